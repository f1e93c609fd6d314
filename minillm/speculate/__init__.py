"""Speculative decoding: guess several tokens, check them in one step. Tokens do not depend on it, only time does."""
