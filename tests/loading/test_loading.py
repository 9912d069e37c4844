"""Loading runs no code of a checkpoint and does not ask to."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dlm_bridge.errors import CheckpointError
from dlm_bridge.generation.autoregressive import end_tokens
from dlm_bridge.generation.settings import resolve_settings
from dlm_bridge.loading import load_model, precision_note
from dlm_bridge.loading.pretrained import load_tokenizer
from dlm_bridge.loading.source import ModelSource
from dlm_bridge.models.auto_classes import register_model_names
from tests.autoregressive.cases import CASES as AUTOREGRESSIVE
from tests.checkpoints import write_llada, write_tokenizer
from tests.families import coda, stable_diffcoder
from tests.refusals import refused

REMOTE = {"AutoConfig": "configuration_x.XConfig", "AutoTokenizer": ["tokenization_x.XTokenizer", None]}


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_nobody_is_asked_to_run_a_folder_s_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    asked: list[str] = []

    def answer(question: str = "") -> str:
        asked.append(question)
        return "y"  # which would run it

    monkeypatch.setattr(builtins, "input", answer)
    write_tokenizer(tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"})
    # As MegaDLMs' configs are: remote code and no model_type.
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DiffLM"]}))
    written = json.loads((tmp_path / where).read_text())
    (tmp_path / where).write_text(json.dumps({**written, "auto_map": REMOTE}))
    for name in ("configuration_x", "tokenization_x"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('remote code was executed')\n")
    assert load_tokenizer(str(tmp_path)).convert_tokens_to_ids("the") == 257
    assert not asked


def test_stable_diffcoder_is_no_causal_llama(tmp_path: Path) -> None:
    """transformers goes by model_type; here, and for transformers' command line, the class name decides."""
    import transformers

    case = stable_diffcoder.CASE
    folder = case.write(tmp_path / "hub")
    wanted = case.spec.load("model_class")
    assert type(ModelSource(str(folder)).load()) is wanted
    assert type(AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)) is LlamaForCausalLM
    register_model_names()
    assert type(transformers.StableDiffcoderForCausalLM.from_pretrained(folder)) is wanted


def test_coda_s_published_order_that_does_not_exist_is_left_out(tmp_path: Path) -> None:
    folder = coda.CASE.write(tmp_path / "hub")
    published = {"alg": "original", "alg_temp": 0.2, "eps": 0.001, "mask_token_id": 126, "top_p": None}
    (folder / "generation_config.json").write_text(json.dumps(published))
    model = coda.CASE.load(folder)
    output = model.generate(torch.tensor([[3, 4]]), gen_length=4, steps=4, eos_token_id=None)
    assert output.shape == (1, 6)
    assert not (output == 126).any()


def test_a_diffusion_architecture_under_another_model_type_is_refused(tmp_path: Path) -> None:
    """transformers goes by model_type: it would make a Llama of it, which trains and samples as no iLLaDA does."""
    write_llama(tmp_path, ["ILLaDAForCausalLM"])
    for load in LOADERS:
        with refused(CheckpointError, tmp_path, "ILLaDAForCausalLM", "'llama'"):
            load(str(tmp_path), None)


@pytest.mark.parametrize(
    ("architectures", "family", "bad"),
    [
        (None, None, False),  # model_type identifies it
        (["LlamaForCausalLM"], None, False),
        (["MistralForCausalLM"], None, True),
        (["MyLlama"], None, True),  # may have another attention pattern
        (["MyLlama"], "llama", False),
    ],
)
def test_training_and_sampling_find_the_same_model(
    tmp_path: Path, architectures: list[str] | None, family: str | None, bad: bool
) -> None:
    write_llama(tmp_path, architectures)
    for load in LOADERS:
        if bad:
            with refused(CheckpointError, None, *(architectures or ())):
                load(str(tmp_path), family)
        else:
            model = load(str(tmp_path), family)
            assert type(model) is LlamaForCausalLM
            assert model.config.name_or_path == str(tmp_path)


LOADERS: tuple[Callable[[str, str | None], Any], ...] = (
    lambda folder, family: load_model(folder, family=family).model,
    lambda folder, family: ModelSource(folder, family).load(),
    lambda folder, family: ModelSource(folder, family).empty(),
)


def write_llama(folder: Path, architectures: list[str] | None) -> None:
    """A Llama whose config.json has other `architectures`, or none."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=272, **sizes)).save_pretrained(folder)
    write_tokenizer(folder, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"})
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"architectures": architectures}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize(
    ("dtype", "device", "said"),
    [(torch.float32, "cuda", True), (torch.float32, "cpu", False), (torch.bfloat16, "cuda", False)],
)
def test_full_precision_on_a_gpu_is_said(dtype: torch.dtype, device: str, said: bool) -> None:
    assert ("`dtype=bf16`" in (precision_note("run-sft", dtype, device) or "")) == said


@pytest.mark.parametrize("diffusion", [True, False], ids=["diffusion", "autoregressive"])
@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        (None, None, (258,)),  # a text would never end
        (7, None, (7, 258)),  # what training appends, and what the checkpoint declares
        (258, None, (258,)),
        ([7, 8], None, (7, 8, 258)),
        (7, 9, (9, 258)),
        (7, [258, 9], (258, 9)),
        (7, [], ()),  # stopping is off
    ],
)
def test_texts_end_at_the_tokenizers_end_too(
    tmp_path: Path, diffusion: bool, config: Any, generation: Any, ends: tuple[int, ...]
) -> None:
    folder = tmp_path / "hub"
    sizes = {"vocab_size": 264, "eos_token_id": config}
    if diffusion:
        write_llada(folder, embedding_size=264, mask_token_id=260, **sizes)
    else:
        AUTOREGRESSIVE[0].write(folder, **sizes)
    stored = folder / "generation_config.json"
    stored.unlink(missing_ok=True)
    if generation is not None:
        stored.write_text(json.dumps({"eos_token_id": generation}))
    # Ids 258 and 259; a token behind the vocabulary is none that the model can write.
    write_tokenizer(folder, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"})
    model = load_model(str(folder), dtype="keep").model
    asked = {"gen_length": 4}
    found = resolve_settings(model, None, asked, 2).eos_token_ids if diffusion else end_tokens(model, asked)
    assert found == ends
    model.save_pretrained(tmp_path / "saved")
    saved = ModelSource(str(tmp_path / "saved")).load()
    assert (resolve_settings(saved, None, asked, 2).eos_token_ids if diffusion else end_tokens(saved, asked)) == ends
    assert saved.config.pad_token_id == 259


def test_a_tokenizers_end_outside_the_vocabulary_or_another_mask_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_llada(tmp_path / "hub", vocab_size=258, embedding_size=258, mask_token_id=257, eos_token_id=None)
    write_tokenizer(folder, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<x>", "mask_token": "<m>"})
    model = load_model(str(folder), dtype="keep").model
    assert resolve_settings(model, None, {"gen_length": 4}, 2).eos_token_ids == ()
    assert model.config.mask_token_id == 257
    assert any("mask token" in record.message for record in caplog.records)
