"""Random numbers keyed by what they are for, so that no layout, order of reading or restart can change them.

Philox is a counter-based generator: its stream is a pure function of a key and a counter. The key is (seed, purpose),
the counter's high words are the caller's indices; drawing advances only the low words, so two streams never meet.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


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


def stream(seed: int, purpose: Purpose, major: int = 0, minor: int = 0, lane: int = 0) -> np.random.Generator:
    """The generator of (seed, purpose, major, minor), for example (seed, TRAIN_NOISE, step, global sample index).
    Its `lane`s are 2^64 numbers apart: what is drawn in one does not depend on how many another gave."""
    key = np.array([seed % 2**64, int(purpose)], dtype=np.uint64)
    counter = np.array([0, lane, major, minor], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def torch_seed(seed: int, step: int, process: int) -> int:
    """A seed for torch's global generators (dropout) at one step of one process."""
    return int(stream(seed, Purpose.TORCH, step, process).integers(2**63))
