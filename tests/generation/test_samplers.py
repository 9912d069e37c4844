"""What all samplers share: rows do not depend on their batch, stopping, seeds, and no mask token ever comes out."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from dlm_bridge.errors import SettingError
from dlm_bridge.generation import SAMPLERS, generate
from dlm_bridge.registration import registered
from tests.conftest import EXTRA_SAMPLERS
from tests.generation.standin import MASK, StandIn, family, ragged
from tests.refusals import refused

BLOCK = {"block_size": 4}
# Each sampler on a model that it runs on, and settings that exercise it.
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "llada": (family(algorithm="llada"), {}, {"block_length": 6}),
    "llada-random": (family(algorithm="llada"), {}, {"block_length": 6, "remasking": "random"}),
    "llada-threshold": (family(shift=True, algorithm="llada"), {}, {"block_length": 6, "threshold": 0.4}),
    "llada-factor": (family(algorithm="llada"), {}, {"block_length": 6, "factor": 1.0}),
    "difflm": (family(algorithm="difflm"), {}, {"block_length": 6, "top_p": 0.9}),
    "illada": (family(algorithm="illada"), {}, {"block_length": 4, "cfg_scale": 0.5}),
    "mdlm": (family(algorithm="mdlm"), {}, {"block_length": 5, "steps": 7}),
    "bd3lm": (family(name="a2d_qwen3", algorithm="bd3lm"), {}, {"block_length": 5, "cfg_scale": 0.5}),
    "dream-origin": (family(shift=True, algorithm="dream"), {}, {"steps": 8}),
    "dream-entropy": (family(shift=True, algorithm="dream"), {}, {"steps": 8, "alg": "entropy", "top_p": 0.9}),
    "dream-ranked": (family(shift=True, algorithm="dream"), {}, {"steps": 8, "alg": "maskgit_plus", "alg_temp": 0.3}),
    "diffullama": (family(shift=True, algorithm="diffullama"), {}, {"steps": 6}),
    "rnd1": (family(shift=True, algorithm="rnd1"), {}, {"steps": 6, "top_k": 5}),
    "rnd1-bounded": (family(shift=True, algorithm="rnd1"), {}, {"steps": 6, "eb_gamma": 0.5}),
    "sdar": (family("block_causal", algorithm="sdar"), BLOCK, {"top_k": 8, "top_p": 0.9}),
    "sdar-entropy": (family("block_causal", algorithm="sdar"), BLOCK, {"remasking_strategy": "entropy_bounded"}),
    "llada2": (family("block_causal", algorithm="llada2"), BLOCK, {"threshold": 0.4}),
    "llada2.1": (family("block_causal", algorithm="llada2.1"), BLOCK, {"threshold": 0.4, "editing_threshold": 0.2}),
    "llada2.2": (
        family("block_causal", algorithm="llada2.2"),
        BLOCK,
        {"threshold": 0.4, "editing_threshold": 0.2, "delete_token_id": 5, "split_token_id": 17},
    ),
    "fast_dllm_v2": (family("block_causal", shift=True, algorithm="fast_dllm_v2"), BLOCK, {"small_block_size": 2}),
    "nemotron": (family(name="nemotron_labs_diffusion", algorithm="nemotron"), BLOCK, {"threshold": 0.4}),
    "linear_spec": (family(name="nemotron_labs_diffusion", algorithm="linear_spec"), BLOCK, {}),
    "linear_spec-threshold": (
        family(name="nemotron_labs_diffusion", algorithm="linear_spec"),
        BLOCK,
        {"threshold": 0.4, "top_k": 8},
    ),
    "uniform": (family(algorithm="uniform"), {}, {"steps": 5}),
    "uniform-bounded": (family(algorithm="uniform"), {}, {"steps": 5, "resampling": "entropy_bound"}),
    "dream_block": (
        family(name="dream", shift=True, algorithm="dream_block"),
        {},
        {"block_length": 4, "threshold": 0.5},
    ),
    "dream_block-entropy": (
        family(name="dream", shift=True, algorithm="dream_block"),
        {},
        {"block_length": 4, "alg": "entropy", "steps": 30, "alg_temp": 0.3},
    ),
    "dreamon": (
        family(name="dreamon", shift=True, algorithm="dreamon"),
        {},  # of one length: test_dreamon.py has the others
        {"number_of_mask": 12, "expand_token_id": 44, "delete_token_id": 45, "suppress_tokens": [44, 45]},
    ),
    "hierarchical": (family(algorithm="hierarchical"), {}, {"block_length": 6, "threshold": 0.5}),
    "hierarchical-blocks": (family("block_causal", algorithm="hierarchical"), BLOCK, {"threshold": 0.5}),
    "credit-blocks": (family("block_causal", algorithm="credit"), BLOCK, {"threshold": 0.5}),
    "multi_bd": (
        family("block_causal", algorithm="multi_bd"),
        BLOCK,
        {"buffer_size": 3, "threshold": 0.3, "semi_complete_threshold": 0.5},
    ),
    "dmax": (
        family("block_causal", algorithm="dmax"),
        BLOCK,
        {"threshold": 0.3, "block_add_threshold": 0.5},
    ),
    "multi_block": (family(shift=True, algorithm="multi_block"), {}, {"block_length": 4, "entropy_threshold": 1.0}),
    "wino": (family(algorithm="wino"), {}, {"block_length": 6, "threshold": 0.1, "threshold_back": 0.5}),
    "credit": (family(shift=True, algorithm="credit"), {}, {"block_length": 6, "threshold": 0.5}),
    "idlm": (
        family("causal", shift=True, name="idlm", algorithm="idlm"),
        {},
        {"block_length": 4, "top_k": 8, "top_p": 0.9},
    ),
    "wedlm": (family("causal", algorithm="wedlm"), {}, {"wedlm_window_size": 5, "wedlm_entropy_threshold": 2.0}),
}


# Where every sampler shows the same, `make test` has these, of every way to commit, cache and draft.
FAST = (
    "credit-blocks", "dream-ranked", "dreamon", "idlm", "linear_spec-threshold", "llada", "llada-random", "llada2.1",
    "llada2.2", "multi_block", "nemotron", "sdar", "uniform", "wedlm",
)  # fmt: skip


def build(name: str) -> tuple[StandIn, dict[str, Any]]:
    facts, config, arguments = CASES[name]
    return StandIn(facts, **config), {"gen_length": 12, "temperature": 0.8, **arguments}


@pytest.mark.extension("extra_samplers")
def test_every_sampler_has_a_case() -> None:
    assert {facts.sampler["algorithm"] for facts, _, _ in CASES.values()} == set(SAMPLERS)
    assert {*EXTRA_SAMPLERS} == {*registered("samplers")}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.fast(*FAST)
def test_a_row_in_a_ragged_batch_equals_the_row_alone(name: str) -> None:
    model, arguments = build(name)
    rows, ids, mask = ragged((5, 9, 2, 9))
    for more in ({"temperature": 0.0, "seed": 1}, {"seed": 1}):
        together = generate(model, ids, attention_mask=mask, eos_token_id=None, **arguments | more)
        assert together.shape == (4, 21)
        for row, line in zip(rows, together, strict=True):
            alone = generate(model, torch.tensor([row]), eos_token_id=None, **arguments | more)
            assert torch.equal(line[9 - len(row) :], alone[0])
    other = generate(model, ids, attention_mask=mask, eos_token_id=None, **arguments, seed=2)
    assert not torch.equal(other, together)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("rnd1")])
@pytest.mark.fast(*FAST)
def test_stopping_changes_nothing_before_the_end(name: str) -> None:
    model, arguments = build(name)
    _, ids, mask = ragged((5, 9, 2, 8))
    full = generate(model, ids, attention_mask=mask, eos_token_id=None, seed=3, **arguments)
    ends = full[[0, 1], [12, 15]].tolist()  # tokens that end two rows, or more, early
    output = generate(
        model, ids, attention_mask=mask, eos_token_id=ends, pad_token_id=0, seed=3, return_dict_in_generate=True,
        **arguments,
    )  # fmt: skip
    expected = []
    for row in full[:, 9:].tolist():
        stop = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
        expected.append(row[: stop + 1])
    width = max(map(len, expected))
    assert output.sequences[:, 9:].tolist() == [row + [0] * (width - len(row)) for row in expected]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.fast(*FAST)
def test_the_mask_token_is_never_emitted(name: str) -> None:
    model, arguments = build(name)
    model.head[:, MASK] = 3 * model.head[:, 1]  # where token 1 is likely, the mask token is likelier
    _, ids, mask = ragged((5, 9))
    for more in ({}, {"temperature": 0.0}):
        output = generate(model, ids, attention_mask=mask, eos_token_id=None, seed=0, **arguments | more)
        assert output.shape == (2, 21)
        assert not (output == MASK).any()


def test_where_a_filter_leaves_the_mask_token_alone_the_next_best_token_is_taken() -> None:
    model = StandIn(family("block_causal", algorithm="sdar"), **BLOCK)
    model.head[:, MASK] = 0.0
    model.head[:, :MASK] = 0.0
    output = generate(model, torch.tensor([[1, 2]]), gen_length=64, top_k=1, eos_token_id=None, seed=0)
    assert not (output == MASK).any()


@pytest.mark.parametrize("steps", [1, 4, 9])
def test_origin_reveals_at_the_published_rates(steps: int) -> None:
    """With n masks, step k reveals 1 - s / t of what is left: the number revealed by step k is n * (1 - t_k)."""
    model = StandIn(family(shift=True, algorithm="dream"))
    seen: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(int((kwargs["input_ids"] == MASK).sum())), with_kwargs=True
    )
    generator = torch.Generator().manual_seed(0)
    generate(model, torch.ones(1, 1).long(), gen_length=2000, steps=steps, generator=generator, eos_token_id=None)
    assert len(seen) == steps
    for step, masked in enumerate(seen):
        level = 1 - step / steps * (1 - 1e-3)
        assert abs(masked - 2000 * level) < 5 * (2000 * level * (1 - level)) ** 0.5 + 1e-6


def test_steps_that_reveal_nothing_cost_no_forward() -> None:
    model = StandIn(family(shift=True, algorithm="dream"))
    for alg in ("origin", "entropy"):
        output = generate(
            model, torch.ones(1, 1).long(), gen_length=4, steps=500, alg=alg, return_dict_in_generate=True, seed=0,
            eos_token_id=None,
        )  # fmt: skip
        assert output.forwards <= 4


def test_alg_temp_draws_positions_by_their_confidence() -> None:
    """At a high alg_temp every position is as likely to come first; at a low one the most confident always does."""
    model = StandIn(family(algorithm="dream"))
    first: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: (
            first.append(int((kwargs["input_ids"][0, 1:] != MASK).int().argmax()))
            if (kwargs["input_ids"] == MASK).sum() == 3
            else None
        ),
        with_kwargs=True,
    )

    def draw(alg_temp: float | None) -> list[int]:
        first.clear()
        for seed in range(60):
            generate(
                model, torch.ones(1, 1).long(), gen_length=4, steps=4, alg="maskgit_plus", alg_temp=alg_temp,
                seed=seed, eos_token_id=None,
            )  # fmt: skip
        return list(first)

    ranked = draw(None)
    assert len(set(ranked)) == 1
    assert draw(1e-4) == ranked
    assert set(draw(100.0)) == {0, 1, 2, 3}


@pytest.mark.extension("extra_samplers")
def test_llada21_rewrites_what_it_has_committed_and_llada2_does_not() -> None:
    rewritten = {"llada2": 0, "llada2.1": 0}
    for algorithm in rewritten:
        model = StandIn(family("block_causal", algorithm=algorithm), **BLOCK)
        canvases: list[list[int]] = []
        model.register_forward_pre_hook(
            lambda _, args, kwargs, seen=canvases: seen.append(kwargs["input_ids"][0].tolist()), with_kwargs=True
        )
        more = {"editing_threshold": 0.1} if algorithm == "llada2.1" else {}
        generate(model, torch.tensor([[1, 2, 3]]), gen_length=9, threshold=0.3, eos_token_id=None, **more)
        for before, after in pairwise(canvases):
            assert before[:3] == after[:3] == [1, 2, 3]
            rewritten[algorithm] += sum(a != b for a, b in zip(before, after, strict=False) if a != MASK)
    assert rewritten["llada2"] == 0
    assert rewritten["llada2.1"] > 0


def test_a_block_causal_prompt_keeps_its_blocks_from_the_first_token() -> None:
    """The ragged end of a prompt shares the first block with new tokens, whatever stands beside it in the batch."""
    model = StandIn(family("block_causal", algorithm="sdar"), **BLOCK)
    masks: list[torch.Tensor] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: masks.append(kwargs["attention_mask"][:, 0]), with_kwargs=True
    )
    _, ids, mask = ragged((6, 9))
    generate(model, ids, attention_mask=mask, gen_length=1, temperature=0.0, eos_token_id=None)
    # Six tokens: blocks of 4 and 2; nine: 4, 4 and 1. The last blocks share the columns 8 to 11.
    seen = masks[0][0]
    assert seen.shape == (12, 12)
    assert seen[4, 4:].tolist() == [True] * 4 + [False] * 4
    assert seen[11].tolist() == [False] * 4 + [True] * 8
    assert masks[0][1][3].tolist() == [True] * 4 + [False] * 8


@pytest.mark.parametrize(
    ("name", "arguments", "field", "named"),
    [
        ("sdar", {"algorithm": "llada"}, "algorithm", "bidirectional"),
        ("wedlm", {"algorithm": "sdar"}, "algorithm", "block_causal"),
        ("sdar", {"algorithm": "wedlm"}, "algorithm", "causal unshifted"),
        ("sdar", {"block_size": 4, "block_length": 8}, "block_size", "block_length=8"),
        ("sdar", {"cfg_scale": 1.0}, "cfg_scale", "sdar"),
        ("sdar", {"denoising_steps": 0}, "denoising_steps", "0"),
        ("sdar", {"remasking_strategy": "random"}, "remasking_strategy", "low_confidence_dynamic"),
        ("fast_dllm_v2", {"small_block_size": 3}, "small_block_size", "block_length=4"),
        ("fast_dllm_v2", {"use_block_cache": True}, "use_block_cache", "cache=dual"),
        ("nemotron", {"gen_length": 10, "block_length": 4}, "gen_length", "8 or 12"),
        ("dream-origin", {"alg_temp": 0.5}, "alg_temp", "alg=origin"),
        ("dream-entropy", {"threshold": 0.5}, "threshold", "alg=confidence_threshold"),
        ("dream-origin", {"alg": "confidence_threshold", "steps": 5}, "steps", "gen_length=12"),
        ("rnd1", {"eos_token_id": 99}, "eos_token_id", "99"),
    ],
)
def test_what_a_sampler_cannot_do_is_refused(name: str, arguments: dict[str, Any], field: str, named: str) -> None:
    model, _ = build(name)
    with refused(SettingError, field, named) as error:
        generate(model, torch.tensor([[1, 2]]), **{"gen_length": 12, **CASES[name][2], **arguments})
    assert "\n" not in str(error.value)


def test_none_turns_off_what_can_be_off() -> None:
    model = StandIn(family(name="nemotron_labs_diffusion", algorithm="nemotron"), **BLOCK)
    arguments = {"gen_length": 12, "eos_token_id": None, "return_dict_in_generate": True}
    slow = generate(model, torch.tensor([[1, 2]]), threshold=None, **arguments)
    fast = generate(model, torch.tensor([[1, 2]]), threshold=0.0, **arguments)
    assert (slow.forwards, fast.forwards) == (12, 6)  # three seeds, and three steps or one for each block
