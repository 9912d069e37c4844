"""Settings of conversions, each declared once: a field here is a flag of `import`, `export` and `reshard`, and a
keyword argument of `Bridge`."""
# ruff: noqa: RUF009 (calls of `option`)

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dlm_bridge.errors import LayoutError, SettingError
from dlm_bridge.mapping.dtypes import check_dtype, parse_dtype, parse_size
from dlm_bridge.mapping.layout import Layout, parse_pipeline_split
from dlm_bridge.settings import QUANTIZE, check_minimum, check_values, nearest, option, options_of

if TYPE_CHECKING:
    import torch

    CastDtype = str | torch.dtype | None
    ByteSize = int | str | None
    PathText = str | os.PathLike[str] | None
else:  # the types of flags
    CastDtype = ByteSize = PathText = str | None

Progress = Callable[[int, int], None]  # (bytes just written, total bytes); called from any thread
FORMATS = ("torch_dist", "torch")
KEY_STYLES = ("te", "te-sequential", "local")
MCORE_FORMS = ("0.16", "0.19")
S = TypeVar("S")
F = TypeVar("F", bound=Callable[..., Any])

_layout = partial(option, panel="Layout", common=True)
_source = partial(option, panel="Source", common=True)
_output = partial(option, panel="Output", common=True)
_running = partial(option, panel="Running", common=True)
_switch = partial(option, False, negative=None, common=True)  # a bool with one flag


@dataclass(frozen=True)
class LayoutSettings:
    """Flags of a parallel layout."""

    tp: int = _layout(1, "Tensor parallel size.")
    pp: int = _layout(1, "Pipeline parallel size.")
    vp: int = _layout(1, "Virtual pipeline chunks per pipeline rank.")
    ep: int = _layout(1, "Expert parallel size.")
    etp: int | None = _layout(None, "Expert tensor parallel size. Default: same as --tp.")
    pipeline_split: str | None = _layout(
        None,
        "Uneven pipeline: FIRST,LAST layers on the first and last stage (the rest even), or one number per stage, or "
        "megatron-core's layout string such as 'Et*3|t*3|t*2L'.",
    )

    @property
    def layout(self) -> Layout:
        """The layout. Raises LayoutError."""
        split = {} if self.pipeline_split is None else parse_pipeline_split(self.pipeline_split, self.pp, self.vp)
        return Layout(tp=self.tp, pp=self.pp, vp=self.vp, ep=self.ep, etp=self.etp, **split)


@dataclass(frozen=True)
class HubSourceSettings:
    """Settings of reading a Hub checkpoint.

    Args:
        revision: branch, tag or commit of a Hub id.
        family: the model family, if config.json does not identify it.
        dequantize_fp8: read block-scaled FP8 weights as bfloat16; otherwise they are refused.
        dequantize_mxfp4: read MXFP4 weights as bfloat16; otherwise they are refused.
    """

    revision: str | None = _source(None, "Branch, tag or commit of a Hub id.")
    family: str | None = _source(None, "The model family, if config.json does not identify it.")
    dequantize_fp8: bool = _switch("Read block-scaled FP8 weights (DeepSeek-V3) as bfloat16.", panel="Source")
    dequantize_mxfp4: bool = _switch("Read experts in MXFP4 (gpt-oss) as bfloat16.", panel="Source")


@dataclass(frozen=True)
class MegatronSourceSettings:
    """Settings of reading a Megatron checkpoint.

    Args:
        like: Hub folder or id of the same model, for a checkpoint that was not written by dlm-bridge.
        hf_config: a config.json, instead of `like`.
        family: the model family, if the config does not identify it.
        ema: read the moving averages of a run with `ema_decay` instead of the weights; also named `averaged`.
    """

    like: PathText = _source(None, "Hub folder or id to copy config, side files and shard map from.", metavar="HF")
    hf_config: PathText = _source(None, "A config.json that names the model.", metavar="FILE")
    family: str | None = _source(None, "The model family, if config.json does not identify it.")
    ema: bool = _switch(
        "Export the moving averages of a run with --ema-decay, not the weights.",
        panel="Source", aliases=("averaged",),
    )  # fmt: skip


@dataclass(frozen=True)
class ConversionSettings:
    """Settings of every conversion.

    Args:
        dtype: "keep" (also None), "bf16", "fp16", "fp32" or a torch dtype.
        workers: number of threads per process; None: one per core, at most 8.
        processes: number of forked processes.
        overwrite: replace the output once the new one is complete.
        resume: continue an interrupted conversion to the same output.
        accept_changed_tensors: accept tensors that differ from the digests in the source's dlm_bridge.json, and list
            them in the new one.
        dry_run: check everything and return the report; write nothing.
        progress: called from any thread with (bytes just written, total bytes).

    Raises:
        SettingError: a value is refused.
    """

    dtype: CastDtype = _output("keep", "Cast the weights: keep, bf16, fp16 or fp32.")
    workers: int | None = _running(None, "Number of threads. Default: one per core, at most 8.", minimum=1)
    processes: int = _running(
        1,
        "Convert with N processes, each with --workers threads, if one process cannot use all cores or the disk's "
        "whole bandwidth.",
        metavar="N", minimum=1,
    )  # fmt: skip
    overwrite: bool = _switch("Replace OUT once the new one is complete.")
    resume: bool = _switch("Continue a killed or interrupted run of the same command.")
    accept_changed_tensors: bool = _switch(
        "Accept tensors that differ from the digests recorded when the source was written; the new dlm_bridge.json "
        "lists them."
    )
    dry_run: bool = _switch("Check everything and print the plan; write nothing.")
    progress: Progress | None = None

    def __post_init__(self) -> None:
        check_values(self)
        check_dtype(self.dtype)
        check_processes(self.processes)

    @property
    def cast_dtype(self) -> torch.dtype | None:
        """`dtype` as torch's; None: the stored dtypes."""
        return parse_dtype(self.dtype)


@dataclass(frozen=True)
class HubSettings(ConversionSettings):
    """Settings of writing a Hub folder, besides those of `ConversionSettings`.

    Args:
        shard_size: largest weight file, in bytes or as text such as "5GB"; None: the source's files and shards.
    """

    shard_size: ByteSize = _output(
        None, "Largest weight file, such as 5GB. Default: the source's shards.", metavar="SIZE"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum("shard_size", self.shard_bytes)

    @property
    def shard_bytes(self) -> int | None:
        """`shard_size` in bytes."""
        return parse_size(self.shard_size)


@dataclass(frozen=True)
class ExportSettings(HubSettings):
    """Settings of `export`, besides those of `HubSettings`.

    Args:
        to: "hf", a Hub folder, or "gguf", a file for llama.cpp.
        quantize: write a Hub folder in the layout of compressed-tensors ("fp8", "int8" or "int4"), or a GGUF file with
            blocks of 8-bit integers ("q8_0").
    """

    to: str = _output("hf", "What to write: hf, a Hub folder, or gguf, a file for llama.cpp.", choices=("hf", "gguf"))
    quantize: str | None = _output(
        None,
        "Quantise the weights: fp8, int8 or int4 (compressed-tensors), with --to gguf q8_0.",
        choices=(*QUANTIZE, "q8_0"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantize is not None and (self.quantize == "q8_0") != (self.to == "gguf"):
            raise SettingError(
                "quantize",
                f"{self.quantize} contradicts `to={self.to}`: a Hub folder is quantised to {', '.join(QUANTIZE)}, a "
                "GGUF file to q8_0",
            )

    @property
    def feature(self) -> str | None:
        """Feature of an extension that writes the output; None for a Hub folder with the weights as they are."""
        if self.to == "gguf":
            return "export --to gguf"
        return None if self.quantize is None else "export --quantize"


@dataclass(frozen=True)
class MegatronSettings(ConversionSettings):
    """Settings of writing a Megatron checkpoint, besides those of `ConversionSettings`.

    Args:
        layout: parallel layout.
        format: "torch_dist", or "torch" for Megatron's legacy format.
        vocab_multiple: pad the vocabulary with zero rows to a multiple of this number.
        key_style: parameter names with `format="torch"`: "te", "te-sequential" or "local".
        mcore: megatron-core whose form of `torch_dist` is written: "0.16", which 0.19 reads too, or "0.19".
        run_config: also write Megatron Bridge's run_config.yaml.
        weights_only: omit the source's optimizer state. Otherwise it is converted with the weights, or refused where
            it cannot be.
    """

    layout: Layout = field(default_factory=Layout)
    format: str = _output("torch_dist", "The Megatron format to write: torch_dist or torch (legacy).", choices=FORMATS)
    vocab_multiple: int | None = _output(
        None, "Pad the vocabulary with zero rows to a multiple of N.", metavar="N", minimum=1
    )
    key_style: str = _output(
        "te",
        "Parameter names with --format torch: te (grouped experts), te-sequential or local (no Transformer Engine).",
        choices=KEY_STYLES,
    )
    mcore: str = _output(
        "0.16",
        "megatron-core whose form of torch_dist is written: 0.16 (0.19 reads it too) or 0.19.",
        choices=MCORE_FORMS,
    )
    run_config: bool = _switch("Also write Megatron Bridge's run_config.yaml.", panel="Output")
    weights_only: bool = _switch("Omit the optimizer state.", panel="Output")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format == "torch" and (self.vocab_multiple or 0) % self.layout.tp:
            raise LayoutError(
                "vocab_multiple",
                f"{self.vocab_multiple} is not a multiple of `tp={self.layout.tp}`; with `format=torch` it must be, "
                "because every rank has the same number of rows",
            )


@dataclass(frozen=True)
class NewModelSettings(HubSourceSettings, HubSettings):
    """Settings of converting a Hub checkpoint to another model: those of reading and of writing it, and a seed.

    Args:
        seed: seed of new random weights. Values depend on the seed and the tensor's name alone.
    """

    seed: int = option(0, "Seed of new random weights.", common=True)


@dataclass(frozen=True)
class ToDlmSettings(NewModelSettings):
    """Settings of `convert_to_dlm`, besides those of `NewModelSettings`.

    Args:
        mask_token: text of the mask token, which is added to the tokenizer if it is new. None: the tokenizer's own
            mask token, or else <|mask|>.
        to: form ("bidirectional", "shifted", "block-causal", "block-causal-shifted", "idlm" or "nemotron"), or the
            name of a target family; None: "idlm".
        block_size: block size of a block-causal model, or with "idlm" the number of masks after a token; None: the
            source's, or else the target family's.
    """

    mask_token: str | None = option(
        None,
        "The mask token, added if new. Default: the tokenizer's own, or else <|mask|>.",
        metavar="TEXT",
        common=True,
    )
    to: str | None = option(
        None,
        "Form: idlm (default), block-causal, bidirectional, shifted, block-causal-shifted, nemotron; or a family.",
        metavar="FORM",
        common=True,
    )
    block_size: int | None = option(
        None,
        "Block size. Default: block-causal 4, block-causal-shifted and nemotron 32; idlm: 3, masks after a token.",
        metavar="N",
        minimum=1,
        common=True,
    )


@dataclass(frozen=True)
class UpcycleSettings(NewModelSettings):
    """Settings of `upcycle`, besides those of `NewModelSettings`.

    Args:
        top_k: number of copies of an MLP that process a token.
        granularity: number of experts that each copy is split into, a power of two, so that scaling is exact in every
            dtype. The model has `experts * granularity` experts, of which `top_k * granularity` process a token.
        shard_size: largest weight file, in bytes or as text such as "5GB", the default.
    """

    top_k: int = option(2, "Copies per token.", metavar="K", minimum=1, common=True)
    granularity: int = option(1, "Experts per copy, a power of two.", metavar="G", minimum=1, common=True)
    shard_size: ByteSize = _output(None, "Largest weight file. Default: 5GB.", metavar="SIZE")


def check_processes(processes: int) -> None:
    """Raise SettingError if this process cannot be forked."""
    if processes > 1 and not hasattr(os, "fork"):
        raise SettingError("processes", f"{processes}: this system cannot fork processes: use `workers`")
    if processes > 1 and "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        raise SettingError("processes", f"{processes}: a process that uses CUDA cannot be forked: use `workers`")


def settings_from(cls: type[S], **values: Any) -> S:
    """Build settings from keyword arguments, by name or alias.

    Raises:
        SettingError: an unknown name, with the nearest known one; or a setting given twice.
    """
    aliases = {alias: each.name for each in options_of(cls).values() for alias in each.aliases}
    known = [each.name for each in fields(cls)]  # type: ignore[arg-type]
    for name in [*values]:
        if name in aliases:
            if aliases[name] in values:
                raise SettingError(aliases[name], f"is given twice, also as `{name}`")
            values[aliases[name]] = values.pop(name)
        elif name not in known:
            raise SettingError(name, f"is unknown: {nearest(name, known, cutoff=0, mark='`')}")
    return cls(**values)


def takes(settings: type) -> Callable[[F], F]:
    """Decorator of a method with `**settings`: its signature lists the fields of the class as keywords."""

    def mark(method: F) -> F:
        own = inspect.signature(method)
        parameters = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
        parameters += [
            inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
            for each in fields(settings)
            if each.name not in own.parameters
        ]
        method.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return method

    return mark
