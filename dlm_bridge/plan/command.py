"""`dlm-bridge plan`: who holds what and how much memory it takes, for any layout, from a config alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dlm_bridge.cli import convert
from dlm_bridge.cli.help import LAYOUT, HelpAll, ModelCommand, completes, objective_names, training_choices
from dlm_bridge.cli.train import TrainingCommand
from dlm_bridge.settings import options_of
from dlm_bridge.train.config import TrainConfig

TRAINING, HARDWARE = "Training", "Hardware"


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("plan", cls=PlanCommand)(plan)


class PlanCommand(ModelCommand, TrainingCommand):
    """A command about a model with some of the options of a training run."""


def names(key: str) -> tuple[str, ...]:
    """The flag of an option of training, with its aliases."""
    return options_of(TrainConfig)[key].flags


def plan(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A folder with a config.json, a Hub id, or a Megatron checkpoint.")
    ],
    gpus: Annotated[int, typer.Option(help="GPUs of the run.")],
    seq_length: Annotated[int, typer.Option(*names("seq_length"), help="Tokens of a sequence.")],
    tp: convert.Tp = 1,
    pp: convert.Pp = 1,
    vp: convert.Vp = 1,
    cp: Annotated[int, typer.Option(help="Context parallel size.", rich_help_panel=LAYOUT)] = 1,
    ep: convert.Ep = 1,
    etp: convert.Etp = None,
    pipeline_split: convert.Split = None,
    micro_batch_size: Annotated[
        int,
        typer.Option(*names("micro_batch_size"), help="Sequences at once on a rank.", rich_help_panel=TRAINING),
    ] = 1,
    global_batch_size: Annotated[
        int | None, typer.Option(help="Sequences of a step, over all ranks.", rich_help_panel=TRAINING)
    ] = None,
    precision: Annotated[
        str,
        typer.Option(
            help="bf16, fp16, fp32 or fp8.",
            rich_help_panel=TRAINING,
            autocompletion=completes(training_choices("precision")),
        ),
    ] = "bf16",
    optimizer: Annotated[
        str,
        typer.Option(
            help="adamw, muon or sgd.",
            rich_help_panel=TRAINING,
            autocompletion=completes(training_choices("optimizer")),
        ),
    ] = "adamw",
    distributed_optimizer: Annotated[
        bool,
        typer.Option(help="Shard the optimizer's state over data parallel ranks (ZeRO-1).", rich_help_panel=TRAINING),
    ] = True,
    optimizer_instances: Annotated[
        int,
        typer.Option(
            help="Groups of ranks that each hold a whole sharded state.", rich_help_panel=TRAINING, hidden=True
        ),
    ] = 1,
    fsdp: Annotated[
        str | None,
        typer.Option(
            help="Megatron FSDP instead: optim, optim_grads or optim_grads_params.",
            rich_help_panel=TRAINING,
            autocompletion=completes(training_choices("megatron_fsdp")),
        ),
    ] = None,
    sequence_parallel: Annotated[
        bool | None,
        typer.Option(help="Shard activations over tp; on by itself where tp is above 1.", rich_help_panel=TRAINING),
    ] = None,
    recompute: Annotated[
        str,
        typer.Option(
            help="Activations to recompute: none, selective or full.",
            rich_help_panel=TRAINING,
            autocompletion=completes(training_choices("recompute")),
        ),
    ] = "none",
    recompute_modules: Annotated[
        str,
        typer.Option(
            help="For selective, with commas: core_attn, layernorm, mla_up_proj, mlp, moe, moe_act, shared_experts.",
            rich_help_panel=TRAINING,
            hidden=True,
        ),
    ] = "core_attn",
    recompute_layers: Annotated[
        int | None,
        typer.Option(help="For full: layers of each chunk; all by default.", rich_help_panel=TRAINING, hidden=True),
    ] = None,
    moe_dispatcher: Annotated[
        str,
        typer.Option(
            help="auto, alltoall, allgather or flex.",
            rich_help_panel=TRAINING,
            autocompletion=completes(training_choices("moe_dispatcher")),
            hidden=True,
        ),
    ] = "alltoall",
    tp_overlap: Annotated[
        bool,
        typer.Option(
            "--tp-overlap", help="Hide tensor parallel communication.", rich_help_panel=TRAINING, hidden=True
        ),
    ] = False,
    ep_overlap: Annotated[
        bool,
        typer.Option(
            "--ep-overlap", help="Hide the dispatch of tokens to experts.", rich_help_panel=TRAINING, hidden=True
        ),
    ] = False,
    gradients: Annotated[
        str,
        typer.Option(
            help="Dtype of the gradient buffer: fp32 or bf16.",
            rich_help_panel=TRAINING,
            autocompletion=completes(("fp32", "bf16")),
            hidden=True,
        ),
    ] = "fp32",
    objective: Annotated[
        str | None,
        typer.Option(
            help="As of pretrain, the family's own by default; block reads two streams.",
            rich_help_panel=TRAINING,
            autocompletion=completes(objective_names),
        ),
    ] = None,
    all_logits: Annotated[
        bool,
        typer.Option(
            "--all-logits",
            help="Logits of every position at once, as other trainers hold them.",
            rich_help_panel=TRAINING,
            hidden=True,
        ),
    ] = False,
    recommend: Annotated[
        bool, typer.Option("--recommend", help="Propose a layout and say why; sizes given are compared with it.")
    ] = False,
    gpu_memory: Annotated[
        str, typer.Option(help="Of one GPU, such as 80GB or 141GB.", rich_help_panel=HARDWARE)
    ] = "80GB",
    gpus_per_node: Annotated[int, typer.Option(help="GPUs that NVLink joins.", rich_help_panel=HARDWARE)] = 8,
    gpu_tflops: Annotated[
        float, typer.Option(help="Dense bf16 rate of one GPU, in TFLOP/s.", rich_help_panel=HARDWARE)
    ] = 989,
    nvlink: Annotated[float, typer.Option(help="GB/s a GPU sends inside a node.", rich_help_panel=HARDWARE)] = 450,
    network: Annotated[float, typer.Option(help="GB/s a GPU sends to other nodes.", rich_help_panel=HARDWARE)] = 50,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a heat map.")] = None,
    family: convert.Family = None,
    revision: convert.Revision = None,
    as_json: convert.Json = False,
    help_all: HelpAll = False,
) -> None:
    """Show what each rank of a training run holds: parameters, gradients, optimizer, activations.

    Exit code 1 where it does not fit --gpu-memory.

    Example: dlm-bridge plan meta-llama/Llama-3.1-70B --gpus 64 --seq-length 8192 --tp 4 --pp 4 --cp 2

    Example: dlm-bridge plan deepseek-ai/DeepSeek-V3 --gpus 1024 --seq-length 4096 --global-batch-size 8192 --recommend
    """
    from dlm_bridge.errors import DlmBridgeError
    from dlm_bridge.mapping.dtypes import parse_size
    from dlm_bridge.plan import views
    from dlm_bridge.plan.memory import memory_plan
    from dlm_bridge.plan.model import open_model
    from dlm_bridge.plan.recommend import recommend as run_search
    from dlm_bridge.plan.run import Hardware, PlannedRun, objective_settings

    if gradients not in ("fp32", "bf16"):
        raise DlmBridgeError(f"--gradients {gradients}: choose fp32 or bf16")
    for name, value in (
        ("gpus-per-node", gpus_per_node),
        ("gpu-tflops", gpu_tflops),
        ("nvlink", nvlink),
        ("network", network),
    ):
        if value <= 0:
            raise DlmBridgeError(f"--{name} must be above 0, not {value}")
    model = open_model(path, revision, family)
    run = PlannedRun(
        layout=convert.parse_layout(tp, pp, vp, ep, etp, pipeline_split),
        gpus=gpus,
        seq_length=seq_length,
        cp=cp,
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
        precision=precision,
        optimizer=optimizer,
        distributed_optimizer=distributed_optimizer,
        optimizer_instances=optimizer_instances,
        fsdp=fsdp,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        recompute_modules=tuple(name.strip() for name in recompute_modules.split(",") if name.strip()),
        recompute_layers=recompute_layers,
        moe_dispatcher=moe_dispatcher,
        tp_overlap=tp_overlap,
        ep_overlap=ep_overlap,
        gradient_bytes=4 if gradients == "fp32" else 2,
        all_logits=all_logits,
        **objective_settings(objective or model.family.objective),
    )
    memory = parse_size(gpu_memory, "gpu_memory")
    assert memory is not None
    hardware = Hardware(
        memory=memory, flops=gpu_tflops * 1e12, nvlink=nvlink * 1e9, network=network * 1e9, per_node=gpus_per_node
    )
    found = None
    if recommend:
        named = any((tp > 1, pp > 1, vp > 1, cp > 1, ep > 1, etp, pipeline_split))
        found = run_search(model, run, hardware, given=run if named else None)
    shown = memory_plan(model, run) if found is None else found.best.memory
    if png is not None:
        from dlm_bridge.plan.views import draw_heat_map

        draw_heat_map(shown, png, memory)
    views.show_plan(shown, found, memory, as_json)
    if shown.peak.total > memory:
        raise typer.Exit(1)
