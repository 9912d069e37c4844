"""Config and model classes of the diffusion forms of autoregressive families.

The classes are attributes of this module, created on first access. Sliding windows of the body remain: a position
attends to positions less than the window away, on either side.
"""

# mypy: disable-error-code="attr-defined, misc, valid-type"

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers.core_model_loading import Concatenate, MergeModulelist

from dlm_bridge.attention.masks import mask_for_implementation
from dlm_bridge.errors import CheckpointError
from dlm_bridge.models import modeling_llada2_moe
from dlm_bridge.models.derived import SPECS
from dlm_bridge.models.diffusion_lm import DiffusionLM, register_hub_names
from dlm_bridge.models.families import FamilySpec, family_by_name
from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.modeling_moe import ExpertsMixin, ExpertStackConverter, expert_converters


def __getattr__(name: str) -> Any:
    """The config or model class `name`."""
    for spec in SPECS:
        if name in (spec.config_class.partition(":")[2], spec.model_class.partition(":")[2]):
            _make_classes(spec)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class DerivedConfig(HubConfig):
    """Base of the configs, placed before the body's config class."""

    is_causal: ClassVar[bool] = False
    slides: ClassVar[bool] = True

    mask_token_id: int | None = None


class BlockCausalConfig(DerivedConfig):
    """Base of the configs of block-causal forms."""

    block_size: int = 4  # SDAR's default

    def __post_init__(self, **kwargs: Any) -> None:
        if type(self.block_size) is not int or self.block_size < 1:
            raise CheckpointError("config.json", f"block_size {self.block_size!r} must be a positive integer")
        super().__post_init__(**kwargs)


class BlockCausalShiftedConfig(BlockCausalConfig):
    """Base of the configs of Fast-dLLM v2's form."""

    block_size: int = 32


class IntrospectiveConfig(BlockCausalConfig):
    """Base of the configs of I-DLM's form. `block_size`: number of masks after a token in training."""

    is_causal: ClassVar[bool] = True

    block_size: int = 1


class HybridConfig(BlockCausalConfig):
    """Base of the configs of Nemotron-Labs-Diffusion's form, with its keys for the weights of the two losses."""

    block_size: int = 32
    dlm_loss_weight: float | None = None
    ar_loss_weight: float = 1.0


_CONFIGS = {  # by form
    "block_causal": BlockCausalConfig,
    "block_causal_shifted": BlockCausalShiftedConfig,
    "idlm": IntrospectiveConfig,
    "nemotron": HybridConfig,
}


class DerivedLM(DiffusionLM):
    """`DiffusionLM` for the bodies of `models.derived`, with sliding windows and scaled or capped logits."""

    lm_head: Any
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = []  # bodies with MTP layers ignore those of two sizes

    def post_init(self) -> None:
        """Extends DiffusionLM's method: replaces the output layer if the body scales or caps the logits."""
        scaling = float(getattr(self.config, "logits_scaling", None) or 1.0)
        softcap = getattr(self.config, "final_logit_softcapping", None)
        if scaling != 1.0 or softcap is not None:
            self.lm_head = ScaledHead(self.lm_head.in_features, self.lm_head.out_features, scaling, softcap)
        super().post_init()

    def _mask_and_positions(
        self, tokens: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> tuple[Any, torch.Tensor | None]:
        mask, positions = super()._mask_and_positions(tokens, attention_mask, position_ids)
        window, length = sliding_window(self.config), tokens.shape[1]
        if window is None or (positions is None and length <= window):
            return mask, positions
        if self.family.attention_pattern == "causal" and (mask is None or mask.dim() == 2):
            return mask, positions  # transformers makes the body's own masks
        counted = torch.arange(length, device=tokens.device)[None] if positions is None else positions
        near = ((counted[:, :, None] - counted[:, None, :]).abs() < window)[:, None]
        if mask is None:
            mask = torch.ones(1, 1, 1, length, dtype=torch.bool, device=tokens.device)
        elif mask.dim() == 2:
            own = torch.eye(length, dtype=torch.bool, device=tokens.device)
            mask = mask.bool()[:, None, None, :] | own
        sliding = mask & near if mask.dtype == torch.bool else mask.masked_fill(~near, torch.finfo(mask.dtype).min)
        implementation = self.config._attn_implementation
        full, sliding = (mask_for_implementation(one, implementation, self.dtype) for one in (mask, sliding))
        if getattr(self.config, "layer_types", None) is None:
            return sliding, positions
        return {"full_attention": full.expand_as(sliding), "sliding_attention": sliding}, positions


class ScaledHead(nn.Linear):
    """Output layer that divides logits by `scaling`, then caps them softly at +-`softcap`."""

    def __init__(self, hidden: int, vocab: int, scaling: float, softcap: float | None) -> None:
        super().__init__(hidden, vocab, bias=False)
        self.scaling, self.softcap = scaling, softcap

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().forward(hidden) / self.scaling
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def sliding_window(config: Any) -> int | None:
    """Size of the sliding window of the body's layers, or None if no layer has one."""
    kinds = getattr(config, "layer_types", None)
    if getattr(config, "use_sliding_window", None) is False or (kinds and "sliding_attention" not in kinds):
        return None
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)


def _make_classes(spec: FamilySpec) -> None:
    """Create the config and model class of a diffusion form as attributes of this module."""
    body = family_by_name(spec.derived_from)
    config_name, model_name = (getattr(spec, which).partition(":")[2] for which in ("config_class", "model_class"))
    body_config, body_model = body.load("config_class"), body.load("model_class")
    experts = hasattr(body_config, "num_experts_per_tok")
    mixins = (ExpertsMixin,) if experts and not issubclass(body_model, ExpertsMixin) else ()

    class Config(_CONFIGS.get(spec.form, DerivedConfig), body_config):
        model_type = spec.model_type
        family = spec

    class Model(*mixins, DerivedLM, body_model):
        config_class = Config
        family = spec

    for made, name in ((Config, config_name), (Model, model_name)):
        made.__name__ = made.__qualname__ = name
        made.__module__ = __name__
        globals()[name] = made
    if spec.derived_from == "mixtral":
        register_hub_names(Model, ((".block_sparse_moe.", ".mlp."),), _mixtral_experts())
    elif spec.derived_from == "bailing_moe_v2":
        register_hub_names(Model, modeling_llada2_moe.RENAMES, expert_converters())
    elif experts and spec.derived_from != "gpt_oss":  # the Hub stores its experts stacked
        register_hub_names(Model, (), expert_converters())


def _mixtral_experts() -> list[ExpertStackConverter]:
    """Converters for the names of Mixtral's release: w1 is the gate, w3 the up and w2 the down projection."""
    expert = "mlp.experts.*."
    return [
        ExpertStackConverter(
            [expert + "w1.weight", expert + "w3.weight"],
            "mlp.experts.gate_up_proj",
            [MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        ExpertStackConverter(expert + "w2.weight", "mlp.experts.down_proj", [MergeModulelist(dim=0)]),
    ]
