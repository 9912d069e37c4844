"""One machine's ways to train a model, each beside one process: losses, speed and memory, as a table.

    python benchmarks/fine_tuning.py --processes 4
    python benchmarks/fine_tuning.py --processes 2 --model tiny --precision fp32 # on a CPU

Data parallelism, FSDP2 (also recomputed and offloaded to the CPU), a run that FSDP2 began and one process goes on
with, LoRA adapters, whole, cut and over quantized bases: each is what `dlm-bridge pretrain` does under torchrun, on
made-up tokens and from the same weights. "apart" is how far a step's loss is at most from that of the run that it must
equal, as a share of it; for quantized bases it shows what quantization costs. A failing row is named; others go on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

STEPS = 6
SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    "small": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 16},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 32},
}
SEQUENCES = {"tiny": 64, "small": 1024, "8b": 4096}
LLADA = {
    "architectures": ["ILLaDAForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32_000,
    "mask_token_id": 31_999,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FSDP: dict[str, Any] = {"sharding": "fsdp"}
OFFLOADED = FSDP | {"cpu_offload": True}
LORA: dict[str, Any] = {"lora_rank": 16}


@dataclass(frozen=True)
class Cell:
    """A run, and the one whose losses it must have."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False  # on one process
    like: str = "one process"
    steps: int = STEPS
    goes_on: bool = False  # in the folder of `like`


CELLS = (
    Cell("one process", alone=True),
    Cell("data parallel"),
    Cell("FSDP2", FSDP),
    Cell("FSDP2, recomputed", FSDP | {"gradient_checkpointing": True}),
    Cell("FSDP2, offloaded", OFFLOADED),
    Cell("FSDP2, offloaded, one process", OFFLOADED, alone=True),
    Cell("FSDP2, half of the steps", FSDP, steps=STEPS // 2),
    Cell("one process goes on with it", alone=True, like="FSDP2, half of the steps", goes_on=True),
    Cell("LoRA, one process", LORA, alone=True, like="LoRA, one process"),
    Cell("LoRA, data parallel", LORA, like="LoRA, one process"),
    Cell("LoRA, FSDP2", LORA | FSDP, like="LoRA, one process"),
    Cell("LoRA, 8 bit, one process", LORA | {"lora_quantize": "8bit"}, alone=True, like="LoRA, one process"),
    Cell("LoRA, 4 bit, one process", LORA | {"lora_quantize": "4bit"}, alone=True, like="LoRA, one process"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--precision", choices=("fp32", "bf16"), nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--only", default="", help="Runs whose name has this, and those they are compared with.")
    parser.add_argument("--output", type=Path, help="Folder of the runs; a temporary one by default.")
    parser.add_argument("--options", help=argparse.SUPPRESS)  # of the processes that this one starts
    arguments = parser.parse_args()
    if arguments.options is not None:
        from dlm_bridge.train.accelerate.trainer import train
        from dlm_bridge.train.config import TrainConfig

        train(TrainConfig.from_flags(**json.loads(arguments.options)), resume=True)  # of what is not there it begins
        return
    with tempfile.TemporaryDirectory() as temporary:
        root = arguments.output or Path(temporary)
        model = _weights(root, arguments.model)
        for precision in arguments.precision:
            table = Table("run", "processes", "last loss", "apart", "tokens/s a device", "peak GiB")
            kept = {"one process"} | {cell.like for cell in CELLS if arguments.only in cell.name}
            for cell in CELLS:
                if arguments.only in cell.name or cell.name in kept:
                    processes = 1 if cell.alone else arguments.processes
                    _run(cell, root / precision, model, SEQUENCES[arguments.model], precision, processes, table)
            Console(width=130).print(f"{arguments.model}, {precision}", table)


def _weights(root: Path, name: str) -> Path:
    """A model of random weights, made once."""
    folder = root / "config"
    folder.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[name]
    (folder / "config.json").write_text(
        json.dumps(LLADA | shape | {"num_key_value_heads": shape["num_attention_heads"], "initializer_range": 0.02})
    )
    model = root / "made/checkpoints/step-0000001"
    if not model.is_dir():
        options = {"model": str(folder), "from_scratch": True, "output": str(root / "made"), "steps": 1, "lr": 0.0}
        said = _launch(1, options | {"seq_length": 64, "global_batch_size": 1})
        if said is not None:
            raise SystemExit(f"no model: {said}")
    return model


def _run(cell: Cell, root: Path, model: Path, sequence: int, precision: str, processes: int, table: Table) -> None:
    output = root / (cell.like if cell.goes_on else cell.name).replace(" ", "-")
    options = {
        "model": str(model),
        "output": str(output),
        "steps": cell.steps,
        "seq_length": sequence,
        "global_batch_size": 8,
        "micro_batch_size": 1,
        "lr_schedule": "constant",
        "lr": 1e-4,
        "save_interval": 0,
        "eval_interval": 0,
        "precision": precision,
    }
    said = _launch(processes, options | dict(cell.options))
    if said is not None:
        table.add_row(cell.name, str(processes), said)
        return
    rows = _rows(output)
    wanted = _rows(root / ("one process" if cell.goes_on else cell.like).replace(" ", "-"))
    pairs = zip(rows, wanted, strict=False)
    apart = max((abs(row["loss"] / other["loss"] - 1) for row, other in pairs), default=float("nan"))
    speed = sorted(row["tokens_per_s_per_device"] for row in rows[2:])[len(rows[2:]) // 2]
    peak = rows[-1]["peak_memory"]
    table.add_row(
        cell.name,
        str(processes),
        f"{rows[-1]['loss']:.5f}",
        f"{apart:.1e}",
        f"{speed:,.0f}",
        "-" if peak is None else f"{peak / 2**30:.2f}",
    )


def _launch(processes: int, options: dict[str, Any]) -> str | None:
    """Run it; where it fails, the line that says why."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += [__file__, "--options", json.dumps({"data": ["mock"], **options})]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if "Error" in line]
    return (lines or ["failed"])[0][:100]


def _rows(output: Path) -> list[dict[str, Any]]:
    path = output / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
