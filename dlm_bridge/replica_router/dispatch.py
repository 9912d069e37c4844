"""The router's queue, and its choice of a replica for each request: by the beginning of the prompt and by load."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from dlm_bridge.replica_router.fleet import Replica
from dlm_bridge.serving.protocol import InfillPrompt, TextRequest

BLOCK = 128  # characters of a prompt that are compared at once: about a block of 32 tokens
MAX_BLOCKS = 256  # per prompt
KNOWN_BLOCKS = 65_536  # that are remembered per replica


@dataclass(eq=False)
class Ticket:
    """A request's place in the queue.

    Args:
        texts: number of texts.
        blocks: digests of the beginnings of its prompt, see `prompt_blocks`.
    """

    texts: int
    blocks: Sequence[int]
    chosen: asyncio.Future[Replica] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Dispatcher:
    """First-in, first-out queue in front of the replicas.

    A replica gets a quarter more texts than it samples together, so that it never waits for the router. A request goes
    to the replica that has seen the longest beginning of its prompt, whose keys and values may be cached there, unless
    that one has half a batch more to do than another.

    Args:
        queue_size: maximum number of waiting texts.
    """

    def __init__(self, replicas: Sequence[Replica], queue_size: int) -> None:
        self._replicas, self._queue_size = replicas, queue_size
        self._waiting: deque[Ticket] = deque()
        self.in_flight = [0] * len(replicas)  # texts at each replica
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in replicas]

    @property
    def waiting(self) -> int:
        """Number of texts in the queue."""
        return sum(ticket.texts for ticket in self._waiting)

    @property
    def room(self) -> int:
        """Number of texts that can enter the queue, or go to a replica if none waits."""
        free = 0 if self._waiting else sum(max(self._room(each), 0) for each in self._replicas if each.ready)
        return self._queue_size + free - self.waiting

    async def acquire(self, ticket: Ticket, *, first: bool = False) -> Replica:
        """Wait for a replica. `release` must follow.

        Args:
            first: wait in front of the others: a request whose replica has died.
        """
        if first:
            ticket.chosen = asyncio.get_running_loop().create_future()
            self._waiting.appendleft(ticket)
        else:
            self._waiting.append(ticket)
        self.dispatch()
        try:
            return await ticket.chosen
        except asyncio.CancelledError:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                self.dispatch()
            elif ticket.chosen.done() and not ticket.chosen.cancelled():
                self.release(ticket.chosen.result(), ticket)
            raise

    def release(self, replica: Replica, ticket: Ticket) -> None:
        """End the request at its replica."""
        self.in_flight[replica.index] -= ticket.texts
        self.dispatch()

    def forget(self, replica: Replica) -> None:
        """Forget the prompts of a process that has ended."""
        self._known[replica.index].clear()

    def dispatch(self) -> None:
        """Assign replicas to the oldest waiting requests."""
        while self._waiting:
            ticket = self._waiting[0]
            if ticket.chosen.done():  # cancelled
                self._waiting.popleft()
                continue
            replica = self._choose(ticket)
            if replica is None:
                return
            self._waiting.popleft()
            self.in_flight[replica.index] += ticket.texts
            self._remember(replica, ticket.blocks)
            ticket.chosen.set_result(replica)

    def _choose(self, ticket: Ticket) -> Replica | None:
        """The replica for a request; None if all are busy."""
        free = [
            each
            for each in self._replicas
            if each.ready and (self._room(each) >= ticket.texts or not self.in_flight[each.index])
        ]
        if not free:
            return None
        least = min(self.in_flight[each.index] for each in self._replicas if each.ready)
        calm = [each for each in free if self.in_flight[each.index] - least <= each.batch_size // 2]
        return max(calm or free, key=lambda each: (self._matched(each, ticket.blocks), -self.in_flight[each.index]))

    def _room(self, replica: Replica) -> int:
        return replica.batch_size + max(replica.batch_size // 4, 1) - self.in_flight[replica.index]

    def _matched(self, replica: Replica, blocks: Sequence[int]) -> int:
        """Number of leading blocks that the replica has seen."""
        known = self._known[replica.index]
        return next((count for count, block in enumerate(blocks) if block not in known), len(blocks))

    def _remember(self, replica: Replica, blocks: Sequence[int]) -> None:
        known = self._known[replica.index]
        for block in reversed(blocks):  # the beginning of a prompt, which others share, is forgotten last
            known[block] = None
            known.move_to_end(block)
        while len(known) > KNOWN_BLOCKS:
            known.popitem(last=False)


def prompt_blocks(request: TextRequest) -> list[int]:
    """Digests of the beginnings of a request's (first) prompt: its first BLOCK characters, its first 2 * BLOCK, ..."""
    text = _beginning(request)
    digest, found = xxhash.xxh3_64(), []
    for start in range(0, min(len(text) - BLOCK + 1, MAX_BLOCKS * BLOCK), BLOCK):
        digest.update(text[start : start + BLOCK].encode("utf-8", "surrogatepass"))
        found.append(digest.intdigest())
    return found


def _beginning(request: TextRequest) -> str:
    if request.chat:
        tools: Any = None if request.tools is None else request.tools.tools
        head = "" if tools is None else str(tools)
        return head + "".join(f"{message.get('role')}: {message.get('content')}\n" for message in request.messages)
    first = request.prompts[0] if request.prompts else ""
    if isinstance(first, InfillPrompt):
        return first.prefix
    return first if isinstance(first, str) else " ".join(map(str, first))
