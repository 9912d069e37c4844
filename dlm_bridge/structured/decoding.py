"""Decoding under a token automaton: every commit leaves a text that can be completed within the request's length.

The sampler proposes tokens as without a constraint. Then, in each step (`AutomatonDecoder`):

1. A proposal that no completion of the canvas contains is replaced by a token that some completion contains
   (`propose`): the best one, or a draw. If tokens are drawn, and the proposals of all masks do not form a text, all of
   them are drawn again together, from the model's distribution restricted to the texts.
2. Of the tokens that the rule commits, those are written that some completion contains together (`commit`): the subset
   of the largest summed confidence. If these are fewer than the sampler's schedule needs, tokens of a completion fill
   the difference.

If the proposals satisfy the constraint, neither changes anything.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor

from dlm_bridge.errors import RowError, SettingError, counted
from dlm_bridge.generation.canvas import Canvas, Columns, to_device
from dlm_bridge.generation.request import MASK, Request
from dlm_bridge.generation.settings import GenerationSettings
from dlm_bridge.generation.token_sampling import Noise, TokenSampling, draw_token, gather_tokens, probability_of
from dlm_bridge.structured.automaton import TokenAutomaton
from dlm_bridge.structured.compile import compile_constraint
from dlm_bridge.structured.constraint import Constraint
from dlm_bridge.structured.lattice import NEVER, Graph, Lattice

# Settings that exclude tokens for other reasons, so that no token of the constraint may be left.
EXCLUDED = (
    "bad_words_ids",
    "logits_processor",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "prefix_allowed_tokens_fn",
    "suppress_tokens",
)
# Least weight, a logarithm, of a token that the filters exclude: it is taken if no other one completes the text.
LEAST_WEIGHT = -70.0
KNOWN_GRAPHS = 8
# Random numbers beside those of the sampler's own draws.
REPLACED, CLASS, TOKEN = 1, 2, 3


@dataclass(frozen=True, eq=False)
class AutomatonConstraint:
    """A compiled constraint, for `Request.constraint`. One object may serve many requests."""

    automaton: TokenAutomaton

    def check(self, request: Request, length: int, plan: Any = None) -> None:
        """Raise RowError or SettingError for a constraint that a text of at most `length` tokens cannot satisfy, or
        that does not fit the `SamplingPlan` (None: an autoregressive model)."""
        room = length
        if plan is not None:
            sampler, settings = plan.settings.sampler, plan.settings
            if not plan.rule.keeps_text:
                raise SettingError("constraint", f"the {sampler.name} sampler cannot keep it: tokens move")
            if settings.stop_strings:
                raise SettingError("stop_strings", "excludes `constraint`: the text would end in its middle")
            for other in EXCLUDED:
                if settings.constraints.get(other):
                    raise SettingError(other, "excludes `constraint`: set one of them")
            if plan.spec.suppress:
                raise SettingError("logits_eos_inf", "excludes `constraint`, whose text ends with such a token")
            room -= int(plan.spec.layout.closing is not None and length > 0)
            if settings.limits.infill:
                self._check_given(request, length)
                return
        if self.automaton.shortest > room:
            closing = "" if room == length else ", of which one ends the text"
            raise RowError(
                f"the shortest text of the constraint has {counted(self.automaton.shortest, 'token')}, more than "
                f"`gen_length={length}`{closing}",
                [request.name],
            )

    def closes(self, tokens: Sequence[int]) -> bool:
        """True if nothing but an end-of-sequence token may follow these tokens."""
        automaton = self.automaton
        state = automaton.advance(0, list(tokens))
        following = automaton.transitions[state]
        return state >= 0 and not bool(((following >= 0) & (following != automaton.end)).any())

    def _check_given(self, request: Request, length: int) -> None:
        """Raise RowError if no text of the constraint has the prompt's tokens at their positions."""
        automaton = self.automaton
        states = {0}
        for token in request.prompt:
            chosen = automaton.transitions[sorted(states)]
            if token != MASK:
                known = token < len(automaton.classes)
                chosen = chosen[:, automaton.classes[token]] if known else chosen[:, :0]
            states = {*chosen.unique().tolist()} - {-1}
            if not states:
                break
        if not any(int(automaton.distances[state]) <= length for state in states):
            raise RowError("no text of the constraint has the given tokens at their positions", [request.name])

    def decoder(
        self, canvas: Canvas, noise: Noise, constraints: Mapping[Hashable, Any], *, edits: bool
    ) -> AutomatonDecoder:
        """Decoder for a run of the engine. `constraints` has those of the running rows, by name."""
        return AutomatonDecoder(canvas, noise, constraints, edits=edits)

    def processor(self, constraints: Sequence[Any], prompt_width: int, length: int) -> LogitsProcessor:
        """Logits processor of a closed batch of an autoregressive model; a row's constraint may be None."""
        return AutomatonProcessor(constraints, prompt_width, length)

    def draft(
        self,
        constraints: Sequence[Any],
        texts: Sequence[Sequence[int]],
        lengths: Sequence[int],
        logits_AQV: torch.Tensor,
        tokens_AQ: torch.Tensor,
    ) -> torch.Tensor:
        """[A, Q] tokens after the rows' texts of at most `lengths` tokens: `tokens_AQ` if they can be completed, else
        the most probable ones. A row's constraint may be None."""
        device, width = tokens_AQ.device, tokens_AQ.shape[1]
        places = [place for place, one in enumerate(constraints) if one is not None]
        automata = [constraints[place].automaton for place in places]
        graph = graph_of(automata, logits_AQV.shape[-1], device)
        states = [one.advance(0, list(texts[place])) for one, place in zip(automata, places, strict=True)]
        lefts = [lengths[place] - len(texts[place]) for place in places]
        index, starts, left_R = to_device([*places, *states, *lefts], device).view(3, -1)
        final = torch.where(graph.distances <= (left_R - width).clamp(min=0)[graph.state_rows], 0.0, NEVER)
        outside_RD = torch.arange(width, device=device) >= left_R[:, None]
        open_DRC = torch.zeros(width, len(places), graph.classes, device=device)
        lattice = Lattice(graph, starts, final, outside_RD, open_DRC)
        return tokens_AQ.index_copy(0, index, _most_probable(lattice, logits_AQV[index], tokens_AQ[index]))


@dataclass(frozen=True)
class _View:
    """The constrained rows of a step.

    Args:
        rows: rows of the canvas.
        places: their indices among the step's rows; None: all of them.
        lattice: the canvas from the block's first column on; new tokens that are masked are open.
        first: the lattice's first column.
        names, graph: the rows' names and automata.
    """

    rows: list[int]
    places: torch.Tensor | None
    lattice: Lattice
    first: int
    graph: Graph

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """The constrained rows of [A, ...] values."""
        return values if self.places is None else values[self.places]

    def put(self, values: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """[A, ...] values with new ones for the constrained rows."""
        return new if self.places is None else values.index_copy(0, self.places, new.to(values.dtype))


class AutomatonDecoder:
    """Keeps the automata of the rows of a canvas; see `generation.constraints.TextDecoder`.

    Args:
        edits: True if the sampler changes committed tokens. Draws are then checked one by one, not drawn together.
    """

    def __init__(self, canvas: Canvas, noise: Noise, constraints: Mapping[Hashable, Any], *, edits: bool) -> None:
        self._canvas, self._noise, self._constraints, self._edits = canvas, noise, constraints, edits
        self._known: dict[Hashable, tuple[AutomatonConstraint, int, torch.Tensor]] = {}  # states by name
        self._block: tuple[Any, Graph, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None
        self._joint = False  # the last proposals form a text
        # Rows of the last proposals, and the logarithm of the probability of their feasible tokens.
        self._proposed: tuple[_View, torch.Tensor] | None = None

    def propose(
        self,
        rows: list[int],
        columns: Columns,
        logits_ANV: torch.Tensor,
        shaped_ANV: torch.Tensor,
        tokens_AN: torch.Tensor,
        sampling: TokenSampling,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Replace proposals that no completion of the row's text contains, and the logits that they come from."""
        view = self._view(rows, logits_ANV.shape[-1])
        self._joint = sampling.draws and not self._edits
        self._proposed = None
        if view is None:
            return logits_ANV, shaped_ANV, tokens_AN
        logits_RNV, tokens_RN = view.take(logits_ANV), view.take(tokens_AN)
        columns_RN = view.take(self._canvas.columns(self._canvas.selected(rows), columns))
        place_RN = columns_RN - view.first
        feasible_DRC = view.lattice.feasible()
        feasible_RNC = _of_columns(feasible_DRC, place_RN)
        class_R1V = view.graph.token_classes[:, None].expand(-1, tokens_RN.shape[1], -1)
        allowed_RNV = feasible_RNC.gather(2, class_R1V)
        fits_RN = gather_tokens(allowed_RNV, tokens_RN)
        only_RNV = logits_RNV.masked_fill(~allowed_RNV, NEVER)
        probabilities_RNV = logits_RNV.softmax(dim=-1, dtype=torch.float32)
        mass_RN = probabilities_RNV.masked_fill_(~allowed_RNV, 0.0).sum(dim=-1).log()
        self._proposed = view, mass_RN
        without = self._canvas.excluded_token_id
        uniform_RN = None
        if sampling.draws:
            uniform_RN = self._noise.uniform(
                view.rows, self._canvas.places(self._canvas.selected(view.rows), columns_RN), REPLACED
            )
        shaped_only_RNV = sampling.shape(only_RNV)
        other_RN = sampling.propose(only_RNV, shaped_only_RNV, without, uniform_RN)
        new_RN = torch.where(fits_RN, tokens_RN, other_RN)
        if self._joint:
            masked_RN = self._canvas.masked(self._canvas.selected(view.rows), columns_RN)
            text_RN = self._drawn_text(
                view, feasible_DRC, place_RN, masked_RN, tokens_RN, only_RNV, shaped_only_RNV, sampling
            )
            new_RN = torch.where(masked_RN, text_RN, new_RN)
        kept_RN1 = (new_RN == tokens_RN)[..., None]
        logits_RNV = torch.where(kept_RN1, logits_RNV, only_RNV)
        if shaped_only_RNV is only_RNV:  # no temperature, no filters
            shaped_RNV = logits_RNV
        else:
            shaped_RNV = torch.where(kept_RN1, view.take(shaped_ANV), shaped_only_RNV)
        return view.put(logits_ANV, logits_RNV), view.put(shaped_ANV, shaped_RNV), view.put(tokens_AN, new_RN)

    def commit(
        self,
        rows: list[int],
        columns: Columns,
        tokens_AN: torch.Tensor,
        logits_ANV: torch.Tensor,
        least: Sequence[int] | None,
    ) -> torch.Tensor:
        """[A, N] tokens to write instead of `tokens_AN`, of which some completion of the row's text contains all. At
        least `least` of the row's changes remain, possibly with another token; None: each row has one change."""
        if self._proposed is None:
            return tokens_AN
        view, mass_RN = self._proposed
        columns_RN = view.take(self._canvas.columns(self._canvas.selected(rows), columns))
        before_RN = self._canvas.take(self._canvas.selected(view.rows), columns_RN)
        if least is not None and not self._joint:
            tokens_AN = self._checked(view, columns_RN, before_RN, tokens_AN, logits_ANV, least)
        filled_RN = (before_RN == MASK) & (view.take(tokens_AN) != MASK)
        mass_R = mass_RN.masked_fill(~filled_RN, 0.0).sum(dim=1)
        self._canvas.log_mass.index_add_(0, self._canvas.index(view.rows), mass_R.double())
        return tokens_AN

    def _checked(
        self,
        view: _View,
        columns_RN: torch.Tensor,
        before_RN: torch.Tensor,
        tokens_AN: torch.Tensor,
        logits_ANV: torch.Tensor,
        least: Sequence[int],
    ) -> torch.Tensor:
        """[A, N] tokens, see `commit`."""
        lattice, graph = view.lattice, view.graph
        tokens_RN, logits_RNV = view.take(tokens_AN), view.take(logits_ANV)
        place_RN = columns_RN - view.first
        inside_RN = ~lattice.outside.gather(1, place_RN)
        changed_RN = (tokens_RN != before_RN) & (tokens_RN != MASK) & inside_RN
        filled_RN = changed_RN & (before_RN == MASK)
        class_RN = graph.class_of(tokens_RN)
        # Weights: 1 + confidence for a change. Less than 1 for all other tokens together, so that at least one change
        # is kept: the better, the higher their probabilities.
        columns_count = len(lattice.open)
        logs_RNC = _class_weights(logits_RNV, graph)
        scaled_RNC = (logs_RNC.clamp(min=-32, max=0) / (32 * columns_count)).nan_to_num(nan=0.0)
        weights_DRC = lattice.open.double()
        spread_DRC = torch.zeros_like(weights_DRC)
        masked_RN1 = filled_RN[..., None]
        rows_R1 = torch.arange(len(view.rows), device=place_RN.device)[:, None]
        spread_DRC[place_RN, rows_R1] = torch.where(masked_RN1, scaled_RNC, 0.0)
        weights_DRC = weights_DRC + spread_DRC
        confidence_RN = probability_of(tokens_RN.clamp(min=0), logits_RNV, torch.float64).nan_to_num(nan=0.0)
        bonus_RN = (1 + confidence_RN).masked_fill(~changed_RN, 0.0)
        bonus_RNC = torch.zeros_like(scaled_RNC).scatter(2, class_RN[..., None], bonus_RN[..., None])
        # A change of a committed token opens the new token's class beside the old one's.
        opened_RNC = (changed_RN & ~filled_RN)[..., None] & (bonus_RNC > 0)
        current_RNC = weights_DRC[place_RN, rows_R1]
        weights_DRC[place_RN, rows_R1] = torch.where(opened_RNC, 0.0, current_RNC) + bonus_RNC
        path_RD = lattice.best_path(weights_DRC)
        chosen_RN = path_RD.gather(1, place_RN)
        accepted_RN = changed_RN & (chosen_RN == class_RN)
        missing_R1 = view.take(to_device(least, tokens_RN.device))[:, None] - (
            (accepted_RN | ~inside_RN & (tokens_RN != before_RN)) & (before_RN == MASK)
        ).sum(dim=1, keepdim=True)
        refused_RN = filled_RN & ~accepted_RN
        order_RN = bonus_RN.masked_fill(~refused_RN, -1.0).sort(dim=1, descending=True, stable=True).indices
        rank_RN = order_RN.argsort(dim=1)
        other_RN = _best_of_class(logits_RNV, graph, chosen_RN)
        new_RN = torch.where(refused_RN & (rank_RN < missing_R1), other_RN, before_RN)
        new_RN = torch.where(changed_RN & ~accepted_RN, new_RN, tokens_RN)
        return view.put(tokens_AN, new_RN)

    def follow(
        self, rows: list[int], firsts: list[int], drafts_AM: torch.Tensor, logits_ANV: torch.Tensor
    ) -> torch.Tensor:
        """Logits of N columns from `firsts` on, without the tokens that cannot follow the text before `firsts` and the
        draft's tokens before the column."""
        places = [place for place, row in enumerate(rows) if self._constraint(row) is not None]
        if not places:
            return logits_ANV
        canvas, device = self._canvas, logits_ANV.device
        own = [rows[place] for place in places]
        graph = self._graph(own, logits_ANV.shape[-1])
        begins = [firsts[place] for place in places]
        starts, ends = canvas.firsts, canvas.text_ends
        state_R = self._states(own, graph, [begin - starts[row] for begin, row in zip(begins, own, strict=True)])
        left_R = to_device([ends[row] - begin for begin, row in zip(begins, own, strict=True)], device)
        index = None if len(places) == len(rows) else to_device(places, device)
        logits_RNV = logits_ANV if index is None else logits_ANV[index]
        drafts_RM = drafts_AM if index is None else drafts_AM[index]
        columns = []
        for column in range(logits_RNV.shape[1]):
            next_RC = graph.next_states(state_R)
            left_R = left_R - 1
            fits_RC = (next_RC >= 0) & (
                graph.distances[graph.first_states[:, None] + next_RC.clamp(min=0)] <= left_R[:, None]
            )
            # After the text, and after a token of the draft that cannot be accepted, every token is allowed.
            fits_RC = fits_RC | (state_R < 0)[:, None] | (left_R < 0)[:, None]
            columns.append(logits_RNV[:, column].masked_fill(~fits_RC.gather(1, graph.token_classes), NEVER))
            if column < drafts_RM.shape[1]:
                class_R1 = graph.class_of(drafts_RM[:, column : column + 1])
                fits_R = fits_RC.gather(1, class_R1)[:, 0] & (drafts_RM[:, column] != MASK)
                state_R = torch.where(fits_R, next_RC.gather(1, class_R1)[:, 0], -1)
            else:
                state_R = torch.full_like(state_R, -1)
        only_RNV = torch.stack(columns, dim=1)
        return only_RNV if index is None else logits_ANV.index_copy(0, index, only_RNV)

    def finish(
        self, rows: list[int], columns: Columns, logits_ANV: torch.Tensor, tokens_AN: torch.Tensor, sampling: Any
    ) -> torch.Tensor:
        """[A, N] `tokens_AN` if they are a valid text, else a valid text from these logits."""
        view = self._view(rows, logits_ANV.shape[-1], open_all=True)
        if view is None:
            return tokens_AN
        canvas, tokens_RN = self._canvas, view.take(tokens_AN)
        columns_RN = view.take(canvas.columns(self._canvas.selected(rows), columns))
        place_RN = columns_RN - view.first
        feasible_DRC = view.lattice.feasible()
        allowed_RNV = _of_columns(feasible_DRC, place_RN).gather(
            2, view.graph.token_classes[:, None].expand(-1, tokens_RN.shape[1], -1)
        )
        only_RNV = view.take(logits_ANV).masked_fill(~allowed_RNV, NEVER)
        new_RN = canvas.behind_prompt(self._canvas.selected(view.rows), columns_RN)
        shaped_RNV = sampling.shape(only_RNV)
        text_RN = self._drawn_text(view, feasible_DRC, place_RN, new_RN, tokens_RN, only_RNV, shaped_RNV, sampling)
        return view.put(tokens_AN, torch.where(new_RN, text_RN, tokens_RN))

    def _drawn_text(
        self,
        view: _View,
        feasible_DRC: torch.Tensor,
        place_RN: torch.Tensor,
        masked_RN: torch.Tensor,
        tokens_RN: torch.Tensor,
        only_RNV: torch.Tensor,
        shaped_RNV: torch.Tensor,
        sampling: TokenSampling,
    ) -> torch.Tensor:
        """[R, N], the rows' tokens if they can be completed together, else tokens drawn together (the most probable
        ones if nothing is drawn) from the product of the columns' distributions, restricted to these."""
        lattice, graph = view.lattice, view.graph
        rows_R1 = torch.arange(len(view.rows), device=place_RN.device)[:, None]
        masked_RN = masked_RN & ~lattice.outside.gather(1, place_RN)
        class_RN = graph.class_of(tokens_RN)
        one_RNC = torch.zeros_like(_of_columns(feasible_DRC, place_RN)).scatter(2, class_RN[..., None], True)
        open_DRC = lattice.open.masked_fill(~feasible_DRC, NEVER)
        tried_DRC = open_DRC.clone()
        current_RNC = open_DRC[place_RN, rows_R1]
        tried_DRC[place_RN, rows_R1] = torch.where(masked_RN[..., None] & ~one_RNC, NEVER, current_RNC)
        fits_R1 = lattice.completes(tried_DRC)[:, None]
        weights_DRC = open_DRC.double()
        logs_RNC = _class_weights(shaped_RNV, graph, summed=sampling.draws).clamp(min=LEAST_WEIGHT)
        weights_DRC[place_RN, rows_R1] = torch.where(
            masked_RN[..., None], logs_RNC + current_RNC, current_RNC.double()
        )
        if sampling.draws:
            drawn_RD = torch.zeros_like(lattice.outside).scatter(1, place_RN, masked_RN)
            columns_D = view.first + torch.arange(drawn_RD.shape[1], device=place_RN.device)
            places_RD = columns_D - self._canvas.origin(self._canvas.selected(view.rows))[:, None]
            uniform_RD = self._noise.uniform(view.rows, places_RD, CLASS)
            path_RD = lattice.drawn_path(weights_DRC, drawn_RD, uniform_RD)
        else:
            path_RD = lattice.best_path(weights_DRC)
        chosen_RN1 = path_RD.gather(1, place_RN)[..., None]
        in_class_RNV = graph.token_classes[:, None] == chosen_RN1
        some_RN1 = (in_class_RNV & (shaped_RNV > NEVER)).any(dim=-1, keepdim=True)
        own_RNV = torch.where(some_RN1, shaped_RNV, only_RNV.to(shaped_RNV.dtype)).masked_fill(~in_class_RNV, NEVER)
        if sampling.draws:
            uniform_RN = self._noise.uniform(
                view.rows, self._canvas.places(self._canvas.selected(view.rows), place_RN + view.first), TOKEN
            )
            text_RN = draw_token(own_RNV, uniform_RN, self._canvas.excluded_token_id)
        else:
            text_RN = own_RNV.argmax(dim=-1)
        return torch.where(fits_R1, tokens_RN, torch.where(masked_RN, text_RN, tokens_RN))

    # ---- The rows' automata and states.

    def _constraint(self, row: int) -> AutomatonConstraint | None:
        return self._constraints.get(self._canvas.names[row])

    def _graph(self, rows: list[int], vocabulary: int) -> Graph:
        automata = [self._constraints[self._canvas.names[row]].automaton for row in rows]
        return graph_of(automata, vocabulary, self._canvas.tokens.device)

    def _view(self, rows: list[int], vocabulary: int, *, open_all: bool = False) -> _View | None:
        """The constrained ones of these rows; None if there are none. `open_all`: all new tokens count as masks."""
        canvas = self._canvas
        places = [place for place, row in enumerate(rows) if self._constraint(row) is not None]
        if not places:
            return None
        own = [rows[place] for place in places]
        every_first, every_end = canvas.firsts, canvas.text_ends
        firsts, ends = [every_first[row] for row in own], [every_end[row] for row in own]
        first = canvas.block.start
        # With masks in the prompt, given tokens follow the block.
        stop = canvas.width if canvas.has_holes else canvas.block.stop
        device, columns = canvas.tokens.device, slice(first, stop)
        names = [canvas.names[row] for row in own]
        key = names, [self._constraints[name] for name in names], places, len(rows), firsts, ends, first, stop
        if self._block is None or self._block[0] != key:  # else the same rows are inside the same block
            graph = self._graph(own, vocabulary)
            start_R = self._states(own, graph, [first - one for one in firsts])
            columns_RD = canvas.columns(self._canvas.selected(own), columns)
            numbers_2R = to_device([*firsts, *ends], device).view(2, -1, 1)
            outside_RD = (columns_RD < numbers_2R[0]) | (columns_RD >= numbers_2R[1])
            left_R = (numbers_2R[1, :, 0] - stop).clamp(min=0)
            final_G = torch.where(graph.distances <= left_R[graph.state_rows], 0.0, NEVER)
            index = None if len(places) == len(rows) else to_device(places, device)
            self._block = key, graph, start_R, outside_RD, final_G, index
        _, graph, start_R, outside_RD, final_G, index = self._block
        tokens_RD = canvas.take(self._canvas.selected(own), columns)
        if open_all:
            tokens_RD = tokens_RD.masked_fill(canvas.behind_prompt(self._canvas.selected(own), columns), MASK)
        fixed_RDC = torch.full((*tokens_RD.shape, graph.classes), NEVER, device=device)
        fixed_RDC.scatter_(2, graph.class_of(tokens_RD)[..., None], 0.0)
        open_RDC = fixed_RDC.masked_fill((tokens_RD == MASK)[..., None], 0.0)
        lattice = Lattice(graph, start_R, final_G, outside_RD, open_RDC.transpose(0, 1).contiguous())
        return _View(own, index, lattice, first, graph)

    def _states(self, rows: list[int], graph: Graph, counts: list[int]) -> torch.Tensor:
        """[R], each row's state after its first `count` tokens, all of which are committed; negative counts: none."""
        canvas, device = self._canvas, self._canvas.tokens.device
        names = [canvas.names[row] for row in rows]
        before, done = [], []
        for name, count in zip(names, counts, strict=True):
            constraint, place, state = self._known.get(name, (None, 0, None))
            fresh = state is None or constraint is not self._constraints[name] or place > max(count, 0)
            before.append(torch.zeros((), dtype=torch.long, device=device) if fresh else state)
            done.append(0 if fresh else place)
        state_R = torch.stack(before)  # type: ignore[arg-type]
        more = [max(count, 0) - place for count, place in zip(counts, done, strict=True)]
        if any(more):
            firsts = canvas.firsts
            begin_R1 = to_device([firsts[row] + place for row, place in zip(rows, done, strict=True)], device)
            offset_N = torch.arange(max(more), device=device)
            tokens_RN = canvas.take(
                self._canvas.selected(rows), (begin_R1[:, None] + offset_N).clamp(max=canvas.width - 1)
            )
            active_RN = (offset_N < to_device(more, device)[:, None]) & (tokens_RN != MASK)
            state_R = graph.advance(state_R, tokens_RN, active_RN)
        if len(self._known) > 2 * len(canvas.rows):
            self._known = {name: self._known[name] for name in canvas.names if name in self._known}
        for number, (name, count) in enumerate(zip(names, counts, strict=True)):
            self._known[name] = self._constraints[name], max(count, 0), state_R[number]
        return state_R


_graphs: dict[tuple[Any, ...], tuple[Sequence[TokenAutomaton], Graph]] = {}  # with the automata, whose ids are keys


def graph_of(automata: Sequence[TokenAutomaton], vocabulary: int, device: torch.device) -> Graph:
    """Graph of these automata. Those of the last batches are cached."""
    key = *map(id, automata), vocabulary, device
    if key not in _graphs:
        while len(_graphs) >= KNOWN_GRAPHS:
            _graphs.pop(next(iter(_graphs)), None)
        _graphs[key] = automata, Graph.of(automata, vocabulary, device)
    return _graphs[key][1]


def _most_probable(lattice: Lattice, logits_RDV: torch.Tensor, tokens_RD: torch.Tensor) -> torch.Tensor:
    """[R, D], the tokens if they are a text, else the most probable text of the product of the columns'
    distributions."""
    graph = lattice.graph
    one_RDC = torch.nn.functional.one_hot(graph.class_of(tokens_RD), graph.classes).bool()
    fits_R1 = lattice.completes(lattice.open.masked_fill(~one_RDC.transpose(0, 1), NEVER))[:, None]
    logs_DRC = _class_weights(logits_RDV, graph).transpose(0, 1)
    path_RD = lattice.best_path(lattice.open + logs_DRC.clamp(min=10 * LEAST_WEIGHT))
    return torch.where(fits_R1 | lattice.outside, tokens_RD, _best_of_class(logits_RDV, graph, path_RD))


def _of_columns(values_DRC: torch.Tensor, place_RN: torch.Tensor) -> torch.Tensor:
    """[R, N, C], the values at columns of the lattice."""
    rows_R1 = torch.arange(len(place_RN), device=place_RN.device)[:, None]
    return values_DRC[place_RN, rows_R1]


def _class_weights(logits_RNV: torch.Tensor, graph: Graph, *, summed: bool = False) -> torch.Tensor:
    """float64 [R, N, C], logarithm of the probability of each class' best token, or of all its tokens."""
    if summed:
        return graph.by_class(logits_RNV.softmax(dim=-1, dtype=torch.float64), summed=True).log()
    best_RNC = graph.by_class(logits_RNV, summed=False).double()
    return best_RNC - logits_RNV.float().logsumexp(dim=-1, keepdim=True)


def _best_of_class(logits_RNV: torch.Tensor, graph: Graph, class_RN: torch.Tensor) -> torch.Tensor:
    """[R, N], the best token of each position's class."""
    return logits_RNV.masked_fill(graph.token_classes[:, None] != class_RN[..., None], NEVER).argmax(dim=-1)


class AutomatonProcessor(LogitsProcessor):
    """Masks the tokens of an autoregressive model that cannot follow the text, or after which it cannot be completed
    within `length` tokens.

    Args:
        constraints: one per row, or None.
        prompt_width: number of tokens before the text, with padding.
    """

    def __init__(self, constraints: Sequence[AutomatonConstraint | None], prompt_width: int, length: int) -> None:
        self._places = [place for place, one in enumerate(constraints) if one is not None]
        self._automata = [one.automaton for one in constraints if one is not None]
        self._rows, self._width, self._length = len(constraints), prompt_width, length
        self._graph: Graph | None = None
        self._state_R = torch.zeros(0)
        self._done = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[B, V] scores of the next token."""
        if len(scores) != self._rows:
            raise SettingError("num_beams", "excludes `constraint`: beams change their order")
        device, count = scores.device, input_ids.shape[1] - self._width
        index = to_device(self._places, device)
        if self._graph is None:
            self._graph = graph_of(self._automata, scores.shape[-1], device)
            self._state_R = torch.zeros(len(index), dtype=torch.long, device=device)
        graph = self._graph
        new_RN = input_ids[index, self._width + self._done : self._width + count]
        self._state_R = graph.advance(self._state_R, new_RN, torch.ones_like(new_RN, dtype=torch.bool))
        self._done = count
        next_RC = graph.next_states(self._state_R)
        left = self._length - count - 1
        fits_RC = (next_RC >= 0) & (graph.distances[graph.first_states[:, None] + next_RC.clamp(min=0)] <= left)
        fits_RC = fits_RC | (self._state_R < 0)[:, None]  # padding after the end
        only_RV = scores[index].masked_fill(~fits_RC.gather(1, graph.token_classes), NEVER)
        return scores.index_copy(0, index, only_RV)


def compiled_constraints(
    constraint: Any, tokenizer: Any, settings: GenerationSettings, count: int
) -> list[AutomatonConstraint | None]:
    """One compiled constraint per row, or None, from the argument `constraint` of `generate`.

    Args:
        constraint: a `Constraint` or a compiled one, or a list of them, in which None is no constraint.
        settings: settings of the call.
        count: number of rows.

    Raises:
        SettingError: the list has another length, `tokenizer` is missing, or a constraint cannot be compiled.
    """
    given = list(constraint) if isinstance(constraint, (list, tuple)) else [constraint] * count
    if len(given) != count:
        raise SettingError("constraint", f"lists {counted(len(given), 'constraint')} for {counted(count, 'row')}")
    for one in given:
        if one is not None and not isinstance(one, (Constraint, AutomatonConstraint)):
            raise SettingError("constraint", f"must be a Constraint, not {one!r}")
    known: dict[Constraint, AutomatonConstraint] = {}
    for one in given:
        if isinstance(one, Constraint) and one not in known:
            if tokenizer is None:
                raise SettingError("constraint", "needs `tokenizer`")
            automaton = compile_constraint(
                one,
                tokenizer,
                vocabulary_size=settings.limits.vocabulary_size,
                mask_token_id=settings.limits.mask_token_id,
                eos_token_ids=settings.eos_token_ids or settings.end_token_ids,
                pad_token_id=settings.pad_token_id,
            )
            known[one] = AutomatonConstraint(automaton)
    return [known[one] if isinstance(one, Constraint) else one for one in given]
