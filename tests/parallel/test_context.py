"""Context parallelism: what two processes on CPU checked."""

from __future__ import annotations

import importlib.util

import pytest

from tests.parallel.context_worker import names
from tests.processes import assert_ok, launch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="megatron-core is not installed: pip install 'dlm-bridge[megatron]'",
)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return launch("tests.parallel.context_worker", tmp_path_factory.mktemp("context"))


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_two_processes(name: str, said: dict[str, list[str]]) -> None:
    assert_ok(name, said)
