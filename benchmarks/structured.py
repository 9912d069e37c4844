"""Structured output: which JSON schemas are accepted, what compiling them costs, and whether texts are valid.

    python benchmarks/structured.py SCHEMAS --tokenizer CHECKPOINT
    python benchmarks/structured.py SCHEMAS --tokenizer CHECKPOINT --texts --first-tokens 1024 --rows rows.jsonl

SCHEMAS is a folder with JSON schemas in files *.json, at any depth, such as data/ of a checkout of
guidance-ai/jsonschemabench. A seeded sample of them is compiled. Texts are decoded, parsed and validated with the
package `jsonschema` (with its formats): random walks through each token automaton and, with --texts, the texts of
seven samplers in up to four lengths: D, the fewest tokens of a text, one more, 64 and 256. Their model has random
weights, so that its proposals are almost never valid by themselves. Schemas are sampled in batches of 16, at
temperatures 1 and 0 in turn.

Each schema is a row of JSON in the file --rows. Schemas that have a row are not run again, so that the command can be
stopped at any time. Prints a line for each schema
that is refused or has an invalid text, and at the end the shares, the median and the 99th percentile of the CPU
seconds, states and classes of tokens, and a table of the texts.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoTokenizer

from dlm_bridge.attention.masks import AttentionPattern
from dlm_bridge.errors import RowError, SettingError
from dlm_bridge.generation.engine import SamplingEngine
from dlm_bridge.generation.request import Ended, Request
from dlm_bridge.models.llada import SPEC
from dlm_bridge.structured import compile
from dlm_bridge.structured.automaton import TokenAutomaton
from dlm_bridge.structured.constraint import Constraint
from dlm_bridge.structured.decoding import AutomatonConstraint

LENGTHS = ("D", "D+1", "64", "256")  # D: the fewest tokens of a text
# Attention pattern, shift and settings of each sampler. Thresholds are such that random weights commit several tokens
# per step.
SAMPLERS: dict[str, tuple[AttentionPattern, bool, dict[str, Any]]] = {
    "llada": ("bidirectional", False, {"block_length": 32, "threshold": 0.02}),
    "sdar": ("block_causal", False, {"block_length": 16, "threshold": 0.02, "steps": 4}),
    "llada2": ("block_causal", False, {"block_length": 32, "threshold": 0.02, "steps": 4}),
    "wino": ("bidirectional", False, {"block_length": 32, "threshold": 0.02, "threshold_back": 0.01}),
    "dream": ("bidirectional", True, {"steps": 3}),
    "uniform": ("bidirectional", False, {"steps": 2}),
    "idlm": ("causal", True, {"block_length": 4, "top_k": None, "top_p": None}),
}
VALID, TOO_SHORT = "valid", "refused"
BATCH = 16  # schemas whose texts are sampled together


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schemas", type=Path)
    parser.add_argument("--tokenizer", required=True, help="folder or name of a model")
    parser.add_argument(
        "--first-tokens", type=int, help="only the tokenizer's first tokens, of a byte-level tokenizer"
    )
    parser.add_argument("--sample", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--walks", type=int, default=5, help="random texts of each schema")
    parser.add_argument("--tokens", type=int, default=256, help="tokens after which a walk takes the shortest way out")
    parser.add_argument("--seconds", type=float, default=60, help="limit of one compilation")
    parser.add_argument("--texts", action="store_true", help="texts of the samplers, too")
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=LENGTHS)
    parser.add_argument("--most-edges", type=int, help="no texts of automata with more transitions than this")
    parser.add_argument("--rows", type=Path, help="file of the rows, continued if it exists")
    options = parser.parse_args(arguments)
    files = sorted(options.schemas.rglob("*.json"))
    files = random.Random(options.seed).sample(files, min(options.sample, len(files)))
    tokenizer = first_tokens(AutoTokenizer.from_pretrained(options.tokenizer), options.first_tokens)
    compile.cached, compile.store = lambda key: None, lambda key, automaton: None  # every one is compiled
    names = {str(file.relative_to(options.schemas)): file for file in files}
    rows = read_rows(options.rows)
    missing = [name for name in names if name not in rows]
    for number, start in enumerate(range(0, len(missing), BATCH)):
        batch = [Measured(name, json.loads(names[name].read_text())) for name in missing[start : start + BATCH]]
        for one in batch:
            one.compile(tokenizer, options)
        if options.texts:
            sample_texts(
                [one for one in batch if one.samples(options)], tokenizer, options.lengths, float(1 - number % 2)
            )
        for one in batch:
            rows[one.name] = one.row
            if options.rows is not None:
                with options.rows.open("a") as output:
                    print(json.dumps(one.row), file=output, flush=True)
            for problem in problems(one.row):
                print(f"{one.name}: {problem}", flush=True)
    print_summary([rows[name] for name in names])


def first_tokens(tokenizer: Any, count: int | None) -> Any:
    """The tokenizer with the first `count` tokens of its vocabulary and the merges that lead to them."""
    if count is None:
        return tokenizer
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    kept = {token: each for token, each in parts["model"]["vocab"].items() if each < count}
    merges = [each if isinstance(each, list) else each.split(" ") for each in parts["model"]["merges"]]
    parts["model"] |= {"vocab": kept, "merges": [each for each in merges if "".join(each) in kept]}
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(parts))
    return tokenizer


def read_rows(path: Path | None) -> dict[str, dict[str, Any]]:
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    return {row["file"]: row for row in map(json.loads, lines)}


class Measured:
    """A schema and its row."""

    def __init__(self, name: str, schema: Any) -> None:
        self.name, self.schema = name, schema
        self.row: dict[str, Any] = {"file": name}
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        self._validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
        self.automaton: TokenAutomaton | None = None

    def compile(self, tokenizer: Any, options: argparse.Namespace) -> None:
        """Compile the schema and validate random walks."""
        start = time.process_time()
        try:
            automaton = self.automaton = compiled(self.schema, tokenizer, options.seconds)
        except SettingError as error:
            self.row["refused"] = error.reason
            return
        finally:
            self.row["seconds"] = time.process_time() - start
        self.row |= {
            "states": len(automaton.accepting),
            "classes": automaton.transitions.shape[1],
            "edges": len(automaton.edges[0]),
            "shortest": automaton.shortest,
        }
        rng = random.Random(0)
        texts = (tokenizer.decode(random_walk(automaton, rng, options.tokens)) for _ in range(options.walks))
        self.row["walks"] = next((problem for text in texts if (problem := self.invalid(text))), None)

    def samples(self, options: argparse.Namespace) -> bool:
        """True if texts of this schema are sampled."""
        most = options.most_edges
        return self.automaton is not None and (most is None or self.row["edges"] <= most)

    def invalid(self, text: str) -> str | None:
        """Why a text is not valid; None if it is."""
        try:
            self._validator.validate(json.loads(text))
        except (ValueError, jsonschema.ValidationError) as error:
            return f"{' '.join(str(error).split())[:200]} in {text[:200]}"
        return None


def compiled(schema: Any, tokenizer: Any, seconds: float) -> TokenAutomaton:
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return compile.compile_constraint(
        Constraint.json_schema(json.dumps(schema)),
        tokenizer,
        vocabulary_size=len(tokenizer) + 1,  # the last one is the mask token
        mask_token_id=len(tokenizer),
        eos_token_ids=ends,
        pad_token_id=tokenizer.pad_token_id,
        seconds=seconds,
    )


def random_walk(automaton: TokenAutomaton, rng: random.Random, tokens: int) -> list[int]:
    """Tokens of a random text: classes are drawn, then a token of the class."""
    members: dict[int, list[int]] = {}
    for token, each in enumerate(automaton.classes.tolist()):
        members.setdefault(each, []).append(token)
    state, found = 0, []
    while not (automaton.accepting[state] and (rng.random() < 0.3 or len(found) > tokens)):
        row = automaton.transitions[state]
        options = [each for each in (row >= 0).nonzero().flatten().tolist() if int(row[each]) != automaton.end]
        if not options:
            break
        if len(found) > tokens:
            options = [min(options, key=lambda each: int(automaton.distances[row[each]]))]
        chosen = rng.choice(options)
        found.append(rng.choice(members[chosen]))
        state = int(row[chosen])
    return found


class RandomModel(nn.Module):
    """A layer of attention with random weights, in the attention pattern of a sampler's models."""

    def __init__(self, sampler: str, vocabulary: int, block: int) -> None:
        super().__init__()
        pattern, shift, _ = SAMPLERS[sampler]
        name = "idlm" if sampler == "idlm" else "llada"
        self.family = replace(SPEC, name=name, attention_pattern=pattern, shift=shift, sampler={"algorithm": sampler})
        self.config = SimpleNamespace(
            vocab_size=vocabulary, mask_token_id=vocabulary - 1, max_position_embeddings=None, block_size=block
        )
        generator = torch.Generator().manual_seed(0)
        self.embed, self.query, self.value, self.head = (
            torch.randn(shape, generator=generator) / 2
            for shape in ((vocabulary, 16), (16, 16), (16, 16), (16, vocabulary))
        )
        self.head *= 3
        self.embedding = nn.Embedding(1, 1)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        logits_to_keep: Any = slice(None),
    ) -> SimpleNamespace:
        width = input_ids.shape[1]
        position_ids = torch.arange(width)[None] if position_ids is None else position_ids
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if attention_mask.dim() == 2:
            attention_mask = attention_mask.bool()[:, None, :] | torch.eye(width, dtype=torch.bool)
        else:
            attention_mask = attention_mask[:, 0]
        hidden = self.embed[input_ids] + (position_ids[..., None] * self.embed[-1]).sin() / 2
        scores = hidden @ self.query @ hidden.mT
        hidden = hidden / 2 + scores.masked_fill(~attention_mask, -torch.inf).softmax(dim=-1) @ hidden @ self.value
        if isinstance(logits_to_keep, torch.Tensor):
            hidden = torch.take_along_dim(hidden, logits_to_keep[..., None], dim=1)
        else:
            hidden = hidden[:, logits_to_keep]
        return SimpleNamespace(logits=hidden @ self.head)


def sample_texts(batch: Sequence[Measured], tokenizer: Any, lengths: Sequence[str], temperature: float) -> None:
    """Record what became of the text of each schema, sampler and length: valid, refused because it is too short, or a
    problem."""
    wanted = {}
    for one in batch:
        assert one.automaton is not None
        shortest = one.automaton.shortest
        one.row |= {"temperature": temperature, "texts": {name: {} for name in SAMPLERS}}
        numbers = dict(zip(LENGTHS, (shortest, shortest + 1, 64, 256), strict=True))
        wanted |= {(one, name): numbers[name] for name in lengths}
    for sampler, (_, _, settings) in SAMPLERS.items():
        groups: dict[int | None, dict[tuple[Measured, str], int]] = {}
        for key, length in wanted.items():
            # LLaDA's lengths are multiples of its block.
            block = None if sampler != "llada" else settings["block_length"] if length % 32 == 0 else length
            groups.setdefault(block, {})[key] = length
        for block, group in groups.items():
            own = settings if not block else settings | {"block_length": block}
            sample_group(sampler, group, own | {"temperature": temperature}, tokenizer)


def sample_group(
    sampler: str, wanted: dict[tuple[Measured, str], int], settings: dict[str, Any], tokenizer: Any
) -> None:
    """Sample the texts of one engine."""
    model = RandomModel(sampler, len(tokenizer) + 1, settings.get("block_length", 1))
    settings = settings | {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    longest = max(wanted.values()) + 64
    engine = SamplingEngine(model, settings, max_rows=len(wanted), max_length=longest, stream=False)
    for seed, ((one, name), length) in enumerate(wanted.items()):
        constraint = AutomatonConstraint(one.automaton)
        try:
            engine.submit(Request((one, name), [20, 30, 40], length, seed, constraint=constraint))
        except RowError:
            too_short = length < one.automaton.shortest
            one.row["texts"][sampler][name] = TOO_SHORT if too_short else "refused without a reason"
    while not engine.idle:
        for event in engine.step():
            one, name = event.name
            if isinstance(event, Ended):
                text = tokenizer.decode(event.tokens, skip_special_tokens=True)
                one.row["texts"][sampler][name] = one.invalid(text) or VALID
            else:
                one.row["texts"][sampler][name] = str(event)
    engine.close()


def problems(row: dict[str, Any]) -> list[str]:
    """What a row has to report."""
    if "refused" in row:
        return [f"refused: {row['refused']}"]
    found = [] if row["walks"] is None else [f"INVALID: {row['walks']}"]
    for sampler, texts in row.get("texts", {}).items():
        found += [
            f"INVALID: {sampler}, {length}: {text}" for length, text in texts.items() if text not in (VALID, TOO_SHORT)
        ]
    return found


def print_summary(rows: Sequence[dict[str, Any]]) -> None:
    accepted = [row for row in rows if "refused" not in row]
    wrong = sum(any("INVALID" in problem for problem in problems(row)) for row in rows)
    print(
        f"schemas {len(rows)}, accepted {len(accepted)} ({len(accepted) / max(len(rows), 1):.1%}), "
        f"with an invalid text {wrong}"
    )
    for name, key, of in (
        ("CPU seconds", "seconds", rows),
        ("states", "states", accepted),
        ("classes", "classes", accepted),
    ):
        if of:
            values = [row[key] for row in of]
            print(f"{name}: median {statistics.median(values):.4g}, 99% {np.quantile(values, 0.99):.4g}")
    reasons = Counter(row["refused"].rpartition(": ")[2] for row in rows if "refused" in row)
    for reason, number in reasons.most_common(20):
        print(f"{number:5} {reason}")
    for sampler in SAMPLERS:
        texts = [row["texts"][sampler] for row in accepted if "texts" in row]
        if texts:
            cells = []
            for length in LENGTHS:
                states = [each[length] for each in texts if length in each]
                if states:
                    cells.append(f"{length} {states.count(VALID)} of {len(states) - states.count(TOO_SHORT)}")
            print(f"| {sampler} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
