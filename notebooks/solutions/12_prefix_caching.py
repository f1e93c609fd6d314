"""Solutions of notebook 12. Try first: `check` gives a hint for the mistakes that many make."""


# %% 12-1
def my_hits(first, second, block_size):
    same = 0
    while same < min(len(first), len(second) - 1) and first[same] == second[same]:
        same += 1
    return same // block_size * block_size


# %% 12-2
def my_find_fault(cache):
    size = cache.block_size
    block = [1] * size
    cache.serve(block)
    if cache.serve(block):
        return "matches the last token"

    unfilled = [2] * (2 * size - 1)
    cache.serve(unfilled)
    if cache.serve(unfilled + [3]) % size:
        return "shares unfilled blocks"

    # The second block of one prompt, asked for as the first of the next. Three prompts of two blocks would do too,
    # but a small cache has evicted the first by then.
    cache.serve([4] * size + [5] * size)
    if cache.serve([5] * size + [0]):
        return "no parent"

    full = list(range(100, 100 + cache.num_blocks * size))
    cache.serve(full)
    cache.serve([8] * size)  # evicts one block of `full`
    return "none" if cache.serve(full) else "heads first"


# %% 12-3
def my_order(parts):
    # With a before b, tokens(a) x keep(a) + tokens(b) x keep(a) x keep(b) are found. Subtract the other order:
    # a belongs in front where tokens(a) x keep(a) / change(a) is the larger one.
    def worth(name):
        tokens, change = parts[name]
        return tokens * (1 - change) / change if change else float("inf")

    return sorted(parts, key=worth, reverse=True)
