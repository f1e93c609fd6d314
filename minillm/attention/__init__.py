"""Attention over the KV cache: one contract, several backends."""

FEW = 9  # tokens of a sequence that are worth gathering it with others for: more are work enough by themselves
