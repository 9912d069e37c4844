"""Batch size from free memory, estimated before sampling (`batch_size=auto`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlm_bridge.distributed import local_world_size
from dlm_bridge.generation.canvas import cache_columns
from dlm_bridge.generation.engine import choose_cache, input_device, sampler_spec
from dlm_bridge.generation.kv_cache import attention_layers, kv_heads
from dlm_bridge.generation.runtime.runner import tensor_parallel_group, unwrapped
from dlm_bridge.generation.settings import resolve_settings
from dlm_bridge.replicas import Replicas

# The rest is for fragmentation, CUDA graphs and libraries' workspaces.
USED_FRACTION = 0.8
MOST_ROWS = 1024


@dataclass(frozen=True)
class Capacity:
    """Number of rows that fit into memory. Sizes are in bytes, for a row at its full length.

    Args:
        length: number of tokens of the longest row, prompt and new tokens.
        cache: size of the KV cache.
        activations: size of the largest activations of a forward pass over the whole row.
        logits: size of the logits of a step, and of sampling's intermediate results.
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
        """Size of a row."""
        return self.cache + self.activations + self.logits

    @property
    def summary(self) -> str:
        """The estimate on one line."""
        return f"batch size {self.rows}: {self.described}; {self.free / 2**30:.1f} GiB free"

    @property
    def described(self) -> str:
        """Description of a row's size."""
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
    """Estimate the batch size for prompts of these lengths. Processes of a tensor-parallel model agree on the
    smallest.

    Memory of the weights is not free. For autoregressive models, 128 new tokens are assumed without `max_new_tokens`
    or `gen_length` in the settings.

    Args:
        scored: True if rows are also scored, which needs all their logits.
        more: True if there may be more rows than `lengths`.
        device: device of a model without weights; default: the model's.
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
    # Per column and layer: residual, norm, input and output of attention; gate, up and their product; and, if
    # attention has no fused kernel (CPU), a score per column and head.
    inner = max(getattr(config, name, None) or 0 for name in ("intermediate_size", "moe_intermediate_size"))
    experts = getattr(config, "num_experts_per_tok", None) or 1
    column = (8 * config.hidden_size + 3 * inner * experts) * itemsize
    device = input_device(model) if device is None else device
    if device.type == "cpu":
        column += 2 * config.num_attention_heads * length * max(itemsize, 4)
    # Logits, a float copy and its softmax; with draws, float64 sums unless a kernel computes them.
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
    """`plan_batch` for batches of all `replicas`: the smallest of their estimates."""
    plans: list[Capacity] = replicas.gather(plan_batch(*arguments, **options))
    return min(plans, key=lambda plan: plan.rows)


def free_memory(device: torch.device) -> int:
    """Bytes available for new tensors: on a GPU, those of the driver and torch's allocator; else this process's part
    of available memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    available = _meminfo("MemAvailable")
    return (available if available is not None else 2**32) // local_world_size()


def _meminfo(name: str) -> int | None:
    """A line of /proc/meminfo in bytes, limited by the control group; None if it does not exist."""
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
    """Size in bytes of a column's keys and values in a layer."""
    return 2 * kv_heads(model, layer) * int(layer.head_dim) * int(model.dtype.itemsize)
