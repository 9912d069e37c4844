"""LoRA adapters by Hub weight names, and PEFT's adapter folder: adapter_config.json, adapter_model.safetensors."""

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
from dlm_bridge.errors import ChangedTensorsError, DlmBridgeError, first_of
from dlm_bridge.hub import ADAPTER_CONFIG, check_named_base, read_config
from dlm_bridge.mapping.dtypes import dtype_name
from dlm_bridge.mapping.rules import ParamMapping, Vocabulary
from dlm_bridge.models.families import FamilySpec

# A [rank, columns] and B [rows, rank]: the weight gets scale * B @ A. DoRA's magnitude [rows] is then the norm of each
# of its rows.
LoraFactor = Literal["A", "B", "magnitude"]
LORA_FACTORS: tuple[LoraFactor, LoraFactor] = ("A", "B")
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_NAME = re.compile(
    r"base_model\.model\.(.+)\.lora_(?:([AB])(?:\.default)?\.weight|magnitude_vector(?:\.default\.weight)?)"
)
# Settings under which the change of a weight is another one than scale * B @ A, or not of the weight alone.
_REFUSED = (
    "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias", "fan_in_fan_out",
    "trainable_token_indices", "layer_replication", "use_qalora", "use_bdlora", "alora_invocation_tokens",
    "arrow_config", "kasa_config", "monteclora_config", "velora_config", "megatron_config",
)  # fmt: skip
# Initialisations that move a part of the base's weights into the adapter.
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mifa")


@dataclass
class AdapterInfo:
    """What an adapter is besides its tensors. `modules` maps a changed Hub weight to the module's name in PEFT."""

    where: str
    rank: int
    alpha: float
    scale: float
    dtype: torch.dtype
    modules: dict[str, str]
    config: dict[str, Any]  # adapter_config.json
    folder: Path | None = None  # where the side files lie
    files: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)  # further modules of PEFT with the factors of a weight
    magnitude_dtype: torch.dtype | None = None  # of DoRA's magnitudes

    @property
    def dora(self) -> bool:
        return self.magnitude_dtype is not None

    @property
    def factors(self) -> tuple[LoraFactor, ...]:
        """What each changed weight has."""
        return (*LORA_FACTORS, "magnitude") if self.dora else LORA_FACTORS

    def dtype_of(self, part: LoraFactor) -> torch.dtype:
        return self.magnitude_dtype if part == "magnitude" and self.magnitude_dtype is not None else self.dtype


class LoraAdapter(ABC):
    """Tensors are read when asked for."""

    facts: AdapterInfo

    @abstractmethod
    def tensor(self, weight: str, part: LoraFactor) -> torch.Tensor:
        """One factor of the change of a Hub weight. Raises DlmBridgeError."""

    def changed(self) -> list[ChangedFile]:
        """The factors, or the files, that are not as recorded when they were written. Reads them."""
        return []

    def check_unchanged(self, accept: bool = False) -> None:
        """Raise ChangedTensorsError for such factors, unless they are accepted."""
        if not accept and (changed := self.changed()):
            raise ChangedTensorsError(self.facts.where, map(str, changed))

    def delta(self, weight: str) -> torch.Tensor:
        """scale * B @ A in fp32: what the adapter adds to a Hub weight."""
        a, b = (self.tensor(weight, part).float() for part in LORA_FACTORS)
        return self.facts.scale * (b @ a)

    def merged(self, weight: str, tensor: torch.Tensor) -> torch.Tensor:
        """The base's `tensor` of a Hub weight with the adapter in it, in fp32."""
        magnitude = self.tensor(weight, "magnitude") if self.facts.dora else None
        return merged_weight(tensor, self.delta(weight), magnitude)


def merged_weight(weight: torch.Tensor, delta: torch.Tensor, magnitude: torch.Tensor | None = None) -> torch.Tensor:
    """A base's weight with an adapter in it, in fp32; with a magnitude of each row DoRA's (arXiv:2402.09353, equation
    5)."""
    changed = weight.float() + delta
    if magnitude is None:
        return changed
    norms = changed.norm(dim=1).clamp_min(torch.finfo(changed.dtype).tiny)
    return changed * (magnitude.float() / norms)[:, None]


def factor_suffix(part: LoraFactor) -> str:
    """The end of a factor's name in PEFT's files, after its module."""
    return "lora_magnitude_vector" if part == "magnitude" else f"lora_{part}.weight"


def adapted_param(base: Checkpoint, weight: str, where: str, experts: bool = False) -> ParamMapping:
    """The parameter of a weight that an adapter may change, with `experts` also one of each routed expert. Raises
    DlmBridgeError for one that it may not."""
    param = base.param_of[weight]
    what = None
    if isinstance(param.rule, Vocabulary):
        what = "the embedding and the output layer, which"
    elif param.rule.each is not None or (param.expert is not None and not experts):
        what = "routed experts, whose adapters"
    elif ".router." in param.rule.megatron:
        what = "a router, which"
    elif param.is_mtp:
        what = "a multi-token prediction layer, which"
    elif len(param.hub_shapes[0]) != 2:
        what = "what is not a linear layer, which"
    if what:
        raise DlmBridgeError(f"{where}: changes {weight}, of {what} cannot be converted: train the adapter without it")
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
    """Raise DlmBridgeError unless factors of these shapes change the base's weight."""
    rows, columns = base.spec(weight)[1]
    if magnitude is not None and magnitude != (rows,):
        raise DlmBridgeError(
            f"{where}: its magnitudes of {weight} have shape {list(magnitude)}, its {rows} rows need {[rows]}: it is "
            "another model's adapter"
        )
    if a != (rank, columns) or b != (rows, rank):
        raise DlmBridgeError(
            f"{where}: its factors of {weight} have shapes {list(a)} and {list(b)}, a rank {rank} change of "
            f"{[rows, columns]} needs {[rank, columns]} and {[rows, rank]}: it is another model's adapter"
        )


def factor_parameters(base: Checkpoint, weights: Iterable[str], rank: int, dora: bool = False) -> int:
    """How many numbers an adapter of these weights has; an expert's gate and up projections share A."""
    total = 0
    for weight in weights:
        param, (*_, rows, columns) = base.param_of[weight], base.spec(weight)[1]
        own = param.expert is None or param.hub_names[0] == weight
        total += rank * (rows + columns * own) * (base.dims.experts if param.rule.each else 1) + rows * dora
    return total


def is_peft_folder(path: Path) -> bool:
    return (path / ADAPTER_CONFIG).is_file()


class PeftAdapter(LoraAdapter):
    """A PEFT LoRA folder of the model that `base` holds. Raises DlmBridgeError for what is neither plain LoRA nor
    DoRA, for another model's adapter, and for a change of what Megatron's adapters cannot change. Routed experts that
    are one tensor on the Hub have a `delta`, but no factors of their own."""

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
                raise DlmBridgeError(
                    f"{where}: tensor {entry.name} is not that of {weight}, the same weight: train both as one"
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
            raise DlmBridgeError(
                f"{self.facts.where}: {weight} has all experts of a layer in one tensor, whose adapter can be merged "
                "only: dlm-bridge adapter export --merge"
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
        """Those of each expert's weights, checked, and with them the factors of all stacks."""
        modules = {module for module, _ in stacks}
        for module in sorted(modules):
            if missing := [part for part in LORA_FACTORS if (module, part) not in stacks]:
                raise DlmBridgeError(f"{where}: lora_{missing[0]} of {module} is missing")
        slices, twins = expert_slices(base, partial(body_names, base.family), copies_of(base), config, modules, where)
        for weight, one in slices.items():
            a, b = (stacks[one.module, part].shape for part in LORA_FACTORS)
            check_stack(base, weight, one, a, b, config["r"], where)
        for module, twin in twins.items():
            for part in LORA_FACTORS:
                if not torch.equal(self._read(stacks[module, part]), self._read(stacks[twin, part])):
                    raise DlmBridgeError(f"{where}: {module} is not {twin}, the same experts: train both as one")

        @lru_cache(maxsize=4)  # a layer's weights come one after the other
        def stack(module: str) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = (self._read(stacks[module, part]) for part in LORA_FACTORS)
            return a, b

        self._stack = stack
        return slices

    def _read(self, entry: TensorEntry) -> torch.Tensor:
        return read_tensor(self._path, entry.offset, entry.dtype, entry.shape)


@dataclass
class _Factors:
    """The tensors of a PEFT folder by what they change."""

    entries: dict[tuple[str, str], TensorEntry] = field(default_factory=dict)  # by Hub weight and part
    modules: dict[str, str] = field(default_factory=dict)  # PEFT's module of each weight
    shared: list[tuple[str, TensorEntry, str, str]] = field(default_factory=list)  # module, tensor, weight, part
    stacks: dict[tuple[str, str], TensorEntry] = field(default_factory=dict)  # of experts, by module and part


def _checked_config(folder: Path, base: Checkpoint) -> dict[str, Any]:
    """adapter_config.json of an adapter of `base` that can be converted. Raises DlmBridgeError for any other, and for
    one without weights."""
    config = read_config(folder / ADAPTER_CONFIG)
    check_plain(config, folder / ADAPTER_CONFIG)
    if mask_only_token(folder) is not None:
        raise DlmBridgeError(
            f"{folder}: acts at mask tokens alone, which neither weights nor Megatron's adapters can: use its PEFT "
            "folder as it is"
        )
    check_named_base(config.get("base_model_name_or_path"), base.hub.source.get("name"), str(folder))
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise DlmBridgeError(f"{folder}: has no {ADAPTER_WEIGHTS}: save the adapter with safetensors")
    return config


def _find_factors(entries: Iterable[TensorEntry], base: Checkpoint, where: str) -> _Factors:
    """Raises DlmBridgeError for a tensor that is no factor, and for a weight that no adapter here may change."""
    found, weights, copies = _Factors(), weights_of_modules(base), copies_of(base)
    for entry in entries:
        match = _NAME.fullmatch(entry.name)
        if match is None:
            raise DlmBridgeError(f"{where}: tensor {entry.name} is not a LoRA factor of a linear layer")
        module, part = match[1], match[2] or "magnitude"
        if is_expert_module(module):
            found.stacks[module, part] = entry
            continue
        if module not in weights:
            raise DlmBridgeError(
                f"{where}: tensor {entry.name}: {base.where} has no linear layer {module}: is it its base model?"
            )
        weight = weights[module]
        adapted_param(base, copies.get(weight, weight), where)
        if weight in copies:
            found.shared.append((module, entry, copies[weight], part))
            continue
        if found.modules.setdefault(weight, module) != module or (weight, part) in found.entries:
            raise DlmBridgeError(f"{where}: two modules change {weight}")
        found.entries[weight, part] = entry
    if not found.modules and not found.stacks:
        raise DlmBridgeError(f"{where}: {ADAPTER_WEIGHTS} holds no LoRA factor")
    return found


def _check_factors(found: _Factors, base: Checkpoint, rank: int, dora: bool, where: str) -> None:
    """Raise DlmBridgeError for a weight that lacks a factor, or has one of another shape."""
    parts: tuple[LoraFactor, ...] = (*LORA_FACTORS, "magnitude") if dora else LORA_FACTORS
    for weight, module in found.modules.items():
        if missing := [part for part in parts if (weight, part) not in found.entries]:
            name = factor_suffix(missing[0]).removesuffix(".weight")
            raise DlmBridgeError(f"{where}: {name} of {module} is missing")
        a, b, *magnitude = (found.entries[weight, part].shape for part in parts)
        check_shapes(base, weight, a, b, rank, where, *magnitude)


def _dtypes(entries: Iterable[TensorEntry], dora: bool, where: str) -> tuple[torch.dtype, torch.dtype | None]:
    """The dtype of all A and B, and of DoRA's magnitudes. Raises DlmBridgeError where there are several."""
    dtypes, own_dtypes = set[torch.dtype](), set[torch.dtype]()
    for entry in entries:
        of_magnitude = "magnitude" in entry.name.rpartition("lora_")[2]
        if of_magnitude and not dora:
            raise DlmBridgeError(f"{where}: has magnitude vectors, but {ADAPTER_CONFIG} does not say use_dora")
        (own_dtypes if of_magnitude else dtypes).add(entry.dtype)
    for several in (dtypes, own_dtypes):
        if len(several) > 1:
            names = " and ".join(sorted(map(dtype_name, several)))
            raise DlmBridgeError(f"{where}: its tensors are of {names}: save them in one dtype")
    return dtypes.pop(), own_dtypes.pop() if own_dtypes else None


def changed_weights(folder: Path) -> list[ChangedFile]:
    """A PEFT folder's weights where they are not as the digests of a training run beside them say."""
    return check_files(folder, only=[ADAPTER_WEIGHTS]) if (folder / FILE_DIGESTS).is_file() else []


def write_peft_folder(adapter: LoraAdapter, base: Checkpoint, folder: Path) -> int:
    """Write the adapter of `base` into an existing folder, with the side files that it came with. Returns how many
    tensors."""
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
    """adapter_config.json of a plain LoRA or DoRA adapter of these modules."""
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
    """Module name -> Hub weight, by the Hub's own names and by those of the family's transformers class."""
    names = [name for name in (*base.param_of, *copies_of(base)) if name.endswith(".weight")]
    found = {name.removesuffix(".weight"): name for name in names}
    for name, module in body_names(base.family, names).items():
        found.setdefault(module.removesuffix(".weight"), name)
    return found


def copies_of(base: Checkpoint) -> dict[str, str]:
    """Hub weight that a checkpoint need not hold -> the one that it is a copy of."""
    known = base.mapping.passthrough_names(base.dims)
    return {name: entry.copy_of for name, entry in known.items() if entry.copy_of and name not in base.param_of}


def body_names(family: FamilySpec, names: Iterable[str]) -> dict[str, str]:
    """Hub name -> the parameter's name in the family's transformers class, whose modules PEFT sees."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    model_class = family.load("model_class")
    transforms = get_checkpoint_conversion_mapping(model_class.__name__)
    if transforms is None:
        transforms = get_checkpoint_conversion_mapping(family.model_type)
    renamings = [transform for transform in transforms or () if isinstance(transform, WeightRenaming)]
    return {name: rename_source_key(name, renamings, [])[0] for name in names}


def check_plain(config: dict[str, Any], path: Path) -> None:
    """Raise DlmBridgeError unless adapter_config.json says plain LoRA, of linear layers or stacked experts, or DoRA of
    linear layers."""
    if config.get("peft_type") != "LORA":
        raise DlmBridgeError(f"{path}: peft_type {config.get('peft_type')!r}: only LORA adapters are converted")
    for key in _REFUSED:
        if config.get(key):
            raise DlmBridgeError(
                f"{path}: {key} = {json.dumps(config[key])[:80]} cannot be converted, only plain LoRA and DoRA"
            )
    if config.get("use_dora") and config.get("target_parameters"):
        raise DlmBridgeError(f"{path}: use_dora with target_parameters: there is no DoRA of stacked experts")
    if config.get("bias", "none") != "none":
        raise DlmBridgeError(f"{path}: bias = {config['bias']!r} cannot be converted: train with bias 'none'")
    how = config.get("init_lora_weights")
    if isinstance(how, str) and how.lower().startswith(_CHANGES_THE_BASE):
        raise DlmBridgeError(
            f"{path}: init_lora_weights = {how!r} changes the base's weights too: convert it to plain LoRA with "
            "PEFT's path_initial_model_for_weight_conversion"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise DlmBridgeError(f"{path}: r {rank!r} and lora_alpha {alpha!r} are no rank and no scale")


def check_all_layers(base: Checkpoint, weights: Iterable[str], where: str) -> None:
    """Raise DlmBridgeError where an adapter changes a kind of weight in some layers only: Megatron stacks the layers
    of a model whose layers are all alike in one tensor."""
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
        raise DlmBridgeError(
            f"{where}: changes some layers only, not {first_of(missing)}: Megatron's stacked layers have it in all"
        )
