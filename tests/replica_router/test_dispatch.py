"""Which replica gets a request: the one that knows the beginning of its prompt, unless it has too much to do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from dlm_bridge.replica_router.dispatch import BLOCK, Dispatcher, Ticket, prompt_blocks
from dlm_bridge.replica_router.fleet import Replica
from dlm_bridge.serving.protocol import InfillPrompt, TextRequest


def dispatcher(replicas: int = 2, batch_size: int = 8, queue_size: int = 64) -> Dispatcher:
    found = [Replica(index, (), {}, lambda _: None) for index in range(replicas)]
    for each in found:
        each.ready, each.batch_size = True, batch_size
    return Dispatcher(found, queue_size)


def blocks(prompt: str) -> list[int]:
    return prompt_blocks(TextRequest(chat=False, prompts=[prompt]))


def test_equal_beginnings_go_to_one_replica() -> None:
    async def check() -> None:
        given = dispatcher()
        chosen: dict[str, list[int]] = {}
        for number in range(4):
            for beginning in "abc":
                ticket = Ticket(1, blocks(beginning * 2 * BLOCK + str(number) * BLOCK))
                replica = await given.acquire(ticket)
                chosen.setdefault(beginning, []).append(replica.index)
                given.release(replica, ticket)
        assert all(len(set(found)) == 1 for found in chosen.values())
        assert given.in_flight == [0, 0]

    asyncio.run(check())


def test_a_busy_replica_shares_its_beginning() -> None:
    async def check() -> None:
        given, prompt = dispatcher(), blocks("a" * BLOCK)
        found = [(await given.acquire(Ticket(1, prompt))).index for _ in range(12)]
        assert found[:5] == [0] * 5
        assert found.count(1) >= 4  # when it had half a batch more than the other
        assert abs(given.in_flight[0] - given.in_flight[1]) <= 4

    asyncio.run(check())


def test_without_a_known_beginning_the_least_loaded_is_chosen() -> None:
    async def check() -> None:
        given = dispatcher(3)
        found = [(await given.acquire(Ticket(1, blocks(letter * BLOCK)))).index for letter in "abcdef"]
        assert found == [0, 1, 2] * 2
        given.forget(given._replicas[1])
        assert given._matched(given._replicas[1], blocks("b" * BLOCK)) == 0

    asyncio.run(check())


def test_a_large_request_waits_and_is_not_overtaken() -> None:
    async def check() -> None:
        given = dispatcher(1, batch_size=4)
        first = Ticket(3, ())
        replica = await given.acquire(first)
        large, small = Ticket(9, ()), Ticket(1, ())  # more than a replica is sent at once
        waiting = [asyncio.ensure_future(given.acquire(each)) for each in (large, small)]
        await asyncio.sleep(0)
        assert given.waiting == 10
        assert given.room == 64 - 10
        given.release(replica, first)
        assert await waiting[0] is replica
        assert not waiting[1].done()
        given.release(replica, large)
        assert await waiting[1] is replica

    asyncio.run(check())


def test_a_cancelled_request_leaves_the_queue() -> None:
    async def check() -> None:
        given = dispatcher(1, batch_size=1)
        tickets = [Ticket(1, ()) for _ in range(4)]
        tasks = [asyncio.ensure_future(given.acquire(each)) for each in tickets]
        await asyncio.sleep(0)
        assert (given.in_flight, given.waiting) == ([2], 2)
        tasks[2].cancel()
        await asyncio.wait([tasks[2]])
        assert given.waiting == 1
        given.release(tasks[0].result(), tickets[0])
        tasks[3].cancel()  # it has a replica, and does not know it yet
        await asyncio.wait([tasks[3]])
        assert (given.in_flight, given.waiting) == ([1], 0)

    asyncio.run(check())


@pytest.mark.parametrize(
    ("same", "other"),
    [
        ({"prompts": ["x" * BLOCK + "1"]}, {"prompts": ["y" * BLOCK + "1"]}),
        ({"prompts": [[1] * BLOCK]}, {"prompts": [[2] * BLOCK]}),
        ({"prompts": [InfillPrompt("x" * BLOCK, "1", 3)]}, {"prompts": [InfillPrompt("y" * BLOCK, "1", 3)]}),
        (
            {"chat": True, "messages": [{"role": "system", "content": "x" * BLOCK}, {"role": "user", "content": "1"}]},
            {"chat": True, "messages": [{"role": "user", "content": "x" * BLOCK}, {"role": "user", "content": "1"}]},
        ),
    ],
)
def test_blocks_are_of_the_prompt(same: dict[str, Any], other: dict[str, Any]) -> None:
    first, again, second = (prompt_blocks(TextRequest(**{"chat": False, **one})) for one in (same, same, other))
    assert first == again
    assert first
    assert first[0] != second[0]


def test_short_prompts_have_no_blocks() -> None:
    assert blocks("a" * (BLOCK - 1)) == []
    assert len(blocks("a" * 3 * BLOCK)) == 3
    assert blocks("a" * 3 * BLOCK)[:2] == blocks("a" * 2 * BLOCK)
