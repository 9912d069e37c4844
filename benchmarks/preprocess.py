"""Tokens a second of `dlm-bridge preprocess` against Megatron-LM's tool, on the same file in one run.

    python benchmarks/preprocess.py --workers 8 --megatron-lm CHECKOUT [--input corpus.jsonl --tokenizer FOLDER_OR_ID]

With a checkout of Megatron-LM core_v0.16.1 its own tools/preprocess_data.py runs, timed from when it opens the input
(which leaves its imports out) to its end; it imports Triton, on CPUs too. Without, it is re-created here by what it
does: a multiprocessing.Pool whose processes parse a line and make one tokenizer call for each document, imap'ed 32
documents at a time, while the parent hands every document to megatron-core's own IndexedDatasetBuilder. All write the
same bytes, which is checked. Without --input the corpus is the source code of the installed Python packages, and the
tokenizer a byte-level BPE trained on a part of it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlm_bridge.data.options import PreprocessOptions
from dlm_bridge.data.preprocess import preprocess

VOCABULARY = 32_000
WAY, TOOL, OURS = "Megatron-LM's way", "Megatron-LM's tool", "dlm-bridge"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, help="a JSONL file with text in 'text'")
    parser.add_argument("--tokenizer", help="folder or Hub id of a fast tokenizer with EOS")
    parser.add_argument("--megatron-lm", type=Path, help="its checkout")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--megabytes", type=float, default=100, help="size of the corpus that is made")
    parser.add_argument("--rounds", type=int, default=3, help="each is timed so often, in turn; the best counts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = options.input or make_corpus(folder / "corpus.jsonl", options.megabytes * 1e6)
        tokenizer = load_tokenizer(options.tokenizer, corpus)
        tokenizer.save_pretrained(folder / "tokenizer")
        peer = WAY if options.megatron_lm is None else TOOL
        best = {peer: 0.0, OURS: 0.0}
        for _ in range(options.rounds):
            if options.megatron_lm is None:
                seconds = run_way(corpus, folder / "peer", tokenizer, options.workers)
            else:
                seconds = run_tool(options.megatron_lm, corpus, folder / "peer", folder / "tokenizer", options.workers)
            settings = PreprocessOptions(
                inputs=[str(corpus)],
                output=str(folder / "ours"),
                tokenizer=tokenizer.name_or_path,
                append_eod=True,
                workers=options.workers,
                overwrite=True,
            )
            report = preprocess(settings, tokenizer)
            best[peer] = max(best[peer], report.tokens / seconds)
            best[OURS] = max(best[OURS], report.tokens_per_s)
            for suffix in (".bin", ".idx"):
                assert (folder / f"peer{suffix}").read_bytes() == (folder / f"ours{suffix}").read_bytes()
    print(f"{corpus.name}: {report.bytes / 1e6:,.0f} MB, {report.documents:,} documents, {report.tokens:,} tokens")
    for side, rate in best.items():
        print(f"{side:>20} {options.workers:>3} workers {rate:>14,.0f} tokens/s")
    print(f"{'ratio':>20} {best[OURS] / best[peer]:>26.2f}")


_tokenizer: Any = None


def run_tool(checkout: Path, corpus: Path, prefix: Path, tokenizer: Path, workers: int) -> float:
    """Seconds of Megatron-LM's tool, from opening the input to its end."""
    options = ["--input", str(corpus), "--output-prefix", str(prefix), "--append-eod", "--workers", str(workers)]
    options += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
    paths = os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-u", str(checkout / "tools/preprocess_data.py"), *options],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("Opening"):
            break
    began = time.perf_counter()
    _, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"{checkout / 'tools/preprocess_data.py'} failed:\n{errors}")
    for suffix in (".bin", ".idx"):
        os.replace(f"{prefix}_text_document{suffix}", f"{prefix}{suffix}")
    return time.perf_counter() - began


def run_way(corpus: Path, prefix: Path, tokenizer: Any, workers: int) -> float:
    """Seconds of the peer's way, from opening the input to the finished index."""
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    began = time.perf_counter()
    with corpus.open(encoding="utf-8") as lines, multiprocessing.Pool(workers, _begin, (tokenizer,)) as pool:
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(len(tokenizer)))
        for ids in pool.imap(_encode, lines, 32):
            if ids:
                builder.add_document(torch.tensor(ids), [len(ids)])
        builder.finalize(f"{prefix}.idx")
    return time.perf_counter() - began


def _begin(tokenizer: Any) -> None:
    global _tokenizer  # noqa: PLW0603  as a Pool's processes hold what they share
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = tokenizer


def _encode(line: str) -> list[int]:
    ids = _tokenizer(json.loads(line)["text"], add_special_tokens=False).input_ids
    return [*ids, _tokenizer.eos_token_id] if ids else []


def make_corpus(path: Path, size: float) -> Path:
    """JSONL of about `size` bytes: the Python files of the installed packages, each a document."""
    written = 0
    with path.open("w") as out:
        for file in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
            text = file.read_text(encoding="utf-8", errors="replace")
            if not text:
                continue  # Megatron-LM's tool writes documents of no sequence for these, we none
            written += out.write(json.dumps({"text": text}) + "\n")
            if written >= size:
                break
    return path


def load_tokenizer(place: str | None, corpus: Path) -> Any:
    """The named tokenizer, or a new one."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if place is not None:
        return AutoTokenizer.from_pretrained(place)
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(_sample(corpus), VOCABULARY, special_tokens=["<eos>"], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<eos>")


def _sample(corpus: Path) -> Iterator[str]:
    with corpus.open() as lines:
        yield from (json.loads(line)["text"] for number, line in enumerate(lines) if number % 20 == 0)


if __name__ == "__main__":
    main()
