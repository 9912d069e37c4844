"""Packed rows: a batch of different lengths runs without its padding, and each row is what it would be alone.

Packing is what happens on a GPU in half precision; here it is switched on, and attention pads the rows for itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from dlm_bridge.generation.batching import ContinuousBatch
from dlm_bridge.generation.runtime import graphs, runner
from dlm_bridge.generation.runtime.varlen import (
    PackedRows,
    attend_packed,
    attend_padded,
    packed_shape,
    padded_cu_seqlens,
    supports_packing,
    write_packed,
)
from tests.generation.conftest import EOS, prompts
from tests.generation.recorded import stand_in
from tests.generation.test_batches import OperatorCount, ragged
from tests.generation.test_batching import alone, ended, requests, run
from tests.generation.test_caches import load_case
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


@pytest.mark.parametrize("window", [None, 3])
def test_attention_stays_within_each_row(window: int | None) -> None:
    (query, key, value), cu_seqlens, longest = packed_heads(LENGTHS, dtype=torch.float64)
    output = attend_packed(query, key, value, cu_seqlens, longest, 0.3, window)
    begin = 0
    for length in LENGTHS:
        own = slice(begin, begin + length)
        q, k, v = (heads[:, :, own].repeat_interleave(4 // heads.shape[1], dim=1) for heads in (query, key, value))
        place = torch.arange(length)
        near = None if window is None else (place[:, None] - place).abs() < window
        expected = scaled_dot_product_attention(q, k, v, attn_mask=near, scale=0.3)
        torch.testing.assert_close(output[:, own], expected.transpose(1, 2))
        begin += length
    assert output.isfinite().all()  # of added tokens, too


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 3])
def test_the_kernel_computes_what_padded_attention_does(window: int | None) -> None:
    (query, key, value), cu_seqlens, longest = packed_heads(LENGTHS, dtype=torch.bfloat16, device="cuda")
    output = attend_packed(query, key, value, cu_seqlens, longest, 0.3, window)
    expected = attend_padded(query, key, value, cu_seqlens, longest, 0.3, window)
    torch.testing.assert_close(output, expected, atol=2e-2, rtol=2e-2)
    assert output.isfinite().all()


def test_tokens_are_packed_in_the_order_of_rows() -> None:
    real = torch.tensor([[0, 1, 1], [0, 0, 0], [1, 1, 0]])
    rows = PackedRows.of(real, (2, 0, 2))
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


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_packed_rows_enter_and_leave(model: Any, cache: str, packed_calls: list[graphs.BodyInputs]) -> None:
    settings = {"cache": cache, "block_length": 4, "threshold": 0.01, "eos_token_id": list(range(0, 128, 16))}
    settings["pad_token_id"] = 0
    rows = requests(6, [4, 8, 12])
    events = run(ContinuousBatch(model, settings, max_rows=3, max_length=40), rows)
    assert {len(inputs.cu_seqlens) for inputs in packed_calls} > {2}
    for row in rows:
        end = ended(events[row.name])
        assert list(end.tokens) == alone(model, row, settings)[: len(end.tokens)]


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


def test_a_packed_steps_operators_do_not_grow_with_the_rows(model: Any, packed_calls: list[graphs.BodyInputs]) -> None:
    def operators(batch: int, steps: int) -> int:
        ids, real = torch.full((batch, 7), EOS), torch.zeros((batch, 7), dtype=torch.long)
        for row in range(batch):
            real[row, -(3 + 2 * (row % 3)) :] = 1
        with OperatorCount() as counted:
            settings = {"gen_length": 16, "block_length": 16, "steps": steps, "eos_token_id": None}
            model.generate(ids, attention_mask=real, **settings)
        return counted.count

    few, many = ([operators(batch, steps) for steps in (4, 8)] for batch in (3, 9))
    assert many[1] - many[0] == few[1] - few[0]
    assert packed_calls


def test_nothing_is_packed_where_the_kernel_does_not_run(model: Any) -> None:
    assert not supports_packing(model)


@pytest.mark.gpu
def test_half_precision_is_packed_on_a_gpu(folder: Path) -> None:
    from tests.generation.conftest import load

    model = load(folder).to("cuda")
    assert not supports_packing(model)
    assert supports_packing(model.bfloat16())
