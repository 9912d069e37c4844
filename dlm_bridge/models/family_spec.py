"""FamilySpec: what is known of a model family without loading a model."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from collections.abc import Callable, Iterator
from collections.abc import Mapping as MappingABC
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.mapping.rules import Mapping
from dlm_bridge.models.initialisation import InitialisationRule, initialise, normal_rule

if TYPE_CHECKING:
    import torch

    from dlm_bridge.attention_mask import AttentionPattern


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
    objective: str = "masked"  # the family's own training objective
    sft: MappingABC[str, Any] = field(default_factory=dict)  # options of `dlm-bridge sft` that differ, as published
    sampler: MappingABC[str, Any] = field(default_factory=dict)  # its `algorithm`, and defaults that differ from that
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
