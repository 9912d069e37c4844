"""Sections of a training configuration, except for `objective` and `reinforcement`: each option, declared once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dlm_bridge.errors import LayoutError, SettingError
from dlm_bridge.files.reading import parse_yaml
from dlm_bridge.mapping.layout import ContextParallelConfig, Layout, parse_pipeline_split
from dlm_bridge.registration import load, registered
from dlm_bridge.settings import (
    TRAINING,
    accelerate_option,
    check_choice,
    comma_separated,
    megatron_option,
    option,
    whole_numbers,
)

ENGINES = tuple(dict.fromkeys(["accelerate", "megatron", *registered("engines")]))  # megatron: known where absent
LENGTHS = ("steps", "epochs", "tokens")  # the length of a run is one of them
PASSED_THROUGH = ("transformer", "ddp", "optimizer")  # megatron-core's configuration classes
OPTIMIZER_ENGINES = {"sgd": "megatron"}  # the others are both engines'
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
DYNAMIC_CP = (
    "megatron-core's dynamic context parallelism needs batches of its own, without masks: pack rows, and use the "
    'smallest `cp` at which one fits (docs/megatron.md, "Documents of very different lengths")'
)


@dataclass(frozen=True)
class ModelOptions:
    """Model or adapter to train."""

    model: str = option(
        "", "Hub folder or id, Megatron checkpoint, or a config.json's folder.", formerly="path",
        aliases=("model_name_or_path",), common=True,
    )  # fmt: skip
    family: str | None = option(None, "Model family, if config.json does not identify it.", fixed=True)
    mask_token_id: int | None = option(
        None, "Id of the mask token, if the model's config has none. Default: the family's.", fixed=True
    )
    tokenizer: str | None = option(None, "Tokenizer folder or id. Default: the model's.", common=True)
    chat_template: str | None = option(
        None, "Jinja file, or name of a template of the tokenizer or of TRL. Default: the tokenizer's.",
        tasks=("sft", "rl"), fixed=True, common=True,
    )  # fmt: skip
    from_scratch: bool = option(
        False, "Initialise randomly from config.json and --seed. Default: --from-weights, read the weights.",
        negative="--from-weights", tasks=TRAINING, common=True,
    )  # fmt: skip
    lora_rank: int = option(
        0, "Train a LoRA adapter of this rank instead of the weights, 0: none.", minimum=0, fixed=True,
        aliases=("lora_r",), common=True,
    )  # fmt: skip
    lora_alpha: float | None = option(
        None, "Scale of the adapter times its rank. Default: twice the rank.", above=0, needs=("lora_rank", None),
        fixed=True, common=True,
    )  # fmt: skip
    lora_dropout: float = accelerate_option(
        0.0, "Dropout before the adapter.", minimum=0, below=1, needs=("lora_rank", None)
    )
    lora_targets: str | None = option(
        None, "Layers with an adapter, such as q_proj,v_proj,experts. Default: the family's.",
        needs=("lora_rank", None), fixed=True, aliases=("lora_target_modules",),
    )  # fmt: skip
    lora_dora: bool = option(
        False,
        "Train DoRA: the adapter also has a magnitude per output row.",
        needs=("lora_rank", None),
        fixed=True,
    )
    lora_mask_only: bool = accelerate_option(
        False, "Apply the adapter only at mask tokens (objective idlm).",
        needs=("lora_rank", None), tasks=TRAINING, fixed=True,
    )  # fmt: skip
    lora_quantize: str | None = accelerate_option(
        None, "Quantize the base's linear layers to 4bit (NF4) or 8bit, with bitsandbytes.", choices=("4bit", "8bit"),
        fixed=True, common=True,
    )  # fmt: skip
    adapter: str | None = option(None, "Folder of a PEFT LoRA adapter of --model to continue.", fixed=True)

    @property
    def adapts(self) -> bool:
        """True if an adapter is trained instead of the weights."""
        return self.lora_rank > 0 or self.adapter is not None


@dataclass(frozen=True)
class DataOptions:
    """Training and validation data, and the size of a batch."""

    data: list[str] = option(
        [], "Training data. May be repeated.", formerly="paths", aliases=("dataset", "train_file"), common=True
    )
    valid_data: list[str] = option(
        [], "Validation data, instead of a part of --data. May be repeated.", formerly="valid_paths", tasks=TRAINING,
        aliases=("validation_file",), common=True,
    )  # fmt: skip
    data_cache: str | None = option(
        None, "Folder on each host's own disk, to which the files of --data are copied before the run.",
        tasks=TRAINING, metavar="DIR",
    )  # fmt: skip
    split: str = option("99,1,0", "Training, validation and test fractions.", tasks=TRAINING, fixed=True)
    seq_length: int = option(
        0, "Tokens per sequence; 0: what the data need (sft), 1024 (pretrain), at most the model's context.",
        minimum=0, fixed=True, task_defaults={"rl": 1024}, aliases=("max_seq_length", "max_length"), common=True,
    )  # fmt: skip
    global_batch_size: int = option(32, "Sequences per step, over all processes.", minimum=1, fixed=True, common=True)
    micro_batch_size: int | None = option(
        None, "Sequences per forward pass of a process.", minimum=1, aliases=("per_device_train_batch_size",),
        common=True,
    )  # fmt: skip
    batch_ramp_up: str | None = option(
        None, "START,INCREMENT,SAMPLES: the batch grows to --global-batch-size over SAMPLES sequences.",
        tasks=TRAINING, fixed=True,
    )  # fmt: skip
    seed: int = option(0, "Seed of data order, noise and initial weights.", minimum=0, fixed=True, common=True)
    document_attention: bool = option(
        False, "Mask attention between the documents of a block.", tasks=("pretrain",), fixed=True
    )
    packing: bool = option(
        False, "Several conversations per row, without attention between them.", tasks=("sft",), fixed=True,
        common=True,
    )  # fmt: skip
    truncate: bool = option(False, "Truncate conversations longer than --seq-length.", tasks=("sft",), fixed=True)
    eos_padding: str | None = option(
        None, "EOS tokens trained with the answer: none, block (to its end) or row. Default: the family's.",
        choices=("none", "block", "row"), tasks=("sft",), fixed=True,
    )  # fmt: skip
    train_on_prompt: bool | None = option(
        None, "Mask prompts too, and count them in the loss. Default: the family's.", tasks=("sft",), fixed=True
    )

    def paths(self, stage: bool = True) -> tuple[list[str], list[str]]:
        """Training and validation data to read: if `stage`, as copied to `data_cache`. The first process of each host
        copies, if there are no copies yet. Raises MissingExtraError if the extension is not installed, InputFileError
        and ResourceError."""
        if self.data_cache is None or not stage:
            return self.data, self.valid_data
        staged = load("features", "--data-cache")([*self.data, *self.valid_data], self.data_cache)
        return staged[: len(self.data)], staged[len(self.data) :]

    @property
    def split_fractions(self) -> tuple[float, float, float]:
        """Fractions for training, validation and test, which sum to 1. Raises SettingError."""
        try:
            numbers = [float(part) for part in self.split.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) != 3 or min(numbers) < 0 or numbers[0] <= 0 or not math.isfinite(sum(numbers)):
            raise SettingError(
                "split", f"{self.split!r} must be three fractions such as 99,1,0 with a positive first one"
            )
        return (numbers[0] / sum(numbers), numbers[1] / sum(numbers), numbers[2] / sum(numbers))

    @cached_property
    def batch_sizes(self) -> tuple[int, ...]:
        """Global batch sizes of `batch_ramp_up`, ending with the final one. Raises SettingError."""
        if self.batch_ramp_up is None:
            return (self.global_batch_size,)
        numbers = whole_numbers("batch_ramp_up", self.batch_ramp_up)
        if len(numbers) != 3 or min(numbers) < 1:
            raise self._ramp_error("must be START,INCREMENT,SAMPLES, such as 32,32,100000")
        start, increment, _ = numbers
        if start >= self.global_batch_size or (self.global_batch_size - start) % increment:
            raise self._ramp_error(
                f"does not reach `global_batch_size={self.global_batch_size}` from {start} in steps of {increment}"
            )
        return tuple(range(start, self.global_batch_size + 1, increment))

    @property
    def samples_per_size(self) -> float:
        """Number of samples that a run reads with each batch size except the last."""
        if self.batch_ramp_up is None:
            return 0.0
        return whole_numbers("batch_ramp_up", self.batch_ramp_up)[2] / (len(self.batch_sizes) - 1)

    def _ramp_error(self, message: str) -> SettingError:
        return SettingError("batch_ramp_up", f"{self.batch_ramp_up} {message}")

    def accumulation(self, processes: int) -> tuple[int, int]:
        """(micro-batch size, micro-batches per step) of each process, with the largest batch. Raises LayoutError if a
        global batch size is not a multiple of micro-batch size x processes."""
        sizes = self.batch_sizes
        common = math.gcd(*sizes)
        micro = self.micro_batch_size or (1 if common % processes else common // processes)
        for size in sizes:
            if size % (micro * processes):
                raise LayoutError(
                    "global_batch_size" if size == self.global_batch_size else "batch_ramp_up",
                    f"{size} is not a multiple of `micro_batch_size={micro}` x {processes} processes",
                )
        return micro, self.global_batch_size // processes // micro


@dataclass(frozen=True)
class OptimizerOptions:
    """The optimizer and its peak learning rate.

    Sources of the default learning rates: `pretrain` from scratch as Llama 3 8B (arXiv 2407.21783, table 3), from
    weights as dLLM's adaptation of autoregressive models (its examples/a2d/mdlm/pt.py); `sft` as LLaDA (arXiv
    2502.09992, section 2.3); `rl` with an adapter as d1 (arXiv 2504.12216), whose LoRA has rank 128. Fine-tuning an
    adapter takes ten times the rate of all weights ("LoRA Without Regret", thinkingmachines.ai, 2025).
    """

    optimizer: str = option(
        "adamw", "adamw; muon for the layers' matrices; sgd (--engine megatron).", formerly="name",
        choices=("adamw", "muon", "sgd"), tasks=TRAINING, fixed=True, common=True,
    )  # fmt: skip
    lr: float = option(
        1e-4, "Peak learning rate. An adapter and --from-scratch have higher defaults.", minimum=0,
        task_defaults={"sft": 2.5e-5, "rl": 1e-6}, aliases=("learning_rate",), common=True,
    )  # fmt: skip
    weight_decay: float = option(
        0.1,
        "Weight decay of all parameters except biases and norms.",
        minimum=0,
        task_defaults={"rl": 0.0},
        common=True,
    )
    beta1: float = option(0.9, "AdamW's first beta.", minimum=0, below=1, aliases=("adam_beta1",))
    beta2: float = option(0.95, "AdamW's second beta.", minimum=0, below=1, aliases=("adam_beta2",))
    adam_eps: float = option(1e-8, "AdamW's epsilon.", minimum=0, aliases=("adam_epsilon",))
    muon_momentum: float = option(
        0.95, "Muon's momentum.", minimum=0, below=1, tasks=TRAINING, needs=("optimizer", "muon")
    )
    clip_grad: float = option(
        1.0, "Gradient clipping norm; 0 turns clipping off.", minimum=0, aliases=("max_grad_norm",)
    )
    ema_decay: float = option(
        0.0, "Decay of the moving average of the weights, saved in each checkpoint; 0: no average.", minimum=0,
        below=1, tasks=TRAINING, fixed=True,
    )  # fmt: skip
    optimizer_cpu_offload: bool = megatron_option(
        False, "Keep the optimizer's state on the CPU, and run its step there.", formerly="cpu_offload"
    )


def default_learning_rate(task: str, adapts: bool, from_scratch: bool) -> float | None:
    """Default of `lr` for an adapter or from scratch; None: the task's. `OptimizerOptions` gives the sources."""
    if adapts:
        return 3e-6 if task == "rl" else 2.5e-4
    return 3e-4 if from_scratch and task == "pretrain" else None


def check_optimizer(name: str, engine: str) -> None:
    """Raise SettingError for an optimizer that an engine does not support."""
    if (needed := OPTIMIZER_ENGINES.get(name, engine)) != engine:
        raise SettingError("optimizer", f"{name} needs `engine={needed}`")


@dataclass(frozen=True)
class ScheduleOptions:
    """Length of a run, and its learning rate schedule. The length is one of `LENGTHS`; once the data are known,
    `train.schedule.with_steps` replaces it by `steps`."""

    steps: int | None = option(
        None, "Optimizer steps.", minimum=1, task_defaults={"rl": 1000}, aliases=("max_steps", "train_iters"),
        common=True,
    )  # fmt: skip
    epochs: int | None = option(
        None, "Passes over the training data, instead of --steps. A resumed run keeps its number of steps.", minimum=1,
        tasks=TRAINING, task_defaults={"sft": 3}, aliases=("num_train_epochs", "num_epochs"), common=True,
    )  # fmt: skip
    tokens: int | None = option(
        None, "Tokens to train on, instead of --steps. A resumed run keeps its number of steps.", minimum=1,
        tasks=("pretrain",), common=True,
    )  # fmt: skip
    lr_schedule: str = option(
        "cosine", "cosine, linear, constant, wsd (constant, then a final decay) or inverse-square-root.",
        formerly="name", choices=("cosine", "linear", "constant", "wsd", "inverse-square-root"),
        task_defaults={"rl": "constant"}, aliases=("lr_scheduler_type",), common=True,
    )  # fmt: skip
    warmup_steps: int = option(0, "Steps of linear warm-up.", minimum=0, common=True)
    min_lr: float = option(0.0, "Minimum learning rate, reached at the end of the decay.", minimum=0)
    lr_decay_steps: int | None = option(
        None, "Step at which the decay ends. Default: --steps. Keep it when a larger --steps prolongs a run.",
        minimum=1,
    )  # fmt: skip
    wsd_decay_steps: int | None = option(
        None, "Number of final steps in which wsd decays. Default: a tenth.", minimum=1, needs=("lr_schedule", "wsd")
    )
    wsd_decay_style: str = option(
        "exponential", "exponential, linear, cosine or minus-sqrt.",
        choices=("exponential", "linear", "cosine", "minus-sqrt"), needs=("lr_schedule", "wsd"),
    )  # fmt: skip
    exit_duration: float | None = option(None, "Minutes after which the run saves and exits.", minimum=0)
    early_stopping_patience: int | None = option(
        None, "End after N validations without a lower loss, and keep the best checkpoint.", minimum=1,
        tasks=TRAINING, common=True, metavar="N",
    )  # fmt: skip

    @property
    def last_step(self) -> int:
        """Number of steps, once `with_steps` has set it."""
        assert self.steps is not None, "the number of steps is not known yet"
        return self.steps

    @property
    def decay_end(self) -> int:
        """Step at which the learning rate reaches its minimum."""
        return self.lr_decay_steps or self.last_step


@dataclass(frozen=True)
class ParallelOptions:
    """Distribution of weights, optimizer state, sequences and experts over the processes."""

    sharding: str = accelerate_option(
        "none", "none (replicated) or fsdp (FSDP2: shard weights, gradients and optimizer state).",
        choices=("none", "fsdp"), common=True,
    )  # fmt: skip
    fsdp_replicas: int = accelerate_option(
        1, "With --sharding fsdp: number of process groups with a full copy each (HSDP).", minimum=1,
        needs=("sharding", "fsdp"),
    )  # fmt: skip
    cpu_offload: bool = accelerate_option(
        False, "With --sharding fsdp: keep weights and optimizer state in CPU memory.", needs=("sharding", "fsdp")
    )  # fmt: skip
    rank_timeout: float = option(
        10.0, "Minutes without a heartbeat of a process after which the run ends and names it; 0: never.", minimum=0
    )
    tp: int = megatron_option(
        1, "Tensor parallel size.", minimum=1, aliases=("tensor_model_parallel_size",), common=True
    )
    pp: int = megatron_option(1, "Pipeline parallel size.", minimum=1, aliases=("pipeline_model_parallel_size",))
    vp: int = megatron_option(1, "Virtual pipeline chunks per pipeline rank.", minimum=1)
    pipeline_split: str | None = megatron_option(None, "Layers of uneven stages: FIRST,LAST or one number per stage.")
    cp: int = megatron_option(
        1, "Context parallel size.", minimum=1, refusals={"auto": DYNAMIC_CP}, aliases=("context_parallel_size",)
    )
    cp_comm_type: str = megatron_option("p2p", "Context parallel communication: p2p, a2a, allgather or a2a+p2p.")
    hierarchical_cp_sizes: str | None = megatron_option(None, "Inner,outer sizes of a2a+p2p, such as 2,4.")
    ep: int = megatron_option(1, "Expert parallel size.", minimum=1, aliases=("expert_model_parallel_size",))
    etp: int | None = megatron_option(
        None, "Expert tensor parallel size. Default: --tp.", minimum=1, aliases=("expert_tensor_parallel_size",)
    )
    sequence_parallel: bool | None = megatron_option(
        None, "Shard activations over tp. Default: on if --tp is above 1."
    )
    tp_overlap: bool = megatron_option(
        False, "Overlap tensor parallel communication with matrix products; needs Transformer Engine.", tasks=TRAINING
    )
    distributed_optimizer: bool = megatron_option(
        True, "Shard AdamW's state over data parallel ranks (ZeRO-1).", fixed=True
    )
    optimizer_instances: int = megatron_option(
        1, "Number of replicas of the sharded optimizer state, such as one per node (HSDP with --fsdp).",
        minimum=1, tasks=TRAINING,
    )  # fmt: skip
    fsdp: str | None = megatron_option(
        None, "Megatron FSDP that shards optim, optim_grads or optim_grads_params.",
        choices=("optim", "optim_grads", "optim_grads_params"), tasks=TRAINING,
    )  # fmt: skip
    overlap_communication: bool = megatron_option(True, "Overlap communication with computation.")
    moe_dispatcher: str = megatron_option(
        "alltoall", "Dispatch of tokens to experts: auto, alltoall, allgather, flex.",
        choices=("auto", "alltoall", "allgather", "flex"),
    )  # fmt: skip
    moe_shared_expert_overlap: bool = megatron_option(False, "Overlap shared experts with the dispatcher.")
    ep_overlap: bool = megatron_option(
        False, "Overlap the dispatch of tokens to experts with another micro-batch's computation.", tasks=TRAINING
    )

    @property
    def shards(self) -> bool:
        """True if each process of the Accelerate engine has a shard of the weights."""
        return self.sharding == "fsdp"

    @property
    def expert_tp(self) -> int:
        """Tensor parallel size of experts."""
        return self.tp if self.etp is None else self.etp

    @property
    def hierarchy(self) -> tuple[int, ...] | None:
        """Sizes of `hierarchical_cp_sizes`, or None. Raises SettingError."""
        return tuple(whole_numbers("hierarchical_cp_sizes", self.hierarchical_cp_sizes)) or None

    @property
    def layout(self) -> Layout:
        """Layout of the weights. Raises LayoutError."""
        split = {} if self.pipeline_split is None else parse_pipeline_split(self.pipeline_split, self.pp, self.vp)
        return Layout(tp=self.tp, pp=self.pp, vp=self.vp, ep=self.ep, etp=self.etp, **split)

    @property
    def context(self) -> ContextParallelConfig:
        """Layout of the sequences. Raises LayoutError."""
        return ContextParallelConfig(self.cp, self.cp_comm_type, self.hierarchy)

    @property
    def sharded_sequence(self) -> bool:
        """True if sequence parallelism is on."""
        return self.tp > 1 if self.sequence_parallel is None else self.sequence_parallel and self.tp > 1


@dataclass(frozen=True)
class PrecisionOptions:
    """Number formats of weights and matrix products."""

    precision: str = option(
        "auto", "fp32, bf16, fp16, fp8, or auto: bf16 on a GPU that has it, else fp32.", formerly="name",
        choices=("auto", *PRECISIONS), aliases=("mixed_precision",), common=True,
    )  # fmt: skip
    fp8_format: str = megatron_option(
        "hybrid", "With --precision fp8: hybrid or e4m3.", choices=("hybrid", "e4m3"), needs=("precision", "fp8"),
        tasks=TRAINING,
    )  # fmt: skip
    fp8_recipe: str = megatron_option(
        "delayed", "With --precision fp8: delayed, tensorwise, blockwise, mxfp8 scaling.",
        choices=("delayed", "tensorwise", "blockwise", "mxfp8"), needs=("precision", "fp8"), tasks=TRAINING,
    )  # fmt: skip
    fp8_params: bool = megatron_option(False, "Store the weights in FP8.", needs=("precision", "fp8"), tasks=TRAINING)


@dataclass(frozen=True)
class CheckpointOptions:
    """Output folder, and steps of checkpoints."""

    output: str = option("", "Folder of the run.", aliases=("output_dir",), common=True)
    save_interval: int = option(1000, "Steps between checkpoints, 0: only the last.", minimum=0, common=True)
    save_steps: str | None = option(None, "Additional steps of checkpoints, such as 10,50.")
    push_to_hub: str | None = option(
        None, "Hub repository (owner/name) to which the last checkpoint is uploaded when the run has finished.",
        aliases=("hub_model_id",),
    )  # fmt: skip
    hub_private: bool = option(False, "Create the repository as private.", needs=("push_to_hub", None))
    keep_last: int = option(0, "Number of checkpoints to keep; 0: all.", minimum=0, aliases=("save_total_limit",))
    stopped_exit_code: int = option(
        0,
        "Exit code of a run that stopped early, by SIGTERM or --exit-duration, such as 75 for a scheduler.",
        minimum=0,
    )
    async_save: bool = megatron_option(False, "Write checkpoints in the background.", tasks=TRAINING)
    local_folder: str | None = megatron_option(
        None, "Folder on each node's own disk, or in its memory, for local checkpoints.", tasks=TRAINING
    )
    local_interval: int = megatron_option(
        100, "Steps between local checkpoints.", minimum=1, needs=("local_folder", None), tasks=TRAINING
    )
    local_copies: int = megatron_option(
        1,
        "Number of nodes that store each rank's local checkpoint.",
        minimum=1,
        needs=("local_folder", None),
        tasks=TRAINING,
    )

    @cached_property
    def saves(self) -> frozenset[int]:
        """Steps of `save_steps`. Raises SettingError."""
        steps = frozenset(whole_numbers("save_steps", self.save_steps))
        if steps and min(steps) < 1:
            raise SettingError("save_steps", f"{self.save_steps}: steps count from 1")
        return steps


@dataclass(frozen=True)
class LoggingOptions:
    """Validation, text samples, profiles, norms and trackers."""

    eval_interval: int = option(
        100, "Steps between validations; 0: never.", minimum=0, aliases=("eval_steps",), common=True
    )
    eval_batches: int = option(8, "Maximum number of global batches per validation.", minimum=1, tasks=TRAINING)
    sample_interval: int = option(
        0, "Steps between sampled texts in DIR/samples.jsonl; 0: never.", minimum=0, tasks=TRAINING
    )
    sample_prompt: list[str] = option(
        [], "Prompt of a sampled text, or @FILE with one prompt per line. May be repeated.", tasks=TRAINING
    )
    sample_length: int = option(64, "Number of tokens of a sampled text.", minimum=1, tasks=TRAINING)
    profile_steps: str | None = option(
        None, "Steps A:B to profile on rank 0, such as 10:12. The trace is in DIR/profile.", tasks=TRAINING
    )
    norm_interval: int = option(
        0, "Steps between norms of parameters and of each layer's gradients in metrics.jsonl, 0: never.", minimum=0,
        tasks=TRAINING,
    )  # fmt: skip
    trackers: str | None = option(
        None, "tensorboard, wandb, trackio, mlflow, several (with commas) or none.", aliases=("report_to",),
        common=True,
    )  # fmt: skip
    tracker_project: str | None = option(
        None, "Project (MLflow: experiment) of the trackers. Default: WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME, or "
        "dlm-bridge.", aliases=("wandb_project",),
    )  # fmt: skip
    run_name: str | None = option(
        None, "Name of the run in the trackers. Default: WANDB_NAME or MLFLOW_RUN_NAME, or the name of --output.",
        aliases=("wandb_exp_name",),
    )  # fmt: skip
    straggler_interval: int = megatron_option(
        0, "Steps between reports of the slowest rank; 0: no reports.", minimum=0, tasks=TRAINING
    )

    @property
    def profiled(self) -> range:
        """Steps of `profile_steps`; empty by default. Raises SettingError."""
        if self.profile_steps is None:
            return range(0)
        first, _, last = self.profile_steps.partition(":")
        if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
            raise SettingError("profile_steps", f"{self.profile_steps} must be FIRST:LAST, such as 10:12")
        return range(int(first), int(last) + 1)

    @property
    def tracker_names(self) -> list[str]:
        """Names of the trackers. Raises SettingError for an unknown one."""
        names = [name for name in comma_separated(self.trackers) if name != "none"]
        for name in names:
            check_choice("trackers", name, TRACKERS)
        return names


@dataclass(frozen=True)
class EngineOptions:
    """Engine, kernels and activation memory."""

    engine: str = option(
        "accelerate", "accelerate (replicas or FSDP2) or megatron (megatron-core).", formerly="name", choices=ENGINES,
        fixed=True, common=True,
    )  # fmt: skip
    attention_backend: str | None = option(
        None,
        "flash: FlashAttention 4. With --engine accelerate: sdpa, eager, ...; with megatron: auto, fused, unfused.",
        aliases=("attn_implementation",),
    )  # fmt: skip
    compile: bool | None = accelerate_option(
        None, "Compile the decoder layers. Default: on if there is a GPU.", tasks=TRAINING
    )
    gradient_checkpointing: bool = accelerate_option(False, "Recompute activations to save memory.", common=True)
    recompute: str = megatron_option(
        "none", "Activations to recompute: none, selective or full.", choices=("none", "selective", "full"),
        aliases=("recompute_granularity",),
    )  # fmt: skip
    recompute_modules: str | None = megatron_option(
        None, "For selective: core_attn,layernorm,mlp,moe,moe_act,...", needs=("recompute", "selective")
    )
    recompute_layers: int | None = megatron_option(
        None, "For full: number of recomputed layers per stage. Default: all.", minimum=1, needs=("recompute", "full")
    )
    moe_grouped_gemm: bool | None = megatron_option(
        None, "Grouped matrix product of experts. Default: on with Transformer Engine."
    )
    cuda_graphs: bool = megatron_option(
        False,
        "Record dense layers in CUDA graphs, for rows without attention masks. Experimental.",
        tasks=("pretrain",),
    )
    megatron: list[str] = option(
        [], "Other settings of megatron-core: transformer.KEY=VALUE, ddp.KEY=VALUE, optimizer.KEY=VALUE.",
        engine="megatron",
    )  # fmt: skip

    @property
    def recomputed(self) -> list[str]:
        """Modules of selective recomputation."""
        return comma_separated(self.recompute_modules) or ["core_attn"]

    def passed_through(self, group: str) -> dict[str, Any]:
        """Settings of one of `PASSED_THROUGH` in `megatron`, with values parsed as YAML. Raises SettingError."""
        found = {}
        for setting in self.megatron:
            name, equals, value = setting.partition("=")
            target, dot, key = name.partition(".")
            if not (equals and dot and key) or target not in PASSED_THROUGH:
                raise SettingError(
                    "megatron", f"{setting}: write GROUP.KEY=VALUE with a group of {', '.join(PASSED_THROUGH)}"
                )
            if target == group:
                found[key] = yaml_value("megatron", value)
        return found


def yaml_value(field: str, text: str) -> Any:
    """Parse a value as YAML. Raises SettingError."""
    try:
        return parse_yaml(text)
    except ValueError:
        raise SettingError(field, f"{text!r} is not a YAML value") from None
