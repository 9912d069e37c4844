"""Schedules of a run: number of steps, learning rate, batch size, mask annealing, block size.

All are pure functions of the step. A resume therefore needs no state, and may change the number of micro-batches and
processes. Every learning rate warms up linearly to `lr`. Schedules that decay end at `min_lr` with the last step, or
with `lr_decay_steps`. `wsd` (warm-up, stable, decay) is constant until its final steps, so that a run can be prolonged
from a checkpoint before them. The formulas are those of megatron-core's `OptimizerParamScheduler` and of its batch
size ramp-up. Mask annealing and the block schedule adapt the attention of an autoregressive model.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dlm_bridge.data.loader import BatchSampler
from dlm_bridge.errors import SettingError
from dlm_bridge.models.families import FamilySpec
from dlm_bridge.objectives.base import Objective
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.objectives.noise import Purpose, keyed_generator
from dlm_bridge.objectives.registry import find_objective, objectives
from dlm_bridge.settings import options_of
from dlm_bridge.train.config import TrainConfig, refuse
from dlm_bridge.train.config.files import Config
from dlm_bridge.train.config.sections import ScheduleOptions


def learning_rate(config: TrainConfig, step: int) -> float:
    """Learning rate of `step`, which counts from 1."""
    schedule, peak = config.schedule, config.optimizer.lr
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.lr_schedule == "inverse-square-root":
        return max(schedule.min_lr, peak * math.sqrt(max(1, schedule.warmup_steps) / step))
    return schedule.min_lr + (peak - schedule.min_lr) * _remaining(schedule, step)


def learning_rate_jump(before: TrainConfig, now: TrainConfig, step: int) -> str | None:
    """Warning for a resume after `step` whose options change the learning rate of the next step, compared with the
    run's own configuration `before`; None if they do not."""
    was, will_be = learning_rate(before, step + 1), learning_rate(now, step + 1)
    if math.isclose(was, will_be, rel_tol=1e-6):
        return None
    (old, new), options = (before.as_flags(), now.as_flags()), options_of(type(now))
    rated = [name for name, option in options.items() if option.section == "schedule" or name == "lr"]
    changed = ", ".join(f"`{name}={new[name]}` (was {old[name]})" for name in rated if old[name] != new[name])
    end = before.schedule.decay_end
    remedy = f": `lr_decay_steps={end}` keeps the run's decay" if end != now.schedule.decay_end else ""
    return f"the learning rate of step {step + 1} jumps from {was:.3g} to {will_be:.3g} because of {changed}{remedy}"


def with_steps(config: Config, blocks: int = 0) -> Config:
    """Replace `epochs` by the number of steps after which a run with `blocks` training blocks has read each of them
    that many times, and `tokens` by the number of steps that read at least as many. The last step may read some blocks
    once more."""
    schedule = config.schedule
    if schedule.steps is not None:
        return config
    tokens = schedule.tokens
    samples = (schedule.epochs or 0) * blocks if tokens is None else -(-tokens // config.data.seq_length)
    before = batch_sampler(config).samples_before
    steps = bisect.bisect_left(range(samples + 1), samples, key=lambda step: before(step + 1))
    return config.replace(steps=max(1, steps))


def batch_sampler(config: TrainConfig) -> BatchSampler:
    """Sampler of the global batches, whose sizes grow with `batch_ramp_up`."""
    return BatchSampler(config.data.batch_sizes, config.data.samples_per_size)


def open_probability(step: int, annealing_steps: int) -> float:
    """Probability that a query attends to a later key at a step, counted from 1: 0 at the first step, then growing
    linearly to 1 over `annealing_steps` (DiffuLLaMA, arXiv 2410.17891, section 3.2)."""
    return 1.0 if annealing_steps == 0 else min(1.0, (step - 1) / annealing_steps)


def anneal_mask(noisy: NoisyBatch, config: TrainConfig, step: int, samples: Sequence[int]) -> NoisyBatch:
    """Set the annealed attention mask of a step, `pairs`: causal, plus random later keys with `open_probability`.

    Args:
        noisy: a batch of one stream.
        samples: global sample index of each row; the random keys depend on it, the step and the seed.
    """
    opened = open_probability(step, config.objective.mask_annealing_steps)
    if opened == 1.0:
        return noisy
    batch, length = noisy.input_ids.shape
    device = noisy.input_ids.device
    allowed_BLL = torch.ones(length, length, dtype=torch.bool, device=device).tril().expand(batch, -1, -1)
    if opened > 0:
        allowed_BLL = allowed_BLL | (_uniform(config.data.seed, step, samples, length).to(device) < opened)
    if noisy.mask_descriptor is not None:  # packed documents
        allowed_BLL = allowed_BLL & noisy.mask_descriptor.dense()[:, 0]
    elif noisy.attention_mask is not None:
        # Padding attends to itself: a softmax over no key is NaN.
        own_LL = torch.eye(length, dtype=torch.bool, device=device)
        allowed_BLL = (allowed_BLL & noisy.attention_mask[:, None, :]) | own_LL
    return dataclasses.replace(noisy, pairs=allowed_BLL[:, None])


def with_block_size(objective: Objective, model: Any, config: TrainConfig, step: int) -> Objective:
    """Objective `at_step`. Sets the block size in the model's config too, which checkpoints contain."""
    size = scheduled_block_size(config, step)
    if size is not None:
        model.config.block_size = size
    return at_step(objective, config, step)


def at_step(objective: Objective, config: TrainConfig, step: int) -> Objective:
    """Objective with the block size of a step."""
    size = scheduled_block_size(config, step)
    # `check_adaptation` has checked that an objective with a schedule has two streams.
    return objective if size is None else dataclasses.replace(objective, block_size=size)  # type: ignore[call-arg]


def scheduled_block_size(config: TrainConfig, step: int) -> int | None:
    """Block size of `block_schedule` at a step, counted from 1; None without a schedule."""
    sizes = [size for start, size in config.objective.block_sizes if start <= step]
    return sizes[-1] if sizes else None


def check_adaptation(config: TrainConfig, family: FamilySpec) -> None:
    """Raise SettingError for data or schedules that the objective or the family does not support."""
    data, options, name = config.data, config.objective, str(config.objective.objective)
    kind = find_objective(name).kind
    cut = f"is not supported by {family.title}, whose canvases are cut from the single answer of a row"
    alone = f"is not supported by objective '{name}', whose rows contain one text each, with room to grow"
    refuse(
        (kind.answer_blocks and data.packing, "packing", cut),
        (kind.answer_blocks and data.document_attention, "document_attention", cut),
        (kind.answer_blocks and options.block_sizes, "block_schedule", f"{cut} with the length in its config"),
        (kind.resizes and data.packing, "packing", alone),
        (kind.resizes and data.document_attention, "document_attention", alone),
        (kind.resizes and data.eos_padding not in (None, "none"), "eos_padding",
         f"must be none with objective '{name}', in which the end of text is the token that deletes a mask"),
        (kind.trajectories and config.task != "sft", "objective",
         f"{name}: trajectories are recorded for answers: train it with dlm-bridge sft"),
    )  # fmt: skip
    if options.block_sizes and kind.streams == 1:
        known = ", ".join(other for other, spec in objectives().items() if spec.kind.streams == 2)
        raise SettingError("block_schedule", f"objective '{name}' has no blocks: objectives with blocks are {known}")
    if options.mask_annealing_steps:
        refuse(
            (kind.streams == 2, "mask_annealing_steps",
             f"objective '{name}' has its own mask of two streams: use `block_schedule`"),
            (family.attention_pattern != "bidirectional", "mask_annealing_steps",
             f"{family.title} is {family.attention_pattern}, not bidirectional"),
        )  # fmt: skip


def _remaining(schedule: ScheduleOptions, step: int) -> float:
    """Fraction of the range from minimum to peak rate that is left at a step after the warm-up, from 1 to 0."""
    if schedule.lr_schedule == "constant":
        return 1.0
    if schedule.lr_schedule == "wsd":
        begin = max(schedule.warmup_steps, schedule.decay_end - decay_steps(schedule))
        return decay(schedule.wsd_decay_style, _progress(step, begin, schedule.decay_end))
    return decay(schedule.lr_schedule, _progress(step, schedule.warmup_steps, schedule.decay_end))


def decay_steps(schedule: ScheduleOptions) -> int:
    """Number of final steps in which a wsd schedule decays."""
    return schedule.wsd_decay_steps or max(1, schedule.decay_end // 10)


def decay(style: str, progress: float) -> float:
    """Fraction of the learning rate left after the fraction `progress` of the decay."""
    if style == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    if style == "exponential":
        return 2 * 0.5**progress - 1
    if style == "minus-sqrt":
        return 1 - math.sqrt(progress)
    return 1 - progress


def _progress(step: int, begin: int, end: int) -> float:
    return 1.0 if step >= end else max(0, step - begin) / (end - begin)


def _uniform(seed: int, step: int, samples: Sequence[int], length: int) -> torch.Tensor:
    """[B, L, L] uniform on [0, 1), fp32, keyed by (seed, step, global sample index)."""
    values = np.empty((len(samples), length, length), dtype=np.float32)
    for row, sample in zip(values, samples, strict=True):
        keyed_generator(seed, Purpose.MASK_ANNEALING, step, sample).random(out=row, dtype=np.float32)
    return torch.from_numpy(values)
