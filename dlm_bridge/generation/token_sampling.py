"""Token sampling: random numbers, temperature, top-k, top-p, and proposed tokens."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dlm_bridge.errors import SettingError, counted
from dlm_bridge.generation.canvas import Canvas, Columns, to_device
from dlm_bridge.generation.runtime.runner import tensor_parallel_group, unwrapped
from dlm_bridge.objectives.noise import philox_uniform
from dlm_bridge.registration import find_kernels


class Noise:
    """Uniform random numbers for a batch of rows, with one seed per row.

    A number is a function of the row's seed, the number of the row's earlier draws, and the position in the row. It
    does not depend on other rows, padding or the device.

    Args:
        seeds: one per row; the lowest 64 bits are used.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self.device = device
        self._rows = _first_draws(seeds)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self._rows = self._rows[list(rows)]

    def admit(self, seeds: Sequence[int]) -> None:
        """Insert rows with these seeds before the others."""
        self._rows = torch.cat([_first_draws(seeds), self._rows])

    def uniform(self, rows: Sequence[int], places_AN: torch.Tensor, stream: int = 0) -> torch.Tensor:
        """float64 [A, N], the next draw of these rows, uniform on (0, 1), at these positions.

        Positions are counted from a row's first token. The number at a position does not depend on the other requested
        positions. With a `stream` above 0, the numbers are further ones beside the rows' last draw, and not counted.
        """
        index = list(rows)
        seed_A1, draw_A1 = to_device(self._rows[index], self.device).split(1, dim=1)
        if stream:
            draw_A1, places_AN = draw_A1 - 1, places_AN + (stream << 40)
        else:
            self._rows[index] += torch.tensor([0, 1])
        kernels = find_kernels("tokens", places_AN.device.type)
        evaluate = philox_uniform if kernels is None else kernels.philox_uniform
        uniform_AN: torch.Tensor = evaluate(seed_A1, draw_A1, places_AN)
        return uniform_AN


def _first_draws(seeds: Sequence[int]) -> torch.Tensor:
    """[B, 2] on the CPU: seed of each row, and number of its draws so far."""
    signed = [(seed + 2**63) % 2**64 - 2**63 for seed in seeds]
    return torch.tensor([[seed, 0] for seed in signed], dtype=torch.long).view(-1, 2)


def request_seeds(
    generator: torch.Generator | Sequence[torch.Generator] | None,
    seed: int | Sequence[int] | None,
    prompts: Sequence[Sequence[int]],
) -> list[int]:
    """Seeds of rows for the arguments of `generate`. `prompts`: tokens of the rows without padding.

    Raises:
        SettingError: both a generator and a seed are set, or their number is not one per row.
    """
    if generator is not None and seed is not None:
        raise SettingError("seed", "excludes `generator`: set one of them")
    if seed is not None:
        return row_seeds(seed, prompts)
    if generator is None or isinstance(generator, torch.Generator):
        return drawn_seeds(len(prompts), generator)
    generators = list(generator) if isinstance(generator, (list, tuple)) else []
    if not generators or not all(isinstance(one, torch.Generator) for one in generators):
        raise SettingError("generator", "must be a torch.Generator or a list of them, one per row")
    if len(generators) != len(prompts):
        raise SettingError(
            "generator",
            f"lists {counted(len(generators), 'generator')} for {counted(len(prompts), 'row')}: list one per row",
        )
    if len({id(one) for one in generators}) != len(generators):
        raise SettingError("generator", "lists a torch.Generator twice: list one per row, or pass a single one")
    return [drawn_seeds(1, one)[0] for one in generators]


def row_seeds(seed: int | Sequence[int], prompts: Sequence[Sequence[int]]) -> list[int]:
    """One seed per row, a function of `seed`, the row's prompt and the number of equal prompts before it; or the
    listed seeds. A row's random numbers are then the same in any batch, and copies of a prompt give different samples.

    Raises:
        SettingError: a list of another length.
    """
    if not isinstance(seed, int):
        if len(seed) != len(prompts):
            raise SettingError(
                "seed",
                f"lists {counted(len(seed), 'number')} for {counted(len(prompts), 'row')}: set one, or one per row",
            )
        return list(seed)
    seen: Counter[tuple[int, ...]] = Counter()
    seeds = []
    for prompt in map(tuple, prompts):
        digest = hashlib.blake2b(repr((seed, seen[prompt], prompt)).encode(), digest_size=8).digest()
        seeds.append(int.from_bytes(digest, "little") >> 1)  # 63 bits
        seen[prompt] += 1
    return seeds


def drawn_seeds(count: int, generator: torch.Generator | None = None) -> list[int]:
    """Draw `count` seeds from the generator, or from torch's global random state on the CPU."""
    device = "cpu" if generator is None else generator.device
    return torch.randint(2**63 - 1, (count,), generator=generator, device=device).tolist()


def shared_seed(model: Any) -> int | None:
    """Seed shared by the processes of a tensor-parallel model, from the first process's global random state; None for
    a model in one process. All processes must call this, because they would deadlock with different tokens."""
    model = unwrapped(model)
    if (group := tensor_parallel_group(model)) is None:
        return None
    seed = torch.randint(2**62, (1,)).to(model.device)
    dist.broadcast(seed, group=group, group_src=0)
    return int(seed)


def best_token(logits_ANV: torch.Tensor, without: int) -> torch.Tensor:
    """[A, N], token with the highest logit except `without` (-1: none); the first of equal ones."""
    kernels = find_kernels("tokens", logits_ANV.device.type)
    if kernels is not None and kernels.supports_logits(logits_ANV):
        tokens_AN: torch.Tensor = kernels.best_token(logits_ANV, without)
        return tokens_AN
    return without_token(logits_ANV, without, logits_ANV.dtype).argmax(dim=-1)


def draw_token(logits_ANV: torch.Tensor, uniform_AN: torch.Tensor, without: int = -1) -> torch.Tensor:
    """[A, N], token drawn from softmax(logits) except `without` (-1: none); see `invert`."""
    kernels = find_kernels("tokens", logits_ANV.device.type)
    if kernels is not None and kernels.supports_logits(logits_ANV):
        tokens_AN: torch.Tensor = kernels.draw_token(logits_ANV, without, uniform_AN)
        return tokens_AN
    scores_ANV = without_token(logits_ANV, without, logits_ANV.dtype)
    return invert(scores_ANV.softmax(dim=-1, dtype=torch.float64), uniform_AN, scores_ANV.argmax(dim=-1))


def invert(
    weights_ANV: torch.Tensor, uniform_AN: torch.Tensor, otherwise_AN: torch.Tensor | None = None
) -> torch.Tensor:
    """[A, N], inverse-CDF sampling: the first token whose cumulative weight exceeds uniform * sum.

    One random number decides for a whole vocabulary, while the Gumbel-max trick needs one per token. Sums in a lower
    precision than float64 would lose the weights of rare tokens.

    Args:
        weights_ANV: float64 weights.
        uniform_AN: random numbers on (0, 1).
        otherwise_AN: token for weights that are NaN; by default the one with the largest weight.
    """
    sums_ANV = weights_ANV.cumsum(dim=-1)
    target_AN1 = uniform_AN[..., None] * sums_ANV[..., -1:]
    token_AN1 = torch.searchsorted(sums_ANV, target_AN1, right=True).clamp(max=sums_ANV.shape[-1] - 1)  # NaN: V
    # Rounding of a parallel sum may select a token of zero weight.
    has_weight_AN = gather_tokens(weights_ANV, token_AN1[..., 0]) > 0
    otherwise_AN = weights_ANV.argmax(dim=-1) if otherwise_AN is None else otherwise_AN
    return torch.where(has_weight_AN, token_AN1[..., 0], otherwise_AN)


def probability_of(
    tokens_AN: torch.Tensor, logits_ANV: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """[A, N], softmax(logits) at the tokens, computed in `dtype` (default: the logits'). In half precision, the sum is
    float32 and the probability is rounded."""
    kernels = find_kernels("tokens", logits_ANV.device.type)
    dtype = logits_ANV.dtype if dtype is None else dtype
    if kernels is not None and kernels.supports_logits(logits_ANV) and dtype in (logits_ANV.dtype, torch.float64):
        probabilities_AN: torch.Tensor = kernels.probability_of(tokens_AN, logits_ANV, dtype)
        return probabilities_AN
    return logits_ANV.softmax(dim=-1, dtype=dtype).gather(-1, tokens_AN[..., None])[..., 0]


def gather_tokens(values_ANV: torch.Tensor, tokens_AN: torch.Tensor) -> torch.Tensor:
    """[A, N], values at the tokens."""
    return values_ANV.gather(-1, tokens_AN[..., None])[..., 0]


# Smaller temperatures would overflow float32; this one is greedy as well.
MIN_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class TokenSampling:
    """Temperature, top-k and top-p.

    Args:
        temperature: 0 is greedy.
        top_k: None or 0: off.
        top_p: None or 1: off.
        order: order of the filters, which differs between the published samplers.
        greedy: propose the best token; the temperature still shapes the distribution.
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
        """[..., V] logits of the distribution that tokens are drawn from, minus infinity at filtered tokens."""
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
        self, logits: torch.Tensor, shaped: torch.Tensor, without: int, uniform: torch.Tensor | None
    ) -> torch.Tensor:
        """[A, N] tokens from `shaped` [A, N, V], never the token `without` (-1: none).

        Args:
            logits: unfiltered logits, used if the filters leave only the token `without`.
            uniform: [A, N] random numbers; None: the best tokens.
        """
        if self.top_k or self.top_p is not None:
            scores = without_token(shaped, without, shaped.dtype)
            nothing = scores.amax(dim=-1, keepdim=True) == -torch.inf
            shaped = torch.where(nothing, without_token(logits, without, shaped.dtype), scores)
        return best_token(shaped, without) if uniform is None else draw_token(shaped, uniform, without)


def without_token(logits: torch.Tensor, token: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits with minus infinity at the token (a copy); -1: the logits themselves."""
    if token < 0:
        return logits.to(dtype)
    copy = logits.to(dtype, copy=True)
    copy[..., token] = -torch.inf
    return copy


def keep_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Keep the k largest logits and their ties; minus infinity elsewhere."""
    least = logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def keep_top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep the most probable tokens up to the first with which their sum exceeds p; minus infinity elsewhere."""
    ordered, indices = logits.sort(dim=-1, descending=True)
    above = ordered.softmax(dim=-1).cumsum(dim=-1) > p
    drop = torch.zeros_like(above)
    drop[..., 1:] = above[..., :-1]
    return logits.masked_fill(drop.scatter(-1, indices, drop), -torch.inf)


def propose_tokens(
    logits: torch.Tensor, canvas: Canvas, rows: list[int], columns: Columns, sampling: TokenSampling, noise: Noise
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distribution [A, N, V] of these columns, and tokens [A, N] proposed from it."""
    shaped = sampling.shape(logits)
    uniform_AN = noise.uniform(rows, canvas.places(rows, columns)) if sampling.draws else None
    return shaped, sampling.propose(logits, shaped, canvas.excluded_token_id, uniform_AN)
