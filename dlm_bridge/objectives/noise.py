"""Noise: random numbers keyed by (seed, purpose, step, sample), the uniforms of a batch, and the noise processes.

Philox is a counter-based generator: its stream is a pure function of a key and a counter. No layout, order of reading
or restart changes it. `keyed_generator` gives NumPy's streams of it, for what is drawn on the host: the key is (seed,
purpose), the counter's high words are the caller's indices; drawing advances only the low words, so two streams never
meet. `philox_uniform` evaluates it for tensors of keys and counters at once, on their device.

A noise process of random tokens makes a clean token x become z with probability q_t(z | x) = keep [z = x] + masked
[z = mask] + replaced / N [z != mask], where N counts the tokens without the mask token and the three probabilities of
noise level t add up to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch


class Purpose(IntEnum):
    """What a stream is for. The numbers are part of every run's reproducibility: never reuse or change one."""

    TRAIN_NOISE = 0
    EVAL_NOISE = 1
    SHUFFLE = 2
    MOCK_DATA = 3
    TORCH = 4
    COLLATOR = 5
    MASK_ANNEALING = 6
    DOCUMENT_ORDER = 7
    ROLLOUT = 8
    PROMPT_MASK = 9
    LIKELIHOOD = 10


def keyed_generator(seed: int, purpose: Purpose, major: int = 0, minor: int = 0, lane: int = 0) -> np.random.Generator:
    """The generator of (seed, purpose, major, minor), for example (seed, TRAIN_NOISE, step, global sample index).
    Its `lane`s are 2^64 numbers apart: what is drawn in one does not depend on how many another gave."""
    key = np.array([seed % 2**64, int(purpose)], dtype=np.uint64)
    counter = np.array([0, lane, major, minor], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def philox_uniform(seed: torch.Tensor, major: torch.Tensor, minor: torch.Tensor) -> torch.Tensor:
    """float64 numbers on (0, 1), neither 0 nor 1, each a function of its own (seed, major, minor).

    The arguments are int64 tensors of shapes that broadcast: the key of Philox4x32-10 and the high and low halves of
    its counter. A number has 52 random bits.
    """
    words = [word for one in (minor, major, seed) for word in (one & _WORD, one >> 32 & _WORD)]
    high, low, *_ = philox_words(*torch.broadcast_tensors(*words))
    return ((high << 20 | low >> 12).double() + 0.5) * 2.0**-52


_WORD = 2**32 - 1


def philox_words(
    c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor, k0: torch.Tensor, k1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32-10 of a counter of four words and a key of two (Salmon et al., Parallel random numbers: as easy as 1,
    2, 3; SC 2011). Words are the low 32 bits of int64 tensors of one shape."""
    for _ in range(10):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # all 64 bits of the product, its highest in the sign
        c0, c1 = (second >> 32 ^ c1 ^ k0) & _WORD, second & _WORD
        c2, c3 = (first >> 32 ^ c3 ^ k1) & _WORD, first & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def torch_seed(seed: int, step: int, process: int) -> int:
    """A seed for torch's global generators (dropout) at one step of one process."""
    return int(keyed_generator(seed, Purpose.TORCH, step, process).integers(2**63))


SPAN_NUMBERS = 4  # of `Uniforms.span`


@dataclass(frozen=True)
class Uniforms:
    """All random numbers of a batch's noise, uniform on [0, 1), fp32 where nothing else is said."""

    level: torch.Tensor  # [B], the noise level t
    token: torch.Tensor  # [B, L], compared with the masking probability
    cut: torch.Tensor  # [B], whether the sequence is cut short
    cut_length: torch.Tensor  # [B], to what length
    block: torch.Tensor  # [B, L], the noise level of block b in column b, where blocks have their own
    replacement: torch.Tensor | None = None  # [B, L] float64, which random token; see `random_tokens`
    span: torch.Tensor | None = None  # [B, 4] float64, which span of a row is noised, and how it is resized

    @classmethod
    def keyed(
        cls, seed: int, step: int, samples: Sequence[int], length: int, purpose: Purpose = Purpose.TRAIN_NOISE
    ) -> Uniforms:
        """Numbers keyed by (seed, step, global sample index): `samples` are the indices of the B rows. A longer
        `length` only adds columns: padding changes no noise."""
        rows = np.empty((len(samples), 3 + length), dtype=np.float32)
        blocks = np.empty((len(samples), length), dtype=np.float32)
        replacements = np.empty((len(samples), length), dtype=np.float64)
        spans = np.empty((len(samples), SPAN_NUMBERS), dtype=np.float64)
        for row, block, replacement, span, sample in zip(rows, blocks, replacements, spans, samples, strict=True):
            keyed_generator(seed, purpose, step, sample).random(out=row, dtype=np.float32)
            keyed_generator(seed, purpose, step, sample, lane=1).random(out=block, dtype=np.float32)
            keyed_generator(seed, purpose, step, sample, lane=2).random(out=replacement)
            keyed_generator(seed, purpose, step, sample, lane=3).random(out=span)
        numbers = (torch.from_numpy(values) for values in (rows, blocks, replacements, spans))
        return cls._of(*numbers)

    @classmethod
    def drawn(
        cls, generator: torch.Generator, batch: int, length: int, replaces: bool = False, spans: bool = False
    ) -> Uniforms:
        """Numbers from an explicit generator, on that generator's device; `replaces` and `spans`: `replacement` and
        `span` too."""
        rows, blocks = (
            torch.rand(batch, columns, generator=generator, device=generator.device)
            for columns in (3 + length, length)
        )
        doubles: Any = {"generator": generator, "device": generator.device, "dtype": torch.float64}
        return cls._of(
            rows,
            blocks,
            torch.rand(batch, length, **doubles) if replaces else None,
            torch.rand(batch, SPAN_NUMBERS, **doubles) if spans else None,
        )

    @classmethod
    def _of(
        cls,
        rows: torch.Tensor,
        blocks: torch.Tensor,
        replacement: torch.Tensor | None,
        span: torch.Tensor | None,
    ) -> Uniforms:
        return cls(rows[:, 0], rows[:, 3:], rows[:, 1], rows[:, 2], blocks, replacement, span)

    def to(self, device: torch.device) -> Uniforms:
        moved: Any = {name: None if value is None else value.to(device) for name, value in vars(self).items()}
        return Uniforms(**moved)


def random_tokens(uniform: torch.Tensor, vocabulary_size: int, mask_token_id: int) -> torch.Tensor:
    """Tokens in the shape of `uniform` [0, 1), all but the mask token equally likely; -1: there is no mask token."""
    has_mask = 0 <= mask_token_id < vocabulary_size
    count = vocabulary_size - has_mask
    tokens = (uniform.double() * count).long().clamp(max=count - 1)
    return tokens + (tokens >= mask_token_id) if has_mask else tokens


@dataclass(frozen=True)
class NoiseProcess:
    """Noise of random tokens, with `p_uniform` None, or GIDD's hybrid of masks and random tokens, in which `p_uniform`
    is the fraction of random tokens at t = 1/2 (gamma is 1). Everything is float64."""

    p_uniform: float | None = None

    def probabilities(self, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """That a token is kept, masked, or replaced by one of the N tokens, itself among them, at noise level `t`."""
        t = t.double()
        if self.p_uniform is None:
            return 1 - t, torch.zeros_like(t), t
        random = self._bend * (t * (1 - t)).sqrt()  # GIDD's c_t
        total = 1 + random
        return (1 - t) / total, t / total, random / total

    def weights(
        self, t: torch.Tensor, clean: torch.Tensor, noisy: torch.Tensor, count: int, mask_token_id: int
    ) -> torch.Tensor:
        """The weights w_t(z, x) of the bound; `count` is N. At noise levels 0 and 1 they are infinite."""
        t = t.double()
        keep, masked, replaced = self.probabilities(t)
        if self.p_uniform is None:
            token_rate, mask_rate = 1 / (1 - t), torch.zeros_like(t)
        else:
            root = (t * (1 - t)).sqrt()
            total = 1 + self._bend * root
            token_rate, mask_rate = self._bend / (2 * root * total), 1 / ((1 - t) * total)
        reached = replaced / count + torch.where(noisy == clean, keep, 0.0)
        weights = token_rate / count / reached
        return torch.where(noisy == mask_token_id, mask_rate / masked, weights)

    def dynamic_weights(
        self, t: torch.Tensor, clean: torch.Tensor, noisy: torch.Tensor, count: int, mask_token_id: int
    ) -> torch.Tensor:
        """GIDD's dynamic weights: 2 for a mask, 1 for a random token and B / N exp(-lambda / 2), lambda the logarithm
        of the signal-to-noise ratio (1 - t) / t, for the clean token: about the bound's without their factor of t."""
        t = t.double()
        unchanged = self._bend / count * (t / (1 - t)).sqrt()
        weights = torch.where(noisy == clean, unchanged, torch.ones_like(t))
        return torch.where(noisy == mask_token_id, 2.0, weights)

    @property
    def _bend(self) -> float:
        """GIDD's B, so that c_t / (1 + c_t) is `p_uniform` at t = 1/2."""
        assert self.p_uniform is not None
        return 2 * self.p_uniform / (1 - self.p_uniform)
