"""A training loop on megatron-core's own parts: DistributedDataParallel, its optimizers, schedules and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.transformer.moe.moe_utils import track_moe_metrics

from dlm_bridge import Bridge, Layout
from dlm_bridge.parallel.attention import attention_mask, block_size
from dlm_bridge.parallel.core import (
    AsyncCallsQueue,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    OptimizerConfig,
    dist_checkpointing,
    finalize_model_grads,
    get_forward_backward_func,
    get_megatron_optimizer,
    parallel_state,
)
from dlm_bridge.parallel.parallelize import build_megatron_model
from tests.parallel.training_cases import ADAM, BATCH, CLIP, LENGTH, batch

CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


@dataclass(frozen=True)
class Setup:
    """How a model is trained."""

    layout: Layout = field(default_factory=Layout)
    dtype: str = "fp32"
    distributed: bool = False  # the distributed optimizer
    ddp: dict[str, Any] = field(default_factory=dict)  # DistributedDataParallelConfig
    model: dict[str, Any] = field(default_factory=dict)  # TransformerConfig
    optimizer: dict[str, Any] = field(default_factory=dict)  # OptimizerConfig


class Trainer:
    """A model with its optimizer; every process of the layout makes one."""

    def __init__(self, bridge: Bridge, setup: Setup) -> None:
        self.bridge, self.steps_done, self.updated = bridge, 0, False
        self.losses_counted = 0  # micro-batches of this rank since the auxiliary losses were last asked for
        self.gradient_norms: list[float] = []
        self.chunks = build_megatron_model(bridge.checkpoint, setup.layout, setup.dtype, **setup.model)
        self.config = self.chunks[0].config
        self.mask = attention_mask(
            bridge.family.attention_pattern, torch.arange(LENGTH)[None], block_size(bridge.checkpoint)
        )
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=setup.distributed, **setup.ddp
        )
        self.wrapped = [DistributedDataParallel(self.config, ddp, chunk).train() for chunk in self.chunks]
        optimizer = OptimizerConfig(
            lr=ADAM["lr"],
            weight_decay=ADAM["weight_decay"],
            adam_beta1=ADAM["betas"][0],
            adam_beta2=ADAM["betas"][1],
            adam_eps=ADAM["eps"],
            clip_grad=CLIP,
            bf16=self.config.bf16,
            fp16=self.config.fp16,
            params_dtype=self.config.params_dtype,
            use_distributed_optimizer=setup.distributed,
            overlap_param_gather=ddp.overlap_param_gather,
            **setup.optimizer,
        )
        self.optimizer = get_megatron_optimizer(optimizer, self.wrapped)
        for group in self.optimizer.param_groups:  # megatron-core leaves it to the scheduler of the learning rate
            group["weight_decay"] = ADAM["weight_decay"] * group["wd_mult"]
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        if ddp.overlap_grad_reduce:
            self.config.no_sync_func = _each([wrapped.no_sync for wrapped in self.wrapped])

    def train(self, steps: int) -> list[float]:
        """The loss of each step before its update, the same on every process."""
        return [self._step() for _ in range(steps)]

    def _step(self) -> float:
        tokens_BL, targets_BLV = batch(self.steps_done, self.bridge.dims.vocab)
        replicas = parallel_state.get_data_parallel_world_size()
        mine = range(parallel_state.get_data_parallel_rank(), BATCH, replicas)
        for wrapped in self.wrapped:
            wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        outputs = get_forward_backward_func()(
            forward_step_func=_forward(tokens_BL, targets_BLV, self.mask),
            data_iterator=_each([iter(mine) for _ in self.wrapped]),
            model=_each(self.wrapped),
            num_microbatches=len(mine),
            seq_length=LENGTH,
            micro_batch_size=1,
            forward_only=False,
        )
        self.updated, norm, _ = self.optimizer.step()
        self.gradient_norms.append(norm)
        self.steps_done += 1
        self.losses_counted += len(mine)
        # A stage without the loss adds nothing, and tensor parallel ranks hold parts of the vocabulary.
        loss = torch.tensor(sum(output["loss"] for output in outputs) / BATCH)
        dist.all_reduce(loss)
        return float(loss)

    def auxiliary_losses(self) -> dict[str, float]:
        """By name, the mean over layers and micro-batches since the last call; empty without experts."""
        if self.config.num_moe_experts is None:
            return {}
        total: dict[str, torch.Tensor] = {}
        track_moe_metrics(
            1 / self.losses_counted,
            self.steps_done,
            None,
            total_loss_dict=total,
            num_layers=self.config.num_layers,
            moe_layer_freq=self.config.moe_layer_freq,
        )
        self.losses_counted = 0
        # The others are means over the ranks already, the router's z-loss is each rank's own.
        means = torch.stack([total[name] for name in sorted(total)])
        dist.all_reduce(means)
        return dict(zip(sorted(total), (means / dist.get_world_size()).tolist(), strict=True))

    def weights(self) -> dict[str, torch.Tensor]:
        """The Hub's tensors, on every process."""
        self._gather_parameters()
        return {name: tensor.clone() for name, tensor in self.bridge.stream_hf_weights(self.wrapped)}

    def _gather_parameters(self) -> None:
        """Where their gathering overlaps the next forward pass, parameters are stale until then."""
        for wrapped in self.wrapped:
            if wrapped.ddp_config.overlap_param_gather:
                wrapped.start_param_sync(force_sync=True)

    def save(self, folder: Path, sharding: str = "", parallel: bool = False, asynchronous: bool = False) -> None:
        """All that a resume takes. `sharding` is of the distributed optimizer's state; `parallel` shares the writing
        among replicas."""
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        self._gather_parameters()
        strategy = get_default_save_sharded_strategy()
        if parallel:
            strategy = FullyParallelSaveStrategyWrapper(strategy, parallel_state.get_data_parallel_group())
        request = dist_checkpointing.save(
            self._state(sharding), str(folder), strategy, async_sharded_save=asynchronous, content_metadata=CONTENT
        )
        if asynchronous:
            queue = AsyncCallsQueue()
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)

    def load(self, folder: Path, sharding: str = "", parallel: bool = False) -> None:
        """What `save` wrote; `parallel` shares the reading."""
        strategy = get_default_load_sharded_strategy(str(folder))
        if parallel:
            strategy = FullyParallelLoadStrategyWrapper(strategy, parallel_state.get_data_parallel_group())
        state = dist_checkpointing.load(self._state(sharding, is_loading=True), str(folder), strategy)
        for i, chunk in enumerate(self.chunks):
            chunk.load_state_dict(state[f"model{i}"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps_done = state["steps_done"]

    def _state(self, sharding: str, is_loading: bool = False) -> dict[str, Any]:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        metadata = {**CONTENT, "dp_cp_group": group} | ({"distrib_optim_sharding_type": sharding} if sharding else {})
        state: dict[str, Any] = {
            f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(self.chunks)
        }
        state["optimizer"] = self.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
        return {**state, "steps_done": self.steps_done}


def _each(of_chunks: Sequence[Any]) -> Any:
    """What the schedules take: one thing a chunk, or the thing itself where there is one chunk."""
    return list(of_chunks) if len(of_chunks) > 1 else of_chunks[0]


def _forward(tokens_BL: torch.Tensor, targets_BLV: torch.Tensor, mask: torch.Tensor | None) -> Any:
    """Mean squared distance of logits and targets, one sample a micro-batch."""
    positions_BL = torch.arange(LENGTH)[None]

    def step(data: Iterator[int], model: Any) -> tuple[torch.Tensor, Any]:
        sample = next(data)
        output = model(tokens_BL[sample : sample + 1], positions_BL, mask)

        def loss(logits_BLV: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
            columns = logits_BLV.shape[-1]
            first = parallel_state.get_tensor_model_parallel_rank() * columns
            mine = targets_BLV[sample, :, first : first + columns]  # without padded columns
            distance = (logits_BLV[0, :, : mine.shape[-1]].float() - mine).square().sum() / targets_BLV[sample].numel()
            return distance, {"loss": distance.item()}  # the schedules scale the tensor in place

        return output, loss

    return step
