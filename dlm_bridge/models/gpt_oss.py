"""gpt-oss (transformers' GptOssForCausalLM): spec, mapping.

The Hub stacks the experts of a layer, transposed, with interleaved rows of gate and up. Published checkpoints store
them as MXFP4 blocks and scales, which the setting `dequantize_mxfp4` reads as bfloat16 tensors of that layout.
Megatron's names are megatron-core's: attention sinks are the offsets of its learnable softmax, and the clamped SwiGLU
is its quick GELU with an offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlm_bridge.errors import CheckpointError
from dlm_bridge.mapping.fused import stacked
from dlm_bridge.mapping.rules import Dims, Direct, GatedMLP, Mapping
from dlm_bridge.models.autoregressive import autoregressive_spec
from dlm_bridge.models.decoder_mapping import (
    ATTENTION_TARGETS,
    HUB_LAYER,
    LAYER,
    TIED_HEAD,
    attention_rules,
    decoder_dims,
    decoder_settings,
    moe_settings,
    outer_rules,
    require_values,
    routed_experts,
)

if TYPE_CHECKING:
    import torch

HUB = "model." + HUB_LAYER
ATTENTION, MLP = LAYER + "self_attention.", LAYER + "mlp."
EXPERT = MLP + "experts.experts.{expert}."


@dataclass(frozen=True)
class InterleavedGatedMLP(GatedMLP):
    """One Hub tensor with interleaved columns of gate and up, [hidden, 2 width]; or the bias, [2 width]."""

    name: str = ""
    bias: bool = False

    @property
    def hub(self) -> tuple[str, ...]:
        return (self.name,)

    def hub_shapes(self, dims: Dims) -> tuple[tuple[int, ...], ...]:
        return (self.megatron_shape(dims)[::-1],)

    def megatron_shape(self, dims: Dims) -> tuple[int, ...]:
        return super().megatron_shape(dims)[: 1 if self.bias else 2]

    def to_megatron(self, tensors: Sequence[torch.Tensor], dims: Dims) -> torch.Tensor:
        import torch

        (columns,) = tensors
        return torch.cat([columns[..., 0::2], columns[..., 1::2]], dim=-1).transpose(0, -1).contiguous()

    def to_hub(self, tensor: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, ...]:
        import torch

        gate, up = tensor.transpose(0, -1).chunk(2, dim=-1)
        return (torch.stack([gate, up], dim=-1).flatten(-2),)

    def hub_views(self, tensor: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, ...] | None:
        return None


@dataclass(frozen=True)
class Transposed(Direct):
    """One Hub tensor, the transpose of Megatron's; `shape` is Megatron's."""

    def hub_shapes(self, dims: Dims) -> tuple[tuple[int, ...], ...]:
        return (self.megatron_shape(dims)[::-1],)

    def to_megatron(self, tensors: Sequence[torch.Tensor], dims: Dims) -> torch.Tensor:
        (tensor,) = tensors
        return tensor.T.contiguous()

    def to_hub(self, tensor: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, ...]:
        return (tensor.T.contiguous(),)

    def hub_views(self, tensor: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, ...] | None:
        return None


# Defaults of transformers' config class, for keys that config.json omits.
DEFAULTS: dict[str, Any] = {
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "sliding_window": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
FACTS = frozenset({"qkv_bias"})


def dims(config: dict[str, Any]) -> Dims:
    """Sizes of gpt-oss. Raises CheckpointError for an unsupported config."""
    config = {**DEFAULTS, **config}
    require_values(config, {"hidden_act": "silu", "attention_bias": True})
    return decoder_dims(config, FACTS, experts=routed_experts(config), moe_ffn=config["intermediate_size"])


def transformer(config: dict[str, Any]) -> dict[str, Any]:
    """megatron-core's settings. Raises CheckpointError for a gate that it cannot compute."""
    config = {**DEFAULTS, **config}
    if config["swiglu_alpha"] != DEFAULTS["swiglu_alpha"]:
        raise CheckpointError(
            "config.json",
            f"swiglu_alpha {config['swiglu_alpha']}: megatron-core's quick GELU supports only "
            f"{DEFAULTS['swiglu_alpha']}",
        )
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config["rope_scaling"] = YARN
    if not config.get("layer_types"):
        kinds = ("sliding_attention", "full_attention")
        config["layer_types"] = [kinds[layer % 2] for layer in range(int(config["num_hidden_layers"]))]
    return {
        **decoder_settings(config, FACTS, sliding_window=True),
        **moe_settings(dims(config), config["num_experts_per_tok"]),
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "activation_func": "quick_gelu",
        "activation_func_clamp_value": float(config["swiglu_limit"]),
        "glu_linear_offset": 1.0,
    }


EXPERTS = HUB + "mlp.experts."
SPEC = autoregressive_spec(
    "gpt_oss",
    "gpt-oss",
    ("openai/gpt-oss-20b", "openai/gpt-oss-120b"),
    "GptOss",
    Mapping(
        rules=(
            *outer_rules(),
            *attention_rules(HUB),
            Direct(ATTENTION + "linear_proj.bias", name=HUB + "self_attn.o_proj.bias", shape="hidden"),
            Direct(ATTENTION + "core_attention.softmax_offset", name=HUB + "self_attn.sinks", shape="heads", axis=0),
            Direct(LAYER + "pre_mlp_layernorm.weight", name=HUB + "post_attention_layernorm.weight", shape="hidden"),
            Direct(MLP + "router.weight", name=HUB + "mlp.router.weight", shape="experts hidden"),
            Direct(MLP + "router.bias", name=HUB + "mlp.router.bias", shape="experts"),
            stacked(InterleavedGatedMLP(EXPERT + "linear_fc1.weight", name=EXPERTS + "gate_up_proj", width="moe_ffn")),
            stacked(
                InterleavedGatedMLP(
                    EXPERT + "linear_fc1.bias", name=EXPERTS + "gate_up_proj_bias", width="moe_ffn", bias=True
                )
            ),
            stacked(
                Transposed(EXPERT + "linear_fc2.weight", name=EXPERTS + "down_proj", shape="hidden moe_ffn", axis=1)
            ),
            stacked(Direct(EXPERT + "linear_fc2.bias", name=EXPERTS + "down_proj_bias", shape="hidden")),
        ),
        dims=dims,
        transformer=transformer,
        passthrough=TIED_HEAD,
    ),
    lora_targets=ATTENTION_TARGETS,
)
