"""Perplexity of a text, per token and per byte: exact for an autoregressive model, a bound for a diffusion model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812

from dlm_bridge.errors import CheckpointError, InputFileError, SettingError, rows_named
from dlm_bridge.evaluation.likelihood import Answer, check_finite, likelihood_bounds
from dlm_bridge.evaluation.options import EvaluationOptions
from dlm_bridge.evaluation.resume import FinishedParts
from dlm_bridge.files.reading import check_text_file
from dlm_bridge.generation.gemma import is_gemma
from dlm_bridge.replicas import ALONE, Replicas

if TYPE_CHECKING:
    from dlm_bridge.loading import LoadedModel

NO_LIKELIHOOD = (
    "DiffusionGemma has no likelihood bound: its canvas is uniform noise without a mask token. Evaluate it on tasks "
    "that generate texts"
)


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a text of `tokens` tokens and `bytes` bytes.

    Args:
        nats: negative log-likelihood per token, or an upper bound of it.
        error: standard error of `nats` over the noise; 0 if it is exact.
    """

    exact: bool
    tokens: int
    bytes: int
    windows: int
    window: int
    nats: float
    error: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nats, 700.0))

    @property
    def bits_per_byte(self) -> float:
        return self.nats * self.tokens / self.bytes / math.log(2)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}


def text_perplexity(
    opened: LoadedModel,
    file: Path,
    options: EvaluationOptions,
    replicas: Replicas = ALONE,
    finished: FinishedParts | None = None,
) -> Perplexity:
    """Perplexity of a text file, measured by `replicas` together, without the windows that are `finished`.

    The text is split into windows of `options.window` tokens. A window begins with the last token of the previous one;
    the first begins with the tokenizer's BOS (else EOS) token. At most `options.limit` windows are evaluated.

    Raises:
        InputFileError: the file is empty or not UTF-8 text.
        SettingError: the model has no likelihoods.
        NonFiniteError: the likelihood of a window is NaN or infinite.
    """
    model, tokenizer = opened.model, opened.tokenizer
    if is_gemma(model):
        raise SettingError("perplexity", NO_LIKELIHOOD)
    check_text_file(file)
    try:
        text = file.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        cause = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputFileError(file, str(cause)) from None
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise InputFileError(file, "no text in it")
    rows = list(windows(ids, first_token(model, tokenizer), options.window))
    shortened = rows[: options.limit]
    read = [token for row in shortened for token in row.answer]
    size = len(text.encode()) if len(shortened) == len(rows) else len(tokenizer.decode(read).encode())
    with rows_named(lambda number: f"{file}, window {number + 1}"):
        if opened.diffusion:
            found = likelihood_bounds(
                model, shortened, options.mc_samples, options.seed, options.rows, replicas, finished
            )
            total, spread = -sum(bound.value for bound in found), math.sqrt(sum(bound.error**2 for bound in found))
        else:
            total, spread = -sum(exact_log_likelihoods(model, shortened, options.rows, replicas, finished)), 0.0
    return Perplexity(
        exact=not opened.diffusion,
        tokens=len(read),
        bytes=size,
        windows=len(shortened),
        window=options.window,
        nats=total / len(read),
        error=spread / len(read),
    )


@torch.no_grad()
def exact_log_likelihoods(
    model: Any,
    answers: Sequence[Answer],
    batch_size: int = 8,
    replicas: Replicas = ALONE,
    finished: FinishedParts | None = None,
) -> list[float]:
    """Log-likelihood of each answer under an autoregressive model, in nats, computed by `replicas` together, without
    the answers that are `finished`. Raises NonFiniteError, whose rows are indices of answers."""
    finished = finished or FinishedParts()
    section, known = finished.section("likelihoods", [astuple(answer) for answer in answers])
    left, found = [number for number in range(len(answers)) if number not in known], dict(known)
    with replicas.named():
        for start in replicas.share(range(0, len(left), batch_size)):
            chosen = left[start : start + batch_size]
            values = dict(zip(chosen, _log_likelihoods(model, [answers[number] for number in chosen]), strict=True))
            finished.add(section, values)
            found |= values
    collected = replicas.collect(found)
    check_finite(collected)
    return collected


def _log_likelihoods(model: Any, rows: Sequence[Answer]) -> list[float]:
    """Log-likelihoods of one batch."""
    device = model.get_input_embeddings().weight.device
    length = max(row.length for row in rows)
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    real, asked = torch.zeros(2, len(rows), length, dtype=torch.bool)
    for number, row in enumerate(rows):
        tokens[number, : row.length] = torch.tensor([*row.prompt, *row.answer])
        real[number, : row.length] = True
        asked[number, len(row.prompt) : row.length] = True
    logits = model(input_ids=tokens.to(device), attention_mask=real.to(device), use_cache=False).logits[:, :-1]
    losses = F.cross_entropy(logits[asked[:, 1:].to(device)].float(), tokens[asked].to(device), reduction="none")
    owners = asked.nonzero()[:, 0]
    values = torch.zeros(len(rows), dtype=torch.float64).index_add(0, owners, -losses.double().cpu())
    return list(values.tolist())


def first_token(model: Any, tokenizer: Any) -> int:
    """Token that precedes a text: BOS, else EOS. Raises CheckpointError if there is neither."""
    for token in (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        model.config.bos_token_id,
        model.config.eos_token_id,
    ):
        if token is not None:
            return token[0] if isinstance(token, list) else int(token)
    raise CheckpointError(tokenizer.name_or_path or "tokenizer", "the tokenizer has neither a BOS nor an EOS token")


def windows(ids: Sequence[int], first: int, window: int) -> Iterator[Answer]:
    """Split a text's tokens into windows of at most `window` tokens. The prompt of each is the token before it; that
    of the first window is `first`."""
    for start in range(0, len(ids), window - 1):
        before = first if start == 0 else ids[start - 1]
        yield Answer((before,), tuple(ids[start : start + window - 1]))
