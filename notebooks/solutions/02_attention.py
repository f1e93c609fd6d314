"""Solutions of notebook 02. Try first: `check` gives a hint for the mistakes that many make."""

# %% 02-1
def my_mask(num_queries, num_keys, window):
    rows = []
    for position in range(num_keys - num_queries, num_keys):
        oldest = 0 if window is None else position - window + 1
        rows.append([oldest <= key <= position for key in range(num_keys)])
    return rows


# %% 02-2
def my_one_query(query, key, value):
    group = query.shape[0] // key.shape[1]
    key = key.repeat_interleave(group, 1)          # [T, heads, d]: KV head 0 group times, then KV head 1, ...
    value = value.repeat_interleave(group, 1)
    scores = (query * key).sum(-1) / query.shape[-1] ** 0.5    # [T, heads]
    weights = scores.softmax(0)                    # over the tokens: each head's add up to 1
    return (weights.unsqueeze(-1) * value).sum(0)  # [heads, d]


# %% 02-3
def my_find_fault(attend):
    import math

    zeros, ones = [0.0] * 4, [1.0] * 4
    # One token, two KV heads with different values: query heads 0 and 1 read the first, 2 and 3 the second.
    heads = attend([[zeros] * 4], [[zeros, zeros]], [[zeros, ones]])[0]
    if [head[0] for head in heads] != [0, 0, 1, 1]:
        return "wrong head"
    # Two tokens: the first must not see the value of the second.
    if attend([[zeros], [zeros]], [[zeros], [zeros]], [[zeros], [ones]])[0][0][0] != 0:
        return "no mask"
    # The second token's scores are 0 and 4 / sqrt(4) = 2.
    weight = attend([[ones], [ones]], [[zeros], [ones]], [[zeros], [ones]])[1][0][0]
    return "none" if math.isclose(weight, math.exp(2) / (1 + math.exp(2))) else "no scale"


# %% 02-4
def my_pairs(prompt, answer, window):
    total = 0
    for position in range(prompt + answer - 1):
        keys = position + 1
        total += keys if window is None else min(keys, window)
    return total
