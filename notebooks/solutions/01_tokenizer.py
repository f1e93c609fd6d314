"""Solutions of notebook 01. Try first: `check` gives a hint for the mistakes that many make."""


# %% 01-1
def my_pieces(word, merges):
    parts = list(word)
    for left, right in merges:  # best first, so each may be applied once and for all
        i = 0
        while i < len(parts) - 1:
            if (parts[i], parts[i + 1]) == (left, right):
                parts[i:i + 2] = [left + right]
            i += 1
    return parts


# %% 01-2
def my_decode(token_bytes, ids):
    return b"".join(token_bytes[i] for i in ids).decode("utf-8", "replace")


# %% 01-3
def my_find_fault(tokenizer):
    if tokenizer.encode("a").count(300) != 1:
        return "doubled start"
    if 301 in tokenizer.encode("a</s>b"):
        return "forged special token"
    text = "  code\n\t"
    return "none" if tokenizer.decode(tokenizer.encode(text)) == text else "not lossless"


# %% 01-4
def my_fit(message_tokens, overhead, fixed, budget):
    left = budget - fixed
    kept = 0
    for tokens in reversed(message_tokens):
        left -= tokens + overhead
        if left < 0:
            break
        kept += 1
    return kept
