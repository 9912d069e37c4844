"""A heat map of the memory plan: pipeline stages down, what their ranks hold across, GiB in every field."""

from __future__ import annotations

from pathlib import Path

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.plan.hardware import GIB
from dlm_bridge.plan.memory import COMPONENTS, MemoryPlan

_FIELDS_WITH_NUMBERS = 40  # stages; more have no room for them


def draw(plan: MemoryPlan, path: Path, gpu_memory: int) -> None:
    """Write the figure as PNG. `gpu_memory` in bytes. Raises DlmBridgeError where it cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = [*COMPONENTS, "total"]
    rows = [[getattr(stage, name) / GIB for name in columns] for stage in plan.stages]
    height = 1.8 + max(1.2, 0.3 * min(len(rows), 64))
    figure, axes = plt.subplots(figsize=(9, height), layout="constrained")
    try:
        image = axes.imshow(rows, aspect="auto", cmap="YlOrRd", vmin=0, vmax=gpu_memory / GIB)
        axes.set_xticks(range(len(columns)), columns)
        step = -(-len(rows) // 32)
        labels = [f"{stage.pp_rank}  ({stage.layers} layers)" for stage in plan.stages]
        axes.set_yticks(range(0, len(rows), step), labels[::step])
        axes.set_ylabel(f"pipeline stage, {plan.ranks} ranks each")
        axes.set_title(_title(plan))
        if len(rows) <= _FIELDS_WITH_NUMBERS:
            for y, row in enumerate(rows):
                for x, value in enumerate(row):
                    dark = value > 0.6 * gpu_memory / GIB
                    axes.text(
                        x, y, f"{value:.1f}", ha="center", va="center", fontsize=8, color="white" if dark else "black"
                    )
        figure.colorbar(image, label=f"GiB a rank (full: {gpu_memory / GIB:.0f} GiB)")
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise DlmBridgeError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        plt.close(figure)


def _title(plan: MemoryPlan) -> str:
    run = plan.run
    layout = f"TP{run.layout.tp} PP{run.layout.pp} VP{run.layout.vp} CP{run.cp} DP{run.dp}"
    if plan.model.dims.experts:
        layout += f" EP{run.layout.ep} ETP{run.layout.expert_tp}"
    return f"{Path(plan.model.name).name}, {plan.model.parameters / 1e9:.1f} B: {layout}, {run.gpus} GPUs"
