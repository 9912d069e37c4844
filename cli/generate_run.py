"""Execution of `dlm-bridge generate`: one prompt with its display, or a file of prompts."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from transformers.utils import logging

from dlm_bridge import terminal
from dlm_bridge.cli.generate_request import EMPTY, GenerateOptions
from dlm_bridge.cli.train import quieten_peft
from dlm_bridge.distributed import is_main
from dlm_bridge.errors import DlmBridgeError, RowError, SettingError, counted
from dlm_bridge.files.atomic import atomic_file, check_new_file
from dlm_bridge.files.partial import PartialOutput
from dlm_bridge.files.reading import bytes_digest
from dlm_bridge.generation.batch_size import plan_shared_batch
from dlm_bridge.generation.offline import (
    GeneratedTexts,
    PromptSampler,
    check_prompts,
    compile_constraint,
    copies_of,
    draws,
    ending_tokens,
    prompt_errors,
    seeds_of,
    write_texts,
)
from dlm_bridge.generation.prompts import WrittenPrompt, as_message, read_prompts
from dlm_bridge.generation.request import MASK, Failed
from dlm_bridge.hub import checkpoint_folder
from dlm_bridge.job import process_group_ends
from dlm_bridge.loading import LoadedModel, Placement, join_replicas, load_model
from dlm_bridge.registration import load
from dlm_bridge.replicas import Replicas

DISPLAYS = ("show", "html", "svg")  # options of the extension `display`
NAMED = 10  # failed lines that an error names after the first three
FILL = "`infill`"  # remedy for masks in a prompt


def run(request: GenerateOptions) -> None:
    """Load the model and sample. Under a launcher, each process has a shard of the model, or the whole model and a
    part of the prompts, or both in groups; the first process writes."""
    logging.set_verbosity_error()  # transformers' generate warns about settings that are checked here
    logging.disable_progress_bar()
    quieten_peft()
    if request.jsonl is not None and request.output is not None:
        check_new_file(request.output, request.overwrite)
    displays = {name: load("features", f"generate --{name}") for name in DISPLAYS if getattr(request, name)}
    prompts = []
    if request.jsonl is not None:
        prompts = read_prompts(request.jsonl, request.field, request.chat, request.system, request.chat_template_args)
    constraint = _constraint(request)
    placement = Placement.of(request.loading, replicated=request.jsonl is not None)
    with process_group_ends():
        loaded = load_model(request.model, placement, **request.loading.source)
        if request.jsonl is None:
            _sample_one(request, loaded, request.settings, displays, constraint)
        else:
            _sample_file(request, loaded, request.settings, prompts, join_replicas(placement), constraint)


def _constraint(request: GenerateOptions) -> Any:
    """The constraint of the options; None if there is none."""
    stated = request.constraint
    return None if stated is None else load("features", "structured output").read_constraint(stated)


def _sample_one(
    request: GenerateOptions,
    loaded: LoadedModel,
    settings: dict[str, Any],
    displays: Mapping[str, Callable[..., Any]],
    constraint: Any,
) -> None:
    text = request.prompt or ""
    prompt = as_message(text, request.system, request.chat_template_args) if request.chat else WrittenPrompt(text=text)
    ids = prompt.encode(loaded.tokenizer, request.model, _infills(loaded, settings))
    check_prompts(loaded.model, [("prompt", ids)], settings, FILL)
    trace = None
    if displays and is_main():
        ends = ending_tokens(loaded.model, settings)
        trace = load("features", "denoising trace")(loaded.tokenizer, ids, ends)
    with displays["show"](trace, Console()) if trace is not None and request.show else nullcontext():
        result = _sample(loaded, [ids], settings, trace, constraint)
    if not is_main():
        return
    facts = {"model": request.model, "family": loaded.family, **_figures(result)}
    if trace is not None and request.html is not None:
        with atomic_file(request.html, request.overwrite) as stream:
            stream.write(displays["html"](trace, request.model, {**settings, **_rounded(facts)}))
    if trace is not None and request.svg is not None:
        with atomic_file(request.svg, request.overwrite) as stream:
            stream.write(displays["svg"](trace, str(loaded.family)))
    with _stdout_or(request) as stream:
        if request.json:
            samples = zip(result.texts, result.token_ids, strict=True)
            report = {**facts, "prompt": text, "samples": [{"text": text, "token_ids": ids} for text, ids in samples]}
            stream.write(json.dumps(report, ensure_ascii=False, indent=2) + "\n")
        else:
            stream.write("\n".join(result.texts) + "\n")
    if not request.json:
        _tell(result.summary)


def _sample_file(
    request: GenerateOptions,
    loaded: LoadedModel,
    settings: dict[str, Any],
    prompts: Sequence[WrittenPrompt],
    replicas: Replicas,
    constraint: Any,
) -> None:
    given = prompts
    prompts, tokens, failed, constraints = _encoded(request, loaded, settings, given, constraint)
    if not prompts:
        raise _failure(failed, given, None)
    if request.commit_steps and not loaded.diffusion:
        raise SettingError("commit_steps", f"{request.model} is not a diffusion model")
    copies = copies_of(loaded.model, settings)
    # A call of `generate` chooses the lengths of spans, and has all beams of a prompt.
    closed = bool(settings.get("span_lengths")) or (copies > 1 and not draws(loaded.model, settings))
    if closed and constraints:
        raise SettingError("constraint", "excludes `span_lengths` and `num_beams` in a file of prompts")
    sample = _rows_of_calls if closed else partial(_rows, recorded=request.commit_steps, constraints=constraints)
    unfinished, done, keys = _resumed(request, loaded, prompts, tokens, copies, replicas)
    began = time.perf_counter()
    size = request.batch_size
    if size is None:
        lengths = [len(ids) for ids in tokens]
        plan = plan_shared_batch(replicas, loaded.model, lengths, settings, diffusion=loaded.diffusion)
        size = plan.rows
        if replicas.leads:
            _tell(plan.summary)
    if replicas.shares > 1 and seeds_of(loaded.model, tokens, settings) is None:
        # Seeds of all rows derive from one number; otherwise, processes would draw the same random numbers.
        settings = {**settings, "seed": replicas.broadcast(int(torch.randint(2**31, (1,))))}
    forwards, written = _Count(), _Count()

    def line(index: int, facts: Facts) -> str:
        """A line of the output. Writes new rows to the partial file."""
        row = {**prompts[index // copies].row, **facts}
        if unfinished is not None and index not in done and replicas.leads_share:
            unfinished.add(keys[index], row)
        written.value += facts["tokens"]
        return json.dumps(row, ensure_ascii=False) + "\n"

    sampled = sample(loaded, tokens, settings, size, copies, forwards, replicas, done)
    lost: set[int] = set()  # failed rows
    rows = _finished(sampled, prompts, copies, failed, lost)
    with _progress(len(prompts) * copies) as advance:
        if request.output is None and replicas.shares == 1:
            for index, facts in _in_order(rows, lost):
                sys.stdout.write(line(index, facts))
                sys.stdout.flush()
                advance(index + 1)
        else:
            try:
                lines = _gathered(rows, line, done, replicas, advance)
                forwards.value = sum(replicas.gather(forwards.value))
                written.value = sum(replicas.gather(written.value))
            except KeyboardInterrupt:
                raise KeyboardInterrupt("interrupted" + ("" if unfinished is None else unfinished.note())) from None
            failed = {where: reason for part in replicas.gather(failed) for where, reason in part.items()}
            if request.output is None or not failed:
                with _stdout_or(request) as stream:
                    stream.writelines(lines)
            if unfinished is not None:
                unfinished.close()
                if replicas.leads and not failed:
                    unfinished.remove()
    if failed:
        raise _failure(failed, given, unfinished)
    if not is_main():
        return
    seconds = time.perf_counter() - began
    report = {
        "model": request.model,
        "family": loaded.family,
        "prompts": len(prompts),
        "tokens": written.value,
        "forwards": forwards.value,
        "seconds": seconds,
    }
    if request.json:
        typer.echo(json.dumps(report, indent=2))
    else:
        passes = counted(forwards.value, "forward pass", "forward passes")
        texts = f"{counted(len(prompts), 'prompt')}: {counted(written.value, 'token')}"
        _tell(f"{texts} in {seconds:.2f} s, {passes}")


def _encoded(
    request: GenerateOptions,
    loaded: LoadedModel,
    settings: dict[str, Any],
    prompts: Sequence[WrittenPrompt],
    constraint: Any,
) -> tuple[list[WrittenPrompt], list[list[int]], dict[str, str], list[Any]]:
    """Encode the prompts. Returns the valid ones, their tokens, the reasons against the others by line, and the
    constraints of the valid ones: the row's own, else `constraint`; empty if none has one."""
    encoded, failed, infill = [], {}, _infills(loaded, settings)
    for prompt in prompts:
        if prompt.text == "" and not request.unconditional:
            failed[prompt.where] = EMPTY
            continue
        try:
            encoded.append((prompt, prompt.encode(loaded.tokenizer, request.model, infill)))
        except DlmBridgeError as error:
            failed[prompt.where] = str(error)
    errors = prompt_errors(loaded.model, [(prompt.where, ids) for prompt, ids in encoded], settings, FILL)
    failed |= {encoded[number][0].where: error.reason for number, error in errors.items()}
    fitting = [one for number, one in enumerate(encoded) if number not in errors]
    constraints: list[Any] = []
    if constraint is not None or any(prompt.row.get("constraint") is not None for prompt, _ in fitting):
        kept = []
        for prompt, ids in fitting:
            try:
                constraints.append(_row_constraint(loaded, settings, prompt, ids, constraint))
                kept.append((prompt, ids))
            except (SettingError, RowError) as error:
                failed[prompt.where] = str(error) if isinstance(error, SettingError) else error.reason
        fitting = kept
    return [prompt for prompt, _ in fitting], [ids for _, ids in fitting], failed, constraints


def _row_constraint(
    loaded: LoadedModel, settings: dict[str, Any], prompt: WrittenPrompt, ids: Sequence[int], otherwise: Any
) -> Any:
    """The compiled constraint of a row; None if it has none. Raises SettingError or RowError."""
    stated = prompt.row.get("constraint")
    if stated is not None:
        otherwise = load("features", "structured output").read_constraint(stated)
    if otherwise is None:
        return None
    return compile_constraint(loaded.model, loaded.tokenizer, otherwise, prompt.where, ids, settings)


def _finished(
    rows: Iterator[tuple[int, Facts | RowError]],
    prompts: Sequence[WrittenPrompt],
    copies: int,
    failed: dict[str, str],
    lost: set[int],
) -> Iterator[tuple[int, Facts]]:
    """Yield finished rows. Failed rows are added to `lost`, and their reasons to `failed`, by line."""
    for index, facts in rows:
        if isinstance(facts, RowError):
            where = prompts[index // copies].where
            failed[where] = facts.reason
            lost.add(index)
        else:
            yield index, facts


def _failure(
    failed: Mapping[str, str], prompts: Sequence[WrittenPrompt], unfinished: PartialOutput | None
) -> RowError:
    """Error that names the failed rows, with the reason of the first one."""
    rows = [prompt.where for prompt in prompts if prompt.where in failed]
    note = "" if unfinished is None else unfinished.note("`resume` continues with these lines corrected or removed")
    others = "" if len(rows) == 1 else f" (the first one; {len(rows)} of {len(prompts)} rows failed)"
    if len(rows) > 3:  # RowError itself names three
        others = f"{others[:-1]}, also {', '.join(rows[3 : 3 + NAMED])}{', ...' if len(rows) > 3 + NAMED else ''})"
    return RowError(f"{failed[rows[0]]}{others}{note}", rows)


@dataclass
class _Count:
    value: int = 0


Facts = dict[str, Any]  # output fields of a row besides its prompt's


def _resumed(
    request: GenerateOptions,
    loaded: LoadedModel,
    prompts: Sequence[WrittenPrompt],
    tokens: Sequence[Sequence[int]],
    copies: int,
    replicas: Replicas,
) -> tuple[PartialOutput | None, dict[int, Facts], list[str]]:
    """Open the file of finished rows.

    Returns:
        The file; the rows that an interrupted command has finished, in all processes; and the key of each row in the
        file, a digest of its content, so that other lines of the input may change.
    """
    if request.output is None:
        return None, {}, []
    call = [
        str(checkpoint_folder(request.model).absolute()),
        [
            request.loading.revision,
            request.loading.family,
            request.loading.like,
            str(loaded.model.dtype),
            request.commit_steps,
        ],
        request.settings if request.constraint is None else {**request.settings, "constraint": request.constraint},
    ]
    seeds, keys, counts = seeds_of(loaded.model, tokens, request.settings), [], Counter[str]()
    for index in range(len(prompts) * copies):
        content = [
            prompts[index // copies].row,
            list(tokens[index // copies]),
            None if seeds is None else seeds[index],
        ]
        digest = bytes_digest(json.dumps(content, sort_keys=True, default=str).encode())
        counts[digest] += 1
        keys.append(f"{digest} {counts[digest]}")
    unfinished = PartialOutput(request.output, call, replicas.number)
    found = {
        key: row
        for part in replicas.gather(unfinished.start(request.resume, request.overwrite))
        for key, row in part.items()
    }
    done = {index: found[key] for index, key in enumerate(keys) if key in found}
    if found and not done:
        raise unfinished.of_another_call()
    return unfinished, done, keys


def _in_order(rows: Iterator[tuple[int, Facts]], lost: Container[int]) -> Iterator[tuple[int, Facts]]:
    """Yield rows in the order of their index, each as soon as all earlier rows have arrived or are `lost`."""
    early: dict[int, Facts] = {}
    following = 0
    for index, row in rows:
        early[index] = row
        while following in early or following in lost:
            if following in early:
                yield following, early.pop(following)
            following += 1
    yield from sorted(early.items())  # rows after one that was lost last


def _gathered(
    rows: Iterator[tuple[int, Facts]],
    line: Callable[[int, Facts], str],
    done: Mapping[int, Facts],
    replicas: Replicas,
    advance: Callable[[int], None],
) -> list[str]:
    """Collect the lines of all processes and of `done` rows, in the order of their index."""
    lines = {index: line(index, facts) for index, facts in done.items()} if replicas.leads else {}
    count = 0
    with replicas.named():
        for index, facts in rows:
            if index in done:  # sampled again with other rows of its prompt
                continue
            lines[index] = line(index, facts)
            count += replicas.shares  # other processes are at about the same row
            advance(len(done) + count)
    merged = {index: text for part in replicas.gather(lines) for index, text in part.items()}
    return [merged[index] for index in sorted(merged)]


def _rows(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    settings: dict[str, Any],
    size: int,
    copies: int,
    forwards: _Count,
    replicas: Replicas,
    done: Container[int],
    recorded: bool = False,
    constraints: Sequence[Any] = (),
) -> Iterator[tuple[int, Facts | RowError]]:
    """Sample this process's rows that are not `done`, and yield (index, output fields or error) as they end.

    Args:
        forwards: set to the number of forward passes.
        recorded: include trajectories.
        constraints: one per prompt; empty: none.
    """
    sampler = PromptSampler(
        loaded.model,
        loaded.tokenizer,
        prompts,
        settings,
        size,
        replicas,
        record=recorded,
        skip=done,
        constraints=constraints,
    )
    for row in sampler:
        if isinstance(row, Failed):
            assert isinstance(row.error, RowError)
            yield row.name, row.error
            continue
        text = loaded.tokenizer.decode(row.tokens, skip_special_tokens=True)
        prompt = prompts[row.name // copies]
        new = len(row.tokens) - (sum(token != MASK for token in prompt) if settings.get("infill") else 0)
        facts = {"text": text, "tokens": new, "forwards": row.forwards, "token_ids": row.tokens}
        if recorded:
            facts |= {"prompt_token_ids": list(prompt), "commit_steps": list(row.steps[: len(row.tokens)])}
        yield row.name, facts
    forwards.value = sampler.engine.forwards


def _rows_of_calls(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    settings: dict[str, Any],
    size: int,
    copies: int,
    forwards: _Count,
    replicas: Replicas,
    done: Container[int],
) -> Iterator[tuple[int, Facts | RowError]]:
    """`_rows` with one call of `generate` per prompt. Prompts with some finished rows are sampled again."""
    seeds = seeds_of(loaded.model, prompts, settings)
    left = [
        number
        for number in range(len(prompts))
        if any(index not in done for index in range(number * copies, (number + 1) * copies))
    ]
    for number in replicas.share(left):
        own = seeds[number * copies : (number + 1) * copies] if seeds else None
        if own is not None:
            settings = {**settings, "seed": own if loaded.diffusion else own[0]}
        try:
            result = _sample(loaded, [prompts[number]], settings, None)
        except DlmBridgeError as error:
            reason = error.reason if isinstance(error, RowError) else str(error)
            for place in range(copies):
                yield number * copies + place, RowError(reason)
            continue
        forwards.value += result.forwards
        for place, (text, ids, count) in enumerate(zip(result.texts, result.token_ids, result.counts, strict=True)):
            facts = {"text": text, "tokens": count, "forwards": result.forwards, "token_ids": list(ids)}
            yield number * copies + place, facts


def _sample(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    settings: dict[str, Any],
    trace: Any,
    constraint: Any = None,
) -> GeneratedTexts:
    streamer = None if trace is None else trace if loaded.diffusion else trace.token_streamer()
    return write_texts(loaded.model, loaded.tokenizer, prompts, settings, streamer=streamer, constraint=constraint)


def _infills(loaded: LoadedModel, settings: dict[str, Any]) -> bool:
    """True if [MASK] in a prompt is a token to fill in."""
    return loaded.diffusion and bool(settings.get("infill"))


def _figures(result: GeneratedTexts) -> dict[str, Any]:
    return {
        "tokens": result.tokens,
        "forwards": result.forwards,
        "tokens_per_forward": result.tokens_per_forward,
        "seconds": result.seconds,
    }


def _rounded(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in facts.items()}


@contextmanager
def _stdout_or(request: GenerateOptions) -> Iterator[TextIO]:
    """Context manager: the output of the first process; other processes discard theirs."""
    if not is_main():
        with open(os.devnull, "w") as stream:
            yield stream
    elif request.output is None:
        yield sys.stdout
    else:
        with atomic_file(request.output, request.overwrite) as stream:
            yield stream


def _tell(text: str) -> None:
    """Print a summary on stderr, beside the results."""
    if not terminal.is_quiet():
        typer.echo(text, err=True)


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """Context manager: a progress bar on stderr, if that is a terminal, called with the number of finished rows."""
    console = Console(stderr=True)
    if terminal.is_quiet() or not (console.is_terminal and is_main()):
        yield lambda number: None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("sampling", total=total)
        yield lambda number: bar.update(task, completed=number)
