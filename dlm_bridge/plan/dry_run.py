"""Dry run of training: resolved settings, layout, data and memory, with every check that needs no GPU."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlm_bridge import distributed
from dlm_bridge.data.documents import NamedDataset, check_tokenizer
from dlm_bridge.data.indexed import IndexedTokens, TokenLimits, check_token_limits
from dlm_bridge.data.sources import DataSources
from dlm_bridge.errors import DlmBridgeError, SettingError
from dlm_bridge.loading.pretrained import check_exists
from dlm_bridge.objectives.base import Objective
from dlm_bridge.plan.memory import MemoryPlan, engine_notes, memory_plan
from dlm_bridge.plan.model import PlannedModel, open_model
from dlm_bridge.plan.run import PlannedRun, accelerate_run, run_of
from dlm_bridge.settings import check_minimum
from dlm_bridge.train.checkpoints import ResumePoint
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.engine import find_engine
from dlm_bridge.train.lora import with_lora
from dlm_bridge.train.output import check_output
from dlm_bridge.train.schedule import with_steps
from dlm_bridge.train.setup import (
    BLOCK_LENGTH,
    check_data,
    context_length,
    empty_model,
    load_tokenizer,
    model_source,
    resolve_objective,
    with_precision,
    with_seq_length,
)

ADAPTER = "no memory plan: it covers neither quantized base models nor adapters that are continued"
UNPLANNED = "no memory plan: it covers the models that megatron-core can compute"
AVERAGED = "the moving average (`ema_decay`) is not counted: 4 bytes per parameter, sharded like the optimizer state"
HUB = "only the config of the Hub id was read: its weights and tokenizer are checked when the run starts"
DEVICE = "settings that need a GPU or Transformer Engine are checked when the run starts"


@dataclass(frozen=True)
class ParallelGroup:
    """One dimension of the layout."""

    name: str
    size: int
    ranks: tuple[int, ...]  # of rank 0's group


@dataclass(frozen=True)
class DataSource:
    """One source of training data: token ids, text of `nbytes` bytes, or a source of unknown size."""

    name: str
    weight: float | None
    tokens: int | None
    nbytes: int | None
    validation: bool = False  # a source of `valid_data`


@dataclass(frozen=True)
class RolloutMemory:
    """Memory of sampling in reinforcement learning, on each device beside the training state, in bytes."""

    weights: int  # of the model to sample from; 0 where that is the trained one
    row: int  # of a row at its full length: KV cache, activations, logits
    reference: int  # the reference model, which stays
    value_model: int  # a second trained model with its gradients and optimizer


@dataclass(frozen=True)
class DryRun:
    """A run before it starts; in `config`, settings that depend on the model are resolved."""

    config: TrainConfig
    gpus: int
    groups: tuple[ParallelGroup, ...]
    micro_batch_size: int
    micro_batches: int
    tokens_per_step: int
    step: int  # of the checkpoint that a resume loads, 0 for a new run
    data: tuple[DataSource, ...]
    memory: MemoryPlan | None
    notes: tuple[str, ...]
    rollouts: RolloutMemory | None = None  # of reinforcement learning on sampled completions

    def as_dict(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {
            "config": self.config.as_flags(),
            "gpus": self.gpus,
            "layout": [dataclasses.asdict(group) for group in self.groups],
            "micro_batch_size": self.micro_batch_size,
            "micro_batches": self.micro_batches,
            "tokens_per_step": self.tokens_per_step,
            "resumes_from_step": self.step,
            "data": [dataclasses.asdict(source) for source in self.data],
            "memory": None if self.memory is None else self.memory.as_dict(),
            "rollouts": None if self.rollouts is None else dataclasses.asdict(self.rollouts),
            "notes": list(self.notes),
        }


def dry_run(config: TrainConfig, gpus: int | None = None, resume: bool = False) -> DryRun:
    """Plan the run of `config` on `gpus` devices (default: the launcher's WORLD_SIZE).

    Reads metadata only, and conversations if `seq_length` follows from them; writes nothing and uses no device. Raises
    the errors of the run that metadata shows: a layout that does not divide the model or the devices, missing or
    damaged data, a tokenizer that does not fit the model, an output folder with another run, a setting that
    megatron-core does not support.
    """
    config = with_precision(config, resume, gpu=True if gpus is not None else None)
    gpus = world_size(gpus)
    point, notes = checked_start(config, resume)
    step, checkpoint = point.step, point.folder
    found = check_data(config, load=False)
    model = empty_model(config, checkpoint)
    config, objective = resolve_objective(config, model, step)
    config, undecided = _with_seq_length(config, model, objective, found)
    config = with_lora(config, model)
    if config.schedule.tokens is not None:
        config = with_steps(config)
    _check_tokens(config, found, model, objective.mask_token)
    config.data.accumulation(gpus if config.engine.engine == "accelerate" else 1)
    memory, more = memory_of(config, run_of(config, str(config.objective.objective), gpus), checkpoint, objective)
    groups = parallel_groups(config, gpus)
    replicas = next(group.size for group in groups if group.name == "dp")
    micro_batch_size, micro_batches = config.data.accumulation(replicas)
    return DryRun(
        config=config,
        gpus=gpus,
        groups=groups,
        micro_batch_size=micro_batch_size,
        micro_batches=micro_batches,
        tokens_per_step=config.data.global_batch_size * config.data.seq_length,
        step=step,
        data=(*data_sources(found), *([] if found.valid is None else data_sources(found.valid, validation=True))),
        memory=memory,
        notes=(*notes, *more, *undecided, *([] if Path(config.model.model).is_dir() else [HUB]), DEVICE),
    )


def _with_seq_length(
    config: TrainConfig, model: Any, objective: Objective, found: DataSources
) -> tuple[TrainConfig, list[str]]:
    """Replace a sequence length of 0 as the run does; if the data or the tokenizer are on the Hub, by a length to plan
    with, and a note."""
    local = Path(config.model.tokenizer or config.model.model).is_dir()
    read = all(
        not isinstance(source, NamedDataset) or source.rows is not None for part in found.all_parts for source in part
    )
    if config.task != "sft" or config.data.seq_length or (local and read):
        return with_seq_length(config, model, objective.mask_token, found), []
    length = min(context_length(model) or BLOCK_LENGTH, BLOCK_LENGTH)
    return config.replace(seq_length=length), [
        f"`seq_length` follows from the data when the run starts: {length} is planned"
    ]


def checked_start(config: TrainConfig, resume: bool) -> tuple[ResumePoint, list[str]]:
    """The checkpoint that a run starts from, with notes. Checks the output folder and the engine's settings."""
    check_output(Path(config.checkpoint.output), resume)
    engine = find_engine(config.engine.engine)
    untested = engine.check_settings(config)
    point = engine.find_checkpoint(config) if resume else ResumePoint()
    return point, [*untested, *point.notes]


def world_size(gpus: int | None) -> int:
    """Number of processes: the launcher's, else `gpus`, else 1. Raises SettingError if they differ."""
    if not distributed.launched():
        check_minimum("gpus", gpus)
        return gpus or 1
    launched = distributed.world_size()
    if gpus not in (None, launched):
        raise SettingError("gpus", f"{gpus} differs from the launcher's {launched} processes: omit it")
    return launched


def _check_tokens(config: TrainConfig, found: DataSources, model: Any, mask_token: int | None) -> None:
    """Check that the model has all token ids of the data and the tokenizer, and that the data was tokenised with the
    run's tokenizer."""
    tokenizer = None
    vocabulary = model.get_input_embeddings().weight.shape[0]
    for part in found.all_parts:
        for source in part:
            if isinstance(source, IndexedTokens):
                check_token_limits(source, TokenLimits(vocabulary, mask_token))
    if config.model.tokenizer:
        check_exists(config.model.tokenizer)
    needs_tokenizer = config.task == "sft" or found.has_text or config.logging.sample_prompt
    if not Path(config.model.tokenizer or config.model.model).is_dir():
        return
    if needs_tokenizer:
        check_tokenizer(load_tokenizer(config), vocabulary, mask_token)
    if found.has_fingerprints:
        with contextlib.suppress(DlmBridgeError):  # a run on pairs alone needs no tokenizer
            tokenizer = load_tokenizer(config)
        if tokenizer is not None:
            found.check_fingerprints(tokenizer)


def memory_of(
    config: TrainConfig, run: PlannedRun, checkpoint: Path | None, objective: Objective | None = None
) -> tuple[MemoryPlan | None, list[str]]:
    """Memory plan of a run made by `run_of`, with notes. With `objective`, the engine's limits on its rows are checked
    too."""
    source = (
        config.model.model if checkpoint is None or config.engine.engine == "accelerate" else str(checkpoint.parent)
    )
    if config.engine.engine == "megatron":
        model = open_model(source, family=config.model.family)
        dims = dataclasses.replace(model.dims, mtp=model.left_out_mtp)
        find_engine(config.engine.engine).check_model(config, model.family, model.config, dims, objective)
        return _planned(model, run)
    if config.model.adapts:
        model_source(config).check_quantization()
        if config.model.lora_quantize or not config.model.lora_rank:
            return None, [ADAPTER]
    try:
        model = open_model(source, family=config.model.family)
    except DlmBridgeError as error:  # the accelerate engine also trains models that megatron-core lacks
        return None, [UNPLANNED if error.field == "engine" else f"no memory plan: {error}"]
    run = accelerate_run(
        run,
        config.parallel.shards,
        config.engine.gradient_checkpointing,
        config.parallel.fsdp_replicas,
        config.parallel.cpu_offload,
    )
    memory, notes = _planned(model, run)
    return memory, [AVERAGED, *notes] if config.optimizer.ema_decay else notes


def _planned(model: PlannedModel, run: PlannedRun) -> tuple[MemoryPlan | None, list[str]]:
    """Memory with notes; no plan for adapters in layers of unknown sizes."""
    try:
        return memory_plan(model, run), engine_notes(model, run)
    except SettingError as error:
        if error.field != "lora_targets":
            raise
        return None, [f"no memory plan: {error}"]


def parallel_groups(config: TrainConfig, gpus: int) -> tuple[ParallelGroup, ...]:
    """Each dimension with rank 0's group. megatron-core's rank order is tp-cp-dp-pp, and etp-ep-dp-pp for experts."""
    sizes, etp = config.parallel, config.parallel.expert_tp
    dp, expert_dp = gpus // (sizes.tp * sizes.cp * sizes.pp), gpus // (etp * sizes.ep * sizes.pp)
    orders: list[tuple[tuple[str, int], ...]] = []
    orders.append((("tp", sizes.tp), ("cp", sizes.cp), ("dp", dp), ("pp", sizes.pp)))
    if sizes.ep > 1 or sizes.etp is not None:
        orders.append((("etp", etp), ("ep", sizes.ep), ("expert dp", expert_dp)))
    groups = []
    for order in orders:
        stride = 1
        for name, size in order:
            groups.append(ParallelGroup(name, size, tuple(range(0, size * stride, stride))))
            stride *= size
    return tuple(groups)


def data_sources(found: DataSources, validation: bool = False) -> list[DataSource]:
    sources = []
    for number, part in enumerate(found.parts):
        weight = found.weights[number] if found.weights else None
        for source in part:
            if isinstance(source, IndexedTokens):
                sources.append(DataSource(source.prefix, weight, len(source.tokens), source.tokens.nbytes, validation))
            elif isinstance(source, Path):
                sources.append(DataSource(str(source), weight, None, source.stat().st_size, validation))
            else:
                name = source if isinstance(source, str) else source.name
                sources.append(DataSource(name, weight, None, None, validation))
    return sources
