"""LLaDA-8B and LLaDA-1.5: spec, mapping, initialisation rule.

Source: the public configs, modeling_llada.py, generate.py and GUIDELINES.md of GSAI-ML/LLaDA, arXiv 2502.09992.
"""

from __future__ import annotations

import math
import re
from typing import Any

from dlm_bridge.errors import CheckpointError
from dlm_bridge.mapping.rules import QKV, Dims, Direct, GatedMLP, Mapping, Passthrough, Vocabulary
from dlm_bridge.models.families import FamilySpec
from dlm_bridge.models.initialisation import Constant, Distribution, InitialisationRule, Normal, initializer_range

ROOT = "model.transformer."
BLOCK = ROOT + "blocks.{layer}."
LAYER = "decoder.layers.{layer}."

# Values of the public checkpoints. With any other the Llama body would be silently wrong.
REQUIRED = {
    "block_type": "llama",
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "activation_type": "silu",
    "rope": True,
    "block_group_size": 1,
    "alibi": False,
    "attention_layer_norm": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "bias_for_layer_norm": False,
    "scale_logits": False,
    "input_emb_norm": False,
}


def check_config(config: dict[str, Any]) -> None:
    """Raise CheckpointError for a LLaDA config that the Llama body does not support."""
    for key, value in REQUIRED.items():
        found = config.get(key, value)
        if found not in (value, None) and not (value is False and not found):
            raise CheckpointError(
                "config.json", f"{key} = {found!r} is not supported, only {value!r} (no public model)"
            )


def dims(config: dict[str, Any]) -> Dims:
    """Sizes of LLaDA. Null keys have the original code's defaults."""
    check_config(config)
    sizes: dict[str, Any] = {key: config.get(key) for key in ("d_model", "n_heads", "n_layers")}
    sizes["vocab_size"] = config.get("embedding_size") or config.get("vocab_size")
    for key, value in sizes.items():
        if type(value) is not int:
            raise CheckpointError("config.json", f"{key} must be a whole number, not {value!r}")
    hidden, heads, layers, vocab = sizes.values()
    if heads < 1 or hidden % heads:
        raise CheckpointError("config.json", f"n_heads {heads} does not divide d_model {hidden}")
    groups = config.get("n_kv_heads") or (1 if config.get("multi_query_attention") else heads)
    if heads % groups:
        raise CheckpointError("config.json", f"n_kv_heads {groups} does not divide n_heads {heads}")
    return Dims(
        layers=layers,
        hidden=hidden,
        heads=heads,
        groups=groups,
        head_dim=hidden // heads,
        ffn=config.get("mlp_hidden_size") or config.get("mlp_ratio", 4) * hidden,
        vocab=vocab,
        tied=bool(config.get("weight_tying", False)),
    )


def transformer(config: dict[str, Any]) -> dict[str, Any]:
    """megatron-core's settings beyond the sizes."""
    return {
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.get("rms_norm_eps", 1e-5),
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "rotary_base": config.get("rope_theta", 500000.0),
        "max_sequence_length": config.get("max_sequence_length", 4096),
    }


MAPPING = Mapping(
    rules=(
        Vocabulary("embedding.word_embeddings.weight", name=ROOT + "wte.weight", shape="vocab hidden"),
        Direct("decoder.final_layernorm.weight", name=ROOT + "ln_f.weight", shape="hidden"),
        Vocabulary("output_layer.weight", when="!tied", name=ROOT + "ff_out.weight", shape="vocab hidden"),
        Direct(LAYER + "self_attention.linear_qkv.layer_norm_weight", name=BLOCK + "attn_norm.weight", shape="hidden"),
        QKV(
            LAYER + "self_attention.linear_qkv.weight",
            q=BLOCK + "q_proj.weight",
            k=BLOCK + "k_proj.weight",
            v=BLOCK + "v_proj.weight",
        ),
        Direct(
            LAYER + "self_attention.linear_proj.weight", name=BLOCK + "attn_out.weight", shape="hidden q_rows", axis=1
        ),
        Direct(LAYER + "mlp.linear_fc1.layer_norm_weight", name=BLOCK + "ff_norm.weight", shape="hidden"),
        GatedMLP(LAYER + "mlp.linear_fc1.weight", gate=BLOCK + "ff_proj.weight", up=BLOCK + "up_proj.weight"),
        Direct(LAYER + "mlp.linear_fc2.weight", name=BLOCK + "ff_out.weight", shape="hidden ffn", axis=1),
    ),
    dims=dims,
    transformer=transformer,
    passthrough=(Passthrough(ROOT + "ff_out.weight", when="tied", copy_of=ROOT + "wte.weight"),),
)


RESIDUAL = re.compile(r"blocks\.(\d+)\.(attn_out|ff_out)\.weight$")  # outputs to the residual stream


def initialisation_rule(config: dict[str, Any]) -> InitialisationRule:
    """Distribution of every tensor by the config's `init_fn`. Raises CheckpointError for an unknown one."""
    init_fn = config.get("init_fn", "mitchell")
    if init_fn not in ("mitchell", "normal"):
        raise CheckpointError("config.json", f"init_fn {init_fn!r} is not supported, only 'mitchell' and 'normal'")
    sizes = dims(config)

    def mitchell(name: str) -> Normal:
        """1 / sqrt(inputs), truncated at 3 standard deviations; smaller with depth for outputs to the residual
        stream."""
        residual = RESIDUAL.search(name)
        if residual is None:
            return Normal(sizes.hidden**-0.5, cutoff=3)
        layer, matrix = int(residual[1]), residual[2]
        inputs = sizes.ffn if matrix == "ff_out" else sizes.hidden
        return Normal(inputs**-0.5 / math.sqrt(2 * (layer + 1)), cutoff=3)

    def normal(name: str) -> Normal:
        """`init_std`, divided by sqrt(2 layers) for the MLP's output, the only one that the public code marks as
        residual."""
        residual = RESIDUAL.search(name)
        std, cutoff = initializer_range(config, "init_std"), config.get("init_cutoff_factor")
        if residual is not None and residual[2] == "ff_out":
            std /= math.sqrt(2 * sizes.layers)
        return Normal(std, cutoff=None if cutoff is None else float(cutoff))

    def distribution(name: str) -> Distribution:
        if name.endswith("norm.weight") or name.endswith("ln_f.weight"):
            return Constant(1.0)
        return mitchell(name) if init_fn == "mitchell" else normal(name)

    return distribution


SPEC = FamilySpec(
    name="llada",
    title="LLaDA-8B, LLaDA-1.5",
    hub_ids=("GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-8B-Instruct", "GSAI-ML/LLaDA-1.5"),
    architectures=("LLaDAModelLM",),
    model_type="llada",
    config_class="dlm_bridge.models.modeling_llada:LLaDAConfig",
    model_class="dlm_bridge.models.modeling_llada:LLaDAModelLM",
    mapping=MAPPING,
    initialisation=initialisation_rule,
    mask_token_id=126336,
    # The loss is the mean over answers, each padded to the end of its row.
    sft={"eos_padding": "row", "loss_normalisation": "sequences"},
    sampler={"algorithm": "llada"},
    checked_against="the public modeling_llada.py and generate.py",
)
