"""The block pool: a block is free, held or cached; a match is of equal tokens behind equal tokens; nothing leaks."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress

import pytest

from minillm.cache import blocks
from minillm.cache.blocks import BlockPool, BlockTable
from minillm.course.batteries.scheduler import check_pool

PROMPT = list(range(10, 19))  # 9 tokens: two blocks of 4, and one token that is always computed


def run(pool: BlockPool, token_ids: list[int]) -> tuple[BlockTable, int]:
    """A request alone: match, allocate, write all, publish. Its table, and how many tokens it need not compute."""
    table = BlockTable()
    num_cached = pool.match(table, token_ids)
    assert pool.allocate(table, len(token_ids))
    pool.publish(table, token_ids, len(token_ids))
    return table, num_cached


def test_room_is_given_whole_or_not_at_all():
    pool, table, other = BlockPool(3, 4), BlockTable(), BlockTable()
    assert pool.allocate(table, 5) and len(table.blocks) == 2 and pool.num_available == 1
    assert pool.allocate(table, 8) and len(table.blocks) == 2, "there was room already"
    assert not pool.allocate(other, 5) and other.blocks == [] and pool.num_available == 1
    assert pool.num_missing(other, 5) == 2
    pool.release(table)
    assert pool.num_available == 3 and pool.num_cached == 0, "nothing was published"
    check_pool(pool, [table, other])


@pytest.mark.parametrize(("length", "expected"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_k04_the_last_token_of_a_prompt_is_never_matched(length, expected):
    pool, prompt = BlockPool(8, 4), PROMPT[:length]
    first, cold = run(pool, prompt)
    second, warm = run(pool, prompt)
    third, again = run(pool, prompt)
    assert (cold, warm, again) == (0, expected, expected)
    check_pool(pool, [first, second, third])


def test_k05_equal_hashes_are_not_equal_tokens():
    """The same tokens behind another parent are another block, and tokens whose hashes collide are told apart."""
    class Colliding(int):
        def __hash__(self) -> int:
            return 7

    prompts = [[Colliding(token) for token in ids] for ids in (
        [1, 2, 3, 4, 5, 6, 7, 8, 0], [8, 7, 6, 5, 5, 6, 7, 8, 0], [5, 6, 7, 8, 5, 6, 7, 8, 0])]
    pool = BlockPool(20, 4)
    tables = [run(pool, prompt) for prompt in prompts]
    assert [num_cached for _, num_cached in tables] == [0, 0, 0]
    assert [run(pool, prompt)[1] for prompt in prompts] == [8, 8, 8]


def test_k07_a_block_is_matched_only_once_it_is_written():
    """Who needs a block that another is writing waits for it, and writes it when the other goes away."""
    pool, writer, waiter = BlockPool(8, 4), BlockTable(), BlockTable()
    assert pool.may_write(writer, PROMPT) and pool.may_write(writer, PROMPT)
    assert pool.allocate(writer, 9)
    assert pool.match(waiter, PROMPT) == 0 and not pool.may_write(waiter, PROMPT)
    pool.publish(writer, PROMPT, 6)  # a chunk of 6 fills one block
    assert pool.match(waiter, PROMPT) == 4 and pool.may_write(writer, PROMPT)
    assert not pool.may_write(waiter, PROMPT)
    pool.release(writer)  # cancelled
    assert pool.may_write(waiter, PROMPT) and pool.allocate(waiter, 9)
    pool.publish(waiter, PROMPT, 9)
    check_pool(pool, [writer, waiter])
    assert run(pool, PROMPT)[1] == 8


def test_one_that_writes_something_else_waits_for_nobody():
    pool, one, other = BlockPool(8, 4), BlockTable(), BlockTable()
    assert pool.may_write(one, PROMPT) and pool.may_write(other, PROMPT[::-1])
    assert pool.may_write(BlockTable(), PROMPT[:4]), "a prompt of one block has none to share"


def test_the_least_recently_used_is_evicted_first_and_tails_before_their_prefix():
    pool = BlockPool(4, 2)
    old, _ = run(pool, [1, 2, 3, 4])
    pool.release(old)
    young, _ = run(pool, [5, 6])
    pool.release(young)
    assert pool.num_cached == 3 and pool.num_available == 4
    assert pool.allocate(BlockTable(), 4), "one free block, and one evicted"
    assert pool.match(BlockTable(), [1, 2, 3, 4, 0]) == 2, "its tail is gone, its beginning is not"
    assert pool.match(BlockTable(), [5, 6, 0]) == 2
    assert pool.num_evicted == 1


def test_two_that_wrote_the_same_publish_it_once():
    pool, one, two = BlockPool(8, 4), BlockTable(), BlockTable()
    for table in (one, two):  # neither asked may_write
        assert pool.allocate(table, 9)
    for table in (one, two):
        pool.publish(table, PROMPT, 9)
    third, num_cached = run(pool, PROMPT)
    assert num_cached == 8 and third.blocks[:2] == one.blocks[:2]
    for table in (one, two, third):
        pool.release(table)
    check_pool(pool, [one, two, third])
    assert pool.num_cached == 2 and pool.num_available == 8


def test_without_caching_nothing_matches_and_nobody_waits():
    pool = BlockPool(8, 4, caching=False)
    table, _ = run(pool, PROMPT)
    assert run(pool, PROMPT)[1] == 0 and pool.may_write(BlockTable(), PROMPT)
    pool.release(table)
    assert pool.num_cached == 0


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_of_nothing_is_refused(sizes):
    with pytest.raises(ValueError, match="at least 1 block of at least 1 token"):
        BlockPool(*sizes)


def test_any_series_of_requests_keeps_every_invariant():
    """Random prompts that share beginnings, in pools too small for them, read in chunks, ended at any point; after
    each action all invariants hold, a match is of equal tokens at equal positions, and at the end all is free."""
    seen = Counter()
    for seed in range(250):
        generator = random.Random(seed)
        size = generator.choice((1, 2, 4))
        pool = BlockPool(generator.randint(3, 12), size, caching=generator.random() < 0.9)
        running: list[tuple[BlockTable, list[int], list[int]]] = []  # table, tokens, [tokens written]
        content: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end, as written
        for _ in range(60):
            if generator.random() < 0.4 or not running:
                running.append((BlockTable(), [generator.randint(0, 1) for _ in range(generator.randint(1, 14))], [0]))
            table, token_ids, written = generator.choice(running)
            if generator.random() < 0.15:
                pool.release(table)
                running = [entry for entry in running if entry[0] is not table]
                seen["released"] += 1
            else:
                matched = pool.match(table, token_ids)
                if written[0] < matched <= len(token_ids) and len(table.chains) == len(table.blocks):
                    written[0] = matched
                    seen["matched"] += 1
                    for index, block in enumerate(table.blocks):
                        assert content[block] == tuple(token_ids[:(index + 1) * size])
                end = min(len(token_ids), written[0] + generator.randint(1, 5))
                if not pool.may_write(table, token_ids):
                    seen["waited"] += 1
                elif not pool.allocate(table, end):
                    seen["refused"] += 1
                else:
                    for index in range(written[0] // size, -(-end // size)):
                        content[table.blocks[index]] = tuple(token_ids[:(index + 1) * size])
                    written[0] = end
                    pool.publish(table, token_ids, end)
            check_pool(pool, [entry[0] for entry in running])
        seen["evicted"] += pool.num_evicted
        for table, _, _ in running:
            pool.release(table)
        check_pool(pool, [])
        assert pool.num_available == pool.num_blocks and not pool._claims
    assert min(seen[what] for what in ("released", "matched", "waited", "refused", "evicted")) > 200, seen


def test_a_block_with_the_writers_last_token_is_waited_for_by_a_longer_prompt_and_not_by_an_equal_one():
    """A writes tokens 0..7 in two blocks; B goes on from there and waits for both, C is the same prompt as A."""
    pool, ids = BlockPool(8, 4), list(range(8))
    a, b, c = BlockTable(), BlockTable(), BlockTable()
    assert pool.may_write(a, ids) and pool.allocate(a, 8)
    pool.publish(a, ids, 4)
    assert pool.match(b, [*ids, 9, 9]) == pool.match(c, ids) == 4
    assert pool.may_write(a, ids)
    assert not pool.may_write(b, [*ids, 9, 9]) and pool.may_write(c, ids)
    pool.publish(a, ids, 8)
    assert pool.match(b, [*ids, 9, 9]) == 8 and pool.match(c, ids) == 4


@pytest.mark.parametrize("held", [True, False])
def test_what_ctrl_c_interrupts_anywhere_is_undone_by_another_release(held, interrupt_at):
    """Whether the blocks that it begins with are another's too or cached, no block is lost, or given to two."""
    for count in range(1, 1000):
        pool, table = BlockPool(6, 4), BlockTable()
        other, old = run(pool, PROMPT)[0], run(pool, PROMPT[::-1])[0]
        pool.release(old)
        token_ids = [*(PROMPT if held else PROMPT[::-1]), 1, 2, 3, 4]

        came = interrupt_at(count, under=blocks.__file__)
        with suppress(KeyboardInterrupt):
            pool.match(table, token_ids)
            pool.may_write(table, token_ids)
            assert pool.allocate(table, 13 if held else 12)  # 13: what is free, and one evicted
            pool.publish(table, token_ids, 12)
            pool.release(table)
        interrupt_at(0)
        if not came:
            break
        pool.release(table)
        assert (table.blocks, table.chains, table.claim) == ([], [], None)
        check_pool(pool, [other])
    assert 40 < count < 999
