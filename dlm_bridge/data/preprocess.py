"""Tokenisation of text to a Megatron pair: processes tokenise batches of documents, whose ids are written in order."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm_bridge.data.documents import Chunk, NamedDataset, Source, check_eos, read_chunks, source_bytes
from dlm_bridge.data.indexed import IndexedTokens, IndexedWriter, fingerprint_file, token_dtype, write_fingerprint
from dlm_bridge.data.options import PreprocessOptions
from dlm_bridge.data.sources import find_sources
from dlm_bridge.errors import InputFileError, WorkerError
from dlm_bridge.processes import end_with_parent, leave_inherited, signals_blocked
from dlm_bridge.settings import check_minimum

if TYPE_CHECKING:
    from dlm_bridge.convert.settings import Progress

CHUNK = 1 << 20  # bytes of text that a process tokenises at once
CHECKPOINT_EVERY = 64  # chunks, after which an interrupted run resumes
AHEAD = 3  # chunks queued per process


@dataclass(frozen=True)
class PreprocessReport:
    """Output of `preprocess`."""

    prefix: str
    documents: int
    tokens: int
    dtype: str
    bytes: int  # of the sources
    seconds: float
    tokens_per_s: float


def preprocess(options: PreprocessOptions, tokenizer: Any, progress: Progress | None = None) -> PreprocessReport:
    """Tokenise the documents of `options.inputs`, in order, to `PREFIX.bin` and `PREFIX.idx`, and write the
    tokenizer's fingerprint to `PREFIX.tokenizer.json`. Empty documents are skipped; no special tokens are added.

    Args:
        tokenizer: the tokenizer that `options.tokenizer` names.

    Raises:
        InputFileError: an input does not exist or is already tokenised, text cannot be read, or there is no text.
        SettingError: the output exists, or `resume` continues a call with other settings.
        CheckpointError: the tokenizer has no EOS token.
        ResourceError: the output cannot be written.
        WorkerError: a worker process was killed.
    """
    if options.append_eod:
        check_eos(tokenizer, "`append_eod` appends")
    check_minimum("workers", options.workers)
    prefix, key = options.output, options.json_key
    workers = options.workers or len(os.sched_getaffinity(0))
    sources = [_text_source(source, item) for item in options.inputs for source in find_sources(item)]
    total = sum(source_bytes(source) for source in sources)
    began = time.perf_counter()
    vocabulary = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))
    dtype = token_dtype(vocabulary)
    work = _TokenizerWork(tokenizer, key, tokenizer.eos_token_id if options.append_eod else None, dtype)
    digest = _call_digest(sources, tokenizer, work)
    with IndexedWriter(prefix, dtype, options.overwrite, digest, options.resume) as writer:
        resumed, chunks = writer.tokens, read_chunks(sources, key, CHUNK)
        for done in itertools.islice(chunks, writer.parts):
            if progress is not None:
                progress(done.nbytes, total)
        for ids, lengths, unfinished, nbytes in _tokenised(chunks, work, workers):
            writer.add(ids, lengths, unfinished)
            if writer.parts % CHECKPOINT_EVERY == 0:
                writer.checkpoint()
            if progress is not None:
                progress(nbytes, total)
        tokens = writer.tokens
        if tokens == 0:
            raise InputFileError(", ".join(options.inputs), "no text there, nothing was written")
        documents = writer.documents
        fingerprint_file(prefix).unlink(missing_ok=True)  # belongs to the pair that is replaced
    write_fingerprint(prefix, tokenizer)
    seconds = time.perf_counter() - began
    return PreprocessReport(prefix, documents, tokens, str(dtype), total, seconds, (tokens - resumed) / seconds)


def _call_digest(sources: Sequence[Source], tokenizer: Any, work: _TokenizerWork) -> str:
    """Digest of everything that determines the tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    whole = tokenizer.get_vocab() if backend is None else backend.to_str()
    facts: list[Any] = [CHUNK, work.key, work.eod, str(work.dtype), tokenizer.name_or_path, whole]
    for source in sources:
        if isinstance(source, NamedDataset):
            facts.append([source.name, source.rows._fingerprint])
        else:
            facts.append([str(source), source.stat().st_size, source.stat().st_mtime_ns])
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


TokenizedChunk = tuple[
    np.ndarray, list[int], bool, int
]  # ids, each document's length, the last goes on, bytes of the source


@dataclass(frozen=True)
class _TokenizerWork:
    """Task of one process: tokenise a chunk."""

    tokenizer: Any
    key: str
    eod: int | None
    dtype: np.dtype

    def __call__(self, chunk: Chunk) -> TokenizedChunk:
        pieces = chunk.parsed(self.key)
        texts = [piece.text for piece in pieces]
        parts: list[Any] = []
        lengths: list[int] = []
        goes_on = False
        for piece, ids in zip(pieces, self._encode(texts), strict=True):
            if not ids and piece.first and piece.last:
                continue
            if piece.last and self.eod is not None:
                ids.append(self.eod)
            parts.append(ids)
            if goes_on:
                lengths[-1] += len(ids)
            else:
                lengths.append(len(ids))
            goes_on = not piece.last
        tokens = np.fromiter(itertools.chain.from_iterable(parts), dtype=self.dtype, count=sum(lengths))
        return tokens, lengths, goes_on, chunk.nbytes

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        # Without offsets, which are not needed and slow.
        return [found.ids for found in backend.encode_batch_fast(texts, add_special_tokens=False)]


def _tokenised(chunks: Iterator[Chunk], work: _TokenizerWork, workers: int) -> Iterator[TokenizedChunk]:
    """Yield the tokens of all chunks, in order; a bounded number of chunks is processed at a time."""
    _no_limits(work.tokenizer)
    if workers == 1:
        yield from map(work, chunks)
        return
    # A forked process starts at once. It must not use the Rust tokenizer's threads, which a fork does not copy.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _begin, (work, os.getpid()))
    under_way: deque[Any] = deque()
    try:
        for chunk in chunks:
            with signals_blocked():  # the first call starts the processes, before they have their own handlers
                under_way.append(pool.submit(_do, chunk))
            if len(under_way) >= AHEAD * workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BrokenProcessPool:
        raise WorkerError("workers", "a process was killed (out of memory?): use fewer") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_of_this_process: list[_TokenizerWork] = []


def _begin(work: _TokenizerWork, parent: int) -> None:
    """Initialise a worker process."""
    leave_inherited()
    end_with_parent(parent)
    _of_this_process.append(work)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def _do(chunk: Chunk) -> TokenizedChunk:
    return _of_this_process[0](chunk)


def _text_source(source: Source | IndexedTokens | str, item: str) -> Source:
    if not isinstance(source, IndexedTokens | str):
        return source
    raise InputFileError(item, "not text: it is already tokenised, or mock")


def _no_limits(tokenizer: Any) -> None:
    """Disable truncation and padding of a tokenizer.json, which transformers ignores by default."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
