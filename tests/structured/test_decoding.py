"""Decoding under a token automaton, by enumeration: feasible sets, validity, reach, exact draws, unchanged tokens."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dlm_bridge.errors import RowError, SettingError
from dlm_bridge.generation import generate
from dlm_bridge.generation.autoregressive import AutoregressiveEngine
from dlm_bridge.generation.engine import SamplingEngine
from dlm_bridge.generation.gemma import GemmaEngine
from dlm_bridge.generation.request import Ended, Request
from dlm_bridge.structured.automaton import TokenAutomaton
from dlm_bridge.structured.decoding import AutomatonConstraint
from dlm_bridge.structured.lattice import Graph, Lattice
from tests.canvas_models import canvas_model, has_class
from tests.generation.scripted import Scripted
from tests.generation.standin import VOCABULARY, StandIn, family, ragged
from tests.generation.test_samplers import CASES, FAST
from tests.refusals import refused
from tests.structured.automata import accepts, automaton, canvases, constraint

MASKED = -1
END, PAD = 46, 45  # of the stand-in models
TOKENS, SMALL_END = 8, 6  # of scripted models, whose mask token is 7
# Pairs of 0 and 0 or 5, then 1 and 2 or 4 in turn with 5s between them, or a 3 or 4 alone.
TABLE = {0: {0: 1, 3: 4, 4: 4, 1: 2}, 1: {0: 0, 5: 0}, 2: {2: 3, 4: 3}, 3: {1: 2, 5: 3}}
ACCEPTING = [3, 4]
# "(" items separated by "," ")": at least 3 tokens; items have 1 or 2 tokens.
ITEMS = range(10, 20)
LIST = {
    0: {1: 1},
    1: dict.fromkeys(ITEMS, 2),
    2: {**dict.fromkeys(ITEMS, 3), 5: 1, 2: 4},
    3: {5: 1, 2: 4, 17: 1},
}
CANNOT = ("llada2.2", "dreamon", "dmax")  # samplers that move tokens, or change them after those behind


def small() -> TokenAutomaton:
    return automaton(TABLE, ACCEPTING, TOKENS, [SMALL_END])


def lists() -> AutomatonConstraint:
    return constraint(LIST, [4], VOCABULARY, [END, PAD])


def anything() -> AutomatonConstraint:
    """Allows every token of the stand-in models but the mask token, in any order."""
    return constraint({0: dict.fromkeys(range(VOCABULARY - 1), 0)}, [0], VOCABULARY, [])


def lattice_of(one: TokenAutomaton, tokens_RD: torch.Tensor, left: int) -> Lattice:
    graph = Graph.of([one] * len(tokens_RD), len(one.classes), torch.device("cpu"))
    allowed = torch.nn.functional.one_hot(graph.class_of(tokens_RD), graph.classes).bool()
    allowed = allowed | (tokens_RD == MASKED)[..., None]
    open_DRC = torch.where(allowed, 0.0, -torch.inf).transpose(0, 1).contiguous()
    final_G = torch.where(graph.distances <= left, 0.0, -torch.inf)
    starts = torch.zeros(len(tokens_RD), dtype=torch.long)
    return Lattice(graph, starts, final_G, torch.zeros_like(tokens_RD, dtype=torch.bool), open_DRC)


@pytest.mark.parametrize("left", [0, 2])
def test_feasible_sets_are_those_of_enumeration(left: int) -> None:
    """For all canvases of four tokens and masks, whatever follows them."""
    one = small()
    symbols = [MASKED, 0, 1, 2, 3, 4, 5, SMALL_END]
    tokens_RD = torch.tensor(list(product(symbols, repeat=4)))
    texts = torch.tensor([*{text[:4] for text in canvases(one, 4 + left)}])
    lattice = lattice_of(one, tokens_RD, left)
    found_RDV = lattice.feasible().transpose(0, 1).gather(2, lattice.graph.token_classes[:, None].expand(-1, 4, -1))
    agrees_RTD = (tokens_RD[:, None] == texts) | (tokens_RD[:, None] == MASKED)
    one_hot_TDV = torch.nn.functional.one_hot(texts, TOKENS).bool()
    for column in range(4):
        others = [place for place in range(4) if place != column]
        fits_RT = agrees_RTD[:, :, others].all(dim=-1)
        expected_RV = (fits_RT.float() @ one_hot_TDV[:, column].float()) > 0
        assert torch.equal(found_RDV[:, column], expected_RV)
    assert found_RDV.any()
    assert torch.equal(lattice.completes(lattice.open), agrees_RTD.all(dim=-1).any(dim=-1))


def test_best_path_is_the_most_probable_text() -> None:
    one, generator = small(), torch.Generator().manual_seed(0)
    texts = list(canvases(one, 5))
    for _ in range(20):
        lattice = lattice_of(one, torch.full((1, 5), MASKED), 0)
        weights_DRC = torch.randn(lattice.open.shape, generator=generator, dtype=torch.float64)
        path = lattice.best_path(weights_DRC)[0].tolist()
        scores = {
            tuple(one.classes[list(text)].tolist()): sum(
                float(weights_DRC[place, 0, one.classes[token]]) for place, token in enumerate(text)
            )
            for text in texts
        }
        assert tuple(path) == max(scores, key=lambda classes: scores[classes])


def sampled(table: torch.Tensor, rows: int, one: TokenAutomaton, **settings: Any) -> Counter[tuple[int, ...]]:
    """Texts of many rows, without a prompt."""
    model = Scripted(table)
    ids = torch.zeros(rows, 1, dtype=torch.long)
    output = generate(
        model, ids, constraint=AutomatonConstraint(one), eos_token_id=SMALL_END, pad_token_id=SMALL_END, **settings
    )
    assert isinstance(output, torch.Tensor)
    length = settings["gen_length"]
    return Counter((*row, *[SMALL_END] * (length - len(row))) for row in output[:, 1:].tolist())


def test_tokens_drawn_in_one_pass_have_the_conditional_distribution() -> None:
    one, length, rows = small(), 4, 1500
    table = torch.randn(length + 1, TOKENS, generator=torch.Generator().manual_seed(3))
    found = sampled(
        table, rows, one, gen_length=length, block_length=length, steps=1, temperature=1.0, algorithm="llada", seed=1
    )
    # The scripted model predicts the token of a column from its own.
    logs = table[1:, :7].double().log_softmax(dim=-1)  # never the mask token
    texts = list(canvases(one, length))
    weights = torch.stack([logs[range(length), text].sum() for text in texts]).softmax(dim=0)
    assert {*found} <= {*texts}
    expected = weights * rows
    counts = torch.tensor([found[text] for text in texts], dtype=torch.float64)
    often = expected >= 5
    assert int(often.sum()) > 5
    chi_square = float(((counts - expected) ** 2 / expected)[often].sum())
    degrees = int(often.sum()) - 1
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "llada", "block_length": 2},
        {"algorithm": "llada", "block_length": 4, "threshold": 0.2},
        {"algorithm": "dream", "steps": 3},
        {"algorithm": "mdlm", "block_length": 4, "steps": 2},
        {"algorithm": "hierarchical", "block_length": 4, "threshold": 0.3},
        {"algorithm": "uniform", "steps": 2},
    ],
    ids=lambda settings: settings["algorithm"],
)
def test_every_text_is_reached(settings: dict[str, Any]) -> None:
    one, length = small(), 4
    table = torch.zeros(length + 1, TOKENS)
    found = sampled(table, 500, one, gen_length=length, temperature=1.0, seed=2, **settings)
    assert {*found} == {*canvases(one, length)}


def run(case: str, **changes: Any) -> Any:
    """Rows of three prompts by one of the stand-in samplers."""
    of_family, config, settings = CASES[case]
    _, ids, mask = ragged((5, 3, 8), seed=1)
    given = {"eos_token_id": END, "pad_token_id": PAD, "seed": 3, **settings, **changes}
    if given.get("block_length", 1) > given["gen_length"]:
        given["block_length"] = given["gen_length"]
    return generate(StandIn(of_family, **config), ids, attention_mask=mask, return_dict_in_generate=True, **given)


def check_valid(case: str, length: int, temperature: float) -> None:
    one = lists()
    closing = int(case.startswith("rnd1"))  # ends its text with a token of its own
    length = CASES[case][2].get("gen_length", length + closing)
    output = run(case, temperature=temperature, constraint=one, gen_length=length)
    for row, end in zip(output.sequences[:, 8:].tolist(), (output.row_ends - 8).tolist(), strict=True):
        assert accepts(one.automaton, row[:end])


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith(CANNOT)])
@pytest.mark.fast(*FAST)
def test_every_text_is_valid_even_without_room(case: str) -> None:
    shortest = lists().automaton.shortest
    assert shortest == 3
    check_valid(case, 4, 0.0)
    check_valid(case, 3, 1.5)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith(CANNOT)])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_every_long_text_is_valid(case: str, temperature: float) -> None:
    for length in (3, 4, 12):
        check_valid(case, length, temperature)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith(CANNOT)])
@pytest.mark.fast(*(f"{name}-1.0" for name in FAST), "sdar-0.0")
def test_a_constraint_that_is_never_violated_changes_no_token(case: str, temperature: float) -> None:
    length = CASES[case][2].get("gen_length", 8 if CASES[case][2].get("block_length") == 4 else 6)
    free = run(case, temperature=temperature, gen_length=length)
    bound = run(case, temperature=temperature, gen_length=length, constraint=anything())
    assert torch.equal(free.sequences, bound.sequences)
    assert free.forwards == bound.forwards


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("case", ["llada-threshold", "sdar", "fast_dllm_v2", "dream-entropy", "idlm"])
def test_rows_with_different_constraints_share_a_batch(case: str, temperature: float) -> None:
    """Each row as alone, and a row without a constraint as in a free batch."""
    other = constraint({0: {30: 1, 31: 1}, 1: {32: 0}}, [0], VOCABULARY, [END, PAD])
    of_family, config, settings = CASES[case]
    model = StandIn(of_family, **config)
    prompts, given = [[1, 2, 3], [4, 5], [6, 7, 8, 9]], {**settings, "temperature": temperature, "gen_length": 6}
    given |= {"eos_token_id": END, "pad_token_id": PAD}

    def texts(wanted: list[int]) -> dict[Any, tuple[int, ...]]:
        engine = SamplingEngine(model, given, max_rows=3, max_length=64, stream=False)
        for number in wanted:
            one = [lists(), other, None][number]
            engine.submit(Request(number, prompts[number], seed=number, constraint=one))
        found = {}
        while not engine.idle:
            found |= {event.name: event.tokens for event in engine.step() if isinstance(event, Ended)}
        return found

    together = texts([0, 1, 2])
    for number in range(3):
        assert together[number] == texts([number])[number]
    assert accepts(lists().automaton, together[0])
    assert accepts(other.automaton, together[1])


def test_given_tokens_of_a_prompt_to_fill_in_stay() -> None:
    model = StandIn(family(algorithm="llada"))
    for temperature in (0.0, 1.0):
        ids = torch.tensor([[1, MASKED, 5, MASKED, MASKED, 5, MASKED, 2]])
        output = generate(
            model,
            ids,
            infill=True,
            gen_length=1,
            constraint=lists(),
            eos_token_id=END,
            temperature=temperature,
            seed=0,
        )
        row = output[0, :8].tolist()
        assert (row[0], row[2], row[5], row[7]) == (1, 5, 5, 2)
        assert accepts(lists().automaton, row)


def test_what_cannot_be_kept_is_refused() -> None:
    with refused(RowError, None, "3 tokens", "gen_length=2"):
        run("llada", gen_length=2, constraint=lists())
    for case in CANNOT:
        with refused(SettingError, "constraint", case):
            run(case, gen_length=4, constraint=lists())
    with refused(SettingError, "suppress_tokens", "`constraint`"):
        run("llada", gen_length=4, constraint=lists(), suppress_tokens=[3])
    with refused(SettingError, "constraint", "3 rows"):
        run("llada", gen_length=4, constraint=[lists(), None])
    ids = torch.tensor([[1, MASKED, 2, 2]])
    with refused(RowError, None, "given tokens"):
        generate(StandIn(family(algorithm="llada")), ids, infill=True, gen_length=1, constraint=lists())


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_texts_of_an_autoregressive_model_are_valid(temperature: float) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes)).eval()
    settings = {"temperature": temperature, "eos_token_id": END, "pad_token_id": PAD}
    engine = AutoregressiveEngine(model, None, settings, max_rows=4)
    for length in (3, 4, 12):
        for number in range(3):
            prompt = [1, 2, *[3] * number]
            engine.submit(Request((length, number), prompt, length, number, constraint=lists() if number else None))
    with refused(RowError, None, "3 tokens", "gen_length=2"):
        engine.submit(Request("short", [1], 2, constraint=lists()))
    found = {}
    while not engine.idle:
        found |= {event.name: event.tokens for event in engine.step() if isinstance(event, Ended)}
    assert len(found) == 9
    for (_, number), tokens in found.items():
        assert not number or accepts(lists().automaton, tokens)


@has_class
@pytest.mark.parametrize("length", [3, 4, 12])
def test_texts_of_diffusion_gemma_are_valid(length: int) -> None:
    engine = GemmaEngine(canvas_model(0), None, {"eos_token_id": END, "steps": 3}, max_rows=3)
    for number in range(3):
        prompt = [1, 2, *[3] * number]
        engine.submit(Request(number, prompt, length, number, constraint=lists() if number else None))
    found: dict[Any, Ended] = {}
    while not engine.idle:
        found |= {event.name: event for event in engine.step() if isinstance(event, Ended)}
    assert len(found) == 3
    for number in (1, 2):
        assert accepts(lists().automaton, found[number].tokens)


def test_the_mass_of_the_feasible_tokens_is_reported() -> None:
    """One token per step, from left to right: the product of the masses is p(text) / q(text)."""
    one, length = small(), 3
    table = torch.randn(length + 1, TOKENS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    settings = {"algorithm": "llada", "block_length": 1, "temperature": 1.0, "gen_length": length}
    settings |= {"eos_token_id": None, "pad_token_id": SMALL_END}
    engine = SamplingEngine(Scripted(table), settings, max_rows=8, max_length=8, stream=False)
    for number in range(8):
        engine.submit(Request(number, [0], seed=number, constraint=AutomatonConstraint(one)))
    engine.submit(Request("free", [0]))
    ended = {}
    while not engine.idle:
        ended |= {event.name: event for event in engine.step() if isinstance(event, Ended)}
    assert ended.pop("free").constraint_log_mass is None
    probabilities = table[1:].softmax(dim=-1)
    texts = list(canvases(one, length))
    for event in ended.values():
        mass = 0.0
        for place in range(length):
            feasible = {text[place] for text in texts if text[:place] == event.tokens[:place]}
            mass += float(probabilities[place, [*feasible]].sum().log())
        assert event.constraint_log_mass == pytest.approx(mass)


@pytest.mark.parametrize("vocabulary", [TOKENS, 700])
def test_values_are_reduced_by_class(vocabulary: int) -> None:
    """Of two automata in one batch, also with more tokens in a class than a group has."""
    table = {0: {**dict.fromkeys(range(min(vocabulary - 1, 600)), 0), 3: 1}, 1: {2: 0}}
    automata = [small(), automaton(table, [0], vocabulary, [vocabulary - 1])]
    graph = Graph.of(automata, vocabulary, torch.device("cpu"))
    values_RNV = torch.randn(2, 3, vocabulary, dtype=torch.float64)
    for summed in (True, False):
        found_RNC = graph.by_class(values_RNV, summed=summed)
        for row, column, kind in product(range(2), range(3), range(graph.classes)):
            own = values_RNV[row, column, graph.token_classes[row] == kind]
            expected = own.sum() if summed else own.max() if len(own) else torch.tensor(-torch.inf)
            assert torch.allclose(found_RNC[row, column, kind], expected.double())
