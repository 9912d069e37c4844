"""`DiffusionGenerationConfig`: what a sampler can be told, saved with the checkpoint as generation_config.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

import numpy as np
import torch
from transformers import GenerationConfig

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.algorithms import ALGORITHMS
from dlm_bridge.generation.execution.runner import EXECUTIONS
from dlm_bridge.generation.predict import Cache

# Names that some published samplers have for what transformers calls otherwise.
ALIASES = {"gen_length": "max_new_tokens", "logits_temp": "temperature", "topp_temp": "top_p"}
SHARED = ("gen_length", "temperature", "top_k", "top_p")  # what every sampler has
# Both lists grow with `register_algorithm`.
PARAMETERS = list(
    dict.fromkeys(name for algorithm in ALGORITHMS.values() for name in algorithm.parameters() if name not in SHARED)
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
    "cache": get_args(Cache),
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
        span_lengths: with `infill`, lengths to try for each span of masks; see `dlm_bridge.generation.lengths`.
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
        # A config that is older than a `register_algorithm` has none of that sampler's names.
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
    for name, known in {"algorithm": tuple(ALGORITHMS), **_CHOICES}.items():
        if name in given and given[name] not in known:
            own = "; register_algorithm makes another known, before the model is loaded" if name == "algorithm" else ""
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
