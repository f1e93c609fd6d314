"""Writes event_log.json beside it: sixty requests to a small simulated service, the fixed log of notebook 09.

One machine, at most four requests at once, no chunked prefill: reading a prompt stops everybody's decoding. Numbers are
round on purpose; nothing here was measured.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

PREFILL_S, TOKEN_S, STEP_S, NETWORK_S, SEATS, PATIENCE_S = 0.05, 0.0004, 0.03, 0.015, 4, 1.8


def simulate(seed: int = 9, num_requests: int = 60) -> list[dict[str, Any]]:
    """Requests with their times on the engine's clock, and the chunks that the client received."""
    draw = random.Random(seed)
    now, waiting, running, log = 0.0, [], [], []
    for number in range(num_requests):
        now += draw.expovariate(0.85)
        long = draw.random() < 0.06
        waiting.append({"id": f"r{number:02}", "arrival_s": round(now, 3), "prompt_tokens": 6000 if long else
                        draw.randrange(80, 400), "want": draw.choice((1, 20, 40, 60, 80)), "token_times_s": [],
                        "failure": None})
    clock = 0.0
    while waiting or running:
        if not running and waiting[0]["arrival_s"] > clock:
            clock = waiting[0]["arrival_s"]
        arrived = [r for r in waiting if r["arrival_s"] <= clock]
        for request in arrived:
            if clock - request["arrival_s"] > PATIENCE_S:
                request["failure"] = "timeout"
                waiting.remove(request)
                log.append(request)
        arrived = [r for r in arrived if r in waiting]
        if arrived and len(running) < SEATS:
            request = arrived[0]
            waiting.remove(request)
            request["admitted_s"] = round(clock, 3)
            clock += PREFILL_S + TOKEN_S * request["prompt_tokens"]
            running.append(request)
            request["token_times_s"].append(round(clock, 3))
        elif running:
            clock += STEP_S
            for request in running:
                request["token_times_s"].append(round(clock, 3))
        for request in [r for r in running if len(r["token_times_s"]) >= r["want"]]:
            running.remove(request)
            log.append(request)
    for request in log:
        del request["want"]
        request["chunks"] = chunks(request["token_times_s"], draw)
    return sorted(log, key=lambda request: request["id"])


def chunks(times: list[float], draw: random.Random) -> list[list[float]]:
    """What came over the wire: ``[time, tokens]``, one to three tokens in a chunk, each a little after its last."""
    result, at = [], 0
    while at < len(times):
        count = min(draw.choice((1, 1, 2, 3)), len(times) - at)
        result.append([round(times[at + count - 1] + NETWORK_S, 3), count])
        at += count
    return result


if __name__ == "__main__":
    path = Path(__file__).with_name("event_log.json")
    path.write_text("[\n" + ",\n".join(" " + json.dumps(r) for r in simulate()) + "\n]\n", encoding="utf-8")
    print(path.name, "written")
