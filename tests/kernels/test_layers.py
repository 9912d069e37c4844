"""Fused elementwise operations: the layers' own numbers in fewer launches; what computes something else is left alone.

On a GPU, or on a CPU in Triton's interpreter.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton")
pytestmark = pytest.mark.gpu(optional=True)

from dlm_bridge.convert.lora.mask_only import restrict_to_masks  # noqa: E402
from dlm_bridge.generation.runtime import runner  # noqa: E402
from dlm_bridge.generation.runtime.graphs import BodyInputs, run_body  # noqa: E402
from dlm_bridge.kernels import elementwise, layers, linear  # noqa: E402
from dlm_bridge.kernels.layers import fuse_elementwise, installed  # noqa: E402
from tests.generation.conftest import load, prompts  # noqa: E402
from tests.generation.recorded import stand_in  # noqa: E402
from tests.generation.test_batches import OperatorCount  # noqa: E402
from tests.generation.test_caches import load_case  # noqa: E402
from tests.generation.test_families import DIFFUSION  # noqa: E402
from tests.kernels.interpreted import round_to_nearest_bf16  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(layers, "_kernels", lambda device: elementwise)
        round_to_nearest_bf16(monkeypatch)


@pytest.fixture
def fresh(folder: Path) -> Any:
    return load(folder).to(DEVICE)


def kinds(replacements: list[layers.Replacement]) -> Counter[str]:
    return Counter(getattr(one.function, "__name__", type(one.function).__name__) for one in replacements)


def hidden_states(model: Any, inputs: BodyInputs) -> torch.Tensor:
    with torch.no_grad(), runner._cached_attention(model):
        return run_body(model, None, inputs).clone()


def packed_inputs(lengths: tuple[int, ...]) -> BodyInputs:
    tokens = prompts(1, sum(lengths)).to(DEVICE) % 59
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(DEVICE)
    starts = torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)
    return BodyInputs(tokens, None, positions, cu_seqlens=starts, max_seqlen=max(lengths))


# llada2_moe: one QKV projection, experts in all layers except the first. sdar_moe: experts with a softmax router.
# nemotron_labs_diffusion: attention that depends on positions in addition to the rotation.
EXPECTED = {
    "llada": {"FusedRMSNorm": 9, "FusedAttention": 4, "FusedSwiGLU": 4, "FusedLayer": 4},
    "sdar": {"FusedRMSNorm": 17, "FusedAttention": 4, "FusedSwiGLU": 4, "FusedLayer": 4},
    "llada2_moe": {
        "FusedRMSNorm": 17,
        "FusedAttention": 4,
        "FusedSwiGLU": 4,
        "FusedExperts": 3,
        "FusedRouter": 3,
        "FusedLayer": 4,
    },
    "sdar_moe": {"FusedRMSNorm": 17, "FusedAttention": 4, "FusedExperts": 4, "FusedLayer": 4},
    "nemotron_labs_diffusion": {"FusedRMSNorm": 9, "FusedSwiGLU": 4, "FusedLayer": 4},
}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.fast("llada2_moe", "llada")
def test_the_same_hidden_states(name: str, tmp_path: Path) -> None:
    model, _ = load_case(next(case for case in DIFFUSION if case.spec.name == name), tmp_path)
    model.to(DEVICE, torch.bfloat16)
    model.config._experts_implementation = "grouped_mm"  # the default on a GPU
    inputs = packed_inputs((3, 1))
    groups = linear.fuse_linear_layers(model)
    with linear.fused_layers_installed(groups):
        expected = hidden_states(model, inputs)
    replacements = fuse_elementwise(model, groups)
    assert kinds(replacements) == EXPECTED[name]
    with linear.fused_layers_installed(groups), installed(replacements):
        found = hidden_states(model, inputs)
    assert (found != expected).float().mean() < 0.05  # another order of rounding changes a third and more
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert not any({"forward", "_apply_gate"} & set(vars(module)) for module in model.modules())
    with linear.fused_layers_installed(groups):
        assert torch.equal(hidden_states(model, inputs), expected)


class Launches(OperatorCount):
    """Counts the operators that launch a kernel."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view or func is torch.ops.aten._unsafe_view.default:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_a_layer_is_nine_launches(tmp_path: Path) -> None:
    """Four products, attention, and four between them."""
    model, _ = load_case(next(case for case in DIFFUSION if case.spec.name == "sdar"), tmp_path)
    model.to(DEVICE, torch.bfloat16)
    groups = linear.fuse_linear_layers(model)
    replacements = fuse_elementwise(model, groups)

    def launches_of_a_layer() -> int:
        counts = []
        for depth in (1, 2):
            model.config.num_hidden_layers = depth
            with Launches() as counted:
                hidden_states(model, packed_inputs((2,)))
            counts.append(counted.count)
        return counts[1] - counts[0]

    with linear.fused_layers_installed(groups):
        assert launches_of_a_layer() > 40
        with installed(replacements):
            assert launches_of_a_layer() == 9


@pytest.mark.parametrize(
    ("execution", "cache", "packed"),
    [
        ("graph", "none", False),
        pytest.param("graph", "dual", False, marks=pytest.mark.slow),
        ("compiled", "none", True),
    ],
)
@pytest.mark.fast("compiled-*")
def test_graphs_run_fused_layers(
    execution: str, cache: str, packed: bool, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without a KV cache, with padded and packed rows. After the last layer's attention only the requested
    positions are computed if they are few, also with compiled layers, of which the last one is fused."""
    sums: list[tuple[int, ...]] = []
    add = layers.FusedRMSNorm.add

    def recording(self: Any, *arguments: Any) -> torch.Tensor:
        total: torch.Tensor = add(self, *arguments)
        sums.append(tuple(total.shape[:2]))
        return total

    monkeypatch.setattr(layers.FusedRMSNorm, "add", recording)
    monkeypatch.setattr(runner, "supports_packing", lambda model: packed)
    if INTERPRETED:
        stand_in(monkeypatch)
        monkeypatch.setattr(runner, "_resolve_execution", lambda model, plain, execution: execution)
    tokens = prompts(2, 4).to(DEVICE)
    real = torch.ones_like(tokens)
    real[1, :3] = 0
    settings = {"attention_mask": real, "gen_length": 4, "block_length": 2, "steps": 4, "cache": cache}
    settings |= {"eos_token_id": None}
    expected = fresh.generate(tokens, **settings, execution="eager")
    assert not sums
    assert torch.equal(fresh.generate(tokens, **settings, execution=execution), expected)
    width = 8 if INTERPRETED else 15  # on a GPU rounded up, for few shapes
    assert sums[:4] == ([(2, width), (2, width), (2, 2), (2, 2)] if execution == "graph" else [(2, 2)] * 4)
    with torch.no_grad():  # weights are read in place
        fresh.model.layers[1].post_attention_layernorm.weight.mul_(-2)
    changed = fresh.generate(tokens, **settings, execution="eager")
    assert not torch.equal(changed, expected)
    assert torch.equal(fresh.generate(tokens, **settings, execution=execution), changed)


class Doubled(nn.Module):
    """Another norm with the same attribute names."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


@pytest.mark.parametrize("norm", [Olmo2RMSNorm, Gemma3RMSNorm, Doubled])
def test_norms_that_compute_something_else(norm: Any, fresh: Any) -> None:
    """OLMo 2's norm rounds after the multiplication with the weight, Gemma's adds one to the weight."""
    model = fresh.bfloat16()
    layer = model.model.layers[0]
    before = layer.input_layernorm
    layer.input_layernorm = norm(before) if norm is Doubled else norm(len(before.weight))
    layer.input_layernorm.variance_epsilon = before.variance_epsilon
    layer.input_layernorm.to(DEVICE, torch.bfloat16)
    replaced = [one.module for one in fuse_elementwise(model, linear.fuse_linear_layers(model))]
    assert layer.input_layernorm not in replaced
    assert layer not in replaced
    assert model.model.layers[1] in replaced
    assert layer.self_attn in replaced


def test_what_is_left_alone(fresh: Any) -> None:
    first, second = fresh.model.layers
    first.post_attention_layernorm.register_forward_hook(lambda *_: None)
    first.mlp.act_fn = nn.GELU()
    second.self_attn.o_proj.register_forward_pre_hook(lambda *_: None)
    second.forward = lambda *arguments, **more: type(second).forward(second, *arguments, **more)
    replaced = [one.module for one in fuse_elementwise(fresh, linear.fuse_linear_layers(fresh))]
    for part in (first, first.post_attention_layernorm, first.mlp, second, second.self_attn):
        assert part not in replaced
    assert {first.self_attn, first.input_layernorm, second.mlp, second.input_layernorm} <= set(replaced)

    assert not fuse_elementwise(fresh.double(), [])
    with torch.autocast(DEVICE, torch.bfloat16):
        assert not fuse_elementwise(fresh.float(), [])


def test_adapters_are_left_alone(fresh: Any) -> None:
    get_peft_model(fresh, LoraConfig(target_modules=["q_proj", "up_proj", "o_proj"], init_lora_weights=False))
    fresh.bfloat16()
    groups = linear.fuse_linear_layers(fresh)
    replacements = fuse_elementwise(fresh, groups)
    assert kinds(replacements) == {"FusedRMSNorm": 5, "FusedLayer": 2}
    inputs = packed_inputs((2,))
    expected = hidden_states(fresh, inputs)
    with installed(replacements):
        torch.testing.assert_close(hidden_states(fresh, inputs), expected, rtol=2e-2, atol=2e-2)


def test_adapters_at_mask_tokens_are_fused(tmp_path: Path) -> None:
    """PEFT's own hidden states, by layers with every fused operation."""
    model, mask = load_case(next(case for case in DIFFUSION if case.spec.name == "idlm"), tmp_path)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapted = get_peft_model(model.to(DEVICE, torch.float32), LoraConfig(r=4, lora_alpha=32, target_modules=targets))
    for name, weight in adapted.eval().named_parameters():
        if ".lora_B." in name:
            weight.data.normal_(generator=torch.Generator(DEVICE).manual_seed(len(name)))
    restrict_to_masks(adapted, mask)
    tokens = torch.tensor([[5, 6, 7, mask, mask]], device=DEVICE)
    inputs = BodyInputs(tokens, None, torch.arange(5, device=DEVICE)[None])
    expected, fused = hidden_states(model, inputs), layers.Layers(model, compiled=False)
    found, count = kinds(fused._replacements), model.config.num_hidden_layers
    assert found["FusedAttention"] == found["FusedSwiGLU"] == found["FusedLayer"] == count
    assert not fused.trims  # the masks are known of whole rows
    with fused.installed():
        torch.testing.assert_close(hidden_states(model, inputs), expected, rtol=1e-4, atol=1e-4)
    fused.end()
