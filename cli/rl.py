"""`dlm-bridge rl`. Its options are the fields of `RLConfig` that it has, each with its text."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from pathlib import Path
from typing import Annotated, Any

import typer

from dlm_bridge.cli.train import option_of, quieten
from dlm_bridge.train.config import SHARED, RLConfig, TrainConfig, load_rl_config

HELP = """Train a model on rewards of what it says, or on answers of which one is preferred.

Sampled (--reward): grpo for autoregressive models, diffu-grpo and block-grpo for diffusion models. --data are rows of
{"prompt": a text or a list of messages}, or {"messages": [...]}; the whole row goes to the reward.
Preferred: dpo for autoregressive models, vrpo for diffusion models. --data are rows of {"prompt", "chosen",
"rejected"}. Every option can stand in a YAML file given with --config; the command line wins.

Example:

  dlm-bridge rl --model run/checkpoints/step-0001000 --data problems.jsonl --output rl --method diffu-grpo
  --reward countdown --gen-length 64 --seq-length 256

On several processes: torchrun --nproc-per-node 2 -m dlm_bridge.cli rl ...
"""
DATA = "Rows: JSONL, parquet, a folder or glob of them, or a dataset. May be repeated."
BATCH = "Completions, or pairs, a step, over all processes."
SEQUENCE = "Longest prompt with its completion, in tokens."


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("rl", help=HELP)(_command())


def _command() -> Any:
    def command(**values: Any) -> None:
        # What was not given on the command line must not override the YAML file.
        given = {name: value for name, value in values.items() if value not in (None, [], ())}
        file, resume = given.pop("config", None), given.pop("resume")
        config = load_rl_config(given, file, resume)
        quieten()
        from dlm_bridge.train.rl.engine import train

        train(config, resume)

    types = typing.get_type_hints(RLConfig)
    shared = {known.name for known in dataclasses.fields(TrainConfig)}
    helps = {"data": DATA, "global_batch_size": BATCH, "seq_length": SEQUENCE}
    fields = [
        known
        for known in dataclasses.fields(RLConfig)
        if known.name not in ("task", "engine") and (known.name in SHARED or known.name not in shared)
    ]
    annotations: dict[str, Any] = {"config": Annotated[Path | None, typer.Option(help="YAML file of options.")]}
    for known in sorted(fields, key=lambda known: known.name in shared):
        annotations[known.name] = option_of(known, types[known.name], helps.get(known.name), None, "rl")
    annotations["resume"] = Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --output.")
    ]
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if name == "resume" else None,
            annotation=annotations[name],
        )
        for name in annotations
    ]
    command.__annotations__ = annotations
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # which Typer reads
    return command
