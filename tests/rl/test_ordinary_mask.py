"""Rollouts of a model whose mask token is an ordinary one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dlm_bridge.loading import Placement, load_model
from dlm_bridge.train.rl.likelihood import one_step
from dlm_bridge.train.rl.reward_worker import RewardScores
from dlm_bridge.train.rl.rollout import Rollouts
from dlm_bridge.train.rl.rows import Problem
from tests.families.diffullama import write_with_ordinary_mask

THE = 257


class OneReward:
    functions: tuple[Any, ...] = ()

    def __call__(self, prompts: Any, completions: Any, rows: Any) -> RewardScores:
        return RewardScores([1.0] * len(rows), {}, 0)


def test_completions_hold_the_mask_token(tmp_path: Path) -> None:
    loaded = load_model(write_with_ordinary_mask(tmp_path / "model"), Placement("cpu"), family="diffullama")
    rollouts = Rollouts(
        loaded.tokenizer, OneReward(), seed=3, group_size=2, gen_length=8, temperature=1.0,
        sampler={"diffusion_steps": 4, "eos_token_id": None},
    )  # fmt: skip
    found = rollouts.sample(loaded.model, [Problem("the", "the", [THE, 3], {}, "")], step=1, first=0)
    tokens, completion = found.sequences.tokens, found.sequences.completion
    written = completion & (tokens == THE)
    assert written.any()
    assert (found.sequences.order[written] <= 4).all()  # each was committed in a step
    query = one_step(loaded.model, found.sequences, seed=0, draw=1, samples=[0, 1], fraction=0.0)
    assert torch.equal(query.predicted, completion)
    assert torch.equal(query.noisy.targets, tokens[completion])
