"""What a constraint costs: ms of a denoising step with and without one.

    python benchmarks/structured_overhead.py
    python benchmarks/structured_overhead.py --device cpu --tiny

For automata of several numbers of states, batches of 1 and 32 rows, greedy and at temperature 1. The model is LLaDA in
the shape of SmolLM2-135M (30 layers of 576, 49,152 tokens), with random weights in bf16; its sampler is llada with a
threshold, in blocks of 32. An automaton's states have 15 classes of tokens each, of 96. A line of JSON for each; the
first run of a shape does not count.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dlm_bridge.generation.engine import SamplingEngine
from dlm_bridge.generation.request import Ended, Request
from dlm_bridge.models.modeling_llada import LLaDAConfig, LLaDAModelLM
from dlm_bridge.structured.automaton import TokenAutomaton
from dlm_bridge.structured.decoding import AutomatonConstraint

CLASSES, DEGREE = 96, 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--states", type=int, nargs="+", default=[10, 100, 500, 1000])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--execution", choices=("eager", "graph", "compiled"), default="graph")
    parser.add_argument("--tiny", action="store_true", help="a model of one layer, on which the command is tried")
    overhead(parser.parse_args())


def overhead(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    model = random_model(options.tiny).to(device)
    execution = options.execution if device.type == "cuda" else "eager"
    for rows in options.rows:
        for temperature in (0.0, 1.0):
            settings = {
                "threshold": 0.9, "block_length": 32, "temperature": temperature, "gen_length": options.new_tokens,
                "execution": execution,
            }  # fmt: skip
            free = step_ms(model, settings, rows, None)
            print_row(rows=rows, temperature=temperature, states=0, step_ms=free)
            for states in options.states:
                constraint = AutomatonConstraint(random_automaton(states, model.config.vocab_size))
                bound = step_ms(model, settings, rows, constraint)
                print_row(
                    rows=rows, temperature=temperature, states=states, step_ms=bound, overhead_ms=bound - free,
                    overhead_percent=100 * (bound / free - 1),
                )  # fmt: skip


def print_row(**values: Any) -> None:
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}
    print(json.dumps(rounded), flush=True)


def step_ms(model: Any, settings: dict[str, Any], rows: int, constraint: AutomatonConstraint | None) -> float:
    """ms per forward pass, with everything between two of them; the second of two runs."""
    for _ in range(2):
        engine = SamplingEngine(model, settings, max_rows=rows, max_length=settings["gen_length"] + 32, stream=False)
        for number in range(rows):
            engine.submit(Request(number, list(range(1, 17)), seed=number, constraint=constraint))
        began = time.perf_counter()
        ended = 0
        while not engine.idle:
            ended += sum(isinstance(event, Ended) for event in engine.step())
        seconds = time.perf_counter() - began
        assert ended == rows
        forwards = engine.forwards
        engine.close()
    return 1000 * seconds / forwards


def random_model(tiny: bool) -> Any:
    torch.manual_seed(0)
    width, layers, vocabulary = (32, 1, 256) if tiny else (576, 30, 49152)
    config = LLaDAConfig(
        d_model=width, n_layers=layers, n_heads=9 if not tiny else 2, n_kv_heads=3 if not tiny else 2,
        mlp_hidden_size=1536 if not tiny else 64, vocab_size=vocabulary, embedding_size=vocabulary,
        mask_token_id=vocabulary - 1, eos_token_id=vocabulary - 2, pad_token_id=vocabulary - 2,
        max_sequence_length=2048,
    )  # fmt: skip
    return LLaDAModelLM(config).to(torch.float32 if tiny else torch.bfloat16).eval()


def random_automaton(states: int, vocabulary: int) -> TokenAutomaton:
    """Chain of states with random classes to the next, and to the state itself. Every eighth state accepts."""
    generator = torch.Generator().manual_seed(states)
    classes = torch.randint(1, CLASSES, (vocabulary,), generator=generator)
    end_token = vocabulary - 2
    classes[end_token], classes[vocabulary - 1] = CLASSES, 0
    table = torch.full((states + 1, CLASSES + 1), -1)
    for state in range(states):
        own = torch.randperm(CLASSES - 1, generator=generator)[:DEGREE] + 1
        table[state, own] = min(state + 1, states - 1)
        table[state, own[:3]] = state
    accepting = torch.zeros(states + 1, dtype=torch.bool)
    accepting[7:states:8] = accepting[states - 1] = accepting[states] = True
    table[accepting, CLASSES] = states
    distances = torch.zeros(states + 1, dtype=torch.long)
    for state in reversed(range(states)):
        distances[state] = 0 if accepting[state] else distances[state + 1] + 1
    return TokenAutomaton(classes, table, accepting, distances, states, (end_token,))


if __name__ == "__main__":
    main()
