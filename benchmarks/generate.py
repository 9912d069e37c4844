"""Sampling speed: `generate` against the published LLaDA loop, Fast-dLLM v1 and a roofline, side by side in one run.

    python benchmarks/generate.py --case plain --batch 1 16 --length 256 512
    python benchmarks/generate.py --case dual --batch 1 16 --length 256 512 --fast-dllm FOLDER
    python benchmarks/generate.py --case sdar --batch 128 --length 64

Random weights in bf16, a prompt of 128 tokens, greedy, no end of sequence: every side runs the same number of forwards
of the same algorithm.

- plain: LLaDA-8B's shape, its published loop without a cache (on transformers' own layers, with the logits of every
  position, as its generate.py asks for) against ours.
- dual: the same shape; Fast-dLLM v1's dual cache, run from a checkout of NVlabs/Fast-dLLM at --fast-dllm, against
  ours. Its sampler takes one row; more rows run its model and its choice of tokens in the same schedule.
- sdar: SDAR-4B's shape, blocks of 4; against the least time in which the GPU can read the weights and the cached keys
  and values or do the multiplications, with both of its rates measured in the same run. What is counted is the least
  that the result takes: a block's keys and values are kept by the next block's first forward, so that weights are read
  as often as a block has steps.

Prints medians of a call's time, the ratio, and what the first call took longer (recording and compiling). With --json
FILE each line is appended there. With --profile each line is followed by one more call's kernels, those that take
longest first, and how long the GPU ran none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402

from benchmarks.generation_peers import (  # noqa: E402
    FastDLLM,
    ceilings,
    kernel_profile,
    model_of_shape,
    published_loop,
    roofline,
)
from dlm_bridge.generation import release  # noqa: E402

PROMPT = 128
SHAPES = {"full": {"llada": "8b", "sdar": "sdar-4b"}, "tiny": {"llada": "tiny", "sdar": "sdar-tiny"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("plain", "dual", "sdar"), required=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--length", type=int, nargs="+", default=[256])
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--steps-per-block", type=int, help="by default one for each token")
    parser.add_argument("--executions", nargs="+", default=["graph", "compiled"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--fast-dllm", type=Path, help="a checkout of NVlabs/Fast-dLLM")
    parser.add_argument("--size", choices=tuple(SHAPES), default="full")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    bench = Bench(options)
    with torch.no_grad():
        {"plain": bench.plain, "dual": bench.dual, "sdar": bench.sdar}[options.case]()


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.console = Console(width=200, highlight=False, soft_wrap=True)

    def plain(self) -> None:
        model = self.model("llada")
        for batch, length in self.cases():
            prompt = self.prompt(model, batch)
            steps = length // self.options.block * self.steps
            arguments = {"gen_length": length, "block_length": self.options.block, "steps": steps}
            peer, _ = self.measure(lambda: [*published_loop(model, prompt, **arguments)][-1])  # noqa: B023
            self.ours(model, prompt, arguments | {"cache": "none"}, "published loop", peer)

    def dual(self) -> None:
        model = self.model("llada")
        if self.options.fast_dllm is None:
            raise SystemExit("--case dual runs the peer's own code: give its checkout with --fast-dllm")
        fast_dllm = FastDLLM(self.options.fast_dllm, model)
        for batch, length in self.cases():
            prompt = self.prompt(model, batch)
            steps = length // self.options.block * self.steps
            arguments = {"gen_length": length, "block_length": self.options.block, "steps": steps}
            peer, theirs = self.measure(lambda: fast_dllm.generate(prompt, **arguments)[0])  # noqa: B023
            ours = self.ours(model, prompt, arguments | {"cache": "dual"}, "Fast-dLLM", peer)
            equal = (ours == theirs)[:, PROMPT:].float().mean().item()
            self.console.print(
                f"    equal tokens: {equal:.1%} (the same weights; bf16 rounds the two sides differently)"
            )

    def sdar(self) -> None:
        model = self.model("sdar")
        first, flops, bandwidth = ceilings(self.device)
        block = 4
        self.console.print(
            f"ceilings: {flops / 1e12:.0f} TFLOP/s for as long as a call lasts ({first / 1e12:.0f} for the first "
            f"moments), {bandwidth / 1e12:.2f} TB/s"
        )
        for batch, length in self.cases():
            prompt = self.prompt(model, batch)
            arguments = {"gen_length": length, "block_length": block, "denoising_steps": self.options.steps_per_block}
            steps = self.options.steps_per_block or block
            least, shortest = (
                roofline(model, [PROMPT] * batch, length, block, steps, rate, bandwidth) for rate in (flops, first)
            )
            self.ours(model, prompt, arguments, "roofline", least)
            self.console.print(f"    the roofline by the rate of the first moments: {shortest:.4f} s")

    def ours(
        self, model: Any, prompt: torch.Tensor, arguments: dict[str, Any], peer: str, peer_s: float
    ) -> torch.Tensor:
        """Time every execution and print a line for each. Returns the last one's tokens."""
        arguments = arguments | {"eos_token_id": None, "pad_token_id": 0, "temperature": 0.0}
        output = prompt
        for execution in self.options.executions:
            release(model)

            def call(execution: str = execution) -> torch.Tensor:
                return model.generate(prompt, **arguments, execution=execution)

            began = time.perf_counter()
            counted = model.generate(prompt, **arguments, execution=execution, return_dict_in_generate=True)
            self.synchronize()
            first = time.perf_counter() - began
            ours_s, output = self.measure(call)
            batch, new, forwards = prompt.shape[0], arguments["gen_length"], counted.forwards
            line = {
                "case": self.options.case,
                "batch": batch,
                "length": new,
                "execution": execution,
                "forwards": forwards,
                "ours_s": round(ours_s, 4),
                f"{peer}_s": round(peer_s, 4),
                "ratio": round(peer_s / ours_s, 3),
                "ours_tokens_per_s": round(batch * new / ours_s, 1),
                "ours_ms_per_forward": round(1000 * ours_s / forwards, 3),
                "start_up_s": round(first - ours_s, 1),
                "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if self.device == "cuda" else None,
            }
            self.console.print(json.dumps(line))
            if self.options.json:
                with self.options.json.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            if self.options.profile:
                if self.device != "cuda":
                    raise SystemExit("--profile looks at a GPU's kernels: there is no GPU here")
                for text in kernel_profile(call, forwards):
                    self.console.print(f"    {text}")
        return output

    @property
    def steps(self) -> int:
        return self.options.steps_per_block or self.options.block

    def cases(self) -> list[tuple[int, int]]:
        return [(batch, length) for batch in self.options.batch for length in self.options.length]

    def model(self, family: str) -> Any:
        return model_of_shape(SHAPES[self.options.size][family], self.device)

    def prompt(self, model: Any, batch: int) -> torch.Tensor:
        return torch.randint(0, min(model.config.vocab_size, 1000), (batch, PROMPT), device=self.device)

    def measure(self, call: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
        """The median of a call's seconds, after one that does not count, and what it returns."""
        output, times = call(), []
        self.synchronize()
        for _ in range(self.options.repeats):
            began = time.perf_counter()
            output = call()
            self.synchronize()
            times.append(time.perf_counter() - began)
        return statistics.median(times), output

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    main()
