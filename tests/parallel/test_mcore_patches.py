"""The table of patches: what it cites is there, what the code does is in it, and other versions are refused."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_bridge
from dlm_bridge.errors import MissingExtraError
from dlm_bridge.parallel import mcore_patches, overrides
from dlm_bridge.parallel.mcore_patches import PATCHES, Patch, process_wide
from dlm_bridge.parallel.platform import CPU, CUDA, Platform
from tests.refusals import refused

megatron_core = pytest.importorskip("megatron.core")
ROOT = Path(dlm_bridge.__file__).parent
HERE = ROOT / "parallel" / "mcore_patches"
CORE = Path(megatron_core.__path__[0])
INSTALLED = overrides.SUPPORTED.index(overrides.nearest_supported(overrides.installed_version()))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.target)
def test_a_row_cites_the_source_and_names_the_code(patch: Patch) -> None:
    line = patch.lines[INSTALLED]
    assert any(patch.lines)
    assert bool(patch.replaces) != bool(patch.code)
    if line is not None:
        cited = (CORE / patch.source).read_text().splitlines()[line - 1]
        private = re.findall(r"(?<!\w)_[a-zA-Z]\w+", patch.target)
        assert any(name in cited for name in private) if private else cited.strip()
    if patch.code:
        module, name = patch.code.split(":")
        module = module if "." in module else f"dlm_bridge.parallel.mcore_patches.{module}"
        assert hasattr(importlib.import_module(module), name)
    for name in patch.replaces if line is not None else ():
        owner, attribute = overrides._locate(name)
        assert hasattr(owner, attribute)


@pytest.mark.parametrize("version", overrides.SUPPORTED)
def test_rows_name_the_versions_they_apply_to(version: str) -> None:
    rows = {patch.target for patch in PATCHES if version in patch.versions}
    assert ("TensorReusePool.insert" in rows) == (version == "0.16.1")
    assert "DistributedOptimizer.model_param_group_index_map" in rows
    replaced = mcore_patches.overrides_of(CPU(), version)
    assert any("TensorReusePool" in name for name in replaced) == (version == "0.16.1")


def test_only_the_table_and_the_differences_ask_for_a_version() -> None:
    """`IS_0_16`, `SUPPORTED` and megatron-core's version are read in `mcore_compat`, the table and the checks."""
    allowed = {"mcore_compat.py", "overrides.py", "core.py", "engine.py"}
    asking = re.compile(r"IS_0_16|SUPPORTED\b.*overrides|overrides.*SUPPORTED|installed_version|nearest_supported")
    found = [
        path.name
        for path in sorted((ROOT / "parallel").rglob("*.py"))
        if path != HERE / "__init__.py" and path.name not in allowed and asking.search(path.read_text())
    ]
    assert not found


def test_private_names_of_megatron_core_are_used_here_only() -> None:
    """No other file reads or sets a private attribute of another object, but for torch's and Python's own."""
    known = {"_fields", "_replace", "_version", "_foreach_mul_", "_foreach_norm", "_local_tensor", "_getpid"}
    found = []
    for path in sorted((ROOT / "parallel").rglob("*.py")):
        if path.is_relative_to(HERE):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or not re.match(r"_[a-z]", node.attr):
                continue
            owner = node.value
            own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
            inherited = isinstance(owner, ast.Call) and getattr(owner.func, "id", "") == "super"
            listed = any(node.attr in patch.target for patch in PATCHES)
            if not own and node.attr not in known and not (inherited and listed):
                found.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
    assert not found


@pytest.mark.parametrize("platform", [CPU(), CUDA()], ids=lambda platform: platform.name)
@pytest.mark.parametrize("with_te", [False, True])
def test_the_replacements_of_a_platform(platform: Platform, with_te: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(platform), "uses_transformer_engine", lambda self: with_te)
    monkeypatch.setattr(mcore_patches.process, "uses_torch_adam", lambda: not with_te)
    wanted = mcore_patches.overrides_of(platform)
    on_cpu = platform.name == "cpu"
    assert ("torch.cuda.current_device" in wanted) == on_cpu
    assert any("DistributedOptimizer" in name for name in wanted) == (on_cpu or not with_te)
    overrides.install(wanted, "a test")
    overrides.uninstall()


def test_a_platform_adds_its_own_replacements() -> None:
    added = {"torch.Tensor.cuda": lambda original: original}

    class Chip(CPU):
        name = "chip"

        def overrides(self) -> overrides.Table:
            return added

    found = mcore_patches.overrides_of(Chip())
    assert found["torch.Tensor.cuda"] is added["torch.Tensor.cuda"]
    assert "torch.cuda.current_device" in found


def test_another_python_than_the_version_supports_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(overrides.ALLOW_UNTESTED, "1")
    monkeypatch.setattr(overrides.sys, "version_info", (3, 11, 9))
    monkeypatch.setattr(overrides.metadata, "version", lambda _: "0.6.0")  # of nvidia-resiliency-ext
    overrides.check_version("0.16.1")
    with refused(MissingExtraError, "megatron-core", "0.19.2", "Python 3.12"):
        overrides.check_version("0.19.2")
    monkeypatch.setattr(overrides.sys, "version_info", (3, 12, 1))
    overrides.check_version("0.19.3")


def test_an_old_resiliency_package_is_refused_before_it_breaks_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overrides.sys, "version_info", (3, 12, 1))
    for version in ("0.4.1", "0.5.0"):
        monkeypatch.setattr(overrides.metadata, "version", lambda _, found=version: found)
        overrides.check_version("0.16.1")
        with refused(MissingExtraError, "nvidia-resiliency-ext", version, "0.19.2", "uninstall"):
            overrides.check_version("0.19.2")
    monkeypatch.setattr(overrides.metadata, "version", lambda _: "0.6.0")
    overrides.check_version("0.19.2")


def test_a_version_is_refused_before_it_is_imported(tmp_path: Path) -> None:
    """A package that fails when it is imported, as megatron-core 0.19 does beside an old nvidia-resiliency-ext."""
    package = tmp_path / "megatron" / "core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AttributeError('imported')")
    (package / "package_info.py").write_text("__version__ = '0.18.0'")
    paths = os.pathsep.join([str(tmp_path), str(ROOT.parent)])
    done = subprocess.run(
        [sys.executable, "-c", "import dlm_bridge.parallel.core"],
        env={**os.environ, "PYTHONPATH": paths, "DLM_BRIDGE_PLATFORM": "cpu", overrides.ALLOW_UNTESTED: ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "MissingExtraError" in done.stderr.splitlines()[-1]
    assert "0.18.0" in done.stderr.splitlines()[-1]


def _import_core_again(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    from dlm_bridge import parallel
    from dlm_bridge.parallel import core

    monkeypatch.setattr(parallel, "core", core)  # put back afterwards
    monkeypatch.setattr(overrides, "installed_version", lambda: version)
    monkeypatch.delitem(sys.modules, "dlm_bridge.parallel.core", raising=False)
    importlib.import_module("dlm_bridge.parallel.core")


def test_another_version_is_refused_whatever_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(overrides.ALLOW_UNTESTED, raising=False)
    with refused(MissingExtraError, "megatron-core", "0.17.0", "0.16.1 and 0.19", overrides.ALLOW_UNTESTED) as raised:
        _import_core_again(monkeypatch, "0.17.0")
    assert "\n" not in str(raised.value)


def test_another_version_is_allowed_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(overrides.ALLOW_UNTESTED, "1")
    with pytest.warns(UserWarning, match=r"megatron-core.*0\.17\.0"):
        _import_core_again(monkeypatch, "0.17.0")


def test_a_version_that_lacks_a_name_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(overrides.ALLOW_UNTESTED, "1")
    monkeypatch.setitem(sys.modules, "megatron.core.transformer.moe.moe_utils", types.ModuleType("moe_utils"))
    with (
        pytest.warns(UserWarning, match="untested"),
        refused(MissingExtraError, "megatron-core", "0.18.0", "permute"),
    ):
        _import_core_again(monkeypatch, "0.18.0")


@pytest.mark.skipif(INSTALLED == 0, reason="megatron-core 0.16 does not find Transformer Engine's function")
@pytest.mark.parametrize("hidden", [torch.bfloat16, torch.float32])
def test_a_router_in_fp32_reads_hidden_states_in_bf16(hidden: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS, stood in for by torch, multiplies operands of one dtype only."""
    from megatron.core.transformer.moe import moe_utils

    def cublas(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, layout: str, **_: Any) -> list[torch.Tensor]:
        assert a.dtype == b.dtype
        first, second = {"TN": (b, a.T), "NN": (b, a), "NT": (b.T, a)}[layout]
        return [(first.float() @ second.float()).to(out_dtype)]

    monkeypatch.setattr(moe_utils, "te_general_gemm", process_wide.in_one_dtype(cublas))
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(5, 8, generator=generator).to(hidden).requires_grad_()
    weight = torch.randn(3, 8, generator=generator).requires_grad_()
    logits = moe_utils.router_gating_linear(inputs, weight, None, torch.float32)
    wanted = inputs.detach().float() @ weight.detach().T
    assert torch.equal(logits, wanted)
    logits.backward(torch.ones_like(logits))
    assert weight.grad is not None
    assert torch.allclose(weight.grad, inputs.detach().float().sum(dim=0).expand(3, 8))
