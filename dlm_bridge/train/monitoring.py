"""Monitoring of a run: metrics, sampled texts, trackers of experiments, and traces by torch's profiler."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dlm_bridge.distributed import is_main
from dlm_bridge.errors import DlmBridgeError, InputFileError, MissingExtraError, SettingError, one_line, printable
from dlm_bridge.files.atomic import append_line, disk_errors, replaced_file
from dlm_bridge.generation.autoregressive import random_state_preserved
from dlm_bridge.generation.offline import write_texts
from dlm_bridge.generation.prompts import WrittenPrompt, as_message
from dlm_bridge.loading.pretrained import model_family
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.metrics import (
    MAKE_ROOM,
    MetricsFile,
    StepMetrics,
    TrainingProgress,
    read_rows,
    write_rows,
)

logger = logging.getLogger(__name__)
PROJECT = "dlm-bridge"  # of the trackers
SAMPLES_FILE = "samples.jsonl"
FOLDER = "profile"
MEMORY_EVENTS = 1_000_000  # number of allocations in a memory snapshot


class RunMonitor:
    """Outputs of a run's steps: metrics.jsonl, progress, trackers and a profile, all on the main process. A context
    manager that shows the progress."""

    def __init__(
        self, config: TrainConfig, output: Path, device: torch.device, console: Console, step: int, main: bool
    ) -> None:
        """Args: `step` is the last completed step, 0 in a new run."""
        logging = config.logging
        self.metrics_file = MetricsFile(output / "metrics.jsonl", step) if main else None
        self._trackers = Trackers(config, output) if main and logging.trackers else None
        self._profiler = StepProfiler(logging.profiled, output, device) if main and logging.profiled else None
        self._progress = TrainingProgress(console, config.schedule.last_step, step, main)

    def __enter__(self) -> RunMonitor:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.__exit__(*error)

    def begin(self, step: int) -> None:
        """Called before a step."""
        if self._profiler is not None:
            self._profiler.begin(step)

    def end(self, step: int) -> None:
        """Called after a step, which may still run on the device."""
        if self._profiler is not None:
            self._profiler.end(step)

    def write(self, metrics: StepMetrics) -> None:
        """Write the metrics of a step. Raises ResourceError if the disk is full."""
        if self.metrics_file is not None:
            self.metrics_file.append(metrics)
        if self._trackers is not None:
            self._trackers.log(metrics)
        self._progress.show(metrics)

    def close(self) -> None:
        """Close the outputs after the last step."""
        if self._profiler is not None:
            self._profiler.close()
        if self._trackers is not None:
            self._trackers.close()
        if self.metrics_file is not None:
            self.metrics_file.close()


class TextSamples:
    """Texts sampled from the prompts of `sample_prompt` during a run, in samples.jsonl.

    Sampling uses the same seed each time, so that differences come from the weights, and does not change the random
    state of training or the model's mode.
    """

    def __init__(self, config: TrainConfig, tokenizer: Any, output: Path, step: int, main: bool) -> None:
        """Read the prompts. The `main` process, which writes the file, drops its rows after `step` and an incomplete
        last line. Raises InputFileError."""
        self._config = config
        self._tokenizer = tokenizer
        self._prompts = read_prompts(config.logging.sample_prompt)
        chat = config.task == "sft" and tokenizer.chat_template is not None
        name = config.model.tokenizer or config.model.model
        self._tokens = [
            (as_message(text, None) if chat else WrittenPrompt(text=text)).encode(tokenizer, name)
            for text in self._prompts
        ]
        self._path = output / SAMPLES_FILE if main else None
        if self._path is None:
            return
        write_rows(self._path, [row for row in read_rows(self._path) if row["step"] <= step])

    def write(self, step: int, model: Any) -> None:
        """Sample after `step`, and append a row per prompt. Called by every process with a shard of the weights.
        Raises SettingError if the model cannot be sampled from, ResourceError if the disk is full."""
        family = model_family(model)
        diffusion = family is not None and family.sampled_here
        settings: dict[str, Any] = {"gen_length": self._config.logging.sample_length, "seed": self._config.data.seed}
        if diffusion:
            settings["execution"] = "eager"  # keeps no buffers on the device
        training = model.training
        model.eval()
        try:
            # Compiled layers would be recompiled for each length.
            with random_state_preserved(), torch.compiler.set_stance("force_eager"):
                result = write_texts(model, self._tokenizer, self._tokens, settings)
        except DlmBridgeError as error:
            raise SettingError("sample_prompt", f"after step {step}: {error}") from error
        finally:
            model.train(training)
        if self._path is not None:
            rows = [
                {"step": step, "prompt": prompt, "text": text}
                for prompt, text in zip(self._prompts, result.texts, strict=True)
            ]
            with disk_errors(self._path, MAKE_ROOM), self._path.open("ab", buffering=0) as file:
                for row in rows:
                    append_line(file, json.dumps(row, ensure_ascii=False))


def read_prompts(given: Sequence[str]) -> list[str]:
    """Replace each @FILE by its lines. Raises InputFileError."""
    texts: list[str] = []
    for text in given:
        if not text.startswith("@"):
            texts.append(text)
            continue
        try:
            lines = [line for line in Path(text[1:]).read_text("utf-8").splitlines() if line.strip()]
        except OSError as error:
            raise InputFileError(text[1:], f"`sample_prompt` cannot be read: {error.strerror}") from error
        except UnicodeDecodeError:
            raise InputFileError(text[1:], "`sample_prompt` is not UTF-8 text") from None
        if not lines:
            raise InputFileError(text[1:], "contains no prompts for `sample_prompt`")
        texts += lines
    return texts


def check_trackers(config: TrainConfig) -> None:
    """Raise MissingExtraError if the package of a tracker is missing, SettingError if it is broken or has no key."""
    for name in config.logging.tracker_names:
        if importlib.util.find_spec(name) is None:
            raise MissingExtraError("trackers", f"{name} is not installed: pip install {name}")
        if is_main():
            with _tracker_errors(name):
                package = importlib.import_module(name)
                if name == "wandb":
                    package.login()  # asks for a key in a terminal


class Trackers:
    """Trackers of one run, through Accelerate, on the run's main process."""

    def __init__(self, config: TrainConfig, output: Path) -> None:
        from accelerate import PartialState

        self.output = output
        PartialState()  # needed by Accelerate's trackers; a Megatron run has no Accelerator
        self.trackers: dict[str, Any] = {}
        for name in config.logging.tracker_names:
            with _tracker_errors(name):
                self.trackers[name] = _started_tracker(name, config, output)

    def log(self, row: StepMetrics) -> None:
        """Log the metrics of a step that are not None, those of layers as KEY/LAYER. A tracker that fails is dropped
        with a warning. Raises ResourceError if the disk is full."""
        values = {key: value for key, value in dataclasses.asdict(row).items() if key != "step"}
        for layer, norm in (values.pop("layer_grad_norms") or {}).items():
            values[f"layer_grad_norms/{layer}"] = norm
        values = {key: value for key, value in values.items() if value is not None}
        self._each(lambda tracker: tracker.log(values, step=row.step))

    def close(self) -> None:
        self._each(lambda tracker: tracker.finish())

    def _each(self, call: Callable[[Any], None]) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                with disk_errors(self.output, MAKE_ROOM):
                    call(tracker)
            except DlmBridgeError:
                raise
            except Exception as error:  # a server that is down must not end the run
                logger.warning("%s", printable(f"{name} stopped: {one_line(error)[:300]}"))
                del self.trackers[name]


def _started_tracker(name: str, config: TrainConfig, output: Path) -> Any:
    """Accelerate's tracker. Options of the configuration precede the tracker's environment variables."""
    from accelerate import tracking

    def chosen(option: str | None, variable: str, default: str) -> str:
        return option or os.environ.get(variable) or default

    project, run = config.logging.tracker_project, config.logging.run_name
    if name == "tensorboard":
        tracker = tracking.TensorBoardTracker("tensorboard", str(output))
    elif name == "wandb":
        tracker = tracking.WandBTracker(
            chosen(project, "WANDB_PROJECT", PROJECT),
            name=chosen(run, "WANDB_NAME", output.name),
            dir=chosen(None, "WANDB_DIR", str(output)),
            config=config.as_flags(),
        )
    elif name == "trackio":
        tracker = tracking.TrackioTracker(project or PROJECT, name=run or output.name, config=config.as_flags())
    else:
        tracker = tracking.MLflowTracker(run_name=chosen(run, "MLFLOW_RUN_NAME", output.name))
        tracker.experiment_name = chosen(project, "MLFLOW_EXPERIMENT_NAME", PROJECT)
    tracker.start()
    if name == "mlflow":  # TensorBoard would create a folder per call, beside config.yaml
        tracker.store_init_configuration(config.as_flags())
    return tracker


@contextlib.contextmanager
def _tracker_errors(name: str) -> Iterator[None]:
    """Context manager that raises what a tracker raises as SettingError."""
    try:
        yield
    except Exception as error:
        raise SettingError("trackers", f"{name}: {one_line(error)[:300]}") from error


class StepProfiler:
    """Profiler of a range of steps on this process; a run resumed within the range profiles the remaining ones.

    The last step, or `close`, writes profile/steps-A-B.json.gz, for chrome://tracing and Perfetto, and with CUDA
    memory-A-B.pickle, for pytorch.org/memory_viz. Raises ResourceError if the disk is full.
    """

    def __init__(self, steps: range, output: Path, device: torch.device) -> None:
        self._steps = steps
        self._folder = output / FOLDER
        self._cuda = device.type == "cuda"
        self._profile: Any = None
        self._first = self._last = 0

    def begin(self, step: int) -> None:
        """Called before a step."""
        if step not in self._steps:
            return
        if self._profile is None:
            self._first = step
            self._start()
        self._last = step

    def end(self, step: int) -> None:
        """Called after a step, which may still run on the device."""
        if step in self._steps and step == self._steps[-1]:
            self.close()

    def close(self) -> None:
        """Write the trace of the steps profiled so far."""
        if self._profile is None:
            return
        if self._cuda:
            torch.cuda.synchronize()
        profile, self._profile = self._profile, None
        profile.stop()
        name = f"{self._first}-{self._last}"
        with disk_errors(self._folder, MAKE_ROOM):
            self._folder.mkdir(exist_ok=True)
            self._write(f"steps-{name}.json.gz", profile.export_chrome_trace)
            if self._cuda:
                self._write(f"memory-{name}.pickle", torch.cuda.memory._dump_snapshot)
        if self._cuda:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def _write(self, name: str, export: Any) -> None:
        with replaced_file(self._folder / name, MAKE_ROOM) as temporary:
            export(str(temporary))
