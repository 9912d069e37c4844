"""The proof against megatron-core: what two processes checked, and what it saved, exported back."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dlm_bridge import Bridge
from tests.interop.cases import Files, models, other_plan, plan, saved
from tests.processes import OK, assert_ok

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="megatron-core is not installed: pip install 'dlm-bridge[megatron]'",
)


@pytest.mark.parametrize("name", list(plan()))
def test_two_processes(name: str, report: dict[str, list[str]]) -> None:
    assert_ok(name, report)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize(("model", "layout"), saved())
def test_what_megatron_core_saved_is_exported_bit_for_bit(
    model: str, layout: str, files: Files, report: dict[str, list[str]], tmp_path: Path
) -> None:
    assert report[f"save[{model}-{layout}]"] == [OK, OK]
    _assert_exported(model, layout, files, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(other_plan()))
def test_other_checks(name: str, other_report: dict[str, list[str]]) -> None:
    assert_ok(name, other_report)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), saved(every=True))
def test_what_megatron_core_saved_of_others_is_exported_bit_for_bit(
    model: str, layout: str, tmp_path: Path, files: Files, other_report: dict[str, list[str]]
) -> None:
    assert other_report[f"save[{model}-{layout}]"] == [OK, OK]
    _assert_exported(model, layout, files, tmp_path)


def _assert_exported(model: str, layout: str, files: Files, tmp_path: Path) -> None:
    out = tmp_path / "out"
    family = models()[model].family
    Bridge.from_megatron(files.saved(model, layout), like=files.hub(model), family=family).to_hf(out)
    wanted = models()[model].tensors()
    found = _tensors(out)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    for file in files.hub(model).rglob("*"):
        if file.is_file() and file.suffix != ".safetensors":
            assert (out / file.relative_to(files.hub(model))).read_bytes() == file.read_bytes(), file.name
