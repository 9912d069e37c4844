"""Dry run of reinforcement learning: its settings, data and layout, the memory of its updates and of sampling."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.errors import SettingError
from dlm_bridge.generation.batch_size import plan_batch
from dlm_bridge.loading.pretrained import model_family
from dlm_bridge.objectives.registry import own_objective
from dlm_bridge.plan.dry_run import (
    DEVICE,
    HUB,
    DryRun,
    RolloutMemory,
    checked_start,
    data_sources,
    memory_of,
    parallel_groups,
    world_size,
)
from dlm_bridge.plan.memory import MemoryPlan
from dlm_bridge.plan.run import PlannedRun, run_of
from dlm_bridge.train.config import RLConfig
from dlm_bridge.train.config.reinforcement import AUTOREGRESSIVE, SAMPLED
from dlm_bridge.train.lora import with_lora
from dlm_bridge.train.rl.methods import check_model, check_settings
from dlm_bridge.train.rl.replica import check_divides, check_split
from dlm_bridge.train.rl.rewards import REWARDS
from dlm_bridge.train.rl.rows import find_rows
from dlm_bridge.train.setup import empty_model, with_precision

UNCOUNTED = (
    "rewards run on the CPU; the memory plan covers the updates, the reference and value models are counted with the "
    "rollouts"
)


def rl_dry_run(config: RLConfig, gpus: int | None = None, resume: bool = False) -> DryRun:
    """Dry run of reinforcement learning, see `plan.dry_run.dry_run`. Rewards are not started, and rows not read."""
    config = with_precision(config, resume, gpu=True if gpus is not None else None)
    gpus = world_size(gpus)
    point, notes = checked_start(config, resume)
    found = find_rows(config.data.data, load=False)
    held_out = find_rows(config.rl.eval_data, "eval_data", load=False) if config.rl.eval_data else None
    _check_rewards(config)
    model = empty_model(config, point.folder)
    if on_hub := not Path(config.model.model).is_dir():
        check_settings(config, model)
    else:
        check_model(config, model)
    config = with_lora(config, model)
    groups = parallel_groups(config, gpus)
    replicas = next(group.size for group in groups if group.name == "dp")
    config.check_batch(replicas)
    if config.rl.method in SAMPLED:
        _check_rollout_tp(config, model, gpus)
    each = config.data.global_batch_size // replicas
    micro_batch_size = min(config.data.micro_batch_size or each, each)
    run = _planned(config, model, gpus, replicas, micro_batch_size)
    memory, more = memory_of(config, run, point.folder)
    return DryRun(
        config=config,
        gpus=gpus,
        groups=groups,
        micro_batch_size=micro_batch_size,
        micro_batches=-(-each // micro_batch_size),
        tokens_per_step=config.data.global_batch_size * config.data.seq_length,
        step=point.step,
        data=(*data_sources(found), *([] if held_out is None else data_sources(held_out, validation=True))),
        memory=memory,
        rollouts=_rollouts(config, model, memory, gpus) if config.rl.method in SAMPLED else None,
        notes=(*notes, *more, UNCOUNTED, *([HUB] if on_hub else []), DEVICE),
    )


def _check_rewards(config: RLConfig) -> None:
    """Raise SettingError for a reward in a missing file; other rewards are checked when the run starts."""
    for name in config.rl.reward:
        path, found, _ = name.rpartition("*")[2].partition(".py:")
        if found and name not in REWARDS and not Path(f"{path}.py").is_file():
            raise SettingError("reward", f"{name}: {path}.py does not exist")


def _check_rollout_tp(config: RLConfig, model: Any, gpus: int) -> None:
    """Check that `rollout_tp` divides the processes and the model."""
    size = config.rl.rollout_tp
    check_divides(size, gpus)
    if size > 1:
        check_split(model, size)


def _planned(config: RLConfig, model: Any, gpus: int, replicas: int, rows: int) -> PlannedRun:
    """Planned run of an update's forward passes, whose micro-batches may have different sizes."""
    options = config.rl
    objective = "causal"
    if options.method not in AUTOREGRESSIVE:
        family = model_family(model)
        assert family is not None, "check_settings has refused a model of no family"
        objective = own_objective(model.config, family)
        if options.method == "diffu-grpo":  # on the noisy tokens alone
            objective = "shifted" if family.shift else "masked"
    if options.method not in SAMPLED:
        rows *= 2 * (options.elbo_levels * options.elbo_masks if options.method == "vrpo" else 1)
    batch = rows * replicas * -(-config.data.global_batch_size // (rows * replicas))
    run = run_of(config, objective, gpus)
    logits = config.engine.engine == "accelerate"  # of all positions with a loss at once
    return dataclasses.replace(run, micro_batch_size=rows, global_batch_size=batch, all_logits=logits)


def _rollouts(config: RLConfig, model: Any, memory: MemoryPlan | None, gpus: int) -> RolloutMemory:
    options, megatron = config.rl, config.engine.engine == "megatron"
    dtype = torch.float32 if config.precision.precision == "fp32" else torch.bfloat16
    count = sum(weight.numel() for weight in model.parameters())
    copied = megatron or config.parallel.shards
    new = "max_new_tokens" if options.method in AUTOREGRESSIVE else "gen_length"
    row = plan_batch(
        model.to(dtype),
        [config.data.seq_length - options.gen_length],
        {new: options.gen_length, **options.sampler},
        diffusion=options.method not in AUTOREGRESSIVE,
        device=torch.device("meta"),  # whose attention, as a GPU's, stores no scores
    )
    reference = value_model = 0
    shards = gpus // config.parallel.fsdp_replicas if config.parallel.shards else 1
    if options.has_reference and not config.model.lora_rank:
        held = count if memory is None else memory.peak.held
        reference = held * dtype.itemsize if megatron else count * 4 // shards
    if options.value_model:  # as the policy, of which it has all but the output layer
        peak = None if memory is None else memory.peak
        value_model = 16 * count // shards if peak is None else peak.weights + peak.gradients + peak.optimizer
    return RolloutMemory(
        weights=count * dtype.itemsize // options.rollout_tp if copied else 0,
        row=row.cache // options.rollout_tp + row.activations + row.logits,
        reference=reference,
        value_model=value_model,
    )
