"""What a model must be for a method."""

from __future__ import annotations

from typing import Any

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.algorithms.base import Tokens
from dlm_bridge.generation.settings import resolve
from dlm_bridge.models.spec import FamilySpec
from dlm_bridge.train.rl.config import AUTOREGRESSIVE, METHODS, RLConfig


def check_method(config: RLConfig, family: FamilySpec | None) -> None:
    """Raise DlmBridgeError for a model of no known family, and a method of the other kind of model."""
    if family is None:
        raise DlmBridgeError(f"--model {config.model}: of no known family: see dlm-bridge families for what rl takes")
    autoregressive = family.kind == "autoregressive"
    if autoregressive != (config.method in AUTOREGRESSIVE):
        fits = [name for name in METHODS if (name in AUTOREGRESSIVE) == autoregressive]
        raise DlmBridgeError(
            f"--method {config.method} is not for {family.title}, which is {family.kind}: use {', '.join(fits)}"
        )


def check_length(config: RLConfig, model: Any) -> None:
    """Raise DlmBridgeError for rows that may be longer than the model."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and config.seq_length > limit:
        raise DlmBridgeError(f"--seq-length {config.seq_length} is more than the model's {limit} positions")


def check_sampler(config: RLConfig, model: Any) -> None:
    """Raise DlmBridgeError for settings of `--generation` that the model's sampler cannot run."""
    keywords = {"gen_length": config.gen_length, "temperature": config.temperature, **config.sampler}
    settings = resolve(model, None, keywords, prompt_width=1)
    settings.algorithm.recipe(Tokens(settings.pad_token_id, settings.eos_token_ids, settings.end_token_ids))
