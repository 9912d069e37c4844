"""Output of a dry run: a JSON object for machines, text and rich tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from dlm_bridge.cli.convert import print_json
from dlm_bridge.cli.help import in_flags
from dlm_bridge.errors import counted, printable

if TYPE_CHECKING:
    from rich.table import Table

    from dlm_bridge.plan.dry_run import DataSource, DryRun
    from dlm_bridge.train.config import TrainConfig

SHOWN_PIECES = 20  # of the data


def show_dry_run(run: DryRun, as_json: bool) -> None:
    """Print a dry run."""
    if as_json:
        print_json(run.as_dict())
        return
    from rich.console import Console
    from rich.text import Text

    from dlm_bridge.plan.views import memory_table, memory_text, model_text, needed

    console = Console()
    typer.echo(run.config.to_yaml())  # valid as a --config file
    console.print(_layout(run))
    tokens = f"{counted(run.config.data.global_batch_size, 'sequence')}, {counted(run.tokens_per_step, 'token')}"
    batches = f"{counted(run.micro_batches, 'micro-batch', 'micro-batches')} of"
    batches += f" {counted(run.micro_batch_size, 'sequence')} per replica"
    console.print(Text(f"per step: {tokens}, {batches}"), soft_wrap=True)
    if ramp_up := run.config.data.batch_ramp_up:
        start, increment, samples = ramp_up.split(",")
        ramp = f"starts at {start} sequences per step and grows by {increment}, over {samples} sequences"
        console.print(Text(ramp), soft_wrap=True)
    if run.step:
        console.print(Text(f"resumes after step {run.step:,} of {run.config.schedule.last_step:,}"), soft_wrap=True)
    for piece in run.data[:SHOWN_PIECES]:
        console.print(Text(printable(f"data: {_described(piece, run)}")), soft_wrap=True)
    if len(run.data) > SHOWN_PIECES:
        console.print(Text(f"data: and {len(run.data) - SHOWN_PIECES:,} more"), soft_wrap=True)
    if run.memory is not None:
        console.print(memory_table(run.memory))
        console.print(Text(printable(model_text(run.memory.model))), soft_wrap=True)
        console.print(Text(needed(run.memory)), soft_wrap=True)
    if (rollouts := run.rollouts) is not None:
        parts = [("weights to sample from", rollouts.weights), ("reference model", rollouts.reference)]
        parts += [("value model and its optimizer", rollouts.value_model), ("each row of full length", rollouts.row)]
        sizes = ", ".join(f"{name} {memory_text(size)}" for name, size in parts if size)
        console.print(Text(f"rollouts, per device besides the training state: {sizes}"), soft_wrap=True)
    for note in run.notes:
        console.print(Text(printable(f"note: {in_flags(note)}")), soft_wrap=True)


def describe_memory(config: TrainConfig, processes: int, gpu: bool) -> str:
    """One line about the planned memory of the fullest process. `config` is resolved.

    Args:
        gpu: True to count what a GPU needs beside the tensors.

    Raises DlmBridgeError for a run that the plan does not cover.
    """
    from dlm_bridge.plan.dry_run import memory_of
    from dlm_bridge.plan.run import run_of
    from dlm_bridge.plan.views import memory_text

    plan, notes = memory_of(config, run_of(config, str(config.objective.objective), processes), None)
    if plan is None:
        return "; ".join(notes)
    peak = plan.peak
    total = peak.total if gpu else max(peak.allocated, peak.building)
    state = memory_text(peak.weights + peak.gradients + peak.optimizer)
    activations = memory_text(peak.activations + peak.transient)
    return f"{memory_text(total)} planned per process (model state {state}, activations {activations})"


def _layout(run: DryRun) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"{counted(run.gpus, 'device')}, --engine {run.config.engine.engine}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("dimension")
    table.add_column("size", justify="right")
    table.add_column("ranks of rank 0's group")
    for group in run.groups:
        table.add_row(group.name, str(group.size), _ranks(group.ranks))
    return table


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, {ranks[2]}, ... {ranks[-1]}"


def _described(piece: DataSource, run: DryRun) -> str:
    text = piece.name if piece.weight is None else f"{piece.weight:g} x {piece.name}"
    if piece.validation:
        text = f"{text} (validation)"
    if piece.tokens is not None:
        return f"{text}: {piece.tokens:,} tokens, {piece.tokens // run.config.data.seq_length:,} blocks"
    return text if piece.nbytes is None else f"{text}: {piece.nbytes:,} bytes"
