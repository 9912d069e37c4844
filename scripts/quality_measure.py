"""What a trained model is worth: its exact loss or its bound on held-out text, and what it writes by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from quality_stories import Departure, read, understood

if TYPE_CHECKING:
    from dlm_bridge.evaluation.likelihood import Answer

CHUNK_TOKENS = 1 << 15  # of one forward pass


@dataclass(frozen=True)
class HeldOut:
    """Rows of held-out tokens: the first of each is given, the others are to be predicted."""

    rows: list[list[int]]
    bytes: int  # of the text that is to be predicted
    truth: list[float] | None = None  # nats of each row under the source itself, where that is known
    left_out: float = 0.0  # the share of documents that were longer than a row

    @property
    def tokens(self) -> int:
        return sum(len(row) - 1 for row in self.rows)


@dataclass(frozen=True)
class Sampling:
    """A way of sampling, by the settings of the model's own `generate`."""

    name: str
    settings: dict[str, Any]


def rows_of_stories(tokenizer: Any, stories: Sequence[tuple[str, float]], seq_length: int, rows: int) -> HeldOut:
    """Whole stories with an EOS before, between and after them, as many as go into `seq_length` tokens, until there
    are `rows` rows. Raises ValueError where the stories do not suffice."""
    eos = tokenizer.eos_token_id
    found: list[list[int]] = []
    truth: list[float] = []
    size, row, nats, left_out = 0, [eos], 0.0, 0
    for number, (text, log_probability) in enumerate(stories):
        tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], eos]
        if 1 + len(tokens) > seq_length:
            left_out += 1
            continue
        if len(row) + len(tokens) > seq_length:
            found.append(row)
            truth.append(nats)
            if len(found) == rows:
                return HeldOut(found, size, truth, left_out / number)
            row, nats = [eos], 0.0
        row += tokens
        nats -= log_probability
        size += len(text.encode())
    raise ValueError(f"{len(stories)} stories fill only {len(found)} rows of {seq_length} tokens, not {rows}")


def rows_of_documents(tokenizer: Any, texts: Sequence[str], seq_length: int, rows: int) -> HeldOut:
    """The first `rows` rows of `seq_length` tokens of some documents in a row, with an EOS after each."""
    stream = [tokenizer.eos_token_id]
    for text in texts:
        stream += [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    found = [stream[start : start + seq_length] for start in range(0, len(stream) - seq_length + 1, seq_length)][:rows]
    size = sum(len(tokenizer.decode(row[1:], skip_special_tokens=True).encode()) for row in found)
    return HeldOut(found, size)


def nats_of(model: Any, rows: Sequence[Sequence[int]], samples: int) -> list[float]:
    """-log p(row | its first token) of each row in nats; see `nats_of_answers`."""
    from dlm_bridge.evaluation.likelihood import Answer

    together = max(1, CHUNK_TOKENS // max(map(len, rows)))
    return nats_of_answers(model, [Answer((row[0],), tuple(row[1:])) for row in rows], samples, together)


def nats_of_answers(model: Any, answers: Sequence[Answer], samples: int, together: int) -> list[float]:
    """-log p(answer | its prompt) of each in nats: exact for an autoregressive model; for a diffusion model a bound
    from above, from so many Monte-Carlo samples of each answer. `together` rows share a forward pass."""
    from dlm_bridge.evaluation.likelihood import likelihood_bounds
    from dlm_bridge.evaluation.perplexity import exact_log_likelihoods

    if hasattr(model, "family"):
        return [-bound.value for bound in likelihood_bounds(model, answers, samples, batch_size=together)]
    return [-value for value in exact_log_likelihoods(model, answers, together)]


def summary(held_out: HeldOut, nats: Sequence[float]) -> dict[str, float]:
    """The figures of a table's line: nats a token and bits a byte, with the standard error over the rows; and, where
    the source is known, how far above it the model is."""
    tokens = [len(row) - 1 for row in held_out.rows]
    mean, error = nats_per_token(nats, tokens)
    figures = {
        "nats_per_token": mean,
        "standard_error": error,
        "bits_per_byte": sum(nats) / math.log(2) / held_out.bytes,
    }
    if held_out.truth is not None:
        above = [nat - true for nat, true in zip(nats, held_out.truth, strict=True)]
        figures["above_truth"], figures["above_truth_error"] = nats_per_token(above, tokens)
    return figures


@torch.no_grad()
def write_texts(
    model: Any, tokenizer: Any, prompt: Sequence[int], number: int, length: int, sampling: Sampling, seed: int = 0
) -> tuple[list[str], list[bool]]:
    """`number` texts after `prompt`, of at most `length` tokens, and whether each came to its end."""
    torch.manual_seed(seed)
    inputs = torch.tensor([list(prompt)] * number, device=model.device)
    output = model.generate(inputs, max_new_tokens=length, **sampling.settings)[:, len(prompt) :].tolist()
    ends = [row.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in row else None for row in output]
    texts = [
        tokenizer.decode(row[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for row, end in zip(output, ends, strict=True)
    ]
    return texts, [end is not None for end in ends]


def grammar_score(texts: Sequence[str], ended: Sequence[bool]) -> dict[str, float]:
    """The share of texts that are stories from beginning to end, and the mean share of a text before it is none."""
    whole = sum(end and _is_story(text) for text, end in zip(texts, ended, strict=True))
    return {
        "whole_stories": whole / len(texts),
        "understood": sum(map(understood, texts)) / len(texts),
        "ended": sum(ended) / len(texts),
    }


def load(folder: Path) -> tuple[Any, Any]:
    """A run's model, in evaluation, on the GPU where there is one, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    import dlm_bridge  # noqa: F401  registers the families

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), AutoTokenizer.from_pretrained(folder)


def _is_story(text: str) -> bool:
    try:
        read(text)
    except Departure:
        return False
    return True


def nats_per_token(values: Sequence[float], tokens: Sequence[int]) -> tuple[float, float]:
    """sum(values) / sum(tokens), and its standard error over the rows."""
    ratio = sum(values) / sum(tokens)
    residuals = sum((value - ratio * count) ** 2 for value, count in zip(values, tokens, strict=True))
    count = len(values)
    return ratio, math.sqrt(residuals / max(count - 1, 1) * count) / sum(tokens)
