"""Nemotron-Labs-Diffusion's three modes, and positions beyond the original context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge.attention.masks import causal_mask
from dlm_bridge.errors import CheckpointError, SettingError
from tests.families.nemotron_labs_diffusion import CASES, SHORT, reference
from tests.refusals import refused

CASE = CASES[1]
TENSORS = CASE.tensors(SHORT, 0, torch.float32)


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return CASE.load(CASE.write(tmp_path / "hub"))


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 100, (2, 40), generator=torch.Generator().manual_seed(0))


def expect(model: Any, ids: torch.Tensor, allowed: torch.Tensor, **arguments: Any) -> None:
    positions = arguments.get("position_ids", torch.arange(ids.shape[1]).expand(ids.shape))
    expected = reference(TENSORS, SHORT, ids, allowed, positions)
    with torch.no_grad():
        logits = model(ids, **arguments).logits
    torch.testing.assert_close(logits.double(), expected, atol=1e-5, rtol=1e-5)


def test_autoregressive_mode_is_causal(model: Any, ids: torch.Tensor) -> None:
    model.config.dlm_paradigm = "autoregressive"
    earlier = torch.ones(40, 40, dtype=torch.bool).tril().expand(2, -1, -1)
    expect(model, ids, earlier)
    far = 100 + torch.arange(40).expand(2, -1) * 2  # beyond 8 * 16 positions at the end
    expect(model, ids, earlier, position_ids=far)
    real = torch.ones_like(ids)
    real[0, :7] = 0
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    expected = reference(TENSORS, SHORT, ids, earlier & real.bool()[:, None], positions)[real.bool()]
    with torch.no_grad():
        logits = model(ids, attention_mask=real, position_ids=positions).logits[real.bool()]
    torch.testing.assert_close(logits.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_block_sees_itself_and_a_causal_prefix(model: Any, ids: torch.Tensor) -> None:
    """The published sampler's pass: the prefix's logits are the autoregressive ones, the block's see all of both."""
    mask = causal_mask(torch.ones_like(ids), draft_start=24)
    allowed = torch.ones(40, 40, dtype=torch.bool).tril()
    allowed[24:, 24:] = True
    expect(model, ids, allowed.expand(2, -1, -1), attention_mask=mask)
    with torch.no_grad():
        both = model(ids, attention_mask=mask).logits
        model.config.dlm_paradigm = "autoregressive"
        torch.testing.assert_close(both[:, :24], model(ids[:, :24]).logits, atol=1e-5, rtol=0)


def test_the_training_mode_asks_for_its_mask(model: Any, ids: torch.Tensor) -> None:
    model.config.dlm_paradigm = "block_diff"
    with refused(SettingError, "attention_mask"):
        model(ids)
    expect(model, ids, torch.ones(2, 40, 40, dtype=torch.bool), attention_mask=torch.ones(2, 1, 40, 40).bool())


def test_what_the_body_cannot_do_is_refused(tmp_path: Path) -> None:
    for key, value in (("dlm_paradigm", "prefix"), ("sliding_window", 128), ("mlp_bias", True)):
        with refused(CheckpointError, "config.json", key):
            CASE.load(CASE.write(tmp_path / key, **{key: value}))
