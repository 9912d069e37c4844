"""When cycles of objects are collected in a run on megatron-core."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from dlm_bridge.parallel.train.trainer import FULL_GC_EVERY, GCSchedule


class Node:
    """One of a cycle."""

    def __init__(self) -> None:
        self.other: Node | None = None


@pytest.fixture(autouse=True)
def _unfrozen() -> Iterator[None]:
    """What the tests' process has frozen is frozen again afterwards."""
    gc.unfreeze()
    yield
    gc.freeze()


def cycle() -> weakref.ref[Node]:
    one, two = Node(), Node()
    one.other, two.other = two, one
    return weakref.ref(one)


def test_cycles_go_between_steps_and_only_there() -> None:
    collection = GCSchedule()
    try:
        collection.step()
        assert not gc.isenabled()
        found = cycle()
        assert found() is not None
        collection.step()
        assert found() is None
    finally:
        collection.close()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_what_the_program_froze_stays_frozen() -> None:
    gc.freeze()
    held = Node()
    held.other = held
    found = weakref.ref(held)
    collection = GCSchedule()
    collection.step()
    collection.close()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    del held
    gc.collect()
    assert found() is None  # the run's own is not frozen with it


def test_old_cycles_go_now_and_then() -> None:
    collection = GCSchedule()
    collection.step()
    try:
        node = Node()
        node.other = node
        found = weakref.ref(node)
        for _ in range(FULL_GC_EVERY // 2):  # it is old by now
            collection.step()
        del node
        collection.step()
        assert found() is not None
        for _ in range(FULL_GC_EVERY // 2):
            collection.step()
        assert found() is None
    finally:
        collection.close()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        collection = GCSchedule()
        collection.step()
        collection.step()
        collection.close()
        assert not gc.isenabled()
    finally:
        gc.enable()
