"""The store of keys in 8 bit with a fault of exercise 16-2, and answers to what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.course.checking import Exercise, Misconception
from minillm.course.exercises.faulty import Unlisted, always_none, built_with, mistaking

FAULTS = ("one scale for all heads", "the first token's scale", "the mean's scale", "scale in a wrong slot", "none")


class Store:
    """Rows of ``num_heads`` x ``head_dim`` numbers in slots, as codes -127..127 and scales."""

    def __init__(self, num_blocks: int, block_size: int, num_heads: int, head_dim: int, fault: str):
        self.num_blocks, self.block_size, self.num_heads, self.head_dim = num_blocks, block_size, num_heads, head_dim
        self._fault = fault
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # codes and scales by slot

    def __repr__(self) -> str:
        return (f"a store of {self.num_blocks} blocks of {self.block_size} tokens, {self.num_heads} heads of "
                f"{self.head_dim} numbers")

    def write(self, slots: Sequence[int], rows: Tensor) -> None:
        """Put ``rows`` ``[tokens, num_heads, head_dim]`` into ``slots``, one each, all different."""
        rows = torch.as_tensor(rows).float()
        shape = len(slots), self.num_heads, self.head_dim
        if tuple(rows.shape) != shape or len({*slots}) < len(slots):
            raise ValueError(f"rows must be {list(shape)} for {len(slots)} different slots, got {list(rows.shape)}")
        if any(not 0 <= slot < self.num_blocks * self.block_size for slot in slots):
            raise ValueError(f"slots are 0 to {self.num_blocks * self.block_size - 1}, got {list(slots)}")
        scales = [self._scale(slot, row) for slot, row in zip(slots, rows)]
        kept = [((row / scale).round().clamp(-127, 127), scale) for row, scale in zip(rows, scales)]
        if self._fault == "scale in a wrong slot":  # each gets the scale of the one before it in this write
            kept = [(codes, scales[i - 1]) for i, (codes, _) in enumerate(kept)]
        self._kept |= zip(slots, kept)

    def read(self, slots: Sequence[int]) -> Tensor:
        """The rows in ``slots``, ``[tokens, num_heads, head_dim]``; zeros where nothing was written."""
        nothing = torch.zeros(self.num_heads, self.head_dim), torch.zeros(self.num_heads, 1)
        return torch.stack([codes * scale for codes, scale in (self._kept.get(slot, nothing) for slot in slots)])

    def _scale(self, slot: int, row: Tensor) -> Tensor:
        """``[num_heads, 1]``."""
        most = row.abs().amax(1, keepdim=True)
        if self._fault == "one scale for all heads":
            most = most.amax(0, keepdim=True).expand_as(most)
        if self._fault == "the mean's scale":
            most = row.abs().mean(1, keepdim=True)
        first = slot - slot % self.block_size
        if self._fault == "the first token's scale" and slot != first and first in self._kept:
            return self._kept[first][1]
        return (most / 127).clamp(min=1e-30)


def _row(store: Store, *sizes: float) -> Tensor:
    """A token, ``[1, num_heads, head_dim]``: in each head one number of its size (the last for the rest), and small
    ones."""
    sizes = [*sizes, *[sizes[-1]] * (store.num_heads - len(sizes))]
    ramp = torch.linspace(0.02, 1, store.head_dim) ** 3
    return torch.stack([size * ramp for size in sizes])[None]


def _wrong(store: Store, slots: Sequence[int], rows: Tensor) -> bool:
    """Whether a number comes back further off than a hundredth of the largest of its token and head."""
    off = (store.read(slots) - rows).abs().amax(2)
    return bool((off > rows.abs().amax(2) / 100).any())


def find_fault(store: Store) -> str:
    """One probe a fault, each in a block of its own, and alone where more than one fault would show."""
    size = store.block_size
    alone = _row(store, 1.0)
    store.write([0], alone)
    if _wrong(store, [0], alone):
        return "the mean's scale"
    uneven = _row(store, 1.0, 1000.0)
    store.write([0], uneven)
    if _wrong(store, [0], uneven):
        return "one scale for all heads"
    small = _row(store, 0.001)
    store.write([size], _row(store, 1.0))
    store.write([size + 1], small)
    if _wrong(store, [size + 1], small):
        return "the first token's scale"
    pair = torch.cat((_row(store, 1.0), small))
    store.write([0, size], pair)  # both are the first of their block
    return "scale in a wrong slot" if _wrong(store, [0, size], pair) else "none"


# ---- what many write instead -----------------------------------------------------------------------------------------


def _any_error(store: Store) -> str:
    """Takes rounding itself for a fault."""
    row = _row(store, 1.0)
    store.write([0], row)
    return "the mean's scale" if (store.read([0]) != row).any() else find_fault(store)


def _blocks_of_four(store: Store) -> str:
    """Takes slots 4 and 5 for one block, whatever the block size."""
    found = find_fault(store)
    return "none" if found == "the first token's scale" and store.block_size != 4 else found


def _two_heads(store: Store) -> str:
    """Writes rows of two heads of eight numbers."""
    store.write([0], torch.ones(1, 2, 8))
    return find_fault(store)


def _not_a_verdict(store: Store) -> object:
    return Unlisted(FAULTS, "wrong slot")


EXERCISE = Exercise(
    "16-2", "the faulty store", built_with,
    cases=tuple((Store(*shape, fault),) for shape in ((4, 4, 2, 8), (3, 2, 3, 16), (2, 5, 2, 4)) for fault in FAULTS),
    misconceptions=(
        Misconception(always_none, "put one probe to each fault. This one shows in a row of one token whose heads "
                                   "are of different size"),
        Misconception(_any_error, "codes are rounded: up to half a scale, 1/254 of the largest number of a head, is no "
                                  "fault"),
        # A row of equal numbers has its mean for its largest.
        Misconception(mistaking(find_fault, {"the mean's scale": "none"}),
                      "where all numbers of a row are equal, the mean is the largest: use one that is much larger "
                      "than the rest"),
        # All heads alike: a shared scale fits them all.
        Misconception(mistaking(find_fault, {"one scale for all heads": "none"}),
                      "write one token whose heads differ a thousandfold, and look at the small head"),
        # A large and a small token of one block in one write: two faults show.
        Misconception(mistaking(find_fault, {"scale in a wrong slot": "the first token's scale"}),
                      "two tokens in one write can show two faults. Write the large one and the small one of a block"
                      " one after the other to see that fault alone"),
        Misconception(mistaking(find_fault, {"scale in a wrong slot": "none"}),
                      "this fault shows only where tokens of different size come in one write"),
        # Small numbers, then large ones: nobody looks whether these are cut.
        Misconception(mistaking(find_fault, {"the first token's scale": "none"}),
                      "write the first slot of a block with large numbers, the next with small ones"),
        Misconception(_blocks_of_four, "blocks may have another size than four: ask store.block_size"),
        Misconception(_two_heads, "ask store.num_heads and store.head_dim: they are not always 2 and 8"),
        Misconception(_not_a_verdict, "return one of these, spelt so: " + ", ".join(FAULTS)),
    ))
