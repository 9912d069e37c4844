"""LoRA adapters by Hub weight, and PEFT's adapter folder (adapter_config.json, adapter_model.safetensors)."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.checkpoints.huggingface import copy_files, list_side_files
from dlm_bridge.convert.formats.hub_weights import TensorEntry, read_header
from dlm_bridge.convert.lora.experts import (
    ExpertSlice,
    check_stack,
    expert_slices,
    is_expert_module,
    stacked_factors,
    target_parameters,
)
from dlm_bridge.convert.lora.mask_only import mask_only_token
from dlm_bridge.convert.manifest import FILE_DIGESTS, ChangedFile, check_files
from dlm_bridge.convert.streaming import read_tensor
from dlm_bridge.errors import ChangedTensorsError, CheckpointError, first_of
from dlm_bridge.hub import ADAPTER_CONFIG, check_named_base, read_config
from dlm_bridge.mapping.dtypes import dtype_name
from dlm_bridge.mapping.rules import ParamMapping, Vocabulary
from dlm_bridge.models.families import FamilySpec

# A [rank, columns] and B [rows, rank]: scale * B @ A is added to the weight. DoRA then scales each row to its
# magnitude [rows].
LoraFactor = Literal["A", "B", "magnitude"]
LORA_FACTORS: tuple[LoraFactor, LoraFactor] = ("A", "B")
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_NAME = re.compile(
    r"base_model\.model\.(.+)\.lora_(?:([AB])(?:\.default)?\.weight|magnitude_vector(?:\.default\.weight)?)"
)
# Settings with which the change of a weight is not scale * B @ A, or more than weights change.
_REFUSED = (
    "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias", "fan_in_fan_out",
    "trainable_token_indices", "layer_replication", "use_qalora", "use_bdlora", "alora_invocation_tokens",
    "arrow_config", "kasa_config", "monteclora_config", "velora_config", "megatron_config",
)  # fmt: skip
_PLAIN = {"peft_type": "LORA", "bias": "none"}
# Initialisations that move a part of the base's weights into the adapter.
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mifa")


@dataclass
class AdapterInfo:
    """Description of an adapter without its tensors."""

    where: str
    rank: int
    alpha: float
    scale: float
    dtype: torch.dtype
    modules: dict[str, str]  # PEFT's module by changed Hub weight
    config: dict[str, Any]  # adapter_config.json
    folder: Path | None = None  # of the side files
    files: tuple[str, ...] = ()
    copies: dict[str, str] = field(default_factory=dict)  # Hub weight by further PEFT module with the same factors
    magnitude_dtype: torch.dtype | None = None  # for DoRA

    @property
    def dora(self) -> bool:
        return self.magnitude_dtype is not None

    @property
    def factors(self) -> tuple[LoraFactor, ...]:
        """Factors of each changed weight."""
        return (*LORA_FACTORS, "magnitude") if self.dora else LORA_FACTORS

    def dtype_of(self, part: LoraFactor) -> torch.dtype:
        return self.magnitude_dtype if part == "magnitude" and self.magnitude_dtype is not None else self.dtype


class LoraAdapter(ABC):
    """LoRA or DoRA adapter of a base model. Tensors are read on access."""

    facts: AdapterInfo

    @abstractmethod
    def tensor(self, weight: str, part: LoraFactor) -> torch.Tensor:
        """One factor of a Hub weight. Raises CheckpointError."""

    def changed(self) -> list[ChangedFile]:
        """Factors or files that differ from their recorded digests. Reads them all."""
        return []

    def check_unchanged(self, accept: bool = False) -> None:
        """Raise ChangedTensorsError for factors that differ from their recorded digests, unless accepted."""
        if not accept and (changed := self.changed()):
            raise ChangedTensorsError(self.facts.where, map(str, changed))

    def delta(self, weight: str) -> torch.Tensor:
        """Change of a Hub weight, scale * B @ A, in fp32."""
        a, b = (self.tensor(weight, part).float() for part in LORA_FACTORS)
        return self.facts.scale * (b @ a)

    def merged(self, weight: str, tensor: torch.Tensor) -> torch.Tensor:
        """The base's `tensor` of a Hub weight with the adapter merged, in fp32."""
        magnitude = self.tensor(weight, "magnitude") if self.facts.dora else None
        return merged_weight(tensor, self.delta(weight), magnitude)


def merged_weight(weight: torch.Tensor, delta: torch.Tensor, magnitude: torch.Tensor | None = None) -> torch.Tensor:
    """Weight with an adapter merged, in fp32. With magnitudes [rows] of DoRA: arXiv:2402.09353, equation 5."""
    changed = weight.float() + delta
    if magnitude is None:
        return changed
    norms = changed.norm(dim=1).clamp_min(torch.finfo(changed.dtype).tiny)
    return changed * (magnitude.float() / norms)[:, None]


def factor_suffix(part: LoraFactor) -> str:
    """Suffix of a factor's name in PEFT's files, after its module."""
    return "lora_magnitude_vector" if part == "magnitude" else f"lora_{part}.weight"


def adapted_param(base: Checkpoint, weight: str, where: str, experts: bool = False) -> ParamMapping:
    """Parameter of a weight that an adapter may change, with `experts` also a routed expert's.

    Raises:
        CheckpointError: adapters of the weight cannot be converted.
    """
    param = base.param_of[weight]
    what = None
    if isinstance(param.rule, Vocabulary):
        what = "the embedding or output layer"
    elif param.rule.each is not None or (param.expert is not None and not experts):
        what = "a routed expert"
    elif ".router." in param.rule.megatron:
        what = "a router"
    elif param.is_mtp:
        what = "a multi-token prediction layer"
    elif len(param.hub_shapes[0]) != 2:
        what = "not a linear layer"
    if what:
        raise CheckpointError(
            where, f"changes {weight} ({what}), which cannot be converted: train the adapter without it"
        )
    return param


def check_shapes(
    base: Checkpoint,
    weight: str,
    a: tuple[int, ...],
    b: tuple[int, ...],
    rank: int,
    where: str,
    magnitude: tuple[int, ...] | None = None,
) -> None:
    """Raise CheckpointError unless factors of these shapes fit the base's weight."""
    rows, columns = base.spec(weight)[1]
    found = [a, b, (rows,) if magnitude is None else magnitude]
    wanted = [(rank, columns), (rows, rank), (rows,)]
    if found != wanted:
        raise CheckpointError(
            where,
            f"factors of {weight} have shapes {', '.join(map(str, found))}; with rank {rank} the base model needs "
            f"{', '.join(map(str, wanted))}: it is another model's adapter",
        )


def factor_parameters(base: Checkpoint, weights: Iterable[str], rank: int, dora: bool = False) -> int:
    """Number of parameters of an adapter of these weights; an expert's gate and up projections share A."""
    total = 0
    for weight in weights:
        param, (*_, rows, columns) = base.param_of[weight], base.spec(weight)[1]
        own = param.expert is None or param.hub_names[0] == weight
        total += rank * (rows + columns * own) * (base.dims.experts if param.rule.each else 1) + rows * dora
    return total


def is_peft_folder(path: Path) -> bool:
    return (path / ADAPTER_CONFIG).is_file()


class PeftAdapter(LoraAdapter):
    """PEFT folder with a LoRA or DoRA adapter of `base`.

    Routed experts that are one tensor on the Hub have a `delta`, but no separate factors.

    Raises:
        CheckpointError: neither plain LoRA nor DoRA, another model's adapter, or a change of a weight whose adapter
            cannot be converted.
    """

    def __init__(self, folder: Path, base: Checkpoint) -> None:
        where = str(folder)
        config = _checked_config(folder, base)
        self._path = folder / ADAPTER_WEIGHTS
        entries = read_header(self._path).entries
        found = _find_factors(entries, base, where)
        rank, dora = config["r"], bool(config.get("use_dora"))
        _check_factors(found, base, rank, dora, where)
        for _, entry, weight, part in found.shared:
            twin = found.entries.get((weight, part))
            if twin is None or not torch.equal(*(self._read(one) for one in (entry, twin))):
                raise CheckpointError(
                    where, f"tensor {entry.name} differs from that of {weight}, the same weight: train both as one"
                )
        self._entries = found.entries
        self._experts = self._slices(base, config, found.stacks, where) if found.stacks else {}
        self._number = base.dims.experts
        dtype, magnitude_dtype = _dtypes(entries, dora, where)
        alpha = float(config["lora_alpha"])
        self.facts = AdapterInfo(
            where=where,
            rank=rank,
            alpha=alpha,
            scale=alpha / (math.sqrt(rank) if config.get("use_rslora") else rank),
            dtype=dtype,
            modules=found.modules | {weight: one.module for weight, one in self._experts.items()},
            config=config,
            folder=folder,
            files=list_side_files(folder, {ADAPTER_WEIGHTS}).kept,
            copies={module: weight for module, _, weight, _ in found.shared},
            magnitude_dtype=magnitude_dtype,
        )

    def changed(self) -> list[ChangedFile]:
        return changed_weights(self._path.parent)

    def tensor(self, weight: str, part: LoraFactor) -> torch.Tensor:
        if (one := self._experts.get(weight)) is None:
            return self._read(self._entries[weight, part])
        if one.expert is None:
            raise CheckpointError(
                self.facts.where,
                f"{weight} has all experts of a layer in one tensor, so the adapter can only be merged (dlm-bridge "
                "adapter export with `merge`)",
            )
        a, b = one.factors(*self._stack(one.module), self._number)
        return a if part == "A" else b

    def delta(self, weight: str) -> torch.Tensor:
        if (one := self._experts.get(weight)) is None:
            return super().delta(weight)
        return self.facts.scale * one.product(*self._stack(one.module), self._number)

    def _slices(
        self,
        base: Checkpoint,
        config: dict[str, Any],
        stacks: dict[tuple[str, str], TensorEntry],
        where: str,
    ) -> dict[str, ExpertSlice]:
        """Check the stacks' factors, prepare `_stack` to read them, and locate each expert weight's slice."""
        modules = {module for module, _ in stacks}
        _check_complete(stacks, {module: module for module in modules}, LORA_FACTORS, where)
        slices, twins = expert_slices(base, partial(body_names, base.family), copies_of(base), config, modules, where)
        for weight, one in slices.items():
            a, b = (stacks[one.module, part].shape for part in LORA_FACTORS)
            check_stack(base, weight, one, a, b, config["r"], where)
        for module, twin in twins.items():
            for part in LORA_FACTORS:
                if not torch.equal(self._read(stacks[module, part]), self._read(stacks[twin, part])):
                    raise CheckpointError(where, f"{module} differs from {twin}, the same experts: train both as one")

        @lru_cache(maxsize=4)  # a layer's weights are read one after another
        def stack(module: str) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = (self._read(stacks[module, part]) for part in LORA_FACTORS)
            return a, b

        self._stack = stack
        return slices

    def _read(self, entry: TensorEntry) -> torch.Tensor:
        return read_tensor(self._path, entry.offset, entry.dtype, entry.shape)


@dataclass
class _Factors:
    """Tensors of a PEFT folder by the weights that they change."""

    entries: dict[tuple[str, str], TensorEntry] = field(default_factory=dict)  # by Hub weight and part
    modules: dict[str, str] = field(default_factory=dict)  # PEFT's module of each weight
    shared: list[tuple[str, TensorEntry, str, str]] = field(default_factory=list)  # module, tensor, weight, part
    stacks: dict[tuple[str, str], TensorEntry] = field(default_factory=dict)  # experts', by module and part


def _checked_config(folder: Path, base: Checkpoint) -> dict[str, Any]:
    """adapter_config.json of an adapter of `base`. Raises CheckpointError if it cannot be converted."""
    config = read_config(folder / ADAPTER_CONFIG)
    check_plain(config, folder / ADAPTER_CONFIG)
    if mask_only_token(folder) is not None:
        raise CheckpointError(
            folder,
            "acts at mask tokens only, which merged weights and Megatron's adapters cannot do: use the PEFT folder",
        )
    check_named_base(config.get("base_model_name_or_path"), base.hub.source.get("name"), str(folder))
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise CheckpointError(folder, f"has no {ADAPTER_WEIGHTS}: save the adapter with safetensors")
    return config


def _find_factors(entries: Iterable[TensorEntry], base: Checkpoint, where: str) -> _Factors:
    """Group an adapter's tensors.

    Raises:
        CheckpointError: a tensor is not a LoRA factor, or adapters of its weight cannot be converted.
    """
    found, weights, copies = _Factors(), weights_of_modules(base), copies_of(base)
    for entry in entries:
        match = _NAME.fullmatch(entry.name)
        if match is None:
            raise CheckpointError(where, f"tensor {entry.name} is not a LoRA factor of a linear layer")
        module, part = match[1], match[2] or "magnitude"
        if is_expert_module(module):
            found.stacks[module, part] = entry
            continue
        if module not in weights:
            raise CheckpointError(
                where, f"{base.where} has no linear layer {module} (tensor {entry.name}): is it the base model?"
            )
        weight = weights[module]
        adapted_param(base, copies.get(weight, weight), where)
        if weight in copies:
            found.shared.append((module, entry, copies[weight], part))
            continue
        if found.modules.setdefault(weight, module) != module or (weight, part) in found.entries:
            raise CheckpointError(where, f"two modules change {weight}")
        found.entries[weight, part] = entry
    if not found.modules and not found.stacks:
        raise CheckpointError(where, f"{ADAPTER_WEIGHTS} has no LoRA factor")
    return found


def _check_factors(found: _Factors, base: Checkpoint, rank: int, dora: bool, where: str) -> None:
    """Raise CheckpointError for a weight that lacks a factor, or has one of another shape."""
    parts: tuple[LoraFactor, ...] = (*LORA_FACTORS, "magnitude") if dora else LORA_FACTORS
    _check_complete(found.entries, found.modules, parts, where)
    for weight in found.modules:
        a, b, *magnitude = (found.entries[weight, part].shape for part in parts)
        check_shapes(base, weight, a, b, rank, where, *magnitude)


def _check_complete(
    entries: dict[tuple[str, str], TensorEntry], modules: dict[str, str], parts: tuple[LoraFactor, ...], where: str
) -> None:
    """Raise CheckpointError unless every weight, or stack, of `modules` has all factors."""
    missing = [(module, part) for name, module in modules.items() for part in parts if (name, part) not in entries]
    if missing:
        module, part = min(missing)
        raise CheckpointError(where, f"{factor_suffix(part).removesuffix('.weight')} of {module} is missing")


def _dtypes(entries: Iterable[TensorEntry], dora: bool, where: str) -> tuple[torch.dtype, torch.dtype | None]:
    """Dtype of all A and B, and of DoRA's magnitudes. Raises CheckpointError if either has several."""
    dtypes, own_dtypes = set[torch.dtype](), set[torch.dtype]()
    for entry in entries:
        of_magnitude = "magnitude" in entry.name.rpartition("lora_")[2]
        if of_magnitude and not dora:
            raise CheckpointError(where, f"has magnitude vectors, but {ADAPTER_CONFIG} does not set use_dora")
        (own_dtypes if of_magnitude else dtypes).add(entry.dtype)
    for several in (dtypes, own_dtypes):
        if len(several) > 1:
            names = " and ".join(sorted(map(dtype_name, several)))
            raise CheckpointError(where, f"has tensors of {names}: save them in one dtype")
    return dtypes.pop(), own_dtypes.pop() if own_dtypes else None


def changed_weights(folder: Path) -> list[ChangedFile]:
    """A PEFT folder's weight file, if it differs from the digests that a training run recorded."""
    return check_files(folder, only=[ADAPTER_WEIGHTS]) if (folder / FILE_DIGESTS).is_file() else []


def write_peft_folder(adapter: LoraAdapter, base: Checkpoint, folder: Path) -> int:
    """Write the adapter of `base` and its side files into an existing folder. Returns the number of tensors."""
    facts = adapter.facts
    if facts.folder is not None:
        copy_files(facts.folder, [name for name in facts.files if name != ADAPTER_CONFIG], folder)
    linear = [(module, weight) for weight, module in facts.modules.items() if base.param_of[weight].expert is None]
    tensors = {
        f"base_model.model.{module}.{factor_suffix(part)}": adapter.tensor(weight, part).contiguous()
        for module, weight in [*linear, *facts.copies.items()]
        for part in facts.factors
    }
    stacks: dict[str, list[str]] = {}
    for weight in facts.modules.keys() - {weight for _, weight in linear}:
        stacks.setdefault(facts.modules[weight], []).append(weight)
    for module, weights in stacks.items():
        factors = stacked_factors(base, weights, adapter.tensor)  # type: ignore[arg-type]
        for part, factor in zip(LORA_FACTORS, factors, strict=True):
            tensors[f"base_model.model.{module}.{factor_suffix(part)}"] = factor.contiguous()
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    if facts.folder is not None and ADAPTER_CONFIG in facts.files:
        copy_files(facts.folder, [ADAPTER_CONFIG], folder)
    else:
        (folder / ADAPTER_CONFIG).write_text(json.dumps(facts.config, indent=2, sort_keys=True) + "\n", "utf-8")
    return len(tensors)


def plain_config(
    rank: int, alpha: float, modules: Iterable[str], base: str | None, dora: bool = False
) -> dict[str, Any]:
    """adapter_config.json for a plain LoRA or DoRA adapter of these modules."""
    modules = list(modules)
    stacks = target_parameters(modules)
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules if not is_expert_module(module)}),
        **({"target_parameters": stacks} if stacks else {}),
        "task_type": "CAUSAL_LM",
        "use_dora": dora,
        "use_rslora": False,
    }


def weights_of_modules(base: Checkpoint) -> dict[str, str]:
    """Hub weight by module name, for the Hub's names and those of the family's transformers class."""
    names = [name for name in (*base.param_of, *copies_of(base)) if name.endswith(".weight")]
    found = {name.removesuffix(".weight"): name for name in names}
    for name, module in body_names(base.family, names).items():
        found.setdefault(module.removesuffix(".weight"), name)
    return found


def copies_of(base: Checkpoint) -> dict[str, str]:
    """Original by copy, for Hub weights that a checkpoint may omit."""
    known = base.mapping.passthrough_names(base.dims)
    return {name: entry.copy_of for name, entry in known.items() if entry.copy_of and name not in base.param_of}


def body_names(family: FamilySpec, names: Iterable[str]) -> dict[str, str]:
    """Parameter names in the family's transformers class, which are PEFT's, by Hub name."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    model_class = family.load("model_class")
    transforms = get_checkpoint_conversion_mapping(model_class.__name__)
    if transforms is None:
        transforms = get_checkpoint_conversion_mapping(family.model_type)
    renamings = [transform for transform in transforms or () if isinstance(transform, WeightRenaming)]
    return {name: rename_source_key(name, renamings, [])[0] for name in names}


def check_plain(config: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError unless adapter_config.json is of plain LoRA (linear layers or stacked experts) or of DoRA
    (linear layers)."""
    refused = [key for key, plain in _PLAIN.items() if config.get(key, "none") != plain]
    refused += [key for key in _REFUSED if config.get(key)]
    if config.get("use_dora") and config.get("target_parameters"):  # PEFT has no DoRA of stacked experts
        refused.append("use_dora")
    if refused:
        value = json.dumps(config.get(refused[0]))[:80]
        raise CheckpointError(
            path, f"{refused[0]} = {value} cannot be converted: only plain LoRA, or DoRA of linear layers, can be"
        )
    how = config.get("init_lora_weights")
    if isinstance(how, str) and how.lower().startswith(_CHANGES_THE_BASE):
        raise CheckpointError(
            path,
            f"init_lora_weights = {how!r} changes the base's weights too: convert it to plain LoRA with PEFT's "
            "path_initial_model_for_weight_conversion",
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise CheckpointError(path, f"r = {rank!r} and lora_alpha = {alpha!r} must be a rank and a finite number")


def check_all_layers(base: Checkpoint, weights: Iterable[str], where: str) -> None:
    """Raise CheckpointError if an adapter changes a weight in some layers only. Megatron stacks the layers of a
    homogeneous model in one tensor."""
    if not base.dims.homogeneous:
        return
    given = set(weights)
    kinds = {(base.param_of[weight].rule, base.param_of[weight].hub_names.index(weight)) for weight in given}
    missing = [
        param.hub_names[number]
        for param in base.params
        for rule, number in kinds
        if param.rule is rule and param.hub_names[number] not in given
    ]
    if missing:
        raise CheckpointError(
            where, f"does not change {first_of(missing)}, but other layers' weights: Megatron stacks all layers"
        )
