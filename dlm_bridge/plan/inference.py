"""Memory of sampling: weights, and the KV cache, activations and logits of a row at its full length.

A row is counted as `generation/batch_size.py` counts it before sampling, with a fused attention kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlm_bridge.errors import LayoutError, SettingError
from dlm_bridge.mapping.layout import Layout
from dlm_bridge.plan.hardware import Hardware
from dlm_bridge.plan.model import PlannedModel
from dlm_bridge.plan.run import OVERHEADS, check_layout
from dlm_bridge.settings import check_minimum

# As in generation/batch_size.py, which imports PyTorch.
USED_FRACTION = 0.8  # of free memory
MOST_ROWS = 1024


@dataclass(frozen=True)
class InferencePlan:
    """Memory of sampling with `gpus` / `tp` copies of a model, in bytes per GPU."""

    model: PlannedModel
    gpus: int
    tp: int
    precision: str
    seq_length: int
    gpu_memory: int
    weights: int
    overhead: int
    kv_cache: int  # of a row, as are the next two
    activations: int
    logits: int

    @property
    def row(self) -> int:
        return self.kv_cache + self.activations + self.logits

    @property
    def total(self) -> int:
        """Bytes with one row."""
        return self.weights + self.overhead + self.row

    @property
    def fits(self) -> bool:
        return self.total <= self.gpu_memory

    @property
    def rows(self) -> int:
        """Rows that each copy of the model samples at once: what `batch_size=auto` chooses of as much free memory."""
        free = self.gpu_memory - self.weights - self.overhead
        return min(max(int(self.fits), int(free * USED_FRACTION) // self.row), MOST_ROWS)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        names = ("gpus", "tp", "precision", "seq_length", "weights", "overhead", "kv_cache", "activations", "logits")
        return {
            "model": self.model.name,
            "family": self.model.family.name,
            "parameters": self.model.parameters,
            "active_parameters": self.model.active_parameters,
            **{name: getattr(self, name) for name in names},
            "copies": self.gpus // self.tp,
            "row_bytes": self.row,
            "rows": self.rows,
            "peak_bytes": self.total,
            "gpu_memory_bytes": self.gpu_memory,
            "fits": self.fits,
        }


def inference_plan(
    model: PlannedModel,
    gpus: int,
    tp: int,
    seq_length: int,
    precision: str,
    hardware: Hardware,
    gen_length: int | None = None,
) -> InferencePlan:
    """Memory of rows of `seq_length` tokens, of which `gen_length` (None: all) are new. Raises SettingError and
    LayoutError."""
    check_minimum("gpus", gpus)
    check_minimum("seq_length", seq_length)
    check_minimum("gen_length", gen_length)
    if gen_length is not None and gen_length > seq_length:
        raise SettingError("gen_length", f"{gen_length} is more than `seq_length={seq_length}`, prompt and new tokens")
    if precision == "fp8":
        raise SettingError("precision", "models are not sampled in fp8: use bf16, fp16 or fp32")
    check_layout(model, Layout(tp=tp))
    if gpus % tp:
        raise LayoutError("gpus", f"{gpus} is not a multiple of `tp={tp}`")
    dims, width = model.dims, 4 if precision == "fp32" else 2
    layers = [model.layer(dims.is_moe(n), tp, 1, tp) for n in range(dims.layers)]
    held = sum(model.outer(tp).values()) + sum(sum(layer.values()) for layer in layers)
    positions, stores, draws = _sampler(model, gen_length or seq_length)
    columns = dims.q_rows + model.size("values") if model.latent_attention else 2 * dims.kv_rows
    cached = columns * dims.layers * width * seq_length if stores else 0
    # The output of a fused QKV matrix is gathered, so that each GPU caches all heads.
    cached //= 1 if "query_key_value" in model.family.lora_targets else tp
    inner = max(dims.ffn, dims.moe_ffn)
    return InferencePlan(
        model=model,
        gpus=gpus,
        tp=tp,
        precision=precision,
        seq_length=seq_length,
        gpu_memory=hardware.memory,
        weights=held * width,
        overhead=OVERHEADS.cuda_context + OVERHEADS.nccl_group * (tp > 1),
        kv_cache=cached,
        activations=(8 * dims.hidden + 3 * inner * max(1, model.top_k)) * width * seq_length,
        logits=positions * dims.vocab * (width + 8 + (24 if draws else 8)),
    )


def _sampler(model: PlannedModel, gen_length: int) -> tuple[int, bool, bool]:
    """Of the family's default sampler: positions whose logits exist at once, True if it has an exact KV cache, True
    if it draws tokens."""
    if "algorithm" not in model.family.sampler:  # transformers' own
        return 1, True, True
    from dlm_bridge.generation.samplers import SAMPLERS, SpecialTokens

    sampler = SAMPLERS[model.family.sampler["algorithm"]]
    given = {name: value for name, value in model.family.sampler.items() if name in sampler.options()}
    if sampler.model_blocks and "block_size" in model.config:
        given["block_length"] = model.config["block_size"]
    spec = sampler(**given).spec(SpecialTokens(0, (), (), model.family.attention_pattern))
    exact = any(cache.stores and cache.exact for cache in spec.predictor.caches)
    return min(spec.window or spec.layout.block_length or gen_length, gen_length), exact, spec.sampling.draws


def smallest_tp(
    model: PlannedModel,
    gpus: int,
    seq_length: int,
    precision: str,
    hardware: Hardware,
    gen_length: int | None = None,
) -> InferencePlan:
    """Plan with the smallest tensor parallel size of a node that fits: the most copies. Without any that fits, the
    plan with the largest size."""
    plan = None
    for tp in range(1, min(gpus, hardware.per_node) + 1):
        try:
            plan = inference_plan(model, gpus, tp, seq_length, precision, hardware, gen_length)
        except LayoutError:
            continue
        if plan.fits:
            break
    assert plan is not None, "every model can be sampled on one GPU"
    return plan
