"""Structured output: which JSON schemas are accepted, what compiling them costs, and whether texts are valid.

    python benchmarks/structured.py SCHEMAS --tokenizer CHECKPOINT

SCHEMAS is a folder with JSON schemas in files *.json, at any depth, such as data/ of a checkout of
guidance-ai/jsonschemabench. A seeded sample of them is compiled, and random walks through each token automaton are
decoded, parsed and validated with the package `jsonschema` (with its formats). Prints a row for each schema that is
refused or has an invalid text, and at the end the shares, the median and the 99th percentile of the CPU seconds,
states and classes of tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from transformers import AutoTokenizer

from dlm_bridge.errors import SettingError
from dlm_bridge.structured import compile
from dlm_bridge.structured.automaton import TokenAutomaton
from dlm_bridge.structured.constraint import Constraint


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schemas", type=Path)
    parser.add_argument("--tokenizer", required=True, help="folder or name of a model")
    parser.add_argument("--sample", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--walks", type=int, default=5, help="random texts of each schema")
    parser.add_argument("--tokens", type=int, default=256, help="tokens after which a walk takes the shortest way out")
    parser.add_argument("--seconds", type=float, default=60, help="limit of one compilation")
    options = parser.parse_args(arguments)
    files = sorted(options.schemas.rglob("*.json"))
    files = random.Random(options.seed).sample(files, min(options.sample, len(files)))
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    compile.cached, compile.store = lambda key: None, lambda key, automaton: None  # every one is compiled
    reasons: Counter[str] = Counter()
    seconds, states, classes, invalid = [], [], [], 0
    for file in files:
        schema = json.loads(file.read_text())
        start = time.process_time()
        try:
            automaton = compiled(schema, tokenizer, options.seconds)
        except SettingError as error:
            reasons[error.reason.rpartition(": ")[2]] += 1
            print(f"{file.relative_to(options.schemas)}: refused: {error.reason}", flush=True)
            continue
        finally:
            seconds.append(time.process_time() - start)
        states.append(len(automaton.accepting))
        classes.append(automaton.transitions.shape[1])
        problem = first_invalid(automaton, tokenizer, schema, options.walks, options.tokens)
        if problem is not None:
            invalid += 1
            print(f"{file.relative_to(options.schemas)}: INVALID: {problem}", flush=True)
    count = len(files)
    print(
        f"schemas {count}, accepted {len(states)} ({len(states) / max(count, 1):.1%}), with an invalid text {invalid}"
    )
    for name, values in (("CPU seconds", seconds), ("states", states), ("classes", classes)):
        if values:
            print(f"{name}: median {statistics.median(values):.4g}, 99% {np.quantile(values, 0.99):.4g}")
    for reason, number in reasons.most_common(20):
        print(f"{number:5} {reason}")


def compiled(schema: Any, tokenizer: Any, seconds: float) -> TokenAutomaton:
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return compile.compile_constraint(
        Constraint.json_schema(json.dumps(schema)),
        tokenizer,
        vocabulary_size=len(tokenizer),
        mask_token_id=tokenizer.mask_token_id,
        eos_token_ids=ends,
        pad_token_id=tokenizer.pad_token_id,
        seconds=seconds,
    )


def first_invalid(automaton: TokenAutomaton, tokenizer: Any, schema: Any, walks: int, tokens: int) -> str | None:
    """Problem of the first random text that is not valid; None if all are."""
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    rng = random.Random(0)
    for _ in range(walks):
        text = tokenizer.decode(random_walk(automaton, rng, tokens))
        try:
            validator.validate(json.loads(text))
        except (ValueError, jsonschema.ValidationError) as error:
            return f"{' '.join(str(error).split())[:200]} in {text[:200]}"
    return None


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


if __name__ == "__main__":
    main()
