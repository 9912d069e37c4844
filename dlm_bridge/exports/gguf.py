"""Export to GGUF, the file format of llama.cpp: metadata, tokenizer and weights in one file.

Keys, tensor names, tensor order and types follow `convert_hf_to_gguf.py` of llama.cpp, so that both write the same
bytes for the same folder. Tables of names and block formats are those of llama.cpp's own Python package `gguf`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dlm_bridge.convert.checkpoint import Checkpoint, TensorSpec, spec_bytes
from dlm_bridge.convert.checkpoints.huggingface import copy_files
from dlm_bridge.convert.journal import Journal, JournalEntry
from dlm_bridge.convert.planning import ASSUMED_SPEED, ConversionReport, HubOutput
from dlm_bridge.convert.settings import ExportSettings
from dlm_bridge.convert.streaming import write_at
from dlm_bridge.convert.transfer import Transfer
from dlm_bridge.convert.workers import TaskMemory, in_flight, worker_count
from dlm_bridge.errors import CheckpointError, MissingExtraError, SettingError, first_of
from dlm_bridge.files.atomic import check_new_file, make_parent, replaced_file, sync, temporary_folder
from dlm_bridge.files.reading import reading
from dlm_bridge.hub import CONFIG_FILE, public_name
from dlm_bridge.loading.pretrained import load_tokenizer
from dlm_bridge.mapping.dtypes import cast, promote
from dlm_bridge.mapping.rules import ParamMapping

try:
    import gguf
except ModuleNotFoundError as error:
    raise MissingExtraError(
        "to", "GGUF files are written with the package gguf: pip install 'dlm-bridge[gguf]'"
    ) from error

Type = gguf.GGMLQuantizationType
INTERPRETER = 400 << 20  # bytes of a process that has imported torch
BAND = 16 << 20  # bytes of float32 values that are converted at once
SIDE_FILES = (".json", ".jinja", ".md", ".txt")  # of a Hub folder: what the metadata and the tokenizer come from
# File type, and the type of its matrices, by the weights' dtype or `quantize`.
FILE_TYPES = {
    torch.float32: (gguf.LlamaFileType.ALL_F32, Type.F32),
    torch.float16: (gguf.LlamaFileType.MOSTLY_F16, Type.F16),
    torch.bfloat16: (gguf.LlamaFileType.MOSTLY_BF16, Type.BF16),
    "q8_0": (gguf.LlamaFileType.MOSTLY_Q8_0, Type.Q8_0),
}
LARGEST_SCALE = 127 * torch.finfo(torch.float16).max  # of a block in Q8_0: 127 times a float16
# Pre-tokenizers of llama.cpp (`tokenizer.ggml.pre`) by the steps of tokenizer.json; see `_steps`. The patterns are
# those in the comments of llama.cpp's src/llama-vocab.cpp.
PRE_TOKENIZERS = {
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
        "ByteLevel",
    ): "qwen2",
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        "ByteLevel",
    ): "bailingmoe",
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
        "ByteLevel",
    ): "llama-bpe",
    ("Digits", "ByteLevel with a pattern"): "smollm",
    ("ByteLevel with a pattern",): "gpt-2",
}


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp.

    Args:
        model: its entry in the tables of `gguf`.
        interleaved: its rotary embedding pairs neighbouring dimensions, ours the two halves of a head.
        square: it assumes that the heads together have the model's width.
        tied: it takes the embedding where the file has no output layer.
        marks_special: added tokens that look special (`<|NAME|>`) are control tokens.
    """

    model: gguf.MODEL_ARCH
    interleaved: bool = False
    square: bool = True
    tied: bool = True
    marks_special: bool = False


ARCHITECTURES = {
    "llada": Architecture(gguf.MODEL_ARCH.LLADA, interleaved=True),
    "llada_moe": Architecture(gguf.MODEL_ARCH.LLADA_MOE, tied=False, marks_special=True),
    "dream": Architecture(gguf.MODEL_ARCH.DREAM),
    "rnd1": Architecture(gguf.MODEL_ARCH.RND1, square=False, marks_special=True),
}


@dataclass
class GgufTensor:
    """A tensor of the file. `shape` is in PyTorch's order; `offset` is a position in the file."""

    name: str
    shape: tuple[int, ...]
    type: Type
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Size without padding."""
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        return prod(self.shape) // block * size


@dataclass(frozen=True)
class Part:
    """The place of a Hub tensor in the file: a tensor, or one expert's part of it. `heads`: number of heads whose rows
    are permuted, or 0."""

    tensor: GgufTensor
    expert: int | None = None
    heads: int = 0

    @property
    def offset(self) -> int:
        if self.expert is None:
            return self.tensor.offset
        return self.tensor.offset + self.expert * self.tensor.nbytes // self.tensor.shape[0]


@dataclass(frozen=True)
class GgufPlan:
    """Tensors of the file in their order, and the parts that each Hub tensor is written to."""

    file_type: gguf.LlamaFileType
    tensors: list[GgufTensor]
    parts: dict[str, list[Part]]


def write_gguf(source: Checkpoint, output: Path, settings: ExportSettings) -> ConversionReport:
    """Write `source` as a GGUF file; with `dry_run`, only return the report.

    Raises:
        ChangedTensorsError: tensors differ from their recorded digests, without `accept_changed_tensors`.
        CheckpointError: llama.cpp does not support the model as configured, or its tokenizer.
        SettingError: llama.cpp does not support the family, or the output is refused.
    """
    started = time.monotonic()
    family = source.family.name
    if family not in ARCHITECTURES:
        raise SettingError(
            "to", f"llama.cpp has no architecture for {family}: gguf supports {', '.join(ARCHITECTURES)}"
        )
    _check_output(source, output, settings)
    notes = source.check()
    architecture = ARCHITECTURES[family]
    _check_model(source, architecture)
    plan = plan_gguf(source, architecture, settings)
    report = _report(source, output, plan, settings)
    report.notes += notes
    with side_files(source) as folder:
        header = _header(source, folder, architecture, plan)
        report.bytes = _place_tensors(plan, len(header))
        report.files = {output.name: report.bytes}
        report.estimated_seconds = report.bytes / ASSUMED_SPEED
        if settings.dry_run:
            return report
        make_parent(output.absolute())
        with replaced_file(output) as temporary:
            with temporary.open("wb") as stream:
                stream.write(header)
                stream.truncate(report.bytes)
            journal = Journal(folder, "", ())  # a GGUF file cannot be resumed, so nothing reads it
            try:
                transfer = GgufTransfer(source, plan, report, journal, settings, temporary)
                transfer.run()
            finally:
                journal.close(remove=False)
            sync(temporary)
        sync(output.absolute().parent)
    report.seconds = time.monotonic() - started
    return report


def plan_gguf(source: Checkpoint, architecture: Architecture, settings: ExportSettings) -> GgufPlan:
    """Plan the tensors of the file from headers only.

    The order is that of the Hub's files by name, and of names in a file. The experts of a layer are stacked in place
    of the last one.
    """
    names = source.hub_names()
    specs = {name: source.spec(name) for name in names}
    file_type, matrix_type = _file_type(specs, settings)
    table = gguf.get_tensor_name_map(architecture.model, source.dims.layers)
    dims, parts = source.dims, {name: [] for name in names}  # type: tuple[Any, dict[str, list[Part]]]
    tensors: list[GgufTensor] = []
    waiting: dict[str, dict[int, str]] = {}  # name of stacked experts -> Hub names by expert

    def add(hub_name: str, shape: tuple[int, ...]) -> GgufTensor:
        name = table.get_name(hub_name, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise CheckpointError(source.where, f"llama.cpp's {source.family.name} has no tensor for {hub_name}")
        tensors.append(GgufTensor(name, shape, _tensor_type(name, shape, matrix_type)))
        return tensors[-1]

    for name in _in_order(source, names):
        shape = specs[name][1]
        stacked, expert = _expert_of(name)
        if expert is not None:
            waiting.setdefault(stacked, {})[expert] = name
            layer = [each for each in waiting if _layer_of(each) == _layer_of(stacked)]
            if sum(len(waiting[each]) for each in layer) == 3 * dims.experts:
                for each in sorted(layer):
                    experts = waiting.pop(each)
                    tensor = add(each, (dims.experts, *specs[experts[0]][1]))
                    for number, hub_name in experts.items():
                        parts[hub_name].append(Part(tensor, number))
            continue
        heads = dims.heads if "q_proj." in name else dims.groups if "k_proj." in name else 0
        parts[name].append(Part(add(name, shape), heads=heads if architecture.interleaved else 0))
    if dims.tied and not architecture.tied:
        embedding = next(name for name, found in parts.items() if found[0].tensor.name == "token_embd.weight")
        output = replace(parts[embedding][0].tensor, name="output.weight")
        if all(tensor.name != output.name for tensor in tensors):
            tensors.append(output)
            parts[embedding].append(Part(output))
    for name, copy_of in source.derived.items():
        parts[copy_of] += parts.pop(name)
    return GgufPlan(file_type, tensors, parts)


class GgufTransfer(Transfer):
    """Conversion of all Hub tensors to their places in the file, which has its header and its size already."""

    def __init__(
        self,
        source: Checkpoint,
        plan: GgufPlan,
        report: ConversionReport,
        journal: Journal,
        settings: ExportSettings,
        file: Path,
    ) -> None:
        specs = {name: source.spec(name) for name in source.hub_names()}
        dtypes = [specs[param.hub_names[0]][0] for param in source.params]
        super().__init__(source, HubOutput(report, specs, []), journal, settings, dtypes)
        self._sizes = [_task_bytes(param, specs) for param in source.params]
        self._memory = TaskMemory(in_flight(self._sizes))
        self._parts, self._file = plan.parts, file

    def _is_written(self, number: int, entry: JournalEntry) -> bool:
        return False

    def _write(self, number: int) -> JournalEntry:
        param = self.source.params[number]
        for name, tensor in zip(param.hub_names, self.source.read_each(param), strict=True):
            self._put(name, tensor)
        return JournalEntry(tuple(self.records.entry(param.hub_names)), ())

    def _note_written(self, number: int, entry: JournalEntry) -> None:
        pass

    def _take_passthrough(self, name: str) -> None:
        self._put(name, self.source.read_passthrough(name))
        self._tell(spec_bytes(self.specs[name]))

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        """Write a Hub tensor to all its places, in bands of rows."""
        tensor = self.records.convert(name, tensor, self.source.stored_record(name))
        for part in self._parts[name]:
            rows = interleave_halves(tensor, part.heads) if part.heads else tensor
            rows = rows.reshape(-1, rows.shape[-1])
            step = max(1, BAND // (4 * rows.shape[1]))
            with self._file.open("r+b") as stream:
                offset = part.offset
                for start in range(0, len(rows), step):
                    data = encode(rows[start : start + step], part.tensor.type, name)
                    write_at(stream.fileno(), data.data.cast("B"), offset)
                    offset += data.nbytes


def interleave_halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Permute the rows [heads * D, ...] of a projection for rotary embeddings that pair neighbouring dimensions: rows
    j and j + D / 2 of a head become rows 2 j and 2 j + 1."""
    halves = tensor.view(heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def encode(rows: torch.Tensor, type_: Type, name: str) -> npt.NDArray[Any]:
    """Encode rows of values in a GGUF type.

    Raises:
        SettingError: a value of the tensor `name` does not fit the type.
    """
    if type_ == Type.Q8_0:
        largest = float(rows.abs().amax())
        if not largest <= LARGEST_SCALE:
            raise SettingError("quantize", f"a value of {name}, {largest:g}, does not fit q8_0")
    elif type_ != Type.F32:
        cast(rows, torch.float16 if type_ == Type.F16 else torch.bfloat16, name)  # only its check
    data: npt.NDArray[Any] = gguf.quants.quantize(rows.float().contiguous().numpy(), type_)
    return np.ascontiguousarray(data)


# ------------------------------------------------------------------------------------------------- metadata


@contextmanager
def side_files(source: Checkpoint) -> Iterator[Path]:
    """Context manager that yields a folder, named like the model, with the side files of the source as they are on the
    Hub. `gguf` reads metadata and vocabulary from a folder, and takes its name for the model's."""
    hub = source.hub
    name = public_name(str(hub.source.get("name") or "model")).rpartition("/")[2] or "model"
    with temporary_folder() as place:
        folder = place / name
        folder.mkdir()
        if hub.folder is not None:
            copy_files(hub.folder, [file for file in hub.files if file.endswith(SIDE_FILES)], folder)
        for file, text in hub.texts.items():
            (folder / file).write_bytes(text)
        (folder / CONFIG_FILE).write_bytes(hub.config_bytes())
        yield folder


def _header(source: Checkpoint, folder: Path, architecture: Architecture, plan: GgufPlan) -> bytes:
    """Beginning of the file: all metadata, and the descriptions of all tensors."""
    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[architecture.model])
    for tensor in plan.tensors:
        # With a float dtype, `shape` counts values and not bytes.
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, tensor.type)
    with reading(source.where, "its model card or configuration cannot be read"):
        _add_general(writer, folder)
    _add_parameters(writer, source, plan.file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_vocabulary(writer, source, folder, architecture)
    file = folder.with_name("header.gguf")
    writer.write_header_to_file(file)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return file.read_bytes()


def _add_general(writer: gguf.GGUFWriter, folder: Path) -> None:
    """Name, size, license and the like, from the model card and config.json."""
    counts = writer.get_total_parameter_count()
    metadata = gguf.Metadata.load(model_path=folder, total_params=counts[0])
    metadata.name = metadata.name or folder.name
    metadata.size_label = metadata.size_label or gguf.size_label(*counts)
    writer.add_type(gguf.GGUFType.MODEL)
    metadata.set_gguf_meta_model(writer)


def _add_parameters(writer: gguf.GGUFWriter, source: Checkpoint, file_type: gguf.LlamaFileType) -> None:
    """Sizes and settings of the model."""
    dims, config, family = source.dims, source.config, source.family
    settings = source.mapping.transformer(config)
    is_llada = family.name == "llada"
    writer.add_block_count(dims.layers)
    writer.add_context_length(settings["max_sequence_length"])
    if not is_llada:
        writer.add_embedding_length(dims.hidden)
        writer.add_feed_forward_length(dims.ffn)
    writer.add_head_count(dims.heads)
    writer.add_head_count_kv(dims.groups)
    if family.name == "rnd1":
        writer.add_causal_attention(False)
    writer.add_rope_freq_base(settings["rotary_base"])
    writer.add_layer_norm_rms_eps(settings["layernorm_epsilon"])
    if dims.experts:
        writer.add_expert_count(dims.experts)
        writer.add_expert_used_count(settings["moe_router_topk"])
    if config.get("head_dim") is not None or dims.q_rows != dims.hidden:
        writer.add_key_length(dims.head_dim)
        writer.add_value_length(dims.head_dim)
    writer.add_file_type(file_type)
    if is_llada:
        writer.add_vocab_size(dims.vocab)
        writer.add_rope_dimension_count(dims.head_dim)
        writer.add_embedding_length(dims.hidden)
        writer.add_feed_forward_length(dims.ffn)
    if dims.experts:
        writer.add_expert_feed_forward_length(dims.moe_ffn)
    if family.name == "llada_moe":
        writer.add_mask_token_id(mask_token(source))
    if family.name != "rnd1":
        writer.add_causal_attention(False)
    if family.name in ("dream", "rnd1"):
        writer.add_mask_token_id(mask_token(source))
    if not family.shift:  # the default is true
        writer.add_diffusion_shift_logits(False)


def _add_vocabulary(writer: gguf.GGUFWriter, source: Checkpoint, folder: Path, architecture: Architecture) -> None:
    """Tokens, merges, special tokens and chat template."""
    tokenizer = load_tokenizer(folder, source.where)
    tokens, types = _tokens(tokenizer, source, architecture)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer(tokenizer, source.where))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    with reading(source.where, "its tokenizer cannot be read"):
        special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=source.dims.vocab)
    special.special_token_ids["mask"] = mask_token(source)
    if source.family.name != "llada":
        special.special_token_ids.pop("mask")  # is among the parameters
    elif "bos" in special.add_special_token:
        special.add_special_token["bos"] = True
    special.add_to_gguf(writer, quiet=True)
    if source.family.name == "llada" and "bos" not in special.add_special_token:
        writer.add_add_bos_token(True)


def mask_token(source: Checkpoint) -> int:
    """Id of the mask token. Raises CheckpointError if the model has none in its vocabulary."""
    mask = source.config.get("mask_token_id")
    mask = source.family.mask_token_id if mask is None else mask
    if type(mask) is not int or not 0 <= mask < source.dims.vocab:
        raise CheckpointError(
            source.where,
            f"mask_token_id {mask!r} is not in the vocabulary of {source.dims.vocab} tokens, and llama.cpp needs one",
        )
    return mask


def pre_tokenizer(tokenizer: Any, where: str) -> str:
    """Name of llama.cpp's pre-tokenizer with the steps of this tokenizer. Raises CheckpointError for others."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    data = {} if backend is None else json.loads(backend.to_str())
    if data.get("model", {}).get("type") != "BPE" or data["model"].get("byte_fallback"):
        raise CheckpointError(where, "its tokenizer is not a byte-level BPE, the only kind that this export supports")
    steps = tuple(_steps(data.get("pre_tokenizer") or {}))
    if steps not in PRE_TOKENIZERS:
        raise CheckpointError(
            where,
            f"no pre-tokenizer of llama.cpp has the steps of its tokenizer ({', '.join(steps) or 'none'}): known are "
            f"those of {', '.join(PRE_TOKENIZERS.values())}",
        )
    return PRE_TOKENIZERS[steps]


def _steps(pre_tokenizer: dict[str, Any]) -> Iterator[str]:
    """Steps of a pre-tokenizer of tokenizer.json: the pattern of a split, and the names of others."""
    for step in pre_tokenizer.get("pretokenizers", [pre_tokenizer]):
        kind = step.get("type", "")
        if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            yield str(step["pattern"].get("Regex", step["pattern"]))
        elif kind == "Digits" and not step.get("individual_digits"):
            yield "Digits in groups"
        elif kind == "ByteLevel" and step.get("use_regex", True):
            yield "ByteLevel with a pattern"
        elif kind:
            yield kind


def _tokens(tokenizer: Any, source: Checkpoint, architecture: Architecture) -> tuple[list[str], list[int]]:
    """Text and type of every row of the embedding. Rows without a token are `[PADn]`, unused."""
    names = {number: token for token, number in tokenizer.get_vocab().items()}
    rows = source.dims.vocab
    if max(names, default=0) >= rows:
        raise CheckpointError(
            source.where, f"its tokenizer has the token {max(names)}, and its vocabulary ends at {rows - 1}"
        )
    added = tokenizer.added_tokens_decoder
    kinds = gguf.TokenType

    def kind(number: int) -> int:
        if number not in names:
            return int(kinds.UNUSED)
        if number not in added:
            return int(kinds.NORMAL)
        token = names[number]
        special = added[number].special
        if architecture.marks_special:
            special = special or token in ("<pad>", "<mask>") or (token.startswith("<|") and token.endswith("|>"))
        return int(kinds.CONTROL if special else kinds.USER_DEFINED)

    return [names.get(number, f"[PAD{number}]") for number in range(rows)], [kind(number) for number in range(rows)]


# ------------------------------------------------------------------------------------------------- helpers


def _check_output(source: Checkpoint, output: Path, settings: ExportSettings) -> None:
    check_new_file(output, settings.overwrite)
    real = output.resolve()
    for folder in source.folders():
        if folder.resolve() in real.parents:
            raise SettingError("output", f"{output} is in the source {folder}: choose another folder")


def _check_model(source: Checkpoint, architecture: Architecture) -> None:
    """Raise CheckpointError for configurations that llama.cpp would compute otherwise."""
    config, dims = source.config, source.dims
    scaling = config.get("rope_scaling")
    if scaling and (scaling.get("rope_type") or scaling.get("type")) not in (None, "default"):
        raise CheckpointError(source.where, f"rope_scaling {scaling} is not written to GGUF: remove it")
    if dims.dense_layers:
        raise CheckpointError(source.where, "llama.cpp does not support layers without experts in this model")
    if architecture.square and dims.q_rows != dims.hidden:
        raise CheckpointError(
            source.where, f"llama.cpp needs head_dim = hidden_size / heads, not {dims.head_dim} in {dims.heads} heads"
        )
    if source.family.name == "rnd1" and not config.get("norm_topk_prob", True):
        raise CheckpointError(source.where, "norm_topk_prob = False is not supported: llama.cpp renormalises RND1")


def _file_type(specs: dict[str, TensorSpec], settings: ExportSettings) -> tuple[gguf.LlamaFileType, Type]:
    """File type and type of matrices; without a cast the narrowest that holds the stored dtypes."""
    if settings.quantize is not None:
        return FILE_TYPES[settings.quantize]
    dtype = settings.cast_dtype or promote([dtype for dtype, shape in specs.values() if len(shape) > 1])
    if dtype not in FILE_TYPES:
        raise SettingError("dtype", f"GGUF has no {dtype}: choose fp32, fp16 or bf16")
    return FILE_TYPES[dtype]


def _tensor_type(name: str, shape: tuple[int, ...], matrix_type: Type) -> Type:
    """Type of a tensor: vectors, norms and routers are F32, and rows that are not whole blocks F16."""
    if len(shape) == 1 or name.endswith(("_norm.weight", ".ffn_gate_inp.weight")):
        return Type.F32
    block, _ = gguf.GGML_QUANT_SIZES[matrix_type]
    return matrix_type if shape[-1] % block == 0 else Type.F16


def _in_order(source: Checkpoint, names: Sequence[str]) -> list[str]:
    """Names in the order of the Hub's files, and sorted in each; in one file if the files are not known."""
    shards = {shard.file: sorted(shard.tensors) for shard in source.hub.shards}
    ordered = [name for file in sorted(shards) for name in shards[file]]
    return ordered if sorted(ordered) == sorted(names) else sorted(names)


def _expert_of(name: str) -> tuple[str, int | None]:
    """("A.experts.B.weight", 3) of "A.experts.3.B.weight"; (name, None) of other tensors."""
    before, found, after = name.partition(".experts.")
    number, _, rest = after.partition(".")
    return (f"{before}{found}{rest}", int(number)) if found else (name, None)


def _layer_of(name: str) -> str:
    return name.partition(".mlp.")[0]


def _place_tensors(plan: GgufPlan, header: int) -> int:
    """Set the offsets of all tensors behind a header of this size. Returns the size of the file."""
    offset = _aligned(header)
    for tensor in plan.tensors:
        tensor.offset = offset
        offset += _aligned(tensor.nbytes)
    return offset


def _aligned(nbytes: int) -> int:
    return -(-nbytes // gguf.GGUF_DEFAULT_ALIGNMENT) * gguf.GGUF_DEFAULT_ALIGNMENT


def _task_bytes(param: ParamMapping, specs: dict[str, TensorSpec]) -> int:
    """Upper bound of the memory of a parameter's task: its tensors, a permuted copy of one, and a few bands."""
    return 2 * sum(spec_bytes(specs[name]) for name in param.hub_names) + 4 * BAND


def _report(source: Checkpoint, output: Path, plan: GgufPlan, settings: ExportSettings) -> ConversionReport:
    specs = {name: source.spec(name) for name in source.hub_names()}
    sizes = sorted((_task_bytes(param, specs) for param in source.params), reverse=True)
    workers = worker_count(settings.workers)
    fallback = [tensor.name for tensor in plan.tensors if tensor.type == Type.F16] if settings.quantize else []
    return ConversionReport(
        action="export",
        source=source.where,
        output=str(output),
        family=source.family.name,
        format="gguf",
        dtype=" + ".join(sorted({tensor.type.name for tensor in plan.tensors})),
        tensors=len(plan.tensors),
        parameters=sum(prod(tensor.shape) for tensor in plan.tensors),
        bytes=0,
        files={},
        left_out=list(source.hub.excluded),
        notes=[f"stored as F16, rows that are not whole blocks of 32: {first_of(fallback, 3)}"] if fallback else [],
        largest_tensor=max(tensor.nbytes for tensor in plan.tensors),
        workers=workers,
        processes=settings.processes,
        peak_memory=INTERPRETER + min(sum(sizes[:workers]), in_flight(sizes)),
        dry_run=settings.dry_run,
    )
