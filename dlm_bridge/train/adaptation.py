"""What depends on the step or on the family: mask annealing, block schedule, fine-tuning defaults.

Mask annealing and the block schedule adapt the attention of an autoregressive model while a run goes on. Both are pure
functions of the step, so a resume continues them, whatever the number of micro-batches and processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.families import FamilySpec
from dlm_bridge.objectives.base import Objective
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.objectives.noise import Purpose, keyed_generator
from dlm_bridge.objectives.registry import find_objective, objectives
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.data.blocks import Blocks, Samples, split
from dlm_bridge.train.data.conversations import ConversationSettings, EosPadding, load_conversation_blocks
from dlm_bridge.train.data.documents import Source, check_tokenizer
from dlm_bridge.train.data.sources import DataSources, Part, Shares
from dlm_bridge.train.loading import load_tokenizer


def open_probability(step: int, annealing_steps: int) -> float:
    """The probability that a pair (query, later key) is open at a step, counted from 1: 0 at the first step, growing
    linearly to 1 after `annealing_steps` of them (DiffuLLaMA, arXiv 2410.17891, section 3.2)."""
    return 1.0 if annealing_steps == 0 else min(1.0, (step - 1) / annealing_steps)


def anneal_mask(noisy: NoisyBatch, config: TrainConfig, step: int, samples: Sequence[int]) -> NoisyBatch:
    """The batch with the attention of its step, as `pairs`: causal plus random later keys with `open_probability`,
    drawn for each global sample index and step. `noisy` has one stream, a row for each of `samples`."""
    opened = open_probability(step, config.objective.mask_annealing_steps)
    if opened == 1.0:
        return noisy
    batch, length = noisy.input_ids.shape
    device = noisy.input_ids.device
    allowed_BLL = torch.ones(length, length, dtype=torch.bool, device=device).tril().expand(batch, -1, -1)
    if opened > 0:
        allowed_BLL = allowed_BLL | (_uniform(config.data.seed, step, samples, length).to(device) < opened)
    if noisy.mask_descriptor is not None:  # packed documents
        allowed_BLL = allowed_BLL & noisy.mask_descriptor.dense()[:, 0]
    elif noisy.attention_mask is not None:
        # Padding attends to itself, so that no row of a softmax is empty.
        own_LL = torch.eye(length, dtype=torch.bool, device=device)
        allowed_BLL = (allowed_BLL & noisy.attention_mask[:, None, :]) | own_LL
    return dataclasses.replace(noisy, pairs=allowed_BLL[:, None])


def with_block_size(objective: Objective, model: Any, config: TrainConfig, step: int) -> Objective:
    """The objective `at_step`, and the same block size in the model's config: a checkpoint has the last one."""
    size = scheduled_block_size(config, step)
    if size is not None:
        model.config.block_size = size
    return at_step(objective, config, step)


def at_step(objective: Objective, config: TrainConfig, step: int) -> Objective:
    """The objective with the block size of a step."""
    size = scheduled_block_size(config, step)
    # `check_adaptation` requires a two-stream objective where there is a schedule.
    return objective if size is None else dataclasses.replace(objective, block_size=size)  # type: ignore[call-arg]


def scheduled_block_size(config: TrainConfig, step: int) -> int | None:
    """The block size of `--block-schedule` at a step, counted from 1; None without a schedule."""
    sizes = [size for start, size in config.objective.block_sizes if start <= step]
    return sizes[-1] if sizes else None


def check_adaptation(config: TrainConfig, family: FamilySpec) -> None:
    """Raise DlmBridgeError where the objective or the family does not support a schedule."""
    name = str(config.objective.name)
    kind = find_objective(name).kind
    if kind.answer_blocks:
        _check_canvases(config, family)
    if kind.resizes:
        _check_resizing(config)
    if kind.trajectories and config.task != "sft":
        raise DlmBridgeError(f"--objective {name}: trajectories are recorded of answers: train it with dlm-bridge sft")
    if config.objective.block_sizes and kind.streams == 1:
        known = ", ".join(other for other, spec in objectives().items() if spec.kind.streams == 2)
        raise DlmBridgeError(f"--block-schedule: objective '{name}' has no blocks: objectives with blocks are {known}")
    if not config.objective.mask_annealing_steps:
        return
    flag = f"--mask-annealing-steps {config.objective.mask_annealing_steps}"
    if kind.streams == 2:
        raise DlmBridgeError(f"{flag}: objective '{name}' has its own mask of two streams: use --block-schedule")
    if family.attention_pattern != "bidirectional":
        raise DlmBridgeError(f"{flag}: {family.title} is {family.attention_pattern}, not bidirectional: leave it out")


def _check_canvases(config: TrainConfig, family: FamilySpec) -> None:
    refused = {
        "--packing": config.data.packing,
        "--document-attention": config.data.document_attention,
        "--block-schedule": bool(config.objective.block_sizes),
    }
    for flag, given in refused.items():
        if given:
            raise DlmBridgeError(
                f"{flag}: {family.title}'s canvases are cut from the one answer of a row, and have the length of its "
                "config: leave it out"
            )


def _check_resizing(config: TrainConfig) -> None:
    refused = {
        "--packing": (config.data.packing, "rows hold one text each, with room to grow"),
        "--document-attention": (config.data.document_attention, "rows hold one text each, with room to grow"),
        f"--eos-padding {config.data.eos_padding}": (
            config.data.eos_padding not in (None, "none"),
            "the end of text is the token that deletes a mask",
        ),
    }
    for flag, (given, why) in refused.items():
        if given:
            raise DlmBridgeError(f"{flag}: objective '{config.objective.name}': {why}: leave it out")


def _uniform(seed: int, step: int, samples: Sequence[int], length: int) -> torch.Tensor:
    """[B, L, L] uniform on [0, 1), fp32, keyed by (seed, step, global sample index)."""
    values = np.empty((len(samples), length, length), dtype=np.float32)
    for row, sample in zip(values, samples, strict=True):
        keyed_generator(seed, Purpose.MASK_ANNEALING, step, sample).random(out=row, dtype=np.float32)
    return torch.from_numpy(values)


def with_family_defaults(config: TrainConfig, family: FamilySpec) -> TrainConfig:
    """The configuration, with its objective resolved, and the family's fine-tuning defaults for what is not given.
    Raises DlmBridgeError for padding that the objective or packing excludes."""
    kind = find_objective(str(config.objective.name)).kind
    blocks = kind.streams == 2
    chosen = config.data.eos_padding
    if chosen == "block" and not blocks:
        raise DlmBridgeError(
            f"--eos-padding block: objective '{config.objective.name}' has no blocks: choose none or row"
        )
    if chosen == "row" and config.data.packing:
        raise DlmBridgeError("--eos-padding row fills a row with one answer: leave --packing out, or choose none")
    padding = chosen or family.sft.get("eos_padding", "none")
    if chosen is None and padding == "row" and config.data.packing:
        padding = "block" if blocks else "none"
    normalisation = config.objective.loss_normalisation or family.sft.get("loss_normalisation")
    if config.objective.loss_normalisation is None and normalisation not in kind.normalisations:
        normalisation = None
    on_prompt = config.data.train_on_prompt
    return config.replace(
        eos_padding=padding if blocks or padding != "block" else "none",
        loss_normalisation=normalisation,
        train_on_prompt=family.sft.get("train_on_prompt", False) if on_prompt is None else on_prompt,
    )


def load_conversations(
    config: TrainConfig, model: Any, found: DataSources, mask_token: int | None
) -> tuple[Samples, Samples, Any]:
    """The training and validation samples and the tokenizer of a configuration from `with_family_defaults`. Raises
    DlmBridgeError."""
    tokenizer = load_tokenizer(config)
    kind = find_objective(str(config.objective.name)).kind
    vocabulary_size = model.get_input_embeddings().weight.shape[0]
    check_tokenizer(tokenizer, vocabulary_size, mask_token)
    settings = ConversationSettings(
        seq_length=config.data.seq_length,
        mask_token_id=mask_token,
        packing=config.data.packing,
        truncate=config.data.truncate,
        eos_padding=cast(EosPadding, config.data.eos_padding),
        block_size=_largest_block(config, model),
        train_on_prompt=bool(config.data.train_on_prompt),
        answer_blocks=kind.answer_blocks,
        trajectories=kind.trajectories,
        vocabulary_size=vocabulary_size,
    )

    def cut(part: Part, shares: Shares) -> tuple[Blocks, Blocks]:
        sources = cast(Sequence[Source], part)  # as `check_sources` has found
        return split(load_conversation_blocks(sources, tokenizer, settings), shares)[:2]

    train, valid = found.mixed(cut, config.data.split_fractions, config.data.seed)
    return train, valid, tokenizer


def _largest_block(config: TrainConfig, model: Any) -> int:
    """The largest block size of the run, which the schedule's smaller ones divide; 1 without blocks."""
    kind = find_objective(str(config.objective.name)).kind
    if kind.streams == 1:
        return 1
    if config.objective.block_sizes:
        return config.objective.block_sizes[-1][1]
    return int(kind.settings(model.config).get("block_size", kind.block_size))  # type: ignore[attr-defined,arg-type]
