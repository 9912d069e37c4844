"""A run of the Megatron engine, from its configuration to its last checkpoint.

`assemble` creates the parts in the order that megatron-core requires: process groups, configuration, layer spec, model
and weights (`parallel.parallelize`), wrapping, optimizer, schedule, fp32 main params.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console

from dlm_bridge.distributed import first_on_main, raised_everywhere
from dlm_bridge.errors import MissingExtraError, SettingError, printable
from dlm_bridge.loading.source import MegatronSource
from dlm_bridge.parallel import groups, mcore_compat, platform
from dlm_bridge.parallel.core import get_megatron_optimizer, named_refusals, parallel_state
from dlm_bridge.parallel.lora import LiveFactor
from dlm_bridge.parallel.mcore_patches.fsdp import filled_when_sharded, located_at_once, patch_unshared_gradients
from dlm_bridge.parallel.mcore_patches.optimizers import patch_optimizer
from dlm_bridge.parallel.parallelize import build_megatron_model
from dlm_bridge.parallel.train import checkpoints, mcore_config
from dlm_bridge.parallel.train.lora import LoraRun
from dlm_bridge.parallel.train.muon import muon_optimizer
from dlm_bridge.parallel.train.schedule import connect_schedule
from dlm_bridge.parallel.train.settings import check_settings
from dlm_bridge.parallel.train.trainer import MegatronTrainer
from dlm_bridge.parallel.weights import load_main_params
from dlm_bridge.terminal import loading
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.lora import with_lora
from dlm_bridge.train.output import RunEnd
from dlm_bridge.train.schedule import with_steps
from dlm_bridge.train.setup import (
    Config,
    RunStart,
    check_data,
    load_data,
    open_megatron_source,
    resolve_objective,
    start_run,
    training_errors,
    with_precision,
    with_seq_length,
    write_config,
)

if TYPE_CHECKING:
    from dlm_bridge.parallel.train.local_checkpoints import LocalCheckpoints

T = TypeVar("T")


@training_errors
def train(config: TrainConfig, resume: bool = False, console: Console | None = None) -> RunEnd:
    """Train until `config.schedule.steps`, a SIGTERM or `exit_duration`.

    With `resume` the run continues from its newest checkpoint, or from the start if it has none, at the layout of
    `config`. Every process of the launcher calls it. Raises DlmBridgeError.
    """
    console = console or Console(stderr=True, markup=False)
    config, start = begin_run(config, resume, console)
    if start.finished is not None:
        return start.finished
    main = dist.get_rank() == 0
    step, local = start.step, None
    if config.checkpoint.local_folder is not None:
        from dlm_bridge.parallel.train.local_checkpoints import LocalCheckpoints

        local = LocalCheckpoints(config)
    if local is not None and resume:
        step = local.find(start.step, start.checkpoint, console)
    trainer = assemble(config, console, start.checkpoint, step, local)
    with raised_everywhere():
        if local is not None:
            local.begin()
        if main:
            if local is None and (start.output / checkpoints.LOCAL_RECORD).is_file():
                from dlm_bridge.parallel.train.local_checkpoints import go_on_without

                go_on_without(start.output, console)
            if start.checkpoint is None:
                trainer.write_shared_files()
            checkpoints.remove_leftovers(start.output)
            write_config(trainer.config, start.output)
    trainer.announce(step, f", {describe_layout(config)}")
    return trainer.run(step)


def begin_run(config: Config, resume: bool, console: Console) -> tuple[Config, RunStart]:
    """Check the options, join the other processes, and determine where the run starts (see `start_run`). Every process
    calls it. Raises DlmBridgeError."""
    untested = check_settings(config)
    mcore_config.check_mcore_config(config)
    initialize_parallel(config)
    main = dist.get_rank() == 0
    for line in untested if main else ():
        console.print(printable(line), highlight=False, soft_wrap=True)
    return start_run(config, resume, main, console, checkpoints.resume_point)


def assemble(
    config: TrainConfig,
    console: Console,
    checkpoint: Path | None = None,
    step: int = 0,
    local: LocalCheckpoints | None = None,
) -> MegatronTrainer:
    """Create a run's model, optimizer, objective and data as they are after `step`. Nothing is written. Every process
    calls it.

    Args:
        checkpoint: folder to resume from; None to start from the model.
        step: of the checkpoint.
        local: local checkpoints; if one was found, it is loaded instead.

    Raises DlmBridgeError.
    """
    config = with_precision(config)
    check_data(config)
    mcore_config.check_mcore_config(config)

    # Process groups.
    initialize_parallel(config)

    # Model source, objective and data.
    source = open_megatron_source(config, checkpoint)
    config, objective = resolve_objective(config, source.model, step)
    config = with_lora(config, source.model)
    config = first_on_main(lambda: with_seq_length(config, source.model, objective.mask_token))
    adapter = LoraRun.of(config, source, checkpoint)
    mcore_config.check_sizes(config, objective)
    mcore_config.check_cuda_graphs(config, objective, source.bridge.family.attention_pattern)

    # Configuration of megatron-core, and the buffers that layers look up.
    overrides = mcore_config.transformer_overrides(config, source.bridge, objective)
    if config.parallel.tp_overlap:
        initialize_userbuffers(config, source.bridge.dims.hidden, objective.tokens_read, overrides)

    # The main process reads and packs the data, the others read its cache.
    data = first_on_main(lambda: load_data(config, source.model, objective.mask_token))
    config = with_steps(config, len(data[0]))

    wrapped, optimizer, factors = build_trained_model(config, source, overrides, checkpoint, adapter)
    trainer = MegatronTrainer(config, source, wrapped, optimizer, objective, data, console, local, adapter, factors)
    if local is not None and local.step is not None:
        trainer.load_local_checkpoint()
    elif checkpoint is not None:
        trainer.load_checkpoint(checkpoint)
    return trainer


def build_trained_model(
    config: TrainConfig,
    source: MegatronSource,
    overrides: dict[str, Any],
    checkpoint: Path | None = None,
    adapter: LoraRun | None = None,
    value_head: bool = False,
) -> tuple[list[Any], Any, list[list[LiveFactor]] | None]:
    """Build and load this rank's part of a model.

    Args:
        source: the weights.
        overrides: fields of megatron-core's TransformerConfig.
        checkpoint: from which the run resumes; weights that it sets are not loaded twice.
        adapter: to train instead of the weights.
        value_head: as in `build_megatron_model`.

    Returns this rank's chunks, wrapped for data parallelism, their optimizer, and the adapter's factors by chunk.
    Raises as `build_megatron_model`, and SettingError or MissingExtraError for a configuration that megatron-core
    refuses.
    """
    dtype = mcore_config.DTYPES[config.precision.precision]
    with named_refusals(AssertionError, ImportError):  # also for NVTE_... variables
        # Layer spec, model and weights.
        load_weights = checkpoint is None or adapter is not None or not checkpoint_sets_all_weights(config)
        weights, layout, context = source.bridge.checkpoint, config.parallel.layout, config.parallel.context
        # Layers that FSDP shards one by one: no GPU ever holds them all.
        unallocated = config.parallel.fsdp == "optim_grads_params" and not config.precision.fp8_params
        with loading(config.model.model):
            chunks = build_megatron_model(
                weights, layout, dtype, context, load_weights, unallocated, value_head, **overrides
            )
        factors = None if adapter is None else adapter.add(chunks)
        # Wrapping, optimizer, schedule.
        wrapped = wrap_chunks(chunks, config)
        optimizer = build_optimizer(wrapped, config, source)
        connect_schedule(wrapped, optimizer)
    # fp32 main params start from the stored weights, not from the rounded params.
    if checkpoint is None and dtype != torch.float32:
        load_main_params(wrapped, optimizer, weights)
    return wrapped, optimizer, factors


def initialize_parallel(config: TrainConfig) -> None:
    """Join the process groups of a run's layout. Raises LayoutError or SettingError if sizes do not fit."""
    mcore_config.check_sequence(config)
    parallel, graphs = config.parallel, config.engine.cuda_graphs
    instances = parallel.optimizer_instances
    groups.initialize(parallel.layout, config.data.seed, parallel.context, graphs, instances)
    parallel.layout.check_optimizer_instances(instances, dist.get_world_size(), parallel.fsdp is not None)
    config.check_batch(parallel_state.get_data_parallel_world_size())


def initialize_userbuffers(config: TrainConfig, hidden_size: int, tokens_read: int, overrides: dict[str, Any]) -> None:
    """Create Transformer Engine's userbuffers for a run's micro-batches; `overrides` as in `build_trained_model`.
    Raises MissingExtraError."""
    parallel = config.parallel
    micro, _ = config.data.accumulation(parallel_state.get_data_parallel_world_size())
    groups.make_userbuffers(
        micro * tokens_read * config.data.seq_length // parallel.cp,
        hidden_size,
        parallel.tp,
        fp8=config.precision.precision == "fp8",
        mixed=bool(overrides.get("first_last_layers_bf16")),
        backend=overrides["tp_comm_bootstrap_backend"],
    )


def wrap_chunks(chunks: Sequence[Any], config: TrainConfig) -> list[Any]:
    """Wrap the model's chunks in megatron-core's DDP or FSDP, in training mode."""
    wrap, wrapped = _data_parallel(config), []
    for number, chunk in enumerate(chunks):
        # Buckets only for the first chunk, whose communication is on the critical path of an interleaved pipeline.
        ddp_config = mcore_config.data_parallel_config(config)
        with (
            nullcontext() if config.parallel.fsdp is None else located_at_once(),
            nullcontext() if chunk.absent is None else filled_when_sharded(chunk.absent.fill),
        ):
            wrapped.append(wrap(chunk, ddp_config, number > 0).train())
        assert chunk.absent is None or not chunk.absent.loads, "a parameter that FSDP has not sharded"
        chunk.absent = None
        if config.parallel.fsdp is not None:
            patch_unshared_gradients(wrapped[-1].module)
    return wrapped


def build_optimizer(chunks: Sequence[Any], config: TrainConfig, source: MegatronSource) -> Any:
    """megatron-core's optimizer for wrapped chunks. The learning rate is set before every step. Raises SettingError if
    megatron-core cannot offload the weights."""
    if config.optimizer.optimizer_cpu_offload:
        for name, parameter in itertools.chain(*(chunk.named_parameters() for chunk in chunks)):
            if parameter.dtype == torch.float32:  # as routers may be
                raise SettingError(
                    "optimizer_cpu_offload", f"megatron-core cannot offload fp32 weights such as {name}: unset it"
                )
    # Its weight decay rule is ours: biases and 1-D parameters do not decay.
    settings = mcore_config.optimizer_config(config)
    if config.optimizer.optimizer == "muon":
        optimizer = muon_optimizer(settings, chunks, source, config.optimizer.muon_momentum)
    else:
        optimizer = get_megatron_optimizer(settings, list(chunks))
    patch_optimizer(optimizer)
    return optimizer


def checkpoint_sets_all_weights(config: TrainConfig) -> bool:
    """True if a resume sets every weight and main param from the checkpoint. FSDP's buffers, the precision-aware
    optimizer and FP8 weights are initialised from the model's weights."""
    inside = mcore_config.optimizer_config(config).use_precision_aware_optimizer
    return config.parallel.fsdp is None and not config.precision.fp8_params and not inside


def describe_layout(config: TrainConfig) -> str:
    """Format the layout of a run, such as "tp 2 x dp 4"."""
    sizes = {name: getattr(config.parallel, name) for name in ("tp", "pp", "vp", "cp", "ep")}
    sizes["dp"] = parallel_state.get_data_parallel_world_size()
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process"


def _data_parallel(config: TrainConfig) -> Callable[[Any, Any, bool], Any]:
    """Function that wraps a chunk, given its configuration and whether bucketing is disabled."""
    fsdp = config.parallel.fsdp
    if fsdp is None:
        return mcore_compat.data_parallel
    if platform.current().name == "cpu":
        raise MissingExtraError("fsdp", f"{fsdp} needs a GPU: unset it")
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    return lambda chunk, ddp, unbucketed: FullyShardedDataParallel(
        chunk.config, ddp, chunk, disable_bucketing=unbucketed
    )
