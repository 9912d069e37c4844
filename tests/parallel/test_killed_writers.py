"""A process that writes a checkpoint of the Megatron engine is killed, as the system does where memory runs out: at
once one line says so, and the run goes on from the checkpoint before."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dlm_bridge import Bridge
from dlm_bridge.errors import WorkerError
from tests.refusals import refused
from tests.train.conftest import Run, without_speed

OPTIONS: dict[str, Any] = {"steps": 4, "save_interval": 2, "eval_interval": 0}
pytestmark = pytest.mark.timeout(300)  # or it would wait for half an hour


@pytest.mark.parametrize("killed", ["a writer", "a writer in the background", "the background"])
@pytest.mark.fast("a writer in the background")
def test_one_line_names_the_signal(
    killed: str, tmp_path: Path, on_megatron: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dlm_bridge.parallel import mcore_compat
    from dlm_bridge.parallel.train import checkpoints

    background = "background" in killed
    writers = mcore_compat.saving(background).writers
    if killed == "a writer" and not mcore_compat.IS_0_16:
        pytest.skip("the writers of this version of megatron-core are threads")
    rows = on_megatron(tmp_path / "whole", **OPTIONS)
    output = tmp_path / "run"
    owner, name = (checkpoints, "end_with_parent") if killed == "the background" else (writers, "_write_item")
    real, rank = getattr(owner, name), os.getpid()

    @functools.wraps(real)  # megatron-core looks at its parameters
    def kill(*arguments: Any, **options: Any) -> Any:
        if os.getpid() != rank and (output / "checkpoints/.iter_0000004").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, kill)
        iteration = output / "checkpoints/iter_0000004"
        with refused(WorkerError, iteration, "rank 0", "SIGKILL", "iter_0000002") as raised:
            on_megatron(output, async_save=background, **OPTIONS)
    assert "MB" not in str(raised.value)  # no disk was full
    found = [path.name for path in (output / "checkpoints").iterdir() if "iter_0" in path.name]
    assert found == ["iter_0000002"]
    assert without_speed(on_megatron(output, resume=True, async_save=background, **OPTIONS)) == without_speed(rows)


def test_results_of_a_failed_save_are_not_the_next_ones(tmp_path: Path, on_megatron: Run) -> None:
    """All saves of a process have one queue."""
    from dlm_bridge.parallel import mcore_compat

    short = OPTIONS | {"steps": 2}
    on_megatron(tmp_path / "first", **short)
    mcore_compat.saving(False).writers._results_queue.put({})
    on_megatron(tmp_path / "second", **short)
    assert Bridge.from_megatron(tmp_path / "second" / "checkpoints").hub_names()
