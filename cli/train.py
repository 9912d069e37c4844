"""The training commands. Their options are the fields of `TrainConfig`, each with its text."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from dlm_bridge.train.config import TASKS, AccelerateOptions, MegatronOptions, TrainConfig, load_config

PRETRAIN_HELP = """Train a model on text: from its weights, or from nothing with --from-scratch.

Every option can stand in a YAML file given with --config, under its name with underscores; the command line wins.
DIR gets config.yaml, metrics.jsonl (a line a step), loss.png and checkpoints/step-NNNNNNN, each a Hub folder.

Example:

  dlm-bridge pretrain --model GSAI-ML/LLaDA-8B-Base --data 'corpus/*.jsonl' --output run --steps 1000 --precision bf16

On several processes: torchrun --nproc-per-node 2 -m dlm_bridge.cli pretrain ...
"""
SFT_HELP = """Fine-tune a model on conversations: it learns to give the answers, whose prompts it sees.

--data are rows of JSONL, parquet or a dataset: {"messages": [{"role": ..., "content": ...}, ...]}, or "prompt" and
"completion", two texts or two lists of messages. The tokenizer's chat template writes them. Masks, padding and what a
loss is divided by are as the model's family was tuned; every option can stand in a YAML file, as for pretrain.

Example:

  dlm-bridge sft --model GSAI-ML/LLaDA-8B-Base --data chats.jsonl --output run --steps 500 --precision bf16

On several processes: torchrun --nproc-per-node 2 -m dlm_bridge.cli sft ...
"""
SFT_DATA = "Conversations: JSONL, parquet, a folder or glob of them, or a dataset. May be repeated."
PRETRAIN_DATA = (
    "Text, JSONL, parquet, a folder, a glob, a dataset NAME:CONFIG:SPLIT, the prefix of a Megatron .bin/.idx pair, or "
    "mock. Several are read as one; W PATH W PATH ... blends them by weight."
)


def register(app: typer.Typer) -> None:
    """Add the training commands to the app."""
    app.command("pretrain", help=PRETRAIN_HELP)(_command("pretrain", data=PRETRAIN_DATA))
    app.command("sft", help=SFT_HELP)(_command("sft", data=SFT_DATA))


def _command(task: str, **helps: str) -> Callable[..., None]:
    """A command that trains, with an option for each field of `TrainConfig` that `task` has; `helps` replace fields'
    own texts."""

    def command(context: typer.Context, **_: Any) -> None:
        # What was not given on the command line must not override the YAML file.
        given = {name: value for name, value in context.params.items() if value is not None}
        file, resume, more = given.pop("config", None), given.pop("resume"), given.pop("more_data", None)
        planned, gpus, as_json = given.pop("dry_run"), given.pop("gpus", None), given.pop("json")
        file = None if file is None else Path(file)  # some releases of typer convert only what the function is given
        if more and not given.get("data"):
            raise typer.BadParameter(f"unexpected argument '{more[0]}'")
        if more:  # --data a b c, as an unquoted glob gives it, leaves b and c as arguments
            given["data"] = [*given["data"], *more]
        given = {name: value for name, value in given.items() if value not in ([], ())}
        config = load_config(given, file, resume, task)
        if planned:
            _show(config, gpus, resume, as_json)
        elif as_json or gpus is not None:
            raise typer.BadParameter(f"{'--json' if as_json else '--gpus'} needs --dry-run")
        else:
            _train(config, resume)

    types = typing.get_type_hints(TrainConfig)
    panels = {known.name: "Accelerate engine" for known in dataclasses.fields(AccelerateOptions)}
    panels |= {known.name: "Megatron engine" for known in dataclasses.fields(MegatronOptions)}
    # Those of one engine come last, in a panel of their own.
    fields = sorted(dataclasses.fields(TrainConfig), key=lambda known: panels.get(known.name, ""))
    annotations: dict[str, Any] = {
        "context": typer.Context,
        "config": Annotated[Path | None, typer.Option(help="YAML file of options.")],
    }
    for known in fields:
        if known.name == "task" or known.metadata.get("task") not in (None, task):
            continue
        annotations[known.name] = option_of(
            known, types[known.name], helps.get(known.name), panels.get(known.name), task
        )
    annotations["more_data"] = Annotated[list[str] | None, typer.Argument(hidden=True)]
    annotations["resume"] = Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --output.")
    ]
    annotations["dry_run"] = Annotated[
        bool, typer.Option("--dry-run", help="Show settings, layout, data and memory, and train nothing.")
    ]
    annotations["gpus"] = Annotated[
        int | None, typer.Option(help="Of --dry-run: devices of the run; the launcher's processes, or 1.")
    ]
    annotations["json"] = Annotated[bool, typer.Option("--json", help="Of --dry-run: as one JSON object.")]
    defaults: dict[str, Any] = {
        "context": inspect.Parameter.empty,
        "resume": False,
        "dry_run": False,
        "json": False,
    }
    parameters = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=annotations[name]
        )
        for name in annotations
    ]
    command.__annotations__ = annotations
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # which Typer reads
    return command


def option_of(known: dataclasses.Field[Any], kind: Any, help: str | None, panel: str | None, task: str) -> Any:
    """The command line's option for a field of a configuration, whose type is `kind`."""
    text = help or known.metadata["help"]
    flag = known.name.replace("_", "-")
    otherwise = known.metadata.get("otherwise") or f"no-{flag}"
    names = [f"--{flag}/--{otherwise}"] if bool in (kind, *typing.get_args(kind)) else [f"--{flag}"]
    default = TASKS[task].get(known.name, known.default)
    shown = str(default) if isinstance(default, int | float | str) and default not in (False, "") else False
    return Annotated[kind | None, typer.Option(*names, help=text, show_default=shown, rich_help_panel=panel)]


def _show(config: TrainConfig, gpus: int | None, resume: bool, as_json: bool) -> None:
    """The dry run, on the first of a launcher's processes."""
    from dlm_bridge.cli.dry_run_views import show_dry_run
    from dlm_bridge.plan.dry_run import dry_run

    if os.environ.get("RANK", "0") == "0":
        show_dry_run(dry_run(config, gpus, resume), as_json)


def _train(config: TrainConfig, resume: bool) -> None:
    quieten()
    if config.engine == "megatron":
        from dlm_bridge.train.megatron.engine import train
    else:
        from dlm_bridge.train.accelerate.trainer import train
    train(config, resume)


def quieten() -> None:
    """No progress bars but ours, and no warnings that a user could not act on."""
    # Imported only now: a mistyped flag should answer at once.
    import datasets
    import transformers

    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    # Of names that megatron-core uses and torch will rename.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed|megatron")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron")
    quieten_peft()


def quieten_peft() -> None:
    """PEFT uses a name that transformers will rename, and imports bitsandbytes wherever that is installed, which then
    says what its 4-bit layers miss on a CPU."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.modeling_utils")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
