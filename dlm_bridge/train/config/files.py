"""Configuration files: nested YAML, and what a resume takes from its run."""

from __future__ import annotations

import contextlib
import difflib
import functools
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from dlm_bridge.distributed import is_main
from dlm_bridge.errors import SettingError, printable
from dlm_bridge.files.reading import parse_yaml
from dlm_bridge.hub import checkpoint_folder
from dlm_bridge.settings import GUESSES, Option, options_meant, options_of, typed
from dlm_bridge.train.config import RLConfig, TrainConfig

logger = logging.getLogger(__name__)
Config = TypeVar("Config", bound=TrainConfig)


def load_config(
    flags: dict[str, Any], file: Path | None = None, resume: bool = False, task: str = "pretrain"
) -> TrainConfig:
    """The configuration of a run of `pretrain` or `sft`, see `load_config_as`."""
    return load_config_as(TrainConfig, flags, file, resume, task)


def load_rl_config(flags: dict[str, Any], file: Path | None = None, resume: bool = False) -> RLConfig:
    """The configuration of a run of `rl`, see `load_config_as`."""
    return load_config_as(RLConfig, flags, file, resume, "rl")


def load_config_as(
    config_class: type[Config], flags: dict[str, Any], file: Path | None, resume: bool, task: str
) -> Config:
    """A configuration: `flags` over the YAML `file` over, on a resume, the run's own config.yaml, over the defaults of
    the `task`.

    Raises DlmBridgeError for bad values, and on a resume for a value that would change the data's order or the noise.
    """
    values = ({} if file is None else read_yaml(file, config_class)) | flags
    # A run's folder stands for its newest checkpoint, which config.yaml then names.
    for key in ("model", "adapter"):
        if values.get(key) and (folder := checkpoint_folder(values[key])) != Path(values[key]).expanduser():
            values[key] = str(folder)
    if values.setdefault("task", task) != task:
        raise SettingError("config", f"{file}: it is for dlm-bridge {values['task']}, this is dlm-bridge {task}")
    own = Path(values.get("output", "")) / "config.yaml"
    if not (resume and "output" in values and own.is_file()):
        return config_class.from_flags(**values)
    began = read_run_config(own, config_class)
    if began.get("task", "pretrain") != task:
        raise SettingError("output", f"{values['output']}: the run there is of dlm-bridge {began['task']}")
    for key, option in options_of(config_class).items():
        before = began.get(key, option.default_for(task))
        if option.fixed and values.get(key) is not None and values[key] != before:
            raise SettingError(
                option.name,
                f"{values[key]} differs from the {before} that the run in {values['output']} began with: "
                "resume with that, or choose another --output",
            )
    if _weights(values.get("data") or began["data"]) != _weights(began["data"]):
        raise SettingError(
            "data", f"other weights than those that the run in {values['output']} began with: resume with those"
        )
    return config_class.from_flags(**(began | values))


def read_yaml(path: Path, config_class: type[TrainConfig] = TrainConfig) -> dict[str, Any]:
    """The options of a nested file, by their flags with underscores. Raises SettingError for a flat file and for
    unknown keys, naming the section or the nearest known key."""
    return _flags_of(_mapping(path), f"--config {path}", config_class)


def read_overrides(words: Iterable[str], config_class: type[TrainConfig] = TrainConfig) -> dict[str, Any]:
    """The options of the words SECTION.KEY=VALUE, or KEY=VALUE with a flag's key, by their flags with underscores.
    Values are YAML. Raises SettingError."""
    flags: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        section, _, key = name.replace("-", "_").rpartition(".")
        flat = [option for option in options_of(config_class).values() if key in (option.name, *option.aliases)]
        if not section and flat:
            section, key = flat[0].section, flat[0].name
        try:
            value = parse_yaml(text)
        except ValueError:
            raise SettingError(word, f"{text} is no value in YAML") from None
        if not section:
            raise SettingError(word, _unknown(name, key, options_of(config_class).values()))
        for option, given in _flags_of({section: {key: value}}, word, config_class).items():
            put(flags, option, given, config_class)
    return flags


def put(flags: dict[str, Any], key: str, value: Any, config_class: type[TrainConfig]) -> None:
    """Set an option. Raises SettingError where it has another value already."""
    if flags.get(key, value) != value:
        option = options_of(config_class)[key]
        name = f"{option.section}.{option.name}"
        raise SettingError(option.name, f"({name}) has two values, {flags[key]} and {value}: give one")
    flags[key] = value


def _flags_of(values: Mapping[str, Any], where: str, config_class: type[TrainConfig]) -> dict[str, Any]:
    """The options of a nested mapping, by their flags with underscores."""
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
                    raise SettingError(where, _unknown(f"{name}.{key}", str(key), options.values()))
                option = sections[name][key]
                if key == option.formerly:
                    renamed.append(f"{name}.{key} is now {name}.{option.name}")
                found = typed(option, value, where)
                if option.name in given and flags[option.name] != found:
                    raise SettingError(
                        where,
                        f"{name}.{given[option.name]} and {name}.{key} are one option, with two values: give one",
                    )
                given[option.name], flags[option.name] = key, found
        elif name in sections and section is None:
            continue  # an empty section
        elif name in options:
            option = options[name]
            raise SettingError(where, f"options stand in sections: write '{option.section}: {{{option.name}: ...}}'")
        elif name in sections:
            raise SettingError(where, f"'{name}' is a section, a mapping of its options is needed")
        elif meant := options_meant(config_class, str(name)):
            raise SettingError(where, f"unknown key '{name}', the nearest is '{meant[0].section}.{meant[0].name}'")
        else:
            near = difflib.get_close_matches(str(name), [*sections, *options], n=1, cutoff=0.0)
            raise SettingError(where, f"unknown key '{name}', the nearest is '{near[0]}'")
    if renamed:
        _warn_once(f"{where}: {', '.join(renamed)}: the old names are read for now, write the new ones")
    return flags


@functools.cache
def _warn_once(text: str) -> None:
    """Log a warning on the main process. A run's config.yaml is read more than once."""
    if is_main():
        logger.warning(printable(text))


def read_run_config(path: Path, config_class: type[TrainConfig] = TrainConfig) -> dict[str, Any]:
    """The options of a run's own config.yaml, by their flags with underscores. Runs of earlier versions have a flat
    one, whose keys are the flags. Raises SettingError."""
    values, options = _mapping(path), options_of(config_class)
    if not values.keys() <= {"task", *options} or any(isinstance(value, Mapping) for value in values.values()):
        return read_yaml(path, config_class)
    where = f"--config {path}"
    return {key: value if key == "task" else typed(options[key], value, where) for key, value in values.items()}


def _mapping(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise SettingError(f"--config {path}", "no such file")
    try:
        values = parse_yaml(path.read_text())
    except ValueError as error:
        raise SettingError(f"--config {path}", f"not YAML: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise SettingError(f"--config {path}", f"cannot be read: {error.strerror or error}") from None
    if values is not None and not isinstance(values, dict):
        raise SettingError(f"--config {path}", "a mapping of sections to options is needed")
    return values or {}


def _unknown(name: str, key: str, options: Iterable[Option]) -> str:
    """A key that its section does not have; the nearest may stand in another section, or be a guess."""
    known = {
        f"{option.section}.{word}": f"{option.section}.{option.name}"
        for option in options
        for word in (*option.aliases, option.name, option.name)
    }
    same = [word for word in known if word.partition(".")[2] in GUESSES.get(key, (key,))]
    near = same or difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f": unknown key '{name}', the nearest is '{known[near[0]]}'"


def _weights(data: list[str]) -> list[float]:
    """The numbers of a blend."""
    numbers = []
    for item in data:
        with contextlib.suppress(ValueError):
            numbers.append(float(item))
    return numbers
