"""Recommended layout of a model on a number of GPUs: the fastest that megatron-core supports and that fits.

For each dimension, the best layouts with the next smaller and larger value give the reason for the choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from dlm_bridge.errors import DlmBridgeError, LayoutError, ResourceError, SettingError
from dlm_bridge.mapping.layout import Layout
from dlm_bridge.plan.cost import StepTime, step_time
from dlm_bridge.plan.hardware import Hardware
from dlm_bridge.plan.memory import MemoryPlan, memory_plan
from dlm_bridge.plan.model import PlannedModel
from dlm_bridge.plan.run import GIB, PlannedRun

# From free to the cost of a whole forward pass; the first that fits is the fastest.
RECOMPUTATION: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("none", ()),
    ("selective", ("layernorm", "moe_act", "mla_up_proj")),
    ("selective", ("layernorm", "mla_up_proj", "mlp", "moe_act", "shared_experts")),
    ("selective", ("layernorm", "mla_up_proj", "mlp", "moe")),
    ("full", ()),
)
_DIMENSIONS = ("tp", "pp", "cp", "ep", "etp", "vp", "micro_batch_size")
_NAMES = {
    "tp": "tensor parallelism",
    "pp": "pipeline parallelism",
    "cp": "context parallelism",
    "ep": "expert parallelism",
    "etp": "expert tensor parallelism",
    "vp": "virtual pipeline chunks",
    "micro_batch_size": "micro-batch size",
}
_CAUSES = {
    "compute": "matrix products and attention",
    "recompute": "recomputation",
    "tensor_parallel": "tensor parallel collectives",
    "context_parallel": "the context parallel ring",
    "expert_parallel": "the experts' all-to-all",
    "pipeline_bubble": "the pipeline's bubble",
    "pipeline_messages": "hand-overs between stages",
    "data_parallel": "gradient and weight communication",
    "optimizer": "the optimizer step",
}


@dataclass(frozen=True)
class LayoutCandidate:
    """A layout with its memory and its time."""

    run: PlannedRun
    memory: MemoryPlan
    time: StepTime

    def as_dict(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        tokens = self.run.batch * self.run.seq_length
        return {
            "run": self.run.as_dict(),
            "peak_bytes": self.memory.peak.total,
            "step_seconds": self.time.as_dict(),
            "tokens_per_second_per_gpu": tokens / self.time.total / self.run.gpus,
        }


@dataclass(frozen=True)
class Recommendation:
    """The best layout with the reasons, and a comparison with the layout that the user gave, if any."""

    best: LayoutCandidate
    reasons: tuple[str, ...]
    considered: int  # layouts that megatron-core supports
    hardware: Hardware
    given: LayoutCandidate | None = None
    comparison: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {
            "recommended": self.best.as_dict(),
            "reasons": list(self.reasons),
            "layouts_considered": self.considered,
            "assumptions": vars(self.hardware) | {"notes": self.hardware.assumptions()},
            "given": None if self.given is None else self.given.as_dict(),
            "comparison": list(self.comparison),
        }


def recommend(
    model: PlannedModel, wanted: PlannedRun, hardware: Hardware, given: PlannedRun | None = None
) -> Recommendation:
    """Find the fastest layout for the GPUs, lengths, batch and optimizer of `wanted`, whose own layout is ignored.

    Args:
        given: a layout to compare with it.

    Raises:
        LayoutError: no layout divides the batch and the model, or `given` is not supported.
        ResourceError: no layout fits into the GPUs' memory.
    """
    if wanted.global_batch_size is None:
        raise SettingError("global_batch_size", "`recommend` needs it: it limits the data parallel size")
    wanted.check_values()
    named = None
    if given is not None:
        named = LayoutCandidate(given, memory_plan(model, given), step_time(model, given, hardware))
    dimensions = [name for name in _DIMENSIONS if model.dims.experts or name not in ("ep", "etp")]
    plain = replace(wanted, recompute="none")
    timed = [(step_time(model, run, hardware).total, run) for run in _runs(model, plain, hardware)]
    if not timed:
        raise LayoutError(
            "gpus",
            f"no layout of {model.name} divides {wanted.gpus} GPUs with "
            f"`global_batch_size={wanted.global_batch_size}` and "
            f"`seq_length={wanted.seq_length}`: choose numbers with more divisors",
        )
    search = _search(model, timed, hardware, dimensions)
    fits = [found for found in search.values() if isinstance(found, LayoutCandidate)]
    if named is not None and named.memory.peak.total <= hardware.memory:
        fits.append(named)  # which the search may have skipped
    if not fits:
        need = min(found for found in search.values() if isinstance(found, int))
        raise ResourceError(
            "gpus",
            f"none of {len(timed)} layouts of {model.name} fits into {wanted.gpus} GPUs of "
            f"{hardware.memory / GIB:.0f} GiB: the smallest needs {need / GIB:.0f} GiB per GPU: use more GPUs",
        )
    best = min(fits, key=lambda candidate: (candidate.time.total, candidate.memory.peak.total))
    return Recommendation(
        best,
        tuple(_reasons(best, search, dimensions, hardware)),
        len(timed),
        hardware,
        named,
        tuple(_comparison(best, named, dimensions, hardware)) if named is not None else (),
    )


def _search(
    model: PlannedModel, timed: list[tuple[float, PlannedRun]], hardware: Hardware, dimensions: list[str]
) -> dict[tuple[str, int], LayoutCandidate | int]:
    """The fastest run that fits for every value of every dimension, or the fewest bytes needed if none fits.

    `timed` are runs without recomputation, a lower bound of their time: runs that cannot beat any record are skipped.
    """
    records: dict[tuple[str, int], LayoutCandidate | int] = {}
    for seconds, run in sorted(timed, key=lambda pair: pair[0]):
        keys = [(name, value_of(run, name)) for name in dimensions]
        if all(isinstance(found := records.get(key), LayoutCandidate) and found.time.total <= seconds for key in keys):
            continue
        candidate, need = _fit(model, run, hardware)
        for key in keys:
            found = records.get(key)
            if candidate is None:
                if not isinstance(found, LayoutCandidate):
                    records[key] = need if found is None else min(found, need)
            elif not isinstance(found, LayoutCandidate) or candidate.time.total < found.time.total:
                records[key] = candidate
    return records


def value_of(run: PlannedRun, dimension: str) -> int:
    """The size of one dimension of a run."""
    if dimension in ("cp", "micro_batch_size"):
        return int(getattr(run, dimension))
    return run.layout.expert_tp if dimension == "etp" else int(getattr(run.layout, dimension))


def _runs(model: PlannedModel, wanted: PlannedRun, hardware: Hardware) -> Iterator[PlannedRun]:
    """All runs that megatron-core supports, without recomputation; tensor parallelism stays inside a node."""
    dims = model.dims
    for tp in _divisors(hardware.per_node):
        if dims.groups % tp or dims.heads % tp:
            continue
        for pp in _divisors(wanted.gpus // tp) if wanted.gpus % tp == 0 and not wanted.fsdp else (1,):
            if pp > dims.layers + 1:
                continue
            for cp in _powers(wanted.gpus // (tp * pp)):
                if wanted.gpus % (tp * pp * cp) or wanted.seq_length // cp < 1024 * (cp > 1):
                    continue
                for layout in _layouts(model, wanted, tp, pp):
                    yield from _batches(model, replace(wanted, layout=layout, cp=cp))


def _layouts(model: PlannedModel, wanted: PlannedRun, tp: int, pp: int) -> Iterator[Layout]:
    dims = model.dims
    expert_ranks = wanted.gpus // pp
    for ep in _divisors(dims.experts) if dims.experts else (1,):
        for etp in sorted({1, tp}) if dims.experts else (tp,):
            if expert_ranks % (ep * etp) or (dims.experts and ep * etp > 1 and ep == 1 and etp != tp):
                continue
            for vp in _virtual(dims.layers, pp):
                yield Layout(tp=tp, pp=pp, ep=ep, etp=etp if dims.experts else None, **_pipeline(dims.layers, pp, vp))


def _batches(model: PlannedModel, run: PlannedRun) -> Iterator[PlannedRun]:
    batch = run.global_batch_size or 1
    for micro in (1, 2, 4, 8):
        if batch % (micro * run.dp):
            continue
        trial = replace(run, micro_batch_size=micro)
        try:
            trial.check_layout(model)
        except DlmBridgeError:
            continue
        yield trial


def _virtual(layers: int, pp: int) -> list[int]:
    """Numbers of virtual chunks to try: at most five."""
    if pp == 1:
        return [1]
    most = -(-layers // pp)
    exact = [vp for vp in range(1, most + 1) if layers % (pp * vp) == 0 or (layers + 2) % (pp * vp) == 0]
    rounded = [vp for vp in (1, 2, 4, most) if pp * vp <= layers + 1]
    found = sorted({*exact, *rounded})
    return found if len(found) <= 5 else sorted({*found[:2], found[len(found) // 2], *found[-2:]})


def _pipeline(layers: int, pp: int, vp: int) -> dict[str, Any]:
    """Even chunks; where the layers do not divide, the last and the first chunk, which also have the output layer and
    the embedding, get fewer."""
    chunks = pp * vp
    if layers % chunks == 0:
        return {"vp": vp}
    fewer = chunks - layers % chunks
    order = [chunks - 1, 0, *range(chunks - 2, 0, -1)]
    short = set(order[:fewer])
    return {"pipeline": _text([layers // chunks + (chunk not in short) for chunk in range(chunks)])}


def _text(sizes: list[int]) -> str:
    """megatron-core's layout string, with equal chunks in a row written once: "Et|(t*2|)*30L"."""
    middle = "".join(f"({_letters(size)}|)*{len(list(run))}" for size, run in groupby(sizes[1:-1]))
    return f"E{_letters(sizes[0])}|{middle}{_letters(sizes[-1])}L"


def _letters(layers: int) -> str:
    return "t" * layers if layers < 2 else f"t*{layers}"


def _fit(model: PlannedModel, run: PlannedRun, hardware: Hardware) -> tuple[LayoutCandidate | None, int]:
    """The run with the least recomputation that fits, and the fewest bytes that any needs."""
    need = 0
    for recompute, all_modules in RECOMPUTATION:
        modules = tuple(module for module in all_modules if _has(model, module))
        if recompute == "selective" and not modules:
            continue
        if run.ep_overlap and (recompute == "full" or "moe" in modules):
            continue  # megatron-core does not recompute these with ep_overlap
        trial = replace(run, recompute=recompute, recompute_modules=modules)
        memory = memory_plan(model, trial, checked=True)
        need = min(need or memory.peak.total, memory.peak.total)
        if memory.peak.total <= hardware.memory:
            return LayoutCandidate(trial, memory, step_time(model, trial, hardware)), need
    return None, need


def _has(model: PlannedModel, module: str) -> bool:
    """True if the model has the module."""
    if module == "mla_up_proj":
        return model.latent_attention
    if module == "shared_experts":
        return model.dims.shared_ffn > 0
    if module == "mlp":
        return not model.dims.experts or bool(model.dims.dense_layers)
    return model.dims.experts > 0  # also "layernorm": other norms are fused with the linear layer after them


def _reasons(
    best: LayoutCandidate,
    search: dict[tuple[str, int], LayoutCandidate | int],
    dimensions: list[str],
    hardware: Hardware,
) -> Iterator[str]:
    for name in dimensions:
        chosen = value_of(best.run, name)
        tried = sorted(value for dimension, value in search if dimension == name)
        lower = [value for value in tried if value < chosen]
        higher = [value for value in tried if value > chosen]
        compared = [f"with {value} {_against(best, search[name, value])}" for value in (*lower[-1:], *higher[:1])]
        if compared:
            yield f"{_NAMES[name]} {chosen}: " + "; ".join(compared)
    run = best.run
    if run.recompute == "none":
        yield f"no recomputation: {best.memory.peak.total / GIB:.1f} of {hardware.memory / GIB:.0f} GiB are used"
    else:
        yield f"recomputation {_recomputed(run)}: with less of it the activations do not fit"
    yield f"data parallelism {run.dp}: what the other dimensions leave of {run.gpus} GPUs"


def _against(best: LayoutCandidate, other: LayoutCandidate | int) -> str:
    """Comparison with the best layout that has another value in one dimension."""
    if isinstance(other, int):
        return f"nothing fits (the smallest layout needs {other / GIB:.0f} GiB)"
    slower = other.time.total / best.time.total - 1
    if slower < 0.005:
        return f"the best takes as long ({other.memory.peak.total / GIB:.0f} GiB)"
    return f"the best is {100 * slower:.0f}% slower, by {_cause(best.time, other.time)}"


def _cause(best: StepTime, other: StepTime) -> str:
    name = max(_CAUSES, key=lambda cause: getattr(other, cause) - getattr(best, cause))
    return _CAUSES[name]


def _comparison(
    best: LayoutCandidate, given: LayoutCandidate, dimensions: list[str], hardware: Hardware
) -> Iterator[str]:
    """Differences between the given layout and the recommendation, and their effect."""
    peak = given.memory.peak.total
    if peak > hardware.memory:
        yield f"the given layout does not fit: {peak / GIB:.1f} GiB of {hardware.memory / GIB:.0f} GiB"
    else:
        yield f"the given layout fits: {peak / GIB:.1f} of {hardware.memory / GIB:.0f} GiB"
    differing = [
        f"{_NAMES[name]} {value_of(given.run, name)} -> {value_of(best.run, name)}"
        for name in dimensions
        if value_of(given.run, name) != value_of(best.run, name)
    ]
    if _recomputed(given.run) != _recomputed(best.run):
        differing.append(f"recomputation {_recomputed(given.run)} -> {_recomputed(best.run)}")
    if not differing:
        yield "it is the recommended one"
        return
    yield "given -> recommended: " + ", ".join(differing)
    a, b = given.time, best.time
    yield f"estimated step {a.total:.2f} s -> {b.total:.2f} s ({100 * (b.total / a.total - 1):+.0f}%)"
    for cause, words in _CAUSES.items():
        before, after = getattr(a, cause), getattr(b, cause)
        if abs(after - before) > 0.01 * a.total:
            yield f"{words}: {before:.2f} s -> {after:.2f} s"


def _recomputed(run: PlannedRun) -> str:
    return run.recompute if run.recompute != "selective" else "+".join(run.recompute_modules)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2
