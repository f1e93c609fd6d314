"""Solutions of notebook 06. Try first: `check` gives a hint for the mistakes that many make."""


# %% 06-1
def my_write(room, start, new):
    items = room[:start] + new
    if len(items) <= len(room):
        return items + [None] * (len(room) - len(items)), 0
    size = max(len(items), 2 * len(room))
    return items + [None] * (size - len(items)), start


# %% 06-2
def my_find_fault(cache):
    cache.write(0, [1, 2], [10, 20])
    if cache.read(0, 2)[0] != [1, 2]:
        return "swaps keys and values"
    cache.write(2, list(range(3, 40)), list(range(3, 40)))
    if cache.read(0, 2)[0] != [1, 2]:
        return "loses on growth"
    cache.write(1, [7], [70])
    return "none" if cache.read(0, 2)[0] == [1, 7] else "ignores start"


# %% 06-3
def my_requests(memory, weights, token_bytes, context, spare):
    left = memory - spare * memory - weights
    return max(0, int(left // (token_bytes * context)))
