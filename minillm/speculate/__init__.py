"""Speculative decoding: guess several tokens, check them in one step. Tokens do not depend on it, only time does.

In float32 and float64, that is. In 16 bit a row's last bits depend on how many rows a kernel computes at once, with
drafts as in any batch; where two tokens are nearly tied, that may decide.
"""
