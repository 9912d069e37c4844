"""Samplers: the base class, the parts of a sampler, and the table of samplers.

A family's own sampler is a file of this folder and a row in `_BUILT_IN`. Others are registered by an extension, such
as `dlm_bridge.extra_samplers` (`dlm_bridge.registration`), by an installed package with an entry point of the group
`dlm_bridge.samplers` that names a `Sampler` class, or by a script with `register_sampler`.
"""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args

from transformers import GenerationConfig
from transformers.utils import logging

from dlm_bridge.attention.masks import AttentionPattern
from dlm_bridge.errors import DlmBridgeError, SettingError
from dlm_bridge.generation.canvas import BlockLayout
from dlm_bridge.generation.commit_rules import DenoisingRule, LogitsBias
from dlm_bridge.generation.options import GENERAL, accepts, check_value, describe, parameter, parameter_of
from dlm_bridge.generation.predictors import BlockCausalPredictor, Predictor
from dlm_bridge.generation.token_sampling import TokenSampling
from dlm_bridge.objectives.base import NoiseName
from dlm_bridge.registration import EXTENSIONS, load, load_entry_points, registered
from dlm_bridge.settings import Option

logger = logging.get_logger(__name__)

_BUILT_IN = {
    "llada": "llada:LLaDASampler",
    "difflm": "difflm:DiffLMSampler",
    "illada": "illada:ILLaDASampler",
    "mdlm": "mdlm:MDLMSampler",
    "dream": "dream:DreamSampler",
    "dreamon": "dreamon:DreamOnSampler",
    "diffullama": "diffullama:DiffuLLaMASampler",
    "rnd1": "rnd1:RND1Sampler",
    "sdar": "sdar:SDARSampler",
    "llada2": "llada2:LLaDA2Sampler",
    "llada2.2": "llada22:LLaDA22Sampler",
    "fast_dllm_v2": "fast_dllm_v2:FastDLLMv2Sampler",
    "nemotron": "nemotron:NemotronSampler",
    "idlm": "idlm:IDLMSampler",
    "wedlm": "wedlm:WeDLMSampler",
    "uniform": "uniform:UniformSampler",
}


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids of a call, and the model's attention pattern."""

    pad_token_id: int
    eos_token_ids: tuple[int, ...]  # empty: no stopping
    end_token_ids: tuple[int, ...] = ()  # the model's end-of-sequence tokens, even if rows do not stop at them
    attention_pattern: AttentionPattern = "bidirectional"

    @classmethod
    def of(cls, settings: Any) -> SpecialTokens:
        """Special tokens of a call's `GenerationSettings`."""
        return cls(settings.pad_token_id, settings.eos_token_ids, settings.end_token_ids, settings.attention_pattern)


@dataclass(frozen=True)
class SamplerSpec:
    """Parts of a sampler. A rule has state, so a spec serves one call of `generate`.

    Args:
        layout: division of the new tokens into blocks.
        rule: denoises a block.
        sampling: proposes tokens.
        predictor: class for the attention pattern; `predictor_options` are further arguments of its constructor.
        first_token, window, logits_bias: see `SamplerContext`.
        suppress: tokens that are never proposed.
    """

    layout: BlockLayout
    rule: DenoisingRule
    sampling: TokenSampling
    predictor: type[Predictor] = Predictor
    predictor_options: dict[str, Any] = field(default_factory=dict)
    first_token: Literal["greedy", "sampled"] | None = None
    window: int | None = None
    logits_bias: LogitsBias | None = None
    suppress: tuple[int, ...] = ()


Presets = Mapping[str, Mapping[str, Any]]  # parameters by the value of the setting `preset`


@dataclass(frozen=True, kw_only=True)
class Sampler(ABC):
    """Base class of samplers: a frozen dataclass of the sampler's parameters, with the published defaults.

    Each field is declared by `parameter`; `options()` lists the declarations. top_k and top_p are additions of this
    package where the published sampler draws from all tokens.

    Attributes:
        name: value of the setting `algorithm`.
        attention_patterns: attention patterns of the models that it runs on.
        families: the only families whose training allows it; empty: any.
        shifted: the only value of the family's logit shift that it runs with; None: any.
        aliases: other names of its parameters, such as the published code's. A concept has one name in all samplers:
            `threshold` (the confidence that commits a token), `block_length`, `steps` and `temperature`.
        published_names: its aliases that the published code reads from generation_config.json. Saved files use them.
        model_blocks: the default block length is the one in the model's config.
        shortens_block: the default block length is at most `gen_length`, unless the model is block-causal.
        whole_blocks: an explicit block length must divide an explicit `gen_length`. If one of them is a default, the
            last block is shorter.
        needs_mask: False if it works without a mask token.
        infills: True if it can fill in masks inside a prompt.
        resizes: True if it chooses the number of new tokens, at most `gen_length`. With `infill`, these replace the
            masks of the prompt.
        takes_commit_rule: True if `commit_rule` can replace its own rule.
        noise_processes: kinds of training noise that it supports, for models whose config records it.
        presets: its parameters under the values of the setting `preset`, without "published".
    """

    name: ClassVar[str]
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]]
    families: ClassVar[tuple[str, ...]] = ()
    shifted: ClassVar[bool | None] = None
    aliases: ClassVar[Mapping[str, str]] = {"block_size": "block_length"}
    published_names: ClassVar[tuple[str, ...]] = ()
    model_blocks: ClassVar[bool] = False
    shortens_block: ClassVar[bool] = False
    whole_blocks: ClassVar[bool] = False
    needs_mask: ClassVar[bool] = True
    infills: ClassVar[bool] = True
    resizes: ClassVar[bool] = False
    takes_commit_rule: ClassVar[bool] = True
    noise_processes: ClassVar[tuple[NoiseName, ...]] = ("mask",)
    presets: ClassVar[Presets] = {}

    gen_length: int = parameter(128)
    temperature: float = parameter(0.0)
    top_k: int | None = parameter(None)
    top_p: float | None = parameter(None)

    def __post_init__(self) -> None:
        for name, declared in self.options().items():
            check_value(name, declared, getattr(self, name))

    @classmethod
    @functools.cache
    def options(cls) -> Mapping[str, Option]:
        """The declaration of each parameter."""
        return {one.name: parameter_of(one) for one in fields(cls)}

    @classmethod
    @functools.cache
    def parameters(cls) -> dict[str, Any]:
        """The default of each parameter."""
        return {name: declared.default for name, declared in cls.options().items()}

    @classmethod
    @functools.cache
    def accepts_none(cls, name: str) -> bool:
        """True if None is a valid value of the parameter."""
        return name in cls.options() and "None" in str(cls.options()[name].type)

    @classmethod
    @functools.cache
    def names(cls) -> dict[str, str]:
        """The parameter that each alias stands for, without aliases of parameters that the sampler does not have."""
        own = cls.parameters()
        return {alias: name for alias, name in cls.aliases.items() if name in own and alias not in own}

    @classmethod
    def model_parameters(cls, config: Any) -> dict[str, Any]:
        """Parameters whose default is in the model's config."""
        block = getattr(config, "block_size", None)
        return {"block_length": block} if cls.model_blocks and block else {}

    @classmethod
    def trained_block(cls, config: Any, attention_pattern: AttentionPattern) -> int | None:
        """The block length that the model was trained with, by its config; None if any length fits."""
        return getattr(config, "block_size", None) if attention_pattern == "block_causal" else None

    def fitted(self, explicit: Container[str]) -> Self:
        """Return the sampler with its other parameters adapted to the `explicit` ones."""
        return self

    def sampling(self) -> TokenSampling:
        """Temperature and filters. Greedy decoding has no filters, so that a confidence is the plain probability."""
        return TokenSampling(self.temperature, self.top_k, self.top_p) if self.temperature else TokenSampling()

    @abstractmethod
    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        """Return the parts of one call. Raises SettingError for parameters that contradict each other."""


def block_parts(block_length: int, tokens: SpecialTokens) -> dict[str, Any]:
    """Layout and predictor of blocks that fit the model's attention pattern, as keywords of `SamplerSpec`. Blocks are
    counted from the end of the prompt; for a block-causal model, from the row's first token."""
    if tokens.attention_pattern != "block_causal":
        return {"layout": BlockLayout(block_length)}
    return {
        "layout": BlockLayout(block_length, aligned=True),
        "predictor": BlockCausalPredictor,
        "predictor_options": {"block_length": block_length},
    }


def check_blocks(gen_length: int, block_length: int) -> None:
    """Raise SettingError, which suggests values, if `block_length` does not divide `gen_length`."""
    if gen_length % block_length:
        below = gen_length // block_length * block_length
        lengths = f"{below} or {below + block_length}" if below else f"{block_length}"
        divisor = largest_divisor(gen_length, block_length)
        raise SettingError(
            "gen_length",
            f"{gen_length} is not a multiple of `block_length={block_length}`: use {lengths}, or "
            f"`block_length={divisor}`",
        )


def largest_divisor(number: int, limit: int) -> int:
    """Largest divisor of `number` that is at most `limit`."""
    return next(divisor for divisor in range(min(number, limit), 0, -1) if number % divisor == 0)


Kind = TypeVar("Kind", bound=type[Sampler])


def register_sampler(kind: Kind) -> Kind:
    """Register a sampler under its name for `generate` and `DiffusionGenerationConfig`; usable as a decorator.

    A rule alone needs no registration: `generate(..., commit_rule=rule)` replaces the sampler's own.

        @register_sampler
        @dataclass(frozen=True, kw_only=True)
        class LeftToRight(Sampler):
            name: ClassVar[str] = "left_to_right"
            attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
            per_step: int = parameter(2, "Tokens that a step commits.", minimum=1)

            def spec(self, tokens: SpecialTokens) -> SamplerSpec:
                schedule = [self.per_step] * self.gen_length
                return SamplerSpec(BlockLayout(self.gen_length), SequentialRule(schedule), self.sampling())

        model.generate(ids, algorithm="left_to_right", per_step=4)

    Raises:
        SettingError: the class is not a dataclass derived from `Sampler`, or its name or a parameter's name is taken.
    """
    SAMPLERS.add(kind)
    return kind


class SamplerTable(Mapping[str, type[Sampler]]):
    """Samplers by name: built-in ones, those of extensions and entry points, and registered ones. The modules are
    imported at the first access."""

    def __init__(self) -> None:
        self._kinds: dict[str, type[Sampler]] = {}
        self._loaded = False
        self._parameters: dict[str, list[Option]] | None = None

    def __getitem__(self, name: str) -> type[Sampler]:
        return self.kinds[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)

    def add(self, kind: type[Sampler]) -> None:
        """Add a sampler after checking it; see `register_sampler`."""
        if not (isinstance(kind, type) and issubclass(kind, Sampler) and is_dataclass(kind)):
            raise SettingError("algorithm", f"{kind!r} must be a frozen, kw_only dataclass derived from Sampler")
        name = getattr(kind, "name", None)
        if not isinstance(name, str) or not name:
            raise SettingError("algorithm", f"{kind.__name__} has no name: add `name: ClassVar[str]`")
        known = self.kinds
        if name in known and known[name].__qualname__ != kind.__qualname__:
            raise SettingError("algorithm", f"{kind.__name__}: the name '{name}' is taken by {known[name].__name__}")
        patterns = getattr(kind, "attention_patterns", ())
        if not patterns or not {*patterns} <= {*get_args(AttentionPattern)}:
            choices = ", ".join(get_args(AttentionPattern))
            raise SettingError("algorithm", f"{kind.__name__}: attention_patterns must be some of {choices}")
        taken = {*GENERAL, *vars(GenerationConfig())} - {*self.parameters()}
        for parameter_name in (*kind.parameters(), *kind.names()):
            if parameter_name in taken:
                raise SettingError(parameter_name, f"a parameter of {kind.__name__} has the name of another setting")
        known[name] = _documented(kind)
        self._parameters = None

    def remove(self, name: str) -> None:
        """Remove a sampler."""
        del self.kinds[name]
        self._parameters = None

    def parameters(self) -> dict[str, list[Option]]:
        """Declarations of each parameter in all samplers, by its name and its aliases."""
        if self._parameters is None:
            found: dict[str, list[Option]] = {}
            for kind in self.kinds.values():
                own = kind.options()
                for name, declared in {**own, **{alias: own[name] for alias, name in kind.names().items()}}.items():
                    found.setdefault(name, []).append(declared)
            self._parameters = found
        return self._parameters

    def check(self, name: str, value: Any, where: str) -> None:
        """Raise SettingError for a value that no sampler with this parameter accepts."""
        declared = self.parameters()[name]
        if not any(accepts(each, value) for each in declared):
            check_value(name, declared[0], value, where)

    @property
    def kinds(self) -> dict[str, type[Sampler]]:
        """Sampler classes by name."""
        if not self._loaded:
            self._loaded = True
            for name, place in _BUILT_IN.items():
                module, _, attribute = place.partition(":")
                self._kinds[name] = _documented(getattr(importlib.import_module(f"{__name__}.{module}"), attribute))
            for name, extension in registered("samplers").items():
                try:
                    self.add(load("samplers", name))
                except DlmBridgeError as error:
                    if extension.name in EXTENSIONS:
                        raise
                    logger.warning(f"sampler {name} of {extension.name} is not available: {error}")
            for entry, kind in load_entry_points("dlm_bridge.samplers").items():
                try:
                    self.add(kind)
                except DlmBridgeError as error:
                    logger.warning(f"sampler of the entry point {entry} is not available: {error}")
        return self._kinds


def _documented(kind: type[Sampler]) -> type[Sampler]:
    """Append the declarations of a sampler's parameters to its docstring."""
    text = vars(kind).get("__doc__") or ""
    if "Args:" not in text:
        kind.__doc__ = f"{text.rstrip()}\n\n{describe(kind.options())}"
    return kind


SAMPLERS = SamplerTable()
