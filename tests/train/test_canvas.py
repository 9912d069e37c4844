"""DiffusionGemma's training: the batches, loss and gradients against its sampling, runs, what is refused."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import PreTrainedTokenizerFast

from dlm_bridge import DlmBridgeError
from dlm_bridge.data.conversations import ConversationSettings, load_conversation_blocks
from dlm_bridge.objectives.base import divisors
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.registry import build_objective
from dlm_bridge.objectives.two_streams import CanvasDiffusion
from dlm_bridge.train.accelerate import transforms
from dlm_bridge.train.accelerate.canvas import CanvasHead
from tests.canvas_models import CANVAS, EOS, IMAGE, VOCABULARY, canvas_model, has_class, write_canvas_model
from tests.convert.helpers import hub_tensors
from tests.data.chats import chatty, conversation, said, write_rows
from tests.train.conftest import Run, without_speed

pytestmark = has_class
LENGTH = 40
OBJECTIVE = CanvasDiffusion(mask_token_id=-1, block_size=CANVAS, vocabulary_size=VOCABULARY)
PREFIXES, ENDS = (5, 11, 17), (5 + 4 * CANVAS, 11 + 2 * CANVAS, 17 + CANVAS + 3)  # the last answer ends in a canvas


def batch(selected: tuple[float, ...] = (0.9, 0.1, 0.6)) -> tuple[torch.Tensor, NoisyBatch]:
    """Three rows of prompt, answer and padding, and their noisy batch: canvas 3, 0 and 1, self-conditioning in rows 0
    and 2."""
    ids = torch.randint(0, EOS, (3, LENGTH), generator=torch.Generator().manual_seed(5))
    labels, real = ids.clone(), torch.zeros(3, LENGTH, dtype=torch.bool)
    for row, (begin, end) in enumerate(zip(PREFIXES, ENDS, strict=True)):
        labels[row, :begin], labels[row, end:], real[row, :end] = -100, -100, True
    uniforms = Uniforms.keyed(1, 1, [0, 1, 2], LENGTH)
    block = uniforms.block.clone()
    block[:, 0], block[:, 1] = torch.tensor(selected), torch.tensor([0.1, 0.9, 0.4])
    return ids, OBJECTIVE.noise(ids, dataclasses.replace(uniforms, block=block), labels, real)


def test_a_canvas_is_a_part_of_the_answer_with_random_tokens() -> None:
    ids, noisy = batch()
    firsts = (PREFIXES[0] + 3 * CANVAS, PREFIXES[1], PREFIXES[2] + CANVAS)
    uniforms = Uniforms.keyed(1, 1, [0, 1, 2], LENGTH)
    changed = 0
    for row, first in enumerate(firsts):
        places = list(range(first, first + CANVAS))
        assert noisy.position_ids[row, LENGTH:].tolist() == places
        level = 1e-3 + (1 - 1e-3) * uniforms.level[row].item()
        for column, place in enumerate(places[: ENDS[row] - first]):
            replaced = uniforms.token[row, place].item() < level
            drawn = int(uniforms.replacement[row, place].item() * VOCABULARY)
            token = noisy.input_ids[row, LENGTH + column].item()
            assert token == (drawn if replaced else ids[row, place].item())
            changed += replaced
    assert 0 < changed < 3 * CANVAS
    assert torch.equal(noisy.input_ids[:, :LENGTH], ids)  # the encoder reads clean tokens
    canvas = noisy.mask[:, LENGTH:]
    assert canvas.sum(dim=1).tolist() == [CANVAS, CANVAS, 3]  # what is not replaced counts too
    assert noisy.mask[:, :LENGTH].sum(dim=1).tolist() == [end - 1 for end in ENDS]  # of the prompt too
    assert noisy.normaliser.tolist() == [2 * CANVAS + 3, sum(ENDS) - 3]
    assert noisy.self_conditioned.tolist() == [True, False, True]


def test_every_canvas_and_both_kinds_of_pass_are_drawn() -> None:
    """Keyed by (seed, step, sample): a row has the same noise in any batch, and another one at another step."""
    ids = torch.arange(64)[None].expand(400, -1)
    labels = torch.where(torch.arange(64) < 16, -100, ids)
    found = OBJECTIVE.noise(ids, Uniforms.keyed(3, 1, range(400), 64), labels)
    counts = torch.bincount((found.position_ids[:, 64] - 16) // CANVAS, minlength=6)
    assert counts.shape == (6,)
    assert (counts > 40).all()
    assert 160 < found.self_conditioned.sum() < 240
    alone = OBJECTIVE.noise(ids[:1], Uniforms.keyed(3, 1, [7], 64), labels[:1])
    assert torch.equal(alone.input_ids[0], found.input_ids[7])
    assert alone.self_conditioned[0] == found.self_conditioned[7]
    later = OBJECTIVE.noise(ids, Uniforms.keyed(3, 2, range(400), 64), labels)
    assert not torch.equal(later.position_ids, found.position_ids)
    replaced = (found.input_ids[:, 64:] != found.position_ids[:, 64:]).float().mean()
    assert 0.45 < replaced < 0.55  # t is uniform
    assert found.input_ids[:, 64:].max() > 250


def capped(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    return 30 * torch.tanh(model.lm_head(hidden) / 30)


def sampled_loss(model: Any, ids: torch.Tensor, noisy: NoisyBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of both terms as sampling computes them: transformers' forward pass of each canvas behind its prefix."""
    canvases, following = torch.zeros(()), torch.zeros(())
    for row, end in enumerate(ENDS):
        first = int(noisy.position_ids[row, LENGTH])
        count = min(CANVAS, end - first)
        tokens = noisy.input_ids[row, LENGTH : LENGTH + count][None]
        prefix = ids[row, :first][None]
        given = {"input_ids": prefix, "decoder_input_ids": tokens}
        with torch.no_grad():
            before = model(**given).logits
        more = {"self_conditioning_logits": before} if noisy.self_conditioned[row] else {}
        logits = model(**given, **more).logits[0]
        canvases = canvases + F.cross_entropy(logits, ids[row, first : first + count], reduction="sum")
        encoded = model.model.encoder(ids[row, :end][None]).last_hidden_state[0, :-1]
        following = following + F.cross_entropy(capped(model, encoded), ids[row, 1:end], reduction="sum")
    return canvases, following


def head_loss(head: CanvasHead, model: Any, noisy: NoisyBatch) -> tuple[torch.Tensor, torch.Tensor]:
    positions = transforms.loss_positions(noisy)
    positions = transforms.normalised_positions(positions, divisors(noisy.normaliser), torch.device("cpu"))
    inputs = {"input_ids": noisy.input_ids, "attention_mask": noisy.model_mask(), "position_ids": noisy.position_ids}
    return head.loss(model, positions, **inputs, self_conditioned=noisy.self_conditioned, use_cache=False)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_loss_and_gradients_are_those_of_sampling(attention: str) -> None:
    """Prefixes and canvases reach beyond the sliding window; keys and values of the encoder have gradients."""
    model = canvas_model(seed=2)
    model.set_attn_implementation(attention)
    ids, noisy = batch()
    canvases, following = sampled_loss(model, ids, noisy)
    expected = canvases / noisy.normaliser[0].float() + following / noisy.normaliser[1].float()
    names = [name for name, weight in model.named_parameters() if "vision" not in name and weight.requires_grad]
    weights = [dict(model.named_parameters())[name] for name in names]
    gradients = torch.autograd.grad(expected, weights)
    loss, terms = head_loss(CanvasHead(model), model, noisy)
    found = torch.autograd.grad(loss, weights)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(terms, torch.stack([canvases, following]).detach() / noisy.normaliser.float())
    for name, ours, theirs in zip(names, found, gradients, strict=True):
        rounding = 1e-4 * float(theirs.abs().max())  # of sums in fp32, in another order on another processor
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=rounding, msg=name)
    assert any(gradient.abs().max() > 1e-3 for name, gradient in zip(names, found, strict=True) if "experts" in name)


def test_settings_come_from_the_config() -> None:
    model = canvas_model()
    found = build_objective("canvas", -1, config=model.config)
    assert (found.block_size, found.vocabulary_size) == (CANVAS, VOCABULARY)
    assert (found.eps, found.encoder_weight, found.self_conditioning) == (1e-3, 1.0, 0.5)
    model.config.canvas_length = None
    with pytest.raises(DlmBridgeError, match="canvas_length"):
        build_objective("canvas", -1, config=model.config)


def test_an_answer_is_filled_to_whole_canvases(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    """Counted from its first token, wherever the prompt ends; of several answers the last is trained."""
    two = [said("user", "def f"), said("assistant", "(x)"), said("user", "def"), said("assistant", "return x + 1")]
    file = write_rows(tmp_path / "chats.jsonl", [{"messages": two}, conversation(1)])
    settings = ConversationSettings(128, None, eos_padding="block", block_size=CANVAS, answer_blocks=True)
    with caplog.at_level(logging.WARNING):
        blocks = load_conversation_blocks([file], chatty(tokenizer), settings)
    assert "1 rows have several answers" in caplog.text
    rows = blocks.rows([0, 1])
    for row in (0, 1):
        answered = (rows.labels[row] != -100).nonzero()[:, 0]
        assert len(answered) % CANVAS == 0
        assert answered.tolist() == list(range(answered[0], answered[0] + len(answered)))
        assert rows.attention_mask[row].sum() == answered[-1] + 1  # the filling is attended to
    text = tokenizer.decode(rows.labels[0][rows.labels[0] != -100])
    assert text.startswith("return x + 1")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_canvas_model(tmp_path_factory.mktemp("base") / "gemma")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return write_rows(tmp_path_factory.mktemp("chats") / "chats.jsonl", [conversation(4 * i) for i in range(12)])


def options(base: Path, chats: Path, **changes: Any) -> dict[str, Any]:
    given = {
        "model": str(base),
        "data": [str(chats)],
        "task": "sft",
        "from_scratch": False,
        "length_variation": 0.0,
        "warmup_steps": 0,
        "lr_schedule": "constant",
        "lr": 1e-2,
        "seq_length": 96,
        "global_batch_size": 4,
        "steps": 2,
        "save_interval": 0,
        "eval_interval": 0,
    }
    return {**given, **changes}


def test_a_run_saves_what_transformers_loads(run: Run, base: Path, chats: Path, tmp_path: Path) -> None:
    from transformers import DiffusionGemmaForBlockDiffusion

    rows = run(tmp_path / "out", **options(base, chats, steps=3, save_interval=2, micro_batch_size=2))
    assert rows[-1]["loss"] < rows[0]["loss"]
    whole = run(tmp_path / "whole", **options(base, chats, steps=1, micro_batch_size=4))
    assert whole[0]["loss"] == pytest.approx(rows[0]["loss"], rel=1e-5)  # micro-batches change nothing
    assert whole[0]["grad_norm"] == pytest.approx(rows[0]["grad_norm"], rel=1e-4)
    saved = tmp_path / "out/checkpoints/step-0000003"
    text = json.loads((saved / "config.json").read_text())["text_config"]
    assert "per_layer_config" not in text  # but the Hub's keys, which vLLM reads
    assert text["global_head_dim"] == 32
    _, info = DiffusionGemmaForBlockDiffusion.from_pretrained(saved, output_loading_info=True)
    assert not any(info.values())
    before, after = hub_tensors(base), hub_tensors(saved)
    assert before.keys() == after.keys()
    assert all(before[name].shape == after[name].shape for name in before)
    kept = {name for name in before if torch.equal(before[name].float(), after[name].float())}
    frozen = ("router", "vision", "layer_scalar")  # as the recipes freeze it; images are not trained; buffers
    assert kept == {name for name in before if any(part in name for part in frozen)}
    (tmp_path / "out/checkpoints/step-0000003").rename(tmp_path / "first")
    again = run(tmp_path / "out", True, **options(base, chats, steps=3, save_interval=2, micro_batch_size=2))
    assert without_speed(again) == without_speed(rows)
    resumed = hub_tensors(saved)
    assert all(torch.equal(after[name], resumed[name]) for name in after)


def test_pretraining_takes_plain_rows(run: Run, base: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 40)
    changes = {"task": "pretrain", "data": [str(text)], "seq_length": 32, "steps": 1, "precision": "bf16"}
    (row,) = run(tmp_path / "out", **options(base, text, **changes))
    assert 0 < row["loss"] < 20


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"packing": True}, "packing"),
        ({"block_schedule": "1:4"}, "block_schedule"),
        ({"sharding": "fsdp"}, "sharding"),
        ({"attention_backend": "flex_attention"}, "attention_backend"),
        ({"objective": "block"}, "objective"),
        ({"loss_weighting": "level"}, "loss.weighting"),
        ({"seq_length": 1024}, "seq_length"),
    ],
)
def test_what_is_refused(
    run: Run, base: Path, chats: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(DlmBridgeError, match=f"^(--)?{named}"):
        run(tmp_path / "out", **options(base, chats, **changes))


def test_an_image_in_a_row_is_named_by_its_line(run: Run, base: Path, tmp_path: Path) -> None:
    rows = [conversation(1), {"messages": [said("user", "see <image>"), said("assistant", "x")]}]
    file = write_rows(tmp_path / "chats.jsonl", rows)
    with pytest.raises(DlmBridgeError) as error:
        run(tmp_path / "out", **options(base, file))
    assert all(word in str(error.value) for word in ("chats.jsonl", "2", "image", str(IMAGE)))
