"""--z-loss-coeff: the mean squared log-sum-exp of the logits by the dense formula, in the output layer and in runs.

Layouts and both engines: test_megatron.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge.errors import SettingError
from dlm_bridge.objectives import linear_cross_entropy as output_layer
from dlm_bridge.objectives.linear_cross_entropy import LossPositions, VocabShard, linear_cross_entropy
from dlm_bridge.objectives.losses import Certainty, NoisePositions, position_losses
from dlm_bridge.train.accelerate import transforms
from dlm_bridge.train.config import TrainConfig
from tests.refusals import refused
from tests.train.conftest import Run

MASK, VOCAB = 11, 12
COEFF = 0.3


def _positions(rows: int, kind: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any, LossPositions]:
    """Hidden states, weight and loss positions in two terms, every seventh one padding."""
    generator = torch.Generator().manual_seed(rows)
    hidden, weight = (torch.randn(size, 8, generator=generator).to(device, dtype) for size in (rows, VOCAB))
    targets = torch.randint(0, MASK, (rows,), generator=generator).to(device)
    real = (torch.arange(rows) % 7 != 3).to(device)
    weights = torch.rand(rows, generator=generator).to(device) * real / rows
    noise = None
    if kind == "random tokens":
        tokens, ratio, spread = targets.roll(1), torch.rand(rows, generator=generator), torch.rand(rows)
        noise = NoisePositions(tokens, ratio.to(device), spread.to(device) / VOCAB, MASK)
    return (
        hidden,
        weight,
        LossPositions(
            torch.arange(rows, device=device),
            targets,
            weights,
            torch.arange(rows, device=device) % 2,
            2,
            noise,
            Certainty(2.0, 0.5) if kind == "certainty" else None,
            COEFF * real / real.sum(),
        ),
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["cross-entropy", "certainty", "random tokens"])
@pytest.mark.parametrize("rows", [20, 100])  # more than it keeps gradients of logits for
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_the_fused_output_layer_has_the_dense_formula(
    rows: int, kind: str, device: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_layer, "CHUNK_BYTES", 4 * VOCAB * 9)  # nine rows at a time
    hidden, weight, positions = _positions(rows, kind, torch.device(device), dtype)
    mine, own = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss, sums = linear_cross_entropy(mine, own, positions, VocabShard(0, VOCAB))
    loss.backward()
    h, w = (value.detach().double().requires_grad_() for value in (hidden, weight))
    logits = h @ w.T
    plain = position_losses(logits, positions.targets, positions.noise, positions.certainty) * positions.weights
    seen = logits[:, :MASK] if kind == "random tokens" else logits  # the mask token is never predicted
    squares = seen.exp().sum(1).log() ** 2
    z_loss = COEFF * squares[positions.weights != 0].mean()
    (plain.sum() + z_loss).backward()
    wanted = torch.stack([plain[0::2].sum(), plain[1::2].sum(), z_loss]).detach()
    torch.testing.assert_close(sums.double(), wanted, rtol=1e-4, atol=1e-6)
    assert loss.item() == pytest.approx(wanted.sum().item(), rel=1e-4)
    for found, expected in ((mine.grad, h.grad), (own.grad, w.grad)):
        assert found is not None
        assert expected is not None
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance * float(expected.abs().max()))
    with torch.no_grad():
        alone, without = (
            linear_cross_entropy(hidden, weight, each, VocabShard(0, VOCAB))
            for each in (positions, replace(positions, z_weights=None))
        )
    torch.testing.assert_close(alone[1], sums)
    torch.testing.assert_close(without[1], sums[:2])


def test_a_run_adds_the_mean_over_the_loss_positions_of_the_batch(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the micro-batches; the loss and the validation loss stay what they are without it."""
    found: list[torch.Tensor] = []
    original = transforms.linear_cross_entropy

    def watched(hidden: Any, weight: Any, positions: LossPositions, shard: VocabShard) -> Any:
        if positions.z_weights is not None:
            squares = (hidden.detach() @ weight.detach().T).logsumexp(1) ** 2
            found.append(squares[positions.weights != 0])
        return original(hidden, weight, positions, shard)

    monkeypatch.setattr(transforms, "linear_cross_entropy", watched)
    options: dict[str, Any] = {"steps": 1, "eval_interval": 1, "save_interval": 0, "lr": 0.0}
    (plain,) = run(tmp_path / "plain", **options)
    assert not found
    (whole,) = run(tmp_path / "whole", z_loss_coeff=COEFF, **options)
    assert whole["z_loss"] == pytest.approx(COEFF * float(torch.cat(found).mean()), rel=1e-5)
    (cut,) = run(tmp_path / "cut", z_loss_coeff=COEFF, micro_batch_size=2, **options)
    assert cut["z_loss"] == pytest.approx(whole["z_loss"], rel=1e-5)
    assert cut["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-5)
    assert whole["grad_norm"] != plain["grad_norm"]
    assert (whole["loss"], whole["eval_loss"]) == pytest.approx((plain["loss"], plain["eval_loss"]), rel=1e-6)
    assert "z_loss" not in plain


def test_a_weight_below_zero_is_refused() -> None:
    with refused(SettingError, "z_loss_coeff", "at least 0"):
        TrainConfig.from_flags(model="m", data=["d"], output="o", z_loss_coeff=-1e-4)
