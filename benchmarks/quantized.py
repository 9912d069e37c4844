"""Memory and speed of `generate` with quantised weights beside bf16, on random weights.

    python benchmarks/quantized.py --size 1.7b 8b --batch 1 16 --folder /tmp/weights
    python benchmarks/quantized.py --size llada2-mini --folder /tmp/weights

Per shape, random weights are written to --folder in bf16 and loaded as a user loads them: as they are, then with
`quantize` set to fp8, int8 and int4. A prompt of 128 tokens, greedy, no end of sequence: all run the same number of
forward passes of the same algorithm.

Prints a line per shape, weights and batch: memory of the loaded model and at most, the median time of a call, the
ratio of bf16's time to it, and the mean divergence (KL) of the next-token distributions from bf16's on random tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402

from benchmarks.generation_peers import SHAPES, llada_sizes, model_of_shape  # noqa: E402
from dlm_bridge.exports.loading import load_quantized  # noqa: E402
from dlm_bridge.loading.pretrained import load_hub_model  # noqa: E402
from dlm_bridge.settings import QUANTIZE  # noqa: E402

PROMPT, TOKENS = 128, 256
SHAPES["quantized-tiny"] = ("llada", llada_sizes(128, 2, 4, 2, 256, 512))  # groups of 128 divide it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SHAPES), nargs="+", default=["1.7b", "8b"])
    parser.add_argument("--weights", choices=("bf16", *QUANTIZE), nargs="+", default=["bf16", *QUANTIZE])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--steps-per-block", type=int, default=16)
    parser.add_argument("--execution", default="graph")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, required=True, help="for the weights, which are removed at the end")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    console = Console(width=300, highlight=False, soft_wrap=True)
    for size in options.size:
        folder = options.folder / size
        model_of_shape(size, device).save_pretrained(folder)
        free()
        expected, plain = None, {}
        for weights in options.weights:
            began = time.perf_counter()
            model = load(folder, weights, device)
            synchronize(device)
            loaded = time.perf_counter() - began
            memory = gib(device, "memory_allocated")
            divergence, logits = compare(model, expected)
            expected = logits if expected is None else expected
            for batch in options.batch:
                seconds = measure(model, batch, options, device)
                plain.setdefault(batch, seconds)
                line = {
                    "size": size,
                    "weights": weights,
                    "batch": batch,
                    "load_s": round(loaded, 1),
                    "model_gib": memory,
                    "peak_gib": gib(device, "max_memory_allocated"),
                    "generate_s": round(seconds, 4),
                    "tokens_per_s": round(batch * options.length / seconds, 1),
                    f"speed_of_{options.weights[0]}": round(plain[batch] / seconds, 3),
                    "kl": round(divergence, 5),
                }
                console.print(json.dumps(line))
            del model
            free()
        shutil.rmtree(folder)


def load(folder: Path, weights: str, device: str) -> Any:
    place = {} if device == "cpu" else {"device_map": {"": device}}
    if weights == "bf16":
        model, _ = load_hub_model(folder, str(folder), None, torch.bfloat16, **place)
    else:
        model, _ = load_quantized(folder, str(folder), None, torch.bfloat16, weights, **place)
    return model.eval()


@torch.no_grad()
def compare(model: Any, expected: torch.Tensor | None) -> tuple[float, torch.Tensor]:
    """Mean divergence from the log probabilities `expected`, and the model's own."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 500, (1, TOKENS), generator=generator).to(model.device)
    own = model(input_ids=tokens).logits.float().log_softmax(dim=-1)
    if expected is None:
        return 0.0, own
    return float((expected.exp() * (expected - own)).sum(dim=-1).mean()), own


@torch.no_grad()
def measure(model: Any, batch: int, options: argparse.Namespace, device: str) -> float:
    """Median of a call's seconds, after two that do not count."""
    steps, blocks = options.steps_per_block, options.length // options.block
    own = {"sdar": {"denoising_steps": steps}, "llada": {"steps": steps * blocks}, "llada2_moe": {"steps": steps}}
    prompt = torch.randint(0, 500, (batch, PROMPT), generator=torch.Generator().manual_seed(1)).to(device)
    times = []
    for _ in range(options.repeats + 2):
        began = time.perf_counter()
        model.generate(
            prompt,
            gen_length=options.length,
            block_length=options.block,
            eos_token_id=None,
            pad_token_id=0,
            temperature=0.0,
            execution=options.execution,
            **own[model.family.name],
        )
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def gib(device: str, what: str) -> float | None:
    return round(getattr(torch.cuda, what)() / 2**30, 2) if device == "cuda" else None


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
