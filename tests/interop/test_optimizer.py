"""An optimizer's state that megatron-core saved goes through reshard, and megatron-core loads it again."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest


def test_megatron_core_loads_the_state_that_was_cut(tmp_path: Path) -> None:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed: pip install 'dlm-bridge[megatron]'")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", "DLM_BRIDGE_PLATFORM": "cpu",
    }  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-m", "tests.interop.optimizer_worker", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert (tmp_path / "ok").exists(), (run.stdout + run.stderr)[-4000:]
