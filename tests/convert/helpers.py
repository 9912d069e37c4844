"""Helpers of the conversion tests: folder contents, tensors read by other libraries, the command line."""

from __future__ import annotations

import io
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from dlm_bridge.cli.app import main
from dlm_bridge.convert.formats.dcp import read_metadata
from dlm_bridge.convert.manifest import MANIFEST


def tree(folder: Path) -> dict[str, bytes]:
    """Map relative paths to contents of all files except the manifest."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).as_posix() != MANIFEST
    }


def hub_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a Hub folder, by safetensors' own reader."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    return tensors


def dcp_tensors(iteration: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a distributed checkpoint, by torch's own reader."""
    reader = dcp.FileSystemReader(iteration)
    metadata = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(item.size, dtype=item.properties.dtype)
        for key, item in metadata.items()
        if hasattr(item, "size")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def common_state(iteration: Path) -> dict[str, Any]:
    """The common state of a torch_dist checkpoint, which must be plain data: common.pt, or the object of
    megatron-core 0.19."""
    if (iteration / "common.pt").is_file():
        found = torch.load(iteration / "common.pt", weights_only=True)
    else:
        place = read_metadata(iteration).objects["common_state/shard_0_1"]
        data = (iteration / place.file).read_bytes()[place.offset : place.offset + place.length]
        (found,) = torch.load(io.BytesIO(data), weights_only=True)
    assert isinstance(found, dict)
    return found


def save_dcp(state: dict[str, torch.Tensor], iteration: Path) -> None:
    """Write a distributed checkpoint with torch's own writer, and the two files that Megatron adds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            state,
            storage_writer=dcp.FileSystemWriter(iteration),
            planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
            no_dist=True,
        )
    (iteration / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({"iteration": 7, "checkpoint_version": 3.0}, iteration / "common.pt")


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run `dlm-bridge ARGUMENTS`. Returns (exit code, stdout, stderr)."""
    capsys.readouterr()
    before = sys.argv
    sys.argv = ["dlm-bridge", *map(str, arguments)]
    try:
        with pytest.raises(SystemExit) as stop:
            main()
    finally:
        sys.argv = before
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def no_leftovers(folder: Path) -> bool:
    """True if the folder contains no hidden files."""
    return not [path for path in folder.iterdir() if path.name.startswith(".")]
