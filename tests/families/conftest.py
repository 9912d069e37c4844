"""One checkpoint and one loaded model per case, made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_bridge  # noqa: F401
from tests.families.case import FamilyCase, all_cases


@pytest.fixture(scope="session", params=all_cases(), ids=lambda case: case.id)
def case(request: pytest.FixtureRequest) -> FamilyCase:
    return request.param


@pytest.fixture(scope="session")
def folder(case: FamilyCase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The case's checkpoint, fp32. Do not write to it."""
    return case.write(tmp_path_factory.mktemp("families") / case.id)


@pytest.fixture(scope="session")
def model(case: FamilyCase, folder: Path) -> Any:
    """The loaded checkpoint. Do not change it."""
    return case.load(folder)


@pytest.fixture(scope="session")
def ids(case: FamilyCase) -> torch.Tensor:
    """[3, S] token ids."""
    return torch.randint(0, 100, (3, case.length), generator=torch.Generator().manual_seed(1))
