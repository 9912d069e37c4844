"""Where each sampler setting comes from: keyword, generation_config, the model's own, the family's defaults."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig
from transformers.utils import logging

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.algorithms import ALGORITHMS, Algorithm
from dlm_bridge.generation.config import ALIASES, OWN_FIELDS, PARAMETERS, check_values, eos_token_ids, merge_names
from dlm_bridge.generation.constraints import FIELDS as CONSTRAINTS
from dlm_bridge.generation.ending import check_stop_strings
from dlm_bridge.generation.execution.runner import Execution
from dlm_bridge.generation.predict import Cache
from dlm_bridge.models.spec import FamilySpec

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

    algorithm: Algorithm
    gen_length: int  # new tokens behind the prompt; none, unless they are asked for, where masks inside it are filled
    infill: bool
    span_lengths: tuple[int, ...]  # lengths to try for each span of masks; none: they are as long as they are
    shift: bool  # the model's logits[i - 1] are about token i
    eos_token_ids: tuple[int, ...]  # empty: no stopping
    end_token_ids: tuple[int, ...]  # the model's end-of-sequence tokens, whether a row stops at them or not
    pad_token_id: int
    mask_token_id: int | None  # None: the sampler works without one
    seed: int | None
    cache: Cache | None  # None: the exact one, where there is one
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


def resolve(
    model: Any, generation_config: GenerationConfig | None, keywords: Mapping[str, Any], prompt_width: int
) -> SamplerSettings:
    """The settings of one call of `generate`; `prompt_width` is what `max_length` counts from.

    Raises:
        DlmBridgeError: an unknown or unsupported setting, a wrong value, or values that do not fit together.
    """
    spec = _family(model)
    levels = _levels(model, generation_config, keywords)
    for level in levels:
        check_values(level.values, "" if level.where == KEYWORD else f" ({level.where})")
    kind = _algorithm(spec, levels)
    _refuse_unknown(keywords, KEYWORD, kind)
    if generation_config is not None:
        _refuse_unknown(_set_fields(generation_config), GIVEN, kind)
    levels += _defaults(model, spec, kind)
    temperature = _temperature(levels)
    _refuse_unsupported(levels, temperature, kind)
    _refuse_foreign(levels, kind)
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


def _family(model: Any) -> FamilySpec:
    spec = getattr(model, "family", None)
    if not isinstance(spec, FamilySpec) or spec.kind != "diffusion":
        raise DlmBridgeError(f"{type(model).__name__} is not a diffusion language model that dlm-bridge knows")
    return spec


def _algorithm(spec: FamilySpec, levels: list[_Level]) -> type[Algorithm]:
    """The sampler that is asked for, or the family's own."""
    name, _ = _find(levels, "algorithm", spec.sampler["algorithm"])
    kind = ALGORITHMS[name]
    fits = [
        other
        for other, known in ALGORITHMS.items()
        if spec.topology in known.topologies and (not known.families or spec.name in known.families)
    ]
    if name not in fits:
        wanted = " or ".join(kind.families or kind.topologies)
        raise DlmBridgeError(
            f"the {name} sampler runs on {wanted} models, {spec.title} is {spec.topology}: "
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


def _defaults(model: Any, spec: FamilySpec, kind: type[Algorithm]) -> list[_Level]:
    """What holds where nobody says anything. The family's defaults are those of its own sampler."""
    block = getattr(model.config, "block_size", None) if kind.model_blocks else None
    family = spec.sampler if spec.sampler["algorithm"] == kind.name else {}
    defaults = {name: value for name, value in kind.parameters().items() if value is not None}
    return [
        _Level(MODEL, {"block_length": block, "block_size": block} if block else {}),
        _Level(FAMILY, merge_names(family)),
        _Level(ALGORITHM, merge_names(defaults)),
    ]


def _parameter(levels: list[_Level], name: str, kind: type[Algorithm]) -> Any:
    """A parameter's value. None turns off what can be off, and means "not given" elsewhere."""
    if kind.can_be_off(name):
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


def _refuse_infill(spec: FamilySpec, kind: type[Algorithm], parameters: Mapping[str, Any]) -> None:
    others = [
        name
        for name, other in ALGORITHMS.items()
        if other.infills and spec.topology in other.topologies and not other.families
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


def _span_lengths(value: Any, infill: bool, spec: FamilySpec, kind: type[Algorithm]) -> tuple[int, ...]:
    if value is None:
        return ()
    if not infill:
        raise DlmBridgeError("span_lengths are those of masks inside a prompt: pass infill=True as well")
    if spec.topology != "bidirectional":
        raise DlmBridgeError(
            f"{spec.title} is {spec.topology}: it cannot judge a span's length by what follows; leave span_lengths out"
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


def _refuse_unknown(values: Mapping[str, Any], where: str, kind: type[Algorithm]) -> None:
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


def _refuse_unsupported(levels: list[_Level], temperature: float, kind: type[Algorithm]) -> None:
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


def _refuse_foreign(levels: list[_Level], kind: type[Algorithm]) -> None:
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
