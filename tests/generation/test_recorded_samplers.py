"""Samplers against what their public code gave, on the same model: recorded tokens and numbers of forward passes.

Each record of recorded_samplers.json names the repository, commit and file whose functions ran, greedily and row by
row, on the stand-in model of its seed, in float64. Here the rows run in one ragged batch, and each alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge.generation import generate
from tests.generation.standin import MASK, StandIn, family, ragged

RECORDS = json.loads((Path(__file__).parent / "recorded_samplers.json").read_text())


class NeverMask(StandIn):
    """Gives the mask token no probability."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits[..., MASK] = -1e4
        return output


def name_of(record: dict[str, Any]) -> str:
    return "-".join(str(value) for value in record["settings"].values())


@pytest.mark.parametrize("record", RECORDS, ids=name_of)
def test_the_public_code_s_tokens(record: dict[str, Any]) -> None:
    settings = {"eos_token_id": None, **record["settings"]}
    model = NeverMask(family(shift=record["shift"], algorithm=settings["algorithm"]), seed=record["seed"], peak=3.0)
    rows, ids, mask = ragged((5, 9, 1, 8), record["seed"])
    together = generate(model, ids, attention_mask=mask, **settings)
    assert together[:, 9:].tolist() == record["tokens"]
    for row, tokens, forwards in zip(rows, record["tokens"], record["forwards"], strict=True):
        alone = generate(model, torch.tensor([row]), return_dict_in_generate=True, **settings)
        assert alone.sequences[0, len(row) :].tolist() == tokens
        assert alone.forwards == forwards
