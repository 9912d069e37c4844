"""Methods of reinforcement learning: the trainer of each, its rows, and its requirements on the model."""

from __future__ import annotations

from typing import Any

from dlm_bridge.data.documents import check_tokenizer
from dlm_bridge.errors import SettingError
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
    """Find the trainer of a run's method and load the tokenizer, and check that they fit the model's family, config
    and sizes; weights are not read."""
    check_settings(config, model)
    tokenizer = load_tokenizer(config)
    check_tokenizer(tokenizer, model.get_input_embeddings().weight.shape[0], _mask_token(model))
    align_special_tokens(model, tokenizer, config.model.model)
    return PolicyTrainer if config.rl.method in SAMPLED else PreferenceTrainer, tokenizer


def check_settings(config: RLConfig, model: Any) -> None:
    """`check_model` without the tokenizer."""
    check_trackers(config)
    check_method(config, model_family(model))
    check_length(config, model)
    if (noise := noise_process(model.config)) not in (None, "mask"):
        raise SettingError(
            "model",
            f"{config.model.model} was trained with {noise} noise (noise_process in its config.json), under which "
            "answers have no likelihood estimate: reinforcement learning needs a masked diffusion model",
        )
    if config.rl.method in SAMPLED:
        check_sampler(config, model)


def load_rows(config: RLConfig, kind: type[RLTrainer[Any]], model: Any, tokenizer: Any) -> tuple[list[Any], list[Any]]:
    """The rows to train on and the held-out rows."""
    token = _mask_token(model)
    rows = kind.load(config, config.data.data, tokenizer, token)
    held_out = config.rl.eval_data
    return rows, kind.load(config, held_out, tokenizer, token, "eval_data") if held_out else []


def check_method(config: RLConfig, family: FamilySpec | None) -> None:
    """Raise SettingError for a model of an unknown family, or a method of the other kind of model."""
    if family is None:
        raise SettingError(
            "model", f"{config.model.model} is of an unknown family: dlm-bridge families lists the known"
        )
    autoregressive = family.kind == "autoregressive"
    if autoregressive != (config.rl.method in AUTOREGRESSIVE):
        fits = [name for name in METHODS if (name in AUTOREGRESSIVE) == autoregressive]
        raise SettingError(
            "method", f"{config.rl.method} is not for {family.title}, which is {family.kind}: use {', '.join(fits)}"
        )


def check_sampler(config: RLConfig, model: Any) -> None:
    """Check that the model's sampler has the settings of `generation`."""
    if config.rl.method in AUTOREGRESSIVE:
        generate_keywords(model, {"temperature": config.rl.temperature, **config.rl.sampler})
        return
    keywords = {"gen_length": config.rl.gen_length, "temperature": config.rl.temperature, **config.rl.sampler}
    settings = resolve_settings(model, None, keywords, prompt_width=1)
    settings.sampler.spec(SpecialTokens.of(settings))


def _mask_token(model: Any) -> int | None:
    """The token that rows must not contain; None for an autoregressive model, or if texts contain the mask token."""
    return mask_token_id(model) if hasattr(model, "family") and not model.family.ordinary_mask else None
