"""Exercises of notebook 09: goodput, a stopwatch with a fault, and a percentile over replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minillm.course.checking import Exercise, Misconception
from minillm.measure.distribution import percentile

Request = dict[str, Any]


def goodput(requests: Sequence[Request], ttft: float, tpot: float) -> float:
    """Share of the judged requests that met both limits. A failure meets none; one token within its TTFT limit has no
    TPOT to judge and is left out."""
    verdicts = [_met(request, ttft, tpot) for request in requests]
    judged = [verdict for verdict in verdicts if verdict is not None]
    return sum(judged) / len(judged)


def _met(request: Request, ttft: float, tpot: float) -> bool | None:
    if request["failure"] or request["ttft"] > ttft:
        return False
    return None if request["tpot"] is None else request["tpot"] <= tpot


def _failures_left_out(requests: Sequence[Request], ttft: float, tpot: float) -> float:
    return goodput([request for request in requests if not request["failure"]], ttft, tpot)


def _ttft_alone(requests: Sequence[Request], ttft: float, tpot: float) -> float:
    return goodput(requests, ttft, float("inf"))


def _one_token_fails(requests: Sequence[Request], ttft: float, tpot: float) -> float:
    return sum(bool(_met(request, ttft, tpot)) for request in requests) / len(requests)


def _one_token_counts(requests: Sequence[Request], ttft: float, tpot: float) -> float:
    return sum(_met(request, ttft, tpot) is not False for request in requests) / len(requests)


def _strictly(requests: Sequence[Request], ttft: float, tpot: float) -> float:
    return goodput(requests, ttft - 1e-9, tpot - 1e-9)


def _count(requests: Sequence[Request], ttft: float, tpot: float) -> float:
    return sum(bool(_met(request, ttft, tpot)) for request in requests)


def _half(requests: Sequence[Request], ttft: float, tpot: float) -> float:
    return 0.5


def _failure_ignored(requests: Sequence[Request], ttft: float, tpot: float) -> float:
    """A failure is noticed by its missing numbers alone."""
    return goodput([request | {"failure": None if request["ttft"] is not None else request["failure"]}
                    for request in requests], ttft, tpot)


def _served_one_token_left_out(requests: Sequence[Request], ttft: float, tpot: float) -> float:
    return goodput([request for request in requests if request["failure"] or request["tpot"] is not None], ttft, tpot)


def _no_tpot_left_out(requests: Sequence[Request], ttft: float, tpot: float) -> float:
    return goodput([request for request in requests if request["tpot"] is not None], ttft, tpot)


def _none_of_a_failure(requests: Sequence[Request], ttft: float, tpot: float) -> float:
    """Compares before it asks whether the request failed: a TypeError."""
    return sum(request["ttft"] <= ttft and not request["failure"] for request in requests) and goodput(
        requests, ttft, tpot)


def _none_of_one_token(requests: Sequence[Request], ttft: float, tpot: float) -> float:
    """Compares the TPOT of a single token: a TypeError."""
    return sum(request["tpot"] <= tpot for request in requests if not request["failure"]) and goodput(
        requests, ttft, tpot)


def _request(ttft: float | None, tpot: float | None, failure: str | None = None) -> Request:
    return {"ttft": ttft, "tpot": tpot, "failure": failure}


_TIMES = {"scheduled": 10.0, "sent": 10.5, "tokens": [11.0, 11.1, 11.2, 11.5],
          "chunks": [[11.02, 1], [11.54, 3]]}
_NUMBERS = {"ttft": 1.0, "tpot": 0.5 / 3}
_EXACT = {"scheduled": 3.0, "sent": 3.0, "tokens": [3.5, 4.0, 5.0], "chunks": [[3.625, 1], [5.125, 2]]}
_PROMPT = {"scheduled": 3.1, "sent": 3.1, "tokens": [3.4, 3.7, 4.2], "chunks": [[3.5, 1], [4.3, 2]]}

_ONE_A_CHUNK = {"scheduled": 1.0, "sent": 1.0, "tokens": [2.0, 2.5, 3.5], "chunks": [[2.1, 1], [2.6, 1], [3.6, 1]]}


def find_flaw(times: Request, report: dict[str, float]) -> str:
    """Compare the report with each honest and dishonest way of computing it."""
    tokens, chunks = times["tokens"], times["chunks"]
    if abs(report["ttft"] - (tokens[0] - times["scheduled"])) > 1e-6:
        return "clock started late"
    if abs(report["tpot"] - (tokens[-1] - tokens[0]) / (len(tokens) - 1)) < 1e-6:
        return "none"
    by_chunks = (chunks[-1][0] - chunks[0][0]) / (len(chunks) - 1)
    return "chunks counted as tokens" if abs(report["tpot"] - by_chunks) < 1e-6 else "divided by N"


def _sent_is_the_start(times: Request, report: dict[str, float]) -> str:
    return find_flaw(times | {"scheduled": times["sent"]}, report)


def _chunks_never(times: Request, report: dict[str, float]) -> str:
    found = find_flaw(times, report)
    return "divided by N" if found == "chunks counted as tokens" else found


def _flaw_before_honesty(times: Request, report: dict[str, float]) -> str:
    chunks = times["chunks"]
    by_chunks = (chunks[-1][0] - chunks[0][0]) / (len(chunks) - 1)
    return "chunks counted as tokens" if abs(report["tpot"] - by_chunks) < 1e-6 else find_flaw(times, report)


def _sent_means_late(times: Request, report: dict[str, float]) -> str:
    late = abs(report["ttft"] - (times["tokens"][0] - times["sent"])) < 1e-6
    return "clock started late" if late else find_flaw(times, report)


def _exact(times: Request, report: dict[str, float]) -> str:
    tokens = times["tokens"]
    if report["ttft"] != tokens[0] - times["scheduled"]:
        return "clock started late"
    return find_flaw(times, report)


def _exact_flaws(times: Request, report: dict[str, float]) -> str:
    """Looks for each flaw with ``==`` and takes what it does not find for honest."""
    tokens, arrivals = times["tokens"], [when for when, _ in times["chunks"]]
    if times["sent"] != times["scheduled"] and report["ttft"] == tokens[0] - times["sent"]:
        return "clock started late"
    if report["tpot"] == (tokens[-1] - tokens[0]) / len(tokens):
        return "divided by N"
    by_chunks = (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1)
    return "chunks counted as tokens" if report["tpot"] == by_chunks else "none"


def _pairs_taken_for_times(times: Request, report: dict[str, float]) -> str:
    chunks = times["chunks"]
    found = find_flaw(times, report)
    return found if found == "clock started late" else str(chunks[-1] - chunks[0])


def _n_is_right(times: Request, report: dict[str, float]) -> str:
    found = find_flaw(times, report)
    return {"none": "divided by N", "divided by N": "none"}.get(found, found)


def _tokens_of_chunks(times: Request, report: dict[str, float]) -> str:
    """Divides the chunks' span by the tokens in them, so that no report was ever made that way."""
    found = find_flaw(times, report)
    return "none" if found == "chunks counted as tokens" else found


def _another_spelling(times: Request, report: dict[str, float]) -> str:
    return find_flaw(times, report).replace(" ", "_")


def pooled(replicas: Sequence[Sequence[float]], p: float) -> float | None:
    """The percentile of all requests together."""
    return percentile([value for replica in replicas for value in replica], p)


def _mean_of_percentiles(replicas: Sequence[Sequence[float]], p: float) -> float:
    own = [percentile(replica, p) for replica in replicas if replica]
    return sum(own) / len(own)


def _worst_replica(replicas: Sequence[Sequence[float]], p: float) -> float:
    return max(percentile(replica, p) for replica in replicas if replica)


def _weighted(replicas: Sequence[Sequence[float]], p: float) -> float:
    total = sum(map(len, replicas))
    return sum(len(replica) * percentile(replica, p) for replica in replicas if replica) / total


def _unsorted(replicas: Sequence[Sequence[float]], p: float) -> float:
    values = [value for replica in replicas for value in replica]
    return values[round(p / 100 * (len(values) - 1))]


def _nearest_rank(replicas: Sequence[Sequence[float]], p: float) -> float:
    values = sorted(value for replica in replicas for value in replica)
    return values[round(p / 100 * (len(values) - 1))]


def _rank_down(replicas: Sequence[Sequence[float]], p: float) -> float:
    values = sorted(value for replica in replicas for value in replica)
    return values[int(p / 100 * (len(values) - 1))]


EXERCISES = {task.id: task for task in (
    Exercise(
        "09-1", "goodput", goodput,
        cases=tuple((requests, 1.0, 0.05) for requests in (
            [_request(0.5, 0.03), _request(1.5, 0.03), _request(0.8, 0.04)],
            [_request(0.5, 0.09), _request(1.0, 0.05), _request(0.4, 0.03), _request(0.3, 0.02)],
            [_request(0.5, 0.03), _request(0.6, 0.04), _request(0.7, 0.03), _request(None, None, "timeout")],
            [_request(0.5, 0.03), _request(0.6, 0.04), _request(0.2, 0.02, "connection lost")],
            [_request(0.5, None), _request(0.5, 0.03), _request(0.4, 0.09)],
            [_request(2.0, None), _request(0.5, 0.03), _request(0.4, 0.03), _request(0.6, 0.02)],
            [_request(0.5, None, "connection lost"), _request(0.5, None), _request(0.5, 0.03)],
            [_request(None, None, "timeout"), _request(1.5, 0.03)])),
        misconceptions=(
            Misconception(_failures_left_out, "a request that failed met no objective: it counts, and against it"),
            Misconception(_ttft_alone, "both limits must be kept"),
            Misconception(_one_token_fails, "a single token has no TPOT to judge: leave it out of the whole too"),
            Misconception(_one_token_counts, "a single token has no TPOT: nobody can say that it met both limits"),
            Misconception(_strictly, "a limit that is just kept is kept: up to 1 s means 1 s too"),
            Misconception(_count, "return a share of the judged requests, not a number of requests"),
            Misconception(_half, "count in this case by hand: how many are judged, how many of them meet both limits?"),
            Misconception(_failure_ignored, "a request can fail after a good start: look at `failure`, not only at the "
                                            "numbers"),
            Misconception(_served_one_token_left_out, "one token above the TTFT limit needs no TPOT to be judged: it "
                                                      "has broken a limit already"),
            Misconception(_no_tpot_left_out, "why has it no TPOT? Served with one token, or failed: the table tells "
                                             "them apart"),
            Misconception(_none_of_a_failure, "a failed request may have no TTFT: ask for `failure` first"),
            Misconception(_none_of_one_token, "one token has no TPOT, and None has no order: ask for it first"),
        )),
    Exercise(
        "09-2", "the dishonest report", find_flaw,
        cases=((_TIMES, _NUMBERS), (_TIMES, _NUMBERS | {"ttft": 0.5}), (_TIMES, _NUMBERS | {"tpot": 0.52}),
               (_TIMES, _NUMBERS | {"tpot": 0.125}), (_EXACT, {"ttft": 0.5, "tpot": 0.75}),
               (_PROMPT, {"ttft": 0.3, "tpot": 0.4}),
               (_PROMPT, {"ttft": 0.3, "tpot": 0.8}), (_PROMPT, {"ttft": 0.3, "tpot": 0.8 / 3}),
               (_ONE_A_CHUNK, {"ttft": 1.0, "tpot": 0.75})),
        misconceptions=(
            Misconception(_sent_is_the_start, "the user waited from when the request was due, not from when the "
                                              "harness got round to sending it"),
            Misconception(_flaw_before_honesty, "ask first whether the number is right: with one token in each chunk "
                                                "both ways agree"),
            Misconception(_exact, "differences of clock readings carry rounding: compare to within a millionth"),
            Misconception(_exact_flaws, "does your test for a flaw use ==? Here 0.52 comes out as 0.519...: compare "
                                        "to within a millionth"),
            Misconception(_pairs_taken_for_times, "a chunk is a pair, [when it came, how many tokens]: take the first"),
            Misconception(_tokens_of_chunks, "who takes chunks for tokens divides by chunks - 1, not by the tokens in "
                                             "them"),
            Misconception(_sent_means_late, "where a request was sent when it was due, counting from then is honest"),
            Misconception(_chunks_never, "divide the chunks' span by chunks - 1: is that, to within a millionth, what "
                                         "the report did?"),
            Misconception(_n_is_right, "N tokens have N - 1 gaps"),
            Misconception(_another_spelling, "return one of the four names exactly as the text spells them"),
        )),
    Exercise(
        "09-3", "a percentile over replicas", pooled,
        cases=(([[1.0, 2.0, 3.0]], 50), ([[1.0, 2.0], [3.0, 4.0]], 50), ([[9.0], [1.0, 1.0, 1.0, 1.0]], 95),
               ([[5.0, 1.0, 3.0], []], 0), ([[1.0, 2.0], [2.0, 10.0, 3.0]], 99)),
        misconceptions=(
            Misconception(_mean_of_percentiles, "the mean of percentiles is no percentile: pool all requests first"),
            Misconception(_worst_replica, "the worst replica is not where most users were"),
            Misconception(_weighted, "weighting percentiles by requests does not make a percentile of them"),
            Misconception(_unsorted, "sort the pooled values first"),
            Misconception(_nearest_rank, "between two ranks the value is interpolated, as my_percentile does"),
            Misconception(_rank_down, "int() drops what is left of the rank: how far is it to the next value?"),
        )),
)}
