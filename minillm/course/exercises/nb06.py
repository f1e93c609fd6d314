"""Exercises of notebook 06: bytes of a cache, a cache with a fault, and how many requests fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minillm.course.checking import Exercise, Misconception


def kv_bytes(layers: int, kv_heads: int, dim: int, bytes_per_number: int, tokens: int) -> int:
    """Keys and values of so many tokens."""
    return 2 * layers * kv_heads * dim * bytes_per_number * tokens


def _keys_alone(layers: int, kv_heads: int, dim: int, bytes_per_number: int, tokens: int) -> int:
    return kv_bytes(layers, kv_heads, dim, bytes_per_number, tokens) // 2


def _one_layer(layers: int, kv_heads: int, dim: int, bytes_per_number: int, tokens: int) -> int:
    return kv_bytes(1, kv_heads, dim, bytes_per_number, tokens)


def _one_token(layers: int, kv_heads: int, dim: int, bytes_per_number: int, tokens: int) -> int:
    return kv_bytes(layers, kv_heads, dim, bytes_per_number, 1)


def _numbers(layers: int, kv_heads: int, dim: int, bytes_per_number: int, tokens: int) -> int:
    return kv_bytes(layers, kv_heads, dim, 1, tokens)


def _mebibytes(layers: int, kv_heads: int, dim: int, bytes_per_number: int, tokens: int) -> float:
    return kv_bytes(layers, kv_heads, dim, bytes_per_number, tokens) / 2**20


def _always_float32(layers: int, kv_heads: int, dim: int, bytes_per_number: int, tokens: int) -> int:
    return kv_bytes(layers, kv_heads, dim, 4, tokens)


def _rounded_up_to_a_power(layers: int, kv_heads: int, dim: int, bytes_per_number: int, tokens: int) -> int:
    return kv_bytes(layers, kv_heads, dim, bytes_per_number, 1 << (tokens - 1).bit_length())


@dataclass
class ToyCache:
    """Keys and values of one layer as lists, with room for a few tokens at first, and perhaps one fault."""

    name: str
    fault: str = "none"
    keys: list[int] = field(default_factory=lambda: [0, 0], repr=False)
    values: list[int] = field(default_factory=lambda: [0, 0], repr=False)
    length: int = field(default=0, repr=False)

    def __repr__(self) -> str:
        return f"cache {self.name}"

    def write(self, start: int, keys: Sequence[int], values: Sequence[int]) -> None:
        """Store at positions ``start`` and later; what stood there is replaced, what came after is forgotten."""
        start = self.length if self.fault == "ignores start" else start
        end = start + len(keys)
        if end > len(self.keys):
            room = [0] * 2 * end
            old = 0 if self.fault == "loses on growth" else start
            self.keys, self.values = [*self.keys[:old], *room[old:]], [*self.values[:old], *room[old:]]
        self.keys[start:end], self.values[start:end], self.length = keys, values, end

    def read(self, start: int, end: int) -> tuple[list[int], list[int]]:
        """Keys and values at positions ``start`` to ``end``."""
        pair = self.keys[start:end], self.values[start:end]
        return (pair[1], pair[0]) if self.fault == "swaps keys and values" else pair


def find_fault(cache: ToyCache) -> str:
    """Write, read; grow, read the old; write again at an earlier position, read."""
    cache.write(0, [1, 2], [-1, -2])
    if cache.read(0, 2) != ([1, 2], [-1, -2]):
        return "swaps keys and values"
    cache.write(2, [3] * 8, [-3] * 8)
    if cache.read(0, 2) != ([1, 2], [-1, -2]):
        return "loses on growth"
    cache.write(2, [9], [-9])
    return "none" if cache.read(0, 3) == ([1, 2, 9], [-1, -2, -9]) else "ignores start"


def _never_grows(cache: ToyCache) -> str:
    found = find_fault(cache)
    return "none" if found == "loses on growth" else found


def _never_rewinds(cache: ToyCache) -> str:
    found = find_fault(cache)
    return "none" if found == "ignores start" else found


def _equal_keys_and_values(cache: ToyCache) -> str:
    found = find_fault(cache)
    return "none" if found == "swaps keys and values" else found


def _another_spelling(cache: ToyCache) -> str:
    return find_fault(cache).replace(" ", "-")


def requests_that_fit(memory: int, weights: int, token_bytes: int, context: int, spare: float) -> int:
    """Whole requests in what weights and spare room leave."""
    left = memory * (1 - spare) - weights
    return max(0, int(left // (token_bytes * context)))


def _weights_forgotten(memory: int, weights: int, token_bytes: int, context: int, spare: float) -> int:
    return requests_that_fit(memory, 0, token_bytes, context, spare)


def _no_spare(memory: int, weights: int, token_bytes: int, context: int, spare: float) -> int:
    return requests_that_fit(memory, weights, token_bytes, context, 0.0)


def _rounded(memory: int, weights: int, token_bytes: int, context: int, spare: float) -> int:
    return max(0, round((memory * (1 - spare) - weights) / (token_bytes * context)))


def _not_rounded(memory: int, weights: int, token_bytes: int, context: int, spare: float) -> float:
    return max(0.0, (memory * (1 - spare) - weights) / (token_bytes * context))


def _negative(memory: int, weights: int, token_bytes: int, context: int, spare: float) -> int:
    return int((memory * (1 - spare) - weights) // (token_bytes * context))


def _spare_of_the_rest(memory: int, weights: int, token_bytes: int, context: int, spare: float) -> int:
    return max(0, int((memory - weights) * (1 - spare) // (token_bytes * context)))


EXERCISES = {task.id: task for task in (
    Exercise(
        "06-1", "bytes of a cache", kv_bytes,
        cases=((1, 1, 4, 4, 1), (30, 3, 64, 4, 1), (32, 8, 128, 2, 4000), (80, 8, 128, 2, 1),
               (32, 8, 128, 2, 16 * 32_768)),
        misconceptions=(
            Misconception(_keys_alone, "keys *and* values are kept: twice"),
            Misconception(_one_layer, "every layer has keys and values of its own"),
            Misconception(_one_token, "that is one token's; there are `tokens` of them"),
            Misconception(_numbers, "that counts numbers; each takes bytes_per_number bytes"),
            Misconception(_always_float32, "bytes_per_number is given: 4 for float32, 2 for 16 bit"),
            Misconception(_rounded_up_to_a_power, "4,000 tokens are 4,000, not 4,096"),
            Misconception(_mebibytes, "return bytes; MiB is a way to print them"),
        )),
    Exercise(
        "06-2", "the faulty cache", find_fault,
        cases=((ToyCache("A"),), (ToyCache("B", "loses on growth"),), (ToyCache("C", "ignores start"),),
               (ToyCache("D", "swaps keys and values"),)),
        misconceptions=(
            Misconception(_never_grows, "fill it far beyond its first capacity, then read what you wrote first"),
            Misconception(_never_rewinds, "write at a position that is taken already: what stands there afterwards?"),
            Misconception(_equal_keys_and_values, "write values that differ from the keys, or a swap cannot show"),
            Misconception(_another_spelling, "return one of the four names exactly as the text spells them"),
        )),
    Exercise(
        "06-3", "requests that fit", requests_that_fit,
        cases=((100, 40, 1, 10, 0.0), (100, 40, 1, 10, 0.1), (100, 99, 1, 10, 0.1), (100, 41, 1, 20, 0.0),
               (80 * 10**9, 16 * 10**9, 131_072, 8192, 0.1), (80 * 10**9, 16 * 10**9, 131_072, 32_768, 0.1)),
        misconceptions=(
            Misconception(_weights_forgotten, "the weights lie in the same memory"),
            Misconception(_no_spare, "`spare` of the whole memory is kept free for everything else"),
            Misconception(_rounded, "half a request does not fit: round down"),
            Misconception(_not_rounded, "a part of a request does not fit: round down to a whole number"),
            Misconception(_negative, "fewer than none cannot fit: return 0"),
            Misconception(_spare_of_the_rest, "`spare` is a share of the whole memory, not of what the weights leave"),
        )),
)}
