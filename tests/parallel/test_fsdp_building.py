"""Megatron FSDP cuts a model layer by layer as it is built: no process holds all layers. FSDP itself needs GPUs, which
two processes on CPU stand in for."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.parallel.fsdp_building_worker import SUBJECTS
from tests.parallel.megatron_cases import Files
from tests.processes import OK, launch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")


def test_layers_get_memory_and_weights_as_they_are_cut(tmp_path: Path) -> None:
    """Their rows are those of a model that was built whole, in fp32 and bf16, and no others are read."""
    Files(tmp_path).write_some(*SUBJECTS)
    report = launch("tests.parallel.fsdp_building_worker", tmp_path, timeout_s=120)
    assert len(report) == 2 * len(SUBJECTS)
    assert {name: said for name, said in report.items() if said != [OK] * 2} == {}
