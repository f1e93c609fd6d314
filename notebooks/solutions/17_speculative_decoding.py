"""Solutions of notebook 17. Try first: `check` gives a hint for the mistakes that many make."""


# %% 17-1
def my_speed_up(acceptance, num_drafts, batch, draft_s, step_s):
    tokens = sum(acceptance**i for i in range(num_drafts + 1))  # the 0-th is the target's own token
    seconds = num_drafts * draft_s + step_s[batch * (1 + num_drafts)]
    return tokens / seconds * step_s[batch]  # both ways for the whole batch: it cancels


# %% 17-2
def my_find_fault(decoder):
    def next_tokens(count):
        ids = list(decoder.ids)
        for _ in range(count):
            ids.append(decoder.target(ids))
        return ids[-count:]

    # All drafts right: they are kept, and the target's own token behind them.
    if len(decoder.call(next_tokens(2))) < 3:
        return "forgets the bonus token"

    # The second of three wrong: the first is kept, and the target's own in the place of the second.
    first, second, third = next_tokens(3)
    wrong = (second + 1) % decoder.vocab_size
    kept = decoder.call([first, wrong, third])
    if kept[1] == wrong:
        return "keeps a wrong draft"
    if len(kept) > 2:
        return "one row too many"
    # The newest token was chosen and not computed: it has no K and V yet.
    return "none" if decoder.num_cached == len(decoder.ids) - 1 else "counter not lowered"


# %% 17-3
def my_least_seconds(right, seconds):
    n = len(right)
    best = [0.0] * (n + 1)  # best[i]: the least time from i tokens to the end
    for i in reversed(range(n)):
        best[i] = min(seconds[k] + best[min(n, i + min(k, right[i]) + 1)] for k in range(len(seconds)))
    return best[0]
