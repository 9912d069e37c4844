"""Output of `dlm-bridge plan`: a JSON object, rich tables, or a heat map."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dlm_bridge.cli.convert import print_json
from dlm_bridge.cli.help import in_flags
from dlm_bridge.errors import SettingError, counted, printable
from dlm_bridge.plan.memory import COMPONENTS, MemoryPlan
from dlm_bridge.plan.run import GIB

if TYPE_CHECKING:
    from rich.table import Table

    from dlm_bridge.plan.inference import InferencePlan
    from dlm_bridge.plan.memory import MemoryPlan, StageMemory
    from dlm_bridge.plan.model import PlannedModel
    from dlm_bridge.plan.recommend import Recommendation
    from dlm_bridge.plan.run import PlannedRun


MEMORY_UNITS = (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10))


def show_plan(plan: MemoryPlan, found: Recommendation | None, gpu_memory: int, as_json: bool) -> None:
    """Print the plan of a layout, with the reasons if it is recommended. `gpu_memory` in bytes."""
    from dlm_bridge.plan.memory import notes

    if as_json:
        value = plan.as_dict() | {"gpu_memory_bytes": gpu_memory, "fits": plan.peak.total <= gpu_memory}
        if found is not None:
            value["recommendation"] = found.as_dict()
        print_json(value)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()
    run, model = plan.run, plan.model
    console.print(Text(printable(model_text(model))))
    console.print(Text(f"{counted(run.gpus, 'GPU')}: {_layout(plan)}"))
    console.print(memory_table(plan))
    console.print(Text("parameters by role: " + _roles(plan)))
    verdict = "fits" if plan.peak.total <= gpu_memory else "does not fit"
    console.print(Text(f"{verdict} {gpu_memory / GIB:.1f} GiB: {needed(plan)}"))
    if plan.peak.total > gpu_memory and found is None and run.engine == "megatron":
        console.print(Text(in_flags("`recommend` looks for a layout that fits")))
    for note in notes(model, run):
        console.print(Text(f"note: {in_flags(note)}"))
    if found is not None:
        _show_reasons(console, found)


def needed(plan: MemoryPlan) -> str:
    """Memory of the stage that needs the most."""
    peak = plan.peak
    parts = [f"{memory_text(peak.allocated)} allocated"]
    if peak.building > peak.allocated:
        parts.append(f"{memory_text(peak.building)} to build the model")
    if peak.host:
        parts.append(f"and {memory_text(peak.host)} of CPU memory per GPU")
    return f"stage {peak.pp_rank} needs {memory_text(peak.total)} ({', '.join(parts)})"


def show_inference(plan: InferencePlan, as_json: bool) -> None:
    """Print the memory of sampling."""
    if as_json:
        print_json(plan.as_dict())
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()
    console.print(Text(printable(model_text(plan.model))))
    copies = counted(plan.gpus // plan.tp, "copy", "copies")
    console.print(Text(f"{counted(plan.gpus, 'GPU')}: {copies} of the model, TP {plan.tp}, {plan.precision}"))
    parts = [("weights", plan.weights), ("overhead", plan.overhead)]
    row = [("KV cache", plan.kv_cache), ("activations", plan.activations), ("logits", plan.logits)]
    console.print(_parts_table("Memory per GPU", [*parts, ("total with one row", plan.total)]))
    console.print(_parts_table(f"A row of {counted(plan.seq_length, 'token')}", [*row, ("total", plan.row)]))
    verdict = "fits" if plan.fits else "does not fit"
    rows = f": {counted(plan.rows, 'row')} at once"
    if plan.gpus > plan.tp:
        rows += f" per copy, {plan.rows * (plan.gpus // plan.tp):,} in all"
    console.print(Text(f"{verdict} {plan.gpu_memory / GIB:.1f} GiB{rows if plan.fits else ''}"))
    if not plan.fits:
        console.print(Text("try a larger --tp, shorter rows, or --recommend for the smallest --tp that fits"))


def _parts_table(title: str, parts: list[tuple[str, int]]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, nbytes in parts:
        table.add_row(name, memory_text(nbytes) if nbytes else "-")
    return table


def model_text(model: PlannedModel) -> str:
    sizes = f"{model.parameters:,} parameters"
    if model.dims.experts:
        sizes += f", {model.active_parameters:,} active"
    return f"{model.name} ({model.family.name}): {sizes}"


def memory_table(plan: MemoryPlan) -> Table:
    """Memory of each rank, one row per pipeline stage."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    unit, size = memory_unit(max(plan.peak.allocated, 1 << 20))  # fixed overhead exceeds a small model
    table = Table(
        title=f"Memory per GPU in {unit} ({counted(plan.ranks, 'GPU')} per pipeline stage)",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    for column in ("stage", "layers", *COMPONENTS, "total"):
        table.add_column(column, justify="right" if column != "stage" else "left", overflow="fold")
    for alike in _folded(plan.stages):
        stage = alike[0]
        name = f"{stage.pp_rank}" if len(alike) == 1 else f"{stage.pp_rank}-{alike[-1].pp_rank}"
        sizes = [getattr(stage, part) / size for part in (*COMPONENTS, "total")]
        table.add_row(
            name, str(stage.layers), *(f"{value:.2f}" if value < 1000 else f"{value:,.0f}" for value in sizes)
        )
    return table


def memory_unit(nbytes: float) -> tuple[str, int]:
    """Binary unit that suits `nbytes`, and its size in bytes."""
    return next(((unit, size) for unit, size in MEMORY_UNITS if nbytes >= size / 2), MEMORY_UNITS[-1])


def memory_text(nbytes: float) -> str:
    unit, size = memory_unit(nbytes)
    return f"{nbytes / size:.1f} {unit}"


def _show_reasons(console: object, found: Recommendation) -> None:
    from rich.console import Console
    from rich.text import Text

    assert isinstance(console, Console)
    best, hardware = found.best, found.hardware
    speed = best.run.batch * best.run.seq_length / best.time.total / best.run.gpus
    console.print(Text(f"recommended of {found.considered:,} layouts: " + _flags(found)))
    console.print(Text(f"estimated {best.time.total:.2f} s per step, {speed:,.0f} tokens/s/GPU, assuming"))
    for line in hardware.assumptions():
        console.print(Text(f"  {line}"))
    for reason in found.reasons:
        console.print(Text(f"- {reason}"))
    for line in found.comparison:
        console.print(Text(f"* {line}"))


def _flags(found: Recommendation) -> str:
    """The command line's flags of the recommended layout."""
    run = found.best.run
    layout = run.layout
    flags = [f"--tp {layout.tp} --pp {layout.pp} --cp {run.cp}"]
    if layout.pipeline is not None:
        flags.append(f"--pipeline-split '{layout.pipeline}'")
    elif layout.vp > 1:
        flags.append(f"--vp {layout.vp}")
    if layout.etp is not None:
        flags.append(f"--ep {layout.ep} --etp {layout.etp}")
    flags.append(f"--micro-batch-size {run.micro_batch_size}")
    if run.recompute == "selective":
        flags.append(f"--recompute selective --recompute-modules {','.join(run.recompute_modules)}")
    elif run.recompute == "full":
        flags.append("--recompute full")
    return " ".join(flags)


def _layout(plan: MemoryPlan) -> str:
    run = plan.run
    batches = counted(run.micro_batches, "micro-batch", "micro-batches")
    batches += f" of {run.micro_batch_size} x {run.seq_length:,} tokens"
    if run.engine == "accelerate":
        sharding = "FSDP2" if run.own_shards else "DDP"
        return f"{sharding}, {batches}, {run.precision}, {_states(run)}"
    parts = [f"TP {run.layout.tp}", f"PP {run.layout.pp}", f"VP {run.layout.vp}", f"CP {run.cp}", f"DP {run.dp}"]
    if plan.model.dims.experts:
        parts += [f"EP {run.layout.ep}", f"ETP {run.layout.expert_tp}", f"expert DP {run.expert_dp}"]
    sharding = f"FSDP {run.fsdp}" if run.fsdp else "distributed optimizer" if run.distributed_optimizer else "plain"
    if (instances := run.optimizer_instances) > 1:
        sharding += f" in {instances} instances"
    parts += [
        batches,
        f"{run.precision}, {run.optimizer}, {sharding}, {_states(run)}",
    ]
    return ", ".join(parts)


def _states(run: PlannedRun) -> str:
    """What is recomputed, trained and offloaded."""
    parts = [f"recompute {run.recompute}"]
    parts += [f"LoRA of rank {run.lora_rank}"] if run.lora_rank else []
    parts += ["all states on the CPU"] if run.cpu_offload else []
    parts += ["optimizer on the CPU"] if run.optimizer_cpu_offload else []
    return ", ".join(parts)


def _roles(plan: MemoryPlan) -> str:
    """Parameters by role on a rank of the first stage, and of the last if there are several."""
    chosen = [plan.stages[0], *plan.stages[-1:]] if len(plan.stages) > 1 else [plan.stages[0]]
    texts = []
    for stage in chosen:
        roles = ", ".join(f"{role} {number:,}" for role, number in stage.parameters.items())
        texts.append(f"stage {stage.pp_rank}: {stage.held:,} ({roles})")
        if stage.trained != stage.held:
            texts[-1] += f", and {stage.trained:,} of the adapter, which are trained"
    return "; ".join(texts)


def _folded(stages: tuple[StageMemory, ...]) -> list[list[StageMemory]]:
    """Groups of neighbouring stages with equal figures."""
    groups: list[list[StageMemory]] = []
    for stage in stages:
        if groups and _figures(groups[-1][0]) == _figures(stage):
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return groups


def _figures(stage: StageMemory) -> tuple[object, ...]:
    return (stage.layers, stage.parameters, stage.allocated, stage.total)


def _short(parameters: float) -> str:
    """Parameters in billions or millions."""
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if parameters >= size / 10:
            return f"{parameters / size:.3f} {unit}"
    return f"{parameters:,.0f}"


_SMALL = 0.1  # of a GPU's memory
_FIELDS_WITH_NUMBERS = 40  # stages; more have no room for them


def draw_heat_map(plan: MemoryPlan, path: Path, gpu_memory: int) -> None:
    """Write the memory of each stage as a PNG heat map. `gpu_memory` in bytes. Raises SettingError if it cannot be
    written."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = [*COMPONENTS, "total"]
    rows = [[getattr(stage, name) for name in columns] for stage in plan.stages]
    unit, size = memory_unit(plan.peak.total)
    # A model that leaves a GPU almost empty has its own scale: its colours would not differ otherwise.
    is_small = plan.peak.total < _SMALL * gpu_memory
    full = plan.peak.total if is_small else gpu_memory
    height = 1.8 + max(1.2, 0.3 * min(len(rows), 64))
    figure, axes = plt.subplots(figsize=(9, height), layout="constrained")
    try:
        image = axes.imshow(
            [[value / size for value in row] for row in rows], aspect="auto", cmap="YlOrRd", vmin=0, vmax=full / size
        )
        axes.set_xticks(range(len(columns)), columns)
        step = -(-len(rows) // 32)
        labels = [f"{stage.pp_rank}  ({counted(stage.layers, 'layer')})" for stage in plan.stages]
        axes.set_yticks(range(0, len(rows), step), labels[::step])
        axes.set_ylabel(f"pipeline stage, {counted(plan.ranks, 'GPU')} each")
        axes.set_title(_heat_map_title(plan))
        if len(rows) <= _FIELDS_WITH_NUMBERS:
            for y, row in enumerate(rows):
                for x, value in enumerate(row):
                    dark = value > 0.6 * full
                    axes.text(
                        x,
                        y,
                        _field(value, size),
                        ha="center",
                        va="center",
                        fontsize=8,
                        color="white" if dark else "black",
                    )
        label = "a GPU has" if is_small else "full:"
        figure.colorbar(image, label=f"{unit} per GPU ({label} {memory_text(gpu_memory)})")
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise SettingError("png", f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        plt.close(figure)


def _field(nbytes: float, size: int) -> str:
    """Number of a cell, with its unit if it differs from the figure's."""
    own = memory_unit(nbytes)[1]
    return f"{nbytes / size:.1f}" if own == size or nbytes < 512 else memory_text(nbytes)


def _heat_map_title(plan: MemoryPlan) -> str:
    run = plan.run
    layout = f"TP{run.layout.tp} PP{run.layout.pp} VP{run.layout.vp} CP{run.cp} DP{run.dp}"
    if run.engine == "accelerate":
        layout = "FSDP2" if run.own_shards else "DDP"
    if plan.model.dims.experts:
        layout += f" EP{run.layout.ep} ETP{run.layout.expert_tp}"
    name = f"{Path(plan.model.name).name}, {_short(plan.model.parameters)} parameters"
    return f"{name}: {layout}, {counted(run.gpus, 'GPU')}"
