"""Fixtures shared by every test: small checkpoints, made once."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import gc
import logging
import os
import re
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several tests, each of several processes, share the cores
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported: its kernels run on the CPU

import torch

from dlm_bridge.registration import EXTENSIONS, extensions
from tests import launcher

torch.set_num_threads(1)
launcher.skip_fsync()
launcher.share_gloo_device()

import typer.main  # noqa: E402
import typer.testing  # noqa: E402

from tests.checkpoints import write_llada  # noqa: E402
from tests.mock_hub import hub  # noqa: E402, F401

ROOT = Path(__file__).parent
BEGAN = time.time()
PACKAGES = ("torch", "transformers", "megatron-core", "transformer-engine", "triton", "torchao", "bitsandbytes")
REPORT = ("tests", "GPUs", "versions", "date", "passed", "failed", "skipped", "minutes")


# Folders of tests that need an extension: where it is not there, or with --core, they are not collected.
FOLDERS = {
    **{"rl": "train.rl", "distill": "train.distill", "interop": "parallel", "faults": "parallel", "nodes": "parallel"},
    **{name: name for name in EXTENSIONS},
}
EXTRA_SAMPLERS = (
    "bd3lm", "credit", "dmax", "dream_block", "hierarchical", "linear_spec", "llada2.1", "multi_bd", "multi_block",
    "wino",
)  # fmt: skip
IMPORT = re.compile(r"^(?:from|import) dlm_bridge\.(train\.\w+|\w+)(?: import (\w+))?", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-report", type=Path, help="a page whose table of test runs gets the row of this one")
    parser.addoption("--core", action="store_true", help="only tests that need no extension")
    parser.addoption("--minutes", type=float, help="skip the tests that would start later than this")
    parser.addoption("--order", help="any text: files in an order that depends on it, so that others are reached")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("order"):
        config.option.loadscopereorder = False  # pytest-xdist would send the largest files first


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files whose folder belongs to an extension that is not there, and files that import one."""
    lacking = _lacking(config)
    if collection_path.parent == ROOT and FOLDERS.get(collection_path.name) in lacking:
        return True
    return bool(collection_path.suffix == ".py" and lacking & _imported(collection_path)) or None


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that need an extension that is not there, by their marks or by the name of a sampler. Mark the
    cases as slow that the test's `fast` mark does not name."""
    _mark_slow_cases(config, items)
    lacking = _lacking(config)
    left_out = [item for item in items if lacking & _needed(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    order = config.getoption("order")
    if order:
        items.sort(key=lambda item: zlib.crc32(f"{order} {item.path.relative_to(ROOT)}".encode()))


def _mark_slow_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    fast: dict[str, bool] = {}  # by test: whether a case of it is
    for item in items:
        if (mark := item.get_closest_marker("fast")) is None:
            continue
        assert isinstance(item, pytest.Function)
        test = item.nodeid.partition("[")[0]
        named, but = (
            any(fnmatch.fnmatchcase(item.callspec.id, pattern) for pattern in patterns)
            for patterns in (mark.args or "*", mark.kwargs.get("but", ()))
        )
        is_fast = named and not but
        fast[test] = fast.get(test, False) or is_fast
        if not is_fast:
            item.add_marker(pytest.mark.slow)
    if not any("::" in arg for arg in config.args) and not all(fast.values()):
        raise pytest.UsageError(f"no case is as `fast` says: {[test for test, found in fast.items() if not found]}")


def _needed(item: pytest.Item) -> set[str]:
    needed = {name for mark in item.iter_markers("extension") for name in mark.args}
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    if any(isinstance(value, str) and value.startswith(EXTRA_SAMPLERS) for value in values):
        needed.add("extra_samplers")
    return needed


@functools.cache
def _lacking(config: pytest.Config) -> frozenset[str]:
    return frozenset(EXTENSIONS) - (frozenset() if config.getoption("core") else frozenset(extensions()))


@functools.cache
def _imported(path: Path) -> frozenset[str]:
    """The extensions that a file imports."""
    found = IMPORT.findall(path.read_text())
    return frozenset(EXTENSIONS) & {one for module, name in found for one in (module, f"{module}.{name}")}


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    from benchmarks.layouts.document import update_table

    page = config.getoption("gpu_report")
    if page is not None:
        update_table(page, "tests", REPORT, _report_row(config, terminalreporter.stats), keys=2)


def _report_row(config: pytest.Config, stats: dict[str, list[Any]]) -> tuple[str, ...]:
    """A run of tests: which, on what, and how many ended how."""
    from benchmarks.layouts.tables import conditions

    left_out = ", ".join(config.getoption("ignore") or [])
    which = f"{config.getoption('markexpr') or 'all'}: {' '.join(config.args)}"
    which += f" without {left_out}" * bool(left_out) + f" -k '{config.getoption('keyword')}'" * bool(
        config.option.keyword
    )
    devices, _, versions = conditions(PACKAGES).partition(", ")
    failed = len(stats.get("failed", [])) + len(stats.get("error", []))
    counts = (len(stats.get("passed", [])), failed, len(stats.get("skipped", [])))
    date = time.strftime("%-d %B %Y", time.gmtime())
    return (which, devices, versions, date, *map(str, counts), f"{(time.time() - BEGAN) / 60:.1f}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("minutes")
    if minutes is not None and time.time() - BEGAN > 60 * minutes:
        pytest.skip(f"not reached in {minutes:g} minutes")
    for marker, wanted in (("gpu", 1), ("gpu2", 2)):
        found = item.get_closest_marker(marker)
        if found is not None and "optional" not in found.kwargs and torch.cuda.device_count() < wanted:
            pytest.skip(f"needs {wanted} GPU" + "s" * (wanted > 1))


def pytest_collection_finish() -> None:
    """What is imported by now stays: no collection of garbage, of which checkpoints ask for many, need walk it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _commands() -> Iterator[None]:
    """Typer makes all commands anew whenever one is called; here once."""
    made = functools.cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", made)
        patch.setattr(typer.testing, "_get_command", made)
        yield


@pytest.fixture(scope="session")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaDA checkpoint (grouped queries, fp32, two shards). Do not write to it."""
    return write_llada(tmp_path_factory.mktemp("hub") / "llada", n_kv_heads=2)


def end_megatron() -> None:
    """Undo what a live model leaves in this process: process groups and overrides, each also where another fails."""
    groups, overrides = (sys.modules.get(f"dlm_bridge.parallel.{name}") for name in ("groups", "overrides"))
    with contextlib.ExitStack() as steps:  # last in, first out
        if torch.distributed.is_initialized():
            steps.callback(torch.distributed.destroy_process_group)
        if overrides is not None:
            steps.callback(overrides.uninstall)
        if torch.distributed.is_initialized() and groups is not None:
            steps.callback(groups.destroy)


@pytest.fixture(scope="module", autouse=True)
def _groups_end_with_the_file() -> Iterator[None]:
    """Files share a process, in an order that changes: what a live model leaves behind must not reach the next one."""
    yield
    end_megatron()


@pytest.fixture(autouse=True)
def _overrides_end_with_the_test() -> Iterator[None]:
    """A test that fails between `overrides.install` and `uninstall` must not fail the tests after it. Under process
    groups, overrides are those of the file's model."""
    yield
    if not torch.distributed.is_initialized():
        end_megatron()


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
