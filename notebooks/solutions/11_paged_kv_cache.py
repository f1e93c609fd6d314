"""Solutions of notebook 11. Try first: `check` gives a hint for the mistakes that many make."""


# %% 11-1
def my_runs(table, start, end, block_size):
    runs = []
    for position in range(start, end):
        slot = table[position // block_size] * block_size + position % block_size
        if runs and slot == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([slot, 1])
    return runs


# %% 11-2
def my_find_fault(pool):
    a, b, size = [], [], pool.block_size
    for tokens in range(1, 8 * size + 1):  # both grow, a token at a time
        for table in (a, b):
            pool.allocate(table, tokens)
            if len(table) > -(-tokens // size):
                return "one too many"
    if set(a) & set(b):
        return "gives a block twice"
    pool.release(a)  # a last block that is full
    pool.allocate(a, 6 * size - 1)
    pool.release(a)  # one that is not
    pool.release(b)
    if pool.num_available > pool.num_blocks:
        return "gives a block twice"
    return "forgets the last block" if pool.num_available < pool.num_blocks else "none"


# %% 11-3
def my_block_size(lengths, price):
    def cost(size):
        blocks = sum(-(-n // size) for n in lengths)
        return blocks * size - sum(lengths) + blocks * price

    return min(range(max(lengths), 0, -1), key=cost)  # the first of equals: the largest
