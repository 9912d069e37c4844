"""Packed rows: a batch of different lengths runs without its padding, and each row is what it would be alone.

Packing is what happens on a GPU in half precision; here it is switched on, and attention pads the rows for itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from dlm_bridge.generation.commit_rules import SamplerContext
from dlm_bridge.generation.engine import SamplingEngine
from dlm_bridge.generation.runtime import attention, graphs, runner, varlen
from dlm_bridge.generation.runtime.varlen import (
    PackedTokens,
    attend_packed,
    attend_packed_cached,
    attend_padded,
    packed_shape,
    padded_cu_seqlens,
    write_packed,
)
from tests.families.case import FamilyCase, some_slow
from tests.generation.conftest import EOS, prompts
from tests.generation.recorded import stand_in
from tests.generation.test_batches import OperatorCount, ragged
from tests.generation.test_batching import alone, ended, requests, run
from tests.generation.test_caches import SDAR, WITH_BLOCK_CACHE, load_case, logits_of
from tests.generation.test_families import DIFFUSION

LENGTHS = (5, 1, 0, 8)
# Shifted logits, experts, guidance.
FAMILIES = ("dream", "llada_moe", "a2d_qwen3")


@pytest.fixture
def packed_calls(monkeypatch: pytest.MonkeyPatch) -> list[graphs.BodyInputs]:
    """Switches packing on; the inputs of the packed forward passes."""
    calls: list[graphs.BodyInputs] = []
    run_body = graphs.run_body

    def recording(model: Any, buffers: Any, inputs: graphs.BodyInputs) -> torch.Tensor:
        if inputs.cu_seqlens is not None:
            calls.append(inputs)
        return run_body(model, buffers, inputs)

    monkeypatch.setattr(runner, "supports_packing", lambda model: True)
    monkeypatch.setattr(runner, "MOST_TOKENS_OVER_CACHE", 1.0)
    monkeypatch.setattr(runner, "run_body", recording)
    monkeypatch.setattr(graphs, "run_body", recording)
    return calls


def packed_heads(lengths: tuple[int, ...], **options: Any) -> tuple[list[torch.Tensor], torch.Tensor, int]:
    """Queries of four heads, keys and values of two; where the rows begin, with what is added; the longest row."""
    tokens, longest = packed_shape(sum(lengths), max(lengths))
    generator = torch.Generator().manual_seed(0)
    heads = [torch.randn(1, count, tokens, 8, generator=generator).to(**options) for count in (4, 2, 2)]
    ends = torch.tensor([0, *lengths]).cumsum(0).int().to(heads[0].device)
    return heads, padded_cu_seqlens(ends, len(lengths) + 2, tokens), longest


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_stays_within_each_row(window: int | None, causal: bool) -> None:
    (query, key, value), cu_seqlens, longest = packed_heads(LENGTHS, dtype=torch.float64)
    output = attend_packed(query, key, value, cu_seqlens, longest, 0.3, window, None, causal)
    begin = 0
    for length in LENGTHS:
        own = slice(begin, begin + length)
        q, k, v = (heads[:, :, own].repeat_interleave(4 // heads.shape[1], dim=1) for heads in (query, key, value))
        place = torch.arange(length)
        allowed = place[:, None] >= place if causal else torch.ones(length, length, dtype=torch.bool)
        if window is not None:
            allowed &= (place[:, None] - place).abs() < window
        expected = scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=0.3)
        torch.testing.assert_close(output[:, own], expected.transpose(1, 2))
        begin += length
    assert output.isfinite().all()  # of added tokens, too


def kernel_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen: int,
    max_seqlen_k: int,
    *,
    scale: float | None,
) -> torch.Tensor:
    """What PyTorch documents of `varlen_attn`, row by row."""
    output = torch.zeros_like(query)
    for row in range(len(cu_seqlens) - 1):
        own, keys = slice(*cu_seqlens[row : row + 2]), slice(*cu_seqlens_k[row : row + 2])
        assert own.stop - own.start <= max_seqlen
        assert keys.stop - keys.start <= max_seqlen_k
        q, k, v = (heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1) for heads in (query, key, value))
        scores = torch.einsum("qhd,khd->hqk", q[own], k[keys]) * (query.shape[-1] ** -0.5 if scale is None else scale)
        output[own] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[keys])
    return output


@pytest.mark.parametrize("window", [None, 3])
def test_blocks_attend_to_themselves_and_those_before(window: int | None) -> None:
    (query, key, value), cu_seqlens, longest = packed_heads(LENGTHS, dtype=torch.float64)
    begins, block = (3, 0, 0, 1), 4
    blocks = torch.cat(
        [(torch.arange(length) + first) // block for first, length in zip(begins, LENGTHS, strict=True)]
    )
    blocks = torch.nn.functional.pad(blocks, (0, query.shape[2] - len(blocks)))[None]
    output = attend_packed(query, key, value, cu_seqlens, longest, 0.3, window, blocks)
    begin = 0
    for first, length in zip(begins, LENGTHS, strict=True):
        own = slice(begin, begin + length)
        q, k, v = (heads[:, :, own].repeat_interleave(4 // heads.shape[1], dim=1) for heads in (query, key, value))
        place = torch.arange(length)
        allowed = (place + first) // block <= (place[:, None] + first) // block
        if window is not None:
            allowed &= (place[:, None] - place).abs() < window
        expected = scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=0.3)
        torch.testing.assert_close(output[:, own], expected.transpose(1, 2))
        begin += length
    assert output.isfinite().all()


@pytest.mark.parametrize("on_kernel", [False, True])
def test_rows_attend_to_their_own_cached_columns(on_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if on_kernel:
        monkeypatch.setattr(varlen, "_kernel_for", lambda query: kernel_on_cpu)
    output, expected = cached_attention(torch.float64, "cpu")
    torch.testing.assert_close(output, expected)


@pytest.mark.gpu
def test_the_kernel_attends_to_cached_columns() -> None:
    output, expected = cached_attention(torch.bfloat16, "cuda")
    torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=2e-2)


def cached_attention(dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend_packed_cached` of three rows, and each row's attention to its own columns of the cache in float64."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 6, 8, generator=generator).to(device, dtype) for heads in (4, 2, 2))
    caches = torch.randn(2, 3, 2, 10, 8, generator=generator).to(device, dtype)
    counts, firsts, attended = (3, 1, 2), (2, 9, 4), (range(5), range(3, 10), range(1, 6))
    columns = [row * 10 + first + one for row, first in enumerate(firsts) for one in range(counts[row])]
    keys = [row * 10 + column for row, own in enumerate(attended) for column in own]
    ends, ends_k = (torch.tensor([0, *sizes]).cumsum(0).int().to(device) for sizes in (counts, map(len, attended)))
    places = (torch.tensor([columns], device=device), torch.tensor([keys], device=device))
    output = attend_packed_cached(query, key, value, *caches, *places, ends, 3, ends_k, 7, 0.3)
    parts, begin = [], 0
    for row, (count, first, own) in enumerate(zip(counts, firsts, attended, strict=True)):
        new = slice(begin, begin + count)
        for cache, heads in zip(caches, (key, value), strict=True):
            assert torch.equal(cache[row, :, first : first + count], heads[0, :, new])
        k, v = (cache[row, :, list(own)].double().repeat_interleave(2, dim=0)[None] for cache in caches)
        parts.append(scaled_dot_product_attention(query[:, :, new].double(), k, v, scale=0.3))
        begin += count
    return output, torch.cat(parts, dim=2).transpose(1, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_the_kernel_computes_what_padded_attention_does(window: int | None, causal: bool) -> None:
    (query, key, value), cu_seqlens, longest = packed_heads(LENGTHS, dtype=torch.bfloat16, device="cuda")
    output = attend_packed(query, key, value, cu_seqlens, longest, 0.3, window, None, causal)
    expected = attend_padded(query, key, value, cu_seqlens, longest, 0.3, window, None, causal)
    torch.testing.assert_close(output, expected, atol=2e-2, rtol=2e-2)
    assert output.isfinite().all()


def test_tokens_are_packed_in_the_order_of_rows() -> None:
    real = torch.tensor([[0, 1, 1], [0, 0, 0], [1, 1, 0]])
    rows = PackedTokens.of(real, (2, 0, 2))
    assert rows.pack(torch.arange(9).view(3, 3)).tolist() == [[1, 2, 6, 7]]
    assert rows.cu_seqlens.tolist() == [0, 2, 2, 4]
    assert rows.cu_seqlens.dtype == torch.int32
    assert rows.max_seqlen == 2
    assert rows.place[real.bool()].tolist() == [0, 1, 2, 3]
    assert rows.place.amin() >= 0


def test_few_shapes_serve_all_numbers_of_tokens() -> None:
    shapes = [packed_shape(tokens, min(tokens, 300)) for tokens in range(1, 40_000)]
    assert len(set(shapes)) < 16 * 12
    for tokens, (padded, longest) in enumerate(shapes, start=1):
        assert tokens <= padded <= max(tokens + tokens // 16 + 1, tokens + 63)
        assert longest >= max(min(tokens, 300), padded - tokens)


def test_keys_and_values_are_cached_where_their_rows_have_them() -> None:
    key, value = torch.randn(2, 1, 3, 2, 4)
    caches = torch.zeros(2, 2, 3, 6, 4)
    write_packed(key, value, caches[0], caches[1], torch.tensor([[6 * 1 + 4, 0]]))
    for cache, new in zip(caches, (key, value), strict=True):
        assert torch.equal(cache[1, :, 4], new[0, :, 0])
        assert torch.equal(cache[0, :, 0], new[0, :, 1])
        assert cache.count_nonzero() == new.numel()


@pytest.mark.parametrize("execution", ["eager", "compiled"])
@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.fast("*-eager")
def test_a_packed_row_equals_the_row_alone(
    model: Any,
    cache: str,
    execution: str,
    packed_calls: list[graphs.BodyInputs],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in(monkeypatch)
    rows, ids, mask = ragged("left")
    settings = {"gen_length": 16, "block_length": 8, "steps": 8, "eos_token_id": None, "cache": cache}
    output = model.generate(ids, attention_mask=mask, execution=execution, **settings)
    tokens = sum(row.shape[1] for row in rows) + 16 * len(rows)
    shape = tokens if execution == "eager" else packed_shape(tokens, 0)[0]
    assert {tuple(inputs.tokens.shape) for inputs in packed_calls} == {(1, shape)}
    assert len(packed_calls) >= 2
    for row, together in zip(rows, output, strict=True):
        assert torch.equal(together[9 - row.shape[1] :], model.generate(row, execution="eager", **settings)[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_rows_of_families(name: str, packed_calls: list[graphs.BodyInputs], tmp_path: Path) -> None:
    case = next(case for case in DIFFUSION if case.spec.name == name)
    model, mask = load_case(case, tmp_path)
    settings = {"gen_length": 8, "mask_token_id": mask, "pad_token_id": 0, "eos_token_id": None, "generator": None}
    settings |= {"algorithm": "llada", "cfg_scale": 0.7} if name == "a2d_qwen3" else {}
    _, ids, real = ragged("left")
    ids = ids % 40 + 4
    seeds = [torch.Generator().manual_seed(row) for row in range(len(ids))]
    output = model.generate(ids, attention_mask=real, **settings | {"generator": seeds})
    assert packed_calls
    for row, length in enumerate(real.sum(dim=1).tolist()):
        settings["generator"] = [torch.Generator().manual_seed(row)]
        own = model.generate(ids[row : row + 1, 9 - length :], **settings)[0, length:]
        assert torch.equal(output[row, 9:], own)


def test_windows_and_guidance(
    packed_calls: list[graphs.BodyInputs], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As with padding that is masked."""
    stand_in(monkeypatch)
    model, mask = load_case(next(case for case in DIFFUSION if case.spec.name == "a2d_qwen3"), tmp_path)
    _, ids, real = ragged("left")
    settings = {"attention_mask": real, "gen_length": 8, "steps": 2, "mask_token_id": mask, "pad_token_id": 0}
    settings |= {"eos_token_id": None, "algorithm": "llada", "cfg_scale": 0.7, "execution": "compiled"}

    def sample(window: int | None, packs: bool) -> torch.Tensor:
        for layer in model.model.layers:
            layer.self_attn.sliding_window = window
        monkeypatch.setattr(runner, "supports_packing", lambda model: packs)
        output: torch.Tensor = model.generate(ids % 40 + 4, **settings)
        return output

    output = sample(3, packs=True)
    assert packed_calls
    packed_calls.clear()
    assert torch.equal(sample(3, packs=False), output)
    assert not packed_calls
    assert not torch.equal(sample(None, packs=True), output)


@pytest.mark.parametrize("execution", ["eager", "compiled"])
@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.fast("*-compiled")
def test_packed_rows_enter_and_leave(
    model: Any,
    cache: str,
    execution: str,
    packed_calls: list[graphs.BodyInputs],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a cache, later steps of a block attend to each row's own cached columns."""
    stand_in(monkeypatch)
    monkeypatch.setattr(attention, "uses_kernel", lambda *_: False)
    settings = {"cache": cache, "block_length": 4, "threshold": 0.9, "eos_token_id": list(range(0, 128, 16))}
    settings["pad_token_id"] = 0
    rows = requests(6, [4, 8, 12])
    events = run(SamplingEngine(model, settings | {"execution": execution}, max_rows=3, max_length=40), rows)
    runner.release(model)
    assert {len(inputs.cu_seqlens) for inputs in packed_calls} >= ({3, 4} if execution == "eager" else set())
    assert any(inputs.attended is not None for inputs in packed_calls) == (cache != "none")
    assert any(inputs.attended is None for inputs in packed_calls)
    for row in rows:
        end = ended(events[row.name])
        assert list(end.tokens) == alone(model, row, settings)[: len(end.tokens)]


@pytest.mark.extension("extra_samplers")
@pytest.mark.parametrize("guided", [False, True])
def test_packed_rows_enter_beside_cached_blocks(
    guided: bool, packed_calls: list[graphs.BodyInputs], tmp_path: Path
) -> None:
    """Their prompts are packed, and each row then attends to its own cached blocks."""
    case = next(case for case in DIFFUSION if case.spec.name == "a2d_qwen3") if guided else SDAR
    model, mask = load_case(case, tmp_path)
    settings = {"mask_token_id": mask, "pad_token_id": 0, "eos_token_id": None, "temperature": 0.0, "cache": "block"}
    settings |= {"algorithm": "bd3lm", "block_size": 4, "cfg_scale": 0.7} if guided else {}
    rows = requests(8, [6, 8, 12])
    events = run(SamplingEngine(model, settings, max_rows=3, max_length=40), rows)
    for kind in ("blocks", "attended"):
        assert any(getattr(inputs, kind) is not None for inputs in packed_calls)
    for row in rows:
        assert list(ended(events[row.name]).tokens) == alone(model, row, settings)


@pytest.mark.parametrize("case", some_slow(WITH_BLOCK_CACHE, *(case.id for case in WITH_BLOCK_CACHE if case != SDAR)))
@pytest.mark.parametrize("cache", ["none", "block"])
def test_packed_block_causal_rows(
    case: FamilyCase,
    cache: str,
    packed_calls: list[graphs.BodyInputs],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every step's logits are those with masked padding: prompts of different lengths, and blocks behind them."""
    model, mask = load_case(case, tmp_path)
    block = model.config.block_size if case.spec.attention_pattern == "block_causal" else 8
    lengths = (1, block + 3, 2 * block)
    tokens = torch.randint(4, 60, (3, max(lengths)), generator=torch.Generator().manual_seed(5))
    real = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    settings = {"input_ids": tokens, "attention_mask": real.long(), "gen_length": 2 * block, "temperature": 0.0}
    settings |= {"mask_token_id": mask, "pad_token_id": 0, "eos_token_id": None, "cache": cache}
    settings |= {} if case.spec.attention_pattern == "block_causal" else {"block_length": block}
    found, packed = logits_of(model, monkeypatch, **settings)
    assert all(inputs.blocks is not None for inputs in packed_calls) == (cache == "none")
    assert packed_calls[0].blocks is not None
    assert packed_calls[0].tokens.shape[1] < packed_calls[0].cu_seqlens.diff().amax() * 3
    packed_calls.clear()
    monkeypatch.setattr(runner, "supports_packing", lambda model: False)
    expected, masked = logits_of(model, monkeypatch, **settings)
    assert not packed_calls
    assert torch.equal(found, expected)
    for ours, theirs in zip(packed, masked, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["wedlm", "linear_spec", "idlm"])
@pytest.mark.parametrize("cache", ["none", "block"])
@pytest.mark.fast("none-linear_spec", "block-idlm", "block-wedlm")
def test_packed_causal_rows(
    name: str, cache: str, packed_calls: list[graphs.BodyInputs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step's logits are those with masked padding: over the whole text, or the prompts and then cached
    columns."""
    family = {"wedlm": "wedlm", "linear_spec": "nemotron_labs_diffusion", "idlm": "idlm"}[name]
    model, mask = load_case(next(case for case in DIFFUSION if case.spec.name == family), tmp_path)
    tokens = torch.randint(4, 60, (3, 11), generator=torch.Generator().manual_seed(5))
    real = torch.arange(11) >= 11 - torch.tensor([3, 11, 6])[:, None]
    settings = {"input_ids": tokens, "attention_mask": real.long(), "gen_length": 14, "temperature": 0.0}
    settings |= {"mask_token_id": mask, "pad_token_id": 0, "eos_token_id": None, "cache": cache, "algorithm": name}
    settings |= {"block_length": 4} if name == "linear_spec" else {}
    found, packed = steps_of(model, monkeypatch, **settings)
    assert packed_calls
    assert all(inputs.causal and inputs.attended is None for inputs in packed_calls)
    assert len(packed_calls) == 1 or cache == "none"
    assert packed_calls[0].tokens.shape[1] < 3 * packed_calls[0].max_seqlen
    packed_calls.clear()
    monkeypatch.setattr(runner, "supports_packing", lambda model: False)
    expected, masked = steps_of(model, monkeypatch, **settings)
    assert not packed_calls
    assert torch.equal(found, expected)
    for ours, theirs in zip(packed, masked, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def steps_of(model: Any, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What `generate` returns, and the logits of each step."""
    seen: list[torch.Tensor] = []
    report = SamplerContext.report

    def recording(self: Any, rows: Any, columns: Any, logits: torch.Tensor, **named: Any) -> None:
        seen.append(logits.clone())
        report(self, rows, columns, logits, **named)

    with monkeypatch.context() as patch:
        patch.setattr(SamplerContext, "report", recording)
        return model.generate(**settings), seen


def test_recorded_block_causal_rows(
    packed_calls: list[graphs.BodyInputs], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With tokens added behind the last row, so that forward passes share a graph."""
    stand_in(monkeypatch)
    model, mask = load_case(SDAR, tmp_path)
    _, ids, real = ragged("left")
    settings = {"attention_mask": real, "gen_length": 8, "mask_token_id": mask, "pad_token_id": 0, "cache": "none"}
    settings |= {"eos_token_id": None, "temperature": 0.0}
    expected = model.generate(ids % 40 + 4, execution="eager", **settings)
    packed_calls.clear()
    assert torch.equal(model.generate(ids % 40 + 4, execution="compiled", **settings), expected)
    assert {inputs.tokens.shape[1] for inputs in packed_calls} == {64, 128}
    assert all(inputs.blocks.shape == inputs.tokens.shape for inputs in packed_calls)


def test_batches_share_a_graph(
    model: Any, packed_calls: list[graphs.BodyInputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    runner.release(model)
    settings = {"gen_length": 8, "block_length": 8, "steps": 3, "eos_token_id": None}
    for lengths in ((6, 3, 9, 1, 9), (20, 30, 30), (5, 11, 30, 14)):
        ids, real = torch.zeros(2, len(lengths), max(lengths), dtype=torch.long)
        for row, length in enumerate(lengths):
            ids[row, -length:], real[row, -length:] = prompts(1, length, seed=row), 1
        expected = model.generate(ids, attention_mask=real, execution="eager", **settings)
        found = model.generate(ids, attention_mask=real, execution="compiled", **settings)
        assert torch.equal(found, expected)
    assert len(runner._graphed_bodies[model]._recorded) == 1
    runner.release(model)


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_a_packed_steps_operators_do_not_grow_with_the_rows(
    model: Any, cache: str, packed_calls: list[graphs.BodyInputs]
) -> None:
    def operators(batch: int, steps: int) -> int:
        ids, real = torch.full((batch, 7), EOS), torch.zeros((batch, 7), dtype=torch.long)
        for row in range(batch):
            real[row, -(3 + 2 * (row % 3)) :] = 1
        with OperatorCount() as counted:
            settings = {"gen_length": 16, "block_length": 16, "steps": steps, "eos_token_id": None, "cache": cache}
            model.generate(ids, attention_mask=real, **settings)
        return counted.count

    few, many = ([operators(batch, steps) for steps in (4, 8)] for batch in (3, 9))
    assert many[1] - many[0] == few[1] - few[0]
    assert (packed_calls[-1].attended is not None) == (cache != "none")


def test_the_operators_of_packed_prompts_do_not_grow_with_the_rows(
    packed_calls: list[graphs.BodyInputs], tmp_path: Path
) -> None:
    model, mask = load_case(SDAR, tmp_path)

    def operators(batch: int, gen_length: int) -> int:
        ids, real = torch.full((batch, 7), 5), torch.zeros((batch, 7), dtype=torch.long)
        for row in range(batch):
            real[row, -(3 + 2 * (row % 3)) :] = 1
        settings = {"mask_token_id": mask, "pad_token_id": 0, "eos_token_id": None, "temperature": 0.0}
        settings |= {"remasking_strategy": "low_confidence_static", "cache": "none"}
        with OperatorCount() as counted:
            model.generate(ids, attention_mask=real, gen_length=gen_length, **settings)
        return counted.count

    block = model.config.block_size
    few, many = ([operators(batch, blocks * block) for blocks in (2, 3)] for batch in (3, 9))
    assert many[1] - many[0] == few[1] - few[0]
    assert packed_calls[-1].blocks is not None


def test_nothing_is_packed_where_the_kernel_does_not_run(model: Any) -> None:
    assert not runner.supports_packing(model)


@pytest.mark.gpu
def test_half_precision_is_packed_on_a_gpu(folder: Path) -> None:
    from tests.generation.conftest import load

    model = load(folder).to("cuda")
    assert not runner.supports_packing(model)
    assert runner.supports_packing(model.bfloat16())
