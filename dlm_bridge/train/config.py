"""A training run's configuration: one flat dataclass, from the command line over a YAML file over the defaults."""

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
from typing import Any, ClassVar, TypeVar

import yaml

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.accelerate_options import AccelerateOptions, check_accelerate_options
from dlm_bridge.train.megatron_options import MegatronOptions, check_megatron_options, flag, option

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
