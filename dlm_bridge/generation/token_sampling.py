"""Token sampling: random numbers, temperature, top-k and top-p, and the proposed tokens."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.canvas import Canvas, Columns, to_device
from dlm_bridge.generation.runtime.runner import tensor_parallel_group, unwrapped
from dlm_bridge.objectives.noise import philox_uniform
from dlm_bridge.registration import find_kernels


class Noise:
    """Uniform random numbers for a batch of rows, each row's keyed by its own seed.

    A number is a function of the row's seed, of how many draws the row has made before, and of a place in the row:
    neither the other rows nor padding nor the device change it.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        """`seeds` are 64 bits each, of integers of any sign."""
        self.device = device
        self._rows = _first_draws(seeds)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows of the current batch only."""
        self._rows = self._rows[list(rows)]

    def admit(self, seeds: Sequence[int]) -> None:
        """Rows with these seeds enter the current batch, in front of the others."""
        self._rows = torch.cat([_first_draws(seeds), self._rows])

    def uniform(self, rows: Sequence[int], places_AN: torch.Tensor) -> torch.Tensor:
        """float64 [A, N], uniform on (0, 1), for these places of these rows of the current batch: their next draw.

        Places are counted from a row's first token; the number of a place does not depend on which others are asked.
        """
        index = list(rows)
        seed_A1, draw_A1 = to_device(self._rows[index], self.device).split(1, dim=1)
        self._rows[index] += torch.tensor([0, 1])
        kernels = find_kernels("tokens", places_AN.device.type)
        evaluate = philox_uniform if kernels is None else kernels.philox_uniform
        uniform_AN: torch.Tensor = evaluate(seed_A1, draw_A1, places_AN)
        return uniform_AN


def _first_draws(seeds: Sequence[int]) -> torch.Tensor:
    """[B, 2] on the CPU: each row's seed, and the number of its next draw."""
    signed = [(seed + 2**63) % 2**64 - 2**63 for seed in seeds]
    return torch.tensor([[seed, 0] for seed in signed], dtype=torch.long).view(-1, 2)


def request_seeds(
    generator: torch.Generator | Sequence[torch.Generator] | None,
    seed: int | Sequence[int] | None,
    prompts: Sequence[Sequence[int]],
) -> list[int]:
    """The seeds of rows for the arguments of `generate`; `prompts` are the rows' tokens without padding.

    Raises:
        DlmBridgeError: both a generator and a seed, or generators or seeds that are not one per row.
    """
    if generator is not None and seed is not None:
        raise DlmBridgeError("generator and seed both choose the random numbers: give one of them")
    if seed is not None:
        return row_seeds(seed, prompts)
    if generator is None or isinstance(generator, torch.Generator):
        return drawn_seeds(len(prompts), generator)
    generators = list(generator) if isinstance(generator, (list, tuple)) else []
    if not generators or not all(isinstance(one, torch.Generator) for one in generators):
        raise DlmBridgeError("generator must be a torch.Generator or a list of them, one per row")
    if len(generators) != len(prompts):
        raise DlmBridgeError(f"{len(generators)} generators for {len(prompts)} rows: give one per row")
    if len({id(one) for one in generators}) != len(generators):
        raise DlmBridgeError("generator lists the same torch.Generator twice: make one per row, or pass just the one")
    return [drawn_seeds(1, one)[0] for one in generators]


def row_seeds(seed: int | Sequence[int], prompts: Sequence[Sequence[int]]) -> list[int]:
    """A seed for each row, from the seed, the row's prompt and the number of equal prompts before it; or those that
    `seed` lists.

    So a row's noise is the same alone and in any batch, while copies of one prompt give different samples.

    Raises DlmBridgeError for a list of another length.
    """
    if not isinstance(seed, int):
        if len(seed) != len(prompts):
            raise DlmBridgeError(f"seed lists {len(seed)} numbers for {len(prompts)} rows: give one, or one per row")
        return list(seed)
    seen: Counter[tuple[int, ...]] = Counter()
    seeds = []
    for prompt in map(tuple, prompts):
        digest = hashlib.blake2b(repr((seed, seen[prompt], prompt)).encode(), digest_size=8).digest()
        seeds.append(int.from_bytes(digest, "little") >> 1)  # 63 bits, as of every setting
        seen[prompt] += 1
    return seeds


def drawn_seeds(count: int, generator: torch.Generator | None = None) -> list[int]:
    """So many seeds from the generator, or from torch's global random state on the CPU."""
    device = "cpu" if generator is None else generator.device
    return torch.randint(2**63 - 1, (count,), generator=generator, device=device).tolist()


def shared_seed(model: Any) -> int | None:
    """A seed shared by the processes of a tensor-parallel model, from the first one's global random state; None for a
    model in one process. Every process must call it: with different tokens they would deadlock."""
    model = unwrapped(model)
    if (group := tensor_parallel_group(model)) is None:
        return None
    seed = torch.randint(2**62, (1,)).to(model.device)
    dist.broadcast(seed, group=group, group_src=0)
    return int(seed)


def best_token(logits_ANV: torch.Tensor, without: int) -> torch.Tensor:
    """[A, N], the token with the highest logit except `without` (-1: none), the first of equal ones."""
    kernels = find_kernels("tokens", logits_ANV.device.type)
    if kernels is not None and kernels.supports_logits(logits_ANV):
        tokens_AN: torch.Tensor = kernels.best_token(logits_ANV, without)
        return tokens_AN
    return without_token(logits_ANV, without, logits_ANV.dtype).argmax(dim=-1)


def draw_token(logits_ANV: torch.Tensor, uniform_AN: torch.Tensor, without: int = -1) -> torch.Tensor:
    """[A, N], a token drawn from softmax(logits), without the token `without` if there is one; see `invert`."""
    kernels = find_kernels("tokens", logits_ANV.device.type)
    if kernels is not None and kernels.supports_logits(logits_ANV):
        tokens_AN: torch.Tensor = kernels.draw_token(logits_ANV, without, uniform_AN)
        return tokens_AN
    scores_ANV = without_token(logits_ANV, without, logits_ANV.dtype)
    return invert(scores_ANV.softmax(dim=-1, dtype=torch.float64), uniform_AN, scores_ANV.argmax(dim=-1))


def invert(
    weights_ANV: torch.Tensor, uniform_AN: torch.Tensor, otherwise_AN: torch.Tensor | None = None
) -> torch.Tensor:
    """[A, N], the first token up to which the float64 weights add up to more than this fraction of all of them: a draw
    in proportion to the weights. `otherwise_AN`, by default the heaviest token, is taken of weights that are NaN.

    One number decides for a whole vocabulary, where the Gumbel-max trick takes one for each token. In float64: sums of
    lower precision round the weights of rare tokens away.
    """
    sums_ANV = weights_ANV.cumsum(dim=-1)
    target_AN1 = uniform_AN[..., None] * sums_ANV[..., -1:]
    token_AN1 = torch.searchsorted(sums_ANV, target_AN1, right=True).clamp(max=sums_ANV.shape[-1] - 1)  # of NaN: V
    # A parallel sum may round in such a way that a token without weight seems to have some.
    has_weight_AN = gather_tokens(weights_ANV, token_AN1[..., 0]) > 0
    otherwise_AN = weights_ANV.argmax(dim=-1) if otherwise_AN is None else otherwise_AN
    return torch.where(has_weight_AN, token_AN1[..., 0], otherwise_AN)


def probability_of(
    tokens_AN: torch.Tensor, logits_ANV: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """[A, N], softmax(logits) at the tokens, computed in `dtype`, by default that of the logits.

    In half precision the sum is float32, and the probability is rounded.
    """
    kernels = find_kernels("tokens", logits_ANV.device.type)
    dtype = logits_ANV.dtype if dtype is None else dtype
    if kernels is not None and kernels.supports_logits(logits_ANV) and dtype in (logits_ANV.dtype, torch.float64):
        probabilities_AN: torch.Tensor = kernels.probability_of(tokens_AN, logits_ANV, dtype)
        return probabilities_AN
    return logits_ANV.softmax(dim=-1, dtype=dtype).gather(-1, tokens_AN[..., None])[..., 0]


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
        self, logits: torch.Tensor, shaped: torch.Tensor, without: int, uniform: torch.Tensor | None
    ) -> torch.Tensor:
        """[A, N] tokens out of `shaped` [A, N, V], never the token `without` (-1: none). `uniform` [A, N], the numbers
        to draw with; None: the best tokens.

        Where the filters leave only that token, the unfiltered `logits` decide.
        """
        if self.top_k or self.top_p is not None:
            scores = without_token(shaped, without, shaped.dtype)
            nothing = scores.amax(dim=-1, keepdim=True) == -torch.inf
            shaped = torch.where(nothing, without_token(logits, without, shaped.dtype), scores)
        return best_token(shaped, without) if uniform is None else draw_token(shaped, uniform, without)


def without_token(logits: torch.Tensor, token: int, dtype: torch.dtype) -> torch.Tensor:
    """A copy in which the token has no probability; -1: the logits as they are."""
    if token < 0:
        return logits.to(dtype)
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
    uniform_AN = noise.uniform(rows, canvas.places(rows, columns)) if sampling.draws else None
    return shaped, sampling.propose(logits, shaped, canvas.excluded_token_id, uniform_AN)
