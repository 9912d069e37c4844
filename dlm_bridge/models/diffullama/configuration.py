"""DiffuLLaMA's configuration: Llama's, with the vocabulary id that serves as the mask token."""

from __future__ import annotations

from typing import ClassVar

from transformers import LlamaConfig

from dlm_bridge.models.diffullama.spec import SPEC
from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.spec import FamilySpec


class DiffuLLaMAConfig(HubConfig, LlamaConfig):
    """Written back as the Llama configuration that it was."""

    family: ClassVar[FamilySpec] = SPEC
    is_causal: ClassVar[bool] = False

    mask_token_id: int | None = 811
