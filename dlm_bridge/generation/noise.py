"""Where a sampler's random numbers come from: torch's global state, one generator, or one generator per row."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from dlm_bridge.errors import DlmBridgeError


class Noise:
    """Uniform numbers for a batch of rows.

    With one generator per row a row's numbers depend on nothing but its own generator, whatever else is in the batch
    and however the row is padded. With one generator, or none (torch's global state), rows share a stream.
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
        """The noise that `generate`'s arguments ask for; `prompts` are the rows' real tokens.

        Raises:
            DlmBridgeError: both a generator and a seed, or generators that are not one per row.
        """
        if generator is not None and seed is not None:
            raise DlmBridgeError("generator and seed both name the noise: give one of them")
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

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the current batch only."""
        if self._per_row is not None:
            self._per_row = [self._per_row[row] for row in rows]

    def per_token(self, rows: Sequence[int], positions: int, vocabulary: int, pads: Sequence[int]) -> torch.Tensor:
        """float64 [rows, positions, vocabulary], uniform in [0, 1), for these rows of the current batch; zero at the
        first `pads` positions of a row if rows have their own generators."""
        if self._per_row is None:
            return self._draw((len(rows), positions, vocabulary), torch.float64, self._shared)
        if not any(pads):
            shape = (positions, vocabulary)
            return torch.stack([self._draw(shape, torch.float64, self._per_row[row]) for row in rows])
        uniform = torch.zeros(len(rows), positions, vocabulary, dtype=torch.float64, device=self._device)
        for line, row, pad in zip(uniform, rows, pads, strict=True):
            line[pad:] = self._draw((positions - pad, vocabulary), torch.float64, self._per_row[row])
        return uniform

    def per_position(self, rows: Sequence[int], width: int, pads: Sequence[int]) -> torch.Tensor:
        """float32 [rows, width], uniform in [0, 1); zero at a row's padding if rows have their own generators."""
        if self._per_row is None:
            return self._draw((len(rows), width), torch.float32, self._shared)
        uniform = torch.zeros(len(rows), width, device=self._device)
        for line, row, pad in zip(uniform, rows, pads, strict=True):
            line[pad:] = self._draw((width - pad,), torch.float32, self._per_row[row])
        return uniform

    def _draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator | None) -> torch.Tensor:
        device = self._device if generator is None else generator.device
        return torch.rand(shape, dtype=dtype, device=device, generator=generator).to(self._device)


def row_seeds(seed: int, prompts: Iterable[Sequence[int]]) -> list[int]:
    """A seed for each row, from the one seed, the row's prompt and how many equal prompts stand before it.

    So a row draws the same noise alone and in any batch, while copies of one prompt still give different samples.
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
