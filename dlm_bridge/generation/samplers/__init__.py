"""Samplers: the table of the published ones, the base class, and the declaration of their parameters.

Adding a family's own takes its file and its row in `_BUILT_IN`. Extensions register others, as
`dlm_bridge.extra_samplers` does (`dlm_bridge.registration`), and an installed package a single one through an entry
point of the group `dlm_bridge.samplers` that names a `Sampler` class; a script, by `register_sampler`.
"""

from __future__ import annotations

import functools
import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args

from transformers import GenerationConfig
from transformers.utils import logging

from dlm_bridge.attention.masks import AttentionPattern
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.canvas import BlockLayout
from dlm_bridge.generation.commit_rules import DenoisingRule, LogitsBias
from dlm_bridge.generation.kv_cache import CacheMode
from dlm_bridge.generation.predictors import BlockCausalPredictor, Predictor
from dlm_bridge.generation.runtime.runner import EXECUTIONS
from dlm_bridge.generation.token_sampling import TokenSampling
from dlm_bridge.objectives.base import NoiseName
from dlm_bridge.registration import EXTENSIONS, load, load_entry_points, registered

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
class Check:
    """Validity of a setting's value, from its type and bounds.

    Args:
        type: annotation of the field, as text.
        minimum, maximum: bounds that are valid values.
        above, below: bounds that are not.
        choices: the valid strings.
    """

    type: str
    minimum: float = -math.inf
    above: float = -math.inf
    below: float = math.inf
    maximum: float = math.inf
    choices: tuple[str, ...] = ()

    def accepts(self, value: Any) -> bool:
        """Whether a value other than None is valid."""
        if self.choices or "str" in self.type:
            return isinstance(value, str) and (not self.choices or value in self.choices)
        if "tuple[int" in self.type:
            return is_token_ids(value)
        if "list[int" in self.type and isinstance(value, list):
            return all(Check("int").accepts(one) for one in value)
        if "bool" in self.type or isinstance(value, bool):
            return "bool" in self.type and isinstance(value, bool)
        if "float" not in self.type and "int" not in self.type:
            return True
        if not isinstance(value, (int, float) if "float" in self.type else int):
            return False
        if isinstance(value, int) and value.bit_length() > 63:  # which no tensor holds
            return False
        return self.minimum <= value <= self.maximum and self.above < value < self.below

    @property
    def requirement(self) -> str:
        """Completes the sentence "NAME must be ..."."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        for part, words in {
            "str": "a name",
            "tuple[int": "a list of token ids",
            "list[int": "a whole number or a list of them",
            "bool": "True or False",
        }.items():
            if part in self.type:
                return words
        lower = {"{:g} or above": self.minimum, "above {:g}": self.above}
        upper = {"at most {:g}": self.maximum, "below {:g}": self.below}
        limits = [text.format(bound) for text, bound in (lower | upper).items() if math.isfinite(bound)]
        return ", ".join(["a number" if "float" in self.type else "a whole number", *limits])


def parameter(default: Any, **bounds: Any) -> Any:
    """A field of a `Sampler`, validated by its type and by `bounds`, which are arguments of `Check`.

    None is valid where the type allows it.
    """
    return field(default=default, metadata=bounds)


def check_of(declared: Field[Any]) -> Check:
    """The check of a sampler's field."""
    return Check(str(declared.type), **declared.metadata)


def is_token_ids(value: Any) -> bool:
    """Whether the value is a list of token ids."""
    return isinstance(value, (list, tuple)) and all(Check("int", minimum=0).accepts(token) for token in value)


# Settings of every sampler that are neither its parameters nor in transformers' GenerationConfig.
GENERAL_SETTINGS = {
    "cache": Check("str", choices=get_args(CacheMode)),
    "execution": Check("str", choices=EXECUTIONS),
    "mask_token_id": Check("int", minimum=0),
    "seed": Check("int | list[int]"),
    "output_history": Check("bool"),
    "infill": Check("bool"),
    "span_lengths": None,
}


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids that a sampler may need, and the model's attention pattern."""

    pad_token_id: int
    eos_token_ids: tuple[int, ...]  # empty: no stopping
    end_token_ids: tuple[int, ...] = ()  # the model's end-of-sequence tokens, even if rows do not stop at them
    attention_pattern: AttentionPattern = "bidirectional"

    @classmethod
    def of(cls, settings: Any) -> SpecialTokens:
        """Those of a call's `GenerationSettings`."""
        return cls(settings.pad_token_id, settings.eos_token_ids, settings.end_token_ids, settings.attention_pattern)


@dataclass(frozen=True)
class SamplerSpec:
    """The parts that a sampler consists of. A rule holds state: a spec serves one call of `generate`.

    Args:
        layout: how new tokens are divided into blocks.
        rule: how a block is denoised.
        sampling: how tokens are proposed.
        predictor: the attention pattern, with `predictor_options` as further arguments of its constructor.
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


@dataclass(frozen=True, kw_only=True)
class Sampler(ABC):
    """Base class of samplers: a frozen dataclass of the sampler's parameters, with the published defaults.

    Args:
        gen_length: new tokens.
        temperature: 0 is greedy.
        top_k, top_p: only the k most probable tokens, or the most probable up to a total of p, are drawn. Where the
            published sampler draws from all, these are additions of ours.

    Attributes:
        name: value of the setting `algorithm`.
        attention_patterns: the models that it can run on.
        families: where not empty, the only families whose training allows it.
        shifted: where not None, the only value of the family's logit shift that it runs with.
        aliases: further names of its parameters, such as those of the published code. One idea has one name in all
            samplers: `threshold` (the confidence that commits a token), `block_length`, `steps` and `temperature`.
        model_blocks: the default block length is the one in the model's config.
        shortens_block: the default block length is at most `gen_length`, unless the model is block-causal.
        whole_blocks: a block length of the call's must divide its `gen_length`; where one of them is a default, the
            last block is shorter.
        needs_mask: False if it works without a mask token.
        infills: can fill masks inside a prompt.
        resizes: it chooses a row's length, at most `gen_length` new tokens; of a prompt to fill, these take the place
            of its masks.
        takes_commit_rule: a `commit_rule` of the caller's can replace its own.
        noise_processes: the noise that a model can be trained with, where its config records that.
    """

    name: ClassVar[str]
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]]
    families: ClassVar[tuple[str, ...]] = ()
    shifted: ClassVar[bool | None] = None
    aliases: ClassVar[Mapping[str, str]] = {"block_size": "block_length"}
    model_blocks: ClassVar[bool] = False
    shortens_block: ClassVar[bool] = False
    whole_blocks: ClassVar[bool] = False
    needs_mask: ClassVar[bool] = True
    infills: ClassVar[bool] = True
    resizes: ClassVar[bool] = False
    takes_commit_rule: ClassVar[bool] = True
    noise_processes: ClassVar[tuple[NoiseName, ...]] = ("mask",)

    gen_length: int = parameter(128, minimum=1)
    temperature: float = parameter(0.0, minimum=0)
    top_k: int | None = parameter(None, minimum=0)
    top_p: float | None = parameter(None, above=0, maximum=1)

    def __post_init__(self) -> None:
        for one in fields(self):
            check_value(one.name, check_of(one), getattr(self, one.name))

    @classmethod
    @functools.cache
    def parameters(cls) -> dict[str, Any]:
        """Each parameter's default."""
        return {one.name: one.default for one in fields(cls)}

    @classmethod
    @functools.cache
    def accepts_none(cls, name: str) -> bool:
        """Whether None is a value of the parameter."""
        return any(one.name == name and "None" in str(one.type) for one in fields(cls))

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
        """The block length that the model was trained with, by its config; None where its blocks may have any."""
        return getattr(config, "block_size", None) if attention_pattern == "block_causal" else None

    def fitted(self, explicit: Container[str]) -> Self:
        """The sampler with parameters that are not `explicit` changed to fit those that are."""
        return self

    def sampling(self) -> TokenSampling:
        """How tokens are drawn. Greedy, nothing is filtered, so that a confidence is the plain probability."""
        return TokenSampling(self.temperature, self.top_k, self.top_p) if self.temperature else TokenSampling()

    @abstractmethod
    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        """The parts of one call. Raises DlmBridgeError for parameters that do not fit together."""


def block_parts(block_length: int, tokens: SpecialTokens) -> dict[str, Any]:
    """Layout and predictor, as keywords of `SamplerSpec`, of blocks that fit the model's attention pattern: counted
    from where the prompt ends or, of a block-causal model, from the text's first token."""
    if tokens.attention_pattern != "block_causal":
        return {"layout": BlockLayout(block_length)}
    return {
        "layout": BlockLayout(block_length, aligned=True),
        "predictor": BlockCausalPredictor,
        "predictor_options": {"block_length": block_length},
    }


def check_value(name: str, check: Check | None, value: Any, where: str = "") -> None:
    """Raise DlmBridgeError, which ends with `where`, unless the check accepts the value; None passes."""
    if value is not None and check is not None and not check.accepts(value):
        shown = "gen_length (max_new_tokens)" if name == "gen_length" else name
        raise DlmBridgeError(f"{shown} must be {check.requirement}, not {value!r}{where}")


def check_blocks(gen_length: int, block_length: int) -> None:
    """Raise DlmBridgeError, with numbers that work, unless blocks divide the length."""
    if gen_length % block_length:
        below = gen_length // block_length * block_length
        lengths = f"{below} or {below + block_length}" if below else f"{block_length}"
        divisor = largest_divisor(gen_length, block_length)
        raise DlmBridgeError(
            f"gen_length {gen_length} is not a multiple of block_length {block_length}: "
            f"use gen_length {lengths}, or block_length {divisor}"
        )


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    return next(divisor for divisor in range(min(number, limit), 0, -1) if number % divisor == 0)


Kind = TypeVar("Kind", bound=type[Sampler])


def register_sampler(kind: Kind) -> Kind:
    """Make a sampler known to `generate` and to `DiffusionGenerationConfig` by its name; usable as a decorator.

    A rule alone needs no name: `generate(..., commit_rule=rule)` replaces the sampler's own.

        @register_sampler
        @dataclass(frozen=True, kw_only=True)
        class LeftToRight(Sampler):
            name: ClassVar[str] = "left_to_right"
            attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
            per_step: int = parameter(2, minimum=1)

            def spec(self, tokens: SpecialTokens) -> SamplerSpec:
                schedule = [self.per_step] * self.gen_length
                return SamplerSpec(BlockLayout(self.gen_length), SequentialRule(schedule), self.sampling())

        model.generate(ids, algorithm="left_to_right", per_step=4)

    Raises:
        DlmBridgeError: not a dataclass below `Sampler`, the name of another sampler, or a parameter with the name of
            another setting.
    """
    SAMPLERS.add(kind)
    return kind


class SamplerTable(Mapping[str, type[Sampler]]):
    """The known samplers by name: those of families, of extensions, of entry points, and the registered ones.

    They are imported at the first look.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, type[Sampler]] = {}
        self._loaded = False
        self._parameters: dict[str, list[Check]] | None = None

    def __getitem__(self, name: str) -> type[Sampler]:
        return self.kinds[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)

    def add(self, kind: type[Sampler]) -> None:
        """Add a sampler after checking it; see `register_sampler`."""
        if not (isinstance(kind, type) and issubclass(kind, Sampler) and is_dataclass(kind)):
            raise DlmBridgeError(f"{kind!r} is not a sampler: it must be a frozen, kw_only dataclass below Sampler")
        name = getattr(kind, "name", None)
        if not isinstance(name, str) or not name:
            raise DlmBridgeError(f"{kind.__name__} has no name: give it `name: ClassVar[str]`")
        known = self.kinds
        if name in known and known[name].__qualname__ != kind.__qualname__:
            raise DlmBridgeError(f"{kind.__name__}: the name '{name}' is that of {known[name].__name__}")
        patterns = getattr(kind, "attention_patterns", ())
        if not patterns or not {*patterns} <= {*get_args(AttentionPattern)}:
            raise DlmBridgeError(
                f"{kind.__name__}: attention_patterns must be some of {', '.join(get_args(AttentionPattern))}"
            )
        taken = {"algorithm", *GENERAL_SETTINGS, *vars(GenerationConfig())} - {*self.parameters()}
        for parameter_name in (*kind.parameters(), *kind.names()):
            if parameter_name in taken:
                raise DlmBridgeError(f"{kind.__name__}: '{parameter_name}' is another setting's name")
        known[name] = kind
        self._parameters = None

    def remove(self, name: str) -> None:
        """Forget a sampler."""
        del self.kinds[name]
        self._parameters = None

    def parameters(self) -> dict[str, list[Check]]:
        """The checks of every parameter of all samplers, by its name and its aliases."""
        if self._parameters is None:
            found: dict[str, list[Check]] = {}
            for kind in self.kinds.values():
                checks = {one.name: check_of(one) for one in fields(kind)}
                checks |= {alias: checks[name] for alias, name in kind.names().items()}
                for name, check in checks.items():
                    found.setdefault(name, []).append(check)
            self._parameters = found
        return self._parameters

    def check(self, name: str, value: Any, where: str) -> None:
        """Raise DlmBridgeError for a value that no sampler with this parameter accepts."""
        checks = self.parameters()[name]
        if not any(check.accepts(value) for check in checks):
            check_value(name, checks[0], value, where)

    @property
    def kinds(self) -> dict[str, type[Sampler]]:
        """The known samplers."""
        if not self._loaded:
            self._loaded = True
            for name, place in _BUILT_IN.items():
                module, _, attribute = place.partition(":")
                self._kinds[name] = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
            for name, extension in registered("samplers").items():
                try:
                    self.add(load("samplers", name))
                except DlmBridgeError as error:
                    if extension.name in EXTENSIONS:
                        raise
                    logger.warning(f"the sampler {name} of {extension.name} is left out: {error}")
            for entry, kind in load_entry_points("dlm_bridge.samplers").items():
                try:
                    self.add(kind)
                except DlmBridgeError as error:
                    logger.warning(f"the sampler of the entry point {entry} is left out: {error}")
        return self._kinds


SAMPLERS = SamplerTable()
