"""`dlm-bridge eval`: tasks of lm-evaluation-harness and perplexity of a text, for both kinds of model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from dlm_bridge.cli.generate_request import parse_options, text_parameters
from dlm_bridge.cli.help import Model, ModelCommand, declared_parameters, with_parameters
from dlm_bridge.cli.launch import with_processes
from dlm_bridge.errors import counted, printable
from dlm_bridge.evaluation.options import EvaluationOptions
from dlm_bridge.settings import LoadingOptions, options_of

Json = Annotated[bool, typer.Option("--json", help="Print results.json to stdout.")]


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    parameters = {
        "model": (Model, ...),
        **text_parameters(EvaluationOptions),
        **declared_parameters(LoadingOptions),
        "as_json": (Json, False),
    }
    app.command("eval", cls=ModelCommand)(with_processes(with_parameters(evaluate, parameters)))


def evaluate(model: str, as_json: bool = False, **given: Any) -> None:
    """Evaluate a model on lm-evaluation-harness's tasks, or measure the perplexity of a text.

    Diffusion models: likelihoods are Monte-Carlo bounds, texts come from the family's sampler. Autoregressive models:
    exact, by lm-evaluation-harness. Decoding is greedy unless a task or --set temperature=T samples. The results file
    records every setting that affects the figures.

    Example:

      dlm-bridge eval GSAI-ML/LLaDA-8B-Instruct --tasks sums,orders --limit 32 --output results/

      dlm-bridge eval MODEL --tasks gsm8k --chat --set gen_length=256 --set steps=128 --perplexity heldout.txt

    On several GPUs, each with the whole model and a part of the rows (with --tp N, N GPUs share a model):

      dlm-bridge eval MODEL --nproc-per-node 8 --tasks gsm8k --output results/
    """
    values = parse_options(given)
    loading = LoadingOptions(**{name: values.pop(name) for name in options_of(LoadingOptions) if name in values})
    options = EvaluationOptions(**values)
    options.check()
    # Imported after the check, so that a mistyped option is answered at once.
    from transformers.utils import logging

    from dlm_bridge.evaluation.run import evaluate as run

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    facts = run(model, options, loading)
    if facts is None:
        return
    if as_json:
        typer.echo(json.dumps(facts, indent=2, default=str))
    else:
        _show(facts)


def _show(facts: Mapping[str, Any]) -> None:
    """Print a table of the results, followed by the settings."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if "COLUMNS" in os.environ else max(Console().width, 100), markup=False)
    table = Table(title=printable(f"{facts['model']} ({facts['family']}, {facts['dtype']})"))
    for column in ("task", "metric", "value", "± standard error", "documents"):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right")
    for task, entry in facts.get("tasks", {}).items():
        for metric, value in entry["metrics"].items():
            kind, _, filtered = metric.partition(",")
            if kind == "sample_len" or kind.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = entry["metrics"].get(f"{kind}_stderr,{filtered}")
            documents = (entry["documents"] or {}).get("effective", "")
            shown = kind if filtered in ("", "none") else f"{kind} ({filtered})"
            spread = f"{error:.4f}" if isinstance(error, int | float) else ""
            table.add_row(printable(str(task)), shown, f"{value:.4f}", spread, str(documents))
    if text := facts.get("perplexity"):
        bound = "" if text["exact"] else ", at most"
        size = f"{counted(text['tokens'], 'token')}"
        table.add_row("perplexity", f"by token{bound}", f"{text['perplexity']:.4f}", "", size)
        table.add_row("", f"nats a token{bound}", f"{text['nats']:.4f}", f"{text['error']:.4f}", size)
        table.add_row(
            "", f"bits a byte{bound}", f"{text['bits_per_byte']:.4f}", "", f"{counted(text['bytes'], 'byte')}"
        )
    console.print(table)
    console.print(f"likelihood: {facts['likelihood']}", highlight=False)
    settings = facts["settings"] | ({"window": text["window"]} if text else {})
    console.print(
        printable(", ".join(f"{name} {value}" for name, value in settings.items() if value not in (None, {}, []))),
        highlight=False,
    )
