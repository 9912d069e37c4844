"""Token sampling: random numbers, temperature, top-k and top-p, and the proposed tokens."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.canvas import Canvas, Columns

if TYPE_CHECKING:
    pass


class Noise:
    """Uniform random numbers for a batch of rows.

    With one generator per row a row's numbers do not depend on the batch or on padding. With one generator, or none
    (torch's global state), rows share a stream.
    """

    def __init__(
        self,
        device: torch.device,
        shared: torch.Generator | None = None,
        per_row: Sequence[torch.Generator] | None = None,
    ) -> None:
        self._device = device
        self._shared = shared
        self._per_row = None if per_row is None else list(per_row)

    @classmethod
    def build(
        cls,
        generator: torch.Generator | Sequence[torch.Generator] | None,
        seed: int | None,
        prompts: Sequence[Sequence[int]],
        device: torch.device,
    ) -> Noise:
        """The noise for the arguments of `generate`; `prompts` are the rows' tokens without padding.

        Raises:
            DlmBridgeError: both a generator and a seed, or generators that are not one per row.
        """
        if generator is not None and seed is not None:
            raise DlmBridgeError("generator and seed both choose the random numbers: give one of them")
        if seed is not None:
            return cls(device, per_row=seeded_generators(row_seeds(seed, prompts), device))
        if generator is None or isinstance(generator, torch.Generator):
            return cls(device, shared=generator)
        generators = list(generator) if isinstance(generator, (list, tuple)) else []
        if not generators or not all(isinstance(one, torch.Generator) for one in generators):
            raise DlmBridgeError("generator must be a torch.Generator or a list of them, one per row")
        if len(generators) != len(prompts):
            raise DlmBridgeError(f"{len(generators)} generators for {len(prompts)} rows: give one per row")
        if len({id(one) for one in generators}) != len(generators):
            raise DlmBridgeError(
                "generator lists the same torch.Generator twice: make one per row, or pass just the one"
            )
        return cls(device, per_row=generators)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows of the current batch only."""
        if self._per_row is not None:
            self._per_row = [self._per_row[row] for row in rows]

    def admit(self, generators: Sequence[torch.Generator]) -> None:
        """Rows with these generators enter the current batch, in front of the others."""
        assert self._per_row is not None
        self._per_row = [*generators, *self._per_row]

    def per_token(
        self, rows: Sequence[int], positions: int, vocabulary: int, pads: Sequence[int], ends: Sequence[int]
    ) -> torch.Tensor:
        """float64 [rows, positions, vocabulary], uniform in [0, 1), for these rows of the current batch. If rows have
        their own generators, a row's numbers are those of its positions from `pads` to `ends`, and zero elsewhere."""
        if self._per_row is None:
            return self._draw((len(rows), positions, vocabulary), torch.float64, self._shared)
        if not any(pads) and min(ends, default=positions) >= positions:
            shape = (positions, vocabulary)
            return torch.stack([self._draw(shape, torch.float64, self._per_row[row]) for row in rows])
        uniform = torch.zeros(len(rows), positions, vocabulary, dtype=torch.float64, device=self._device)
        for line, row, pad, end in zip(uniform, rows, pads, ends, strict=True):
            own = line[pad:end]
            own.copy_(self._draw(tuple(own.shape), torch.float64, self._per_row[row]))
        return uniform

    def per_position(self, rows: Sequence[int], width: int, pads: Sequence[int], ends: Sequence[int]) -> torch.Tensor:
        """float32 [rows, width], uniform in [0, 1), as `per_token`."""
        if self._per_row is None:
            return self._draw((len(rows), width), torch.float32, self._shared)
        uniform = torch.zeros(len(rows), width, device=self._device)
        for line, row, pad, end in zip(uniform, rows, pads, ends, strict=True):
            own = line[pad:end]
            own.copy_(self._draw(tuple(own.shape), torch.float32, self._per_row[row]))
        return uniform

    def _draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator | None) -> torch.Tensor:
        device = self._device if generator is None else generator.device
        return torch.rand(shape, dtype=dtype, device=device, generator=generator).to(self._device)


def row_seeds(seed: int, prompts: Iterable[Sequence[int]]) -> list[int]:
    """A seed for each row, from the seed, the row's prompt and the number of equal prompts before it.

    So a row's noise is the same alone and in any batch, while copies of one prompt give different samples.
    """
    seen: Counter[tuple[int, ...]] = Counter()
    seeds = []
    for prompt in map(tuple, prompts):
        digest = hashlib.blake2b(repr((seed, seen[prompt], prompt)).encode(), digest_size=8).digest()
        seeds.append(int.from_bytes(digest, "little") >> 1)  # 63 bits: torch.Generator takes a signed 64-bit integer
        seen[prompt] += 1
    return seeds


def seeded_generators(seeds: Iterable[int], device: torch.device) -> list[torch.Generator]:
    """A generator for each seed."""
    return [torch.Generator(device).manual_seed(seed) for seed in seeds]


def shared_seed(model: Any) -> int | None:
    """A seed shared by the processes of a tensor-parallel model, from the first one's global random state; None for a
    model in one process. Every process must call it: with different tokens they would deadlock."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if (getattr(model, "_tp_size", None) or 1) == 1:
        return None
    seed = torch.randint(2**62, (1,)).to(model.device)
    dist.broadcast(seed, group=model._device_mesh["tp"].get_group(), group_src=0)
    return int(seed)


def best_token(logits_ANV: torch.Tensor, without: int) -> torch.Tensor:
    """[A, N], the token with the highest logit except `without`, the first of equal ones."""
    kernels = _triton_kernels() if logits_ANV.is_cuda else None
    if kernels is not None and kernels.supports_logits(logits_ANV):
        tokens_AN: torch.Tensor = kernels.best_token(logits_ANV, without)
        return tokens_AN
    logits_ANV = logits_ANV.clone()
    logits_ANV[..., without] = -torch.inf
    return logits_ANV.argmax(dim=-1)


def probability_of(
    tokens_AN: torch.Tensor, logits_ANV: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """[A, N], softmax(logits) at the tokens, computed in `dtype`, by default that of the logits.

    In half precision the sum is float32, and the probability is rounded.
    """
    kernels = _triton_kernels() if logits_ANV.is_cuda else None
    dtype = logits_ANV.dtype if dtype is None else dtype
    if kernels is not None and kernels.supports_logits(logits_ANV) and dtype in (logits_ANV.dtype, torch.float64):
        probabilities_AN: torch.Tensor = kernels.probability_of(tokens_AN, logits_ANV, dtype)
        return probabilities_AN
    return logits_ANV.softmax(dim=-1, dtype=dtype).gather(-1, tokens_AN[..., None])[..., 0]


@functools.cache
def _triton_kernels() -> ModuleType | None:
    """The module of the Triton kernels; None without Triton."""
    try:
        from dlm_bridge.generation.runtime import triton_kernels
    except ImportError:
        return None
    return triton_kernels


def gather_tokens(values_ANV: torch.Tensor, tokens_AN: torch.Tensor) -> torch.Tensor:
    """[A, N], the values at the tokens."""
    return values_ANV.gather(-1, tokens_AN[..., None])[..., 0]


# A smaller temperature would overflow float32; both are greedy.
MIN_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class TokenSampling:
    """Temperature, top-k and top-p.

    Args:
        temperature: 0 is greedy.
        top_k: None or 0: off.
        top_p: None or 1: off.
        order: of the filters, which differs between the published samplers.
        greedy: propose the best token, although the temperature shapes the distribution.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    order: tuple[str, ...] = ("temperature", "top_k", "top_p")
    greedy: bool = False

    @property
    def draws(self) -> bool:
        return self.temperature > 0 and not self.greedy

    def shape(self, logits: torch.Tensor) -> torch.Tensor:
        """[..., V] logits of the distribution that tokens are drawn from, minus infinity where filtered out."""
        if self.temperature > 0:
            logits = logits.float()
        for name in self.order:
            if name == "temperature" and self.temperature > 0:
                logits = logits / max(self.temperature, MIN_TEMPERATURE)
            elif name == "top_k" and self.top_k:
                logits = keep_top_k(logits, self.top_k)
            elif name == "top_p" and self.top_p is not None and self.top_p < 1:
                logits = keep_top_p(logits, self.top_p)
        return logits

    def propose(
        self, logits: torch.Tensor, shaped: torch.Tensor, mask_token_id: int, uniform: torch.Tensor | None
    ) -> torch.Tensor:
        """[A, N] tokens out of `shaped` [A, N, V], never the mask token. `uniform` [A, N, V] is needed to draw.

        Where the filters leave only the mask token, the unfiltered `logits` decide. Draws use the Gumbel-max trick in
        float64: lower precision truncates the noise's tail and so skews the draws (arXiv 2409.02908).
        """
        filtered = bool(self.top_k or self.top_p is not None)
        if uniform is None and not filtered:
            return best_token(shaped, mask_token_id)
        dtype = shaped.dtype if uniform is None else torch.float64
        scores = without_token(shaped, mask_token_id, dtype)
        if filtered:
            nothing = scores.amax(dim=-1, keepdim=True) == -torch.inf
            scores = torch.where(nothing, without_token(logits, mask_token_id, dtype), scores)
        if uniform is not None:
            scores = scores - uniform.log_().neg_().log_()
        return scores.argmax(dim=-1)


def without_token(logits: torch.Tensor, token: int, dtype: torch.dtype) -> torch.Tensor:
    """A copy in which the token has no probability."""
    copy = logits.to(dtype, copy=True)
    copy[..., token] = -torch.inf
    return copy


def keep_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest logits and their ties; minus infinity elsewhere."""
    least = logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def keep_top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """The most probable tokens up to the first that brings their sum above p; minus infinity elsewhere."""
    ordered, indices = logits.sort(dim=-1, descending=True)
    above = ordered.softmax(dim=-1).cumsum(dim=-1) > p
    drop = torch.zeros_like(above)
    drop[..., 1:] = above[..., :-1]
    return logits.masked_fill(drop.scatter(-1, indices, drop), -torch.inf)


def propose_tokens(
    logits: torch.Tensor, canvas: Canvas, rows: list[int], columns: Columns, sampling: TokenSampling, noise: Noise
) -> tuple[torch.Tensor, torch.Tensor]:
    """The distribution [A, N, V] of these columns and the tokens [A, N] proposed from it."""
    shaped = sampling.shape(logits)
    uniform = None
    if sampling.draws:
        pads, ends = [0] * len(rows), [logits.shape[1]] * len(rows)
        if isinstance(columns, slice):
            pads = [max(0, canvas.origins[row] - columns.start) for row in rows]
            ends = [canvas.stops[row] - columns.start for row in rows]
        uniform = noise.per_token(rows, logits.shape[1], logits.shape[2], pads, ends)
    return shaped, sampling.propose(logits, shaped, canvas.mask_token_id, uniform)
