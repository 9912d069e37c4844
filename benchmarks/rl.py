"""Steps of reinforcement learning on several GPUs: how long rollout, weight transfer and update take in each layout.

    python benchmarks/rl.py --rows fsdp fsdp-tp              on two GPUs, LLaDA-8B's shape
    python benchmarks/rl.py --rows megatron-tp --layers 16   with half of the layers
    python benchmarks/rl.py --size tiny                      on a CPU, by two processes and gloo

A checkpoint with random weights in bf16 is written once; each row is a `dlm-bridge rl` of its own under torchrun, of a
few steps without a reference (`--beta 0`) and without its checkpoint at the end, and prints one line: the seconds of
weight transfer, rollout and update of the median step behind the first, which compiles and records, completions and
new tokens a second, and the peak memory of the fullest GPU. Completions never end early, so that all rows sample as
many tokens. Steps are told on stderr as they end. A row that fails, or takes longer than --limit, says why or where it
was, and what its steps took until then, and the others go on.

    dp             data parallel, each process the whole training state (small models)
    fsdp           FSDP2; every process samples from a whole copy
    fsdp-tp        FSDP2; the processes sample from one copy, tensor parallel
    megatron-dp    data parallel with a sharded optimizer; every process samples from a whole copy
    megatron-tp    tensor parallel with sequence parallelism; every process samples from a whole copy
    megatron-tp-tp the same; the processes sample from one copy, tensor parallel

Megatron's rows keep the optimizer's state on the CPU unless --no-offload is given: 8B in bf16 with gradients in fp32
leave no room for it on GPUs of 80 GB. AdamW then runs on the cores of the CPU, which the processes share; rows of
fewer --layers with --no-offload are quick.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from launching import end_after, launch

import dlm_bridge  # noqa: F401
from dlm_bridge.models.families import family_by_name

SIZES: dict[str, dict[str, Any]] = {
    "8b": {"d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "mlp_hidden_size": 12288},
    "1.7b": {"d_model": 2048, "n_layers": 28, "n_heads": 16, "n_kv_heads": 16, "mlp_hidden_size": 6144},
    "tiny": {
        "d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 128, "vocab_size": 512,
        "embedding_size": 512, "mask_token_id": 500, "eos_token_id": 501, "pad_token_id": 501,
    },
}  # fmt: skip
OFFLOAD = ("--optimizer-cpu-offload",)
MEGATRON = ("--engine", "megatron", "--recompute", "full")
FSDP = ("--sharding", "fsdp", "--gradient-checkpointing")
ON_GPU = torch.cuda.is_available()


def rows(gpus: int) -> dict[str, tuple[str, ...]]:
    """The options of each row."""
    tp, shared = ("--tp", str(gpus)), ("--rollout-tp", str(gpus))
    return {
        "dp": (),
        "fsdp": FSDP,
        "fsdp-tp": (*FSDP, *shared),
        "megatron-dp": MEGATRON,
        "megatron-tp": (*MEGATRON, *tp),
        "megatron-tp-tp": (*MEGATRON, *tp, *shared),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="of those above (default: all but dp; tiny: all)")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--size", choices=tuple(SIZES), default="8b")
    parser.add_argument("--layers", type=int, help="fewer or more than the size has")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--completions", type=int, default=32, help="a step (%(default)s), 8 of each prompt")
    parser.add_argument("--micro-batch", type=int, default=4, help="completions of a forward pass (%(default)s)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt (%(default)s)")
    parser.add_argument("--length", type=int, help="new tokens of a completion (128; tiny: 8)")
    parser.add_argument("--forwards", type=int, help="of the sampler for a completion (a fourth of its tokens)")
    parser.add_argument("--no-offload", action="store_true", help="optimizer states stay on the GPUs")
    parser.add_argument("--folder", type=Path, help="where there is room for the checkpoint (16 GB)")
    parser.add_argument("--limit", type=float, default=150, help="seconds for a row, with its start (%(default)s)")
    parser.add_argument("--json", type=Path, help="append the lines to this file")
    parser.add_argument("--worker", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)  # one of torchrun's processes
    options = parser.parse_args()
    if options.worker:
        end_after(options.limit)
        work(options.worker)
        return
    options.length = options.length or (8 if options.size == "tiny" else 128)
    known = rows(options.gpus)
    chosen = options.rows or [row for row in known if row != "dp" or options.size == "tiny"]
    failed = False
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        began = time.perf_counter()
        write_inputs(Path(folder), options)
        print(f"a checkpoint of {options.size} in {time.perf_counter() - began:.0f} s", flush=True)
        for row in chosen:
            line = run(row, known[row], Path(folder), options)
            failed |= "error" in line
            print(json.dumps(line), flush=True)
            if options.json is not None:
                with options.json.open("a") as lines:
                    lines.write(json.dumps(line) + "\n")
    sys.exit(failed)


def write_inputs(folder: Path, options: argparse.Namespace) -> None:
    """The checkpoint with its tokenizer, rows of prompts, and a reward."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    sizes = dict(SIZES[options.size])
    sizes["n_layers"] = options.layers or sizes["n_layers"]
    spec = family_by_name("llada")
    torch.manual_seed(0)
    with torch.device("cuda" if ON_GPU else "cpu"):
        model = spec.load("model_class")._from_config(spec.load("config_class")(**sizes), dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    mask = model.config.mask_token_id
    del model
    if ON_GPU:
        torch.cuda.empty_cache()  # the processes of the rows use this GPU, too
    words = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    tokenizer = Tokenizer(models.WordLevel({**words, "<mask>": mask}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="a", eos_token="b", mask_token="<mask>"
    ).save_pretrained(folder / "model")
    prompts = ["".join("abcdefghij"[(7 * n + 3 * place) % 10] for place in range(options.prompt)) for n in range(64)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    (folder / "reward.py").write_text(
        "def share(prompts, completions, rows):\n    return [len(set(text)) / 26 for text in completions]\n"
    )


def run(row: str, layout: tuple[str, ...], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The line of a row."""
    output = folder / row
    forwards = options.forwards or max(1, options.length // 4)
    settings = {
        "model": folder / "model", "data": folder / "rows.jsonl", "output": output, "method": "diffu-grpo",
        "reward": f"{folder / 'reward.py'}:share", "beta": 0, "steps": options.steps, "group_size": 8,
        "global_batch_size": options.completions, "micro_batch_size": options.micro_batch,
        "seq_length": options.prompt + options.length, "gen_length": options.length, "eval_interval": 0,
        "precision": "bf16" if ON_GPU else "fp32", "lr": 1e-6,
    }  # fmt: skip
    words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words += ["--generation", f"steps={forwards}", "--generation", "eos_token_id=null", *layout]
    words += ["--generation", f"block_length={options.length}"]
    offloads = ON_GPU and layout[:2] == MEGATRON[:2] and not options.no_offload
    words = ["--limit", str(options.limit), "--worker", "rl", *words, *(OFFLOAD if offloads else ())]
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    began, told = time.perf_counter(), 0

    def watch() -> None:
        nonlocal told
        for each in steps_of(output)[told:]:
            told += 1
            taken = f"{time.perf_counter() - began:.0f} s"
            print(f"{row}: step {told} after {taken}: {each['seconds']}", file=sys.stderr, flush=True)

    error = launch(__file__, options.gpus, words, options.limit, folder / f"{row}.log", environment, watch)
    line: dict[str, Any] = {"row": row, "size": options.size, "layers": options.layers, "gpus": options.gpus}
    if error is not None:
        line["error"] = error
    found = steps_of(output)
    if not found:
        return line
    later = found[1:] or found
    seconds = {part: statistics.median(each["seconds"][part] for each in later) for part in found[0]["seconds"]}
    peak = found[-1]["peak_memory"]
    total = sum(seconds.values())
    return line | {
        "device": torch.cuda.get_device_name() if ON_GPU else "CPU",
        "steps": len(found),
        "offloaded": offloads,
        **{f"{part}_s": round(value, 3) for part, value in seconds.items()},
        "step_s": round(total, 3),
        "completions_per_s": round(options.completions / total, 2),
        "sampled_tokens_per_s": round(options.completions * options.length / seconds["rollout"], 1),
        "peak_gib": None if peak is None else round(peak / 2**30, 1),
        "whole_run_s": round(time.perf_counter() - began),
    }


def steps_of(output: Path) -> list[dict[str, Any]]:
    """The steps that a row has taken."""
    metrics = output / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def work(words: list[str]) -> None:
    """`dlm-bridge` in one process of a row, which writes no checkpoint."""
    from dlm_bridge.cli.app import main as command
    from dlm_bridge.train.rl.accelerate_engine import AccelerateUpdates

    engines: list[Any] = [AccelerateUpdates]
    if "megatron" in words:
        from dlm_bridge.train.rl.megatron_engine import MegatronUpdates

        engines.append(MegatronUpdates)

    def unsaved(self: Any, step: int, state: dict[str, Any]) -> Path:
        return Path(self.config.checkpoint.output)

    for engine in engines:
        engine.save_checkpoint = unsaved
    if not ON_GPU:
        os.environ["DLM_BRIDGE_PLATFORM"] = "cpu"
    sys.argv = ["dlm-bridge", *words]
    command()


if __name__ == "__main__":
    main()
