"""Results of an evaluation as JSON, with every setting that affects the figures."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.evaluation.likelihood import bound_estimator
from dlm_bridge.evaluation.options import EvaluationOptions
from dlm_bridge.evaluation.perplexity import Perplexity
from dlm_bridge.files.atomic import atomic_file
from dlm_bridge.generation.gemma import is_gemma
from dlm_bridge.loading import LoadedModel

PACKAGES = ("dlm-bridge", "torch", "transformers", "lm-eval", "datasets")
RECORDED = (
    "tasks", "perplexity", "limit", "shots", "chat", "system", "fewshot_as_multiturn", "chat_template_args",
    "mc_samples", "batch_size", "processes", "max_length", "seed", "sampler",
)  # fmt: skip
RESULTS, SAMPLES = "results.json", "samples.jsonl"


def report(
    name: str,
    opened: LoadedModel,
    options: EvaluationOptions,
    processes: int,
    found: Mapping[str, Any] | None,
    text: Perplexity | None,
) -> dict[str, Any]:
    """Content of results.json.

    Args:
        name: the model as given by the user.
        processes: number of processes that shared the rows.
        found: result of `harness.run_tasks`.
    """
    device = opened.model.device
    facts: dict[str, Any] = {
        "model": name,
        "family": opened.family,
        "kind": "diffusion" if opened.diffusion or is_gemma(opened.model) else "autoregressive",
        "dtype": str(opened.model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "likelihood": _likelihood(opened),
        "settings": _settings(options, processes, opened.diffusion),
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
    """Write FOLDER/results.json and, for tasks, FOLDER/samples.jsonl (one document with its requests and answers per
    line), each atomically. Raises SettingError for files that exist, unless `overwrite`."""
    if found is not None:
        with atomic_file(folder / SAMPLES, overwrite) as stream:
            for task, rows in found["samples"].items():
                for row in rows:
                    stream.write(json.dumps({"task": task, **row}, default=str, ensure_ascii=False) + "\n")
    with atomic_file(folder / RESULTS, overwrite) as stream:
        stream.write(json.dumps(facts, indent=2, default=str) + "\n")


def _settings(options: EvaluationOptions, processes: int, diffusion: bool) -> dict[str, Any]:
    changed = {
        "perplexity": None if options.perplexity is None else str(options.perplexity),
        "fewshot_as_multiturn": options.fewshot_as_multiturn is not False if options.chat else None,
        "mc_samples": options.mc_samples if diffusion else None,
        "processes": processes,
        "sampler": options.set,
    }
    return {name: changed[name] if name in changed else getattr(options, name) for name in RECORDED}


def _likelihood(opened: LoadedModel) -> str:
    if opened.diffusion:
        return f"bound: {bound_estimator(opened.model).described}"
    return "none" if is_gemma(opened.model) else "exact"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
