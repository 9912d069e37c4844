"""`dlm-bridge plan`: who holds what and how much memory it takes, for any layout, from a config alone."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm_bridge import processes
from dlm_bridge.cli import convert
from dlm_bridge.cli.help import (
    LAYOUT,
    HelpAll,
    ModelCommand,
    declared_parameters,
    message,
    option_annotation,
    values_of,
    with_parameters,
)
from dlm_bridge.cli.train import TrainingCommand
from dlm_bridge.convert.settings import LayoutSettings
from dlm_bridge.errors import ResourceError, SettingError
from dlm_bridge.mapping.dtypes import parse_size
from dlm_bridge.plan.hardware import GPUS, Hardware, find_gpu
from dlm_bridge.settings import check_choice, check_values, comma_separated, option, options_of
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.config.sections import PRECISIONS

if TYPE_CHECKING:
    from dlm_bridge.plan.model import PlannedModel
    from dlm_bridge.plan.run import PlannedRun

TRAINING, INFERENCE, HARDWARE = "Training", "Inference", "Hardware"
REQUIRED = inspect.Parameter.empty
# The options of a training run that decide memory and time, with their defaults in a plan.
OF_LAYOUT: dict[str, Any] = {"tp": 1, "pp": 1, "vp": 1, "cp": 1, "ep": 1, "etp": None, "pipeline_split": None}
OF_TRAINING: dict[str, Any] = {
    "micro_batch_size": 1, "global_batch_size": None, "precision": "bf16", "optimizer": "adamw",
    "distributed_optimizer": True, "optimizer_instances": 1, "fsdp": None, "sequence_parallel": None,
    "recompute": "none", "recompute_modules": "core_attn", "recompute_layers": None, "moe_dispatcher": "alltoall",
    "tp_overlap": False, "ep_overlap": False, "objective": None, "lora_rank": 0, "lora_targets": None,
    "optimizer_cpu_offload": False, "engine": "megatron", "sharding": "none", "gradient_checkpointing": False,
    "cpu_offload": False,
}  # fmt: skip
CHANGED = {"precision": {"help": "fp32, bf16, fp16 or fp8.", "choices": PRECISIONS}}
RARE = (
    "optimizer_instances",
    "recompute_modules",
    "recompute_layers",
    "moe_dispatcher",
    "tp_overlap",
    "ep_overlap",
    "lora_targets",
)


def _hardware(help: str, **constraints: Any) -> Any:
    return option(None, f"{help}. Default: --gpu's data sheet.", panel=HARDWARE, common=True, **constraints)


@dataclass(frozen=True)
class PlanSettings:
    """The options that only `plan` has."""

    gradients: str = option(
        "fp32", "Dtype of the gradient buffer: fp32 or bf16.", choices=("fp32", "bf16"), panel=TRAINING
    )
    all_logits: bool = option(
        False, "Assume a trainer that computes the logits of every position at once.", panel=TRAINING
    )
    gpu: str = option("H100", f"Kind of GPU: {', '.join(GPUS)}.", metavar="NAME", panel=HARDWARE, common=True)
    gpu_memory: str | None = _hardware("Memory of one GPU, such as 80GB or 141GB")
    gpus_per_node: int = option(8, "GPUs joined by NVLink.", above=0, panel=HARDWARE, common=True)
    gpu_tflops: float | None = _hardware("Dense bf16 rate of one GPU, in TFLOP/s", above=0)
    memory_bandwidth: float | None = _hardware("GB/s of a GPU's memory", above=0)
    nvlink: float | None = _hardware("GB/s that a GPU sends inside a node", above=0)
    network: float | None = _hardware("GB/s that a GPU sends to other nodes", above=0)

    @property
    def hardware(self) -> Hardware:
        """The named GPU with the rates that were set. Raises SettingError for an unknown GPU."""
        given: dict[str, Any] = {
            "memory": parse_size(self.gpu_memory, "gpu_memory"),
            "flops": self.gpu_tflops and self.gpu_tflops * 1e12,
            "memory_bandwidth": self.memory_bandwidth and self.memory_bandwidth * 1e9,
            "nvlink": self.nvlink and self.nvlink * 1e9,
            "network": self.network and self.network * 1e9,
        }
        changes = {name: value for name, value in given.items() if value is not None}
        return dataclasses.replace(find_gpu(self.gpu), per_node=self.gpus_per_node, **changes)


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
    inference = typer.Option(
        "--inference",
        help="Plan sampling: weights, and how many rows of --seq-length tokens fit.",
        rich_help_panel=INFERENCE,
    )
    gen_length = typer.Option(
        help="New tokens of a row; the others are its prompt. Default: all.", rich_help_panel=INFERENCE
    )
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
        "inference": (Annotated[bool, inference], False),
        "gen_length": (Annotated[int | None, gen_length], None),
        "png": (Annotated[Path | None, typer.Option(metavar="FILE", help="Write a heat map.")], None),
        "family": (convert.Family, None),
        "revision": (convert.Revision, None),
        "as_json": (convert.Json, False),
        "help_all": (HelpAll, False),
    }


def plan(**given: Any) -> None:
    """Show the memory of each GPU: of a training run by pipeline stage, or of sampling with --inference.

    Published models are planned from the package's own table, without the Hub (--revision reads the Hub's config).
    Exit code 1 if it does not fit.

    Example: dlm-bridge plan LLaDA2.0-flash --gpus 8 --seq-length 4096 --inference --gpu H200 --recommend

    Example: dlm-bridge plan GSAI-ML/LLaDA-8B-Instruct --gpus 1 --seq-length 2048 --lora-rank 16

    Example: dlm-bridge plan meta-llama/Llama-3.1-70B --gpus 64 --seq-length 8192 --tp 4 --pp 4 --cp 2

    Example: dlm-bridge plan deepseek-ai/DeepSeek-V3 --gpus 1024 --seq-length 4096 --global-batch-size 8192 --recommend
    """
    from dlm_bridge.plan import views
    from dlm_bridge.plan.memory import memory_plan
    from dlm_bridge.plan.published import find_model
    from dlm_bridge.plan.recommend import recommend

    settings = PlanSettings(**values_of(PlanSettings, given))
    check_values(settings)
    hardware = settings.hardware
    model = find_model(given["path"], given["revision"], given["family"])
    if given["inference"]:
        _show_inference(model, given, hardware)
        return
    if given["gen_length"] is not None:
        raise SettingError("gen_length", "needs `inference`")
    run = _run(model, given, settings)
    found = None
    if given["recommend"]:
        if run.engine == "accelerate":
            raise SettingError("recommend", "needs `engine=megatron`: the other engine's layout is `sharding`")
        named = any(given[key] != default for key, default in OF_LAYOUT.items())
        try:
            found = recommend(model, run, hardware, given=run if named else None)
        except ResourceError as error:  # no layout fits: an answer, not an error
            if given["as_json"]:
                convert.print_json({"model": model.name, "fits": False, "reason": message(error)})
            processes.report(message(error))
            raise typer.Exit(1) from None
    shown = memory_plan(model, run) if found is None else found.best.memory
    if given["png"] is not None:
        views.draw_heat_map(shown, given["png"], hardware.memory)
    views.show_plan(shown, found, hardware.memory, given["as_json"])
    if shown.peak.total > hardware.memory:
        raise typer.Exit(1)


def _run(model: PlannedModel, given: dict[str, Any], settings: PlanSettings) -> PlannedRun:
    """The run of the command line's options."""
    from dlm_bridge.plan.run import PlannedRun, accelerate_run, objective_settings

    fields = {each.name for each in dataclasses.fields(PlannedRun)} - {"engine", "cpu_offload"}
    sizes = {key: value for key, value in given.items() if key in fields}
    lists = {key: tuple(comma_separated(given[key])) for key in ("recompute_modules", "lora_targets")}
    run = PlannedRun(
        layout=LayoutSettings(**values_of(LayoutSettings, given)).layout,
        **sizes | lists,
        gradient_bytes=4 if settings.gradients == "fp32" else 2,
        **objective_settings(given["objective"] or model.family.objective),
    )
    shards = given["sharding"] == "fsdp"
    if given["engine"] == "megatron":
        for key in ("sharding", "gradient_checkpointing", "cpu_offload"):
            if given[key] != OF_TRAINING[key]:
                raise SettingError(key, "needs `engine=accelerate`")
        return run
    check_choice("engine", given["engine"], ("accelerate", "megatron"))
    check_choice("sharding", given["sharding"], ("none", "fsdp"))
    of_megatron = ("fsdp", "recompute", "optimizer_cpu_offload", "optimizer")
    for key, default in {**OF_LAYOUT, **{key: OF_TRAINING[key] for key in of_megatron}}.items():
        if given[key] != default:
            raise SettingError(key, "needs `engine=megatron`")
    if given["cpu_offload"] and not shards:
        raise SettingError("cpu_offload", "needs `sharding=fsdp`")
    return accelerate_run(run, shards, given["gradient_checkpointing"], cpu_offload=given["cpu_offload"])


def _show_inference(model: PlannedModel, given: dict[str, Any], hardware: Hardware) -> None:
    from dlm_bridge.plan.inference import inference_plan, smallest_tp
    from dlm_bridge.plan.views import show_inference

    for key, default in {**OF_LAYOUT, **OF_TRAINING, "png": None}.items():
        if key not in ("tp", "precision") and given[key] != default:
            raise SettingError(key, "is an option of training: `inference` has `tp`, `precision` and `gen_length`")
    sizes = (given["seq_length"], given["precision"], hardware, given["gen_length"])
    if given["recommend"]:
        found = smallest_tp(model, given["gpus"], *sizes)
    else:
        found = inference_plan(model, given["gpus"], given["tp"], *sizes)
    show_inference(found, given["as_json"])
    if not found.fits:
        raise typer.Exit(1)
