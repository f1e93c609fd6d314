"""Solutions of notebook 04. Try first: `check` gives a hint for the mistakes that many make."""


# %% 04-1
def my_top_p(probabilities, p):
    order = sorted(range(len(probabilities)), key=lambda i: (-probabilities[i], i))
    kept, before = [], 0.0
    for token in order:
        if before >= p:
            break
        kept.append(token)
        before += probabilities[token]
    return sorted(kept)


# %% 04-2
def my_find_fault(adjust):
    # Token 0 stands in the prompt alone, token 1 has a negative logit, token 2 came twice.
    first, second, third = adjust([4.0, -4.0, 4.0], [0], [1, 2, 2], 2.0)
    if first == 4.0:
        return "prompt forgotten"
    if second > -4.0:
        return "wrong sign"
    return "counted" if third < 2.0 else "none"


# %% 04-3
def my_recomputed(prompt, answer):
    computed = sum(prompt + done for done in range(answer))
    needed = prompt + answer - 1
    return computed - needed
