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
def my_count_forwards(num_prompt_tokens, num_output_tokens):
    return num_output_tokens, num_prompt_tokens + num_output_tokens - 1
