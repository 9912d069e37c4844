"""megatron-core's GPTModel with explicit positions, packed documents, and a loss at the loss positions only."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from dlm_bridge.errors import SettingError
from dlm_bridge.objectives.linear_cross_entropy import LossPositions
from dlm_bridge.parallel.batch import MicroBatch, Prediction
from dlm_bridge.parallel.core import GPTModel, parallel_state
from dlm_bridge.parallel.mcore_compat import PREDICTED_LAYER
from dlm_bridge.parallel.mcore_patches.modules import (
    LossPositionsLayer,
    patch_expert_biases,
    patch_last_layer,
    patch_output_layer,
    patch_token_dispatchers,
    patched_gradient_accumulation,
    show_blocks_to_routers,
)
from dlm_bridge.parallel.self_attention import (
    fuses_heads,
    rotary_angles,
    rotary_table,
    scales_queries,
    with_query_scale,
)
from dlm_bridge.parallel.value_head import ValueHead
from dlm_bridge.parallel.weights import AbsentWeights

# Settings of megatron-core that this forward pass would ignore.
IGNORED_SETTINGS = {
    "defer_embedding_wgrad_compute": "the output layer does not store logits",
    "fused_single_qkv_rope": "the engine uses its own fused kernel",
}


@dataclass
class DeferredLoss:
    """Loss positions of a micro-batch in a schedule plan, and the sums of its loss once it has run."""

    loss_positions: LossPositions
    sums: torch.Tensor | None = None


def model_inputs(batch: MicroBatch, num_terms: int = 1, summed: bool = True) -> dict[str, Any]:
    """Keyword arguments of a forward pass, `model(**model_inputs(batch))`, on every pipeline stage and through any
    wrapper.

    Args:
        num_terms: number of the objective's loss terms.
        summed: as in `LossPositions`.
    """
    return {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "attention_mask": batch.attention_mask,
        "packed_seq_params": None if batch.packed is None else batch.packed.params(),
        "loss_positions": LossPositions(
            batch.loss_positions,
            batch.targets,
            batch.weights,
            batch.terms,
            num_terms,
            batch.noise,
            batch.certainty,
            batch.z_weights,
            summed,
            batch.rows,
            len(batch.input_ids),
            None if batch.rows is None else parallel_state.get_context_parallel_group(),
        ),
        "predictions": batch.predictions,
    }


class BridgeGPTModel(GPTModel):
    """One virtual pipeline stage.

    Do not wrap it in megatron-core's Float16Module, which would also cast tensors that are fp32 on purpose; the last
    stage's output is fp32 anyway.

    Args:
        vocab: vocabulary size without padding.
        value_head: the last stage has a `ValueHead` instead of the output layer.
        args, kwargs: arguments of GPTModel.

    Raises SettingError for a setting that the model would ignore.
    """

    absent: AbsentWeights | None = None  # weights to load before the model is used
    _next_ids: torch.Tensor | None = None  # [D, B, S] during a forward pass, for multi-token prediction layers

    def __init__(self, *args: Any, vocab: int, value_head: bool = False, **kwargs: Any) -> None:
        with patched_gradient_accumulation():
            super().__init__(*args, **kwargs)
        for setting, reason in IGNORED_SETTINGS.items():
            if getattr(self.config, setting):
                raise SettingError(setting, f"would be ignored ({reason}): unset it")
        self._scales_queries, self._fuses_heads = scales_queries(self.config), fuses_heads(self.config)
        patch_token_dispatchers(self)
        patch_expert_biases(self)
        show_blocks_to_routers(self.decoder.layers)
        if self.post_process:
            if value_head:
                self.output_layer = ValueHead(self.config)
            else:
                patch_output_layer(self.output_layer, vocab)
            for layer in [] if self.mtp_process else self.decoder.layers[-1:]:
                patch_last_layer(layer, self.config)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        loss_positions: LossPositions | None = None,
        predictions: Sequence[Prediction] = (),
    ) -> Any:
        """Hidden states of this stage; on the last stage logits, or the loss at the `loss_positions`.

        Args:
            input_ids: [B, S], this context parallel rank's part.
            position_ids: [B or 1, S]; None for 0..S-1, or for the positions in `packed_seq_params`.
            attention_mask: mask descriptor or dense mask, see `parallel.attention`.
            packed_seq_params: megatron-core's PackedSeqParams.
            predictions: inputs and targets of the multi-token prediction layers, if any. In training mode their loss
                is part of the loss.

        Returns:
            logits: [B, S, V / tp] fp32 at every position, -inf in padded columns.
            loss, sums: with `loss_positions`; see `linear_cross_entropy` and `ValueHead.forward`. With multi-token
                prediction the loss is L + factor / D (L_1 + ... + L_D) for D depths (DeepSeek-V3, arXiv 2412.19437,
                section 2.2), and the last of the sums is (L_1 + ... + L_D) / D.
        """
        predicts = self.mtp_process and self.training and loss_positions is not None
        self._next_ids = torch.stack([each.input_ids for each in predictions]) if predicts else None
        last = self._loss_positions_layer() if loss_positions is not None and len(loss_positions.positions) else None
        with nullcontext() if last is None or loss_positions is None else last.at(loss_positions.positions):
            hidden_SBH = super().forward(input_ids, position_ids, attention_mask, packed_seq_params=packed_seq_params)
        if not self.post_process:
            return hidden_SBH
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if loss_positions is not None and predicts:
            hidden_SBH, *of_depths = hidden_SBH.chunk(1 + len(predictions))
            loss, sums = self.output_layer(hidden_SBH, weight, loss_positions=loss_positions)
            return self._with_predictions(loss, sums, of_depths, predictions, weight)
        if loss_positions is not None:
            return self.output_layer(hidden_SBH, weight, loss_positions=loss_positions, selected=last is not None)
        logits_SBV, _ = self.output_layer(hidden_SBH, weight)
        return logits_SBV.transpose(0, 1).contiguous().float()

    def build_schedule_plan(  # type: ignore[override, unused-ignore]
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        loss_positions: LossPositions | None = None,
        predictions: Sequence[Prediction] = (),
    ) -> Any:
        """megatron-core's plan of a training forward and backward pass, layer by layer, which overlaps with another
        micro-batch's (`overlap_moe_expert_parallel_comm`). Arguments as in `forward`, without `predictions`. The last
        stage stores the sums of its loss in the plan's `state.labels`, a `DeferredLoss`."""
        assert loss_positions is not None
        assert not predictions
        return super().build_schedule_plan(
            input_ids,
            position_ids,
            attention_mask,
            labels=DeferredLoss(loss_positions),
            packed_seq_params=packed_seq_params,
        )

    def _with_predictions(
        self,
        loss: torch.Tensor,
        sums: torch.Tensor,
        of_depths: Sequence[torch.Tensor],
        predictions: Sequence[Prediction],
        weight: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the loss of each depth's hidden states [S, B, H] to the loss, and append their mean to the sums."""
        mean = torch.zeros_like(sums[:1])
        for hidden_SBH, each in zip(of_depths, predictions, strict=True):
            positions = LossPositions(each.loss_positions, each.targets, each.weights)
            more, sum_1 = self.output_layer(hidden_SBH, weight, loss_positions=positions)
            loss = loss + more * (self.config.mtp_loss_scaling_factor / len(predictions))
            mean = mean + sum_1 / len(predictions)
        return loss, torch.cat([sums, mean])

    def _loss_positions_layer(self) -> LossPositionsLayer | None:
        """The last layer, if it can compute only the loss positions."""
        found = [layer for layer in self.decoder.layers[-1:] if isinstance(layer, LossPositionsLayer)]
        return found[0] if found else None

    def _preprocess(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """megatron-core's embedding, with the rotary angles of `position_ids`."""
        embedded, angles, *rest = super()._preprocess(*args, **kwargs)
        position_ids = kwargs["position_ids"]
        if position_ids is not None and (rotary := self._rotary()) is not None:
            one_row = self.config.apply_rope_fusion and not self._fuses_heads
            angles = rotary_angles(rotary, position_ids, one_row)
        if self._scales_queries and angles is not None:
            angles = with_query_scale(angles, position_ids, self.config)
        if self._fuses_heads and angles is not None:
            angles = rotary_table(angles, self.config, kwargs["input_ids"].numel(), kwargs["packed_seq_params"])
        return embedded, angles, *rest

    def _rotary(self) -> Any:
        """Rotary embedding of the model, or of the first layer with latent attention; None for a stage without
        layers."""
        if not self.config.multi_latent_attention:
            return self.rotary_pos_emb
        layers = [*self.decoder.layers, *(self.mtp.layers if self.mtp_process else ())]
        layers = [getattr(layer, PREDICTED_LAYER, layer) for layer in layers]
        return next((layer.self_attention.rotary_pos_emb.own for layer in layers), None)

    def _postprocess(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        labels: DeferredLoss | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Hidden states [S, B, H], or with those of each depth [(1 + D) S, B, H]: `forward` calls the output layer. In
        a schedule plan, the loss of the `labels`."""
        if labels is not None and self.post_process:
            weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
            loss, labels.sums = self.output_layer(hidden_states, weight, loss_positions=labels.loss_positions)
            return loss
        if self._next_ids is None:
            return hidden_states
        found: torch.Tensor = self.mtp(
            input_ids=self._next_ids,
            position_ids=None,
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            embedding=self.embedding,
        )
        return found
