"""Runs a live megatron-core model through its own pipeline schedules, and saves and loads it as Megatron-LM."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.pipeline_parallel import get_forward_backward_func

from dlm_bridge.errors import DlmBridgeError

OF_NORMS = re.compile(r"decoder\.(.+\.)?(final|q|k|input|pre_mlp)_layernorm\._extra_state")
CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


@contextmanager
def refused(*named: str) -> Iterator[None]:
    """Expect a DlmBridgeError whose message contains these words."""
    with pytest.raises(DlmBridgeError) as raised:
        yield
    for name in named:
        assert name in str(raised.value)


def run(
    chunks: list[Any],
    input_ids: torch.Tensor,
    vocab: int,
    weights: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute logits [B, S, V] on every rank, with one sample per micro-batch, each under `mask` (of one row). With
    `weights` [B, S, V], also run the backward pass of sum(logits * weights) / B into `.grad`."""
    batch, length = input_ids.shape
    tp_rank = parallel_state.get_tensor_model_parallel_rank()

    def samples() -> Iterator[int]:
        yield from range(batch)

    def step(data: Iterator[int], model: Any) -> tuple[torch.Tensor, Any]:
        sample = next(data)
        position_ids = torch.arange(length)[None]
        output = model(input_ids[sample : sample + 1], position_ids, mask)

        def loss(logits_BSV: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            if weights is None:
                return logits_BSV.sum(), {"logits": logits_BSV.detach()}
            columns = logits_BSV.shape[-1]
            mine = torch.nn.functional.pad(weights[sample], (0, columns))[
                :, tp_rank * columns : (tp_rank + 1) * columns
            ]
            return (logits_BSV * mine).sum(), {"logits": logits_BSV.detach()}

        return output, loss

    outputs = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[samples() for _ in chunks] if len(chunks) > 1 else samples(),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=batch,
        seq_length=length,
        micro_batch_size=1,
        forward_only=weights is None,
    )
    return _whole_logits([output["logits"] for output in outputs], batch, length)[..., :vocab]


def _whole_logits(local: list[torch.Tensor], batch: int, length: int) -> torch.Tensor:
    """Gather the last stage's vocabulary-parallel logits, and broadcast them to every stage."""
    group = parallel_state.get_tensor_model_parallel_group()
    last = parallel_state.get_pipeline_model_parallel_world_size() - 1
    box: list[Any] = [None]
    if local:
        mine = torch.cat(local)
        parts = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(parts, mine, group=group)
        box = [torch.cat(parts, dim=-1)]
    dist.broadcast_object_list(box, group=parallel_state.get_pipeline_model_parallel_group(), group_src=last)
    assert box[0].shape[:2] == (batch, length)
    return box[0]


def finalize_gradients(chunks: list[Any]) -> None:
    """Reduce gradients as megatron-core's `finalize_model_grads`, for parameters that tensor parallel ranks replicate
    but use on their own tokens or heads, and of experts, which see tokens of several replicas."""
    replicas = parallel_state.get_data_parallel_world_size() // parallel_state.get_expert_data_parallel_world_size()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if getattr(parameter, "sequence_parallel", False) or "q_layernorm" in name or "k_layernorm" in name:
                dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())
            if ".experts." in name:
                parameter.grad /= replicas


def save(chunks: list[Any], root: Path, iteration: int = 0) -> None:
    """Save as Megatron-LM: dist_checkpointing of the sharded state, and the tracker file."""
    folder = root / f"iter_{iteration:07d}"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    state = {**_sharded(chunks), "iteration": iteration, "checkpoint_version": 3.0}
    dist_checkpointing.save(state, str(folder), content_metadata=CONTENT)
    if dist.get_rank() == 0:
        (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    dist.barrier()


def load(chunks: list[Any], root: Path) -> None:
    """Load strictly: the checkpoint must contain exactly the model's tensors, and the norms' (empty) objects of the
    Transformer Engine spec."""
    iteration = (root / "latest_checkpointed_iteration.txt").read_text().strip()
    folder = root / (iteration if iteration == "release" else f"iter_{int(iteration):07d}")
    state, left_over, not_found = dist_checkpointing.load(
        _sharded(chunks), str(folder), strict=StrictHandling.RETURN_ALL
    )
    assert not not_found, not_found
    assert "decoder.final_layernorm._extra_state" in left_over
    assert all(OF_NORMS.fullmatch(name) for name in left_over), left_over
    for key, chunk in zip(_keys(chunks), chunks, strict=True):
        chunk.load_state_dict(state[key], strict=True)


def _keys(chunks: list[Any]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]


def _sharded(chunks: list[Any]) -> dict[str, Any]:
    metadata = {**CONTENT, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    return {key: chunk.sharded_state_dict(metadata=metadata) for key, chunk in zip(_keys(chunks), chunks, strict=True)}
