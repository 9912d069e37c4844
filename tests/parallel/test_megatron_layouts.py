"""The layouts of the Megatron engine against one process: the cells that test_megatron.py leaves out."""

from __future__ import annotations

import pytest

from tests.parallel.megatron_cases import Files
from tests.parallel.megatron_layouts_worker import plan
from tests.parallel.megatron_worker import WORLDS
from tests.processes import assert_ok, forked, launch

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, list[str]]]:
    files = Files(tmp_path_factory.mktemp("layouts"))
    files.write()
    launch("tests.parallel.megatron_layouts_worker", files.root, processes=1, timeout_s=1100)
    return {processes: forked(files.root / f"layouts{processes}", processes) for processes in WORLDS}


@pytest.mark.parametrize(("processes", "name"), [(number, name) for number in WORLDS for name in plan(number)])
def test_processes(processes: int, name: str, said: dict[int, dict[str, list[str]]]) -> None:
    assert_ok(name, said[processes], processes)
