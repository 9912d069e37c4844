"""Fine-tuning through the engine: the published loss, family defaults, packing, resume, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from dlm_bridge.cli.app import main
from dlm_bridge.errors import DlmBridgeError, InputFileError
from dlm_bridge.generation.settings import resolve_settings
from dlm_bridge.models.families import families, family_by_name
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.registry import OBJECTIVES
from dlm_bridge.train.config.files import load_config, read_yaml
from tests.autoregressive.cases import CASES as AUTOREGRESSIVE
from tests.data.chats import chatty, conversation, write_rows
from tests.families import dream, fast_dllm_v2, nemotron_labs_diffusion, sdar, wedlm
from tests.refusals import refused
from tests.train.conftest import VOCAB, Run, without_speed

ROWS = 24
SHORT = {
    "task": "sft",
    "length_variation": 0.0,
    "warmup_steps": 0,
    "lr_schedule": "constant",
    "seq_length": 96,
    "global_batch_size": 8,
    "save_interval": 0,
    "eval_interval": 0,
    "split": "100,0,0",
}
FAMILY_CASES = {
    "shifted": dream.CASE,
    "block": sdar.CASES[0],
    "block_complementary": fast_dllm_v2.CASES[0],
    "nemotron": nemotron_labs_diffusion.CASES[0],
    "wedlm": wedlm.CASES[0],
}


@pytest.fixture(scope="module")
def chat(tokenizer: PreTrainedTokenizerFast) -> Any:
    return chatty(tokenizer)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(
        tmp_path_factory.mktemp("chats") / "chats.jsonl", [conversation(number) for number in range(ROWS)]
    )


@pytest.fixture
def options(seed_folder: Path, chat: Any, chats: Path, tmp_path: Path) -> dict[str, Any]:
    """Of a LLaDA from scratch."""
    raw = json.loads((seed_folder / "config.json").read_text())
    chat.save_pretrained(tmp_path / "llada")
    (tmp_path / "llada/config.json").write_text(json.dumps(raw | {"max_sequence_length": 128}))
    folder = str(tmp_path / "llada")
    return {**SHORT, "model": folder, "data": [str(chats)], "tokenizer": folder}


def _body(case: Any, folder: Path, chat: Any) -> dict[str, Any]:
    """A folder with the config.json of another family, for the tokenizer's vocabulary."""
    folder.mkdir()
    config = {**case.config, "vocab_size": VOCAB, "mask_token_id": chat.mask_token_id, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": 0, "max_position_embeddings": 256}))
    return {"model": str(folder)}


def _resolved(output: Path) -> dict[str, Any]:
    return read_yaml(output / "config.yaml")


def test_lladas_loss_is_that_of_its_guidelines(tmp_path: Path, run: Run, options: dict[str, Any], chat: Any) -> None:
    """Prompts keep their tokens, EOS to the end of the row is answer, each answer's sum is over its own length."""
    (row,) = run(tmp_path / "run", steps=1, lr=0.0, **options)
    resolved = _resolved(tmp_path / "run")
    assert (resolved["eos_padding"], resolved["loss_normalisation"]) == ("row", "sequences")
    raw = json.loads((tmp_path / "llada/config.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoints/step-0000001").eval()
    weights = dict(families()[0].initial_weights(raw, seed=0))
    model.load_state_dict(type(model).from_pretrained(None, config=model.config, state_dict=weights).state_dict())

    from dlm_bridge.data.blocks import Epochs
    from dlm_bridge.data.conversations import ConversationSettings, load_conversation_blocks

    blocks = load_conversation_blocks(
        [Path(options["data"][0])], chat, ConversationSettings(96, chat.mask_token_id, eos_padding="row")
    )
    chosen = [Epochs(blocks, seed=0).block(sample) for sample in range(8)]
    uniforms = Uniforms.keyed(0, 1, range(8), 96)
    loss, two_turns = 0.0, 0
    for place, number in enumerate(chosen):
        messages = conversation(number)["messages"]
        ids = chat.apply_chat_template(messages, tokenize=True)["input_ids"]
        answer = []
        for turn, message in enumerate(messages):
            text = f"{message['role']}:\n"
            count = len(chat(text, add_special_tokens=False)["input_ids"])
            whole = len(chat(f"{text}{message['content']}<eos>", add_special_tokens=False)["input_ids"])
            answer += [False] * (whole if turn % 2 == 0 else count) + [True] * (0 if turn % 2 == 0 else whole - count)
        assert len(answer) == len(ids)
        ids, answer = ids + [0] * (96 - len(ids)), answer + [True] * (96 - len(ids))
        p = (1 - 1e-3) * uniforms.level[place].item() + 1e-3
        masked = [answer[i] and uniforms.token[place, i].item() < p for i in range(96)]
        seen = torch.tensor([[chat.mask_token_id if masked[i] else ids[i] for i in range(96)]])
        with torch.no_grad():
            log_probabilities = model(seen).logits[0].log_softmax(-1)
        costs = -sum(log_probabilities[i, ids[i]].item() for i in range(96) if masked[i])
        loss += costs / p / sum(answer) / 8
        two_turns += len(messages) == 4
    assert two_turns
    assert row["loss"] == pytest.approx(loss, rel=1e-5)


def test_packed_conversations_cost_what_they_cost_alone(tmp_path: Path, run: Run, chat: Any, chats: Path) -> None:
    """Next-token training draws no noise: one step over all conversations, padded or packed, has the same loss and
    gradient; as a mean over tokens or over conversations."""
    chat.save_pretrained(tmp_path / "tokenizer")
    options = {**SHORT, **_body(AUTOREGRESSIVE[0], tmp_path / "model", chat), "from_scratch": True}
    options |= {"data": [str(chats)], "tokenizer": str(tmp_path / "tokenizer")}
    for normalisation in ("predicted", "sequences"):
        both = {}
        for packing in (False, True):
            output = tmp_path / f"{normalisation}-{packing}"
            count = ROWS if not packing else _packed_rows(chat, chats)
            changes = {"packing": packing, "global_batch_size": count, "loss_normalisation": normalisation}
            (both[packing],) = run(output, steps=1, **{**options, **changes})
        assert _packed_rows(chat, chats) < ROWS / 1.5
        for key in ("loss", "grad_norm"):
            assert both[True][key] == pytest.approx(both[False][key], rel=1e-4), key


def _packed_rows(chat: Any, chats: Path) -> int:
    from dlm_bridge.data.conversations import ConversationSettings, load_conversation_blocks

    return len(load_conversation_blocks([chats], chat, ConversationSettings(96, None, packing=True)))


@pytest.mark.parametrize("objective", FAMILY_CASES)
@pytest.mark.fast("block", "nemotron")
def test_every_objective_is_tuned_packed_cut_and_resumed(
    objective: str, tmp_path: Path, run: Run, options: dict[str, Any], chat: Any
) -> None:
    options |= _body(FAMILY_CASES[objective], tmp_path / "model", chat) | {"packing": True, "from_scratch": True}
    options |= {"global_batch_size": 4, "lr": 1e-3}
    whole = run(tmp_path / "whole", steps=2, **options)
    resolved = _resolved(tmp_path / "whole")
    assert resolved["objective"] == objective
    assert resolved["eos_padding"] == ("block" if objective == "block" else "none")
    cut = run(tmp_path / "cut", steps=2, micro_batch_size=1, **options)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in cut] == pytest.approx([row[key] for row in whole], rel=1e-4)
    run(tmp_path / "resumed", steps=1, **options)
    assert without_speed(run(tmp_path / "resumed", resume=True, steps=2, **options)) == without_speed(whole)


def test_answers_are_learnt(tmp_path: Path, run: Run, options: dict[str, Any]) -> None:
    rows = run(tmp_path / "run", **{**options, "steps": 30, "lr": 1e-2, "eval_interval": 10, "split": "80,20,0"})
    evaluated = [row["eval_loss"] for row in rows if "eval_loss" in row]
    assert evaluated[-1] < 0.7 * evaluated[0]
    saved = load_file(tmp_path / "run/checkpoints/step-0000030/model.safetensors")
    assert all(tensor.isfinite().all() for tensor in saved.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_padding": "block"}, "^eos_padding: block: .*'masked'"),
        ({"eos_padding": "row", "packing": True}, "^eos_padding: row .*`packing`"),
        ({"eos_padding": "some"}, "^eos_padding: 'some' .*none, block, row"),
        ({"loss_normalisation": "mean"}, "^loss_normalisation: 'mean'"),
        ({"loss_weighting": "cart"}, "loss.weighting.*cart.* level, fraction, uniform"),
        ({"noise_range": "0.8,0.3"}, "^noise_range: "),
        ({"noise_range": "0.3"}, "^noise_range: "),
        ({"document_attention": True}, "^document_attention: "),
        ({"task": "pretrain", "packing": True}, "^packing: "),
        ({"data": ["mock"]}, "mock"),
        ({"seq_length": 8}, "chats.jsonl.*1: "),
        ({"tokenizer": None}, "chat template"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, run: Run, options: dict[str, Any], seed_folder: Path, changes: dict[str, Any], message: str
) -> None:
    if "tokenizer" in changes:
        changes = {"tokenizer": str(seed_folder)}
    with pytest.raises(DlmBridgeError, match=message) as raised:
        run(tmp_path / "run", steps=1, **{**options, **changes})
    assert "\n" not in str(raised.value)


def test_the_command(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad row is one line and code 2; its own defaults stand in config.yaml; pretrain does not resume it."""
    from accelerate.state import AcceleratorState

    bad = write_rows(tmp_path / "bad.jsonl", [conversation(0), {"text": "x"}])
    words = ["--model", options["model"], "--from-scratch", "--output", str(tmp_path / "run"), "--seq-length", "96"]
    words += ["--tokenizer", options["tokenizer"], "--steps", "1", "--global-batch-size", "2", "--packing"]

    def said(*words: str) -> tuple[int | None, str]:
        AcceleratorState._reset_state(reset_partial_state=True)
        monkeypatch.setattr(sys, "argv", ["dlm-bridge", *words])
        code: Any = 0
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code
        return code, capsys.readouterr().err

    code, error = said("sft", *words, "--data", str(bad))
    assert code == 2
    assert re.search(rf"{bad}.*2: .*'messages'.*'text'", error)
    assert said("sft", *words, "--data", options["data"][0], "--resume")[0] == 0
    resolved = _resolved(tmp_path / "run")
    assert (resolved["task"], resolved["lr"], resolved["length_variation"]) == ("sft", 2.5e-5, 0.0)
    code, error = said("pretrain", *words[:-1], "--data", options["data"][0], "--resume")
    assert code == 2
    assert "--output: " in error
    assert "dlm-bridge sft" in error
    with refused(InputFileError, tmp_path / "run/config.yaml", "dlm-bridge sft", "dlm-bridge pretrain"):
        load_config({"output": str(tmp_path / "other")}, tmp_path / "run/config.yaml")


def test_what_families_were_tuned_with_fits_them() -> None:
    for family in families():
        kind = OBJECTIVES[family.objective].kind
        assert family.sft.keys() <= {"eos_padding", "loss_normalisation", "train_on_prompt"}
        assert family.sft.get("loss_normalisation") in (None, *kind.normalisations)
    assert family_by_name("llada").sft == {"eos_padding": "row", "loss_normalisation": "sequences"}


@pytest.mark.parametrize("declared", [None, 5])
def test_checkpoints_end_where_training_ended_answers(
    tmp_path: Path, run: Run, options: dict[str, Any], declared: int | None
) -> None:
    """The tokenizer's end token, which is trained, is one of those that a checkpoint's texts end at."""
    declare_end(options, declared)
    run(tmp_path / "run", steps=1, lr=0.0, **options)
    check_ends(tmp_path / "run/checkpoints/step-0000001", declared)


def declare_end(options: dict[str, Any], declared: int | None) -> None:
    """A model whose configurations name another end token, or none."""
    folder = Path(options["model"])
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"eos_token_id": declared}))
    if declared is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [declared], "temperature": 0.5}))


def check_ends(saved: Path, declared: int | None) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(saved)
    expected = (0,) if declared is None else (declared, 0)
    assert resolve_settings(model, None, {"gen_length": 32}, 2).eos_token_ids == expected
