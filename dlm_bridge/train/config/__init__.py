"""The configuration of a training run."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import yaml

from dlm_bridge.errors import DlmBridgeError

if TYPE_CHECKING:
    from dlm_bridge.mapping.layout import Layout
    from dlm_bridge.parallel.context_parallel import ContextParallelConfig


FSDP_STRATEGIES = ("optim", "optim_grads", "optim_grads_params")
RECOMPUTE = ("none", "selective", "full")
DISPATCHERS = ("auto", "alltoall", "allgather", "flex")
FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
FP8_FORMATS = ("hybrid", "e4m3")
OPTIMIZERS = ("adamw", "sgd")
AUX_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
PASSED_THROUGH = ("transformer", "ddp", "optimizer")  # megatron-core's configuration classes


def option(default: Any, help: str, otherwise: str | None = None, task: str | None = None) -> Any:
    """A field with the text that `--help` shows. A truth value's other flag is --no-NAME, or --`otherwise`; with
    `task` only that command has it."""
    return field(default=default, metadata={"help": help, "otherwise": otherwise, "task": task})


@dataclass(frozen=True)
class MegatronOptions:
    """Names are the command line's flags with underscores. Sizes that a model or a world size cannot have are refused
    when both are known."""

    tp: int = option(1, "Tensor parallel size.")
    pp: int = option(1, "Pipeline parallel size.")
    vp: int = option(1, "Virtual pipeline chunks on each pipeline rank.")
    pipeline_split: str | None = option(None, "Layers of uneven stages: FIRST,LAST or one number a stage.")
    cp: int = option(1, "Context parallel size.")
    cp_comm_type: str = option("p2p", "Context parallel communication: p2p, a2a, allgather or a2a+p2p.")
    hierarchical_cp_sizes: str | None = option(None, "Inner,outer sizes of a2a+p2p, such as 2,4.")
    ep: int = option(1, "Expert parallel size.")
    etp: int | None = option(None, "Expert tensor parallel size; tp by default.")
    sequence_parallel: bool | None = option(None, "Shard activations over tp; on by itself where tp is above 1.")
    distributed_optimizer: bool = option(True, "Shard AdamW's state over data parallel ranks (ZeRO-1).")
    fsdp: str | None = option(None, "Megatron FSDP instead: " + ", ".join(FSDP_STRATEGIES) + ".")
    overlap_communication: bool = option(True, "Overlap gradient and parameter communication with computation.")
    optimizer: str = option("adamw", "adamw or sgd.")
    optimizer_cpu_offload: bool = option(False, "Keep the optimizer's state and step on the CPU.")
    recompute: str = option("none", "Activations to recompute: none, selective or full.")
    recompute_modules: str | None = option(None, "For selective: core_attn,layernorm,mlp,moe,moe_act,...")
    recompute_layers: int | None = option(None, "For full: layers of each stage that are recomputed; all by default.")
    fp8_format: str = option("hybrid", "With --precision fp8: hybrid or e4m3.")
    fp8_recipe: str = option("delayed", "With --precision fp8: " + ", ".join(FP8_RECIPES) + " scaling.")
    fp8_params: bool = option(False, "Keep the weights themselves in FP8.")
    moe_dispatcher: str = option("alltoall", "How tokens reach experts: " + ", ".join(DISPATCHERS) + ".")
    moe_grouped_gemm: bool | None = option(None, "All experts of a rank in one product; on with Transformer Engine.")
    moe_aux_loss: str = option("seq_aux_loss", "Load balancing loss: " + ", ".join(AUX_LOSSES) + ".")
    moe_aux_loss_coeff: float = option(0.0, "Its weight, 0: none.")
    moe_z_loss_coeff: float = option(0.0, "Weight of the router's z-loss, 0: none.")
    moe_expert_bias_update_rate: float = option(0.0, "Of routers with an expert bias, a step; 0: it stays as it is.")
    moe_shared_expert_overlap: bool = option(False, "Compute shared experts beside the dispatcher's communication.")
    async_save: bool = option(False, "Write checkpoints in the background.")
    straggler_interval: int = option(0, "Steps between lines that name the slowest rank, 0: none.")
    save_steps: str | None = option(None, "Further steps to save at, such as 10,50.")
    trackers: str | None = option(None, "tensorboard, wandb, or both with a comma.")
    megatron: list[str] = field(
        default_factory=list,
        metadata={
            "help": "megatron-core's other settings: transformer.KEY=VALUE, ddp.KEY=VALUE, optimizer.KEY=VALUE."
        },
    )

    @property
    def saves(self) -> frozenset[int]:
        """The steps of `save_steps`."""
        return frozenset(whole_numbers("--save-steps", self.save_steps))

    @property
    def hierarchy(self) -> tuple[int, ...] | None:
        """The sizes of `hierarchical_cp_sizes`; None without."""
        return tuple(whole_numbers("--hierarchical-cp-sizes", self.hierarchical_cp_sizes)) or None

    @property
    def layout(self) -> Layout:
        """How the weights are cut. Raises DlmBridgeError."""
        from dlm_bridge.mapping.layout import Layout, parse_pipeline_split  # which import torch

        split = {} if self.pipeline_split is None else parse_pipeline_split(self.pipeline_split, self.pp, self.vp)
        return Layout(tp=self.tp, pp=self.pp, vp=self.vp, ep=self.ep, etp=self.etp, **split)

    @property
    def context(self) -> ContextParallelConfig:
        """How the sequences are cut. Raises DlmBridgeError."""
        from dlm_bridge.parallel.context_parallel import ContextParallelConfig  # which imports torch

        return ContextParallelConfig(self.cp, self.cp_comm_type, self.hierarchy)

    @property
    def recomputed(self) -> list[str]:
        """The modules of selective recomputation."""
        return names(self.recompute_modules) or ["core_attn"]

    @property
    def sharded_sequence(self) -> bool:
        """Whether sequence parallelism is on."""
        return self.tp > 1 if self.sequence_parallel is None else self.sequence_parallel and self.tp > 1

    def passed_through(self, group: str) -> dict[str, Any]:
        """What `--megatron GROUP.KEY=VALUE` says of one of `PASSED_THROUGH`, values read as YAML."""
        found = {}
        for setting in self.megatron:
            name, equals, value = setting.partition("=")
            target, dot, key = name.partition(".")
            if not (equals and dot and key) or target not in PASSED_THROUGH:
                raise DlmBridgeError(
                    f"--megatron {setting}: write GROUP.KEY=VALUE with a group of {', '.join(PASSED_THROUGH)}"
                )
            if target == group:
                try:
                    found[key] = yaml.safe_load(value)
                except yaml.YAMLError:
                    raise DlmBridgeError(f"--megatron {setting}: {value} is no value in YAML") from None
        return found


def check_megatron_options(options: MegatronOptions, engine: str, precision: str) -> None:
    """Raise DlmBridgeError for values that no model could have, and for a set option that the engine has not."""
    if engine != "megatron":
        shared = ("save_steps", "trackers")
        for known in dataclasses.fields(MegatronOptions):
            default = known.default if known.default is not dataclasses.MISSING else []
            if known.name not in shared and getattr(options, known.name) != default:
                raise DlmBridgeError(f"{flag(known.name)} needs --engine megatron")
    for name in ("tp", "pp", "vp", "cp", "ep", "etp", "recompute_layers"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise DlmBridgeError(f"{flag(name)} must be at least 1, not {value}")
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_expert_bias_update_rate", "straggler_interval"):
        if getattr(options, name) < 0:
            raise DlmBridgeError(f"{flag(name)} must not be negative, not {getattr(options, name)}")
    for name, known_values in (
        ("fsdp", (None, *FSDP_STRATEGIES)),
        ("recompute", RECOMPUTE),
        ("optimizer", OPTIMIZERS),
        ("moe_dispatcher", DISPATCHERS),
        ("moe_aux_loss", AUX_LOSSES),
        ("fp8_recipe", FP8_RECIPES),
        ("fp8_format", FP8_FORMATS),
    ):
        if getattr(options, name) not in known_values:
            known_names = ", ".join(value for value in known_values if value)
            raise DlmBridgeError(f"{flag(name)} {getattr(options, name)!r} is unknown: known are {known_names}")
    for tracker in names(options.trackers):
        if tracker not in ("tensorboard", "wandb"):
            raise DlmBridgeError(f"--trackers {tracker} is unknown: known are tensorboard, wandb")
    if options.saves and min(options.saves) < 1:
        raise DlmBridgeError(f"--save-steps {options.save_steps}: steps count from 1")
    if options.fsdp and options.pp > 1:
        raise DlmBridgeError(
            f"--fsdp {options.fsdp} with --pp {options.pp}: megatron-core's FSDP has no pipeline: choose one of them"
        )
    if options.fsdp and options.optimizer != "adamw":
        raise DlmBridgeError(f"--fsdp with --optimizer {options.optimizer}: megatron-core's FSDP has AdamW only")
    if options.fsdp and options.optimizer_cpu_offload:
        raise DlmBridgeError("--fsdp with --optimizer-cpu-offload: megatron-core offloads without FSDP only")
    if options.fsdp and not options.distributed_optimizer:
        raise DlmBridgeError("--fsdp with --no-distributed-optimizer: FSDP shards it: leave one of them out")
    if options.fsdp and options.async_save:
        raise DlmBridgeError("--fsdp with --async-save: Megatron FSDP's checkpoints are not written in the background")
    if options.sequence_parallel is False and options.tp > 1 and options.ep > 1:
        raise DlmBridgeError(
            f"--tp {options.tp} --ep {options.ep} without sequence parallelism: megatron-core trains no experts so: "
            "leave out --no-sequence-parallel"
        )
    for name, default in (("fp8_params", False), ("fp8_recipe", "delayed"), ("fp8_format", "hybrid")):
        if getattr(options, name) != default and precision != "fp8":
            raise DlmBridgeError(f"{flag(name)} needs --precision fp8")
    for name, how in (("recompute_modules", "selective"), ("recompute_layers", "full")):
        if getattr(options, name) and options.recompute != how:
            raise DlmBridgeError(f"{flag(name)} {getattr(options, name)} needs --recompute {how}")
    if options.optimizer_cpu_offload and options.optimizer != "adamw":
        raise DlmBridgeError("--optimizer-cpu-offload needs --optimizer adamw")
    if options.optimizer_cpu_offload and engine == "megatron" and precision == "fp32":
        raise DlmBridgeError(
            "--optimizer-cpu-offload with --precision fp32: megatron-core offloads no weights in fp32: choose bf16"
        )
    for group in PASSED_THROUGH:
        options.passed_through(group)
    if engine == "megatron":
        options.context  # noqa: B018 (made to be checked)


def names(text: str | None) -> list[str]:
    """The words of a comma-separated option."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def whole_numbers(name: str, text: str | None) -> list[int]:
    """The numbers of a comma-separated option. Raises DlmBridgeError."""
    try:
        return [int(word) for word in names(text)]
    except ValueError:
        raise DlmBridgeError(f"{name} {text}: whole numbers with commas are needed") from None


def flag(name: str) -> str:
    """An option's flag."""
    return "--" + name.replace("_", "-")


SHARDINGS = ("none", "fsdp")
QUANTIZATIONS = ("4bit", "8bit")
OF_A_NEW_ADAPTER = ("lora_alpha", "lora_dropout", "lora_targets")


@dataclass(frozen=True)
class AccelerateOptions:
    """Names are the command line's flags with underscores. What the model or the machine cannot do is refused when
    they are known."""

    sharding: str = option(
        "none",
        "Over processes: none (each has the whole model) or fsdp (FSDP2: weights, gradients and optimizer cut).",
    )
    cpu_offload: bool = option(False, "With --sharding fsdp: keep weights and optimizer in the CPU's memory.")
    lora_rank: int = option(0, "Train a LoRA adapter of this rank in place of the weights, 0: none.")
    lora_alpha: float | None = option(None, "Its scale times its rank; twice the rank by default.")
    lora_dropout: float = option(0.0, "Dropout before the adapter.")
    lora_targets: str | None = option(None, "Linear layers that it changes, such as q_proj,v_proj; the family's.")
    lora_quantize: str | None = option(None, "Hold the base's linear layers in 4bit (NF4) or 8bit, by bitsandbytes.")
    adapter: str | None = option(None, "Folder of a PEFT LoRA adapter of --model to go on training.")

    @property
    def adapts(self) -> bool:
        """Whether an adapter is trained, and not the weights."""
        return self.lora_rank > 0 or self.adapter is not None

    @property
    def shards(self) -> bool:
        """Whether each process holds a part of the weights."""
        return self.sharding == "fsdp"


def check_accelerate_options(options: AccelerateOptions, engine: str, precision: str) -> None:
    """Raise DlmBridgeError for values that no run could have, and for a set option that the engine has not."""
    if engine != "accelerate":
        for known in dataclasses.fields(AccelerateOptions):
            if getattr(options, known.name) != known.default:
                raise DlmBridgeError(f"{flag(known.name)} needs --engine accelerate")
    if options.sharding not in SHARDINGS:
        raise DlmBridgeError(f"--sharding {options.sharding!r} is unknown: known are {', '.join(SHARDINGS)}")
    if options.cpu_offload and not options.shards:
        raise DlmBridgeError("--cpu-offload needs --sharding fsdp")
    if options.shards and precision == "fp16":
        raise DlmBridgeError("--precision fp16 with --sharding fsdp: gradients are not scaled there: use bf16")
    if options.lora_rank < 0:
        raise DlmBridgeError(f"--lora-rank must not be negative, not {options.lora_rank}")
    if options.lora_alpha is not None and not (math.isfinite(options.lora_alpha) and options.lora_alpha > 0):
        raise DlmBridgeError(f"--lora-alpha must be a positive number, not {options.lora_alpha}")
    if not 0 <= options.lora_dropout < 1:
        raise DlmBridgeError(f"--lora-dropout must be in [0, 1), not {options.lora_dropout}")
    if options.lora_targets is not None and not names(options.lora_targets):
        raise DlmBridgeError("--lora-targets names nothing: leave it out for the family's own")
    if options.lora_quantize not in (None, *QUANTIZATIONS):
        raise DlmBridgeError(
            f"--lora-quantize {options.lora_quantize!r} is unknown: known are {', '.join(QUANTIZATIONS)}"
        )
    if options.adapter is not None and options.lora_rank:
        raise DlmBridgeError("--adapter has a rank of its own: leave --lora-rank out")
    for name in OF_A_NEW_ADAPTER:
        set_to = getattr(options, name)
        if set_to and not options.lora_rank:
            raise DlmBridgeError(f"{flag(name)} {set_to}: it is of a new adapter, which --lora-rank makes")
    if options.lora_quantize and not options.adapts:
        raise DlmBridgeError("--lora-quantize needs an adapter: add --lora-rank N, or --adapter")
    if options.lora_quantize and precision == "fp8":
        raise DlmBridgeError("--lora-quantize with --precision fp8: a base in few bits has no FP8 products: use bf16")
    if options.lora_quantize and options.shards:
        raise DlmBridgeError(
            "--lora-quantize with --sharding fsdp: quantized weights cannot be cut: choose one of them"
        )


SCHEDULES = ("cosine", "linear", "constant")
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
ENGINES = ("accelerate", "megatron")
LOSS_WEIGHTINGS = ("level", "fraction", "uniform", "cart")
LOSS_NORMALISATIONS = ("tokens", "sequences", "predicted")
EOS_PADDINGS = ("none", "block", "row")
# What a command trains, and where its defaults differ.
TASKS: dict[str, dict[str, Any]] = {
    "pretrain": {},
    "sft": {"length_variation": 0.0, "lr": 2.5e-5},
    "rl": {"length_variation": 0.0, "lr": 1e-6, "weight_decay": 0.0, "lr_schedule": "constant"},
}

# A resumed run must agree with its start on whose checkpoints these are and what optimizer's state they hold, and on
# what decides the data's order and the noise.
FIXED_FOR_A_RUN = (
    "engine",
    "optimizer",
    "distributed_optimizer",
    "family",
    "mask_token_id",
    "split",
    "seq_length",
    "global_batch_size",
    "seed",
    "document_attention",
    "objective",
    "length_variation",
    "mask_annealing_steps",
    "block_schedule",
    "loss_weighting",
    "loss_normalisation",
    "packing",
    "truncate",
    "eos_padding",
    "train_on_prompt",
    "lora_rank",
    "lora_alpha",
    "lora_targets",
    "lora_quantize",
    "adapter",
)


@dataclass(frozen=True)
class TrainConfig(AccelerateOptions, MegatronOptions):
    """Names are the command line's flags with underscores. Checked when it is made: DlmBridgeError names the flag."""

    fixed: ClassVar[tuple[str, ...]] = FIXED_FOR_A_RUN

    task: str = field(default="pretrain", metadata={"help": None})  # the command, not an option of it
    model: str = option("", "Hub folder or id, Megatron checkpoint, or a config.json's folder.")
    data: list[str] = field(default_factory=list, metadata={"help": "What to train on. May be repeated."})
    output: str = option("", "The run's folder.")
    engine: str = option("accelerate", "accelerate (one machine) or megatron (megatron-core).")
    family: str | None = option(None, "The model family, where config.json cannot tell.")
    mask_token_id: int | None = option(None, "Where the model's config has none.")  # then the family's
    tokenizer: str | None = option(None, "Folder or id; the model's own by default.")
    from_scratch: bool = option(False, "Initialise from config.json and --seed.", "from-weights")
    steps: int = option(1000, "Optimizer steps.")
    global_batch_size: int = option(32, "Sequences a step, over all processes.")
    micro_batch_size: int | None = option(None, "Sequences at once on a process.")  # None: no gradient accumulation
    seq_length: int = option(1024, "Tokens of a sequence.")
    seed: int = option(0, "Of data order, noise and initial weights.")
    document_attention: bool = option(
        False, "Documents that share a block do not look at each other.", task="pretrain"
    )
    packing: bool = option(False, "Several conversations in a row, which do not see each other.", task="sft")
    truncate: bool = option(False, "Cut conversations that are longer than --seq-length.", task="sft")
    eos_padding: str | None = option(
        None,
        "EOS tokens that count as answer: none, to the end of a block, or of the row; the family's.",
        task="sft",
    )
    train_on_prompt: bool | None = option(None, "Mask and count prompts as well; the family's way.", task="sft")
    objective: str | None = option(None, "masked, shifted, block, causal, ...; the family's own by default.")
    length_variation: float = option(0.01, "Share of sequences cut to a random length.")
    loss_weighting: str | None = option(
        None,
        "What a masked token weighs: level (1/t), fraction (1/masked share), uniform, cart; the objective's own.",
    )
    loss_normalisation: str | None = option(
        None, "What a loss is divided by: tokens, sequences (a mean over them) or predicted (tokens); the objective's."
    )
    mask_annealing_steps: int = option(0, "Steps over which causal attention opens to bidirectional.")
    block_schedule: str | None = option(None, "step:block size pairs, growing, such as 0:4,1000:8,2000:32.")
    precision: str = option("fp32", "fp32, bf16, fp16 or fp8.")
    lr: float = option(3e-4, "Peak learning rate.")
    lr_schedule: str = option("cosine", "cosine, linear or constant.")
    warmup_steps: int = option(0, "Steps of linear warm-up.")
    min_lr: float = option(0.0, "Rate at the last step.")
    weight_decay: float = option(0.1, "Of all but biases and norms.")
    beta1: float = option(0.9, "AdamW's first beta.")
    beta2: float = option(0.95, "AdamW's second beta.")
    adam_eps: float = option(1e-8, "AdamW's epsilon.")
    clip_grad: float = option(1.0, "Largest gradient norm, 0: no clipping.")
    split: str = option("99,1,0", "Training, validation and test shares, such as 99,1,0.")
    eval_interval: int = option(100, "Steps between validations, 0: never.")
    sample_interval: int = option(0, "Steps between texts that the model writes to DIR/samples.jsonl, 0: never.")
    sample_prompt: list[str] = field(
        default_factory=list, metadata={"help": "What such a text follows; @FILE: each of its lines. May be repeated."}
    )
    sample_length: int = option(64, "Tokens of such a text.")
    save_interval: int = option(1000, "Steps between checkpoints, 0: only the last.")
    keep_last: int = option(0, "Checkpoints to keep, 0: all.")
    exit_duration: float | None = option(None, "Save and exit after so many minutes.")
    attention_backend: str | None = option(
        None, "flash: FlashAttention 4. Of --engine accelerate: sdpa, eager, ...; of megatron: auto, fused, unfused."
    )
    compile: bool | None = option(None, "Of --engine accelerate: compile the decoder layers; so on a GPU.")
    gradient_checkpointing: bool = option(False, "Of --engine accelerate: recompute activations to save memory.")

    def __post_init__(self) -> None:
        _check(self)

    @property
    def shares(self) -> tuple[float, float, float]:
        """The train, validation and test shares, adding up to one."""
        numbers = _split_numbers(self.split)
        return (numbers[0] / sum(numbers), numbers[1] / sum(numbers), numbers[2] / sum(numbers))

    @property
    def block_sizes(self) -> tuple[tuple[int, int], ...]:
        """(step, block size from it on) of `block_schedule`, in order; empty without one."""
        return () if self.block_schedule is None else _split_schedule(self.block_schedule, self.seq_length)

    def accumulation(self, processes: int) -> tuple[int, int]:
        """(micro-batch size, micro-batches a step) of each process. Raises DlmBridgeError where the global batch is
        not micro-batch size x processes x a whole number."""
        if self.global_batch_size % processes:
            raise DlmBridgeError(
                f"--global-batch-size {self.global_batch_size} does not divide over {processes} processes: "
                f"make it a multiple of {processes}"
            )
        share = self.global_batch_size // processes
        micro = self.micro_batch_size or share
        if share % micro:
            raise DlmBridgeError(
                f"--global-batch-size {self.global_batch_size} is not --micro-batch-size {micro} x {processes} "
                f"processes x a whole number: make it a multiple of {micro * processes}"
            )
        return micro, share // micro

    def to_yaml(self) -> str:
        return yaml.safe_dump(dataclasses.asdict(self), sort_keys=False)


Config = TypeVar("Config", bound=TrainConfig)


def load_config(
    flags: dict[str, Any], file: Path | None = None, resume: bool = False, task: str = "pretrain"
) -> TrainConfig:
    """The configuration of a run of `pretrain` or `sft`, see `load_as`."""
    return load_as(TrainConfig, flags, file, resume, task)


def load_as(kind: type[Config], flags: dict[str, Any], file: Path | None, resume: bool, task: str) -> Config:
    """A configuration of the class `kind`: `flags` over the YAML `file` over, on a resume, the run's own config.yaml,
    over the defaults of the `task`.

    Raises DlmBridgeError for bad values, and on a resume for a value that would change the data's order or the noise.
    """
    values = ({} if file is None else read_yaml(file, kind)) | flags
    if values.setdefault("task", task) != task:
        raise DlmBridgeError(f"--config {file}: it is for dlm-bridge {values['task']}, this is dlm-bridge {task}")
    own = Path(values.get("output", "")) / "config.yaml"
    if not (resume and "output" in values and own.is_file()):
        return kind(**(TASKS[task] | values))
    began = read_yaml(own, kind)
    if began.get("task", "pretrain") != task:
        raise DlmBridgeError(f"--output {values['output']}: the run there is of dlm-bridge {began['task']}")
    for name in kind.fixed:
        if values.get(name) is not None and values[name] != began.get(name):
            raise DlmBridgeError(
                f"{flag(name)} {values[name]} differs from the {began.get(name)} that the run in "
                f"{values['output']} began with: resume with that, or choose another --output"
            )
    if _weights(values.get("data") or began["data"]) != _weights(began["data"]):
        raise DlmBridgeError(
            f"--data: other weights than those that the run in {values['output']} began with: resume with those"
        )
    return kind(**(began | values))


def read_yaml(path: Path, kind: type[TrainConfig] = TrainConfig) -> dict[str, Any]:
    """The values of a file of options. Raises DlmBridgeError for unknown keys, naming the nearest known one."""
    if not path.is_file():
        raise DlmBridgeError(f"--config {path}: no such file")
    try:
        values = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DlmBridgeError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise DlmBridgeError(f"--config {path}: a mapping of option names to values is needed")
    known = {option.name: option for option in dataclasses.fields(kind)}
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
            raise DlmBridgeError(f"--config {path}: unknown key '{key}', the nearest is '{near[0]}'")
        values[key] = _typed(path, key, value, kind)
    return values


def _typed(path: Path, key: str, value: Any, kind_of_config: type[TrainConfig]) -> Any:
    """`value` in the field's type, where YAML's reading of it is harmless (1 for 1.0, 1e-3, one data path)."""
    hint = typing.get_type_hints(kind_of_config)[key]
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    if list[str] in options:
        value = [value] if isinstance(value, str) else value
        kinds = {type(item) for item in value} if isinstance(value, list) else {None}
        if kinds <= {str, int, float} and (str in kinds or not value):
            return [str(item) for item in value]  # a blend's weights are numbers
    for kind in options:
        if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
            try:
                return float(value)  # YAML reads 1e-3 as text
            except ValueError:
                continue
        if isinstance(kind, type) and type(value) is kind:
            return value
    wanted = " or ".join(
        ("list of paths" if key == "data" else "list of texts") if option == list[str] else option.__name__
        for option in options
    )
    raise DlmBridgeError(f"--config {path}: {key} must be {wanted.replace('NoneType', 'null')}, not {value!r}")


def _weights(data: list[str]) -> list[float]:
    """The numbers of a blend."""
    numbers = []
    for item in data:
        with contextlib.suppress(ValueError):
            numbers.append(float(item))
    return numbers


def _check(config: TrainConfig) -> None:
    for name in ("model", "data", "output"):
        if not getattr(config, name):
            raise DlmBridgeError(f"--{name} is missing: give it on the command line or in the --config file")
    for name in ("steps", "global_batch_size", "micro_batch_size", "seq_length", "sample_length"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise DlmBridgeError(f"{flag(name)} must be at least 1, not {value}")
    not_negative = ("warmup_steps", "eval_interval", "sample_interval", "save_interval", "keep_last", "seed")
    for name in (*not_negative, "mask_annealing_steps"):
        if getattr(config, name) < 0:
            raise DlmBridgeError(f"{flag(name)} must not be negative, not {getattr(config, name)}")
    for name in ("lr", "min_lr", "weight_decay", "clip_grad", "adam_eps", "exit_duration"):
        value = getattr(config, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise DlmBridgeError(f"{flag(name)} must be a number that is not negative, not {value}")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(config, name) < 1:
            raise DlmBridgeError(f"{flag(name)} must be in [0, 1), not {getattr(config, name)}")
    if not 0 <= config.length_variation <= 1:
        raise DlmBridgeError(f"--length-variation must be in [0, 1], not {config.length_variation}")
    for name, known in (("lr_schedule", SCHEDULES), ("precision", PRECISIONS), ("engine", ENGINES)):
        if getattr(config, name) not in known:
            raise DlmBridgeError(f"{flag(name)} {getattr(config, name)!r} is unknown: known are {', '.join(known)}")
    choices: dict[str, tuple[str, ...]] = {
        "loss_weighting": LOSS_WEIGHTINGS,
        "loss_normalisation": LOSS_NORMALISATIONS,
        "eos_padding": EOS_PADDINGS,
        "task": tuple(TASKS),
    }
    for name, names in choices.items():
        if getattr(config, name) not in (None, *names):
            raise DlmBridgeError(f"{flag(name)} {getattr(config, name)!r} is unknown: known are {', '.join(names)}")
    for chosen in dataclasses.fields(config):
        task = chosen.metadata.get("task")
        if task not in (None, config.task) and getattr(config, chosen.name) not in (None, chosen.default):
            raise DlmBridgeError(f"{flag(chosen.name)} is an option of dlm-bridge {task}, not {config.task}")
    if bool(config.sample_interval) != bool(config.sample_prompt):
        raise DlmBridgeError("--sample-interval N and --sample-prompt TEXT belong together: give both")
    if config.min_lr > config.lr:
        raise DlmBridgeError(f"--min-lr {config.min_lr} is more than --lr {config.lr}")
    _split_numbers(config.split)
    if config.block_schedule is not None:
        _split_schedule(config.block_schedule, config.seq_length)
    if config.compile is not None and config.engine != "accelerate":
        raise DlmBridgeError("--compile and --no-compile need --engine accelerate: megatron-core has its own kernels")
    if config.gradient_checkpointing and config.engine != "accelerate":
        raise DlmBridgeError("--gradient-checkpointing needs --engine accelerate: megatron-core's is --recompute full")
    config.accumulation(processes=1)
    check_accelerate_options(config, config.engine, config.precision)
    check_megatron_options(config, config.engine, config.precision)
    if config.adapts and config.from_scratch:
        raise DlmBridgeError("--from-scratch with an adapter: an adapter changes weights that are trained already")


def _split_numbers(split: str) -> list[float]:
    try:
        numbers = [float(part) for part in split.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or min(numbers) < 0 or numbers[0] <= 0 or not math.isfinite(sum(numbers)):
        raise DlmBridgeError(f"--split {split!r} must be three shares such as 99,1,0, the first of them positive")
    return numbers


def _split_schedule(schedule: str, seq_length: int) -> tuple[tuple[int, int], ...]:
    option = f"--block-schedule {schedule!r}"
    try:
        pairs = [(int(step), int(size)) for step, size in (part.split(":") for part in schedule.split(","))]
    except ValueError:
        raise DlmBridgeError(f"{option} must be step:size pairs such as 0:4,1000:8,2000:32") from None
    if pairs[0][0] != 0:
        raise DlmBridgeError(f"{option} must begin with step 0, not {pairs[0][0]}")
    for (step, size), (later, larger) in itertools.pairwise(pairs):
        if later <= step or larger <= size:
            raise DlmBridgeError(
                f"{option} must grow in steps and sizes: {step}:{size} stands before {later}:{larger}"
            )
    for _, size in pairs:
        if size < 1 or seq_length % size:
            raise DlmBridgeError(f"{option}: block size {size} does not divide --seq-length {seq_length}")
    return tuple(pairs)


SAMPLED = ("grpo", "diffu-grpo", "block-grpo")  # methods whose completions are sampled and judged
PREFERRED = ("dpo", "vrpo")  # methods that follow preferred rows
METHODS = (*SAMPLED, *PREFERRED)
AUTOREGRESSIVE = ("grpo", "dpo")  # what TRL trains
FAILURES = ("stop", "zero")
ADVANTAGES = ("centred", "scaled")
BETAS = {"grpo": 0.04, "diffu-grpo": 0.04, "block-grpo": 0.04, "dpo": 0.1, "vrpo": 0.2}
# What rollouts themselves say to generate, or what would make other rows than a completion behind each prompt.
NO_SETTINGS = (
    "attention_mask", "commit_rule", "generation_config", "generator", "infill", "input_ids", "inputs",
    "num_return_sequences", "output_history", "return_dict_in_generate", "span_lengths", "streamer",
)  # fmt: skip
# The options of the other training commands that this one has too.
SHARED = (
    "task", "model", "data", "output", "engine", "family", "mask_token_id", "tokenizer", "steps", "global_batch_size",
    "micro_batch_size", "seq_length", "seed", "precision", "lr", "lr_schedule", "warmup_steps", "min_lr",
    "weight_decay", "beta1", "beta2", "adam_eps", "clip_grad", "eval_interval", "save_interval", "keep_last",
    "exit_duration", "attention_backend", "gradient_checkpointing", "save_steps", "trackers",
    "lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "lora_quantize",
    "adapter",
)  # fmt: skip


@dataclass(frozen=True)
class RLConfig(TrainConfig):
    """Names are the command line's flags with underscores. Checked when it is made: DlmBridgeError names the flag.

    A step samples (or reads) `global_batch_size` completions (or pairs), over all processes, and updates the model
    `updates` times with them."""

    fixed: ClassVar[tuple[str, ...]] = (
        "family", "mask_token_id", "seq_length", "global_batch_size", "seed", "method", "reward", "eval_data",
        "group_size", "updates", "gen_length", "temperature", "generation", "advantages", "prompt_masking",
        "trace_steps", "elbo_levels", "elbo_masks",
    )  # fmt: skip

    task: str = field(default="rl", metadata={"help": None})
    method: str = option("", f"{', '.join(METHODS)}; grpo and dpo are for autoregressive models.")
    reward: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Function (prompts, completions, rows) -> numbers: package.module.name, file.py:name, countdown, "
            "maths, ...; 0.1*NAME weighs it. May be repeated."
        },
    )
    reward_timeout: float = option(10.0, "Seconds that a reward may take for a step's completions.")
    reward_failure: str = option("stop", "When a reward raises or hangs: stop, or zero (such a row counts as 0).")
    eval_data: list[str] = field(
        default_factory=list, metadata={"help": "Held-out rows, answered greedily (or compared). May be repeated."}
    )
    group_size: int = option(8, "Completions of each prompt, which are compared with each other.")
    updates: int = option(1, "Optimizer steps with each step's completions.")
    gen_length: int = option(256, "Longest completion, in tokens.")
    temperature: float = option(1.0, "Of sampling; held-out prompts are answered at 0.")
    generation: list[str] = field(
        default_factory=list,
        metadata={"help": "Further settings of the sampler, NAME=VALUE such as steps=64. May be repeated."},
    )
    advantages: str = option("centred", "Rewards less their group's mean (centred), or over its deviation (scaled).")
    clip_range: float = option(0.2, "How far a token's probability ratio may move with profit.")
    beta: float | None = option(None, "Weight of the KL term (0.04, 0: no reference model), of dpo and vrpo 0.1, 0.2.")
    prompt_masking: float = option(0.15, "Of diffu-grpo: the share of prompt tokens hidden in a likelihood.")
    trace_steps: int = option(
        32, "Of block-grpo and bidirectional models: forwards of the sampler that a likelihood takes at once."
    )
    elbo_levels: int = option(8, "Of vrpo: noise levels drawn for each likelihood bound.")
    elbo_masks: int = option(1, "Of vrpo: masks drawn at each of them.")

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_rl(self)

    @property
    def kl_weight(self) -> float:
        """`beta`, or the method's own."""
        return BETAS[self.method] if self.beta is None else self.beta

    @property
    def sampler(self) -> dict[str, Any]:
        """The settings of `generation`, as keyword arguments of a model's generate."""
        settings = {}
        for item in self.generation:
            name, equals, value = item.partition("=")
            if not (name.isidentifier() and equals and value):
                raise DlmBridgeError(f"--generation {item}: NAME=VALUE is needed, such as steps=64")
            if name in ("gen_length", "max_new_tokens", "temperature", "seed"):
                raise DlmBridgeError(f"--generation {item}: the option --{name.replace('_', '-')} says it")
            if name in NO_SETTINGS:
                raise DlmBridgeError(
                    f"--generation {item}: a rollout is one completion behind each prompt: leave it out"
                )
            settings[name] = yaml.safe_load(value)
        return settings

    def groups(self, processes: int) -> int:
        """How many prompts each process samples for in a step. Raises DlmBridgeError where a step's completions are
        not whole groups for each."""
        share = self.group_size * processes
        if self.global_batch_size % share:
            raise DlmBridgeError(
                f"--global-batch-size {self.global_batch_size} must be a multiple of {share} "
                f"(--group-size {self.group_size} x {processes} processes)"
            )
        return self.global_batch_size // share


def load_rl_config(flags: dict[str, Any], file: Path | None = None, resume: bool = False) -> RLConfig:
    """The configuration of a run, see `dlm_bridge.train.config.load_as`."""
    return load_as(RLConfig, flags, file, resume, "rl")


def _check_rl(config: RLConfig) -> None:
    if config.task != "rl":
        raise DlmBridgeError(f"the configuration is of dlm-bridge {config.task}: this is dlm-bridge rl")
    for known in dataclasses.fields(TrainConfig):
        if known.name not in SHARED:
            default = known.default_factory() if callable(known.default_factory) else known.default
            if getattr(config, known.name) not in (default, 0.0, None):
                raise DlmBridgeError(f"{flag(known.name)} is no option of dlm-bridge rl")
    if not config.method:
        raise DlmBridgeError(f"--method is missing: one of {', '.join(METHODS)}")
    for name, names in (("method", METHODS), ("reward_failure", FAILURES), ("advantages", ADVANTAGES)):
        if getattr(config, name) not in names:
            raise DlmBridgeError(f"{flag(name)} {getattr(config, name)!r} is unknown: known are {', '.join(names)}")
    if config.engine != "accelerate":
        raise DlmBridgeError("--engine megatron: reinforcement learning runs under accelerate only")
    if config.precision == "fp8":
        raise DlmBridgeError("--precision fp8: reinforcement learning runs in fp32, bf16 or fp16")
    for name in ("group_size", "updates", "gen_length", "trace_steps", "elbo_levels", "elbo_masks"):
        if getattr(config, name) < 1:
            raise DlmBridgeError(f"{flag(name)} must be at least 1, not {getattr(config, name)}")
    for name in ("reward_timeout", "temperature", "clip_range"):
        if not (math.isfinite(getattr(config, name)) and getattr(config, name) > 0):
            raise DlmBridgeError(f"{flag(name)} must be a number above 0, not {getattr(config, name)}")
    if not 0 <= config.prompt_masking < 1:
        raise DlmBridgeError(f"--prompt-masking must be in [0, 1), not {config.prompt_masking}")
    if not (math.isfinite(config.kl_weight) and config.kl_weight >= 0):
        raise DlmBridgeError(f"--beta must be a number that is not negative, not {config.beta}")
    _ = config.sampler
    if config.method in SAMPLED:
        if not config.reward:
            raise DlmBridgeError(f"--method {config.method} needs a --reward")
        if config.group_size < 2:
            raise DlmBridgeError("--group-size 1: a completion is compared with others of its prompt, take 2 or more")
        if config.gen_length >= config.seq_length:
            raise DlmBridgeError(
                f"--gen-length {config.gen_length} leaves no room for a prompt in --seq-length {config.seq_length}"
            )
        config.groups(processes=1)
    elif config.reward:
        raise DlmBridgeError(f"--reward: --method {config.method} follows the rows' preferences, leave it out")
