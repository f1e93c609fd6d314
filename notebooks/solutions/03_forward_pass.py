"""Solutions of notebook 03. Try first: `check` gives a hint for the mistakes that many make."""


# %% 03-1
def my_parameters(hidden, inner, layers, heads, kv_heads, dim, vocab, tied):
    qkv = hidden * (heads + 2 * kv_heads) * dim
    output = heads * dim * hidden
    mlp = 3 * hidden * inner
    norms = 2 * hidden
    tables = vocab * hidden if tied else 2 * vocab * hidden
    return tables + layers * (qkv + output + mlp + norms) + hidden


# %% 03-2
def my_find_fault(layer):
    half, silent, same = (lambda v: v / 2), (lambda v: 0.0), (lambda v: v)
    left = layer(8.0, half, silent, silent)
    if left == 0.0:
        return "lost residual"
    if left == 4.0:
        return "normed residual"
    return "none" if layer(8.0, half, silent, same) == 12.0 else "missing norm"


# %% 03-3
def my_flops(weights, head, prompt, answer):
    through_layers = prompt + answer - 1
    return 2 * (weights - head) * through_layers + 2 * head * answer


# %% 03-4
def my_last_step(vector, norm_weights, epsilon, table):
    size = (sum(x * x for x in vector) / len(vector) + epsilon) ** 0.5
    normed = [x / size * w for x, w in zip(vector, norm_weights)]
    logits = [sum(a * b for a, b in zip(row, normed)) for row in table]
    return logits.index(max(logits)), max(logits)
