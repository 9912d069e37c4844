"""Settings of Megatron runs: derivation of a Hub config, and settings of a converted model.

Sources are Megatron-LM's saved `args` and Megatron Bridge's `run_config.yaml`. Every key of a derived config is
recorded with its origin. Settings that no supported family has are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from dlm_bridge.convert.checkpoint import Checkpoint, Derived
from dlm_bridge.errors import CheckpointError, DlmBridgeError, one_line
from dlm_bridge.files.reading import parse_yaml
from dlm_bridge.mapping.dtypes import dtype_name, promote
from dlm_bridge.mapping.layout import Layout
from dlm_bridge.mapping.rules import ParamMapping
from dlm_bridge.models.families import FamilySpec, family_by_name

RUN_CONFIG = "run_config.yaml"
# Config keys besides the sizes, by family, for families whose config the settings determine.
_LLAMA_LIKE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "a2d_llama": {},
    "a2d_qwen2": {},
    "a2d_qwen3": {},
    "difflm": {"attn_mask_type": "bidirectional"},
    "dream": {},
    "sdar": {},
}
_QWEN3_MOE_LIKE: dict[str, dict[str, Any]] = {"qwen3_moe": {}, "sdar_moe": {}, "rnd1": {}}
DERIVABLE = (*_LLAMA_LIKE, *_QWEN3_MOE_LIKE, "mixtral", "llada")
# Supported values by setting; None is an absent setting.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "normalization": (None, "RMSNorm"),
    "gated_linear_unit": (None, True),
    "add_bias_linear": (None, False),
    "position_embedding_type": (None, "rope"),
    "apply_layernorm_1p": (None, False),
    "layernorm_zero_centered_gamma": (None, False),
    "rotary_percent": (None, 1, 1.0),
    "rotary_interleaved": (None, False),
    "multi_latent_attention": (None, False),
    "moe_layer_freq": (None, 1, "1"),
    "moe_shared_expert_intermediate_size": (None, 0),
    "moe_router_score_function": (None, "softmax"),
    "mtp_num_layers": (None, 0),
}
VOCAB_DIVISIBLE_BY = 128  # Megatron-LM's --make-vocab-size-divisible-by


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run by megatron-core's names."""

    values: Mapping[str, Any]
    origin: str  # "args" or "run_config.yaml"


def read_settings(root: Path, iteration: Path, common: Mapping[str, Any]) -> RunSettings | None:
    """Settings that a checkpoint was saved with; None if it has none. Raises CheckpointError."""
    if (path := find_run_config(root, iteration)) is not None:
        return RunSettings(_from_run_config(path), RUN_CONFIG)
    args = common.get("args")
    return RunSettings(_from_args(args), "args") if isinstance(args, Mapping) and "num_layers" in args else None


def derive_config(
    settings: RunSettings, family: str | None, vocab_rows: int | None, dtype: str, where: str
) -> tuple[FamilySpec, dict[str, Any], tuple[Derived, ...]]:
    """Derive config.json from a run's settings.

    Args:
        family: name of the model family; by default guessed from the settings.
        vocab_rows: rows of the stored embedding.
        dtype: dtype of the stored embedding.
        where: the checkpoint, for errors.

    Returns:
        The family, the config, and the origin of each key.

    Raises:
        CheckpointError: no family has these settings, or they do not determine the family's config.
    """
    _check_supported(settings, where)
    derivation = _Derivation(settings, where)
    spec = family_by_name(family) if family else derivation.guess_family()
    if spec.name not in DERIVABLE:
        raise CheckpointError(
            where,
            f"the config of a {spec.name} model cannot be derived from {settings.origin}: give `hf_config` or `like` "
            f"(derivable are {', '.join(DERIVABLE)})",
        )
    derivation.add("architectures", [spec.architectures[0]], f"family {spec.name}")
    if spec.model_type:
        derivation.add("model_type", spec.model_type, f"family {spec.name}")
    if spec.name == "llada":
        derivation.llada(vocab_rows)
    else:
        derivation.standard(spec.name, vocab_rows)
    derivation.add("torch_dtype", dtype, "the stored weights")
    if spec.kind == "diffusion":
        derivation.mask_token(spec)
    return spec, {row.key: row.value for row in derivation.rows if row.key != "family"}, tuple(derivation.rows)


class _Derivation:
    def __init__(self, settings: RunSettings, where: str) -> None:
        self._values, self._origin, self._where = settings.values, settings.origin, where
        self.rows: list[Derived] = []

    def add(self, key: str, value: Any, origin: str, assumed: bool = False) -> None:
        self.rows.append(Derived(key, value, origin, assumed))

    def guess_family(self) -> FamilySpec:
        """Guess the family from the settings, and record the guess."""
        values = self._values
        if values.get("model_running_mode") not in (None, "vanilla"):
            name, why = "difflm", f"model_running_mode {values['model_running_mode']} (MegaDLMs)"
        elif values.get("num_experts"):
            name, why = ("qwen3_moe", "experts and QK norm") if values.get("qk_layernorm") else ("mixtral", "experts")
        elif values.get("qk_layernorm"):
            name, why = "qwen3", "QK norm"
        elif values.get("add_qkv_bias"):
            name, why = "qwen2", "biases of query, key and value"
        else:
            name, why = "llama", "no QK norm, no biases, no experts"
        self.add("family", name, f"{why}; change it with `family`", assumed=True)
        return family_by_name(name)

    def standard(self, family: str, vocab_rows: int | None) -> None:
        """Add the config by transformers' key names."""
        experts = family in _QWEN3_MOE_LIKE or family == "mixtral"
        self._take("hidden_size", "hidden_size")
        if family == "mixtral":
            self._take("intermediate_size", "moe_ffn_hidden_size", "ffn_hidden_size")
        else:
            self._take("intermediate_size", "ffn_hidden_size")
        self._take("num_hidden_layers", "num_layers")
        self._heads("num_attention_heads", "num_key_value_heads")
        if (channels := self._values.get("kv_channels")) is not None:
            self.add("head_dim", channels, self._name("kv_channels"))
        self._vocabulary(("vocab_size",), vocab_rows)
        self._tied("tie_word_embeddings")
        self.add("hidden_act", "silu", "SwiGLU")
        self._default("rms_norm_eps", "norm_epsilon", 1e-5)
        self._default("rope_theta", "rotary_base", 10000)
        self._rope_scaling()
        self._default("max_position_embeddings", "max_position_embeddings", self._values.get("seq_length") or 4096)
        if experts:
            self._take("num_local_experts" if family == "mixtral" else "num_experts", "num_experts")
            self._default("num_experts_per_tok", "moe_router_topk", 2)
        if family in _QWEN3_MOE_LIKE:
            self._take("moe_intermediate_size", "moe_ffn_hidden_size", "ffn_hidden_size")
            self._renormalised()
        for key, value in (_LLAMA_LIKE | _QWEN3_MOE_LIKE).get(family, {}).items():
            self.add(key, value, f"family {family}")

    def llada(self, vocab_rows: int | None) -> None:
        """Add the config by LLaDA's key names, with the switches that all public checkpoints share."""
        from dlm_bridge.models.llada import REQUIRED

        self._take("d_model", "hidden_size")
        self._take("n_layers", "num_layers")
        self._heads("n_heads", "n_kv_heads")
        self._take("mlp_hidden_size", "ffn_hidden_size")
        self._vocabulary(("vocab_size", "embedding_size"), vocab_rows)
        self._tied("weight_tying")
        self._default("rms_norm_eps", "norm_epsilon", 1e-5)
        self._default("rope_theta", "rotary_base", 10000)
        self._default("max_sequence_length", "max_position_embeddings", self._values.get("seq_length") or 4096)
        for key, value in REQUIRED.items():
            self.add(key, value, "family llada")

    def mask_token(self, spec: FamilySpec) -> None:
        """Add the mask token, which samplers and objectives need. A wrong guess would not be noticed, so none is made
        beyond the family's own."""
        if (token := self._values.get("mask_token")) is not None:
            self.add("mask_token_id", token, self._name("mask_token"))
        elif spec.mask_token_id is not None and spec.mask_token_id < self._vocab_size():
            self.add("mask_token_id", spec.mask_token_id, f"family {spec.name}'s own", assumed=True)

    def _vocab_size(self) -> int:
        return next(row.value for row in self.rows if row.key == "vocab_size")

    def _name(self, key: str) -> str:
        return f"{self._origin}: {key}"

    def _take(self, key: str, *names: str) -> None:
        for name in names:
            if (value := self._values.get(name)) is not None:
                return self.add(key, value, self._name(name))
        raise self._missing(names[0])

    def _missing(self, name: str) -> CheckpointError:
        return CheckpointError(self._where, f"{self._origin} has no {name}: give `hf_config` or `like`")

    def _default(self, key: str, name: str, default: Any) -> None:
        value = self._values.get(name)
        if value is None:
            self.add(key, default, f"{self._origin} has no {name}", assumed=True)
        else:
            self.add(key, value, self._name(name))

    def _heads(self, heads: str, groups: str) -> None:
        self._take(heads, "num_attention_heads")
        values = self._values
        grouped = values.get("group_query_attention", values.get("num_query_groups") is not None)
        if grouped and values.get("num_query_groups") is not None:
            self.add(groups, values["num_query_groups"], self._name("num_query_groups"))
        else:
            self.add(groups, values["num_attention_heads"], f"{self._origin}: no grouped queries")

    def _vocabulary(self, keys: tuple[str, ...], rows: int | None) -> None:
        value, padded = self._values.get("vocab_size"), self._values.get("padded_vocab_size")
        for key in keys:
            if value is not None and (rows is None or value <= rows):
                self.add(key, value, self._name("vocab_size"))
            elif padded is not None or rows is not None:
                name = "padded_vocab_size" if padded is not None else "the stored embedding"
                self.add(key, padded if padded is not None else rows, f"{name}, padding included", assumed=True)
            else:
                raise self._missing("vocab_size")

    def _tied(self, key: str) -> None:
        untied = self._values.get("untie_embeddings_and_output_weights")
        shared = self._values.get("share_embeddings_and_output_weights")
        if untied is not None:
            self.add(key, not untied, self._name("untie_embeddings_and_output_weights"))
        elif shared is not None:
            self.add(key, bool(shared), self._name("share_embeddings_and_output_weights"))
        else:
            self.add(key, False, f"not in {self._origin}", assumed=True)

    def _rope_scaling(self) -> None:
        values = self._values
        factor = values.get("rope_scaling_factor", 8.0)
        if values.get("use_rope_scaling") or values.get("rope_scaling"):
            scaling = {"rope_type": "llama3", "factor": float(factor), "low_freq_factor": 1.0}
            scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
            self.add("rope_scaling", scaling, self._name("use_rope_scaling") + ", as megatron-core computes it")
        elif (factor := values.get("rotary_seq_len_interpolation_factor")) not in (None, 1):
            scaling = {"rope_type": "linear", "factor": float(factor)}
            self.add("rope_scaling", scaling, self._name("rotary_seq_len_interpolation_factor"))

    def _renormalised(self) -> None:
        first = bool(self._values.get("moe_router_pre_softmax"))
        self.add("norm_topk_prob", not first, f"{self._origin}: moe_router_pre_softmax {first}")


def _check_supported(settings: RunSettings, where: str) -> None:
    for name, allowed in _SUPPORTED.items():
        value = settings.values.get(name)
        if isinstance(value, list) and set(value) == {1}:
            continue
        if value not in allowed:
            raise CheckpointError(
                where,
                f"{name} is {value!r} in {settings.origin}, which is not supported: give `like` or `hf_config` of its "
                "family",
            )


def _from_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """Translate Megatron-LM's names to megatron-core's."""
    values = dict(args)
    if values.get("swiglu") is not None:
        values["gated_linear_unit"] = values["swiglu"]
    if values.get("disable_bias_linear") is not None:
        values["add_bias_linear"] = not values["disable_bias_linear"]
    return values


def find_run_config(root: Path, iteration: Path) -> Path | None:
    """Path of a checkpoint's run_config.yaml; the iteration's own is preferred."""
    return next((path for path in (iteration / RUN_CONFIG, root / RUN_CONFIG) if path.is_file()), None)


def read_run_config(path: Path, section: str, key: str) -> dict[str, Any]:
    """Section of a run_config.yaml that has a key. Raises CheckpointError for a damaged file, or one without it."""
    try:
        content = parse_yaml(path.read_text("utf-8"))
        found = content.get(section) if isinstance(content, dict) else None
        if not isinstance(found, dict) or found.get(key) is None:
            raise ValueError(f"it has no {section}.{key}")
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"cannot be read: {one_line(error)[:200]}") from None
    return found


def _from_run_config(path: Path) -> dict[str, Any]:
    values = dict(read_run_config(path, "model", "num_layers"))
    values["num_experts"] = values.get("num_moe_experts")
    values["norm_epsilon"] = values.get("layernorm_epsilon")
    if values.get("max_position_embeddings") is None:
        values["max_position_embeddings"] = values.get("seq_length")
    return values


SILU, QUICK_GELU = "torch.nn.functional.silu", "megatron.core.fusions.fused_bias_geglu.quick_gelu"


def write_run_config(
    folder: Path, source: Checkpoint, params: Sequence[ParamMapping], layout: Layout, dtypes: dict[str, torch.dtype]
) -> None:
    """Write Megatron Bridge's run_config.yaml, whose `model` is a GPTModelProvider of this model and layout."""
    dtype = promote(list(dtypes.values()))
    args = megatron_args(source, params, layout, dtype, "te")
    renamed = {"norm_epsilon": "layernorm_epsilon", "num_experts": "num_moe_experts"}
    left_out = {
        "swiglu", "quick_geglu", "untie_embeddings_and_output_weights", "group_query_attention", "padded_vocab_size",
        "max_position_embeddings", "add_position_embedding", "transformer_impl", "params_dtype", "iteration",
    }  # fmt: skip
    model: dict[str, Any] = {
        "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider",
        "activation_func": {"_target_": QUICK_GELU if args.get("quick_geglu") else SILU, "_call_": False},
        "gated_linear_unit": True,
        "share_embeddings_and_output_weights": source.dims.tied,
        "params_dtype": {"_target_": f"torch.{dtype_name(dtype)}", "_call_": False},
        **{renamed.get(key, key): value for key, value in args.items() if key not in left_out},
    }
    content = {"model": model, "checkpoint": {"ckpt_format": "torch_dist"}}
    (folder / RUN_CONFIG).write_text(yaml.safe_dump(content, sort_keys=True), "utf-8")


def megatron_args(
    source: Checkpoint, params: Sequence[ParamMapping], layout: Layout, dtype: torch.dtype, style: str
) -> dict[str, Any]:
    """Megatron-LM's arguments for this model and layout; for models that megatron-core lacks, their sizes only."""
    dims = source.dims
    padded = next(param.megatron_shape[0] for param in params if param.megatron_key.startswith("embedding."))
    try:
        described = source.mapping.settings(source.config)
    except DlmBridgeError:
        described = {}
    renamed = {
        "layernorm_epsilon": "norm_epsilon",
        "num_moe_experts": "num_experts",
        "gated_linear_unit": "swiglu",
        "max_sequence_length": "max_position_embeddings",
        "rope_scaling": "use_rope_scaling",
        "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    }
    length = described.get("max_sequence_length", 4096)
    if described.pop("activation_func", "silu") == "quick_gelu":  # gpt-oss
        described |= {"gated_linear_unit": False, "quick_geglu": True}
    return {
        "position_embedding_type": "rope",
        **{renamed.get(key, key): value for key, value in described.items()},
        "num_layers": dims.layers,
        "hidden_size": dims.hidden,
        "ffn_hidden_size": dims.ffn,
        "num_attention_heads": dims.heads,
        "group_query_attention": dims.groups != dims.heads,
        "num_query_groups": dims.groups,
        "kv_channels": dims.head_dim,
        "seq_length": length,
        "max_position_embeddings": length,
        "add_position_embedding": False,
        "vocab_size": dims.vocab,
        "padded_vocab_size": padded,
        "make_vocab_size_divisible_by": VOCAB_DIVISIBLE_BY,
        "untie_embeddings_and_output_weights": not dims.tied,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vp if layout.vp > 1 else None,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
        "transformer_impl": "local" if style == "local" else "transformer_engine",
        "moe_grouped_gemm": dims.experts > 0 and style == "te",
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
    }
