"""Tiny checkpoints whose sizes groups of 128 divide, and their quantised folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dlm_bridge import Bridge
from tests.autoregressive.cases import CASES as AUTOREGRESSIVE
from tests.families.case import FamilyCase, all_cases

SIZES = {
    "d_model": 128, "mlp_hidden_size": 256, "hidden_size": 128, "intermediate_size": 256,
    "moe_intermediate_size": 128, "head_dim": 32,
}  # fmt: skip
# All experts process every token: with random weights, rounding would change which ones do.
ALL_EXPERTS = {"llada2_moe": {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 8, "topk_group": 4}}
CASES: dict[str, Any] = {case.id: case for case in all_cases()} | {case.label: case for case in AUTOREGRESSIVE}


def write(folder: Path, name: str, dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> Path:
    """A checkpoint of the family case `name`."""
    case = CASES[name]
    sizes = {key: size for key, size in SIZES.items() if key in case.config}
    if not isinstance(case, FamilyCase):
        sizes |= {"num_attention_heads": 4}
    path: Path = case.write(folder, dtype, **{**sizes, **ALL_EXPERTS.get(name, {}), **overrides})
    return path


def export(source: Path, folder: Path, quantize: str, **settings: Any) -> Path:
    """The quantised folder of a Hub folder."""
    Bridge.from_hf(source).to_hf(folder, quantize=quantize, **settings)
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found
