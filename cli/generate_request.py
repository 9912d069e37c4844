"""Options of `dlm-bridge generate`, and the parsing of values that the commands that sample take as text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from dlm_bridge.cli.help import declared_parameters, option_annotation
from dlm_bridge.distributed import world_size
from dlm_bridge.errors import InputFileError, SettingError
from dlm_bridge.files.reading import check_text_file
from dlm_bridge.generation.options import COMMAND_LINE, SAMPLING, check_value
from dlm_bridge.settings import LoadingOptions, check_minimum, comma_separated, common_option, options_of

# Arguments of `generate` in Python that are not settings, and settings that the command sets.
NO_SETTINGS = (
    "attention_mask", "commit_rule", "generation_config", "generator", "input_ids", "inputs", "output_history",
    "return_dict_in_generate", "streamer", "tokenizer",
)  # fmt: skip
Set = Annotated[
    list[str],
    typer.Option("--set", metavar="NAME=VALUE", rich_help_panel=SAMPLING, help="Any other setting. Repeatable."),
]
EMPTY = "is empty: give a text, or set `unconditional` to sample without a prompt"
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of one invocation. `settings` are keyword arguments of `generate`."""

    model: str
    settings: dict[str, Any]
    loading: LoadingOptions = field(default_factory=LoadingOptions)
    prompt: str | None = common_option(None, "The prompt.", metavar="TEXT")
    unconditional: bool = common_option(
        False, "Sample without a prompt; with --jsonl, allow rows whose prompt is empty.", negative=None
    )
    chat: bool = common_option(False, "Format the prompt as a user message with the chat template.", negative=None)
    system: str | None = common_option(None, "With --chat: system message.", metavar="TEXT")
    chat_template_args: dict[str, Any] = common_option(
        {}, "Variable of the chat template: enable_thinking=false. Repeatable.", metavar="KEY=VALUE"
    )
    infill: bool = common_option(
        False, "Fill in the prompt's [MASK] (one token) or [MASK:n] (n tokens).", negative=None
    )
    regex: str | None = common_option(None, "The text matches this regular expression.", metavar="PATTERN")
    json_schema: Path | None = common_option(
        None, "The text is JSON that is valid by the JSON schema in this file.", metavar="FILE"
    )
    choice: str | None = common_option(None, "The text is one of these, separated by commas.", metavar="A,B,...")
    jsonl: str | None = common_option(None, "File of prompts, one JSON object per line; - is stdin.", metavar="FILE")
    field: str = common_option("prompt", "With --jsonl: the field that holds the prompt.")
    batch_size: int | None = common_option(
        8, "With --jsonl: rows per batch; auto: as many as fit into memory.", metavar="N|auto"
    )
    commit_steps: bool = common_option(
        False, "With --jsonl: write prompt_token_ids and commit_steps, for sft on trajectories.", negative=None
    )
    output: Path | None = common_option(None, "Output file, written atomically. Default: stdout.", metavar="FILE")
    overwrite: bool = common_option(False, "Replace --output, --html and --svg.", negative=None)
    resume: bool = common_option(
        False, "With --jsonl: continue from OUTPUT.partial after an interruption.", negative=None
    )
    show: bool = common_option(False, "Show the denoising in the terminal.", negative=None)
    html: Path | None = common_option(None, "Write an animated page of the denoising.", metavar="FILE")
    svg: Path | None = common_option(None, "Write an animated picture of the denoising.", metavar="FILE")
    json: bool = common_option(False, "Print one JSON object to stdout.", negative=None)

    def check(self) -> None:
        """Raise SettingError for options that contradict each other."""
        if self.unconditional and (self.prompt is not None or self.chat or self.settings.get("infill")):
            raise SettingError("unconditional", "excludes `prompt`, `chat` and `infill`: remove it, or these")
        if self.prompt is None and self.jsonl is None and not self.unconditional:
            raise SettingError("prompt", "is missing: give a text, or a file of prompts with `jsonl`")
        if self.prompt == "" and not self.chat:
            raise SettingError("prompt", EMPTY)
        if self.chat and self.prompt is not None and not self.prompt.strip():
            raise SettingError("prompt", "is empty: with `chat` it is a user's message")
        if self.jsonl is not None:
            for name in ("prompt", "show", "html", "svg"):
                if getattr(self, name) not in (None, False):
                    raise SettingError(
                        name, "needs a single prompt, but `jsonl` is a file of prompts: set one of them"
                    )
            if self.json and self.output is None:
                raise SettingError("json", "prints a summary with `jsonl`: set `output` for the texts")
        if self.commit_steps and (self.jsonl is None or self.settings.get("infill")):
            raise SettingError("commit_steps", "needs `jsonl`, without `infill`")
        if self.resume and (self.jsonl is None or self.output is None):
            raise SettingError("resume", "needs `jsonl` and `output`")
        stated = [name for name in ("regex", "json_schema", "choice") if getattr(self, name) is not None]
        if len(stated) > 1:
            raise SettingError(stated[1], f"excludes `{stated[0]}`: a text has one constraint, set one of them")
        if self.system is not None and not self.chat:
            raise SettingError("system", "needs `chat`")
        if self.jsonl == "-" and world_size() > 1:
            raise SettingError("jsonl", "stdin cannot be read by several processes: use a file")

    @property
    def constraint(self) -> dict[str, Any] | None:
        """The constraint of the options `regex`, `json_schema` and `choice`, as in the rows of `jsonl`. Raises
        InputFileError for a file that is not JSON."""
        if self.regex is not None:
            return {"regex": self.regex}
        if self.choice is not None:
            return {"choice": self.choice.split(",")}
        if self.json_schema is None:
            return None
        check_text_file(self.json_schema)
        try:
            return {"json": json.loads(self.json_schema.read_text("utf-8"))}
        except OSError as error:
            raise InputFileError(self.json_schema, str(error.strerror)) from error
        except (ValueError, RecursionError) as error:
            raise InputFileError(self.json_schema, f"is not JSON: {error}") from None


def parse_batch_size(text: str) -> int | None:
    """Value of `batch_size`: a number, or None for "auto". Raises SettingError."""
    if text == "auto":
        return None
    if not text.isdecimal():
        raise SettingError("batch_size", f"{text}: must be a number of rows, or auto")
    check_minimum("batch_size", int(text))
    return int(text)


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """Values of `--set name=value`, see `parse_pairs`. Raises SettingError, also for names that are not settings."""
    values = parse_pairs(pairs, "set", "remasking=random")
    for name in values:
        if name in NO_SETTINGS:
            raise SettingError("set", f"{name} is an argument of generate in Python, not a setting: remove it")
    return values


def parse_template_args(pairs: list[str]) -> dict[str, Any]:
    """Values of `--chat-template-args name=value`, see `parse_pairs`. Raises SettingError."""
    values = parse_pairs(pairs, "chat_template_args", "enable_thinking=false")
    if values:
        from dlm_bridge.generation.prompts import check_template_args

        check_template_args(values, "chat_template_args")
    return values


def parse_pairs(pairs: list[str], setting: str, example: str) -> dict[str, Any]:
    """Parse name=value: JSON, Python's True, False and None, or else text. Raises SettingError for `setting`."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name.isidentifier():
            raise SettingError(setting, f"{pair}: must be a name and a value, such as {example}")
        if name in values:
            raise SettingError(setting, f"{name} is given twice")
        try:
            values[name] = json.loads(PYTHON_WORDS.get(text, text))
        except ValueError:
            values[name] = text
    return values


# Options that the command line takes as text, by name: type of the parameter, and parser.
PARSED: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "batch_size": (str, parse_batch_size),
    "chat_template_args": (list[str], parse_template_args),
    "set": (list[str], parse_settings),
    "tasks": (list[str], lambda names: comma_separated(",".join(names))),
}


def text_parameters(config_class: type, without: Iterable[str] = ()) -> dict[str, tuple[Any, Any]]:
    """`declared_parameters` with text as the type of the options in `PARSED`."""
    parameters = declared_parameters(config_class, without=without)
    for name in PARSED.keys() & parameters.keys():
        declared, (kind, _) = options_of(config_class)[name], PARSED[name]
        annotation = option_annotation(dataclasses.replace(declared, type=kind))
        parameters[name] = annotation, str(declared.default) if kind is str else []
    return parameters


def parse_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a command's options, with those in `PARSED` parsed. Raises SettingError."""
    return {name: PARSED[name][1](value) if name in PARSED else value for name, value in given.items()}


def sampling_parameters() -> dict[str, tuple[Any, Any]]:
    """Parameters of a command for the settings in `COMMAND_LINE`, and `set` for others."""
    sampling = {name: (option_annotation(each), None) for name, each in COMMAND_LINE.items()}
    sampling["seed"] = (option_annotation(dataclasses.replace(COMMAND_LINE["seed"], type=int)), None)
    return {**sampling, "set": (Set, [])}


def take_settings(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the values of `sampling_parameters` from a command's options, and return them as keyword arguments of
    `generate`. Raises SettingError for an invalid value, and for a setting with two values."""
    settings = {name: options.pop(name) for name in COMMAND_LINE}
    for name, value in settings.items():  # before a model is loaded
        check_value(name, COMMAND_LINE[name], value)
    settings = {name: value for name, value in settings.items() if value is not None}
    for name, value in options.pop("set").items():
        if name in settings:
            raise SettingError(name, f"has two values: `{name}={settings[name]}` and `set={name}={value}`")
        settings[name] = value
    return settings
