"""Characters younger than the Unicode tables of the ``tokenizers`` library. No torch.

A pattern's ``\\p{L}`` means the letters that the tokenizer's own tables know: those of Unicode 16. The ``regex``
package follows newer versions of Unicode, so letters assigned since would be cut differently: to the model they are
characters of no class. Found by comparing the two on every code point; a test repeats that.
"""

from __future__ import annotations

from collections.abc import Callable

import regex

# Ranges run on over code points that no version has assigned: they are in no class either.
_YOUNGER_THAN_UNICODE_16 = """
558 58b-58c 5c8-5c9 88f b53-b54 c5c cdc 1acf-1af0 208f 209d-209f 20c1-20c4 2b96 2e60-2e63 a7ce-a7cf a7d2 a7d4 a7dd-a7f1
ab6c-ab6d fbc3-fbd2 fd90-fd91 fdc8-fdce 107bb-107bf 10940-10959 10ec5-10efb 11b0a-11b67 11db0-11df1 1246f 12475-1247f
12550-12686 16ea0-16ed3 16ff2-16ff6 187f8-187ff 18cd6-18cda 18d09-191d2 1b123-1b128 1b168 1ccfa-1ccfc 1ceba-1cefd
1d127-1d128 1d1eb-1d1ff 1d250-1d281 1d6a6 1db00-1db1c 1df1f-1df24 1df2b-1dfff 1e6c0-1e6ff 1f1ae 1f6d8-1f6d9 1f777-1f77a
1f7da-1f7db 1f7f1-1f7ff 1f8d0-1f8d8 1fa54-1fa57 1fa8a-1fa8e 1fac8-1facd 1fadd 1faea-1faef 1faf9-1fafa 1fbfa 2b73a-2b73f
2b81e 2cea2-2cead 323b0-3fc3f
"""
_STAND_IN = "\u0378"  # a code point that is not assigned, so in no class either


_BOUNDS = ([chr(int(code, 16)) for code in word.split("-")] for word in _YOUNGER_THAN_UNICODE_16.split())
_RANGES = "".join(f"{bounds[0]}-{bounds[-1]}" for bounds in _BOUNDS)  # from a lone code point to itself
_YOUNGER = regex.compile(f"[{_STAND_IN}{_RANGES}]")


def cut_as_unicode_16(text: str, cut: Callable[[str], list[str]]) -> list[str]:
    """``cut(text)``, with every younger character taken for an unassigned one."""
    if text.isascii() or not (originals := _YOUNGER.findall(text)):
        return cut(text)
    remaining = iter(originals)  # the stand-ins come back in the order in which they went in
    return [regex.sub(_STAND_IN, lambda _: next(remaining), piece) for piece in cut(_YOUNGER.sub(_STAND_IN, text))]
