"""The picture of a pool: every block of every table is in it, and what cannot be is refused."""

import pytest

from minillm.course.blockmap import block_map


def test_the_table_lists_each_held_and_cached_block_with_its_holders():
    shown = block_map(6, {"a": [5, 2], "b": [2]}, cached=[0], filled={"a": 0.25}, order=["b", "a"],
                      finding="Block 2 is held by two requests.")
    assert shown.rows == ((2, "a, b"), (5, "a"), (0, "nobody: cached"))
    assert shown.png.startswith(b"\x89PNG") and "two requests" in shown.alt


def test_an_empty_pool_is_drawn_too():
    assert block_map(3, {}, finding="No request holds a block.").rows == (("none is held", "nobody"),)


@pytest.mark.parametrize(("tables", "cached", "message"), [
    ({"a": [6]}, [], "not in a pool of 6"), ({"a": [1]}, [1], "held and cached")])
def test_a_block_that_cannot_be_is_refused(tables, cached, message):
    with pytest.raises(ValueError, match=message):
        block_map(6, tables, cached=cached, finding="This is not drawn at all.")
