"""CoDA on transformers' Qwen3 body with bidirectional attention: config and model."""

# mypy: disable-error-code="arg-type, assignment, misc, override"

from __future__ import annotations

from contextlib import suppress
from typing import Any, ClassVar

from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from dlm_bridge.models.coda import SPEC
from dlm_bridge.models.diffusion_lm import DiffusionLM
from dlm_bridge.models.hub_config import HubConfig


class CoDAConfig(HubConfig, Qwen3Config):
    """Config with the fields and defaults of the public model_config.py, except that the output layer is not tied; the
    original code never ties it."""

    model_type = "CoDA"
    family = SPEC
    required_values: ClassVar[dict[str, Any]] = {"tie_word_embeddings": False, "attention_bias": False}
    default_theta = 1e6

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 40960
    use_cache: bool = False
    bos_token_id: int | None = 151643
    eos_token_id: int | list[int] | None = 151645
    pad_token_id: int | None = 151643
    mask_token_id: int | None = 151669


class CoDALanguageModel(DiffusionLM, Qwen3ForCausalLM):
    """`logits[i]` predicts token i + 1 (`family.shift`), as in the original."""

    config_class = CoDAConfig
    family = SPEC

    def adjust_generation_fn(
        self, generation_config: Any, from_auto_class: Any, from_pipeline: Any, source: Any, **kwargs: Any
    ) -> None:
        """Extends DiffusionLM's method: drops the published file's `alg: original` and its temperature, which name no
        known order; the original `diffusion_generate` does not read the file."""
        if generation_config is None and source is not None:
            with suppress(OSError):  # no such file
                stored = GenerationConfig.from_pretrained(source, **kwargs)
                if getattr(stored, "alg", None) == "original":
                    for name in ("alg", "alg_temp"):
                        vars(stored).pop(name, None)
                    generation_config = stored
        super().adjust_generation_fn(generation_config, from_auto_class, from_pipeline, source, **kwargs)
