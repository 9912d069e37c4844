"""TraceRL's value model: returns, advantages, loss and gradients by plain maths, checkpoints, runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from dlm_bridge.convert.manifest import check_files
from dlm_bridge.errors import SettingError
from dlm_bridge.train.checkpoints import load_state
from dlm_bridge.train.rl.likelihood import trace_block_size
from dlm_bridge.train.rl.rollout import Rollout, Rollouts
from dlm_bridge.train.rl.updates import trajectory_advantages, value_loss
from tests.refusals import refused
from tests.rl.conftest import Run
from tests.rl.test_tracerl import (
    letters_reward,  # noqa: F401  a fixture
    plain_groups,
    plain_logits,
    plain_loss,
    write_model,
)
from tests.train.test_damaged_checkpoints import flip

Values = dict[int, float]  # of a row's scored tokens, by position


def plain_advantages(
    reward: float, values: Values, step_of: dict[int, int], discount: float, gae_lambda: float
) -> tuple[Values, Values]:
    """Returns and advantages of one row as sums over the steps ahead, without a recursion."""
    steps = sorted(set(step_of.values()))
    tokens = [[place for place in values if step_of[place] == step] for step in steps]
    mean = [sum(values[place] for place in each) / len(each) for each in tokens]
    last = len(steps) - 1
    returns: Values = {}
    advantages: Values = {}
    for number, each in enumerate(tokens):
        rest = 0.0
        for ahead in range(number + 1, last + 1):
            following = mean[ahead + 1] if ahead < last else 0.0
            delta = (reward if ahead == last else 0.0) + discount * following - mean[ahead]
            rest += (discount * gae_lambda) ** (ahead - number) * delta
        for place in each:
            own = reward if number == last else 0.0
            following = mean[number + 1] if number < last else 0.0
            returns[place] = discount ** (last - number) * reward
            advantages[place] = own + discount * following - values[place] + rest
    return returns, advantages


def test_returns_and_advantages() -> None:
    """Rows of three, one and four steps in several tokens each, in no order of places."""
    torch.manual_seed(0)
    steps = torch.tensor([[-1, 2, 0, 0, 1, 2, -1], [-1, 0, 0, -1, -1, -1, -1], [3, 2, 1, 0, 0, 3, 1]])
    values, rewards = torch.randn(3, 7), torch.tensor([0.5, -2.0, 1.5])
    for discount, gae_lambda in ((1.0, 1.0), (0.9, 0.0), (0.8, 0.7)):
        returns, advantages = trajectory_advantages(rewards, values, steps, discount, gae_lambda)
        for row in range(3):
            step_of = {place: step for place, step in enumerate(steps[row].tolist()) if step >= 0}
            own = {place: float(values[row, place]) for place in step_of}
            wanted = plain_advantages(float(rewards[row]), own, step_of, discount, gae_lambda)
            for found, expected in zip((returns, advantages), wanted, strict=True):
                row_of = [expected.get(place, 0.0) for place in range(7)]
                assert found[row].tolist() == pytest.approx(row_of, abs=1e-6)
    returns, advantages = trajectory_advantages(rewards, values, steps, 1.0, 1.0)
    assert torch.allclose((advantages + values)[steps >= 0], rewards[:, None].expand(3, 7)[steps >= 0])


def test_the_loss_by_hand() -> None:
    """Within the clipping range, beyond it away from the return, and beyond it towards the return."""
    old, new = torch.zeros(1, 3), torch.tensor([[0.1, -0.5, 0.5]]).requires_grad_()
    loss = value_loss(new, old, torch.ones(1, 3), torch.tensor([[1.0, 2.0, 1.0]]), 0.2)
    assert loss.item() == pytest.approx(0.5 * (0.9**2 + 2 * 1.5**2 + 0.8**2))
    loss.backward()
    assert new.grad.tolist()[0] == pytest.approx([-0.9, -3.0, 0.0])


@pytest.mark.parametrize("family", ["sdar", pytest.param("llada", marks=pytest.mark.slow)])
def test_two_steps_by_plain_maths(
    run: Run,
    tmp_path: Path,
    letters_reward: str,  # noqa: F811
    family: str,
) -> None:
    """Loss and every gradient, of the value model and of the policy under its advantages, in two steps of two updates;
    at first all values are zero."""
    folder = write_model(tmp_path / "model", family)
    rollouts: list[Rollout] = []
    gradients: list[list[torch.Tensor]] = []
    sample, adam_step = Rollouts.sample, torch.optim.AdamW.step

    def sampling(self: Any, *arguments: Any) -> Rollout:
        rollouts.append(sample(self, *arguments))
        return rollouts[-1]

    def stepping(self: Any, *arguments: Any, **more: Any) -> Any:
        gradients.append([weight.grad.clone() for group in self.param_groups for weight in group["params"]])
        return adam_step(self, *arguments, **more)

    generation = ["steps=3", "block_length=5"] if family == "llada" else []
    options = {"model": str(folder), "steps": 2, "updates": 2, "beta": 0.05, "gen_length": 5, "seed": 3, "lr": 2e-3}
    values = {"value_model": True, "value_lr": 5e-3, "discount": 0.9, "gae_lambda": 0.8, "reward": [letters_reward]}
    batch = {"global_batch_size": 4, "group_size": 4, "micro_batch_size": 2, "clip_grad": 0.0, "trace_steps": 1}
    with mock.patch.object(Rollouts, "sample", sampling), mock.patch.object(torch.optim.AdamW, "step", stepping):
        rows = run(tmp_path / "run", method="tracerl", generation=generation, **options, **values, **batch)

    policy, critic = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    critic.lm_head = nn.Linear(critic.lm_head.in_features, 1, bias=False)
    nn.init.zeros_(critic.lm_head.weight)
    optimizers = {id(model): adam(model, lr) for model, lr in ((policy, 2e-3), (critic, 5e-3))}
    seen = iter(gradients)

    def update(model: Any, loss: torch.Tensor) -> None:
        """Compare the gradients, and step by those that the run had: Adam's first steps go by signs."""
        optimizer = optimizers[id(model)]
        optimizer.zero_grad()
        loss.backward()
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        for weight, found in zip(weights, next(seen), strict=True):
            assert (found - weight.grad).abs().max() <= 1e-3 * weight.grad.abs().max() + 1e-6, weight.shape
            weight.grad.copy_(found)
        optimizer.step()

    for step, rollout in enumerate(rollouts):
        sequences, old, step_of = rollout.sequences, [], []
        for row in range(4):
            groups = plain_groups(sequences, row, trace_block_size(policy), 1)
            with torch.no_grad():
                found = plain_logits(critic, sequences, row, 1)
            old.append({place: float(value) for place, value in found.items()})
            ordered = sorted({groups[place] for place in found})
            step_of.append({place: ordered.index(groups[place]) for place in found})
        assert all(value == 0 for value in old[0].values()) == (step == 0)
        both = [plain_advantages(float(rollout.advantages[row]), old[row], step_of[row], 0.9, 0.8) for row in range(4)]
        losses = []
        for _ in range(2):
            loss, count = torch.zeros(()), 0
            for row, (returns, _) in enumerate(both):
                new = plain_logits(critic, sequences, row, 1)
                for number in set(step_of[row].values()):
                    tokens = [place for place in new if step_of[row][place] == number]
                    count += 1
                    for place in tokens:
                        value, before, goal = new[place][0], old[row][place], returns[place]
                        near = value.clamp(before - 0.2, before + 0.2)
                        loss = loss + 0.5 * torch.maximum((value - goal) ** 2, (near - goal) ** 2) / len(tokens)
            update(critic, loss / count)
            losses.append(loss.item() / count)
        assert rows[step]["value_loss"] == pytest.approx(sum(losses) / 2, rel=1e-4)
        before, policy_losses = None, []
        for _ in range(2):
            loss, logps = plain_loss(policy, rollout, before, 1, 0.05, [advantages for _, advantages in both])
            before = before or logps
            update(policy, loss)
            policy_losses.append(loss.item())
        assert rows[step]["loss"] == pytest.approx(sum(policy_losses) / 2, abs=1e-5)
    assert next(seen, None) is None


def adam(model: nn.Module, lr: float) -> torch.optim.AdamW:
    weights = list(model.parameters())
    ordered = [weight for weight in weights if weight.dim() > 1] + [weight for weight in weights if weight.dim() == 1]
    return torch.optim.AdamW(ordered, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)


CHANGES: dict[str, Any] = {
    "method": "tracerl",
    "value_model": True,
    "value_lr": 3e-3,
    "gae_lambda": 0.9,
    "updates": 2,
    "micro_batch_size": 8,
    "generation": ["steps=2"],
    "trace_steps": 1,
}


@pytest.mark.slow
def test_the_reward_rises(run: Run, tmp_path: Path, problems: Path) -> None:
    rows = run(tmp_path, **CHANGES, steps=20, eval_data=[str(problems)], eval_interval=20)
    assert rows[0]["reward"] < 0.35
    assert rows[-1]["reward"] > 0.8
    assert rows[-1]["eval_reward"] > 0.9
    assert all(row["value_loss"] > 0 for row in rows)


@pytest.mark.slow
def test_a_resume_is_exact(run: Run, tmp_path: Path) -> None:
    """Policy, value model and both optimizers, to the last bit; the model in the checkpoint is the policy alone, and
    the value model's file is checked as the others are."""
    whole = run(tmp_path / "whole", **CHANGES, save_interval=2)
    run(tmp_path / "cut", **CHANGES, save_interval=2, steps=2)
    resumed = run(tmp_path / "cut", resume=True, **CHANGES, save_interval=2)
    for key in ("reward", "loss", "value_loss", "grad_norm", "kl", "clip_fraction"):
        assert [row[key] for row in resumed] == [row[key] for row in whole]
    one, other = (tmp_path / name / "checkpoints" / "step-0000004" for name in ("whole", "cut"))
    for name in ("model.safetensors", "value/model.safetensors"):
        found, expected = load_file(one / name), load_file(other / name)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)
    for key in ("optimizer", "value_optimizer"):
        states = [load_state(folder)[key]["state"] for folder in (one, other)]
        assert states[0].keys() == states[1].keys() != set()
        for number, moments in states[0].items():
            assert all(torch.equal(moments[name], states[1][number][name]) for name in moments)
    policy = AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32)
    assert policy.lm_head.out_features > 1
    assert not check_files(one)
    flip(one / "value" / "model.safetensors")
    assert check_files(one)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"method": "block-grpo"}, "tracerl"),
        ({"lora_rank": 2}, "an adapter"),
        ({"lora_rank": 2, "engine": "megatron"}, "an adapter"),
    ],
)
def test_what_is_refused_is_named(run: Run, tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with refused(SettingError, "value_model", named):
        run(tmp_path / "run", **{"method": "tracerl", "value_model": True, **changes})


def test_a_checkpoint_without_one_is_refused(run: Run, tmp_path: Path) -> None:
    changes = {**CHANGES, "steps": 1, "value_model": False, "value_lr": None, "gae_lambda": 1.0}
    run(tmp_path / "run", **changes)
    with refused(SettingError, "value_model", "step-0000001"):
        run(tmp_path / "run", resume=True, **{**CHANGES, "steps": 2})
