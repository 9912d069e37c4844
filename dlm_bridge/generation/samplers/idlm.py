"""I-DLM's introspective strided decoding (arXiv 2604.11035): one forward pass checks a draft and writes the next one.

    text = prompt + next token;  draft = []
    while new tokens are missing:
        logits of [last token] + draft + [MASK] * (block_length - 1), under causal attention
        p[i] = distribution after the i-th of these tokens;  q[i] = distribution that the draft's token was drawn from
        accept the draft's tokens from left to right, each with probability min(1, p / (verify_alpha q))
        if one is rejected:  commit those before it and a draw from max(0, p - verify_alpha q);  draft = []
        else:  commit the draft and a draw from the next p;  draft = draws from the predictions at the masks

At temperature 0, a token is accepted if it is the best one: the text is the causal model's, token for token. Above 0,
with verify_alpha 1, the text is drawn from that model.

With `mask_tails`, a forward pass also predicts the next draft for every number of tokens that it may accept, so that a
rejection does not cost the next draft (as in TiDAR, arXiv 2511.08923, which has such drafts for its bidirectional
blocks). With N = `block_length`, tail j attends to the text, to j tokens of the draft and to its own earlier masks:

    [last token] + draft of N - 1 tokens + N tails of N - 1 masks;  tail j has the position ids after j draft tokens

Source: Introspective-Diffusion/I-DLM, SGLang's `IDLMBlockN`; diffusers' `IDLMPipeline`. These compare with p before
top-k and top-p, and SGLang drafts best tokens; here both p and q include the filters, so that the text's distribution
is the causal model's under the same filters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch

from dlm_bridge.attention.masks import AttentionPattern, causal_mask
from dlm_bridge.generation.canvas import BlockLayout, to_device
from dlm_bridge.generation.commit_rules import DenoisingRule, SamplerContext
from dlm_bridge.generation.constraints import Constraints
from dlm_bridge.generation.predictors import RowCachePredictor
from dlm_bridge.generation.request import MASK
from dlm_bridge.generation.runtime.graphs import at_places
from dlm_bridge.generation.runtime.runner import CanvasView
from dlm_bridge.generation.runtime.varlen import Packing
from dlm_bridge.generation.samplers import Sampler, SamplerSpec, SpecialTokens, parameter
from dlm_bridge.generation.token_sampling import gather_tokens, invert, propose_tokens, without_token

# The width that rows in different columns attend to is rounded up to a multiple of this, so that shapes recur.
COLUMN_MULTIPLE = 256


@dataclass(frozen=True, kw_only=True)
class IDLMSampler(Sampler):
    """I-DLM's introspective strided decoding."""

    name: ClassVar[str] = "idlm"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("causal",)
    families: ClassVar[tuple[str, ...]] = ("idlm",)
    aliases: ClassVar[Mapping[str, str]] = {"gen_block_size": "block_length"}  # block_size is one less
    infills: ClassVar[bool] = False  # causal attention does not reach later tokens
    takes_commit_rule: ClassVar[bool] = False

    temperature: float = parameter(1.0)
    top_k: int | None = parameter(50)
    top_p: float | None = parameter(0.95)
    block_length: int = parameter(
        3,
        "Maximum tokens that a forward pass commits; by default one more than the model's block size, the number of "
        "masks that it was trained with. Published as `gen_block_size`.",
        minimum=2,
    )
    verify_alpha: float = parameter(
        1.0, "Below 1: accept more of a draft than the causal model's distribution allows.", above=0, maximum=1
    )
    mask_tails: bool = parameter(
        False,
        "Also predict the next draft for every number of accepted tokens: more tokens per forward pass, each of which "
        "runs block_length squared tokens instead of 2 block_length - 1.",
    )

    @classmethod
    def model_parameters(cls, config: Any) -> dict[str, Any]:
        block = getattr(config, "block_size", None)
        return {"block_length": block + 1} if block else {}

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        # Columns that a forward pass may run after the last new token.
        spare = self.block_length**2 - 2 if self.mask_tails else 2 * self.block_length - 2
        return SamplerSpec(
            layout=BlockLayout(None, spare=spare),
            rule=StridedRule(self.block_length - 1, self.verify_alpha, tails=self.mask_tails),
            sampling=self.sampling(),
            predictor=SpeculativePredictor,
        )


@dataclass
class _Drafts:
    """Drafts of M tokens per row."""

    tokens: torch.Tensor  # [A, M]
    probabilities: torch.Tensor | None  # [A, M, V], q; None: greedy decoding
    exist: torch.Tensor  # [A] bool, False: the row has no draft


class StridedRule(DenoisingRule):
    """Rule whose steps check drafts of `drafted` tokens and write the next ones; see `IDLMSampler`."""

    needs_prompt: ClassVar[bool] = True
    keeps_text: ClassVar[bool] = True

    def __init__(self, drafted: int, alpha: float, *, tails: bool = False) -> None:
        self._drafted = drafted
        self._alpha = alpha
        self._tails = tails

    def constrained(self, constraints: Constraints) -> DenoisingRule:
        constraints.refuse_text("a draft has no committed text before its tokens")
        return self

    def begin_block(self, context: SamplerContext, block: slice, rows: list[int]) -> list[int]:
        """Commit the causal model's first token. The block contains all new tokens."""
        canvas, predictor = context.canvas, context.predictor
        assert isinstance(predictor, SpeculativePredictor)
        predictor.begin(rows)
        columns_AN = columns_from(predictor.firsts(rows), 1, canvas.tokens.device) + 1
        logits_ANV = context.constrain(predictor.prompt(rows), rows, columns_AN)
        allowed_ANV = context.follow(rows, predictor.firsts(rows), columns_AN[:, 1:], logits_ANV)
        _, tokens_AN = propose_tokens(allowed_ANV, canvas, rows, columns_AN, context.sampling, context.noise)
        canvas.put(rows, columns_AN, tokens_AN)
        context.report(rows, columns_AN, logits_ANV, final=True)
        return self._go_on(context, block, rows, torch.ones_like(tokens_AN[:, 0]))

    def denoise_step(self, context: SamplerContext, block: slice, rows: list[int]) -> list[int]:
        """One forward pass: check the drafts and write the next ones."""
        canvas, predictor, count = context.canvas, context.predictor, self._drafted
        assert isinstance(predictor, SpeculativePredictor)
        predictor.keep_rows(rows)
        firsts, selected, device = predictor.firsts(rows), context.selected(rows), canvas.tokens.device
        drafts = self._drafts(context, selected)
        masks = count * (count + 1 if self._tails else 1)
        columns_AQ = columns_from(firsts, 1 + count + masks, device)  # from the last committed token on
        last_A1, columns_AN = canvas.take(selected, columns_AQ[:, :1]), columns_AQ[:, 1 : count + 2]
        # Rows without a draft have masks instead, so that all rows have one shape.
        input_AQ = torch.nn.functional.pad(torch.cat([last_A1, drafts.tokens], dim=1), (0, masks), value=MASK)
        logits_at = predictor.run_block(rows, firsts, input_AQ, columns_AQ, tail=count if self._tails else 0)
        logits_ANV = context.constrain(logits_at(slice(0, count + 1)), rows, columns_AN)
        allowed_ANV = context.follow(rows, firsts, drafts.tokens, logits_ANV)
        shaped_ANV, tokens_AN = propose_tokens(allowed_ANV, canvas, rows, columns_AN, context.sampling, context.noise)
        if drafts.probabilities is None:
            # The tokens proposed before the first rejection are the draft's, and the one there corrects it.
            accepted_A = (tokens_AN[:, :count] == drafts.tokens).cumprod(dim=1).sum(dim=1)
        else:
            accepted_A, tokens_AN = self._verify(context, rows, columns_AN, shaped_ANV, tokens_AN, drafts)
        canvas.put(selected, columns_AN, tokens_AN.masked_fill(_places(count + 1, device) > accepted_A[:, None], MASK))
        context.report(rows, columns_AN, logits_ANV, final=True)
        # The masks after that token predict the next draft: those of its tail or, without tails, the masks behind the
        # whole draft, which follow it only if nothing was rejected.
        steps_AM = accepted_A[:, None] + _places(count, device)
        if self._tails:
            exist_A = torch.ones_like(accepted_A, dtype=torch.bool)
            from_AM = accepted_A[:, None] * (count - 1) + steps_AM + (count + 1)
        else:
            exist_A = ~drafts.exist | (accepted_A == count)
            from_AM = (steps_AM + 1).clamp(max=input_AQ.shape[1] - 1)
        columns_AM = columns_AN[:, :1] + 1 + steps_AM
        logits_AMV = context.constrain(logits_at(from_AM), rows, columns_AM)
        shaped_AMV, drafts_AM = propose_tokens(logits_AMV, canvas, rows, columns_AM, context.sampling, context.noise)
        self._keep(context, selected, drafts_AM, shaped_AMV, exist_A)
        return self._go_on(context, block, rows, accepted_A + 1)

    @staticmethod
    def _go_on(context: SamplerContext, block: slice, rows: list[int], committed_A: torch.Tensor) -> list[int]:
        """Count the committed tokens. Returns the rows that have not ended."""
        predictor = context.predictor
        assert isinstance(predictor, SpeculativePredictor)
        values = partial(torch.mul, committed_A)
        counts = context.canvas.read_unfinished(context.selected(rows), block, context.read, values)
        return predictor.advance(rows, counts)

    def _drafts(self, context: SamplerContext, rows: list[int] | None) -> _Drafts:
        """Drafts of the rows' last step."""
        memory, count = context.canvas.memory, self._drafted
        which = slice(None) if rows is None else context.canvas.index(rows)
        exist_A = memory.tensor("drafted", dtype=torch.bool)[which]
        tokens_AM = memory.tensor("drafts", count)[which].masked_fill(~exist_A[:, None], MASK)
        if not context.sampling.draws:
            return _Drafts(tokens_AM, None, exist_A)
        q_BMV = memory.tensor("q", count, context.vocabulary_size, dtype=torch.float64)
        return _Drafts(tokens_AM, q_BMV[which], exist_A)

    def _keep(
        self,
        context: SamplerContext,
        rows: list[int] | None,
        tokens_AM: torch.Tensor,
        shaped_AMV: torch.Tensor,
        exist_A: torch.Tensor,
    ) -> None:
        """Store the rows' drafts, and the distributions that they were drawn from."""
        memory, count = context.canvas.memory, self._drafted
        which = slice(None) if rows is None else context.canvas.index(rows)
        memory.tensor("drafts", count)[which] = tokens_AM
        memory.tensor("drafted", dtype=torch.bool)[which] = exist_A
        if context.sampling.draws:
            q_BMV = memory.tensor("q", count, context.vocabulary_size, dtype=torch.float64)
            q_BMV[which] = self._probabilities(context, shaped_AMV)

    def _verify(
        self,
        context: SamplerContext,
        rows: list[int],
        columns_AN: torch.Tensor,
        shaped_ANV: torch.Tensor,
        drawn_AN: torch.Tensor,
        drafts: _Drafts,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[A], the number of accepted draft tokens, and [A, N], these tokens and the one after them: the correction of
        a rejected token, else a new draw."""
        count = self._drafted
        assert drafts.probabilities is not None
        places_AM = context.canvas.places(rows, columns_AN[:, :count])
        p_AMV = self._probabilities(context, shaped_ANV[:, :count])
        q_AMV = self._alpha * drafts.probabilities
        tokens_AM = drafts.tokens.clamp(min=0)  # rows without a draft accept nothing
        bound_AM = context.noise.uniform(rows, places_AM) * gather_tokens(q_AMV, tokens_AM)
        accepted_AM = bound_AM < gather_tokens(p_AMV, tokens_AM)
        rest_AMV = (p_AMV - q_AMV).clamp(min=0)
        rest_AMV = torch.where(rest_AMV.sum(dim=-1, keepdim=True) > 0, rest_AMV, p_AMV)
        corrected_AM = invert(rest_AMV, context.noise.uniform(rows, places_AM))
        accepted_A = accepted_AM.cumprod(dim=1).sum(dim=1) * drafts.exist
        # Without a draft, the first token is a new draw; there, as behind an accepted draft, nothing is corrected.
        rejected_A1 = (drafts.exist & (accepted_A < count))[:, None]
        next_A1 = drawn_AN.gather(1, accepted_A[:, None])
        next_A1 = torch.where(rejected_A1, corrected_AM.gather(1, accepted_A[:, None].clamp(max=count - 1)), next_A1)
        return accepted_A, torch.cat([drafts.tokens, next_A1], dim=1).scatter(1, accepted_A[:, None], next_A1)

    @staticmethod
    def _probabilities(context: SamplerContext, shaped_ANV: torch.Tensor) -> torch.Tensor:
        """float64 [A, N, V], zero at the token that is never drawn."""
        return without_token(shaped_ANV, context.canvas.excluded_token_id, torch.float64).softmax(dim=-1)


class SpeculativePredictor(RowCachePredictor):
    """Causal attention; in a draft, a row's block attends to all of itself.

    Each row has its own block, which begins at the column of its last committed token (`firsts`). With the cache
    "block", keys and values of committed tokens are cached as the check computed them. Those of rejected tokens and
    drafts follow, and are overwritten by the next block before anything attends to them.
    """

    def begin(self, rows: list[int]) -> None:
        """Set the number of new tokens of these rows to zero."""
        for row in rows:
            self.canvas.memory.values("new tokens")[row] = 0

    def firsts(self, rows: list[int]) -> list[int]:
        """The column of each row's last committed token."""
        written = self.canvas.memory.values("new tokens")
        return [self.canvas.starts[row] - 1 + written[row] for row in rows]

    def advance(self, rows: list[int], counts: list[int]) -> list[int]:
        """Add committed tokens to each row's count. Returns the rows with at least one."""
        written = self.canvas.memory.values("new tokens")
        for row, count in zip(rows, counts, strict=True):
            written[row] += count
        return [row for row, count in zip(rows, counts, strict=True) if count]

    def prompt(self, rows: list[int]) -> torch.Tensor:
        """[A, 1, V], the causal model's logits for each row's first new token. With a cache, `rows` are the first
        rows."""
        view = self.prompt_view(rows)
        last_A1 = (self.canvas.first_new(rows) - self.canvas.origin(rows))[:, None] - 1
        if not self.cache.stores:
            return self._runner.logits_at(view, last_A1)
        return self._runner.head_at(self._runner.hidden(view, once=True), last_A1)

    def check(self, rows: list[int], firsts: list[int], tokens_AN: torch.Tensor) -> torch.Tensor:
        """[A, N, V], the causal model's logits after each token of the rows' blocks."""
        return self._block_logits(rows, firsts, tokens_AN, draft=False)

    def run_block(
        self,
        rows: list[int],
        firsts: list[int],
        tokens_AQ: torch.Tensor,
        own_AQ: torch.Tensor,
        *,
        tail: int = 0,
    ) -> Callable[[slice | torch.Tensor], torch.Tensor]:
        """Run the rows' blocks once.

        Args:
            own_AQ: the columns of the blocks, from `firsts` on.
            tail: size of the tails at the end of a block, see `IDLMSampler`; 0: all tokens follow one another.

        Returns:
            Function of a slice of places in the blocks, or of [A, N] places of each row, that returns the logits
            [A, N, V] after them.
        """
        if tail:
            view = self._tail_view(rows, firsts, tokens_AQ, own_AQ, tail)
        elif self.cache.stores:
            view = self._cached_view(rows, firsts, tokens_AQ, own_AQ, draft=False)
        else:
            view = self._uncached_view(rows, firsts, tokens_AQ, own_AQ, draft=False)
        if not self.cache.stores:
            logits_AQV = self._runner.logits_at(view, own_AQ)
            return lambda places: logits_AQV[:, places] if isinstance(places, slice) else at_places(logits_AQV, places)
        runner, hidden_AQH = self._runner, self._runner.hidden(view)

        def logits_at(places: slice | torch.Tensor) -> torch.Tensor:
            if isinstance(places, slice):
                return runner.head(hidden_AQH, places)
            return runner.head_at(hidden_AQH, places)

        return logits_at

    def _block_logits(
        self, rows: list[int], firsts: list[int], tokens_AN: torch.Tensor, *, draft: bool
    ) -> torch.Tensor:
        own_AN = columns_from(firsts, tokens_AN.shape[1], tokens_AN.device)
        if not self.cache.stores:
            return self._runner.logits_at(self._uncached_view(rows, firsts, tokens_AN, own_AN, draft), own_AN)
        view = self._cached_view(rows, firsts, tokens_AN, own_AN, draft)
        return self._runner.head(self._runner.hidden(view), slice(None))

    def _uncached_view(
        self, rows: list[int], firsts: list[int], tokens_AN: torch.Tensor, own_AN: torch.Tensor, draft: bool
    ) -> CanvasView:
        stop = max(firsts) + tokens_AN.shape[1]
        positions_AS, real_AS = self._positions(rows, stop)
        tokens_AS = self.canvas.take(rows, slice(0, stop)).scatter(1, own_AN, tokens_AN)
        mask = causal_mask(real_AS)
        if draft:
            inside_AS = torch.zeros_like(real_AS).scatter(1, own_AN, True)
            mask = mask | (inside_AS[:, None, :, None] & inside_AS[:, None, None, :])
            return CanvasView(tokens_AS, mask, positions_AS, 0, stop)
        needed_AS = real_AS & (torch.arange(stop, device=own_AN.device) <= own_AN[:, -1:])
        ends = [first + tokens_AN.shape[1] for first in firsts]
        lengths = tuple(end - self.canvas.origins[row] for row, end in zip(rows, ends, strict=True))
        packing = Packing(needed_AS, lengths, causal=True)
        return CanvasView(tokens_AS, mask, positions_AS, 0, stop, packing=packing)

    def _cached_view(
        self, rows: list[int], firsts: list[int], tokens_AN: torch.Tensor, own_AN: torch.Tensor, draft: bool
    ) -> CanvasView:
        width, block = tokens_AN.shape[1], None if draft else 1
        before = [first - self.canvas.origins[row] for row, first in zip(rows, firsts, strict=True)]
        stop = max(before) + width
        if min(before) == max(before):  # one range of columns: attention needs no mask
            return CanvasView(tokens_AN, None, None, before[0], stop, block=block)
        stop = min(-(-stop // COLUMN_MULTIPLE) * COLUMN_MULTIPLE, self.canvas.cache_width)
        own_AN = own_AN - self._origins(rows)
        attended_AS = _places(stop, own_AN.device) <= own_AN[:, -1:]
        return CanvasView(tokens_AN, attended_AS, own_AN, end=stop, columns=own_AN, block=block)

    def _origins(self, rows: list[int]) -> torch.Tensor:
        """[A, 1], the columns of the rows' first tokens."""
        return self.canvas.origin(self.canvas.selected(rows))[:, None]

    def _tail_view(
        self, rows: list[int], firsts: list[int], tokens_AQ: torch.Tensor, own_AQ: torch.Tensor, tail: int
    ) -> CanvasView:
        layout, width = TailLayout.of(tail, own_AQ.device), own_AQ.shape[1]
        if self.cache.stores:
            before = [first - self.canvas.origins[row] for row, first in zip(rows, firsts, strict=True)]
            stop = -(-(max(before) + width) // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
            cached_AQ = own_AQ - self._origins(rows)
            mask = layout.mask(
                cached_AQ, torch.ones(1, min(stop, self.canvas.cache_width), device=own_AQ.device).bool()
            )
            positions_AQ = cached_AQ[:, :1] + layout.offsets
            return CanvasView(tokens_AQ, mask, positions_AQ, end=mask.shape[-1], columns=cached_AQ)
        stop = max(firsts) + width
        positions_AS, real_AS = self._positions(rows, stop)
        mask = causal_mask(real_AS)
        rows_of_mask = own_AQ[:, None, :, None].expand(-1, 1, -1, stop)
        mask = mask.scatter(2, rows_of_mask, layout.mask(own_AQ, real_AS))
        before_A1 = positions_AS.gather(1, own_AQ[:, :1])
        tokens_AS = self.canvas.take(rows, slice(0, stop)).scatter(1, own_AQ, tokens_AQ)
        positions_AS = positions_AS.scatter(1, own_AQ, before_A1 + layout.offsets)
        return CanvasView(tokens_AS, mask, positions_AS, 0, stop)


@dataclass(frozen=True)
class TailLayout:
    """Attention and positions in a block of a last token, a draft of M tokens, and M + 1 tails of M masks.

    Tails are behind the draft in the canvas and in the cache, where the next block overwrites them.
    """

    offsets: torch.Tensor  # [Q], positions counted from the last token
    attends: torch.Tensor  # [Q, Q] bool, query by key

    @classmethod
    @lru_cache
    def of(cls, size: int, device: torch.device) -> TailLayout:
        index = torch.arange(size + 1, device=device)
        accepted = torch.cat([index, index.repeat_interleave(size)])  # draft tokens that a place attends to
        masks = torch.cat([torch.zeros_like(index), (index[:size] + 1).repeat(size + 1)])  # place in its tail, from 1
        text = masks == 0
        same_tail = (accepted[:, None] == accepted) & ~text & (masks <= masks[:, None])
        return cls(accepted + masks, (text & (accepted <= accepted[:, None])) | (same_tail & ~text[:, None]))

    def mask(self, own_AQ: torch.Tensor, attended_AS: torch.Tensor) -> torch.Tensor:
        """[A, 1, Q, S], attention of blocks in these columns to `attended_AS` before them, and to themselves."""
        width = own_AQ.shape[1]
        place_AS = torch.arange(attended_AS.shape[1], device=own_AQ.device) - own_AQ[:, :1]
        inside_AQS = self.attends[:, place_AS.clamp(0, width - 1)].movedim(0, 1) & (place_AS < width)[:, None]
        return torch.where(place_AS[:, None] < 0, attended_AS[:, None], inside_AQS)[:, None]


def columns_from(firsts: list[int], width: int, device: torch.device) -> torch.Tensor:
    """[A, width] columns of the canvas, starting at each row's entry in `firsts`."""
    return to_device(firsts, device)[:, None] + _places(width, device)


@lru_cache
def _places(width: int, device: torch.device) -> torch.Tensor:
    """[width], from 0 on. Made once, since each small kernel delays a step of few rows."""
    return torch.arange(width, device=device)
