"""Published runs with their step times, which docs/planning.md compares with the planned ones; the product has no such
table. `python -m tests.plan.published_runs` prints the page's table.

Llama 3: arXiv 2407.21783, table 4; its TFLOP/s are turned into seconds with 6 FLOPs a parameter and 6 L h s for causal
attention. Chunks of one layer are assumed. Nemotron-4: arXiv 2406.11704, table 2, and NVIDIA's dgxc-benchmarking,
nemotron4-340b, container 24.11. Llama 3.1 in FP8: Megatron Bridge, performance summary of container 26.04.01.
DeepSeek-V3: arXiv 2412.19437, 180,000 GPU hours per 10^12 tokens; an H800 sends 200 GB/s over NVLink; DualPipe, whose
bubble is about half of 1F1B's, stands as two virtual stages. NeMo's runs overlap tensor parallelism. Megatron-LM:
arXiv 2205.05198, table 5, "present work". MLPs without gates stand as gated ones of as many parameters, which have as
many FLOPs and move as many bytes. The last are ours, from docs/training_speed.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from dlm_bridge import Layout
from dlm_bridge.plan.cost import StepTime, step_time
from dlm_bridge.plan.hardware import Hardware
from dlm_bridge.plan.model import model_of
from dlm_bridge.plan.run import PlannedRun
from tests.plan import configs

AIM = 0.15
H100 = Hardware()
H800 = replace(H100, nvlink=200e9)
H200 = replace(H100, memory=141 * 10**9, memory_bandwidth=4.8e12)
A100 = replace(H100, flops=312e12, nvlink=300e9, network=25e9, memory_bandwidth=2.04e12)


@dataclass(frozen=True)
class PublishedRun:
    """`seconds` a step, as published or as they follow from what is."""

    name: str
    config: dict[str, Any]
    layout: Layout
    seconds: float
    run: dict[str, Any] = field(default_factory=dict)
    hardware: Hardware = H100
    own_schedule: bool = False  # not one of megatron-core's

    def planned(self) -> StepTime:
        model, run = model_of(self.config, self.name), PlannedRun(layout=self.layout, **self.run)
        if not self.own_schedule:
            run.check(model)
        return step_time(model, run, self.hardware)

    def line(self) -> str:
        """The row of the page's table."""
        planned = self.planned().total
        off = planned / self.seconds - 1
        shown = f"**{off:+.0%}**" if abs(off) > AIM else f"{off:+.0%}"
        return f"| {self.name} | {self.run['gpus']:,} | {self.seconds:.2f} | {planned:.2f} | {shown} |"


def _llama3(name: str, gpus: int, seq_length: int, tflops: float, **more: Any) -> PublishedRun:
    tokens = 2**24
    flops = tokens * (6 * 405.9e9 + 6 * 126 * 16384 * seq_length)
    run = {"gpus": gpus, "seq_length": seq_length, "global_batch_size": tokens // seq_length, **more}
    layout = Layout(tp=8, pp=16, pipeline="E|(t|)*126L")
    return PublishedRun(name, configs.LLAMA_31_405B, layout, flops / gpus / tflops / 1e12, run)


def _nemotron(gpus: int, seconds: float, batch: int, pp: int, vp: int, **more: Any) -> PublishedRun:
    config = {**configs.llama(18432, 49152, 96, 96), "vocab_size": 256000}
    run = {"gpus": gpus, "seq_length": 4096, "global_batch_size": batch, **more}
    name = f"Nemotron-4 340B, TP8 PP{pp} VP{vp}, {'NeMo, ' * bool(more)}batch {batch}"
    return PublishedRun(name, config, Layout(tp=8, pp=pp, vp=vp), seconds, run)


def _megatron(size: str, sizes: tuple[int, int, int], layout: Layout, batch: int, seconds: float) -> PublishedRun:
    hidden, layers, heads = sizes
    ffn = round(hidden / 24) * 64
    config = {**configs.llama(hidden, ffn, layers, heads, heads), "vocab_size": 51200}
    run = {
        "gpus": layout.tp * layout.pp,
        "seq_length": 2048,
        "global_batch_size": batch,
        "micro_batch_size": 4 if layout.pp == 1 else 1,
        "recompute": "selective",
    }
    name = f"Megatron-LM {size}, A100, TP8 PP{layout.pp} VP{layout.vp}, batch {batch}"
    return PublishedRun(name, config, layout, seconds, run, A100)


def _ours(name: str, config: dict[str, Any], layout: Layout, tokens_per_s: float, **more: Any) -> PublishedRun:
    """`tokens_per_s` of a GPU, at 4,096 tokens a row."""
    run = {"gpus": 4, "seq_length": 4096, "loss_share": 0.5, **more}
    seconds = run["global_batch_size"] * 4096 / run["gpus"] / tokens_per_s
    return PublishedRun(f"ours, H200: {name}", config, layout, seconds, run, H200)


_V3 = {
    "gpus": 2048,
    "seq_length": 4096,
    "global_batch_size": 15360,
    "precision": "fp8",
    "moe_dispatcher": "flex",
    "recompute": "selective",
    "recompute_modules": ("layernorm", "mla_up_proj", "moe_act"),
    "ep_overlap": True,
}
_FP8 = {"seq_length": 8192, "cp": 2, "precision": "fp8", "gradient_bytes": 2, "tp_overlap": True}

PUBLISHED = (
    _llama3("Llama 3 405B, TP8 PP16, 8,192 tokens, batch 2,048", 8192, 8192, 430),
    _llama3("Llama 3 405B, TP8 PP16, 8,192 tokens, batch 2,048", 16384, 8192, 400),
    _llama3("Llama 3 405B, TP8 CP16 PP16, 131,072 tokens, batch 128", 16384, 131072, 380, cp=16),
    PublishedRun(
        "Llama 3.1 405B, FP8, NeMo, TP8 CP2 PP8 VP8, batch 1,536",
        configs.LLAMA_31_405B,
        Layout(tp=8, pp=8, pipeline="Et|(tt|)*62tL"),
        1536 * 8192 / 1024 / 328,
        {"gpus": 1024, "global_batch_size": 1536, **_FP8},
    ),
    _nemotron(1536, 10.3, 768, 12, 8),
    _nemotron(6144, 8.0, 2304, 12, 8),
    _nemotron(1024, 4.73, 256, 8, 12, gradient_bytes=2, tp_overlap=True),
    _nemotron(2048, 4.84, 512, 8, 12, gradient_bytes=2, tp_overlap=True),
    PublishedRun(
        "DeepSeek-V3, H800, FP8, PP16 EP64, batch 15,360",
        configs.DEEPSEEK_V3,
        Layout(pp=16, ep=64, etp=1, pipeline="Et|(tt|)*30L"),
        15360 * 4096 * 180_000 * 3600 / 1e12 / 2048,
        _V3,
        H800,
        own_schedule=True,
    ),
    _megatron("22B", (6144, 48, 64), Layout(tp=8), 4, 1.10),
    _megatron("175B", (12288, 96, 96), Layout(tp=8, pp=8, vp=3), 64, 13.75),
    _megatron("530B", (20480, 105, 128), Layout(tp=8, pp=35, vp=3), 280, 37.83),
    _megatron("1T", (25600, 128, 160), Layout(tp=8, pp=64), 512, 71.49),
    _ours("8B, DP4", configs.LLADA_8B, Layout(), 10793, micro_batch_size=2, global_batch_size=8),
    _ours("8B, FP8, DP4", configs.LLADA_8B, Layout(), 14967, micro_batch_size=2, global_batch_size=8, precision="fp8"),
    _ours("8B, TP2 x DP2", configs.LLADA_8B, Layout(tp=2), 9619, micro_batch_size=2, global_batch_size=4),
    _ours("8B, PP2 x DP2", configs.LLADA_8B, Layout(pp=2), 10323, global_batch_size=16),
    _ours(
        "7B-A1B, EP4, balanced", configs.LLADA_MOE, Layout(ep=4), 43529, micro_batch_size=4, global_batch_size=16,
        moe_dispatcher="auto",
    ),
)  # fmt: skip


def table() -> Iterator[str]:
    """The lines of the page's table."""
    yield "| run | GPUs | published, s | predicted, s | difference |"
    yield "|---|---|---|---|---|"
    for run in PUBLISHED:
        yield run.line()


if __name__ == "__main__":
    print("\n".join(table()))
