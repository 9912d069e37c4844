"""`generate`: settings, prompts and constraints of a call, the sampler's run, and the result.

Also the choice of span lengths (`span_lengths`): each candidate length is tried, and the model's first-step confidence
decides, as in CAL (arXiv 2602.00476), over the lengths that the caller names and without its bias correction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import ModelOutput

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.callbacks import CallbackHandler, DenoisingStep
from dlm_bridge.generation.canvas import Canvas, PromptBatch, StopCondition, check_ids, warn_of_padding
from dlm_bridge.generation.commit_rules import CheckedRule, CommitRule
from dlm_bridge.generation.config import resolve_settings
from dlm_bridge.generation.constraints import read_constraints
from dlm_bridge.generation.loop import SamplerSpec, denoise
from dlm_bridge.generation.runtime.runner import ModelRunner
from dlm_bridge.generation.samplers.base import SpecialTokens
from dlm_bridge.generation.token_sampling import Noise, shared_seed, without_token


@dataclass
class DiffusionGenerateOutput(ModelOutput):
    """What `generate` returns with `return_dict_in_generate=True`.

    Args:
        sequences: [B, prompt + new] token ids.
        forwards: how many times the model was run (guidance counts as one, of twice the rows), those that chose among
            `span_lengths` included.
        tokens_per_forward: new tokens of a row, as far as its end, for each forward that it took part in; the mean
            over all of them.
        time: seconds that the call took.
        history: with `output_history=True` a `DenoisingStep` for every forward.
    """

    sequences: torch.Tensor | None = None
    forwards: int | None = None
    tokens_per_forward: float | None = None
    time: float | None = None
    history: tuple[DenoisingStep, ...] | None = None


# Not inference_mode: its tensors cannot be saved for a backward pass, and what is sampled is often trained on.
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
    **kwargs: Any,
) -> torch.Tensor | DiffusionGenerateOutput:
    """Sample from a diffusion language model, by default with its family's published algorithm.

    New tokens start as mask tokens right after the prompt and are settled block by block; each step runs the model
    once on the whole canvas and settles some positions of the block. Which ones, and in what order blocks are cut, is
    what the samplers in `dlm_bridge.generation.ALGORITHMS` differ in. The mask token itself is never emitted.

    A setting is taken from the first of: a keyword argument, `generation_config`, the model's own
    `generation_config`, the model's block size, the family's defaults, the sampler's defaults. The keywords are the
    fields of `DiffusionGenerationConfig`. `max_length` (prompt included) works as in transformers. The temperature
    decides between greedy and sampling; `do_sample=False` means temperature 0, `do_sample=True` where no temperature
    is set 1.0. `use_cache` has no effect: `cache` says what is kept.

    Args:
        model: one of this package's diffusion models, plain or wrapped by PEFT; its train or eval mode is left alone.
        inputs, input_ids: [B, P] prompt token ids, two names for one argument. P may be 0.
        generation_config: a `DiffusionGenerationConfig`, or transformers' own with such fields.
        attention_mask: [B, P], zero at padding, on the left or on the right; without it every token is real. Each row
            is computed as if it were alone: the model sees neither the padding nor the positions it takes.
        generator: a torch.Generator for the whole batch, or one per row, which makes rows independent of the batch.
            Without it and without `seed`, torch's global random state is used, of a tensor-parallel model the first
            process's.
        streamer: who watches, one object or a list of them: a transformers streamer, which gets the prompts and then
            each run of new tokens as soon as it is settled for good, or any object with `on_step(step)`, which gets a
            `DenoisingStep` after every forward; see `dlm_bridge.generation.callbacks`. Nobody watching costs nothing.
        commit_rule: which proposals a step settles, instead of the sampler's own rule; an object serves one call at a
            time. A sampler of one's own is registered by `register_algorithm`.
        **kwargs: any setting, for this call. `eos_token_id=None` turns stopping off.

    Returns:
        [B, P + new] token ids, with `num_return_sequences` n [B * n, P + new], on the device of the model's
        embedding. Prompts that were padded on the right come back
        padded on the left, so that the new tokens always are `output[:, P:]`. After its first end-of-sequence
        token a row is filled up with `pad_token_id`, and the longest row ends the output; without stopping, new is
        `gen_length`. With `return_dict_in_generate=True` a `DiffusionGenerateOutput`.

    Raises:
        DlmBridgeError: a setting or an input that the sampler cannot run, with the remedy.
    """
    began = time.perf_counter()
    if inputs is not None and input_ids is not None:
        raise DlmBridgeError("inputs and input_ids are the same argument: give one of them")
    tokens_BP = check_ids(input_ids if inputs is None else inputs, attention_mask)
    settings = resolve_settings(model, generation_config, kwargs, prompt_width=tokens_BP.shape[1])
    if attention_mask is None:
        warn_of_padding(tokens_BP, settings.pad_token_id)
    recipe = settings.algorithm.recipe(
        SpecialTokens(settings.pad_token_id, settings.eos_token_ids, settings.end_token_ids)
    )
    closing = recipe.layout.closing
    if closing is not None and closing >= settings.vocabulary:
        raise DlmBridgeError(
            f"the {settings.algorithm.name} sampler puts token {closing} at the text's end, outside the vocabulary of "
            f"{settings.vocabulary}: pass another eos_token_id and pad_token_id"
        )
    mask_token_id = -1 if settings.mask_token_id is None else settings.mask_token_id  # -1: no token
    if commit_rule is not None:
        if not isinstance(recipe.rule, CommitRule):
            lacks = "steps whose positions" if settings.algorithm.needs_mask else "masks that"
            raise DlmBridgeError(
                f"the {settings.algorithm.name} sampler has no {lacks} a commit_rule could settle: leave it out"
            )
        recipe = replace(recipe, rule=CheckedRule(commit_rule))
    prompt_of = partial(
        PromptBatch.build,
        mask_token_id=settings.mask_token_id,
        vocabulary=settings.vocabulary,
        gen_length=settings.gen_length,
        context=settings.context,
        device=input_device(model),
        infill=settings.infill,
    )
    prompt, trials, row_trials = prompt_of(tokens_BP, attention_mask), 0, 0
    asked = prompt.rows
    if settings.span_lengths:
        make = partial(_left_padded, prompt_of, settings.pad_token_id)
        rows, trials, row_trials = fit_spans(
            model,
            prompt.rows,
            settings.span_lengths,
            recipe,
            make,
            gen_length=settings.gen_length,
            mask_token_id=mask_token_id,
            shift=settings.shift,
        )
        prompt = make(rows)
    prompt = prompt.repeated(settings.num_return_sequences)
    seed = settings.seed if generator is None else kwargs.get("seed")  # a keyword comes before what is stored
    if seed is None and generator is None:
        seed = shared_seed(model)
    asked = [row for row in asked for _ in range(settings.num_return_sequences)]
    noise = Noise.build(generator, seed, asked, prompt.tokens.device)
    observer = CallbackHandler(
        streamer, keep_history=settings.return_dict and settings.output_history, batch=len(prompt.rows)
    )
    outcome = denoise(
        model,
        prompt,
        recipe,
        noise,
        gen_length=settings.gen_length,
        mask_token_id=mask_token_id,
        vocabulary=settings.vocabulary,
        pad_token_id=settings.pad_token_id,
        ending=StopCondition(
            settings.eos_token_ids, prompt.tokens.device, settings.stop_strings, kwargs.get("tokenizer")
        ),
        constraints=read_constraints(
            settings.constraints.get,
            prompt_width=prompt.tokens.shape[1],
            vocabulary=settings.vocabulary,
            mask_token_id=mask_token_id,
            eos_token_ids=settings.eos_token_ids,
            pad_token_id=settings.pad_token_id,
            suppress=recipe.suppress,
        ),
        shift=settings.shift,
        observer=observer,
        cache=settings.cache,
        execution=settings.execution,
    )
    _refuse_no_numbers(observer, outcome.sequences, prompt, mask_token_id)
    if not settings.return_dict:
        return outcome.sequences
    if outcome.sequences.device.type == "cuda":
        torch.cuda.synchronize(outcome.sequences.device)
    row_forwards = outcome.row_forwards + row_trials * settings.num_return_sequences
    return DiffusionGenerateOutput(
        sequences=outcome.sequences,
        forwards=outcome.forwards + trials,
        tokens_per_forward=int(outcome.new_tokens) / max(row_forwards, 1),
        time=time.perf_counter() - began,
        history=tuple(observer.history) if settings.output_history else None,
    )


def _left_padded(prompt_of: Callable[..., PromptBatch], pad_token_id: int, rows: list[list[int]]) -> PromptBatch:
    width = max(map(len, rows))
    tokens = torch.tensor([[pad_token_id] * (width - len(row)) + row for row in rows])
    real = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return prompt_of(tokens, real)


def input_device(model: Any) -> torch.device:
    """Where the model takes token ids. Raises DlmBridgeError for one without weights."""
    embedding = model.get_input_embeddings()
    device: torch.device = embedding.weight.device
    if device.type == "meta":  # offloaded: accelerate's hook says where it runs
        hook = getattr(embedding, "_hf_hook", None)
        if hook is None:
            raise DlmBridgeError(
                "the model is on the meta device, without weights: load it with from_pretrained, or move it with "
                "to_empty and load its state_dict"
            )
        device = torch.device(hook.execution_device)
    return device


def _refuse_no_numbers(
    observer: CallbackHandler, tokens_BS: torch.Tensor, prompt: PromptBatch, mask_token_id: int
) -> None:
    """Raise DlmBridgeError where the model's logits were NaN: from the first forward on, or so that masks are left, as
    no rule leaves them whose scores are numbers."""
    pads_B = torch.tensor(prompt.pads, device=tokens_BS.device)
    real_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device) >= pads_B[:, None]
    if observer.saw_no_numbers or bool(((tokens_BS == mask_token_id) & real_BS).any()):
        raise DlmBridgeError(
            "the model's logits are not numbers (NaN), nothing can be chosen by them: look for NaN in its weights; "
            "float16 overflows where bfloat16 does not"
        )


def fit_spans(
    model: Any,
    rows: Sequence[Sequence[int]],
    lengths: Sequence[int],
    recipe: SamplerSpec,
    make_prompt: Callable[[list[list[int]]], PromptBatch],
    *,
    gen_length: int,
    mask_token_id: int,
    shift: bool,
) -> tuple[list[list[int]], int, int]:
    """The rows with each span of masks as long as the best of `lengths` for it; the number of forwards, and the sum
    over them of how many rows took part.

    Spans are decided from left to right, those to the right as long as they are given; of equal scores the shortest
    length wins. Each length costs a forward for the first span of all rows, for the second, and so on.
    """
    fitted = [list(row) for row in rows]
    forwards = row_forwards = 0
    for number in range(max((len(spans(row, mask_token_id)) for row in rows), default=0)):
        chosen = [row for row, tokens in enumerate(fitted) if len(spans(tokens, mask_token_id)) > number]
        scores, candidates = [], []
        for length in lengths:
            tried = [resized_span(fitted[row], number, length, mask_token_id) for row in chosen]
            prompt = make_prompt(tried)
            canvas = Canvas(
                prompt,
                recipe.layout,
                gen_length=gen_length,
                mask_token_id=mask_token_id,
                pad_token_id=0,
                ending=StopCondition((), prompt.tokens.device),
            )
            begins = [
                origin + spans(row, mask_token_id)[number][0]
                for origin, row in zip(canvas.origins, tried, strict=True)
            ]
            with ModelRunner.open(model, "eager", keeps=False, rows=len(tried), width=canvas.width) as runner:
                predictor = recipe.predictor(runner, canvas, shift=shift, **recipe.predictor_options)
                columns = slice(min(begins), max(begins) + length)
                predictor.open(columns)
                logits_ANV = predictor(None, columns)
            forwards += 1
            row_forwards += len(tried)
            scores.append(
                _span_confidence(logits_ANV, [begin - columns.start for begin in begins], length, mask_token_id)
            )
            candidates.append(tried)
        for place, best in enumerate(torch.stack(scores).argmax(dim=0).tolist()):
            fitted[chosen[place]] = candidates[best][place]
    return fitted, forwards, row_forwards


def spans(row: Sequence[int], mask_token_id: int) -> list[tuple[int, int]]:
    """Begin and end of each run of masks."""
    found, place = [], 0
    for is_mask, run in groupby(row, lambda token: token == mask_token_id):
        length = len(list(run))
        if is_mask:
            found.append((place, place + length))
        place += length
    return found


def resized_span(row: Sequence[int], number: int, length: int, mask_token_id: int) -> list[int]:
    """The row with so many masks in this span of it."""
    begin, end = spans(row, mask_token_id)[number]
    return [*row[:begin], *[mask_token_id] * length, *row[end:]]


def _span_confidence(logits_ANV: torch.Tensor, begins: list[int], length: int, mask_token_id: int) -> torch.Tensor:
    """[A], the mean over a row's span of the best token's probability."""
    rows = torch.arange(len(begins))[:, None]
    columns = torch.tensor(begins)[:, None] + torch.arange(length)
    probabilities = without_token(logits_ANV[rows, columns], mask_token_id, torch.float32).softmax(dim=-1)
    return probabilities.amax(dim=-1).mean(dim=1)
