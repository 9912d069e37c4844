"""The configuration of a training run: nested sections of options, checked when it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import yaml

from dlm_bridge.errors import SettingError
from dlm_bridge.mapping.layout import Layout
from dlm_bridge.settings import check_option, options_of
from dlm_bridge.train.config.objective import ObjectiveOptions
from dlm_bridge.train.config.reinforcement import PREFERRED, RLOptions
from dlm_bridge.train.config.sections import (
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
)

INSTANCES = "--optimizer-instances"


@dataclass(frozen=True)
class TrainConfig:
    """The configuration of `pretrain` and `sft`, in sections; `from_flags` makes it of a flat dictionary.

    Checked when it is made: SettingError names the flag."""

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
        """A configuration of flags with underscores for dashes; what is not given has the task's default."""
        task = cls.tasks[0] if task is None else task
        options = options_of(cls)
        if unknown := [key for key in flags if key not in options]:
            raise TypeError(f"{cls.__name__} has no option {unknown[0]}")
        if task not in cls.tasks:
            raise SettingError("task", f"{task!r} is not one of {', '.join(cls.tasks)}")
        sections: dict[str, dict[str, Any]] = {}
        for key, option in options.items():
            value = flags.get(key, option.default_for(task))
            sections.setdefault(option.section, {})[option.name] = list(value) if option.default == [] else value
        kinds = {field.name: field.default_factory for field in dataclasses.fields(cls)}
        return cls(task, **{name: kinds[name](**values) for name, values in sections.items()})  # type: ignore[operator]

    def as_flags(self) -> dict[str, Any]:
        """Every option's value by its flag with underscores, and the task."""
        options = options_of(type(self))
        values = {key: getattr(getattr(self, option.section), option.name) for key, option in options.items()}
        return {"task": self.task} | values

    def replace(self, **flags: Any) -> Self:
        """A copy with other values, by their flags with underscores."""
        return self.from_flags(**(self.as_flags() | flags))

    def to_yaml(self) -> str:
        """The nested configuration, as a `--config` file."""
        return yaml.safe_dump(dataclasses.asdict(self), sort_keys=False)

    def check_batch(self, processes: int) -> None:
        """Raise SettingError where the global batch does not divide over the processes."""
        self.data.accumulation(processes)

    def __post_init__(self) -> None:
        flags = self.as_flags()
        for key in ("model", "data", "output"):
            if not flags[key]:
                raise SettingError(key, "is missing: give it on the command line or in the --config file")
        for key, option in options_of(type(self)).items():
            check_option(option, flags[key], self.task, flags)
        self._check()

    def _check(self) -> None:
        """What holds between options. Raises DlmBridgeError."""
        if self.schedule.min_lr > self.optimizer.lr:
            raise SettingError("min_lr", f"{self.schedule.min_lr} is more than --lr {self.optimizer.lr}")
        if bool(self.logging.sample_interval) != bool(self.logging.sample_prompt):
            raise SettingError("sample_interval", "N and --sample-prompt TEXT belong together: give both")
        for _, size in self.objective.block_sizes:
            if self.data.seq_length % size:
                raise SettingError(
                    "block_schedule", f"block size {size} does not divide --seq-length {self.data.seq_length}"
                )
        if self.data.valid_data and self.data.split != DataOptions.split:
            raise SettingError("split", "with --valid-data: all of --data is for training: leave one of them out")
        if self.data.batch_ramp_up and (self.objective.moe_aux_loss_coeff or self.objective.moe_z_loss_coeff):
            raise SettingError(
                "batch_ramp_up",
                "with losses of MoE routers: megatron-core scales them for one batch size: leave "
                "--moe-aux-loss-coeff and --moe-z-loss-coeff out",
            )
        if self.objective.auto_balance and self.objective.z_loss_coeff:
            raise SettingError("auto_balance", "with --z-loss-coeff, which it would scale too: leave one of them out")
        schedule = self.schedule
        if schedule.lr_decay_steps is not None and schedule.lr_decay_steps <= schedule.warmup_steps:
            raise SettingError(
                "lr_decay_steps", f"{schedule.lr_decay_steps} is not after --warmup-steps {schedule.warmup_steps}"
            )
        if (decays := schedule.wsd_decay_steps) is not None and decays > schedule.decay_end:
            end = "--lr-decay-steps" if schedule.lr_decay_steps else "--steps"
            raise SettingError("wsd_decay_steps", f"{decays} is more than {end} {schedule.decay_end}")
        self.data.accumulation(processes=1)
        # Made to be checked.
        _ = (
            self.data.split_fractions,
            self.objective.noise_levels,
            self.checkpoint.saves,
            self.logging.tracker_names,
            self.logging.profiled,
        )
        for group in PASSED_THROUGH:
            self.engine.passed_through(group)
        self._check_adapter()
        if self.parallel.shards and self.precision.precision == "fp16":
            raise SettingError("precision", "fp16 with --sharding fsdp: gradients are not scaled there: use bf16")
        check_optimizer(self.optimizer.optimizer, self.engine.engine)
        if self.engine.engine == "megatron":
            self._check_megatron()

    def _check_adapter(self) -> None:
        model = self.model
        if model.adapter is not None and model.lora_rank:
            raise SettingError("adapter", "has a rank of its own: leave --lora-rank out")
        if model.adapts and model.from_scratch:
            raise SettingError("from_scratch", "with an adapter: an adapter needs a base with trained weights")
        if model.adapts and self.optimizer.ema_decay:
            raise SettingError("ema_decay", "with an adapter: only whole models are averaged: leave it out")
        if model.lora_targets is not None and not model.lora_targets.strip(", "):
            raise SettingError("lora_targets", "names nothing: leave it out for the family's own")
        if model.lora_mask_only and model.lora_dora:
            raise SettingError("lora_mask_only", "with --lora-dora, whose magnitudes act at every token")
        if model.lora_quantize is None:
            return
        if not model.adapts:
            raise SettingError("lora_quantize", "needs an adapter: add --lora-rank N, or --adapter")
        if self.precision.precision == "fp8":
            raise SettingError(
                "lora_quantize", "with --precision fp8: quantized layers have no FP8 products: use bf16"
            )
        if self.parallel.shards:
            raise SettingError("lora_quantize", "with --sharding fsdp: quantized weights cannot be sharded")

    def _check_megatron(self) -> None:
        """What holds between options of the Megatron engine. Raises DlmBridgeError."""
        parallel = self.parallel
        if parallel.fsdp is not None:
            self._check_fsdp(parallel.fsdp)
        check_instances(
            parallel.optimizer_instances, parallel.fsdp, self.optimizer.optimizer, parallel.distributed_optimizer
        )
        if parallel.tp_overlap:
            self._check_tp_overlap()
        if parallel.ep_overlap:
            self._check_ep_overlap()
        if self.engine.cuda_graphs:
            self._check_cuda_graphs()
        if self.optimizer.optimizer == "muon":
            cut = "megatron-core cuts its state anywhere, and knows AdamW's only: add --no-distributed-optimizer"
            _exclude(
                "--optimizer",
                "muon and --engine megatron",
                (parallel.distributed_optimizer, "--distributed-optimizer", cut),
                (self.precision.fp8_params, "--fp8-params", "its main params are AdamW's: leave it out"),
                (self.model.adapts, "an adapter", "its factors are no matrices of the Hub's: use adamw"),
            )
        if self.model.adapts:
            _exclude(
                "--engine",
                "megatron and an adapter",
                (parallel.fsdp, f"--fsdp {parallel.fsdp}", "megatron-core's FSDP shards no frozen weights"),
                (self.checkpoint.local_folder, "--local-folder", "local checkpoints do not hold adapters"),
                (self.logging.sample_interval, "--sample-interval", "it samples from the base's weights"),
                (self.precision.precision == "fp8", "--precision fp8", "adapters have no FP8 products there"),
                remedy="leave it out",
            )
        if self.checkpoint.local_folder is not None:
            self._check_local_checkpoints()
        if parallel.ep > 1:
            check_sequence_of_experts(parallel.tp, parallel.sharded_sequence)
        if self.optimizer.optimizer_cpu_offload:
            self._check_offload()
        _ = parallel.context  # made to be checked

    def _check_fsdp(self, fsdp: str) -> None:
        """Raise SettingError for what megatron-core's FSDP does not have."""
        parallel, optimizer = self.parallel, self.optimizer
        _exclude(
            "--fsdp",
            fsdp,
            (parallel.pp > 1, f"--pp {parallel.pp}", "megatron-core's FSDP has no pipeline"),
            (
                optimizer.optimizer != "adamw",
                f"--optimizer {optimizer.optimizer}",
                "megatron-core's FSDP has AdamW only",
            ),
            (optimizer.optimizer_cpu_offload, "--optimizer-cpu-offload", "megatron-core's FSDP does not offload"),
            (not parallel.distributed_optimizer, "--no-distributed-optimizer", "FSDP shards the optimizer"),
            (self.checkpoint.async_save, "--async-save", "FSDP's checkpoints are written at once"),
            (self.logging.norm_interval, "--norm-interval", "norms of its shards are not measured"),
            (optimizer.ema_decay, "--ema-decay", "its shards are not averaged"),
            remedy="leave one of them out",
        )

    def _check_local_checkpoints(self) -> None:
        """Raise SettingError for what keeps a state that local checkpoints do not hold."""
        lost = "local checkpoints do not hold its state"
        _exclude(
            "--local-folder",
            "",
            (self.parallel.fsdp, "--fsdp", lost),
            (self.precision.fp8_params, "--fp8-params", lost),
            (self.optimizer.optimizer_cpu_offload, "--optimizer-cpu-offload", lost),
            (self.optimizer.ema_decay, "--ema-decay", lost),
        )

    def _check_offload(self) -> None:
        """Raise SettingError for an optimizer whose state megatron-core does not keep on the CPU."""
        if self.optimizer.ema_decay:
            raise SettingError("optimizer_cpu_offload", "with --ema-decay: averages stay on the device: leave one out")
        if self.optimizer.optimizer != "adamw":
            raise SettingError("optimizer_cpu_offload", "needs --optimizer adamw")
        if self.precision.precision == "fp32":
            raise SettingError("optimizer_cpu_offload", "with --precision fp32 is not in megatron-core: use bf16")

    def _check_tp_overlap(self) -> None:
        """Raise SettingError for what Transformer Engine's userbuffers cannot compute, or would compute wrong."""
        parallel, precision = self.parallel, self.precision
        if not parallel.sharded_sequence:
            raise SettingError(
                "tp_overlap", "needs --tp above 1 with sequence parallelism, whose communication overlaps"
            )
        if precision.precision not in ("bf16", "fp8"):
            raise SettingError(
                "tp_overlap",
                f"with --precision {precision.precision}: Transformer Engine's userbuffers add up in bf16: use bf16 or fp8",
            )
        _exclude(
            "--tp-overlap",
            "",
            (
                precision.precision == "fp8" and precision.fp8_recipe == "blockwise",
                "--fp8-recipe blockwise",
                "Transformer Engine's userbuffers do not hold it: use another recipe",
            ),
            (
                self.model.adapts,
                "an adapter",
                "gradients of hidden states are reduced beside the weights' gradients, which a frozen base has not",
            ),
            remedy="leave one of them out",
        )

    def _check_ep_overlap(self) -> None:
        """Raise SettingError for what megatron-core's schedule of two micro-batches at a time cannot do."""
        parallel, engine = self.parallel, self.engine
        check_ep_overlap(parallel.layout, parallel.moe_dispatcher, parallel.fsdp, engine.recompute, engine.recomputed)
        if self.precision.precision == "fp32":
            raise SettingError("ep_overlap", "needs --precision bf16, fp16 or fp8: megatron-core has it for these")
        _exclude(
            "--ep-overlap",
            "",
            (self.model.adapts, "an adapter", "every part has a backward pass, which a frozen embedding has not"),
            (parallel.moe_shared_expert_overlap, "--moe-shared-expert-overlap", "both would overlap the same"),
            (
                self.logging.straggler_interval,
                "--straggler-interval",
                "forward and backward passes of two micro-batches are not timed apart",
            ),
            remedy="leave one of them out",
        )

    def _check_cuda_graphs(self) -> None:
        """Raise SettingError for what changes the layers' inputs or memory from step to step."""
        parallel, data, passed = self.parallel, self.data, self.engine.passed_through("transformer")
        masked = "rows have an attention mask, which layers in graphs do not take"
        _exclude(
            "--cuda-graphs",
            "",
            (parallel.pp > 1, f"--pp {parallel.pp}", "each micro-batch of a stage would have graphs of its own"),
            (parallel.fsdp, f"--fsdp {parallel.fsdp}", "weights have no place of their own in memory"),
            (self.engine.recompute == "full", "--recompute full", "a recomputed layer is in no graph"),
            (self.precision.precision == "fp8", "--precision fp8", "FP8's scaling in graphs was never compared"),
            (parallel.ep_overlap, "--ep-overlap", "its layers run in parts"),
            (data.document_attention, "--document-attention", masked),
            (self.objective.mask_annealing_steps, "--mask-annealing-steps", masked),
            (
                self.objective.length_variation,
                f"--length-variation {self.objective.length_variation}",
                "truncated rows have an attention mask: set it to 0",
            ),
            *(
                (passed.get(name), f"--megatron transformer.{name}", "evaluations would replay a training step's")
                for name in ("hidden_dropout", "attention_dropout")
            ),
        )


@dataclass(frozen=True)
class RLConfig(TrainConfig):
    """The configuration of `rl`. A step samples (or reads) `data.global_batch_size` completions (or pairs), over all
    processes, and updates the model `rl.updates` times with them."""

    task: str = "rl"
    rl: RLOptions = field(default_factory=RLOptions)

    tasks: ClassVar[tuple[str, ...]] = ("rl",)

    def check_batch(self, processes: int) -> None:
        """Raise SettingError where a step's pairs do not divide over the processes, or its completions are not whole
        groups for each."""
        if self.rl.method in PREFERRED:
            super().check_batch(processes)
            return
        completions = self.rl.group_size * processes
        if self.data.global_batch_size % completions:
            raise SettingError(
                "global_batch_size",
                f"{self.data.global_batch_size} must be a multiple of {completions} "
                f"(--group-size {self.rl.group_size} x {processes} processes)",
            )

    def _check(self) -> None:
        super()._check()
        options = self.rl
        if not options.method:
            raise SettingError("method", "is missing: give it on the command line or in the --config file")
        if self.precision.precision == "fp8":
            raise SettingError("precision", "fp8: reinforcement learning runs in fp32, bf16 or fp16")
        if self.engine.engine == "megatron":
            self._check_megatron_updates()
        elif options.rollout_tp > 1 and not self.parallel.shards:
            raise SettingError(
                "rollout_tp",
                f"{options.rollout_tp} without --sharding fsdp or --engine megatron: each process has the whole model",
            )
        if options.value_model:
            self._check_value_model()
        if options.updates > 1 and self.model.lora_dropout:
            raise SettingError(
                "lora_dropout",
                f"with --updates {options.updates}: ratios would compare two of its draws: leave it out",
            )
        _ = options.sampler  # made to be checked
        if options.method in PREFERRED:
            if options.reward:
                raise SettingError("reward", f"--method {options.method} has preferred rows instead, leave it out")
            if not options.kl_weight:
                raise SettingError(
                    "beta", f"0: {options.method} compares with the model as it began, give a positive number"
                )
            return
        if not options.reward:
            raise SettingError("reward", f"is missing: --method {options.method} needs one")
        if options.rl_normalisation == "steps" and options.method != "tracerl":
            raise SettingError(
                "rl_normalisation", f"steps: --method {options.method} has no steps, take rows or tokens"
            )
        if options.group_size < 2:
            raise SettingError("group_size", "1: a completion is compared with others of its prompt, take 2 or more")
        if options.gen_length >= self.data.seq_length:
            raise SettingError(
                "gen_length",
                f"{options.gen_length} leaves no room for a prompt in --seq-length {self.data.seq_length}",
            )
        self.check_batch(processes=1)

    def _check_value_model(self) -> None:
        """Raise SettingError for what cannot have a value model."""
        _exclude(
            "--value-model",
            "",
            (self.rl.method != "tracerl", f"--method {self.rl.method}", "only tracerl has one"),
            (self.model.adapts, "an adapter", "it would be trained whole: leave one of them out"),
        )

    def _check_megatron_updates(self) -> None:
        """What the Megatron engine cannot do for a method. Raises SettingError."""
        passed = self.engine.passed_through("transformer")
        dropout = [name for name in ("hidden_dropout", "attention_dropout") if passed.get(name)]
        twice = "log-probabilities and gradients come from two forward passes: leave it out"
        _exclude(
            "--engine",
            "megatron",
            *((True, f"--megatron transformer.{name}", twice) for name in dropout),
        )


def check_instances(instances: int, fsdp: str | None, optimizer: str, distributed_optimizer: bool) -> None:
    """Raise SettingError for several instances of an optimizer that is not sharded, or between which megatron-core's
    FSDP sums no gradients."""
    if instances > 1:
        cut = "there is no sharded state to hold several times"
        _exclude(
            INSTANCES,
            str(instances),
            (not distributed_optimizer, "--no-distributed-optimizer", cut),
            (optimizer != "adamw", f"--optimizer {optimizer}", cut),
            remedy="leave it out",
        )
        unsummed = "megatron-core sums no gradients between them: leave --fsdp out, the optimizer is sharded without"
        _exclude(INSTANCES, str(instances), (fsdp == "optim", "--fsdp optim", unsummed))


def check_instances_of_experts(instances: int, fsdp: str | None) -> None:
    """`check_instances` of a model with experts."""
    if instances > 1:
        _exclude(
            INSTANCES,
            str(instances),
            (fsdp is not None, f"--fsdp {fsdp}", "megatron-core's FSDP has no such instances of experts"),
            remedy="leave one of them out",
        )


def check_sequence_of_experts(tp: int, sharded_sequence: bool) -> None:
    """Raise SettingError for tensor parallelism in which megatron-core trains no experts."""
    if tp > 1 and not sharded_sequence:
        raise SettingError(
            "tp",
            f"{tp} without sequence parallelism: megatron-core trains no experts so: leave out --no-sequence-parallel",
        )


def check_userbuffers(latent_attention: bool) -> None:
    """Raise SettingError for a model whose layers have no tensor parallel communication to overlap."""
    if latent_attention:
        raise SettingError("tp_overlap", "multi-head latent attention's layers have no userbuffers: leave it out")


def check_ep_overlap(
    layout: Layout, dispatcher: str, fsdp: str | None, recompute: str, modules: Sequence[str]
) -> None:
    """Raise SettingError for a layout, and recomputation (of `modules` if it is selective), in which megatron-core
    cannot compute two micro-batches at a time."""
    if layout.ep == 1:
        raise SettingError("ep_overlap", "needs --ep above 1, whose communication overlaps")
    if layout.pp > 1 and layout.vp == 1:
        raise SettingError(
            "ep_overlap", f"with --pp {layout.pp} needs --vp 2 or more, which megatron-core interleaves"
        )
    layers = "layers run in parts, which nothing recomputes"
    _exclude(
        "--ep-overlap",
        "",
        (dispatcher == "allgather", "--moe-dispatcher allgather", "only alltoall and flex have parts to overlap"),
        (fsdp, f"--fsdp {fsdp}", "layers run in parts, before which no shard is gathered"),
        (recompute == "full", "--recompute full", layers),
        (recompute == "selective" and "moe" in modules, "--recompute-modules moe", layers),
        remedy="leave one of them out",
    )


def _exclude(flag: str, value: str, *others: tuple[object, str, str], remedy: str = "") -> None:
    """Raise SettingError for the first of `others` that is given, each as (whether it is, its name, why it excludes
    `flag` with that value)."""
    for given, name, reason in others:
        if given:
            where, end = f"{value} with" if value else "with", f": {remedy}" if remedy else ""
            raise SettingError(flag, f"{where} {name}: {reason}{end}")
