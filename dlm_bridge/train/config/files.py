"""Configuration files: nested YAML, and the configuration of a run that is resumed."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from dlm_bridge.distributed import is_main
from dlm_bridge.errors import DlmBridgeError, InputFileError, SettingError, printable
from dlm_bridge.files.reading import parse_yaml
from dlm_bridge.hub import checkpoint_folder
from dlm_bridge.settings import GUESSES, Option, nearest, options_meant, options_of, typed
from dlm_bridge.train.config import RLConfig, TrainConfig
from dlm_bridge.train.config.sections import LENGTHS, yaml_value

# Of versions whose config.yaml may lack these options.
EARLIER_DEFAULTS: dict[str, Any] = {"steps": 1000, "seq_length": 1024, "precision": "fp32"}
logger = logging.getLogger(__name__)
Config = TypeVar("Config", bound=TrainConfig)
Refusal = Callable[[str], DlmBridgeError]  # constructs the error for a reason


def load_config(
    flags: dict[str, Any], file: Path | None = None, resume: bool = False, task: str = "pretrain"
) -> TrainConfig:
    """Load the configuration of a run of `pretrain` or `sft`; see `load_config_as`."""
    return load_config_as(TrainConfig, flags, file, resume, task)


def load_rl_config(flags: dict[str, Any], file: Path | None = None, resume: bool = False) -> RLConfig:
    """Load the configuration of a run of `rl`; see `load_config_as`."""
    return load_config_as(RLConfig, flags, file, resume, "rl")


def load_config_as(
    config_class: type[Config], flags: dict[str, Any], file: Path | None, resume: bool, task: str
) -> Config:
    """Load a configuration: `flags` override the YAML `file`, which overrides, on a resume, the run's own config.yaml,
    which overrides the defaults of `task`.

    Raises:
        SettingError: a value is refused, or would change the data order or the noise of a resumed run.
        LayoutError: the layout or the batch size is impossible.
        InputFileError: `file` is missing or malformed.
    """
    values = _overriding({} if file is None else read_yaml(file, config_class), flags)
    # A run's folder is replaced by its newest checkpoint, so that config.yaml names that.
    for key in ("model", "adapter"):
        if values.get(key) and (folder := checkpoint_folder(values[key])) != Path(values[key]).expanduser():
            values[key] = str(folder)
    if values.setdefault("task", task) != task:
        raise InputFileError(file, f"is for dlm-bridge {values['task']}, this is dlm-bridge {task}")
    own = Path(values.get("output", "")) / "config.yaml"
    if not (resume and "output" in values and own.is_file()):
        config = config_class.from_flags(**values)
        config.check_length()
        return config
    began, where = read_run_config(own, config_class), f"the run in {values['output']} began with"
    if began.get("task", "pretrain") != task:
        raise SettingError("output", f"{values['output']} contains a run of dlm-bridge {began['task']}")
    if [name for name in ("epochs", "tokens") if values.pop(name, None) is not None]:
        _warn_once(f"{own}: a resumed run keeps its number of steps, {began['steps']}; `steps` prolongs it")
    for name, option in options_of(config_class).items():
        before = began.get(name, option.default_for(task))
        if option.fixed and values.get(name) is not None and values[name] != before:
            raise SettingError(
                name, f"{values[name]} differs from {before}, which {where}: use that, or another `output`"
            )
    if _weights(values.get("data") or began["data"]) != _weights(began["data"]):
        raise SettingError("data", f"the weights of the blend differ from those that {where}: use those")
    return config_class.from_flags(**(began | values))


def _overriding(file: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """Options of a file, overridden by `flags`. The `LENGTHS` exclude each other in one source, and override each
    other between sources. Raises SettingError."""
    for values in (file, flags):
        if len(given := [name for name in LENGTHS if values.get(name) is not None]) > 1:
            raise SettingError(given[1], f"excludes `{given[0]}`: give one of them")
    if any(flags.get(name) is not None for name in LENGTHS):
        file = {name: value for name, value in file.items() if name not in LENGTHS}
    return file | flags


def read_yaml(path: Path, config_class: type[TrainConfig] = TrainConfig) -> dict[str, Any]:
    """Read a nested file of options. Returns options by name.

    Raises:
        InputFileError: the file is missing, malformed or flat, or has an unknown key, whose section or nearest known
            key the error names.
    """
    return _options_in(_mapping(path), functools.partial(InputFileError, path), config_class)


def read_overrides(words: Iterable[str], config_class: type[TrainConfig] = TrainConfig) -> dict[str, Any]:
    """Parse words SECTION.KEY=VALUE or KEY=VALUE, whose values are YAML. Returns options by name. Raises
    SettingError."""
    flags: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        section, _, key = name.replace("-", "_").rpartition(".")
        found = [option for option in options_of(config_class).values() if key in (option.name, *option.aliases)]
        if not section and found:
            section, key = found[0].section, found[0].name
        value = yaml_value(name, text)
        if not section:
            raise SettingError(name, _unknown(name, key, options_of(config_class).values()))
        refusal = functools.partial(_refused_word, name, f"{section}.{key} ")
        for option, given in _options_in({section: {key: value}}, refusal, config_class).items():
            put(flags, option, given, config_class)
    return flags


def _refused_word(name: str, path: str, reason: str) -> SettingError:
    """Error of a word, whose name says already what a reason of `_options_in` begins with."""
    return SettingError(name, reason.removeprefix(path))


def put(flags: dict[str, Any], name: str, value: Any, config_class: type[TrainConfig]) -> None:
    """Set an option in `flags`. Raises SettingError if it has another value already."""
    if flags.get(name, value) != value:
        path = options_of(config_class)[name].path
        raise SettingError(name, f"({path}) has two values, {flags[name]} and {value}: give one")
    flags[name] = value


def _options_in(values: Mapping[str, Any], refusal: Refusal, config_class: type[TrainConfig]) -> dict[str, Any]:
    """Options of a nested mapping by name. Keys of earlier versions are accepted, with one warning."""
    options = options_of(config_class)
    sections: dict[str, dict[str, Option]] = {}
    for option in options.values():
        keys = filter(None, (option.name, *option.aliases, option.formerly))
        sections.setdefault(option.section, {}).update(dict.fromkeys(keys, option))
    flags: dict[str, Any] = {}
    renamed: list[str] = []
    for name, section in values.items():
        if name == "task" and isinstance(section, str):
            flags["task"] = section
        elif name in sections and isinstance(section, Mapping):
            given: dict[str, str] = {}
            for key, value in section.items():
                if key not in sections[name]:
                    raise refusal(_unknown(f"{name}.{key}", str(key), options.values()))
                option = sections[name][key]
                if key == option.formerly:
                    renamed.append(f"{name}.{key} is now {option.path}")
                try:
                    found = typed(option, value)
                except SettingError as error:
                    raise refusal(f"{name}.{key} {error.reason}") from None
                if option.name in given and flags[option.name] != found:
                    raise refusal(
                        f"{name}.{given[option.name]} and {name}.{key} are one option, with two values: give one"
                    )
                given[option.name], flags[option.name] = key, found
        elif name in sections and section is None:
            continue  # an empty section
        elif name in options:
            raise refusal(f"options belong in sections: write '{options[name].section}: {{{name}: ...}}'")
        elif name in sections:
            raise refusal(f"'{name}' must be a mapping of options")
        elif meant := options_meant(config_class, str(name)):
            raise refusal(f"unknown key '{name}': the nearest is '{meant[0].path}'")
        else:
            raise refusal(f"unknown key '{name}': " + nearest(name, [*sections, *options], cutoff=0, mark="'"))
    if renamed:
        _warn_once(f"{refusal('').field}: old keys are read, but use the new ones: {', '.join(renamed)}")
    return flags


@functools.cache
def _warn_once(text: str) -> None:
    """Log a warning on the main process, once although a run's config.yaml is read repeatedly."""
    if is_main():
        logger.warning(printable(text))


def read_run_config(path: Path, config_class: type[TrainConfig] = TrainConfig) -> dict[str, Any]:
    """Read a run's own config.yaml. Returns options by name. Raises InputFileError.

    Files of early versions are flat, with the names of options as keys."""
    values, options = _mapping(path), options_of(config_class)
    if not values.keys() <= {"task", *options} or any(isinstance(value, Mapping) for value in values.values()):
        return EARLIER_DEFAULTS | read_yaml(path, config_class)
    try:
        found = {name: value if name == "task" else typed(options[name], value) for name, value in values.items()}
        return EARLIER_DEFAULTS | found
    except SettingError as error:
        raise InputFileError(path, f"{error.field} {error.reason}") from None


def _mapping(path: Path) -> dict[str, Any]:
    try:
        values = parse_yaml(path.read_text())
    except ValueError as error:
        raise InputFileError(path, f"is not YAML: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise InputFileError(path, f"cannot be read: {error.strerror or error}") from None
    if values is not None and not isinstance(values, dict):
        raise InputFileError(path, "must be a mapping of sections to options")
    return values or {}


def _unknown(name: str, key: str, options: Iterable[Option]) -> str:
    """Reason for refusing a key that its section does not have, with the nearest option of any section."""
    known = {f"{option.section}.{word}": option.path for option in options for word in (*option.aliases, option.name)}
    same = [path for word, path in known.items() if word.partition(".")[2] in GUESSES.get(key, (key,))]
    hint = f"the nearest is '{same[0]}'" if same else nearest(name, known, cutoff=0, mark="'", shown=known)
    return f"unknown key '{name}': {hint}"


def _weights(data: list[str]) -> list[float]:
    """Numbers in a blend."""
    numbers = []
    for item in data:
        with contextlib.suppress(ValueError):
            numbers.append(float(item))
    return numbers
