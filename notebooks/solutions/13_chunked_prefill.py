"""Solutions of notebook 13. Try first: `check` gives a hint for the mistakes that many make."""


# %% 13-1
def my_first_step(prompt, streams, budget, chunk):
    size = min(chunk, budget - streams)
    return -(-prompt // size) if size > 0 else None


# %% 13-2
def my_find_fault(steps, chunk):
    for rows in steps:
        waits = any(lacks == 1 and planned == 0 for lacks, planned, _ in rows)
        reads = any(lacks > 1 and planned > 0 for lacks, planned, _ in rows)
        if waits and reads:
            return "prompts first"
        for lacks, planned, samples in rows:
            if planned > chunk:
                return "no cap"
            if samples and planned < lacks:
                return "samples too early"
    return "none"


# %% 13-3
def my_largest_chunk(step_s, prompt, limit_s):
    holds, too_long = 0, prompt + 1
    while too_long - holds > 1:
        middle = (holds + too_long) // 2
        if step_s(middle) <= limit_s:
            holds = middle
        else:
            too_long = middle
    return holds
