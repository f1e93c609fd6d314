"""Attention over the KV cache: one contract, several backends."""
