"""Inputs of runs, and two nodes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes.network import Network, unavailable
from tests.parallel.megatron_cases import Files
from tests.rl.conftest import policy_folder, problems, reward  # noqa: F401
from tests.train.conftest import corpus, seed_folder, tokenizer  # noqa: F401

pytest.importorskip("megatron.core")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.nodes)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("inputs")).write_some("masked")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Network]:
    """Two nodes of a file; `network` for one test."""
    if reason := unavailable():
        pytest.skip(f"no nodes: {reason}")
    with tempfile.TemporaryDirectory(prefix="nodes-") as folder, Network(Path(folder)) as network:
        yield network


@pytest.fixture
def network(nodes: Network) -> Iterator[Network]:
    """Both nodes on, their cables in, their commands over at the end."""
    yield nodes
    nodes.restore()
