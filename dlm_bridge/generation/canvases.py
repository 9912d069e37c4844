"""DiffusionGemma's sampling, by transformers' own `generate`: its settings, and what it refuses.

An encoder reads the prompt; canvases of uniform random tokens behind it are denoised one after the other, each by the
entropy-bound sampler (arXiv 2505.24857) under a temperature that falls from `t_max` to `t_min`, until its tokens are
stable and certain or `max_denoising_steps` are over; the encoder reads what a canvas became before the next one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.samplers import Check, check_value

logger = logging.getLogger(__name__)

# The settings, under transformers' names; `entropy_bound` is that of its EntropyBoundSamplerConfig.
SETTINGS: dict[str, Check | None] = {
    "max_new_tokens": Check("int", minimum=1),
    "max_denoising_steps": Check("int", minimum=1),
    "entropy_bound": Check("float", above=0),
    "t_min": Check("float", minimum=0),
    "t_max": Check("float", above=0),
    "stability_threshold": Check("int", minimum=0),
    "confidence_threshold": Check("float", above=0),
    "block_length": Check("int", minimum=1),
    "cache_implementation": Check("str"),
    "disable_compile": Check("bool"),
    "eos_token_id": None,
    "pad_token_id": Check("int", minimum=0),
    "num_return_sequences": Check("int", minimum=1),
    "stop_strings": None,
    "seed": None,
}
IGNORED = ("do_sample", "transformers_version", "use_cache")  # which transformers' clients send
OTHER_NAMES = {"steps": "max_denoising_steps", "block_size": "block_length", "canvas_length": "block_length"}
NUMBERS = ("entropy_bound", "t_min", "t_max", "confidence_threshold")  # which transformers takes as floats only
IMAGE_TOKENS = ("image_token_id", "boi_token_id", "eoi_token_id")


def has_canvas(model: Any) -> bool:
    """Whether this is a DiffusionGemma model, plain or wrapped by PEFT."""
    return getattr(model.config, "canvas_length", None) is not None


def image_token_ids(config: Any) -> tuple[int, ...]:
    """The tokens that stand for images in a model's text, by its config; other models have none."""
    ids = (getattr(config, name, None) for name in IMAGE_TOKENS)
    return tuple(token for token in ids if token is not None)


def decoder(model: Any) -> nn.Module:
    """The tower whose forward passes are the denoising steps; the encoder's, one a canvas, are not counted."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    found: nn.Module = plain.model.decoder
    return found


def keywords(model: Any, given: Mapping[str, Any], ends: Sequence[int]) -> dict[str, Any]:
    """The settings of a call under transformers' names, checked, with the number of new tokens and the tokens that end
    a text. Raises DlmBridgeError for one that the sampler does not have or whose value is wrong."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        own = OTHER_NAMES.get(name, name)
        if own in IGNORED:
            continue
        if own not in SETTINGS:
            more = ": it falls from t_max to t_min" if name == "temperature" else ""
            raise DlmBridgeError(
                f"DiffusionGemma's sampler has no setting '{name}'{more}: it has "
                f"{', '.join(sorted(SETTINGS.keys() | OTHER_NAMES.keys()))}"
            )
        if own in found:
            raise DlmBridgeError(f"{name} and {own} are the same setting: give one of them")
        check_value(name, SETTINGS[own], value)
        found[own] = float(value) if own in NUMBERS else value
    stored, defaults = model.generation_config, model.generation_config._get_default_generation_params()
    t_min, t_max = (found.get(name, getattr(stored, name, None)) for name in ("t_min", "t_max"))
    t_min, t_max = defaults["t_min"] if t_min is None else t_min, defaults["t_max"] if t_max is None else t_max
    if t_min >= t_max:
        raise DlmBridgeError(f"t_min {t_min} is not below t_max {t_max}, from which the temperature falls to it")
    if "max_new_tokens" not in found:
        found["max_new_tokens"] = stored.max_new_tokens or defaults["max_new_tokens"]
    found["eos_token_id"] = list(ends) or None
    return found


def check_prompt(model: Any, prompt: Sequence[int], given: Mapping[str, Any]) -> None:
    """Raise DlmBridgeError for an empty prompt, one with an image, and where its canvases leave the context."""
    config, text = model.config, model.config.get_text_config()
    if not len(prompt):
        raise DlmBridgeError("DiffusionGemma needs a prompt of at least one token: this one has none")
    image = next((token for token in image_token_ids(config) if token in prompt), None)
    if image is not None:
        raise DlmBridgeError(
            f"the prompt holds an image (token id {image}): only text is sampled here, leave images out"
        )
    outside = next((token for token in prompt if not 0 <= token < text.vocab_size), None)
    if outside is not None:
        raise DlmBridgeError(f"the prompt holds token {outside}, outside the vocabulary of {text.vocab_size}")
    length = given.get("block_length") or config.canvas_length
    context = text.max_position_embeddings
    if length > context:
        raise DlmBridgeError(
            f"a canvas of {length} tokens is longer than the model's context of {context}: use a shorter block_length"
        )
    last = len(prompt) + math.ceil(given["max_new_tokens"] / length) * length
    if last > context:
        raise DlmBridgeError(
            f"a prompt of {len(prompt)} tokens and canvases of {length} for {given['max_new_tokens']} new ones make "
            f"{last}, beyond the model's context of {context}: use a shorter gen_length"
        )


def generate(model: Any, input_ids: torch.Tensor, mask: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
    """[B, P + new] tokens: the last canvas is cut where `max_new_tokens` end. `given` are `keywords`."""
    own = dict(given)
    for name in ("tokenizer", "stop_strings"):  # a text is cut at its first stop string by the caller
        own.pop(name, None)
    new, copies = own["max_new_tokens"], own.pop("num_return_sequences", 1)
    if "entropy_bound" in own:
        from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

        own["sampler_config"] = EntropyBoundSamplerConfig(entropy_bound=own.pop("entropy_bound"))
    with _canvases_of(model, own.pop("block_length", None)):
        found = model.generate(
            input_ids=input_ids.repeat_interleave(copies, dim=0),
            attention_mask=mask.repeat_interleave(copies, dim=0),
            return_dict_in_generate=False,
            **own,
        )
    sequences: torch.Tensor = found[:, : input_ids.shape[1] + new]
    return sequences


def check_length(model: Any, length: int | None) -> None:
    """Warn of canvases of another length than the model was trained with."""
    trained = model.config.canvas_length
    if length not in (None, trained):
        logger.warning(
            f"canvases of {length} tokens: the model was trained with {trained} (canvas_length in config.json)"
        )


@contextmanager
def _canvases_of(model: Any, length: int | None) -> Iterator[None]:
    """The model with canvases of another length, which it was not trained with."""
    check_length(model, length)
    trained = model.config.canvas_length
    model.config.canvas_length = length or trained
    try:
        yield
    finally:
        model.config.canvas_length = trained
