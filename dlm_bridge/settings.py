"""One declaration per option: a dataclass field that also gives the flag, its help, its YAML key and its constraints.

    @dataclass(frozen=True)
    class OptimizerOptions:
        lr: float = option(3e-4, "Peak learning rate.", minimum=0, task_defaults={"sft": 2.5e-5})

is `--lr`, `optimizer: {lr: ...}` in YAML, and `config.optimizer.lr`; `options_of` lists a configuration's options.
With `aliases=("learning_rate",)` it is `--learning-rate` and `optimizer: {learning_rate: ...}` as well.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dlm_bridge.errors import SettingError

TASKS = ("pretrain", "sft", "rl")  # the commands that train
TRAINING = ("pretrain", "sft")
# Other trainers' names for what has another unit or other values here: refused, with these options' names.
GUESSES = {
    **dict.fromkeys(("batch_size", "train_batch_size"), ("global_batch_size", "micro_batch_size")),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), ("steps",)),
    **dict.fromkeys(("bf16", "fp16", "dtype", "torch_dtype"), ("precision",)),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), ("lora_quantize",)),
    **dict.fromkeys(("deepspeed", "fsdp_config"), ("sharding",)),
    "gradient_accumulation_steps": ("global_batch_size",),
    "optim": ("optimizer",),
    "torch_compile": ("compile",),
    "reward_model": ("reward",),
    "use_lora": ("lora_rank",),
    "warmup_ratio": ("warmup_steps",),
}


@dataclass(frozen=True)
class Option:
    """What `option` declares, and where `options_of` found it."""

    help: str
    flag: str = ""  # "--name-of-the-field" where nothing else is declared
    negative: str = ""  # the flag that sets a bool to False, "--no-..." where nothing else is declared
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    above: float | None = None
    below: float | None = None
    maximum: float | None = None
    engine: str | None = None  # the only engine that has it
    tasks: tuple[str, ...] = TASKS
    needs: tuple[str, str | None] | None = (
        None  # another flag, and the value that it must have (None: any but default)
    )
    fixed: bool = False  # a resume must not change it
    refusals: Mapping[str, str] = field(default_factory=dict)  # values known from elsewhere, and why they are refused
    task_defaults: Mapping[str, Any] = field(default_factory=dict)  # where a task's default differs
    aliases: tuple[str, ...] = ()  # other trainers' names for it, as keys: flags and YAML keys as well
    switch: bool = False  # a bool without a negative flag
    common: bool = False  # in --help; --help-all has every option
    metavar: str = ""  # of the value in --help, such as FILE
    panel: str = ""  # title of its group in --help; the section where nothing else is declared
    section: str = ""  # "" in a flat class
    name: str = ""  # of the field, and the key in YAML
    type: Any = None
    default: Any = None

    @property
    def key(self) -> str:
        """The flag with underscores: the name in flat dictionaries of options."""
        return self.flag[2:].replace("-", "_")

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag and its aliases."""
        return (self.flag, *(f"--{alias.replace('_', '-')}" for alias in self.aliases))

    def default_for(self, task: str) -> Any:
        return self.task_defaults.get(task, self.default)

    def belongs_to(self, task: str) -> bool:
        """Whether the command `task` has the option."""
        return task in self.tasks


def option(default: Any, help: str, flag: str = "", negative: str = "", **constraints: Any) -> Any:
    """A field of a section of the configuration. `constraints` are the other fields of `Option`."""
    metadata = {"option": Option(help, flag, negative, **constraints)}
    if isinstance(default, list):
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


common_option = functools.partial(option, common=True)
accelerate_option = functools.partial(option, engine="accelerate")
megatron_option = functools.partial(option, engine="megatron")


def options_of(config_class: type) -> Mapping[str, Option]:
    """Every option of a dataclass by its key, in the order of declaration. A field that is a dataclass is a section,
    whose options follow; a field that is neither a section nor declared by `option` is not an option."""
    return _declared(config_class)


@functools.cache
def _declared(config_class: type) -> Mapping[str, Option]:
    found: dict[str, Option] = {}
    hints = typing.get_type_hints(config_class)
    for known in dataclasses.fields(config_class):
        if dataclasses.is_dataclass(section := hints[known.name]):
            nested = _declared(section)  # type: ignore[arg-type]
            found |= {key: dataclasses.replace(each, section=known.name) for key, each in nested.items()}
        elif declared := known.metadata.get("option"):
            flag = declared.flag or "--" + known.name.replace("_", "-")
            bound = dataclasses.replace(
                declared,
                flag=flag,
                negative=declared.negative or f"--no-{flag[2:]}",
                name=known.name,
                type=hints[known.name],
                default=[] if known.default is dataclasses.MISSING else known.default,
            )
            found[bound.key] = bound
    return types.MappingProxyType(found)


def options_meant(config_class: type, word: str) -> list[Option]:
    """The options that have a word, with underscores, for a key or an alias, or that answer it as a guess."""
    keys = GUESSES.get(word, (word,))
    return [each for each in options_of(config_class).values() if {each.key, *each.aliases} & set(keys)]


def check_option(option: Option, value: Any, task: str, flags: Mapping[str, Any]) -> None:
    """Raise SettingError for a value out of range, or one that the engine, the task or another option excludes.

    Args:
        flags: every option's value by key, for `engine` and `needs`.
    """
    if option.choices and value is not None and value not in option.choices:
        raise SettingError(option.key, f"{value!r} is unknown: known are {', '.join(filter(None, option.choices))}")
    if isinstance(value, int | float) and not isinstance(value, bool) and not in_range(option, value):
        raise SettingError(option.key, f"must be {range_text(option)}, not {value}")
    if value in (None, option.default, option.default_for(task)):
        return
    if not option.belongs_to(task):
        raise SettingError(option.key, f"is not an option of dlm-bridge {task}")
    if option.engine not in (None, flags["engine"]):
        raise SettingError(option.key, f"needs --engine {option.engine}")
    if option.needs is not None:
        flag, needed = option.needs
        given = flags[flag[2:].replace("-", "_")]
        if given != needed if needed is not None else not given:
            raise SettingError(option.key, f"needs {flag}{'' if needed is None else f' {needed}'}")


def in_range(option: Option, value: float) -> bool:
    """True if the number is finite and within the option's bounds."""
    return (
        math.isfinite(value)
        and (option.minimum is None or value >= option.minimum)
        and (option.above is None or value > option.above)
        and (option.below is None or value < option.below)
        and (option.maximum is None or value <= option.maximum)
    )


def range_text(option: Option) -> str:
    """Description of the option's bounds."""
    low = option.minimum if option.above is None else option.above
    high = option.maximum if option.below is None else option.below
    if high is None:
        if low is None:
            return "a finite number"
        return f"{'at least' if option.above is None else 'above'} {low}"
    return f"in {'[' if option.above is None else '('}{low}, {high}{']' if option.below is None else ')'}"


def typed(option: Option, value: Any, where: str) -> Any:
    """`value` as the option's type, where YAML's reading of it is harmless (1 for 1.0, 1e-3, one path for a list).
    Raises SettingError, whose message begins with `where`."""
    if isinstance(value, str) and value in option.refusals:
        raise SettingError(where, f"{option.section}.{option.name} {value!r}: {option.refusals[value]}")
    kinds = typing.get_args(option.type) if isinstance(option.type, types.UnionType) else (option.type,)
    if value is None and type(None) in kinds:
        return None
    if list[str] in kinds:
        value = [value] if isinstance(value, str) else value
        found = {type(item) for item in value} if isinstance(value, list) else {None}
        if found <= {str, int, float} and (str in found or not value):
            return [str(item) for item in value]  # a blend's weights are numbers
    for kind in kinds:
        if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
            try:
                return float(value)  # YAML reads 1e-3 as text
            except ValueError:
                continue
        if isinstance(kind, type) and type(value) is kind:
            return value
    names = [
        "list of texts" if kind == list[str] else "null" if kind is type(None) else kind.__name__ for kind in kinds
    ]
    raise SettingError(where, f"{option.section}.{option.name} must be {' or '.join(names)}, not {value!r}")


def check_choice(field: str, value: object, choices: Iterable[str]) -> None:
    """Raise SettingError for a value that is not among the choices."""
    if value not in (known := list(choices)):
        raise SettingError(field, f"{value!r} is unknown: choose one of {', '.join(known)}")


def check_minimum(field: str, value: float | None, minimum: float = 1) -> None:
    """Raise SettingError for a number below the minimum."""
    if value is not None and not value >= minimum:
        raise SettingError(field, f"must be at least {minimum}, not {value}")


def comma_separated(text: str | None) -> list[str]:
    """The words of a comma-separated option."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def whole_numbers(flag: str, text: str | None) -> list[int]:
    """The numbers of a comma-separated option. Raises SettingError."""
    try:
        return [int(word) for word in comma_separated(text)]
    except ValueError:
        raise SettingError(flag, f"{text}: whole numbers with commas are needed") from None


_loading_option = functools.partial(common_option, panel="Loading")


@dataclass(frozen=True, kw_only=True)
class LoadingOptions:
    """Options of the commands that load a model. `source` are keywords of `dlm_bridge.loading.load_model`;
    `dlm_bridge.loading.Placement.of` reads the others."""

    dtype: str = _loading_option("keep", "keep (as stored), bf16, fp16 or fp32.")
    device: str | None = _loading_option(None, "Such as cpu, cuda or cuda:1; a GPU by default.")
    device_map: str | None = _loading_option(
        None, "Several GPUs, CPU and disk: auto, or a JSON object of devices.", metavar="MAP"
    )
    offload_folder: str | None = _loading_option(
        None, "Folder for the weights that a device map offloads to disk.", metavar="DIR"
    )
    tp_plan: str | None = _loading_option(None, "Tensor parallelism over torchrun's processes.", metavar="auto")
    tp: int | None = _loading_option(
        None, "Shard the model over N processes; each group of N gets a part of the rows.", minimum=1, metavar="N"
    )
    tokenizer: str | None = _loading_option(None, "Tokenizer folder or id; the model's own by default.")
    family: str | None = _loading_option(None, "Model family, if config.json does not identify it.")
    revision: str | None = _loading_option(None, "Branch, tag or commit of a Hub id.")
    like: str | None = _loading_option(None, "Hub model of a Megatron checkpoint of another program.", metavar="HF")

    @property
    def source(self) -> dict[str, Any]:
        """Keywords of `load_model` that select the tensors and the tokenizer."""
        return {name: getattr(self, name) for name in ("dtype", "family", "revision", "like", "tokenizer")}
