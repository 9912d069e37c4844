"""The legacy format against megatron-core: its models load what is written, and what they save is read back."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from dlm_bridge import Bridge
from dlm_bridge.convert.verify import verify_pair
from tests.interop.cases import models
from tests.interop.legacy_worker import CASES
from tests.processes import assert_ok, launch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of both kinds."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed: pip install 'dlm-bridge[megatron]'")
    root = tmp_path_factory.mktemp("legacy")
    for name, layout in CASES.items():
        models()[name].write(root / "hub" / name)
        bridge = Bridge.from_hf(root / "hub" / name, family=models()[name].family)
        # As with --make-vocab-size-divisible-by 1, which is how a model is built from the bridge.
        options = {"format": "torch", "key_style": "local", "vocab_multiple": layout.tp}
        bridge.to_megatron(root / "legacy" / name, layout, **options)
        (root / "again" / name).mkdir(parents=True)
        (root / "again" / name / "latest_checkpointed_iteration.txt").write_text("0")
    return root


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, list[str]]:
    """Results of each check on both ranks."""
    return launch("tests.interop.legacy_worker", folder)


@pytest.mark.parametrize("name", CASES)
def test_megatron_core_loads_it_and_saves_it_the_same(folder: Path, report: dict[str, list[str]], name: str) -> None:
    assert_ok(name, report)
    verdict = verify_pair(folder / "again" / name, folder / "hub" / name)
    assert verdict.equal, verdict.differences
