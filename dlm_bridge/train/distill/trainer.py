"""Trainer of distillation with Accelerate: the model in training, and its frozen parent."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console

from dlm_bridge.data.blocks import LabelledTokens, Samples
from dlm_bridge.data.loader import Prefetcher
from dlm_bridge.errors import SettingError, printable
from dlm_bridge.loading.pretrained import load_tokenizer as open_tokenizer
from dlm_bridge.loading.pretrained import model_family
from dlm_bridge.loading.source import ModelSource, StartingModel
from dlm_bridge.models.derived import PUBLISHED
from dlm_bridge.objectives.base import Objective
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.objectives.editing import EditingBlockDiffusion
from dlm_bridge.objectives.linear_cross_entropy import LossPositions
from dlm_bridge.objectives.losses import certain_entropies
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.train.accelerate import fsdp
from dlm_bridge.train.accelerate.attention import attention_kernels, layer_masks, set_attention
from dlm_bridge.train.accelerate.trainer import AccelerateTrainer, run
from dlm_bridge.train.distill.config import DistillConfig
from dlm_bridge.train.distill.losses import DistillBatch, distill_batch, divergences
from dlm_bridge.train.distill.sampling import SampledRows
from dlm_bridge.train.lora import add_adapter, with_lora
from dlm_bridge.train.output import RunEnd
from dlm_bridge.train.rl.rows import Problem, load_problems
from dlm_bridge.train.schedule import with_block_size, with_steps
from dlm_bridge.train.setup import (
    RunStart,
    check_data,
    context_length,
    conversation_settings,
    load_data,
    load_tokenizer,
    resolve_objective,
    starting_model,
    training_errors,
    with_seq_length,
)
from dlm_bridge.train.trainer import StepInputs


@training_errors
def train(config: DistillConfig, resume: bool = False, console: Console | None = None) -> RunEnd:
    """Train until `steps`, a SIGTERM or `exit_duration`. With `resume` the run in `output` continues from its newest
    checkpoint.

    Raises:
        NonFiniteError: the loss or a gradient norm is NaN or infinite.
        DlmBridgeError: bad settings, data or checkpoints, as its subclasses say.
    """
    return run(fsdp.with_launcher_settings(config), resume, console, assembled)


@contextlib.contextmanager
def assembled(
    config: DistillConfig, accelerator: Accelerator, start: RunStart, console: Console
) -> Iterator[DistillTrainer]:
    """Context manager with the trainer of a run: model, parent, optimizer, objective and data."""
    check_data(config)
    config = config.replace(eos_padding="none")
    starting = starting_model(config, start.checkpoint, accelerator.is_main_process)
    model = starting.model
    config, objective = resolve_objective(config, model, start.step)
    check_model(config, model, objective)
    source = parent_source(config, model)
    config = with_lora(config, model)
    with accelerator.main_process_first():
        config, data = load_rows(config, model, objective.mask_token)
    if source is not None:
        check_parent_length(config, source)
    config = with_steps(config, len(data[0]))
    with fsdp.process_group(config):
        adapter = add_adapter(config, model, start.checkpoint, starting.weights) if config.model.adapts else None
        parent = None if source is None else load_parent(source, config, accelerator)
        yield DistillTrainer(config, accelerator, starting, adapter, objective, data, console, parent)


def check_model(config: DistillConfig, model: Any, objective: Objective) -> None:
    """Raise SettingError for a model without masks, whose tokens are replaced or move, or that is not read as its own
    parent although there is no other."""
    family: Any = model_family(model)
    name = config.objective.objective
    if family.kind == "autoregressive":
        raise SettingError(
            "model",
            f"{config.model.model} is autoregressive and has no mask token: make a diffusion model of it with "
            "dlm-bridge convert-to-dlm",
        )
    if (
        not objective.masks
        or objective.noise_process != "mask"
        or objective.resizes
        or isinstance(objective, EditingBlockDiffusion)
    ):
        raise SettingError("objective", f"{name} predicts more than the tokens behind masks: distillation needs masks")
    adapted = family.derived_from or any(family.name in forms.values() for forms in PUBLISHED.values())
    if config.distill.parent is None and not adapted:
        raise SettingError(
            "parent", f"is missing: {family.title} is not an autoregressive model's weights under another attention"
        )


def parent_source(config: DistillConfig, model: Any) -> ModelSource | None:
    """Source of the parent's weights, which are in the run's precision; None: the base of the adapter is the parent.

    Raises:
        SettingError: the parent is not an autoregressive model, or has another vocabulary.
        CheckpointError: it does not load, or has no tokenizer.
    """
    path = config.distill.parent
    if path is None:
        return None
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(config.precision.precision, torch.bfloat16)
    source = ModelSource(path, dtype=dtype)
    parent = source.empty()
    family = model_family(parent)
    if family is None or family.kind != "autoregressive":
        what = "of an unknown family" if family is None else "a diffusion model"
        raise SettingError("parent", f"{path} is {what}: name an autoregressive model")
    theirs, ours = open_tokenizer(path, path).get_vocab(), load_tokenizer(config).get_vocab()
    if other := next((token for token, number in theirs.items() if ours.get(token) != number), None):
        raise SettingError(
            "parent",
            f"{path} has another vocabulary than {config.model.model}: {other!r} is token {theirs[other]} there, "
            f"{ours.get(other, 'missing')} here",
        )
    return source


def check_parent_length(config: DistillConfig, source: ModelSource) -> None:
    """Raise SettingError for rows that are longer than the parent supports."""
    limit = context_length(source.empty())
    if limit is not None and config.data.seq_length > limit:
        length = config.data.seq_length
        raise SettingError("parent", f"{source.path} has {limit} positions, less than `seq_length={length}`")


def load_parent(source: ModelSource, config: DistillConfig, accelerator: Accelerator) -> Any:
    """Load the frozen parent, sharded as the model is."""
    sharded = config.parallel.shards
    starting = source.in_parts(accelerator.is_main_process) if sharded else StartingModel(source.load())
    parent = starting.model.requires_grad_(False).eval()
    if config.engine.attention_backend is not None:
        set_attention(parent, config.engine.attention_backend)
    if sharded:
        fsdp.shard_model(parent, starting.weights, config, accelerator.device)
        return parent
    return parent.to(accelerator.device)


def load_rows(
    config: DistillConfig, model: Any, mask_token: int | None
) -> tuple[DistillConfig, tuple[Samples, Samples, Any]]:
    """Load training rows, validation rows and tokenizer: conversations, or prompts of an on-policy run. A `seq_length`
    of 0 is replaced by that of the longest row."""
    if not config.distill.on_policy:
        config = with_seq_length(config, model, mask_token)
        return config, load_data(config, model, mask_token)
    config, problems, tokenizer = read_prompts(config, model, mask_token)
    rows = SampledRows(config, model, problems, tokenizer)
    return config, (rows, SampledRows(config, model, [], tokenizer), tokenizer)


def read_prompts(
    config: DistillConfig, model: Any, mask_token: int | None
) -> tuple[DistillConfig, list[Problem], Any]:
    """Read the prompts of an on-policy run. Returns also its tokenizer, and the configuration with a `seq_length` of 0
    replaced by the length of the longest prompt and its text."""
    length = config.distill.gen_length
    tokenizer, _ = conversation_settings(config, model, mask_token)  # checks that it fits the model
    limit = context_length(model) or sys.maxsize
    problems = load_problems(config.data.data, tokenizer, (config.data.seq_length or limit) - length, mask_token)
    if not config.data.seq_length:
        longest = max(len(problem.input_ids) for problem in problems) + length
        blocks = [size for _, size in config.objective.block_sizes]
        multiple = math.lcm(8, getattr(model.config, "block_size", None) or 1, *blocks)
        config = config.replace(seq_length=min(limit, -(-longest // multiple) * multiple))
    return config, problems, tokenizer


class OnDemand(Prefetcher[StepInputs]):
    """Inputs that are produced when they are needed, because they depend on the current weights."""

    def __init__(self, produce: Any, first: int) -> None:
        self._produce, self._steps = produce, itertools.count(first)

    def get(self) -> StepInputs:
        inputs: StepInputs = self._produce(next(self._steps))
        return inputs

    def close(self) -> None:
        return None


class DistillTrainer(AccelerateTrainer):
    """Trainer whose loss of a position is the divergence from the parent's next-token distribution, in place of the
    cross-entropy. Weights and divisors are the objective's."""

    config: DistillConfig

    def __init__(self, *arguments: Any) -> None:
        """Args: those of `AccelerateTrainer`, and the parent; None: the base of the adapter."""
        *own, self.parent = arguments
        super().__init__(*own)

    def announce(self, step: int, layout: str = "") -> None:
        distill = self.config.distill
        super().announce(step, layout)
        if self.main:
            parent = "the base under the adapter" if distill.parent is None else printable(distill.parent)
            texts = f", texts of up to {distill.gen_length} tokens sampled in every step" if distill.on_policy else ""
            self.console.print(f"parent: {parent}{texts}", highlight=False, soft_wrap=True)

    def prefetch(self, first: int) -> Prefetcher[StepInputs]:
        return OnDemand(self.produce, first) if self.config.distill.on_policy else super().prefetch(first)

    def produce(self, step: int) -> StepInputs:
        if isinstance(self.train, SampledRows):
            with_block_size(self.objective, self.plain_model, self.config, step)  # the sampler's too
            self.train.sample(self.computing, step, list(itertools.chain.from_iterable(self.rank_samples(step))))
        return super().produce(step)

    def noisy_batch(self, objective: Objective, uniforms: Uniforms, rows: LabelledTokens) -> NoisyBatch:
        return distill_batch(objective, uniforms, rows, causal_mask=self.parent is None)

    def _loss(
        self, model: Any, batch: NoisyBatch, positions: LossPositions, divisors_K: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch = batch.to(self.device)
        assert isinstance(batch, DistillBatch)
        assert batch.parent is not None
        parent_MV = self._parent_logits(batch.parent)[batch.index]
        logits_MV = batch.logits(model)
        token = -1 if self.objective.mask_token is None else self.objective.mask_token
        losses_M = divergences(logits_MV, parent_MV, self.config.distill.divergence, token)
        if batch.certainty is not None:
            losses_M = losses_M + certain_entropies(logits_MV.float(), batch.targets, batch.certainty)
        terms_K = self.objective.weighted_sums(losses_M, batch) / divisors_K.to(self.device)
        return terms_K.sum(), terms_K.detach()

    @torch.no_grad()
    def _parent_logits(self, batch: NoisyBatch) -> torch.Tensor:
        """[N, V] logits of the parent."""
        model, without = self.parent, contextlib.nullcontext()
        if model is None:
            assert self.adapter is not None
            model, without = self.plain_model, self.adapter.peft.disable_adapter()
        elif (mask := batch.model_mask()) is not None and mask.dim() == 4:
            batch = replace(batch, pairs=layer_masks(mask, model.config, model.dtype))  # type: ignore[arg-type]
        training = model.training
        model.eval()
        try:
            with without, self.accelerator.autocast(), attention_kernels(self.device, True, False):
                return batch.logits(model)
        finally:
            model.train(training)
