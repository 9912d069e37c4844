"""Estimate of a step's time: matrix products and attention, exposed communication, the pipeline bubble.

Each figure is counted work divided by a rate of `Hardware`: FLOPs of matrix products and attention, bytes of what
is computed between them and of communication. The bubble is (pp - 1) / (micro-batches x vp) of the ideal
time (Narayanan et al., arXiv 2104.04473, section 2.2); tensor parallel volumes follow Korthikanti et al. (arXiv
2205.05198, section 4.2.2), ZeRO's arXiv 1910.02054, section 7. docs/planning.md compares the estimates
with published runs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from dlm_bridge.plan.hardware import Hardware
from dlm_bridge.plan.memory import adapter_parameters, copies
from dlm_bridge.plan.model import PlannedModel
from dlm_bridge.plan.run import PlannedRun

# Passes over each token copy in memory: permutation and back, forward and backward, and reading it.
_EXPERT_PASSES = 10
_BACKWARD_ATTENTION = 2.5  # times forward: FlashAttention's backward pass makes five products to its two
_OPTIMIZER_BYTES = 30  # per parameter: AdamW reads and writes weights, gradient and moments


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by cause, of the slowest stage."""

    compute: float
    recompute: float
    tensor_parallel: float
    context_parallel: float
    expert_parallel: float
    pipeline_bubble: float
    pipeline_messages: float
    data_parallel: float
    optimizer: float

    @cached_property
    def total(self) -> float:
        return sum(asdict(self).values())

    def as_dict(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return asdict(self) | {"total": self.total}


@dataclass
class _Work:
    """Seconds of one micro-batch, forward and backward."""

    compute: float = 0.0
    recompute: float = 0.0
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0
    expert_parallel: float = 0.0

    def add(self, other: _Work, times: int = 1) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + times * value)

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def step_time(model: PlannedModel, run: PlannedRun, hardware: Hardware) -> StepTime:
    """Estimated time of a step of a run that `PlannedRun.check` accepts."""
    layout = run.layout
    kinds = model.kinds(layout)
    layers = {moe: _layer(model, run, hardware, moe) for moe in set().union(*kinds)}
    works = []
    for stage in range(layout.pp):
        work = _Work()
        for moe, number in kinds[stage].items():
            work.add(layers[moe], number)
        if stage == layout.pp - 1:
            work.add(_head(model, run, hardware))
        works.append(work)
    slowest = max(works, key=lambda work: work.total)
    exposed, optimizer = _data_parallel(model, run, hardware, slowest.total / layout.vp)
    return StepTime(
        **{cause: run.micro_batches * seconds for cause, seconds in vars(slowest).items()},
        pipeline_bubble=(layout.pp - 1) / layout.vp * slowest.total,
        pipeline_messages=_messages(model, run, hardware),
        data_parallel=exposed,
        optimizer=optimizer,
    )


def _layer(model: PlannedModel, run: PlannedRun, hardware: Hardware, moe: bool) -> _Work:
    layout, dims = run.layout, model.dims
    held = model.layer(moe, layout.tp, layout.ep, layout.expert_tp)
    dense = sum(held.get(role, 0) for role in ("attention", "mlp", "router", "shared experts"))
    experts = _expert_seconds(model, run, hardware) if moe else 0.0
    attention = _attention_flops(model, run) / (hardware.flops * hardware.attention_efficiency)
    products = 2 * dense * run.tokens / _rate(run, hardware)
    between = elementwise_bytes(model, run, moe) * run.tokens / hardware.memory_rate
    forward = max(products + attention + experts + between, hardware.layer_latency)
    work = _Work(compute=3 * forward + (_BACKWARD_ATTENTION - 2) * attention)
    if run.lora_rank:
        work.compute -= products + experts  # frozen weights have no gradients
    work.tensor_parallel = _tensor_parallel(model, run, hardware)
    if run.tp_overlap:
        work.tensor_parallel = _exposed(work.tensor_parallel, 3 * products, hardware)
    work.context_parallel = _context_parallel(model, run, hardware, (1 + _BACKWARD_ATTENTION) * attention)
    work.expert_parallel = _expert_parallel(model, run, hardware) if moe else 0.0
    if run.ep_overlap and run.micro_batches > 1:
        work.expert_parallel = _exposed(work.expert_parallel, work.compute, hardware)
    if run.recompute == "full":
        share = 1.0 if run.recompute_layers is None else min(1.0, run.recompute_layers * layout.pp / dims.layers)
        work.recompute = share * (forward + work.tensor_parallel / 2 + work.expert_parallel / 2)
    elif run.recompute == "selective":
        work.recompute = _selective(model, run, hardware, moe, attention, experts, work.expert_parallel / 2)
    return work


def _exposed(seconds: float, behind: float, hardware: Hardware) -> float:
    """Exposed time of a communication that overlaps with computation, in seconds."""
    return seconds - min(hardware.overlap_efficiency * seconds, behind)


def _rate(run: PlannedRun, hardware: Hardware) -> float:
    """FLOP/s of matrix products, which few rows do not saturate."""
    filled = run.tokens / (run.tokens + hardware.small_rows)
    return hardware.flops * hardware.matmul_efficiency * filled * _speedup(run)


def _speedup(run: PlannedRun) -> float:
    """Speed of matrix products relative to bf16. FP8's casts are counted in `elementwise_bytes`."""
    return {"fp8": 2.0, "fp32": 0.06}.get(run.precision, 1.0)


def elementwise_bytes(model: PlannedModel, run: PlannedRun, moe: bool) -> float:
    """Bytes that a layer's fused kernels between the matrix products and attention read and write forward, per token
    on one rank; twice that backward.

    Two norms read and write the hidden states, two residual additions read two tensors and write one, rotary
    embeddings read and write queries and keys, SwiGLU reads gate and up and writes one tensor. Under FP8 the input of
    each product is read once more and written twice, as it is and transposed. Those of routed experts are in
    `_EXPERT_PASSES`.
    """
    dims, layout = model.dims, run.layout
    width = 4 if run.precision == "fp32" else 2
    sequence = layout.tp if run.sharded_sequence else 1
    keys = dims.q_rows if model.latent_attention else dims.kv_rows
    ffn = dims.shared_ffn if moe else dims.ffn
    moved = width * (2 * 2 + 2 * 3) * dims.hidden / sequence
    moved += width * (2 * (dims.q_rows + keys) + 3 * ffn) / layout.tp
    if run.precision == "fp8":
        values = model.size("values") if model.latent_attention else dims.q_rows
        moved += (width + 2) * (2 * dims.hidden + (values + ffn) / layout.tp)
    return moved


def _attention_flops(model: PlannedModel, run: PlannedRun) -> float:
    """Forward FLOPs of the scores and their product with the values; a causal kernel skips half."""
    values = model.size("values") if model.latent_attention else model.dims.q_rows
    seen = run.seq_length * run.streams / (2 if model.causal or run.streams > 1 else 1)
    return 2 * (model.dims.q_rows + values) / run.layout.tp * seen * run.tokens


def _expert_seconds(model: PlannedModel, run: PlannedRun, hardware: Hardware) -> float:
    """Forward seconds of the most loaded rank: grouped matrix products, and memory traffic of the token copies."""
    dims, layout = model.dims, run.layout
    rows = copies(model, run) * run.tokens
    flops = 2 * 3 * dims.hidden * dims.moe_ffn / layout.expert_tp * rows
    # With few rows per expert, reading the weights dominates.
    weights = 3 * dims.hidden * dims.moe_ffn / layout.expert_tp * dims.experts / layout.ep * 2
    moved = (_EXPERT_PASSES / 3 * 2 * dims.hidden * rows + weights) / hardware.memory_rate
    return flops / (hardware.flops * hardware.expert_efficiency * _speedup(run)) + moved


def _tensor_parallel(model: PlannedModel, run: PlannedRun, hardware: Hardware) -> float:
    """Two all-gathers and two reduce-scatters of the hidden states forward, and the same backward."""
    tp = run.layout.tp
    if tp == 1:
        return 0.0
    volume = (tp - 1) / tp * 2 * model.dims.hidden * run.tokens
    return 8 * (volume / hardware.bandwidth(tp) + hardware.message_latency)


def _context_parallel(model: PlannedModel, run: PlannedRun, hardware: Hardware, attention: float) -> float:
    """Exposed communication of keys and values around the ring (three rounds, forward and backward), which overlaps
    with attention. Ranks of a ring are `tp` apart."""
    if run.cp == 1:
        return 0.0
    dims = model.dims
    width = dims.q_rows + model.size("values") if model.latent_attention else 2 * dims.kv_rows
    volume = (run.cp - 1) * 2 * width / run.layout.tp * run.tokens
    seconds = 3 * (volume / hardware.bandwidth(run.layout.tp * run.cp) + run.cp * hardware.message_latency)
    return max(0.1 * seconds, seconds - attention)


def _expert_parallel(model: PlannedModel, run: PlannedRun, hardware: Hardware) -> float:
    """All-to-all of the token copies to their experts and back, forward and backward; within a node at NVLink's rate.

    An all-gather sends a copy to every rank; "auto" uses it where those are fewer than a token's experts. The flex
    dispatcher (DeepEP) sends a token once to each node with experts of it, which a group-limited router bounds; the
    others send every copy.
    """
    layout = run.layout
    group = layout.ep * layout.expert_tp
    if group == 1:
        return 0.0
    gathers = run.moe_dispatcher == "allgather" or (
        run.moe_dispatcher == "auto" and group < model.top_k and not run.ep_overlap
    )
    sent = 2 * model.dims.hidden * (group if gathers else copies(model, run)) * run.tokens
    nodes = -(-group // hardware.per_node)
    near = sent * max(0.0, 1 / nodes - 1 / group) / hardware.bandwidth(min(group, hardware.per_node))
    far = sent * (1 - 1 / nodes)
    if run.moe_dispatcher == "flex":
        reached = min(nodes, model.top_k, int(model.settings.get("moe_router_group_topk") or model.top_k))
        far *= reached / model.top_k
    return 4 * (max(near, far / hardware.bandwidth(group)) + hardware.message_latency)


def _selective(
    model: PlannedModel,
    run: PlannedRun,
    hardware: Hardware,
    moe: bool,
    attention: float,
    experts: float,
    dispatch: float,
) -> float:
    """Forward seconds of the recomputed modules; `attention` and `experts` are theirs, `dispatch` that of one
    all-to-all and back."""
    modules = set(run.recompute_modules)
    rate = _rate(run, hardware)
    seconds = attention if "core_attn" in modules else 0.0
    if "mla_up_proj" in modules and model.latent_attention:
        up = model.size("q_lora") * model.dims.q_rows + model.size("kv_lora") * model.size("kv_up")
        seconds += 2 * up / run.layout.tp * run.tokens / rate
    held = model.layer(moe, run.layout.tp, run.layout.ep, run.layout.expert_tp)
    if "mlp" in modules:
        seconds += 2 * held.get("mlp", 0) * run.tokens / rate
    if {"shared_experts", "moe"} & modules:
        seconds += 2 * held.get("shared experts", 0) * run.tokens / rate
    if "moe" in modules and moe:
        seconds += experts + dispatch
    if {"layernorm", "moe_act"} & modules and moe:
        width = 4 * model.dims.hidden + 6 * model.dims.moe_ffn * copies(model, run)
        seconds += width * run.tokens / hardware.memory_rate
    return seconds


def _head(model: PlannedModel, run: PlannedRun, hardware: Hardware) -> _Work:
    columns = -(-model.dims.vocab // run.layout.tp)
    flops = 2 * columns * model.dims.hidden * run.tokens / run.streams * (1.0 if run.all_logits else run.loss_share)
    return _Work(compute=(2 if run.lora_rank else 3) * flops / _rate(run, hardware))


def _messages(model: PlannedModel, run: PlannedRun, hardware: Hardware) -> float:
    """Messages between stages; an interleaved schedule overlaps all but their latency with other chunks."""
    layout = run.layout
    if layout.pp == 1:
        return 0.0
    sequence = layout.tp if run.sharded_sequence else 1
    rate = hardware.bandwidth(layout.tp * run.cp * layout.pp)
    seconds = 2 * model.dims.hidden * run.tokens / sequence / rate
    exposed = hardware.message_latency + (0.0 if layout.vp > 1 else seconds)
    return 2 * layout.vp * run.micro_batches * exposed + 2 * (layout.pp - 1) * seconds


def _data_parallel(model: PlannedModel, run: PlannedRun, hardware: Hardware, overlapped: float) -> tuple[float, float]:
    """Exposed seconds of gradient reduction and weight gathering, and seconds of the optimizer step.

    Once per step, overlapped with the last micro-batch's backward and the first one's forward pass; with fully sharded
    weights in every micro-batch. Several instances of the distributed optimizer reduce and gather inside each, and sum
    the reduced gradients among them.
    """
    instances = run.optimizer_instances
    layout = run.layout
    seconds = worst = 0.0
    for stage, kinds in enumerate(model.kinds(layout)):
        experts = dense = 0
        for moe, number in kinds.items():
            held = model.layer(moe, layout.tp, layout.ep, layout.expert_tp)
            experts += number * held.get("experts", 0)
            dense += number * (sum(held.values()) - held.get("experts", 0))
        outer = model.outer(layout.tp)
        dense += outer["embedding"] * (stage == 0) + outer.get("head", 0) * (stage == layout.pp - 1)
        dense, experts = adapter_parameters(model, run, stage) or (dense, experts)
        total = update = 0.0
        for count, shards, span in (
            (dense, run.shards[0], layout.tp * run.cp * run.dp),
            (experts, run.shards[1], layout.expert_tp * layout.ep * run.expert_dp),
        ):
            times = run.micro_batches if run.fsdp == "optim_grads_params" else 1
            share = (shards - 1) / shards
            volume = (run.gradient_bytes + 2 * times + (2 * times if times > 1 else 0)) * count * share
            total += volume / hardware.bandwidth(span // instances)
            between = 2 * run.gradient_bytes * count / shards * (instances - 1) / instances
            total += between / hardware.bandwidth(span)
            sharded = run.distributed_optimizer or run.fsdp is not None
            update += _OPTIMIZER_BYTES * (count / shards if sharded else count) / hardware.memory_rate
        seconds, worst = max(seconds, total), max(worst, update)
    behind = overlapped * (run.micro_batches if run.fsdp == "optim_grads_params" else 1)
    return max(0.1 * seconds, seconds - behind), worst
