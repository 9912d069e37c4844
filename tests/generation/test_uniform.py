"""Sampling from random tokens: against transition matrices, for models with and without a mask token."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch

from dlm_bridge.errors import SettingError
from dlm_bridge.generation import generate
from dlm_bridge.generation.commit_rules import LeftToRightRule
from tests.generation.scripted import Scripted
from tests.generation.standin import MASK, VOCABULARY, StandIn, family, ragged
from tests.refusals import refused

LOGITS = torch.tensor([0.3, 1.2, -0.5, 0.9])


def no_mask(model: Any) -> Any:
    model.config.mask_token_id = None
    model.family = replace(model.family, mask_token_id=None)
    return model


def noised(keep: float, size: int) -> torch.Tensor:
    """[from, to]: a token is kept, or replaced by any."""
    return keep * torch.eye(size, dtype=torch.float64) + (1 - keep) / size


def published_posterior(x: torch.Tensor, now: int, alpha_t: float, alpha_s: float) -> torch.Tensor:
    """UDLM's equation for q(z_s | z_t, x), term by term."""
    size, z = len(x), torch.zeros_like(x)
    z[now] = 1.0
    ratio = alpha_t / alpha_s
    numerator = size * alpha_t * z * x + (ratio - alpha_t) * z + (alpha_s - alpha_t) * x
    numerator = numerator + (1 - ratio) * (1 - alpha_s) / size
    return numerator / (size * alpha_t * x[now] + 1 - alpha_t)


# Two steps are the first ones that depend on each other.
FEW_OR_MORE_STEPS = [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]


@pytest.mark.parametrize("steps", FEW_OR_MORE_STEPS)
def test_the_posterior_s_chain(steps: int) -> None:
    """A model that always predicts the same x: the distribution of the result is that of the chain."""
    x = LOGITS.double().softmax(0)
    chain = torch.full((4,), 0.25, dtype=torch.float64)
    for step in range(steps):
        alpha_t, alpha_s = step / steps, (step + 1) / steps
        rows = []
        for now in range(4):
            row = noised(alpha_t / alpha_s, 4)[:, now] * (x @ noised(alpha_s, 4))  # Bayes, over matrices
            rows.append(row / row.sum())
            assert torch.allclose(rows[-1], published_posterior(x, now, alpha_t, alpha_s))
        chain = chain @ torch.stack(rows)
    model = no_mask(Scripted(LOGITS.expand(5, 4)))
    output = generate(
        model, torch.zeros(2000, 0, dtype=torch.long), algorithm="uniform", gen_length=5, steps=steps,
        eos_token_id=None, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    counts, expected = torch.bincount(output.flatten(), minlength=4).double(), 10000 * chain
    assert float(((counts - expected) ** 2 / expected).sum()) < 21.1  # once in ten thousand, 3 degrees of freedom


@pytest.mark.parametrize("steps", FEW_OR_MORE_STEPS)
def test_the_hybrid_s_chain(steps: int) -> None:
    """GIDD's noise, of 4 tokens and a mask: each step is Bayes over matrices of the noise between two levels."""
    x = torch.cat([LOGITS.double().softmax(0), torch.zeros(1, dtype=torch.float64)])
    uniform = torch.tensor([0.25] * 4 + [0.0], dtype=torch.float64)
    mask = torch.tensor([0.0] * 4 + [1.0], dtype=torch.float64)

    def level(t: float) -> tuple[float, torch.Tensor]:
        c = 2 * 0.4 / 0.6 * (t * (1 - t)) ** 0.5
        return (1 - t) / (1 + c), (t * mask + c * uniform) / (1 + c)

    chain = mask
    for step in range(steps):
        (alpha_t, noise_t), (alpha_s, noise_s) = level(1 - step / steps), level(1 - (step + 1) / steps)
        ratio = alpha_t / alpha_s
        between = ratio * torch.eye(5, dtype=torch.float64) + (noise_t - ratio * noise_s)  # [from s, to t]
        before = alpha_s * x + noise_s
        rows = torch.stack([between[:, now] * before for now in range(5)])
        chain = chain @ (rows / rows.sum(1, keepdim=True).clamp(min=1e-300))
    model = Scripted(torch.cat([LOGITS, torch.tensor([9.0])]).expand(5, 5))  # which would rather predict a mask
    model.config.mask_token_id = 4
    output = generate(
        model, torch.zeros(2000, 0, dtype=torch.long), algorithm="uniform", p_uniform=0.4, gen_length=5, steps=steps,
        eos_token_id=None, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert chain[4] == 0
    counts, expected = torch.bincount(output.flatten(), minlength=5)[:4].double(), 10000 * chain[:4]
    assert int(counts.sum()) == 10000
    assert float(((counts - expected) ** 2 / expected).sum()) < 21.1
    with refused(SettingError, "mask_token_id"):
        generate(no_mask(model), torch.ones(1, 1).long(), algorithm="uniform", p_uniform=0.4)


def test_a_mask_token_is_no_noise() -> None:
    model = StandIn(family(algorithm="llada"))
    model.head[:, MASK] = 3 * model.head[:, 1]
    seen: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"].clone()), with_kwargs=True)
    output = generate(
        model, torch.ones(40, 1).long(), algorithm="uniform", gen_length=40, steps=3, eos_token_id=None, seed=0
    )
    counts = torch.bincount(seen[0][:, 1:].flatten(), minlength=VOCABULARY)
    assert counts[MASK] == 0
    assert counts[:MASK].min() > 10  # of 1600 among 47: every other token comes
    assert not (output == MASK).any()


@pytest.mark.parametrize("resampling", ["posterior", "entropy_bound"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_without_a_mask_token(resampling: str, temperature: float) -> None:
    model = no_mask(StandIn(family(algorithm="llada"), peak=3.0))
    rows, ids, mask = ragged((5, 9, 2))
    arguments = {
        "algorithm": "uniform", "resampling": resampling, "gen_length": 7, "steps": 6, "temperature": temperature,
        "seed": 2, "eos_token_id": None,
    }  # fmt: skip
    result = generate(model, ids, attention_mask=mask, return_dict_in_generate=True, **arguments)
    assert (result.forwards, result.sequences.shape) == (6, (3, 16))
    for row, line in zip(rows, result.sequences, strict=True):
        assert torch.equal(line[9 - len(row) :], generate(model, torch.tensor([row]), **arguments)[0])
        assert line[9 - len(row) : 9].tolist() == row


def test_the_entropy_bound_accepts_what_is_sure_and_remakes_the_rest() -> None:
    table = torch.zeros(6, 8)
    table[:3, 5] = 50.0  # sure of token 5 in the first three columns, of nothing elsewhere
    model = no_mask(Scripted(table))
    generate(
        model, torch.zeros(200, 0, dtype=torch.long), algorithm="uniform", resampling="entropy_bound", gen_length=6,
        steps=4, entropy_bound=0.1, eos_token_id=None, temperature=1.0, seed=0,
    )  # fmt: skip
    seen = [call["input_ids"] for call in model.calls]
    assert len(seen) == 4
    for before, after in pairwise(seen):
        assert (after[:, :3] == 5).all()
        # One uncertain position passes (the largest entropy does not count); the others are new noise.
        kept = (before[:, 3:] == after[:, 3:]).double().mean()
        assert abs(float(kept) - 1 / 8) < 0.06
    assert {len({*column}) for column in seen[0].T.tolist()} == {8}


def test_what_is_given_uses_none_of_the_bound() -> None:
    """Masks inside a prompt: neither padding nor the tokens around them count, so that a row is filled as alone."""
    model = StandIn(family(algorithm="llada"), peak=6.0)
    arguments = {"algorithm": "uniform", "resampling": "entropy_bound", "steps": 4, "infill": True, "temperature": 1.0}
    rows = torch.tensor([[0, 0, 0, 0, 0, 0, MASK, 7, MASK], [1, MASK, 2, 3, 4, 5, 6, 8, 9]])
    mask = torch.tensor([[0] * 6 + [1] * 3, [1] * 9])
    for seed in range(8):
        settings = {**arguments, "seed": seed, "entropy_bound": 2.0, "eos_token_id": None}
        together = generate(model, rows, attention_mask=mask, **settings)
        assert torch.equal(together[0, 6:], generate(model, rows[:1, 6:], **settings)[0])
    seen: list[torch.Tensor] = []  # of a hole beside ten tokens: it alone, whose own entropy does not count, passes
    scripted = Scripted(torch.tensor([[5.0, 5.0, 0.0, 0.0]] + [[9.0, 0.0, 0.0, 0.0]] * 10))
    scripted.register_forward_pre_hook(lambda *call: seen.append(call[2]["input_ids"][:, 0]), with_kwargs=True)
    ids = torch.tensor([[3] + [0] * 10] * 300)
    generate(scripted, ids, **arguments, entropy_bound=0.0, eos_token_id=None, seed=0)
    assert all((after < 2).double().mean() > 0.97 for after in seen[1:])  # of noise, two thirds would be


def test_pairs_of_positions_are_independent_noise() -> None:
    model = no_mask(Scripted(torch.zeros(2, 3)))
    generate(
        model, torch.zeros(3000, 0, dtype=torch.long), algorithm="uniform", gen_length=2, steps=1, eos_token_id=None,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    first = model.calls[0]["input_ids"]
    counts = {pair: int((first == torch.tensor(pair)).all(1).sum()) for pair in product(range(3), repeat=2)}
    assert all(abs(count - 3000 / 9) < 5 * (3000 / 9) ** 0.5 for count in counts.values())


@pytest.mark.parametrize(
    ("arguments", "field", "named"),
    [
        ({"algorithm": None}, "mask_token_id", "algorithm=uniform"),
        ({"infill": True}, "mask_token_id", ""),
        ({"repetition_penalty": 1.2}, "repetition_penalty", ""),
        ({"prefix_allowed_tokens_fn": lambda row, text: [1]}, "prefix_allowed_tokens_fn", ""),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size", ""),
        ({"commit_rule": LeftToRightRule()}, "commit_rule", "uniform"),
        ({"resampling": "best"}, "resampling", "posterior, entropy_bound"),
        ({"infill": True, "span_lengths": [2], "mask_token_id": 1}, "span_lengths", "uniform"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], field: str, named: str) -> None:
    model = no_mask(StandIn(family(algorithm="llada")))
    with refused(SettingError, field, named) as error:
        generate(model, torch.tensor([[1, 2, 3]]), **{"algorithm": "uniform", **arguments})
    assert "\n" not in str(error.value)
