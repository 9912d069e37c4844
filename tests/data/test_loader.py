"""The prefetcher: the same results in the same order, bounded, with its exceptions, and gone after close."""

from __future__ import annotations

import threading

import pytest

from dlm_bridge.data.loader import Prefetcher
from dlm_bridge.errors import InputFileError
from tests.refusals import refused


def test_results_come_in_order_and_only_so_far_ahead() -> None:
    made: list[int] = []
    enough = threading.Event()

    def produce(step: int) -> int:
        made.append(step)
        if step == 8:
            enough.set()
        return step * step

    with Prefetcher(produce, first=5, depth=2) as prefetcher:
        assert prefetcher.get() == 25
        assert enough.wait(10)  # 6 and 7 are ready, 8 waits for room
        assert made == [5, 6, 7, 8]
        assert [prefetcher.get() for _ in range(50)] == [step * step for step in range(6, 56)]
    assert made == list(range(5, made[-1] + 1))
    assert made[-1] <= 55 + 3


def test_an_exception_is_raised_at_its_step_and_again() -> None:
    def produce(step: int) -> int:
        if step == 3:
            raise InputFileError("a.bin", "contains token id 9")
        return step

    with Prefetcher(produce, first=1) as prefetcher:
        assert [prefetcher.get(), prefetcher.get()] == [1, 2]
        for _ in range(2):
            with refused(InputFileError, "a.bin"):
                prefetcher.get()


def test_close_ends_the_thread_whatever_it_waits_for() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(step: int) -> int:
        begun.set()
        assert go_on.wait(10)
        return step

    before = threading.active_count()
    full = Prefetcher(lambda step: step, first=0, depth=1)
    making = Prefetcher(slow, first=0)
    assert begun.wait(10)
    full.close()
    threading.Timer(0.05, go_on.set).start()
    making.close()
    making.close()
    assert threading.active_count() <= before + 1  # the timer
    with pytest.raises(RuntimeError, match="closed"):
        full.get()
