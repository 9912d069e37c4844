"""Sampled and scored: the gradient is that of the expected reward, likelihoods are what they claim, rewards rise."""

from __future__ import annotations

import dataclasses
import io
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from transformers import AutoModelForCausalLM

from dlm_bridge.generation import batch_size
from dlm_bridge.generation.batch_size import plan_batch
from dlm_bridge.generation.offline import open_engine
from dlm_bridge.generation.request import Engine
from dlm_bridge.train.rl import rollout
from dlm_bridge.train.rl.likelihood import NEVER_COMMITTED, LikelihoodQuery, Sequences, blockwise, one_step
from dlm_bridge.train.rl.reward_worker import RewardScores
from dlm_bridge.train.rl.rollout import Rollouts, group_advantages
from dlm_bridge.train.rl.rows import Problem
from dlm_bridge.train.rl.trainer import target_logps
from dlm_bridge.train.rl.updates import policy_loss, token_weights
from tests.families.sdar import CASES as SDAR
from tests.rl.conftest import Run, letters, write_llada

PROMPT, NEW = [2, 3], 2


def sequences_of(completions: list[tuple[int, ...]], prompt: list[int] = PROMPT) -> Sequences:
    tokens = torch.tensor([[*prompt, *completion] for completion in completions])
    is_prompt = torch.zeros_like(tokens, dtype=torch.bool)
    is_prompt[:, : len(prompt)] = True
    return Sequences(tokens, is_prompt, ~is_prompt, ~is_prompt, torch.full_like(tokens, NEVER_COMMITTED))


@pytest.mark.parametrize("reward", [0.1, 0.7, 16777.1])
def test_equal_rewards_have_no_advantage(reward: float) -> None:
    for scaled in (False, True):
        found = group_advantages(torch.tensor([reward] * 7 + [1.0] * 6 + [0.0]), 7, scaled)
        assert torch.equal(found[:7], torch.zeros(7))
        assert found[7:].ne(0).all()


def token_logps(model: Any, *queries: LikelihoodQuery) -> torch.Tensor:
    return torch.stack([query.per_token(target_logps(model, query.noisy)) for query in queries]).sum(dim=0)


def reward_of(completion: tuple[int, ...]) -> float:
    """Not a sum over positions: tokens matter together."""
    return float(completion[0] == completion[1]) + 0.3 * completion[1]


@pytest.fixture
def small(tmp_path: Path) -> Any:
    """Three tokens beside the mask, which has no probability, as in the sampler; no token ends a row."""
    folder = write_llada(tmp_path / "small", vocabulary=4)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).double()
    model.lm_head.register_forward_hook(lambda module, args, output: output.index_fill(-1, torch.tensor([1]), -1e9))
    return model


def exact_gradient(model: Any) -> tuple[torch.Tensor, list[tuple[int, ...]], torch.Tensor]:
    """The gradient of the expected reward over all completions, those, and their probabilities: by one forward on
    the masked canvas, without any of the code under test."""
    canvas = torch.tensor([[*PROMPT, 1, 1]])
    logps = model(input_ids=canvas).logits[0, 2:].log_softmax(-1)
    completions = list(itertools.product([0, 2, 3], repeat=NEW))
    probabilities = torch.stack([(logps[0, a] + logps[1, b]).exp() for a, b in completions])
    expected = (probabilities * torch.tensor([reward_of(one) for one in completions])).sum()
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients]), completions, probabilities.detach()


def flat_gradient(model: Any) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_the_gradient_is_that_of_the_expected_reward(small: Any) -> None:
    """Over all pairs of completions, weighed by their probability: the loss is the mean over NEW tokens, and centring
    on a group of 2 leaves half."""
    exact, completions, probabilities = exact_gradient(small)
    assert torch.allclose(probabilities.sum(), torch.tensor(1.0, dtype=torch.float64))
    small.zero_grad()
    rewards = [reward_of(one) for one in completions]
    pairs = list(itertools.product(range(len(completions)), repeat=2))
    rows = [completions[place] for pair in pairs for place in pair]
    advantages = group_advantages(torch.tensor([rewards[place] for pair in pairs for place in pair]), 2, scaled=False)
    weights = torch.stack([probabilities[a] * probabilities[b] for a, b in pairs]).repeat_interleave(2)
    sequences = sequences_of(rows)
    logps = token_logps(small, one_step(small, sequences, 0, 1, list(range(len(rows))), 0.0))
    loss, _ = policy_loss(
        logps.double(),
        logps.detach().double(),
        None,
        (weights * advantages)[:, None],
        token_weights(sequences.scored, "rows"),
        0.2,
        0.0,
    )
    loss.backward()
    assert torch.allclose(flat_gradient(small), -exact * (1 - 1 / 2) / NEW * 2, atol=1e-6)


def test_rollouts_follow_the_likelihood(small: Any) -> None:
    """Sampled in one step, completions come from the distribution that the estimate is of: the mean gradient of many
    is the exact one."""
    exact, _, _ = exact_gradient(small)
    small.zero_grad()

    class Exact:
        functions: tuple[Any, ...] = ()

        def __call__(self, prompts: Any, completions: Any, rows: Any) -> RewardScores:
            found = [tuple(0 if letter == "_" else "ab".index(letter) + 2 for letter in text) for text in completions]
            return RewardScores([reward_of(one) for one in found], {}, 0)

    class Letters:
        def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool) -> list[str]:
            return ["".join("_?ab"[token] for token in row) for row in rows]

    sampler = {"steps": 1, "eos_token_id": None}
    rollouts = Rollouts(Letters(), Exact(), 0, 8, NEW, 1.0, sampler)  # type: ignore[arg-type]
    small.config.eos_token_id = None
    small.generation_config.eos_token_id = None
    problem = Problem("ab", "ab", PROMPT, {}, "")
    rollout = rollouts.sample(small, [problem] * 800, step=1, first=0)
    logps = token_logps(small, one_step(small, rollout.sequences, 0, 1, rollout.samples, 0.0)).double()
    weights = token_weights(rollout.sequences.scored, "rows")
    loss, _ = policy_loss(logps, logps.detach(), None, rollout.advantages[:, None], weights, 0.2, 0.0)
    (loss / len(rollout)).backward()
    found, wanted = flat_gradient(small), -exact * (1 - 1 / 8) / NEW
    assert torch.cosine_similarity(found, wanted, dim=0) > 0.98
    assert (found - wanted).norm() < 0.2 * wanted.norm()


def test_one_step_is_the_masked_canvas(policy: Any) -> None:
    """With prompt tokens hidden by the keyed noise, the same again for the same key, with or without other rows."""
    sequences = sequences_of([(4, 5), (6, 7), (4, 4)])
    query = one_step(policy, sequences, 3, 1, [5, 6, 7], 0.5)
    hidden = query.noisy.input_ids == 1
    assert hidden[:, 2:].all()
    assert 0 < hidden[:, :2].sum() < 6
    logps = policy(input_ids=query.noisy.input_ids).logits.log_softmax(-1)
    wanted = logps[:, 2:].gather(-1, sequences.tokens[:, 2:, None])[..., 0]
    found = token_logps(policy, query)
    assert torch.allclose(found[:, 2:], wanted, atol=1e-5)
    assert (found[:, :2] == 0).all()
    alone = one_step(policy, sequences.rows(slice(1, 2)), 3, 1, [6], 0.5)
    assert torch.equal(alone.noisy.input_ids[0], query.noisy.input_ids[1])
    other = one_step(policy, sequences, 3, 2, [5, 6, 7], 0.5)
    assert not torch.equal(other.noisy.input_ids, query.noisy.input_ids)


def test_blockwise_of_a_bidirectional_model(policy: Any) -> None:
    """A completion of five that ends at its fourth token, committed in the order 2, 5, 1 and 4, 3: two forwards at a
    time, by a forward of the model for each two."""
    completion = (4, 5, 6, 0, 7)
    whole = sequences_of([completion])
    scored, order = whole.scored.clone(), whole.order.clone()
    scored[0, -1] = False
    order[0, 2:] = torch.tensor([3, 1, 4, 3, 2])
    found = token_logps(policy, *blockwise(policy, dataclasses.replace(whole, scored=scored, order=order), 2))[0]
    for canvas, places in (([1, 1, 1, 1, 1], [1]), ([1, 5, 1, 1, 7], [0, 2, 3])):
        logps = policy(input_ids=torch.tensor([[*PROMPT, *canvas]])).logits[0].log_softmax(-1)
        for place in places:
            assert torch.allclose(found[2 + place], logps[2 + place, completion[place]], atol=1e-5)
    assert found[-1] == 0


@torch.no_grad()
def test_single_forwards_are_what_was_drawn(policy: Any) -> None:
    """Of prompts of several lengths: each token's likelihood is that of the canvas that its own forward looked at, by
    the sampler's history."""
    prompts = [[2, 3], [4], [5, 6, 7]]
    problems = [Problem("", "", prompt, {}, "") for prompt in prompts]

    class Unjudged:
        functions: tuple[Any, ...] = ()

        def __call__(self, prompts: Any, completions: Any, rows: Any) -> RewardScores:
            return RewardScores([0.0] * len(rows), {}, 0)

    rollouts = Rollouts(letters(), Unjudged(), 5, 2, 6, 1.0, {"steps": 3})  # type: ignore[arg-type]
    rollout = rollouts.sample(policy, problems, step=1, first=0)
    sequences = rollout.sequences
    found = token_logps(policy, *blockwise(policy, sequences, 1))
    for row in range(6):
        prompt = prompts[row // 2]
        begin, length = len(prompt), int(sequences.scored[row].sum())
        tokens, order = sequences.tokens[row, begin : begin + 6], sequences.order[row, begin : begin + 6]
        assert sorted(order.tolist()) == [1, 1, 2, 2, 3, 3]
        for place in range(length):
            canvas = torch.where(order < order[place], tokens, 1)
            logps = policy(input_ids=torch.tensor([[*prompt, *canvas.tolist()]])).logits[0].log_softmax(-1)
            assert torch.allclose(found[row, begin + place], logps[begin + place, tokens[place]], atol=1e-5)


def test_as_many_rows_are_sampled_at_once_as_free_memory_holds(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unjudged:
        functions: tuple[Any, ...] = ()

        def __call__(self, prompts: Any, completions: Any, rows: Any) -> RewardScores:
            return RewardScores([0.0] * len(rows), {}, 0)

    def watched(*given: Any, max_rows: int, **more: Any) -> Engine:
        sizes.append(max_rows)
        return open_engine(*given, max_rows=max_rows, **more)

    monkeypatch.setattr(rollout, "open_engine", watched)
    problems, sizes, found = [Problem("", "", [2, 3, 4 + n], {}, "") for n in range(4)], list[int](), []
    row = plan_batch(policy, [3], {"gen_length": 6, "steps": 3}, diffusion=True).row
    for free, asked in ((2**40, None), (4 * row, None), (2**40, 2)):
        monkeypatch.setattr(batch_size, "free_memory", lambda device, free=free: free)
        rollouts = Rollouts(letters(), Unjudged(), 5, 2, 6, 1.0, {"steps": 3}, asked)  # type: ignore[arg-type]
        found.append(rollouts.sample(policy, problems, step=1, first=0).sequences.tokens)
    assert sizes == [8, 3, 2]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_blockwise_of_a_block_causal_model(tmp_path: Path) -> None:
    """SDAR in blocks of four, of which the prompt fills one and a half: each block behind clean ones, by the family's
    own attention in a forward for each."""
    case = SDAR[0]
    model = case.load(case.write(tmp_path / "sdar", mask_token_id=127), dtype=torch.float32)
    prompt, completion = [5, 6, 7, 8, 9, 10], (11, 12, 13, 14, 15, 16)
    sequences = sequences_of([completion], prompt)
    found = token_logps(model, *blockwise(model, sequences, 99))[0]
    tokens = sequences.tokens[0]
    for first, last in ((4, 8), (8, 12)):
        canvas = tokens[:last].clone()
        canvas[max(first, len(prompt)) :] = 127
        logps = model(input_ids=canvas[None]).logits[0].log_softmax(-1)
        for place in range(max(first, len(prompt)), last):
            assert torch.allclose(found[place], logps[place, tokens[place]], atol=1e-4)


def test_the_loss_by_hand() -> None:
    """Two rows of two and one tokens: clipped upwards, not clipped downwards, and the KL term."""
    old = torch.tensor([[-1.0, -2.0], [-1.0, 0.0]])
    new = (old + torch.tensor([[0.5, -0.1], [0.5, 0.0]])).requires_grad_()
    scored = torch.tensor([[True, True], [True, False]])
    reference = old - 0.3
    advantages = torch.tensor([[2.0], [-1.0]])
    loss, measured = policy_loss(new, old, reference, advantages, token_weights(scored, "rows"), 0.2, 0.1)
    e = torch.tensor([0.5, -0.1, 0.5]).exp()
    away = torch.tensor([-0.8, -0.2, -0.8])
    kl = away.exp() - away - 1
    rows = (-2 * 1.2 - 2 * e[1]) / 2 + e[2] + 0.1 * ((kl[0] + kl[1]) / 2 + kl[2])
    assert torch.allclose(loss, rows)
    assert measured["clipped"] == 1
    assert torch.allclose(measured["kl"], (kl[0] + kl[1]) / 2 + kl[2])
    over_tokens, _ = policy_loss(new, old, reference, advantages, token_weights(scored, "tokens"), 0.2, 0.1)
    assert torch.allclose(over_tokens, -2 * 1.2 - 2 * e[1] + e[2] + 0.1 * kl.sum())


def test_d1_s_mean_over_tokens(run: Run, tmp_path: Path, policy_folder: Path) -> None:
    """`--rl-normalisation tokens` divides by the step's tokens, however it is cut into micro-batches."""
    # The completions end early: their lengths differ, and with them the two means.
    changes = {"steps": 1, "generation": ["threshold=0.0"], "gen_length": 6, "beta": 0.0, "updates": 2}
    rows = run(tmp_path / "rows", **changes)[0]
    tokens = run(tmp_path / "tokens", **changes, rl_normalisation="tokens")[0]
    cut = run(tmp_path / "cut", **changes, rl_normalisation="tokens", micro_batch_size=8)[0]
    assert rows["completion_length"] == tokens["completion_length"] < 6
    assert abs(rows["grad_norm"] - tokens["grad_norm"]) > 1e-3
    assert cut["grad_norm"] == pytest.approx(tokens["grad_norm"], abs=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="diffu"),
        pytest.param(
            {"updates": 2, "beta": 0.01, "micro_batch_size": 8}, id="several-updates", marks=pytest.mark.slow
        ),
        pytest.param({"method": "block-grpo", "trace_steps": 2}, id="block"),
    ],
)
@pytest.mark.fast("diffu")
def test_the_reward_rises(run: Run, tmp_path: Path, problems: Path, changes: dict[str, Any]) -> None:
    settings = {"steps": 25, "beta": 0.0, "eval_data": [str(problems)], "eval_interval": 25, **changes}
    rows = run(tmp_path, **settings)
    assert rows[0]["reward"] < 0.35
    assert rows[-1]["reward"] > 0.8
    assert rows[-1]["eval_reward"] > 0.9
    assert (rows[-1]["kl"] is not None) == ("updates" in changes)


@pytest.mark.parametrize(("score", "steps", "count"), [("1.0", 12, 1), ("1.0", 2, 1), ("i % 2", 11, 0)])
def test_a_run_whose_rewards_are_all_equal_warns_once(
    run: Run, tmp_path: Path, score: str, steps: int, count: int
) -> None:
    (tmp_path / "score.py").write_text(
        f"def score(prompts, texts, rows):\n    return [{score} for i in range(len(texts))]"
    )
    console = Console(file=io.StringIO(), width=80)
    rows = run(tmp_path / "run", console=console, steps=steps, reward=[f"{tmp_path}/score.py:score"], gen_length=1)
    assert [row["idle_groups"] for row in rows] == [float(count > 0)] * steps
    assert console.file.getvalue().count("idle_groups") == count  # type: ignore[attr-defined]


def test_a_resume_goes_on_as_if_nothing_had_been(run: Run, tmp_path: Path) -> None:
    changes = {"updates": 2, "beta": 0.05, "save_interval": 2}
    whole = run(tmp_path / "whole", **changes)
    run(tmp_path / "cut", **changes, steps=2)
    resumed = run(tmp_path / "cut", resume=True, **changes)

    def kept(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        assert all(row["seconds"].keys() == {"transfer", "rollout", "update"} for row in rows)
        timed = ("tokens_per_s", "tokens_per_s_per_device", "seconds")
        return [{key: value for key, value in row.items() if key not in timed} for row in rows]

    assert kept(resumed) == kept(whole)
    folders = [tmp_path / name / "checkpoints" / "step-0000004" for name in ("whole", "cut")]
    one, other = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_letters() -> None:
    """What the tests above take for granted of their tokenizer."""
    assert letters()("ab")["input_ids"] == PROMPT
    assert letters().decode([2, 3, 0], skip_special_tokens=True) == "ab"


def test_an_adapter_learns_and_the_base_stays(run: Run, tmp_path: Path, policy_folder: Path) -> None:
    """The reference is the base without its adapter, held in memory once; a resume goes on with the adapter."""
    changes = {"lora_rank": 4, "lr": 3e-2, "beta": 0.01, "save_interval": 10}
    whole = run(tmp_path / "whole", **changes, steps=20)
    assert whole[0]["kl"] == 0
    assert whole[-1]["kl"] > 0
    assert whole[-1]["reward"] > whole[0]["reward"] + 0.3
    run(tmp_path / "cut", **changes, steps=10)
    resumed = run(tmp_path / "cut", resume=True, **changes, steps=20)
    for key in ("reward", "kl", "loss"):
        assert [row[key] for row in resumed] == [row[key] for row in whole]
    folder = tmp_path / "whole" / "checkpoints" / "step-0000020"
    base = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folder)
    found = model.generate(torch.tensor([PROMPT]), gen_length=4, temperature=0.0)
    assert letters().decode(found[0, 2:], skip_special_tokens=True).count("c") >= 3
