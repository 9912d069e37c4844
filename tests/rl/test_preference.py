"""VRPO: bounds are unbiased, noise that is shared leaves less variance, and chosen answers gain."""

from __future__ import annotations

import copy
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge.data.conversations import Example
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.train.rl.likelihood import bound_query
from dlm_bridge.train.rl.likelihood import bound_sums as sums_of
from dlm_bridge.train.rl.rows import PreferencePair
from dlm_bridge.train.rl.trainer import target_logps
from dlm_bridge.train.rl.updates import BoundDraws, bound_uniforms, longest, pair_rows, preference_loss
from tests.rl.conftest import Run

PROMPT, CHOSEN, REJECTED = [2, 3], [4, 4, 0], [5, 7]


def pair() -> PreferencePair:
    def example(answer: list[int]) -> Example:
        return Example(PROMPT + answer, [False] * len(PROMPT) + [True] * len(answer), "")

    return PreferencePair(example(CHOSEN), example(REJECTED), "")


def bound_sums(model: Any, noisy: NoisyBatch) -> torch.Tensor:
    return sums_of(noisy, target_logps(model, noisy))


@torch.no_grad()
def exact_bound(model: Any, answer: list[int], eps: float = 1e-3) -> float:
    """The bound over all masks, integrated over the masking probability p on [eps, 1] by Gauss' rule."""
    points, weights = torch.tensor([(0.5 * (1 + x), 0.5 * w) for x, w in _gauss()], dtype=torch.float64).T
    p = eps + (1 - eps) * points
    total = 0.0
    for mask in itertools.product([False, True], repeat=len(answer)):
        if not any(mask):
            continue
        canvas = torch.tensor(
            [[*PROMPT, *[1 if hidden else token for hidden, token in zip(mask, answer, strict=True)]]]
        )
        logps = model(input_ids=canvas).logits[0].log_softmax(-1).double()
        losses = sum(float(logps[len(PROMPT) + n, answer[n]]) for n in range(len(answer)) if mask[n])
        total += losses * float((weights * p ** (sum(mask) - 1) * (1 - p) ** (len(mask) - sum(mask))).sum())
    return total


def _gauss() -> list[tuple[float, float]]:
    import numpy as np

    return list(zip(*np.polynomial.legendre.leggauss(8), strict=True))


@torch.no_grad()
def samples(model: Any, seed: int, count: int) -> torch.Tensor:
    """[count, 2] draws of the bounds of the chosen and of the rejected answer."""
    answers = pair_rows([pair()], longest([pair()]))
    uniforms = bound_uniforms(seed, 1, [0], answers.tokens.shape[1], count, 1)
    many = [value.repeat(count, 1) for value in (answers.tokens, answers.answer, answers.real)]
    return bound_sums(model, bound_query(model, *many, uniforms)).reshape(count, 2).double()


def test_bounds_are_unbiased_and_shared_noise_has_less_variance(policy: Any) -> None:
    count = 1500
    reference = copy.deepcopy(policy)
    with torch.no_grad():
        for number, weight in enumerate(policy.parameters()):
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
            weight.add_(0.1 * weight.std() * noise)
    mine, theirs, others = samples(policy, 1, count), samples(reference, 1, count), samples(reference, 2, count)
    for found, model in ((mine, policy), (theirs, reference)):
        exact = torch.tensor([exact_bound(model, CHOSEN), exact_bound(model, REJECTED)])
        error = found.std(dim=0) / count**0.5
        assert ((found.mean(dim=0) - exact).abs() < 4 * error).all()
    shared, apart = (gain[:, 0] - gain[:, 1] for gain in (mine - theirs, mine - others))
    assert shared.var() < 0.1 * apart.var()
    assert (shared.mean() - apart.mean()).abs() < 4 * apart.std() / count**0.5


def test_masks_share_their_level() -> None:
    uniforms = bound_uniforms(7, 3, [10, 11], 6, levels=4, masks=3)
    level = uniforms.level.reshape(4, 3, 4)
    assert torch.equal(level, level[:, :1].expand(4, 3, 4))
    assert len(level[:, 0].unique()) == 16
    assert len(uniforms.token[:, 0].unique()) == 48
    alone = bound_uniforms(7, 3, [11], 6, levels=4, masks=3)
    assert torch.equal(alone.token.reshape(12, 2, 6), uniforms.token.reshape(12, 2, 2, 6)[:, :, 1])


def test_the_gradient_is_of_the_mean_bounds(policy: Any) -> None:
    """d loss / d theta = -sigmoid(-beta m) beta dm / d theta, with m of the exact draws, each forward alone."""
    reference = copy.deepcopy(policy).requires_grad_(False)
    with torch.no_grad():
        policy.lm_head.weight.mul_(1.1)
    answers = pair_rows([pair()], longest([pair()]))
    uniforms = bound_uniforms(0, 1, [0], answers.tokens.shape[1], 2, 2)
    margin: Any = 0.0
    for k in range(4):
        part = slice(2 * k, 2 * k + 2)
        drawn = {name: value for name, value in vars(uniforms).items() if value is not None}
        one = type(uniforms)(**{name: value[part] for name, value in drawn.items()})
        noisy = bound_query(policy, answers.tokens, answers.answer, answers.real, one)
        gain = bound_sums(policy, noisy) - bound_sums(reference, noisy)
        margin = margin + (gain[0] - gain[1]) / 4
    wanted = torch.autograd.grad(margin, policy.lm_head.weight)[0] * (-0.5 * torch.sigmoid(-0.5 * margin.detach()))

    draws = BoundDraws(levels=2, masks=2, seed=0)
    noisy = draws.query(policy, [pair()], [0], 1, longest([pair()]))
    found = draws.margins(noisy, target_logps(policy, noisy), target_logps(reference, noisy))
    assert torch.allclose(found, margin.detach(), atol=1e-5)
    preference_loss(found, 0.5).sum().backward()
    assert torch.allclose(policy.lm_head.weight.grad, wanted, atol=1e-5)


def test_chosen_answers_gain(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "pairs.jsonl"
    rows = [{"prompt": letter, "chosen": "cc", "rejected": "hh"} for letter in "abdefg"]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"method": "vrpo", "data": [str(data)], "eval_data": [str(data)], "eval_interval": 8, "steps": 8}
    changes |= {"global_batch_size": 4, "micro_batch_size": 2, "elbo_levels": 4, "elbo_masks": 2, "save_interval": 4}
    found = run(tmp_path / "run", **changes)
    assert found[0]["loss"] == pytest.approx(math.log(2), abs=1e-7)  # exactly: the same noise for the same model
    assert found[0]["margin"] == 0
    assert found[-1]["loss"] < 0.5
    assert found[-1]["preferred"] == 1
    assert found[-1]["eval_preferred"] == 1
    assert found[-1]["eval_loss"] < 0.5
    run(tmp_path / "cut", **{**changes, "steps": 4})
    resumed = run(tmp_path / "cut", resume=True, **changes)
    assert [row["loss"] for row in resumed] == [row["loss"] for row in found]
