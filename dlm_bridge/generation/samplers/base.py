"""Base class of samplers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from dlm_bridge.attention_mask import AttentionPattern
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.canvas import BlockLayout
from dlm_bridge.generation.loop import SamplerSpec
from dlm_bridge.generation.predictors import BlockCausalPredictor
from dlm_bridge.generation.token_sampling import TokenSampling


@dataclass(frozen=True)
class SpecialTokens:
    """The token ids that a sampler may need."""

    pad_token_id: int
    eos_token_ids: tuple[int, ...]  # empty: no stopping
    end_token_ids: tuple[int, ...] = ()  # the model's end-of-sequence tokens, whether a row stops at them or not


@dataclass(frozen=True, kw_only=True)
class Sampler(ABC):
    """A subclass's fields are its parameters, with the published names and defaults."""

    name: ClassVar[str]
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]]  # the models that it can run on
    families: ClassVar[tuple[str, ...]] = ()  # where not empty: the only ones whose training allows it
    model_blocks: ClassVar[bool] = False  # a default block is the one that the model's config states
    shortens_block: ClassVar[bool] = False  # a default block is no longer than what is to be generated
    needs_mask: ClassVar[bool] = True  # False: it works without a mask token
    infills: ClassVar[bool] = True  # can fill masks inside a prompt

    gen_length: int = 128  # new tokens
    temperature: float = 0.0  # 0 is greedy
    # Only the k most probable tokens, or the most probable up to a total of p, are drawn. Where the published sampler
    # draws from all, these are additions of ours.
    top_k: int | None = None
    top_p: float | None = None

    @classmethod
    def parameters(cls) -> dict[str, Any]:
        """Each parameter's default."""
        return {field.name: field.default for field in fields(cls)}

    @classmethod
    def accepts_none(cls, name: str) -> bool:
        """Whether None is one of the parameter's values."""
        return any(field.name == name and "None" in str(field.type) for field in fields(cls))

    def sampling(self) -> TokenSampling:
        """The filters where tokens are drawn; greedy, nothing is filtered, so that a confidence is the plain
        probability."""
        return TokenSampling(self.temperature, self.top_k, self.top_p) if self.temperature else TokenSampling()

    @abstractmethod
    def recipe(self, tokens: SpecialTokens) -> SamplerSpec:
        """The parts of one call. Raises DlmBridgeError where parameters do not fit together."""


def check_blocks(gen_length: int, block_length: int) -> int:
    """How many blocks there are. Raises DlmBridgeError, with numbers that work, unless blocks divide the length."""
    if gen_length % block_length:
        below = gen_length // block_length * block_length
        lengths = f"{below} or {below + block_length}" if below else f"{block_length}"
        divisor = next(n for n in range(min(block_length, gen_length), 0, -1) if gen_length % n == 0)
        raise DlmBridgeError(
            f"gen_length {gen_length} is not a multiple of block_length {block_length}: "
            f"use gen_length {lengths}, or block_length {divisor}"
        )
    return gen_length // block_length


def by_blocks(block_length: int) -> dict[str, Any]:
    """The parts of a recipe that do not depend on the rule."""
    return {
        "layout": BlockLayout(block_length, aligned=True),
        "predictor": BlockCausalPredictor,
        "predictor_options": {"block_length": block_length},
    }
