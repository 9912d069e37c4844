"""LLaDA's tensors, Hub to Megatron. On the Hub ff_proj is the gate, up_proj the up and ff_out the down projection;
the ff_out outside the blocks is the output layer."""

from __future__ import annotations

from typing import Any

from dlm_bridge.convert.mapping import QKV, Carried, Dims, Direct, GatedMLP, Mapping, Vocabulary
from dlm_bridge.errors import DlmBridgeError

ROOT = "model.transformer."
BLOCK = ROOT + "blocks.{layer}."
LAYER = "decoder.layers.{layer}."

# What the public checkpoints say and the Llama body can do. Anything else would be silently wrong.
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


def check(config: dict[str, Any]) -> None:
    """Raise DlmBridgeError for a LLaDA config that the Llama body cannot hold."""
    for key, value in REQUIRED.items():
        found = config.get(key, value)
        if found not in (value, None) and not (value is False and not found):
            raise DlmBridgeError(f"LLaDA config: {key} = {found!r} is not supported, only {value!r} (no public model)")


def dims(config: dict[str, Any]) -> Dims:
    """LLaDA's sizes; null keys mean what the original code takes them for."""
    check(config)
    try:
        hidden, heads, layers = int(config["d_model"]), int(config["n_heads"]), int(config["n_layers"])
        vocab = int(config.get("embedding_size") or config["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise DlmBridgeError(
            f"LLaDA config: d_model, n_heads, n_layers and vocab_size must be numbers ({error})"
        ) from None
    if heads < 1 or hidden % heads:
        raise DlmBridgeError(f"LLaDA config: n_heads {heads} does not divide d_model {hidden}")
    groups = config.get("n_kv_heads") or (1 if config.get("multi_query_attention") else heads)
    if heads % groups:
        raise DlmBridgeError(f"LLaDA config: n_kv_heads {groups} does not divide n_heads {heads}")
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
    """What megatron-core needs beyond the sizes."""
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
            LAYER + "self_attention.linear_proj.weight",
            name=BLOCK + "attn_out.weight",
            shape="hidden q_rows",
            axis=1,
        ),
        Direct(LAYER + "mlp.linear_fc1.layer_norm_weight", name=BLOCK + "ff_norm.weight", shape="hidden"),
        GatedMLP(LAYER + "mlp.linear_fc1.weight", gate=BLOCK + "ff_proj.weight", up=BLOCK + "up_proj.weight"),
        Direct(LAYER + "mlp.linear_fc2.weight", name=BLOCK + "ff_out.weight", shape="hidden ffn", axis=1),
    ),
    dims=dims,
    transformer=transformer,
    carried=(Carried(ROOT + "ff_out.weight", when="tied", copy_of=ROOT + "wte.weight"),),
)
