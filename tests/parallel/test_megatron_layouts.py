"""The layouts of the Megatron engine against one process, and runs: what test_megatron.py leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.megatron_cases import Files
from tests.parallel.megatron_layouts_worker import plan
from tests.parallel.megatron_worker import SINKS, WORLDS
from tests.parallel.test_megatron import Said, assert_both_engines_agree, assert_is_a_hub_model
from tests.processes import assert_ok, forked, launch

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2100)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    files = Files(tmp_path_factory.mktemp("layouts"))
    files.write()
    return files


@pytest.fixture(scope="module")
def said(files: Files) -> Said:
    launch("tests.parallel.megatron_layouts_worker", files.root, processes=1, timeout_s=2000)
    return {processes: forked(files.root / f"layouts{processes}", processes) for processes in WORLDS}


@pytest.mark.parametrize(("processes", "name"), [(number, name) for number in WORLDS for name in plan(number)])
def test_processes(processes: int, name: str, said: Said) -> None:
    assert_ok(name, said[processes], processes)


def test_both_engines_agree(files: Files, said: Said) -> None:
    assert_both_engines_agree(files, "sinks", SINKS)


@pytest.mark.parametrize("subject", ["latent", "sinks"])
def test_a_training_checkpoint_is_a_hub_model(subject: str, files: Files, said: Said, tmp_path: Path) -> None:
    assert_is_a_hub_model(files, f"{subject}-cut", subject, tmp_path)
