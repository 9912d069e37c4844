"""Results of an evaluation as a JSON file and as a table, with every setting that the figures depend on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.convert.atomic import atomic_file
from dlm_bridge.evaluation.likelihood import bound_estimator
from dlm_bridge.evaluation.perplexity import Perplexity
from dlm_bridge.loading import LoadedModel

PACKAGES = ("dlm-bridge", "torch", "transformers", "lm-eval", "datasets")
RESULTS, SAMPLES = "results.json", "samples.jsonl"


def report(
    name: str,
    opened: LoadedModel,
    settings: Mapping[str, Any],
    found: Mapping[str, Any] | None,
    text: Perplexity | None,
) -> dict[str, Any]:
    """The content of results.json.

    `name` is the model as given by the user, `settings` are the command's, `found` is the result of
    `harness.run_tasks`.
    """
    device = opened.model.device
    facts: dict[str, Any] = {
        "model": name,
        "family": opened.family,
        "kind": "diffusion" if opened.diffusion else "autoregressive",
        "dtype": str(opened.model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "likelihood": f"bound: {bound_estimator(opened.model).described}" if opened.diffusion else "exact",
        "settings": dict(settings),
        "versions": {"python": platform.python_version()} | {package: _version(package) for package in PACKAGES},
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    if found is not None:
        facts["tasks"] = {
            task: {
                "metrics": {metric: value for metric, value in metrics.items() if metric not in ("alias", "name")},
                "version": found["versions"].get(task),
                "shots": found["n-shot"].get(task),
                "documents": found["n-samples"].get(task),
                "sampler": found["sampled"].get(task),
            }
            for task, metrics in found["results"].items()
        }
    if text is not None:
        facts["perplexity"] = text.to_json()
    return facts


def write(folder: Path, facts: Mapping[str, Any], found: Mapping[str, Any] | None, overwrite: bool) -> None:
    """Write FOLDER/results.json and, for tasks, FOLDER/samples.jsonl (per line a document, its requests and answers).

    Each is written atomically. Raises DlmBridgeError for files that exist, unless `overwrite`.
    """
    if found is not None:
        with atomic_file(folder / SAMPLES, overwrite) as stream:
            for task, rows in found["samples"].items():
                for row in rows:
                    stream.write(json.dumps({"task": task, **row}, default=str, ensure_ascii=False) + "\n")
    with atomic_file(folder / RESULTS, overwrite) as stream:
        stream.write(json.dumps(facts, indent=2, default=str, ensure_ascii=False) + "\n")


def show(facts: Mapping[str, Any]) -> None:
    """Print a table of the figures, and below it the settings."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if "COLUMNS" in os.environ else max(Console().width, 100))
    table = Table(title=f"{facts['model']} ({facts['family']}, {facts['dtype']})")
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
            table.add_row(task, shown, f"{value:.4f}", spread, str(documents))
    if text := facts.get("perplexity"):
        bound = "" if text["exact"] else ", at most"
        size = f"{text['tokens']:,} tokens"
        table.add_row("perplexity", f"by token{bound}", f"{text['perplexity']:.4f}", "", size)
        table.add_row("", f"nats a token{bound}", f"{text['nats']:.4f}", f"{text['error']:.4f}", size)
        table.add_row("", f"bits a byte{bound}", f"{text['bits_per_byte']:.4f}", "", f"{text['bytes']:,} bytes")
    console.print(table)
    console.print(f"likelihood: {facts['likelihood']}", highlight=False)
    settings = facts["settings"] | ({"window": text["window"]} if text else {})
    console.print(
        ", ".join(f"{name} {value}" for name, value in settings.items() if value not in (None, {}, [])),
        highlight=False,
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
