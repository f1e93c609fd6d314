"""Solutions of notebook 16. Try first: `check` gives a hint for the mistakes that many make."""


# %% 16-1
def my_fit(memory, layers, kv_heads, head_dim, block_size, tokens, kv):
    row = {"float32": 4 * head_dim, "bfloat16": 2 * head_dim, "int8": head_dim + 2}[kv]
    blocks = memory // (block_size * 2 * layers * kv_heads * row)  # 2: keys and values
    return blocks // -(-tokens // block_size)


# %% 16-2
def my_find_fault(store):
    import torch

    def token(*sizes):
        """A row for each head: one large number of that size (the last size for all other heads), and small ones."""
        sizes = [*sizes, *[sizes[-1]] * store.num_heads][:store.num_heads]
        return torch.stack([size * torch.linspace(0.02, 1, store.head_dim) ** 3 for size in sizes])[None]

    def wrong(slots, rows):  # further off than a hundredth of a head's largest number; rounding gives 1 / 254
        return bool(((store.read(slots) - rows).abs().amax(2) > rows.abs().amax(2) / 100).any())

    size, large, small = store.block_size, token(1.0), token(0.001)
    store.write([0], large)  # one token, all heads alike: only the mean can be wrong
    if wrong([0], large):
        return "the mean's scale"

    uneven = token(0.001, 1.0)  # one token, unlike heads
    store.write([0], uneven)
    if wrong([0], uneven):
        return "one scale for all heads"

    store.write([size], large)  # two tokens of one block, each in a write of its own
    store.write([size + 1], small)
    if wrong([size + 1], small):
        return "the first token's scale"

    store.write([0, size], torch.cat((large, small)))  # the first tokens of two blocks, in one write
    return "scale in a wrong slot" if wrong([size], small) or wrong([0], large) else "none"


# %% 16-3
def my_four_bits(rows, group):
    import torch

    def rounded(part, dim):
        scale = part.abs().amax(dim, keepdim=True) / 7
        scale = torch.where(scale == 0, 1.0, scale)
        return (part / scale).round() * scale

    by_token = rounded(rows, 1)
    by_channel = torch.cat([rounded(part, 0) for part in rows.split(group)])
    errors = [(near - rows).square().sum() for near in (by_token, by_channel)]
    return by_channel if errors[1] < errors[0] else by_token
