"""Batch size from free memory, planned by arithmetic before anything runs (`--batch-size auto`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlm_bridge.distributed import Replicas, local_world_size
from dlm_bridge.generation.canvas import cache_columns
from dlm_bridge.generation.engine import choose_cache, input_device, sampler_spec
from dlm_bridge.generation.kv_cache import attention_layers, kv_heads
from dlm_bridge.generation.runtime.runner import tensor_parallel_group, unwrapped
from dlm_bridge.generation.settings import resolve_settings

# What is left to the allocator's fragments, CUDA graphs and libraries' workspaces.
USED_FRACTION = 0.8
MOST_ROWS = 1024


@dataclass(frozen=True)
class Capacity:
    """The rows that fit, and why. Sizes in bytes, those of a row at its full length.

    Args:
        length: tokens of the longest row, prompt and new ones together.
        cache: keys and values.
        activations: the largest activations of a forward pass of the whole row.
        logits: logits of the positions of a step, and what sampling makes of them.
        free: free memory on the model's device.
    """

    rows: int
    length: int
    cache: int
    activations: int
    logits: int
    free: int

    @property
    def row(self) -> int:
        """What a row takes in all."""
        return self.cache + self.activations + self.logits

    @property
    def summary(self) -> str:
        """The plan in one line."""
        return f"batch size {self.rows}: {self.described}; {self.free / 2**30:.1f} GiB free"

    @property
    def described(self) -> str:
        """What a row takes, in words."""
        parts = [("KV cache", self.cache), ("activations", self.activations), ("logits", self.logits)]
        sizes = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in parts if size)
        return f"a row of {self.length} tokens takes {sizes}"


def plan_batch(
    model: Any,
    lengths: Sequence[int],
    settings: Mapping[str, Any],
    *,
    diffusion: bool,
    scored: bool = False,
    more: bool = False,
    device: torch.device | None = None,
) -> Capacity:
    """The batch size for prompts of these lengths; processes of a tensor-parallel model agree on the smallest.

    Weights are counted as what is not free. An autoregressive model needs `max_new_tokens` or `gen_length` in the
    settings; 128 are assumed without it.

    Args:
        scored: rows are scored as well, which takes all their logits.
        more: there may be more rows than these lengths.
        device: by default the model's; one that has no weights needs it.
    """
    plain = unwrapped(model)
    longest = max(lengths)
    positions, new, copies, stores, draws, layout = 1, 128, 1, True, True, None
    if diffusion:
        found = resolve_settings(model, None, settings, prompt_width=longest)
        spec = sampler_spec(found, None)
        new, layout = found.limits.gen_length, spec.layout
        whole = new + layout.spare
        positions = spec.window or min(layout.block_length or whole, whole) if not found.limits.infill else longest
        copies = 2 if spec.predictor_options.get("cfg_scale") else 1
        cache = choose_cache(spec.predictor, model, found.cache)
        stores, draws = cache.stores, spec.sampling.draws
    else:
        new = int(settings.get("max_new_tokens") or settings.get("gen_length") or new)
        positions = getattr(plain.config, "canvas_length", None) or 1
    length = longest + new
    positions = length if scored else positions
    config, itemsize = plain.config.get_text_config(), plain.dtype.itemsize
    columns = length if layout is None else cache_columns(layout, length)
    kept = sum(_cache_bytes(plain, layer) for layer in attention_layers(plain)) * columns if stores else 0
    # Of a column in a layer: residual, norm and attention's input and output; gate, up and their product; and, where
    # attention runs without a fused kernel (CPU), a score for each column of each head.
    inner = max(getattr(config, name, None) or 0 for name in ("intermediate_size", "moe_intermediate_size"))
    experts = getattr(config, "num_experts_per_tok", None) or 1
    column = (8 * config.hidden_size + 3 * inner * experts) * itemsize
    device = input_device(model) if device is None else device
    if device.type == "cpu":
        column += 2 * config.num_attention_heads * length * max(itemsize, 4)
    # The model's logits, a float copy and its softmax; with draws, unless a kernel does, float64 sums of them.
    logit = itemsize + 8 + (24 if draws else 8)
    cache_bytes, activations = copies * kept, copies * length * column
    logits = copies * positions * config.vocab_size * logit
    free = free_memory(device)
    rows = max(1, min(int(free * USED_FRACTION) // max(cache_bytes + activations + logits, 1), MOST_ROWS))
    if (group := tensor_parallel_group(plain)) is not None:
        smallest = torch.tensor([rows], device=device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN, group=group)
        rows = int(smallest)
    return Capacity(
        rows if scored or more else min(rows, len(lengths)), length, cache_bytes, activations, logits, free
    )


def plan_shared_batch(replicas: Replicas, *arguments: Any, **options: Any) -> Capacity:
    """`plan_batch` of these arguments for the batches that `replicas` share: as many rows as all of them hold."""
    plans: list[Capacity] = replicas.gather(plan_batch(*arguments, **options))
    return min(plans, key=lambda plan: plan.rows)


def free_memory(device: torch.device) -> int:
    """Bytes that new tensors can have: on a GPU what the driver and torch's allocator have, else this process's part
    of available memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    available = _meminfo("MemAvailable")
    return (available if available is not None else 2**32) // local_world_size()


def _meminfo(name: str) -> int | None:
    """A line of /proc/meminfo in bytes, no more than the control group's limit leaves; None where there is none."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        amount = next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
    except (OSError, StopIteration):
        return None
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        return min(amount, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no control group, or "max"
        return amount


def _cache_bytes(model: Any, layer: Any) -> int:
    """Bytes of a column's keys and values in a layer."""
    return 2 * kv_heads(model, layer) * int(layer.head_dim) * next(layer.parameters()).dtype.itemsize
