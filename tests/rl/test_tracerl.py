"""TraceRL: likelihoods along the sampled trajectory, the loss and gradients of two updates by plain maths, runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from dlm_bridge.errors import SettingError
from dlm_bridge.train.rl.likelihood import (
    NEVER_COMMITTED,
    Sequences,
    step_groups,
    trace_block_size,
    trace_numbers,
    trajectory,
)
from dlm_bridge.train.rl.reward_worker import RewardScores
from dlm_bridge.train.rl.rollout import Rollout, Rollouts
from dlm_bridge.train.rl.rows import Problem
from dlm_bridge.train.rl.trainer import target_logps
from dlm_bridge.train.rl.updates import policy_loss, token_weights
from tests.families.dream import CASE as DREAM
from tests.families.dreamon import CASE as DREAMON
from tests.families.fast_dllm_v2 import CASES as FAST
from tests.families.llada2_moe import CASE as LLADA2
from tests.families.sdar import CASES as SDAR
from tests.refusals import refused
from tests.rl.conftest import Run, letters, write_llada

SPECIAL = {"mask_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}
CASES = {"sdar": SDAR[0], "llada2": LLADA2, "dream": DREAM}


def write_model(folder: Path, family: str) -> Path:
    if family == "llada":
        return write_llada(folder)
    CASES[family].write(folder, **SPECIAL)
    letters().save_pretrained(folder)
    return folder


class Unjudged:
    functions: tuple[Any, ...] = ()

    def __call__(self, prompts: Any, completions: Any, rows: Any) -> RewardScores:
        return RewardScores([0.0] * len(rows), {}, 0)


def sampled(model: Any, **sampler: Any) -> Sequences:
    """Completions of ten tokens of prompts of several lengths, by the family's own sampler."""
    problems = [Problem("", "", prompt, {}, "") for prompt in ([2, 3], [4, 5, 6, 7, 8], [5, 6, 7])]
    rollouts = Rollouts(letters(), Unjudged(), 5, 2, 10, 1.0, sampler)  # type: ignore[arg-type]
    return rollouts.sample(model, problems, step=1, first=0).sequences


def plain_groups(sequences: Sequences, row: int, size: int | None, trace_steps: int) -> dict[int, tuple[int, int]]:
    """(block, group) of each position of a row's completion."""
    blocks: dict[int, dict[int, int]] = {}
    for place in sequences.completion[row].nonzero()[:, 0].tolist():
        blocks.setdefault(place // size if size else 0, {})[place] = int(sequences.order[row, place])
    found = {}
    for block, orders in blocks.items():
        steps = sorted(set(orders.values()))
        found |= {place: (block, steps.index(order) // trace_steps) for place, order in orders.items()}
    return found


def plain_logits(model: Any, sequences: Sequences, row: int, trace_steps: int) -> dict[int, torch.Tensor]:
    """Each scored token's logits, by a forward pass of the family's own on the canvas of its group's first step: of a
    block-causal model up to the end of the block."""
    size, shift = trace_block_size(model), int(model.family.shift)
    groups, tokens = plain_groups(sequences, row, size, trace_steps), sequences.tokens[row]
    length, found = int((sequences.prompt | sequences.completion)[row].sum()), {}
    for place in sequences.scored[row].nonzero()[:, 0].tolist():
        canvas = tokens.clone()
        for other, group in groups.items():
            if group >= groups[place]:
                canvas[other] = 1
        end = min(length, (place // size + 1) * size) if size else length
        found[place] = model(input_ids=canvas[None, :end]).logits[0, place - shift]
    return found


def plain_logps(model: Any, sequences: Sequences, row: int, trace_steps: int) -> dict[int, torch.Tensor]:
    """Each scored token's log-probability."""
    found = plain_logits(model, sequences, row, trace_steps)
    return {place: logits.log_softmax(-1)[sequences.tokens[row, place]] for place, logits in found.items()}


@torch.no_grad()
@pytest.mark.parametrize("trace_steps", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "family", ["llada", "sdar", *(pytest.param(one, marks=pytest.mark.slow) for one in CASES if one != "sdar")]
)
def test_likelihoods_are_those_of_the_sampled_steps(tmp_path: Path, family: str, trace_steps: int) -> None:
    folder = write_model(tmp_path / "model", family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sampler = {"steps": 5, "block_length": 10} if family == "llada" else {"steps": 5} if family == "dream" else {}
    sequences = sampled(model, **sampler)
    queries = trajectory(model, sequences, trace_steps)
    assert len(queries) > 1
    found = sum(query.per_token(target_logps(model, query.noisy)) for query in queries)
    assert torch.equal(sum(query.predicted.int() for query in queries), sequences.scored.int())
    for row in range(len(sequences)):
        wanted = plain_logps(model, sequences, row, trace_steps)
        assert len(wanted) == sequences.scored[row].sum()
        for place, logp in wanted.items():
            assert torch.allclose(found[row, place], logp, atol=1e-4), (row, place)


def test_steps_by_hand() -> None:
    """A prompt of two tokens, a completion of six of which the fourth ends it, the last was never committed; by twos
    over the row, and one by one within blocks of four."""
    order = torch.tensor([[9, 9, 3, 7, 4, 5, 7, NEVER_COMMITTED]])
    order[:, :2] = NEVER_COMMITTED
    prompt = torch.arange(8)[None] < 2
    scored = ~prompt & (torch.arange(8)[None] < 6)
    sequences = Sequences(torch.arange(8)[None], prompt, ~prompt, scored, order)
    assert step_groups(sequences, 2, None).tolist() == [[0, 0, 0, 1, 0, 1, 1, 2]]
    assert step_groups(sequences, 1, 4).tolist() == [[0, 0, 0, 1, 0, 1, 2, 3]]
    assert trace_numbers(sequences, 2, None).tolist() == [[-1, -1, 0, 1, 0, 1, -1, -1]]
    steps = trace_numbers(sequences, 1, 4)
    assert steps.tolist() == [[-1, -1, 0, 1, 2, 3, -1, -1]]
    weights = token_weights(scored, "steps", trace_numbers(sequences, 2, None))
    assert weights.tolist() == [[0, 0, 0.5, 0.5, 0.5, 0.5, 0, 0]]


def plain_loss(
    model: Any,
    rollout: Rollout,
    old: list[dict[int, torch.Tensor]] | None,
    trace_steps: int,
    beta: float,
    advantages: list[dict[int, float]],
) -> tuple[torch.Tensor, list[dict[int, torch.Tensor]]]:
    """TraceRL's loss token by token: the mean over all aggregated steps of the mean over each one's tokens."""
    total, steps, seen = torch.zeros(()), 0, []
    for row in range(len(rollout)):
        logps = plain_logps(model, rollout.sequences, row, trace_steps)
        groups = plain_groups(rollout.sequences, row, trace_block_size(model), trace_steps)
        before = old[row] if old else {place: logp.detach() for place, logp in logps.items()}
        for step in {groups[place] for place in logps}:
            tokens = [place for place in logps if groups[place] == step]
            steps += 1
            for place in tokens:
                ratio, advantage = (logps[place] - before[place]).exp(), advantages[row][place]
                gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                away = before[place] - logps[place]
                total = total - (gain - beta * (away.exp() - 1 - away)) / len(tokens)
        seen.append({place: logp.detach() for place, logp in logps.items()})
    return total / steps, seen


@pytest.fixture
def letters_reward(tmp_path: Path) -> str:
    """Differs between most completions of a model that has learned nothing."""
    (tmp_path / "letters.py").write_text(
        "def count(prompts, completions, rows):\n"
        "    return [len(text) + 0.3 * sum(map(text.count, 'aceg')) for text in completions]\n"
    )
    return f"{tmp_path / 'letters.py'}:count"


@pytest.mark.parametrize("family", ["sdar", pytest.param("llada", marks=pytest.mark.slow)])
def test_two_updates_by_plain_maths(run: Run, tmp_path: Path, letters_reward: str, family: str) -> None:
    """Loss and every gradient of a step of two updates, in micro-batches of two rows."""
    folder = write_model(tmp_path / "model", family)
    rollouts: list[Rollout] = []
    gradients: list[list[torch.Tensor]] = []
    sample, step = Rollouts.sample, torch.optim.AdamW.step

    def sampling(self: Any, *arguments: Any) -> Rollout:
        rollouts.append(sample(self, *arguments))
        return rollouts[-1]

    def stepping(self: Any, *arguments: Any, **more: Any) -> Any:
        gradients.append([weight.grad.clone() for group in self.param_groups for weight in group["params"]])
        return step(self, *arguments, **more)

    generation = ["steps=4", "block_length=6"] if family == "llada" else []
    options = {"model": str(folder), "steps": 1, "updates": 2, "beta": 0.05, "gen_length": 6, "seed": 3, "lr": 5e-3}
    batch = {"global_batch_size": 8, "group_size": 4, "micro_batch_size": 2, "clip_grad": 0.0, "trace_steps": 2}
    with mock.patch.object(Rollouts, "sample", sampling), mock.patch.object(torch.optim.AdamW, "step", stepping):
        (row,) = run(
            tmp_path / "run", method="tracerl", generation=generation, reward=[letters_reward], **options, **batch
        )
    assert rollouts[0].advantages.abs().max() > 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trained = list(model.named_parameters())
    decaying = [weight for name, weight in trained if weight.dim() > 1]
    others = [weight for name, weight in trained if weight.dim() == 1]
    weights = decaying + others
    optimizer = torch.optim.AdamW(weights, lr=5e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    old, losses = None, []
    given = [dict.fromkeys(range(99), advantage) for advantage in rollouts[0].advantages.tolist()]
    for update in range(2):
        optimizer.zero_grad()
        loss, seen = plain_loss(model, rollouts[0], old, 2, 0.05, given)
        old = old or seen
        loss.backward()
        losses.append(loss.item())
        assert len(weights) == len(gradients[update])
        for found, weight in zip(gradients[update], weights, strict=True):
            scale = weight.grad.abs().max()
            assert (found - weight.grad).abs().max() <= 1e-3 * scale + 1e-6, (update, weight.shape)
        with torch.no_grad():
            for weight, found in zip(weights, gradients[update], strict=True):
                weight.grad.copy_(found)  # Adam's first steps go by signs
        optimizer.step()
    assert abs(losses[1]) > 1e-3
    assert row["loss"] == pytest.approx(sum(losses) / 2, abs=1e-5)
    assert row["kl"] > 0


def test_steps_weigh_the_same() -> None:
    """One step of three tokens and one of one: the loss is the sum of their means."""
    new = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    scored, steps = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[0, 0, 1, 0]])
    weights = token_weights(scored, "steps", steps)
    advantages = torch.tensor([[1.0, 2.0, 5.0, 3.0]])
    loss, _ = policy_loss(new, new, None, advantages, weights, 0.2, 0.0)
    assert loss.item() == pytest.approx(-(1 + 2 + 3) / 3 - 5)


def test_the_reward_rises(run: Run, tmp_path: Path, problems: Path) -> None:
    rows = run(
        tmp_path,
        method="tracerl",
        steps=25,
        updates=2,
        trace_steps=2,
        generation=["steps=2"],
        eval_data=[str(problems)],
        eval_interval=25,
    )
    assert rows[0]["reward"] < 0.35
    assert rows[-1]["reward"] > 0.8
    assert rows[-1]["eval_reward"] > 0.9
    assert rows[-1]["kl"] is not None


@pytest.mark.slow
def test_a_resume_is_exact(run: Run, tmp_path: Path) -> None:
    changes = {"method": "tracerl", "updates": 2, "save_interval": 2, "trace_steps": 1, "micro_batch_size": 8}
    whole = run(tmp_path / "whole", **changes)
    run(tmp_path / "cut", **changes, steps=2)
    resumed = run(tmp_path / "cut", resume=True, **changes)
    for key in ("reward", "loss", "grad_norm", "kl", "clip_fraction"):
        assert [row[key] for row in resumed] == [row[key] for row in whole]
    folders = [tmp_path / name / "checkpoints" / "step-0000004" for name in ("whole", "cut")]
    one, other = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_is_refused_is_named(run: Run, tmp_path: Path) -> None:
    with refused(SettingError, "rl_normalisation", "tracerl"):
        run(tmp_path / "run", rl_normalisation="steps")
    mask = torch.ones(1, 4, dtype=torch.bool)
    sequences = Sequences(torch.full((1, 4), 3), ~mask, mask, mask, torch.ones(1, 4, dtype=torch.int64))
    for case in (FAST[0], DREAMON):  # the second one's tokens move while it samples
        model = case.load(case.write(tmp_path / case.name, **SPECIAL), dtype=torch.float32)
        with refused(SettingError, "method", case.spec.title):
            trajectory(model, sequences, 1)
