"""The sections of a training configuration but the objective's: every option, declared once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dlm_bridge.files.reading import parse_yaml
from dlm_bridge.mapping.layout import ContextParallelConfig, Layout, parse_pipeline_split
from dlm_bridge.registration import registered
from dlm_bridge.settings import (
    TRAINING,
    SettingError,
    accelerate_option,
    comma_separated,
    megatron_option,
    option,
    whole_numbers,
)

ENGINES = tuple(dict.fromkeys(["accelerate", "megatron", *registered("engines")]))  # megatron: known where absent
PASSED_THROUGH = ("transformer", "ddp", "optimizer")  # megatron-core's configuration classes
OPTIMIZER_ENGINES = {"sgd": "megatron"}  # the others are both engines'
TRACKERS = ("tensorboard", "wandb")
DYNAMIC_CP = (
    "megatron-core runs dynamic context parallelism on batches of its own, without masks: pack rows, and take the "
    'smallest --cp at which one fits (docs/megatron.md, "Documents of very different lengths")'
)


@dataclass(frozen=True)
class ModelOptions:
    """Which model is trained: its weights, or an adapter of them."""

    model: str = option(
        "", "Hub folder or id, Megatron checkpoint, or a config.json's folder.", formerly="path",
        aliases=("model_name_or_path",), common=True,
    )  # fmt: skip
    family: str | None = option(None, "The model family, where config.json does not determine it.", fixed=True)
    mask_token_id: int | None = option(None, "Where the model's config has none; the family's by default.", fixed=True)
    tokenizer: str | None = option(None, "Folder or id; the model's own by default.", common=True)
    chat_template: str | None = option(
        None, "Jinja file, or name of one of the tokenizer's templates or TRL's; the tokenizer's own by default.",
        tasks=("sft", "rl"), fixed=True, common=True,
    )  # fmt: skip
    from_scratch: bool = option(
        False, "Initialise from config.json and --seed; --from-weights, the default: from the weights beside it.",
        negative="--from-weights", tasks=TRAINING, common=True,
    )  # fmt: skip
    lora_rank: int = option(
        0, "Train a LoRA adapter of this rank instead of the weights, 0: none.", minimum=0, fixed=True,
        aliases=("lora_r",), common=True,
    )  # fmt: skip
    lora_alpha: float | None = option(
        None, "Its scale times its rank; twice the rank by default.", above=0, needs=("lora_rank", None), fixed=True,
        common=True,
    )  # fmt: skip
    lora_dropout: float = accelerate_option(
        0.0, "Dropout before the adapter.", minimum=0, below=1, needs=("lora_rank", None)
    )
    lora_targets: str | None = option(
        None, "Layers with an adapter: q_proj,v_proj,experts; the family's by default.", needs=("lora_rank", None),
        fixed=True, aliases=("lora_target_modules",),
    )  # fmt: skip
    lora_dora: bool = option(
        False,
        "Train DoRA: the adapter has a magnitude of each output row too.",
        needs=("lora_rank", None),
        fixed=True,
    )
    lora_mask_only: bool = accelerate_option(
        False, "The adapter acts at mask tokens alone, of objective idlm: all others are the base's.",
        needs=("lora_rank", None), tasks=TRAINING, fixed=True,
    )  # fmt: skip
    lora_quantize: str | None = accelerate_option(
        None, "Quantize the base's linear layers to 4bit (NF4) or 8bit, with bitsandbytes.", choices=("4bit", "8bit"),
        fixed=True, common=True,
    )  # fmt: skip
    adapter: str | None = option(None, "Folder of a PEFT LoRA adapter of --model to continue.", fixed=True)

    @property
    def adapts(self) -> bool:
        """Whether an adapter is trained instead of the weights."""
        return self.lora_rank > 0 or self.adapter is not None


@dataclass(frozen=True)
class DataOptions:
    """What a step reads."""

    data: list[str] = option(
        [], "Training data. May be repeated.", formerly="paths", aliases=("dataset", "train_file"), common=True
    )
    valid_data: list[str] = option(
        [], "Validation data, in place of a part of --data. May be repeated.", formerly="valid_paths", tasks=TRAINING,
        aliases=("validation_file",), common=True,
    )  # fmt: skip
    split: str = option("99,1,0", "Training, validation and test fractions.", tasks=TRAINING, fixed=True)
    seq_length: int = option(
        1024, "Tokens per sequence.", minimum=1, fixed=True, aliases=("max_seq_length", "max_length"), common=True
    )
    global_batch_size: int = option(32, "Sequences per step, over all processes.", minimum=1, fixed=True, common=True)
    micro_batch_size: int | None = option(
        None, "Sequences per forward pass of a process.", minimum=1, aliases=("per_device_train_batch_size",),
        common=True,
    )  # fmt: skip
    batch_ramp_up: str | None = option(
        None, "START,INCREMENT,SAMPLES: the batch grows to --global-batch-size over so many sequences.",
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
        None, "EOS tokens trained as part of the answer: none, to the end of a block, or of the row; the family's.",
        choices=("none", "block", "row"), tasks=("sft",), fixed=True,
    )  # fmt: skip
    train_on_prompt: bool | None = option(
        None, "Mask and count prompts as well; the family's default.", tasks=("sft",), fixed=True
    )

    @property
    def split_fractions(self) -> tuple[float, float, float]:
        """The train, validation and test fractions, which add up to one. Raises SettingError."""
        try:
            numbers = [float(part) for part in self.split.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) != 3 or min(numbers) < 0 or numbers[0] <= 0 or not math.isfinite(sum(numbers)):
            raise SettingError(
                "split", f"{self.split!r} must be three fractions such as 99,1,0, the first of them positive"
            )
        return (numbers[0] / sum(numbers), numbers[1] / sum(numbers), numbers[2] / sum(numbers))

    @cached_property
    def batch_sizes(self) -> tuple[int, ...]:
        """The global batch sizes of `batch_ramp_up`, in order, and the final one. Raises SettingError."""
        if self.batch_ramp_up is None:
            return (self.global_batch_size,)
        numbers = whole_numbers("--batch-ramp-up", self.batch_ramp_up)
        if len(numbers) != 3 or min(numbers) < 1:
            raise self._ramp_error("must be START,INCREMENT,SAMPLES, such as 32,32,100000")
        start, increment, _ = numbers
        if start >= self.global_batch_size or (self.global_batch_size - start) % increment:
            raise self._ramp_error(
                f"does not reach --global-batch-size {self.global_batch_size} from {start} in steps of {increment}"
            )
        return tuple(range(start, self.global_batch_size + 1, increment))

    @property
    def samples_per_size(self) -> float:
        """How many samples a run reads with each batch size but the last."""
        if self.batch_ramp_up is None:
            return 0.0
        return whole_numbers("--batch-ramp-up", self.batch_ramp_up)[2] / (len(self.batch_sizes) - 1)

    def _ramp_error(self, message: str) -> SettingError:
        return SettingError("batch_ramp_up", f"{self.batch_ramp_up} {message}")

    def accumulation(self, processes: int) -> tuple[int, int]:
        """(micro-batch size, micro-batches per step) of each process, with the largest batch. Raises SettingError if a
        global batch is not micro-batch size x processes x a whole number."""
        sizes = self.batch_sizes
        flags = {self.global_batch_size: "--global-batch-size"}
        for size in sizes:
            if size % processes:
                raise SettingError(
                    flags.get(size, "--batch-ramp-up"),
                    f"{size} does not divide over {processes} processes: take a multiple of {processes}",
                )
        micro = self.micro_batch_size or math.gcd(*sizes) // processes
        for size in sizes:
            if size // processes % micro:
                raise SettingError(
                    flags.get(size, "--batch-ramp-up"),
                    f"{size} is not --micro-batch-size {micro} x {processes} processes x an integer: make it a "
                    f"multiple of {micro * processes}",
                )
        return micro, self.global_batch_size // processes // micro


@dataclass(frozen=True)
class OptimizerOptions:
    """The optimizer and its peak learning rate."""

    optimizer: str = option(
        "adamw", "adamw; muon for the layers' matrices; sgd (--engine megatron).", formerly="name",
        choices=("adamw", "muon", "sgd"), tasks=TRAINING, fixed=True, common=True,
    )  # fmt: skip
    lr: float = option(
        3e-4, "Peak learning rate.", minimum=0, task_defaults={"sft": 2.5e-5, "rl": 1e-6}, aliases=("learning_rate",),
        common=True,
    )  # fmt: skip
    weight_decay: float = option(
        0.1, "Of all but biases and norms.", minimum=0, task_defaults={"rl": 0.0}, common=True
    )
    beta1: float = option(0.9, "AdamW's first beta.", minimum=0, below=1, aliases=("adam_beta1",))
    beta2: float = option(0.95, "AdamW's second beta.", minimum=0, below=1, aliases=("adam_beta2",))
    adam_eps: float = option(1e-8, "AdamW's epsilon.", minimum=0, aliases=("adam_epsilon",))
    muon_momentum: float = option(
        0.95, "Muon's momentum.", minimum=0, below=1, tasks=TRAINING, needs=("optimizer", "muon")
    )
    clip_grad: float = option(1.0, "Largest gradient norm, 0: no clipping.", minimum=0, aliases=("max_grad_norm",))
    ema_decay: float = option(
        0.0, "Decay of the weights' moving average, saved in each checkpoint, 0: none.", minimum=0, below=1,
        tasks=TRAINING, fixed=True,
    )  # fmt: skip
    optimizer_cpu_offload: bool = megatron_option(
        False, "Keep the optimizer's state and step on the CPU.", formerly="cpu_offload"
    )


def check_optimizer(name: str, engine: str) -> None:
    """Raise SettingError for an optimizer that an engine does not have."""
    if (needed := OPTIMIZER_ENGINES.get(name, engine)) != engine:
        raise SettingError("optimizer", f"{name} needs --engine {needed}")


@dataclass(frozen=True)
class ScheduleOptions:
    """How long a run takes, and the learning rate over its steps."""

    steps: int = option(1000, "Optimizer steps.", minimum=1, aliases=("max_steps", "train_iters"), common=True)
    lr_schedule: str = option(
        "cosine", "cosine, linear, constant, wsd (constant until a last decay) or inverse-square-root.",
        formerly="name", choices=("cosine", "linear", "constant", "wsd", "inverse-square-root"),
        task_defaults={"rl": "constant"}, aliases=("lr_scheduler_type",), common=True,
    )  # fmt: skip
    warmup_steps: int = option(0, "Steps of linear warm-up.", minimum=0, common=True)
    min_lr: float = option(0.0, "Learning rate at the last step, or the least.", minimum=0)
    lr_decay_steps: int | None = option(
        None, "The step at which the decay ends, --steps by default: keep it where a longer --steps prolongs a run.",
        minimum=1,
    )  # fmt: skip
    wsd_decay_steps: int | None = option(
        None, "The last steps, in which wsd decays; a tenth by default.", minimum=1, needs=("lr_schedule", "wsd")
    )
    wsd_decay_style: str = option(
        "exponential", "exponential, linear, cosine or minus-sqrt.",
        choices=("exponential", "linear", "cosine", "minus-sqrt"), needs=("lr_schedule", "wsd"),
    )  # fmt: skip
    exit_duration: float | None = option(None, "Minutes after which the run saves and exits.", minimum=0)

    @property
    def decay_end(self) -> int:
        """The step at which the learning rate reaches its least."""
        return self.lr_decay_steps or self.steps


@dataclass(frozen=True)
class ParallelOptions:
    """How weights, optimizer state, sequences and experts are distributed over the processes."""

    sharding: str = accelerate_option(
        "none", "Over processes: none (replicated) or fsdp (FSDP2: weights, gradients and optimizer state).",
        choices=("none", "fsdp"), common=True,
    )  # fmt: skip
    fsdp_replicas: int = accelerate_option(
        1, "With --sharding fsdp: groups of processes that each hold all shards (HSDP).", minimum=1,
        needs=("sharding", "fsdp"),
    )  # fmt: skip
    cpu_offload: bool = accelerate_option(
        False, "With --sharding fsdp: keep weights and optimizer state in CPU memory.", needs=("sharding", "fsdp")
    )  # fmt: skip
    rank_timeout: float = option(
        10.0, "Minutes without a sign of life of a process after which the run ends and names it, 0: never.", minimum=0
    )
    tp: int = megatron_option(
        1, "Tensor parallel size.", minimum=1, aliases=("tensor_model_parallel_size",), common=True
    )
    pp: int = megatron_option(1, "Pipeline parallel size.", minimum=1, aliases=("pipeline_model_parallel_size",))
    vp: int = megatron_option(1, "Virtual pipeline chunks per pipeline rank.", minimum=1)
    pipeline_split: str | None = megatron_option(None, "Layers of uneven stages: FIRST,LAST or one per stage.")
    cp: int = megatron_option(
        1, "Context parallel size.", minimum=1, refusals={"auto": DYNAMIC_CP}, aliases=("context_parallel_size",)
    )
    cp_comm_type: str = megatron_option("p2p", "Context parallel communication: p2p, a2a, allgather or a2a+p2p.")
    hierarchical_cp_sizes: str | None = megatron_option(None, "Inner,outer sizes of a2a+p2p, such as 2,4.")
    ep: int = megatron_option(1, "Expert parallel size.", minimum=1, aliases=("expert_model_parallel_size",))
    etp: int | None = megatron_option(
        None, "Expert tensor parallel size; tp by default.", minimum=1, aliases=("expert_tensor_parallel_size",)
    )
    sequence_parallel: bool | None = megatron_option(None, "Shard activations over tp; on where tp is above 1.")
    tp_overlap: bool = megatron_option(
        False, "Overlap tensor parallel communication with matrix products; needs Transformer Engine.", tasks=TRAINING
    )
    distributed_optimizer: bool = megatron_option(
        True, "Shard AdamW's state over data parallel ranks (ZeRO-1).", fixed=True
    )
    optimizer_instances: int = megatron_option(
        1, "Groups of data parallel ranks that each hold a whole sharded state, such as nodes (HSDP with --fsdp).",
        minimum=1, tasks=TRAINING,
    )  # fmt: skip
    fsdp: str | None = megatron_option(
        None, "Megatron FSDP instead: optim, optim_grads, optim_grads_params.",
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
        """Whether each process of the Accelerate engine holds a shard of the weights."""
        return self.sharding == "fsdp"

    @property
    def expert_tp(self) -> int:
        """The tensor parallel size of experts."""
        return self.tp if self.etp is None else self.etp

    @property
    def hierarchy(self) -> tuple[int, ...] | None:
        """The sizes of `hierarchical_cp_sizes`; None without. Raises SettingError."""
        return tuple(whole_numbers("--hierarchical-cp-sizes", self.hierarchical_cp_sizes)) or None

    @property
    def layout(self) -> Layout:
        """The layout of the weights. Raises DlmBridgeError."""
        split = {} if self.pipeline_split is None else parse_pipeline_split(self.pipeline_split, self.pp, self.vp)
        return Layout(tp=self.tp, pp=self.pp, vp=self.vp, ep=self.ep, etp=self.etp, **split)

    @property
    def context(self) -> ContextParallelConfig:
        """The layout of the sequences. Raises DlmBridgeError."""
        return ContextParallelConfig(self.cp, self.cp_comm_type, self.hierarchy)

    @property
    def sharded_sequence(self) -> bool:
        """Whether sequence parallelism is on."""
        return self.tp > 1 if self.sequence_parallel is None else self.sequence_parallel and self.tp > 1


@dataclass(frozen=True)
class PrecisionOptions:
    """Number formats of weights and matrix products."""

    precision: str = option(
        "fp32", "fp32, bf16, fp16 or fp8.", formerly="name", choices=("fp32", "bf16", "fp16", "fp8"),
        aliases=("mixed_precision",), common=True,
    )  # fmt: skip
    fp8_format: str = megatron_option(
        "hybrid", "With --precision fp8: hybrid or e4m3.", choices=("hybrid", "e4m3"), needs=("precision", "fp8"),
        tasks=TRAINING,
    )  # fmt: skip
    fp8_recipe: str = megatron_option(
        "delayed", "With --precision fp8: delayed, tensorwise, blockwise, mxfp8 scaling.",
        choices=("delayed", "tensorwise", "blockwise", "mxfp8"), needs=("precision", "fp8"), tasks=TRAINING,
    )  # fmt: skip
    fp8_params: bool = megatron_option(
        False, "Keep the weights themselves in FP8.", needs=("precision", "fp8"), tasks=TRAINING
    )


@dataclass(frozen=True)
class CheckpointOptions:
    """Where a run writes, and when it saves."""

    output: str = option("", "The run's folder.", aliases=("output_dir",), common=True)
    save_interval: int = option(1000, "Steps between checkpoints, 0: only the last.", minimum=0, common=True)
    save_steps: str | None = option(None, "Further steps to save at, such as 10,50.")
    keep_last: int = option(0, "Checkpoints to keep, 0: all.", minimum=0, aliases=("save_total_limit",), common=True)
    async_save: bool = megatron_option(False, "Write checkpoints in the background.", tasks=TRAINING)
    local_folder: str | None = megatron_option(
        None, "Folder on each node's own disk, or in its memory, for local checkpoints.", tasks=TRAINING
    )
    local_interval: int = megatron_option(
        100, "Steps between local checkpoints.", minimum=1, needs=("local_folder", None), tasks=TRAINING
    )
    local_copies: int = megatron_option(
        1, "Nodes that hold each rank's local checkpoint.", minimum=1, needs=("local_folder", None), tasks=TRAINING
    )

    @cached_property
    def saves(self) -> frozenset[int]:
        """The steps of `save_steps`. Raises SettingError."""
        steps = frozenset(whole_numbers("--save-steps", self.save_steps))
        if steps and min(steps) < 1:
            raise SettingError("save_steps", f"{self.save_steps}: steps count from 1")
        return steps


@dataclass(frozen=True)
class LoggingOptions:
    """What is measured beside the training loss."""

    eval_interval: int = option(
        100, "Steps between validations, 0: never.", minimum=0, aliases=("eval_steps",), common=True
    )
    eval_batches: int = option(8, "Global batches that a validation reads at most.", minimum=1, tasks=TRAINING)
    sample_interval: int = option(
        0, "Steps between sampled texts in DIR/samples.jsonl, 0: never.", minimum=0, tasks=TRAINING
    )
    sample_prompt: list[str] = option(
        [], "Prompt of a sampled text; @FILE: one prompt per line. May be repeated.", tasks=TRAINING
    )
    sample_length: int = option(64, "Tokens of a sampled text.", minimum=1, tasks=TRAINING)
    profile_steps: str | None = option(
        None, "Steps A:B of which rank 0 writes a trace to DIR/profile, such as 10:12.", tasks=TRAINING
    )
    norm_interval: int = option(
        0, "Steps between norms of parameters and of each layer's gradients in metrics.jsonl, 0: never.", minimum=0,
        tasks=TRAINING,
    )  # fmt: skip
    trackers: str | None = option(
        None, "tensorboard, wandb, or both with a comma; none.", aliases=("report_to",), common=True
    )
    straggler_interval: int = megatron_option(
        0, "Steps between reports of the slowest rank, 0: none.", minimum=0, tasks=TRAINING
    )

    @property
    def profiled(self) -> range:
        """The steps of `profile_steps`, none without it. Raises SettingError."""
        if self.profile_steps is None:
            return range(0)
        first, _, last = self.profile_steps.partition(":")
        if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
            raise SettingError("profile_steps", f"{self.profile_steps} must be FIRST:LAST, such as 10:12")
        return range(int(first), int(last) + 1)

    @property
    def tracker_names(self) -> list[str]:
        """The trackers. Raises SettingError for an unknown one."""
        names = [name for name in comma_separated(self.trackers) if name != "none"]
        for name in names:
            if name not in TRACKERS:
                raise SettingError("trackers", f"{name} is unknown: known are {', '.join(TRACKERS)}")
        return names


@dataclass(frozen=True)
class EngineOptions:
    """The engine, its kernels and its memory."""

    engine: str = option(
        "accelerate", "accelerate (one machine) or megatron (megatron-core).", formerly="name", choices=ENGINES,
        fixed=True, common=True,
    )  # fmt: skip
    attention_backend: str | None = option(
        None,
        "flash: FlashAttention 4. With --engine accelerate: sdpa, eager, ...; with megatron: auto, fused, unfused.",
        aliases=("attn_implementation",),
    )  # fmt: skip
    compile: bool | None = accelerate_option(
        None, "Compile the decoder layers; on by default on a GPU.", tasks=TRAINING
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
        None, "For full: recomputed layers per stage; all by default.", minimum=1, needs=("recompute", "full")
    )
    moe_grouped_gemm: bool | None = megatron_option(
        None, "Grouped matrix product of experts; on with Transformer Engine."
    )
    cuda_graphs: bool = megatron_option(
        False,
        "Record dense layers in CUDA graphs; for rows without attention masks. Experimental.",
        tasks=("pretrain",),
    )
    megatron: list[str] = option(
        [], "megatron-core's other settings: transformer.KEY=VALUE, ddp.KEY=VALUE, optimizer.KEY=VALUE.",
        engine="megatron",
    )  # fmt: skip

    @property
    def recomputed(self) -> list[str]:
        """The modules of selective recomputation."""
        return comma_separated(self.recompute_modules) or ["core_attn"]

    def passed_through(self, group: str) -> dict[str, Any]:
        """The `--megatron GROUP.KEY=VALUE` settings of one of `PASSED_THROUGH`, values read as YAML. Raises
        SettingError."""
        found = {}
        for setting in self.megatron:
            name, equals, value = setting.partition("=")
            target, dot, key = name.partition(".")
            if not (equals and dot and key) or target not in PASSED_THROUGH:
                raise SettingError(
                    "megatron", f"{setting}: write GROUP.KEY=VALUE with a group of {', '.join(PASSED_THROUGH)}"
                )
            if target == group:
                try:
                    found[key] = parse_yaml(value)
                except ValueError:
                    raise SettingError("megatron", f"{setting}: {value} is no value in YAML") from None
        return found
