"""Platforms: one contract for all, which is chosen, what packages add, and overrides that say when they do not fit."""

from __future__ import annotations

import importlib
import importlib.util
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge import Layout
from dlm_bridge.errors import DlmBridgeError, MissingExtraError, SettingError
from dlm_bridge.parallel import mcore_patches, overrides, platform
from dlm_bridge.parallel.overrides import Table
from dlm_bridge.parallel.platform import CPU, CUDA
from dlm_bridge.registration import load_entry_points
from tests.parallel.conftest import megatron_alone
from tests.refusals import hide, refused

MIB = 2**20
AVAILABLE = [name for name, kind in platform.known().items() if kind.available()]
needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="megatron-core is not installed: pip install 'dlm-bridge[megatron]'",
)


def in_force() -> Table | None:
    """The overrides that are installed in this process."""
    return None if overrides._installed is None else overrides._installed[0]


@pytest.fixture(params=AVAILABLE)
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> platform.Platform:
    """Every platform of this machine in turn."""
    monkeypatch.setenv(platform.VARIABLE, request.param)
    return platform.current()


def test_a_platform_computes_on_its_device(chosen: platform.Platform) -> None:
    chosen.set_device()
    assert chosen.device().type == chosen.name
    assert chosen.device_count() >= 1
    assert chosen.device_name()
    assert torch.distributed.is_backend_available(chosen.backend)
    assert chosen.group_device() in (None, chosen.device())
    assert float(torch.ones(3, device=chosen.device()).sum()) == 3


def test_random_numbers_can_be_seeded(chosen: platform.Platform) -> None:
    def draw(seed: int) -> torch.Tensor:
        chosen.manual_seed(seed)
        return torch.rand(5, device=chosen.device())

    first = draw(7)
    assert not torch.equal(draw(8), first)
    assert torch.equal(draw(7), first)


def test_memory_is_measured_in_bytes(chosen: platform.Platform) -> None:
    before = chosen.memory_allocated()
    tensor = newly_mapped(64 * MIB, chosen.device())
    held = chosen.memory_allocated()
    assert 60 * MIB <= held - before <= 128 * MIB
    del tensor
    assert chosen.memory_allocated() <= held - 60 * MIB
    assert chosen.peak_memory() >= held - MIB
    assert chosen.total_memory() > held


def newly_mapped(nbytes: int, device: torch.device) -> torch.Tensor:
    """Bytes in use; on a CPU in pages of their own: torch's allocator may give what an earlier test has let go, which
    the process has held all along."""
    if device.type != "cpu":
        return torch.ones(nbytes, dtype=torch.uint8, device=device)
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).fill_(1)


@needs_megatron
@pytest.mark.parametrize("joined", [False, True])
def test_a_test_that_fails_leaves_nothing_to_the_next_one(joined: bool) -> None:
    from dlm_bridge.parallel import groups

    def fail() -> None:
        with megatron_alone():
            if joined:
                groups.initialize(Layout())
            else:
                overrides.install({f"{HERE}.own": _louder}, "a test")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert in_force() is None
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("earlier", ["none", "one that left its overrides"])
def test_overrides_end_with_their_test(earlier: str) -> None:
    assert in_force() is None
    overrides.install({f"{HERE}.own": _louder}, "a test")


@needs_megatron
def test_installing_twice_changes_nothing_more(chosen: platform.Platform) -> None:
    try:
        mcore_patches.install(chosen)
        assert in_force() == mcore_patches.overrides_of(chosen)
        installed = torch.cuda.current_device
        mcore_patches.install(chosen)
        assert torch.cuda.current_device is installed
    finally:
        overrides.uninstall()
    assert in_force() is None


def test_the_variable_chooses_and_a_wrong_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(platform.VARIABLE, "cpu")
    chosen = platform.current()
    assert (chosen.name, chosen.backend, chosen.device()) == ("cpu", "gloo", torch.device("cpu"))
    monkeypatch.setenv(platform.VARIABLE, "tpu")
    with refused(SettingError, platform.VARIABLE, "tpu", "cuda, cpu"):
        platform.current()


def test_cuda_is_the_default_only_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(platform.VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert platform.current().name == "cpu"
    monkeypatch.setenv(platform.VARIABLE, "cuda")
    with refused(MissingExtraError, platform.VARIABLE, "cuda"):
        platform.current()
    monkeypatch.delenv(platform.VARIABLE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert platform.current().name == "cuda"


@pytest.mark.parametrize("rank", ["2", "first"])
def test_a_process_without_a_device_is_told(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", rank)
    with pytest.raises(DlmBridgeError, match=f"^LOCAL_RANK.*{rank}"):
        CUDA().set_device()


def test_without_megatron_core_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("dlm_bridge.parallel.")]:
        monkeypatch.delitem(sys.modules, name)
    hide(monkeypatch, "megatron")
    with refused(MissingExtraError, "megatron-core", "pip install 'dlm-bridge[megatron]'"):
        importlib.import_module("dlm_bridge.parallel.parallelize")


class Vendor:
    """An installed package that offers a platform."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self.patch = root, patch

    def install(self, entry: str, code: str = "") -> None:
        """`entry`: "name = module:class"; `code`: the class's body."""
        module = f"vendor_{self.root.name}"
        (self.root / f"{module}.py").write_text(
            "from dlm_bridge.parallel.platform import CPU\n\n\n"
            f"class Chip(CPU):\n    name = 'chip'\n{code}\nclass Other: ...\n\n\nclass Cpu(CPU): ...\n"
        )
        info = self.root / "vendor-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{platform.GROUP}]\n{entry.replace('MODULE', module)}\n")
        self.patch.syspath_prepend(str(self.root))
        platform.known.cache_clear()
        load_entry_points.cache_clear()


@pytest.fixture
def vendor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vendor]:
    monkeypatch.delenv(platform.VARIABLE, raising=False)
    with monkeypatch.context() as patch:
        yield Vendor(tmp_path, patch)
    platform.known.cache_clear()
    load_entry_points.cache_clear()


def test_a_package_adds_a_platform(vendor: Vendor, monkeypatch: pytest.MonkeyPatch) -> None:
    vendor.install("chip = MODULE:Chip")
    assert list(platform.known()) == ["chip", "cuda", "cpu"]
    chosen = platform.current()
    assert chosen.name == "chip"
    assert isinstance(chosen, CPU)
    monkeypatch.setenv(platform.VARIABLE, "cpu")
    assert platform.current().name == "cpu"
    monkeypatch.setenv(platform.VARIABLE, "chip")
    assert platform.current() is chosen


def test_a_packages_platform_counts_only_where_its_device_is(vendor: Vendor, monkeypatch: pytest.MonkeyPatch) -> None:
    vendor.install("chip = MODULE:Chip", "\n    @classmethod\n    def available(cls):\n        return False\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert platform.current().name == "cpu"
    monkeypatch.setenv(platform.VARIABLE, "chip")
    with refused(MissingExtraError, platform.VARIABLE, "chip"):
        platform.current()


@pytest.mark.parametrize("entry", ["chip = MODULE:Other", "slip = MODULE:Chip", "cpu = MODULE:Cpu"])
def test_a_packages_wrong_platform_is_named(entry: str, vendor: Vendor) -> None:
    vendor.install(entry)
    name, _, kind = entry.replace("MODULE:", "").split()
    with refused(SettingError, platform.GROUP, name, kind, "vendor_"):
        platform.current()


@pytest.mark.parametrize("entry", ["chip = MODULE:Absent", "chip = absent_module:Chip"])
def test_a_package_that_fails_to_import_is_left_out(
    entry: str, vendor: Vendor, caplog: pytest.LogCaptureFixture
) -> None:
    vendor.install(entry)
    assert list(platform.known()) == ["cuda", "cpu"]
    assert "vendor: entry point 'chip' of dlm_bridge.platforms fails to import" in caplog.text


class Parent:
    def inherited(self) -> str:
        return "original"


class Child(Parent):
    @staticmethod
    def own() -> str:
        return "original"


HERE = f"{__name__}.Child"


def _louder(original: Any) -> Any:
    return lambda *arguments: original(*arguments).upper()


def test_overrides_are_installed_once_and_undone() -> None:
    declared = {f"{HERE}.own": _louder, f"{HERE}.inherited": _louder}
    own = vars(Child)["own"]
    overrides.install(declared, "a test")
    overrides.install(declared, "a test")
    assert in_force() == declared
    assert Child().inherited() == "ORIGINAL"
    assert Child.own() == "ORIGINAL"
    assert Parent().inherited() == "original"
    overrides.uninstall()
    assert vars(Child)["own"] is own
    assert "inherited" not in vars(Child)
    overrides.uninstall()
    assert in_force() is None


def _breaks(original: Any) -> Any:
    raise KeyError("a size\nthat is gone")


@pytest.mark.parametrize(
    ("name", "make", "reason"),
    [
        (f"{HERE}.absent", _louder, ""),
        (f"{HERE}.absent.own", _louder, ""),
        ("absent_module.name", _louder, ""),
        (f"{HERE}.own", _breaks, r"'a size\nthat is gone'"),
    ],
)
def test_an_override_that_does_not_fit_is_named_and_nothing_is_changed(name: str, make: Any, reason: str) -> None:
    with refused(MissingExtraError, name, "a test", reason) as raised:
        overrides.install({f"{HERE}.inherited": _louder, name: make}, "a test")
    assert "\n" not in str(raised.value)
    assert Child().inherited() == "original"
    assert in_force() is None


def test_two_platforms_do_not_override_in_one_process() -> None:
    overrides.install({f"{HERE}.own": _louder}, "a test")
    try:
        with refused(SettingError, "another", "a test"):
            overrides.install({f"{HERE}.inherited": _louder}, "another")
        assert Child().inherited() == "original"
    finally:
        overrides.uninstall()


def test_env_says_it_all_without_importing_megatron_core() -> None:
    code = (
        "import sys\n"
        "from dlm_bridge.cli.app import main\n"
        "sys.argv = ['dlm-bridge', 'env', '--json']\n"
        "try:\n    main()\n"
        "except SystemExit as stop:\n    assert not stop.code\n"
        "heavy = {'megatron', 'transformers', 'accelerate', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    environment = {"DLM_BRIDGE_PLATFORM": "cpu", "NCCL_DEBUG": "INFO", "HF_TOKEN": "secret"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["platform"]["chosen"] == "cpu"
    assert found["platform"]["available"]["cuda"]["class"] == "dlm_bridge.parallel.platform.CUDA"
    assert found["versions"]["torch"] == metadata.version("torch")
    assert found["overrides"]["made_for"] == ["0.16.1", "0.19.2"]
    assert "torch.cuda.current_device" in found["overrides"]["names"]
    active = {patch["target"]: patch["active"] for patch in found["patches"]}
    assert len(active) == len(mcore_patches.PATCHES)
    assert active["torch.Tensor"]
    assert not active["GradReducePipeline._bucket_group_gradient_reduce"]
    assert found["variables"] == {"DLM_BRIDGE_PLATFORM": "cpu", "NCCL_DEBUG": "INFO"}
    assert "secret" not in done.stdout


def test_env_shows_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from dlm_bridge.cli import env
    from dlm_bridge.parallel import engine

    monkeypatch.setenv(platform.VARIABLE, "cpu")
    monkeypatch.setattr(engine, "version", lambda name: {"megatron-core": "0.17.0"}.get(name, "1.0"))
    env.env()
    said = capsys.readouterr().out
    assert "cpu (gloo)" in said
    assert "torch.Tensor" not in said
    env.env(patches=True)
    said = capsys.readouterr().out
    assert "torch.Tensor" in said
    assert "not the installed version: training is refused" in " ".join(said.split())


def test_env_lists_overrides_only_of_an_installed_megatron_core(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dlm_bridge.cli import env
    from dlm_bridge.parallel import engine

    def version(name: str) -> str:
        if name == "megatron-core":
            raise PackageNotFoundError
        return "1.0"

    monkeypatch.setenv(platform.VARIABLE, "cpu")
    monkeypatch.setattr(engine, "version", version)
    env.env(as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["overrides"], found["patches"]) == (None, [])
    env.env(patches=True)
    said = capsys.readouterr().out
    assert "torch.Tensor" not in said
    assert "megatron-core is not installed" in " ".join(said.split())


@needs_megatron
def test_the_cpu_does_without_packages_of_gpus(tmp_path: Path) -> None:
    """Where Transformer Engine is installed too, megatron-core's optimizers on the CPU are torch's."""
    for name in ("transformer_engine", "apex"):
        for module in ("__init__", "pytorch/__init__", "pytorch/optimizers", "optimizers"):
            file = tmp_path / name / f"{module}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("class FusedAdam:\n    pass\n\n\nFusedSGD = multi_tensor_scale = FusedAdam\n")
    (metadata := tmp_path / "transformer_engine-2.20.2.dist-info/METADATA").parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: transformer_engine\nVersion: 2.20.2\n")
    code = "from dlm_bridge.parallel import core; from megatron.core import optimizer as o; print(o.Adam, o.SGD)"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {platform.VARIABLE: "cpu"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.strip() == f"{torch.optim.AdamW} {torch.optim.SGD}"
