"""Bytes that one layer keeps for its backward pass, per token, as megatron-core runs it.

After Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (arXiv 2205.05198), section 4,
brought up to date: flash attention keeps no scores, SwiGLU keeps its input and its output, RMSNorm keeps its input,
RoPE makes new queries and keys, dropout is off. Weights and gradients are not counted here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dlm_bridge.plan.hardware import OVERHEADS
from dlm_bridge.plan.model import Model
from dlm_bridge.plan.run import Run

Split = Literal["sequence", "heads", "experts"]  # what divides a term: SP's sequence, TP's columns, expert TP's


@dataclass(frozen=True)
class Term:
    """`nbytes` per token (for "experts": per copy of a token), gone where one of `modules` is recomputed."""

    name: str
    nbytes: float
    split: Split
    modules: tuple[str, ...] = ()


def layer_activations(model: Model, run: Run, moe: bool, full: bool = False) -> float:
    """Bytes that one layer keeps of one micro-batch on one rank; with `full` recomputation only its input."""
    gone = run.recompute_modules if run.recompute == "selective" else ()
    layout, sharded = run.layout, run.sharded_sequence
    key = ("activations", moe, full, layout.tp, sharded, layout.expert_tp, run.precision, gone)
    per_token = model.remembered(key, lambda: _per_token(model, run, moe, full, set(gone)))
    return per_token * run.tokens


def _per_token(model: Model, run: Run, moe: bool, full: bool, gone: set[str]) -> float:
    divisor = {
        "sequence": run.layout.tp if run.sharded_sequence else 1,
        "heads": run.layout.tp,
        "experts": run.layout.expert_tp,
    }
    if full:
        return (4 if run.precision == "fp32" else 2) * model.dims.hidden / divisor["sequence"]
    nbytes = 0.0
    for term in layer_terms(model, moe, run.precision):
        if not gone.intersection(term.modules):
            factor = copies(model, run) if term.split == "experts" else 1.0
            nbytes += term.nbytes * factor / divisor[term.split]
    return nbytes


def copies(model: Model, run: Run) -> float:
    """Copies of tokens that the fullest rank's experts get, per token of a micro-batch before tensor parallelism.

    An expert's holders, `etp` of them, each get all copies of the tokens that its `ep` x `etp` ranks bring.
    """
    brought = 1 / (run.layout.tp if run.sharded_sequence else 1)
    return brought * run.layout.expert_tp * model.top_k * OVERHEADS.expert_imbalance


def layer_terms(model: Model, moe: bool, precision: str) -> Iterator[Term]:
    """Everything that a layer keeps. Linear layers in FP8 keep their input in one byte an element."""
    hidden = model.dims.hidden
    wide = 4 if precision == "fp32" else 2
    narrow = 1 if precision == "fp8" else wide  # the input of a linear layer
    yield Term("input", wide * hidden, "sequence")
    yield Term("normed input", narrow * hidden, "sequence")
    yield from _latent_attention(model, wide, narrow) if model.latent_attention else _attention(model, wide, narrow)
    yield Term("attention's sum with the input", wide * hidden, "sequence")
    if moe:
        yield from _experts(model, wide, narrow)
    else:
        ffn = model.dims.ffn
        yield Term("normed sum", narrow * hidden, "sequence", ("mlp",))
        yield Term("gate and up", 2 * wide * ffn, "heads", ("mlp",))
        yield Term("SwiGLU's output", narrow * ffn, "heads", ("mlp",))


def _attention(model: Model, wide: int, narrow: int) -> Iterator[Term]:
    q, kv = model.dims.q_rows, model.dims.kv_rows
    yield Term("fused query, key and value", wide * (q + 2 * kv), "heads")  # held whole by the view of the value
    yield Term("rotated query and key", wide * (q + kv), "heads")
    yield from _output(q, wide, narrow, model.dims.heads)


def _latent_attention(model: Model, wide: int, narrow: int) -> Iterator[Term]:
    dims = model.dims
    q_lora, kv_lora = model.size("q_lora"), model.size("kv_lora")
    up = ("mla_up_proj",)
    yield Term("query's latent vector", wide * q_lora, "sequence")
    yield Term("key and value's latent vector", wide * model.size("kv_down"), "sequence")
    yield Term("normed latent vectors", narrow * (q_lora + kv_lora), "sequence", up)
    yield Term("keys without position, and values", wide * model.size("kv_up"), "heads", up)
    yield Term("query and key", 2 * wide * dims.q_rows, "heads", up)
    yield from _output(model.size("values"), wide, narrow, dims.heads)


def _output(width: int, wide: int, narrow: int, heads: int) -> Iterator[Term]:
    yield Term("attention's output", wide * width, "heads")
    if narrow < wide:
        yield Term("attention's output in FP8", narrow * width, "heads")
    yield Term("log-sum-exp", 4 * heads, "heads")


def _experts(model: Model, wide: int, narrow: int) -> Iterator[Term]:
    """The normed sum stays for the router and the shared expert, but not where its norm is recomputed."""
    hidden, width, shared = model.dims.hidden, model.dims.moe_ffn, model.dims.shared_ffn
    yield Term("normed sum", wide * hidden, "sequence", ("layernorm",))
    yield Term("router's logits and probabilities", 12 * model.dims.experts, "sequence", ("moe",))
    yield Term("copies of tokens", narrow * hidden, "experts", ("moe",))
    yield Term("experts' gate and up", 2 * wide * width, "experts", ("moe",))
    yield Term("experts' SwiGLU output", narrow * width, "experts", ("moe", "moe_act"))
    if shared:
        yield Term("shared expert's gate and up", 2 * wide * shared, "heads", ("moe", "shared_experts"))
        yield Term("shared expert's SwiGLU output", narrow * shared, "heads", ("moe", "shared_experts"))
