"""The learning rate and the batch size over the steps of a run: pure functions, so that a resume needs no state.

Every schedule warms up linearly to `--lr`. Those that decay end at `--min-lr` with the last step; `wsd` (warm-up,
stable, decay) keeps the rate until its last steps, so that a run can be prolonged from a checkpoint before them. The
formulas are those of megatron-core's `OptimizerParamScheduler`, and of its ramp-up of the batch size.
"""

from __future__ import annotations

import math

from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.config.sections import ScheduleOptions
from dlm_bridge.train.data.loader import BatchSampler


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of `step`, which counts from 1."""
    schedule, peak = config.schedule, config.optimizer.lr
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.name == "inverse-square-root":
        return max(schedule.min_lr, peak * math.sqrt(max(1, schedule.warmup_steps) / step))
    return schedule.min_lr + (peak - schedule.min_lr) * _remaining(schedule, step)


def batch_sampler(config: TrainConfig) -> BatchSampler:
    """Which samples each step reads, with `--batch-ramp-up` fewer in the first steps."""
    return BatchSampler(config.data.batch_sizes, config.data.samples_per_size)


def _remaining(schedule: ScheduleOptions, step: int) -> float:
    """The part of the way from the least to the peak rate that is left at a step after the warm-up: from 1 to 0."""
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "wsd":
        begin = max(schedule.warmup_steps, schedule.steps - decay_steps(schedule))
        return decay(schedule.wsd_decay_style, _progress(step, begin, schedule.steps))
    return decay(schedule.name, _progress(step, schedule.warmup_steps, schedule.steps))


def decay_steps(schedule: ScheduleOptions) -> int:
    """The last steps of a wsd schedule, in which it decays."""
    return schedule.wsd_decay_steps or max(1, schedule.steps // 10)


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
    return min(1.0, max(0, step - begin) / (end - begin))
