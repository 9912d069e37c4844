"""`dlm-bridge distill`: distillation from an autoregressive parent; its options are declared in `config`."""

from __future__ import annotations

from typing import Any

import typer

from dlm_bridge.cli.launch import with_processes
from dlm_bridge.cli.train import (
    SFT_DATA,
    START_OPTIONS,
    TrainingCommand,
    exit_if_stopped,
    given_flags,
    quieten,
    run_console,
    take_words,
    taken_dry_run,
    with_options,
)
from dlm_bridge.train.distill.config import TASK, DistillConfig, load_distill_config

HELP = """Distil a diffusion model from an autoregressive parent.

The frozen parent gives next-token distributions of the same texts; the loss is their divergence from the model's
predictions of the masked tokens. The texts are the answers of --data, or with --on-policy the model's own completions
of its prompts. With an adapter (--lora-rank) the parent is the base under it, and no second model is in memory. All
other options are those of sft.

Example:

  dlm-bridge distill --model smollm2-dlm --data prompts.jsonl --output run --on-policy --gen-length 128 --lora-rank 64
  --steps 500

On several processes: dlm-bridge distill --nproc-per-node 2 ... (on several nodes: torchrun)
"""


def register(app: typer.Typer) -> None:
    """Add the command to the app."""

    def command(context: typer.Context, **_: Any) -> None:
        given = given_flags(context.params)
        file, resume, planned = take_words(given, DistillConfig), given.pop("resume"), taken_dry_run(given)
        config = load_distill_config(given, file, resume)
        if planned is not None:
            planned.show("distill --dry-run", config, resume)
            return
        quieten()
        from dlm_bridge.train.distill.trainer import train

        exit_if_stopped(config, train(config, resume, run_console()))

    helps = {"data": f"{SFT_DATA} With --on-policy only their prompts are read."}
    options = with_options(command, DistillConfig, TASK, helps, START_OPTIONS)
    app.command("distill", cls=TrainingCommand, help=HELP)(with_processes(options))
