"""A diffusion language model and its autoregressive twin, trained from the same weights on the same text for as many
steps, and measured on text that neither has seen: stories whose entropy is known, and Python's own sources."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import sysconfig
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

import quality_stories
from demo import EOS, MASK, PAD, dlm_bridge
from rich.console import Console

TEXTS = ("stories", "python")
KINDS = ("autoregressive", "diffusion")
BATCH = 2000  # stories drawn at once
HELD_OUT, TRAINING = 1, 0  # seeds of the stories
SKIP = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "__pycache__"}
PYTHON_PROMPT = "def read_lines(path):\n"


@dataclass(frozen=True)
class Preset:
    """Sizes for a machine."""

    hidden: int
    layers: int
    heads: int
    feed_forward: int
    seq_length: int
    global_batch_size: int
    steps: dict[str, int]  # of each text that is trained on
    vocabulary: dict[str, int]
    lr: float
    warmup_steps: int
    precision: str
    held_out_rows: int
    bound_samples: int  # Monte-Carlo draws of the bound for each row
    written: int  # texts sampled for the score
    length: int  # of a sampled text in tokens


PRESETS = {
    "h200": Preset(
        hidden=512,
        layers=8,
        heads=8,
        feed_forward=1536,
        seq_length=512,
        global_batch_size=64,
        steps={"stories": 1600, "python": 800},
        vocabulary={"stories": 1024, "python": 4096},
        lr=2e-3,
        warmup_steps=200,
        precision="bf16",
        held_out_rows=128,
        bound_samples=64,
        written=64,
        length=256,
    ),
    "cpu": Preset(
        hidden=96,
        layers=2,
        heads=3,
        feed_forward=256,
        seq_length=256,
        global_batch_size=8,
        steps={"stories": 700},
        vocabulary={"stories": 640},
        lr=4e-3,
        warmup_steps=30,
        precision="fp32",
        held_out_rows=32,
        bound_samples=32,
        written=8,
        length=192,
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="a new folder")
    parser.add_argument("--preset", choices=PRESETS, default="h200", help="sizes (default: %(default)s)")
    parser.add_argument("--text", choices=TEXTS, action="append", help="only this text; may be repeated")
    given = parser.parse_args()
    preset: Preset = PRESETS[given.preset]
    texts = [text for text in given.text or TEXTS if text in preset.steps]
    if not texts:
        parser.error(f"--preset {given.preset} has only {', '.join(preset.steps)}")
    root: Path = given.output
    if root.exists():
        parser.error(f"--output {root} exists: choose another")
    root.mkdir(parents=True)
    from quality_page import draw_curves, machine, page

    console = Console()
    began = time.monotonic()
    results: dict[str, Any] = {"preset": given.preset, "sizes": asdict(preset), "machine": machine(), "texts": {}}
    for text in texts:
        console.rule(f"[bold]{text}")
        results["texts"][text] = compare(console, root / text, text, preset)
    results["seconds"] = time.monotonic() - began
    (root / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    draw_curves(results, root)
    (root / "quality.md").write_text(page(results))
    console.print(f"{root}/quality.md, quality.png and results.json: {results['seconds']:.0f} s in all")
    return 0


def compare(console: Console, folder: Path, text: str, preset: Preset) -> dict[str, Any]:
    """Train both models on one text and measure them: everything that the page says about it."""
    from quality_measure import load, nats_of, summary

    folder.mkdir()
    corpus, make_held_out = CORPORA[text](folder, preset)
    tokenizer = train_tokenizer(folder / "corpus.jsonl", preset.vocabulary[text])
    for kind in KINDS:
        write_model(folder / kind, kind, tokenizer, preset)
    data = folder / "tokens"
    files = ("--tokenizer", folder / KINDS[0], "--append-eod")
    dlm_bridge(console, "preprocess", folder / "corpus.jsonl", "--output", data, *files)
    held_out = make_held_out(tokenizer)
    found: dict[str, Any] = {
        "corpus": corpus,
        "held_out": {
            "rows": len(held_out.rows),
            "tokens": held_out.tokens,
            "bytes": held_out.bytes,
            "left_out": held_out.left_out,
        },
        "models": {},
    }
    if held_out.truth is not None:
        found["truth"] = summary(held_out, held_out.truth)
    for kind in KINDS:
        run = folder / f"{kind}-run"
        began = time.monotonic()
        dlm_bridge(console, "pretrain", *options(folder / kind, data, run, text, preset))
        seconds = time.monotonic() - began
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        model, _ = load(sorted((run / "checkpoints").glob("step-*"))[-1])
        nats = nats_of(model, held_out.rows, preset.bound_samples)
        found["models"][kind] = {
            "parameters": model.num_parameters(),
            "training_tokens": rows[-1]["tokens"],
            "seconds": seconds,
            "tokens_per_s": statistics.median(row["tokens_per_s"] for row in rows),
            **summary(held_out, nats),
            "curve": [[row["tokens"], row["loss"], row.get("eval_loss")] for row in rows],
            "samples": sample(model, tokenizer, kind, text, preset),
        }
        line = {name: round(value, 4) for name, value in summary(held_out, nats).items()}
        console.print(f"{kind}: {line}, {seconds:.0f} s", highlight=False)
    return found


def options(model: Path, data: Path, run: Path, text: str, preset: Preset) -> list[str | Path]:
    """What both runs of a text are told: the objective is the model family's own."""
    steps = preset.steps[text]
    values = {
        "steps": steps,
        "global-batch-size": preset.global_batch_size,
        "seq-length": preset.seq_length,
        "lr": preset.lr,
        "min-lr": preset.lr / 10,
        "warmup-steps": preset.warmup_steps,
        "precision": preset.precision,
        "eval-interval": max(steps // 15, 1),
        "save-interval": 0,
        "length-variation": 0.0,
    }
    words: list[str | Path] = ["--model", model, "--from-scratch", "--data", data, "--output", run]
    words += [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return [*words, "--no-compile"]  # which takes longer than it saves in runs as short as these


def sample(model: Any, tokenizer: Any, kind: str, text: str, preset: Preset) -> list[dict[str, Any]]:
    """Texts from one model, in every way of sampling: what they score, and the first of them."""
    from quality_measure import Sampling, grammar_score, write_texts

    ways = [Sampling("left to right", {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0})]
    if kind == "diffusion":
        length = preset.length
        block = {"temperature": 1.0, "block_size": 32}
        ways = [
            Sampling(
                "random order", {"temperature": 1.0, "block_size": length, "steps": length, "remasking": "random"}
            )
        ]
        ways += [
            Sampling(f"most confident first, blocks of 32, {per} per step", {**block, "steps": length // per})
            for per in (1, 2, 4)
        ]
    begin = PYTHON_PROMPT if text == "python" else ""
    prompt = [tokenizer.eos_token_id, *tokenizer(begin, add_special_tokens=False)["input_ids"]]
    found = []
    for way in ways:
        number = preset.written if text == "stories" else 1
        began = time.monotonic()
        texts, ended = write_texts(model, tokenizer, prompt, number, preset.length, way)
        score = grammar_score(texts, ended) if text == "stories" else {}
        seconds = time.monotonic() - began
        found.append(
            {"name": way.name, "settings": way.settings, "seconds": seconds, **score, "text": begin + texts[0]}
        )
    return found


def stories(folder: Path, preset: Preset) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Write enough stories that no run reads one twice; and what makes the held-out rows, from another seed."""
    from quality_measure import rows_of_stories

    # A story has 144 tokens on average, where the vocabulary has every word; a hundredth of them is for validation.
    wanted = preset.steps["stories"] * preset.global_batch_size * preset.seq_length // 135
    batches = -(-wanted // BATCH)
    size, log_probability = 0, 0.0
    with (folder / "corpus.jsonl").open("w") as file, ProcessPoolExecutor() as pool:
        jobs = [pool.submit(quality_stories.batch, TRAINING, number, BATCH) for number in range(batches)]
        for job in jobs:
            drawn = job.result()
            file.writelines(json.dumps({"text": text}) + "\n" for text, _ in drawn)
            size += quality_stories.sizes(drawn)
            log_probability += quality_stories.total(drawn)
    held_out = quality_stories.batch(HELD_OUT, 0, preset.held_out_rows * max(preset.seq_length // 64, 1))

    def make(tokenizer: Any) -> Any:
        return rows_of_stories(tokenizer, held_out, preset.seq_length, preset.held_out_rows)

    return {"documents": batches * BATCH, "bytes": size, "nats": -log_probability}, make


def python_sources(folder: Path, preset: Preset) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """The interpreter's standard library, but for one file in sixteen, by a hash of its path: those are held out."""
    from quality_measure import rows_of_documents

    write_corpus(folder / "all.jsonl")
    held_out: list[str] = []
    digest = hashlib.sha256()
    documents = size = 0
    with (folder / "all.jsonl").open() as files, (folder / "corpus.jsonl").open("w") as corpus:
        for line in files:
            row = json.loads(line)
            digest.update(row["text"].encode())
            if hashlib.sha256(row["path"].encode()).digest()[0] % 16 == 0:
                held_out.append(row["text"])
                continue
            corpus.write(line)
            documents, size = documents + 1, size + len(row["text"].encode())

    def make(tokenizer: Any) -> Any:
        return rows_of_documents(tokenizer, held_out, preset.seq_length, preset.held_out_rows)

    facts = {"python": platform.python_version(), "sha256": digest.hexdigest()}
    return {"documents": documents, "bytes": size, **facts}, make


CORPORA = {"stories": stories, "python": python_sources}


def write_corpus(path: Path) -> tuple[int, int]:
    """One JSON line for each source file of the standard library: the number of files and their bytes."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = size = 0
    with path.open("w", encoding="utf-8") as corpus:
        for file in sorted(library.rglob("*.py")):
            if SKIP.intersection(file.relative_to(library).parts):
                continue
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            corpus.write(json.dumps({"text": text, "path": str(file.relative_to(library))}) + "\n")
            files, size = files + 1, size + len(text.encode())
    return files, size


def train_tokenizer(corpus: Path, vocabulary: int) -> Any:
    """A byte-level BPE tokenizer on the first documents of a corpus."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    with corpus.open() as lines:
        texts = [json.loads(line)["text"] for _, line in zip(range(20_000), lines, strict=False)]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocabulary, special_tokens=[EOS, PAD, MASK], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, eos_token=EOS, pad_token=PAD, mask_token=MASK
    )


def write_model(folder: Path, kind: str, tokenizer: Any, preset: Preset) -> None:
    """A config.json and a tokenizer: Qwen3's body for both, causal for one, bidirectional for the other."""
    diffusion = kind == "diffusion"
    tokenizer.save_pretrained(folder)
    config = {
        "architectures": ["A2DQwen3LMHeadModel" if diffusion else "Qwen3ForCausalLM"],
        "model_type": "a2d-qwen3" if diffusion else "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": preset.hidden // preset.heads,
        "hidden_act": "silu",
        "hidden_size": preset.hidden,
        "initializer_range": 0.02,
        "intermediate_size": preset.feed_forward,
        "max_position_embeddings": 2 * preset.seq_length,
        "num_attention_heads": preset.heads,
        "num_hidden_layers": preset.layers,
        "num_key_value_heads": preset.heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_sliding_window": False,
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.eos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if diffusion:
        config["mask_token_id"] = tokenizer.mask_token_id
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
