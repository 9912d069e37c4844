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
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    above: float | None = None
    below: float | None = None
    maximum: float | None = None
    engine: str | None = None  # the only engine that has it
    tasks: tuple[str, ...] = TASKS
    needs: tuple[str, str | None] | None = None  # another option, and its value (None: any but 0, False and None)
    fixed: bool = False  # a resume must not change it
    refusals: Mapping[str, str] = field(default_factory=dict)  # values known from elsewhere, and why they are refused
    task_defaults: Mapping[str, Any] = field(default_factory=dict)  # where a task's default differs
    aliases: tuple[str, ...] = ()  # other trainers' names for it, as keys: flags and YAML keys as well
    formerly: str = ""  # its key in YAML files of earlier versions
    negative: str | None = ""  # the flag that sets a bool to False: "" for --no-NAME, None for none
    common: bool = False  # in --help; --help-all has every option
    metavar: str = ""  # of the value in --help, such as FILE
    panel: str = ""  # title of its group in --help; the section where nothing else is declared
    section: str = ""  # "" in a flat class
    name: str = ""  # of the field: the key in YAML, and the flag with dashes
    type: Any = None
    default: Any = None

    @property
    def flag(self) -> str:
        return self.flags[0]

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag and its aliases."""
        return tuple(f"--{name.replace('_', '-')}" for name in (self.name, *self.aliases))

    def default_for(self, task: str) -> Any:
        return self.task_defaults.get(task, self.default)

    def belongs_to(self, task: str) -> bool:
        """Whether the command `task` has the option."""
        return task in self.tasks


def option(default: Any, help: str, **constraints: Any) -> Any:
    """A field of a section of the configuration. `constraints` are the other fields of `Option`."""
    metadata = {"option": Option(help, **constraints)}
    if isinstance(default, list):
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


accelerate_option = functools.partial(option, engine="accelerate")
megatron_option = functools.partial(option, engine="megatron")


def options_of(config_class: type) -> Mapping[str, Option]:
    """Every option of a dataclass by its name, in the order of declaration. A field that is a dataclass is a section,
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
            found[known.name] = dataclasses.replace(
                declared,
                negative=f"--no-{known.name.replace('_', '-')}" if declared.negative == "" else declared.negative,
                name=known.name,
                type=hints[known.name],
                default=[] if known.default is dataclasses.MISSING else known.default,
            )
    return types.MappingProxyType(found)


def options_meant(config_class: type, word: str) -> list[Option]:
    """The options that have a word, with underscores, for a key or an alias, or that answer it as a guess."""
    keys = GUESSES.get(word, (word,))
    return [each for each in options_of(config_class).values() if {each.name, *each.aliases} & set(keys)]


def check_option(option: Option, value: Any, task: str, flags: Mapping[str, Any]) -> None:
    """Raise SettingError for a value out of range, or one that the engine, the task or another option excludes.

    Args:
        flags: every option's value by key, for `engine` and `needs`.
    """
    check_value(option, value)
    if value in (None, option.default, option.default_for(task)):
        return
    if not option.belongs_to(task):
        raise SettingError(option.name, f"is not an option of dlm-bridge {task}")
    if option.engine not in (None, flags["engine"]):
        raise SettingError(option.name, f"needs `engine={option.engine}`")
    if option.needs is not None:
        other, needed = option.needs
        if flags[other] != needed if needed is not None else not flags[other]:
            raise SettingError(option.name, f"needs `{other}{'' if needed is None else f'={needed}'}`")


def check_value(option: Option, value: Any) -> None:
    """Raise SettingError for a value that is not among the option's choices, or out of its range."""
    if option.choices and value is not None and value not in option.choices:
        raise SettingError(option.name, f"{value!r} is unknown: known are {', '.join(filter(None, option.choices))}")
    if isinstance(value, int | float) and not isinstance(value, bool) and not _in_range(option, value):
        raise SettingError(option.name, f"must be {_range(option)}, not {value}")


def _in_range(option: Option, value: float) -> bool:
    return (
        math.isfinite(value)
        and (option.minimum is None or value >= option.minimum)
        and (option.above is None or value > option.above)
        and (option.below is None or value < option.below)
        and (option.maximum is None or value <= option.maximum)
    )


def _range(option: Option) -> str:
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
