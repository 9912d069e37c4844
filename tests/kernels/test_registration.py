"""Sampling without the package of kernels, and with those of other packages: the same tokens."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dlm_bridge
from dlm_bridge import registration
from dlm_bridge.generation.runtime import graphs, runner
from dlm_bridge.registration import Extension, find_kernels
from tests.generation.conftest import load, prompts
from tests.generation.recorded import stand_in
from tests.test_registration import copy_without

pytestmark = pytest.mark.gpu(optional=True)
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
EXECUTIONS = ("eager", "graph") if GPU else ("eager", "compiled")
ROOT = Path(dlm_bridge.__file__).parents[1]
WITHOUT = """
import json, sys
from tests.kernels import test_registration as test
print(json.dumps({
    "samples": test.samples(test.Path(sys.argv[1])),
    "package": test.dlm_bridge.__file__,
    "kernels": [name for name in sys.modules if name.startswith("dlm_bridge.kernels")],
}))
"""


def samples(folder: Path) -> list[list[list[int]]]:
    """Greedy tokens and drawn ones by each execution, twice: what was recorded is replayed."""
    model = load(folder).double().to(DEVICE)
    tokens = prompts(2, 5).to(DEVICE)
    real = torch.ones_like(tokens)
    real[1, :3] = 0
    settings = {"attention_mask": real, "gen_length": 8, "block_length": 4, "eos_token_id": None, "cache": "dual"}
    found = []
    with pytest.MonkeyPatch.context() as patch:
        if not GPU:
            stand_in(patch)
        for execution in EXECUTIONS:
            for temperature in (0.0, 0.0, 1.0):
                output = model.generate(tokens, **settings, execution=execution, temperature=temperature, seed=1)
                found.append(output.tolist())
        assert runner._graphed_bodies[model]._recorded
    return found


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[list[int]]]:
    found = samples(folder)
    assert found[0] == found[1] == found[3] == found[4] != found[2] == found[5]
    return found


@pytest.mark.slow
def test_without_the_folder(folder: Path, tmp_path: Path, expected: list[Any]) -> None:
    assert issubclass(find_kernels("layers", DEVICE).Layers, graphs.DecoderLayers)
    copy_without(tmp_path, "kernels")
    paths = [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", WITHOUT, str(folder)]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert Path(found["package"]).is_relative_to(tmp_path)
    assert found["kernels"] == []
    assert found["samples"] == expected


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The kernels of another package beside ours."""
    kernels: dict[str, str] = {}
    there = {**registration.extensions(), "vendor": Extension("vendor", kernels=kernels)}
    monkeypatch.setattr(registration, "extensions", lambda: there)
    find_kernels.cache_clear()
    yield kernels
    find_kernels.cache_clear()


def test_broken_kernels_are_named_and_left_out(
    vendor: dict[str, str], folder: Path, expected: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    places = {"tokens": "no_such_package.tokens", "attention": "json", "layers": "json:loads"}
    vendor.update({f"{subject}.{DEVICE}": place for subject, place in places.items()})
    with caplog.at_level(logging.WARNING, "dlm_bridge"):
        assert samples(folder) == expected
    lines = [line.getMessage() for line in caplog.records if line.name == registration.__name__]
    ours = registration.extensions()["kernels"].kernels  # come first
    left_out = [name for name in vendor if name not in ours]
    assert len(lines) == len(left_out)  # once each
    assert all(any(name in line and "vendor" in line for line in lines) for name in left_out)
    assert find_kernels("layers", DEVICE).__name__ == "dlm_bridge.kernels.layers"


def test_kernels_of_another_device(vendor: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are used there, and ours are not."""
    functions = dict.fromkeys(registration.KERNELS["attention"])
    monkeypatch.setitem(sys.modules, "vendor_kernels", SimpleNamespace(**functions))
    vendor["attention.chip"] = "vendor_kernels"
    assert find_kernels("attention", "chip") is sys.modules["vendor_kernels"]
    assert find_kernels("attention", "cpu") is None
    assert find_kernels("tokens", "chip") is None
