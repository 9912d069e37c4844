"""A live GPTModel as training needs it: explicit positions, packed documents, the loss of chosen positions only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.parallel import platform
from dlm_bridge.parallel.batch import MicroBatch
from dlm_bridge.parallel.core import (
    ColumnParallelLinear,
    GPTModel,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    tensor_parallel_layers,
)
from dlm_bridge.parallel.expert_dispatch import GatherDispatcher
from dlm_bridge.parallel.fused.attention import fuses_heads, rotary_table
from dlm_bridge.parallel.last_layer import LastLayer, rows_at
from dlm_bridge.parallel.output import Chosen, Shard, chosen_loss
from dlm_bridge.parallel.query_scaling import scales_queries, with_query_scale
from dlm_bridge.parallel.rotary import rotary_angles

# Settings of megatron-core that a forward pass of our own would not follow.
IGNORED = {
    "defer_embedding_wgrad_compute": "the output layer keeps no logits for later",
    "fused_single_qkv_rope": "the engine has a kernel of its own for it, where it can",
    "mtp_num_layers": "the engine builds no multi-token prediction layers",
    "overlap_moe_expert_parallel_comm": "that schedule has an output layer and a loss of its own",
}


def arguments(batch: MicroBatch, num_terms: int = 1) -> dict[str, Any]:
    """What a call takes of a micro-batch: `model(**arguments(batch))`, through any wrapper, on every pipeline stage.

    `num_terms` is the objective's number of sums.
    """
    return {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "attention_mask": batch.attention,
        "packed_seq_params": None if batch.packed is None else batch.packed.params(),
        "chosen": Chosen(batch.chosen, batch.targets, batch.weights, batch.terms, num_terms),
    }


class LiveModel(GPTModel):
    """One pipeline stage of a model; `vocab` is its true vocabulary, without padding. Arguments else as GPTModel's.
    Raises DlmBridgeError for a setting that it would not follow.

    It has the dtype of its parameters and is not to be wrapped in megatron-core's Float16Module, which would also cast
    what is fp32 on purpose: what the last stage returns is fp32 by itself.
    """

    def __init__(self, *args: Any, vocab: int, **kwargs: Any) -> None:
        with _without_apex():
            super().__init__(*args, **kwargs)
        for setting, reason in IGNORED.items():
            if getattr(self.config, setting):
                raise DlmBridgeError(f"{setting} would be ignored ({reason}): leave it off")
        GatherDispatcher.take_over(self)
        if self.post_process:
            OutputLayer.take_over(self.output_layer, vocab)
            for layer in self.decoder.layers[-1:]:
                LastLayer.take_over(layer, self.config)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        chosen: Chosen | None = None,
    ) -> Any:
        """This stage's hidden states; on the last stage logits, or the loss of the `chosen` positions.

        Args:
            input_ids: [B, S], of this context parallel rank.
            position_ids: [B or 1, S]; None for 0..S-1, or for those of `packed_seq_params`.
            attention_mask: what the layers' attention takes; see `parallel.attention`.
            packed_seq_params: megatron-core's PackedSeqParams.

        Returns:
            logits: [B, S, V / tp] fp32 of every position, -inf at padded columns.
            loss, sums: with `chosen`; see `output.chosen_loss`.
        """
        last = self._last_layer() if chosen is not None and len(chosen.positions) else None
        with nullcontext() if last is None or chosen is None else last.at(chosen.positions):
            hidden_SBH = super().forward(input_ids, position_ids, attention_mask, packed_seq_params=packed_seq_params)
        if not self.post_process:
            return hidden_SBH
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if chosen is not None:
            return self.output_layer(hidden_SBH, weight, chosen=chosen, whole=last is None)
        logits_SBV, _ = self.output_layer(hidden_SBH, weight)
        return logits_SBV.transpose(0, 1).contiguous().float()

    def _last_layer(self) -> LastLayer | None:
        """The layer that can give hidden states of chosen positions only; None where this stage has none."""
        found = [layer for layer in self.decoder.layers[-1:] if isinstance(layer, LastLayer)]
        return found[0] if found else None

    def _preprocess(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """megatron-core's embedding and rotary angles, but the angles of the positions that were given."""
        embedded, angles, *rest = super()._preprocess(*args, **kwargs)
        position_ids = kwargs["position_ids"]
        if position_ids is not None and (rotary := self._rotary()) is not None:
            one_row = self.config.apply_rope_fusion and not fuses_heads(self.config)
            angles = rotary_angles(rotary, position_ids, one_row)
        if scales_queries(self.config) and angles is not None:
            angles = with_query_scale(angles, position_ids, self.config)
        if fuses_heads(self.config) and angles is not None:
            angles = rotary_table(angles, self.config, kwargs["input_ids"].numel(), kwargs["packed_seq_params"])
        return embedded, angles, *rest

    def _rotary(self) -> Any:
        """The rotary embedding, which every layer of latent attention has for itself; None for a stage without any."""
        if not self.config.multi_latent_attention:
            return self.rotary_pos_emb
        return next((layer.self_attention.rotary_pos_emb.own for layer in self.decoder.layers), None)

    def _postprocess(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        """Nothing: `forward` knows what is asked of the hidden states."""
        return hidden_states


class OutputLayer(ColumnParallelLinear):
    """megatron-core's output layer, which besides logits of every position gives the loss of chosen ones.

    The loss is a call of this module too, because data parallelism and FSDP wait for a module's weights in its hooks.
    """

    shard: Shard
    accumulates: bool  # into `weight.main_grad`

    @classmethod
    def take_over(cls, layer: ColumnParallelLinear, vocab: int) -> None:
        """Make an OutputLayer of the layer that GPTModel has built, for a true vocabulary of `vocab` tokens.

        Raises DlmBridgeError where this rank would hold padding only.
        """
        rows, group = layer.output_size_per_partition, layer.tp_group
        first = group.rank() * rows
        if first >= vocab:
            raise DlmBridgeError(
                f"a vocabulary of {vocab} leaves tensor parallel rank {group.rank()} of {group.size()} without a "
                "token: choose a smaller --tp"
            )
        layer.__class__ = cls
        layer.shard = Shard(first, min(rows, vocab - first), group)
        layer.accumulates = layer.gradient_accumulation_fusion
        layer.gradient_accumulation_fusion = False  # of logits: that kernel is another library's

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        chosen: Chosen | None = None,
        whole: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As megatron-core's, with -inf at padded columns; with `chosen` the loss and its sums, as `chosen_loss`.

        `input_` is [S, B, H], under sequence parallelism of this rank's positions only; if not `whole`, [M, 1, H] of
        the chosen ones.
        """
        if chosen is None:
            return super().forward(input_, weight, runtime_gather_output)
        weight = self.weight if weight is None else weight
        hidden_MH = self._rows(input_, chosen.positions if whole else None)
        return chosen_loss(hidden_MH, weight, chosen, self.shard, self.accumulates)

    def _forward_impl(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """megatron-core's logits of this rank's columns, before they are gathered."""
        logits = super()._forward_impl(*args, **kwargs)
        if padding := self.output_size_per_partition - self.shard.tokens:
            logits = torch.nn.functional.pad(logits[..., :-padding], (0, padding), value=-torch.inf)
        return logits

    def _rows(self, hidden_SBH: torch.Tensor, positions_M: torch.Tensor | None) -> torch.Tensor:
        """[M, H] of the positions b * S + s (None: these they are); the gradients of the tensor parallel ranks are
        summed."""
        if self.sequence_parallel:  # the gather's backward sums
            assert positions_M is not None
            return rows_at(gather_from_sequence_parallel_region(hidden_SBH, group=self.tp_group), positions_M)
        hidden_MH = hidden_SBH.flatten(0, 1) if positions_M is None else rows_at(hidden_SBH, positions_M)
        return copy_to_tensor_model_parallel_region(hidden_MH, group=self.tp_group)


@contextmanager
def _without_apex() -> Iterator[None]:
    """Build layers where gradient_accumulation_fusion is on. megatron-core asks apex for it in its own linear layers;
    under Transformer Engine only the output layer is one of those, and ours does without."""
    available = tensor_parallel_layers._grad_accum_fusion_available
    tensor_parallel_layers._grad_accum_fusion_available = available or platform.current().uses_transformer_engine()
    try:
        yield
    except RuntimeError as error:
        if "gradient_accumulation_fusion" not in str(error):
            raise
        raise DlmBridgeError(
            "gradient_accumulation_fusion needs Transformer Engine: leave it off, or install it on a GPU"
        ) from error
    finally:
        tensor_parallel_layers._grad_accum_fusion_available = available
