"""An optimizer's state that megatron-core saved goes through reshard, and megatron-core loads it again."""

from __future__ import annotations

import importlib.util

import pytest

from tests.interop.optimizer_worker import CASES
from tests.processes import assert_ok, launch


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Results of each check."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed: pip install 'dlm-bridge[megatron]'")
    return launch("tests.interop.optimizer_worker", tmp_path_factory.mktemp("optimizer"), processes=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_megatron_core_loads_the_state_that_was_cut(report: dict[str, list[str]], name: str) -> None:
    assert_ok(name, report, processes=1)
