"""Replacements of megatron-core's modules: for layer specs first, then class swaps and patches of built modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from dlm_bridge.attention.masks import MaskColumn
from dlm_bridge.errors import LayoutError, MissingExtraError
from dlm_bridge.objectives.linear_cross_entropy import LossPositions, VocabShard, linear_cross_entropy
from dlm_bridge.parallel import mcore_compat, platform
from dlm_bridge.parallel.core import (
    ColumnParallelLinear,
    MoEAllGatherTokenDispatcher,
    MultiTokenPredictionLayer,
    RowParallelLinear,
    TopKRouter,
    TransformerConfig,
    TransformerLayer,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    multi_latent_attention,
    parallel_state,
    reduce_scatter_to_sequence_parallel_region,
    tensor_parallel_layers,
)
from dlm_bridge.parallel.mcore_patches import is_needed


class LocalRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, which megatron-core wraps too, with support for sequence parallelism: each rank normalises its
    own tokens, and `weight.sequence_parallel` makes megatron-core sum the gradient over tensor parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=platform.current().device(), dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 (unknown to torch)


class LocalHeadNorm(LocalRMSNorm):
    """Norm of each query and key head. A rank has whole sequences of its own heads, so the norm is not sequence
    parallel; megatron-core sums the gradients over tensor parallel ranks by the modules' names."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(config, hidden_size, eps, **kwargs)
        setattr(self.weight, "sequence_parallel", False)  # noqa: B010


class LocalRouter(TopKRouter):
    """megatron-core's router in plain torch. Its own matrix product is undefined without Transformer Engine."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Logits [S, B, E] of hidden states [S, B, H], in `moe_router_dtype` if it is set."""
        dtype = {"fp32": torch.float32, "fp64": torch.float64, None: input.dtype}[self.config.moe_router_dtype]
        bias = None if self.bias is None else self.bias.to(dtype)
        return torch.nn.functional.linear(input.to(dtype), self.weight.to(dtype), bias)

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Count tokens per expert; megatron-core compiles these two lines, which takes seconds."""
        if self.enable_expert_bias and torch.is_grad_enabled():
            with torch.no_grad():
                real = routing_map if padding_mask is None else routing_map & ~padding_mask
                self.local_tokens_per_expert += real.sum(dim=0)


class BlockRouter(LocalRouter):
    """LLaDA2.2's router: a block's tokens choose among the experts with the highest scores in the block, where an
    expert's score is its maximum over the block's tokens. See `models.modeling_llada2_moe.LLaDA2MoeBlockRouter`.

    A hook of the layer sets `descriptor`, which identifies blocks: a block's tokens attend to the same keys.
    """

    descriptor: torch.Tensor | None = None  # [B or 1, S, 5], see `attention_mask.MaskDescriptor`

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert weights [N, E] of this tensor parallel rank's tokens, and the bool map [N, E] of chosen experts, from
        logits [S / tp, B, E]."""
        config, rank = self.config, parallel_state.get_tensor_model_parallel_rank()
        assert self.descriptor is not None
        scores_NE = self.apply_z_loss(logits.flatten(0, 1), padding_mask=padding_mask).sigmoid()
        with torch.no_grad():
            choice_SBE = scores_NE.view_as(logits) + self.expert_bias
            whole_SBE = gather_from_sequence_parallel_region(choice_SBE) if config.sequence_parallel else choice_SBE
            blocks_BS = routing_runs(self.descriptor.expand(logits.shape[1], -1, -1))
            blocks_N = blocks_BS.T.flatten()
            best_NE = torch.full_like(whole_SBE, -torch.inf).flatten(0, 1)
            best_NE.scatter_reduce_(0, blocks_N[:, None].expand_as(best_NE), whole_SBE.flatten(0, 1), "amax")
            pool_NC = best_NE.topk(getattr(config, BLOCK_ROUTING_CAPACITY), dim=-1).indices
            allowed_NE = torch.zeros_like(best_NE, dtype=torch.bool).scatter(1, pool_NC, True)
            first = rank * len(scores_NE) if config.sequence_parallel else 0
            allowed_NE = allowed_NE[blocks_N[first : first + len(scores_NE)]]
            experts_NK = choice_SBE.flatten(0, 1).masked_fill(~allowed_NE, -torch.inf).topk(self.topk, dim=-1).indices
        weights_NK = scores_NE.gather(1, experts_NK)
        weights_NK = (
            weights_NK / (weights_NK.sum(dim=-1, keepdim=True) + 1e-20) * config.moe_router_topk_scaling_factor
        )
        probs_NE = torch.zeros_like(scores_NE).scatter(1, experts_NK, weights_NK)
        map_NE = torch.zeros_like(scores_NE, dtype=torch.bool).scatter(1, experts_NK, True)
        self._apply_expert_bias(map_NE, padding_mask)
        return probs_NE, map_NE


BLOCK_ROUTING_CAPACITY = "block_routing_capacity"  # attribute of a TransformerConfig


def routing_runs(descriptor_BSC: torch.Tensor) -> torch.Tensor:
    """Run numbers [B, S]: a run is consecutive positions that attend to the same keys."""
    columns = [MaskColumn.DOCUMENT, MaskColumn.NOISY_BLOCK, MaskColumn.NOISY_LIMIT, MaskColumn.CLEAN_LIMIT]
    codes = descriptor_BSC[..., columns]
    begins_BS = torch.ones_like(codes[..., 0], dtype=torch.bool)
    begins_BS[:, 1:] = (codes[:, 1:] != codes[:, :-1]).any(dim=-1)
    return begins_BS.flatten().cumsum(dim=0).view_as(begins_BS) - 1


def show_blocks_to_routers(layers: Sequence[nn.Module]) -> None:
    """Register hooks that pass the batch's mask descriptor to the `BlockRouter` of each layer that has one, before the
    layer runs; with full recomputation before each run."""

    def show(router: BlockRouter, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        router.descriptor = kwargs["attention_mask"] if "attention_mask" in kwargs else args[1]

    for layer in layers:
        router = getattr(getattr(layer, "mlp", None), "router", None)
        if isinstance(router, BlockRouter):
            layer.register_forward_pre_hook(partial(show, router), with_kwargs=True)


class ReplicatedLinear(torch.nn.Module):
    """Linear layer replicated on every tensor parallel rank, like Transformer Engine's with `parallel_mode`
    "duplicated". Under sequence parallelism each rank has its own tokens: `weight.sequence_parallel` makes
    megatron-core sum the gradient over the ranks."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], Any],
        **_: Any,
    ) -> None:
        super().__init__()
        self.config = config
        device = platform.current().device()
        self.weight = torch.nn.Parameter(
            torch.empty(output_size, input_size, device=device, dtype=config.params_dtype)
        )
        init_method(self.weight)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 (unknown to torch)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The product, and None for the bias."""
        return torch.nn.functional.linear(input_, self.weight), None

    def get_extra_state(self) -> None:
        """None, so that checkpoints have the same keys as with Transformer Engine's layer."""

    def set_extra_state(self, state: Any) -> None:
        """Ignore the state of Transformer Engine's layer."""


@contextmanager
def patched_latent_linear() -> Iterator[None]:
    """Context manager that builds layers with `ReplicatedLinear` if Transformer Engine is not used: megatron-core
    looks up its linear class by a name that is then None."""
    theirs = multi_latent_attention.TELinear
    if not platform.current().uses_transformer_engine():
        multi_latent_attention.TELinear = ReplicatedLinear
    try:
        yield
    finally:
        multi_latent_attention.TELinear = theirs


class TransformerEngineActivation:
    """Transformer Engine's activation for `use_te_activation_func`, without a state in checkpoints.

    A class, because megatron-core interprets a function in a layer spec as the activation itself.
    """

    def __new__(cls, config: Any) -> Any:
        return stateless(_te_activation(config))


def _te_activation(config: Any) -> nn.Module:
    from megatron.core.extensions.transformer_engine import TEActivationOp

    operation: nn.Module = TEActivationOp(config)
    return operation


def stateless(module: nn.Module) -> nn.Module:
    """Replace the class of a module without parameters by one with an empty state.

    megatron-core calls `sharded_state_dict` of every module of a feed-forward, which Transformer Engine's operations
    lack. Their extra state belongs to a quantisation that is not used, and loading a checkpoint would require it.
    """
    module.__class__ = _stateless(type(module))  # type: ignore[arg-type]  # types as cache keys
    return module


@cache
def _stateless(kind: type[nn.Module]) -> type[nn.Module]:
    def sharded_state_dict(self: nn.Module, *_: Any, **__: Any) -> dict[str, Any]:
        return {}

    body = {
        "sharded_state_dict": sharded_state_dict,
        # torch compares these with its own to detect an extra state.
        "get_extra_state": nn.Module.get_extra_state,
        "set_extra_state": nn.Module.set_extra_state,
    }
    return type(kind.__name__, (kind,), body)


class AllGatherDispatcher(MoEAllGatherTokenDispatcher):
    """Token dispatch by one all-gather: every rank receives every token and selects those of its own experts.

    With k experts per token and n ranks, an all-to-all moves k (n - 1) / n copies of each token, an all-gather n - 1:
    fewer if n < k. megatron-core's dispatcher waits twice per layer for the number of tokens, after they were
    gathered, and sums results in the router's dtype. Here the counts are copied to the CPU while tokens are gathered.
    """

    routing_map: Any  # [T, E] bool for this rank's tokens, then [T * ranks, E] for all

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather hidden states [T * ranks, H] and expert weights [T * ranks, E] of all ranks' tokens."""
        several = self.tp_size > 1 or self.ep_size > 1
        if several:
            with torch.no_grad():
                self.routing_map = gather_from_sequence_parallel_region(self.routing_map, group=self.tp_ep_group)
        own = slice(self.local_expert_indices[0], self.local_expert_indices[-1] + 1)
        self.local_map = self.routing_map[:, own].contiguous()
        self._counts = _AsyncCounts(self.local_map.sum(dim=0))
        if several:
            probs = gather_from_sequence_parallel_region(probs, group=self.tp_ep_group)
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=self.tp_ep_group)
        return hidden_states, probs[:, own].contiguous()

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states, token counts and weights of this rank's experts, sorted by expert."""
        self.hidden_shape_before_permute = hidden_states.shape
        counts = self._counts.read()
        permuted, weights, self.reversed_local_input_permutation_mapping = mcore_compat.permute(
            hidden_states,
            self.local_map,
            probs=probs,
            num_out_tokens=int(counts.sum()),
            fused=self.config.moe_permute_fusion,
        )
        self.routing_map = None
        return permuted, counts, weights

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Sum the hidden states [T, H] of this rank's tokens over all ranks' experts."""
        if self.tp_size > 1 or self.ep_size > 1:
            hidden_states = reduce_scatter_to_sequence_parallel_region(hidden_states, group=self.tp_ep_group)
        return hidden_states


class _AsyncCounts:
    """Asynchronous copy of counts to the CPU; reading them does not wait for kernels launched later."""

    def __init__(self, counts: torch.Tensor) -> None:
        self._event: Any = None
        if counts.is_cuda:
            self._values = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
            self._values.copy_(counts, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._values = counts

    def read(self) -> torch.Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._values


def patch_token_dispatchers(model: torch.nn.Module) -> None:
    """Replace every all-gather dispatcher of a model by an `AllGatherDispatcher`."""
    for module in model.modules():
        dispatcher = getattr(module, "token_dispatcher", None)
        if type(dispatcher) is MoEAllGatherTokenDispatcher:
            dispatcher.__class__ = AllGatherDispatcher


def patch_expert_biases(model: torch.nn.Module) -> None:
    """Make experts with biases trainable; they are never tensor parallel.

    An expert layer adds its bias in place to the result of a reduction over its single rank, which autograd refuses:
    the reduction is skipped. Tensor parallel ranks are data or expert parallel ranks of the experts: a bias' gradient
    is not summed over them again, and each rank's gradient counts in the norm, like a weight's.
    """
    for module in model.modules():
        if isinstance(module, RowParallelLinear) and module.is_expert and module.bias is not None:
            module.explicit_expert_comm = True
    for name, parameter in model.named_parameters():
        if ".experts." in name and ".bias" in name:
            setattr(parameter, "sequence_parallel", False)  # noqa: B010 (unknown to torch)
            setattr(parameter, "tensor_model_parallel", True)  # noqa: B010


class PredictionLayer(MultiTokenPredictionLayer):
    """Multi-token prediction layer for given tokens. megatron-core's layer shifts each rank's part of a row by one
    token, across document boundaries."""

    def _get_embeddings(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        embedding: Callable[..., torch.Tensor],
        hidden_states: torch.Tensor,
        packed_seq_params: Any = None,
        padding_mask: torch.Tensor | None = None,
    ) -> tuple[Any, ...]:
        """Embeddings of the first of the `input_ids` [D, B, S], which is this depth's, and the remaining ids."""
        embedded = embedding(input_ids[0], position_ids)
        return mcore_compat.prediction_inputs(input_ids[1:], position_ids, padding_mask, embedded, hidden_states)


class LossPositionsLayer(TransformerLayer):
    """Last layer, whose feed-forward computes only the rows of `positions` if they are set. It is not recorded in a
    CUDA graph, because their number changes between steps."""

    positions: torch.Tensor | None = None  # [M] int64, b * S + s, during a forward pass

    @contextmanager
    def at(self, positions: torch.Tensor) -> Iterator[None]:
        """Context manager in which forward passes compute the feed-forward at `positions` [M]."""
        self.positions = positions
        try:
            yield
        finally:
            self.positions = None

    def _forward_mlp(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Hidden states [S, B, H], or [M, 1, H] with `positions`."""
        if self.positions is not None:
            hidden_states = rows_at(hidden_states, self.positions)[:, None]
        return super()._forward_mlp(hidden_states, *args, **kwargs)


def patch_last_layer(layer: Any, config: TransformerConfig) -> None:
    """Convert a layer built by GPTModel to a `LossPositionsLayer` if possible.

    It is not possible with sequence parallelism (ranks would have different numbers of rows), with experts (the loss
    depends on the tokens that each receives), or with full recomputation (a layer is recomputed when another
    micro-batch's positions are set).
    """
    if (
        type(layer) is TransformerLayer
        and not layer.is_moe_layer
        and not config.sequence_parallel
        and config.recompute_granularity != "full"
    ):
        layer.__class__ = LossPositionsLayer
        if hasattr(layer, "cudagraph_manager"):
            del layer.cudagraph_manager


def rows_at(hidden_SBH: torch.Tensor, positions_M: torch.Tensor) -> torch.Tensor:
    """Select hidden states [M, H] at the positions b * S + s."""
    length, batch, size = hidden_SBH.shape
    if batch > 1:
        positions_M = positions_M % length * batch + positions_M // length
    return hidden_SBH.reshape(-1, size).index_select(0, positions_M)


class OutputLayer(ColumnParallelLinear):
    """megatron-core's output layer, which can also compute the loss at the loss positions.

    The loss is computed by a call of this module, because data parallelism and FSDP wait for a module's weights in its
    hooks.
    """

    shard: VocabShard
    accumulates: bool  # into `weight.main_grad`

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        loss_positions: LossPositions | None = None,
        selected: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits, minus infinity in padded columns; with `loss_positions` the loss and its sums, as in
        `linear_cross_entropy`.

        Args:
            input_: [S, B, H], with sequence parallelism this rank's positions; [M, 1, H] if `selected`.
            selected: `input_` contains only the loss positions.
        """
        if loss_positions is None:
            return super().forward(input_, weight, runtime_gather_output)
        weight = self.weight if weight is None else weight
        hidden_MH = self._rows(input_, None if selected else loss_positions.positions)
        return linear_cross_entropy(hidden_MH, weight, loss_positions, self.shard, self.accumulates)

    def _forward_impl(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Logits of this rank's columns, before they are gathered."""
        logits = super()._forward_impl(*args, **kwargs)
        if padding := self.output_size_per_partition - self.shard.tokens:
            logits = torch.nn.functional.pad(logits[..., :-padding], (0, padding), value=-torch.inf)
        return logits

    def _rows(self, hidden_SBH: torch.Tensor, positions_M: torch.Tensor | None) -> torch.Tensor:
        """Select hidden states [M, H] at the positions b * S + s (None: all rows). Gradients are summed over the
        tensor parallel ranks."""
        if self.sequence_parallel:  # the backward pass of the gather sums
            assert positions_M is not None
            return rows_at(gather_from_sequence_parallel_region(hidden_SBH, group=self.tp_group), positions_M)
        hidden_MH = hidden_SBH.flatten(0, 1) if positions_M is None else rows_at(hidden_SBH, positions_M)
        return copy_to_tensor_model_parallel_region(hidden_MH, group=self.tp_group)


def patch_output_layer(layer: ColumnParallelLinear, vocab: int) -> None:
    """Convert the output layer built by GPTModel to an `OutputLayer` for an unpadded vocabulary of `vocab` tokens.
    Raises LayoutError if this rank would hold only padding."""
    rows, group = layer.output_size_per_partition, layer.tp_group
    first = group.rank() * rows
    if first >= vocab:
        raise LayoutError(
            "tp", f"{group.size()} leaves rank {group.rank()} without a token of the vocabulary of {vocab}: use less"
        )
    layer.__class__ = OutputLayer
    layer.shard = VocabShard(first, min(rows, vocab - first), group)
    layer.accumulates = layer.gradient_accumulation_fusion
    layer.gradient_accumulation_fusion = False  # for logits, where it would need apex


@contextmanager
def patched_gradient_accumulation() -> Iterator[None]:
    """Context manager that allows layers with gradient_accumulation_fusion. megatron-core's own linear layers need
    apex for it; with Transformer Engine the output layer is the only one, and `OutputLayer` does not use it."""
    available = tensor_parallel_layers._grad_accum_fusion_available
    tensor_parallel_layers._grad_accum_fusion_available = available or platform.current().uses_transformer_engine()
    try:
        yield
    except RuntimeError as error:
        if "gradient_accumulation_fusion" not in str(error):
            raise
        raise MissingExtraError(
            "gradient_accumulation_fusion", "needs Transformer Engine: unset it, or install it on a GPU"
        ) from error
    finally:
        tensor_parallel_layers._grad_accum_fusion_available = available


def patch_grouped_linear_state(chunks: Sequence[Any]) -> None:
    """Make layers of grouped experts savable if their FP8 recipe has no state: megatron-core would split Transformer
    Engine 2.20's empty state."""
    for chunk in chunks if is_needed(patch_grouped_linear_state) else ():
        for module in chunk.modules():
            if hasattr(module, "_split_extra_state"):
                module._split_extra_state = partial(_split_extra_state, module)


def release_cuda_graphs() -> None:
    """Delete all CUDA graphs and the memory that they share, so that another model can be recorded: megatron-core has
    one list of graphs per process, for one model."""
    from megatron.core.transformer import cuda_graphs

    cuda_graphs.delete_cuda_graphs()
    if is_needed(release_graph_buffers):
        release_graph_buffers(cuda_graphs._CudagraphGlobalRecord.tensor_reuse_pool)


def release_graph_buffers(pool: Any) -> None:
    """Release the buffers in the pool that CUDA graphs share."""
    for references in (pool.pool, pool.tensor_strong_refs, pool.tensor_strong_refs_dataptrs):
        references.clear()


def _split_extra_state(module: Any, state: Any) -> list[Any]:
    if state is None or (isinstance(state, torch.Tensor) and state.numel() == 0):
        return [state] * module.num_gemms
    parts: list[Any] = type(module)._split_extra_state(module, state)
    return parts
