"""What `dlm-bridge generate` does once its options are read: one prompt with its show, or a file of prompts."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TextIO

import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import Progress
from transformers.utils import logging

from dlm_bridge.cli.generate import Request
from dlm_bridge.cli.train import quieten_peft
from dlm_bridge.convert.atomic import atomic_file
from dlm_bridge.generation.display.html import page
from dlm_bridge.generation.display.terminal import live
from dlm_bridge.generation.display.trace import DenoisingTrace, TokenStrings
from dlm_bridge.generation.texts import (
    GeneratedTexts,
    WrittenPrompt,
    as_message,
    check_prompts,
    mask_token,
    read_prompts,
    seeds_of,
    write_texts,
)
from dlm_bridge.loading import LoadedModel, Placement, load_model


def run(request: Request) -> None:
    """Open the model and sample. Under a launcher all processes do so together and the first one writes."""
    logging.set_verbosity_error()  # warnings of transformers' generate are about settings that were checked here
    logging.disable_progress_bar()
    quieten_peft()
    prompts = [] if request.jsonl is None else _read(request)
    placement = Placement(request.device, request.device_map, request.offload_folder, request.tp_plan)
    opened = load_model(
        request.model,
        placement,
        dtype=request.dtype,
        family=request.family,
        revision=request.revision,
        like=request.like,
        tokenizer=request.tokenizer,
    )
    try:
        if request.jsonl is None:
            _sample_one(request, opened, request.settings)
        else:
            _sample_file(request, opened, request.settings, prompts)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _sample_one(request: Request, opened: LoadedModel, settings: dict[str, Any]) -> None:
    text = str(request.prompt)
    prompt = as_message(text, request.system) if request.chat else WrittenPrompt(text=text)
    ids = prompt.encode(opened.tokenizer, request.model, _span_token(opened, settings))
    film = None
    if (request.show or request.html) and _is_main():
        film = DenoisingTrace(
            TokenStrings(opened.tokenizer, mask_token(opened.model, settings) if opened.diffusion else None), ids
        )
    with live(film, Console()) if film is not None and request.show else nullcontext():
        result = _sample(opened, [ids], settings, film)
    if not _is_main():
        return
    facts = {"model": request.model, "family": opened.family, **_figures(result)}
    if film is not None and request.html is not None:
        with atomic_file(request.html, request.overwrite) as stream:
            stream.write(page(film, request.model, {**settings, **_rounded(facts)}))
    with _stdout_or(request) as stream:
        if request.as_json:
            samples = zip(result.texts, result.token_ids, strict=True)
            report = {**facts, "prompt": text, "samples": [{"text": text, "token_ids": ids} for text, ids in samples]}
            stream.write(json.dumps(report, ensure_ascii=False, indent=2) + "\n")
        else:
            stream.write("\n".join(result.texts) + "\n")
    if not request.as_json:
        typer.echo(_summary(result), err=True)


def _sample_file(
    request: Request, opened: LoadedModel, settings: dict[str, Any], prompts: Sequence[WrittenPrompt]
) -> None:
    span_token = _span_token(opened, settings)
    tokens = [prompt.encode(opened.tokenizer, f"{prompt.where}: {request.model}", span_token) for prompt in prompts]
    named = [(prompt.where, ids) for prompt, ids in zip(prompts, tokens, strict=True)]
    check_prompts(opened.model, named, settings, diffusion=opened.diffusion)
    seeds = seeds_of(opened.model, tokens, settings) if opened.diffusion else None
    copies = len(seeds) // len(tokens) if seeds else 0
    done: list[GeneratedTexts] = []
    began = time.perf_counter()
    size = request.batch_size
    with _stdout_or(request) as stream, _progress(len(prompts)) as advance:
        for start in range(0, len(prompts), size):
            own = seeds[start * copies : (start + size) * copies] if seeds else None
            if not opened.diffusion and settings.get("seed") is not None:  # of a whole batch: each draws anew
                settings = {**settings, "seed": settings["seed"] + (start > 0)}
            result = _sample(opened, tokens[start : start + size], settings, None, own)
            done.append(result)
            each = len(result.texts) // len(tokens[start : start + size])  # several, with num_return_sequences
            for place, (text, ids, count) in enumerate(
                zip(result.texts, result.token_ids, result.counts, strict=True)
            ):
                row = {
                    **prompts[start + place // each].row,
                    "text": text,
                    "tokens": count,
                    "forwards": result.forwards,
                    "token_ids": ids,
                }
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
            stream.flush()
            advance(len(result.texts) // each)
    if not _is_main():
        return
    seconds = time.perf_counter() - began
    report = {
        "model": request.model,
        "family": opened.family,
        "prompts": len(prompts),
        "tokens": sum(result.tokens for result in done),
        "forwards": sum(result.forwards for result in done),
        "seconds": seconds,
    }
    if request.as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        typer.echo(
            f"{report['prompts']} prompts: {report['tokens']} tokens in {report['forwards']} forwards, "
            f"{seconds:.2f} s",
            err=True,
        )


def _sample(
    opened: LoadedModel,
    prompts: Sequence[Sequence[int]],
    settings: dict[str, Any],
    film: DenoisingTrace | None,
    seeds: Sequence[int] | None = None,
) -> GeneratedTexts:
    watcher = None if film is None else film if opened.diffusion else film.tokens()
    return write_texts(
        opened.model, opened.tokenizer, prompts, settings, diffusion=opened.diffusion, watcher=watcher, seeds=seeds
    )


def _read(request: Request) -> list[WrittenPrompt]:
    return read_prompts(str(request.jsonl), request.field, request.chat, request.system)


def _span_token(opened: LoadedModel, settings: dict[str, Any]) -> int | None:
    """What [MASK] in a prompt stands for, where it is to be filled."""
    return mask_token(opened.model, settings) if opened.diffusion and settings.get("infill") else None


def _figures(result: GeneratedTexts) -> dict[str, Any]:
    return {
        "tokens": result.tokens,
        "forwards": result.forwards,
        "tokens_per_forward": result.tokens_per_forward,
        "seconds": result.seconds,
    }


def _rounded(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in facts.items()}


def _summary(result: GeneratedTexts) -> str:
    return (
        f"{result.tokens} tokens in {result.forwards} forwards ({result.tokens_per_forward:.2f} a forward), "
        f"{result.seconds:.2f} s"
    )


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def _stdout_or(request: Request) -> Iterator[TextIO]:
    """Where the first process's results go; what the others have is thrown away."""
    if not _is_main():
        with open(os.devnull, "w") as stream:
            yield stream
    elif request.output is None:
        yield sys.stdout
    else:
        with atomic_file(request.output, request.overwrite) as stream:
            yield stream


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar over prompts on stderr, where that is a terminal."""
    console = Console(stderr=True)
    if not (console.is_terminal and _is_main()):
        yield lambda count: None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("sampling", total=total)
        yield lambda count: bar.advance(task, count)
