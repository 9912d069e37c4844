"""The legacy format against megatron-core: its models load what is written, and what they save is read back."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dlm_bridge import Bridge
from dlm_bridge.convert.verify import verify_pair
from tests.interop.cases import models
from tests.interop.legacy_worker import CASES

TIMEOUT_S = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of both kinds, and what two processes did with them."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed: pip install 'dlm-bridge[megatron]'")
    root = tmp_path_factory.mktemp("legacy")
    for name, layout in CASES.items():
        models()[name].write(root / "hub" / name)
        bridge = Bridge.from_hf(root / "hub" / name, family=models()[name].family)
        # As with --make-vocab-size-divisible-by 1, which is how a model is built from the bridge.
        options = {"format": "torch", "key_style": "local", "vocab_multiple": layout.tp}
        bridge.to_megatron(root / "legacy" / name, layout, **options)
        (root / "again" / name).mkdir(parents=True)
        (root / "again" / name / "latest_checkpointed_iteration.txt").write_text("0")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", "DLM_BRIDGE_PLATFORM": "cpu",
    }  # fmt: skip
    logs = [(root / f"log_{rank}.txt").open("w+") for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.interop.legacy_worker", str(root)],
            cwd=Path(__file__).parents[2],
            env={**environment, "RANK": str(rank)},
            stdout=logs[rank],
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            process.wait(timeout=TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, log in enumerate(logs):
        log.seek(0)
        assert (root / f"ok_{rank}").exists(), log.read()[-4000:]
        log.close()
    return root


@pytest.mark.parametrize("name", CASES)
def test_megatron_core_loads_it_and_saves_it_the_same(folder: Path, name: str) -> None:
    verdict = verify_pair(folder / "again" / name, folder / "hub" / name)
    assert verdict.equal, verdict.differences
