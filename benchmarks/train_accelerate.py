"""Training speed on GPUs: our Accelerate engine against the same model as transformers' users train it, in one run.

    export PYTORCH_ALLOC_CONF=expandable_segments:True
    python benchmarks/train_accelerate.py --model 1.7b
    python benchmarks/train_accelerate.py --model 1.7b --precision bf16 fp8 --only ours
    torchrun --nproc-per-node 4 benchmarks/train_accelerate.py --model 8b --batch 2 --sides ours

A masked diffusion step (forward, backward, clipping, AdamW) on made-up tokens, sequence 4096, bidirectional attention,
weights in bf16. The peers are transformers' own class under a plain loop, as frameworks on top of its Trainer run it:
SDPA, logits of every position, cross-entropy of all of them, weights and optimizer state in bf16 (ours keeps both in
fp32); once as it is ("eager") and once with compiled layers ("compiled"). On several processes all are sharded by
FSDP2, a layer a unit, fp32 weights, computing in bf16. Medians over the steps after warm-up, one side after the other;
a side that fails says so, and the others go on. Prints a result line for each precision, and with --json FILE appends
it there; that of a second precision has its speed and last loss beside the first one's.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from rich.console import Console
from shapes import SEQUENCE, SHAPES  # the file beside this one
from torch.nn.attention import SDPBackend

# Of about 135M parameters, of which 29M are embeddings.
SMALL = {
    **SHAPES["1.7b"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49_152,
    "mask_token_id": 49_151,
}
ALL = SHAPES | {"135m": SMALL}
SIDES = ("ours", "eager", "compiled")
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
MAIN = os.environ.get("RANK", "0") == "0"
CUDA = torch.cuda.is_available()


def main() -> None:
    arguments = parse()
    if CUDA:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    first: dict[str, Any] = {}
    for precision in arguments.precision:
        row = measure(arguments, precision, first)
        first = first or row
        if MAIN:
            print("RESULT " + json.dumps(row), flush=True)
            if arguments.json:
                with open(arguments.json, "a") as file:
                    file.write(json.dumps(row) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


def measure(arguments: argparse.Namespace, precision: str, first: dict[str, Any]) -> dict[str, Any]:
    """The result line of ours in a precision, beside the peers and the one of the `first` precision, if any."""
    row: dict[str, Any] = {
        "model": arguments.model,
        "layers": arguments.layers,
        "precision": precision,
        "gpus": WORLD,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if CUDA else "cpu",
        "settings": {
            name: getattr(arguments, name) for name in ("seq_length", "gqa", "attention", "weights", "keep", "set")
        },
    }
    for side in arguments.sides:
        batch = {"ours": arguments.batch, "eager": arguments.eager_batch, "compiled": arguments.compiled_batch}[side]
        try:
            if CUDA:
                torch.cuda.reset_peak_memory_stats()
            figures = ours(arguments, precision, batch) if side == "ours" else peer(arguments, side, batch)
            row[side] = {"batch": batch} | figures
            if CUDA:
                row[side]["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        except Exception as error:
            row[side] = {"batch": batch, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
            if arguments.debug:
                traceback.print_exc()
        if MAIN:
            print(f"{side}: {json.dumps(row[side])}", flush=True)
        free()
    for side in SIDES[1:]:
        if all("tokens_per_s" in row.get(name, {}) for name in ("ours", side)):
            row[f"ratio_to_{side}"] = round(row["ours"]["tokens_per_s"] / row[side]["tokens_per_s"], 3)
    if all("tokens_per_s" in found.get("ours", {}) for found in (row, first)):
        row[f"ratio_to_{first['precision']}"] = round(row["ours"]["tokens_per_s"] / first["ours"]["tokens_per_s"], 3)
        row["last_loss_apart"] = abs(row["ours"]["losses"][-1] / first["ours"]["losses"][-1] - 1)
    return row


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("135m", "1.7b", "8b", "tiny"), default="1.7b")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument("--precision", choices=("bf16", "fp8", "fp32"), nargs="+", default=["bf16"], help="of ours")
    parser.add_argument("--batch", type=int, default=8, help="rows of ours at once on a GPU")
    parser.add_argument("--micro-batches", type=int, default=1, help="of ours, in a step")
    parser.add_argument("--eager-batch", type=int, default=4)
    parser.add_argument("--compiled-batch", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=SEQUENCE)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--only", choices=SIDES, help="one side")
    parser.add_argument(
        "--gqa", choices=("repeat", "native"), default="repeat", help="ours: keys and values of grouped heads"
    )
    parser.add_argument("--attention", choices=("cudnn", "flash"), default="cudnn", help="ours: its kernel")
    parser.add_argument("--weights", choices=("half", "autocast"), default="half", help="ours: how bf16 is computed")
    parser.add_argument(
        "--keep", action="store_true", help="ours under FSDP: keep whole weights until the backward pass"
    )
    parser.add_argument("--set", action="append", default=[], help="of ours: a field of the run's configuration, K=V")
    parser.add_argument("--profile", action="store_true", help="print where the time of one of our steps goes")
    parser.add_argument("--json")
    parser.add_argument("--debug", action="store_true")
    arguments = parser.parse_args()
    if arguments.only:
        arguments.sides = [arguments.only]
    return arguments


def shape(arguments: argparse.Namespace) -> dict[str, Any]:
    found = dict(ALL[arguments.model])
    if arguments.layers:
        found["n_layers" if "n_layers" in found else "num_hidden_layers"] = arguments.layers
    return found


def ours(arguments: argparse.Namespace, precision: str, batch: int) -> dict[str, Any]:
    """Steps of the engine, as `pretrain` takes them."""
    import yaml

    from dlm_bridge.train.accelerate import attention
    from dlm_bridge.train.accelerate import trainer as trainer_module
    from dlm_bridge.train.config import TrainConfig

    if arguments.gqa == "native":
        attention.replace_sdpa = lambda _: contextlib.nullcontext()
    if arguments.attention == "flash":
        attention.KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    os.environ["FSDP_RESHARD_AFTER_FORWARD"] = str(not arguments.keep).lower()
    if arguments.weights == "autocast":
        trainer_module.HALF = ()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape(arguments)))
        config = TrainConfig.from_flags(
            model=folder,
            from_scratch=True,
            data=["mock"],
            output=folder + "/run",
            steps=1000,
            seq_length=arguments.seq_length,
            micro_batch_size=batch,
            global_batch_size=batch * arguments.micro_batches * WORLD,
            precision=precision,
            length_variation=0.0,
            lr=1e-5,
            eval_interval=0,
            **({"sharding": "fsdp"} if WORLD > 1 else {})
            | {name: yaml.safe_load(value) for name, value in (pair.split("=", 1) for pair in arguments.set)},
        )
        trainer = assemble(config)
        rows = []
        with trainer_batches(trainer):
            before: Callable[[], Any] | None = None
            for number in range(1, arguments.warmup + arguments.steps + 1):
                figures, _ = trainer.start_step(number, False)
                if before is not None:
                    rows.append(before())
                before = figures
            assert before is not None
            rows.append(before())
            if arguments.profile:
                profile(lambda: take_step(trainer, arguments.warmup + arguments.steps + 1))
    measured = rows[arguments.warmup :]
    speeds = [row.tokens_per_s_per_device for row in measured]
    found = {
        "tokens_per_s": round(statistics.median(speeds)),  # per GPU
        "spread": round((max(speeds) - min(speeds)) / statistics.median(speeds), 3),
        "losses": [round(rows[0].loss, 4), round(rows[-1].loss, 4)],
    }
    mfu = measured[0].mfu
    return found | ({} if mfu is None else {"mfu": round(mfu / speeds[0] * statistics.median(speeds), 4)})


def take_step(trainer: Any, number: int) -> Any:
    figures, _ = trainer.start_step(number, False)
    return figures()


def assemble(config: Any) -> Any:
    """The engine's trainer, with weights that are drawn on the GPU, which takes seconds where a CPU takes minutes."""
    from dlm_bridge.loading.source import StartingModel
    from dlm_bridge.train.accelerate import trainer as engine
    from dlm_bridge.train.setup import load_data, model_source, resolve_objective

    accelerator = engine.build_accelerator(config)
    model = model_source(config).empty()
    if MAIN or not config.parallel.shards:  # others get their parts of it
        model.to_empty(device=accelerator.device)
        initialise(model)
    config, objective = resolve_objective(config, model)
    with accelerator.main_process_first():
        data = load_data(config, model, objective.mask_token_id)
    return engine.AccelerateTrainer(
        config, accelerator, StartingModel(model), None, objective, data, Console(quiet=True)
    )


@contextlib.contextmanager
def trainer_batches(trainer: Any) -> Any:
    from dlm_bridge.data.loader import Prefetcher

    with Prefetcher(trainer.produce, 1) as trainer.prefetcher:
        yield


@torch.no_grad()
def initialise(model: Any) -> None:
    """Weights as transformers draws them; what is computed and not drawn is computed anew."""
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.fill_(1.0)
        else:
            weight.normal_(std=0.02)
    rotary = model.model.rotary_emb
    fresh = type(rotary)(config=model.config)
    for name, buffer in rotary.named_buffers():
        buffer.copy_(getattr(fresh, name))
    model.tie_weights()


def peer(arguments: argparse.Namespace, side: str, batch: int) -> dict[str, Any]:
    """transformers' class under a plain loop."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    device = torch.device("cuda" if CUDA else "cpu")
    raw = shape(arguments)
    mask_token = raw["mask_token_id"]
    with torch.device("meta"):
        if "d_model" in raw:
            config: Any = LlamaConfig(
                hidden_size=raw["d_model"],
                intermediate_size=raw["mlp_hidden_size"],
                num_hidden_layers=raw["n_layers"],
                num_attention_heads=raw["n_heads"],
                num_key_value_heads=raw["n_kv_heads"],
                vocab_size=raw["embedding_size"],
                max_position_embeddings=raw["max_sequence_length"],
                rms_norm_eps=raw["rms_norm_eps"],
                rope_theta=raw["rope_theta"],
                tie_word_embeddings=False,
            )
            model: Any = LlamaForCausalLM(config)
        else:
            kept = {key: value for key, value in raw.items() if key not in ("architectures", "model_type")}
            config = Qwen3Config(**kept)
            model = Qwen3ForCausalLM(config)
    config.is_causal = False
    for module in model.modules():
        if getattr(module, "is_causal", False):
            module.is_causal = False
    model = model.to_empty(device=device).float()
    initialise(model)
    if WORLD == 1:
        for weight in model.parameters():
            weight.data = weight.data.bfloat16()
    else:
        cut(model, device)
    if side == "compiled":
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=CUDA)
    generator = torch.Generator(device).manual_seed(int(os.environ.get("RANK", "0")))
    size = (batch, arguments.seq_length)
    times, losses = [], []
    for _ in range(arguments.warmup + arguments.steps):
        labels = torch.randint(0, mask_token, size, device=device, generator=generator)
        level = torch.rand(batch, 1, device=device, generator=generator) * (1 - 1e-3) + 1e-3
        masked = torch.rand(size, device=device, generator=generator) < level
        logits = model(input_ids=torch.where(masked, mask_token, labels), use_cache=False).logits
        token_losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
        loss = (token_losses.view(size) / level * masked).sum() / labels.numel()
        del logits, token_losses
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        times.append(moment())
    seconds = [later - earlier for earlier, later in zip(read(times), read(times)[1:], strict=False)]
    seconds = seconds[arguments.warmup - 1 :]
    median = statistics.median(seconds)
    tokens = batch * arguments.seq_length
    return {
        "tokens_per_s": round(tokens / median),
        "spread": round((max(seconds) - min(seconds)) / median, 3),
        "losses": [round(float(losses[0]), 4), round(float(losses[-1]), 4)],
    }


def cut(model: Any, device: torch.device) -> None:
    """FSDP2 as Accelerate sets it up."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():
        dist.init_process_group("nccl" if CUDA else "gloo")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (WORLD,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def moment() -> Any:
    """Now, on the device's clock: nobody waits."""
    if not CUDA:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def read(times: list[Any]) -> list[float]:
    if not CUDA:
        return times
    torch.cuda.synchronize()
    return [times[0].elapsed_time(event) / 1000 for event in times]


def profile(step: Callable[[], Any]) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        step()
        if CUDA:
            torch.cuda.synchronize()
    if MAIN:
        events = [
            event for event in profiled.key_averages() if event.self_device_time_total and not event.cpu_time_total
        ]
        print(f"PROFILE {sum(event.self_device_time_total for event in events) / 1000:8.1f} ms of kernels")
        for event in sorted(events, key=lambda event: -event.self_device_time_total)[:40]:
            milliseconds = event.self_device_time_total / 1000
            print(f"PROFILE {milliseconds:8.1f} ms {event.count:6} x {event.key[:110]}")


def free() -> None:
    """Give the memory of one side back."""
    torch._dynamo.reset()
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
