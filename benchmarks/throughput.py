"""Throughput on a file of prompts of different lengths: a plain loop against ours, side by side in one run.

    python benchmarks/throughput.py --size 135m --batch 16 64 256
    python benchmarks/throughput.py --size 8b --batch 64 --ways plain graph continuous --cache dual --threshold 0.9
    python benchmarks/throughput.py --size 1.7b --ways eager graph compiled --padding masked packed
    python benchmarks/throughput.py --size tiny --prompts 12 --new-tokens 16 --batch 4 --repeats 1    # a CPU will do

LLaDA's body in four shapes with random weights in bf16, or --model, a Hub folder or id, or --config, a config.json.
Prompts have lengths like GSM8K's (--shortest to --longest, most of them short). Greedy, `block-length` tokens a block,
one a step unless --threshold says otherwise. The ways:

- plain: the published loop on transformers' own layers, in batches in the file's order: left-padded, the logits of
  every position, `topk` once a row. It has no cache and no threshold.
- eager, graph, compiled: `generate` in batches in the file's order.
- continuous: `ContinuousBatch`, longest prompts first, in --continuous-execution.

With `--padding masked packed` every way but `plain` runs twice: padding masked in attention, which is what happens
where `torch.nn.attention.varlen` does not run, and rows packed without their padding.

With --answers ragged each prompt has its own number of new tokens, from a quarter of --new-tokens to all of it, as
where rows end at their end of sequence: a batch in lockstep runs them all to its longest, a continuous one does not.

Prints a row as soon as it is measured: the median seconds of --repeats runs after one that does not count, that first
run's seconds, new tokens asked for per second, and the ratio to `plain`. --json FILE appends each row there.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import dlm_bridge  # noqa: F401
from dlm_bridge.generation import release
from dlm_bridge.generation.batching import ContinuousBatch, RowRequest
from dlm_bridge.generation.runtime import runner

COLUMNS = ("way", "padding", "batch", "seconds", "first run", "tokens/s", "ratio", "forwards", "peak GiB")
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "mlp_hidden_size": 128, "vocab": 512},
    "135m": {"d_model": 576, "n_layers": 30, "n_heads": 9, "n_kv_heads": 3, "mlp_hidden_size": 1536, "vocab": 49152},
    "1.7b": {
        "d_model": 2048,
        "n_layers": 24,
        "n_heads": 32,
        "n_kv_heads": 32,
        "mlp_hidden_size": 8192,
        "vocab": 49152,
    },
    "8b": {
        "d_model": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "n_kv_heads": 32,
        "mlp_hidden_size": 12288,
        "vocab": 126464,
    },
}
SUPPORTS_PACKING = runner.supports_packing
WAYS = ("plain", "eager", "graph", "compiled", "continuous")


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = self.load()
        draw = random.Random(0)
        spread = options.longest - options.shortest
        self.prompts = [
            [draw.randrange(min(self.model.config.vocab_size, 1000) - 2) for _ in range(length)]
            for length in (options.shortest + int(spread * draw.random() ** 2) for _ in range(options.prompts))
        ]
        blocks = options.new_tokens // options.block_length
        self.new = [
            options.block_length * draw.randint(max(1, blocks // 4), blocks)
            if options.answers == "ragged"
            else options.new_tokens
            for _ in self.prompts
        ]

    def run(self) -> None:
        print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
        for batch in self.options.batch:
            plain = None
            for way in self.options.ways:
                if way == "graph" and self.device != "cuda":
                    continue
                for padding in ("masked",) if way == "plain" else self.options.padding:
                    runner.supports_packing = SUPPORTS_PACKING if padding == "packed" else lambda model: False
                    release(self.model)
                    if self.device == "cuda":
                        torch.cuda.reset_peak_memory_stats()
                    seconds, first, forwards = self.measure(lambda way=way, batch=batch: self.sample(way, batch))
                    plain = seconds if way == "plain" else plain
                    self.report(way, padding, batch, seconds, first, forwards, plain)

    def report(
        self, way: str, padding: str, batch: int, seconds: float, first: float, forwards: int, plain: float | None
    ) -> None:
        peak = f"{torch.cuda.max_memory_allocated() / 2**30:.1f}" if self.device == "cuda" else "-"
        ratio = "-" if plain is None else f"{plain / seconds:.2f}"
        rate = sum(self.new) / seconds
        if padding == "packed" and not SUPPORTS_PACKING(self.model):
            padding = "masked"
        values = (way, padding, batch, f"{seconds:.2f}", f"{first:.2f}", f"{rate:,.0f}", ratio, forwards, peak)
        print("| " + " | ".join(map(str, values)) + " |", flush=True)
        if self.options.json:
            with self.options.json.open("a") as file:
                file.write(json.dumps(dict(zip(COLUMNS, values, strict=True))) + "\n")

    def sample(self, way: str, batch: int) -> int:
        """All prompts once; the forward passes that it took."""
        if way == "continuous":
            return self.continuous(batch)
        forwards = 0
        for start in range(0, len(self.prompts), batch):
            part = slice(start, start + batch)
            tokens, real = left_padded(self.prompts[part], self.device)
            new = max(self.new[part])
            if way == "plain":
                forwards += published_loop(self.model, tokens, real, new, self.options.block_length)
                continue
            output = self.model.generate(
                tokens,
                attention_mask=real,
                gen_length=new,
                execution=way,
                return_dict_in_generate=True,
                **self.settings(),
            )
            forwards += output.forwards
        return forwards

    def continuous(self, batch: int) -> int:
        longest = max(len(prompt) + new for prompt, new in zip(self.prompts, self.new, strict=True))
        settings = self.settings() | {"execution": self.options.continuous_execution}
        rows = ContinuousBatch(self.model, settings, max_rows=batch, max_length=longest, stream=False)
        order = sorted(range(len(self.prompts)), key=lambda number: -len(self.prompts[number]))
        for number in order:
            rows.submit(RowRequest(number, self.prompts[number], self.new[number], seed=0))
        while not rows.idle:
            rows.advance()
        return rows.forwards

    def settings(self) -> dict[str, Any]:
        options = self.options
        settings = {"block_length": options.block_length, "temperature": 0.0, "eos_token_id": None, "pad_token_id": 0}
        chosen = {"cache": options.cache, "threshold": options.threshold}
        return settings | {name: value for name, value in chosen.items() if value is not None}

    def load(self) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        options = self.options
        if options.model:
            model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
            return model.to(self.device).eval()
        if options.config:
            config = AutoConfig.from_pretrained(options.config)
        else:
            shape = {"n_kv_heads": SIZES[options.size]["n_heads"], **SIZES[options.size]}
            vocabulary = shape.pop("vocab")
            config = AutoConfig.for_model(
                "llada",
                **shape,
                vocab_size=vocabulary,
                embedding_size=vocabulary,
                mask_token_id=vocabulary - 1,
                eos_token_id=vocabulary - 2,
                pad_token_id=vocabulary - 2,
                max_sequence_length=4096,
            )
        torch.manual_seed(0)
        with torch.device(self.device):
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    def measure(self, call: Callable[[], int]) -> tuple[float, float, int]:
        """The median of a call's seconds, those of the first one, which does not count, and what it returns."""
        times, forwards = [], 0
        for _ in range(1 + self.options.repeats):
            began = time.perf_counter()
            forwards = call()
            if self.device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:]), times[0], forwards


def left_padded(prompts: Sequence[Sequence[int]], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The prompts as one tensor, and their attention mask."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    real = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return tokens, real


@torch.no_grad()
def published_loop(model: Any, prompt: torch.Tensor, real: torch.Tensor, new: int, block_length: int) -> int:
    """LLaDA's loop as it is published (arXiv 2502.09992, algorithm 5), one token a step, with a mask over padding. The
    number of forward passes."""
    mask, width = model.config.mask_token_id, prompt.shape[1]
    tokens = torch.nn.functional.pad(prompt, (0, new), value=mask)
    attended = torch.nn.functional.pad(real, (0, new), value=1)
    positions = (attended.cumsum(dim=1) - 1).clamp(min=0)
    for step in range(new):
        end = width + (step // block_length + 1) * block_length
        logits = model(tokens, attention_mask=attended, position_ids=positions).logits
        logits[..., mask] = -torch.inf
        proposed = logits.argmax(dim=-1)
        confidence = logits.softmax(dim=-1).gather(-1, proposed[..., None])[..., 0]
        confidence = confidence.masked_fill(tokens != mask, -torch.inf)
        confidence[:, end:] = -torch.inf
        for row in range(len(tokens)):
            picked = confidence[row].topk(1).indices
            tokens[row, picked] = proposed[row, picked]
    return new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="135m")
    parser.add_argument("--model", help="a Hub folder or id of a bidirectional model, in place of --size")
    parser.add_argument("--config", help="a folder with a config.json, for random weights")
    parser.add_argument("--batch", type=int, nargs="+", default=[64])
    parser.add_argument(
        "--ways", choices=WAYS, nargs="+", default=["plain", "eager", "graph", "compiled", "continuous"]
    )
    parser.add_argument("--continuous-execution", choices=("eager", "graph", "compiled"))
    parser.add_argument("--padding", choices=("masked", "packed"), nargs="+", default=["packed"])
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--shortest", type=int, default=40)
    parser.add_argument("--longest", type=int, default=240)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--block-length", type=int, default=32)
    parser.add_argument("--answers", choices=("full", "ragged"), default="full")
    parser.add_argument("--cache", choices=("none", "prefix", "dual", "block"))
    parser.add_argument("--threshold", type=float)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.new_tokens % options.block_length:
        parser.error(f"--new-tokens {options.new_tokens} is not a multiple of --block-length {options.block_length}")
    Bench(options).run()


if __name__ == "__main__":
    main()
