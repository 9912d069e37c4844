"""Recorded and compiled forward passes give what eager ones give, call after call, whatever happens in between.

On a GPU; on a CPU graphs are stood in for (`recorded`), and nothing is compiled.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model

from dlm_bridge.generation.engine import SamplingEngine
from dlm_bridge.generation.request import Ended, Failed, Request
from dlm_bridge.generation.runtime import graphs, runner
from dlm_bridge.job import process_group_ends
from tests.families.case import FamilyCase, some_slow
from tests.generation.conftest import load, prompts
from tests.generation.recorded import stand_in
from tests.generation.test_caches import load_case, logits_of
from tests.generation.test_families import DIFFUSION
from tests.generation.test_small_blocks import load_varied, ragged

pytestmark = pytest.mark.gpu(optional=True)
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
EXECUTIONS = ("graph", "compiled") if GPU else ("compiled",)


@pytest.fixture(autouse=True)
def graphs_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        stand_in(monkeypatch)


@pytest.fixture(scope="module")
def llada(folder: Path) -> Any:
    return load(folder).to(DEVICE)


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.fast("compiled-dual")
def test_bidirectional(llada: Any, cache: str, execution: str) -> None:
    tokens = prompts(3, 9).to(DEVICE)
    real = torch.ones_like(tokens)
    real[1, :4] = 0
    for mask in (None, real):
        settings = {"attention_mask": mask, "gen_length": 32, "block_length": 8, "cache": cache, "eos_token_id": None}
        expected = llada.generate(tokens, **settings, execution="eager")
        for _ in range(2):  # the second call replays what the first has recorded
            assert torch.equal(llada.generate(tokens, **settings, execution=execution), expected)


@pytest.mark.gpu2
def test_a_model_on_another_gpu_than_the_current_one(folder: Path) -> None:
    tokens = prompts(3, 9)
    settings = {"gen_length": 32, "block_length": 8, "eos_token_id": None}
    expected = load(folder).generate(tokens, **settings).cpu()
    model = load(folder).to("cuda:1")
    for _ in range(2):
        assert torch.equal(model.generate(tokens.to("cuda:1"), **settings, execution="graph").cpu(), expected)
    assert runner._graphed_bodies[model]._recorded
    assert torch.cuda.current_device() == 0


def test_graphs_are_gone_before_their_process_group(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for graphs that have recorded its collectives."""
    model, left = load(folder).to(DEVICE), []
    destroy = dist.destroy_process_group

    def counted() -> None:
        left.append(len(body._recorded))
        destroy()

    monkeypatch.setattr(dist, "destroy_process_group", counted)
    with process_group_ends():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        settings = {"gen_length": 32, "block_length": 8, "eos_token_id": None, "execution": EXECUTIONS[0]}
        for _ in range(2):
            model.generate(prompts(3, 9).to(DEVICE), **settings)
        body = runner._graphed_bodies[model]  # something may still refer to it
        assert body._recorded
    assert left == [0]


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_adapters_that_are_switched_between_calls(execution: str, folder: Path) -> None:
    wrapped = get_peft_model(load(folder), LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    wrapped.to(DEVICE)
    settings = {"inputs": prompts(2, 9).to(DEVICE), "gen_length": 16, "block_length": 8, "eos_token_id": None}

    def equal() -> torch.Tensor:
        expected: torch.Tensor = wrapped.generate(**settings, execution="eager")
        for _ in range(3):
            assert torch.equal(wrapped.generate(**settings, execution=execution), expected)
        return expected

    tuned = equal()
    with wrapped.disable_adapter():
        assert not torch.equal(equal(), tuned)
    wrapped.merge_adapter()
    equal()


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", ["sdar", pytest.param("fast_dllm_v2", marks=pytest.mark.slow)])
def test_block_causal_rows_that_end(name: str, execution: str, tmp_path: Path) -> None:
    model, mask = load_case(next(case for case in DIFFUSION if case.spec.name == name), tmp_path)
    model.to(DEVICE)
    block = model.config.block_size
    tokens = torch.randint(4, 60, (5, block + 3), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    real = torch.ones_like(tokens)
    real[0, :block], real[3, :2] = 0, 0
    settings = {"attention_mask": real, "gen_length": 4 * block, "temperature": 0.0, "mask_token_id": mask}
    settings |= {"pad_token_id": 0} | ({"small_block_size": block // 4} if name == "fast_dllm_v2" else {})
    free = model.generate(tokens, **settings, eos_token_id=None, execution="eager", cache="none")
    stops = sorted({int(free[row, block + 4 + row]) for row in range(4)})  # so that rows leave one after the other
    for eos in (None, stops):
        expected = model.generate(tokens, **settings, eos_token_id=eos, execution="eager", cache="none")
        for _ in range(2):
            assert torch.equal(model.generate(tokens, **settings, eos_token_id=eos, execution=execution), expected)


@pytest.mark.parametrize("lengths", [pytest.param((16,), marks=pytest.mark.slow), (13, 5, 16, 10)])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_small_blocks(lengths: tuple[int, ...], execution: str, tmp_path: Path) -> None:
    """Fast-dLLM v2's own cache: forward passes of the block, of a small block, and of rows in different small
    blocks."""
    model, mask = load_varied(tmp_path)
    model.to(DEVICE).float()  # which attends in place on a GPU
    _, tokens, real = ragged(lengths, 0)
    settings = {"inputs": tokens.to(DEVICE), "attention_mask": real.to(DEVICE), "gen_length": 40, "cache": "dual"}
    settings |= {"mask_token_id": mask, "pad_token_id": 0, "small_block_size": 4, "threshold": 0.3}
    free = model.generate(**settings, eos_token_id=None, execution="eager")
    assert not torch.equal(model.generate(**settings | {"cache": "block"}, eos_token_id=None, execution="eager"), free)
    for eos in (None, sorted({int(free[row, 20 + 6 * row]) for row in range(len(lengths))})):
        expected = model.generate(**settings, eos_token_id=eos, execution="eager")
        for _ in range(3):
            assert torch.equal(model.generate(**settings, eos_token_id=eos, execution=execution), expected)
    assert len(runner._graphed_bodies[model]._recorded) >= 2


@pytest.mark.gpu
def test_fast_dllm_v2_s_tokens_on_a_gpu_are_those_on_the_cpu(tmp_path: Path) -> None:
    """In float64, where rounding decides no token, with its `dual` cache."""
    model, mask = load_varied(tmp_path)
    _, tokens, real = ragged((13, 5, 16, 10), 0)
    settings = {"gen_length": 40, "cache": "dual", "mask_token_id": mask, "pad_token_id": 0, "eos_token_id": None}
    settings |= {"small_block_size": 4, "threshold": 0.3, "return_dict_in_generate": True}
    check_device(model, tokens, real, settings)


def check_device(model: Any, tokens: torch.Tensor, real: torch.Tensor, settings: dict[str, Any]) -> None:
    """The model's tokens on the GPU are those on the CPU, in as many forward passes."""
    expected = model.generate(tokens, attention_mask=real, **settings)
    model.to(DEVICE)
    for execution in ("eager", *EXECUTIONS):
        output = model.generate(tokens.to(DEVICE), attention_mask=real.to(DEVICE), **settings, execution=execution)
        assert torch.equal(output.sequences.cpu(), expected.sequences), execution
        assert output.forwards == expected.forwards, execution


@pytest.mark.parametrize("padded", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_one_graph_serves_every_length(execution: str, padded: bool, tmp_path: Path) -> None:
    """Of a block, and of two where the first of them is cached; the prompt's shape comes once."""
    if GPU:
        pytest.importorskip("triton")
    model, mask = load_case(next(case for case in DIFFUSION if case.spec.name == "llada2_moe"), tmp_path)
    model.to(DEVICE).float().set_experts_implementation("batched_mm")
    block = model.config.block_size
    tokens = prompts(3, block + 3).to(DEVICE) % 60
    real = torch.ones_like(tokens)
    real[1, : (block + 1) * padded] = 0
    settings = {"attention_mask": real, "gen_length": 5 * block, "temperature": 0.0, "mask_token_id": mask, "steps": 4}
    settings |= {"pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(tokens, **settings, execution="eager")
    for _ in range(3):
        assert torch.equal(model.generate(tokens, **settings, execution=execution), expected)
    assert 1 <= len(runner._graphed_bodies[model]._recorded) <= 2
    longer = settings | {"gen_length": 6 * block}  # still in the same buffers or in larger ones
    expected = model.generate(tokens, **longer, execution="eager")
    assert torch.equal(model.generate(tokens, **longer, execution=execution), expected)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_cache_of_reordered_rows(execution: str, tmp_path: Path) -> None:
    """WeDLM: each row's keys and values have columns of their own, and rows leave one after the other."""
    model, mask = load_case(next(case for case in DIFFUSION if case.spec.name == "wedlm"), tmp_path)
    model.to(DEVICE)
    tokens = torch.randint(4, 60, (5, 9), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    real = torch.ones_like(tokens)
    real[0, :8], real[3, :2] = 0, 0
    settings = {"attention_mask": real, "gen_length": 40, "temperature": 0.0, "mask_token_id": mask, "pad_token_id": 0}
    settings |= {"wedlm_entropy_threshold": 2.5, "wedlm_window_size": 6}
    free = model.generate(tokens, **settings, eos_token_id=None, execution="eager", cache="none")
    for eos in (None, sorted({int(free[row, 14 + 6 * row]) for row in range(4)})):
        expected = model.generate(tokens, **settings, eos_token_id=eos, execution="eager", cache="none")
        for _ in range(2):
            assert torch.equal(model.generate(tokens, **settings, eos_token_id=eos, execution=execution), expected)


EXPERTS = [case for case in DIFFUSION if case.spec.name in ("llada_moe", "sdar_moe", "llada2_moe")]


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("case", some_slow(EXPERTS, "llada2_moe-2.2", "llada2_moe", "sdar_moe"))
def test_experts(case: FamilyCase, execution: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward with experts is recorded: batched products in fp32, and grouped ones in bf16, which is the default.

    Two blocks of two steps: a block-causal sampler runs its prompt with the first block as it is, and records forwards
    of one block and of two. Each call's tokens are others, which a replay has to send to other experts. Grouped
    products of fp32 are a loop that asks the device.
    """
    model, mask = load_case(case, tmp_path)
    model.to(DEVICE)
    block = model.config.block_size if case.spec.attention_pattern == "block_causal" else 8
    settings = {"gen_length": 2 * block, "temperature": 0.0, "mask_token_id": mask, "pad_token_id": 0}
    settings |= {"eos_token_id": None, "execution": execution}
    settings |= {
        "llada_moe": {"block_length": block, "steps": 4},
        "llada2_moe": {"steps": 2, "threshold": 1.0},
        "sdar_moe": {"denoising_steps": 2, "remasking_strategy": "low_confidence_static"},
    }[case.spec.name]
    calls = [settings | {"inputs": prompts(4, 2 * block, seed).to(DEVICE) % 59 + 1} for seed in range(4)]

    def recorded() -> int:
        body = runner._graphed_bodies[model]
        assert body._records
        return len(body._recorded)

    kinds = 1 if case.spec.name == "llada_moe" else 2
    model.float().set_experts_implementation("batched_mm")
    for call in calls:  # the second one records, the third replays
        expected = model.generate(**call | {"execution": "eager"})
        assert torch.equal(model.generate(**call), expected)
    assert recorded() >= kinds
    # Half precision rounds a product of queries, keys and values otherwise than three, and a near tie sends a token to
    # another expert. So a replay is held against the same forward as it is, both after the same logits.
    model.bfloat16().set_experts_implementation("grouped_mm")
    with monkeypatch.context() as patch:
        patch.setattr(graphs.GraphedBody, "_record", lambda *_: None)
        expected_logits = [logits_of(model, patch, **call)[1] for call in calls]
    assert recorded() == 0
    for call, expected in zip(calls, expected_logits, strict=True):
        _, found = logits_of(model, monkeypatch, expected, **call)
        for ours, theirs in zip(found, expected, strict=True):
            errors = (ours - theirs).float().norm(dim=-1) / theirs.float().norm(dim=-1)
            assert (errors < 0.05).float().mean() > 0.75
    assert recorded() >= kinds


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_what_is_recorded_has_run_before(execution: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same sizes and strides, for any number of rows: nothing is compiled during capture."""
    model, mask = load_case(next(case for case in DIFFUSION if case.spec.name == "sdar"), tmp_path)
    model.to(DEVICE)
    run, record = graphs.run_body, graphs.GraphedBody._record
    recording, seen, recorded = False, set(), []

    def run_body(model: Any, kept: Any, inputs: graphs.BodyInputs) -> torch.Tensor:
        values = [getattr(inputs, field.name) for field in dataclasses.fields(inputs)]
        kind = tuple((one.shape, one.stride()) if isinstance(one, torch.Tensor) else one for one in values)
        if recording:
            recorded.append(kind in seen)
        seen.add(kind)
        return run(model, kept, inputs)

    def record_it(*arguments: Any) -> Any:
        nonlocal recording
        recording = True
        try:
            return record(*arguments)
        finally:
            recording = False

    monkeypatch.setattr(graphs, "run_body", run_body)
    monkeypatch.setattr(graphs.GraphedBody, "_record", record_it)
    tokens = prompts(5, 9).to(DEVICE) % 59 + 1
    real = torch.ones_like(tokens)
    real[1, :7] = 0
    settings = {"gen_length": 16, "temperature": 0.0, "mask_token_id": mask, "pad_token_id": 0, "execution": execution}
    for padding in (None, real):
        settings["attention_mask"] = padding
        free = model.generate(tokens, **settings, eos_token_id=None)
        stops = sorted({int(free[row, 9 + 2 * row]) for row in range(4)})  # so that rows leave one after the other
        for _ in range(2):
            model.generate(tokens, **settings, eos_token_id=stops)
    assert len(recorded) >= 4
    assert all(recorded)


def test_weights_that_change(llada: Any) -> None:
    """A recorded forward pass reads the weights in place; where they have moved it is recorded again."""
    tokens, settings = prompts(2, 9).to(DEVICE), {"gen_length": 16, "block_length": 8, "eos_token_id": None}
    llada.generate(tokens, **settings, execution=EXECUTIONS[0])
    weight = llada.model.layers[0].mlp.down_proj.weight
    before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.mul_(-3)
        changed = llada.generate(tokens, **settings, execution="eager")
        assert torch.equal(llada.generate(tokens, **settings, execution=EXECUTIONS[0]), changed)
        weight.data = before.clone()
        restored = llada.generate(tokens, **settings, execution="eager")
        assert torch.equal(llada.generate(tokens, **settings, execution=EXECUTIONS[0]), restored)
        assert not torch.equal(changed, restored)
    finally:
        weight.data = before


@pytest.mark.gpu  # on a CPU nothing is recorded by default
def test_the_default_records_and_release_gives_back(llada: Any) -> None:
    runner.release(llada)
    llada.generate(prompts(2, 9).to(DEVICE), gen_length=16, block_length=8, cache="dual", eos_token_id=None)
    assert len(runner._graphed_bodies[llada]._recorded) > 0
    runner.release(llada)
    assert llada not in runner._graphed_bodies


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_rows_that_fail_leave_no_nan_in_the_cache_of_the_next_ones(folder: Path, cache: str, execution: str) -> None:
    """Which may get the same buffers, and are shorter than their batch."""
    model = load(folder).to(DEVICE)
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = torch.nan
    settings = {"block_length": 8, "cache": cache, "eos_token_id": None, "suppress_tokens": [5]}
    bad = [Request(f"bad {number}", [5] * 30, 16) for number in range(2)]
    good = [Request(f"good {number}", list(range(10, 12 + 6 * number)), 16) for number in range(2)]
    batch = SamplingEngine(model, {**settings, "execution": execution}, max_rows=2, max_length=64)
    for row in (*bad, *good):
        batch.submit(row)
    ends = {}
    while not batch.idle:
        ends |= {event.name: event for event in batch.step() if isinstance(event, (Ended, Failed))}
    assert all(isinstance(ends[row.name], Failed) for row in bad)
    for row in good:
        expected = model.generate(torch.tensor([row.prompt], device=DEVICE), gen_length=16, **settings)
        assert list(ends[row.name].tokens) == expected[0, len(row.prompt) :].tolist()
