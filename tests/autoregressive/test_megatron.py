"""Names, shapes and settings against megatron-core itself, built on one CPU process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dlm_bridge import Bridge, DlmBridgeError, Layout, LayoutError
from dlm_bridge.attention.masks import MaskDescriptor
from dlm_bridge.models.families import family_by_name
from dlm_bridge.models.rope import rope_settings, window_settings
from tests.autoregressive.cases import CASES, Case
from tests.autoregressive.published import (
    DEEPSEEK_V3,
    GLM_45,
    GPT_OSS,
    GRANITE_3,
    LLAMA_31,
    LLAMA_32,
    MISTRAL_1,
    PHI_3,
    QWEN_25,
    SMOLLM_3,
)
from tests.refusals import refused

pytestmark = pytest.mark.extension("parallel")

BY_LABEL = {case.label: case for case in CASES}
HELD = [case for case in CASES if case.megatron and case.live]
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
QWEN_YARN = {**QWEN_25, "rope_scaling": YARN}
OTHER_LLAMA3 = {**LLAMA_31["rope_scaling"], "low_freq_factor": 2.0}


@pytest.fixture(scope="module")
def megatron() -> Iterator[pytest.MonkeyPatch]:
    """megatron-core on one process. Its own latent attention wants Transformer Engine's classes even where it has none
    of them, and is only built here, not run."""
    from megatron.core.transformer import dot_product_attention, multi_latent_attention

    from dlm_bridge.parallel import groups

    groups.initialize(Layout())
    init = dot_product_attention.DotProductAttention.__init__

    def without_sizes(self: Any, *arguments: Any, k_channels: int = 0, v_channels: int = 0, **options: Any) -> None:
        init(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multi_latent_attention, "HAVE_TE", False)
        patch.setattr(multi_latent_attention, "TELinear", type("TELinear", (), {}))
        patch.setattr(dot_product_attention.DotProductAttention, "__init__", without_sizes)
        yield patch


def transformer_config(case: Case, described: dict[str, Any]) -> Any:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    dims = case.spec.mapping.dims(case.config)
    kind = MLATransformerConfig if described.get("multi_latent_attention") else TransformerConfig
    known = {field.name for field in fields(kind)}
    others = {
        "max_sequence_length", "rotary_base", "rotary_percent", "rope_scaling", "rope_scaling_factor",
        "position_embedding_type",
    }  # fmt: skip
    assert {name for name in described.keys() - known if not name.startswith("yarn_")} <= others
    activation = {"quick_gelu": quick_gelu}.get(described.get("activation_func"), torch.nn.functional.silu)
    return kind(
        num_layers=dims.layers,
        hidden_size=dims.hidden,
        ffn_hidden_size=dims.ffn,
        num_attention_heads=dims.heads,
        num_query_groups=dims.groups,
        kv_channels=dims.head_dim,
        activation_func=activation,
        use_cpu_initialization=True,
        mtp_num_layers=dims.mtp or None,
        **{key: value for key, value in described.items() if key in known - {"activation_func"}},
    )


def stored_name(key: str, moe: bool, latent: bool) -> str:
    """Transformer Engine's name for one of the local layers' norms: it fuses a norm into the matrix that follows."""
    if latent:
        key = key.replace("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight")
        key = key.replace("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight")
        return key if moe else key.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
    return key.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight") if moe else key


@pytest.mark.parametrize("case", HELD, ids=lambda case: case.label)
def test_keys_and_shapes_are_megatron_cores(case: Case, megatron: pytest.MonkeyPatch) -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

    mapping = case.spec.mapping
    dims, described = mapping.dims(case.config), mapping.transformer(case.config)
    config = transformer_config(case, described)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if dims.mtp else None
    model = GPTModel(
        config, spec, dims.vocab, 64, share_embeddings_and_output_weights=dims.tied, mtp_block_spec=mtp,
        position_embedding_type="rope",
    )  # fmt: skip
    found = {}
    state = model.sharded_state_dict()
    for name, entry in state.items():
        if isinstance(entry, ShardedTensorFactory):  # gate and up are two chunks of one tensor
            built = entry.build()
            entry = (built if isinstance(built, list) else list(built.values()))[0]
        if isinstance(entry, ShardedTensor) and not (dims.tied and name == "output_layer.weight"):
            moe = any(name.startswith(p) for p in moe_prefixes(dims))
            found[stored_name(entry.key, moe, "multi_latent_attention" in described)] = tuple(entry.global_shape)
    wanted = {
        piece.megatron_key: (*(size for _, size in piece.stack), *piece.megatron_shape)
        for param in mapping.params(dims)
        for piece in param.pieces
    }
    assert found == wanted


def moe_prefixes(dims: Any) -> list[str]:
    if not dims.experts:
        return []
    decoder = [f"decoder.layers.{layer}." for layer in range(dims.layers) if dims.is_moe(layer)]
    return [*decoder, "mtp.layers."]


RUN = [
    *(
        pytest.param(case, {}, id=case.label)
        for case in HELD
        if case.family not in ("mistral", "glm4_moe", "deepseek_v3", "phi3")
    ),
    pytest.param(BY_LABEL["phi3"], {"sliding_window": None, "partial_rotary_factor": 0.5}, id="phi3"),
    pytest.param(BY_LABEL["phi3"], {"sliding_window": 8}, id="phi3 window"),
    pytest.param(
        BY_LABEL["granite"],
        {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0},
        id="granite's attention multiplier",
    ),
    pytest.param(BY_LABEL["mistral-nemo"], {}, id="mistral-nemo"),
    pytest.param(BY_LABEL["glm4-moe"], {"num_nextn_predict_layers": 0}, id="glm4-moe"),
    pytest.param(BY_LABEL["deepseek-v3"], {"num_nextn_predict_layers": 0}, id="deepseek-v3"),
    pytest.param(
        BY_LABEL["deepseek-direct-q"],
        {"num_nextn_predict_layers": 0, "rope_scaling": None},
        id="deepseek without a low-rank query and without yarn",
    ),
    pytest.param(BY_LABEL["mistral"], {"sliding_window": 8}, id="window"),
    pytest.param(
        BY_LABEL["qwen2.5"],
        {
            "sliding_window": 8,
            "use_sliding_window": True,
            "max_window_layers": 2,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        },
        id="window of some layers and yarn",
    ),
]


@pytest.mark.parametrize(("case", "changed"), RUN)
def test_logits_are_transformers_own(
    case: Case, changed: dict[str, Any], megatron: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beyond the window and YaRN's original context, too; without a mask and with one."""
    source = case.write(tmp_path / "hub", **changed)
    (model,) = Bridge.from_hf(source).build_megatron_model(Layout())
    ids = torch.randint(0, 130, (2, 40), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(40).expand(2, -1)
    masks = [None, MaskDescriptor.causal(torch.zeros(1, 40, dtype=torch.int32)).codes]
    if "sliding_window" not in {**case.config, **changed}:
        masks.append(torch.ones(1, 1, 40, 40, dtype=torch.bool).tril())
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").eval()(ids).logits
        for mask in masks:
            found = model.eval()(ids, positions, mask)[..., :130]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_latent_attention_without_sequence_parallelism_is_refused() -> None:
    """Of the part of the keys that all heads share each rank would have the gradient of its own heads only."""
    from dlm_bridge.parallel.config import model_config

    case = BY_LABEL["deepseek-v3"]
    mapping, config = case.spec.mapping, {**case.config, "num_nextn_predict_layers": 0}
    arguments = (mapping, config, mapping.dims(config), Layout(tp=2), torch.float32)
    assert model_config(*arguments).transformer.sequence_parallel
    with refused(LayoutError, "tp", "sequence_parallel=False"):
        model_config(*arguments, sequence_parallel=False)


@pytest.mark.parametrize(
    "damage", [{"rope_scaling": 10**39}, {"rope_theta": [1]}, {"rope_scaling": {"rope_type": "linear"}}]
)
def test_settings_that_cannot_be_read_are_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(DlmBridgeError, match=r"config\.json"):
        family_by_name("llama").mapping.settings({**LLAMA_31, "rope_scaling": None, **damage})


@pytest.mark.parametrize(
    "published",
    [LLAMA_31, LLAMA_32, QWEN_YARN, {**QWEN_25, "rope_scaling": {**YARN, "attention_factor": 1.3}}, GLM_45],
    ids=["llama3.1", "llama3.2", "yarn", "yarn with attention factor", "partial"],
)
def test_rotary_frequencies_are_the_published_ones(published: dict[str, Any], megatron: pytest.MonkeyPatch) -> None:
    """megatron-core's angles with our settings against transformers' with the published config, far out."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    positions = torch.tensor([[0, 1, 5000, 40000]])
    config = AutoConfig.for_model(**published)
    theirs = config.to_dict()["rope_parameters"]
    if theirs["rope_type"] == "default":
        from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding as LlamaRotaryEmbedding
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    head_dim = published.get("head_dim") or published["hidden_size"] // published["num_attention_heads"]
    ours = rope_settings(published)
    scale = 1.0
    if ours.pop("position_embedding_type", "rope") == "yarn":
        named = {key.removeprefix("yarn_"): value for key, value in ours.items() if key.startswith("yarn_")}
        named["scaling_factor"] = named.pop("rotary_scaling_factor")
        angles, scale = YarnRotaryEmbedding(head_dim, rotary_base=ours["rotary_base"], **named)(40001)
    else:
        angles = RotaryEmbedding(head_dim, **{"rotary_percent": 1.0, **ours})(40001)
    angles = angles[positions[0], 0, 0]
    torch.testing.assert_close(angles.cos() * scale, cos[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(angles.sin() * scale, sin[0], atol=1e-4, rtol=0)


def test_windows() -> None:
    assert window_settings(MISTRAL_1) == {"window_size": (4095, 0)}
    assert window_settings(QWEN_25) == {}
    on = {**QWEN_25, "use_sliding_window": True, "num_hidden_layers": 4, "max_window_layers": 3}
    assert window_settings(on) == {"window_size": (131071, 0), "window_attn_skip_freq": [0, 0, 0, 1]}
    layers = ["sliding_attention", "full_attention"] * 2
    assert window_settings({**on, "layer_types": layers})["window_attn_skip_freq"] == [1, 0, 1, 0]
    assert window_settings({**on, "max_window_layers": 4}) == {}
    described = family_by_name("mistral").mapping.transformer(MISTRAL_1)
    assert described["window_size"] == (4095, 0)


def test_published_settings() -> None:
    glm = family_by_name("glm4_moe").mapping.transformer(GLM_45)
    assert glm["rotary_percent"] == 0.5
    assert glm["moe_layer_freq"] == [0] * 3 + [1] * 89
    assert glm["moe_router_topk_scaling_factor"] == 2.5
    assert "moe_router_num_groups" not in glm
    deepseek = family_by_name("deepseek_v3").mapping.transformer(DEEPSEEK_V3)
    wanted = {
        "multi_latent_attention": True, "rope_type": "yarn", "rotary_scaling_factor": 40.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "moe_router_num_groups": 8,
        "moe_router_group_topk": 4, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64,
    }  # fmt: skip
    assert {key: deepseek[key] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("family", "published", "change", "says"),
    [
        ("llama", LLAMA_31, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("llama", LLAMA_31, {"rope_scaling": OTHER_LLAMA3}, "low_freq_factor 2.0"),
        ("glm4_moe", GLM_45, {"norm_topk_prob": False}, "norm_topk_prob"),
        ("granite", GRANITE_3, {}, "embedding_multiplier 12.0"),
        ("granite", GRANITE_3, {"embedding_multiplier": 1}, "residual_multiplier 0.22"),
        ("phi3", PHI_3, {"rope_scaling": {"type": "longrope"}}, "'longrope'"),
        ("smollm3", SMOLLM_3, {"no_rope_layers": [1]}, "no_rope_layers"),
        ("deepseek_v3", DEEPSEEK_V3, {"num_experts_per_tok": 6}, "twice topk_group 4"),
        ("deepseek_v3", DEEPSEEK_V3, {"rope_interleave": False}, "interleaved"),
        ("gpt_oss", GPT_OSS, {"swiglu_alpha": 1.5}, "swiglu_alpha 1.5"),
        ("deepseek_v3", DEEPSEEK_V3, {"rope_scaling": {"type": "linear", "factor": 2}}, "'linear'"),
    ],
)  # fmt: skip
def test_what_megatron_cannot_compute_is_refused_live_but_converted(
    family: str, published: dict[str, Any], change: dict[str, Any], says: str
) -> None:
    mapping = family_by_name(family).mapping
    config = {**published, **change}
    with pytest.raises(DlmBridgeError, match=says):
        mapping.transformer(config)
    mapping.dims(config)  # the conversion to torch_dist needs no more
