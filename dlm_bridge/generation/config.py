"""`DiffusionGenerationConfig`: a sampler's settings, saved with the checkpoint as generation_config.json.

Names and values of settings are checked here as far as that needs no model: our own, the samplers', transformers'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.samplers import GENERAL_SETTINGS, SAMPLERS, Check, Sampler, check_value, is_token_ids
from dlm_bridge.registration import absent

# Unset in the file, so that transformers' text-generation pipeline does not fill them with its own defaults.
PIPELINE_DEFAULTS = ("max_new_tokens", "do_sample", "temperature")
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


class DiffusionGenerationConfig(GenerationConfig):
    """The settings of a diffusion sampler. None means unset: the checkpoint's or the family's value is used.

    The parameters depend on the sampler (`algorithm`, by default the family's own):
    `dlm_bridge.generation.SAMPLERS[name].parameters()` lists them with their defaults, and the sampler's docstring
    describes them. Published names that differ are its aliases (`SAMPLERS[name].names()`), and are saved as they are
    given. `generate` refuses a parameter that the sampler does not have.

    Args:
        algorithm: the published sampler, by its name in `SAMPLERS`.
        gen_length, max_new_tokens: new tokens of every row, two names for one setting.
        block_length: tokens that are denoised together; blocks are denoised from left to right. By default the model's
            own block.
        steps: denoising steps, of each block or of all together: the sampler's docstring says which.
        threshold: the confidence that commits a token.
        temperature: 0 is greedy; above 0 each token is drawn from softmax(logits / temperature).
        top_k, top_p: only the k most probable tokens, or the most probable up to a total of p, are drawn.
        eos_token_id: one id or several that end a row; an explicit None turns stopping off (stored as an empty list).
        pad_token_id: fills a row behind its end.
        mask_token_id: the token of masks.
        cache: the KV cache, see `dlm_bridge.generation.kv_cache`. By default the exact one, where there is one; for
            fast_dllm_v2 "dual" is its own cache of small blocks (approximate; its `use_block_cache`).
        execution: how forward passes run: "eager", "graph" (CUDA graphs, the default on a GPU) or "compiled" (CUDA
            graphs of compiled decoder layers: faster, after up to a minute once for each model).
        repetition_penalty, suppress_tokens, bad_words_ids, min_new_tokens, min_length, no_repeat_ngram_size: as in
            transformers; see `dlm_bridge.generation.constraints`.
        stop_strings: text that ends a row, with `tokenizer=` at the call.
        num_return_sequences: samples of each prompt, next to each other.
        infill: fill the masks inside the prompts (-1 or, unless it is an ordinary token, the mask token), by the
            sampler's own rule; there are new tokens behind them only where `gen_length` is passed. `steps` then are
            those of each block. A block-causal model fills a block without attending to later ones.
        span_lengths: with `infill`, lengths to try for each span of masks; see `generation.api`.
        seed: makes the noise a function of the seed and of each row's own prompt; a list is the rows' own seeds.
        output_history: with `return_dict_in_generate`, the result holds every step.
        **kwargs: the parameters of samplers, and any other field of transformers' GenerationConfig; `generate` refuses
            those that it does not support.

    Raises:
        DlmBridgeError: a value that no sampler accepts, or two names of one setting that differ.
    """

    def __init__(self, **kwargs: Any) -> None:
        stopping_off = "eos_token_id" in kwargs and kwargs["eos_token_id"] is None
        kwargs = merge_names(kwargs)
        for name in diffusion_fields():
            setattr(self, name, kwargs.pop(name, None))
        super().__init__(**kwargs)
        if stopping_off:
            self.eos_token_id = None

    def __setattr__(self, name: str, value: Any) -> None:
        # transformers' constructor assigns None to what is unset; a later None is meant.
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
        """As in transformers; a null in a file means unset, and a keyword wins by any of a setting's names."""
        given = merge_names(kwargs)
        pairs = [pair for pair in _name_pairs(SAMPLERS.values()) if not given.keys().isdisjoint(pair)]
        replaced = {name for pair in pairs for name in pair}
        stored = {key: value for key, value in config_dict.items() if value is not None and key not in replaced}
        return super().from_dict(merge_names(stored), **given)

    @classmethod
    def from_model_config(cls, model_config: Any) -> DiffusionGenerationConfig:
        """As in transformers: the generation settings that an old config.json holds, if any."""
        return cls.from_config(GenerationConfig.from_model_config(model_config))

    def to_dict(self) -> dict[str, Any]:
        """Every field but our own unset ones, which plain transformers would not know."""
        own, values = diffusion_fields(), super().to_dict()
        unset = [name for name in own if values.get(name) is None]
        for name in unset:
            values.pop(name, None)
        if len(unset) < len(own):
            # With this mark transformers drops every field that is not its own when it loads the file.
            values.pop("_from_model_config", None)
        return values

    def to_diff_dict(self) -> dict[str, Any]:
        """As in transformers, with None for what the sampler has a default of its own: transformers' pipelines fill
        settings that are missing here with values for autoregressive models."""
        return {**dict.fromkeys(PIPELINE_DEFAULTS), **super().to_diff_dict()}

    def to_json_string(
        self, use_diff: bool = True, ignore_metadata: bool = False, keys_to_pop: list[str] | None = None
    ) -> str:
        """As in transformers: unset values are left out."""
        unset = [name for name in PIPELINE_DEFAULTS if use_diff and getattr(self, name) is None]
        return super().to_json_string(use_diff, ignore_metadata, [*(keys_to_pop or []), *unset])

    def validate(self, strict: bool = False, user_set_attributes: set[str] | None = None) -> None:
        """As in transformers, with our own checks; a temperature needs no `do_sample` here."""
        check_values(vars(self))
        if user_set_attributes is None:
            user_set_attributes = {name for name, value in vars(self).items() if value is not None}
        # transformers warns about these unless do_sample, and not they, were set by the user.
        own = {"temperature", "top_k", "top_p"}
        super().validate(strict=strict, user_set_attributes=(user_set_attributes | {"do_sample"}) - own)


def diffusion_fields() -> list[str]:
    """Fields of `DiffusionGenerationConfig` that transformers' own class does not have."""
    parameters = [name for name in SAMPLERS.parameters() if name not in Sampler.parameters()]
    return ["algorithm", *parameters, *GENERAL_SETTINGS]


def merge_names(values: Mapping[str, Any], kind: type[Sampler] = Sampler) -> dict[str, Any]:
    """`values` under transformers' names and, of a sampler's aliases, those of its parameters, with numpy's numbers as
    Python's, so that they are saved and hashed alike.

    Raises DlmBridgeError if two names of one setting are there and differ.
    """
    merged = {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}
    for alias, name in {"gen_length": "max_new_tokens", **kind.names()}.items():
        if alias in merged:
            value = merged.pop(alias)
            _refuse_conflict(alias, value, name, merged.get(name))
            if value is not None or (name not in merged and kind.accepts_none(name)):
                merged[name] = value
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
    if algorithm is not None and (not isinstance(algorithm, str) or algorithm not in SAMPLERS):
        raise DlmBridgeError(
            f"unknown algorithm {algorithm!r}: known are {', '.join(SAMPLERS)}; register_sampler adds another, before "
            f"the model is loaded{where}{absent()}"
        )
    for alias, name in _name_pairs(SAMPLERS.values() if algorithm is None else [SAMPLERS[algorithm]]):
        _refuse_conflict(alias, values.get(alias), name, values.get(name))
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


def _name_pairs(kinds: Iterable[type[Sampler]]) -> list[tuple[str, str]]:
    """Aliases of these samplers, each with the parameter that it stands for."""
    return [pair for kind in kinds for pair in kind.names().items()]


def _refuse_conflict(name: str, value: Any, other: str, other_value: Any) -> None:
    if value is not None and other_value is not None and value != other_value:
        raise DlmBridgeError(f"{name} {value} and {other} {other_value} are the same setting: give one of them")
