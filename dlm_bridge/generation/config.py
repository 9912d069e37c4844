"""`DiffusionGenerationConfig`: what a sampler can be told, saved with the checkpoint as generation_config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.commit import COMMIT_RULES

# What transformers' own class does not have. `gen_length` is a second name of its `max_new_tokens`.
OWN_FIELDS = ("steps", "block_length", "cfg_scale", "remasking", "mask_token_id", "seed")


class DiffusionGenerationConfig(GenerationConfig):
    """The settings of a diffusion sampler. None means unset: the checkpoint's or the family's value is used.

    Args:
        gen_length, max_new_tokens: new tokens of every row, two names for one value.
        block_length: tokens that are denoised together; blocks are settled from left to right.
        steps: denoising steps over all blocks (each block gets `steps / number of blocks`).
        temperature: 0 is greedy; above 0 each token is drawn from softmax(logits / temperature).
        cfg_scale: w of classifier-free guidance, logits = un + (w + 1) * (cond - un); 0 is off.
        remasking: which masked positions a step settles: "low_confidence" (the most probable) or "random".
        eos_token_id: one id or several that end a row; None, when given, turns stopping off (kept as an empty list).
        pad_token_id: what follows the end of a row.
        mask_token_id: the token that stands for "not settled yet".
        seed: makes the noise a function of the seed and of each row's own prompt.
        **kwargs: any other field of transformers' GenerationConfig; those that would change the result and that the
            sampler does not have are refused by `generate`.

    Raises:
        DlmBridgeError: a value that no sampler can run, or `gen_length` and `max_new_tokens` that differ.
    """

    steps: int | None
    block_length: int | None
    cfg_scale: float | None
    remasking: str | None
    mask_token_id: int | None
    seed: int | None

    def __init__(self, **kwargs: Any) -> None:
        stopping_off = "eos_token_id" in kwargs and kwargs["eos_token_id"] is None
        kwargs = merge_length_names(kwargs)
        for name in OWN_FIELDS:
            setattr(self, name, kwargs.pop(name, None))
        super().__init__(**kwargs)
        if stopping_off:
            self.eos_token_id = None

    def __setattr__(self, name: str, value: Any) -> None:
        # transformers' constructor assigns None to what is unset; a None that comes later was meant.
        if name == "eos_token_id" and value is None and name in self.__dict__:
            value = []
        super().__setattr__(name, value)

    @property
    def gen_length(self) -> int | None:
        return self.max_new_tokens

    @gen_length.setter
    def gen_length(self, value: int | None) -> None:
        self.max_new_tokens = value

    @classmethod
    def from_config(cls, config: GenerationConfig) -> DiffusionGenerationConfig:
        """The same settings as `config`, which may be transformers' own class (that is what it loads from a file)."""
        if isinstance(config, cls):
            return config
        converted = cls.from_dict(config.to_dict())
        if getattr(config, "_original_object_hash", None) is not None:
            converted._original_object_hash = hash(converted)  # as loaded: transformers then saves it leniently
        return converted

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers; a null in a file means unset."""
        return super().from_dict({key: value for key, value in config_dict.items() if value is not None}, **kwargs)

    @classmethod
    def from_model_config(cls, model_config: Any) -> DiffusionGenerationConfig:
        """As in transformers: the generation settings that an old config.json holds, if any."""
        return cls.from_config(GenerationConfig.from_model_config(model_config))

    def to_dict(self) -> dict[str, Any]:
        """Every field but our own unset ones, which plain transformers would not know."""
        fields = super().to_dict()
        unset = [name for name in OWN_FIELDS if fields[name] is None]
        for name in unset:
            del fields[name]
        if len(unset) < len(OWN_FIELDS):
            # With this mark transformers drops every field that is not its own when it loads the file.
            fields.pop("_from_model_config", None)
        return fields

    def validate(self, strict: bool = False, user_set_attributes: set[str] | None = None) -> None:
        """As in transformers, with our own checks; a temperature needs no `do_sample` here."""
        check_values(vars(self))
        if self.max_new_tokens is not None and self.block_length is not None:
            check_lengths(self.max_new_tokens, self.block_length, self.steps or self.max_new_tokens)
        if user_set_attributes is None:
            user_set_attributes = {name for name, value in vars(self).items() if value is not None}
        # transformers warns about a temperature unless do_sample, and not it, was set by the user.
        super().validate(strict=strict, user_set_attributes=(user_set_attributes | {"do_sample"}) - {"temperature"})


def merge_length_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with `gen_length` under transformers' name. Raises DlmBridgeError if both are there and differ."""
    merged = dict(values)
    length = merged.pop("gen_length", None)
    if length is not None:
        other = merged.get("max_new_tokens")
        if other is not None and other != length:
            raise DlmBridgeError(
                f"gen_length {length} and max_new_tokens {other} are the same setting: give one of them"
            )
        merged["max_new_tokens"] = length
    return merged


def check_values(values: Mapping[str, Any]) -> None:
    """Raise DlmBridgeError for a sampler setting that is wrong by itself; None and other keys are let through."""
    for name in ("max_new_tokens", "block_length", "steps", "max_length"):
        value = values.get(name)
        if value is not None and not (_is_int(value) and value > 0):
            shown = "gen_length (max_new_tokens)" if name == "max_new_tokens" else name
            raise DlmBridgeError(f"{shown} must be a whole number above 0, not {value!r}")
    for name in ("temperature", "cfg_scale"):
        value = values.get(name)
        if value is not None and not (_is_number(value) and 0 <= value < math.inf):
            raise DlmBridgeError(f"{name} must be a number, 0 or above, not {value!r}")
    for name in ("mask_token_id", "pad_token_id"):
        value = values.get(name)
        if value is not None and not (_is_int(value) and value >= 0):
            raise DlmBridgeError(f"{name} must be a token id, not {value!r}")
    eos_token_ids(values.get("eos_token_id"))
    seed = values.get("seed")
    if seed is not None and not _is_int(seed):
        raise DlmBridgeError(f"seed must be a whole number, not {seed!r}")
    remasking = values.get("remasking")
    if remasking is not None and remasking not in list(COMMIT_RULES):
        raise DlmBridgeError(f"unknown remasking {remasking!r}: known are {', '.join(COMMIT_RULES)}")


def check_lengths(gen_length: int, block_length: int, steps: int) -> None:
    """Raise DlmBridgeError, with numbers that work, where blocks do not divide the length or steps the blocks."""
    if gen_length % block_length:
        below = gen_length // block_length * block_length
        lengths = f"{below} or {below + block_length}" if below else f"{block_length}"
        divisor = next(n for n in range(min(block_length, gen_length), 0, -1) if gen_length % n == 0)
        raise DlmBridgeError(
            f"gen_length {gen_length} is not a multiple of block_length {block_length}: "
            f"use gen_length {lengths}, or block_length {divisor}"
        )
    blocks = gen_length // block_length
    if steps % blocks:
        below = steps // blocks * blocks
        numbers = f"{below} or {below + blocks}" if below else f"{blocks} or more"
        raise DlmBridgeError(
            f"steps {steps} is not a multiple of the {blocks} blocks "
            f"(gen_length {gen_length} / block_length {block_length}): use steps {numbers}"
        )


def eos_token_ids(value: Any) -> tuple[int, ...]:
    """`eos_token_id` as a tuple; empty when there is none. Raises DlmBridgeError for what is not token ids."""
    if value is None:
        return ()
    ids = value.tolist() if isinstance(value, torch.Tensor) else value
    ids = [ids] if _is_int(ids) else ids
    if not isinstance(ids, (list, tuple)) or not all(_is_int(token) and token >= 0 for token in ids):
        raise DlmBridgeError(f"eos_token_id must be a token id or a list of them, not {value!r}")
    return tuple(ids)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
