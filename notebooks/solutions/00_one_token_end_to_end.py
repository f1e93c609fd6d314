"""Solutions of notebook 00. Try first: `check` gives a hint for the mistakes that many make."""


# %% 00-1
def my_four_numbers(arrival, token_times):
    first, last = token_times[0], token_times[-1]
    gaps = len(token_times) - 1
    return {
        "ttft": first - arrival,
        "tpot": (last - first) / gaps if gaps else None,
        "itl": [after - before for before, after in zip(token_times, token_times[1:])],
        "e2e": last - arrival,
    }


# %% 00-2
def my_find_flaw(reported_ms, stages_ms):
    honest = stages_ms["tokenize"] + stages_ms["queue"] + stages_ms["prefill"]
    off = abs(reported_ms - honest)
    if off < 1:
        return "none"
    return min(stages_ms, key=lambda stage: abs(stages_ms[stage] - off))


# %% 00-3
def my_second_turn(prompt, answer, new, second_answer):
    # Cached: prompt + answer - 1, because the first answer's last token was never read. It joins the new tokens.
    return second_answer, (new + 1) + (second_answer - 1)
