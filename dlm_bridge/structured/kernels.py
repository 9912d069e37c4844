"""Triton kernels of the lattice: a program walks through the columns of one row. Imports Triton.

The functions replace the methods of `lattice.Lattice` of the same names, whose loop over columns launches several
operations for each. Flags and weights of a column are written to global memory and read by the same program after a
barrier.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dlm_bridge.structured.lattice import NEVER, Lattice

_EDGES = 4096  # edges that a program handles together
_LEAST: tl.constexpr = tl.constexpr(-1e300)  # in place of minus infinity, whose differences are NaN


@triton.jit
def _flags(  # type: ignore[no-untyped-def]
    sources, targets, classes, row_edges, row_states, outside, allowed, flags, rows, states, width,
    D, FORWARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """flags [D + 1, G] of one row, zero but for the last column (the first one if FORWARD)."""
    row = tl.program_id(0)
    first_edge, last_edge = tl.load(row_edges + row), tl.load(row_edges + row + 1)
    first_state, last_state = tl.load(row_states + row), tl.load(row_states + row + 1)
    lanes = tl.arange(0, BLOCK)
    for step in range(D):
        column = step if FORWARD else D - 1 - step
        read = flags + (column if FORWARD else column + 1) * states
        write = flags + (column + 1 if FORWARD else column) * states
        if tl.load(outside + row * D + column) != 0:
            for begin in range(first_state, last_state, BLOCK):
                own = begin + lanes
                here = own < last_state
                tl.store(write + own, tl.load(read + own, mask=here, other=0, volatile=True), mask=here)
        else:
            for begin in range(first_edge, last_edge, BLOCK):
                edge = begin + lanes
                here = edge < last_edge
                source = tl.load(sources + edge, mask=here, other=0)
                target = tl.load(targets + edge, mask=here, other=0)
                own = tl.load(classes + edge, mask=here, other=0)
                is_open = tl.load(allowed + column * width + own, mask=here, other=0)
                came = tl.load(read + (source if FORWARD else target), mask=here, other=0, volatile=True)
                live = here & (is_open != 0) & (came != 0)
                tl.store(write + (target if FORWARD else source), tl.full([BLOCK], 1, tl.uint8), mask=live)
        tl.debug_barrier()


@triton.jit
def _live_classes(  # type: ignore[no-untyped-def]
    sources, targets, classes, row_edges, outside, reached, completed, feasible, states, width, count,
    D, BLOCK: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0), tl.program_id(1)
    first_edge, last_edge = tl.load(row_edges + row), tl.load(row_edges + row + 1)
    lanes = tl.arange(0, BLOCK)
    out = feasible + column * width
    if tl.load(outside + row * D + column) != 0:
        own = tl.arange(0, CLASSES)
        tl.store(out + row * count + own, tl.full([CLASSES], 1, tl.uint8), mask=own < count)
    else:
        before, after = reached + column * states, completed + (column + 1) * states
        for begin in range(first_edge, last_edge, BLOCK):
            edge = begin + lanes
            here = edge < last_edge
            source = tl.load(sources + edge, mask=here, other=0)
            target = tl.load(targets + edge, mask=here, other=0)
            own = tl.load(classes + edge, mask=here, other=0)
            came = tl.load(before + source, mask=here, other=0)
            goes = tl.load(after + target, mask=here, other=0)
            tl.store(out + own, tl.full([BLOCK], 1, tl.uint8), mask=here & (came != 0) & (goes != 0))


@triton.jit
def _weights(  # type: ignore[no-untyped-def]
    targets, classes, first_edges, row_states, row_degrees, outside, drawn, weights, betas, states, width,
    D, SUM: tl.constexpr, BLOCK: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """betas [D + 1, G] of one row, of which the last column is given."""
    row = tl.program_id(0)
    first_state, last_state = tl.load(row_states + row), tl.load(row_states + row + 1)
    degree = tl.load(row_degrees + row)
    for step in range(D):
        column = D - 1 - step
        read, write = betas + (column + 1) * states, betas + column * states
        passes = tl.load(outside + row * D + column) != 0
        summed = (tl.load(drawn + row * D + column) != 0) & SUM
        for begin in range(first_state, last_state, BLOCK):
            own = begin + tl.arange(0, BLOCK)
            here = own < last_state
            if passes:
                tl.store(write + own, tl.load(read + own, mask=here, other=0, volatile=True), mask=here)
            else:
                edge = tl.load(first_edges + own, mask=here, other=0)
                last = tl.load(first_edges + own + 1, mask=here, other=0)
                best, total = tl.full([BLOCK], _LEAST, tl.float64), tl.zeros([BLOCK], tl.float64)
                for offset in range(0, degree, EDGES):
                    each = edge[:, None] + offset + tl.arange(0, EDGES)[None, :]
                    valid = each < last[:, None]
                    target = tl.load(targets + each, mask=valid, other=0)
                    kind = tl.load(classes + each, mask=valid, other=0)
                    weight = tl.load(weights + column * width + kind, mask=valid, other=_LEAST)
                    value = tl.load(read + target, mask=valid, other=_LEAST, volatile=True)
                    value = tl.maximum(tl.maximum(weight, _LEAST) + tl.maximum(value, _LEAST), _LEAST)
                    most = tl.maximum(best, tl.max(value, axis=1))
                    if SUM:
                        terms = tl.where(value > _LEAST, tl.exp(value - most[:, None]), 0.0)
                        total = total * tl.exp(best - most) + tl.sum(terms, axis=1)
                    best = most
                if SUM:
                    best = tl.where(summed & (best > _LEAST), best + tl.log(tl.maximum(total, 1e-300)), best)
                tl.store(write + own, best, mask=here)
        tl.debug_barrier()


@triton.jit
def _path(  # type: ignore[no-untyped-def]
    table, bases, row_states, starts, outside, drawn, uniform, weights, betas, path, states, width, count,
    D, SUM: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    first_state, base, state = tl.load(row_states + row), tl.load(bases + row), tl.load(starts + row)
    own = tl.arange(0, CLASSES)
    for column in range(D):
        known = (own < count) & (state >= 0)
        following = tl.load(table + (base + tl.maximum(state, 0)) * count + own, mask=known, other=-1)
        valid = following >= 0
        weight = tl.load(weights + column * width + row * count + own, mask=valid, other=_LEAST)
        beta = tl.load(betas + (column + 1) * states + first_state + following, mask=valid, other=_LEAST)
        score = tl.maximum(tl.maximum(weight, _LEAST) + tl.maximum(beta, _LEAST), _LEAST)
        best = tl.max(score, axis=0)
        chosen = tl.min(tl.where(score == best, own, CLASSES), axis=0)
        if SUM:
            mass = tl.where(score > _LEAST, tl.exp(score - best), 0.0)
            passed = tl.cumsum(mass, axis=0) > tl.load(uniform + row * D + column) * tl.sum(mass, axis=0)
            drawn_class = tl.min(tl.where(passed & (mass > 0), own, CLASSES), axis=0)
            is_drawn = (tl.load(drawn + row * D + column) != 0) & (drawn_class < CLASSES)
            chosen = tl.where(is_drawn, drawn_class, chosen)
        tl.store(path + row * D + column, chosen)
        after = tl.sum(tl.where(own == chosen, following, 0), axis=0)
        state = tl.where(tl.load(outside + row * D + column) != 0, state, after)


def _walked(lattice: Lattice, allowed_DRC: torch.Tensor, *, forward: bool) -> torch.Tensor:
    """uint8 [D + 1, G], states that allowed classes lead to (`forward`), or from which they lead to the end."""
    graph, columns = lattice.graph, len(allowed_DRC)
    flags = torch.zeros(columns + 1, len(graph.state_rows), dtype=torch.uint8, device=allowed_DRC.device)
    if forward:
        flags[0].index_fill_(0, graph.first_states + lattice.starts.clamp(min=0), 1)
    else:
        flags[-1] = lattice.final > NEVER
    _flags[(len(graph.first_states),)](
        graph.sources, graph.targets, graph.edge_classes, graph.row_edges, graph.row_states, lattice.outside_flags,
        allowed_DRC, flags, len(graph.first_states), len(graph.state_rows), allowed_DRC[0].numel(), columns,
        FORWARD=forward, BLOCK=_EDGES, num_warps=16, num_stages=1,
    )  # fmt: skip
    return flags


def feasible(lattice: Lattice) -> torch.Tensor:
    graph, (columns, rows, count) = lattice.graph, lattice.open.shape
    allowed = (lattice.open > NEVER).view(torch.uint8)
    reached, completed = _walked(lattice, allowed, forward=True), _walked(lattice, allowed, forward=False)
    found = torch.zeros_like(allowed)
    _live_classes[(rows, columns)](
        graph.sources, graph.targets, graph.edge_classes, graph.row_edges, lattice.outside_flags, reached, completed,
        found, len(graph.state_rows), rows * count, count, columns,
        BLOCK=_EDGES, CLASSES=triton.next_power_of_2(count), num_warps=8, num_stages=1,
    )  # fmt: skip
    return found.view(torch.bool)


def completes(lattice: Lattice, weights_DRC: torch.Tensor) -> torch.Tensor:
    flags = _walked(lattice, (weights_DRC > NEVER).contiguous().view(torch.uint8), forward=False)
    return flags[0][lattice.graph.first_states + lattice.starts.clamp(min=0)] > 0


def path(
    lattice: Lattice, weights_DRC: torch.Tensor, drawn_RD: torch.Tensor | None, uniform_RD: torch.Tensor | None
) -> torch.Tensor:
    """`best_path`, or `drawn_path` if random numbers are given."""
    graph, (columns, rows, count) = lattice.graph, weights_DRC.shape
    weights, summed = weights_DRC.double().contiguous(), uniform_RD is not None
    betas = weights.new_empty(columns + 1, len(graph.state_rows))
    betas[-1] = lattice.final
    drawn = lattice.outside_flags if drawn_RD is None else drawn_RD.contiguous().view(torch.uint8)
    uniform: Any = weights if uniform_RD is None else uniform_RD.contiguous()
    sizes = len(graph.state_rows), rows * count
    _weights[(rows,)](
        graph.targets, graph.edge_classes, graph.first_edges, graph.row_states, graph.row_degrees,
        lattice.outside_flags, drawn, weights, betas, *sizes, columns,
        SUM=summed, BLOCK=512, EDGES=8, num_warps=16, num_stages=1,
    )  # fmt: skip
    found = torch.empty(rows, columns, dtype=torch.long, device=weights.device)
    _path[(rows,)](
        graph.table, graph.bases, graph.row_states, lattice.starts, lattice.outside_flags, drawn, uniform, weights,
        betas, found, *sizes, count, columns,
        SUM=summed, CLASSES=triton.next_power_of_2(count), num_warps=4, num_stages=1,
    )  # fmt: skip
    return found
