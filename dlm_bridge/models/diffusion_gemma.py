"""DiffusionGemma (transformers' DiffusionGemmaForBlockDiffusion): spec, mapping.

One Gemma 4 text tower is both encoder of the prompt and decoder of the draft. Checkpoints store it once, under the
decoder's names, except for one scalar per layer. Sliding and full layers have different head sizes, and full layers
have no value projection. Every layer has a dense MLP and experts in parallel.
Megatron's names follow Megatron Bridge (models/gemma/gemma4_bridge.py, diffusion/conversion/diffusion_gemma and, for
the vision tower, models/gemma_vl/gemma4_vl_bridge.py), where the dense MLP is the shared expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from dlm_bridge.errors import CheckpointError
from dlm_bridge.mapping.fused import FusedGatedMLP, SharedKV, stacked
from dlm_bridge.mapping.rules import QKV, Dims, Direct, GatedMLP, Mapping, Passthrough, Rule, Vocabulary
from dlm_bridge.models.decoder_mapping import LAYER, decoder_dims, require_values, routed_experts
from dlm_bridge.models.families import FamilySpec
from dlm_bridge.models.initialisation import Constant, Distribution, InitialisationRule, Normal, initializer_range

DECODER, ENCODER = "model.decoder.", "model.encoder."
HUB, TIED = DECODER + "layers.{layer}.", ENCODER + "language_model."
ATTENTION, MLP = LAYER + "self_attention.", LAYER + "mlp."
FULL, SLIDING = "full_attention", "sliding_attention"

NO_MEGATRON_ENGINE = (
    "megatron-core cannot compute DiffusionGemma (docs/diffusion_gemma.md lists the missing parts): train it "
    "with `engine=accelerate`"
)
# Defaults of transformers' config classes, for keys that config.json omits.
TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
}
VISION_SIZES: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "patch_size": 16,
    "position_embedding_size": 10_240,
}
_LAYER_SIZES = ("head_dim", "num_key_value_heads")


def dims(config: dict[str, Any]) -> Dims:
    """Sizes of the text tower, and those of the vision tower under names of their own. Raises CheckpointError for a
    config that the class or this mapping does not support."""
    text = {**TEXT_DEFAULTS, **_section(config, "text_config")}
    _check_sizes("text_config", text, [*TEXT_DEFAULTS, "moe_intermediate_size"])
    require_values(config, {"tie_word_embeddings": True})
    require_values(text, {"attention_bias": False, "hidden_activation": "gelu_pytorch_tanh"})
    types = _layer_types(text)
    full = frozenset(layer for layer, kind in enumerate(types) if kind == FULL)
    (sliding_head, sliding_groups), (full_head, full_groups) = _head_sizes(text, types)
    vision = {**VISION_SIZES, "standardize": False, **_section(config, "vision_config")}
    require_values(vision, {"use_clipped_linears": False})
    heads = int(text["num_attention_heads"])
    return decoder_dims(
        {**text, "head_dim": sliding_head, "num_key_value_heads": sliding_groups, "tie_word_embeddings": True},
        frozenset({"standardized_vision"} if vision["standardize"] else ()),
        experts=routed_experts({**text, "num_experts_per_tok": text.get("top_k_experts")}),
        moe_ffn=text.get("moe_intermediate_size"),
        shared_ffn=int(text["intermediate_size"]),
        full_layers=full,
        sizes=(
            ("one", 1),
            ("full_head_dim", full_head),
            ("full_groups", full_groups),
            ("full_q_rows", heads * full_head),
            *_vision_sizes(vision).items(),
        ),
    )


def _section(config: dict[str, Any], key: str) -> dict[str, Any]:
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise CheckpointError("config.json", f"{key} is {found!r}, not an object of sizes")
    return found


def _layer_types(text: dict[str, Any]) -> list[str]:
    """Type of attention of each layer; always full in the last one, as in transformers."""
    layers = text["num_hidden_layers"]
    types = text.get("layer_types")
    if types is None:
        types = [FULL if (layer + 1) % 6 == 0 else SLIDING for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not all(kind in (FULL, SLIDING) for kind in types):
        raise CheckpointError(
            "config.json", f"text_config.layer_types must name {SLIDING} or {FULL} for each of the {layers} layers"
        )
    return [*types[:-1], FULL]


def _head_sizes(text: dict[str, Any], types: list[str]) -> tuple[tuple[int, int], tuple[int, int]]:
    """(head size, key/value heads) of sliding layers and of full layers. A config saved by transformers >= 5.17 has
    `per_layer_config` instead of the two keys for global attention."""
    common = {key: text[key] for key in _LAYER_SIZES}
    overrides = text.get("per_layer_config")
    if overrides is None:
        groups = text.get("num_global_key_value_heads")
        own = {"head_dim": text["global_head_dim"], **({} if groups is None else {"num_key_value_heads": groups})}
        overrides = {layer: own for layer, kind in enumerate(types) if kind == FULL}
    if not isinstance(overrides, dict) or not all(isinstance(own, dict) for own in overrides.values()):
        raise CheckpointError("config.json", "text_config.per_layer_config must have an object of sizes per layer")
    by_layer = {int(layer): own for layer, own in overrides.items()}
    if odd_layers := sorted(by_layer.keys() - range(len(types))):
        raise CheckpointError("config.json", f"text_config.per_layer_config: layer {odd_layers[0]} does not exist")
    found: dict[str, tuple[int, int]] = {}
    for layer, kind in enumerate(types):
        own = by_layer.get(layer, {})
        if odd := sorted(own.keys() - set(_LAYER_SIZES)):
            raise CheckpointError("config.json", f"text_config.per_layer_config of layer {layer} sets {odd[0]}")
        head_dim, groups = ({**common, **own}[key] for key in _LAYER_SIZES)
        _check_heads(text["num_attention_heads"], head_dim, groups, layer)
        if found.setdefault(kind, (head_dim, groups)) != (head_dim, groups):
            raise CheckpointError(
                "config.json", f"text_config.per_layer_config: layer {layer} differs from other {kind}"
            )
    return found.get(SLIDING, (common["head_dim"], common["num_key_value_heads"])), found[FULL]


def _check_heads(heads: Any, head_dim: Any, groups: Any, layer: int) -> None:
    if not all(type(size) is int and size > 0 for size in (heads, head_dim, groups)) or heads % groups:
        raise CheckpointError(
            "config.json",
            f"text_config: layer {layer} has {groups!r} key/value heads of size {head_dim!r} for "
            f"{heads!r} attention heads",
        )


def _check_sizes(where: str, section: dict[str, Any], keys: Iterable[str]) -> None:
    """Raise CheckpointError unless all sizes are integers from 1 to 10^6, numbers of layers to 1000."""
    for key in keys:
        size, most = section.get(key), 1000 if key == "num_hidden_layers" else 10**6
        if type(size) is not int or not 1 <= size <= most:
            raise CheckpointError("config.json", f"{where}.{key} {size!r} is not a whole number from 1 to {most:,}")


def _vision_sizes(vision: dict[str, Any]) -> dict[str, int]:
    output = vision.get("output_proj_dims", vision["hidden_size"])
    _check_sizes("vision_config", {**vision, "output_proj_dims": output}, [*VISION_SIZES, "output_proj_dims"])
    head = vision["head_dim"]
    return {
        "vision_layers": vision["num_hidden_layers"],
        "vision_hidden": vision["hidden_size"],
        "vision_ffn": vision["intermediate_size"],
        "vision_head_dim": head,
        "vision_q_rows": vision["num_attention_heads"] * head,
        "vision_kv_rows": vision["num_key_value_heads"] * head,
        "patch": 3 * vision["patch_size"] ** 2,
        "directions": 2,
        "positions": vision["position_embedding_size"],
        "vision_output": output,
    }


def hub_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """A config with the two keys for global attention instead of `per_layer_config`; transformers reads them, and vLLM
    0.26.0 needs them. Raises CheckpointError as `dims` does."""
    text = _section(config, "text_config")
    if "per_layer_config" not in text:
        return config
    complete = {**TEXT_DEFAULTS, **text}
    _, (head_dim, groups) = _head_sizes(complete, _layer_types(complete))
    kept = {key: value for key, value in text.items() if key != "per_layer_config"}
    return {**config, "text_config": {**kept, "global_head_dim": head_dim, "num_global_key_value_heads": groups}}


def initialisation(config: dict[str, Any]) -> InitialisationRule:
    """transformers' rule: N(0, `initializer_range`), with a separate range for the vision tower; ones for norms,
    scales and position embeddings."""
    vision = initializer_range(_section(config, "vision_config"))
    text = initializer_range(config)
    ones = ("layer_scalar", "scale", "std_scale", "position_embedding_table")

    def distribution(name: str) -> Distribution:
        if name.endswith("std_bias"):
            return Constant(0.0)
        if "norm" in name or name.endswith(ones):
            return Constant(1.0)
        return Normal(vision if "vision_tower" in name else text)

    return distribution


# ------------------------------------------------------------------------------------------------ the table


def _attention() -> tuple[Rule, ...]:
    hub = HUB + "self_attn."
    q, k, v = (f"{hub}{name}_proj.weight" for name in "qkv")
    sizes = (("sliding", "head_dim", "q_rows"), ("full", "full_head_dim", "full_q_rows"))
    return (
        Direct(ATTENTION + "linear_qkv.layer_norm_weight", name=HUB + "input_layernorm.weight", shape="hidden"),
        QKV(ATTENTION + "linear_qkv.weight", when="sliding", q=q, k=k, v=v),
        SharedKV(
            ATTENTION + "linear_qkv.weight", when="full", q=q, k=k, groups="full_groups", head_dim="full_head_dim"
        ),
        *(
            Direct(f"{ATTENTION}{name}_layernorm.weight", when=when, name=f"{hub}{name}_norm.weight", shape=head)
            for when, head, _ in sizes
            for name in "qk"
        ),
        *(
            Direct(
                ATTENTION + "linear_proj.weight", when=when, name=hub + "o_proj.weight", shape=f"hidden {rows}", axis=1
            )
            for when, _, rows in sizes
        ),
        Direct(
            ATTENTION + "linear_proj.post_layernorm.weight",
            name=HUB + "post_attention_layernorm.weight",
            shape="hidden",
        ),
    )


def _feed_forward() -> tuple[Rule, ...]:
    """The dense MLP and the experts, each with a norm before and after, and a norm after their sum."""
    return (
        Direct(
            LAYER + "pre_shared_expert_layernorm.weight", name=HUB + "pre_feedforward_layernorm.weight", shape="hidden"
        ),
        GatedMLP(
            MLP + "shared_experts.linear_fc1.weight",
            gate=HUB + "mlp.gate_proj.weight",
            up=HUB + "mlp.up_proj.weight",
            width="shared_ffn",
        ),
        Direct(
            MLP + "shared_experts.linear_fc2.weight",
            name=HUB + "mlp.down_proj.weight",
            shape="hidden shared_ffn",
            axis=1,
        ),
        Direct(
            MLP + "post_shared_expert_layernorm.weight",
            name=HUB + "post_feedforward_layernorm_1.weight",
            shape="hidden",
        ),
        Direct(LAYER + "pre_mlp_layernorm.weight", name=HUB + "pre_feedforward_layernorm_2.weight", shape="hidden"),
        Direct(MLP + "router.weight", name=HUB + "router.proj.weight", shape="experts hidden"),
        Direct(MLP + "router.scale", name=HUB + "router.scale", shape="hidden"),
        Direct(MLP + "router.per_expert_scale", name=HUB + "router.per_expert_scale", shape="experts"),
        stacked(
            FusedGatedMLP(
                MLP + "experts.experts.{expert}.linear_fc1.weight",
                name=HUB + "experts.gate_up_proj",
                width="moe_ffn",
            )
        ),
        stacked(
            Direct(
                MLP + "experts.experts.{expert}.linear_fc2.weight",
                name=HUB + "experts.down_proj",
                shape="hidden moe_ffn",
                axis=1,
            )
        ),
        Direct(MLP + "post_moe_layernorm.weight", name=HUB + "post_feedforward_layernorm_2.weight", shape="hidden"),
        Direct(LAYER + "post_ffn_layernorm.weight", name=HUB + "post_feedforward_layernorm.weight", shape="hidden"),
        Direct(LAYER + "layer_scalar", name=HUB + "layer_scalar", shape="one"),
        Direct(LAYER + "encoder_layer_scalar", name=TIED + "layers.{layer}.layer_scalar", shape="one"),
    )


def _self_conditioning() -> tuple[Rule, ...]:
    """Block that adds the previous step's expected embeddings to the draft; replicated on every rank."""
    shapes = {
        "pre_norm": "hidden",
        "gate_proj": "shared_ffn hidden",
        "up_proj": "shared_ffn hidden",
        "down_proj": "hidden shared_ffn",
    }
    return tuple(
        Direct(f"self_conditioning.{name}.weight", name=f"{DECODER}self_conditioning.{name}.weight", shape=shape)
        for name, shape in shapes.items()
    )


def vision_rules(dims: Dims) -> Iterator[Rule]:
    """The vision tower and its projection, unchanged and replicated on every rank."""
    layer = {
        "input_layernorm.weight": "vision_hidden",
        "post_attention_layernorm.weight": "vision_hidden",
        "pre_feedforward_layernorm.weight": "vision_hidden",
        "post_feedforward_layernorm.weight": "vision_hidden",
        "self_attn.q_norm.weight": "vision_head_dim",
        "self_attn.k_norm.weight": "vision_head_dim",
        "self_attn.q_proj.linear.weight": "vision_q_rows vision_hidden",
        "self_attn.k_proj.linear.weight": "vision_kv_rows vision_hidden",
        "self_attn.v_proj.linear.weight": "vision_kv_rows vision_hidden",
        "self_attn.o_proj.linear.weight": "vision_hidden vision_q_rows",
        "mlp.gate_proj.linear.weight": "vision_ffn vision_hidden",
        "mlp.up_proj.linear.weight": "vision_ffn vision_hidden",
        "mlp.down_proj.linear.weight": "vision_hidden vision_ffn",
    }
    shapes = {
        "vision_tower.patch_embedder.input_proj.weight": "vision_hidden patch",
        "vision_tower.patch_embedder.position_embedding_table": "directions positions vision_hidden",
        "embed_vision.embedding_projection.weight": "hidden vision_output",
    }
    if "standardized_vision" in dims.facts:
        shapes |= {"vision_tower.std_bias": "vision_hidden", "vision_tower.std_scale": "vision_hidden"}
    for number in range(dims.shape("vision_layers")[0]):
        shapes |= {f"vision_tower.encoder.layers.{number}.{name}": shape for name, shape in layer.items()}
    for name, shape in shapes.items():
        yield Direct(name, name=ENCODER + name, shape=shape)


RULES: tuple[Rule, ...] = (
    Vocabulary("embedding.word_embeddings.weight", name=DECODER + "embed_tokens.weight", shape="vocab hidden"),
    Direct("decoder.final_layernorm.weight", name=DECODER + "norm.weight", shape="hidden"),
    *_self_conditioning(),
    *_attention(),
    *_feed_forward(),
)


def _copies() -> Iterator[Passthrough]:
    """Tensors that a checkpoint may store twice: the output layer and the encoder's text tower."""
    yield Passthrough("lm_head.weight", copy_of=DECODER + "embed_tokens.weight")
    for rule in RULES:
        for name in rule.hub:
            if name.startswith(DECODER) and "self_conditioning" not in name and not name.endswith("layer_scalar"):
                yield Passthrough(TIED + name.removeprefix(DECODER), when=rule.when, copy_of=name)


MAPPING = Mapping(
    rules=RULES,
    dims=dims,
    passthrough=tuple(_copies()),
    engine_lacks=NO_MEGATRON_ENGINE,
    other_towers=vision_rules,
)

SPEC = FamilySpec(
    name="diffusion_gemma",
    title="DiffusionGemma",
    hub_ids=("google/diffusiongemma-26B-A4B-it",),
    architectures=("DiffusionGemmaForBlockDiffusion",),
    model_type="diffusion_gemma",
    config_class="transformers:DiffusionGemmaConfig",
    model_class="transformers:DiffusionGemmaForBlockDiffusion",
    mapping=MAPPING,
    initialisation=initialisation,
    auto_classes=(),  # transformers registers its own
    attention_pattern="block_causal",
    objective="canvas",
    sft={"eos_padding": "block"},
    training=("accelerate",),
    checked_against="transformers' own DiffusionGemmaForBlockDiffusion",
    hub_spelling=hub_spelling,
)
