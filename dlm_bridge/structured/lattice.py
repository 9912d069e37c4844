"""Dynamic programmes over the canvas and the states of token automata.

R rows with an automaton each, D columns, C classes (of the largest automaton). The states of all rows follow each
other in one vector of G states, so that rows with different automata share all operations. An edge leads from a state
to the next one with the tokens of one class; the E edges are ordered by their first state. Weights are natural
logarithms, minus infinity for what is not allowed.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dlm_bridge.generation.token_sampling import invert
from dlm_bridge.structured.automaton import TokenAutomaton

NEVER = -torch.inf
CHUNK = 256


@dataclass(frozen=True)
class Graph:
    """The automata of R rows as one graph.

    Args:
        sources, targets, edge_classes: edges; a class counts from the row's first one, `row * C`.
        first_edges: the first edge of each state, and E.
        row_edges, row_states: the first edge and the first state of each row, and E, and G.
        row_degrees: the largest number of edges from a state of each row.
        state_rows: the row of each state.
        first_states: the first state of each row, which is its automaton's start state.
        distances: the fewest tokens from each state to an accepting one.
        table: next states of the U states of the different automata, counted within the automaton; -1: not allowed.
        bases: the first state of the row's automaton in the table.
        token_classes: class of each token.
        chunks: the tokens of each class in K groups of at most `CHUNK`; a shorter one repeats its first token.
        chunk_classes: the class of each group.
        repeated: True at repeated tokens, and in groups that only fill the K.
    """

    sources: torch.Tensor  # [E]
    targets: torch.Tensor  # [E]
    edge_classes: torch.Tensor  # [E]
    first_edges: torch.Tensor  # [G + 1]
    row_edges: torch.Tensor  # [R + 1]
    row_states: torch.Tensor  # [R + 1]
    row_degrees: torch.Tensor  # [R]
    state_rows: torch.Tensor  # [G]
    first_states: torch.Tensor  # [R]
    distances: torch.Tensor  # [G]
    table: torch.Tensor  # [U, C]
    bases: torch.Tensor  # [R]
    token_classes: torch.Tensor  # [R, V]
    chunks: torch.Tensor  # [R, K, CHUNK]
    chunk_classes: torch.Tensor  # [R, K]
    repeated: torch.Tensor  # [R, K, CHUNK]

    @classmethod
    def of(cls, automata: Sequence[TokenAutomaton], vocabulary: int, device: torch.device) -> Graph:
        """Join the rows' automata. Tokens that an automaton does not know are not allowed."""
        different = list({id(one): one for one in automata}.values())
        places = {id(one): place for place, one in enumerate(different)}
        count = max(one.transitions.shape[1] for one in different)
        edges, tables, starts = [], [], [0]
        for one in different:
            edges.append(one.edges)
            tables.append(torch.nn.functional.pad(one.transitions, (0, count - one.transitions.shape[1]), value=-1))
            starts.append(starts[-1] + len(one.distances))
        classes = [_classes(one, vocabulary)[0] for one in different]
        chunks = [_classes(one, vocabulary)[1] for one in different]
        most = max(map(len, chunks))
        chunks = [torch.cat([one, one[:1].expand(most - len(one), -1)]) for one in chunks]
        sizes = [len(one.distances) for one in automata]
        first_R = torch.tensor([0, *sizes]).cumsum(0)[:-1]
        chosen = [places[id(one)] for one in automata]
        joined = [torch.cat([edges[place][part] for place in chosen]) for part in range(4)]
        counts = torch.tensor([len(edges[place][0]) for place in chosen])
        row_E = torch.repeat_interleave(counts)
        offset_E = first_R[row_E]
        parts = (
            joined[0] + offset_E,
            joined[1] + offset_E,
            joined[2] + row_E * count,
            torch.nn.functional.pad(joined[3].cumsum(0), (1, 0)),
            torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
            torch.tensor([0, *sizes]).cumsum(0),
            torch.stack([edges[place][3].max() for place in chosen]),
            torch.repeat_interleave(torch.tensor(sizes)),
            first_R,
            torch.cat([one.distances for one in automata]),
            torch.cat(tables),
            torch.tensor([starts[place] for place in chosen]),
            torch.stack([classes[place] for place in chosen]),
            torch.stack([chunks[place] for place in chosen]),
            torch.stack([classes[place][chunks[place][:, 0]] for place in chosen]),
            torch.stack([_repeated(chunks[place]) for place in chosen]),
        )
        return cls(*(part.to(device) for part in parts))

    @property
    def classes(self) -> int:
        return self.table.shape[1]

    def by_class(self, values_RNV: torch.Tensor, *, summed: bool) -> torch.Tensor:
        """[R, N, C], the largest or the summed value of each class' tokens. Values of whole classes are reduced in
        groups, because atomic operations on so few places are slow."""
        (rows, count), (groups, size) = values_RNV.shape[:2], self.chunks.shape[1:]
        grouped = values_RNV.gather(2, self.chunks.view(rows, 1, -1).expand(-1, count, -1))
        grouped = grouped.view(rows, count, groups, size)
        if summed:  # by a product, whose order of additions is always the same
            partial_RNK = grouped.masked_fill(self.repeated[:, None], 0.0).sum(dim=-1)
            of_class_RKC = torch.nn.functional.one_hot(self.chunk_classes, self.classes)
            return partial_RNK @ of_class_RKC.to(partial_RNK.dtype)
        class_RNK = self.chunk_classes[:, None].expand(-1, count, -1)
        empty_RNC = values_RNV.new_full((rows, count, self.classes), NEVER)
        return empty_RNC.scatter_reduce(2, class_RNK, grouped.amax(dim=-1), "amax")

    def next_states(self, state_R: torch.Tensor) -> torch.Tensor:
        """[R, C], next states of states counted within each row; -1: not allowed, or no state."""
        next_RC = self.table[self.bases + state_R.clamp(min=0)]
        return next_RC.masked_fill(state_R[:, None] < 0, -1)

    def class_of(self, tokens_RN: torch.Tensor) -> torch.Tensor:
        """[R, N], classes of tokens; at masks, of token 0."""
        return self.token_classes.gather(1, tokens_RN.clamp(min=0))

    def advance(self, state_R: torch.Tensor, tokens_RN: torch.Tensor, active_RN: torch.Tensor) -> torch.Tensor:
        """[R], states after the active tokens."""
        class_RN = self.class_of(tokens_RN)
        for place in range(tokens_RN.shape[1]):
            next_R = self.next_states(state_R).gather(1, class_RN[:, place : place + 1])[:, 0]
            state_R = torch.where(active_RN[:, place], next_R, state_R)
        return state_R


@dataclass(frozen=True)
class Lattice:
    """D columns of R rows, each of which a token of an allowed class fills.

    Args:
        graph: the rows' automata.
        starts: each row's state before the first column, counted within the row.
        final: weight of each state after the last column: 0 if the rest of the text can still be completed.
        outside: True at columns that do not belong to the text: the state passes them unchanged.
        open: 0 at the classes that may fill a column, else minus infinity.
    """

    graph: Graph
    starts: torch.Tensor  # [R]
    final: torch.Tensor  # [G]
    outside: torch.Tensor  # [R, D]
    open: torch.Tensor  # [D, R, C]

    @functools.cached_property
    def outside_flags(self) -> torch.Tensor:
        """uint8 [R, D], `outside` as the kernels read it."""
        return self.outside.contiguous().view(torch.uint8)

    @property
    def _kernels(self) -> Any:
        return _kernels(self.outside.device.type)

    def _passed(self) -> torch.Tensor:
        """[D, G], True at columns that the state passes unchanged."""
        return self.outside.T[:, self.graph.state_rows]

    def best_weights(self, weights_DRC: torch.Tensor) -> list[torch.Tensor]:
        """For D + 1 columns [G], the largest weight of the ways from a state to the end of the columns."""
        graph, outside_DG = self.graph, self._passed()
        weights_DW, beta_G = weights_DRC.flatten(1), self.final.to(weights_DRC.dtype)
        betas = [beta_G]
        for column in reversed(range(len(weights_DW))):
            edges_E = weights_DW[column][graph.edge_classes] + beta_G[graph.targets]
            best_G = _segments(edges_E, graph.first_edges, "max")
            beta_G = torch.where(outside_DG[column], beta_G, best_G)
            betas.append(beta_G)
        return betas[::-1]

    def summed_weights(self, weights_DRC: torch.Tensor, drawn_RD: torch.Tensor) -> list[torch.Tensor]:
        """For D + 1 columns [G], the logarithm of the summed weights of the ways from a state to the end. Columns that
        are not drawn contribute whether a way exists, not how many."""
        graph, outside_DG = self.graph, self._passed()
        drawn_DG = drawn_RD.T[:, graph.state_rows]
        weights_DW, beta_G = weights_DRC.flatten(1), self.final.to(weights_DRC.dtype)
        betas = [beta_G]
        for column in reversed(range(len(weights_DW))):
            edges_E = weights_DW[column][graph.edge_classes] + beta_G[graph.targets]
            best_G = _segments(edges_E, graph.first_edges, "max")
            shift_G = best_G.clamp(min=torch.finfo(best_G.dtype).min)
            sum_G = _segments((edges_E - shift_G[graph.sources]).exp(), graph.first_edges, "sum")
            total_G = torch.where(drawn_DG[column], shift_G + sum_G.log(), best_G)
            beta_G = torch.where(outside_DG[column], beta_G, total_G)
            betas.append(beta_G)
        return betas[::-1]

    def reached(self, weights_DRC: torch.Tensor) -> list[torch.Tensor]:
        """For D + 1 columns [G], 1 at the states that allowed classes lead to from the start."""
        graph, outside_DG = self.graph, self._passed()
        allowed_DW = (weights_DRC > NEVER).flatten(1).int()
        now_G = torch.zeros_like(graph.state_rows, dtype=torch.int32)
        now_G = now_G.index_fill(0, graph.first_states + self.starts.clamp(min=0), 1)
        states = [now_G]
        for column in range(len(allowed_DW)):
            edges_E = now_G[graph.sources] * allowed_DW[column][graph.edge_classes]
            next_G = torch.zeros_like(now_G).index_add(0, graph.targets, edges_E).clamp(max=1)
            now_G = torch.where(outside_DG[column], now_G, next_G)
            states.append(now_G)
        return states

    def feasible(self) -> torch.Tensor:
        """[D, R, C], True at the classes that some completion has in a column, whatever fills this column now. Columns
        outside the text allow every class."""
        if self._kernels is not None:
            return self._kernels.feasible(self)
        graph = self.graph
        beta_DG = torch.stack(self.best_weights(self.open))[1:]
        reached_DG = torch.stack(self.reached(self.open))[:-1]
        live_DE = reached_DG[:, graph.sources] * (beta_DG[:, graph.targets] > NEVER)
        count_DW = torch.zeros_like(self.open, dtype=torch.int32).flatten(1)
        count_DW.index_add_(1, graph.edge_classes, live_DE.int())
        return (count_DW > 0).view_as(self.open) | self.outside.T[..., None]

    def best_path(self, weights_DRC: torch.Tensor) -> torch.Tensor:
        """[R, D], classes of the text with the largest summed weight; the first of equal ones."""
        if self._kernels is not None:
            return self._kernels.path(self, weights_DRC, None, None)
        return self._path(weights_DRC, self.best_weights(weights_DRC), None, None)

    def drawn_path(self, weights_DRC: torch.Tensor, drawn_RD: torch.Tensor, uniform_RD: torch.Tensor) -> torch.Tensor:
        """[R, D], classes of a text drawn with probability proportional to the exponential of its summed weight.
        Columns that are not drawn have some class that completes it."""
        if self._kernels is not None:
            return self._kernels.path(self, weights_DRC, drawn_RD, uniform_RD)
        return self._path(weights_DRC, self.summed_weights(weights_DRC, drawn_RD), drawn_RD, uniform_RD)

    def _path(
        self,
        weights_DRC: torch.Tensor,
        betas: list[torch.Tensor],
        drawn_RD: torch.Tensor | None,
        uniform_RD: torch.Tensor | None,
    ) -> torch.Tensor:
        graph, state_R, path = self.graph, self.starts, []
        for column in range(len(weights_DRC)):
            next_RC = graph.next_states(state_R)
            scores_RC = betas[column + 1][graph.first_states[:, None] + next_RC.clamp(min=0)] + weights_DRC[column]
            scores_RC = scores_RC.masked_fill(next_RC < 0, NEVER)
            class_R = scores_RC.argmax(dim=1)
            if uniform_RD is not None and drawn_RD is not None:
                drawn_R = invert(scores_RC.softmax(dim=1)[:, None], uniform_RD[:, column, None], class_R[:, None])[
                    :, 0
                ]
                class_R = torch.where(drawn_RD[:, column], drawn_R, class_R)
            path.append(class_R)
            next_R = next_RC.gather(1, class_R[:, None])[:, 0]
            state_R = torch.where(self.outside[:, column], state_R, next_R)
        return torch.stack(path, dim=1)

    def completes(self, weights_DRC: torch.Tensor) -> torch.Tensor:
        """[R], True if some text has allowed classes only."""
        if self._kernels is not None:
            return self._kernels.completes(self, weights_DRC)
        states_G = self.reached(weights_DRC)[-1] * (self.final > NEVER)
        found_R = torch.zeros_like(self.starts, dtype=torch.int32).index_add(0, self.graph.state_rows, states_G.int())
        return found_R > 0


@functools.lru_cache(maxsize=32)
def _classes(automaton: TokenAutomaton, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[V], class of each token of the vocabulary; [K, CHUNK], tokens of equal class in groups."""
    known_V = automaton.classes[:vocabulary]
    classes_V = torch.nn.functional.pad(known_V, (0, vocabulary - len(known_V)))
    order_V = classes_V.argsort(stable=True)
    parts = []
    for own in order_V.split(torch.bincount(classes_V).tolist()):
        for part in own.split(CHUNK) if len(own) else ():
            parts.append(torch.cat([part, part[:1].expand(CHUNK - len(part))]))
    return classes_V, torch.stack(parts)


def _repeated(chunks_KM: torch.Tensor) -> torch.Tensor:
    """[K, CHUNK], True at tokens that a group, or a group after the first equal one, repeats."""
    repeated_KM = torch.zeros_like(chunks_KM, dtype=torch.bool)
    repeated_KM[:, 1:] = chunks_KM[:, 1:] == chunks_KM[:, :1]
    again_K = (chunks_KM[:, 0] == chunks_KM[0, 0]) & (torch.arange(len(chunks_KM)) > 0)
    return repeated_KM | again_K[:, None]


@functools.cache
def _kernels(device: str) -> Any:
    """Module of kernels for a device type, or None."""
    if device != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("dlm_bridge.structured.kernels")


def _segments(values_E: torch.Tensor, edges_G1: torch.Tensor, reduce: str) -> torch.Tensor:
    """[G], reduction over the edges of each state, in their order, so that sums are reproducible."""
    initial = NEVER if reduce == "max" else 0.0
    reduced_G: torch.Tensor = torch.segment_reduce(values_E, reduce, offsets=edges_G1, unsafe=True, initial=initial)
    return reduced_G
