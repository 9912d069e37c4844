"""Fine-tuning on conversations: a family's own way of it, and the rows of a run."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.spec import FamilySpec
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.data import Answers, Data, Samples, check_tokenizer, load_answers, split
from dlm_bridge.train.data.answers import EosPadding
from dlm_bridge.train.loading import load_tokenizer
from dlm_bridge.train.objectives import OBJECTIVES, TwoStreams


def tuned_as(config: TrainConfig, family: FamilySpec) -> TrainConfig:
    """The configuration, with its objective resolved, where what is not given is as `family` was tuned. Raises
    DlmBridgeError for padding that the rest does not allow."""
    kind = OBJECTIVES[str(config.objective)].kind
    blocks = issubclass(kind, TwoStreams)
    chosen = config.eos_padding
    if chosen == "block" and not blocks:
        raise DlmBridgeError(f"--eos-padding block: objective '{config.objective}' has no blocks: choose none or row")
    if chosen == "row" and config.packing:
        raise DlmBridgeError("--eos-padding row fills a row with one answer: leave --packing out, or choose none")
    padding = chosen or family.sft.get("eos_padding", "none")
    if chosen is None and padding == "row" and config.packing:
        padding = "block" if blocks else "none"
    normalisation = config.loss_normalisation or family.sft.get("loss_normalisation")
    if config.loss_normalisation is None and normalisation not in kind.normalisations:
        normalisation = None
    on_prompt = config.train_on_prompt
    return dataclasses.replace(
        config,
        eos_padding=padding if blocks or padding != "block" else "none",
        loss_normalisation=normalisation,
        train_on_prompt=family.sft.get("train_on_prompt", False) if on_prompt is None else on_prompt,
    )


def load_conversations(
    config: TrainConfig, model: Any, found: Data, mask_token: int | None
) -> tuple[Samples, Samples, Any]:
    """The training and validation samples and the tokenizer of a configuration that `tuned_as` gave. Raises
    DlmBridgeError."""
    tokenizer = load_tokenizer(config)
    check_tokenizer(tokenizer, model.get_input_embeddings().weight.shape[0], mask_token)
    settings = Answers(
        seq_length=config.seq_length,
        mask_token_id=mask_token,
        packing=config.packing,
        truncate=config.truncate,
        eos_padding=cast(EosPadding, config.eos_padding),
        block_size=_largest_block(config, model),
        train_on_prompt=bool(config.train_on_prompt),
    )
    cut = [split(load_answers(part, tokenizer, settings), config.shares)[:2] for part in found.parts]  # type: ignore[arg-type]  # as checked
    train, valid = found.mixed(cut, config.seed)
    return train, valid, tokenizer


def _largest_block(config: TrainConfig, model: Any) -> int:
    """The largest block that the run will have, which its schedule's smaller ones divide; 1 without blocks."""
    kind = OBJECTIVES[str(config.objective)].kind
    if not issubclass(kind, TwoStreams):
        return 1
    if config.block_sizes:
        return config.block_sizes[-1][1]
    return int(kind.settings(model.config).get("block_size", kind.block_size))
