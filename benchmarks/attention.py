"""Attention over cached keys and values in place (`kernels.sampling`) against PyTorch's, and the best tiles for it.

    python benchmarks/attention.py --tune

Prints for each shape what PyTorch's way takes (writing keys and values, attention, the copy to the output's order),
what the kernel takes, the least time in which the keys and values can be read, and with --tune the fastest tiles and
numbers of programs for a group. Medians of a graph's replays over twelve layers' buffers, in us a layer.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from dlm_bridge.generation.runtime import attention
from dlm_bridge.kernels import sampling

BYTES_PER_S = 4.3e12
LAYERS = 12


@dataclass(frozen=True)
class Shape:
    """Rows of the batch, query groups, heads of a group, new positions, the first of them, and how many are seen; of
    the new ones, by blocks of `block`. With `padded`, rows have padding of different lengths in front, up to so many
    columns, and how many columns are seen is on the device, as in a recorded graph."""

    name: str
    batch: int
    groups: int
    shared: int
    new: int
    first: int
    end: int
    size: int = 128
    block: int | None = None
    padded: int | None = None


SHAPES = (
    Shape("SDAR-4B, 128 rows, 192", 128, 8, 4, 4, 188, 192),
    Shape("SDAR-4B, 128 rows, 256", 128, 8, 4, 4, 252, 256),
    Shape("SDAR-4B, 128 rows, 192, two blocks", 128, 8, 4, 8, 184, 192, block=4),
    Shape("SDAR-4B, 128 rows, 256, two blocks", 128, 8, 4, 8, 248, 256, block=4),
    Shape("SDAR-4B, 128 padded rows, 368", 128, 8, 4, 4, 364, 368, padded=200),
    Shape("SDAR-4B, 128 padded rows, 368, two blocks", 128, 8, 4, 8, 360, 368, block=4, padded=200),
    Shape("SDAR-4B, 16 rows, 256", 16, 8, 4, 4, 252, 256),
    Shape("SDAR-4B, 1 row, 2048", 1, 8, 4, 4, 2044, 2048),
    Shape("LLaDA-8B, 1 row, 384", 1, 32, 1, 32, 160, 384),
    Shape("LLaDA-8B, 1 row, 640", 1, 32, 1, 32, 160, 640),
    Shape("LLaDA-8B, 16 rows, 640", 16, 32, 1, 32, 160, 640),
    Shape("Fast-dLLM v2 7B, 8 rows, 1024", 8, 4, 7, 32, 992, 1024),
)
TINY = (
    Shape("tiny", 2, 2, 2, 4, 12, 16, size=16),
    Shape("tiny, two padded blocks", 2, 2, 2, 8, 8, 16, size=16, block=4, padded=4),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes alone")
    options = parser.parse_args()
    console = Console(width=200, highlight=False, soft_wrap=True)
    torch.manual_seed(0)
    for shape in TINY if options.tiny else SHAPES:
        layers = [inputs(shape) for _ in range(1 if options.tiny else LAYERS)]
        expected = attention.attend_torch(*layers[0]).double()
        error = ((sampling.attend(*layers[0]).double() - expected).norm() / expected.norm()).item()
        seen = shape.batch * shape.end if layers[0][7] is None else int(layers[0][7].sum())
        least = 4 * seen * shape.groups * shape.size / BYTES_PER_S * 1e6
        console.print(
            f"{shape.name:42} PyTorch {microseconds(attention.attend_torch, layers):6.1f}   kernel "
            f"{microseconds(sampling.attend, layers):6.1f}   reading {least:5.1f}   relative error {error:.0e}"
        )
        if options.tune:
            tune(shape, layers, console)


def inputs(shape: Shape) -> tuple[Any, ...]:
    """`attend`'s arguments in bf16; queries, keys and values are views, as one product gives them."""
    heads = shape.groups * (shape.shared + 2)
    new = torch.randn(shape.batch, shape.new, heads, shape.size, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    query, key, value = new.split([shape.groups * shape.shared, shape.groups, shape.groups], dim=1)
    kept = (shape.batch, shape.groups, -(-shape.end // 64) * 64, shape.size)
    keys, values = (torch.randn(kept, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    columns = torch.arange(shape.first, shape.first + shape.new, device="cuda")
    if shape.padded is None:
        return query, key, value, keys, values, columns, shape.end, None, None, None, shape.block
    padding = shape.padded - shape.padded * torch.rand(shape.batch, 1, device="cuda") ** 2  # most prompts are short
    mask = (torch.arange(shape.end, device="cuda") >= padding)[:, None, None]
    length = torch.tensor([shape.end], device="cuda")
    return query, key, value, keys, values, columns, shape.end, mask, None, length, shape.block


def tune(shape: Shape, layers: list[tuple[Any, ...]], console: Console) -> None:
    found = []
    for tiles in candidates(shape.shared * shape.new):
        try:
            took = microseconds(lambda *one, tiles=tiles: sampling.attend(*one, tiles=tiles), layers)
        except Exception as error:  # such as tiles that do not fit the shared memory
            console.print(f"    {tiles}: {type(error).__name__}")
            continue
        found.append((took, tiles))
    for took, tiles in sorted(found, key=lambda one: one[0])[:5]:
        console.print(f"    {took:6.1f}  {tiles}")
    splits = []
    for count in (1, 2, 4, 8, 16):
        took = microseconds(lambda *one, count=count: sampling.attend(*one, splits=count), layers)
        splits.append(f"{count}: {took:.1f}")
    console.print(f"    programs for a group: {', '.join(splits)}")


def candidates(rows: int) -> Iterable[sampling.AttentionTiles]:
    if rows <= 16:
        cuts = itertools.product((16,), (32, 64, 128), (1, 2, 4, 8), (1, 2, 3, 4))
    elif rows <= 32:
        cuts = itertools.product((32,), (32, 64, 128), (2, 4), (2, 3))
    else:
        cuts = itertools.product((32, 64, 128), (32, 64), (4, 8), (2, 3))
    return (sampling.AttentionTiles(*cut) for cut in cuts)


def microseconds(call: Callable[..., Any], layers: list[tuple[Any, ...]]) -> float:
    """The median of a layer's time in a recorded graph of all of them."""
    for one in layers[:2]:
        call(*one)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in layers:
            call(*one)
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(layers))
    return statistics.median(times[2:])


if __name__ == "__main__":
    main()
