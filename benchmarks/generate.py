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

import torch
from rich.console import Console

import dlm_bridge  # noqa: F401
from dlm_bridge.generation import release

PROMPT = 128
KERNELS = 25  # so many of a profile are printed
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "full": {
        "llada": {"d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "mlp_hidden_size": 12288},
        "sdar": {
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32768,
            "rope_theta": 1000000.0,
        },
    },
    "tiny": {
        "llada": {"d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 128},
        "sdar": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 1024,
            "mask_token_id": 1000,
        },
    },
}


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
    parser.add_argument("--size", choices=tuple(SIZES), default="full")
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
            peer, _ = self.measure(lambda: published_llada(model, prompt, **arguments))  # noqa: B023
            self.ours(model, prompt, arguments | {"cache": "none"}, "published loop", peer)

    def dual(self) -> None:
        model = self.model("llada")
        peer_model, peer_code = fast_dllm(self.options.fast_dllm, model)
        for batch, length in self.cases():
            prompt = self.prompt(model, batch)
            steps = length // self.options.block * self.steps
            arguments = {"gen_length": length, "block_length": self.options.block, "steps": steps}
            mask = model.config.mask_token_id
            peer, theirs = self.measure(
                lambda: dual_cache(peer_model, peer_code, prompt, mask=mask, **arguments)  # noqa: B023
            )
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
                roofline(model, batch, length, block, steps, rate, bandwidth) for rate in (flops, first)
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
                self.profile(call, forwards)
        return output

    def profile(self, call: Callable[[], Any], forwards: int) -> None:
        """Print what the GPU does in a call, in ms a forward."""
        if self.device != "cuda":
            raise SystemExit("--profile looks at a GPU's kernels: there is no GPU here")
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            call()
            self.synchronize()
        kernels: dict[str, list[float]] = {}
        spans = []
        for event in profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                kernels.setdefault(event.name, []).append(event.device_time)
                spans.append((event.time_range.start, event.time_range.end))
        spans.sort()
        idle, busy_until = 0.0, spans[0][0]
        for begin, end in spans:
            idle += max(0, begin - busy_until)
            busy_until = max(busy_until, end)
        total = busy_until - spans[0][0]
        self.console.print(f"    {total / 1000 / forwards:.3f} ms a forward, idle {idle / total:.1%}")
        for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:KERNELS]:
            share, count = sum(times) / total, len(times)
            self.console.print(
                f"    {share:6.1%} {sum(times) / 1000 / forwards:7.3f} ms {count:6d} x {sum(times) / count:7.1f} us"
                f"  {name[:110]}"
            )

    @property
    def steps(self) -> int:
        return self.options.steps_per_block or self.options.block

    def cases(self) -> list[tuple[int, int]]:
        return [(batch, length) for batch in self.options.batch for length in self.options.length]

    def model(self, family: str) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(family, **SIZES[self.options.size][family])
        torch.manual_seed(0)
        with torch.device(self.device):
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

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


def published_llada(
    model: Any, prompt: torch.Tensor, *, gen_length: int, block_length: int, steps: int
) -> torch.Tensor:
    """LLaDA's sampler as it is published (arXiv 2502.09992, algorithm 5): each step asks for the logits of every
    position, ranks what is masked up to the block's end, and commits each row's share."""
    mask = model.config.mask_token_id
    row_length = prompt.shape[1] + gen_length
    tokens = torch.full((prompt.shape[0], row_length), mask, device=prompt.device)
    tokens[:, : prompt.shape[1]] = prompt
    blocks = gen_length // block_length
    share = gen_length // steps
    for block in range(blocks):
        end = prompt.shape[1] + (block + 1) * block_length
        for _ in range(steps // blocks):
            logits = model(tokens).logits
            proposed = logits.argmax(dim=-1)
            confidence = logits.softmax(dim=-1).gather(-1, proposed[..., None])[..., 0]
            confidence[:, end:] = -torch.inf
            confidence = torch.where(tokens == mask, confidence, -torch.inf)
            for row in range(len(tokens)):
                picked = confidence[row].topk(share).indices
                tokens[row, picked] = proposed[row, picked]
    return tokens


def dual_cache(
    model: Any, code: Any, prompt: torch.Tensor, *, mask: int, gen_length: int, block_length: int, steps: int
) -> torch.Tensor:
    """Fast-dLLM's `generate_with_dual_cache`; for several rows its forwards and its `get_transfer_index` in turn."""
    if len(prompt) == 1:
        arguments = {"gen_length": gen_length, "block_length": block_length, "steps": steps}
        tokens: torch.Tensor = code.generate_with_dual_cache(model, prompt, mask_id=mask, **arguments)[0]
        return tokens
    tokens = torch.full((len(prompt), prompt.shape[1] + gen_length), mask, device=prompt.device)
    tokens[:, : prompt.shape[1]] = prompt
    steps_per_block = steps // (gen_length // block_length)
    share = torch.full((len(prompt),), block_length // steps_per_block, device=prompt.device)
    for start in range(prompt.shape[1], tokens.shape[1], block_length):
        block = slice(start, start + block_length)
        output = model(tokens, use_cache=True)
        open_ = tokens == mask
        open_[:, block.stop :] = False
        proposed, picked = code.get_transfer_index(output.logits, 0.0, "low_confidence", open_, tokens, share)
        tokens[picked] = proposed[picked]
        replaced = torch.zeros_like(tokens[:1], dtype=torch.bool)
        replaced[:, block] = True
        for _ in range(steps_per_block - 1):
            logits = model(
                tokens[:, block],
                past_key_values=output.past_key_values,
                use_cache=True,
                replace_position=replaced,
            ).logits
            now = tokens[:, block]
            proposed, picked = code.get_transfer_index(logits, 0.0, "low_confidence", now == mask, now, share)
            now[picked] = proposed[picked]
    return tokens


def fast_dllm(folder: Path | None, model: Any) -> tuple[Any, Any]:
    """Fast-dLLM's own LLaDA, with our model's very weights, and the module of its samplers."""
    if folder is None:
        raise SystemExit("--case dual runs the peer's own code: give its checkout with --fast-dllm")
    sys.path.insert(0, str(folder / "llada"))
    import generate as code  # type: ignore[import-not-found]
    from model.configuration_llada import LLaDAConfig  # type: ignore[import-not-found]
    from model.modeling_llada import LLaDAModelLM  # type: ignore[import-not-found]

    ours = model.config
    config = LLaDAConfig(
        d_model=ours.d_model,
        n_heads=ours.n_heads,
        n_kv_heads=ours.num_key_value_heads,
        n_layers=ours.n_layers,
        mlp_hidden_size=ours.mlp_hidden_size,
        vocab_size=ours.vocab_size,
        embedding_size=ours.vocab_size,
        max_sequence_length=ours.max_sequence_length,
        rope_theta=ours.rope_theta if hasattr(ours, "rope_theta") else 500000.0,
        activation_type="silu",
        block_type="llama",
        layer_norm_type="rms",
        rms_norm_eps=ours.rms_norm_eps,
        rope=True,
        alibi=False,
        weight_tying=False,
        include_bias=False,
        include_qkv_bias=False,
        bias_for_layer_norm=False,
        attention_layer_norm=False,
        attention_dropout=0.0,
        residual_dropout=0.0,
        embedding_dropout=0.0,
        init_device="meta",
        mask_token_id=ours.mask_token_id,
    )
    with torch.device("meta"):
        peer = LLaDAModelLM(config)
    names = {
        "model.embed_tokens.": "model.transformer.wte.",
        "model.norm.": "model.transformer.ln_f.",
        "lm_head.": "model.transformer.ff_out.",
        "model.layers.": "model.transformer.blocks.",
        "self_attn.o_proj": "attn_out",
        "self_attn.": "",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ff_norm",
        "mlp.gate_proj": "ff_proj",
        "mlp.up_proj": "up_proj",
        "mlp.down_proj": "ff_out",
    }
    weights = {}
    for name, tensor in model.state_dict().items():
        for old, new in names.items():
            name = name.replace(old, new)
        weights[name] = tensor
    peer.load_state_dict(weights, assign=True)
    return peer.eval(), code


def ceilings(device: str) -> tuple[float, float, float]:
    """What this machine reaches: FLOP/s of a large bf16 product in the first moments, and after seconds of it, when a
    GPU has come to the clock that its power allows; and bytes/s that it reads."""
    size = 8192 if device == "cuda" else 256
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    b = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    data = torch.zeros(2**30 if device == "cuda" else 2**20, device=device, dtype=torch.int32)

    def seconds(call: Callable[[], Any], lasting: float) -> list[float]:
        """Of one call, again and again for that long."""
        call()
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < 10 or time.perf_counter() - began < lasting:
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(4):
                call()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / 4)
        return times

    reading = statistics.median(seconds(data.max, 0))
    products = seconds(lambda: a @ b, 2.0)
    first, last = (statistics.median(times) for times in (products[:10], products[len(products) // 2 :]))
    return 2 * size**3 / first, 2 * size**3 / last, data.nbytes / reading


def roofline(model: Any, batch: int, length: int, block: int, steps: int, flops: float, bandwidth: float) -> float:
    """The least seconds of a block-causal call: for every forward the longer of reading the weights and what is kept,
    and of the multiplications. A block takes `steps` forwards, the first together with what is not kept yet: the
    prompt or the block before. The last block is not kept. A prompt's attention is left out."""
    config = model.config
    body = sum(
        p.numel() for name, p in model.named_parameters() if "embed_tokens" not in name and "lm_head" not in name
    )
    head = config.vocab_size * config.hidden_size
    group_bytes = 2 * 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    pair = 4 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    total = 0.0
    for start in range(PROMPT, PROMPT + length, block):
        end = start + block
        reading = (2 * (body + head) + batch * end * group_bytes) / bandwidth
        for step in range(steps):
            products = 2 * batch * block * (body + head) + batch * block * end * pair
            if step == 0:
                committed = PROMPT if start == PROMPT else block
                products += 2 * batch * committed * body + (batch * block * start * pair if start > PROMPT else 0)
            total += max(products / flops, reading)
    return total


if __name__ == "__main__":
    main()
