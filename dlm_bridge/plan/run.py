"""The planned training run and its hardware: settings that decide memory and time, and their checks.

Constants that the memory and time models rest on, and that no formula gives, are in `Overheads` and in hardware.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from dlm_bridge.errors import LayoutError, SettingError
from dlm_bridge.mapping.layout import Layout
from dlm_bridge.objectives.registry import find_objective
from dlm_bridge.plan.model import PlannedModel
from dlm_bridge.settings import check_choice, check_minimum, check_option, comma_separated, options_of
from dlm_bridge.train.config import (
    TrainConfig,
    check_ep_overlap,
    check_instances,
    check_instances_of_experts,
    check_sequence_of_experts,
    check_userbuffers,
)
from dlm_bridge.train.config.sections import PRECISIONS, check_optimizer

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Overheads:
    """Memory of a process beyond the tensors that the formulas count.

    `reserved_share` is the caching allocator's fragmentation over the allocated peak; the CUDA context with loaded
    kernels and each NCCL communicator's buffers lie outside of the allocator. `expert_imbalance` is the most loaded
    rank's number of token copies over the mean, dropless and early in training. The engine's output layer computes the
    loss in chunks of `loss_chunk_bytes` of fp32 logits; `loss_chunk_copies` of them are alive at once (logits, their
    exponentials or gradients, and the bf16 product).
    """

    cuda_context: int = 600 * MIB
    nccl_group: int = 64 * MIB
    reserved_share: float = 0.03
    expert_imbalance: float = 1.25
    loss_chunk_bytes: int = 256 * MIB
    loss_chunk_copies: float = 2.5
    gradient_bytes: int = 4  # the engine reduces gradients in fp32


OVERHEADS = Overheads()

TRAINING_OPTIONS = (
    "seq_length", "micro_batch_size", "global_batch_size", "cp", "precision", "optimizer",
    "optimizer_instances", "fsdp", "recompute", "recompute_layers", "moe_dispatcher",
)  # fmt: skip
RECOMPUTE_MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")


@dataclass(frozen=True)
class PlannedRun:
    """Sizes are counts of ranks, `seq_length` tokens, batches sequences; names are those of the training options.

    `streams` is the number of copies of a sequence in the model's input (two for the two-stream block objective),
    `loss_share` the mean fraction of its positions that have a loss. With `all_logits` the logits of all positions
    exist at once, otherwise those of the positions with a loss, in chunks. With `own_shards` each
    process reads only its shards under FSDP, as in the Accelerate engine, and never has the whole model; with
    `cpu_offload` these are in the CPU's memory. With a `lora_rank` the weights are frozen and an adapter in
    `lora_targets` (default: the family's) is trained.
    """

    layout: Layout
    gpus: int
    seq_length: int
    cp: int = 1
    micro_batch_size: int = 1
    global_batch_size: int | None = None
    precision: str = "bf16"
    optimizer: str = "adamw"
    distributed_optimizer: bool = True
    optimizer_cpu_offload: bool = False
    optimizer_instances: int = 1
    fsdp: str | None = None
    sequence_parallel: bool | None = None
    recompute: str = "none"
    recompute_modules: tuple[str, ...] = ("core_attn",)
    recompute_layers: int | None = None  # of each stage, with full recomputation; all where None
    moe_dispatcher: str = "alltoall"
    tp_overlap: bool = False
    ep_overlap: bool = False
    gradient_bytes: int = field(default=OVERHEADS.gradient_bytes)
    streams: int = 1
    loss_share: float = 1.0
    all_logits: bool = False
    own_shards: bool = False
    cpu_offload: bool = False
    engine: str = "megatron"
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()

    @property
    def model_ranks(self) -> int:
        """Ranks of one replica of the dense part."""
        return self.layout.tp * self.layout.pp * self.cp

    @property
    def dp(self) -> int:
        """Data parallel size."""
        return self.gpus // self.model_ranks

    @property
    def expert_dp(self) -> int:
        """Data parallel size of the experts."""
        return self.gpus // (self.layout.pp * self.layout.ep * self.layout.expert_tp)

    @property
    def shards(self) -> tuple[int, int]:
        """Ranks that shard the optimizer's state, or what FSDP shards: of the dense part, and of experts."""
        instances = self.optimizer_instances
        return self.dp * self.cp // instances, self.expert_dp // instances

    @property
    def sharded_sequence(self) -> bool:
        """True with sequence parallelism, which is the default for `tp` above 1."""
        return self.layout.tp > 1 and self.sequence_parallel is not False

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step and rank; without a global batch, enough to hide most of the pipeline bubble."""
        if self.global_batch_size is None:
            return 8 * self.layout.pp if self.layout.pp > 1 else 1
        return self.global_batch_size // (self.micro_batch_size * self.dp)

    @property
    def batch(self) -> int:
        """Sequences per step."""
        return self.micro_batches * self.micro_batch_size * self.dp

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank, before tensor parallelism splits the sequence."""
        return self.micro_batch_size * self.streams * self.seq_length // self.cp

    def check(self, model: PlannedModel) -> None:
        """Raise SettingError or LayoutError for a run that megatron-core does not support."""
        self.check_values()
        self.check_layout(model)

    def check_layout(self, model: PlannedModel) -> None:
        """`check` of the numbers of ranks alone."""
        layout = self.layout
        model.cached(("takes", layout), lambda: check_layout(model, layout))
        for ranks, what in (
            (self.model_ranks, f"`tp={layout.tp}` x `pp={layout.pp}` x `cp={self.cp}`"),
            (layout.pp * layout.ep * layout.expert_tp, f"`pp={layout.pp}` x `ep={layout.ep}` x `etp`"),
        ):
            if self.gpus % ranks:
                raise LayoutError("gpus", f"{self.gpus} is not a multiple of {what} = {ranks} ranks")
        layout.check_optimizer_instances(self.optimizer_instances, self.gpus, self.fsdp is not None)
        if model.dims.experts:
            check_instances_of_experts(self.optimizer_instances, self.fsdp)
            check_sequence_of_experts(layout.tp, self.sharded_sequence)
        self._check_overlap(model)
        self._check_batch()
        if self.fsdp and layout.pp > 1:
            raise LayoutError("fsdp", f"{self.fsdp} excludes pipeline parallelism (`pp={layout.pp}`)")

    def check_values(self) -> None:
        """`check` of each setting alone, as the training options declare it."""
        check_minimum("gpus", self.gpus)
        check_minimum("seq_length", self.seq_length)
        check_choice("precision", self.precision, PRECISIONS)
        options, flags = options_of(TrainConfig), vars(self) | {"engine": "megatron"}
        for name in TRAINING_OPTIONS:
            check_option(options[name], flags[name], "pretrain", flags)
        check_optimizer(self.optimizer, "megatron")
        check_minimum("lora_rank", self.lora_rank, 0)
        if self.lora_targets and not self.lora_rank:
            raise SettingError("lora_targets", "needs `lora_rank`")
        if self.lora_rank and self.fsdp and not self.own_shards:
            raise SettingError("fsdp", "excludes an adapter: megatron-core's FSDP does not shard frozen weights")
        if self.lora_rank and self.precision == "fp8" and not self.own_shards:
            raise SettingError("precision", "fp8 is not supported with an adapter: its layers have no FP8 products")
        if self.optimizer_cpu_offload and (self.fsdp or self.optimizer != "adamw" or self.precision == "fp32"):
            raise SettingError("optimizer_cpu_offload", "needs `optimizer=adamw` in 16 bits, without `fsdp`")
        check_instances(self.optimizer_instances, self.fsdp, self.optimizer, self.distributed_optimizer)
        if self.optimizer == "muon" and self.distributed_optimizer:
            raise SettingError("optimizer", "muon's state is not sharded: add `distributed_optimizer=False`")
        for module in self.recompute_modules:
            check_choice("recompute_modules", module, RECOMPUTE_MODULES)

    def _check_overlap(self, model: PlannedModel) -> None:
        if self.tp_overlap:
            check_userbuffers(model.latent_attention)
        if self.ep_overlap:
            check_ep_overlap(self.layout, self.moe_dispatcher, self.fsdp, self.recompute, self.recompute_modules)

    def _check_batch(self) -> None:
        pieces = self.cp * (2 if self.cp > 1 else 1)  # context parallelism balances causal work with two pieces each
        pieces = math.lcm(pieces, self.cp * (self.layout.tp if self.sharded_sequence else 1))
        if self.seq_length % pieces:
            raise LayoutError(
                "seq_length",
                f"{self.seq_length} is not a multiple of {pieces}, the number of parts into which `cp={self.cp}` and "
                f"sequence parallelism over `tp={self.layout.tp}` split it",
            )
        if self.global_batch_size is not None and self.global_batch_size % (self.micro_batch_size * self.dp):
            raise LayoutError(
                "global_batch_size",
                f"{self.global_batch_size} is not a multiple of `micro_batch_size={self.micro_batch_size}` x "
                f"{self.dp} data parallel ranks",
            )
        if self.layout.vp > 1 and self.micro_batches % self.layout.pp:
            raise LayoutError(
                "vp",
                f"interleaved stages need a multiple of `pp={self.layout.pp}` micro-batches per step, not "
                f"{self.micro_batches}",
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        names = (
            "gpus", "seq_length", "cp", "dp", "expert_dp", "micro_batch_size", "micro_batches", "batch", "precision",
            "optimizer", "distributed_optimizer", "optimizer_cpu_offload", "optimizer_instances",
            "fsdp", "sharded_sequence", "recompute", "recompute_modules", "recompute_layers", "moe_dispatcher",
            "tp_overlap", "ep_overlap", "gradient_bytes", "streams", "loss_share", "all_logits",
            "engine", "cpu_offload", "lora_rank", "lora_targets",
        )  # fmt: skip
        values = {name: getattr(self, name) for name in names}
        if self.recompute != "selective":
            values["recompute_modules"] = ()
        return {**self.layout.as_dict(), "etp": self.layout.expert_tp, **values}


def check_layout(model: PlannedModel, layout: Layout) -> None:
    layout.check(model.dims)
    for rule in model.rules:
        rule.check_tp(layout.expert_tp if "{expert}" in rule.megatron else layout.tp, model.dims)
    if model.dims.heads % layout.tp:
        raise LayoutError("tp", f"{layout.tp} does not divide the {model.dims.heads} attention heads")


def accelerate_run(
    run: PlannedRun, shards: bool, gradient_checkpointing: bool, replicas: int = 1, cpu_offload: bool = False
) -> PlannedRun:
    """The run in the Accelerate engine, as DDP or, with `shards`, FSDP2 in groups of `gpus` / `replicas`."""
    if run.gpus % replicas:
        raise LayoutError("fsdp_replicas", f"{replicas} does not divide `gpus={run.gpus}`")
    return replace(
        run,
        gpus=run.gpus // replicas,  # each group of replicas has a model of its own
        optimizer="adamw",
        distributed_optimizer=shards,
        fsdp="optim_grads_params" if shards else None,
        own_shards=shards,
        engine="accelerate",
        cpu_offload=cpu_offload,
        recompute="full" if gradient_checkpointing else "none",
        gradient_bytes=8 if run.gpus > 1 and not shards else 4,  # DDP has buckets besides the parameters' gradients
    )


def run_of(config: TrainConfig, objective: str, gpus: int) -> PlannedRun:
    """The planned run of a training configuration."""
    replicas = max(1, gpus // (config.parallel.tp * config.parallel.pp * config.parallel.cp))
    return PlannedRun(
        layout=config.parallel.layout,
        gpus=gpus,
        seq_length=config.data.seq_length,
        cp=config.parallel.cp,
        micro_batch_size=config.data.micro_batch_size or max(1, config.data.global_batch_size // replicas),
        global_batch_size=config.data.global_batch_size,
        precision=config.precision.precision,
        optimizer=config.optimizer.optimizer,
        distributed_optimizer=config.parallel.distributed_optimizer,
        optimizer_cpu_offload=config.optimizer.optimizer_cpu_offload,
        optimizer_instances=config.parallel.optimizer_instances,
        fsdp=config.parallel.fsdp,
        sequence_parallel=config.parallel.sequence_parallel,
        recompute=config.engine.recompute,
        recompute_modules=tuple(config.engine.recomputed),
        recompute_layers=config.engine.recompute_layers,
        moe_dispatcher=config.parallel.moe_dispatcher,
        tp_overlap=config.parallel.tp_overlap,
        ep_overlap=config.parallel.ep_overlap,
        lora_rank=config.model.lora_rank,
        lora_targets=tuple(comma_separated(config.model.lora_targets)),
        **objective_settings(objective),
    )


def objective_settings(name: str) -> dict[str, Any]:
    """`streams` and `loss_share` of an objective. Raises SettingError for an unknown one."""
    kind = find_objective(name).kind
    return {"streams": kind.tokens_read, "loss_share": kind.loss_fraction}
