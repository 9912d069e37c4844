"""The published samplers in plain, slow steps, greedy, for one row without padding: what `generate` has to equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Logits = Callable[[list[int]], torch.Tensor]  # tokens -> [S, V]


def bidirectional(model: Any) -> Logits:
    """As the model computes them; with a shift, logits[i - 1] are moved to token i, the first one stays."""

    def logits(tokens: list[int]) -> torch.Tensor:
        plain = model(torch.tensor([tokens])).logits[0]
        return torch.cat([plain[:1], plain[:-1]]) if model.family.shift else plain

    return logits


def block_causal(model: Any, block: int) -> Logits:
    def logits(tokens: list[int]) -> torch.Tensor:
        index = torch.arange(len(tokens)) // block
        plain = model(torch.tensor([tokens]), (index[None] <= index[:, None])[None, None]).logits[0]
        return torch.cat([plain[:1], plain[:-1]]) if model.family.shift else plain

    return logits


def shaped(logits: torch.Tensor, top_k: int | None = None, top_p: float | None = None) -> torch.Tensor:
    """One position's probabilities after top-p and then top-k."""
    probabilities = logits.softmax(-1)
    if top_p is not None:
        total, keep = 0.0, []
        for token in probabilities.argsort(descending=True).tolist():
            if total <= top_p:
                keep.append(token)
            total += float(probabilities[token])
        probabilities = torch.zeros_like(probabilities).index_copy(0, torch.tensor(keep), probabilities[keep])
    if top_k:
        probabilities = probabilities.where(probabilities >= probabilities.sort().values[-top_k], 0.0)
    return probabilities / probabilities.sum()


def dream(
    logits: Logits, prompt: list[int], gen: int, mask: int, *, steps: int, alg: str, top_k: Any = None,
    top_p: Any = None, eps: float = 1e-3,
) -> list[int]:  # fmt: skip
    row = prompt + [mask] * gen
    level = torch.linspace(1, eps, steps + 1)
    for step in range(steps):
        open_ = [i for i, token in enumerate(row) if token == mask]
        share = int(torch.tensor(float(len(open_))) * (1 - level[step + 1] / level[step]))
        if step == steps - 1:
            share = len(open_)
        found = logits(row)
        probabilities = {i: shaped(found[i], top_k, top_p) for i in open_}
        score = {
            "maskgit_plus": lambda p: float(p.max()),
            "topk_margin": lambda p: float(p.sort().values[-1] - p.sort().values[-2]),
            "entropy": lambda p: float((p * (p + 1e-10).log()).sum()),
        }[alg]
        for i in sorted(open_, key=lambda i: -score(probabilities[i]))[:share]:
            row[i] = int(probabilities[i].argmax())
    return row


def dream_budget(logits: Logits, prompt: list[int], gen: int, mask: int, *, steps: int, threshold: float) -> list[int]:
    row, held_back, step = prompt + [mask] * gen, 0, 0
    while mask in row:
        budget = (gen // steps if step < steps else 0) + held_back
        held_back = 0
        probabilities = logits(row).softmax(-1)
        open_ = sorted((i for i, t in enumerate(row) if t == mask), key=lambda i: -float(probabilities[i].max()))
        for rank, i in enumerate(open_[:budget]):
            if rank == 0 or float(probabilities[i].max()) >= threshold:
                row[i] = int(probabilities[i].argmax())
            else:
                held_back += 1
        step += 1
    return row


def dreamon(
    logits: Logits, row: list[int], most: int, mask: int, *, alg: str, expand: int, delete: int,
    broadcast: bool = False, budget: int | None = None, count: int = 1,
) -> tuple[list[int], int]:  # fmt: skip
    """The text, of which at most `most` tokens take the place of the masks in `row`, and the number of forwards."""
    row, forwards = list(row), 0
    longest = len(row) - row.count(mask) + most
    budget = 2 * (longest - row.index(mask)) if budget is None else budget
    while mask in row:
        found = logits(row).clone()
        forwards += 1
        room = min(budget, longest - len(row))
        if not room:
            found[:, expand] = -torch.inf
        open_ = [i for i, token in enumerate(row) if token == mask]
        probabilities = {i: found[i].softmax(-1) for i in open_}
        score = {
            "maskgit_plus": lambda p: float(p.max()),
            "topk_margin": lambda p: float(p.sort().values[-1] - p.sort().values[-2]),
            "entropy": lambda p: float((p * (p + 1e-10).log()).sum()),
        }[alg]
        chosen = sorted(open_, key=lambda i: -score(probabilities[i]))[:count]
        result = {i: [int(probabilities[i].argmax())] for i in chosen}
        gone = [i for i in chosen if result[i] == [delete]]
        if broadcast and gone:
            gone = [i for i in open_ if i >= min(gone)]
        result |= {i: [] for i in gone}
        for i in sorted(chosen):
            if result[i] == [expand]:
                result[i] = [mask] * (1 + (room > 0))
                budget, room = budget - (room > 0), max(room - 1, 0)
        row = [token for i, old in enumerate(row) for token in result.get(i, [old])]
    return row, forwards


def fast_dllm(
    logits: Logits, prompt: list[int], gen: int, mask: int, *, block: int, threshold: Any = None, factor: Any = None,
    factor_exact: bool = False,
) -> list[int]:  # fmt: skip
    row = prompt + [mask] * gen
    for begin in range(len(prompt), len(row), block):
        while mask in row[begin : begin + block]:
            probabilities = logits(row).softmax(-1)
            open_ = [i for i in range(begin, begin + block) if row[i] == mask]
            open_.sort(key=lambda i: -float(probabilities[i].max()))
            for rank, i in enumerate(open_, start=1):
                bound = threshold if threshold is not None else 1 - factor / (rank + 1)
                published = factor_exact and rank == len(open_)  # the last one is never examined
                if rank > 1 and float(probabilities[i].max()) < bound and not published:
                    break
                row[i] = int(probabilities[i].argmax())
    return row


def dllm(
    model: Any, prompt: list[int], gen: int, mask: int, *, block: int, steps: int, cfg_scale: float, causal: bool
) -> list[int]:
    """dLLM's MDLM, and with `causal` its BD3LM: blocks are counted from the prompt's end, in both directions."""

    def logits(tokens: list[int]) -> torch.Tensor:
        if not causal:
            return model(torch.tensor([tokens])).logits[0]
        index = (torch.arange(len(tokens)) - len(prompt)) // block
        return model(torch.tensor([tokens]), (index[None] <= index[:, None])[None, None]).logits[0]

    row, blocks = prompt + [mask] * gen, -(-gen // block)
    for begin in range(len(prompt), len(row), block):
        end = min(begin + block, len(row))
        count = -(-steps // blocks)
        for step in range(count, 0, -1):
            open_ = [i for i in range(begin, end) if row[i] == mask]
            now, then = (1 - (1 - torch.tensor(k / count)) for k in (step, step - 1))
            share = min(len(open_), round(len(open_) * (1 - float(then / now))))
            if not share:
                continue
            canvas = row[:end] if causal else row
            found = logits(canvas)
            if cfg_scale:
                unconditional = logits([mask] * len(prompt) + canvas[len(prompt) :])
                found = unconditional + (cfg_scale + 1) * (found - unconditional)
            probabilities = found.softmax(-1)
            for i in sorted(open_, key=lambda i: -float(probabilities[i].max()))[:share]:
                row[i] = int(probabilities[i].argmax())
    return row


def sdar(
    logits: Logits, prompt: list[int], gen: int, mask: int, *, block: int, steps: int, strategy: str,
    threshold: float = 0.85, bound: float = 0.35, top_k: Any = None,
) -> list[int]:  # fmt: skip
    """Also LLaDA2.0's, as strategy "low_confidence_dynamic"."""
    row = prompt + [mask] * (-(len(prompt) + gen) % block + gen)
    for begin in range(len(prompt) // block * block, len(row), block):
        for step in range(steps):
            open_ = [i for i in range(begin, begin + block) if row[i] == mask]
            if not open_:
                break
            num_transfer = block // steps + (step < block % steps)
            found = logits(row[: begin + block])
            probabilities = {i: shaped(found[i], top_k) for i in open_}
            best = sorted(open_, key=lambda i: -float(probabilities[i].max()))
            sure = [i for i in best if float(probabilities[i].max()) > threshold]
            if strategy == "sequential":
                chosen = open_[:num_transfer]
            elif strategy == "low_confidence_static":
                chosen = best[:num_transfer]
            elif strategy == "low_confidence_dynamic":
                chosen = sure if len(sure) >= min(num_transfer, len(open_)) else best[:num_transfer]
            else:
                entropy = {i: -float((p * p.clamp(min=1e-12).log()).sum()) for i, p in probabilities.items()}
                chosen, total = [], 0.0
                for i in sorted(open_, key=lambda i: entropy[i]):
                    total += entropy[i]
                    if not chosen or total < bound or step == steps - 1:
                        chosen.append(i)
            for i in chosen:
                row[i] = int(probabilities[i].argmax())
    return row[: len(prompt) + gen]


def llada21(
    logits: Logits, prompt: list[int], gen: int, mask: int, *, block: int, threshold: float, editing: float,
    post: int, least: int,
) -> list[int]:  # fmt: skip
    row = prompt + [mask] * (-(len(prompt) + gen) % block + gen)
    for begin in range(len(prompt) // block * block, len(row), block):
        columns, post_steps = range(begin, begin + block), 0
        while True:
            open_ = [i for i in columns if row[i] == mask]
            post_steps += not open_
            if post_steps > post:
                break
            probabilities = logits(row[: begin + block]).softmax(-1)
            best = sorted(open_, key=lambda i: -float(probabilities[i].max()))
            sure = [i for i in open_ if float(probabilities[i].max()) > threshold]
            edits = [
                i
                for i in columns
                if i >= len(prompt) and i not in open_ and int(probabilities[i].argmax()) != row[i]
                and float(probabilities[i].max()) > editing
            ]  # fmt: skip
            for i in (sure if len(sure) >= least else best[:least]) + edits:
                row[i] = int(probabilities[i].argmax())
            if not open_ and not edits:
                break
    return row[: len(prompt) + gen]


def llada22(
    logits: Logits, prompt: list[int], gen: int, mask: int, *, block: int, steps: int, threshold: float,
    editing: float, post: int, most: int, delete: int, split: int, repeats: list[int] | None = None,
) -> list[int]:  # fmt: skip
    """The mask token has no probability. `repeats` gets an entry for each result that was there before."""
    row = prompt + [mask] * (-(len(prompt) + gen) % block + gen)
    for begin in range(len(prompt) // block * block, len(row), block):
        given = max(0, len(prompt) - begin)  # of the block's tokens
        now = row[begin : begin + block]
        original = [place >= given for place in range(block)]
        schedule = [sum(original) // steps + (step < sum(original) % steps) for step in range(steps)]
        seen: list[list[int]] = []
        post_steps = 0
        for step in range(most):
            raw = logits(row[:begin] + now)[begin:].clone()
            raw[:, mask] = -torch.inf
            sure, ranked = raw.softmax(-1).max(-1).values.tolist(), raw.argsort(-1, descending=True).tolist()
            open_ = [i for i in range(given, block) if now[i] == mask]
            first = [i for i in open_ if original[i]]
            post_steps = 0 if first else post_steps + 1
            filled = open_
            if step < steps:
                least = schedule[step] + len(open_) - len(first)
                filled = [i for i in open_ if sure[i] > threshold]
                if len(filled) < least:
                    filled = sorted(open_, key=lambda i: -sure[i])[:least]
            last = post_steps >= post if post else bool(first) and set(first) <= set(filled)
            if last := last or step == most - 1:
                filled = open_
            edits = [i for i in range(given, block) if i not in open_ and sure[i] > editing and ranked[i][0] != now[i]]
            after = list(now)
            for i in filled + edits:
                after[i] = next(t for t in ranked[i] if not last or t not in (delete, split))
            for _ in range(5):
                changed = [i for i in range(block) if after[i] != now[i]]
                if last or after not in seen or not changed:
                    break
                if repeats is not None:
                    repeats.append(step)
                place = min(changed, key=lambda i: sure[i])
                after[place] = next(t for t in ranked[place] if t != after[place])
            seen.append(list(after))
            tokens, tracked = list(after[:given]), [False] * given
            for i in range(given, block):
                if after[i] == split:
                    tokens += [mask, now[i]]
                    tracked += [False, original[i]]
                elif after[i] != delete:
                    tokens.append(after[i])
                    tracked.append(original[i])
            tokens, original = (tokens + [mask] * block)[:block], (tracked + [False] * block)[:block]
            stable = tokens == now and mask not in tokens[given:]
            now = tokens
            if last or stable:
                break
        row[begin : begin + block] = now
    return row[: len(prompt) + gen]


def fast_dllm_v2(
    logits: Logits, prompt: list[int], gen: int, mask: int, *, block: int, small: int, threshold: float
) -> list[int]:
    """`logits` are shifted, so that a block's first token is predicted by the token before it."""
    row = prompt + [mask] * (-(len(prompt) + gen) % block + gen)
    for begin in range(len(prompt) // block * block, len(row), block):
        if begin and row[begin] == mask:
            row[begin] = int(logits(row[: begin + 1])[begin].argmax())
        for first in range(begin, begin + block, small):
            while mask in row[first : first + small]:
                probabilities = logits(row[: begin + block]).softmax(-1)
                open_ = [i for i in range(first, first + small) if row[i] == mask]
                best = max(open_, key=lambda i: float(probabilities[i].max()))
                for i in open_:
                    if i == best or float(probabilities[i].max()) > threshold:
                        row[i] = int(probabilities[i].argmax())
    return row[: len(prompt) + gen]


def nemotron(model: Any, prompt: list[int], gen: int, mask: int, *, block: int, threshold: float | None) -> list[int]:
    def logits(tokens: list[int], begin: int) -> torch.Tensor:
        index = torch.arange(len(tokens))
        seen = (index[None] <= index[:, None]) | (index[:, None] >= begin)
        return model(torch.tensor([tokens]), seen[None, None]).logits[0]

    row = list(prompt)
    for begin in range(len(prompt), len(prompt) + gen, block):
        seed = [int(logits(row, begin)[-1].argmax())] if begin else [mask]
        row += seed + [mask] * (block - 1)
        while mask in row:
            probabilities = logits(row, begin).softmax(-1)
            open_ = [i for i, token in enumerate(row) if token == mask]
            best = max(open_, key=lambda i: float(probabilities[i].max()))
            for i in open_:
                if i == best or (threshold is not None and float(probabilities[i].max()) >= threshold):
                    row[i] = int(probabilities[i].argmax())
    return row


def linear_spec(
    draft: Logits, causal: Logits, prompt: list[int], gen: int, mask: int, *, block: int, threshold: float = 0.0
) -> tuple[list[int], int, list[int]]:
    """The row, how many forwards it took, and how many tokens each check committed, those past the end included.

    `draft` gives the logits of a row whose last `block` tokens see each other, `causal` those of a causal model.
    """

    def best(logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(1, torch.tensor([mask]), -torch.inf).argmax(-1)

    row, forwards = [*prompt, int(best(causal(prompt))[-1])], 1
    committed = []
    while len(row) < len(prompt) + gen:
        last = len(row) - 1
        guess = row + [mask] * (block - 1)
        while mask in guess:
            logits, forwards = draft(guess), forwards + 1
            tokens = best(logits)
            sure = logits.softmax(-1).gather(1, tokens[:, None])[:, 0].tolist()
            open_ = [i for i, token in enumerate(guess) if token == mask]
            surest = max(open_, key=lambda i: sure[i])
            for i in open_:
                if i == surest or sure[i] >= threshold:
                    guess[i] = int(tokens[i])
        forwards += 1
        for i, token in enumerate(best(causal(guess))[last:].tolist(), last + 1):
            row.append(token)
            if i == len(guess) or guess[i] != token:
                break
        committed.append(len(row) - 1 - last)
    return row[: len(prompt) + gen], forwards, committed


def rnd1(
    logits: Logits, prompt: list[int], gen: int, mask: int, *, steps: int, temperature: float, pad: int,
    gamma: float | None = None,
) -> list[int]:  # fmt: skip
    """The last new token is padding from the start."""
    row = prompt + [mask] * (gen - 1) + [pad]
    for step in range(steps):
        open_ = [i for i, token in enumerate(row) if token == mask]
        if not open_:
            break
        probabilities = (logits(row) / temperature).softmax(-1)
        entropy = torch.special.entr(probabilities).sum(-1).tolist()
        if gamma is None:
            keep = int((gen - 1) * (steps - 1 - step) / steps + 1e-6)
            chosen = sorted(open_, key=lambda i: entropy[i])[: len(open_) - keep]
        else:
            chosen, total, largest = [], 0.0, 0.0
            for i in sorted(open_, key=lambda i: -float(probabilities[i].max())):
                total, largest = total + entropy[i], max(largest, entropy[i])
                if total - largest <= gamma or step == steps - 1:
                    chosen.append(i)
        for i in chosen:
            row[i] = int(probabilities[i].argmax())
    return row


def idlm(
    model: Any, row: list[int], gen: int, mask: int, *, count: int, tails: bool = False
) -> tuple[list[int], int]:
    """The row, of whose new tokens each forward drafts `count` and checks those of the one before, and the number of
    forwards. With `tails`, one forward also has the drafts behind each prefix of the draft, here by another one."""

    def best(tokens: list[int]) -> list[int]:
        order = torch.arange(len(tokens))
        logits = model(torch.tensor([tokens]), (order[None] <= order[:, None])[None, None]).logits[0].clone()
        logits[:, mask] = -torch.inf
        return logits.argmax(-1).tolist()

    prompt, forwards, draft = len(row), 1, []
    row = [*row, best(row)[-1]]
    while len(row) < prompt + gen:
        said = best(row + draft + [mask] * count)[len(row) - 1 :]
        forwards += 1
        right = next((place for place, token in enumerate(draft) if said[place] != token), len(draft))
        after = best(row + draft[:right] + [mask] * count)[-count:]
        row = [*row, *draft[:right], said[right]]
        draft = after if tails or right == len(draft) else []
    return row[: prompt + gen], forwards


def wedlm(
    model: Any, prompt: list[int], gen: int, mask: int, *, window: int, threshold: float | None, factor: float
) -> list[int]:
    row = prompt + [mask] * (gen + window)
    while mask in row[: len(prompt) + gen]:
        first = row.index(mask)
        known = [i for i, token in enumerate(row) if token != mask]
        open_ = [i for i in range(first, first + window) if row[i] == mask]
        order = known + open_
        seen = torch.ones(len(order), len(order)).tril().bool()[None, None]
        tokens, positions = torch.tensor([[row[i] for i in order]]), torch.tensor([order])
        logits = model(tokens, seen, positions).logits[0, len(known) :]
        entropy = torch.special.entr(logits.softmax(-1)).sum(-1).tolist()
        score = {i: value + factor * (i - first) for i, value in zip(open_, entropy, strict=True)}
        chosen = [i for i in open_ if threshold is not None and score[i] < threshold]
        for i in chosen or [min(open_, key=lambda i: score[i])]:
            row[i] = int(logits[open_.index(i)].argmax())
    return row[: len(prompt) + gen]
