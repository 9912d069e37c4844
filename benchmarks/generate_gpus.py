"""Sampling of models that are spread over GPUs: the same tokens as one GPU's, and how long a forward takes.

    python benchmarks/generate_gpus.py                       on all GPUs
    python benchmarks/generate_gpus.py --parts timing --executions graph --length 32      the figures alone, quickly
    python benchmarks/generate_gpus.py --parts equality --families llada sdar
    python benchmarks/generate_gpus.py --size tiny           also on a CPU, there by two processes and gloo

Two ways: tensor parallelism, for which this command starts torchrun, with transformers' layers and with the plain
ones that `generate --tp-plan auto` puts in their place, eagerly, in CUDA graphs and compiled; and a device map, whose
GPUs run one after the other. The parts, in this order:

timing      LLaDA-8B's shape with random weights in bf16: milliseconds a forward, beside one GPU's, of one row and of
            --rows. `of_linear` is the time of one GPU, in its fastest execution so far, over that of N GPUs and over
            N; `equal_tokens` the share of greedy tokens that are one GPU's (in bf16, where sums in another order round
            otherwise, a token that differs changes those after it) and `equal_to_eager` those of the same GPUs run
            eagerly.
equality    small models of several families in fp32, dense and with experts, and that shape, with the family's own
            cache and without: logits to 1e-4 of the largest and greedy tokens must be those of one GPU, and without a
            seed all processes must draw the same.
device-map  both over a device map.

Prints a line for each as soon as it is known, and after timing and equality one that says which execution `--tp-plan
auto` should have by default: the fastest whose tokens in fp32 were all right. Exits with 1 if something is wrong, or
if a line takes longer than --limit: the processes then print where they are.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launching import end_after

import dlm_bridge  # noqa: F401
from dlm_bridge.generation.runtime.tensor_parallel import use_plain_shards
from dlm_bridge.models.families import family_by_name

TINY = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "initializer_range": 0.2,
    "mask_token_id": 1000,
    "eos_token_id": 1001,
    "pad_token_id": 1001,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "head_dim": 32}
LLADA = {
    "vocab_size": 1024,
    "embedding_size": 1024,
    "d_model": 256,
    "mlp_hidden_size": 512,
    "n_layers": 4,
    "n_heads": 16,
    "n_kv_heads": 8,
    "init_std": 0.2,
    "mask_token_id": 1000,
    "eos_token_id": 1001,
    "pad_token_id": 1001,
}
SMALL: dict[str, dict[str, Any]] = {
    "llada": LLADA,
    "dream": TINY,
    "sdar": {**TINY, "head_dim": 32, "block_size": 4},
    "nemotron_labs_diffusion": {**TINY, "head_dim": 32, "block_size": 8},
    "wedlm": TINY,
    "sdar_moe": {**TINY, **EXPERTS, "block_size": 4},
    "llada2_moe": {**TINY, **EXPERTS, "n_group": 4, "topk_group": 2, "num_shared_experts": 1},
}
LARGE: dict[str, dict[str, Any]] = {
    "8b": {"d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "mlp_hidden_size": 12288},
    "tiny": LLADA,
}
PROMPT = 128
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXECUTIONS = ("eager", "graph", "compiled") if DEVICE == "cuda" else ("eager",)
PARTS = ("timing", "equality", "device-map")
LONG_S = 5  # a call of that length is timed once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--size", choices=tuple(LARGE), default="8b", help="of the model that is timed")
    parser.add_argument("--length", type=int, default=64, help="new tokens of the model that is timed")
    parser.add_argument("--rows", type=int, default=64, help="of the larger batch that is timed")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument(
        "--families", nargs="*", choices=tuple(SMALL), default=tuple(SMALL), help="of the small models"
    )
    parser.add_argument("--executions", nargs="+", choices=EXECUTIONS, default=EXECUTIONS, help="default: all")
    parser.add_argument("--limit", type=float, default=150, help="seconds until the next line (%(default)s)")
    parser.add_argument("--folder", type=Path, help="where there is room for a checkpoint of 16 GB")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # one of torchrun's processes
    options = parser.parse_args()
    if options.worker:
        tensor_parallel(options)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        options.folder = Path(folder)
        began = time.perf_counter()
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.gpus)]
        words = ["--folder", str(options.folder), "--size", options.size, "--length", str(options.length)]
        words += ["--rows", str(options.rows), "--limit", str(options.limit)]
        for option in ("parts", "families", "executions"):
            words += [f"--{option}", *getattr(options, option)]
        workers = subprocess.Popen([*launch, __file__, "--worker", *words])
        try:
            for name in options.families:
                write(name, SMALL[name], options.folder / name, torch.float32)
            write("llada", LARGE[options.size], options.folder / "large", torch.bfloat16)
            if DEVICE == "cuda":
                torch.cuda.empty_cache()  # the other processes use this GPU, too
            (options.folder / "ready").touch()
            workers.wait()
            wrong = 0 if (options.folder / "right").exists() else 1
        finally:
            workers.kill()
        if "device-map" in options.parts:
            wrong |= device_map(options)
        print(f"{time.perf_counter() - began:.0f} s in all", flush=True)
    sys.exit(1 if wrong else 0)


def write(name: str, sizes: dict[str, Any], folder: Path, dtype: torch.dtype) -> None:
    """A checkpoint with random weights."""
    spec = family_by_name(name)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = spec.load("model_class")._from_config(spec.load("config_class")(**sizes), dtype=dtype)
    model.save_pretrained(folder)


def tensor_parallel(options: argparse.Namespace) -> None:
    """One process of several, each with its share of every matrix. The first one says in a file if all is right."""
    from transformers.distributed import DistributedConfig

    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    end_after(options.limit)
    while not (options.folder / "ready").exists():  # written while this process imported
        time.sleep(0.1)
    own = torch.device(DEVICE, int(os.environ["LOCAL_RANK"]) if DEVICE == "cuda" else None)

    def say(text: str) -> None:
        end_after(options.limit)
        if rank == 0:
            print(f"tp {processes}: {text}", flush=True)

    def spread(folder: Path, **more: Any) -> Any:
        return load(folder, distributed_config=DistributedConfig(tp_plan="auto"), **more)

    taken, wrong = {}, 0
    right = dict.fromkeys(options.executions, True)
    if "timing" in options.parts:
        taken = time_large(options, spread, own, say)
    if "equality" in options.parts:
        for name in (*options.families, "large"):  # the last one, written in bf16, in fp32 too
            model, whole = (make(options.folder / name, dtype=torch.float32) for make in (spread, load))
            whole.to(own)
            wrong |= compare(name, model, whole, own, say)
            wrong |= draws_the_same(name, model, own, say)
            if not use_plain_shards(model):
                say(f"{name}: no plain layers  WRONG")
                wrong = 1
            for execution in options.executions:
                bad = compare(f"{name}, plain layers, {execution}", model, whole, own, say, execution=execution)
                right[execution] &= not bad
                wrong |= bad
            del model, whole
            gc.collect()
        good = [execution for execution in options.executions if right[execution]]
        for rows, times in taken.items():
            fastest = min(good, key=lambda execution: times[execution].ms, default=None)
            say(
                f"--tp-plan auto, batch {rows}: {fastest} is the fastest execution whose tokens in fp32 were all right"
            )
    verdict = torch.tensor([wrong], device=own)
    dist.all_reduce(verdict, dist.ReduceOp.MAX)
    if rank == 0 and not verdict.item():
        (options.folder / "right").touch()
    dist.destroy_process_group()


def time_large(
    options: argparse.Namespace, spread: Callable[[Path], Any], own: torch.device, say: Callable[[str], None]
) -> dict[int, dict[str, Timed]]:
    """The large model on one GPU and on all, side by side in memory, and at the end with transformers' layers. Returns
    what the plain layers took, by number of rows and execution."""
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = spread(options.folder / "large")
    use_plain_shards(model)
    whole = load(options.folder / "large", device_map={"": own}) if rank == 0 else None
    found: dict[int, dict[str, Timed]] = {}
    for rows in (1, options.rows):
        alone: list[Timed] = []
        together = found[rows] = {}
        for execution in options.executions:
            if whole is not None:
                alone.append(
                    figures(whole, own, options.length, partial(print, "one GPU:", flush=True), rows, execution)
                )
            end_after(options.limit)
            dist.barrier()
            beside = (processes, alone) if alone else None
            eager = together.get("eager")
            together[execution] = figures(model, own, options.length, say, rows, execution, beside, eager)
    del model, whole
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    model = spread(options.folder / "large")
    figures(model, own, options.length, lambda text: say(f"transformers' layers: {text}"))
    return found


def device_map(options: argparse.Namespace) -> int:
    """One process, whose layers lie on several GPUs. Returns 1 if something is wrong."""
    devices = [f"cuda:{number}" for number in range(options.gpus)] if DEVICE == "cuda" else ["cpu"]

    def say(text: str) -> None:
        end_after(options.limit)
        print(f"device map of {len(devices)}: {text}", flush=True)

    end_after(options.limit)
    wrong, first = 0, torch.device(devices[0])
    for name in options.families:
        sizes = SMALL[name]
        layers = sizes.get("num_hidden_layers") or sizes["n_layers"]
        places = {"model.embed_tokens": devices[0], "model.rotary_emb": devices[0]}
        places |= {"model.norm": devices[-1], "lm_head": devices[-1]}
        places |= {f"model.layers.{layer}": devices[layer * len(devices) // layers] for layer in range(layers)}
        model, whole = load(options.folder / name, device_map=places), load(options.folder / name).to(first)
        wrong |= compare(name, model, whole, first, say)
    model = load(options.folder / "large", device_map="auto")
    say(f"auto uses {len({*getattr(model, 'hf_device_map', {}).values()}) or 1} devices")
    figures(model, first, options.length, say)
    return wrong


def load(folder: Path, dtype: str | torch.dtype = "auto", **more: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **more).eval()


def compare(
    name: str, model: Any, whole: Any, device: torch.device, say: Callable[[str], None], execution: str | None = None
) -> int:
    """Logits, and greedy tokens with the family's own cache and with none. Returns 1 if something is wrong."""
    ids = torch.randint(0, 1000, (2, 40), generator=torch.Generator().manual_seed(1)).to(device)
    given = {"gen_length": 32, "temperature": 0.0, "eos_token_id": None, "seed": 1}
    equal = {}
    try:
        with torch.no_grad():
            logits, wanted = model(ids).logits.to(device), whole(ids).logits
        apart = ((logits - wanted).abs().max() / wanted.abs().max()).item()
        for cache in (None, "none"):
            rows = model.generate(ids, cache=cache, execution=execution, **given).to(device)
            same = (rows == whole.generate(ids, cache=cache, execution="eager", **given)).float().mean().item()
            equal["own" if cache is None else cache] = same
    except RuntimeError as error:
        say(f"{name}: {str(error).splitlines()[0]}  WRONG")
        return 1
    right = apart < 1e-4 and all(same == 1 for same in equal.values())
    shown = ", ".join(f"{same:.0%} with cache {cache}" for cache, same in equal.items())
    say(f"{name}: logits {apart:.1e} apart, equal tokens: {shown}{'' if right else '  WRONG'}")
    return 0 if right else 1


def draws_the_same(name: str, model: Any, device: torch.device, say: Callable[[str], None]) -> int:
    """Whether processes with random numbers of their own draw the same tokens."""
    torch.manual_seed(dist.get_rank())
    ids = torch.randint(0, 1000, (2, 40), generator=torch.Generator().manual_seed(1)).to(device)
    rows = model.generate(ids, gen_length=32, temperature=1.0, eos_token_id=None)
    gathered = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, rows)
    if all(torch.equal(one, rows) for one in gathered):
        return 0
    say(f"{name}: processes drew different tokens  WRONG")
    return 1


@dataclass(frozen=True)
class Timed:
    """Milliseconds a forward, and the tokens on the CPU."""

    ms: float
    tokens: torch.Tensor


def figures(
    model: Any,
    device: torch.device,
    length: int,
    say: Callable[[str], None],
    rows: int = 1,
    execution: str | None = None,
    beside: tuple[int, list[Timed]] | None = None,  # the number of GPUs, and one GPU's, last in the same execution
    eager: Timed | None = None,  # the same GPUs', run eagerly
) -> Timed:
    """Say how long a forward of so many rows takes, with every step of the published sampler."""
    ids = torch.randint(0, 1000, (rows, PROMPT), generator=torch.Generator().manual_seed(1)).to(device)
    given = {"gen_length": length, "block_length": min(32, length), "steps": length, "eos_token_id": None}
    given |= {"execution": execution}
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times: list[float] = []
    while len(times) < (2 if times and min(times) > LONG_S else 3):  # the first one compiles and records
        output = model.generate(ids, return_dict_in_generate=True, temperature=0.0, **given)
        times.append(output.time)
    taken = min(times[1:])
    line = {
        "parameters_b": round(sum(one.numel() for one in model.parameters()) / 1e9, 2),
        "execution": execution or "default",
        "rows": rows,
        "tokens": rows * length,
        "forwards": output.forwards,
        "ms_per_forward": round(1000 * taken / output.forwards, 2),
        "tokens_per_s": round(rows * length / taken, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 1) if DEVICE == "cuda" else None,
    }
    found = Timed(1000 * taken / output.forwards, output.sequences[:, PROMPT:].cpu())
    if beside is not None:
        processes, alone = beside
        line["of_linear"] = round(min(one.ms for one in alone) / processes / found.ms, 3)
        line["equal_tokens"] = round((alone[-1].tokens == found.tokens).float().mean().item(), 4)
    if eager is not None:
        line["equal_to_eager"] = round((eager.tokens == found.tokens).float().mean().item(), 4)
    say(json.dumps(line))
    gc.collect()
    return found


if __name__ == "__main__":
    main()
