"""`dlm-bridge verify --logits` with megatron-core, whose CPU overrides are process-wide: every case in one process.

python -m tests.convert.logits_worker FOLDER      writes FOLDER/report.json
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dlm_bridge import Bridge, Layout
from dlm_bridge.cli.app import main
from dlm_bridge.models.families import family_by_name
from tests.autoregressive.cases import CASES
from tests.checkpoints import write_llada
from tests.convert.helpers import hub_tensors, save_dcp
from tests.convert.test_torch_dist import expected
from tests.families import sdar
from tests.refusals import hide

YARN = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48}}
WINDOW = {"sliding_window": 40, "use_sliding_window": True, "max_window_layers": 2}


def run(folder: Path) -> dict[str, Any]:
    """Every case: [exit code, stdout, stderr]."""
    hub, megatron = write_llada(folder / "hub", shards=1, n_kv_heads=2), folder / "megatron"
    Bridge.from_hf(hub).to_megatron(megatron, Layout(tp=2, pp=2))
    said: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        hide(patch, "megatron")
        said["missing"] = verify(hub, megatron)
        said["missing-shown"] = verify(hub, megatron, json=False)
        said["missing-alone"] = verify(megatron)
    before = torch.cuda.current_device, torch.Tensor.cuda
    said["alone"] = verify(megatron)
    said["shown"] = verify(megatron, json=False)
    said["left"] = before == (torch.cuda.current_device, torch.Tensor.cuda) and not torch.distributed.is_initialized()
    said["pair"] = verify(hub, megatron)
    said["swapped"] = verify(hub, swapped(hub, folder / "swapped"))
    said["cut"] = verify(hub, cut(hub, folder / "cut"))
    mapping = family_by_name("llada").mapping
    wrong = {**mapping.transformer(Bridge.from_hf(hub).config), "rotary_base": 10000.0}
    with mock.patch.dict(vars(mapping), transformer=lambda config: dict(wrong)):
        said["wrong-setting"] = verify(megatron)
    windowed = {**mapping.transformer(Bridge.from_hf(hub).config), "window_size": (3, 0)}
    with mock.patch.dict(vars(mapping), transformer=lambda config: dict(windowed)):
        said["refused"] = verify(hub, megatron)
        said["refused-alone"] = verify(megatron)
    padded = write_llada(folder / "padded", n_kv_heads=2, embedding_size=160)  # more rows than tokens
    said["padded"] = verify(padded, imported(padded))
    said["blocks"] = verify(imported(sdar.CASES[0].write(folder / "blocks")))
    autoregressive = {case.label: case for case in CASES}
    said["window"] = verify(imported(autoregressive["mistral"].write(folder / "window", sliding_window=40)))
    said["yarn"] = verify(imported(autoregressive["qwen2.5"].write(folder / "yarn", **YARN, **WINDOW)))
    said["too-long"] = verify(imported(autoregressive["mistral"].write(folder / "long", sliding_window=1 << 20)))
    return said


def verify(*paths: Path, json: bool = True) -> list[Any]:
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["dlm-bridge", "verify", *map(str, paths), "--logits", *(["--json"] if json else [])]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            return [int(stop.code or 0), out.getvalue(), err.getvalue()]
    raise AssertionError("main returned")


def imported(hub: Path) -> Path:
    megatron = hub.with_name(hub.name + "_megatron")
    Bridge.from_hf(hub).to_megatron(megatron)
    return megatron


def swapped(hub: Path, folder: Path) -> Path:
    """A foreign Megatron checkpoint with gate and up in the wrong order: the same shapes, the same values."""
    state = expected(hub_tensors(hub))
    key = "decoder.layers.mlp.linear_fc1.weight"
    half = state[key].shape[1] // 2
    state[key] = torch.cat([state[key][:, half:], state[key][:, :half]], dim=1)
    return foreign(state, folder)


def cut(hub: Path, folder: Path) -> Path:
    """One without a tensor."""
    state = expected(hub_tensors(hub))
    del state["decoder.final_layernorm.weight"]
    return foreign(state, folder)


def foreign(state: dict[str, torch.Tensor], folder: Path) -> Path:
    save_dcp(state, folder / "iter_0000001")
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    return folder


if __name__ == "__main__":
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    report = run(root)
    (root / "report.json").write_text(json.dumps(report))
