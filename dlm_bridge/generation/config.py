"""`DiffusionGenerationConfig`: settings of a sampler, saved with the checkpoint as generation_config.json.

Also the checks of names and values that need no model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from dlm_bridge.errors import SettingError
from dlm_bridge.generation.options import GENERAL, check_value, is_token_ids
from dlm_bridge.generation.samplers import SAMPLERS, Sampler
from dlm_bridge.registration import absent
from dlm_bridge.settings import Option, check_choice

# Unset in the file, so that transformers' text-generation pipeline does not fill them with its own defaults.
PIPELINE_DEFAULTS = ("max_new_tokens", "do_sample", "temperature")
# Settings of transformers' `generate` with the same meaning here.
TRANSFORMERS_SETTINGS = {
    "max_new_tokens": None,
    "max_length": Option("", type=int, minimum=1),
    "do_sample": None,
    "eos_token_id": None,
    "pad_token_id": Option("", type=int, minimum=0),
    "num_return_sequences": Option("", type=int, minimum=1),
    "return_dict_in_generate": None,
    "stop_strings": None,
}
# Settings of transformers' `generate` that have no effect on samplers with their own caches, and LLaDA2's
# eos_early_stop: tokens after the end are never returned.
IGNORED_SETTINGS = (
    "bos_token_id", "cache_config", "cache_implementation", "compile_config", "disable_compile", "eos_early_stop",
    "max_cache_len", "token_type_ids", "tokenizer", "transformers_version", "use_cache",
)  # fmt: skip
# Settings that affect only the distribution that tokens are drawn from.
SAMPLING_ONLY = ("top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
# Remedies for settings of transformers' `generate` or of published samplers.
ALTERNATIVES = {
    "use_block_cache": "use `cache=dual`",
    "past_key_values": "`cache` selects the KV cache",
    "inputs_embeds": "pass input_ids",
    "guidance_scale": "use `cfg_scale`, which is guidance_scale - 1, if the sampler has it",
    "stopping_criteria": "use `eos_token_id` or `stop_strings`",
    "output_scores": "`output_history=True` returns the confidence of every token",
    "output_logits": "`output_history=True` returns the confidence of every token",
}


class DiffusionGenerationConfig(GenerationConfig):
    """Settings of a diffusion sampler. None: use the value of the checkpoint, the family or the sampler.

    The fields are those of `dlm_bridge.generation.options` and the parameters of all samplers; the docstring of
    `dlm_bridge.generation.SAMPLERS[name]` lists a sampler's parameters and their defaults. `generate` refuses
    parameters that the sampler does not have. Published names are aliases (`SAMPLERS[name].names()`), and are saved
    under the given name.

    Args:
        gen_length, max_new_tokens: maximum number of new tokens per row, two names of one setting.
        eos_token_id: one or several ids that end a row. An explicit None disables stopping (stored as an empty list).
        pad_token_id: token after the end of a row.
        cache: KV cache, see `dlm_bridge.generation.kv_cache`. Default: the exact one, if there is one. For
            fast_dllm_v2, "dual" is its approximate cache of small blocks (published as `use_block_cache`).
        execution: "eager", "graph" (CUDA graphs; default on a GPU) or "compiled" (CUDA graphs of compiled decoder
            layers: faster, after up to a minute of compilation per model).
        repetition_penalty, suppress_tokens, bad_words_ids, min_new_tokens, min_length, no_repeat_ngram_size: as in
            transformers; see `dlm_bridge.generation.constraints`.
        stop_strings: texts that end a row; need `tokenizer=` at the call.
        num_return_sequences: samples per prompt, in adjacent rows.
        infill: fill in the masks of the prompts (-1, or the mask token unless it is an ordinary token) by the
            sampler's rule. New tokens follow only if `gen_length` is passed. `steps` is then the number per block. A
            block-causal model fills a block without attending to later ones.
        span_lengths: with `infill`, lengths to try for each span of masks; see `generation.api`.
        seed: each row's random numbers depend on the seed and its prompt; a list contains one seed per row.
        output_history: with `return_dict_in_generate`, return every denoising step.
        **kwargs: any other setting, and other fields of transformers' GenerationConfig. `generate` refuses those that
            it does not support.

    Raises:
        SettingError: no sampler accepts the value, or two names of one setting have different values.
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
        """Convert a GenerationConfig, such as transformers loads from a file."""
        if isinstance(config, cls):
            return config
        converted = cls.from_dict(config.to_dict())
        if getattr(config, "_original_object_hash", None) is not None:
            converted._original_object_hash = hash(converted)  # as loaded: transformers then saves it leniently
        return converted

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Construct from a dict. null means unset; a keyword overrides a setting under any of its names."""
        given = merge_names(kwargs)
        pairs = [pair for pair in _name_pairs(SAMPLERS.values()) if not given.keys().isdisjoint(pair)]
        replaced = {name for pair in pairs for name in pair}
        stored = {key: value for key, value in config_dict.items() if value is not None and key not in replaced}
        return super().from_dict(merge_names(stored), **given)

    @classmethod
    def from_model_config(cls, model_config: Any) -> DiffusionGenerationConfig:
        """Construct from the generation settings of an old config.json."""
        return cls.from_config(GenerationConfig.from_model_config(model_config))

    def to_dict(self) -> dict[str, Any]:
        """Fields, without this class's unset ones, which plain transformers does not know."""
        own, values = diffusion_fields(), super().to_dict()
        unset = [name for name in own if values.get(name) is None]
        for name in unset:
            values.pop(name, None)
        if len(unset) < len(own):
            # With this mark transformers drops every field that is not its own when it loads the file.
            values.pop("_from_model_config", None)
        return values

    def to_diff_dict(self) -> dict[str, Any]:
        """Differences from the defaults, with None for `PIPELINE_DEFAULTS`: transformers' pipelines replace missing
        settings by values for autoregressive models."""
        return {**dict.fromkeys(PIPELINE_DEFAULTS), **super().to_diff_dict()}

    def to_json_string(
        self, use_diff: bool = True, ignore_metadata: bool = False, keys_to_pop: list[str] | None = None
    ) -> str:
        """JSON without unset values."""
        unset = [name for name in PIPELINE_DEFAULTS if use_diff and getattr(self, name) is None]
        return super().to_json_string(use_diff, ignore_metadata, [*(keys_to_pop or []), *unset])

    def validate(self, strict: bool = False, user_set_attributes: set[str] | None = None) -> None:
        """Check the values. Unlike in transformers, a temperature needs no `do_sample`."""
        check_values(vars(self))
        if user_set_attributes is None:
            user_set_attributes = {name for name, value in vars(self).items() if value is not None}
        # transformers warns about these settings without do_sample.
        own = {"temperature", "top_k", "top_p"}
        super().validate(strict=strict, user_set_attributes=(user_set_attributes | {"do_sample"}) - own)


def diffusion_fields() -> list[str]:
    """Fields of `DiffusionGenerationConfig` that transformers' own class does not have."""
    parameters = [name for name in SAMPLERS.parameters() if name not in Sampler.parameters()]
    return [*parameters, *GENERAL]


def sampler_defaults(model: Any) -> Mapping[str, Any]:
    """The model's own sampler and its defaults; those of the family for classes of other packages; empty without a
    family."""
    of_family = getattr(getattr(model, "family", None), "sampler", {})
    defaults: Mapping[str, Any] = getattr(model, "sampler_defaults", of_family)
    return defaults


def published_generation_config(model: Any) -> Any:
    """The generation config to save with a model, under the names that the published code of its sampler reads."""
    config = model.generation_config
    kind = SAMPLERS.get(getattr(config, "algorithm", None) or sampler_defaults(model).get("algorithm", ""))
    if kind is None or not kind.published_names:
        return config
    saved = copy.copy(config)
    for alias in kind.published_names:
        name = kind.aliases[alias]
        if getattr(config, alias, None) is None and getattr(config, name, None) is not None:
            setattr(saved, alias, getattr(config, name))
            setattr(saved, name, None)
    return saved


def merge_names(values: Mapping[str, Any], kind: type[Sampler] = Sampler) -> dict[str, Any]:
    """Rename aliases to transformers' names and the sampler's parameters, and convert numpy's numbers to Python's.

    Raises SettingError for two names of one setting with different values.
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
    """Raise SettingError for an invalid value; None and unknown keys pass.

    Args:
        where: end of the message, such as " (the model's generation_config)".
    """
    parameters = SAMPLERS.parameters()
    for name, value in values.items():
        if value is None:
            continue
        declared = "gen_length" if name == "max_new_tokens" else name
        if declared in parameters:
            SAMPLERS.check(declared, value, where)
        else:
            check_value(name, GENERAL.get(name) or TRANSFORMERS_SETTINGS.get(name), value, where)
    algorithm = values.get("algorithm")
    if algorithm is not None:
        more = f"; register_sampler adds others, before the model is loaded{where}{absent()}"
        check_choice("algorithm", algorithm, SAMPLERS, more)
    for alias, name in _name_pairs(SAMPLERS.values() if algorithm is None else [SAMPLERS[algorithm]]):
        _refuse_conflict(alias, values.get(alias), name, values.get(name))
    eos_token_ids(values.get("eos_token_id"))


def eos_token_ids(value: Any) -> tuple[int, ...]:
    """Convert `eos_token_id` to a tuple, empty for None. Raises SettingError for other values than token ids."""
    if value is None:
        return ()
    ids = value.tolist() if isinstance(value, torch.Tensor) else value
    ids = ids if isinstance(ids, (list, tuple)) else [ids]
    if not is_token_ids(ids):
        raise SettingError("eos_token_id", f"must be a token id or a list of them, not {value!r}; None: no stopping")
    return tuple(ids)


def _name_pairs(kinds: Iterable[type[Sampler]]) -> list[tuple[str, str]]:
    """Pairs of alias and parameter of these samplers."""
    return [pair for kind in kinds for pair in kind.names().items()]


def _refuse_conflict(name: str, value: Any, other: str, other_value: Any) -> None:
    if value is not None and other_value is not None and value != other_value:
        raise SettingError(name, f"{value} and `{other}={other_value}` are the same setting: set one of them")
