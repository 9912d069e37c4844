"""Resolution of the settings of `generate` from keywords, generation_config, the checkpoint, the family and the
sampler."""

from __future__ import annotations

import inspect
import json
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import GenerationConfig, GenerationMixin
from transformers.utils import logging

from dlm_bridge.attention.masks import AttentionPattern
from dlm_bridge.errors import CheckpointError, SettingError, counted
from dlm_bridge.generation.config import (
    ALTERNATIVES,
    IGNORED_SETTINGS,
    SAMPLING_ONLY,
    TRANSFORMERS_SETTINGS,
    check_values,
    diffusion_fields,
    eos_token_ids,
    merge_names,
    sampler_defaults,
)
from dlm_bridge.generation.constraints import CONSTRAINT_SETTINGS
from dlm_bridge.generation.options import GENERAL, CacheMode, Execution
from dlm_bridge.generation.prompts import PromptLimits
from dlm_bridge.generation.samplers import SAMPLERS, Sampler, check_blocks
from dlm_bridge.generation.stopping import check_stop_strings
from dlm_bridge.models.families import FamilySpec
from dlm_bridge.objectives.base import NoiseName
from dlm_bridge.objectives.registry import noise_process
from dlm_bridge.settings import nearest

logger = logging.get_logger(__name__)

KEYWORD, GIVEN, PRESET, STORED, MODEL, FAMILY, SAMPLER = (
    "keyword argument",
    "generation_config",
    "the preset",
    "the model's generation_config",
    "the model's config",
    "the family's default",
    "the sampler's default",
)
EXPLICIT = (KEYWORD, GIVEN)  # sources of the call itself; values of other sources are reduced to fit


@dataclass(frozen=True)
class GenerationSettings:
    """Resolved and checked settings of a call.

    Args:
        limits: limits of a prompt. With `infill`, its `gen_length` is 0 unless new tokens are requested or the sampler
            chooses the number of tokens that replace the masks.
        span_lengths: lengths to try for each span of masks; empty: the given lengths.
        shift: True if logits[i - 1] predict token i.
        eos_token_ids: tokens that end a row; empty: no stopping.
        end_token_ids: the model's end-of-sequence tokens, even if rows do not stop at them.
        cache: None: the exact KV cache, if there is one.
        execution: None: by the device.
        output_history: return the denoising steps.
        constraints: settings for `constraints.read_constraints`, without those that have no effect.
    """

    sampler: Sampler
    limits: PromptLimits
    span_lengths: tuple[int, ...]
    shift: bool
    eos_token_ids: tuple[int, ...]
    end_token_ids: tuple[int, ...]
    pad_token_id: int
    seed: int | list[int] | None
    cache: CacheMode | None
    execution: Execution | None
    return_dict: bool
    output_history: bool
    num_return_sequences: int
    stop_strings: tuple[str, ...]
    constraints: Mapping[str, Any]
    attention_pattern: AttentionPattern


@dataclass(frozen=True)
class _Source:
    """Settings of one source. Sources are searched in order."""

    where: str
    values: Mapping[str, Any]


def resolve_settings(
    model: Any,
    generation_config: GenerationConfig | None,
    keywords: Mapping[str, Any],
    prompt_width: int,
    longest: int | None = None,
) -> GenerationSettings:
    """Resolve the settings of one call of `generate`. Results are cached until a config of the model changes.

    Args:
        prompt_width: number of tokens of the padded prompts, which `max_length` includes.
        longest: number of tokens of the longest prompt; None: `prompt_width`. Defaults are reduced to the room after
            it in the model's context.

    Raises:
        SettingError: a setting is unknown or unsupported, a value is invalid, or values contradict each other.
    """
    family = _family_of(model)
    given = model, family, generation_config, keywords, prompt_width, longest
    configs = [model.config, generation_config, getattr(model, "generation_config", None)]
    try:
        values = [{name: value for name, value in vars(one).items() if name[0] != "_"} for one in configs if one]
        asked = json.dumps([prompt_width, longest, sorted(keywords.items())])
        key = asked, json.dumps(values, default=repr, skipkeys=True), tuple(SAMPLERS.kinds.values())
        known = _resolved.setdefault(model, {})
    except TypeError:  # keywords that are objects, such as a logits processor
        return _resolve(*given)
    if key not in known:
        if len(known) >= RESOLVED:
            known.clear()
        known[key] = _resolve(*given)
    return known[key]


RESOLVED = 256  # cached settings per model
_resolved: weakref.WeakKeyDictionary[nn.Module, dict[Any, GenerationSettings]] = weakref.WeakKeyDictionary()


def _resolve(
    model: Any,
    family: FamilySpec,
    generation_config: GenerationConfig | None,
    keywords: Mapping[str, Any],
    prompt_width: int,
    longest: int | None,
) -> GenerationSettings:
    kind, sources = _sampler_and_sources(model, family, generation_config, keywords)
    temperature = _temperature(sources)
    _refuse_unsupported(sources, temperature, kind)
    infill = bool(_find(sources, "infill", False)[0])
    inside = infill and kind.resizes
    context = getattr(model.config, "max_position_embeddings", None)
    room = None if context is None else max(context - (prompt_width if longest is None else longest), 1)
    gen_length = _gen_length(sources, prompt_width, infill and not inside, room)
    given = {"gen_length": gen_length, "temperature": temperature}
    parameters = _sampler_parameters(model, family, kind, sources, given, prompt_width if infill else None)

    config = model.config
    needs_mask = kind.needs_mask or infill or parameters.get("p_uniform") is not None
    mask_token_id = _mask_token_id(model, family, sources, needs_mask)
    eos = eos_token_ids(_find(sources, "eos_token_id", getattr(config, "eos_token_id", None))[0])
    named = [ids for source in sources if (ids := eos_token_ids(source.values.get("eos_token_id")))]
    pad_token_id, _ = _find(sources, "pad_token_id", getattr(config, "pad_token_id", None))
    if pad_token_id is None:
        pad_token_id = eos[0] if eos else 0  # without stopping there is no padding
    stop_strings = check_stop_strings(_find(sources, "stop_strings", ())[0])
    if family.ordinary_mask and parameters.get("p_uniform") is not None:
        raise SettingError(
            "p_uniform", f"needs a mask token that texts do not contain, which {family.title} does not have"
        )
    limits = PromptLimits(
        mask_token_id, config.vocab_size, gen_length, context, infill, inside, ordinary_mask=family.ordinary_mask
    )
    _check_tokens(limits, parameters.get("eot_token_id"), eos, pad_token_id, stop_strings)
    return_dict = bool(_find(sources, "return_dict_in_generate", False)[0])
    output_history, where = _find(sources, "output_history", False)
    if output_history and not return_dict and where == KEYWORD:
        raise SettingError("output_history", "needs `return_dict_in_generate=True`")
    return GenerationSettings(
        sampler=kind(**parameters).fitted(_explicit(sources, kind)),
        limits=limits,
        span_lengths=_span_lengths(_find(sources, "span_lengths", None)[0], infill, family, kind),
        shift=family.shift,
        eos_token_ids=eos,
        end_token_ids=named[0] if named else eos_token_ids(getattr(config, "eos_token_id", None)),
        pad_token_id=pad_token_id,
        seed=_find(sources, "seed", None)[0],
        cache=_find(sources, "cache", None)[0],
        execution=_find(sources, "execution", None)[0],
        return_dict=return_dict,
        output_history=bool(output_history),
        num_return_sequences=_find(sources, "num_return_sequences", 1)[0],
        stop_strings=stop_strings,
        constraints=_constraints(sources),
        attention_pattern=family.attention_pattern,
    )


def fitting_samplers(family: FamilySpec) -> list[str]:
    """Names of the samplers that can run on a family's models, its own first."""
    fits = [
        name
        for name, known in SAMPLERS.items()
        if family.attention_pattern in known.attention_patterns
        and family.is_any_of(known.families)
        and known.shifted in (None, family.shift)
    ]
    return sorted(fits, key=lambda name: name != family.sampler["algorithm"])


def preset_values(kind: type[Sampler], preset: str | None) -> Mapping[str, Any]:
    """The parameters that a preset sets. Raises SettingError for one that the sampler does not have."""
    if preset in (None, "published"):
        return {}
    if preset not in kind.presets:
        known = ", ".join(["published", *kind.presets])
        raise SettingError("preset", f"the {kind.name} sampler does not have {preset}: choose one of {known}")
    return kind.presets[preset]


def check_adapters(model: Any) -> None:
    """`refuse_prompt_learning` for a live model."""
    # PEFT's `generate` calls the base model's, whose `prepare_inputs_for_generation` it has replaced.
    wrapper = getattr(getattr(model, "prepare_inputs_for_generation", None), "__self__", None)
    for owner in (model, wrapper):
        refuse_prompt_learning(getattr(owner, "active_peft_config", None), type(owner).__name__)


def refuse_prompt_learning(adapter: Any, where: str) -> None:
    """Raise CheckpointError for the PEFT config of an adapter that adds tokens or keys to the input (prompt tuning,
    P-tuning, prefix tuning), which samplers and likelihoods would ignore. `where`: the adapter's name in the error."""
    if getattr(adapter, "is_prompt_learning", False):
        kind = getattr(adapter.peft_type, "value", adapter.peft_type)
        raise CheckpointError(
            where,
            f"an adapter of peft_type {kind} adds tokens or keys to the input, which sampling and evaluation do not "
            "support: use an adapter of weights, such as LoRA",
        )


_SHIFT = {False: "unshifted", True: "shifted"}


def _family_of(model: Any) -> FamilySpec:
    family = getattr(model, "family", None)
    if not isinstance(family, FamilySpec) or family.kind != "diffusion":
        raise SettingError("model", f"{type(model).__name__} is not a supported diffusion language model")
    check_adapters(model)
    return family


def _sampler_and_sources(
    model: Any, family: FamilySpec, generation_config: GenerationConfig | None, keywords: Mapping[str, Any]
) -> tuple[type[Sampler], list[_Source]]:
    """Select the sampler. Returns it with the sources of its settings: the caller, the checkpoint, the defaults."""
    sources = _callers_sources(model, generation_config, keywords)
    for source in sources:
        check_values(source.values, "" if source.where == KEYWORD else f" ({source.where})")
    defaults = sampler_defaults(model)
    kind = _sampler_class(family, noise_process(model.config), sources, defaults["algorithm"])
    _refuse_unknown(keywords, KEYWORD, kind)
    if generation_config is not None:
        _refuse_unknown(_set_fields(generation_config), GIVEN, kind)
    sources = [_Source(one.where, merge_names(one.values, kind)) for one in sources]
    callers = [one for one in sources if one.where in EXPLICIT]
    preset = _Source(PRESET, preset_values(kind, _find(sources, "preset", None)[0]))
    return kind, [*callers, preset, *sources[len(callers) :], *_default_sources(model, defaults, kind)]


def combine_settings(model: Any, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge keywords of `generate`; `given` overrides `defaults` under any of a setting's names."""
    if not getattr(getattr(model, "family", None), "sampled_here", False):
        return merge_names(defaults) | merge_names(given)
    algorithm = {"algorithm": given.get("algorithm", defaults.get("algorithm"))}
    kind, _ = _sampler_and_sources(model, _family_of(model), None, algorithm)
    return merge_names(defaults, kind) | merge_names(given, kind)


def _sampler_class(family: FamilySpec, noise: NoiseName | None, sources: list[_Source], default: str) -> type[Sampler]:
    """Return the requested sampler, or the model's own."""
    name, _ = _find(sources, "algorithm", default)
    kind = SAMPLERS[name]
    fits = fitting_samplers(family)
    if name not in fits:
        wanted, shift = " or ".join(kind.families or kind.attention_patterns), ""
        if kind.shifted is not None:
            wanted, shift = f"{wanted} {_SHIFT[kind.shifted]}", f" {_SHIFT[family.shift]}"
        raise SettingError(
            "algorithm",
            f"{name} runs on {wanted} models, {family.title} is {family.attention_pattern}{shift}: use one of "
            f"{', '.join(fits)}",
        )
    if noise is not None and noise not in kind.noise_processes:
        raise SettingError(
            "algorithm",
            f"{name} does not support {noise} noise, with which the model was trained (noise_process in its "
            f"config.json): use {default}",
        )
    return kind


def _callers_sources(
    model: Any, generation_config: GenerationConfig | None, keywords: Mapping[str, Any]
) -> list[_Source]:
    """Settings of the caller, then those saved with the checkpoint."""
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        raise SettingError(
            "generation_config", f"must be a DiffusionGenerationConfig, not {type(generation_config).__name__}"
        )
    # None is a value only for settings that it disables; see `_parameter`.
    off = {"eos_token_id", *SAMPLING_ONLY, *CONSTRAINT_SETTINGS, *SAMPLERS.parameters()}
    sources = [_Source(KEYWORD, {key: value for key, value in keywords.items() if value is not None or key in off})]
    if generation_config is not None:
        sources.append(_Source(GIVEN, _set_fields(generation_config)))
    stored = getattr(model, "generation_config", None)
    if stored is not None:
        sources.append(_Source(STORED, _set_fields(stored)))
    return [_Source(source.where, merge_names(source.values)) for source in sources]


def _default_sources(model: Any, own: Mapping[str, Any], kind: type[Sampler]) -> list[_Source]:
    """Defaults of the model, the family and the sampler. `own`: the model's sampler and its defaults."""
    of_model = kind.model_parameters(model.config)
    of_family = own if own["algorithm"] == kind.name else {}
    defaults = {name: value for name, value in kind.parameters().items() if value is not None}
    values = {MODEL: of_model, FAMILY: of_family, SAMPLER: defaults}
    return [_Source(where, merge_names(found, kind)) for where, found in values.items()]


def _parameter(sources: list[_Source], name: str, kind: type[Sampler]) -> Any:
    """Value of a parameter. None is a value if the parameter accepts it, else it means "not given"."""
    if kind.accepts_none(name):
        return _find(sources, name, None)[0]
    given = [source.values[name] for source in sources if source.values.get(name) is not None]
    return given[0] if given else None


def _sampler_parameters(
    model: Any,
    family: FamilySpec,
    kind: type[Sampler],
    sources: list[_Source],
    given: Mapping[str, Any],
    infilled_width: int | None,
) -> dict[str, Any]:
    """Parameters of the sampler, including the `given` ones. `infilled_width`: width of prompts to fill in."""
    parameters = {**{name: _parameter(sources, name, kind) for name in kind.parameters()}, **given}
    blocks, explicit = "block_length" in parameters, _explicit(sources, kind)
    where = _find(sources, "block_length", None)[1]
    shortens = kind.shortens_block and family.attention_pattern != "block_causal"  # whose blocks are the model's own
    if infilled_width is not None:
        _refuse_infill(family, kind, parameters)
        # The spec describes one block, or the whole canvas.
        whole = infilled_width + parameters["gen_length"] + 1
        parameters["gen_length"] = parameters["block_length"] if blocks else whole
    elif kind.whole_blocks and {"block_length", "gen_length"} <= explicit:
        check_blocks(parameters["gen_length"], parameters["block_length"])
    elif shortens and blocks and "block_length" not in explicit:
        parameters["block_length"] = min(parameters["block_length"], parameters["gen_length"])
    if blocks and where in (KEYWORD, GIVEN, STORED):
        _warn_of_another_block(kind.trained_block(model.config, family.attention_pattern), parameters["block_length"])
    return parameters


def _explicit(sources: list[_Source], kind: type[Sampler]) -> frozenset[str]:
    """Names of the sampler's parameters that the call sets."""
    named = {name for source in sources if source.where in EXPLICIT for name in source.values}
    if named & {"max_new_tokens", "max_length"}:
        named.add("gen_length")
    return frozenset(named & {*kind.parameters()})


def _mask_token_id(model: Any, family: FamilySpec, sources: list[_Source], needed: bool) -> int | None:
    """The mask token. Raises SettingError if it is `needed` and there is none."""
    found: int | None = _find(sources, "mask_token_id", getattr(model.config, "mask_token_id", None))[0]
    found = family.mask_token_id if found is None else found
    if found is None and needed:
        raise SettingError(
            "mask_token_id",
            "the model's config has no mask token: set it, or `algorithm=uniform` for a model trained with random "
            "tokens",
        )
    return found


def _set_fields(config: GenerationConfig) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if value is not None and not name.startswith("_")}


def _constraints(sources: list[_Source]) -> dict[str, Any]:
    """Constraints of the call. Those saved with a checkpoint are ignored, see `_refuse_unsupported`."""
    callers = [source for source in sources if source.where in EXPLICIT]
    found = {name: _find(callers, name, None)[0] for name in CONSTRAINT_SETTINGS}
    return {name: value for name, value in found.items() if not _is_off(name, value)}


def _find(sources: list[_Source], name: str, default: Any) -> tuple[Any, str | None]:
    """Value and name of the first source that has the setting."""
    for source in sources:
        if name in source.values:
            return source.values[name], source.where
    return default, None


def _check_tokens(
    limits: PromptLimits,
    eot_token_id: int | None,
    eos: tuple[int, ...],
    pad_token_id: int,
    stop_strings: tuple[str, ...],
) -> None:
    mask_token_id, vocabulary_size = limits.mask_token_id, limits.vocabulary_size
    for name, value in (("mask_token_id", mask_token_id), ("pad_token_id", pad_token_id)):
        if value is not None and type(value) is not int:  # from a config
            raise SettingError(name, f"must be a token id, not {value!r}")
    for name, token in (("mask_token_id", mask_token_id), ("eot_token_id", eot_token_id)):
        if token is not None and not 0 <= token < vocabulary_size:
            raise SettingError(name, f"{token} is outside the vocabulary of {vocabulary_size}")
    if limits.ordinary_mask:
        return
    if mask_token_id is not None and mask_token_id in eos:
        raise SettingError("eos_token_id", f"{mask_token_id} is the mask token, which is never generated")
    if (eos or stop_strings) and pad_token_id == mask_token_id:
        raise SettingError("pad_token_id", f"{pad_token_id} is the mask token: set another one")


def _warn_of_another_block(trained: int | None, block: int) -> None:
    if trained is not None and block != trained:
        logger.warning_once(
            f"block_length {block}: the model was trained with {trained} (block_size in its config.json); to correct "
            f"the config, load the model with from_pretrained(..., block_size={block})"
        )


def _refuse_infill(family: FamilySpec, kind: type[Sampler], parameters: Mapping[str, Any]) -> None:
    others = [name for name in fitting_samplers(family) if SAMPLERS[name].infills and not SAMPLERS[name].families]
    if not kind.infills:
        raise SettingError(
            "infill", f"the {kind.name} sampler cannot fill in masks: set `algorithm` to one of {', '.join(others)}"
        )
    if parameters.get("alg") == "confidence_threshold":
        raise SettingError("alg", "confidence_threshold divides `gen_length`, which `infill` does not have")


def _span_lengths(value: Any, infill: bool, family: FamilySpec, kind: type[Sampler]) -> tuple[int, ...]:
    if value is None:
        return ()
    if not infill:
        raise SettingError("span_lengths", "needs `infill`")
    if family.attention_pattern != "bidirectional":
        raise SettingError(
            "span_lengths", f"needs bidirectional attention: {family.title} is {family.attention_pattern}"
        )
    if not kind.needs_mask:
        raise SettingError("span_lengths", f"the {kind.name} sampler has no masks")
    lengths = tuple(value) if isinstance(value, (list, tuple, range)) else (value,)
    if not lengths or not all(isinstance(one, int) and one > 0 for one in lengths):
        raise SettingError("span_lengths", f"must be whole numbers above 0, not {value!r}")
    return tuple(sorted({*lengths}))


def _gen_length(sources: list[_Source], prompt_width: int, infill: bool, room: int | None) -> int:
    if infill:
        sources = [source for source in sources if source.where in EXPLICIT]
    for source in sources:
        if "max_new_tokens" in source.values:
            length: int = source.values["max_new_tokens"]
            return length if source.where in EXPLICIT or room is None else min(length, room)
        if "max_length" in source.values:
            length = source.values["max_length"]
            if length <= prompt_width:
                raise SettingError(
                    "max_length",
                    f"{length} ({source.where}) leaves no room after a prompt of {counted(prompt_width, 'token')}: "
                    "use `gen_length`, which counts new tokens only",
                )
            return length - prompt_width
    return 0  # with infill; otherwise the sampler has a default


def _temperature(sources: list[_Source]) -> float:
    """Temperature of the first source that sets `temperature` or `do_sample`."""
    for number, source in enumerate(sources):
        temperature, do_sample = source.values.get("temperature"), source.values.get("do_sample")
        if do_sample is False:
            if source.where == KEYWORD and temperature:
                raise SettingError("do_sample", f"False contradicts `temperature={temperature}`: remove one of them")
            return 0.0
        if temperature is not None:
            return temperature
        if do_sample:
            return _find(sources[number + 1 :], "temperature", 0.0)[0] or 1.0
    return 0.0


def _refuse_unknown(values: Mapping[str, Any], where: str, kind: type[Sampler]) -> None:
    """Raise SettingError for unknown names, with the nearest known one."""
    known = {"gen_length", *diffusion_fields(), *TRANSFORMERS_SETTINGS, *IGNORED_SETTINGS, *SAMPLING_ONLY}
    known |= {*vars(GenerationConfig()), *inspect.signature(GenerationMixin.generate).parameters}
    for name in values:
        if name not in known:
            has = f"the {kind.name} sampler has {', '.join(kind.parameters())}"
            hint = ALTERNATIVES.get(name) or nearest(name, known, has, mark="`")
            raise SettingError(name, f"is unknown ({where}): {hint}")


def _refuse_unsupported(sources: list[_Source], temperature: float, kind: type[Sampler]) -> None:
    """Raise SettingError for parameters of other samplers and unsupported settings of transformers. Checkpoints
    inherit the latter from autoregressive models: there, they are ignored with a warning."""
    supported = {*kind.parameters(), *GENERAL, *TRANSFORMERS_SETTINGS, *IGNORED_SETTINGS}
    names = {name for source in sources if source.where in (KEYWORD, GIVEN, STORED) for name in source.values}
    for name in sorted(names - supported):
        value, where = _find(sources, name, None)
        foreign = name in SAMPLERS.parameters()
        if value is None or (not foreign and _is_off(name, value)) or (name in SAMPLING_ONLY and temperature == 0):
            continue
        if name in CONSTRAINT_SETTINGS and where in EXPLICIT:
            continue
        if where == STORED and not foreign:
            if name in vars(GenerationConfig()):
                logger.warning_once(f"{STORED} has {name} {value!r}, which the {kind.name} sampler ignores")
            continue
        remedy = f"set {name}=None" if where == STORED else ALTERNATIVES.get(name, "remove it")
        has = f"; it has {', '.join(kind.parameters())}" if foreign else ""
        raise SettingError(name, f"the {kind.name} sampler does not have it ({where}: {_shown(value)}): {remedy}{has}")


def _is_off(name: str, value: Any) -> bool:
    """True if the value of a setting of transformers has no effect."""
    defaults = {**GenerationConfig._get_default_generation_params(), "min_new_tokens": 0, "guidance_scale": 1.0}
    return (
        value is None
        or value is False
        or value == defaults.get(name)
        or (hasattr(value, "__len__") and not len(value))
    )


def _shown(value: Any) -> str:
    """A value for an error message; models, processors and tensors are shown by their class."""
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else type(value).__name__
