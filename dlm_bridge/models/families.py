"""Model families: the table of them, what a `FamilySpec` says of one, and the family of a Hub config.

Nothing here loads a model, and a spec is imported only when the table is read.
"""

from __future__ import annotations

import difflib
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

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.mapping.rules import Mapping
from dlm_bridge.models.initialisation import InitialisationRule, initialise, normal_rule
from dlm_bridge.registration import load_entry_points

if TYPE_CHECKING:
    import torch

    from dlm_bridge.attention.masks import AttentionPattern

logger = logging.getLogger(__name__)

ENTRY_POINTS = "dlm_bridge.families"  # each names a FamilySpec of another package

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
DERIVED_SPECS = "dlm_bridge.models.derived:SPECS"  # what `convert-to-dlm` makes of the autoregressive ones

# Checkpoints that people will try, and why they do not load or what of them is left out. Keyed by Hub architecture;
# "A in B" is a checkpoint B that names the architecture A of a family above.
UNSUPPORTED: dict[str, str] = {
    "BD3LM": "BD3LM (OpenWebText) is a diffusion transformer with time modulation and LayerNorm, a body of its own",
    "CausalLM": "MegaDLMs' autoregressive baselines have no model type: load them with their own code",
    "DFlashDraftModel": "DFlash models draft for another model's speculative decoding and cannot run alone",
    "DiffEncoderModel": "Efficient-DLM's facts (mask token 151662, blocks of 32) were not checked against its code",
    "DiscreteDiffusionModel": "DiffuGPT is GPT-2 (learned positions, LayerNorm, biases): no body for it here",
    "GPT2LMHeadModel": "GPT-2 (also DiffuGPT's base) has learned positions, LayerNorm and biases: no body for it here",
    "Gemma3ForConditionalGeneration": (
        "Gemma 3 from 4B on has a vision tower: only text models (Gemma3ForCausalLM) load here"
    ),
    "LLaDAModelLM in MMaDA": (
        "MMaDA's text model loads as LLaDA with a longer vocabulary (the image tokens at its end); its image "
        "tokenizer and image sampler are not written here"
    ),
    "Lfm2BidirectionalForMaskedLM": "LFM2.5-Encoder-Diffusion has short convolutions: no body for it here",
    "MDLM": "MDLM (OpenWebText) is a diffusion transformer with time modulation and LayerNorm, a body of its own",
    "MMadaModelLM": "MMaDA is multimodal (its own image tokenizer, a mixed vocabulary): only text models load here",
    "ModernBertForMaskedLM": (
        "ModernBERT-Chat is native in transformers; its encoder (LayerNorm, alternating windows, GeGLU) has no mapping"
    ),
    "NemotronLabsDiffusionVLMModel": "Nemotron-Labs-Diffusion-VLM has a vision tower: only text models load here",
    "NemotronHTwoTowerForCausalLM": (
        "Nemotron-Labs-TwoTower-30B-A3B is two nemotron_h hybrids of Mamba-2, attention and experts: a frozen "
        "autoregressive tower for the context and one with time conditioning that denoises blocks of 16; there is no "
        "state-space body, mapping or cache for it here"
    ),
    "PanguEmbeddedForCausalLM": (
        "openPangu-R-7B-Diffusion (blocks of 32 over a causal context, mask token 45830) has this class in common "
        "with the autoregressive openPangu-Embedded; its sampling code is only on the Hub and was not read, so that "
        "no sampler of this package is checked against it"
    ),
    "SumiForMaskGeneration": (
        "Sumi-7B divides attention by one more than the sum of its weights (off-by-one softmax): no body for it here"
    ),
    "W1-4B-dLLM": (
        "a diffusion transformer of its own (AdaLN time conditioning), whose YAML config has no architecture"
    ),
}


@dataclass(frozen=True, eq=False)
class FamilySpec:
    """One family of checkpoints.

    A spec and its module import neither torch nor transformers: classes are named as "module:attribute".
    """

    name: str  # the --family value
    title: str
    hub_ids: tuple[str, ...]  # public checkpoints
    architectures: tuple[str, ...]  # what `architectures[0]` of config.json says: the dispatch key
    model_type: str
    config_class: str
    model_class: str
    mapping: Mapping  # Hub tensors to Megatron's
    initialisation: Callable[[dict[str, Any]], InitialisationRule] = normal_rule  # of config.json's dict
    other_model_types: tuple[str, ...] = ()  # what other projects write for it; kept as it is on save
    tokenizer_class: str = ""  # only where the Hub's tokenizer_class is one that transformers does not have
    auto_classes: tuple[str, ...] = ("AutoModel", "AutoModelForCausalLM")
    kind: Literal["diffusion", "autoregressive"] = "diffusion"
    attention_pattern: AttentionPattern = "bidirectional"
    shift: bool = False  # True: logits[i - 1] predicts token i
    mask_token_id: int | None = None  # used where the config has none
    ordinary_mask: bool = False  # the mask token is an ordinary one, which texts contain: masks are known by position
    objective: str = "masked"  # the family's own training objective
    sft: MappingABC[str, Any] = field(default_factory=dict)  # options of `dlm-bridge sft` that differ, as published
    sampler: MappingABC[str, Any] = field(default_factory=dict)  # its `algorithm`, and defaults that differ from that
    # What an adapter has by default: those of these linear layers that the model has.
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    training: tuple[str, ...] = ("accelerate", "megatron")  # the engines that train it as published
    checked_against: str = ""
    # (family, key of config.json): a checkpoint of that family's architectures with the key is one of this family.
    told_from: tuple[str, str] | None = None
    # config.json's dict in the spelling of the Hub, which other programs read, where transformers saves another one.
    hub_spelling: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config
    derived_from: str = ""  # the autoregressive family whose body it has, of what `convert-to-dlm` makes

    def __post_init__(self) -> None:
        for name in ("sft", "sampler"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @property
    def native(self) -> bool:
        """Whether the model's class is transformers' own."""
        return self.model_class.startswith("transformers:")

    @property
    def sampled_here(self) -> bool:
        """Whether this package's samplers and likelihood bounds are the model's."""
        return self.kind == "diffusion" and not self.native

    def published_config(self, text: str) -> str:
        """config.json's text in the spelling of the Hub; every byte kept where it has that already."""
        config = json.loads(text)
        published = self.hub_spelling(config)
        return text if published == config else json.dumps(published, indent=2, ensure_ascii=False) + "\n"

    def load(self, attribute: Literal["config_class", "model_class", "tokenizer_class"]) -> Any:
        """Import and return the class that `attribute` names.

        Raises DlmBridgeError where the installed transformers does not have one of its own yet.
        """
        module, _, name = getattr(self, attribute).partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except AttributeError:
            if module != "transformers":
                raise
        found = importlib.metadata.version("transformers")
        raise DlmBridgeError(
            f"family '{self.name}' needs a newer transformers: {found} has no {name} (conversion works without it)"
        )

    def initial_weights(self, config: dict[str, Any], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Every Hub tensor of an untrained model with this config.json, one at a time.

        Raises DlmBridgeError for a config that the family cannot hold or an initialisation that it does not know.
        """
        rule = self.initialisation(config)
        for param in self.mapping.params(self.mapping.dims(config)):
            if param.is_mtp:  # transformers' models do not have these layers
                continue
            for name, shape in zip(param.hub_names, param.hub_shapes, strict=True):
                yield name, initialise(name, shape, rule(name), seed)


@cache
def families() -> tuple[FamilySpec, ...]:
    """All families: those of `FAMILY_SPECS`, the derived ones, then those that other packages register as entry
    points."""
    found: list[FamilySpec] = [_loaded(reference) for reference in FAMILY_SPECS]
    found += _loaded(DERIVED_SPECS)
    for name, spec in load_entry_points(ENTRY_POINTS).items():
        if reason := _why_not(spec, found):
            logger.warning(f"entry point '{name}' of {ENTRY_POINTS} is left out: {reason}")
        else:
            found.append(spec)
    return tuple(found)


def _loaded(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def _why_not(spec: Any, known: list[FamilySpec]) -> str | None:
    """Why the object of an entry point cannot join the `known` families, or None where it can."""
    if not isinstance(spec, FamilySpec):
        return f"{spec!r} is no FamilySpec"
    for other in known:
        if spec.name == other.name or set(spec.architectures) & set(other.architectures):
            return f"family '{other.name}' has that name or architecture already"
    return None


@cache
def _by_architecture() -> dict[str, FamilySpec]:
    return {architecture: spec for spec in families() for architecture in spec.architectures}


def family_by_name(name: str) -> FamilySpec:
    """The family that `--family NAME` means. Raises DlmBridgeError with the known names."""
    for spec in families():
        if spec.name == name:
            return spec
    known = ", ".join(spec.name for spec in families() if not spec.derived_from)
    raise DlmBridgeError(f"unknown family '{name}': known are {known}, and what convert-to-dlm makes")


def find_family(config: MappingABC[str, Any], family: str | None = None, where: str = "config.json") -> FamilySpec:
    """The family of a Hub config, by `architectures` first (`model_type` is shared between families).

    `family` overrides the config. `where` names the config in errors. Raises DlmBridgeError.
    """
    if family is not None:
        return family_by_name(family)
    known = _by_architecture()
    architectures = class_names(config, where)
    # A stock class name may hide remote code with another attention pattern: the names in auto_map count, too.
    remote = _remote_classes(config, where)
    for architecture in [*architectures, *remote]:
        if architecture in UNSUPPORTED:
            raise DlmBridgeError(f"{where}: architecture {architecture}: {UNSUPPORTED[architecture]}")
    for architecture in architectures:
        if architecture in known:
            found = known[architecture]
            behind = [known[name] for name in remote if name in known] if found.native else []
            return behind[0] if behind else _told_apart(found, config)
    published = [architecture for architecture, spec in known.items() if not spec.derived_from]
    if not architectures:
        named = f"no 'architectures' (model_type {config.get('model_type')!r})"
        near = published
    else:
        named = f"unknown architecture {architectures[0]}"
        near = difflib.get_close_matches(architectures[0], known, n=3, cutoff=0.3) or published
    raise DlmBridgeError(f"{where}: {named}; known are {', '.join(near)}, or name the family with --family")


def class_names(config: MappingABC[str, Any], where: str) -> list[str]:
    """The `architectures` of a Hub config. Raises DlmBridgeError where they are not a list of names."""
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise DlmBridgeError(f"{where}: 'architectures' must be a list of class names, not {architectures!r}")
    return architectures


def _told_apart(found: FamilySpec, config: MappingABC[str, Any]) -> FamilySpec:
    """The family with the architectures of `found` that a key of the config tells, or `found` itself."""
    others = (spec for spec in families() if spec.told_from is not None and spec.told_from[0] == found.name)
    return next((spec for spec in others if spec.told_from and config.get(spec.told_from[1])), found)


def _remote_classes(config: MappingABC[str, Any], where: str) -> list[str]:
    references = config.get("auto_map") or {}
    if not isinstance(references, dict):
        raise DlmBridgeError(f"{where}: 'auto_map' must be an object of class names, not {references!r}")
    return [reference.rpartition(".")[2] for reference in references.values() if isinstance(reference, str)]
