"""`generate`: samples a batch of prompts with the sampling engine and returns a tensor."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import ModelOutput

from dlm_bridge.errors import NonFiniteError, SettingError
from dlm_bridge.generation.callbacks import DenoisingStep, OutputColumns, StepRecorder, TextStreams, split_observers
from dlm_bridge.generation.canvas import Canvas, Entry
from dlm_bridge.generation.commit_rules import CommitRule
from dlm_bridge.generation.engine import SamplingEngine, SamplingPlan, input_device
from dlm_bridge.generation.kv_cache import KVCache
from dlm_bridge.generation.prompts import (
    PromptLimits,
    check_ids,
    check_row,
    prompt_rows,
    resized_span,
    spans,
    warn_of_padding,
)
from dlm_bridge.generation.request import MASK, Ended, Failed, Request
from dlm_bridge.generation.runtime.runner import ModelRunner
from dlm_bridge.generation.settings import resolve_settings
from dlm_bridge.generation.stopping import StopCondition
from dlm_bridge.generation.token_sampling import request_seeds, shared_seed, without_token
from dlm_bridge.registration import load


@dataclass
class DiffusionGenerateOutput(ModelOutput):
    """Output of `generate` with `return_dict_in_generate=True`.

    Args:
        sequences: [B, prompt + new] token ids.
        row_ends: [B], the column of `sequences` after each row's last token (which may be an EOS token).
        forwards: number of forward passes of the model, including those that choose among `span_lengths`. A pass with
            guidance, which has twice the rows, counts as one.
        tokens_per_forward: new tokens of all rows, up to their ends, divided by the sum over rows of the forward
            passes that the row took part in.
        time: duration of the call in seconds.
        history: with `output_history=True`, a `DenoisingStep` for every forward pass.
    """

    sequences: torch.Tensor | None = None
    row_ends: torch.Tensor | None = None
    forwards: int | None = None
    tokens_per_forward: float | None = None
    time: float | None = None
    history: tuple[DenoisingStep, ...] | None = None


# Not inference_mode: its tensors cannot be saved for a backward pass, and samples are often trained on.
@torch.no_grad()
def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    input_ids: torch.Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    attention_mask: torch.Tensor | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    streamer: Any = None,
    commit_rule: CommitRule | None = None,
    constraint: Any = None,
    **kwargs: Any,
) -> torch.Tensor | DiffusionGenerateOutput:
    """Sample from a diffusion language model, by default with its family's published sampler.

    New tokens start as mask tokens after the prompt and are denoised block by block. Each step runs the model once and
    commits some tokens of the block. The samplers in `dlm_bridge.generation.SAMPLERS` differ in which tokens a step
    commits and in the order of blocks. The mask token itself is never emitted, unless it is an ordinary token
    (`FamilySpec.ordinary_mask`), because masks are identified by their positions.

    Settings are looked up in this order: keyword arguments, `generation_config`, the model's own `generation_config`,
    the model's block size, the family's defaults, the sampler's defaults. The keywords are the fields of
    `DiffusionGenerationConfig`. `max_length` (including the prompt) works as in transformers. The temperature selects
    greedy decoding (0) or sampling; `do_sample=False` means temperature 0, and `do_sample=True` without a temperature
    means 1.0. `use_cache` has no effect: the setting `cache` selects the KV cache.

    Args:
        model: one of this package's diffusion models, plain or wrapped by PEFT. Its train or eval mode is not changed.
        inputs, input_ids: [B, P] prompt token ids, two names of the same argument. P may be 0. With `infill`,
            positions to fill in have the id -1 or, unless the mask token is an ordinary token, the mask token's id.
        generation_config: a `DiffusionGenerationConfig`, or a transformers `GenerationConfig` with such fields.
        attention_mask: [B, P], zero at padding, on the left or on the right. Without it, every token is real. Each row
            is computed as if it were alone: padding is not attended to and does not shift positions.
        generator: a torch.Generator from which the rows' seeds are drawn, or one per row, which makes rows independent
            of the batch. Without `generator` and `seed`, torch's global random state is used (of the first process,
            for a tensor-parallel model).
        streamer: one object or a list. A transformers streamer gets the prompts, and then new tokens as soon as they
            are final. A step callback with a method `on_step(step)` gets a `DenoisingStep` after every forward pass;
            see `dlm_bridge.generation.callbacks`.
        commit_rule: selects the proposals that a step commits, instead of the sampler's own rule. An object can be
            used in one call at a time. To add a complete sampler, use `register_sampler`.
        constraint: language that the new text belongs to: a `structured.Constraint`, or one per prompt, in which None
            is no constraint. It needs `tokenizer`.
        **kwargs: any setting, for this call. `eos_token_id=None` disables stopping.

    Returns:
        [B, P + new] token ids, or [B * n, P + new] with `num_return_sequences` n, on the device of the model's
        embedding. Prompts that are padded on the right are returned padded on the left, so that the new tokens are
        always `output[:, P:]`. After its first end-of-sequence token, a row is filled with `pad_token_id`; the output
        is as long as its longest row. Without stopping, `new` is `gen_length`. A sampler that inserts and deletes
        tokens ends a row where its text ends; with `infill`, the row then starts with its prompt and is padded at the
        end. With `return_dict_in_generate=True`, a `DiffusionGenerateOutput`.

    Raises:
        SettingError: a setting or an input is invalid for the sampler.
        RowError: the sampler cannot continue the named rows.
        NonFiniteError: logits are NaN or infinite, in the named rows or in all rows.
    """
    began = time.perf_counter()
    if inputs is not None and input_ids is not None:
        raise SettingError("input_ids", "is the same argument as inputs: pass one of them")
    tokens_BP = check_ids(input_ids if inputs is None else inputs, attention_mask)
    longest = None if attention_mask is None else int(attention_mask.sum(dim=1).max())
    settings = resolve_settings(model, generation_config, kwargs, tokens_BP.shape[1], longest)
    if attention_mask is None:
        warn_of_padding(tokens_BP, settings.pad_token_id)
    limits, copies = settings.limits, settings.num_return_sequences
    plan = SamplingPlan.of(settings, commit_rule, tokens_BP.shape[1])
    device = input_device(model)
    prompts, padding = prompt_rows(tokens_BP, attention_mask, limits)
    width, trials, row_trials = tokens_BP.shape[1], 0, 0
    given = [_as_given(prompt, limits) for prompt in prompts for _ in range(copies)]
    if settings.span_lengths:
        prompts, trials, row_trials = _fit_spans(model, prompts, plan, device)
        width = max(map(len, prompts))
        for number, prompt in enumerate(prompts):
            check_row(prompt, number, limits)
        padding = [[settings.pad_token_id] * (width - len(prompt)) for prompt in prompts]
    prompts, padding = ([row for row in rows for _ in range(copies)] for rows in (prompts, padding))
    seed = settings.seed if generator is None else kwargs.get("seed")  # a generator wins over a stored seed
    if seed is None and generator is None:
        seed = shared_seed(model)
    seeds = request_seeds(generator, seed, given)
    keep_history = settings.return_dict and settings.output_history
    callbacks, streamers = split_observers(streamer, len(prompts))
    output = OutputColumns(prompts, padding, width, limits.gen_length, settings.pad_token_id, limits.infill)
    recorder = None
    if callbacks or keep_history:
        recorder = StepRecorder(
            callbacks,
            output,
            device,
            keep_history=keep_history,
            mask_token_id=limits.mask_token_id or 0,
            closing=plan.spec.layout.closing,
        )
    streams = TextStreams(streamers, output) if streamers else None
    engine = SamplingEngine(
        model,
        plan,
        tokenizer=kwargs.get("tokenizer"),
        max_rows=len(prompts),
        max_length=max(map(len, prompts)) + limits.gen_length,
        stream=streams is not None,
        observers=[recorder] if recorder is not None else [],
    )
    constraints = [None] * len(prompts)
    if constraint is not None:
        compiled = load("features", "constraint")
        constraints = compiled(constraint, kwargs.get("tokenizer"), settings, len(prompts) // copies)
        constraints = [one for one in constraints for _ in range(copies)]
    ends: dict[int, Ended] = {}
    failed: list[Failed] = []
    for number, (prompt, row_seed, one) in enumerate(zip(prompts, seeds, constraints, strict=True)):
        engine.submit(Request(number, prompt, seed=row_seed, constraint=one))
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Failed):
                failed.append(event)
            elif isinstance(event, Ended):
                ends[event.name] = event
            if streams is not None and not failed:
                streams.report(event)
        if failed:
            engine.close()
            raise _failure(failed, copies, len(prompts))
    rows = [output.text(number, ends[number].tokens) for number in range(len(prompts))]
    row_ends = list(map(len, rows))
    length = max(row_ends)
    rows = [row + [settings.pad_token_id] * (length - len(row)) for row in rows]
    sequences = torch.tensor(rows, dtype=torch.long).view(len(rows), length).to(device)
    if streams is not None:
        streams.end(sequences)
    if not settings.return_dict:
        return sequences
    row_forwards = sum(event.forwards for event in ends.values()) + row_trials * copies
    filled = sum(len(prompt) - prompt.count(MASK) for prompt in prompts) if limits.infill else 0
    new_tokens = sum(len(event.tokens) for event in ends.values()) - filled
    return DiffusionGenerateOutput(
        sequences=sequences,
        row_ends=torch.tensor(row_ends, device=device),
        forwards=engine.forwards + trials,
        tokens_per_forward=new_tokens / max(row_forwards, 1),
        time=time.perf_counter() - began,
        history=tuple(recorder.history) if recorder is not None and keep_history else None,
    )


def _failure(failed: Sequence[Failed], copies: int, rows: int) -> Exception:
    """Error of a call with failed rows, named by their index in the input."""
    named = [event.error for event in failed if isinstance(event.error, NonFiniteError) and event.error.rows]
    if len(named) < len(failed):
        return failed[0].error
    numbers = sorted({event.name // copies for event in failed})
    return NonFiniteError(named[0].reason, numbers if len(failed) < rows else ())


def _as_given(prompt: Sequence[int], limits: PromptLimits) -> list[int]:
    """Prompt with the mask token's id at masks. The row's seed is derived from it."""
    return [limits.mask_token_id or 0 if token == MASK else token for token in prompt]


def _fit_spans(
    model: Any, rows: Sequence[list[int]], plan: SamplingPlan, device: torch.device
) -> tuple[list[list[int]], int, int]:
    """Choose the length of each span of masks among `span_lengths`.

    In the first step, a masked diffusion model is most confident if a span of masks has about the right length; CAL
    (arXiv 2602.00476) chooses lengths by this observation. The score used here is the first-step confidence: the mean
    over the span of the highest token probability, for each length in `span_lengths`. CAL's search, and its correction
    for the confidence's bias towards some lengths, are not implemented.

    Spans are decided from left to right, with the spans to the right at their given length. Among equal scores, the
    shortest length is chosen. Each length costs one forward pass for the first span of all rows, one for the second,
    and so on.

    Returns:
        The rows with spans of the chosen lengths; the number of forward passes; the number of rows in these passes.
    """
    settings = plan.settings
    fitted = [list(row) for row in rows]
    forwards = row_forwards = 0
    for number in range(max((len(spans(row)) for row in rows), default=0)):
        undecided = [row for row, tokens in enumerate(fitted) if len(spans(tokens)) > number]
        scores, candidates = [], []
        for length in settings.span_lengths:
            tried = [resized_span(fitted[row], number, length) for row in undecided]
            for row, tokens in zip(undecided, tried, strict=True):
                check_row(tokens, row, settings.limits)
            begins = [spans(row)[number][0] for row in tried]
            columns = slice(min(begins), max(begins) + length)
            logits_ANV = _first_logits(model, tried, columns, plan, device)
            places = [begin - columns.start for begin in begins]
            scores.append(_span_confidence(logits_ANV, places, length, settings.limits.excluded_token_id))
            candidates.append(tried)
            forwards += 1
            row_forwards += len(tried)
        highest, choices = torch.stack(scores).max(dim=0)  # NaN propagates
        bad = [row for row, score in zip(undecided, highest.tolist(), strict=True) if not math.isfinite(score)]
        if bad:
            raise NonFiniteError(rows=bad if len(bad) < len(rows) else ())
        for place, best in enumerate(choices.tolist()):
            fitted[undecided[place]] = candidates[best][place]
    return fitted, forwards, row_forwards


def _first_logits(
    model: Any, rows: Sequence[list[int]], columns: slice, plan: SamplingPlan, device: torch.device
) -> torch.Tensor:
    """[A, N, V] logits at these columns of the rows, before the first step."""
    limits, cache = plan.settings.limits, KVCache()
    canvas = Canvas(
        plan.spec.layout,
        StopCondition((), device),
        device,
        mask_token_id=limits.mask_token_id,
        proposes_mask=limits.ordinary_mask,
        cache_width=max(map(len, rows)) + limits.gen_length + 1,
        infill=True,
    )
    canvas.admit([Entry(number, row, limits.gen_length) for number, row in enumerate(rows)])
    options = {"rows": plan.copies * len(rows), "width": canvas.width, "mask_token_id": limits.mask_token_id}
    with ModelRunner.open(model, "eager", cache, **options) as runner:
        predictor = plan.spec.predictor(
            runner, canvas, cache, shift=plan.settings.shift, **plan.spec.predictor_options
        )
        predictor.open_block(columns, canvas.rows)
        logits_ANV = predictor(None, columns)
    if plan.spec.logits_bias is not None:
        logits_ANV = plan.spec.logits_bias(logits_ANV, canvas, None, columns)
    return logits_ANV


def _span_confidence(logits_ANV: torch.Tensor, begins: list[int], length: int, excluded_token_id: int) -> torch.Tensor:
    """[A], mean over each row's span of the highest token probability."""
    rows = torch.arange(len(begins))[:, None]
    columns = torch.tensor(begins)[:, None] + torch.arange(length)
    probabilities = without_token(logits_ANV[rows, columns], excluded_token_id, torch.float32).softmax(dim=-1)
    return probabilities.amax(dim=-1).mean(dim=1)
