"""The main job on real text, in a few minutes on two CPU cores: train a small LLaDA on the Python standard library's
own sources, carry it to Megatron's layout and back, prove that nothing changed, and sample from it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

EOS, PAD, MASK = "<|endoftext|>", "<|pad|>", "<|mask|>"
VOCABULARY = 2048
SKIP = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "__pycache__"}
PROMPT = "class Reader:\n    def __init__(self, "
# Small steps, many of them: a diffusion model needs about a thousand before it looks at its neighbours at all.
TRAINING = {
    "steps": 1500,
    "global-batch-size": 32,
    "seq-length": 64,
    "lr": 3e-3,
    "min-lr": 3e-4,
    "warmup-steps": 50,
    "eval-interval": 250,
    "save-interval": 500,
    "keep-last": 1,
    "exit-duration": 4,  # minutes, for a machine that is slower than expected
}
# The public config.json of LLaDA-8B, with smaller sizes and our tokenizer's ids.
CONFIG: dict[str, Any] = {
    "activation_type": "silu",
    "alibi": False,
    "alibi_bias_max": 8.0,
    "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "attention_layer_norm_with_affine": True,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": 192,
    "embedding_dropout": 0.0,
    "embedding_size": VOCABULARY,
    "flash_attention": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "init_cutoff_factor": None,
    "init_device": "meta",
    "init_fn": "mitchell",
    "init_std": 0.02,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "max_sequence_length": 256,
    "mlp_hidden_size": 384,
    "mlp_ratio": 4,
    "model_type": "llada",
    "multi_query_attention": None,
    "n_heads": 6,
    "n_kv_heads": 6,
    "n_layers": 2,
    "precision": "amp_bf16",
    "residual_dropout": 0.0,
    "rms_norm_eps": 1e-05,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 10000.0,
    "scale_logits": False,
    "torch_dtype": "float32",
    "use_cache": False,
    "vocab_size": VOCABULARY,
    "weight_tying": True,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), help="emptied first (default: %(default)s)"
    )
    root: Path = parser.parse_args().output
    console = Console()
    began = time.monotonic()
    if root.exists():
        if not (root / ".dlm-bridge-demo").exists():
            console.print(f"{root} exists and is not from an earlier demo: choose another --output")
            return 2
        shutil.rmtree(root)
    root.mkdir(parents=True)
    (root / ".dlm-bridge-demo").touch()

    console.rule("[bold]1  real text, a tokenizer and an empty model")
    corpus = root / "corpus.jsonl"
    files, size = write_corpus(corpus)
    model = root / "model"
    train_tokenizer(corpus, model)
    console.print(f"{files} source files of Python's standard library, {size / 1e6:.1f} MB; {VOCABULARY} tokens")

    console.rule("[bold]2  train LLaDA from scratch")
    run = root / "run"
    options = [word for name, value in TRAINING.items() for word in (f"--{name}", str(value))]
    dlm_bridge(console, "pretrain", "--model", model, "--from-scratch", "--data", corpus, "--output", run, *options)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = sorted((run / "checkpoints").glob("step-*"))[-1]

    console.rule("[bold]3  to Megatron's layout, to another one, and back")
    sharded, merged, exported = root / "megatron-tp2-pp2", root / "megatron-tp1-pp1", root / "exported"
    dlm_bridge(console, "import", trained, sharded, "--tp", "2", "--pp", "2")
    dlm_bridge(console, "reshard", sharded, merged, "--tp", "1", "--pp", "1")
    dlm_bridge(console, "export", merged, exported)
    dlm_bridge(console, "verify", trained, exported)

    console.rule("[bold]4  reload and sample")
    text, parameters = sample(exported)
    console.print(Panel(text, title="a sample, prompt included", expand=False), highlight=False, markup=False)

    table = Table(title="where everything lies", show_header=False)
    for what, where in (
        ("loss curve", run / "loss.png"),
        ("figures of every step", run / "metrics.jsonl"),
        ("trained checkpoint (Hub layout)", trained),
        ("Megatron, TP=2 x PP=2", sharded),
        ("Megatron, TP=1 x PP=1", merged),
        ("back from Megatron, bit for bit equal", exported),
    ):
        table.add_row(what, Text(str(where), overflow="fold"))
    console.print(table)
    first, last = rows[0]["loss"], sum(row["loss"] for row in rows[-20:]) / 20
    evaluated = [row["eval_loss"] for row in rows if "eval_loss" in row]
    console.print(
        f"{parameters / 1e6:.1f} M parameters, {rows[-1]['tokens']:,} tokens; loss {first:.2f} at the first step, "
        f"{last:.2f} over the last 20; validation {evaluated[0]:.2f} -> {evaluated[-1]:.2f}; "
        f"{time.monotonic() - began:.0f} s in all",
        highlight=False,
    )
    if last > 0.9 * first:
        console.print("the loss did not fall as it should")
        return 1
    return 0


def dlm_bridge(console: Console, *arguments: str | Path) -> None:
    """Run the command as a user would; stop the demo where it fails."""
    words = [str(argument) for argument in arguments]
    console.print(f"[bold green]$[/] dlm-bridge {shlex.join(words)}", highlight=False, soft_wrap=True)
    finished = subprocess.run([sys.executable, "-m", "dlm_bridge.cli", *words], check=False)
    if finished.returncode:
        raise SystemExit(finished.returncode)


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


def train_tokenizer(corpus: Path, folder: Path) -> None:
    """A byte-level BPE tokenizer on the corpus, saved beside a config.json: all that `--from-scratch` needs."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = ByteLevelBPETokenizer()
    with corpus.open(encoding="utf-8") as lines:
        tokenizer.train_from_iterator(
            (json.loads(line)["text"] for line in lines),
            vocab_size=VOCABULARY,
            special_tokens=[EOS, PAD, MASK],
            show_progress=False,
        )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, eos_token=EOS, pad_token=PAD, mask_token=MASK
    )
    wrapped.save_pretrained(folder)
    ids = {name: wrapped.convert_tokens_to_ids(token) for name, token in (("eos", EOS), ("pad", PAD), ("mask", MASK))}
    config = CONFIG | {f"{name}_token_id": number for name, number in ids.items()}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def sample(folder: Path) -> tuple[str, int]:
    """A text that the model writes after PROMPT, and the model's number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    import dlm_bridge  # noqa: F401  registers LLaDA

    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = torch.tensor([tokenizer(PROMPT, add_special_tokens=False)["input_ids"]])
    output = model.generate(prompt, gen_length=96, block_length=8, steps=96, temperature=0.8)
    return tokenizer.decode(output[0], skip_special_tokens=True), sum(p.numel() for p in model.parameters())


if __name__ == "__main__":
    raise SystemExit(main())
