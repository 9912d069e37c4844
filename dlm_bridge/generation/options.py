"""Settings of `generate`, each declared once, and the checks of their values.

A declaration makes the option of `dlm-bridge generate` (`common`), the keyword argument of `generate`, the field of
`DiffusionGenerationConfig`, the field of a request to the server, and the lines of a sampler's help. A sampler
declares the default of a shared parameter, and adds its own parameters, with `parameter`.

The command line imports this module before it imports torch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import Field, dataclass
from typing import Any, Literal, get_args

from dlm_bridge.errors import SettingError
from dlm_bridge.settings import Option, common_option, in_range, option, options_of, requirement

CacheMode = Literal["none", "prefix", "dual", "block"]
Execution = Literal["eager", "graph", "compiled"]
SAMPLING = "Sampling"  # panel of `dlm-bridge generate --help`
sampling_option = functools.partial(common_option, panel=SAMPLING)


@dataclass(frozen=True, kw_only=True)
class SharedParameters:
    """Parameters that several samplers have. None: the default of the sampler, the family or the model."""

    gen_length: int | None = sampling_option(
        None, "Maximum number of new tokens.", minimum=1, aliases=("max_new_tokens",)
    )
    steps: int | None = sampling_option(
        None,
        "Denoising steps, per block or in total, depending on the sampler (see `--algorithm X --help`).",
        minimum=1,
    )
    block_length: int | None = sampling_option(
        None, "Tokens per block; blocks are denoised from left to right.", minimum=1
    )
    temperature: float | None = sampling_option(None, "Randomness of the draws; 0: greedy decoding.", minimum=0)
    top_k: int | None = sampling_option(None, "Sample from the k most probable tokens.", minimum=0)
    top_p: float | None = sampling_option(
        None, "Sample from the most probable tokens, up to a total probability of p.", above=0, maximum=1
    )
    threshold: float | None = sampling_option(None, "Confidence that commits a token.", minimum=0)
    cfg_scale: float | None = sampling_option(None, "Scale w of classifier-free guidance; 0: off.", minimum=0)


@dataclass(frozen=True, kw_only=True)
class GeneralSettings:
    """Settings of every sampler that are not its parameters, without those of transformers' GenerationConfig."""

    algorithm: str | None = sampling_option(None, "Sampler. Default: the family's.")
    preset: str | None = sampling_option(
        None,
        "Values of the sampler for what is not set otherwise: published (the model's and the family's; default), fast "
        "(more tokens per forward pass) or careful (fewer).",
        choices=("published", "fast", "careful"),
    )
    cache: str | None = sampling_option(None, "KV cache: none, block, prefix or dual.", choices=get_args(CacheMode))
    execution: str | None = sampling_option(
        None, "eager, graph (CUDA graphs; default on a GPU) or compiled.", choices=get_args(Execution)
    )
    seed: int | list[int] | None = sampling_option(None, "Seed of the random numbers.")  # noqa: RUF009
    mask_token_id: int | None = option(None, "Token that the model reads at masks.", minimum=0)
    output_history: bool | None = option(None, "Return every denoising step.")
    infill: bool | None = option(None, "Fill in the masks of the prompt.")
    span_lengths: Any = option(None, "With `infill`: lengths to try for each span of masks.")


SHARED = options_of(SharedParameters)
GENERAL = options_of(GeneralSettings)
# Options of `dlm-bridge generate`; `--set` takes every other setting.
COMMAND_LINE = {name: each for name, each in {**SHARED, **GENERAL}.items() if each.common}


def parameter(default: Any, help: str = "", **constraints: Any) -> Any:
    """Declare a parameter of a sampler.

    A shared parameter (`SharedParameters`) inherits help and constraints that are not given here.

    Args:
        default: the default; None is a valid value where the field's type allows it.
        help: one or two sentences for the sampler's help.
        **constraints: `minimum`, `maximum`, `above`, `below` or `choices`, see `dlm_bridge.settings.Option`.
    """
    given = {"help": help, **constraints} if help else constraints
    return dataclasses.field(default=default, metadata={"parameter": given})


def parameter_of(declared: Field[Any]) -> Option:
    """The declaration of a sampler's field, with what it inherits."""
    shared = SHARED.get(declared.name, Option(""))
    given: Mapping[str, Any] = declared.metadata.get("parameter", {})
    return dataclasses.replace(shared, **given, name=declared.name, type=declared.type, default=declared.default)


def accepts(declared: Option, value: Any) -> bool:
    """True if a value other than None is valid for the declared type, choices and range."""
    kind = str(declared.type)
    if declared.choices or "str" in kind:
        return isinstance(value, str) and (not declared.choices or value in declared.choices)
    if "tuple[int" in kind:
        return is_token_ids(value)
    if "list[int" in kind and isinstance(value, list):
        return all(_is_integer(each) for each in value)
    if "bool" in kind or isinstance(value, bool):
        return "bool" in kind and isinstance(value, bool)
    if "float" not in kind and "int" not in kind:
        return True
    is_number = _is_integer(value) or ("float" in kind and isinstance(value, float))
    return is_number and in_range(declared, value)


def check_value(name: str, declared: Option | None, value: Any, where: str = "") -> None:
    """Raise SettingError, whose reason ends with `where`, for a value that is not valid; None passes."""
    if value is not None and declared is not None and not accepts(declared, value):
        raise SettingError(name, f"must be {requirement(declared)}, not {value!r}{where}")


def is_token_ids(value: Any) -> bool:
    """True if the value is a list of token ids."""
    return isinstance(value, list | tuple) and all(_is_integer(token) and token >= 0 for token in value)


def describe(options: Mapping[str, Option]) -> str:
    """The "Args" section of a docstring for these declarations."""
    lines = [f"        {each.name}: {each.help} Default: {each.default!r}." for each in options.values()]
    return "\n".join(["    Args:", *lines])


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value.bit_length() <= 63  # as a tensor's element
