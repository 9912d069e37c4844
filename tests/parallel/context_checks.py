"""What processes check about context parallelism: each case on one process against the Hub's model, then cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlm_bridge import Bridge, Layout
from dlm_bridge.errors import LayoutError, MissingExtraError, SettingError
from dlm_bridge.mapping.layout import ContextParallelConfig
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.parallel import groups, platform
from dlm_bridge.parallel.attention import block_size
from dlm_bridge.parallel.batch import MicroBatch, micro_batch
from dlm_bridge.parallel.core import get_forward_backward_func, parallel_state
from dlm_bridge.parallel.core_attention import MASKS
from dlm_bridge.parallel.handover import stream_hf_weights
from dlm_bridge.parallel.parallelize import build_megatron_model
from tests.parallel.context_cases import Case, context_models, hub
from tests.refusals import refused

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Tolerance:
    """Of the loss, relative; of each gradient, relative to its largest element."""

    dtype: torch.dtype
    loss: float
    gradient: float

    @classmethod
    def of(cls, case: Case) -> Tolerance:
        """Transformer Engine multiplies fp32 matrices in TF32, and its context parallelism takes half precision."""
        if platform.current().name == "cpu":
            return cls(torch.float32, 1e-5, 1e-4)
        return cls(torch.float32, 2e-3, 1e-2) if case.has_codes else cls(torch.bfloat16, 1e-2, 6e-2)


def cut_equals_whole(root: Path, case: Case, comm_type: str = "p2p", sizes: tuple[int, ...] | None = None) -> str:
    """Loss and every gradient of one process and of as many as there are, without recomputation and with each that the
    case names. Returns how far they were apart."""
    bridge = bridge_of(root, case)
    noisy = case.noisy()
    tolerance = Tolerance.of(case)
    loss, gradients = _trained(bridge, noisy, ContextParallelConfig(), tolerance.dtype)
    wanted = _hub_loss(bridge, case, noisy)
    assert abs(loss - wanted) <= tolerance.loss * abs(wanted), (loss, wanted)
    parallel = ContextParallelConfig(dist.get_world_size(), comm_type, sizes)
    worst = [0.0, 0.0]
    for recompute in (None, *case.recomputations):
        found, cut = _trained(bridge, noisy, parallel, tolerance.dtype, recompute)
        worst[0] = max(worst[0], abs(found - loss) / abs(loss))
        assert cut.keys() == gradients.keys()
        assert any(gradient.abs().max() > 0 for gradient in gradients.values())
        for name, gradient in gradients.items():
            apart = float((cut[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-6))
            assert apart <= tolerance.gradient, f"{name}, recompute {recompute}: {apart:.1e}"
            worst[1] = max(worst[1], apart)
    assert worst[0] <= tolerance.loss, worst
    return f"loss {worst[0]:.1e}, gradients {worst[1]:.1e}"


def bridge_of(root: Path, case: Case) -> Bridge:
    return Bridge.from_hf(hub(root, case.model), family=context_models()[case.model].family)


def micro_batches_in_flight(root: Path, packed: Case, whole: Case) -> None:
    """Two pipeline stages with several micro-batches, each with its own mask and positions, recomputed."""
    bridge = bridge_of(root, packed)
    batches = [micro_batch(case.noisy(), bridge.family.attention_pattern) for case in (packed, whole, packed, whole)]
    results = []
    for layout in (Layout(), Layout(pp=2)):
        groups.destroy()
        chunks = build_megatron_model(bridge.checkpoint, layout, torch.float32, **FULL)
        _through_the_schedule(chunks, batches)
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.data = parameter.grad
        results.append(dict(stream_hf_weights(bridge.checkpoint, chunks)))
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, atol=1e-5 * float(gradient.abs().max()), rtol=0)


def what_cannot_be_is_refused(root: Path, case: Case, window: Case, blocks: Case) -> None:
    bridge = bridge_of(root, case)

    def build(parallel: ContextParallelConfig, of: Bridge = bridge, layout: Layout | None = None) -> None:
        groups.destroy()
        build_megatron_model(of.checkpoint, layout or Layout(), parallel=parallel)

    with refused(LayoutError, "layout", "4", "2"):
        build(ContextParallelConfig(2), layout=Layout(tp=2))
    with refused(LayoutError, "layout", "cp 3"):
        build(ContextParallelConfig(3))
    with refused(LayoutError, "cp_comm_type", "a2a"):  # one query group for two ranks
        build(ContextParallelConfig(2, "a2a"), layout=Layout(tp=2))
    for parallel in (ContextParallelConfig(2, "a2a"), ContextParallelConfig(2, "a2a+p2p", (2, 1))):
        with refused(MissingExtraError, "cp_comm_type", str(parallel.cp_comm_type)):
            build(parallel)
    with refused(LayoutError, "cp_comm_type", "p2p", "allgather"):
        build(ContextParallelConfig(2), bridge_of(root, window))
    with pytest.MonkeyPatch.context() as patch:  # as if there were an engine that distributes heads
        patch.setattr(type(platform.current()), "uses_transformer_engine", lambda self: True)
        with refused(LayoutError, "cp_comm_type", "a2a"):
            build(ContextParallelConfig(2, "a2a"), bridge_of(root, blocks))
    groups.destroy()
    build_megatron_model(bridge.checkpoint, Layout(), parallel=ContextParallelConfig(2))
    with refused(LayoutError, "cp", "1", "2"):
        build_megatron_model(bridge.checkpoint, Layout())


def what_would_be_ignored_is_refused(root: Path, case: Case) -> None:
    bridge = bridge_of(root, case)
    groups.destroy()
    (model,) = build_megatron_model(bridge.checkpoint, Layout())
    batch = _cut(bridge, case.noisy())
    whole = micro_batch(case.noisy(), bridge.family.attention_pattern, packed=True)
    assert whole.packed is not None
    with refused(MissingExtraError, "packed_seq_params"):
        model(whole.input_ids, None, None, packed_seq_params=whole.packed.params())
    with refused(SettingError, "attention_mask", "[2, 20, 5]"):
        model(batch.input_ids, batch.position_ids, batch.attention_mask[:, :20])


def _trained(
    bridge: Bridge,
    noisy: NoisyBatch,
    parallel: ContextParallelConfig,
    dtype: torch.dtype,
    recompute: str | None = None,
) -> tuple[float, Gradients]:
    """The loss of the whole batch and its gradients, each rank having seen its part."""
    groups.destroy()
    MASKS.clear()
    (model,) = build_megatron_model(bridge.checkpoint, Layout(), dtype, parallel, **_recompute(recompute))
    batch = _cut(bridge, noisy).to(platform.current().device())
    loss = _loss(model.train(), batch)
    loss.backward()
    codes = batch.attention_mask is not None and batch.attention_mask.dim() == 3
    assert len(MASKS) == int(codes)  # one mask for all layers and their recomputation
    values = [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]
    for value in values:
        dist.all_reduce(value, group=parallel_state.get_context_parallel_group())
    gradients = {name: value.grad.float() for name, value in model.named_parameters() if value.grad is not None}
    return float(loss.detach()), gradients


def _recompute(kind: str | None) -> dict[str, Any]:
    if kind == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return FULL if kind == "full" else {}


def _cut(bridge: Bridge, noisy: NoisyBatch) -> MicroBatch:
    return micro_batch(
        noisy,
        bridge.family.attention_pattern,
        block_size(bridge.checkpoint),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_context_parallel_world_size(),
    )


def _loss(model: Any, batch: MicroBatch) -> torch.Tensor:
    logits_BSV = model(batch.input_ids, batch.position_ids, batch.attention_mask)
    return _weighted(logits_BSV, batch)


def _weighted(logits_BSV: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    logits_MV = logits_BSV.flatten(0, 1)[batch.loss_positions]
    return (torch.nn.functional.cross_entropy(logits_MV, batch.targets, reduction="none") * batch.weights).sum()


def _hub_loss(bridge: Bridge, case: Case, noisy: NoisyBatch) -> float:
    model = bridge.build_hf_model().float()
    positions = None if noisy.position_ids is None else noisy.position_ids.expand_as(noisy.input_ids)
    mask = noisy.model_mask()
    with torch.no_grad():
        logits_BSV = model(noisy.input_ids, attention_mask=mask, position_ids=positions).logits
    return float(case.objective.loss_sum(logits_BSV[noisy.mask], noisy).sum())


def _through_the_schedule(chunks: list[Any], batches: list[MicroBatch]) -> None:
    def step(data: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
        batch = next(data)
        output = model.train()(batch.input_ids, batch.position_ids, batch.attention_mask)

        def loss(logits_BSV: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            return _weighted(logits_BSV, batch), {}

        return output, loss

    rows, length = batches[0].input_ids.shape
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(batches),
        model=chunks[0],
        num_microbatches=len(batches),
        seq_length=length,
        micro_batch_size=rows,
        forward_only=False,
    )
