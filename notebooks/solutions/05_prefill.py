"""Solutions of notebook 05. Try first: `check` gives a hint for the mistakes that many make."""


# %% 05-1
def my_longest(target, body, head, pair_flops, bytes_per_weight, read, flops):
    if (body + head) * bytes_per_weight / read > target:  # this side of the floor is the same for every prompt
        return 0
    tokens = 0
    while True:
        longer = tokens + 1
        work = 2 * body * longer + 2 * head + pair_flops * longer * (longer + 1) / 2
        if work / flops > target:
            return tokens
        tokens = longer


# %% 05-2
def my_find_fault(model, report):
    if report["weight_bytes"] > 4 * (model["body"] + model["head"]):
        return "weights read per token"
    if report["logit_bytes"] > 4 * model["vocab"]:
        return "logits for every row"
    token_bytes = 2 * model["layers"] * model["kv_heads"] * model["dim"] * 4
    return "keys of every query head" if report["kv_bytes"] > token_bytes * report["tokens"] else "none"


# %% 05-3
def my_crossing(hidden, inner, heads, kv_heads, dim):
    weights = hidden * (heads + 2 * kv_heads) * dim + heads * dim * hidden + 3 * hidden * inner
    tokens = 1
    while 4 * heads * dim * tokens * (tokens + 1) // 2 < 2 * weights * tokens:
        tokens += 1
    return tokens
