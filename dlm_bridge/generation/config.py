"""Generation settings: `DiffusionGenerationConfig`, and the resolution of a call's settings from their sources."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeVar, get_args

import numpy as np
import torch
from transformers import GenerationConfig
from transformers.utils import logging

from dlm_bridge.attention_mask import AttentionPattern
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.canvas import check_stop_strings
from dlm_bridge.generation.constraints import CONSTRAINT_SETTINGS as CONSTRAINTS
from dlm_bridge.generation.kv_cache import CacheMode
from dlm_bridge.generation.runtime.runner import EXECUTIONS, Execution
from dlm_bridge.generation.samplers import SAMPLERS
from dlm_bridge.generation.samplers.base import Sampler
from dlm_bridge.models.family_spec import FamilySpec

# Names that some published samplers have for what transformers calls otherwise.
ALIASES = {"gen_length": "max_new_tokens", "logits_temp": "temperature", "topp_temp": "top_p"}
SHARED = ("gen_length", "temperature", "top_k", "top_p")  # what every sampler has
# Both lists grow with `register_sampler`.
PARAMETERS = list(
    dict.fromkeys(name for algorithm in SAMPLERS.values() for name in algorithm.parameters() if name not in SHARED)
)
# What transformers' own class does not have.
OWN_FIELDS = [
    "algorithm",
    *PARAMETERS,
    "cache",
    "execution",
    "mask_token_id",
    "seed",
    "output_history",
    "infill",
    "span_lengths",
]

# What transformers' text-generation pipeline sets where neither its user nor the model does.
PIPELINE_DEFAULTS = ("max_new_tokens", "do_sample", "temperature")

_ABOVE_ZERO = (
    "max_new_tokens", "max_length", "num_return_sequences",
    "block_length", "block_size", "small_block_size", "steps", "denoising_steps",
    "diffusion_steps", "num_diffusion_steps", "minimal_topk", "num_to_transfer", "wedlm_window_size",
)  # fmt: skip
_COUNTS = ("max_post_steps", "top_k")
_NUMBERS = (
    "temperature", "cfg_scale", "alg_temp", "threshold", "factor", "confidence_threshold", "editing_threshold",
    "eb_threshold", "eb_gamma", "end_think_logit_boost", "end_think_boost_power", "entropy_bound",
    "wedlm_entropy_threshold", "wedlm_pos_penalty_factor",
)  # fmt: skip
_FLAGS = ("greedy", "add_eos_at_end", "logits_eos_inf", "confidence_eos_eot_inf", "output_history", "infill")
_CHOICES = {
    "cache": get_args(CacheMode),
    "execution": EXECUTIONS,
    "remasking": ("low_confidence", "random"),
    "remasking_strategy": ("low_confidence_dynamic", "low_confidence_static", "sequential", "entropy_bounded"),
    "resampling": ("posterior", "entropy_bound"),
    "alg": ("origin", "maskgit_plus", "topk_margin", "entropy", "confidence_threshold"),
}


class DiffusionGenerationConfig(GenerationConfig):
    """The settings of a diffusion sampler. None means unset: the checkpoint's or the family's value is used.

    Which of the parameters there are depends on the sampler (`algorithm`, by default the family's own); they have the
    names that its authors gave them, and `dlm_bridge.generation.ALGORITHMS[name].parameters()` lists them with their
    defaults. A parameter that the sampler does not have is refused by `generate`.

    Args:
        algorithm: the published sampler, by its name in `ALGORITHMS`.
        gen_length, max_new_tokens: new tokens of every row, two names for one value.
        temperature: 0 is greedy; above 0 each token is drawn from softmax(logits / temperature).
        top_k, top_p: only the k most probable tokens, or the most probable up to a total of p, are drawn.
        block_length, block_size: tokens that are denoised together; blocks are settled from left to right. By default
            the model's own block.
        steps: denoising steps, over all blocks (llada, difflm, mdlm, bd3lm, dream, uniform) or of each block (illada,
            llada2).
        denoising_steps, diffusion_steps, num_diffusion_steps: the same of sdar (each block), diffullama and rnd1.
        draft_adapter: (linear_spec) the name of the model's PEFT adapter that is on in drafts and off in their checks.
        small_block_size: (fast_dllm_v2) tokens of a block that are settled before the next ones.
        logits_eos_inf, confidence_eos_eot_inf: (llada) end-of-sequence tokens are never proposed; or they and
            `eot_token_id` are settled last, since they have no confidence.
        eot_token_id: (llada) the end-of-turn token where it is none of `eos_token_id`.
        end_think_token_ids, end_think_logit_boost, end_think_boost_power: (llada, illada) the tokens that close a
            thought, in a row; what is added to their logits at the end of `gen_length`; and with which power of the
            share of the text that is written before.
        cfg_scale: w of classifier-free guidance, logits = un + (w + 1) * (cond - un); 0 is off.
        remasking: (llada, difflm, illada, mdlm, bd3lm) which positions a step settles: "low_confidence" (the most
            probable) or "random".
        remasking_strategy: (sdar) "low_confidence_dynamic", "low_confidence_static", "sequential", "entropy_bounded".
        alg, eps, alg_temp: (dream) the order of reveals, "origin", "maskgit_plus", "topk_margin", "entropy" or
            Fast-dLLM's "confidence_threshold"; the last noise level; above 0, positions are drawn, not ranked.
        threshold, confidence_threshold: the confidence above which a token is settled at once; (linear_spec) from
            which on a forward drafts it, 0 for all of them in one.
        factor: (llada) the r most confident tokens are settled while the r-th reaches 1 - factor / (r + 1).
        eb_threshold, eb_gamma: (sdar, rnd1) how much entropy one step may settle.
        resampling, entropy_bound: (uniform) tokens are drawn from the "posterior" of the noise, or those that the
            bound on entropy lets pass are taken and the others made noise again.
        minimal_topk: (llada2) caps the steps of a block at gen_length / minimal_topk.
        editing_threshold, max_post_steps, num_to_transfer: (llada2.1) the confidence above which a settled token is
            rewritten, how many steps a block without masks may take, and how many masks a step settles at least.
        greedy, add_eos_at_end: (rnd1) the best tokens at any temperature; what closes the canvas.
        wedlm_window_size, wedlm_entropy_threshold, wedlm_pos_penalty_factor: (wedlm) positions in the window, and
            the bound on entropy + factor * distance.
        eos_token_id: one id or several that end a row; None, when given, turns stopping off (kept as an empty list).
        pad_token_id: what follows the end of a row.
        mask_token_id: the token that stands for "not settled yet".
        cache: what is kept of a forward for the next ones: "none"; "block" (exact, the default of block-causal models,
            Nemotron's and WeDLM's); "prefix" or "dual" (approximate, of bidirectional models; Fast-dLLM v1); for
            fast_dllm_v2 "dual" is its own, of the block's other small blocks (approximate; its `use_block_cache`).
        execution: how forwards run: "eager", "graph" (recorded as CUDA graphs, the default on a GPU) or "compiled"
            (recorded, and decoder layers are compiled: faster, after up to a minute once for each model).
        repetition_penalty, suppress_tokens, bad_words_ids, min_new_tokens, min_length, no_repeat_ngram_size: as in
            transformers; see `dlm_bridge.generation.constraints` for what they mean to a denoiser.
        stop_strings: text that ends a row, with `tokenizer=` at the call.
        num_return_sequences: samples of each prompt, next to each other.
        infill: fill the mask tokens inside the prompts, by the sampler's own rule; there are new tokens behind them
            only where `gen_length` is passed. `steps` then are those of each block. A block-causal model fills a block
            without seeing later ones.
        span_lengths: with `infill`, lengths to try for each span of masks; see `dlm_bridge.generation.api`.
        seed: makes the noise a function of the seed and of each row's own prompt.
        output_history: with `return_dict_in_generate`, the result holds every step.
        **kwargs: any other field of transformers' GenerationConfig; those that would change the result and that the
            sampler does not have are refused by `generate`.

    Raises:
        DlmBridgeError: a value that no sampler can run, or `gen_length` and `max_new_tokens` that differ.
    """

    def __init__(self, **kwargs: Any) -> None:
        stopping_off = "eos_token_id" in kwargs and kwargs["eos_token_id"] is None
        kwargs = merge_names(kwargs)
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
        """As in transformers; a null in a file means unset, and a keyword wins by either of a setting's two names."""
        stored = merge_names({key: value for key, value in config_dict.items() if value is not None})
        return super().from_dict(stored, **merge_names(kwargs))

    @classmethod
    def from_model_config(cls, model_config: Any) -> DiffusionGenerationConfig:
        """As in transformers: the generation settings that an old config.json holds, if any."""
        return cls.from_config(GenerationConfig.from_model_config(model_config))

    def to_dict(self) -> dict[str, Any]:
        """Every field but our own unset ones, which plain transformers would not know."""
        fields = super().to_dict()
        # A config that is older than a `register_sampler` has none of that sampler's names.
        unset = [name for name in OWN_FIELDS if fields.get(name) is None]
        for name in unset:
            fields.pop(name, None)
        if len(unset) < len(OWN_FIELDS):
            # With this mark transformers drops every field that is not its own when it loads the file.
            fields.pop("_from_model_config", None)
        return fields

    def to_diff_dict(self) -> dict[str, Any]:
        """As in transformers, with None for what the sampler has a default of its own for: there transformers'
        pipelines look for settings that nobody made, and give them values made for autoregressive models."""
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


def merge_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` under transformers' names, numpy's numbers as Python's, so that they are saved and hashed like them.

    Raises DlmBridgeError if two names of one setting are there and differ.
    """
    merged = {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}
    for alias, name in ALIASES.items():
        value = merged.pop(alias, None)
        if value is not None:
            other = merged.get(name)
            if other is not None and other != value:
                raise DlmBridgeError(f"{alias} {value} and {name} {other} are the same setting: give one of them")
            merged[name] = value
    return merged


def check_values(values: Mapping[str, Any], where: str = "") -> None:
    """Raise DlmBridgeError for a sampler setting that is wrong by itself; None and other keys are let through.

    `where` ends the message: " (the model's generation_config)".
    """
    given = {name: value for name, value in values.items() if value is not None}

    def check(names: Iterable[str], fits: Callable[[Any], bool], wanted: str) -> None:
        for name in names:
            if name in given and not fits(given[name]):
                shown = "gen_length (max_new_tokens)" if name == "max_new_tokens" else name
                raise DlmBridgeError(f"{shown} must be {wanted}, not {given[name]!r}{where}")

    check(_ABOVE_ZERO, lambda value: _is_int(value) and value > 0, "a whole number above 0")
    check(_COUNTS, lambda value: _is_int(value) and value >= 0, "a whole number, 0 or above")
    check(_NUMBERS, lambda value: _is_number(value) and 0 <= value < math.inf, "a number, 0 or above")
    check(["top_p"], lambda value: _is_number(value) and 0 < value <= 1, "a number above 0, at most 1")
    check(["eps"], lambda value: _is_number(value) and 0 < value < 1, "a number between 0 and 1")
    check(["mask_token_id", "pad_token_id", "eot_token_id"], lambda value: _is_int(value) and value >= 0, "a token id")
    check(["end_think_token_ids"], _is_ids, "a list of token ids")
    check(["seed"], _is_int, "a whole number")
    check(["draft_adapter"], lambda value: isinstance(value, str), "the name of an adapter")
    check(_FLAGS, lambda value: isinstance(value, bool), "True or False")
    for name, known in {"algorithm": tuple(SAMPLERS), **_CHOICES}.items():
        if name in given and given[name] not in known:
            own = "; register_sampler makes another known, before the model is loaded" if name == "algorithm" else ""
            raise DlmBridgeError(f"unknown {name} {given[name]!r}: known are {', '.join(known)}{own}{where}")
    eos_token_ids(given.get("eos_token_id"))


def eos_token_ids(value: Any) -> tuple[int, ...]:
    """`eos_token_id` as a tuple; empty when there is none. Raises DlmBridgeError for what is not token ids."""
    if value is None:
        return ()
    ids = value.tolist() if isinstance(value, torch.Tensor) else value
    ids = [ids] if _is_int(ids) else ids
    if not isinstance(ids, (list, tuple)) or not all(_is_int(token) and token >= 0 for token in ids):
        raise DlmBridgeError(f"eos_token_id must be a token id or a list of them, not {value!r}: None is no stopping")
    return tuple(ids)


def _is_ids(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(_is_int(token) and token >= 0 for token in value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


Kind = TypeVar("Kind", bound=type[Sampler])


def register_sampler(kind: Kind) -> Kind:
    """Make a sampler known to `generate` and to `DiffusionGenerationConfig` by its name; usable as a decorator.

    A rule alone needs no name: `generate(..., commit_rule=rule)` puts it in place of the sampler's own.

        @register_sampler
        @dataclass(frozen=True, kw_only=True)
        class LeftToRight(Algorithm):
            name: ClassVar[str] = "left_to_right"
            attention_patterns: ClassVar[tuple[Topology, ...]] = ("bidirectional",)
            per_step: int = 2

            def recipe(self, tokens: Tokens) -> Recipe:
                schedule = [self.per_step] * self.gen_length
                return Recipe(Layout(self.gen_length), Sequential(schedule), self.sampling(), Predictor, {})

        model.generate(ids, algorithm="left_to_right", per_step=4)

    Raises:
        DlmBridgeError: no dataclass of `Algorithm`'s, a name that another sampler has, or a parameter with the name
            of another setting.
    """
    if not (isinstance(kind, type) and issubclass(kind, Sampler) and is_dataclass(kind)):
        raise DlmBridgeError(f"{kind!r} is no sampler: register a frozen, kw_only dataclass below Sampler")
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not name:
        raise DlmBridgeError(f"{kind.__name__} has no name: give it `name: ClassVar[str]`")
    if name in SAMPLERS and SAMPLERS[name].__qualname__ != kind.__qualname__:
        raise DlmBridgeError(f"{kind.__name__}: the name '{name}' is that of {SAMPLERS[name].__name__}")
    attention_patterns = getattr(kind, "attention_patterns", ())
    if not attention_patterns or not {*attention_patterns} <= {*get_args(AttentionPattern)}:
        raise DlmBridgeError(
            f"{kind.__name__}: attention_patterns must be some of {', '.join(get_args(AttentionPattern))}"
        )
    own = [parameter for parameter in kind.parameters() if parameter not in SHARED]
    for parameter in own:
        if parameter not in PARAMETERS and (parameter in OWN_FIELDS or hasattr(GenerationConfig(), parameter)):
            raise DlmBridgeError(f"{kind.__name__}: '{parameter}' is another setting's name")
    SAMPLERS[name] = kind
    for parameter in own:
        if parameter not in PARAMETERS:
            PARAMETERS.append(parameter)
            OWN_FIELDS.append(parameter)
    return kind


logger = logging.get_logger(__name__)

# Settings of transformers' generate that this sampler reads as they are.
SHARED_FIELDS = (
    "max_new_tokens",
    "max_length",
    "temperature",
    "do_sample",
    "eos_token_id",
    "pad_token_id",
    "num_return_sequences",
    "return_dict_in_generate",
    "stop_strings",
)
# Those that cannot change the result of a sampler with caches of its own (`cache`), whatever their value. (LLaDA2's
# eos_early_stop is among them since no tokens behind the end are ever returned.)
WITHOUT_EFFECT = (
    "bos_token_id",
    "cache_config",
    "cache_implementation",
    "compile_config",
    "disable_compile",
    "eos_early_stop",
    "max_cache_len",
    "token_type_ids",
    "tokenizer",
    "transformers_version",
    "use_cache",
    "_from_model_config",
)
# Those that reshape a distribution to draw from: of no account to a greedy sampler. Name: the value that means off.
SAMPLING_ONLY = {
    "top_k": 0,
    "top_p": 1.0,
    "top_h": None,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
# What else is off with a value of its own; any other setting of transformers' is off with None, False or nothing.
OFF = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "diversity_penalty": 0.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "guidance_scale": 1.0,
}
GENERATE_ARGUMENTS = (
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "synced_gpus",
    "assistant_model",
    "assistant_tokenizer",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "custom_generate",
)
# What transformers' generate hands on to a model, or a published sampler takes, and what to do instead.
NO_INPUTS = {
    "inputs_embeds": "a denoiser starts from tokens, pass input_ids",
    "position_ids": "each row counts from its own first token, say with attention_mask where padding is",
    "past_key_values": "what is kept between forwards is chosen by cache",
    "use_block_cache": "cache='dual' is what it turns on, cache='block' what is kept without it",
    "cache_position": "what is kept between forwards is chosen by cache",
    "logits_to_keep": "the sampler asks for the logits that it needs",
    "labels": "the loss is model(input_ids, labels=labels).loss",
    "trust_remote_code": "no code of a checkpoint is run",
}
# What does here what a setting of transformers' does there.
INSTEAD = {
    "assistant_model": "a denoiser settles several tokens a forward by itself, see threshold and steps",
    "guidance_scale": "use cfg_scale, which is guidance_scale - 1, where the sampler has it",
    "output_logits": "output_history=True gives how sure the model was of every token",
    "output_scores": "output_history=True gives how sure the model was of every token",
    "stopping_criteria": "a row ends at eos_token_id and at stop_strings",
}
KEYWORD, GIVEN, STORED, MODEL, FAMILY, ALGORITHM = (
    "keyword argument",
    "generation_config",
    "the model's generation_config",
    "the model's config",
    "the family's default",
    "the sampler's default",
)


@dataclass(frozen=True)
class SamplerSettings:
    """A call's settings, complete and checked."""

    algorithm: Sampler
    gen_length: int  # new tokens behind the prompt; none, unless they are asked for, where masks inside it are filled
    infill: bool
    span_lengths: tuple[int, ...]  # lengths to try for each span of masks; none: they are as long as they are
    shift: bool  # the model's logits[i - 1] are about token i
    eos_token_ids: tuple[int, ...]  # empty: no stopping
    end_token_ids: tuple[int, ...]  # the model's end-of-sequence tokens, whether a row stops at them or not
    pad_token_id: int
    mask_token_id: int | None  # None: the sampler works without one
    seed: int | None
    cache: CacheMode | None  # None: the exact one, where there is one
    execution: Execution | None  # None: by the device
    return_dict: bool
    output_history: bool  # the steps are part of the returned dict
    num_return_sequences: int
    stop_strings: tuple[str, ...]
    constraints: Mapping[str, Any]  # the settings that `constraints.read_constraints` reads, as far as they are given
    vocabulary: int
    context: int | None  # the longest sequence that the model was made for, in tokens


@dataclass(frozen=True)
class _Level:
    """What one source says; the sources are asked in order."""

    where: str
    values: Mapping[str, Any]


def resolve_settings(
    model: Any, generation_config: GenerationConfig | None, keywords: Mapping[str, Any], prompt_width: int
) -> SamplerSettings:
    """The settings of one call of `generate`; `prompt_width` is what `max_length` counts from.

    Raises:
        DlmBridgeError: an unknown or unsupported setting, a wrong value, or values that do not fit together.
    """
    spec = _family_of(model)
    levels = _levels(model, generation_config, keywords)
    for level in levels:
        check_values(level.values, "" if level.where == KEYWORD else f" ({level.where})")
    kind = _sampler_class(spec, levels)
    _refuse_unknown(keywords, KEYWORD, kind)
    if generation_config is not None:
        _refuse_unknown(_set_fields(generation_config), GIVEN, kind)
    levels += _defaults(model, spec, kind)
    temperature = _temperature(levels)
    _refuse_unsupported(levels, temperature, kind)
    _refuse_other_samplers(levels, kind)
    parameters = {name: _parameter(levels, name, kind) for name in kind.parameters()}
    infill = bool(_find(levels, "infill", False)[0])
    gen_length = _gen_length(levels, prompt_width, infill)
    parameters |= {"gen_length": gen_length, "temperature": temperature}
    if infill:
        _refuse_infill(spec, kind, parameters)
        # The recipe is that of one block, or of the whole canvas.
        blocks = [parameters[name] for name in ("block_length", "block_size") if name in parameters]
        parameters["gen_length"] = blocks[0] if blocks else prompt_width + gen_length + 1
    elif kind.shortens_block and _find(levels, "block_length", None)[1] in (MODEL, FAMILY, ALGORITHM):
        parameters["block_length"] = min(parameters["block_length"], parameters["gen_length"])

    config = model.config
    vocabulary = config.vocab_size
    mask_token_id, _ = _find(levels, "mask_token_id", getattr(config, "mask_token_id", None))
    if mask_token_id is None:
        mask_token_id = spec.mask_token_id
    if mask_token_id is None and (kind.needs_mask or infill):
        raise DlmBridgeError(
            "the model's config names no mask token: pass mask_token_id, or algorithm='uniform' to a model that was "
            "trained with random tokens instead"
        )
    eos, _ = _find(levels, "eos_token_id", getattr(config, "eos_token_id", None))
    eos = eos_token_ids(eos)
    said = [ids for level in levels if (ids := eos_token_ids(level.values.get("eos_token_id")))]
    ends = said[0] if said else eos_token_ids(getattr(config, "eos_token_id", None))
    pad_token_id, _ = _find(levels, "pad_token_id", getattr(config, "pad_token_id", None))
    if pad_token_id is None:
        pad_token_id = eos[0] if eos else 0  # without stopping nothing is filled up
    if mask_token_id is not None and not 0 <= mask_token_id < vocabulary:
        raise DlmBridgeError(f"mask_token_id {mask_token_id} is outside the vocabulary of {vocabulary}")
    eot = parameters.get("eot_token_id")
    if eot is not None and eot >= vocabulary:
        raise DlmBridgeError(f"eot_token_id {eot} is outside the vocabulary of {vocabulary}")
    if mask_token_id is not None and mask_token_id in eos:
        raise DlmBridgeError(
            f"eos_token_id {mask_token_id} is the mask token, which is never generated: pass another, or None"
        )
    stop_strings = check_stop_strings(_find(levels, "stop_strings", ())[0])
    if (eos or stop_strings) and pad_token_id == mask_token_id:
        raise DlmBridgeError(f"pad_token_id {pad_token_id} is the mask token: pass another pad_token_id")
    return_dict = bool(_find(levels, "return_dict_in_generate", False)[0])
    output_history, where = _find(levels, "output_history", False)
    if output_history and not return_dict and where == KEYWORD:
        raise DlmBridgeError("output_history is a part of the returned dict: pass return_dict_in_generate=True too")
    return SamplerSettings(
        algorithm=kind(**parameters),
        gen_length=gen_length,
        infill=infill,
        span_lengths=_span_lengths(_find(levels, "span_lengths", None)[0], infill, spec, kind),
        shift=spec.shift,
        eos_token_ids=eos,
        end_token_ids=ends,
        pad_token_id=pad_token_id,
        mask_token_id=mask_token_id,
        seed=_find(levels, "seed", None)[0],
        cache=_find(levels, "cache", None)[0],
        execution=_find(levels, "execution", None)[0],
        return_dict=return_dict,
        output_history=bool(output_history),
        num_return_sequences=_find(levels, "num_return_sequences", 1)[0],
        stop_strings=stop_strings,
        constraints=_constraints(levels),
        vocabulary=vocabulary,
        context=getattr(config, "max_position_embeddings", None),
    )


def _family_of(model: Any) -> FamilySpec:
    spec = getattr(model, "family", None)
    if not isinstance(spec, FamilySpec) or spec.kind != "diffusion":
        raise DlmBridgeError(f"{type(model).__name__} is not a diffusion language model that dlm-bridge knows")
    return spec


def _sampler_class(spec: FamilySpec, levels: list[_Level]) -> type[Sampler]:
    """The sampler that is asked for, or the family's own."""
    name, _ = _find(levels, "algorithm", spec.sampler["algorithm"])
    kind = SAMPLERS[name]
    fits = [
        other
        for other, known in SAMPLERS.items()
        if spec.attention_pattern in known.attention_patterns and (not known.families or spec.name in known.families)
    ]
    if name not in fits:
        wanted = " or ".join(kind.families or kind.attention_patterns)
        raise DlmBridgeError(
            f"the {name} sampler runs on {wanted} models, {spec.title} is {spec.attention_pattern}: "
            f"use one of {', '.join(fits)}"
        )
    return kind


def _levels(model: Any, generation_config: GenerationConfig | None, keywords: Mapping[str, Any]) -> list[_Level]:
    """What the user says, and what is saved with the checkpoint."""
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        raise DlmBridgeError(
            f"generation_config must be a DiffusionGenerationConfig, not {type(generation_config).__name__}"
        )
    # None is a value only where it says "off"; see `_find`.
    says_off = {"eos_token_id", *SAMPLING_ONLY, *OFF, *PARAMETERS}
    levels = [_Level(KEYWORD, {key: value for key, value in keywords.items() if value is not None or key in says_off})]
    if generation_config is not None:
        levels.append(_Level(GIVEN, _set_fields(generation_config)))
    stored = getattr(model, "generation_config", None)
    if stored is not None:
        levels.append(_Level(STORED, _set_fields(stored)))
    return [_Level(level.where, merge_names(level.values)) for level in levels]


def _defaults(model: Any, spec: FamilySpec, kind: type[Sampler]) -> list[_Level]:
    """What holds where nobody says anything. The family's defaults are those of its own sampler."""
    block = getattr(model.config, "block_size", None) if kind.model_blocks else None
    family = spec.sampler if spec.sampler["algorithm"] == kind.name else {}
    defaults = {name: value for name, value in kind.parameters().items() if value is not None}
    return [
        _Level(MODEL, {"block_length": block, "block_size": block} if block else {}),
        _Level(FAMILY, merge_names(family)),
        _Level(ALGORITHM, merge_names(defaults)),
    ]


def _parameter(levels: list[_Level], name: str, kind: type[Sampler]) -> Any:
    """A parameter's value. None turns off what can be off, and means "not given" elsewhere."""
    if kind.accepts_none(name):
        return _find(levels, name, None)[0]
    said = [level.values[name] for level in levels if level.values.get(name) is not None]
    return said[0] if said else None


def _set_fields(config: GenerationConfig) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if value is not None}


def _constraints(levels: list[_Level]) -> dict[str, Any]:
    """What the caller says; a checkpoint's own file is not read for these, see `_refuse_unsupported`."""
    said = [level for level in levels if level.where in (KEYWORD, GIVEN)]
    found = {name: _find(said, name, None)[0] for name in CONSTRAINTS}
    return {
        name: value
        for name, value in found.items()
        if value is not None and value != OFF.get(name) and not (hasattr(value, "__len__") and not len(value))
    }


def _find(levels: list[_Level], name: str, default: Any) -> tuple[Any, str | None]:
    """The first source's value and that source's name."""
    for level in levels:
        if name in level.values:
            return level.values[name], level.where
    return default, None


def _refuse_infill(spec: FamilySpec, kind: type[Sampler], parameters: Mapping[str, Any]) -> None:
    others = [
        name
        for name, other in SAMPLERS.items()
        if other.infills and spec.attention_pattern in other.attention_patterns and not other.families
    ]
    if not kind.infills:
        raise DlmBridgeError(
            f"the {kind.name} sampler cannot fill masks inside a prompt, its blocks see nothing of what follows: use "
            f"one of {', '.join(others)}"
        )
    if parameters.get("alg") == "confidence_threshold":
        raise DlmBridgeError(
            "alg 'confidence_threshold' settles equal shares of gen_length, which infilling does not have: use another"
        )


def _span_lengths(value: Any, infill: bool, spec: FamilySpec, kind: type[Sampler]) -> tuple[int, ...]:
    if value is None:
        return ()
    if not infill:
        raise DlmBridgeError("span_lengths are those of masks inside a prompt: pass infill=True as well")
    if spec.attention_pattern != "bidirectional":
        raise DlmBridgeError(
            f"{spec.title} is {spec.attention_pattern}: it cannot judge a span's length by what follows; leave span_lengths out"
        )
    if not kind.needs_mask:
        raise DlmBridgeError(f"the {kind.name} sampler works without masks: leave span_lengths out")
    lengths = tuple(value) if isinstance(value, (list, tuple, range)) else (value,)
    if not lengths or not all(isinstance(one, int) and one > 0 for one in lengths):
        raise DlmBridgeError(f"span_lengths must be whole numbers above 0, not {value!r}")
    return tuple(sorted({*lengths}))


def _gen_length(levels: list[_Level], prompt_width: int, infill: bool) -> int:
    if infill:
        levels = [level for level in levels if level.where in (KEYWORD, GIVEN)]
    for level in levels:
        if "max_new_tokens" in level.values:
            return level.values["max_new_tokens"]
        if "max_length" in level.values:
            length = level.values["max_length"]
            if length <= prompt_width:
                raise DlmBridgeError(
                    f"max_length {length} ({level.where}) leaves no room after a prompt of {prompt_width} tokens: "
                    "use gen_length, which counts new tokens only"
                )
            return length - prompt_width
    return 0  # of infilling; every sampler has a default


def _temperature(levels: list[_Level]) -> float:
    """The first source that speaks of sampling decides: by a temperature, by `do_sample`, or by both."""
    for number, level in enumerate(levels):
        temperature, do_sample = level.values.get("temperature"), level.values.get("do_sample")
        if do_sample is False:
            if level.where == KEYWORD and temperature:
                raise DlmBridgeError(f"do_sample=False contradicts temperature {temperature}: leave one of them out")
            return 0.0
        if temperature is not None:
            return temperature
        if do_sample:
            return _find(levels[number + 1 :], "temperature", 0.0)[0] or 1.0
    return 0.0


def _refuse_unknown(values: Mapping[str, Any], where: str, kind: type[Sampler]) -> None:
    known = {*ALIASES, *OWN_FIELDS, *SHARED_FIELDS, *WITHOUT_EFFECT, *SAMPLING_ONLY, *OFF, *GENERATE_ARGUMENTS}
    known |= set(vars(GenerationConfig()))
    for name in values:
        if name in NO_INPUTS:
            raise DlmBridgeError(f"generate takes no {name}: {NO_INPUTS[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = (
                f"did you mean {near[0]}?" if near else f"the {kind.name} sampler has {', '.join(kind.parameters())}"
            )
            raise DlmBridgeError(f"generate does not know '{name}' ({where}): {hint}")


def _refuse_unsupported(levels: list[_Level], temperature: float, kind: type[Sampler]) -> None:
    """Nothing that a caller asks for is passed over; what a checkpoint inherited is, with a warning."""
    read = {*OWN_FIELDS, *SHARED_FIELDS, *WITHOUT_EFFECT, *kind.parameters()}
    foreign = {*SAMPLING_ONLY, *OFF, *GENERATE_ARGUMENTS, *vars(GenerationConfig())} - read
    for name in sorted(foreign):
        value, where = _find(levels, name, None)
        if value is None or value is False or value == OFF.get(name) or (hasattr(value, "__len__") and not len(value)):
            continue
        if name in SAMPLING_ONLY and (temperature == 0 or value == SAMPLING_ONLY[name]):
            continue
        if name in CONSTRAINTS and where in (KEYWORD, GIVEN):
            continue
        if where == STORED and (name in OFF or name in CONSTRAINTS):
            # Checkpoints inherit such settings from the autoregressive model that they were made of; the published
            # samplers never read them.
            logger.warning_once(
                f"{STORED} has {name} {value!r}, which the published {kind.name} sampler does not read: ignored"
            )
            continue
        raise DlmBridgeError(
            f"the {kind.name} sampler has no {name} ({where}: {_shown(value)}): {_remedy(name, where)}"
        )


def _refuse_other_samplers(levels: list[_Level], kind: type[Sampler]) -> None:
    """A parameter of another sampler is no parameter of this one."""
    own = kind.parameters()
    for name in PARAMETERS:
        value, where = _find(levels, name, None)
        if name not in own and value is not None and where in (KEYWORD, GIVEN, STORED):
            raise DlmBridgeError(
                f"the {kind.name} sampler has no {name} ({where}: {value!r}): {_remedy(name, where)}; "
                f"it has {', '.join(own)}"
            )


def _shown(value: Any) -> str:
    """A value as an error names it: models, processors and tensors by their class."""
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else type(value).__name__


def _remedy(name: str, where: str | None) -> str:
    return f"pass {name}=None" if where == STORED else INSTEAD.get(name, "leave it out")
