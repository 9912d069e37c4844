"""Tasks whose data come with the package, so that an evaluation runs without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "tasks"
LOCAL = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def local_task(name: str) -> dict[str, Any]:
    """The configuration of one of `LOCAL`, as lm-evaluation-harness's TaskManager loads it."""
    config: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    data = {"data_files": {"test": str(FOLDER / f"{name}.jsonl")}}
    return {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test", **config}
