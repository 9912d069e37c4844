"""Training commands `pretrain` and `sft`. `dlm_bridge.train.config` declares their options."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm_bridge import processes, terminal
from dlm_bridge.cli.help import Command, HelpAll, in_flags, option_annotation, refuse_two, with_parameters
from dlm_bridge.cli.launch import with_processes
from dlm_bridge.distributed import is_main
from dlm_bridge.errors import counted, printable
from dlm_bridge.registration import load
from dlm_bridge.settings import GUESSES, Option, check_minimum, nearest, options_meant, options_of
from dlm_bridge.train.config import RLConfig, TrainConfig
from dlm_bridge.train.config.files import load_config, put, read_overrides

if TYPE_CHECKING:
    from rich.console import Console

    from dlm_bridge.train.output import RunEnd

PRETRAIN_HELP = """Train a model on text, from its weights or from scratch (--from-scratch).

Options can also be set in a nested YAML file (--config); the command line overrides it. The output folder contains
config.yaml with all options, metrics.jsonl with a line per step, loss.png, and checkpoints/step-NNNNNNN, each a Hub
folder.

Example:

  dlm-bridge pretrain --model GSAI-ML/LLaDA-8B-Base --data 'corpus/*.jsonl' --output run --tokens 1_000_000_000

On several processes: dlm-bridge pretrain --nproc-per-node 2 ... (on several nodes: torchrun)
"""
SFT_HELP = """Fine-tune a model on conversations: the loss is on the answers, given their prompts.

Rows of --data are {"messages": [{"role": ..., "content": ...}, ...]}, "prompt" and "completion" (two texts or two
lists of messages), or in the format of ShareGPT or Alpaca. The chat template of the tokenizer, or --chat-template,
formats them; --preview N shows the trained tokens. Masks, padding and the divisor of the loss follow the model's
family. Options can also be set in a YAML file, as for pretrain.

Example:

  dlm-bridge sft --model GSAI-ML/LLaDA-8B-Base --data chats.jsonl --output run --epochs 3

On several processes: dlm-bridge sft --nproc-per-node 2 ... (on several nodes: torchrun)
"""
SFT_DATA = (
    "Conversations: JSONL (also .gz, .zst), parquet, CSV, a folder or glob of them, or a dataset. May be repeated."
)
PRETRAIN_DATA = (
    "Text, JSONL, parquet, a folder, a glob, a dataset NAME:CONFIG:SPLIT, the prefix of a Megatron .bin/.idx pair, or "
    "mock. Several are concatenated; W PATH W PATH ... blends them by weight."
)
RESUME = Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint in --output.")]
DRY_RUN = Annotated[bool, typer.Option("--dry-run", help="Show settings, layout, data and memory without training.")]
GPUS = Annotated[
    int | None,
    typer.Option(help="With --dry-run: number of GPUs to plan for. Default: the number of processes."),
]
AS_JSON = Annotated[bool, typer.Option("--json", help="With --dry-run: one JSON object.")]
PREVIEW = Annotated[
    int | None,
    typer.Option(metavar="N", help="Show the first N rows with trained tokens in colour, and exit."),
]
SFT_JSON = Annotated[
    bool, typer.Option("--json", help="With --dry-run: one JSON object. With --preview: one per row.")
]
WORDS = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL|FILE.yaml|SECTION.KEY=VALUE",
        help="Model (same as --model), YAML file of options (same as --config), or single options by key.",
    ),
]
START_OPTIONS: dict[str, tuple[Any, Any]] = {
    "resume": (RESUME, False),
    "dry_run": (DRY_RUN, False),
    "gpus": (GPUS, None),
    "json": (AS_JSON, False),
}


def register(app: typer.Typer) -> None:
    """Add the training commands to the app."""
    app.command("pretrain", cls=TrainingCommand, help=PRETRAIN_HELP)(_command("pretrain", PRETRAIN_DATA))
    app.command("sft", cls=TrainingCommand, help=SFT_HELP)(_command("sft", SFT_DATA))


class TrainingCommand(Command):
    """Command with the options of a training configuration. Positional words are a model, a YAML file and
    SECTION.KEY=VALUE. After --data PATH they are more data, because an unquoted glob expands to several words."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        names = next((option.opts for option in self.params if option.name == "data"), [])
        words: list[str] = []
        reading = False  # after --data
        for word in args:
            name, equals, value = word.partition("=")
            if word.startswith("-"):
                if (flag := name.replace("_", "-")) in self.flags:
                    word = f"{flag}{equals}{value}"  # --learning_rate
                reading = flag in names
            elif reading and words[-1] not in names and _kind_of_word(word) == "model":
                words.append(names[0])  # words[-1] is a value, or --data=PATH
            words.append(word)
        return super().parse_args(ctx, words)

    def answer(self, word: str) -> str:
        """Answer to an unknown option: the option meant, the command or engine that has it, or the nearest name."""
        flags, options = self.flags, options_of(RLConfig)
        meant = options_meant(RLConfig, word.lstrip("-").replace("-", "_"))
        if here := [option for option in meant if option.flag in flags]:
            return "use " + " or ".join(f"{option.flag} ({option.help.removesuffix('.')})" for option in here)
        if meant:
            tasks = RLConfig.tasks if meant[0].section == "rl" else meant[0].tasks
            return f"it is an option of dlm-bridge {', '.join(tasks)}{_engine_of(meant[0])}"
        known = {flag: option for option in options.values() if option.flag in flags for flag in option.flags}
        guesses = {f"--{guess.replace('_', '-')}": options[names[0]] for guess, names in GUESSES.items()}
        known |= {guess: option for guess, option in guesses.items() if option.flag in flags}
        shown = {
            flag: f"{flag if flag in flags else option.flag}{_engine_of(option) if '--engine' in flags else ''}"
            for flag, option in known.items()
        }
        return nearest(word, [*known, *flags], shown=shown)


def _engine_of(option: Option) -> str:
    return f" (--engine {option.engine})" if option.engine else ""


def _kind_of_word(word: str) -> str:
    """Kind of a positional word: override, file or model."""
    if re.match(r"[\w-]+(\.[\w-]+)?=", word) and not os.path.exists(word):
        return "override"
    return "file" if word.endswith((".yaml", ".yml")) else "model"


def take_words(given: dict[str, Any], config_class: type[TrainConfig]) -> Path | None:
    """Replace the positional words in `given` by the options that they set. Returns the YAML file, or None. Raises
    SettingError."""
    words: dict[str, list[str]] = {"override": [], "file": [], "model": []}
    for word in given.pop("words", []):
        words[_kind_of_word(word)].append(word)
    file = refuse_two("config", [*([given.pop("config")] if "config" in given else []), *map(Path, words["file"])])
    models = [("model", model) for model in words["model"]]
    for name, value in (*models, *read_overrides(words["override"], config_class).items()):
        put(given, name, value, config_class)
    return file


def _command(task: str, data: str) -> Callable[..., None]:
    def command(context: typer.Context, **_: Any) -> None:
        given = given_flags(context.params)
        file, resume = take_words(given, TrainConfig), given.pop("resume")
        shown, as_json = given.pop("preview", None), given["json"]
        check_minimum("preview", shown)
        if shown is not None:
            given |= {"json": False, "output": given.get("output", "preview")}  # not written
        planned = taken_dry_run(given)
        if shown is not None and planned is not None:
            raise typer.BadParameter("--preview and --dry-run exclude each other")
        config = load_config(given, file, resume, task)
        if shown is not None:
            if is_main():
                _preview(config, shown, as_json)
            return
        if planned is None:
            _train(config, resume)
            return
        planned.show("train --dry-run", config, resume)

    more = {"preview": (PREVIEW, None), "json": (SFT_JSON, False)} if task == "sft" else {}
    return with_processes(with_options(command, TrainConfig, task, {"data": data}, START_OPTIONS | more))


@dataclass(frozen=True)
class AskedDryRun:
    """Arguments of --dry-run."""

    gpus: int | None
    as_json: bool

    def show(self, feature: str, config: TrainConfig, resume: bool) -> None:
        """Show the plan of the run by an extension's `feature`, on the first process of a launcher."""
        show = load("features", "--dry-run")
        if is_main():
            show(load("features", feature)(config, self.gpus, resume), self.as_json)


def taken_dry_run(given: dict[str, Any]) -> AskedDryRun | None:
    """Remove the arguments of a dry run from `given`. Returns them, or None without --dry-run."""
    planned, gpus, as_json = given.pop("dry_run"), given.pop("gpus", None), given.pop("json")
    processes = given.pop("nproc_per_node", None)
    if planned:
        return AskedDryRun(refuse_two("gpus", filter(None, (gpus, processes))), as_json)
    if as_json or gpus is not None:
        raise typer.BadParameter(f"{'--json' if as_json else '--gpus'} needs --dry-run")
    return None


def given_flags(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Options given on the command line. Defaults must not override the YAML file."""
    return {name: value for name, value in parameters.items() if value not in (None, [], ())}


def with_options(
    command: Callable[..., None],
    config_class: type[TrainConfig],
    task: str,
    helps: Mapping[str, str],
    more: Mapping[str, tuple[Any, Any]],
) -> Callable[..., None]:
    """Set the signature that Typer reads: context, `WORDS`, `config`, and the options of `config_class` for `task`.

    Args:
        helps: help texts by name, instead of the declared ones.
        more: annotation and default of further parameters by name.
    """
    parameters: dict[str, tuple[Any, Any]] = {
        "context": (typer.Context, inspect.Parameter.empty),
        "words": (WORDS, None),
        "config": (Annotated[Path | None, typer.Option(help="YAML file of options.")], None),
    }
    for name, option in options_of(config_class).items():
        if option.belongs_to(task):
            parameters[name] = (option_annotation(option, helps.get(name, option.help), task), None)
    parameters |= {**more, "help_all": (HelpAll, False)}
    return with_parameters(command, parameters)


def _train(config: TrainConfig, resume: bool) -> None:
    quieten()
    from dlm_bridge.train.engine import find_engine

    exit_if_stopped(config, find_engine(config.engine.engine).train(config, resume, run_console()))


def exit_if_stopped(config: TrainConfig, end: RunEnd) -> None:
    """End the command with `stopped_exit_code` if the run stopped early."""
    if not end.finished and (code := config.checkpoint.stopped_exit_code):
        processes.end_process_group(code=code)
        raise typer.Exit(code)


def run_console() -> Console:
    """Console on stderr that prints the settings in a run's notes as flags."""
    from rich.console import Console

    class FlagConsole(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*(in_flags(each) if isinstance(each, str) else each for each in objects), **options)

    return FlagConsole(stderr=True, markup=False, quiet=terminal.is_quiet())


def _preview(config: TrainConfig, count: int, as_json: bool) -> None:
    """Print the first rows as model inputs."""
    quieten()
    from rich.console import Console
    from rich.text import Text

    from dlm_bridge.train.preview import preview

    console = Console()
    for number, row in enumerate(preview(config, count), 1):
        if as_json:
            typer.echo(json.dumps(row.as_dict()))
            continue
        console.rule(f"row {number}: {counted(len(row.input_ids), 'token')}, {sum(row.trained)} trained", style="dim")
        pieces = (
            (_without_repeats(printable(piece)), "bold green" if trained else "") for piece, trained in row.pieces
        )
        console.print(Text.assemble(*pieces), soft_wrap=True)


def _without_repeats(text: str) -> str:
    """The text with a special token that is repeated, as that for padding, written once and counted."""
    return re.sub(r"(<[^<>\s]+>)\1{3,}", lambda run: f"{run[1]} x {len(run[0]) // len(run[1])}", text)


def quieten() -> None:
    """Turn off progress bars of libraries, and warnings that users cannot act on."""
    # Imported late, so that a mistyped flag is answered at once.
    import datasets
    import transformers

    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    # megatron-core uses names that torch will rename.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed|megatron")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron")
    quieten_peft()


def quieten_peft() -> None:
    """Turn off warnings of PEFT, which uses a name that transformers will rename, and of bitsandbytes, which PEFT
    imports, about 4-bit layers on a CPU."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.modeling_utils")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
