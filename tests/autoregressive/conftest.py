"""One checkpoint per case, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.autoregressive.cases import CASES, Case


@pytest.fixture(scope="session", params=CASES, ids=lambda case: case.label)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="session")
def folder(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The case's checkpoint, fp32. Do not write to it."""
    return case.write(tmp_path_factory.mktemp("autoregressive") / case.label)
