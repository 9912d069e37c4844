"""`dlm-bridge plan`: who holds what and how much memory it takes, for any layout, from a config alone."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from dlm_bridge.cli import convert
from dlm_bridge.cli.help import (
    LAYOUT,
    HelpAll,
    ModelCommand,
    declared_parameters,
    option_annotation,
    values_of,
    with_parameters,
)
from dlm_bridge.cli.train import TrainingCommand
from dlm_bridge.convert.settings import LayoutSettings
from dlm_bridge.settings import check_values, comma_separated, option, options_of
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.config.sections import PRECISIONS

TRAINING, HARDWARE = "Training", "Hardware"
REQUIRED = inspect.Parameter.empty
# The options of a training run that decide memory and time, with their defaults in a plan.
OF_LAYOUT: dict[str, Any] = {"tp": 1, "pp": 1, "vp": 1, "cp": 1, "ep": 1, "etp": None, "pipeline_split": None}
OF_TRAINING: dict[str, Any] = {
    "micro_batch_size": 1, "global_batch_size": None, "precision": "bf16", "optimizer": "adamw",
    "distributed_optimizer": True, "optimizer_instances": 1, "fsdp": None, "sequence_parallel": None,
    "recompute": "none", "recompute_modules": "core_attn", "recompute_layers": None, "moe_dispatcher": "alltoall",
    "tp_overlap": False, "ep_overlap": False, "objective": None,
}  # fmt: skip
CHANGED = {"precision": {"help": "fp32, bf16, fp16 or fp8.", "choices": PRECISIONS}}
RARE = ("optimizer_instances", "recompute_modules", "recompute_layers", "moe_dispatcher", "tp_overlap", "ep_overlap")


@dataclass(frozen=True)
class PlanSettings:
    """The options that only `plan` has."""

    gradients: str = option(
        "fp32", "Dtype of the gradient buffer: fp32 or bf16.", choices=("fp32", "bf16"), panel=TRAINING
    )
    all_logits: bool = option(
        False, "Assume a trainer that computes the logits of every position at once.", panel=TRAINING
    )
    gpu_memory: str = option("80GB", "Memory of one GPU, such as 80GB or 141GB.", panel=HARDWARE, common=True)
    gpus_per_node: int = option(8, "GPUs joined by NVLink.", above=0, panel=HARDWARE, common=True)
    gpu_tflops: float = option(989, "Dense bf16 rate of one GPU, in TFLOP/s.", above=0, panel=HARDWARE, common=True)
    nvlink: float = option(450, "GB/s that a GPU sends inside a node.", above=0, panel=HARDWARE, common=True)
    network: float = option(50, "GB/s that a GPU sends to other nodes.", above=0, panel=HARDWARE, common=True)


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("plan", cls=PlanCommand)(with_parameters(plan, _parameters()))


class PlanCommand(ModelCommand, TrainingCommand):
    """A command about a model with some of the options of a training run."""


def _parameters() -> dict[str, tuple[Any, Any]]:
    """The command's parameters: annotation and default."""

    def declared(key: str, default: Any, panel: str, **changes: Any) -> tuple[Any, Any]:
        known = dataclasses.replace(options_of(TrainConfig)[key], engine=None, panel=panel, default=default, **changes)
        return option_annotation(known), default

    path = typer.Argument(metavar="PATH", help="A folder with a config.json, a Hub id, or a Megatron checkpoint.")
    seq_length = options_of(TrainConfig)["seq_length"]
    recommend = typer.Option("--recommend", help="Propose a layout with reasons; given sizes are compared with it.")
    return {
        "path": (Annotated[str, path], REQUIRED),
        "gpus": (Annotated[int, typer.Option(help="Number of GPUs.")], REQUIRED),
        "seq_length": (Annotated[int, typer.Option(*seq_length.flags, help="Tokens per sequence.")], REQUIRED),
        **{key: declared(key, default, LAYOUT, common=True) for key, default in OF_LAYOUT.items()},
        **{
            key: declared(key, default, TRAINING, common=key not in RARE, **CHANGED.get(key, {}))
            for key, default in OF_TRAINING.items()
        },
        **declared_parameters(PlanSettings),
        "recommend": (Annotated[bool, recommend], False),
        "png": (Annotated[Path | None, typer.Option(metavar="FILE", help="Write a heat map.")], None),
        "family": (convert.Family, None),
        "revision": (convert.Revision, None),
        "as_json": (convert.Json, False),
        "help_all": (HelpAll, False),
    }


def plan(**given: Any) -> None:
    """Show what each rank of a training run holds: parameters, gradients, optimizer, activations.

    Exit code 1 where it does not fit --gpu-memory.

    Example: dlm-bridge plan meta-llama/Llama-3.1-70B --gpus 64 --seq-length 8192 --tp 4 --pp 4 --cp 2

    Example: dlm-bridge plan deepseek-ai/DeepSeek-V3 --gpus 1024 --seq-length 4096 --global-batch-size 8192 --recommend
    """
    from dlm_bridge.mapping.dtypes import parse_size
    from dlm_bridge.plan import views
    from dlm_bridge.plan.memory import memory_plan
    from dlm_bridge.plan.model import open_model
    from dlm_bridge.plan.recommend import recommend
    from dlm_bridge.plan.run import Hardware, PlannedRun, objective_settings

    settings = PlanSettings(**values_of(PlanSettings, given))
    check_values(settings)
    model = open_model(given["path"], given["revision"], given["family"])
    layout = LayoutSettings(**values_of(LayoutSettings, given)).layout
    fields = {each.name for each in dataclasses.fields(PlannedRun)}
    sizes = {key: value for key, value in given.items() if key in fields}
    run = PlannedRun(
        layout=layout,
        **sizes | {"recompute_modules": tuple(comma_separated(given["recompute_modules"]))},
        gradient_bytes=4 if settings.gradients == "fp32" else 2,
        **objective_settings(given["objective"] or model.family.objective),
    )
    memory = parse_size(settings.gpu_memory, "gpu_memory")
    assert memory is not None
    hardware = Hardware(
        memory=memory,
        flops=settings.gpu_tflops * 1e12,
        nvlink=settings.nvlink * 1e9,
        network=settings.network * 1e9,
        per_node=settings.gpus_per_node,
    )
    found = None
    if given["recommend"]:
        named = any(given[key] != default for key, default in OF_LAYOUT.items())
        found = recommend(model, run, hardware, given=run if named else None)
    shown = memory_plan(model, run) if found is None else found.best.memory
    if given["png"] is not None:
        from dlm_bridge.plan.views import draw_heat_map

        draw_heat_map(shown, given["png"], memory)
    views.show_plan(shown, found, memory, given["as_json"])
    if shown.peak.total > memory:
        raise typer.Exit(1)
