"""Two processes that see different folders: a resume waits, then ends and names the rank."""

from __future__ import annotations

import pytest

from tests.processes import assert_ok, launch
from tests.train.views_worker import CHECKS


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return launch("tests.train.views_worker", tmp_path_factory.mktemp("views"), timeout_s=200)


@pytest.mark.parametrize("name", CHECKS)
def test_views(name: str, report: dict[str, list[str]]) -> None:
    assert_ok(name, report)
