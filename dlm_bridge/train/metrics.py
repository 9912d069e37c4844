"""Training metrics: metrics.jsonl, the progress bar, the loss plot, throughput and model FLOPs utilisation (MFU)."""

from __future__ import annotations

import datetime
import itertools
import json
import logging
import math
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from torch import nn

from dlm_bridge.errors import printable
from dlm_bridge.files.atomic import append_line, atomic_file, disk_errors, replaced_file
from dlm_bridge.files.reading import check_plain_file

logger = logging.getLogger(__name__)
# Dense bf16 peak in FLOP/s by a substring of the device's name, from the vendor's data sheets. The first match is
# used.
PEAK_FLOPS = (
    ("B300", 2.5e15),
    ("B200", 2.25e15),
    ("GH200", 989e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A40", 150e12),
    ("A10", 125e12),
    ("RTX 5090", 209e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
    ("V100", 125e12),
)

MAKE_ROOM = "make room there, then `resume`"
LINE_EVERY = 15.0  # seconds between progress lines if the output is not a terminal
ESTIMATED_OVER = 3600.0  # seconds whose mean speed estimates the time that is left
# Fields of `StepMetrics` that are omitted if None.
OPTIONAL = ("eval_loss", "z_loss", "mtp_loss", "param_norm", "layer_grad_norms")


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step: a line of metrics.jsonl."""

    step: int  # from 1
    loss: float
    grad_norm: float | None  # before clipping; None if fp16 scaling overflowed and the step was skipped
    lr: float
    tokens: int  # number of tokens read so far, by all processes
    tokens_per_s: float  # throughput of this step, over all processes
    tokens_per_s_per_device: float
    mfu: float | None  # fraction of the devices' bf16 peak; None on CPU, in fp32 and on unknown devices
    peak_memory: int | None = None  # bytes so far on the device with the largest peak; None on CPU
    eval_loss: float | None = None  # validation loss, after steps with an evaluation
    z_loss: float | None = None  # multiplied by its coefficient; not included in `loss`
    mtp_loss: float | None = None  # multi-token prediction loss, a mean over its layers
    param_norm: float | None = None  # all trained parameters, after the step, every `norm_interval` steps
    layer_grad_norms: dict[str, float | None] | None = None  # by layer, before clipping

    @property
    def was_evaluated(self) -> bool:
        return self.eval_loss is not None

    def summary(self) -> str:
        """One-line summary for the console."""
        summary = f"loss {self.loss:.4f}  "
        if self.eval_loss is not None:
            summary += f"validation {self.eval_loss:.4f}  "
        summary += f"{self.tokens_per_s:,.0f} tokens/s"
        if self.tokens_per_s_per_device != self.tokens_per_s:
            summary += f" ({self.tokens_per_s_per_device:,.0f} per device)"
        if self.mfu is not None:
            summary += f"  MFU {self.mfu:.1%}"
        if self.peak_memory is not None:
            summary += f"  {self.peak_memory / 2**30:.1f} GiB"
        return summary

    def to_json(self) -> str:
        values = {key: value for key, value in asdict(self).items() if key not in OPTIONAL or value is not None}
        if values["grad_norm"] is not None and not math.isfinite(values["grad_norm"]):
            values["grad_norm"] = None  # JSON has no infinity
        return json.dumps(values)


class MetricsFile:
    """metrics.jsonl of a run, written line by line. Opening it drops rows after `step` and an incomplete last line.
    Methods raise ResourceError if the disk is full."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.rows = [row for row in read_rows(path) if row["step"] <= step]
        write_rows(path, self.rows)
        self._file = path.open("ab", buffering=0)  # no buffer remains after a failed write

    def append(self, row: StepMetrics) -> None:
        line = row.to_json()
        with disk_errors(self.path, MAKE_ROOM):
            append_line(self._file, line)
        self.rows.append(json.loads(line))

    def sync(self) -> None:
        """Flush the rows to disk, before a checkpoint of the same step."""
        with disk_errors(self.path, MAKE_ROOM):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Replace a file of rows. Raises ResourceError if the disk is full."""
    with atomic_file(path, overwrite=True) as file:
        for row in rows:
            line = json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace")  # lone surrogates
            file.write(f"{line.decode()}\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the complete rows of a metrics file. Skips an incomplete last line of a killed run, and damaged lines with
    a warning."""
    if not path.exists():
        return []
    check_plain_file(path)
    rows, damaged = [], []
    lines = path.read_text("utf-8", "replace").split("\n")[:-1]  # the rest is incomplete or empty
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append(row)
        else:
            damaged.append(number)
    if damaged:
        more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
        logger.warning(f"{path}: line {damaged[0]}{more} is damaged and skipped")
    return rows


SMOOTHED_FROM = 20  # number of steps from which the curve is smoothed
LOG_RATIO = 5.0  # ratio of largest to smallest smoothed loss from which the axis is logarithmic


def plot_loss(rows: list[dict[str, Any]], path: Path) -> None:
    """Write the loss curve as a PNG: loss per step, moving average and validation losses. Raises ResourceError if the
    disk is full."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="loss", title=_loss_title(rows, path))
    steps, losses = _curve(rows, "loss")
    span = max(len(losses) // 20, 5) | 1
    if len(losses) < SMOOTHED_FROM:
        smooth = losses
        axes.plot(steps, losses, linewidth=0.8, label="training")
    else:
        smooth = moving_average(losses, span)
        axes.plot(steps, losses, linewidth=0.6, alpha=0.35)
        axes.plot(steps, smooth, linewidth=1.5, color="C0", label=f"training, averaged over {span} steps")
    evaluated, validation = _curve(rows, "eval_loss")
    if evaluated:
        axes.plot(evaluated, validation, "o-", color="C1", markersize=4, label="validation")
    if losses and min(losses + validation) > 0 and max(smooth) >= LOG_RATIO * min(smooth):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda loss, _: f"{loss:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)
    axes.legend()
    with replaced_file(path, MAKE_ROOM) as temporary:
        figure.savefig(temporary, format="png")


def moving_average(values: list[float], span: int) -> list[float]:
    """Mean of each value and its `span // 2` neighbours on each side; fewer at the ends."""
    sums = [0.0, *itertools.accumulate(values)]
    windows = [(max(place - span // 2, 0), min(place + span // 2 + 1, len(values))) for place in range(len(values))]
    return [(sums[end] - sums[start]) / (end - start) for start, end in windows]


def _curve(rows: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps with a finite value, and the values."""
    values = [(row["step"], row.get(key)) for row in rows]
    found = [(step, value) for step, value in values if isinstance(value, int | float) and math.isfinite(value)]
    return [step for step, _ in found], [value for _, value in found]


def _loss_title(rows: list[dict[str, Any]], path: Path) -> str:
    """Title with the run's folder, its last step and number of tokens."""
    from matplotlib.ticker import EngFormatter

    title = printable(path.resolve().parent.name).replace("$", r"\$")  # $ starts a formula
    if rows and isinstance(rows[-1].get("tokens"), int):
        title += f": step {rows[-1]['step']:,}, {EngFormatter(places=1)(rows[-1]['tokens'])} tokens"
    return title


def flops_per_token(model: nn.Module, seq_length: int) -> float:
    """Model FLOPs of training per token: 6 N + 12 L h s (arXiv 2204.02311, appendix B). N excludes an input embedding
    that is only looked up, and experts that the token is not routed to. Frozen weights, without gradients of their
    own, count 4 N. Recomputation does not count."""
    config: Any = model.config.get_text_config()  # type: ignore[union-attr,operator]
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    flops = sum(
        elements(parameter)
        * (_active_experts(config) if ".experts." in name else 1.0)
        * (6 if parameter.requires_grad else 4)
        for name, parameter in model.named_parameters()
        if config.tie_word_embeddings or parameter is not embedding.weight
    )
    return flops + 12 * config.num_attention_heads * sum(_head_dims(config)) * seq_length


def _head_dims(config: Any) -> list[int]:
    """Head size of each layer. If layers differ, the config itself has no head_dim."""
    layers = range(config.num_hidden_layers)
    own = getattr(config, "per_layer_config", None)
    configs = [own[layer] if own else config for layer in layers]
    return [getattr(one, "head_dim", None) or config.hidden_size // config.num_attention_heads for one in configs]


def elements(parameter: nn.Parameter) -> int:
    """Number of elements of a weight; bitsandbytes packs two per byte."""
    quantized: Any = getattr(parameter, "quant_state", None)
    return parameter.numel() if quantized is None else quantized.shape.numel()


def _active_experts(config: Any) -> float:
    """Fraction of a layer's experts that a token is routed to."""
    experts = next(
        getattr(config, name)
        for name in ("num_experts", "n_routed_experts", "num_local_experts")
        if getattr(config, name, None)
    )
    active: int = getattr(config, "num_experts_per_tok", None) or config.top_k_experts
    return active / experts


def peak_flops(device_name: str | None, precision: str) -> float | None:
    """Dense 16-bit peak of a device in FLOP/s; None if it is unknown or the run is in fp32."""
    if device_name is None or precision == "fp32":
        return None
    return next((peak for name, peak in PEAK_FLOPS if name in device_name), None)


class TrainingProgress:
    """Progress of a run: a bar on a terminal, otherwise a line every `LINE_EVERY` seconds. A context manager,
    `enabled` on one process."""

    def __init__(self, console: Console, steps: int, step: int, enabled: bool) -> None:
        self.console = console
        self.steps = steps
        self.enabled = enabled
        self.bar = Progress(
            TextColumn("[bold]training"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            # A narrow terminal cuts the end of this column, nothing else.
            TextColumn("left  {task.fields[summary]}", table_column=Column(no_wrap=True, ratio=1)),
            console=console,
            expand=True,
            speed_estimate_period=ESTIMATED_OVER,
            disable=not (enabled and console.is_terminal),
        )
        self.task = self.bar.add_task("training", total=steps, completed=step, summary="")
        self.last_line = 0.0

    def __enter__(self) -> TrainingProgress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, metrics: StepMetrics) -> None:
        if not self.enabled:
            return
        summary = metrics.summary()
        self.bar.update(self.task, completed=metrics.step, summary=summary)
        now = time.monotonic()
        if not self.console.is_terminal and (
            metrics.step in (1, self.steps) or metrics.was_evaluated or now - self.last_line >= LINE_EVERY
        ):
            self.last_line = now
            left = self.bar.tasks[self.task].time_remaining
            if left is not None and metrics.step < self.steps:
                summary += f"  {datetime.timedelta(seconds=round(left))} left"
            self.console.print(f"step {metrics.step}/{self.steps}  {summary}", highlight=False, soft_wrap=True)


class CudaTimer:
    """Elapsed time of a device's work from construction to `stop`, by CUDA events; on other devices by the CPU's
    clock. Neither call waits for the device."""

    def __init__(self, device: torch.device) -> None:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else None
        self._events = events
        self._started = self._stopped = time.perf_counter()
        if events is not None:
            events[0].record()

    def stop(self) -> None:
        """Mark the end of the work launched so far."""
        self._stopped = time.perf_counter()
        if self._events is not None:
            self._events[1].record()

    def seconds(self) -> float:
        """Seconds between start and stop. Waits until the device has reached the stop."""
        if self._events is None:
            return self._stopped - self._started
        start, stop = self._events
        stop.synchronize()
        return start.elapsed_time(stop) / 1000


class DeferredMetrics:
    """Metrics of a step, copied to the CPU asynchronously.

    Args:
        values: [N] float64 on the device.
        timer: timer that started with the step.
    """

    def __init__(self, values: torch.Tensor, timer: CudaTimer) -> None:
        on_gpu = values.device.type == "cuda"
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True) if on_gpu else values.detach()
        if on_gpu:
            self._values.copy_(values.detach(), non_blocking=True)
        self._timer = timer
        timer.stop()

    def read(self) -> tuple[list[float], float]:
        """Values, and duration of the step in seconds. Waits for the copy."""
        seconds = self._timer.seconds()
        return self._values.tolist(), seconds
