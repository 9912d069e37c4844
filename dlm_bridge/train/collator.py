"""Data collator with which transformers' Trainer and TRL's SFTTrainer train any diffusion family."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.utils.data import get_worker_info

from dlm_bridge.distributed import rank
from dlm_bridge.errors import RowError, SettingError
from dlm_bridge.objectives.base import Objective
from dlm_bridge.objectives.batches import IGNORE_INDEX, NoisyBatch
from dlm_bridge.objectives.noise import Purpose, Uniforms
from dlm_bridge.objectives.registry import family_objective

ANSWER_MASKS = ("completion_mask", "assistant_masks")  # columns of TRL: 1 for tokens with a loss
SAMPLE_INDEX = "sample_index"


@dataclass
class DiffusionCollator:
    """Pads samples, noises them on the CPU with the family's objective, and returns inputs of the model's forward.

        collator = DiffusionCollator.of(model, seed=0)
        Trainer(model=model, args=args, data_collator=collator, train_dataset=dataset).train()

        collator = DiffusionCollator.of(model, seed=0, for_trl=True)
        SFTTrainer(model=model, args=args, data_collator=collator, compute_loss_func=trl_loss, ...).train()

    A sample has `input_ids` and optionally `labels` (-100 for tokens that are never masked, such as the prompt),
    `completion_mask` or `assistant_masks` (0 for such tokens), and `attention_mask`. Packed documents are marked by
    `position_ids` that restart at 0, or by TRL's `seq_lengths`; each is noised and attended to separately.

    The batch has `labels` and `loss_weights` for DiffusionLM.forward. Trainer normalises the loss by its count of
    labels over a step's micro-batches, so gradient accumulation and the number of processes do not change it.
    Exceptions, where each micro-batch is normalised separately: WeDLM and `nemotron_sft` (sums of two means),
    `loss_normalisation` "sequences" (a mean over rows), and DreamOn (a row's deletions count as one token).

    The noise of a sample with a `sample_index` is keyed by (seed, index); give each visit of a sample its own index.
    Otherwise it is keyed by the seed, the process, the loader's worker and the number of batches that the worker has
    collated: a run is reproducible, a resumed one draws new noise. A `generator` overrides this (without workers
    only).

    In a Trainer's evaluation the noise is keyed by (seed, tokens and labels of the sample), so that every evaluation
    has the same noise. Set `evaluation` in a loader of your own, or if workers are not forked.
    """

    objective: Objective
    pad_token_id: int = 0  # masked from attention and the loss
    seed: int = 0
    generator: torch.Generator | None = None
    pad_to_multiple_of: int = 1
    for_trl: bool = False
    evaluation: bool = False
    _batches: int = field(default=0, init=False)

    @classmethod
    def of(cls, model: Any, objective: str | None = None, **settings: Any) -> DiffusionCollator:
        """Construct the collator of a model, with the family's objective or another that fits. `settings` are the
        fields of this class. Raises SettingError for a model or an objective that is not supported."""
        if not hasattr(model, "family"):
            raise SettingError(
                "model", f"{type(model).__name__} is not a diffusion model: train it with transformers' own collators"
            )
        chosen = family_objective(model, objective)
        if chosen.noise_process != "mask":
            raise SettingError(
                "objective",
                f"the loss of {chosen.noise_process} noise is not the cross-entropy that trainers compute of labels: "
                "use dlm-bridge pretrain or sft, or model(input_ids, labels=..., generator=...)",
            )
        settings.setdefault("pad_token_id", model.config.pad_token_id or 0)
        return cls(chosen, **settings)

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Collate samples into a batch. Raises RowError for samples without tokens or with columns of other
        lengths."""
        tokens = [torch.as_tensor(sample["input_ids"]) for sample in samples]
        if not tokens or min(len(row) for row in tokens) == 0:
            raise RowError("a batch needs samples with `input_ids` that are not empty")
        length = -(-max(len(row) for row in tokens) // self.pad_to_multiple_of) * self.pad_to_multiple_of
        input_ids = torch.full((len(tokens), length), self.pad_token_id)
        labels = torch.full_like(input_ids, IGNORE_INDEX)
        real = torch.zeros_like(input_ids, dtype=torch.bool)
        for row, sample in enumerate(samples):
            count = len(tokens[row])
            input_ids[row, :count] = tokens[row]
            labels[row, :count] = _labels(sample, tokens[row])
            real[row, :count] = _column(sample, "attention_mask", count).bool() if "attention_mask" in sample else True
        uniforms, documents = self._uniforms(samples, length, labels), _documents(samples, input_ids)
        if documents is not None and self.objective.resizes:
            raise SettingError("packing", f"{type(self.objective).__name__} moves tokens: each row must be one text")
        return self._batch(self.objective.noise(input_ids, uniforms, labels, None if real.all() else real, documents))

    def _batch(self, noisy: NoisyBatch) -> dict[str, torch.Tensor]:
        if noisy.rows is not None:
            raise SettingError("auto_balance", "needs the losses: use dlm-bridge pretrain or sft")
        rows = len(noisy.input_ids)
        mask = noisy.model_mask()
        # Labels without a loss count in the divisor too.
        labels = torch.where(noisy.counted, 0, IGNORE_INDEX)
        labels[noisy.mask] = noisy.targets
        terms = torch.zeros_like(noisy.targets) if noisy.terms is None else noisy.terms
        scale = noisy.counted.sum() / noisy.normaliser.clamp(min=1e-12)  # 1 for objectives with a single term
        weights = torch.zeros(labels.shape)
        weights[noisy.mask] = noisy.weights * scale.float()[terms]
        batch = {
            "input_ids": noisy.input_ids,
            "labels": labels,
            "loss_weights": weights,
            "logits_to_keep": noisy.mask,
            "attention_mask": torch.ones_like(noisy.mask) if mask is None else mask.expand(rows, *mask.shape[1:]),
        }
        if noisy.position_ids is not None:
            batch["position_ids"] = noisy.position_ids.expand(rows, -1)
        if self.for_trl:
            batch["targets"] = labels.clone()
        return batch

    def _uniforms(self, samples: Sequence[Mapping[str, Any]], length: int, labels: torch.Tensor) -> Uniforms:
        evaluates = self.evaluation or _evaluates()
        if self.generator is not None and not evaluates:
            if get_worker_info() is not None:
                raise SettingError("generator", "gives every worker of the data loader the same noise: use `seed`")
            return Uniforms.drawn(self.generator, len(samples), length, spans=self.objective.resizes)
        if all(SAMPLE_INDEX in sample for sample in samples):
            return Uniforms.keyed(self.seed, 0, [int(sample[SAMPLE_INDEX]) for sample in samples], length)
        if evaluates:
            keys = [_digest(sample, row) for sample, row in zip(samples, labels, strict=True)]
            return Uniforms.keyed(self.seed, 0, keys, length, Purpose.EVAL_NOISE)
        worker = get_worker_info()
        workers, number = (1, 0) if worker is None else (worker.num_workers, worker.id)
        stream = rank() * workers + number
        self._batches += 1
        rows = [(self._batches << 24) + row for row in range(len(samples))]
        return Uniforms.keyed(self.seed, stream, rows, length, Purpose.COLLATOR)


def trl_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: int | torch.Tensor | None = None) -> torch.Tensor:
    """Loss function (`compute_loss_func`) for TRL's SFTTrainer, whose default is the next-token loss. The entropy and
    token accuracy that SFTTrainer logs remain those of next-token prediction, meaningless for a diffusion model.

    Raises:
        SettingError: the batches are not from a DiffusionCollator with `for_trl`.
    """
    loss = getattr(outputs, "loss", None)
    if loss is None:
        raise SettingError("for_trl", "must be True: trl_loss needs batches of DiffusionCollator(..., for_trl=True)")
    if num_items_in_batch is None:
        return loss
    return loss * (labels.ne(IGNORE_INDEX).sum() / num_items_in_batch)


def _evaluates() -> bool:
    """True inside the evaluation of a Trainer, including workers that it has forked."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "evaluation_loop":
        frame = frame.f_back
    return frame is not None and hasattr(frame.f_locals.get("self"), "data_collator")


def _digest(sample: Mapping[str, Any], labels: torch.Tensor) -> int:
    """64-bit digest of a sample's tokens and labels without padding."""
    tokens = torch.as_tensor(sample["input_ids"]).long()
    row = torch.cat([tokens, labels[: len(tokens)]]).contiguous()
    return int.from_bytes(hashlib.blake2b(row.numpy().tobytes(), digest_size=8).digest(), "little")


def _labels(sample: Mapping[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    labels = _column(sample, "labels", len(tokens)) if "labels" in sample else tokens
    for name in ANSWER_MASKS:
        if name in sample:
            labels = torch.where(_column(sample, name, len(tokens)).bool(), labels, IGNORE_INDEX)
    return labels


def _documents(samples: Sequence[Mapping[str, Any]], input_ids: torch.Tensor) -> torch.Tensor | None:
    """[B, L] document numbers of packed rows; None if every row is one document."""
    documents = torch.zeros_like(input_ids)
    for row, sample in enumerate(samples):
        count = len(sample["input_ids"])
        if "position_ids" in sample:
            documents[row, :count] = _column(sample, "position_ids", count).eq(0).cumsum(0)
        elif "seq_lengths" in sample:
            lengths = torch.as_tensor(sample["seq_lengths"])
            numbers = torch.arange(1, len(lengths) + 1).repeat_interleave(lengths)
            documents[row, :count] = _column({"seq_lengths": numbers}, "seq_lengths", count)
    return documents if bool((documents > 1).any()) else None


def _column(sample: Mapping[str, Any], name: str, count: int) -> torch.Tensor:
    column = torch.as_tensor(sample[name])
    if len(column) != count:
        raise RowError(f"a sample has {count} input_ids and {len(column)} {name}: the numbers must be equal")
    return column
