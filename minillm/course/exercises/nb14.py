"""Exercises of notebook 14: how many get in and a service to tune; the second has a module of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product

from minillm.cache.blocks import BlockPool
from minillm.course.checking import Exercise, Misconception
from minillm.course.exercises import faulty_scheduler
from minillm.course.loads import chats_and_jobs
from minillm.measure.metrics import Slo
from minillm.measure.simulate import simulate
from minillm.request import Request
from minillm.schedule.scheduler import Scheduler

Settings = tuple[int, int, int]
Answer = tuple[Settings, float]


# ---- 14-1: how many get in -------------------------------------------------------------------------------------------


def admitted(num_blocks: int, size: int, prompt: int, most_output: int, watermark: int, reserve: bool) -> int:
    """All blocks of the worst case, or those of the prompt and a watermark beside others who run."""
    if reserve:
        return num_blocks // _blocks(prompt + most_output - 1, size)
    each = _blocks(prompt, size)
    return max(int(each <= num_blocks), (num_blocks - watermark) // each)


def _blocks(tokens: int, size: int) -> int:
    return -(-tokens // size)


def _last_token_too(num_blocks: int, size: int, prompt: int, most_output: int, watermark: int, reserve: bool) -> int:
    return admitted(num_blocks, size, prompt, most_output + reserve, watermark, reserve)


def _rounds_down(num_blocks: int, size: int, prompt: int, most_output: int, watermark: int, reserve: bool) -> int:
    tokens = prompt + most_output - 1 if reserve else prompt
    return (num_blocks - (0 if reserve else watermark)) // max(1, tokens // size)


def _in_tokens(num_blocks: int, size: int, prompt: int, most_output: int, watermark: int, reserve: bool) -> int:
    tokens = prompt + most_output - 1 if reserve else prompt
    return max(0, num_blocks - (0 if reserve else watermark)) * size // tokens


def _watermark_always(num_blocks: int, size: int, prompt: int, most_output: int, watermark: int, reserve: bool) -> int:
    """Also where it means nothing: for the first."""
    if reserve:
        return admitted(num_blocks, size, prompt, most_output, 0, True)
    return max(0, num_blocks - watermark) // _blocks(prompt, size)


def _watermark_in_reserve(num_blocks: int, size: int, prompt: int, most_output: int, watermark: int,
                          reserve: bool) -> int:
    return admitted(num_blocks - (watermark if reserve else 0), size, prompt, most_output, watermark, reserve)


def _no_watermark(num_blocks: int, size: int, prompt: int, most_output: int, watermark: int, reserve: bool) -> int:
    return admitted(num_blocks, size, prompt, most_output, 0, reserve)


def _one_at_least(num_blocks: int, size: int, prompt: int, most_output: int, watermark: int, reserve: bool) -> int:
    return max(1, admitted(num_blocks, size, prompt, most_output, watermark, reserve))


def _output_apart(num_blocks: int, size: int, prompt: int, most_output: int, watermark: int, reserve: bool) -> int:
    """Blocks of the prompt and blocks of the answer, each rounded up."""
    if not reserve:
        return admitted(num_blocks, size, prompt, most_output, watermark, False)
    return num_blocks // (_blocks(prompt, size) + _blocks(most_output - 1, size))


def _room_for_the_next(num_blocks: int, size: int, prompt: int, most_output: int, watermark: int, reserve: bool) -> int:
    """Counts the first token of the answer as known."""
    return admitted(num_blocks, size, prompt + (not reserve), most_output, watermark, reserve)


def _negative(num_blocks: int, size: int, prompt: int, most_output: int, watermark: int, reserve: bool) -> int:
    if reserve:
        return admitted(num_blocks, size, prompt, most_output, watermark, True)
    return (num_blocks - watermark) // _blocks(prompt, size)


# ---- 14-3: a service to tune -----------------------------------------------------------------------------------------


class Service:
    """160 requests at 1.4 times what the machine serves with 8 slots; each run is a simulation."""

    choices = {"max_num_seqs": [2, 4, 8, 16], "watermark": [0, 2, 8, 24], "max_waiting": [0, 2, 6, 1000]}

    def __init__(self, fixed_s: float, token_s: float, slo: tuple[float, float], rate: float, num_blocks: int):
        self._load = fixed_s, token_s, *slo, rate, num_blocks
        self.runs_left = 30

    def __repr__(self) -> str:
        fixed_s, token_s, ttft_s, tpot_s, rate, num_blocks = self._load
        return (f"a service: {num_blocks} blocks, {fixed_s * 1e3:g} ms a step and {token_s * 1e3:g} ms a token, {rate} "
                f"requests/s, TTFT up to {ttft_s} s, TPOT up to {tpot_s * 1e3:g} ms")

    def goodput(self, max_num_seqs: int, watermark: int, max_waiting: int) -> float:
        """The share in time; ``ValueError`` for another value than the choices, or one run too many."""
        for name, value in zip(self.choices, (max_num_seqs, watermark, max_waiting), strict=True):
            if value not in self.choices[name]:
                raise ValueError(f"{name} must be one of {self.choices[name]}, got {value!r}")
        if not self.runs_left:
            raise ValueError("30 runs are used up: go through one setting at a time, and remember what you have run")
        self.runs_left -= 1
        return _goodput(self._load, (max_num_seqs, watermark, max_waiting))


class _Door(Scheduler):
    max_waiting = 0

    def add(self, request: Request) -> None:
        if len(self.waiting) >= self.max_waiting + self.max_num_seqs - len(self.running):
            self.finish(request, "error")
        else:
            super().add(request)


@cache
def _goodput(load: tuple[float, ...], settings: Settings) -> float:
    fixed_s, token_s, ttft_s, tpot_s, rate, num_blocks = load
    door = _Door(BlockPool(int(num_blocks), 16, caching=False), max_num_seqs=settings[0], watermark=settings[1])
    door.max_waiting = settings[2]
    result = simulate(chats_and_jobs(rate, 160), door, lambda plan: fixed_s + token_s * plan.num_tokens)
    for own in result.requests:
        own.failure = None if own.token_times_s else "refused"
    return round(result.summary(Slo(ttft_s=ttft_s, tpot_s=tpot_s)).goodput, 4)


def tuned(service: Service) -> Answer:
    """One setting after the other, round and round, until nothing is better."""
    run = cache(service.goodput)
    best = tuple(values[1] for values in service.choices.values())
    while True:
        before = best
        for place, values in enumerate(service.choices.values()):
            best = max((best[:place] + (value,) + best[place + 1:] for value in values), key=lambda own: run(*own))
        if best == before:
            return best, run(*best)


def _reached(choose: Callable[[Service], Settings]) -> Callable[[Service], Answer]:
    """The settings that ``choose`` finds, with what they reach (of a new service: it has runs left)."""
    def solution(service: Service) -> Answer:
        settings = choose(service)
        service.runs_left = max(1, service.runs_left)
        return settings, service.goodput(*settings)
    return solution


def _first_of_each(service: Service) -> Settings:
    return tuple(values[0] for values in service.choices.values())


def _largest(service: Service) -> Settings:
    return tuple(values[-1] for values in service.choices.values())


def _alone(place: int, choice: int = -1) -> Callable[[Service], Settings]:
    """All but one setting at the best: what who never tried that one would get."""
    def solution(service: Service) -> Settings:
        best, _ = tuned(service)
        return best[:place] + (service.choices[list(service.choices)[place]][choice],) + best[place + 1:]
    return solution


def _one_round(service: Service) -> Settings:
    best = _largest(service)
    for place, values in enumerate(service.choices.values()):
        best = max((best[:place] + (value,) + best[place + 1:] for value in values),
                   key=lambda own: service.goodput(*own))
    return best


def _each_by_itself(service: Service) -> Settings:
    """Each setting's best beside the others' first values."""
    first = _first_of_each(service)
    return tuple(max(values, key=lambda value, place=place: service.goodput(
        *first[:place], value, *first[place + 1:])) for place, values in enumerate(service.choices.values()))


def _first_thirty(service: Service) -> Settings:
    return max(list(product(*service.choices.values()))[:service.runs_left], key=lambda own: service.goodput(*own))


def _all_of_them(service: Service) -> Settings:
    return max(product(*service.choices.values()), key=lambda own: service.goodput(*own))


def _between(service: Service) -> Settings:
    return 8, 1, 4


def _settings_only(service: Service) -> Settings:
    return tuned(service)[0]


def _the_goodput(service: Service) -> float:
    return tuned(service)[1]


def _another_order(service: Service) -> Answer:
    (places, watermark, waiting), share = tuned(service)
    return (waiting, watermark, places), share


def _by_name(service: Service) -> tuple[dict[str, int], float]:
    settings, share = tuned(service)
    return dict(zip(service.choices, settings)), share


def _nothing(service: Service) -> None:
    tuned(service)


_NEAR = "the best of all 64 reaches the share expected. Keep two settings, and try every value of "

EXERCISES = {task.id: task for task in (
    Exercise(
        "14-1", "how many get in", admitted,
        cases=((10, 4, 8, 8, 0, False), (10, 4, 8, 8, 0, True), (10, 4, 6, 7, 1, False), (10, 4, 6, 7, 1, True),
               (12, 4, 5, 8, 0, True), (9, 4, 5, 3, 2, True), (9, 4, 8, 3, 3, False), (20, 4, 4, 9, 1, False),
               (4, 4, 13, 9, 2, False), (3, 4, 13, 9, 1, False), (3, 4, 9, 9, 0, True), (4, 4, 13, 3, 9, False)),
        misconceptions=(
            Misconception(_last_token_too, "the last token of an answer is never read: it needs no room"),
            Misconception(_rounds_down, "a block that is begun is held whole: round up"),
            Misconception(_in_tokens, "requests share no block: count whole blocks for each"),
            Misconception(_watermark_always, "while nobody runs the watermark means nothing: the first gets in if it "
                                             "fits"),
            Misconception(_watermark_in_reserve, "who reserves the worst case needs no watermark"),
            Misconception(_no_watermark, "optimistic: the watermark's blocks must stay free"),
            Misconception(_one_at_least, "who doesn't fit the pool alone does not get in"),
            Misconception(_output_apart, "prompt and answer follow each other in the same blocks: add them up first"),
            Misconception(_room_for_the_next, "before anything is computed, the prompt is all that is known"),
            Misconception(_negative, "who comes first finds nobody who runs: does the watermark count for it?"),
        )),
    faulty_scheduler.EXERCISE,
    Exercise(
        "14-3", "a service to tune", tuned,
        cases=((Service(0.02, 0.001, (1.0, 0.06), 4.2, 80),), (Service(0.02, 0.001, (3.0, 0.04), 3.5, 40),)),
        misconceptions=(
            Misconception(_reached(_first_of_each), "the smallest of each wastes the machine: compare the two shares"),
            Misconception(_reached(_largest), "the largest of each lets everybody wait: compare the two shares"),
            Misconception(_reached(_alone(0)), "more slots make each step longer: TPOT. Try fewer"),
            Misconception(_reached(_alone(1)), "a large watermark reserves again. Try a smaller one"),
            Misconception(_reached(_alone(2)), "a long queue accepts requests that will be late. Try a shorter one"),
            Misconception(_reached(_alone(1, 0)), _NEAR + "the watermark"),
            Misconception(_reached(_alone(1, 2)), _NEAR + "a smaller watermark"),
            Misconception(_reached(_alone(2, 1)), _NEAR + "max_waiting"),
            Misconception(_reached(_alone(2, 0)), _NEAR + "max_waiting, in the second service too"),
            Misconception(_reached(_alone(0, 1)), _NEAR + "max_num_seqs"),
            Misconception(_reached(_one_round), "one round is not enough: with another setting changed, the first may "
                                                "do better elsewhere"),
            Misconception(_reached(_each_by_itself), "the settings depend on each other: keep the best of one while "
                                                     "you try the next"),
            Misconception(_reached(_first_thirty), "the first 30 of 64 never try many slots: change one setting at a "
                                                   "time instead"),
            Misconception(_all_of_them, "`service` refused the run: it allows 30, and only the values of `choices`"),
            Misconception(_reached(_between), "`service` refused the run: it allows 30, and only the values of "
                                              "`choices`"),
            Misconception(_settings_only, "return the settings and the share that they reach"),
            Misconception(_the_goodput, "return the settings too: ((8, 2, 1000), 0.3688), for example"),
            Misconception(_another_order, "the order is max_num_seqs, watermark, max_waiting"),
            Misconception(_by_name, "the settings are a tuple of three numbers"),
            Misconception(_nothing, "it returned None: end with `return best, share`"),
        )),
)}
