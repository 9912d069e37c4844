"""Noise: random numbers keyed by (seed, purpose, step, sample), the uniforms of a batch, and the noise processes.

Philox is a counter-based generator: its stream is a pure function of a key and a counter, whatever the parallel layout
or the order of reading. `keyed_generator` returns NumPy's Philox generator, for numbers on the host: the key is (seed,
purpose), the counter's high words are the caller's indices; drawing advances only the low words, so streams never
overlap. `philox_uniform` evaluates Philox for tensors of keys and counters, on their device.

A noise process of random tokens replaces a clean token x by z with probability q_t(z | x) = keep [z = x] + masked
[z = mask] + replaced / N [z != mask], where N counts the tokens without the mask token and the three probabilities of
noise level t add up to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from dlm_bridge.lazy_import import LazyModule

if TYPE_CHECKING:
    import numpy as np
    import torch
else:
    np = LazyModule("numpy", globals(), "np")
    torch = LazyModule("torch", globals())


class Purpose(IntEnum):
    """Purpose of a random stream. Reproducibility depends on the values: never reuse or change one."""

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
    """Generator for (seed, purpose, major, minor), for example (seed, TRAIN_NOISE, step, global sample index). Lanes
    are 2^64 numbers apart, so that drawing from one does not affect another."""
    key = np.array([seed % 2**64, int(purpose)], dtype=np.uint64)
    counter = np.array([0, lane, major, minor], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def philox_uniform(seed: torch.Tensor, major: torch.Tensor, minor: torch.Tensor) -> torch.Tensor:
    """Uniform float64 numbers on the open interval (0, 1), with 52 random bits, as a function of (seed, major, minor).

    Args:
        seed: int64 key of Philox4x32-10. All arguments have shapes that broadcast.
        major, minor: int64, high and low half of the counter.
    """
    words = [word for one in (minor, major, seed) for word in (one & _WORD, one >> 32 & _WORD)]
    high, low, *_ = philox_words(*torch.broadcast_tensors(*words))
    return ((high << 20 | low >> 12).double() + 0.5) * 2.0**-52


_WORD = 2**32 - 1


def philox_words(
    c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor, k0: torch.Tensor, k1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32-10 for a counter of four words and a key of two (Salmon et al., Parallel random numbers: as easy as
    1, 2, 3; SC 2011). Words are the low 32 bits of int64 tensors of one shape."""
    for _ in range(10):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # all 64 bits of the product; the sign is the highest
        c0, c1 = (second >> 32 ^ c1 ^ k0) & _WORD, second & _WORD
        c2, c3 = (first >> 32 ^ c3 ^ k1) & _WORD, first & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def torch_seed(seed: int, step: int, process: int) -> int:
    """Seed for torch's global generators (dropout) at one step of one process."""
    return int(keyed_generator(seed, Purpose.TORCH, step, process).integers(2**63))


SPAN_NUMBERS = 4  # columns of `Uniforms.span`


@dataclass(frozen=True)
class Uniforms:
    """All random numbers of a batch's noise, uniform on [0, 1), fp32 by default."""

    level: torch.Tensor  # [B] noise level t
    token: torch.Tensor  # [B, L] compared with the masking probability
    cut: torch.Tensor  # [B] selects the sequences to truncate
    cut_length: torch.Tensor  # [B] determines their length
    block: torch.Tensor  # [B, L] noise level of block b in column b, for objectives with a level per block
    replacement: torch.Tensor | None = None  # [B, L] float64, selects the random token; see `random_tokens`
    span: torch.Tensor | None = None  # [B, 4] float64, determine the noisy span of a row and how it is resized

    @classmethod
    def keyed(
        cls, seed: int, step: int, samples: Sequence[int], length: int, purpose: Purpose = Purpose.TRAIN_NOISE
    ) -> Uniforms:
        """Numbers keyed by (seed, step, global sample index). `samples`: indices of the B rows. A longer `length` only
        adds columns, so that padding does not change the noise."""
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
        """Numbers from an explicit generator, on its device. `replaces`, `spans`: also draw `replacement`, `span`."""
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
    """Uniform tokens without the mask token (-1: there is none), in the shape of the numbers `uniform` on [0, 1)."""
    has_mask = 0 <= mask_token_id < vocabulary_size
    count = vocabulary_size - has_mask
    tokens = (uniform.double() * count).long().clamp(max=count - 1)
    return tokens + (tokens >= mask_token_id) if has_mask else tokens


@dataclass(frozen=True)
class NoiseProcess:
    """Noise of random tokens, or GIDD's hybrid of masks and random tokens, in float64.

    Args:
        p_uniform: fraction of random tokens at t = 1/2 in the hybrid (gamma is 1); None: random tokens only.
    """

    p_uniform: float | None = None

    def probabilities(self, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Probabilities at noise level `t` that a token is kept, masked, or replaced by one of the N tokens (including
        itself)."""
        t = t.double()
        if self.p_uniform is None:
            return 1 - t, torch.zeros_like(t), t
        random = self._bend * (t * (1 - t)).sqrt()  # GIDD's c_t
        total = 1 + random
        return (1 - t) / total, t / total, random / total

    def weights(
        self, t: torch.Tensor, clean: torch.Tensor, noisy: torch.Tensor, count: int, mask_token_id: int
    ) -> torch.Tensor:
        """Weights w_t(z, x) of the bound; `count` is N. They are infinite at noise levels 0 and 1."""
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
        """GIDD's dynamic weights: 2 for a mask, 1 for a random token, and B / N exp(-lambda / 2) for the clean token,
        where lambda is the logarithm of the signal-to-noise ratio (1 - t) / t: about the bound's weights without their
        factor of t."""
        t = t.double()
        unchanged = self._bend / count * (t / (1 - t)).sqrt()
        weights = torch.where(noisy == clean, unchanged, torch.ones_like(t))
        return torch.where(noisy == mask_token_id, 2.0, weights)

    @property
    def _bend(self) -> float:
        """GIDD's B, for which c_t / (1 + c_t) is `p_uniform` at t = 1/2."""
        assert self.p_uniform is not None
        return 2 * self.p_uniform / (1 - self.p_uniform)
