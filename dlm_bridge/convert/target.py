"""The Megatron format that is written: its plan, its writer, and the settings that Megatron wants with the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import yaml

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.derive import RUN_CONFIG
from dlm_bridge.convert.formats.legacy_writer import LegacyWriter, plan_legacy
from dlm_bridge.convert.formats.rank_names import KeyStyle
from dlm_bridge.convert.formats.torch_dist_writer import TorchDistWriter, plan_torch_dist
from dlm_bridge.convert.layout import Layout
from dlm_bridge.convert.mapping import Link
from dlm_bridge.convert.streaming import Bands
from dlm_bridge.convert.tensors import dtype_name, promote
from dlm_bridge.errors import DlmBridgeError

FORMATS = ("torch_dist", "torch")
_DIVISIBLE_BY = 128  # Megatron-LM's --make-vocab-size-divisible-by


class Writer(Protocol):
    """Writes slices in any order and from any thread or process."""

    def write(self, link: Link, bands: Bands) -> list[str]:
        """Put a link's whole slice in its places; returns digests for `has` and `note`."""

    def has(self, link: Link, digests: Sequence[str]) -> bool:
        """Whether an earlier run put it there."""

    def note(self, link: Link, digests: Sequence[str]) -> None:
        """The slice is there; every one must be noted in the process that finishes."""

    def finish(self, iteration: int) -> dict[str, str]:
        """Complete the checkpoint; digests of its files."""


class OptimizerTensors(Protocol):
    """The optimizer's tensors that are written with the weights."""

    @property
    def links(self) -> Sequence[Link]:
        """Their slices."""

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """By their keys."""


@dataclass(frozen=True)
class MegatronFormat:
    """What `--format`, `--key-style`, `--run-config` and `--weights-only` ask for."""

    name: str = "torch_dist"
    key_style: KeyStyle = "te"  # the legacy format's
    run_config: bool = False  # write Megatron Bridge's run_config.yaml as well
    weights_only: bool = False  # leave an optimizer's state out

    def __post_init__(self) -> None:
        if self.name not in FORMATS:
            raise DlmBridgeError(f"--format {self.name}: choose one of {', '.join(FORMATS)}")
        if self.key_style != "te" and self.name != "torch":
            raise DlmBridgeError(f"--key-style {self.key_style} is the legacy format's: add --format torch")

    def vocab_multiple(self, given: int | None, layout: Layout) -> int | None:
        """What the vocabulary's rows are rounded up to: in the legacy format as Megatron-LM pads them, so that every
        rank has as many. Raises DlmBridgeError."""
        if self.name != "torch":
            return given
        if given is not None and given % layout.tp:
            raise DlmBridgeError(
                f"--vocab-multiple {given}: --format torch needs one that --tp {layout.tp} divides, since every rank "
                "has as many rows"
            )
        return _DIVISIBLE_BY * layout.tp if given is None else given


@dataclass(frozen=True)
class Target:
    """A planned checkpoint: its files below the iteration's folder, and what writes it there."""

    files: dict[str, int]
    writer: Callable[[Path], Writer]


def plan_target(
    asked: MegatronFormat,
    source: Checkpoint,
    links: Sequence[Link],
    layout: Layout,
    dtypes: dict[str, torch.dtype],
    iteration: int,
    state: OptimizerTensors | None = None,
) -> Target:
    """Lay the checkpoint out; `links` have their vocabulary padded, `state` goes with them into torch_dist.

    Raises DlmBridgeError.
    """
    if asked.name == "torch":
        args = megatron_args(source, links, layout, promote(list(dtypes.values())), asked.key_style)
        legacy = plan_legacy(links, layout, dtypes, args, asked.key_style, iteration)
        return Target(legacy.files, lambda folder: LegacyWriter(folder, legacy))
    more = ([], {}) if state is None else (state.links, state.dtypes)
    plan = plan_torch_dist([*links, *more[0]], layout, {**dtypes, **more[1]})
    return Target(plan.files, lambda folder: TorchDistWriter(folder, plan))


def write_run_config(
    folder: Path, source: Checkpoint, links: Sequence[Link], layout: Layout, dtypes: dict[str, torch.dtype]
) -> None:
    """Write Megatron Bridge's run_config.yaml: its `model` is a GPTModelProvider of this model and layout."""
    dtype = promote(list(dtypes.values()))
    args = megatron_args(source, links, layout, dtype, "te")
    renamed = {"norm_epsilon": "layernorm_epsilon", "num_experts": "num_moe_experts"}
    left_out = {
        "swiglu", "untie_embeddings_and_output_weights", "group_query_attention", "padded_vocab_size",
        "max_position_embeddings", "add_position_embedding", "transformer_impl", "params_dtype", "iteration",
    }  # fmt: skip
    model: dict[str, Any] = {
        "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider",
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
        "gated_linear_unit": True,
        "share_embeddings_and_output_weights": source.dims.tied,
        "params_dtype": {"_target_": f"torch.{dtype_name(dtype)}", "_call_": False},
        **{renamed.get(key, key): value for key, value in args.items() if key not in left_out},
    }
    content = {"model": model, "checkpoint": {"ckpt_format": "torch_dist"}}
    (folder / RUN_CONFIG).write_text(yaml.safe_dump(content, sort_keys=True), "utf-8")


def megatron_args(
    source: Checkpoint, links: Sequence[Link], layout: Layout, dtype: torch.dtype, style: KeyStyle
) -> dict[str, Any]:
    """Megatron-LM's arguments for this model and layout, by its names. Those of a model that megatron-core cannot
    compute are its sizes only."""
    dims = source.dims
    padded = next(link.megatron_shape[0] for link in links if link.megatron_key.startswith("embedding."))
    try:
        described = source.mapping.transformer(source.config)
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
        "make_vocab_size_divisible_by": _DIVISIBLE_BY,
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
