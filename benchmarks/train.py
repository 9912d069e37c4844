"""Training speed on GPUs: our Megatron engine against megatron-core's own GPTModel, side by side in one run.

    python benchmarks/train.py --model 1.7b --precision bf16 --micro-batch-size 8
    torchrun --nproc-per-node 4 benchmarks/train.py --model 8b --micro-batch-size 2 --tp 2
    UB_SKIPMC=1 torchrun --nproc-per-node 2 benchmarks/train.py --model 8b --layers 20 --tp 2 --tp-overlap \
        --only without --only ours

A masked diffusion step (forward, backward, optimizer) on made-up tokens, sequence 4096, bidirectional attention. The
peer is megatron-core's GPTModel with Transformer Engine's layers, as its users run it: logits of every position,
Transformer Engine's cross entropy, the same layout, data parallelism and optimizer. Medians over the steps after
warm-up, timed on the device from the end of a step to the end of the next, one side after the other in one process;
neither side's loop reads a loss before the next step is under way. The side "without" is ours without --tp-overlap,
--ep-overlap and --cuda-graphs, which both others have. Prints a line of each side when it is done, then a result line,
and with --json FILE appends that there. A side that takes longer than --limit ends the run, and prints where it was.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launching import end_after
from rich.console import Console
from shapes import SEQUENCE, SHAPES
from step_profile import profile

from dlm_bridge.convert.checkpoints import in_memory
from dlm_bridge.models.initialisation import Constant
from dlm_bridge.train.config import TrainConfig

OVERLAPS = {  # by flag: the option of a run, and what it is
    "tp-overlap": ("tp_overlap", "tensor parallel communication beside matrix products"),
    "ep-overlap": ("ep_overlap", "expert parallel communication beside another micro-batch"),
    "cuda-graphs": ("cuda_graphs", "layers in CUDA graphs"),
}
VARIABLES = ("UB_SKIPMC", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_NVLS_ENABLE")


def main() -> None:
    arguments = parse()
    # Values do not matter for speed: drawn on the GPU, which takes seconds where a CPU takes minutes.
    in_memory.initialise = draw
    with tempfile.TemporaryDirectory() as folder:
        config = run_config(arguments, Path(folder))
        row: dict[str, Any] = {"model": arguments.model, "precision": arguments.precision, "layout": layout(arguments)}
        row["environment"] = {name: os.environ[name] for name in VARIABLES if name in os.environ}
        for side, make in (("without", without), ("ours", ours), ("peer", peer)):
            if side not in (arguments.only or ("ours", "peer")):
                continue
            end_after(arguments.limit)
            try:
                torch.cuda.reset_peak_memory_stats()
                row[side] = measure(*make(config), arguments)
            except Exception as error:
                row[side] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
                if arguments.debug:
                    raise
            if int(os.environ.get("RANK", "0")) == 0:
                print(f"{side.upper()} {json.dumps(row[side])}", flush=True)
            free()
    if dist.get_rank() == 0:
        for name, side in (("ratio", "peer"), ("gain", "without")):
            if all("tokens_per_s" in row.get(each, {}) for each in ("ours", side)):
                row[name] = row["ours"]["tokens_per_s"] / row[side]["tokens_per_s"]
        print("RESULT " + json.dumps(row), flush=True)
        if arguments.json:
            with open(arguments.json, "a") as file:
                file.write(json.dumps(row) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="1.7b")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--seq-length", type=int, default=SEQUENCE)
    for name in ("tp", "pp", "vp", "cp", "ep"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--fsdp")
    for name, (_, what) in OVERLAPS.items():
        parser.add_argument(f"--{name}", action="store_true", help=what)
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--set", action="append", default=[], help="of ours: a field of the run's configuration, K=V")
    parser.add_argument("--megatron", action="append", default=[], help="of both: GROUP.KEY=VALUE")
    parser.add_argument(
        "--balanced", action="store_true", help="of both: tokens go to random experts, not to the router's"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--only", action="append", choices=("without", "ours", "peer"), help="a side; may be repeated")
    parser.add_argument("--profile", action="store_true", help="print where the time of a step goes")
    parser.add_argument("--limit", type=float, default=600, help="seconds for a side (%(default)s)")
    parser.add_argument("--json")
    parser.add_argument("--debug", action="store_true")
    arguments = parser.parse_args()
    if arguments.tp_overlap and "UB_SKIPMC" not in os.environ:
        parser.error("--tp-overlap: set UB_SKIPMC to 1 (CUDA IPC) or 0 (NVLink multicast), which the result is of")
    return arguments


def layout(arguments: argparse.Namespace) -> str:
    sizes = [
        f"{name}{getattr(arguments, name)}" for name in ("tp", "pp", "vp", "cp", "ep") if getattr(arguments, name) > 1
    ]
    sizes += [name for name, (option, _) in OVERLAPS.items() if getattr(arguments, option)]
    return " ".join([f"gpus{world()}", *sizes, *([arguments.fsdp] if arguments.fsdp else [])]) + (
        f" batch {arguments.micro_batches} x {arguments.micro_batch_size} x {arguments.seq_length}"
    )


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def run_config(arguments: argparse.Namespace, folder: Path) -> TrainConfig:
    import yaml

    shape = dict(SHAPES[arguments.model])
    if arguments.layers:
        key = "n_layers" if "n_layers" in shape else "num_hidden_layers"
        shape[key] = arguments.layers
        if "moe_layer_freq" in shape:
            shape["moe_layer_freq"] = [1] * arguments.layers
    (folder / "config.json").write_text(json.dumps(shape))
    replicas = world() // (arguments.tp * arguments.pp * arguments.cp)
    sgd = ["optimizer.sgd_momentum=0.0"] if arguments.optimizer == "sgd" else []
    lot = ["transformer.moe_router_force_load_balancing=true"] if arguments.balanced else []
    settings = dict(pair.split("=", 1) for pair in arguments.set)
    return TrainConfig.from_flags(
        engine="megatron",
        model=str(folder),
        from_scratch=True,
        data=["mock"],
        output=str(folder / "run"),
        steps=1000,
        seq_length=arguments.seq_length,
        micro_batch_size=arguments.micro_batch_size,
        global_batch_size=arguments.micro_batch_size * arguments.micro_batches * replicas,
        precision=arguments.precision,
        tp=arguments.tp,
        pp=arguments.pp,
        vp=arguments.vp,
        cp=arguments.cp,
        ep=arguments.ep,
        fsdp=arguments.fsdp,
        optimizer=arguments.optimizer,
        recompute=arguments.recompute,
        **{option: getattr(arguments, option) for option, _ in OVERLAPS.values()},
        length_variation=0.0,
        lr=1e-5,
        distributed_optimizer=world() > 1,
        megatron=[*arguments.megatron, *sgd, *lot],
        **{name: yaml.safe_load(value) for name, value in settings.items()},
    )


def draw(name: str, shape: tuple[int, ...], distribution: Any, seed: int) -> torch.Tensor:
    if isinstance(distribution, Constant):
        return torch.full(shape, distribution.value, device="cuda")
    generator = torch.Generator("cuda").manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, device="cuda", generator=generator) * distribution.std


def without(config: TrainConfig) -> tuple[Callable[[int], Any], Callable[[], None], Any]:
    """`ours` without overlap and graphs."""
    return ours(config.replace(**{option: False for option, _ in OVERLAPS.values()}))


def ours(config: TrainConfig) -> tuple[Callable[[int], Any], Callable[[], None], Any]:
    """A step of the engine as `pretrain` takes it."""
    from dlm_bridge.data.loader import Prefetcher
    from dlm_bridge.parallel.train.assembly import assemble

    trainer = assemble(config, Console(quiet=True))
    trainer.prefetcher = Prefetcher(trainer.produce, 1)

    before: list[Callable[[], Any]] = []

    def step(number: int) -> Callable[[], float]:
        """As the loop of a run: the figures of a step are read when the device has the next one's work."""
        figures, _ = trainer.start_step(number, False)
        for read in before:
            read()
        before[:] = [figures]
        return lambda: figures().loss

    return step, trainer.close, trainer


def peer(config: TrainConfig) -> tuple[Callable[[int], Any], Callable[[], None], Any]:
    """megatron-core's GPTModel with its own data parallelism, optimizer and schedule."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.enums import AttnMaskType

    from dlm_bridge.parallel.config import model_config
    from dlm_bridge.parallel.core import get_forward_backward_func, parallel_state
    from dlm_bridge.parallel.mcore_patches.modules import release_cuda_graphs
    from dlm_bridge.parallel.train.assembly import (
        build_optimizer,
        initialize_parallel,
        initialize_userbuffers,
        wrap_chunks,
    )
    from dlm_bridge.parallel.train.mcore_config import DTYPES
    from dlm_bridge.parallel.train.settings import passed_on
    from dlm_bridge.parallel.weights import load
    from dlm_bridge.train.setup import open_megatron_source

    initialize_parallel(config)
    source = open_megatron_source(config, None)
    bridge = source.bridge
    fp8 = (
        {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
        if config.precision.precision == "fp8"
        else {}
    )
    moe = (
        {
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": True,
            "moe_permute_fusion": True,
            "moe_router_load_balancing_type": "none",
        }
        if bridge.dims.experts
        else {}
    )
    recompute = (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        if config.engine.recompute == "full"
        else {}
    )
    settings = {
        "sequence_parallel": config.parallel.tp > 1,
        "apply_rope_fusion": True,
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,  # its output layer needs apex for it
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "te",
        "deallocate_pipeline_outputs": config.parallel.pp > 1,
        "tp_comm_overlap": config.parallel.tp_overlap,
        "overlap_moe_expert_parallel_comm": config.parallel.ep_overlap,
        "cuda_graph_impl": "local" if config.engine.cuda_graphs else "none",
        "init_method": torch.nn.init.normal_,
        "output_layer_init_method": torch.nn.init.normal_,
        "embedding_init_method": torch.nn.init.normal_,
    }
    described = model_config(
        bridge.mapping,
        bridge.config,
        bridge.dims,
        config.parallel.layout,
        DTYPES[config.precision.precision],
        config.parallel.context,
        **settings | fp8 | moe | recompute | passed_on(config, "transformer"),
    )
    if config.parallel.tp_overlap:
        initialize_userbuffers(config, bridge.dims.hidden, 1, {"tp_comm_bootstrap_backend": "gloo"})
    arguments = {name: value for name, value in described.arguments.items() if name != "vocab"}
    chunks = []
    for number in range(config.parallel.vp):
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=bridge.dims.experts or None,
            moe_grouped_gemm=bool(bridge.dims.experts),
            qk_layernorm=described.transformer.qk_layernorm,
        )
        spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.no_mask
        stage = parallel_state.get_pipeline_model_parallel_rank()
        model = GPTModel(
            described.transformer,
            spec,
            pre_process=stage == 0 and number == 0,
            post_process=stage == config.parallel.pp - 1 and number == config.parallel.vp - 1,
            vp_stage=number if config.parallel.vp > 1 else None,
            **arguments,
        )
        model.absent = None  # which `wrap_chunks` asks of our models: nothing is loaded later
        chunks.append(model.cuda())
    load(chunks, bridge.checkpoint)  # our side's weights: routers, above all, send as many tokens to each GPU
    wrapped = wrap_chunks(chunks, config)
    optimizer = build_optimizer(wrapped, config, source)
    wrapped[0].config.finalize_model_grads_func = finalize
    schedule = get_forward_backward_func()
    local = config.data.seq_length // config.parallel.cp
    shape = (config.data.micro_batch_size, local)
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    # Half of the positions masked, on average, each step anew: what the objective asks of both sides.
    mask_token = bridge.config["mask_token_id"]
    positions = torch.arange(local, device="cuda")[None].expand(shape).contiguous()
    count = (
        config.data.global_batch_size // config.data.micro_batch_size // parallel_state.get_data_parallel_world_size()
    )

    def data() -> Iterator[tuple[torch.Tensor, ...]]:
        while True:
            labels = torch.randint(0, mask_token, shape, device="cuda", generator=generator)
            level = torch.rand(shape[0], 1, device="cuda", generator=generator)
            masked = torch.rand(shape, device="cuda", generator=generator) < level
            yield torch.where(masked, mask_token, labels), labels, masked / level

    def forward(
        batches: Iterator[tuple[torch.Tensor, ...]], model: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Any]:
        tokens, labels, weights = next(batches)

        def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            total = (losses.float() * weights).sum() / (config.data.global_batch_size * config.data.seq_length)
            return total, torch.zeros((), dtype=torch.int, device="cuda"), total.detach()

        call = model.build_schedule_plan if return_schedule_plan else model
        return call(tokens, positions, None, labels=labels), loss

    iterators = [data() for _ in wrapped]

    def step(number: int) -> Callable[[], torch.Tensor]:
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        results = schedule(
            forward_step_func=forward,
            data_iterator=iterators if len(wrapped) > 1 else iterators[0],
            model=wrapped if len(wrapped) > 1 else wrapped[0],
            num_microbatches=count,
            seq_length=config.data.seq_length,
            micro_batch_size=config.data.micro_batch_size,
            forward_only=False,
        )
        optimizer.step()
        total = torch.stack(results).sum() if results else torch.zeros((), device="cuda")
        dist.all_reduce(total)
        return lambda: total

    return step, release_cuda_graphs if config.engine.cuda_graphs else lambda: None, None


def finalize(model: Any, num_tokens: Any = None, **kwargs: Any) -> None:
    """Gradients stay sums, as on our side."""
    from dlm_bridge.parallel.core import finalize_model_grads

    finalize_model_grads(model, None, **kwargs)


def measure(
    step: Callable[[int], Any], close: Callable[[], None], trainer: Any, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Time steps on the device, from the end of one to the end of the next, as they follow each other in a run: nobody
    waits between them but what takes them. `step` returns what gives the loss, once it is asked."""
    build = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(arguments.steps + 1)]
    for number in range(1, arguments.warmup + arguments.steps + 1):
        loss = step(number)
        if number == 1:
            torch.cuda.synchronize()
            first = time.perf_counter() - started
        if number >= arguments.warmup:
            ends[number - arguments.warmup].record()
    last_loss = float(loss())
    torch.cuda.synchronize()
    seconds = [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(ends)]
    if arguments.profile:
        profile(step, arguments.warmup + arguments.steps + 1)
    close()
    if trainer is not None:
        release(trainer)
    tokens = arguments.micro_batch_size * arguments.micro_batches * arguments.seq_length
    tokens /= arguments.tp * arguments.pp * arguments.cp
    median = statistics.median(seconds)
    found = {
        "tokens_per_s": tokens / median,  # per GPU
        "step_s": median,
        "spread": (max(seconds) - min(seconds)) / median,
        "first_step_s": first,
        "build_gib": build / 2**30,  # the peak of building model and optimizer
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "loss": last_loss,
    }
    if trainer is not None and trainer.peak_flops:
        found["mfu"] = found["tokens_per_s"] * trainer.flops_per_token / trainer.peak_flops
    return found


def release(trainer: Any) -> None:
    """Give the memory of one side back: megatron-core's gradient hooks keep its parameters alive for ever."""
    for chunk in trainer.chunks:
        tensors = [parameter.data for parameter in chunk.parameters()]
        # Of megatron-core's data parallelism; its FSDP has a method of the name.
        buffers = chunk.buffers if isinstance(getattr(chunk, "buffers", None), list) else []
        for buffer in [*buffers, *getattr(chunk, "expert_parallel_buffers", [])]:
            tensors += [tensor for tensor in (buffer.param_data, buffer.grad_data) if tensor is not None]
        for tensor in tensors:
            tensor.untyped_storage().resize_(0)
    for part in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
        for group in getattr(part, "optimizer", part).param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data.new_empty(0)
        part.optimizer.state.clear()


def free() -> None:
    from dlm_bridge.parallel import groups

    groups.destroy_userbuffers()
    groups.destroy()
    if "transformer_engine.pytorch" in sys.modules:  # it keeps the process groups of FP8's scales
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reset()
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
