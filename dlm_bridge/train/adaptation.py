"""How the attention of an autoregressive model is adapted while a run goes on: opened pair by pair, or block by block.

Both depend on the step alone, so a resumed run goes on where it was, and on nothing that an engine's cutting of the
batch into micro-batches or processes could change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.spec import FamilySpec
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.keyed import Purpose, stream
from dlm_bridge.train.objectives import OBJECTIVES, NoisyBatch, Objective, TwoStreams


def open_share(step: int, annealing_steps: int) -> float:
    """The probability that a pair (query, later key) is open at a step, counted from 1: 0 at the first step, growing
    linearly to 1 after `annealing_steps` of them (DiffuLLaMA, arXiv 2410.17891, section 3.2)."""
    return 1.0 if annealing_steps == 0 else min(1.0, (step - 1) / annealing_steps)


def annealed(noisy: NoisyBatch, config: TrainConfig, step: int, samples: Sequence[int]) -> NoisyBatch:
    """The batch with the attention of its step, as `pairs`: causal plus a random `open_share` of the later keys, drawn
    anew for each global sample index and step. `noisy` holds one stream, a row for each of `samples`."""
    share = open_share(step, config.mask_annealing_steps)
    if share == 1.0:
        return noisy
    batch, length = noisy.input_ids.shape
    device = noisy.input_ids.device
    allowed_BLL = torch.ones(length, length, dtype=torch.bool, device=device).tril().expand(batch, -1, -1)
    if share > 0:
        allowed_BLL = allowed_BLL | (_uniform(config.seed, step, samples, length).to(device) < share)
    if noisy.visibility is not None:  # packed documents
        allowed_BLL = allowed_BLL & noisy.visibility.dense()[:, 0]
    elif noisy.attention_mask is not None:
        # Padding looks at itself, so that no row of a softmax is empty.
        own_LL = torch.eye(length, dtype=torch.bool, device=device)
        allowed_BLL = (allowed_BLL & noisy.attention_mask[:, None, :]) | own_LL
    return dataclasses.replace(noisy, pairs=allowed_BLL[:, None])


def with_block_size(objective: Objective, model: Any, config: TrainConfig, step: int) -> Objective:
    """The objective `at_step`. The model's config says the size too: a checkpoint names the one that it was trained
    with last."""
    size = block_size(config, step)
    if size is not None:
        model.config.block_size = size
    return at_step(objective, config, step)


def at_step(objective: Objective, config: TrainConfig, step: int) -> Objective:
    """The objective with the block size of a step."""
    size = block_size(config, step)
    # A TwoStreams where there is a schedule, as checked.
    return objective if size is None else dataclasses.replace(objective, block_size=size)  # type: ignore[call-arg]


def block_size(config: TrainConfig, step: int) -> int | None:
    """The block size of `--block-schedule` at a step, counted from 1; None without a schedule."""
    sizes = [size for start, size in config.block_sizes if start <= step]
    return sizes[-1] if sizes else None


def check_adaptation(config: TrainConfig, family: FamilySpec) -> None:
    """Raise DlmBridgeError where the resolved `config.objective` or the family cannot follow a schedule."""
    name = str(config.objective)
    kind = OBJECTIVES[name].kind
    if config.block_sizes and not issubclass(kind, TwoStreams):
        known = ", ".join(other for other, preset in OBJECTIVES.items() if issubclass(preset.kind, TwoStreams))
        raise DlmBridgeError(f"--block-schedule: objective '{name}' has no blocks: those that have are {known}")
    if not config.mask_annealing_steps:
        return
    flag = f"--mask-annealing-steps {config.mask_annealing_steps}"
    if issubclass(kind, TwoStreams):
        raise DlmBridgeError(
            f"{flag}: objective '{name}' makes the mask of its two streams itself: adapt it with --block-schedule"
        )
    if family.topology != "bidirectional":
        raise DlmBridgeError(f"{flag}: {family.title} is {family.topology}, not bidirectional: leave it out")


def _uniform(seed: int, step: int, samples: Sequence[int], length: int) -> torch.Tensor:
    """[B, L, L] uniform on [0, 1), fp32, keyed by (seed, step, global sample index)."""
    values = np.empty((len(samples), length, length), dtype=np.float32)
    for row, sample in zip(values, samples, strict=True):
        stream(seed, Purpose.MASK_ANNEALING, step, sample).random(out=row, dtype=np.float32)
    return torch.from_numpy(values)
