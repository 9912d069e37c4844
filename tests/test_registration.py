"""Extensions: what an installed package adds, what is said of one that is broken, incomplete or not there."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dlm_bridge
from dlm_bridge import registration
from dlm_bridge.errors import MissingExtraError
from dlm_bridge.generation.samplers import SAMPLERS, SamplerTable
from dlm_bridge.registration import EXTENSIONS, Extension, extensions, load, load_entry_points, registered
from tests.refusals import refused

ROOT = Path(dlm_bridge.__file__).parents[1]
VENDOR = """
from dlm_bridge.registration import Extension

EXTENSION = Extension(
    "vendor",
    "vendor[gpu]",
    engines={"chip": "vendor_code:Chip", "megatron": "vendor_code:Other", "lost": "vendor_lost:Engine"},
    commands={"hello": "vendor_code:add", "bye": "vendor_lost:add", "wrong": "vendor_code:wrong"},
    samplers={"steps": "vendor_sampler:Steps", "lost": "vendor_lost:Sampler", "path": "pathlib:Path"},
)
TAKEN = Extension("parallel")
OTHER = object()
"""
CODE = """
from pathlib import Path
from dlm_bridge.train.engine import TrainingEngine

class Chip(TrainingEngine):
    def train(self, config, resume=False, console=None):
        return Path("trained")
    def find_checkpoint(self, config): ...

def add(app):
    app.command("hello")(lambda: print("hello"))

def wrong(app):
    raise TypeError("no such argument")
"""
SAMPLER = """
from dlm_bridge.generation.samplers.llada import LLaDASampler

class Steps(LLaDASampler):
    name = "steps"
"""


def clear() -> None:
    for cached in (extensions, load_entry_points):
        cached.cache_clear()


@pytest.fixture
def vendor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package beside this one, with entry points that are good, broken and of other kinds."""
    (tmp_path / "vendor_extension.py").write_text(VENDOR)
    (tmp_path / "vendor_code.py").write_text(CODE)
    (tmp_path / "vendor_sampler.py").write_text(SAMPLER)
    (tmp_path / "vendor_lost.py").write_text("import no_such_package\n")
    info = tmp_path / "vendor-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor\nVersion: 1.0\n")
    points = {
        "good": "vendor_extension:EXTENSION",
        "taken": "vendor_extension:TAKEN",
        "other": "vendor_extension:OTHER",
    }
    points["broken"] = "vendor_lost:EXTENSION"
    lines = [f"{name} = {place}" for name, place in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{registration.ENTRY_POINTS}]", *lines]) + "\n")
    assert "llada" in SAMPLERS  # which is filled at its first use, here without the package
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        clear()
        yield tmp_path
    clear()


@pytest.mark.extension("parallel")
def test_a_package_adds_an_engine(vendor: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dlm_bridge"):
        assert registered("engines")["chip"].name == "vendor"
    assert [point for point in ("good", "taken", "other", "broken") if f"'{point}'" in caplog.text] == [
        "taken",
        "other",
        "broken",
    ]
    assert "vendor_code" not in sys.modules
    assert str(load("engines", "chip")().train(None)) == "trained"
    assert registered("engines")["megatron"].name == "parallel"  # ours first


def test_a_package_adds_samplers(vendor: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = SamplerTable()
    with caplog.at_level(logging.WARNING, "dlm_bridge"):
        assert [name for name in table if name not in SAMPLERS] == ["steps"]
    assert ["lost: " in caplog.text, "path of vendor" in caplog.text] == [True, True]


def test_what_fails_to_import_names_its_extra(vendor: Path) -> None:
    with refused(MissingExtraError, "lost", "no_such_package", "pip install 'vendor[gpu]'"):
        load("engines", "lost")


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"wrong": "dlm_bridge.errors:NoSuchName", "missing": "dlm_bridge.no_such_module:Engine"}
    monkeypatch.setattr(registration, "extensions", lambda: {"parallel": Extension("parallel", engines=places)})
    with pytest.raises(AttributeError):
        load("engines", "wrong")
    with pytest.raises(ModuleNotFoundError):
        load("engines", "missing")


def run(code: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Python `code` with the packages of a folder, and with those words for arguments."""
    environment = {"PATH": "", "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


def copy_without(folder: Path, extension: str) -> None:
    """The package in a folder, without an extension's own, of which there is what git leaves."""
    shutil.copytree(ROOT / "dlm_bridge", folder / "dlm_bridge", ignore=shutil.ignore_patterns("__pycache__"))
    own = folder / "dlm_bridge" / extension.replace(".", "/")
    shutil.rmtree(own)
    (own / "__pycache__").mkdir(parents=True)


COMMAND = "from dlm_bridge.cli.app import main; main()"


def test_the_command_line_has_a_packages_commands(vendor: Path) -> None:
    shutil.copytree(ROOT / "dlm_bridge", vendor / "dlm_bridge", ignore=shutil.ignore_patterns("__pycache__"))
    said = run(COMMAND, vendor, "--help")
    assert "hello" in said.stdout
    assert "bye" not in said.stdout
    assert run(COMMAND, vendor, "hello").stdout == "hello\n"
    assert run(COMMAND, vendor, "env", "--json").returncode == 0  # without the engine that is lost
    wrong = run(COMMAND, vendor, "wrong")
    assert wrong.returncode == 2
    assert "wrong: the extension vendor " in wrong.stderr
    left = run(COMMAND, vendor, "bye", "--any", "words")
    assert left.returncode == 2
    (line,) = [line for line in left.stderr.splitlines() if line.startswith("dlm-bridge: ")]
    assert "pip install 'vendor[gpu]'" in line


# Modules of other extensions that import one.
EDGES = {
    "parallel": ("dlm_bridge.train.rl.megatron_engine", "dlm_bridge.train.rl.pipelined"),
    "train.rl": tuple(f"dlm_bridge.train.distill.{name}" for name in ("dry_run", "sampling", "trainer")),
    "plan": ("dlm_bridge.train.distill.dry_run", "dlm_bridge.train.rl.dry_run"),
    "display": (
        "dlm_bridge.chat.local",
        "dlm_bridge.replica_router.router",
        "dlm_bridge.serving.server",
        "dlm_bridge.serving.web_page",
    ),
    "serving": tuple(
        f"dlm_bridge.replica_router.{name}" for name in ("command", "dispatch", "fleet", "metrics", "router")
    ),
}
TRAIN = ("pretrain", "--model", "m", "--data", "mock", "--output", "o", "--steps", "9")
RL = ("rl", "--model", "m", "--data", "d", "--output", "o", "--method", "dpo")
DISTILL = ("distill", "--model", "m", "--data", "d", "--output", "o", "--lora-rank", "1")
GENERATE = ("generate", "m", "--prompt", "x")
# What is refused without an extension.
REFUSED: dict[str, list[tuple[str, ...]]] = {
    "parallel": [(*TRAIN, "--engine", "megatron"), (*TRAIN, "--engine", "megatron", "--dry-run")],
    "train.rl": [RL, DISTILL],
    "train.distill": [DISTILL],
    "plan": [
        ("plan", "m", "--gpus", "1", "--seq-length", "8"),
        (*TRAIN, "--dry-run"),
        (*RL, "--dry-run"),
        (*DISTILL, "--dry-run"),
    ],
    "display": [
        (*GENERATE, "--show"),
        (*GENERATE, "--html", "o"),
        (*GENERATE, "--svg", "o"),
        ("serve", "m"),
        ("app", "m"),
        ("chat", "m"),
    ],
    "serving": [("serve", "m"), ("app", "m"), ("transformers", "env")],
    "chat": [("chat", "m")],
    "kernels": [],
    "extra_samplers": [],  # which takes a model: tests/extra_samplers
    "extra_objectives": [],  # the same: tests/extra_objectives
    "structured": [(*GENERATE, "--regex", "a"), (*GENERATE, "--choice", "a,b")],
    "prefix_cache": [("serve", "m", "--prefix-cache", "1")],
    "original": [("verify", "m", "--against-original", "--trust-remote-code")],
    "cluster": [("env", "--cluster"), (*TRAIN, "--data-cache", "c")],
    "replica_router": [("serve", "m", "--replicas", "2")],
    "exports": [
        ("export", "m", "o", "--quantize", "fp8"),
        ("export", "m", "o", "--to", "gguf"),
        ("verify", "m", "--against", "s"),
        (*GENERATE, "--quantize", "int8"),
    ],
}
WITHOUT = """
import contextlib, importlib, io, pkgutil, sys
import dlm_bridge
from dlm_bridge.cli.app import main
edges, commands = eval(sys.argv[1])
for module in pkgutil.walk_packages(dlm_bridge.__path__, "dlm_bridge."):
    if module.name not in edges and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for words in commands:
    sys.argv = ["dlm-bridge", *words]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
        except SystemExit as stop:
            print(stop.code or 0, file=sys.__stdout__)
            raise
"""
LIVE = """
import dlm_bridge
from dlm_bridge.evaluation.logits import unsupported_reason
bridge = dlm_bridge.Bridge(None)
for ask in (lambda: bridge.build_megatron_model(dlm_bridge.Layout()), lambda: bridge.stream_hf_weights(None)):
    try:
        ask()
    except dlm_bridge.DlmBridgeError as error:
        print(error)
print(unsupported_reason(bridge))
"""


# `make test` has one, which another extension imports, and which adds an engine.
FIRST = ("parallel",)


@pytest.mark.extension(*EXTENSIONS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FIRST)) for name in EXTENSIONS]
)
def test_without_an_extensions_folder(name: str, tmp_path: Path) -> None:
    """Everything else is imported and answers; what the extension adds is refused in one line that names it."""
    copy_without(tmp_path, name)
    refused = REFUSED[name]
    commands = [("--help",), ("env", "--json"), ("families", "--json"), *refused, ("no-such-command",)]
    done = run(WITHOUT, tmp_path, repr((EDGES.get(name, ()), commands)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0"] * 3 + ["2"] * (len(refused) + 1), done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("dlm-bridge: ")]
    assert len(said) == len(refused) + 1
    assert [line for line in said if f"lacks dlm_bridge.{name}" not in line] == []
    assert not (tmp_path / "o").exists()
    if name == "parallel":
        assert run(LIVE, tmp_path).stdout.count("lacks dlm_bridge.parallel") == 3
