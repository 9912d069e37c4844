"""Dry run of distillation: that of fine-tuning, with the checks of the parent and the memory of its weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.generation.batch_size import plan_batch
from dlm_bridge.loading.source import ModelSource
from dlm_bridge.plan.dry_run import DryRun, RolloutMemory, checked_start, dry_run, world_size
from dlm_bridge.plan.views import memory_text
from dlm_bridge.train.distill.config import DistillConfig
from dlm_bridge.train.distill.trainer import check_model, check_parent_length, parent_source, read_prompts
from dlm_bridge.train.setup import check_data, empty_model, resolve_objective, with_precision


def distill_dry_run(config: DistillConfig, gpus: int | None = None, resume: bool = False) -> DryRun:
    """Dry run of distillation, see `plan.dry_run.dry_run`. Tokenizers and prompts of local models are read; those of
    Hub ids are checked when the run starts."""
    config = with_precision(config.replace(eos_padding="none"), resume, gpu=True if gpus is not None else None)
    gpus = world_size(gpus)
    point, _ = checked_start(config, resume)
    check_data(config, load=False)
    model = empty_model(config, point.folder)
    resolved, objective = resolve_objective(config, model, point.step)
    check_model(resolved, model, objective)
    local = Path(config.model.tokenizer or config.model.model).is_dir()
    source = None
    if local and Path(config.distill.parent or ".").is_dir():
        source = parent_source(config, model)
    if config.distill.on_policy and not config.data.seq_length and local:
        config = config.replace(seq_length=read_prompts(resolved, model, objective.mask_token)[0].data.seq_length)
    planned = dry_run(config, gpus, resume)
    config = config.replace(seq_length=planned.config.data.seq_length)
    if source is not None:
        check_parent_length(config, source)
    return dataclasses.replace(
        planned,
        rollouts=_rollouts(config, model) if config.distill.on_policy else None,
        notes=(_uncounted(planned, config, source, model), *planned.notes),
    )


def _uncounted(planned: DryRun, config: DistillConfig, source: ModelSource | None, model: Any) -> str:
    """Note on what the memory plan, which is that of fine-tuning, leaves out."""
    positions = planned.micro_batch_size * config.data.seq_length
    logits = memory_text(4 * positions * model.get_input_embeddings().weight.shape[0])
    parent = "no second model is loaded"
    if config.distill.parent is not None:
        parent = "the parent is loaded too"
        if source is not None:
            shards = planned.gpus // config.parallel.fsdp_replicas if config.parallel.shards else 1
            weights = sum(weight.numel() * weight.element_size() for weight in source.empty().parameters())
            parent = f"the parent's weights take another {memory_text(weights // shards)} per device"
    return (
        f"{parent}; not counted: the logits of the masked positions, of the model and the parent, each up to {logits} "
        "in fp32"
    )


def _rollouts(config: DistillConfig, model: Any) -> RolloutMemory:
    options = config.distill
    dtype = torch.float32 if config.precision.precision == "fp32" else torch.bfloat16
    row = plan_batch(
        model.to(dtype),
        [max(1, config.data.seq_length - options.gen_length)],
        {"gen_length": options.gen_length, **options.sampler},
        diffusion=True,
        device=torch.device("meta"),  # whose attention, as a GPU's, stores no scores
    )
    return RolloutMemory(weights=0, row=row.cache + row.activations + row.logits, reference=0, value_model=0)
