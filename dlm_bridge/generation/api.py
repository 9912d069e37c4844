"""`generate`: the settings, prompts and constraints of a call, the run of the sampler, and the result.

The denoising loop takes blocks from left to right, each denoised by the sampler's rule. A sampler is one choice of
independent parts: the block layout (`canvas`), the attention pattern (`predictors`), the proposal of tokens
(`token_sampling`) and the rule that commits them (`commit_rules`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import ModelOutput

from dlm_bridge.errors import DlmBridgeError, rows_named
from dlm_bridge.generation.callbacks import CallbackHandler, DenoisingStep, StepObserver
from dlm_bridge.generation.canvas import Canvas
from dlm_bridge.generation.commit_rules import MASKS_LEFT, CheckedRule, CommitRule, DenoisingRule, SamplerContext
from dlm_bridge.generation.constraints import Constraints, read_constraints
from dlm_bridge.generation.kv_cache import CacheMode, KVCache
from dlm_bridge.generation.predictors import Predictor
from dlm_bridge.generation.rows import PromptBatch, StopCondition, check_ids, warn_of_padding
from dlm_bridge.generation.runtime.runner import ModelRunner, supports_kv_cache
from dlm_bridge.generation.samplers import SamplerSpec, SpecialTokens
from dlm_bridge.generation.settings import GenerationSettings, resolve_settings
from dlm_bridge.generation.spans import fit_spans
from dlm_bridge.generation.token_sampling import Noise, shared_seed


@dataclass
class DiffusionGenerateOutput(ModelOutput):
    """Output of `generate` with `return_dict_in_generate=True`.

    Args:
        sequences: [B, prompt + new] token ids.
        row_ends: [B], the column of `sequences` behind each row's last token, which may be the one that ended it.
        forwards: forward passes of the model (guidance counts as one, of twice the rows), those that chose among
            `span_lengths` included.
        tokens_per_forward: new tokens of a row, as far as its end, per forward pass that it took part in; the mean
            over all of them.
        time: seconds that the call took.
        history: with `output_history=True` a `DenoisingStep` for every forward pass.
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
    **kwargs: Any,
) -> torch.Tensor | DiffusionGenerateOutput:
    """Sample from a diffusion language model, by default with its family's published sampler.

    New tokens start as mask tokens right behind the prompt and are denoised block by block; each step runs the model
    once and commits some tokens of the block. The samplers in `dlm_bridge.generation.SAMPLERS` differ in which tokens
    and in the order of blocks. The mask token itself is never emitted.

    A setting is taken from the first of: a keyword argument, `generation_config`, the model's own
    `generation_config`, the model's block size, the family's defaults, the sampler's defaults. The keywords are the
    fields of `DiffusionGenerationConfig`. `max_length` (prompt included) works as in transformers. The temperature
    decides between greedy decoding and sampling; `do_sample=False` means temperature 0, `do_sample=True` without a
    temperature 1.0. `use_cache` has no effect: the setting `cache` chooses the KV cache.

    Args:
        model: one of this package's diffusion models, plain or wrapped by PEFT; its train or eval mode is not changed.
        inputs, input_ids: [B, P] prompt token ids, two names for one argument. P may be 0.
        generation_config: a `DiffusionGenerationConfig`, or transformers' own with such fields.
        attention_mask: [B, P], zero at padding, on the left or on the right; without it every token is real. Each row
            is computed as if it were alone: the model sees neither the padding nor the positions it takes.
        generator: a torch.Generator that the rows' seeds are drawn from, or one per row, which makes rows independent
            of the batch. Without it and without `seed`, torch's global random state is used, of a tensor-parallel
            model the first process's.
        streamer: one object or a list of them: a transformers streamer, which gets the prompts and then each run of
            new tokens as soon as they are final, or a step callback with `on_step(step)`, which gets a `DenoisingStep`
            after every forward pass; see `dlm_bridge.generation.callbacks`.
        commit_rule: chooses the proposals that a step commits, instead of the sampler's own rule; an object serves one
            call at a time. `register_sampler` adds a sampler of one's own.
        **kwargs: any setting, for this call. `eos_token_id=None` turns stopping off.

    Returns:
        [B, P + new] token ids, with `num_return_sequences` n [B * n, P + new], on the device of the model's
        embedding. Prompts that were padded on the right come back padded on the left, so that the new tokens always
        are `output[:, P:]`. Behind its first end-of-sequence token a row is filled with `pad_token_id`, and the
        longest row ends the output; without stopping, new is `gen_length`. A sampler that inserts and deletes tokens
        ends a row where its text ends; of prompts to fill, a row's text begins where its prompt does and is followed
        by padding. With `return_dict_in_generate=True` a `DiffusionGenerateOutput`.

    Raises:
        DlmBridgeError: a setting or an input that the sampler cannot run, with the remedy.
        NonFiniteError: logits are NaN or infinite, in the rows that it names or in all.
    """
    began = time.perf_counter()
    if inputs is not None and input_ids is not None:
        raise DlmBridgeError("inputs and input_ids are the same argument: give one of them")
    tokens_BP = check_ids(input_ids if inputs is None else inputs, attention_mask)
    longest = None if attention_mask is None else int(attention_mask.sum(dim=1).max())
    settings = resolve_settings(model, generation_config, kwargs, tokens_BP.shape[1], longest)
    if attention_mask is None:
        warn_of_padding(tokens_BP, settings.pad_token_id)
    spec = sampler_spec(settings, commit_rule)
    limits = settings.limits
    make_prompt = partial(PromptBatch.build, limits=limits, device=input_device(model))
    prompt, trials, row_trials = make_prompt(tokens_BP, attention_mask), 0, 0
    given_rows = [row for row in prompt.rows for _ in range(settings.num_return_sequences)]
    if settings.span_lengths:
        make_padded = partial(_left_padded, make_prompt, settings.pad_token_id)
        rows, trials, row_trials = fit_spans(model, prompt.rows, spec, settings, make_padded)
        prompt = make_padded(rows)
    prompt = prompt.repeated(settings.num_return_sequences)
    seed = settings.seed if generator is None else kwargs.get("seed")  # a generator wins over a stored seed
    if seed is None and generator is None:
        seed = shared_seed(model)
    noise = Noise.build(generator, seed, given_rows, prompt.tokens.device)
    keep_history = settings.return_dict and settings.output_history
    callbacks = None
    if streamer or keep_history:
        callbacks = CallbackHandler(streamer, keep_history=keep_history, batch=len(prompt.rows))
    stop = StopCondition(settings.eos_token_ids, prompt.tokens.device, settings.stop_strings, kwargs.get("tokenizer"))
    constraints = call_constraints(settings, spec, prompt.tokens.shape[1])
    with rows_named(lambda row: row // settings.num_return_sequences):
        result = denoise(model, prompt, spec, settings, noise, stop, constraints, callbacks)
    _refuse_masks(result.sequences, prompt, limits.masked_token_id)
    if not settings.return_dict:
        return result.sequences
    if result.sequences.device.type == "cuda":
        torch.cuda.synchronize(result.sequences.device)
    row_forwards = result.row_forwards + row_trials * settings.num_return_sequences
    return DiffusionGenerateOutput(
        sequences=result.sequences,
        row_ends=result.row_ends,
        forwards=result.forwards + trials,
        tokens_per_forward=int(result.new_tokens) / max(row_forwards, 1),
        time=time.perf_counter() - began,
        history=tuple(callbacks.history) if callbacks is not None and keep_history else None,
    )


@dataclass(frozen=True)
class SamplingResult:
    """Result of the denoising loop.

    Args:
        sequences: [B, P + new].
        forwards: forward passes of the model.
        row_forwards: sum over the forward passes of the rows that took part.
        new_tokens: number of new tokens of all rows, each as far as its end.
        row_ends: [B], the column behind each row's last token.
    """

    sequences: torch.Tensor
    forwards: int
    row_forwards: int
    new_tokens: torch.Tensor
    row_ends: torch.Tensor


def denoise(
    model: Any,
    prompt: PromptBatch,
    spec: SamplerSpec,
    settings: GenerationSettings,
    noise: Noise,
    stop_condition: StopCondition,
    constraints: Constraints | None,
    callbacks: CallbackHandler | None,
) -> SamplingResult:
    """Run the sampler. Rows that have ended leave the batch after their block.

    Raises:
        DlmBridgeError: a cache that the sampler does not have, or an execution that the model or its device does not.
        NonFiniteError: logits are NaN or infinite.
    """
    canvas = Canvas(prompt, spec.layout, settings.limits, settings.pad_token_id, stop_condition)
    rule = spec.rule if constraints is None else spec.rule.constrained(constraints)
    kv_cache = choose_cache(spec.predictor, model, settings.cache)
    copies = 2 if spec.predictor_options.get("cfg_scale") else 1
    rows = copies * len(canvas.rows)
    with ModelRunner.open(model, settings.execution, kv_cache, rows=rows, width=canvas.width) as runner:
        context = sampler_context(spec, settings, runner, canvas, kv_cache, noise, constraints, callbacks)
        if callbacks is not None:
            callbacks.begin(canvas)
        for _ in denoise_rows(context, rule):
            canvas.refuse_failed()
    sequences = canvas.output()
    if callbacks is not None:
        callbacks.end(sequences)
    return SamplingResult(
        sequences,
        context.predictor.forwards,
        context.row_forwards,
        canvas.new_tokens(),
        canvas.output_ends(),
    )


def sampler_context(
    spec: SamplerSpec,
    settings: GenerationSettings,
    runner: ModelRunner,
    canvas: Canvas,
    kv_cache: KVCache,
    noise: Noise,
    constraints: Constraints | None,
    callbacks: StepObserver | None,
    planner: Callable[[Any], DenoisingRule] | None = None,
) -> SamplerContext:
    """What the rows of a canvas are denoised with."""
    predictor = spec.predictor(runner, canvas, kv_cache, shift=settings.shift, **spec.predictor_options)
    predictor.commits_first_token = spec.first_token is not None
    return SamplerContext(
        canvas,
        predictor,
        spec.sampling,
        constraints,
        noise,
        callbacks,
        settings.limits.vocabulary_size,
        first_token=spec.first_token,
        window=spec.window,
        logits_bias=spec.logits_bias,
        planner=planner,
    )


def denoise_rows(
    context: SamplerContext,
    rule: DenoisingRule,
    enter: Callable[[], None] = lambda: None,
    may_launch: Callable[[], bool] = lambda: True,
) -> Iterator[bool]:
    """Denoise the rows of the canvas until none is left. Yields after each step: whether rows have completed a block.

    Args:
        enter: called between two steps, lets rows enter the canvas.
        may_launch: whether a forward pass of the rows that go on may be launched before they are known.
    """
    canvas, predictor = context.canvas, context.predictor

    def launch() -> None:
        if may_launch():
            predictor.launch_speculatively(done=True)

    def leave_block(rows: list[int]) -> bool:
        over = canvas.close_block(rows)
        if not over:
            return False
        if context.callbacks is not None:
            context.callbacks.block(canvas, canvas.block, over)
        names = canvas.names
        stay = canvas.retire(over, partial(canvas.read, overlap_with=launch))
        if canvas.failed & ({*names} - {*canvas.names}):
            predictor.cache.drop_non_finite()
        if stay is not None:
            context.noise.select_rows(stay)
            predictor.select_rows(stay)
        return True

    while canvas.names:
        opening = canvas.open_block()
        nothing_to_do: set[int] = set()
        if opening:
            predictor.open_block(canvas.block, opening)
            nothing_to_do = {*opening} - {*rule.begin_block(context, canvas.block, opening)}
        inside = [row for row in canvas.rows if canvas.inside[row]]
        active = [row for row in inside if row not in nothing_to_do]
        going = set(rule.denoise_step(context, canvas.block, active) if active else ())
        for row in active:
            canvas.steps[row] += 1
        yield leave_block([row for row in inside if row not in going])
        unwanted = canvas.unwanted()
        if unwanted:
            leave_block(unwanted)
        enter()


def choose_cache(predictor: type[Predictor], model: Any, wanted: CacheMode | None) -> KVCache:
    """The cache that is asked for; by default the exact one that stores, where the predictor has one."""
    kinds = {kind.mode: kind for kind in predictor.caches}
    if wanted is None:
        storing = [kind for kind in predictor.caches if kind.stores and kind.exact]
        return storing[0]() if storing and supports_kv_cache(model) else KVCache()
    if wanted not in kinds:
        raise DlmBridgeError(f"this sampler has no cache '{wanted}', its attention allows {' or '.join(kinds)}")
    return kinds[wanted]()


def sampler_spec(settings: GenerationSettings, commit_rule: CommitRule | None) -> SamplerSpec:
    """The parts of the call's sampler, with the caller's rule in place of its own. Raises DlmBridgeError."""
    sampler, limits = settings.sampler, settings.limits
    if limits.context is not None and not limits.infill and limits.gen_length > limits.context:
        raise DlmBridgeError(  # before blocks and steps that do not divide it
            f"gen_length {limits.gen_length} alone is beyond the model's context of {limits.context}: use "
            f"{limits.context} less the prompt's tokens, or fewer"
        )
    spec = sampler.spec(SpecialTokens.of(settings))
    closing = spec.layout.closing
    if closing is not None and closing >= limits.vocabulary_size:
        raise DlmBridgeError(
            f"the {sampler.name} sampler puts token {closing} at the text's end, outside the vocabulary of "
            f"{limits.vocabulary_size}: pass another eos_token_id and pad_token_id"
        )
    if commit_rule is None:
        return spec
    if not sampler.takes_commit_rule:
        raise DlmBridgeError(f"the {sampler.name} sampler takes no commit_rule: leave it out")
    return replace(spec, rule=CheckedRule(commit_rule))


def call_constraints(settings: GenerationSettings, spec: SamplerSpec, prompt_width: int) -> Constraints | None:
    """The constraints that the caller or the sampler asks for; None without any. Raises DlmBridgeError."""
    if not settings.constraints and not spec.suppress:
        return None
    return read_constraints(
        settings.constraints.get,
        prompt_width=prompt_width,
        vocabulary_size=settings.limits.vocabulary_size,
        mask_token_id=settings.limits.masked_token_id,
        eos_token_ids=settings.eos_token_ids,
        pad_token_id=settings.pad_token_id,
        suppress=spec.suppress,
    )


def _left_padded(make_prompt: Callable[..., PromptBatch], pad_token_id: int, rows: list[list[int]]) -> PromptBatch:
    width = max(map(len, rows))
    tokens = torch.tensor([[pad_token_id] * (width - len(row)) + row for row in rows])
    real = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return make_prompt(tokens, real)


def input_device(model: Any) -> torch.device:
    """The device of the model's input. Raises DlmBridgeError for a model without weights."""
    embedding = model.get_input_embeddings()
    device: torch.device = embedding.weight.device
    if device.type == "meta":  # offloaded: accelerate's hook names the device
        hook = getattr(embedding, "_hf_hook", None)
        if hook is None:
            raise DlmBridgeError(
                "the model is on the meta device, without weights: load it with from_pretrained, or move it with "
                "to_empty and load its state_dict"
            )
        device = torch.device(hook.execution_device)
    return device


def _refuse_masks(tokens_BS: torch.Tensor, prompt: PromptBatch, mask_token_id: int) -> None:
    """Raise DlmBridgeError where a sampler's rule has left masks."""
    pads_B = torch.tensor(prompt.pads, device=tokens_BS.device)
    real_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device) >= pads_B[:, None]
    if bool(((tokens_BS == mask_token_id) & real_BS).any()):
        raise DlmBridgeError(MASKS_LEFT)
