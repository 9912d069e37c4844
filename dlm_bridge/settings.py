"""Options of commands, each declared once: a dataclass field with its help and constraints.

    @dataclass(frozen=True)
    class OptimizerOptions:
        lr: float = option(3e-4, "Peak learning rate.", minimum=0, task_defaults={"sft": 2.5e-5})

declares `--lr` on the command line, `optimizer: {lr: ...}` in YAML and `config.optimizer.lr` in Python. Aliases, such
as `aliases=("learning_rate",)`, are accepted as flags and as YAML keys too.
"""

from __future__ import annotations

import dataclasses
import difflib
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
# Other trainers' names of settings that have another unit or other values here. An error names these options instead.
GUESSES = {
    **dict.fromkeys(("batch_size", "train_batch_size"), ("global_batch_size", "micro_batch_size")),
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
    """Declaration of one option by `option`, completed by `options_of`."""

    help: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    above: float | None = None
    below: float | None = None
    maximum: float | None = None
    engine: str | None = None  # the only engine with this option
    tasks: tuple[str, ...] = TASKS
    needs: tuple[str, str | None] | None = None  # another option and its value; None: any true value
    fixed: bool = False  # cannot change when a run is resumed
    refusals: Mapping[str, str] = field(default_factory=dict)  # reasons for refusing values of other programs
    task_defaults: Mapping[str, Any] = field(default_factory=dict)  # defaults of single tasks
    aliases: tuple[str, ...] = ()  # names in other programs, accepted as flags and YAML keys
    formerly: str = ""  # key in YAML files of earlier versions
    negative: str | None = ""  # flag that sets a bool to False; "": --no-NAME; None: no such flag
    common: bool = False  # shown by --help; --help-all shows every option
    metavar: str = ""  # placeholder of the value in --help, such as FILE
    panel: str = ""  # title of the option's group in --help; by default the section
    section: str = ""  # "" in a flat class
    name: str = ""  # name of the field; also the YAML key and, with dashes, the flag
    type: Any = None
    default: Any = None

    @property
    def flag(self) -> str:
        """The flag without its aliases, such as --seq-length."""
        return self.flags[0]

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag and its aliases."""
        return tuple(f"--{name.replace('_', '-')}" for name in (self.name, *self.aliases))

    @property
    def path(self) -> str:
        """Path of the key in a YAML file, such as optimizer.lr."""
        return f"{self.section}.{self.name}"

    def default_for(self, task: str) -> Any:
        """Default of one task."""
        return self.task_defaults.get(task, self.default)

    def belongs_to(self, task: str) -> bool:
        """True if the command `task` has the option."""
        return task in self.tasks


def option(default: Any, help: str, **constraints: Any) -> Any:
    """Dataclass field that declares an option, which is required if `default` is dataclasses.MISSING. `constraints`
    are the other fields of `Option`."""
    metadata = {"option": Option(help, **constraints)}
    if isinstance(default, list | dict):
        return field(default_factory=type(default), metadata=metadata)
    return field(default=default, metadata=metadata)


common_option = functools.partial(option, common=True)
accelerate_option = functools.partial(option, engine="accelerate")
megatron_option = functools.partial(option, engine="megatron")


def options_of(config_class: type) -> Mapping[str, Option]:
    """Options of a dataclass by name, in the order of declaration. A field that is a dataclass is a section with
    options of its own; other fields that `option` does not declare are skipped."""
    return _declared(config_class)


@functools.cache
def _declared(config_class: type) -> Mapping[str, Option]:
    found: dict[str, Option] = {}
    hints = typing.get_type_hints(config_class)
    for known in dataclasses.fields(config_class):
        if dataclasses.is_dataclass(section := hints[known.name]):
            nested = _declared(section)  # type: ignore[arg-type]
            found |= {name: dataclasses.replace(each, section=known.name) for name, each in nested.items()}
        elif declared := known.metadata.get("option"):
            negative = f"--no-{known.name.replace('_', '-')}" if declared.negative == "" else declared.negative
            found[known.name] = dataclasses.replace(
                declared,
                negative=negative,
                name=known.name,
                type=hints[known.name],
                default=known.default_factory() if callable(known.default_factory) else known.default,
            )
    return types.MappingProxyType(found)


def options_meant(config_class: type, word: str) -> list[Option]:
    """Options with `word` as name or alias, or that `GUESSES` gives for it."""
    names = GUESSES.get(word, (word,))
    return [each for each in options_of(config_class).values() if {each.name, *each.aliases} & set(names)]


def check_option(option: Option, value: Any, task: str, values: Mapping[str, Any]) -> None:
    """Raise SettingError for a value out of range, or one that the engine, the task or another option excludes.

    Args:
        values: values of all options by name, for `engine` and `needs`.
    """
    check_value(option, value)
    if value in (None, option.default, option.default_for(task)):
        return
    if not option.belongs_to(task):
        raise SettingError(option.name, f"is not an option of dlm-bridge {task}")
    if option.engine not in (None, values["engine"]):
        raise SettingError(option.name, f"needs `engine={option.engine}`")
    if option.needs is not None:
        other, needed = option.needs
        if values[other] != needed if needed is not None else not values[other]:
            raise SettingError(option.name, f"needs `{other}{'' if needed is None else f'={needed}'}`")


def check_values(settings: Any) -> None:
    """Raise SettingError for the first option of a flat dataclass whose value `check_value` refuses."""
    for each in options_of(type(settings)).values():
        check_value(each, getattr(settings, each.name))


def check_value(option: Option, value: Any) -> None:
    """Raise SettingError for a value that is not among the option's choices or out of its range. None is a value only
    of options whose type says so."""
    if option.choices and not (value is None and type(None) in typing.get_args(option.type)):
        check_choice(option.name, value, option.choices)
    if isinstance(value, int | float) and not isinstance(value, bool) and not in_range(option, value):
        raise SettingError(option.name, f"must be {range_text(option)}, not {value}")


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


def typed(option: Option, value: Any) -> Any:
    """Convert a YAML value to the option's type where that is unambiguous: 1 for 1.0, "1e-3", one path for a list.
    Raises SettingError."""
    if isinstance(value, str) and value in option.refusals:
        raise SettingError(option.name, f"{value!r}: {option.refusals[value]}")
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
    raise SettingError(
        option.name, f"must be {requirement(option)}{' or null' if type(None) in kinds else ''}, not {value!r}"
    )


def requirement(option: Option) -> str:
    """Description of valid values, which completes "must be ..."."""
    if option.choices:
        return f"one of {', '.join(filter(None, option.choices))}"
    kind = kind_text(option.type)
    bounds = range_text(option) if kind in ("a number", "a whole number") else ""
    return kind if bounds in ("", "a finite number") else f"{kind} {bounds.replace('at least', 'of at least')}"


def kind_text(kind: Any) -> str:
    """Description of a type's values, such as "a whole number"."""
    text = str(kind)
    return next(words for part, words in _KINDS.items() if part in text)


_KINDS = {
    "tuple[int": "a list of token ids",
    "list[int": "a whole number or a list of them",
    "list[": "a list",
    "str": "a text",
    "bool": "True or False",
    "float": "a number",
    "int": "a whole number",
    "": "a value of another type",
}


def nearest(
    word: object,
    known: Iterable[str],
    otherwise: str = "",
    cutoff: float = 0.6,
    mark: str = "",
    shown: Mapping[str, str] | None = None,
) -> str:
    """Hint at the known name that a mistyped one may mean, such as "the nearest is llada".

    Args:
        otherwise: hint where no name is as similar as `cutoff` (0: any).
        mark: encloses the name: a backquote for a setting.
        shown: what to print instead of a known name.
    """
    near = difflib.get_close_matches(str(word), list(known), n=1, cutoff=cutoff)
    return f"the nearest is {mark}{(shown or {}).get(near[0], near[0])}{mark}" if near else otherwise


def check_choice(field: str, value: object, choices: Iterable[str], more: str = "") -> None:
    """Raise SettingError, whose reason ends with `more`, for a value that is not among the choices."""
    known = list(choices)
    if value not in known:
        names = list(filter(None, known))
        hint = nearest(value, names)
        near = f"{hint}; " if hint else ""
        raise SettingError(field, f"{value!r} is unknown: {near}choose one of {', '.join(names)}{more}")


def check_minimum(field: str, value: float | None, minimum: float = 1) -> None:
    """Raise SettingError for a number below the minimum."""
    if value is not None and not value >= minimum:
        raise SettingError(field, f"must be at least {minimum}, not {value}")


def comma_separated(text: str | None) -> list[str]:
    """Split a comma-separated value into words."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def whole_numbers(field: str, text: str | None) -> list[int]:
    """Split a comma-separated value into integers. Raises SettingError."""
    try:
        return [int(word) for word in comma_separated(text)]
    except ValueError:
        raise SettingError(field, f"{text} must be integers separated by commas") from None


QUANTIZE = ("fp8", "int8", "int4")
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
    tp_plan: str | None = _loading_option(None, "Tensor parallelism over all processes.", metavar="auto")
    tp: int | None = _loading_option(
        None, "Shard the model over N processes; each group of N gets a part of the rows.", minimum=1, metavar="N"
    )
    tokenizer: str | None = _loading_option(None, "Tokenizer folder or id; the model's own by default.")
    family: str | None = _loading_option(None, "Model family, if config.json does not identify it.")
    revision: str | None = _loading_option(None, "Branch, tag or commit of a Hub id.")
    like: str | None = _loading_option(None, "Hub model of a Megatron checkpoint of another program.", metavar="HF")
    quantize: str | None = _loading_option(None, "Quantise the weights: fp8, int8 or int4.", choices=QUANTIZE)

    @property
    def source(self) -> dict[str, Any]:
        """Keywords of `load_model` that select the tensors and the tokenizer."""
        names = ("dtype", "family", "revision", "like", "tokenizer", "quantize")
        return {name: getattr(self, name) for name in names}
