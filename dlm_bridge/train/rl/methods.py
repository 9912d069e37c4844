"""A run's method: the trainer that it takes, the rows that it reads, and what it asks of the model."""

from __future__ import annotations

from typing import Any

from dlm_bridge.data.documents import check_tokenizer
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.autoregressive import generate_keywords
from dlm_bridge.generation.samplers import SpecialTokens
from dlm_bridge.generation.settings import resolve_settings
from dlm_bridge.loading.pretrained import model_family
from dlm_bridge.models.families import FamilySpec
from dlm_bridge.models.special_tokens import align_special_tokens
from dlm_bridge.objectives.registry import mask_token_id, noise_process
from dlm_bridge.train.config import RLConfig
from dlm_bridge.train.config.reinforcement import AUTOREGRESSIVE, METHODS, SAMPLED
from dlm_bridge.train.monitoring import check_trackers
from dlm_bridge.train.rl.policy import PolicyTrainer
from dlm_bridge.train.rl.preference import PreferenceTrainer
from dlm_bridge.train.rl.trainer import RLTrainer
from dlm_bridge.train.setup import check_length, load_tokenizer


def check_model(config: RLConfig, model: Any) -> tuple[type[RLTrainer[Any]], Any]:
    """The trainer of a run's method, and the tokenizer. Of the model, family, config and sizes are read. Raises
    DlmBridgeError where they do not fit each other."""
    check_settings(config, model)
    tokenizer = load_tokenizer(config)
    check_tokenizer(tokenizer, model.get_input_embeddings().weight.shape[0], _mask_token(model))
    align_special_tokens(model, tokenizer, f"--model {config.model.model}")
    return PolicyTrainer if config.rl.method in SAMPLED else PreferenceTrainer, tokenizer


def check_settings(config: RLConfig, model: Any) -> None:
    """`check_model` without the tokenizer."""
    check_trackers(config)
    check_method(config, model_family(model))
    check_length(config, model)
    if (noise := noise_process(model.config)) not in (None, "mask"):
        raise DlmBridgeError(
            f"--model {config.model.model}: trained with {noise} noise (noise_process in its config.json), whose "
            "answers have no likelihood that --method could use: rl needs a model of masks"
        )
    if config.rl.method in SAMPLED:
        check_sampler(config, model)


def load_rows(config: RLConfig, kind: type[RLTrainer[Any]], model: Any, tokenizer: Any) -> tuple[list[Any], list[Any]]:
    """The rows to train on and those held out. Raises DlmBridgeError."""
    token = _mask_token(model)
    rows = kind.load(config, config.data.data, tokenizer, token)
    held_out = config.rl.eval_data
    return rows, kind.load(config, held_out, tokenizer, token, "--eval-data") if held_out else []


def check_method(config: RLConfig, family: FamilySpec | None) -> None:
    """Raise DlmBridgeError for a model of no known family, and a method of the other kind of model."""
    if family is None:
        raise DlmBridgeError(
            f"--model {config.model.model}: of no known family: see dlm-bridge families for what rl takes"
        )
    autoregressive = family.kind == "autoregressive"
    if autoregressive != (config.rl.method in AUTOREGRESSIVE):
        fits = [name for name in METHODS if (name in AUTOREGRESSIVE) == autoregressive]
        raise DlmBridgeError(
            f"--method {config.rl.method} is not for {family.title}, which is {family.kind}: use {', '.join(fits)}"
        )


def check_sampler(config: RLConfig, model: Any) -> None:
    """Raise DlmBridgeError for settings of `--generation` that the model's sampler cannot run."""
    if config.rl.method in AUTOREGRESSIVE:
        generate_keywords(model, {"temperature": config.rl.temperature, **config.rl.sampler})
        return
    keywords = {"gen_length": config.rl.gen_length, "temperature": config.rl.temperature, **config.rl.sampler}
    settings = resolve_settings(model, None, keywords, prompt_width=1)
    settings.sampler.spec(SpecialTokens.of(settings))


def _mask_token(model: Any) -> int | None:
    """The token that no row may hold; None of an autoregressive model, and where texts contain the mask token."""
    return mask_token_id(model) if hasattr(model, "family") and not model.family.ordinary_mask else None
