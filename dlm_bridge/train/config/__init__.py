"""Configuration of a training run: nested sections of options, checked when it is constructed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import yaml

from dlm_bridge.errors import LayoutError, SettingError
from dlm_bridge.mapping.layout import Layout
from dlm_bridge.settings import check_option, options_of
from dlm_bridge.train.config.objective import ObjectiveOptions
from dlm_bridge.train.config.reinforcement import PREFERRED, RLOptions
from dlm_bridge.train.config.sections import (
    LENGTHS,
    PASSED_THROUGH,
    CheckpointOptions,
    DataOptions,
    EngineOptions,
    LoggingOptions,
    ModelOptions,
    OptimizerOptions,
    ParallelOptions,
    PrecisionOptions,
    ScheduleOptions,
    check_optimizer,
    default_learning_rate,
)


@dataclass(frozen=True)
class TrainConfig:
    """Configuration of `pretrain` and `sft` in sections. `from_flags` constructs it from a flat dictionary.

    Raises:
        SettingError: a value is refused, or contradicts another option.
        LayoutError: the model layout or the batch size is impossible.
    """

    task: str = "pretrain"
    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    objective: ObjectiveOptions = field(default_factory=ObjectiveOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    precision: PrecisionOptions = field(default_factory=PrecisionOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    logging: LoggingOptions = field(default_factory=LoggingOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)

    tasks: ClassVar[tuple[str, ...]] = ("pretrain", "sft")

    @classmethod
    def from_flags(cls, task: str | None = None, **flags: Any) -> Self:
        """Construct a configuration from options by name. Options that are not given have the task's default."""
        task = cls.tasks[0] if task is None else task
        options = options_of(cls)
        if unknown := [name for name in flags if name not in options]:
            raise TypeError(f"{cls.__name__} has no option {unknown[0]}")
        if task not in cls.tasks:
            raise SettingError("task", f"{task!r} is not one of {', '.join(cls.tasks)}")
        defaults = {name: option.default_for(task) for name, option in options.items()}
        if any(flags.get(name) is not None for name in LENGTHS):
            defaults |= dict.fromkeys(LENGTHS)
        adapts = bool(flags.get("lora_rank") or flags.get("adapter"))
        if lr := default_learning_rate(task, adapts, bool(flags.get("from_scratch"))):
            defaults["lr"] = lr
        sections: dict[str, dict[str, Any]] = {}
        for name, option in options.items():
            value = defaults[name] if name in LENGTHS and flags.get(name) is None else flags.get(name, defaults[name])
            sections.setdefault(option.section, {})[name] = list(value) if option.default == [] else value
        kinds = {field.name: field.default_factory for field in dataclasses.fields(cls)}
        return cls(task, **{name: kinds[name](**values) for name, values in sections.items()})  # type: ignore[operator]

    def as_flags(self) -> dict[str, Any]:
        """Values of all options by name, and the task."""
        options = options_of(type(self))
        values = {name: getattr(getattr(self, option.section), name) for name, option in options.items()}
        return {"task": self.task} | values

    def replace(self, **flags: Any) -> Self:
        """Copy with other values of some options. A new length, such as `steps`, replaces the old one."""
        length = dict.fromkeys(LENGTHS) if flags.keys() & set(LENGTHS) else {}
        return self.from_flags(**(self.as_flags() | length | flags))

    def to_yaml(self) -> str:
        """Format the nested configuration as a YAML file, which `load_config` reads."""
        return yaml.safe_dump(dataclasses.asdict(self), sort_keys=False)

    def check_length(self) -> None:
        """Raise SettingError if nothing decides the number of steps."""
        if all(getattr(self.schedule, name) is None for name in LENGTHS):
            raise SettingError("steps", "is missing: give `steps`, `tokens` or `epochs`")

    def check_batch(self, processes: int) -> None:
        """Raise LayoutError unless the processes can share the global batch evenly."""
        self.data.accumulation(processes)

    def __post_init__(self) -> None:
        values = self.as_flags()
        for name in ("model", "data", "output"):
            if not values[name]:
                raise SettingError(name, "is missing: give it on the command line or in the YAML file")
        for name, option in options_of(type(self)).items():
            check_option(option, values[name], self.task, values)
        self._check()

    def _check(self) -> None:
        """Check combinations of options. Raises SettingError or LayoutError."""
        model, data, objective, schedule = self.model, self.data, self.objective, self.schedule
        moe_losses = objective.moe_aux_loss_coeff or objective.moe_z_loss_coeff
        decay, end = schedule.wsd_decay_steps, "lr_decay_steps" if schedule.lr_decay_steps else "steps"
        decay_end = schedule.lr_decay_steps or schedule.steps
        patience = schedule.early_stopping_patience is not None
        lengths = [name for name in LENGTHS if getattr(schedule, name) is not None]
        refuse(
            *((True, other, f"excludes `{lengths[0]}`: give one of them") for other in lengths[1:]),
            (patience and not self.logging.eval_interval, "early_stopping_patience",
             "needs a validation: `eval_interval` is 0"),
            (patience and not data.valid_data and not data.split_fractions[1], "early_stopping_patience",
             f"needs validation data: give `valid_data`, or a `split` with a part for it, not {data.split}"),
            (schedule.min_lr > self.optimizer.lr, "min_lr", f"{schedule.min_lr} is above `lr={self.optimizer.lr}`"),
            (bool(self.logging.sample_interval) != bool(self.logging.sample_prompt), "sample_interval",
             "and `sample_prompt` belong together: give both"),
            *(
                (data.seq_length % size, "block_schedule", f"{size} does not divide `seq_length={data.seq_length}`")
                for _, size in objective.block_sizes
            ),
            (data.valid_data and data.split != DataOptions.split, "split",
             "excludes `valid_data`, with which all of `data` is for training"),
            (data.batch_ramp_up and moe_losses, "batch_ramp_up", "excludes losses of MoE routers, which "
             "megatron-core scales for one batch size: set `moe_aux_loss_coeff=0` and `moe_z_loss_coeff=0`"),
            (objective.auto_balance and objective.z_loss_coeff, "auto_balance",
             "excludes `z_loss_coeff`, which it would scale too"),
            (schedule.lr_decay_steps is not None and schedule.lr_decay_steps <= schedule.warmup_steps,
             "lr_decay_steps",
             f"{schedule.lr_decay_steps} is not after `warmup_steps={schedule.warmup_steps}`"),
            (decay is not None and decay_end is not None and decay > decay_end, "wsd_decay_steps",
             f"{decay} is more than `{end}={decay_end}`"),
            (model.adapter is not None and model.lora_rank, "lora_rank",
             "excludes `adapter`, which has a rank of its own"),
            (model.adapts and model.from_scratch, "from_scratch",
             "excludes an adapter, which needs a base with trained weights"),
            (model.adapts and self.optimizer.ema_decay, "ema_decay",
             "excludes an adapter: only all weights of a model are averaged"),
            (model.lora_targets is not None and not model.lora_targets.strip(", "), "lora_targets",
             "names no layers: leave it out for the family's"),
            (model.lora_mask_only and model.lora_dora, "lora_mask_only",
             "excludes `lora_dora`, whose magnitudes act at every token"),
            (self.parallel.shards and self.precision.precision == "fp16", "precision",
             "fp16 is not supported with `sharding=fsdp`, which does not scale gradients: use bf16"),
        )  # fmt: skip
        if model.lora_quantize is not None:
            refuse(
                (not model.adapts, "lora_quantize", "needs an adapter: add `lora_rank` or `adapter`"),
                (self.precision.precision == "fp8", "lora_quantize",
                 "excludes `precision=fp8`: quantized layers have no FP8 matrix products: use bf16"),
                (self.parallel.shards, "lora_quantize", "excludes `sharding=fsdp`: quantized weights are not sharded"),
            )  # fmt: skip
        self.data.accumulation(processes=1)
        # These properties raise SettingError for malformed values.
        _ = (
            self.data.split_fractions,
            self.objective.noise_levels,
            self.checkpoint.saves,
            self.logging.tracker_names,
            self.logging.profiled,
        )
        for group in PASSED_THROUGH:
            self.engine.passed_through(group)
        check_optimizer(self.optimizer.optimizer, self.engine.engine)
        if self.engine.engine == "megatron":
            self._check_megatron()

    def _check_megatron(self) -> None:
        """Check combinations of options that the Megatron engine does not support. Raises SettingError."""
        parallel, optimizer, precision = self.parallel, self.optimizer, self.precision
        adapts, fp8, lost = self.model.adapts, precision.precision == "fp8", "local checkpoints do not store its state"
        check_instances(
            parallel.optimizer_instances, parallel.fsdp, optimizer.optimizer, parallel.distributed_optimizer
        )
        if parallel.fsdp is not None:
            exclude("fsdp",
                (parallel.pp > 1, f"pp={parallel.pp}", "megatron-core's FSDP has no pipeline"),
                (optimizer.optimizer != "adamw", f"optimizer={optimizer.optimizer}",
                 "megatron-core's FSDP supports AdamW only"),
                (optimizer.optimizer_cpu_offload, "optimizer_cpu_offload", "megatron-core's FSDP does not offload"),
                (not parallel.distributed_optimizer, "distributed_optimizer=False", "FSDP shards the optimizer"),
                (self.checkpoint.async_save, "async_save", "FSDP writes checkpoints synchronously"),
                (self.logging.norm_interval, "norm_interval", "norms of FSDP's shards are not measured"),
                (optimizer.ema_decay, "ema_decay", "FSDP's shards are not averaged"),
            )  # fmt: skip
        if parallel.tp_overlap:
            self._check_tp_overlap()
        if parallel.ep_overlap:
            self._check_ep_overlap()
        if self.engine.cuda_graphs:
            self._check_cuda_graphs()
        if optimizer.optimizer == "muon":
            refuse(
                (parallel.distributed_optimizer, "distributed_optimizer", "megatron-core shards the state of AdamW "
                 "only: add `distributed_optimizer=False` to `optimizer=muon`"),
                (precision.fp8_params, "fp8_params", "excludes `optimizer=muon`: its main params are AdamW's"),
                (adapts, "optimizer", "muon updates matrices of the Hub model, not factors of an adapter: use adamw"),
            )  # fmt: skip
        if adapts:
            refuse(
                (parallel.fsdp, "fsdp", "excludes an adapter: megatron-core's FSDP does not shard frozen weights"),
                (self.checkpoint.local_folder, "local_folder", "excludes an adapter, which is not stored there"),
                (self.logging.sample_interval, "sample_interval", "would sample from the base without the adapter"),
                (fp8, "precision", "fp8 is not supported with an adapter: its layers have no FP8 products there"),
            )  # fmt: skip
        if self.checkpoint.local_folder is not None:
            exclude("local_folder",
                (parallel.fsdp, "fsdp", lost),
                (precision.fp8_params, "fp8_params", lost),
                (optimizer.optimizer_cpu_offload, "optimizer_cpu_offload", lost),
                (optimizer.ema_decay, "ema_decay", lost),
            )  # fmt: skip
        if parallel.ep > 1:
            check_sequence_of_experts(parallel.tp, parallel.sharded_sequence)
        if optimizer.optimizer_cpu_offload:
            refuse(
                (optimizer.ema_decay, "optimizer_cpu_offload",
                 "excludes `ema_decay`: the averages stay on the device"),
                (optimizer.optimizer != "adamw", "optimizer_cpu_offload", "needs `optimizer=adamw`"),
                (precision.precision == "fp32", "optimizer_cpu_offload",
                 "excludes `precision=fp32` in megatron-core: use bf16"),
            )  # fmt: skip
        _ = parallel.context  # raises LayoutError for an impossible context parallel layout

    def _check_tp_overlap(self) -> None:
        """Check limits of Transformer Engine's userbuffers, beyond which results are wrong. Raises SettingError."""
        precision = self.precision
        refuse(
            (not self.parallel.sharded_sequence, "tp_overlap",
             "overlaps the communication of sequence parallelism: it needs `tp` above 1 with it"),
            (precision.precision not in ("auto", "bf16", "fp8"), "tp_overlap",
             f"excludes `precision={precision.precision}`: userbuffers add in bf16: use bf16 or fp8"),
        )  # fmt: skip
        exclude("tp_overlap",
            (precision.precision == "fp8" and precision.fp8_recipe == "blockwise", "fp8_recipe=blockwise",
             "Transformer Engine's userbuffers do not support it"),
            (self.model.adapts, "lora_rank" if self.model.lora_rank else "adapter",
             "gradients of hidden states are reduced during those of the weights, which are frozen"),
        )  # fmt: skip

    def _check_ep_overlap(self) -> None:
        """Check what megatron-core's schedule of two overlapping micro-batches cannot do. Raises SettingError."""
        parallel, engine = self.parallel, self.engine
        check_ep_overlap(parallel.layout, parallel.moe_dispatcher, parallel.fsdp, engine.recompute, engine.recomputed)
        refuse(
            (self.precision.precision == "fp32", "ep_overlap",
             "excludes `precision=fp32`: megatron-core overlaps in bf16, fp16 and fp8"),
        )  # fmt: skip
        exclude("ep_overlap",
            (self.model.adapts, "lora_rank" if self.model.lora_rank else "adapter",
             "every part needs a backward pass, which a frozen embedding does not have"),
            (parallel.moe_shared_expert_overlap, "moe_shared_expert_overlap",
             "both would overlap the same communication"),
            (self.logging.straggler_interval, "straggler_interval",
             "passes of two overlapping micro-batches cannot be timed separately"),
        )  # fmt: skip

    def _check_cuda_graphs(self) -> None:
        """Check what changes the layers' inputs or memory from step to step. Raises SettingError."""
        parallel, data, passed = self.parallel, self.data, self.engine.passed_through("transformer")
        length_variation = self.objective.length_variation
        masked = "rows have an attention mask, which layers in graphs do not support"
        exclude("cuda_graphs",
            (parallel.pp > 1, f"pp={parallel.pp}", "each micro-batch of a stage would need graphs of its own"),
            (parallel.fsdp, f"fsdp={parallel.fsdp}", "weights have no fixed addresses"),
            (self.engine.recompute == "full", "recompute=full", "recomputed layers are not in a graph"),
            (self.precision.precision == "fp8", "precision=fp8", "FP8 scaling in graphs is untested"),
            (parallel.ep_overlap, "ep_overlap", "its layers run in parts"),
            (data.document_attention, "document_attention", masked),
            (self.objective.mask_annealing_steps, "mask_annealing_steps", masked),
            (length_variation, f"length_variation={length_variation}", f"truncated {masked}: set it to 0"),
            *(
                (passed.get(name), f"megatron=transformer.{name}", "evaluations would replay the dropout of training")
                for name in ("hidden_dropout", "attention_dropout")
            ),
        )  # fmt: skip


@dataclass(frozen=True)
class RLConfig(TrainConfig):
    """Configuration of `rl`. Each step samples (or reads) `data.global_batch_size` completions (or pairs) over all
    processes and runs `rl.updates` optimizer steps with them."""

    task: str = "rl"
    rl: RLOptions = field(default_factory=RLOptions)

    tasks: ClassVar[tuple[str, ...]] = ("rl",)

    def check_batch(self, processes: int) -> None:
        """Raise LayoutError unless each process gets the same number of pairs, or of whole groups of completions."""
        if self.rl.method in PREFERRED:
            super().check_batch(processes)
            return
        completions = self.rl.group_size * processes
        if self.data.global_batch_size % completions:
            raise LayoutError(
                "global_batch_size",
                f"{self.data.global_batch_size} must be a multiple of {completions} "
                f"(`group_size={self.rl.group_size}` x {processes} processes)",
            )

    def _check(self) -> None:
        super()._check()
        rl, megatron = self.rl, self.engine.engine == "megatron"
        passed = self.engine.passed_through("transformer")
        preferred = rl.method in PREFERRED
        refuse(
            (not rl.method, "method", "is missing: give it on the command line or in the YAML file"),
            (self.precision.precision == "fp8", "precision",
             "fp8 is not supported in reinforcement learning: use fp32, bf16 or fp16"),
            *(
                (
                    megatron and passed.get(name),
                    "megatron",
                    f"excludes transformer.{name}: log-probabilities and gradients come from two forward passes",
                )
                for name in ("hidden_dropout", "attention_dropout")
            ),
            (rl.rollout_tp > 1 and not megatron and not self.parallel.shards, "rollout_tp",
             "needs `sharding=fsdp` or `engine=megatron`: otherwise each process has the whole model"),
            (rl.value_model and rl.method != "tracerl", "value_model", "needs `method=tracerl`"),
            (rl.value_model and self.model.adapts, "value_model", "excludes an adapter: it trains all weights"),
            (rl.updates > 1 and self.model.lora_dropout, "lora_dropout",
             f"excludes `updates={rl.updates}`: ratios would compare two draws of dropout"),
        )  # fmt: skip
        _ = rl.sampler  # raises SettingError for malformed values
        if preferred:
            refuse((not rl.kl_weight, "beta", f"must be above 0: {rl.method} compares with the starting model"))
            return
        refuse(
            (not rl.reward, "reward", f"is missing: `method={rl.method}` needs one"),
            (rl.rl_normalisation == "steps" and rl.method != "tracerl", "rl_normalisation",
             "steps needs `method=tracerl`: use rows or tokens"),
            (rl.group_size < 2, "group_size", "must be at least 2: completions of a prompt are compared"),
            (rl.gen_length >= self.data.seq_length, "gen_length",
             f"{rl.gen_length} leaves no room for a prompt in `seq_length={self.data.seq_length}`"),
        )  # fmt: skip
        self.check_batch(processes=1)


def check_instances(instances: int, fsdp: str | None, optimizer: str, distributed_optimizer: bool) -> None:
    """Raise SettingError for several instances of an optimizer whose state is not sharded, or whose gradients
    megatron-core's FSDP does not sum between instances."""
    if instances > 1:
        exclude("optimizer_instances",
            (not distributed_optimizer, "distributed_optimizer=False", "its state is not sharded"),
            (optimizer != "adamw", f"optimizer={optimizer}", "its state is not sharded"),
            (fsdp == "optim", "fsdp=optim",
             "megatron-core does not sum gradients between instances; the optimizer is sharded without it"),
        )  # fmt: skip


def check_instances_of_experts(instances: int, fsdp: str | None) -> None:
    """Raise SettingError for several optimizer instances of a model with experts under megatron-core's FSDP."""
    if instances > 1:
        exclude("optimizer_instances", (fsdp, f"fsdp={fsdp}", "megatron-core's FSDP has no instances of experts"))


def check_sequence_of_experts(tp: int, sharded_sequence: bool) -> None:
    """Raise SettingError for experts under tensor parallelism without sequence parallelism."""
    if tp > 1 and not sharded_sequence:
        raise SettingError(
            "sequence_parallel", f"is required: megatron-core trains experts with `tp={tp}` only with it"
        )


def check_userbuffers(latent_attention: bool) -> None:
    """Raise SettingError for a model whose layers have no tensor parallel communication to overlap."""
    if latent_attention:
        raise SettingError("tp_overlap", "layers with multi-head latent attention have no userbuffers")


def check_ep_overlap(
    layout: Layout, dispatcher: str, fsdp: str | None, recompute: str, modules: Sequence[str]
) -> None:
    """Raise SettingError for a layout or recomputation with which megatron-core cannot overlap two micro-batches.

    Args:
        modules: modules that selective recomputation recomputes.
    """
    parts = "layers run in parts, which are not recomputed"
    refuse(
        (layout.ep == 1, "ep_overlap", "overlaps expert parallel communication: it needs `ep` above 1"),
        (layout.pp > 1 and layout.vp == 1, "ep_overlap",
         f"with `pp={layout.pp}` needs `vp` above 1: megatron-core overlaps interleaved stages"),
    )  # fmt: skip
    exclude("ep_overlap",
        (dispatcher == "allgather", "moe_dispatcher=allgather", "only alltoall and flex can overlap"),
        (fsdp, f"fsdp={fsdp}", "layers run in parts, before which no shard is gathered"),
        (recompute == "full", "recompute=full", parts),
        (recompute == "selective" and "moe" in modules, "recompute_modules=moe", parts),
    )  # fmt: skip


def refuse(*rows: tuple[object, str, str]) -> None:
    """Raise SettingError(field, reason) for the first row (condition, field, reason) whose condition is true."""
    for holds, name, reason in rows:
        if holds:
            raise SettingError(name, reason)


def exclude(name: str, *others: tuple[object, str, str]) -> None:
    """Raise SettingError for the option `name` and the first of `others`, rows (condition, setting, reason), whose
    condition is true."""
    refuse(*((holds, name, f"excludes `{other}`: {reason}") for holds, other, reason in others))
