"""Conversion against a plain copy: seconds, speed and peak memory on one machine, in one run.

    python benchmarks/conversion.py --folder /fast/disk --gb 16
    python benchmarks/conversion.py --peers DIR     # DIR: pip install --target DIR --no-deps mbridge

It writes a LLaDA-8B-shaped bfloat16 checkpoint of random weights (with fewer layers and a smaller vocabulary below
16 GB), four shards, tensors in random order over them. Then it times, in turn and several times over, `cp -r` and sync
of it, its import to TP=4 x PP=2, the export of that, and its reshard to TP=2, each in a process of its own; the time
counts from the first look at the source to the last byte on the disk, start-up is told apart. Right before the clock
starts a file of the same size is written and removed, in pieces as cp writes them, so that all find the memory of the
machine in the same state: a virtual one hands pages that are free for two seconds back to its host, and getting them
again takes longer than filling them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dlm_bridge import Bridge, Layout
from dlm_bridge.convert.formats.hub_weights import METADATA, HubWriter, ShardFile, build_header, index_text
from dlm_bridge.models.families import find_family

LLADA = {
    "architectures": ["LLaDAModelLM"], "model_type": "llada", "block_type": "llama", "activation_type": "silu",
    "layer_norm_type": "rms", "d_model": 4096, "n_heads": 32, "n_kv_heads": 32, "mlp_hidden_size": 12288,
    "max_sequence_length": 4096, "rope": True, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "weight_tying": False,
    "include_bias": False, "include_qkv_bias": False, "torch_dtype": "bfloat16", "mask_token_id": 1, "eos_token_id": 0,
    "pad_token_id": 0, "block_group_size": 1, "alibi": False, "input_emb_norm": False, "attention_layer_norm": False,
    "multi_query_attention": None, "scale_logits": False,
}  # fmt: skip
RND1 = {
    "architectures": ["RND1LM"], "model_type": "rnd1", "hidden_size": 64, "intermediate_size": 96, "head_dim": 32,
    "moe_intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 32,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": False, "hidden_act": "silu", "attention_bias": False,
    "tie_word_embeddings": False, "max_position_embeddings": 256, "vocab_size": 128, "mask_token_id": 99,
    "eos_token_id": 98, "pad_token_id": 97, "torch_dtype": "bfloat16",
}  # fmt: skip
FULL_SIZE = 16e9  # bytes of LLaDA-8B in bfloat16

# Runs in a process of its own: [import torch, import dlm_bridge, conversion] in seconds, peak memory in bytes.
CHILD = """
import json, os, sys, time
start = time.perf_counter()
import torch
torch_done = time.perf_counter()
from dlm_bridge import Bridge, Layout
import dlm_bridge.bridge
ready = time.perf_counter()
action, source, output, workers, processes, nbytes = sys.argv[1:]
options = {"workers": int(workers) or None, "processes": int(processes)}
block = bytes(1 << 16)
with open(output + ".warm", "wb") as stream:
    for _ in range(int(nbytes) // len(block) + 8192):
        stream.write(block)
os.sync()
os.unlink(output + ".warm")
ready_to_run = time.perf_counter()
if action == "import":
    Bridge.from_hf(source).to_megatron(output, Layout(tp=4, pp=2), **options)
elif action == "export":
    Bridge.from_megatron(source).to_hf(output, **options)
else:
    Bridge.from_megatron(source).to_megatron(output, Layout(tp=2), **options)
done = time.perf_counter()
peak = 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
figures = {"torch": torch_done - start, "package": ready - torch_done, "warm": ready_to_run - ready}
print(json.dumps({**figures, "seconds": done - ready_to_run, "peak": peak}))
"""
PEERS = {
    "mbridge": "from mbridge import AutoBridge; AutoBridge.from_pretrained({hub!r}).get_model(weight_path={hub!r})",
}


def main() -> None:
    """Parse the options, run everything, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, help="size of the checkpoint; 16, or a third of the memory, by default")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0, help="0: dlm-bridge's own default")
    parser.add_argument("--processes", type=int, default=1, help="each with --workers threads")
    parser.add_argument("--folder", type=Path, help="where to write (three times the size); a temporary folder else")
    parser.add_argument("--peers", type=Path, help="folder with mbridge, to be tried as well")
    options = parser.parse_args()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    size = min(memory / 3, FULL_SIZE) if options.gb is None else options.gb * 1e9
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        hub = write_llada(folder / "hub", size / FULL_SIZE)
        nbytes = sum(file.stat().st_size for file in hub.iterdir())
        print(f"{nbytes / 1e9:.2f} GB, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        chosen = (options.workers, options.processes, nbytes)
        show(measure(folder, hub, nbytes, options.repeat, chosen), nbytes)
        plan_experts(folder / "experts")
        if options.peers is None:
            print("peers: none asked for (--peers DIR)")
        else:
            for peer, code in PEERS.items():
                try_peer(peer, code.format(hub=str(hub), output=str(folder / "peer")), options.peers)


def write_llada(folder: Path, scale: float) -> Path:
    """Random weights; layers and vocabulary shrink together, so that the tensors keep their proportions."""
    layers = max(2, 2 * round(32 * scale / 2))
    rows = max(128, round(126464 * scale / 128) * 128)
    return write_random(folder, {**LLADA, "n_layers": layers, "vocab_size": rows, "embedding_size": rows})


def write_random(folder: Path, config: dict[str, Any]) -> Path:
    """Write a Hub folder with random weights in bfloat16, in four shards."""
    plans, shapes = plan_shards(folder, config)
    writer = HubWriter(folder, plans)
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        writer.write(name, torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator))
    writer.finish()
    return folder


def plan_shards(folder: Path, config: dict[str, Any]) -> tuple[list[ShardFile], dict[str, tuple[int, ...]]]:
    """Write config.json and the index of a checkpoint in four shards; what the shards will hold."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mapping = find_family(config, None, str(folder)).mapping
    params = mapping.params(mapping.dims(config))
    shapes = {name: shape for param in params for name, shape in zip(param.hub_names, param.hub_shapes, strict=True)}
    names = list(shapes)
    random.Random(0).shuffle(names)
    plans = []
    for number in range(4):
        header, entries = build_header(METADATA, [(name, torch.bfloat16, shapes[name]) for name in names[number::4]])
        plans.append(ShardFile(f"model-{number + 1:05d}-of-00004.safetensors", METADATA, header, entries))
    (folder / "model.safetensors.index.json").write_text(index_text(plans))
    return plans, shapes


def measure(
    folder: Path, hub: Path, nbytes: int, repeat: int, chosen: tuple[int, int, int]
) -> dict[str, list[dict[str, float]]]:
    """Every run's figures, by what was run; `chosen` are workers, processes and bytes."""
    runs: dict[str, Callable[[], dict[str, float]]] = {
        "cp -r + sync": lambda: copy(hub, folder / "copy"),
        "import": lambda: convert("import", hub, folder / "megatron", chosen),
        "export": lambda: convert("export", folder / "megatron", folder / "export", chosen),
        "reshard": lambda: convert("reshard", folder / "megatron", folder / "reshard", chosen),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for _ in range(repeat):
        for name, run in runs.items():
            if name not in ("import", "export", "reshard"):  # which do it themselves, once they have started up
                warm(folder, nbytes)
            found[name].append(run())
            for left in ("copy", "export", "reshard"):
                shutil.rmtree(folder / left, ignore_errors=True)
        shutil.rmtree(folder / "megatron")
    return found


def warm(folder: Path, nbytes: int) -> None:
    """Bring pages into the machine: one that was idle hands them back to its host, and getting them again is slow."""
    block = bytes(1 << 16)
    with (folder / "warm").open("wb") as stream:
        for _ in range(nbytes // len(block) + 8192):
            stream.write(block)
    os.sync()
    (folder / "warm").unlink()


def copy(source: Path, target: Path) -> dict[str, float]:
    """Copy a folder and wait until it is on the disk."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync", target, *target.iterdir()], check=True)
    return {"seconds": time.perf_counter() - start}


def convert(action: str, source: Path, output: Path, chosen: tuple[int, int, int]) -> dict[str, float]:
    """One conversion in a process of its own."""
    command = [sys.executable, "-c", CHILD, action, str(source), str(output), *map(str, chosen)]
    start = time.perf_counter()
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(result.stdout)
    inside = sum(figures[part] for part in ("torch", "package", "warm", "seconds"))
    return figures | {"interpreter": time.perf_counter() - start - inside}


def show(found: dict[str, list[dict[str, float]]], nbytes: int) -> None:
    """Medians, and the ratio to the copy's speed."""

    def median(name: str, figure: str) -> float:
        return statistics.median(run[figure] for run in found[name])

    base = median("cp -r + sync", "seconds")
    print(f"{'':14}{'seconds':>9}{'GB/s':>7}{'of cp':>7}{'peak MB':>9}   every run")
    for name, runs in found.items():
        seconds = median(name, "seconds")
        peak = f"{median(name, 'peak') / 1e6:9.0f}" if "peak" in runs[0] else f"{'-':>9}"
        each = " ".join(f"{run['seconds']:.2f}" for run in runs)
        print(f"{name:14}{seconds:9.2f}{nbytes / seconds / 1e9:7.2f}{base / seconds:7.2f}{peak}   {each}")
    apart = ", ".join(
        f"{what} {statistics.median(run[key] for run in found['import']):.2f} s"
        for what, key in (("interpreter", "interpreter"), ("import torch", "torch"), ("dlm_bridge", "package"))
    )
    print(f"start-up, not counted above: {apart}")


def plan_experts(folder: Path) -> None:
    """Planning alone of models with very many tensors; their files are holes."""
    for experts in (64, 128, 256):
        hub = folder.with_name(f"{folder.name}-{experts}")
        plans, shapes = plan_shards(hub, {**RND1, "num_experts": experts})
        for plan in plans:
            with (hub / plan.file).open("wb") as stream:
                stream.write(plan.header)
                stream.truncate(plan.nbytes)
        start = time.process_time()
        Bridge.from_hf(hub).to_megatron(folder.with_name("none"), Layout(tp=2, pp=4, ep=8, etp=1), dry_run=True)
        seconds = time.process_time() - start
        print(f"plan {experts} experts x 32 layers: {len(shapes):,} tensors in {seconds:.2f} s of CPU time")


def try_peer(name: str, code: str, site: Path) -> None:
    """A peer's import of the same checkpoint, or why it cannot run here."""
    environment = {**os.environ, "PYTHONPATH": str(site.absolute()), "PYTHONDONTWRITEBYTECODE": "1"}
    start = time.perf_counter()
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if result.returncode:
        print(f"{name}: cannot run here: {(result.stderr.strip().splitlines() or ['no message'])[-1]}")
    else:
        print(f"{name}: {time.perf_counter() - start:.2f} s, start-up included")


if __name__ == "__main__":
    main()
