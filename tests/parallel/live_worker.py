"""One of the processes that compute with a live model, through megatron-core's own schedules and data parallelism.

python -m tests.parallel.live_worker FOLDER      with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlm_bridge import Bridge, Layout
from dlm_bridge.errors import LayoutError, MissingExtraError, SettingError
from dlm_bridge.parallel import groups
from dlm_bridge.parallel.attention import block_size
from dlm_bridge.parallel.batch import MicroBatch, micro_batch
from dlm_bridge.parallel.core import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    get_forward_backward_func,
    parallel_state,
)
from dlm_bridge.parallel.gpt import model_inputs
from dlm_bridge.parallel.mcore_patches.modules import patch_output_layer
from dlm_bridge.parallel.parallelize import build_megatron_model
from dlm_bridge.parallel.weights import live_tensors, load
from tests.groups import make_way
from tests.interop.cases import models
from tests.parallel.live_cases import CASES, ROWS, SAMPLES, TERMS, Case, Files, noisy_batch
from tests.processes import work
from tests.refusals import refused


def _build(files: Files, case: Case, **overrides: Any) -> tuple[Bridge, list[Any]]:
    make_way(case.layout)
    bridge = Bridge.from_hf(files.hub(case.model))
    chunks = build_megatron_model(bridge.checkpoint, case.layout, **case.overrides, **overrides)
    for chunk in chunks:
        if chunk.post_process:
            chunk.output_layer.accumulates = case.accumulates
    return bridge, chunks


def _micro_batches(bridge: Bridge, model: str) -> list[MicroBatch]:
    """Those of this data parallel replica; the second of all has no position with a loss, not even padding."""
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    found = []
    for number in range(replica, SAMPLES // ROWS, replicas):
        noisy = noisy_batch(model, range(number * ROWS, (number + 1) * ROWS))
        batch = micro_batch(noisy, bridge.family.attention_pattern, block_size(bridge.checkpoint))
        if number == 1:
            none = {name: getattr(batch, name)[:0] for name in ("loss_positions", "targets", "weights", "terms")}
            batch = dataclasses.replace(batch, **none)
        found.append(batch)
    return found


def _run(bridge: Bridge, chunks: list[Any], model: str, forward_only: bool = False) -> torch.Tensor:
    """[TERMS] the sums of the loss over the global batch, on every rank."""
    batches = _micro_batches(bridge, model)

    def step(data: Iterator[MicroBatch], chunk: Any) -> tuple[Any, Any]:
        def loss(output: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            torch.testing.assert_close(output[0].detach(), output[1].sum())
            return output[0], torch.zeros((), dtype=torch.int), output[1]

        return chunk(**model_inputs(next(data), TERMS)), loss

    several = len(chunks) > 1
    results = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(batches) for _ in chunks] if several else iter(batches),
        model=chunks if several else chunks[0],
        num_microbatches=len(batches),
        seq_length=models()[model].length,
        micro_batch_size=ROWS,
        forward_only=forward_only,
    )
    sums = torch.zeros(TERMS)
    if results and parallel_state.get_tensor_model_parallel_rank() == 0:
        sums += torch.stack(results).sum(dim=0)
    dist.all_reduce(sums)
    return sums


def loss_and_gradients_match(files: Files, name: str) -> None:
    case = CASES[name]
    bridge, chunks = _build(files, case, calculate_per_token_loss=True)
    wanted = torch.load(files.reference(case.model), weights_only=True)
    wrapped = [DistributedDataParallel(chunk.config, DistributedDataParallelConfig(), chunk) for chunk in chunks]
    torch.testing.assert_close(_run(bridge, wrapped, case.model, forward_only=True), wanted["sums"], rtol=1e-5, atol=0)
    torch.testing.assert_close(_run(bridge, wrapped, case.model), wanted["sums"], rtol=1e-5, atol=0)
    finalize_model_grads(wrapped)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data = parameter.main_grad
    found = {name: tensor.clone() for name, tensor in bridge.stream_hf_weights(wrapped)}
    # A router's bias has no gradient: it chooses experts and weighs nothing.
    assert found.keys() - wanted["gradients"].keys() == {name for name in found if name.endswith("expert_bias")}
    for name, gradient in wanted["gradients"].items():
        torch.testing.assert_close(found[name], gradient, atol=1e-4 * float(gradient.abs().max()), rtol=0, msg=name)


def padded_logits_are_never_sampled(files: Files) -> None:
    _, (chunk,) = _build(files, CASES["tp2"])
    ids = noisy_batch("odd_vocabulary", range(2)).input_ids
    logits = chunk(ids)
    assert (logits.shape[-1], logits.dtype) == (63, torch.float32)
    last = parallel_state.get_tensor_model_parallel_rank() == 1
    assert torch.equal(logits[..., 62].isneginf(), torch.full_like(ids, last, dtype=torch.bool))
    assert logits[..., :62].isfinite().all()
    gathered, _ = chunk.output_layer(torch.randn(4, 1, 64), runtime_gather_output=True)
    assert torch.equal(gathered[0, 0].isneginf().nonzero().flatten(), torch.tensor([125]))


def half_precision_gives_an_fp32_loss(files: Files) -> None:
    """And what the optimizer's fp32 main params start from is not rounded."""
    groups.destroy()
    bridge = Bridge.from_hf(files.hub("odd_vocabulary"))
    (chunk,) = build_megatron_model(bridge.checkpoint, Layout(tp=2), "bf16")
    weight = chunk.decoder.layers[0].self_attention.linear_qkv.weight
    exact = torch.zeros_like(weight, dtype=torch.float32)
    weight.get_high_precision_init_val = lambda: exact  # as Transformer Engine's FP8 weights have it
    load([chunk], bridge.checkpoint)
    assert torch.equal(exact.bfloat16(), weight)
    assert not torch.equal(exact, weight.float())
    sums = _run(bridge, [chunk.eval()], "odd_vocabulary", forward_only=True)
    wanted = torch.load(files.reference("odd_vocabulary"), weights_only=True)["sums"]
    assert sums.dtype == chunk(noisy_batch("odd_vocabulary", range(2)).input_ids).dtype == torch.float32
    torch.testing.assert_close(sums, wanted, rtol=2e-2, atol=0)


def hand_over_is_bitwise(files: Files, model: str) -> None:
    """Out, into a Hub model in place, and from that one again into another live model."""
    case = Case(model, Layout(tp=2, pp=2))
    bridge, chunks = _build(files, case)
    source = models()[model].tensors()
    _assert_same(dict(bridge.stream_hf_weights(chunks)), source)
    hf_model = bridge.build_hf_model()
    with torch.no_grad():
        for tensor in live_tensors(chunks).values():
            tensor.mul_(0.5)
    bridge.refresh_hf_model(hf_model, chunks)
    again = Bridge.from_model(hf_model)
    half = {name: tensor * 0.5 for name, tensor in source.items()}
    rebuilt = build_megatron_model(again.checkpoint, case.layout)
    _assert_same(dict(again.stream_hf_weights(rebuilt)), half)
    for chunk, other in zip(chunks, rebuilt, strict=True):
        for (name, one), two in zip(chunk.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(one, two), name


def every_layout_starts_from_the_same_values(files: Files) -> None:
    values = []
    for layout, dtype in ((Layout(tp=2, pp=2), None), (Layout(ep=2), None), (Layout(tp=2, ep=2), "bf16")):
        groups.destroy()
        bridge = Bridge.from_scratch(files.hub("llada2_moe"), seed=11)
        values.append(dict(bridge.stream_hf_weights(build_megatron_model(bridge.checkpoint, layout, dtype))))
    expected = {name: bridge.read(name) for name in bridge.hub_names()}
    _assert_same(values[0], expected)
    _assert_same(values[1], expected)
    own = {name for param in bridge.checkpoint.params if param.rule.own_dtype for name in param.hub_names}
    assert own
    _assert_same(values[2], {name: t if name in own else t.bfloat16() for name, t in expected.items()})


def parameters_are_ready_for_the_optimizer(files: Files) -> None:
    """megatron-core's norms, reductions and weight decay go by these attributes."""
    for name in ("tied-tp2-sp", "moe-ep2-tp2-sp", "tied-pp2"):
        case = CASES[name]
        _, chunks = _build(files, case)
        for chunk in chunks:
            for parameter_name, parameter in chunk.named_parameters():
                norm, router = "layernorm" in parameter_name, "router" in parameter_name
                expert = ".experts." in parameter_name
                head = "word_embeddings" in parameter_name or parameter_name.startswith("output_layer")
                place = f"{name}: {parameter_name}"
                cut = case.layout.tp > 1 and not norm and not router
                assert getattr(parameter, "tensor_model_parallel", False) is (not norm and not router), place
                if cut:
                    assert parameter.partition_dim == (1 if "proj" in parameter_name or "fc2" in parameter_name else 0)
                per_rank = (norm and "q_layer" not in parameter_name and "k_layer" not in parameter_name) or router
                assert getattr(parameter, "sequence_parallel", False) is (per_rank and case.layout.tp > 1), place
                assert getattr(parameter, "allreduce", True) is not expert, place
                assert getattr(parameter, "is_embedding_or_output_parameter", False) is head, place
                assert getattr(parameter, "shared_embedding", False) is (head and name == "tied-pp2"), place


def what_would_be_ignored_is_refused(files: Files) -> None:
    groups.destroy()
    bridge = Bridge.from_hf(files.hub("odd_vocabulary"))
    with refused(MissingExtraError, "gradient_accumulation_fusion"):
        build_megatron_model(bridge.checkpoint, Layout(tp=2), gradient_accumulation_fusion=True)
    with refused(SettingError, "mtp_num_layers", "1", "0"):
        build_megatron_model(bridge.checkpoint, Layout(tp=2), mtp_num_layers=1)
    with refused(SettingError, "megatron-core", "no_such_field"):
        build_megatron_model(bridge.checkpoint, Layout(tp=2), no_such_field=1)
    (chunk,) = build_megatron_model(bridge.checkpoint, Layout(tp=2))
    with refused(LayoutError, "tp", "2"):
        patch_output_layer(chunk.output_layer, 0)


def _assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def checks(files: Files) -> dict[str, Callable[[], None]]:
    """Every check in order, by its name in `test_live_model.NAMES`."""
    found: dict[str, Callable[[], None]] = {
        function.__name__: partial(function, files)
        for function in (
            padded_logits_are_never_sampled,
            half_precision_gives_an_fp32_loss,
            parameters_are_ready_for_the_optimizer,
            every_layout_starts_from_the_same_values,
            what_would_be_ignored_is_refused,
        )
    }
    for model in ("odd_vocabulary", "tied", "llada2_moe"):
        found[f"hand_over_is_bitwise[{model}]"] = partial(hand_over_is_bitwise, files, model)
    for name in CASES:
        found[f"loss_and_gradients_match[{name}]"] = partial(loss_and_gradients_match, files, name)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    work(Path(sys.argv[1]), checks(Files(Path(sys.argv[1]))).items())
    dist.destroy_process_group()
