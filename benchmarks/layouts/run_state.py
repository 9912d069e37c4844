"""What runs.py compares of runs: losses, weights, optimizer state, and exported checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.layouts.one_step import LAUNCHER
from dlm_bridge.errors import one_line

KEPT = ("exp_avg", "exp_avg_sq", "momentum_buffer", "master_param")  # of an optimizer, for each parameter


def losses_of(output: Path, validations: bool = False) -> dict[int, float]:
    """By step; with `validations` theirs too, each by the negative of its step."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    found = {row["step"]: row["loss"] for row in rows}
    return found | {-row["step"]: row["eval_loss"] for row in rows if validations and "eval_loss" in row}


def largest_difference(wanted: dict[int, float], found: dict[int, float]) -> float:
    """Relative; infinite where they are not of the same steps."""
    if wanted.keys() != found.keys():
        return float("inf")
    return max(abs(found[step] - loss) / abs(loss) for step, loss in wanted.items())


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """All weights by Hub name, on the CPU. Collective."""
    from dlm_bridge.parallel.handover import stream_hf_weights
    from dlm_bridge.parallel.train.schedule import gathered_weights

    with gathered_weights(trainer.chunks):
        return {
            name: tensor.cpu() for name, tensor in stream_hf_weights(trainer.source.bridge.checkpoint, trainer.chunks)
        }


def optimizer_state(trainer: Any) -> list[torch.Tensor]:
    """Copies of a rank's main params and moments, in their own order."""
    parts = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    found = []
    for part in parts:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                moments = part.optimizer.state.get(parameter, {})
                # The last where main params are left to the optimizer inside.
                for tensor in (parameter, *(moments.get(name) for name in KEPT)):
                    if isinstance(tensor, torch.Tensor):
                        local = getattr(tensor, "_local_tensor", tensor)
                        found.append(local.detach().float().cpu().clone())
    return found


def fp32_weights(trainer: Any) -> list[str]:
    """The model's own parameters in fp32, in a run in half precision."""
    named = (pair for chunk in trainer.chunks for pair in chunk.named_parameters())
    return [name for name, parameter in named if parameter.dtype == torch.float32]


def all_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """To the bit, and not empty."""
    return bool(one) and len(one) == len(other) and all(map(torch.equal, one, other))


def export_difference(output: Path, live: dict[str, torch.Tensor]) -> str:
    """What is wrong with `dlm-bridge export` and `verify` of a run's last checkpoint, against its live weights;
    nothing: ""."""
    from safetensors import safe_open

    folder = output / "exported"
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name not in (*LAUNCHER, "LOCAL_RANK")}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    checkpoints = str(output / "checkpoints")
    for arguments in (["export", checkpoints, str(folder), "--overwrite"], ["verify", checkpoints]):
        command = [sys.executable, "-m", "dlm_bridge.cli", *arguments]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode:
            return f"dlm-bridge {arguments[0]}: {one_line(ended.stderr or ended.stdout)[-300:]}"
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    if missing := found.keys() ^ live.keys():
        return f"exported on one side only: {min(missing)}"
    other = [name for name, tensor in live.items() if not torch.equal(found[name].to(tensor.dtype), tensor)]
    return f"{len(other)} of {len(live)} exported tensors differ, the first {other[0]}" if other else ""
