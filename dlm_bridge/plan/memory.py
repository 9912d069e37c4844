"""Memory of every rank: weights, gradients, optimizer state, activations and transient buffers.

Weights, gradients and optimizer follow Rajbhandari et al., ZeRO (arXiv 1910.02054), section 3: two bytes per
parameter for bf16 weights, the gradient buffer, and for AdamW twelve bytes (fp32 main parameters and two moments),
each divided over data parallel ranks as the sharding strategy says.

Activations follow Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (arXiv
2205.05198), section 4, brought up to date: flash attention stores no scores, SwiGLU stores its input and its output,
RMSNorm its input, RoPE makes new queries and keys, dropout is off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Literal

from dlm_bridge.errors import counted
from dlm_bridge.plan.lora import adapter_layer
from dlm_bridge.plan.model import ROLES, PlannedModel
from dlm_bridge.plan.run import GIB, OVERHEADS, PlannedRun

COMPONENTS = ("weights", "gradients", "optimizer", "activations", "transient", "overhead")
MAIN_PARAMS = "optimizer contains the Accelerate engine's fp32 weights, weights their 16-bit copies"
ESTIMATED = "activations are estimated for the Megatron engine's layers; transformers' layers store more"
_STATE = {"adamw": 8, "sgd": 4, "muon": 8}  # bytes of moments per parameter, but for the matrices of Muon
_REDUCED_TOGETHER = 10**9  # gradient elements that may wait for their reduction in Megatron FSDP, at least
# Roles whose matrices have one moment under Muon. Experts are not among them: it depends on the family.
_MATRICES = ("attention", "mlp", "shared experts")
# Number of Transformer Engine's userbuffers, each for a micro-batch's hidden states.
_GATHERED, _REDUCED = 8, 4


@dataclass(frozen=True)
class StageMemory:
    """Memory of each rank of one pipeline stage, in bytes. All ranks of a stage need the same."""

    pp_rank: int
    chunks: tuple[tuple[int, ...], ...]  # the layers of each virtual chunk
    parameters: dict[str, int]  # by role
    in_flight: tuple[int, ...]  # micro-batches whose activations each chunk stores at the peak
    weights: int
    gradients: int
    optimizer: int
    activations: int
    transient: int  # the largest of the loss's logits, one layer's recomputed activations, FSDP's unreduced gradients
    overhead: int  # outside of the caching allocator, and its fragmentation
    building: int  # peak of tensors before the first step, while the model is built and sharded
    trained: int  # parameters of the adapter; without one, all
    host: int  # in the CPU's memory per GPU: offloaded weights, gradients and optimizer state

    @property
    def allocated(self) -> int:
        """Peak bytes of tensors in training, as torch.cuda.max_memory_allocated counts them."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.transient

    @property
    def total(self) -> int:
        """Bytes of memory that the GPU needs."""
        return max(self.allocated, self.building) + self.overhead

    @property
    def layers(self) -> int:
        """Number of layers on the rank."""
        return sum(map(len, self.chunks))

    @property
    def held(self) -> int:
        """Number of parameters on the rank."""
        return sum(self.parameters.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return asdict(self) | {"held": self.held, "allocated": self.allocated, "total": self.total}


@dataclass(frozen=True)
class MemoryPlan:
    """Parameters and memory by pipeline stage."""

    model: PlannedModel
    run: PlannedRun
    stages: tuple[StageMemory, ...]

    @property
    def ranks(self) -> int:
        """Number of ranks of each stage."""
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


def memory_plan(model: PlannedModel, run: PlannedRun, checked: bool = False) -> MemoryPlan:
    """Parameters and memory of every rank. `PlannedRun.check` is called unless the run is `checked` already."""
    if not checked:
        run.check(model)
    return MemoryPlan(model, run, tuple(_stage(model, run, pp) for pp in range(run.layout.pp)))


def notes(model: PlannedModel, run: PlannedRun) -> list[str]:
    """Parts that the estimate does not include, and its assumptions."""
    found = []
    if model.left_out_mtp:
        found.append(
            f"{counted(model.left_out_mtp, 'multi-token prediction layer')} not planned. When trained, each needs as "
            "much as a layer and the output layer, plus an embedding, on the last stage; otherwise it stays on the CPU"
        )
    if run.global_batch_size is None:
        batches = counted(run.micro_batches, "micro-batch", "micro-batches")
        found.append(f"without `global_batch_size`: assumes {batches} per step")
    found += engine_notes(model, run)
    if model.dims.experts:
        percent = round(100 * (OVERHEADS.expert_imbalance - 1))
        found.append(f"assumes that the busiest expert-parallel rank gets {percent}% more tokens than average")
    return found


def engine_notes(model: PlannedModel, run: PlannedRun) -> list[str]:
    """Assumptions about the engine, and the composition of the peak before the first step."""
    found = _building_notes(model, run)
    if run.lora_rank:
        found.append("activations under LoRA are counted as if all weights were trained: at most these are stored")
    if run.engine == "accelerate":
        found += [] if run.precision == "fp32" or run.lora_rank else [MAIN_PARAMS]
        found.append(ESTIMATED)
    return found


def _building_notes(model: PlannedModel, run: PlannedRun) -> list[str]:
    """Composition of the peak before the first step, and the measurements that it was compared with."""
    if run.fsdp is None:
        return []
    if run.own_shards:
        largest = 4 * largest_parameter(model) / GIB
        return [
            "to build the model, each process reads its own shards; beside them it holds no more than its largest "
            f"parameter in fp32, {largest:.1f} GiB (within 2% of 16B and 30B models with experts on H200s)"
        ]
    if run.fsdp == "optim_grads_params":
        return [
            "to build the model, each GPU holds its whole tensor parallel part of embedding and head, then of one "
            "layer at a time, which Megatron FSDP shards, and then the gradients (within 0.1% of LLaDA-8B's shape on "
            "two H100s)"
        ]
    return [
        "to build the model, each GPU holds its whole tensor parallel part of the weights, which stays under this "
        "strategy of Megatron FSDP: that peak follows megatron-core's code, and was not measured"
    ]


def _stage(model: PlannedModel, run: PlannedRun, pp: int) -> StageMemory:
    chunks = model.stages(run.layout)[pp]
    parameters = _parameters(model, run, pp)
    adapter = adapter_parameters(model, run, pp)
    weights, gradients, optimizer, host = _states(model, run, parameters, adapter)
    micro_batches = in_flight(pp, run.layout.pp, run.layout.vp, run.micro_batches)
    kinds = model.kinds(run.layout)[pp]
    layer = {moe: (layer_activations(model, run, moe), layer_activations(model, run, moe, full=True)) for moe in kinds}
    kept = 0.0
    for chunk, count in zip(chunks, micro_batches, strict=True):
        recomputed = 0
        if run.recompute == "full":
            recomputed = len(chunk) if run.recompute_layers is None else run.recompute_layers
        for number, n in enumerate(chunk):
            kept += count * layer[model.dims.is_moe(n)][number < recomputed]
    transient = max(_head(model, run, pp), _one_layer(model, run, kinds))
    if pp == run.layout.pp - 1:
        kept += 2 * 2 * model.dims.hidden * run.tokens / _sequence(run)  # the final norm's input and output
    transient = max(transient, _waiting(model, run, sum(parameters.values())) - kept)  # when no activation is left
    building = _building(model, run, parameters)
    allocated = max(weights + gradients + optimizer + kept + transient, building)
    groups = sum(size > 1 for size in (run.layout.tp, run.layout.pp, run.cp, run.dp, run.layout.ep, run.expert_dp))
    overhead = OVERHEADS.cuda_context + groups * OVERHEADS.nccl_group + OVERHEADS.reserved_share * allocated
    if run.tp_overlap and run.layout.tp > 1:
        overhead += (_GATHERED * (1 if run.precision == "fp8" else 2) + _REDUCED * 2) * run.tokens * model.dims.hidden
    return StageMemory(
        pp_rank=pp,
        chunks=chunks,
        parameters=parameters,
        in_flight=micro_batches,
        weights=round(weights),
        gradients=round(gradients),
        optimizer=round(optimizer),
        activations=round(kept),
        transient=round(transient),
        overhead=round(overhead),
        building=round(building),
        trained=sum(parameters.values()) if adapter is None else sum(adapter),
        host=round(host),
    )


@cache
def in_flight(pp: int, stages: int, virtual: int, micro_batches: int) -> tuple[int, ...]:
    """Micro-batches whose activations each virtual chunk of stage `pp` stores at the peak, which is after the warm-up
    and one more forward pass.

    1F1B stores stages - pp of them. Interleaved (Narayanan et al., arXiv 2104.04473), the warm-up is
    2 (stages - pp - 1) + (virtual - 1) stages passes, of `stages` micro-batches through each chunk in turn.
    """
    if virtual == 1:
        return (min(micro_batches, stages - pp),)
    passes = min(micro_batches * virtual, 2 * (stages - pp - 1) + (virtual - 1) * stages + 1)
    counts = Counter(number // stages % virtual for number in range(passes))
    return tuple(counts[chunk] for chunk in range(virtual))


def _parameters(model: PlannedModel, run: PlannedRun, pp: int) -> dict[str, int]:
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


def adapter_parameters(model: PlannedModel, run: PlannedRun, pp: int) -> tuple[int, int] | None:
    """Parameters of the adapter on a rank, in the dense part and in experts; None if the weights are trained."""
    if not run.lora_rank:
        return None
    dense = experts = 0
    for moe, number in model.kinds(run.layout)[pp].items():
        layer = adapter_layer(
            model, moe, run.layout.tp, run.layout.ep, run.layout.expert_tp, run.lora_rank, run.lora_targets
        )
        dense, experts = dense + number * layer[0], experts + number * layer[1]
    return dense, experts


def _states(
    model: PlannedModel, run: PlannedRun, parameters: dict[str, int], adapter: tuple[int, int] | None
) -> tuple[float, float, float, float]:
    """Bytes of weights, gradients and optimizer state on the device, and of what is offloaded to the CPU."""
    experts = parameters.get("experts", 0)
    held = (sum(parameters.values()) - experts, experts)
    low = run.precision != "fp32"
    of_state = _STATE[run.optimizer] + (4 if low else 0)  # fp32 main parameters beside narrow ones
    sharded = run.distributed_optimizer or run.fsdp is not None
    weights = gradients = optimizer = 0.0
    for count, trained, shards in zip(held, adapter or held, run.shards, strict=True):
        split = shards if run.fsdp == "optim_grads_params" else 1
        if not (low and run.own_shards):  # FSDP2 casts what it gathers
            weights += (2 if low else 4) * (trained / split)
        if adapter is not None:  # frozen
            weights += (2 if low else 4) * (count / split)
        gradients += run.gradient_bytes * (
            trained / shards if run.fsdp in ("optim_grads", "optim_grads_params") else trained
        )
        optimizer += of_state * (trained / shards if sharded else trained)
    if run.optimizer == "muon":
        optimizer -= 4 * sum(parameters.get(role, 0) for role in _MATRICES)
    host = 0.0
    if run.cpu_offload:
        host, weights, gradients, optimizer = weights + gradients + optimizer, 0.0, 0.0, 0.0
    elif run.optimizer_cpu_offload:
        host, optimizer = optimizer, 0.0
    if run.precision == "fp8":  # each linear weight once more in FP8, as it is and transposed
        linear = sum(parameters.get(role, 0) for role in ("attention", "mlp", "experts", "shared experts"))
        weights += 2 * linear
    if run.fsdp == "optim_grads_params":
        weights += 2 * (2 if low else 4) * _largest_unit(model, run)  # gathered: the layer at work and the next one
    if run.fsdp in ("optim_grads", "optim_grads_params") and adapter is None:
        gradients += run.gradient_bytes * _largest_unit(model, run)  # whole until they are summed
    return weights, gradients, optimizer, host


def _waiting(model: PlannedModel, run: PlannedRun, parameters: int) -> float:
    """Bytes of gradients that Megatron FSDP holds at the end of the backward pass, beside its shards and the whole
    gradients of the largest unit: that unit's reduced shard, its gradients in the weights' dtype, and gradients
    that wait to be freed, whose number megatron-core limits. These are whole layers, or smaller buckets where weights
    are not sharded."""
    if run.fsdp not in ("optim_grads", "optim_grads_params") or run.own_shards:  # FSDP2 waits for each unit
        return 0.0
    unit, layer = _largest_unit(model, run), _largest_layer(model, run)
    elements = _REDUCED_TOGETHER
    if run.fsdp == "optim_grads_params":
        elements = max(elements, 2 * layer) // layer * layer
    elements = min(elements, parameters - unit)
    return run.gradient_bytes * (elements + unit / run.shards[0]) + (0 if run.precision == "fp32" else 2) * unit


def _building(model: PlannedModel, run: PlannedRun, parameters: dict[str, int]) -> float:
    """Bytes on the device at the peak before the first step. Without FSDP these are the weights, which stay.

    Under Megatron FSDP a rank holds its whole tensor parallel part of the weights, and for the first unit also the
    buffer that they are copied to and their shards, with fp32 main params; what was copied is freed. Where weights are
    sharded too (optim_grads_params), it holds embedding and head whole and a copy of one of them, then all shards and
    a layer twice. When all weights are sharded the gradients are allocated. In the Accelerate engine a rank holds its
    fp32 shards, and its shard of the largest parameter once more, as it is read.
    """
    count, low = sum(parameters.values()), 4 if run.precision == "fp32" else 2
    if run.fsdp is None:
        return low * count
    shards, expert_shards = run.shards
    if run.own_shards:
        width = low if run.lora_rank else 4  # frozen weights are loaded in the run's precision
        return width * (largest_parameter(model) + (0 if run.cpu_offload else count)) / shards
    main, experts = 4 if low == 2 else 0, parameters.get("experts", 0)
    sharded = (count - experts) / shards + experts / expert_shards
    gradients = run.gradient_bytes * (count if run.fsdp == "optim" else sharded)
    if run.fsdp == "optim_grads_params":
        outer, held = model.outer(run.layout.tp).values(), (low + main) * sharded
        layers = 2 * low * _largest_layer(model, run)
        return max(low * (sum(outer) + max(outer)), held + max(layers, gradients))
    unit = _largest_unit(model, run)
    return max(low * (count + unit) + main * unit / shards, low * count + main * sharded + gradients)


def largest_parameter(model: PlannedModel) -> int:
    """Elements of the largest parameter of the Hub model. All experts of a layer are one parameter."""
    dims = model.dims
    sizes = [dims.vocab * dims.hidden, dims.q_rows * dims.hidden, 2 * dims.experts * dims.moe_ffn * dims.hidden]
    return max(*sizes, 0 if dims.experts and not dims.dense_layers else dims.ffn * dims.hidden)


def _largest_unit(model: PlannedModel, run: PlannedRun) -> int:
    """Parameters of the largest unit that FSDP gathers: a layer, the embedding or the output layer."""
    return max(_largest_layer(model, run), *model.outer(run.layout.tp).values())


def _largest_layer(model: PlannedModel, run: PlannedRun) -> int:
    layout = run.layout
    kinds = {model.dims.is_moe(n) for n in range(model.dims.layers)}
    return max(sum(model.layer(moe, layout.tp, layout.ep, layout.expert_tp).values()) for moe in kinds)


def _head(model: PlannedModel, run: PlannedRun, pp: int) -> float:
    """Bytes of logits, loss buffers and the gradient of the hidden states, on the last stage."""
    if pp != run.layout.pp - 1:
        return 0.0
    columns = -(-model.dims.vocab // run.layout.tp)
    tokens = run.tokens / run.streams  # only one stream has a loss
    states = 2 * 2 * model.dims.hidden * tokens
    if run.all_logits:
        return 2 * columns * tokens + states
    chunk = min(OVERHEADS.loss_chunk_bytes, 4 * columns * tokens)
    return OVERHEADS.loss_chunk_copies * chunk + states


def _one_layer(model: PlannedModel, run: PlannedRun, kinds: dict[bool, int]) -> float:
    """Bytes of activations that recomputation restores, for one layer at a time."""
    if run.recompute == "none":
        return 0.0
    everything = replace(run, recompute="none")
    back = [layer_activations(model, everything, moe) for moe in kinds]
    kept = [layer_activations(model, run, moe) if run.recompute == "selective" else 0.0 for moe in kinds]
    return max((a - b for a, b in zip(back, kept, strict=True)), default=0.0)


def _sequence(run: PlannedRun) -> int:
    """Number of ranks that share a sequence outside of tensor parallel layers (sequence parallelism)."""
    return run.layout.tp if run.sharded_sequence else 1


SplitBy = Literal["sequence", "heads", "experts"]  # what divides a term: SP's sequence, TP's columns, expert TP's


@dataclass(frozen=True)
class ActivationTerm:
    """`nbytes` per token (for "experts": per token copy), which are not stored if one of `modules` is recomputed."""

    name: str
    nbytes: float
    split: SplitBy
    modules: tuple[str, ...] = ()


def layer_activations(model: PlannedModel, run: PlannedRun, moe: bool, full: bool = False) -> float:
    """Bytes that one layer stores of one micro-batch on one rank; with `full` recomputation only its input."""
    recomputed = run.recompute_modules if run.recompute == "selective" else ()
    layout, sharded = run.layout, run.sharded_sequence
    key = ("activations", moe, full, layout.tp, sharded, layout.expert_tp, run.precision, recomputed)
    per_token = model.cached(key, lambda: _per_token(model, run, moe, full, set(recomputed)))
    return per_token * run.tokens


def _per_token(model: PlannedModel, run: PlannedRun, moe: bool, full: bool, recomputed: set[str]) -> float:
    divisor = {
        "sequence": _sequence(run),
        "heads": run.layout.tp,
        "experts": run.layout.expert_tp,
    }
    if full:
        return (4 if run.precision == "fp32" else 2) * model.dims.hidden / divisor["sequence"]
    nbytes = 0.0
    for term in layer_terms(model, moe, run.precision):
        if not recomputed.intersection(term.modules):
            factor = copies(model, run) if term.split == "experts" else 1.0
            nbytes += term.nbytes * factor / divisor[term.split]
    return nbytes


def copies(model: PlannedModel, run: PlannedRun) -> float:
    """Token copies that the most loaded rank's experts receive, per token of a micro-batch before tensor parallelism.

    Each of an expert's `etp` ranks receives all copies from the `ep` x `etp` ranks of its group.
    """
    return 1 / _sequence(run) * run.layout.expert_tp * model.top_k * OVERHEADS.expert_imbalance


def layer_terms(model: PlannedModel, moe: bool, precision: str) -> Iterator[ActivationTerm]:
    """All tensors that a layer stores. Linear layers in FP8 store their input with one byte per element."""
    hidden = model.dims.hidden
    wide = 4 if precision == "fp32" else 2
    narrow = 1 if precision == "fp8" else wide  # the input of a linear layer
    yield ActivationTerm("input", wide * hidden, "sequence")
    yield ActivationTerm("normed input", narrow * hidden, "sequence")
    yield from _latent_attention(model, wide, narrow) if model.latent_attention else _attention(model, wide, narrow)
    yield ActivationTerm("attention's sum with the input", wide * hidden, "sequence")
    if moe:
        yield from _experts(model, wide, narrow)
    else:
        ffn = model.dims.ffn
        yield ActivationTerm("normed sum", narrow * hidden, "sequence", ("mlp",))
        yield ActivationTerm("gate and up", 2 * wide * ffn, "heads", ("mlp",))
        yield ActivationTerm("SwiGLU's output", narrow * ffn, "heads", ("mlp",))


def _attention(model: PlannedModel, wide: int, narrow: int) -> Iterator[ActivationTerm]:
    q, kv = model.dims.q_rows, model.dims.kv_rows
    yield ActivationTerm(
        "fused query, key and value", wide * (q + 2 * kv), "heads"
    )  # stored whole through the view of the value
    yield ActivationTerm("rotated query and key", wide * (q + kv), "heads")
    yield from _output(q, wide, narrow, model.dims.heads)


def _latent_attention(model: PlannedModel, wide: int, narrow: int) -> Iterator[ActivationTerm]:
    dims = model.dims
    q_lora, kv_lora = model.size("q_lora"), model.size("kv_lora")
    up = ("mla_up_proj",)
    yield ActivationTerm("query's latent vector", wide * q_lora, "sequence")
    yield ActivationTerm("key and value's latent vector", wide * model.size("kv_down"), "sequence")
    yield ActivationTerm("normed latent vectors", narrow * (q_lora + kv_lora), "sequence", up)
    yield ActivationTerm("keys without position, and values", wide * model.size("kv_up"), "heads", up)
    yield ActivationTerm("query and key", 2 * wide * dims.q_rows, "heads", up)
    yield from _output(model.size("values"), wide, narrow, dims.heads)


def _output(width: int, wide: int, narrow: int, heads: int) -> Iterator[ActivationTerm]:
    yield ActivationTerm("attention's output", wide * width, "heads")
    if narrow < wide:
        yield ActivationTerm("attention's output in FP8", narrow * width, "heads")
    yield ActivationTerm("log-sum-exp", 4 * heads, "heads")


def _experts(model: PlannedModel, wide: int, narrow: int) -> Iterator[ActivationTerm]:
    """The normed sum is stored for the router and the shared expert, unless its norm is recomputed."""
    hidden, width, shared = model.dims.hidden, model.dims.moe_ffn, model.dims.shared_ffn
    yield ActivationTerm("normed sum", wide * hidden, "sequence", ("layernorm",))
    yield ActivationTerm("router's logits and probabilities", 12 * model.dims.experts, "sequence", ("moe",))
    yield ActivationTerm("copies of tokens", narrow * hidden, "experts", ("moe",))
    yield ActivationTerm("experts' gate and up", 2 * wide * width, "experts", ("moe",))
    yield ActivationTerm("experts' SwiGLU output", narrow * width, "experts", ("moe", "moe_act"))
    if shared:
        yield ActivationTerm("shared expert's gate and up", 2 * wide * shared, "heads", ("moe", "shared_experts"))
        yield ActivationTerm("shared expert's SwiGLU output", narrow * shared, "heads", ("moe", "shared_experts"))
