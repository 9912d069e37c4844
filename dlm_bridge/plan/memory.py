"""The memory of every rank: weights, gradients, optimizer state, activations, and what is alive for a moment.

Weights, gradients and optimizer follow Rajbhandari et al., ZeRO (arXiv 1910.02054), section 3: two bytes a parameter
for bf16 weights, the gradient buffer, and for AdamW twelve bytes (fp32 weights and two moments), each divided over
data parallel ranks as the sharding strategy says. Activations: `dlm_bridge.plan.activations`, times the micro-batches
in flight.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from dlm_bridge.plan.activations import layer_activations
from dlm_bridge.plan.hardware import OVERHEADS
from dlm_bridge.plan.model import ROLES, Model
from dlm_bridge.plan.run import Run

COMPONENTS = ("weights", "gradients", "optimizer", "activations", "transient", "overhead")
_STATE = {"adamw": 8, "sgd": 4}  # bytes of moments a parameter


@dataclass(frozen=True)
class StageMemory:
    """What each rank of one pipeline stage holds; all of a stage's ranks are alike. Sizes in bytes."""

    pp_rank: int
    chunks: tuple[tuple[int, ...], ...]  # the layers of each virtual chunk
    parameters: dict[str, int]  # by role
    in_flight: tuple[int, ...]  # micro-batches whose activations each chunk keeps at the peak
    weights: int
    gradients: int
    optimizer: int
    activations: int
    transient: int  # the larger of the loss's logits and one layer's backward buffers
    overhead: int  # outside of the allocator, and its slack

    @property
    def allocated(self) -> int:
        """The peak of what tensors take: torch.cuda.max_memory_allocated."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.transient

    @property
    def total(self) -> int:
        """What the GPU must have."""
        return self.allocated + self.overhead

    @property
    def layers(self) -> int:
        return sum(map(len, self.chunks))

    @property
    def held(self) -> int:
        """Parameters on the rank."""
        return sum(self.parameters.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return asdict(self) | {"held": self.held, "allocated": self.allocated, "total": self.total}


@dataclass(frozen=True)
class MemoryPlan:
    """Who holds what. `ranks` is the number of ranks in each stage."""

    model: Model
    run: Run
    stages: tuple[StageMemory, ...]

    @property
    def ranks(self) -> int:
        return self.run.gpus // self.run.layout.pp

    @property
    def peak(self) -> StageMemory:
        """The stage that needs the most."""
        return max(self.stages, key=lambda stage: stage.total)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {
            "model": self.model.name,
            "family": self.model.family.name,
            "parameters": self.model.parameters,
            "active_parameters": self.model.active_parameters,
            "run": self.run.as_dict(),
            "ranks_per_stage": self.ranks,
            "peak_bytes": self.peak.total,
            "peak_allocated_bytes": self.peak.allocated,
            "stages": [stage.as_dict() for stage in self.stages],
            "notes": notes(self.model, self.run),
        }


def memory_plan(model: Model, run: Run) -> MemoryPlan:
    """Parameters and memory of every rank. Raises DlmBridgeError for a run that megatron-core would refuse."""
    run.check(model)
    return checked_memory_plan(model, run)


def checked_memory_plan(model: Model, run: Run) -> MemoryPlan:
    """`memory_plan` of a run that `Run.check` has accepted."""
    return MemoryPlan(model, run, tuple(_stage(model, run, pp) for pp in range(run.layout.pp)))


def notes(model: Model, run: Run) -> list[str]:
    """What the figures leave out or assume, for people."""
    found = []
    if model.left_out_mtp:
        found.append(
            f"{model.left_out_mtp} multi-token prediction layer(s) are left out: training keeps them on the CPU"
        )
    if run.global_batch_size is None:
        found.append(f"no --global-batch-size: {run.micro_batches} micro-batches a step are assumed")
    if model.dims.experts:
        share = round(100 * (OVERHEADS.expert_imbalance - 1))
        found.append(f"the fullest rank's experts are taken to get {share}% more tokens than the mean")
    return found


def _stage(model: Model, run: Run, pp: int) -> StageMemory:
    chunks = model.stages(run.layout)[pp]
    parameters = _parameters(model, run, pp)
    weights, gradients, optimizer = _states(model, run, parameters)
    flying = in_flight(pp, run.layout.pp, run.layout.vp, run.micro_batches)
    kinds = model.kinds(run.layout)[pp]
    layer = {moe: (layer_activations(model, run, moe), layer_activations(model, run, moe, full=True)) for moe in kinds}
    kept = 0.0
    for chunk, count in zip(chunks, flying, strict=True):
        recomputed = 0
        if run.recompute == "full":
            recomputed = len(chunk) if run.recompute_layers is None else run.recompute_layers
        for number, n in enumerate(chunk):
            kept += count * layer[model.dims.is_moe(n)][number < recomputed]
    transient = max(_head(model, run, pp), _one_layer(model, run, kinds))
    if pp == run.layout.pp - 1:
        kept += 2 * 2 * model.dims.hidden * run.tokens / _sequence(run)  # the final norm's input and output
    allocated = weights + gradients + optimizer + kept + transient
    groups = sum(size > 1 for size in (run.layout.tp, run.layout.pp, run.cp, run.dp, run.layout.ep, run.expert_dp))
    overhead = OVERHEADS.cuda_context + groups * OVERHEADS.nccl_group + OVERHEADS.reserved_share * allocated
    return StageMemory(
        pp_rank=pp,
        chunks=chunks,
        parameters=parameters,
        in_flight=flying,
        weights=round(weights),
        gradients=round(gradients),
        optimizer=round(optimizer),
        activations=round(kept),
        transient=round(transient),
        overhead=round(overhead),
    )


@cache
def in_flight(pp: int, stages: int, virtual: int, micro_batches: int) -> tuple[int, ...]:
    """Micro-batches whose activations each virtual chunk of stage `pp` keeps at the peak, which is after the warm-up
    and one more forward pass.

    1F1B keeps stages - pp of them. Interleaved (Narayanan et al., arXiv 2104.04473), the warm-up is
    2 (stages - pp - 1) + (virtual - 1) stages passes, of `stages` micro-batches through each chunk in turn.
    """
    if virtual == 1:
        return (min(micro_batches, stages - pp),)
    passes = min(micro_batches * virtual, 2 * (stages - pp - 1) + (virtual - 1) * stages + 1)
    counts = Counter(number // stages % virtual for number in range(passes))
    return tuple(counts[chunk] for chunk in range(virtual))


def _parameters(model: Model, run: Run, pp: int) -> dict[str, int]:
    layout = run.layout
    counts = dict.fromkeys(ROLES, 0)
    for moe, number in model.kinds(layout)[pp].items():
        for role, held in model.layer(moe, layout.tp, layout.ep, layout.expert_tp).items():
            counts[role] += number * held
    outer = model.outer(layout.tp)
    if pp == 0:
        counts["embedding"] += outer["embedding"]
    if pp == layout.pp - 1:
        counts["norms"] += outer.get("norms", 0)
        counts["head"] += outer.get("head", 0)
        if model.dims.tied and layout.pp > 1:
            counts["head"] += outer["embedding"]  # the last stage has its own copy
    return {role: count for role, count in counts.items() if count}


def _states(model: Model, run: Run, parameters: dict[str, int]) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer state on the device."""
    experts = parameters.get("experts", 0)
    dense = sum(parameters.values()) - experts
    low = run.precision != "fp32"
    of_state = _STATE[run.optimizer] + (4 if low else 0)  # an fp32 copy of the weights beside narrow ones
    if run.optimizer_cpu_offload:
        of_state = 0
    sharded = run.distributed_optimizer or run.fsdp is not None
    weights = gradients = optimizer = 0.0
    for count, replicas in ((dense, run.dp * run.cp), (experts, run.expert_dp)):
        held = count / replicas if run.fsdp == "optim_grads_params" else count
        weights += (2 if low else 4) * held
        gradients += run.gradient_bytes * (
            count / replicas if run.fsdp in ("optim_grads", "optim_grads_params") else count
        )
        optimizer += of_state * (count / replicas if sharded else count)
    if run.precision == "fp8":  # each linear weight once more in FP8, as it is and transposed
        linear = sum(parameters.get(role, 0) for role in ("attention", "mlp", "experts", "shared experts"))
        weights += 2 * linear
    if run.fsdp == "optim_grads_params":
        weights += 2 * (2 if low else 4) * _largest_unit(model, run)  # gathered: the layer at work and the next one
    if run.fsdp in ("optim_grads", "optim_grads_params"):
        gradients += run.gradient_bytes * _largest_unit(model, run)
    return weights, gradients, optimizer


def _largest_unit(model: Model, run: Run) -> int:
    """Parameters of the largest layer or outer tensor, which FSDP gathers at once."""
    layout = run.layout
    kinds = {model.dims.is_moe(n) for n in range(model.dims.layers)}
    layers = [sum(model.layer(moe, layout.tp, layout.ep, layout.expert_tp).values()) for moe in kinds]
    return max(*layers, *model.outer(layout.tp).values())


def _head(model: Model, run: Run, pp: int) -> float:
    """Logits and the loss's buffers on the last stage; the hidden states' gradient stands beside them."""
    if pp != run.layout.pp - 1:
        return 0.0
    columns = -(-model.dims.vocab // run.layout.tp)
    tokens = run.tokens / run.streams  # only one stream has a loss
    states = 2 * 2 * model.dims.hidden * tokens
    if run.all_logits:
        return 2 * columns * tokens + states
    chunk = min(OVERHEADS.loss_chunk_bytes, 4 * columns * tokens)
    return OVERHEADS.loss_chunk_copies * chunk + states


def _one_layer(model: Model, run: Run, kinds: dict[bool, int]) -> float:
    """What recomputing brings back for one layer at a time."""
    if run.recompute == "none":
        return 0.0
    everything = replace(run, recompute="none")
    back = [layer_activations(model, everything, moe) for moe in kinds]
    kept = [layer_activations(model, run, moe) if run.recompute == "selective" else 0.0 for moe in kinds]
    return max((a - b for a, b in zip(back, kept, strict=True)), default=0.0)


def _sequence(run: Run) -> int:
    return run.layout.tp if run.sharded_sequence else 1
