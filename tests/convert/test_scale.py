"""Cost of conversions: linear in the number of tensors; every byte is read once and written once."""

from __future__ import annotations

import gc
import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge import Bridge, DlmBridgeError, Layout
from dlm_bridge.cli.app import main  # noqa: F401 (the command line is loaded before calls are counted)
from dlm_bridge.convert.formats.hub_weights import METADATA, ShardFile, build_header, index_text
from dlm_bridge.models.families import find_family
from tests.convert.helpers import run_cli
from tests.families import rnd1

LAYOUT = Layout(tp=2, pp=2, ep=4, etp=1)


def write_holes(folder: Path, config: dict[str, Any]) -> int:
    """Write a Hub folder with headers and sparse files. Returns the number of tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mapping = find_family(config, None, str(folder)).mapping
    params = mapping.params(mapping.dims(config))
    shapes = {name: shape for param in params for name, shape in zip(param.hub_names, param.hub_shapes, strict=True)}
    plans = []
    for number in range(2):
        chosen = [(name, torch.bfloat16, shapes[name]) for name in list(shapes)[number::2]]
        header, entries = build_header(METADATA, chosen)
        plans.append(ShardFile(f"model-{number + 1:05d}-of-00002.safetensors", METADATA, header, entries))
        with (folder / plans[-1].file).open("wb") as stream:
            stream.write(header)
            stream.truncate(plans[-1].nbytes)
    (folder / "model.safetensors.index.json").write_text(index_text(plans))
    return len(shapes)


def planning_calls(hub: Path) -> int:
    """Count the Python and C function calls of opening and planning."""
    count = 0

    def profile(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        Bridge.from_hf(hub).to_megatron(hub.with_name("none"), LAYOUT, dry_run=True)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.slow
def test_planning_is_linear_in_tensors(tmp_path: Path) -> None:
    found = []
    for experts in (8, 8, 16, 32):  # the first run fills caches
        hub = tmp_path / f"hub{len(found)}"
        found.append((write_holes(hub, {**rnd1.CONFIG, "num_experts": experts}), planning_calls(hub)))
    (small, a), (middle, b), (large, c) = found[1:]
    first, second = (b - a) / (middle - small), (c - b) / (large - middle)
    assert second == pytest.approx(first, rel=0.05)  # calls for one more tensor
    assert first < 250


def test_planning_does_not_wake_the_collector(tmp_path: Path) -> None:
    write_holes(tmp_path / "hub", {**rnd1.CONFIG, "num_experts": 32})
    collections = 0

    def count(phase: str, _: Any) -> None:
        nonlocal collections
        collections += phase == "start"

    gc.callbacks.append(count)
    try:
        Bridge.from_hf(tmp_path / "hub").to_megatron(tmp_path / "none", LAYOUT, dry_run=True)
    finally:
        gc.callbacks.remove(count)
    assert collections <= 2  # between the two steps
    assert gc.isenabled()
    with pytest.raises(DlmBridgeError):
        Bridge.from_hf(tmp_path / "hub").to_megatron(tmp_path / "none", Layout(tp=64), dry_run=True)
    assert gc.isenabled()


def test_every_byte_once(tmp_path: Path, llada: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the bytes of system calls that read and write weights, by file and position."""
    moved: dict[str, dict[str, list[tuple[int, int]]]] = {"read": {}, "written": {}}
    preadv, pwrite = os.preadv, os.pwrite

    def name(fd: int) -> str:
        return os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))

    def reading(fd: int, views: Any, offset: int) -> int:
        got = preadv(fd, views, offset)
        moved["read"].setdefault(name(fd), []).append((offset, offset + got))
        return got

    def writing(fd: int, data: Any, offset: int) -> int:
        put = pwrite(fd, data, offset)
        moved["written"].setdefault(name(fd), []).append((offset, offset + put))
        return put

    monkeypatch.setattr(os, "preadv", reading)
    monkeypatch.setattr(os, "pwrite", writing)

    def check(kind: str, total: int) -> None:
        spans = moved[kind]
        for file, places in spans.items():
            places.sort()
            assert all(a[1] <= b[0] for a, b in pairwise(places)), f"{file}: {kind} twice"
        assert sum(end - start for places in spans.values() for start, end in places) == total
        spans.clear()

    bridge = Bridge.from_hf(llada)
    weights = sum(bridge.read(name).nbytes for name in bridge.hub_names())
    moved["read"].clear()
    objects = 0
    for step, layout in (("a", Layout(tp=2, pp=4)), ("b", Layout(tp=1, pp=2))):
        report = bridge.to_megatron(tmp_path / step, layout)
        bridge = Bridge.from_megatron(tmp_path / step)
        objects = sum(place.length for place in bridge.checkpoint.reader.contents.objects.values())  # type: ignore[attr-defined]
        check("read", weights)
        check("written", report.bytes - objects)
    report = bridge.to_hf(tmp_path / "c")
    check("read", weights)
    check("written", weights)
    assert objects > 0


def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = write_holes(tmp_path / "hub", rnd1.CONFIG)
    arguments = ("import", tmp_path / "hub", tmp_path / "m", "--tp", 2, "--pp", 2, "--dry-run")
    code, out, _ = run_cli(capsys, *arguments, "--json")
    plan = json.loads(out)
    assert code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["hub"]
    assert plan["tensors"] == tensors
    assert plan["bytes"] == sum(plan["files"].values())
    assert sorted(plan["files"]) == [f"iter_0000000/__{rank}_0.distcp" for rank in range(4)]
    assert plan["estimated_seconds"] == pytest.approx(plan["bytes"] / 1e9)
    assert 2 * plan["largest_tensor"] < plan["peak_memory"] < 2e9
    code, out, _ = run_cli(capsys, *arguments)
    text = " ".join(out.split())
    assert code == 0
    for words in ("peak memory", "about 0 s (assumes a disk that copies 1.0 GB/s)", "__3_0.distcp"):
        assert words in text
    Bridge.from_hf(tmp_path / "hub").to_megatron(tmp_path / "m", Layout(tp=2, pp=2))
    for file, size in plan["files"].items():
        assert (tmp_path / "m" / file).stat().st_size == size
