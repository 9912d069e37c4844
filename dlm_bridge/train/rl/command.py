"""`dlm-bridge rl`: reinforcement learning and preference optimisation; its options are declared in
`dlm_bridge.train.config`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from dlm_bridge.cli.launch import with_processes
from dlm_bridge.cli.train import (
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
from dlm_bridge.train.config import RLConfig
from dlm_bridge.train.config.files import load_rl_config

HELP = """Reinforcement learning and preference optimisation (diffu-GRPO, block-GRPO, TraceRL, GRPO, VRPO, DPO).

Sampled completions (--reward): grpo for autoregressive models, diffu-grpo, block-grpo and tracerl for diffusion
models. --data are rows of {"prompt": text or list of messages}, or {"messages": [...]}; the reward function gets the
whole row. Preference pairs: dpo for autoregressive models, vrpo for diffusion models. --data are rows of {"prompt",
"chosen", "rejected"}. Every option can be set in a nested YAML file given with --config; the command line wins.

Example:

  dlm-bridge rl --model run/checkpoints/step-0001000 --data problems.jsonl --output rl --method diffu-grpo
  --reward countdown --gen-length 64 --seq-length 256

On several processes: dlm-bridge rl --nproc-per-node 2 ... (on several nodes: torchrun)
"""
DATA = "Rows: JSONL, parquet, a folder or glob of them, or a dataset. May be repeated."
BATCH = "Completions, or pairs, per step, over all processes."
SEQUENCE = "Maximum number of tokens of a prompt and its completion."


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("rl", cls=TrainingCommand, help=HELP)(_command())


def _command() -> Callable[..., None]:
    def command(context: typer.Context, **_: Any) -> None:
        given = given_flags(context.params)
        file, resume, planned = take_words(given, RLConfig), given.pop("resume"), taken_dry_run(given)
        config = load_rl_config(given, file, resume)
        if planned is not None:
            planned.show("rl --dry-run", config, resume)
            return
        quieten()
        from dlm_bridge.train.rl.accelerate_engine import train

        exit_if_stopped(config, train(config, resume, run_console()))

    helps = {"data": DATA, "global_batch_size": BATCH, "seq_length": SEQUENCE}
    return with_processes(with_options(command, RLConfig, "rl", helps, START_OPTIONS))
