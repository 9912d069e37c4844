"""What depends on the step of a run: learning rate, batch size, mask annealing, block size.

All are pure functions of the step, so that a resume needs no state and continues them, whatever the number of
micro-batches and processes. Every learning rate warms up linearly to `--lr`. Schedules that decay end at `--min-lr`
with the last step, or with `--lr-decay-steps`; `wsd` (warm-up, stable, decay) keeps the rate until its last steps, so
that a run can be prolonged from a checkpoint before them. The formulas are those of megatron-core's
`OptimizerParamScheduler`, and of its ramp-up of the batch size. Mask annealing and the block schedule adapt the
attention of an autoregressive model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dlm_bridge.data.loader import BatchSampler
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.families import FamilySpec
from dlm_bridge.objectives.base import Objective
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.objectives.noise import Purpose, keyed_generator
from dlm_bridge.objectives.registry import find_objective, objectives
from dlm_bridge.settings import options_of
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.config.sections import ScheduleOptions


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of `step`, which counts from 1."""
    schedule, peak = config.schedule, config.optimizer.lr
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.lr_schedule == "inverse-square-root":
        return max(schedule.min_lr, peak * math.sqrt(max(1, schedule.warmup_steps) / step))
    return schedule.min_lr + (peak - schedule.min_lr) * _remaining(schedule, step)


def learning_rate_jump(before: TrainConfig, now: TrainConfig, step: int) -> str | None:
    """What is said of a resume after `step` whose options change the learning rate that the run's own, `before`, give
    the next step; None where they do not."""
    was, will_be = learning_rate(before, step + 1), learning_rate(now, step + 1)
    if math.isclose(was, will_be, rel_tol=1e-6):
        return None
    flags, options = (before.as_flags(), now.as_flags()), options_of(type(now))
    rated = [key for key, option in options.items() if option.section == "schedule" or key == "lr"]
    changed = ", ".join(
        f"{options[key].flag} {flags[1][key]} (was {flags[0][key]})" for key in rated if flags[0][key] != flags[1][key]
    )
    end = before.schedule.decay_end
    remedy = f": --lr-decay-steps {end} keeps the run's decay" if end != now.schedule.decay_end else ""
    return f"the learning rate of step {step + 1} jumps from {was:.3g} to {will_be:.3g} by {changed}{remedy}"


def batch_sampler(config: TrainConfig) -> BatchSampler:
    """Which samples each step reads, with `--batch-ramp-up` fewer in the first steps."""
    return BatchSampler(config.data.batch_sizes, config.data.samples_per_size)


def open_probability(step: int, annealing_steps: int) -> float:
    """The probability that a pair (query, later key) is open at a step, counted from 1: 0 at the first step, growing
    linearly to 1 after `annealing_steps` of them (DiffuLLaMA, arXiv 2410.17891, section 3.2)."""
    return 1.0 if annealing_steps == 0 else min(1.0, (step - 1) / annealing_steps)


def anneal_mask(noisy: NoisyBatch, config: TrainConfig, step: int, samples: Sequence[int]) -> NoisyBatch:
    """The batch with the attention of its step, as `pairs`: causal plus random later keys with `open_probability`,
    drawn for each global sample index and step. `noisy` has one stream, a row for each of `samples`."""
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
        # Padding attends to itself, so that no row of a softmax is empty.
        own_LL = torch.eye(length, dtype=torch.bool, device=device)
        allowed_BLL = (allowed_BLL & noisy.attention_mask[:, None, :]) | own_LL
    return dataclasses.replace(noisy, pairs=allowed_BLL[:, None])


def with_block_size(objective: Objective, model: Any, config: TrainConfig, step: int) -> Objective:
    """The objective `at_step`, and the same block size in the model's config: a checkpoint has the last one."""
    size = scheduled_block_size(config, step)
    if size is not None:
        model.config.block_size = size
    return at_step(objective, config, step)


def at_step(objective: Objective, config: TrainConfig, step: int) -> Objective:
    """The objective with the block size of a step."""
    size = scheduled_block_size(config, step)
    # `check_adaptation` requires a two-stream objective where there is a schedule.
    return objective if size is None else dataclasses.replace(objective, block_size=size)  # type: ignore[call-arg]


def scheduled_block_size(config: TrainConfig, step: int) -> int | None:
    """The block size of `--block-schedule` at a step, counted from 1; None without a schedule."""
    sizes = [size for start, size in config.objective.block_sizes if start <= step]
    return sizes[-1] if sizes else None


def check_adaptation(config: TrainConfig, family: FamilySpec) -> None:
    """Raise DlmBridgeError where the objective or the family does not support a schedule."""
    name = str(config.objective.objective)
    kind = find_objective(name).kind
    if kind.answer_blocks:
        _check_canvases(config, family)
    if kind.resizes:
        _check_resizing(config)
    if kind.trajectories and config.task != "sft":
        raise DlmBridgeError(f"--objective {name}: trajectories are recorded of answers: train it with dlm-bridge sft")
    if config.objective.block_sizes and kind.streams == 1:
        known = ", ".join(other for other, spec in objectives().items() if spec.kind.streams == 2)
        raise DlmBridgeError(f"--block-schedule: objective '{name}' has no blocks: objectives with blocks are {known}")
    if not config.objective.mask_annealing_steps:
        return
    flag = f"--mask-annealing-steps {config.objective.mask_annealing_steps}"
    if kind.streams == 2:
        raise DlmBridgeError(f"{flag}: objective '{name}' has its own mask of two streams: use --block-schedule")
    if family.attention_pattern != "bidirectional":
        raise DlmBridgeError(f"{flag}: {family.title} is {family.attention_pattern}, not bidirectional: leave it out")


def _check_canvases(config: TrainConfig, family: FamilySpec) -> None:
    refused = {
        "--packing": config.data.packing,
        "--document-attention": config.data.document_attention,
        "--block-schedule": bool(config.objective.block_sizes),
    }
    for flag, given in refused.items():
        if given:
            raise DlmBridgeError(
                f"{flag}: {family.title}'s canvases are cut from the one answer of a row, and have the length of its "
                "config: leave it out"
            )


def _check_resizing(config: TrainConfig) -> None:
    refused = {
        "--packing": (config.data.packing, "rows hold one text each, with room to grow"),
        "--document-attention": (config.data.document_attention, "rows hold one text each, with room to grow"),
        f"--eos-padding {config.data.eos_padding}": (
            config.data.eos_padding not in (None, "none"),
            "the end of text is the token that deletes a mask",
        ),
    }
    for flag, (given, why) in refused.items():
        if given:
            raise DlmBridgeError(f"{flag}: objective '{config.objective.objective}': {why}: leave it out")


def _remaining(schedule: ScheduleOptions, step: int) -> float:
    """The part of the way from the least to the peak rate that is left at a step after the warm-up: from 1 to 0."""
    if schedule.lr_schedule == "constant":
        return 1.0
    if schedule.lr_schedule == "wsd":
        begin = max(schedule.warmup_steps, schedule.decay_end - decay_steps(schedule))
        return decay(schedule.wsd_decay_style, _progress(step, begin, schedule.decay_end))
    return decay(schedule.lr_schedule, _progress(step, schedule.warmup_steps, schedule.decay_end))


def decay_steps(schedule: ScheduleOptions) -> int:
    """The last steps of a wsd schedule, in which it decays."""
    return schedule.wsd_decay_steps or max(1, schedule.decay_end // 10)


def decay(style: str, progress: float) -> float:
    """What a style of decay leaves after `progress` of its steps, both from 0 to 1."""
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
