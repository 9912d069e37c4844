"""Names and values of `generate`'s settings, apart from a model: our own, the samplers', and transformers'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.samplers import GENERAL_SETTINGS, SAMPLERS, Check, Sampler, check_value, is_token_ids

BLOCK_NAMES = ("block_length", "block_size")  # two names of one setting
# Settings of transformers' generate with the same meaning here.
TRANSFORMERS_SETTINGS = {
    "max_new_tokens": None,
    "max_length": Check("int", minimum=1),
    "do_sample": None,
    "eos_token_id": None,
    "pad_token_id": Check("int", minimum=0),
    "num_return_sequences": Check("int", minimum=1),
    "return_dict_in_generate": None,
    "stop_strings": None,
}
# Settings of transformers' generate that have no effect on a sampler with caches of its own. (Nor has LLaDA2's
# eos_early_stop: tokens behind the end are never returned.)
IGNORED_SETTINGS = (
    "bos_token_id", "cache_config", "cache_implementation", "compile_config", "disable_compile", "eos_early_stop",
    "max_cache_len", "token_type_ids", "tokenizer", "transformers_version", "use_cache",
)  # fmt: skip
# Settings that change only the distribution that tokens are drawn from.
SAMPLING_ONLY = ("top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
# What to pass instead of a setting of transformers' generate or of a published sampler.
ALTERNATIVES = {
    "use_block_cache": "cache='dual' enables it",
    "past_key_values": "the setting cache chooses the KV cache",
    "inputs_embeds": "pass input_ids",
    "guidance_scale": "use cfg_scale, which is guidance_scale - 1, where the sampler has it",
    "stopping_criteria": "a row ends at eos_token_id and at stop_strings",
    "output_scores": "output_history=True gives the confidence of every token",
    "output_logits": "output_history=True gives the confidence of every token",
}


def diffusion_fields() -> list[str]:
    """Fields of `DiffusionGenerationConfig` that transformers' own class does not have."""
    parameters = [name for name in SAMPLERS.parameters() if name not in Sampler.parameters()]
    return ["algorithm", *parameters, *GENERAL_SETTINGS]


def merge_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` under transformers' names, with numpy's numbers as Python's, so that they are saved and hashed alike.

    Raises DlmBridgeError if two names of one setting are there and differ.
    """
    merged = {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}
    for alias, name in aliases().items():
        value = merged.pop(alias, None)
        if value is not None:
            _refuse_conflict(alias, value, name, merged.get(name))
            merged[name] = value
    _refuse_conflict(BLOCK_NAMES[0], merged.get(BLOCK_NAMES[0]), BLOCK_NAMES[1], merged.get(BLOCK_NAMES[1]))
    return merged


def check_values(values: Mapping[str, Any], where: str = "") -> None:
    """Raise DlmBridgeError for a setting whose value is wrong by itself; None and other keys pass.

    `where` ends the message: " (the model's generation_config)".
    """
    parameters = SAMPLERS.parameters()
    for name, value in values.items():
        if value is None:
            continue
        declared = "gen_length" if name == "max_new_tokens" else name
        if declared in parameters:
            SAMPLERS.check(declared, value, where)
        else:
            check_value(name, GENERAL_SETTINGS.get(name) or TRANSFORMERS_SETTINGS.get(name), value, where)
    algorithm = values.get("algorithm")
    if algorithm is not None and algorithm not in SAMPLERS:
        raise DlmBridgeError(
            f"unknown algorithm {algorithm!r}: known are {', '.join(SAMPLERS)}; register_sampler adds another, before "
            f"the model is loaded{where}"
        )
    eos_token_ids(values.get("eos_token_id"))


def eos_token_ids(value: Any) -> tuple[int, ...]:
    """`eos_token_id` as a tuple; empty when there is none. Raises DlmBridgeError for what is not token ids."""
    if value is None:
        return ()
    ids = value.tolist() if isinstance(value, torch.Tensor) else value
    ids = ids if isinstance(ids, (list, tuple)) else [ids]
    if not is_token_ids(ids):
        raise DlmBridgeError(f"eos_token_id must be a token id or a list of them, not {value!r}: None is no stopping")
    return tuple(ids)


def aliases() -> dict[str, str]:
    """Further names of settings, and what transformers calls them."""
    names = {"gen_length": "max_new_tokens"}
    for kind in SAMPLERS.values():
        names |= kind.aliases
    return names


def _refuse_conflict(name: str, value: Any, other: str, other_value: Any) -> None:
    if value is not None and other_value is not None and value != other_value:
        raise DlmBridgeError(f"{name} {value} and {other} {other_value} are the same setting: give one of them")
