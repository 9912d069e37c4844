"""Models whose layers have the engine's own kernels, on four processes against transformers' model on one."""

from __future__ import annotations

import pytest

from tests.interop.cases import models
from tests.parallel.fused_worker import CASES
from tests.parallel.live_cases import CASES as LAYOUTS
from tests.parallel.live_cases import WORLD, Files
from tests.parallel.test_live_model import write_reference
from tests.processes import assert_ok, launch

pytest.importorskip("triton")
pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each check said of a model whose layers have the kernels, on every rank."""
    files = Files(tmp_path_factory.mktemp("fused"))
    for model in sorted({LAYOUTS[name].model for name in CASES}):
        models()[model].write(files.hub(model))
        write_reference(files, model)
    return launch("tests.parallel.fused_worker", files.root, WORLD)


@pytest.mark.parametrize("name", CASES)
def test_a_layout_has_the_loss_and_the_gradients_of_transformers_model(
    name: str, report: dict[str, list[str]]
) -> None:
    assert_ok(name, report, WORLD)
