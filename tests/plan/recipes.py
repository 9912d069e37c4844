"""Layouts that others publish and measured peaks, to check planning against; the product has no such table.

Recipes: NVIDIA's for H100 of 80 GB in bf16, from
https://github.com/NVIDIA/NeMo/blob/main/scripts/performance/recommended_model_configs/model_configs_h100.csv
which https://github.com/NVIDIA/Megatron-LM/blob/main/docs/user-guide/parallelism-guide.md repeats (for Mixtral 8x22B
without context parallelism, and without sequence length). They reduce gradients in bf16; DeepSeek-V3's recompute the
latent attention's up-projections, the second one's (Megatron Bridge, perf_recipes/deepseek/h100/deepseek_v3.py) the
dense MLPs too, and dispatch through DeepEP.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dlm_bridge import Layout
from dlm_bridge.plan.run import PlannedRun
from tests.plan import configs

GIB = 1 << 30


@dataclass(frozen=True)
class Recipe:
    """`measured`: GiB allocated at the peak, where somebody measured it."""

    name: str
    config: dict[str, Any]
    layout: Layout
    run: dict[str, Any] = field(default_factory=dict)
    measured: float = 0.0

    def settings(self) -> PlannedRun:
        """Gradients in bf16, unless the recipe says otherwise."""
        return PlannedRun(layout=self.layout, **{"gradient_bytes": 2, **self.run})


def _latent(**more: Any) -> dict[str, Any]:
    return {
        "gpus": 1024,
        "seq_length": 4096,
        "recompute": "selective",
        "recompute_modules": ("mla_up_proj",),
        "moe_dispatcher": "flex",
        **more,
    }


RECIPES = (
    Recipe(
        "Llama-3 8B",
        configs.LLAMA_3_8B,
        Layout(),
        {"gpus": 8, "seq_length": 8192, "cp": 2, "global_batch_size": 128},
    ),
    Recipe(
        "Llama-3 70B",
        configs.LLAMA_3_70B,
        Layout(tp=4, pp=4, vp=5),
        {"gpus": 64, "seq_length": 8192, "cp": 2, "global_batch_size": 128},
    ),
    Recipe(
        "Llama-3.1 405B",
        configs.LLAMA_31_405B,
        Layout(tp=8, pp=8, pipeline="Et|(tt|)*62tL"),
        {"gpus": 1024, "seq_length": 8192, "cp": 2, "global_batch_size": 512},
    ),
    Recipe(
        "Mixtral 8x7B",
        configs.MIXTRAL_8X7B,
        Layout(pp=4, vp=8, ep=8),
        {"gpus": 64, "seq_length": 4096, "global_batch_size": 256},
    ),
    Recipe(
        "Mixtral 8x22B, 64k tokens",
        configs.MIXTRAL_8X22B,
        Layout(tp=4, pp=4, vp=14, ep=8, etp=1),
        {"gpus": 256, "seq_length": 65536, "cp": 8, "global_batch_size": 256},
    ),
    Recipe(
        "Mixtral 8x22B",
        configs.MIXTRAL_8X22B,
        Layout(tp=4, pp=4, vp=14, ep=8, etp=1),
        {"gpus": 256, "seq_length": 4096, "global_batch_size": 256},
    ),
    Recipe(
        "DeepSeek-V3, PP16",
        configs.DEEPSEEK_V3,
        Layout(tp=2, pp=16, ep=64, etp=1, pipeline="Et*3|(t*4|)*14t*2L"),
        _latent(global_batch_size=8192),
    ),
    Recipe(
        "DeepSeek-V3, PP8 VP4",
        configs.DEEPSEEK_V3,
        Layout(tp=2, pp=8, ep=64, etp=1, pipeline="Et|(tt|)*30L"),
        _latent(global_batch_size=16384, recompute_modules=("mla_up_proj", "mlp")),
    ),
)

# Peaks of Megatron-Core 0.16.1 with Transformer Engine 2.20 on H200s: logits of every position, AdamW in the
# distributed optimizer, gradients reduced in bf16.
_FOUR: dict[str, Any] = {"gpus": 4, "seq_length": 4096, "all_logits": True}
MEASURED = (
    Recipe("8B, DP4", configs.LLADA_8B, Layout(), {**_FOUR, "micro_batch_size": 2}, 90),
    Recipe("8B, DP4, FP8", configs.LLADA_8B, Layout(), {**_FOUR, "micro_batch_size": 2, "precision": "fp8"}, 99),
    Recipe("8B, TP2 x DP2", configs.LLADA_8B, Layout(tp=2), {**_FOUR, "micro_batch_size": 2}, 57),
    Recipe("8B, PP2 x DP2", configs.LLADA_8B, Layout(pp=2), {**_FOUR, "global_batch_size": 16}, 55),
    Recipe("7B-A1B, EP4", configs.LLADA_MOE, Layout(ep=4), {**_FOUR, "micro_batch_size": 4}, 75),
)

# Peaks of our engine on the same machines (benchmarks/train.py): masked positions' logits, gradients reduced in fp32.
_OURS: dict[str, Any] = {"gpus": 4, "seq_length": 4096, "gradient_bytes": 4}
_ONE: dict[str, Any] = {**_OURS, "gpus": 1, "distributed_optimizer": False, "micro_batch_size": 8}
# benchmarks/fsdp_building.py on two H100s, 26 November 2026: few activations, so gradients that wait are the peak.
_CUT: dict[str, Any] = {**_OURS, "gpus": 2, "seq_length": 512, "fsdp": "optim_grads_params"}
OURS = (
    Recipe("8B, DP4", configs.LLADA_8B, Layout(), {**_OURS, "micro_batch_size": 2}, 104.6),
    Recipe("8B, DP4, FP8", configs.LLADA_8B, Layout(), {**_OURS, "micro_batch_size": 2, "precision": "fp8"}, 113.6),
    Recipe("8B, TP2 x DP2", configs.LLADA_8B, Layout(tp=2), {**_OURS, "micro_batch_size": 2}, 63.9),
    Recipe("8B, PP2 x DP2", configs.LLADA_8B, Layout(pp=2), {**_OURS, "global_batch_size": 16}, 62.5),
    Recipe(
        "8B, FSDP", configs.LLADA_8B, Layout(), {**_OURS, "micro_batch_size": 2, "fsdp": "optim_grads_params"}, 76.4
    ),
    Recipe("8B of 24 layers, FSDP", {**configs.LLADA_8B, "n_layers": 24}, Layout(), _CUT, 62.98),
    Recipe("8B, CP2", configs.LLADA_8B, Layout(), {**_OURS, "seq_length": 32768, "cp": 2, "recompute": "full"}, 77.1),
    Recipe("7B-A1B, EP4", configs.LLADA_MOE, Layout(ep=4), {**_OURS, "micro_batch_size": 4}, 70.4),
    Recipe("1.7B", configs.QWEN3_1_7B, Layout(), _ONE, 94.1),
    Recipe("1.7B, FP8", configs.QWEN3_1_7B, Layout(), {**_ONE, "precision": "fp8"}, 89.7),
)
