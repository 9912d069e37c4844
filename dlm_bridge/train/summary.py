"""Summary of a run before its first step: model, data, length, number format and devices, memory, output."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console

from dlm_bridge.errors import DlmBridgeError, counted, printable
from dlm_bridge.loading.pretrained import model_family
from dlm_bridge.registration import load
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.metrics import elements

MAIN_PARAMS = {"fp16": "fp16", "bf16": "bf16", "fp8": "fp8 and bf16"}  # number formats of computation


def print_summary(
    console: Console,
    config: TrainConfig,
    model: Any,
    data: str,
    step: int,
    devices: str,
    device: torch.device,
    processes: int,
) -> None:
    """Print the summary on the main process.

    Args:
        model: the Hub model, with or without weights.
        data: rows for training and validation.
        step: last completed step, 0 in a new run.
        devices: names of devices and layout.
        device: of this process.
        processes: number of processes.
    """
    precision = MAIN_PARAMS.get(config.precision.precision)
    lines = {
        "model": _model(config, model),
        "data": data,
        "length": _length(config, step),
        "dtype": f"{f'{precision}, main params in fp32' if precision else 'fp32'}; {devices}",
        "memory": _memory(config, device, processes),
        "output": _output(config),
    }
    for name, text in lines.items():
        console.print(printable(f"{name:<8}{text}"), highlight=False, soft_wrap=True)


def _model(config: TrainConfig, model: Any) -> str:
    family = model_family(model)
    weights = list(model.parameters())
    total, trained = (sum(map(elements, some)) for some in (weights, [each for each in weights if each.requires_grad]))
    name = config.model.model if family is None else f"{config.model.model} ({family.title})"
    return f"{name}, {total:,} parameters" + (f", {trained:,} trained" if trained < total else "")


def _length(config: TrainConfig, step: int) -> str:
    steps, rows = config.schedule.last_step, config.data.global_batch_size
    begun = counted(steps, "step") if step == 0 else f"resuming at step {step} of {steps:,}"
    tokens = counted(rows * config.data.seq_length, "token")
    return f"{begun}, {counted(rows, 'row')} ({tokens}) each, peak lr {config.optimizer.lr:g}"


def _memory(config: TrainConfig, device: torch.device, processes: int) -> str:
    if config.task == "rl":
        return "a `dry_run` plans updates and rollouts"
    try:
        planned: str = load("features", "memory of a run")(config, processes, device.type == "cuda")
    except DlmBridgeError as error:
        return f"not planned: {error.reason}"
    if device.type != "cuda":
        return planned
    return f"{planned}, of {torch.cuda.get_device_properties(device).total_memory / 2**30:.1f} GiB"


def _output(config: TrainConfig) -> str:
    options, interval = config.checkpoint, config.logging.eval_interval
    parts = [
        f"checkpoints every {counted(options.save_interval, 'step')}" if options.save_interval else "one checkpoint"
    ]
    parts += [f"validation every {interval:,}"] if interval else []
    if (patience := config.schedule.early_stopping_patience) is not None:
        parts.append(f"early stopping with patience {patience}")
    return f"{options.output}: {', '.join(parts)}"
