"""Every published sampler, greedy, in a ragged batch: each row equals the row-by-row reference, token for token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dlm_bridge.generation import generate
from tests.generation import published_samplers as published
from tests.generation.scripted import Scripted
from tests.generation.standin import MASK, StandIn, family, ragged

LENGTHS = (5, 9, 1, 8)


def sample(
    model: Any, lengths: tuple[int, ...] = LENGTHS, **arguments: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """The rows' prompts, and each row's prompt with what was generated."""
    rows, ids, mask = ragged(lengths)
    arguments = {"eos_token_id": None, "temperature": 0.0, **arguments}
    output = generate(model, ids, attention_mask=mask, **arguments)
    assert isinstance(output, torch.Tensor)
    assert not (output[:, ids.shape[1] :] == MASK).any()
    width = ids.shape[1]
    return rows, [line[width - len(row) :] for row, line in zip(rows, output.tolist(), strict=True)]


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("alg", ["maskgit_plus", "topk_margin", "entropy"])
@pytest.mark.parametrize(("gen", "steps"), [(12, 12), (10, 4), (7, 30)])
@pytest.mark.fast("12-12-*", "10-4-entropy-*", "7-30-entropy-True")
def test_dream(shift: bool, alg: str, gen: int, steps: int) -> None:
    model = StandIn(family(shift=shift, algorithm="dream"))
    for filters in ({}, {"top_p": 0.9}, {"top_k": 3, "top_p": 0.95}):
        # Without a prompt a shifted model's first two tokens have the same logits: a tie.
        lengths = (5, 9, 1 if shift else 0)
        rows, found = sample(model, lengths, gen_length=gen, steps=steps, alg=alg, **filters)
        for row, line in zip(rows, found, strict=True):
            logits = published.bidirectional(model)
            assert line == published.dream(logits, row, gen, MASK, steps=steps, alg=alg, **filters)


def test_the_first_token_of_all_is_predicted_by_itself() -> None:
    model = StandIn(family(shift=True, algorithm="dream"))
    rows, found = sample(model, (4, 0, 2), gen_length=6, steps=1, alg="maskgit_plus")
    for row, line in zip(rows, found, strict=True):
        best = model(torch.tensor([row + [MASK] * 6])).logits[0].argmax(-1).tolist()
        assert line == row + (best[:1] + best[:5] if not row else best[len(row) - 1 : -1])


@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("steps", [3, 6, 12])
def test_dream_with_fast_dllm_s_threshold(threshold: float, steps: int) -> None:
    model = StandIn(family(shift=True, algorithm="dream"))
    rows, found = sample(model, gen_length=12, steps=steps, alg="confidence_threshold", threshold=threshold)
    for row, line in zip(rows, found, strict=True):
        logits = published.bidirectional(model)
        assert line == published.dream_budget(logits, row, 12, MASK, steps=steps, threshold=threshold)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize(
    "rule",
    [
        {"threshold": 0.3},
        {"threshold": 0.7},
        {"factor": 0.7},
        {"factor": 2.0},
        {"factor": 0.7, "factor_exact": True},
        {"factor": 2.0, "factor_exact": True},
    ],
)
def test_fast_dllm(shift: bool, rule: dict[str, Any]) -> None:
    model = StandIn(family(shift=shift, algorithm="llada"))
    rows, found = sample(model, gen_length=18, block_length=6, **rule)
    for row, line in zip(rows, found, strict=True):
        assert line == published.fast_dllm(published.bidirectional(model), row, 18, MASK, block=6, **rule)


def test_difflm_ranks_in_float64() -> None:
    """Two positions that bfloat16 cannot tell apart: LLaDA's code takes the first one, MegaDLMs' the surer one."""
    table = torch.zeros(2, 8, dtype=torch.bfloat16)
    table[0, 1], table[1, 2] = 8.0, 8.0
    table[0, 3] = 1.0  # costs less probability than bfloat16 shows
    for algorithm, first in (("llada", 0), ("difflm", 1)):
        result = generate(
            Scripted(table), torch.zeros(1, 0, dtype=torch.long), algorithm=algorithm, gen_length=2, eos_token_id=None,
            return_dict_in_generate=True, output_history=True,
        )  # fmt: skip
        assert result.history[0].committed[0].tolist() == [first == 0, first == 1]


@pytest.mark.parametrize("algorithm", ["mdlm", "bd3lm"])
@pytest.mark.parametrize(("gen", "block", "steps"), [(12, 4, 12), (13, 5, 7), (7, 32, 3), (9, 8, 40)])
@pytest.mark.parametrize("cfg_scale", [0.0, 1.0])
def test_dllm(algorithm: str, gen: int, block: int, steps: int, cfg_scale: float) -> None:
    model = StandIn(family(name="a2d_qwen3", algorithm=algorithm))
    rows, found = sample(model, (5, 9, 8), gen_length=gen, block_size=block, steps=steps, cfg_scale=cfg_scale)
    for row, line in zip(rows, found, strict=True):
        arguments = {"block": block, "steps": steps, "cfg_scale": cfg_scale, "causal": algorithm == "bd3lm"}
        assert line == published.dllm(model, row, gen, MASK, **arguments)


@pytest.mark.parametrize("steps", [3, 6, 9])
def test_illada_appends_blocks(steps: int) -> None:
    model = StandIn(family(algorithm="illada"))
    rows, found = sample(model, gen_length=18, block_length=6, steps=steps)
    for row, line in zip(rows, found, strict=True):
        tokens = row
        for _ in range(3):  # each block is a call of LLaDA's sampler, with all before it as the prompt
            tokens = generate(
                model, torch.tensor([tokens]), algorithm="llada", gen_length=6, block_length=6, steps=steps,
                eos_token_id=None,
            )[0].tolist()  # fmt: skip
        assert line == tokens


@pytest.mark.parametrize(
    "strategy", ["low_confidence_dynamic", "low_confidence_static", "sequential", "entropy_bounded"]
)
@pytest.mark.parametrize(("gen", "block", "steps"), [(12, 4, 4), (13, 4, 3), (9, 8, 8), (11, 6, 4)])
def test_sdar(strategy: str, gen: int, block: int, steps: int) -> None:
    model = StandIn(family("block_causal", algorithm="sdar"), block_size=4)
    for bounds in ((0.3, 1.0), (0.85, 0.35)):
        arguments = {"block_length": block, "denoising_steps": steps, "remasking_strategy": strategy}
        more = {"confidence_threshold": bounds[0], "eb_threshold": bounds[1]}
        rows, found = sample(model, gen_length=gen, **arguments, **more)
        for row, line in zip(rows, found, strict=True):
            assert line == published.sdar(
                published.block_causal(model, block), row, gen, MASK, block=block, steps=steps, strategy=strategy,
                threshold=bounds[0], bound=bounds[1],
            )  # fmt: skip


def test_sdar_with_top_k_1_is_sure_of_everything() -> None:
    model = StandIn(family("block_causal", algorithm="sdar"), block_size=4)
    rows, found = sample(model, gen_length=8, temperature=1.0, top_k=1)
    for row, line in zip(rows, found, strict=True):
        arguments = {"block": 4, "steps": 4, "strategy": "low_confidence_dynamic", "top_k": 1}
        assert line == published.sdar(published.block_causal(model, 4), row, 8, MASK, **arguments)


@pytest.mark.parametrize(("threshold", "steps"), [(0.2, 8), (0.6, 3), (0.95, 8)])
def test_llada2(threshold: float, steps: int) -> None:
    model = StandIn(family("block_causal", algorithm="llada2"), block_size=8)
    rows, found = sample(model, gen_length=14, steps=steps, threshold=threshold)
    for row, line in zip(rows, found, strict=True):
        arguments = {"block": 8, "steps": steps, "strategy": "low_confidence_dynamic", "threshold": threshold}
        assert line == published.sdar(published.block_causal(model, 8), row, 14, MASK, **arguments)


@pytest.mark.extension("extra_samplers")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("threshold", "editing", "post", "least"),
    [(0.5, 0.3, 16, 1), (0.9, 0.0, 4, 2), (0.2, 0.2, 1, 3), (0.7, 0.5, 0, 1)],
)
def test_llada21_edits(seed: int, threshold: float, editing: float, post: int, least: int) -> None:
    model = StandIn(family("block_causal", algorithm="llada2.1"), seed=seed, block_size=6)
    arguments = {"threshold": threshold, "editing_threshold": editing, "max_post_steps": post}
    rows, found = sample(model, gen_length=15, num_to_transfer=least, **arguments)
    for row, line in zip(rows, found, strict=True):
        assert line == published.llada21(
            published.block_causal(model, 6), row, 15, MASK, block=6, threshold=threshold, editing=editing, post=post,
            least=least,
        )  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("steps", "threshold", "editing", "post", "most"),
    [
        (8, 0.5, 0.0, 16, 1000),
        (3, 0.3, 0.2, 5, 1000),
        (8, 0.9, 0.0, 0, 12),
        (6, 0.2, 0.1, 1, 1000),
        (12, 0.6, 0, 9, 7),
    ],
)
@pytest.mark.fast("8-0.5-*", "3-*")
def test_llada22_deletes_and_inserts(
    seed: int, steps: int, threshold: float, editing: float, post: int, most: int
) -> None:
    """Edits, repeated results and blocks that run out of steps are common here."""
    model = StandIn(family("block_causal", algorithm="llada2.2"), seed=seed, block_size=8, peak=2.0)
    ids = {"delete_token_id": 5 + 9 * seed, "split_token_id": 17 + seed}
    model.head[:, list(ids.values())] *= 1.5  # often the best token
    arguments = {"threshold": threshold, "editing_threshold": editing, "max_post_steps": post}
    rows, found = sample(model, gen_length=21, steps=steps, max_steps_per_block=most, **arguments, **ids)
    for row, line in zip(rows, found, strict=True):
        assert line == published.llada22(
            published.block_causal(model, 8), row, 21, MASK, block=8, steps=steps, threshold=threshold,
            editing=editing, post=post, most=most, delete=ids["delete_token_id"], split=ids["split_token_id"],
        )  # fmt: skip
        assert not set(line[len(row) :]) & {MASK, *ids.values()}


@pytest.mark.parametrize("threshold", [1.0, 0.6, 0.2])
@pytest.mark.parametrize(("block", "small"), [(8, 4), (6, 2), (4, 4)])
def test_fast_dllm_v2(threshold: float, block: int, small: int) -> None:
    model = StandIn(family("block_causal", shift=True, algorithm="fast_dllm_v2"))
    rows, found = sample(
        model, (5, 9, 0, 8, 6), gen_length=15, block_size=block, small_block_size=small, threshold=threshold
    )
    for row, line in zip(rows, found, strict=True):
        logits = published.block_causal(model, block)
        expected = published.fast_dllm_v2(logits, row, 15, MASK, block=block, small=small, threshold=threshold)
        assert line == expected


@pytest.mark.parametrize("threshold", [None, 0.7, 0.2])
def test_nemotron(threshold: float | None) -> None:
    model = StandIn(family(name="nemotron_labs_diffusion", algorithm="nemotron"), block_size=5)
    rows, found = sample(model, (5, 9, 0, 8), gen_length=15, threshold=threshold)
    for row, line in zip(rows, found, strict=True):
        assert line == published.nemotron(model, row, 15, MASK, block=5, threshold=threshold)


@pytest.mark.parametrize(
    ("steps", "temperature", "gamma"), [(12, 1.0, None), (5, 0.5, None), (30, 1.0, 0.8), (4, 1.0, 0)]
)
def test_rnd1(steps: int, temperature: float, gamma: float | None) -> None:
    model = StandIn(family(shift=True, algorithm="rnd1"))
    arguments = {"num_diffusion_steps": steps, "temperature": temperature, "greedy": True, "eb_gamma": gamma}
    # Token 46 ends a text and is never generated: the last new token is padding.
    model.head[:, 46] = 0
    rows, found = sample(model, gen_length=13, eos_token_id=46, pad_token_id=45, **arguments)
    for row, line in zip(rows, found, strict=True):
        logits = published.bidirectional(model)
        expected = published.rnd1(logits, row, 13, MASK, steps=steps, temperature=temperature, pad=45, gamma=gamma)
        assert line == expected
    _, closed = sample(model, gen_length=13, eos_token_id=46, pad_token_id=45, add_eos_at_end=True, **arguments)
    assert all(line[-1] == 46 for line in closed)
    _, free = sample(model, gen_length=13, **arguments)
    assert all(len(line) == len(row) + 13 for row, line in zip(rows, free, strict=True))


@pytest.mark.parametrize(
    ("window", "threshold", "factor"), [(4, 0.4, 0.02), (16, 1.5, 0.02), (6, 2.5, 0.3), (5, None, 0.1)]
)
def test_wedlm(window: int, threshold: float | None, factor: float) -> None:
    model = StandIn(family("causal", algorithm="wedlm"))
    rows, found = sample(
        model, gen_length=13, wedlm_window_size=window, wedlm_entropy_threshold=threshold,
        wedlm_pos_penalty_factor=factor,
    )  # fmt: skip
    for row, line in zip(rows, found, strict=True):
        assert line == published.wedlm(model, row, 13, MASK, window=window, threshold=threshold, factor=factor)
