"""A served model whose weights several processes share: the first process serves, and the others follow its engine."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import signal
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from dlm_bridge.distributed import torch_distributed
from dlm_bridge.errors import DlmBridgeError, WorkerError
from dlm_bridge.generation.request import Engine, Event, Request
from dlm_bridge.replicas import Replicas, in_all_processes
from dlm_bridge.serving.model import ServedModel

logger = logging.getLogger(__name__)
IDLE = datetime.timedelta(days=3650)  # without requests
END_S = 12.0  # after SIGTERM: longer than the first process needs to end


class SharedEngine:
    """Engine of the first process whose calls the others repeat. There is one at a time. A collective operation.

    A request's tokens follow from its seed, so all processes commit the same ones. A process that fails alone would
    leave the others waiting: it ends, and its launcher ends them.
    """

    def __init__(self, served: ServedModel) -> None:
        dist = torch_distributed()
        self.replicas = Replicas.of_group(dist.new_group(backend="gloo", timeout=IDLE), dist.get_world_size())
        self._served = served
        self._engine: Engine

    def open_engine(
        self, settings: Mapping[str, Any], max_rows: int, deliver: Callable[[Sequence[Event]], None]
    ) -> Engine:
        """See `scheduler.OpenEngine`. Events are returned by `step` only."""
        self._open((settings, max_rows))
        return self

    @property
    def forwards(self) -> int:
        return self._engine.forwards

    @property
    def idle(self) -> bool:
        return self._engine.idle

    @in_all_processes
    def submit(self, request: Request) -> None:
        self._engine.submit(request)

    @in_all_processes
    def cancel(self, name: Hashable) -> bool:
        return self._engine.cancel(name)

    def step(self) -> list[Event]:
        return self._step(None)

    def close(self) -> None:
        self._close(None)

    @in_all_processes
    def _open(self, argument: tuple[Mapping[str, Any], int]) -> None:
        self._engine = self._served.open_engine(*argument)

    @in_all_processes
    def _step(self, _: None) -> list[Event]:
        try:
            return self._engine.step()
        except DlmBridgeError:  # in all processes
            raise
        except Exception:
            logger.exception("sampling failed: the server ends")
            os._exit(2)

    @in_all_processes
    def _close(self, _: None) -> None:
        self._engine.close()

    def follow(self) -> None:
        """Repeat the first process's calls until it ends; for the other processes."""
        signal.signal(signal.SIGTERM, lambda *_: _end_later())
        with contextlib.suppress(WorkerError):  # the first process has ended, and said why
            while (call := self.replicas.broadcast()) is not None:
                with contextlib.suppress(DlmBridgeError):  # an event or an error in the first process
                    getattr(self, call[0])(call[1])

    def end(self) -> None:
        """Let the other processes end; for the first one."""
        self.replicas.broadcast(None)


def _end_later() -> None:
    timer = threading.Timer(END_S, os._exit, (0,))
    timer.daemon = True
    timer.start()
