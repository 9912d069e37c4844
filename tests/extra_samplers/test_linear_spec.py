"""Linear self-speculation: the causal model's own text, in the forwards that drafts and checks take."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LogitsProcessor

from dlm_bridge.errors import RowError, SettingError
from dlm_bridge.extra_samplers import linear_spec
from dlm_bridge.generation import generate
from dlm_bridge.generation.commit_rules import LeftToRightRule
from tests.families.case import FamilyCase
from tests.families.nemotron_labs_diffusion import CASES, reference
from tests.generation import published_samplers as published
from tests.generation.recorded import stand_in
from tests.generation.standin import MASK, StandIn, family, keep_tokens, ragged
from tests.refusals import refused

GEN, BLOCK = 13, 5
LENGTHS = (5, 9, 1, 8)
LIKELY = 4  # tokens that any weights choose between, so that drafts are right now and then


def stand_in_model(seed: int = 0, likely: int = LIKELY) -> StandIn:
    model = StandIn(family(name="nemotron_labs_diffusion", algorithm="linear_spec"), seed=seed, block_size=BLOCK)
    model.head[:, likely:MASK] *= 0.02
    return model


def logits_of(forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], own: int) -> published.Logits:
    """Of a row in which the last `own` tokens see each other and everything else what stands before it."""

    def logits(tokens: list[int]) -> torch.Tensor:
        index = torch.arange(len(tokens))
        seen = (index[None] <= index[:, None]) | (index[:, None] >= len(tokens) - own)
        return forward(torch.tensor([tokens]), seen[None])[0]

    return logits


def of_stand_in(model: StandIn, own: int) -> published.Logits:
    return logits_of(lambda ids, seen: model(ids, seen[:, None]).logits, own)


def checkpoint(case: FamilyCase, folder: Path) -> tuple[Any, dict[str, torch.Tensor], dict[str, Any]]:
    """A model in float64 with few likely tokens, and its tensors and config for our own maths."""
    config = {**case.config, "mask_token_id": MASK}
    model = case.load(case.write(folder / "hub", mask_token_id=MASK), dtype=torch.float64)
    tensors = case.tensors(config, 0, torch.float32)
    head = tensors["diffusion_head.weight"].double()
    head[:LIKELY] *= 10
    head[LIKELY:] *= 0.02
    tensors["diffusion_head.weight"] = head
    with torch.no_grad():
        model.lm_head.weight.copy_(head)
    return model.requires_grad_(False), tensors, config


def of_tensors(tensors: dict[str, torch.Tensor], config: dict[str, Any], own: int) -> published.Logits:
    def forward(ids: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return reference(tensors, config, ids, seen, torch.arange(ids.shape[1])[None])

    return logits_of(forward, own)


def autoregressive(causal: published.Logits, row: list[int], gen: int) -> list[int]:
    for _ in range(gen):
        logits = causal(row)[-1]
        logits[MASK] = -torch.inf
        row = [*row, int(logits.argmax())]
    return row


def rows_of(output: torch.Tensor, rows: list[list[int]]) -> list[list[int]]:
    """What `generate` returned, without padding on the left."""
    width = max(map(len, rows))
    return [line[width - len(row) :] for row, line in zip(rows, output.tolist(), strict=True)]


ARGUMENTS: dict[str, Any] = {
    "algorithm": "linear_spec",
    "gen_length": GEN,
    "block_length": BLOCK,
    "temperature": 0.0,
    "eos_token_id": None,
    "return_dict_in_generate": True,
}


@pytest.mark.parametrize("cache", ["none", "block"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.fast("nemotron_labs_diffusion-block")
def test_it_writes_what_the_causal_model_writes(case: FamilyCase, cache: str, tmp_path: Path) -> None:
    """Rows of different lengths, of which each gets on at its own pace, by our own float64 maths."""
    model, tensors, config = checkpoint(case, tmp_path)
    rows, ids, mask = ragged(LENGTHS)
    arguments = {**ARGUMENTS, "attention_mask": mask, "cache": cache}
    causal = of_tensors(tensors, config, own=0)
    expected = [autoregressive(causal, row, GEN) for row in rows]
    output = model.generate(ids, **arguments)
    assert rows_of(output.sequences, rows) == expected
    for row, line in zip(rows, expected, strict=True):
        drafts = of_tensors(tensors, config, own=BLOCK)
        text, forwards, committed = published.linear_spec(drafts, causal, row, GEN, MASK, block=BLOCK)
        assert text == line
        alone = model.generate(torch.tensor([row]), **{**arguments, "attention_mask": None})
        assert alone.sequences[0].tolist() == line
        assert alone.forwards == forwards == 1 + 2 * len(committed)
        assert alone.tokens_per_forward == GEN / forwards
        assert output.forwards >= forwards
    # Blocks of one token are the autoregressive mode, one forward for each.
    for more in ({"block_length": 1}, {"algorithm": "nemotron", "block_length": 1}):
        plain = model.generate(ids, **{**arguments, **more})
        assert torch.equal(plain.sequences, output.sequences)
        assert plain.forwards == GEN


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("block", [2, 5, 20])
@pytest.mark.fast("5-*", "2-0.0")
def test_drafts_are_those_of_the_published_loop(block: int, threshold: float) -> None:
    """Forward by forward: a right draft is committed as far as it is right, and one token more."""
    paces = set()
    for seed in range(1 if block > GEN else 2):
        model = stand_in_model(seed)
        rows, ids, mask = ragged(LENGTHS, seed)
        arguments = {**ARGUMENTS, "block_length": block, "threshold": threshold}
        together = generate(model, ids, attention_mask=mask, **arguments)
        row_forwards = 0
        for row, line in zip(rows, rows_of(together.sequences, rows), strict=True):
            expected, forwards, committed = published.linear_spec(
                of_stand_in(model, block), of_stand_in(model, 0), row, GEN, MASK, block=block, threshold=threshold
            )
            assert line == expected
            assert generate(model, torch.tensor([row]), **arguments).forwards == forwards
            row_forwards += forwards
            paces |= {*committed}
        assert together.tokens_per_forward == len(rows) * GEN / row_forwards
    assert len(paces) > 1  # or no draft was ever right


@pytest.mark.parametrize(
    "filters",
    [
        {},
        *(pytest.param(each, marks=pytest.mark.slow) for each in ({"top_k": 2}, {"top_p": 0.7})),
        {"threshold": 0.5},
    ],
)
def test_what_is_drawn_has_the_causal_model_s_distribution(filters: dict[str, Any]) -> None:
    """The frequencies of all texts of three tokens, against their exact probabilities."""
    model, prompt, copies = stand_in_model(1), [7, 11], 2000
    keep_tokens(model, 3)
    causal = of_stand_in(model, 0)
    names = {"top_k": filters.get("top_k"), "top_p": filters.get("top_p")}

    def probability(text: tuple[int, ...]) -> float:
        total = 1.0
        for i, token in enumerate(text):
            total *= float(published.shaped(causal([*prompt, *text[:i]])[-1] / 2.5, **names)[token])
        return total

    settings = {**ARGUMENTS, "gen_length": 3, "temperature": 2.5, "seed": 3, "num_return_sequences": copies, **filters}
    found = generate(model, torch.tensor([prompt]), **settings)
    counts = Counter(map(tuple, found.sequences[:, 2:].tolist()))
    assert found.tokens_per_forward > 0.7 or filters.get("threshold")  # 3 / 5, were no draft ever right
    for text in itertools.product(range(3), repeat=3):
        expected = probability(text)
        error = (expected * (1 - expected) / copies) ** 0.5
        assert abs(counts[text] / copies - expected) <= 4 * error


class Moody(LogitsProcessor):
    """Prefers tokens by all of the text before them."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert not (input_ids == MASK).any()  # committed text, nothing that a draft only guesses
        liked = (input_ids.sum(dim=1) + input_ids.shape[1]) % LIKELY
        return scores.scatter_add(1, liked[:, None], torch.full_like(scores[:, :1], 4.0))


@pytest.mark.parametrize(
    "constraint",
    [
        {"repetition_penalty": 1.8},
        {"no_repeat_ngram_size": 2},
        {"suppress_tokens": [0, 2]},
        {"bad_words_ids": [[1], [0, 2]]},
        {"logits_processor": Moody()},
        {"prefix_allowed_tokens_fn": lambda row, text: [(int(text[-1]) + 1 + row) % LIKELY, len(text) % LIKELY]},
        {"min_new_tokens": 6, "eos_token_id": [0, 1], "pad_token_id": 9},
    ],
    ids=lambda constraint: next(iter(constraint)),
)
def test_constraints_hold_as_for_the_causal_model(constraint: dict[str, Any]) -> None:
    model = stand_in_model()
    _, ids, mask = ragged((6, 6, 6) if "logits_processor" in constraint else LENGTHS)
    arguments = {**ARGUMENTS, "attention_mask": mask, **constraint}
    output = generate(model, ids, **arguments)
    plain = generate(model, ids, **{**arguments, "algorithm": "nemotron", "block_length": 1})
    assert torch.equal(output.sequences, plain.sequences)
    assert not torch.equal(output.sequences, generate(model, ids, attention_mask=mask, **ARGUMENTS).sequences)


class Letters:
    """A tokenizer of one letter for each token."""

    def decode(self, ids: Any) -> str:
        return "".join(chr(97 + int(one) % 26) for one in ids)


def test_a_row_ends_within_what_a_check_commits() -> None:
    model = stand_in_model()
    rows, ids, mask = ragged(LENGTHS)
    arguments = {**ARGUMENTS, "attention_mask": mask, "pad_token_id": 40}
    free = rows_of(generate(model, ids, **arguments).sequences, rows)
    texts = [Letters().decode(line[len(row) :]) for row, line in zip(rows, free, strict=True)]
    stop = texts[0][4:6]
    stopped = generate(model, ids, **arguments, stop_strings=stop, tokenizer=Letters())
    for row, text, line in zip(rows, texts, rows_of(stopped.sequences, rows), strict=True):
        kept = text.partition(stop)[0] + stop if stop in text else text
        assert Letters().decode(line[len(row) : len(row) + len(kept)]) == kept
        assert {*line[len(row) + len(kept) :]} <= {40}
    assert stopped.forwards < generate(model, ids, **arguments).forwards or stop not in texts[0]


def test_the_history_shows_what_checks_commit() -> None:
    model = stand_in_model()
    row = torch.tensor([[3, 1, 4, 1, 5]])
    output = generate(model, row, **ARGUMENTS, output_history=True)
    _, forwards, committed = published.linear_spec(
        of_stand_in(model, BLOCK), of_stand_in(model, 0), row[0].tolist(), GEN, MASK, block=BLOCK
    )
    counts = [int(step.committed.sum()) for step in output.history]
    committed[-1] -= 1 + sum(committed) - GEN  # what stands behind the last new token is not shown
    assert counts == [1, *itertools.chain.from_iterable((0, count) for count in committed)]
    assert [step.forwards for step in output.history] == [*range(1, forwards + 1)]
    confidence = output.history[-1].confidence[0, 5:]
    probabilities = of_stand_in(model, 0)(output.sequences[0].tolist()[:-1])[4:].softmax(-1)
    expected = probabilities.gather(1, output.sequences[0, 5:, None])[:, 0]
    torch.testing.assert_close(confidence.double(), expected, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.fast("0.9")
def test_cached_keys_and_values_are_those_of_whole_forwards(
    temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every draft's and check's logits, of rows that get on at their own pace and leave one after the other."""
    model, _, _ = checkpoint(CASES[1], tmp_path)
    _, ids, mask = ragged((3, 9, 1, 8))
    settings = {**ARGUMENTS, "attention_mask": mask, "gen_length": 24, "temperature": temperature, "seed": 2}
    settings |= {"pad_token_id": 40, "threshold": 0.3}
    free = model.generate(ids, **settings).sequences
    seen: list[torch.Tensor] = []
    propose = linear_spec.propose_tokens

    def recording(logits: torch.Tensor, *others: Any) -> Any:
        seen.append(logits.clone())
        return propose(logits, *others)

    monkeypatch.setattr(linear_spec, "propose_tokens", recording)
    for eos in (None, sorted({int(free[row, 12 + 5 * row]) for row in range(2)})):
        outputs, logits = [], []
        for cache in ("none", "block"):
            seen.clear()
            outputs.append(model.generate(ids, **{**settings, "eos_token_id": eos}, cache=cache).sequences)
            logits.append([*seen])
        assert torch.equal(*outputs)
        assert [one.shape for one in logits[0]] == [one.shape for one in logits[1]]
        for ours, theirs in zip(*logits, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        assert len({len(one) for one in logits[0]}) > 1  # rows have left
    assert not any(hasattr(module, "kv_keys") for module in model.modules())


def of_model(model: Any, own: int = 0, added: dict[str, torch.Tensor] | None = None) -> published.Logits:
    """Of a model without adapters; the last `own` tokens alone have what is `added` to its weights."""

    def forward(ids: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        handles = []
        for name, change in (added or {}).items():
            layer = model.get_submodule(name.replace("encoder.", "model.").removesuffix(".weight"))

            def add(_: Any, inputs: Any, output: torch.Tensor, change: torch.Tensor = change) -> torch.Tensor:
                more = torch.zeros_like(output)
                more[:, -own:] = inputs[0][:, -own:] @ change.T
                return output + more

            handles.append(layer.register_forward_hook(add))
        try:
            with torch.no_grad():
                logits: torch.Tensor = model(ids, attention_mask=seen[:, None]).logits
            return logits
        finally:
            for handle in handles:
                handle.remove()

    return logits_of(forward, own)


def write_published_adapter(folder: Path, config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """`linear_spec_lora` as on the Hub, with weights that matter. Returns what it adds to which tensor."""
    generator = torch.Generator().manual_seed(seed)
    width, hidden = config["num_attention_heads"] * config["head_dim"], config["hidden_size"]
    tensors, added = {}, {}
    for layer in range(config["num_hidden_layers"]):
        name = f"encoder.layers.{layer}.self_attn.o_proj"
        a, b = torch.randn(4, width, generator=generator), torch.randn(hidden, 4, generator=generator) / 4
        tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        added[f"{name}.weight"] = 16 / 4 * b.double() @ a.double()
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": ["o_proj"], "bias": "none"}
    settings |= {"base_model_name_or_path": "nvidia/Nemotron-Labs-Diffusion-8B", "inference_mode": True}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return added


@pytest.mark.parametrize(
    ("threshold", "execution"), [(0.0, "eager"), pytest.param(0.3, "compiled", marks=pytest.mark.slow)]
)
def test_the_published_adapter_drafts_and_does_not_check(
    threshold: float, execution: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel

    if execution == "compiled":
        stand_in(monkeypatch)
    model, tensors, config = checkpoint(CASES[0], tmp_path)
    plain, _, _ = checkpoint(CASES[0], tmp_path / "plain")
    added = write_published_adapter(tmp_path / "linear_spec_lora", config, seed=1)
    wrapped = PeftModel.from_pretrained(model, tmp_path, subfolder="linear_spec_lora")
    before = {name: (parameter.requires_grad, parameter.clone()) for name, parameter in wrapped.named_parameters()}
    rows, ids, mask = ragged((5, 5, 2))
    arguments = {**ARGUMENTS, "threshold": threshold, "execution": execution, "gen_length": 20}
    loop = {"causal": of_model(plain), "gen": 20, "mask": MASK, "block": BLOCK, "threshold": threshold}
    saved, total = [], 0
    for row in rows:
        line, forwards, _ = published.linear_spec(of_model(plain, BLOCK, added), prompt=row, **loop)
        for _ in range(2):
            output = wrapped.generate(torch.tensor([row]), **arguments, draft_adapter="default")
            assert output.sequences[0].tolist() == line
            assert output.forwards == forwards
        saved.append(forwards - published.linear_spec(of_model(plain, BLOCK), prompt=row, **loop)[1])
        total += forwards
    assert any(saved)  # or the adapter has done nothing
    for _ in range(2):
        output = wrapped.generate(ids, **arguments, attention_mask=mask, draft_adapter="default")
        assert output.tokens_per_forward == 20 * len(rows) / total
    # Without a name it is a part of the model, as any adapter is.
    tuned = {name: tensor.double() + added.get(name, 0) for name, tensor in tensors.items()}
    output = wrapped.generate(ids, **arguments, attention_mask=mask)
    causal = of_tensors(tuned, config, own=0)
    assert rows_of(output.sequences, rows) == [autoregressive(causal, row, 20) for row in rows]
    assert wrapped.active_adapters == ["default"]
    for name, parameter in wrapped.named_parameters():
        assert parameter.requires_grad == before[name][0]
        assert torch.equal(parameter, before[name][1])


def test_other_adapters_take_part_in_drafts_and_checks(tmp_path: Path) -> None:
    from peft import PeftModel

    model, _, config = checkpoint(CASES[0], tmp_path)
    plain, _, _ = checkpoint(CASES[0], tmp_path / "plain")
    tuned, _, _ = checkpoint(CASES[0], tmp_path / "merged")
    more = write_published_adapter(tmp_path / "tuned", config, seed=2)
    added = write_published_adapter(tmp_path / "drafter", config, seed=3)
    for name, change in more.items():
        tuned.get_parameter(name.replace("encoder.", "model.")).add_(change)
    wrapped = PeftModel.from_pretrained(model, tmp_path / "tuned", adapter_name="tuned")
    wrapped.load_adapter(tmp_path / "drafter", "drafter", key_mapping=model._checkpoint_conversion_mapping)
    row = [3, 1, 4, 1, 5]
    settings = {"inputs": torch.tensor([row]), **ARGUMENTS}
    loop = {"prompt": row, "gen": GEN, "mask": MASK, "block": BLOCK}

    def check(base: Any) -> None:
        expected = published.linear_spec(of_model(base, BLOCK, added), of_model(base), **loop)
        output = wrapped.generate(**settings, draft_adapter="drafter")
        assert (output.sequences[0].tolist(), output.forwards) == expected[:2]

    check(tuned)
    assert wrapped.active_adapters == ["tuned"]
    with wrapped.disable_adapter():  # then the drafter is the only one
        check(plain)
    with refused(SettingError, "draft_adapter", "'x'", "drafter, tuned"):
        wrapped.generate(**settings, draft_adapter="x")
    with refused(SettingError, "draft_adapter", "cache=block"):
        wrapped.generate(**settings, draft_adapter="drafter", cache="none")
    wrapped.merge_adapter(["tuned"])
    with refused(SettingError, "draft_adapter", "unmerge_adapter()"):
        wrapped.generate(**settings, draft_adapter="drafter")


@pytest.mark.parametrize(
    ("settings", "field", "named"),
    [
        ({"inputs": torch.tensor([[1], [0]]), "attention_mask": torch.tensor([[1], [0]])}, "row 1", ""),
        ({"commit_rule": LeftToRightRule()}, "commit_rule", "linear_spec"),
        ({"infill": True, "inputs": torch.tensor([[1, MASK]])}, "infill", "linear_spec"),
        ({"cache": "dual"}, "cache", "dual"),
        ({"draft_adapter": "x"}, "draft_adapter", "cache=block"),
        ({"draft_adapter": 3}, "draft_adapter", "3"),
        ({"threshold": -0.5}, "threshold", "-0.5"),
        ({"block_length": 0}, "block_length", "0"),
    ],
)
def test_refused(settings: dict[str, Any], field: str, named: str) -> None:
    with refused(RowError if field == "row 1" else SettingError, field, named) as error:
        generate(stand_in_model(), **{"inputs": torch.tensor([[1, 2]]), **ARGUMENTS, **settings})
    assert "\n" not in str(error.value)
