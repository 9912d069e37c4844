"""On a GPU: recorded and compiled forwards give what eager ones give, call after call, whatever happens in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge.generation.execution import runner
from tests.families.case import FamilyCase
from tests.generation.conftest import load, prompts
from tests.generation.test_caches import load_case
from tests.generation.test_families import DIFFUSION

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="records CUDA graphs")
EXECUTIONS = ("graph", "compiled")


@pytest.fixture(scope="module")
def on_gpu(folder: Path) -> Any:
    return load(folder).cuda()


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_bidirectional(on_gpu: Any, cache: str, execution: str) -> None:
    tokens = prompts(3, 9).cuda()
    real = torch.ones_like(tokens)
    real[1, :4] = 0
    for mask in (None, real):
        settings = {"attention_mask": mask, "gen_length": 32, "block_length": 8, "cache": cache, "eos_token_id": None}
        expected = on_gpu.generate(tokens, **settings, execution="eager")
        for _ in range(2):  # the second call replays what the first has recorded
            assert torch.equal(on_gpu.generate(tokens, **settings, execution=execution), expected)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", ["sdar", "fast_dllm_v2"])
def test_block_causal_rows_that_end(name: str, execution: str, tmp_path: Path) -> None:
    model, mask = load_case(next(case for case in DIFFUSION if case.spec.name == name), tmp_path)
    model.cuda()
    block = model.config.block_size
    tokens = torch.randint(4, 60, (5, block + 3), generator=torch.Generator().manual_seed(5)).cuda()
    real = torch.ones_like(tokens)
    real[0, :block], real[3, :2] = 0, 0
    settings = {"attention_mask": real, "gen_length": 4 * block, "temperature": 0.0, "mask_token_id": mask}
    settings |= {"pad_token_id": 0} | ({"small_block_size": min(block, 8)} if name == "fast_dllm_v2" else {})
    free = model.generate(tokens, **settings, eos_token_id=None, execution="eager", cache="none")
    stops = sorted({int(free[row, block + 4 + row]) for row in range(4)})  # so that rows leave one after the other
    for eos in (None, stops):
        expected = model.generate(tokens, **settings, eos_token_id=eos, execution="eager", cache="none")
        for _ in range(2):
            assert torch.equal(model.generate(tokens, **settings, eos_token_id=eos, execution=execution), expected)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_one_graph_serves_every_length(execution: str, padded: bool, tmp_path: Path) -> None:
    """Of a block, and of two where the first of them is kept; the prompt's shape comes once."""
    pytest.importorskip("triton")
    model, mask = load_case(next(case for case in DIFFUSION if case.spec.name == "llada2_moe"), tmp_path)
    model.cuda().float().set_experts_implementation("batched_mm")
    block = model.config.block_size
    tokens = prompts(3, block + 3).cuda() % 60
    real = torch.ones_like(tokens)
    real[1, : (block + 1) * padded] = 0
    settings = {"attention_mask": real, "gen_length": 5 * block, "temperature": 0.0, "mask_token_id": mask, "steps": 4}
    settings |= {"pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(tokens, **settings, execution="eager")
    for _ in range(3):
        assert torch.equal(model.generate(tokens, **settings, execution=execution), expected)
    assert 1 <= len(runner._kept_graphs[model]._recorded) <= 2
    longer = settings | {"gen_length": 6 * block}  # still in the same buffers or in larger ones
    expected = model.generate(tokens, **longer, execution="eager")
    assert torch.equal(model.generate(tokens, **longer, execution=execution), expected)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_kept_in_the_order_of_knowledge(execution: str, tmp_path: Path) -> None:
    """WeDLM: each row's keys and values have columns of their own, and rows leave one after the other."""
    model, mask = load_case(next(case for case in DIFFUSION if case.spec.topology == "causal"), tmp_path)
    model.cuda()
    tokens = torch.randint(4, 60, (5, 9), generator=torch.Generator().manual_seed(5)).cuda()
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
@pytest.mark.parametrize("case", EXPERTS, ids=lambda case: case.id)
def test_experts(case: FamilyCase, execution: str, tmp_path: Path) -> None:
    """A forward with experts is recorded: grouped products in bf16, which is the default, and batched ones in fp32.

    Grouped products of fp32 are a loop that asks the device. In bf16 queries, keys and values in one product may be
    rounded otherwise, so that near ties may fall otherwise: one step, whose tokens hardly depend on each other.
    """
    model, mask = load_case(case, tmp_path)
    model.cuda()
    block = model.config.block_size if case.spec.topology == "block_causal" else 8
    steps = {"sdar_moe": "denoising_steps"}.get(case.spec.name, "steps")
    settings = {"gen_length": block, "temperature": 0.0, "mask_token_id": mask, "pad_token_id": 0, steps: 1}
    settings |= {"eos_token_id": None} | ({} if case.spec.topology == "block_causal" else {"block_length": block})
    tokens = prompts(4, 2 * block).cuda() % 60
    for dtype, implementation, least in ((torch.float32, "batched_mm", 1.0), (torch.bfloat16, "grouped_mm", 0.75)):
        model.to(dtype).set_experts_implementation(implementation)
        expected = model.generate(tokens, **settings, execution="eager")
        for _ in range(3):  # the second call records, the third replays
            found = model.generate(tokens, **settings, execution=execution)
            assert (found == expected)[:, 2 * block :].float().mean() >= least
        assert runner._kept_graphs[model]._records
        assert len(runner._kept_graphs[model]._recorded) > 0


def test_weights_that_change(on_gpu: Any) -> None:
    """A recorded forward reads the weights where they are; where they have moved it is recorded anew."""
    tokens, settings = prompts(2, 9).cuda(), {"gen_length": 16, "block_length": 8, "eos_token_id": None}
    on_gpu.generate(tokens, **settings, execution="graph")
    weight = on_gpu.model.layers[0].mlp.down_proj.weight
    before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.mul_(-3)
        changed = on_gpu.generate(tokens, **settings, execution="eager")
        assert torch.equal(on_gpu.generate(tokens, **settings, execution="graph"), changed)
        weight.data = before.clone()
        restored = on_gpu.generate(tokens, **settings, execution="eager")
        assert torch.equal(on_gpu.generate(tokens, **settings, execution="graph"), restored)
        assert not torch.equal(changed, restored)
    finally:
        weight.data = before


def test_the_default_records_and_release_gives_back(on_gpu: Any) -> None:
    runner.release(on_gpu)
    on_gpu.generate(prompts(2, 9).cuda(), gen_length=16, block_length=8, cache="dual", eos_token_id=None)
    assert len(runner._kept_graphs[on_gpu]._recorded) > 0
    runner.release(on_gpu)
    assert on_gpu not in runner._kept_graphs
