"""KV caches: exact ones change no token, approximate ones give the tokens of their paper's algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from dlm_bridge.errors import SettingError
from dlm_bridge.generation import canvas, commit_rules, predictors
from dlm_bridge.generation.engine import SamplingEngine
from dlm_bridge.generation.predictors import BlockCachePredictor
from dlm_bridge.generation.request import Ended, Extended, Request
from dlm_bridge.generation.runtime import attention, graphs
from tests.families.case import FamilyCase, some_slow
from tests.generation.conftest import MASK, prompts
from tests.generation.recorded import read as read_with_overlap
from tests.generation.test_families import DIFFUSION
from tests.refusals import refused

WITH_BLOCK_CACHE = [
    case
    for case in DIFFUSION
    if case.spec.attention_pattern == "block_causal" or case.spec.sampler["algorithm"] == "nemotron"
]
REORDERED = [case for case in DIFFUSION if case.spec.sampler["algorithm"] == "wedlm"]


def load_case(case: FamilyCase, folder: Path) -> tuple[Any, int]:
    """A peaked model in float64, in which tokens are not decided by rounding, and its mask token; its blocks have 8
    tokens or fewer."""
    model = case.load(case.write(folder / "hub"), dtype=torch.float64)
    model.set_experts_implementation("eager")  # torch._grouped_mm has no float64
    if case.block is not None:
        model.config.block_size = min(case.block, 8)
    mask = model.config.vocab_size - 1
    with torch.no_grad():
        head = model.get_output_embeddings().weight.mul_(10)
        head[mask] = 0
    return model.requires_grad_(False), mask


def logits_of(
    model: Any, monkeypatch: pytest.MonkeyPatch, instead: Sequence[torch.Tensor] = (), **settings: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What `generate` returns, and the logits that each step looked at. `instead`: the logits that each step goes on
    with."""
    seen: list[torch.Tensor] = []
    propose = commit_rules.propose_tokens

    def recording(logits: torch.Tensor, *others: Any) -> Any:
        seen.append(logits.clone())
        if instead:
            logits.copy_(instead[len(seen) - 1])
        return propose(logits, *others)

    with monkeypatch.context() as patch:
        patch.setattr(commit_rules, "propose_tokens", recording)
        return model.generate(**settings), seen


@pytest.mark.parametrize("case", some_slow(WITH_BLOCK_CACHE, "llada2_moe-2.2"))
@pytest.mark.fast("fast_dllm_v2-tied", "nemotron_labs_diffusion", "sdar", "sdar_moe", "dream_reasoner")
def test_block_cache_is_exact(case: FamilyCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different lengths, some of which end early and leave the batch, have the same tokens; each alone, the
    same logits in every step."""
    model, mask = load_case(case, tmp_path)
    block = model.config.block_size if case.spec.attention_pattern == "block_causal" else 8
    lengths = (1, block + 3, 2 * block)
    width = max(lengths)
    tokens = torch.randint(4, 60, (3, width), generator=torch.Generator().manual_seed(5))
    real = torch.tensor([[column >= width - length for column in range(width)] for length in lengths]).long()
    settings = {"input_ids": tokens, "attention_mask": real, "gen_length": 3 * block, "temperature": 0.0}
    settings |= {"mask_token_id": mask, "pad_token_id": 0}
    if case.spec.attention_pattern != "block_causal":
        settings["block_length"] = block
    if case.spec.name == "fast_dllm_v2":
        settings["small_block_size"] = block // 4
    free = model.generate(**settings, cache="none", eos_token_id=None)
    ending = [int(free[0, width + 1])]  # so that the first row ends in its first block
    for stop in (None, ending):
        plain = model.generate(**settings, eos_token_id=stop, cache="none")
        assert torch.equal(model.generate(**settings, eos_token_id=stop), plain)  # the default
    for row, length in zip(tokens, lengths, strict=True):
        alone = settings | {"input_ids": row[None, width - length :], "attention_mask": None}
        plain, plain_logits = logits_of(model, monkeypatch, **alone, eos_token_id=None, cache="none")
        cached, kept_logits = logits_of(model, monkeypatch, **alone, eos_token_id=None)
        assert torch.equal(cached, plain)
        assert [logits.shape for logits in kept_logits] == [logits.shape for logits in plain_logits]
        for ours, theirs in zip(kept_logits, plain_logits, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert not any(hasattr(module, "kv_keys") for module in model.modules())  # the model is as it was


SDAR = next(case for case in WITH_BLOCK_CACHE if case.spec.name == "sdar")


def widths_of(model: Any, **settings: Any) -> tuple[Any, list[int]]:
    """What `generate` returns, and how many columns each of its forward passes ran."""
    widths: list[int] = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    output = model.generate(**settings, return_dict_in_generate=True)
    hook.remove()
    return output, widths


def test_caching_a_block_takes_no_forward_pass_of_its_own(tmp_path: Path) -> None:
    """The prompt is run with the first block, a committed block with the next one, the last one not again."""
    model, mask = load_case(SDAR, tmp_path)
    block = model.config.block_size
    settings = {"inputs": prompts(2, 2 * block) % 60, "gen_length": 3 * block, "temperature": 0.0}
    settings |= {"mask_token_id": mask, "eos_token_id": None, "remasking_strategy": "low_confidence_static"}
    for steps in (1, block):
        output, widths = widths_of(model, **settings, denoising_steps=steps)
        again = [block] * (steps - 1)
        assert widths == [3 * block, *again, 2 * block, *again, 2 * block, *again]
        assert output.forwards == len(widths) == 3 * steps
        assert output.tokens_per_forward == block / steps


@pytest.mark.slow
@pytest.mark.parametrize("case", some_slow(WITH_BLOCK_CACHE, "llada2_moe-2.2"))
def test_a_block_is_cached_as_by_a_forward_pass_of_its_own(
    case: FamilyCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block's first forward pass, which also caches the block before, against two separate ones."""
    model, mask = load_case(case, tmp_path)
    block = model.config.block_size if case.spec.attention_pattern == "block_causal" else 8
    tokens, real = prompts(3, 2 * block + 1) % 60, torch.ones(3, 2 * block + 1, dtype=torch.long)
    real[1, : block + 2] = 0
    settings = {"inputs": tokens, "attention_mask": real, "gen_length": 3 * block, "temperature": 0.0}
    settings |= {"mask_token_id": mask, "pad_token_id": 0, "eos_token_id": None}
    if case.spec.attention_pattern != "block_causal":
        settings["block_length"] = block
    if case.spec.name == "fast_dllm_v2":
        settings["small_block_size"] = block // 4
    together, logits = logits_of(model, monkeypatch, **settings)
    forwards = len(widths_of(model, **settings)[1])
    view = BlockCachePredictor.view

    def view_of_the_block(self: BlockCachePredictor, *arguments: Any) -> Any:
        if self._cached < self._block.start:
            self._hidden_before_block()
        return view(self, *arguments)

    monkeypatch.setattr(BlockCachePredictor, "view", view_of_the_block)
    apart, expected = logits_of(model, monkeypatch, **settings)
    assert torch.equal(together, apart)
    for ours, theirs in zip(logits, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    saved = len(widths_of(model, **settings)[1]) - forwards
    # Where a block's first token is committed alone, it needs no more than the column before it.
    assert saved == {"nemotron_labs_diffusion": 0, "fast_dllm_v2": 1}.get(case.spec.name, 4)


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("case", [SDAR, REORDERED[0]], ids=lambda case: case.id)
def test_context_length_on_the_device(
    case: FamilyCase, padded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The context length as a tensor, so that one graph serves every length: PyTorch's attention takes it as well."""
    model, mask = load_case(case, tmp_path)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(
        attention,
        "uses_kernel",
        lambda shapes, dtype, columns, mask: columns.dim() == 1 and (mask is None or mask.shape[2] == 1),
    )
    tokens = prompts(3, 9) % 60
    real = torch.ones_like(tokens)
    real[1, : 7 * padded] = 0
    settings = {"input_ids": tokens, "attention_mask": real, "gen_length": 16, "temperature": 0.0}
    settings |= {"mask_token_id": mask, "pad_token_id": 0, "eos_token_id": None}
    lengths: set[Any] = set()
    run = graphs.run_body

    def run_body(model: Any, kept: Any, inputs: graphs.BodyInputs) -> torch.Tensor:
        lengths.add((inputs.end, None if inputs.length is None else int(inputs.length)))
        return run(model, kept, inputs)

    expected, expected_logits = logits_of(model, monkeypatch, **settings)
    monkeypatch.setattr(graphs, "run_body", run_body)
    found, logits = logits_of(model, monkeypatch, **settings, execution="compiled")
    assert torch.equal(found, expected)
    for ours, theirs in zip(logits, expected_logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    if case is SDAR:  # the buffers' width, but for the prompt's forward, of which the mask says what is seen
        assert lengths == {(12, None), *((64, end) for end in (12, 16, 20, 24, 28))}
    else:  # each row's own columns
        assert all(known is None for _, known in lengths)


@pytest.mark.parametrize("free", [0, 256])
@pytest.mark.parametrize(
    "case", [case for case in WITH_BLOCK_CACHE if case.spec.name in ("sdar", "fast_dllm_v2")], ids=lambda case: case.id
)
@pytest.mark.fast("fast_dllm_v2-tied-0", "sdar-0", "sdar-256")
def test_a_speculative_forward_pass_is_the_next(
    case: FamilyCase, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the next forward pass is launched before the rule's answer is known: the same text, by as many forward
    passes where the next block comes with it, else by one more where a block is complete before its last step."""
    monkeypatch.setattr(predictors, "SPECULATIVE_TOKENS", free)
    model, mask = load_case(case, tmp_path)
    block = model.config.block_size
    tokens = prompts(4, block + 3) % 60
    real = torch.ones_like(tokens)
    real[1, :block] = 0
    settings = {"attention_mask": real, "gen_length": 3 * block, "temperature": 0.0, "mask_token_id": mask}
    settings |= {"pad_token_id": 0, "return_dict_in_generate": True}
    runs: list[int] = []
    early: list[bool] = []
    model.model.register_forward_pre_hook(lambda *_: runs.append(1))

    def read(flags: torch.Tensor, overlap_with: Callable[[], None]) -> list[bool]:
        before = len(runs)
        overlap_with()
        early.append(len(runs) > before)
        return flags.tolist()

    text = model.generate(tokens, **settings, eos_token_id=None).sequences
    for stops in (None, [int(text[0, block + 4])], sorted({int(text[row, block + 4]) for row in range(4)})):
        found = []
        for ahead in (False, True):
            runs.clear()
            with monkeypatch.context() as patch:
                if ahead:
                    patch.setattr(canvas, "read_flags", read)
                found.append((model.generate(tokens, **settings, eos_token_id=stops), len(runs)))
        (expected, before), (output, after) = found
        assert torch.equal(output.sequences, expected.sequences)
        assert output.tokens_per_forward == expected.tokens_per_forward
        assert expected.forwards <= output.forwards <= expected.forwards + (0 if free else 3)
        assert before == expected.forwards
        # One that nobody asks for where every row ends before the last block.
        assert output.forwards <= after <= output.forwards + 1
    assert any(early)


def test_rows_leave_with_a_first_block_that_was_run_speculatively(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts shorter than a block: that forward pass is the first that caches anything."""
    model, mask = load_case(SDAR, tmp_path)
    block = model.config.block_size
    tokens = prompts(4, block // 2) % 60
    settings = {"gen_length": 3 * block, "temperature": 0.0, "mask_token_id": mask, "pad_token_id": 0}
    text = model.generate(tokens, **settings, eos_token_id=None)
    settings["eos_token_id"] = [int(text[0, block - 1])]
    expected = model.generate(tokens, **settings)
    going = (expected[:, block:] != 0).any(dim=1)
    assert not going[0]
    assert going.any()
    monkeypatch.setattr(canvas, "read_flags", read_with_overlap)
    assert torch.equal(model.generate(tokens, **settings), expected)


@pytest.mark.parametrize("speculative", [False, True])
def test_a_longer_prompt_enters_before_anything_is_cached(
    speculative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a continuous batch, whose columns move to the right."""
    model, mask = load_case(SDAR, tmp_path)
    block = model.config.block_size
    settings = {"mask_token_id": mask, "eos_token_id": None, "temperature": 0.0}
    rows = [Request("short", [5], 2 * block), Request("long", list(range(6, 7 + 2 * block)), block)]
    expected: dict[Any, tuple[int, ...]] = {}
    for row in rows:
        output = model.generate(torch.tensor([row.prompt]), gen_length=row.gen_length, **settings)
        expected[row.name] = tuple(output[0, len(row.prompt) :].tolist())
    if speculative:
        monkeypatch.setattr(canvas, "read_flags", read_with_overlap)
    batch = SamplingEngine(model, settings, max_rows=2, max_length=4 * block)
    batch.submit(rows[0])
    while not any(isinstance(event, Extended) for event in batch.step()):
        pass
    batch.submit(rows[1])
    events: list[Any] = []
    while not batch.idle:
        events += batch.step()
    assert {event.name: event.tokens for event in events if isinstance(event, Ended)} == expected


@pytest.mark.parametrize("threshold", [None, 3.0])
@pytest.mark.parametrize("case", REORDERED, ids=lambda case: case.id)
@pytest.mark.fast("wedlm-None", "wedlm-3.0")
def test_tokens_committed_without_a_gap_are_cached(
    case: FamilyCase, threshold: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of different lengths, whose tokens are committed at different speed and out of order, and which end
    apart."""
    model, mask = load_case(case, tmp_path)
    lengths = (1, 9, 6, 0)
    tokens = torch.randint(4, 60, (4, 9), generator=torch.Generator().manual_seed(5))
    real = torch.tensor([[column >= 9 - length for column in range(9)] for length in lengths]).long()
    settings = {"input_ids": tokens, "attention_mask": real, "gen_length": 24, "temperature": 0.0}
    settings |= {"mask_token_id": mask, "pad_token_id": 0, "wedlm_window_size": 6}
    settings |= {"wedlm_entropy_threshold": threshold, "wedlm_pos_penalty_factor": 0.3}
    free = model.generate(**settings, cache="none", eos_token_id=None)
    for stop in (None, [int(free[1, 13]), int(free[2, 20])]):
        plain, plain_logits = logits_of(model, monkeypatch, **settings, eos_token_id=stop, cache="none")
        kept, kept_logits = logits_of(model, monkeypatch, **settings, eos_token_id=stop)  # the default
        assert torch.equal(kept, plain)
        assert len(kept_logits) == len(plain_logits) < 24 or threshold is None
        for ours, theirs in zip(kept_logits, plain_logits, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("gen_length", [0, 10])
def test_tokens_before_the_first_mask_to_fill_are_cached(
    gen_length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, mask = load_case(REORDERED[0], tmp_path)
    tokens = torch.randint(4, 60, (3, 20), generator=torch.Generator().manual_seed(5))
    tokens[0, [4, 5, 6, 15]], tokens[1, [0, 12]], tokens[2, 17:] = mask, mask, mask
    settings = {"input_ids": tokens, "infill": True, "mask_token_id": mask, "pad_token_id": 0, "eos_token_id": None}
    settings |= {"wedlm_window_size": 5, "temperature": 0.0} | ({"gen_length": gen_length} if gen_length else {})
    plain, plain_logits = logits_of(model, monkeypatch, **settings, cache="none")
    kept, kept_logits = logits_of(model, monkeypatch, **settings)
    assert torch.equal(kept, plain)
    for ours, theirs in zip(kept_logits, plain_logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_a_forward_pass_runs_two_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One shape for all forward passes but the first, however long the text."""
    model, mask = load_case(REORDERED[0], tmp_path)
    shapes = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    settings = {"gen_length": 40, "wedlm_window_size": 6, "temperature": 0.0, "mask_token_id": mask}
    model.generate(prompts(2, 11) % 60, **settings, eos_token_id=None, wedlm_entropy_threshold=2.5)
    assert shapes[0] == (2, 17)
    assert {shape[1] for shape in shapes[1:]} == {12}


@pytest.mark.extension("extra_samplers")
def test_block_cache_with_guidance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """dLLM's bd3lm sampler, whose second copy of every row does not see the prompt."""
    model, mask = load_case(next(case for case in DIFFUSION if case.spec.name == "a2d_qwen3"), tmp_path)
    settings = {
        "inputs": prompts(2, 9) % 60,
        "mask_token_id": mask,
        "algorithm": "bd3lm",
        "block_size": 4,
        "steps": 8,
        "gen_length": 16,
    }
    settings |= {"cfg_scale": 0.7, "eos_token_id": None}
    plain, plain_logits = logits_of(model, monkeypatch, **settings, cache="none")
    kept, kept_logits = logits_of(model, monkeypatch, **settings, cache="block")
    assert torch.equal(kept, plain)
    for ours, theirs in zip(kept_logits, plain_logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


class Frozen:
    """LLaDA's body by hand, which reads the keys and values of an earlier pass outside some columns."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def logits(self, tokens_S: list[int], columns: range, *, keep: bool) -> torch.Tensor:
        """[N, V] of the columns; `keep` caches everything that this pass computes."""
        body = self.model.model
        picked = torch.tensor(list(columns))
        hidden = body.embed_tokens(torch.tensor([tokens_S]))[:, picked]
        cos, sin = body.rotary_emb(hidden, picked[None])
        kept = []
        for number, layer in enumerate(body.layers):
            attention = layer.self_attn
            normed = layer.input_layernorm(hidden)
            q, k, v = (
                projection(normed).view(1, len(picked), -1, attention.head_dim).transpose(1, 2)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            if keep:
                keys, values = k, v
                kept.append((k, v))
            else:
                keys, values = (old.clone() for old in self.kept[number])
                keys[:, :, picked], values[:, :, picked] = k, v
            groups = q.shape[1] // keys.shape[1]
            keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
            weights = (q @ keys.mT * attention.scaling).softmax(-1)
            hidden = hidden + attention.o_proj((weights @ values).transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        self.kept = kept or self.kept
        return self.model.lm_head(body.norm(hidden))[0]


@torch.no_grad()
def fast_dllm(model: Any, prompt: list[int], gen: int, block: int, behind: bool) -> list[int]:
    """One token a step, LLaDA's confidence; a block's first pass runs everything, the others cache the columns outside
    the block (`behind`: before it)."""
    row, frozen = prompt + [MASK] * gen, Frozen(model)
    for start in range(len(prompt), len(row), block):
        for step in range(block):
            columns = range(len(row)) if step == 0 else range(start, len(row) if behind else start + block)
            probabilities = frozen.logits(row, columns, keep=step == 0).softmax(-1)
            open_ = [i for i in range(start, start + block) if row[i] == MASK]
            best = max(open_, key=lambda i: float(probabilities[i - columns.start].max()))
            row[best] = int(probabilities[best - columns.start].argmax())
    return row


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.fast("dual")
def test_approximate_caches_are_fast_dllm_s(model: Any, cache: str) -> None:
    differs = False
    for seed in range(6):
        tokens = prompts(1, 11, seed)
        settings = {"gen_length": 32, "block_length": 8, "eos_token_id": None}
        ours = model.generate(tokens, **settings, cache=cache)[0].tolist()
        assert ours == fast_dllm(model, tokens[0].tolist(), 32, 8, behind=cache == "prefix")
        differs |= ours != model.generate(tokens, **settings)[0].tolist()
    assert differs  # the default keeps nothing, and approximations show


def test_a_row_is_what_it_is_alone(model: Any) -> None:
    tokens, real = prompts(3, 9), torch.ones(3, 9, dtype=torch.long)
    real[1, :4] = 0
    settings = {"gen_length": 16, "block_length": 8, "cache": "dual", "threshold": 0.02}
    batch = model.generate(tokens, attention_mask=real, **settings, eos_token_id=None)
    alone = model.generate(tokens[1:2, 4:], **settings, eos_token_id=None)
    assert torch.equal(batch[1, 9:], alone[0, 5:])


def test_one_block_needs_no_approximation(model: Any) -> None:
    """A shifted prediction comes from the column before the block, which is run as well; with one step a block no
    cached column is outdated: the caches change nothing."""
    tokens = prompts(2, 7)
    settings = {"gen_length": 16, "block_length": 4, "steps": 4, "eos_token_id": None}
    plain = model.generate(tokens, **settings)
    for cache in ("prefix", "dual"):
        assert torch.equal(model.generate(tokens, **settings, cache=cache), plain)


def test_compiled_layers_share_their_code(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer is traced once for each kind of forward pass, not once for each layer."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    settings = {"gen_length": 16, "block_length": 8, "eos_token_id": None}
    plain = {cache: model.generate(prompts(2, 9), **settings, cache=cache) for cache in ("none", "dual")}
    with torch._dynamo.config.patch(recompile_limit=4):
        for cache, expected in plain.items():
            assert torch.equal(model.generate(prompts(2, 9), **settings, cache=cache, execution="compiled"), expected)
    assert 1 <= counters["stats"]["unique_graphs"] <= 4
    assert all(layer._compiled_call_impl is None for layer in model.model.layers)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"cache": "block"}, "none or prefix or dual"),
        ({"cache": "static"}, "none, prefix"),
        ({"execution": "graph"}, "cpu"),
        ({"execution": "fast"}, "eager"),
    ],
)
def test_bad_input(model: Any, settings: dict[str, Any], named: str) -> None:
    with refused(SettingError, next(iter(settings)), named):
        model.generate(prompts(1, 4), gen_length=8, block_length=8, **settings)
