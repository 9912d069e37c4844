"""Model families: the table of families, `FamilySpec`, and the family of a Hub config.

Nothing here loads a model. Specs are imported when the table is first read.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
from collections.abc import Callable, Iterator
from collections.abc import Mapping as MappingABC
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from dlm_bridge.errors import CheckpointError, MissingExtraError
from dlm_bridge.mapping.rules import Mapping
from dlm_bridge.models.initialisation import InitialisationRule, initialise, normal_rule
from dlm_bridge.registration import load_entry_points
from dlm_bridge.settings import check_choice, nearest

if TYPE_CHECKING:
    import torch

    from dlm_bridge.attention.masks import AttentionPattern

logger = logging.getLogger(__name__)

ENTRY_POINTS = "dlm_bridge.families"  # entry points of other packages, each a FamilySpec

FAMILY_SPECS = (
    "dlm_bridge.models.llada:SPEC",
    "dlm_bridge.models.a2d:LLAMA",
    "dlm_bridge.models.a2d:QWEN2",
    "dlm_bridge.models.a2d:QWEN3",
    "dlm_bridge.models.coda:SPEC",
    "dlm_bridge.models.difflm:SPEC",
    "dlm_bridge.models.diffusion_gemma:SPEC",
    "dlm_bridge.models.diffullama:SPEC",
    "dlm_bridge.models.dream:SPEC",
    "dlm_bridge.models.dream_reasoner:SPEC",
    "dlm_bridge.models.dreamon:SPEC",
    "dlm_bridge.models.fast_dllm_v2:SPEC",
    "dlm_bridge.models.idlm:SPEC",
    "dlm_bridge.models.illada:SPEC",
    "dlm_bridge.models.llada2_moe:SPEC",
    "dlm_bridge.models.llada_moe:SPEC",
    "dlm_bridge.models.nemotron_labs_diffusion:SPEC",
    "dlm_bridge.models.rnd1:SPEC",
    "dlm_bridge.models.sdar:SPEC",
    "dlm_bridge.models.sdar_moe:SPEC",
    "dlm_bridge.models.stable_diffcoder:SPEC",
    "dlm_bridge.models.wedlm:SPEC",
    "dlm_bridge.models.autoregressive:LLAMA",
    "dlm_bridge.models.autoregressive:QWEN2",
    "dlm_bridge.models.autoregressive:QWEN3",
    "dlm_bridge.models.autoregressive:MISTRAL",
    "dlm_bridge.models.autoregressive:QWEN3_MOE",
    "dlm_bridge.models.autoregressive:MIXTRAL",
    "dlm_bridge.models.glm4_moe:SPEC",
    "dlm_bridge.models.autoregressive:OLMOE",
    "dlm_bridge.models.deepseek_v3:SPEC",
    "dlm_bridge.models.bailing_moe:SPEC",
    "dlm_bridge.models.gpt_oss:SPEC",
    "dlm_bridge.models.autoregressive_dense:SEED_OSS",
    "dlm_bridge.models.autoregressive_dense:SMOLLM3",
    "dlm_bridge.models.autoregressive_dense:PHI3",
    "dlm_bridge.models.autoregressive_dense:GRANITE",
    "dlm_bridge.models.autoregressive_dense:OLMO2",
    "dlm_bridge.models.autoregressive_dense:OLMO3",
    "dlm_bridge.models.autoregressive_dense:GEMMA2",
    "dlm_bridge.models.autoregressive_dense:GEMMA3",
)
DERIVED_SPECS = "dlm_bridge.models.derived:SPECS"  # diffusion forms of the autoregressive families

# Published checkpoints that are not or only partly supported, with the reason. Keyed by Hub architecture; "A in B" is
# a checkpoint B that names the architecture A of a family above.
UNSUPPORTED: dict[str, str] = {
    "BD3LM": "BD3LM (OpenWebText) is a diffusion transformer with time modulation and LayerNorm: not supported",
    "CausalLM": "MegaDLMs' autoregressive baselines have no model type: load them with their own code",
    "DFlashDraftModel": "DFlash models draft tokens for another model's speculative decoding and cannot run alone",
    "DiffEncoderModel": "Efficient-DLM's settings (mask token 151662, blocks of 32) were not checked against its code",
    "DiscreteDiffusionModel": "DiffuGPT is GPT-2 (learned positions, LayerNorm, biases), which is not supported",
    "GPT2LMHeadModel": "GPT-2 (also DiffuGPT's base) has learned positions, LayerNorm and biases: not supported",
    "Gemma3ForConditionalGeneration": (
        "Gemma 3 from 4B on has a vision tower: only text models (Gemma3ForCausalLM) are supported"
    ),
    "LLaDAModelLM in MMaDA": (
        "MMaDA's text model loads as LLaDA with a longer vocabulary (image tokens at its end); its image tokenizer "
        "and image sampler are not implemented"
    ),
    "Lfm2BidirectionalForMaskedLM": "LFM2.5-Encoder-Diffusion has short convolutions, which are not supported",
    "MDLM": "MDLM (OpenWebText) is a diffusion transformer with time modulation and LayerNorm, which is not supported",
    "MMadaModelLM": "MMaDA is multimodal (image tokenizer, mixed vocabulary): only text models are supported",
    "ModernBertForMaskedLM": (
        "ModernBERT-Chat is part of transformers; its encoder (LayerNorm, alternating windows, GeGLU) has no mapping"
    ),
    "NemotronLabsDiffusionVLMModel": (
        "Nemotron-Labs-Diffusion-VLM has a vision tower: only text models are supported"
    ),
    "NemotronHTwoTowerForCausalLM": (
        "Nemotron-Labs-TwoTower-30B-A3B is two nemotron_h hybrids of Mamba-2, attention and experts: a frozen "
        "autoregressive tower for the context and one with time conditioning that denoises blocks of 16; state-space "
        "models are not supported"
    ),
    "PanguEmbeddedForCausalLM": (
        "openPangu-R-7B-Diffusion (blocks of 32 over a causal context, mask token 45830) shares this class with the "
        "autoregressive openPangu-Embedded; no sampler of this package was checked against its sampling code, which "
        "is only on the Hub"
    ),
    "SumiForMaskGeneration": (
        "Sumi-7B's softmax adds one to the sum of the attention weights (off-by-one softmax), which is not supported"
    ),
    "W1-4B-dLLM": (
        "W1-4B-dLLM is a diffusion transformer with AdaLN time conditioning, whose YAML config has no architecture"
    ),
}


@dataclass(frozen=True, eq=False)
class FamilySpec:
    """One family of checkpoints.

    A spec and its module import neither torch nor transformers: classes are named as "module:attribute".
    """

    name: str  # value of the setting `family`
    title: str
    hub_ids: tuple[str, ...]  # public checkpoints
    architectures: tuple[str, ...]  # values of `architectures[0]` in config.json, by which the family is found
    model_type: str
    config_class: str
    model_class: str
    mapping: Mapping  # between Hub and Megatron tensors
    initialisation: Callable[[dict[str, Any]], InitialisationRule] = normal_rule  # called with config.json's dict
    other_model_types: tuple[str, ...] = ()  # written by other projects; kept on save
    tokenizer_class: str = ""  # only if transformers lacks the Hub's tokenizer_class
    auto_classes: tuple[str, ...] = ("AutoModel", "AutoModelForCausalLM")
    kind: Literal["diffusion", "autoregressive"] = "diffusion"
    attention_pattern: AttentionPattern = "bidirectional"
    shift: bool = False  # True: logits[i - 1] predicts token i
    mask_token_id: int | None = None  # default for configs without one
    ordinary_mask: bool = False  # the mask token also occurs in texts: masks are identified by position
    objective: str = "masked"  # default training objective
    sft: MappingABC[str, Any] = field(default_factory=dict)  # published settings that differ from sft's defaults
    sampler: MappingABC[str, Any] = field(default_factory=dict)  # `algorithm`, and settings that differ from its own
    # LoRA's default targets; those that a model does not have are ignored.
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    training: tuple[str, ...] = ("accelerate", "megatron")  # engines that train the model as published
    checked_against: str = ""
    # (family, key of config.json): a config with an architecture of that family and this key is of this family.
    told_from: tuple[str, str] | None = None
    # Converts a config.json saved by transformers to the keys of the Hub, which other programs read.
    hub_spelling: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config
    derived_from: str = ""  # of a diffusion form: the autoregressive family with the same body
    form: str = ""  # of a diffusion form: which one, see `derived.FORMS`

    def __post_init__(self) -> None:
        for name in ("sft", "sampler"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @property
    def native(self) -> bool:
        """True if the model class is part of transformers."""
        return self.model_class.startswith("transformers:")

    def is_any_of(self, names: tuple[str, ...]) -> bool:
        """True if the family or its form is among `names`, those that an objective or a sampler supports; () are
        all."""
        return not names or self.name in names or self.form in names

    @property
    def stored_architecture(self) -> str:
        """Class name in a config.json of the family; another family's if a key of the config tells them apart."""
        if self.architectures or self.told_from is None:
            return self.architectures[0]
        return family_by_name(self.told_from[0]).architectures[0]

    @property
    def sampled_here(self) -> bool:
        """True if this package's samplers and likelihood bounds apply to the model."""
        return self.kind == "diffusion" and not self.native

    def published_config(self, text: str) -> str:
        """The text of a config.json with the keys of the Hub; unchanged if it has them already."""
        config = json.loads(text)
        published = self.hub_spelling(config)
        return text if published == config else json.dumps(published, indent=2, ensure_ascii=False) + "\n"

    def load(self, attribute: Literal["config_class", "model_class", "tokenizer_class"]) -> Any:
        """Import and return the class that `attribute` names.

        Raises MissingExtraError if the installed transformers is too old to have the class.
        """
        module, _, name = getattr(self, attribute).partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except AttributeError:
            if module != "transformers":
                raise
        found = importlib.metadata.version("transformers")
        raise MissingExtraError(
            "transformers", f"{found} has no {name}: family '{self.name}' needs a newer one, except for conversion"
        )

    def initial_weights(self, config: dict[str, Any], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hub name, tensor) for every tensor of a randomly initialised model with this config.json.

        Raises CheckpointError for a config, or a method of initialisation, that the family does not support.
        """
        rule = self.initialisation(config)
        for param in self.mapping.params(self.mapping.dims(config)):
            if param.is_mtp:  # transformers' models do not have these layers
                continue
            for name, shape in zip(param.hub_names, param.hub_shapes, strict=True):
                yield name, initialise(name, shape, rule(name), seed)


@cache
def families() -> tuple[FamilySpec, ...]:
    """All families: `FAMILY_SPECS`, their diffusion forms, then the entry points of other packages."""
    found: list[FamilySpec] = [_loaded(reference) for reference in FAMILY_SPECS]
    found += _loaded(DERIVED_SPECS)
    for name, spec in load_entry_points(ENTRY_POINTS).items():
        if reason := _why_not(spec, found):
            logger.warning(f"entry point '{name}' of {ENTRY_POINTS} is ignored: {reason}")
        else:
            found.append(spec)
    return tuple(found)


def _loaded(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def _why_not(spec: Any, known: list[FamilySpec]) -> str | None:
    """Reason to ignore the object of an entry point, or None."""
    if not isinstance(spec, FamilySpec):
        return f"{spec!r} is not a FamilySpec"
    for other in known:
        if spec.name == other.name or set(spec.architectures) & set(other.architectures):
            return f"family '{other.name}' already has that name or architecture"
    return None


@cache
def _by_architecture() -> dict[str, FamilySpec]:
    return {architecture: spec for spec in families() for architecture in spec.architectures}


def family_by_name(name: str) -> FamilySpec:
    """The family of this name. Raises SettingError with the known names."""
    named = {spec.name: spec for spec in families()}
    if name not in named:
        known = [spec.name for spec in families() if not spec.derived_from]
        check_choice("family", name, known, ", or a target of convert-to-dlm")
    return named[name]


def find_family(config: MappingABC[str, Any], family: str | None = None, where: str = "config.json") -> FamilySpec:
    """The family of a Hub config, by `architectures` (families can share a `model_type`).

    Args:
        config: config.json's dict.
        family: name of the family, which overrides the config.
        where: field of errors about the config.

    Raises:
        CheckpointError: an unknown or unsupported architecture, or a malformed config.
        SettingError: `family` is unknown.
    """
    if family is not None:
        return family_by_name(family)
    known = _by_architecture()
    architectures = class_names(config, where)
    # A class name of transformers may belong to remote code with another attention pattern: check auto_map as well.
    remote = _remote_classes(config, where)
    for architecture in [*architectures, *remote]:
        if architecture in UNSUPPORTED:
            raise CheckpointError(where, f"architecture {architecture}: {UNSUPPORTED[architecture]}")
    for architecture in architectures:
        if architecture in known:
            found = known[architecture]
            behind = [known[name] for name in remote if name in known] if found.native else []
            return behind[0] if behind else _told_apart(found, config)
    published = [architecture for architecture, spec in known.items() if not spec.derived_from]
    if not architectures:
        named = f"no 'architectures' (model_type {config.get('model_type')!r})"
    else:
        named = f"unknown architecture {architectures[0]}"
    hint = nearest((architectures or [""])[0], known, f"known are {', '.join(published)}")
    raise CheckpointError(where, f"{named}: {hint}, or set `family`")


def class_names(config: MappingABC[str, Any], where: str) -> list[str]:
    """The `architectures` of a Hub config. Raises CheckpointError unless they are a list of names."""
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise CheckpointError(where, f"'architectures' must be a list of class names, not {architectures!r}")
    return architectures


def _told_apart(found: FamilySpec, config: MappingABC[str, Any]) -> FamilySpec:
    """The family that a key of the config identifies among those with the architectures of `found`, or `found`."""
    others = (spec for spec in families() if spec.told_from is not None and spec.told_from[0] == found.name)
    return next((spec for spec in others if spec.told_from and config.get(spec.told_from[1])), found)


def _remote_classes(config: MappingABC[str, Any], where: str) -> list[str]:
    references = config.get("auto_map") or {}
    if not isinstance(references, dict):
        raise CheckpointError(where, f"'auto_map' must be an object of class names, not {references!r}")
    return [reference.rpartition(".")[2] for reference in references.values() if isinstance(reference, str)]
