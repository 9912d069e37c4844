"""Nemotron-Labs-Diffusion on transformers' Ministral-3 body: YaRN, and queries scaled by position.

One model, three ways to look, by `config.dlm_paradigm`, which may be changed on a live model:

- "bidirectional": every token sees every token, and `logits[i]` predicts token i. This is the denoiser.
- "autoregressive": every token sees those before it, and `logits[i]` predicts token i + 1.
- "block_diff": the training pass over noisy and clean tokens, whose mask the caller gives.

The published sampler denoises a block that sees all of itself and a prefix that was read causally: that is a
"bidirectional" pass with `attention_mask=causal_mask(real, draft_start)` of dlm_bridge.models.masks.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from transformers import Ministral3ForCausalLM

from dlm_bridge.convert.mapping import Mapping
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.diffusion import DiffusionLM, register_renames
from dlm_bridge.models.masks import causal_mask
from dlm_bridge.models.nemotron_labs_diffusion.configuration import NemotronLabsDiffusionConfig
from dlm_bridge.models.nemotron_labs_diffusion.mapping import MAPPING
from dlm_bridge.models.nemotron_labs_diffusion.spec import SPEC
from dlm_bridge.models.spec import FamilySpec

RENAMES = ((r"^encoder\.", "model."), (r"^diffusion_head\.", "lm_head."))


class NemotronLabsDiffusionModel(DiffusionLM, Ministral3ForCausalLM):
    """With its output layer, as `AutoModel` gives it on the Hub."""

    config_class = NemotronLabsDiffusionConfig
    config: NemotronLabsDiffusionConfig
    family: ClassVar[FamilySpec] = SPEC
    megatron_mapping: ClassVar[Mapping] = MAPPING
    # PEFT reads this: adapters that were published for the original class name its modules.
    _checkpoint_conversion_mapping: ClassVar[dict[str, str]] = dict(RENAMES)

    def _topology(
        self, tokens: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        own = attention_mask is not None and attention_mask.dim() == 4
        if not own and self.config.dlm_paradigm == "block_diff":
            raise DlmBridgeError(
                "dlm_paradigm 'block_diff' looks through a mask over [noisy | clean] tokens: pass a 4-D "
                "attention_mask, or set model.config.dlm_paradigm = 'bidirectional'"
            )
        if not own and self.config.dlm_paradigm == "autoregressive":
            whole = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
            attention_mask = causal_mask(whole if attention_mask is None else attention_mask)
        return super()._topology(tokens, attention_mask, position_ids)


register_renames(NemotronLabsDiffusionModel, RENAMES)
