"""Throughput of sampling on prompts of different lengths: ours beside its peers, in one run.

    python benchmarks/throughput.py                                              the whole table
    python benchmarks/throughput.py --size 135m --batch 64 --limit-seconds 500   as much of it as fits
    python benchmarks/throughput.py --fast-dllm CHECKOUT --only '8b/*/dual/*'
    python benchmarks/throughput.py --size tiny sdar-tiny --batch 4 --new-tokens 16 --ways plain eager    a CPU will do

A row is SIZE/BATCH/CACHE/WAY. Sizes are LLaDA's body with 135M, 1.7B and 8B parameters, SDAR-4B and LLaDA2.0-mini
(16B-A1.4B), with random weights in bf16; or --model, a Hub folder or id of a bidirectional model, or --config. Prompts
have lengths like GSM8K's (--shortest to --longest, most of them short), --batches batches of them. Greedy. Caches:

- none (bidirectional): --steps-per-block steps a block. Ratios are to `plain`, the published loop on transformers' own
  layers: left-padded, with the logits of every position, and `topk` once a row.
- dual (bidirectional): Fast-dLLM v1's cache and rule, tokens above --threshold, over prompts of --peer-prompt tokens:
  its code takes no others in a batch. Ratios are to `fast-dllm`, its own code from the checkout of NVlabs/Fast-dLLM
  at --fast-dllm. The output layer is scaled, for both alike, until a forward pass commits about --tokens-per-forward
  tokens of a row, since with random weights no token is above the threshold.
- dual-ragged: the same over ragged prompts, ours alone.
- block (block-causal): ratios are to `roofline`, the least time in which this GPU can read weights and cache or do the
  multiplications, of which both rates are measured in the same run.

Ways of ours: eager, graph, compiled: `generate` in batches; continuous: `SamplingEngine`, longest prompts first, in
--continuous-execution. With --padding masked packed each runs twice: padding masked in attention, and left out. With
--answers ragged each prompt has its own number of new tokens, from a quarter of --new-tokens to all of it, as where
rows end at their end of sequence: a batch in lockstep runs them all to its longest, a continuous one does not.

A row is printed as soon as it is measured: milliseconds a forward pass, forward passes, tokens of a row that one
commits, new tokens per second, the ratio of its time to the peer's, and that of its forward pass; the seconds of the
first call, which records and compiles, and the peak of memory. `plain` runs for --peer-seconds a batch at most: its
forward passes all cost the same. Then straight lines through the milliseconds over the
tokens of a forward pass, from 16 rows on. --json appends each row to a file, --profile prints the kernels of each.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.generation_peers import (  # noqa: E402
    SHAPES,
    FastDLLM,
    ceilings,
    kernel_profile,
    model_of_shape,
    published_loop,
    random_model,
    roofline,
)
from dlm_bridge.generation import release  # noqa: E402
from dlm_bridge.generation.engine import SamplingEngine  # noqa: E402
from dlm_bridge.generation.request import Request  # noqa: E402
from dlm_bridge.generation.runtime import runner  # noqa: E402

SIZES = ["135m", "1.7b", "8b", "sdar-4b", "llada2-mini"]
PEERS = {"none": "plain", "dual": "fast-dllm", "block": "roofline"}
OURS = ("eager", "graph", "compiled", "continuous")
BATCHES = {"sdar-4b": [128], "llada2-mini": [64, 16]}  # of the others: those of BATCH
BATCH = [64, 16, 256, 1]
STEPS_PER_BLOCK = {"8b": 4, "sdar-4b": 4, "sdar-tiny": 4}  # of the others 8
SUPPORTS_PACKING = runner.supports_packing
HEADINGS = (
    "row", "ms a forward", "forwards", "tokens a forward", "tokens/s", "ratio", "ratio a forward", "first call", "GiB"
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    size: str
    batch: int
    cache: str
    way: str
    padding: str = "packed"

    @property
    def name(self) -> str:
        name = f"{self.size}/{self.batch}/{self.cache}/{self.way}"
        return name if self.padding == "packed" else f"{name}/{self.padding}"


@dataclass(frozen=True)
class Measured:
    """What a row took.

    Args:
        first: seconds of the first call.
        tokens: of a forward pass on average, as far as the model runs them.
    """

    seconds: float
    forwards: int
    first: float = 0.0
    tokens: float = 0.0


class Bench:
    """Measures and prints rows."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.began = time.perf_counter()
        self.measured: dict[Row, Measured] = {}
        self.left_out: list[str] = []
        self._ceilings: tuple[float, float, float] | None = None
        self._size, self._model, self._peer = "", None, None
        self._sharp = False

    def run(self) -> None:
        print("| " + " | ".join(HEADINGS) + " |\n|" + "---|" * len(HEADINGS), flush=True)
        longest = 0.0
        for row in self.rows():
            began = time.perf_counter()
            if began - self.began + longest > self.options.limit_seconds:
                self.left_out.append(row.name)
                continue
            try:
                self.report(row, self.measure(row))
            except torch.OutOfMemoryError:
                print(f"| {row.name} | out of memory" + " |" * (len(HEADINGS) - 1), flush=True)
            longest = max(longest, time.perf_counter() - began)
        for line in self.fits():
            print(line, flush=True)
        if self.left_out:
            print(f"left out, no time: {' '.join(self.left_out)}", flush=True)

    def rows(self) -> Iterator[Row]:
        """Those that are asked for, a peer before what is compared with it."""
        options = self.options
        for size in options.size:
            family = "llada" if options.model or options.config else SHAPES[size][0]
            for cache in ("none", "dual", "dual-ragged") if family == "llada" else ("block",):
                for batch in options.batch or BATCHES.get(size, BATCH):
                    for way in ([PEERS[cache]] if cache in PEERS else []) + [*OURS]:
                        for padding in options.padding if way in OURS else ("packed",):
                            row = Row(size, batch, cache, way, padding)
                            if way in options.ways and self.runs(row) and self.wanted(row):
                                yield row

    def wanted(self, row: Row) -> bool:
        return any(fnmatch.fnmatch(row.name, pattern) for pattern in self.options.only)

    def runs(self, row: Row) -> bool:
        """Whether this machine and these options run the row."""
        if row.way == "graph" and self.device != "cuda":
            return False
        # Prompts of one length have no padding, and a continuous batch nothing to gain from them.
        equal = row.cache == "dual" and (row.padding != "packed" or row.way == "continuous")
        return not equal and (row.way != "fast-dllm" or self.options.fast_dllm is not None)

    def measure(self, row: Row) -> Measured:
        model = self.model(row.size)
        if row.cache.startswith("dual"):
            self.sharpen(row)
        runner.supports_packing = SUPPORTS_PACKING if row.padding == "packed" else lambda model: False
        release(model)
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        prompts, new = self.work(row)
        if row.way == "plain":
            return self.plain(row, prompts, max(new))
        if row.way == "roofline":
            return self.roofline(row, prompts, max(new))
        if row.way == "fast-dllm":
            self._peer = self._peer or FastDLLM(self.options.fast_dllm, model)
            return self.timed(lambda: self.peer(self._peer, row, prompts, max(new)), 0.0)
        measured = self.timed(lambda: self.ours(row, prompts, new), self.tokens_of_a_forward(row, prompts, new))
        if self.options.profile and self.device == "cuda":
            for line in kernel_profile(lambda: self.ours(row, prompts, new), measured.forwards):
                print(f"    {line}", flush=True)
        return measured

    # ---- The work, and the ways to do it.

    def model(self, size: str) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        if self._size != size:
            self._model = self._peer = None
            gc.collect()
            self._size, self._sharp = size, False
            if self.options.model:
                loaded = AutoModelForCausalLM.from_pretrained(self.options.model, dtype=torch.bfloat16)
                self._model = loaded.to(self.device).eval()
            elif self.options.config:
                self._model = random_model(AutoConfig.from_pretrained(self.options.config), self.device)
            else:
                self._model = model_of_shape(size, self.device)
        return self._model

    def work(self, row: Row) -> tuple[list[list[int]], list[int]]:
        """Prompts, and the new tokens of each."""
        options, draw = self.options, random.Random(0)
        count = options.prompts or max(row.batch * options.batches, 1)
        spread = options.longest - options.shortest
        lengths = [options.shortest + int(spread * draw.random() ** 2) for _ in range(count)]
        if row.cache == "dual":
            lengths = [options.peer_prompt] * count
        vocabulary = min(self.model(row.size).config.vocab_size, 1000) - 2
        prompts = [[draw.randrange(vocabulary) for _ in range(length)] for length in lengths]
        blocks = options.new_tokens // self.block(row)
        ragged = options.answers == "ragged" and row.cache != "dual"
        quarter = max(1, blocks // 4)
        return prompts, [self.block(row) * (draw.randint(quarter, blocks) if ragged else blocks) for _ in prompts]

    def block(self, row: Row) -> int:
        return self.model(row.size).config.block_size if row.cache == "block" else self.options.block_length

    def steps_per_block(self, row: Row) -> int:
        return min(self.options.steps_per_block or STEPS_PER_BLOCK.get(row.size, 8), self.block(row))

    def settings(self, row: Row, new: int) -> dict[str, Any]:
        steps = self.steps_per_block(row)
        settings = {"temperature": 0.0, "eos_token_id": None, "pad_token_id": 0, "block_length": self.block(row)}
        if row.cache == "none":
            return settings | {"cache": "none", "steps": new // self.block(row) * steps}
        if row.cache == "block":
            sdar = SHAPES[row.size][0] == "sdar"
            return settings | ({"denoising_steps": steps} if sdar else {"steps": steps, "threshold": 1.0})
        return settings | {"cache": "dual", "threshold": self.options.threshold}

    def ours(self, row: Row, prompts: list[list[int]], new: list[int]) -> int:
        """All prompts once. Returns the forward passes."""
        if row.way == "continuous":
            return self.continuous(row, prompts, new)
        forwards = 0
        for part in parts(len(prompts), row.batch):
            tokens, real = left_padded(prompts[part], self.device)
            length = max(new[part])
            output = self.model(row.size).generate(
                tokens,
                attention_mask=None if real.all() else real,
                gen_length=length,
                execution=row.way,
                return_dict_in_generate=True,
                **self.settings(row, length),
            )
            forwards += output.forwards
        return forwards

    def continuous(self, row: Row, prompts: list[list[int]], new: list[int]) -> int:
        longest = max(len(prompt) + count for prompt, count in zip(prompts, new, strict=True))
        settings = self.settings(row, max(new)) | {"execution": self.options.continuous_execution}
        batch = SamplingEngine(
            self.model(row.size), settings, max_rows=row.batch, max_length=longest + self.block(row), stream=False
        )
        for number in sorted(range(len(prompts)), key=lambda number: -len(prompts[number])):
            batch.submit(Request(number, prompts[number], new[number], seed=0))
        while not batch.idle:
            batch.step()
        return batch.forwards

    def plain(self, row: Row, prompts: list[list[int]], new: int) -> Measured:
        """The published loop, whose time is that of all its forward passes, as far as they are run."""
        steps = new // self.block(row) * self.steps_per_block(row)
        total, forwards, tokens_run = 0.0, 0, 0
        for part in parts(len(prompts), row.batch):
            tokens, real = left_padded(prompts[part], self.device)
            arguments: dict[str, Any] = {"gen_length": new, "block_length": self.block(row), "steps": steps}
            arguments["real"] = None if real.all() else real
            next(published_loop(self.model(row.size), tokens, **arguments))  # does not count
            self.synchronize()
            began, count = time.perf_counter(), 0
            for count, _ in enumerate(published_loop(self.model(row.size), tokens, **arguments), start=1):
                if count % 8 == 0:
                    self.synchronize()
                    if time.perf_counter() - began > self.options.peer_seconds:
                        break
            self.synchronize()
            total += (time.perf_counter() - began) / count * steps
            forwards += steps
            tokens_run += steps * len(tokens) * (tokens.shape[1] + new)
        return Measured(total, forwards, tokens=tokens_run / forwards)

    def roofline(self, row: Row, prompts: list[list[int]], new: int) -> Measured:
        if self._ceilings is None:
            self._ceilings = ceilings(self.device)
            first, flops, bandwidth = self._ceilings
            print(
                f"    ceilings: {flops / 1e12:.0f} TFLOP/s for as long as a call lasts ({first / 1e12:.0f} for the "
                f"first moments), {bandwidth / 1e12:.2f} TB/s",
                flush=True,
            )
        _, flops, bandwidth = self._ceilings
        block, steps = self.block(row), self.steps_per_block(row)
        seconds, forwards = 0.0, 0
        for part in parts(len(prompts), row.batch):
            lengths = [len(prompt) for prompt in prompts[part]]
            seconds += roofline(self.model(row.size), lengths, new, block, steps, flops, bandwidth)
            forwards += new // block * steps
        return Measured(seconds, forwards)

    def peer(self, peer: Any, row: Row, prompts: list[list[int]], new: int) -> int:
        """Fast-dLLM's own code. Returns the forward passes."""
        forwards = 0
        for part in parts(len(prompts), row.batch):
            tokens, _ = left_padded(prompts[part], self.device)
            arguments = {"gen_length": new, "block_length": self.block(row), "steps": new}
            forwards += peer.generate(tokens, threshold=self.options.threshold, **arguments)[1]
        return forwards

    def sharpen(self, row: Row) -> None:
        """Scale the output layer until a forward pass commits about so many tokens of a row."""
        if self._sharp:
            return
        self._sharp = True
        model = self.model(row.size)
        weight = model.lm_head.weight
        prompts, _ = self.work(Row(row.size, min(row.batch, 16), "dual", "eager"))
        tokens, _ = left_padded(prompts[: min(row.batch, 16)], self.device)
        low, high = 0.0, 12.0  # powers of two
        before = weight.detach().clone()
        for _ in range(8):
            middle = (low + high) / 2
            weight.data = before * 2**middle
            block = self.options.block_length
            settings = self.settings(row, block) | {"gen_length": block, "return_dict_in_generate": True}
            committed = block / model.generate(tokens, execution="eager", **settings).forwards
            low, high = (middle, high) if committed < self.options.tokens_per_forward else (low, middle)
        print(f"    output layer of {row.size} x {2**middle:.2f}: {committed:.1f} tokens a forward", flush=True)

    # ---- Measuring and reporting.

    def timed(self, call: Callable[[], int], tokens: float) -> Measured:
        """The median of some calls after a first one."""
        times, forwards = [], 0
        for _ in range(1 + self.options.repeats):
            self.synchronize()
            began = time.perf_counter()
            forwards = call()
            self.synchronize()
            times.append(time.perf_counter() - began)
        return Measured(statistics.median(times[1:]), forwards, times[0], tokens)

    def tokens_of_a_forward(self, row: Row, prompts: list[list[int]], new: list[int]) -> float:
        """Tokens that a forward pass runs, on average; 0 where they are of several widths."""
        if row.cache == "block":
            return float(min(row.batch, len(prompts)) * self.block(row))
        if row.cache != "none" or row.way == "continuous":
            return 0.0
        counts = []
        for part in parts(len(prompts), row.batch):
            lengths, length = [len(prompt) for prompt in prompts[part]], max(new[part])
            packed = row.padding == "packed" and runner.supports_packing(self.model(row.size))
            counts.append(sum(lengths) if packed else max(lengths) * len(lengths))
            counts[-1] += length * len(lengths)
        return statistics.mean(counts)

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def report(self, row: Row, measured: Measured) -> None:
        self.measured[row] = measured
        prompts, new = self.work(row)
        peer = self.measured.get(Row(row.size, row.batch, row.cache, PEERS.get(row.cache, "")))
        calls = len(list(parts(len(prompts), row.batch)))
        ratio = each = None
        if peer is not None and row.way in OURS:
            ratio = peer.seconds / measured.seconds
            each = ratio * measured.forwards / peer.forwards
        values = {
            "row": row.name,
            "ms_per_forward": round(1000 * measured.seconds / measured.forwards, 3),
            "forwards": measured.forwards,
            "tokens_per_forward": round(sum(new) / len(new) * calls / measured.forwards, 2),
            "tokens_per_s": round(sum(new) / measured.seconds, 1),
            "ratio": None if ratio is None else round(ratio, 3),
            "ratio_per_forward": None if each is None else round(each, 3),
            "first_call_s": round(measured.first, 1),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if self.device == "cuda" else None,
        }
        print("| " + " | ".join("" if value is None else str(value) for value in values.values()) + " |", flush=True)
        if self.options.json:
            more = {
                "seconds": round(measured.seconds, 4),
                "prompts": len(prompts),
                "prompt_tokens": sum(map(len, prompts)),
                "new_tokens": sum(new),
                "tokens_run_per_forward": round(measured.tokens, 1),
                "device": torch.cuda.get_device_name() if self.device == "cuda" else "cpu",
                "torch": torch.__version__,
            }
            with self.options.json.open("a") as file:
                file.write(json.dumps(values | more) + "\n")

    def fits(self) -> Iterator[str]:
        """Lines through the milliseconds of each way over the tokens that a forward pass runs."""
        groups: dict[str, list[tuple[float, float]]] = {}
        for row, measured in self.measured.items():
            if measured.tokens and row.batch >= 16:
                name = Row(row.size, 0, row.cache, row.way, row.padding).name.replace("/0/", "/*/")
                groups.setdefault(name, []).append((measured.tokens, 1000 * measured.seconds / measured.forwards))
        for name, points in groups.items():
            if len(points) < 3:
                continue
            fixed, slope = line_through(points)
            off = max(abs(fixed + slope * x - y) / y for x, y in points)
            tokens = " to ".join(f"{bound:,.0f}" for bound in (min(points)[0], max(points)[0]))
            yield f"{name}: {fixed:.2f} ms + {1000 * slope:.3f} us a token, {off:.1%} off at most ({tokens} tokens)"


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope of the line with the least squares of relative errors."""
    weights = [1 / y**2 for _, y in points]
    total = sum(weights)
    x_mean = sum(weight * x for weight, (x, _) in zip(weights, points, strict=True)) / total
    y_mean = sum(weight * y for weight, (_, y) in zip(weights, points, strict=True)) / total
    covariance = sum(weight * (x - x_mean) * (y - y_mean) for weight, (x, y) in zip(weights, points, strict=True))
    slope = covariance / sum(weight * (x - x_mean) ** 2 for weight, (x, _) in zip(weights, points, strict=True))
    return y_mean - slope * x_mean, slope


def parts(count: int, batch: int) -> Iterator[slice]:
    """The slices of so many prompts that are batches."""
    for start in range(0, count, batch):
        yield slice(start, min(start + batch, count))


def left_padded(prompts: Sequence[Sequence[int]], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The prompts as one tensor, and their attention mask."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    real = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return tokens, real


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SHAPES), nargs="+", default=SIZES)
    parser.add_argument("--model", help="a Hub folder or id of a bidirectional model, in place of --size")
    parser.add_argument("--config", help="a folder with a config.json of one, for random weights")
    parser.add_argument("--batch", type=int, nargs="+", help=f"{BATCH}, of some sizes {BATCHES}")
    parser.add_argument("--ways", choices=(*PEERS.values(), *OURS), nargs="+", default=[*PEERS.values(), *OURS[1:]])
    parser.add_argument("--only", nargs="+", default=["*"], help="rows whose names match one of these patterns")
    parser.add_argument("--padding", choices=("masked", "packed"), nargs="+", default=["packed"])
    parser.add_argument("--continuous-execution", choices=("eager", "graph", "compiled"))
    parser.add_argument("--batches", type=int, default=1, help="prompts for so many batches")
    parser.add_argument("--prompts", type=int, help="so many prompts, whatever the batch")
    parser.add_argument("--shortest", type=int, default=40)
    parser.add_argument("--longest", type=int, default=240)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--block-length", type=int, default=32, help="of bidirectional models")
    parser.add_argument("--steps-per-block", type=int, help=f"8, of some sizes {STEPS_PER_BLOCK}")
    parser.add_argument("--answers", choices=("full", "ragged"), default="full")
    parser.add_argument("--threshold", type=float, default=0.9)
    parser.add_argument("--tokens-per-forward", type=float, default=3.0)
    parser.add_argument("--fast-dllm", type=Path, help="a checkout of NVlabs/Fast-dLLM")
    parser.add_argument("--peer-prompt", type=int, default=128)
    parser.add_argument("--peer-seconds", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="no row begins that may end later")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args(arguments)
    if options.model or options.config:
        options.size = ["model"]
    if options.new_tokens % options.block_length:
        parser.error(f"--new-tokens {options.new_tokens} is not a multiple of --block-length {options.block_length}")
    Bench(options).run()


if __name__ == "__main__":
    main()
