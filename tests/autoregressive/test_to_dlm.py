"""Conversion of an autoregressive checkpoint to a diffusion model: weights, mask token, attention pattern."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dlm_bridge import Bridge, DlmBridgeError, Layout
from dlm_bridge.convert import to_dlm
from dlm_bridge.convert.to_dlm import TARGETS, convert_to_dlm
from dlm_bridge.convert.verify import verify_manifest
from dlm_bridge.errors import CheckpointError, SettingError
from dlm_bridge.models.families import family_by_name
from tests.autoregressive.cases import CASES, Case
from tests.autoregressive.test_families import tensors_of
from tests.checkpoints import write_tokenizer
from tests.convert.helpers import no_leftovers, run_cli, tree
from tests.refusals import refused

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
VOCABULARY = {EMBEDDING, HEAD, "model.word_embeddings.weight"}  # the last is Ling's
TOKENIZER = {
    "added_tokens_decoder": {
        "258": {"content": "<eos>", "special": True},
        "259": {"content": "<pad>", "special": True},
    },
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "tokenizer_class": "PreTrainedTokenizerFast",
}
NEW_ID = 260  # 256 letters, 2 merges, 2 special tokens
BY_LABEL = {case.label: case for case in CASES}
FIRST = {case.family: case for case in reversed(CASES)}


def is_shown(case: Case, name: str) -> bool:
    """Every form of some families, one of the others: they differ in their attention mask only."""
    whole = case.family in ("llama", "qwen3", "mistral", "qwen3_moe")
    return case is FIRST[case.family] and (whole or name.endswith("block_causal"))


PAIRS = [
    pytest.param(case, name, id=f"{case.label}-{name}", marks=() if is_shown(case, name) else pytest.mark.slow)
    for case in CASES
    for name in TARGETS[case.family]
]
WINDOW = 6


def write(case: Case, folder: Path, rows: int = 260, **tokenizer: Any) -> Path:
    case.write(folder, vocab_size=rows)
    write_tokenizer(folder, {**TOKENIZER, **tokenizer})
    return folder


@pytest.mark.parametrize(("case", "name"), PAIRS)
@pytest.mark.fast("qwen3-*", "gpt-oss-*", "gemma3-*", "deepseek-*")
def test_weights_attention_pattern_and_tokenizer(case: Case, name: str, tmp_path: Path) -> None:
    source = write(case, tmp_path / "ar")
    before = tree(source)
    report = convert_to_dlm(source, tmp_path / "dlm", to=name)
    assert tree(source) == before
    assert report.action == "convert-to-dlm"
    assert verify_manifest(tmp_path / "dlm").equal
    old, new = tensors_of(source), tensors_of(tmp_path / "dlm")
    mtp = f"model.layers.{case.config['num_hidden_layers']}."
    assert {n for n in old if not n.endswith("inv_freq") and not n.startswith(mtp)} == set(new)
    with_mask_row = VOCABULARY & set(new)
    for tensor_name, tensor in new.items():
        kept = tensor[:NEW_ID] if tensor_name in with_mask_row else tensor
        assert torch.equal(kept, old[tensor_name]), tensor_name
    for tensor_name in with_mask_row:
        row = new[tensor_name][NEW_ID]
        assert new[tensor_name].shape == (NEW_ID + 1, 64)
        assert 0.01 < row.std() < 0.03  # initializer_range is 0.02
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dlm").eval()
    spec = family_by_name(name)
    assert type(model) is spec.load("model_class")
    assert model.config.mask_token_id == NEW_ID
    assert model.config.vocab_size == NEW_ID + 1
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "dlm")
    assert tokenizer.mask_token_id == NEW_ID
    assert tokenizer.mask_token == "<|mask|>"
    assert tokenizer("the<|mask|>").input_ids == [257, NEW_ID]
    assert tokenizer.eos_token_id == 258
    ids = torch.randint(0, 250, (1, 12), generator=torch.Generator().manual_seed(0))
    assert model.generate(ids, max_new_tokens=8, eos_token_id=None).shape == (1, 20)
    assert_attention_pattern(model, None)


def assert_attention_pattern(model: Any, window: int | None) -> None:
    """Exactly the logits of positions that attend to a token move when that token changes; with a window, as far as
    its layers reach."""
    ids = torch.randint(0, 250, (1, 14), generator=torch.Generator().manual_seed(0))
    places = torch.arange(14)
    reach = 14 if window is None else (window - 1) * model.config.num_hidden_layers
    with torch.no_grad():
        before = model(ids).logits
        for token in (0, 7, 13):
            allowed = (places - token).abs() <= reach
            if model.family.attention_pattern == "causal":
                allowed &= places >= token
            if model.family.attention_pattern == "block_causal":
                allowed &= places // model.config.block_size >= token // model.config.block_size
            changed = ids.clone()
            changed[:, token] = (ids[:, token] + 1) % 250
            moved = (model(changed).logits - before).abs().amax(-1)[0] > 1e-5
            assert (moved == allowed).all(), token


@pytest.mark.parametrize("name", ["a2d_qwen3", "sdar"])
def test_what_transformers_5_wrote_is_read_by_the_targets_own_code(name: str, tmp_path: Path) -> None:
    source = write(BY_LABEL["qwen3"], tmp_path / "ar", tokenizer_class="TokenizersBackend")
    config = json.loads((source / "config.json").read_text())
    config.pop("rope_theta", None)
    config["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 12345.0, "factor": 2.0}
    (source / "config.json").write_text(json.dumps(config))
    convert_to_dlm(source, tmp_path / "dlm", to=name)
    made = json.loads((tmp_path / "dlm" / "config.json").read_text())
    assert "rope_parameters" not in made
    assert made["rope_theta"] == 12345.0
    assert made["rope_scaling"] == {"rope_type": "yarn", "factor": 2.0}
    assert json.loads((tmp_path / "dlm" / "tokenizer_config.json").read_text())["tokenizer_class"].endswith("Fast")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "dlm").mask_token_id == NEW_ID
    loaded = transformers.AutoConfig.from_pretrained(tmp_path / "dlm").rope_parameters
    assert (loaded["rope_theta"], loaded["rope_type"], loaded["factor"]) == (12345.0, "yarn", 2.0)


@pytest.mark.parametrize("label", [case.label for case in FIRST.values()])
def test_the_body_computes_what_it_did(label: str, tmp_path: Path) -> None:
    """With a causal mask handed in, logits are the autoregressive model's, in windows too."""
    source = write(BY_LABEL[label], tmp_path / "ar")
    convert_to_dlm(source, tmp_path / "dlm", to="shifted")
    causal = torch.ones(12, 12, dtype=torch.bool).tril().expand(2, 1, 12, 12)
    expected, found = logits_of(source, {}), logits_of(tmp_path / "dlm", {"attention_mask": causal})
    torch.testing.assert_close(found[..., :NEW_ID], expected, atol=1e-6, rtol=1e-6)


def logits_of(folder: Path, arguments: dict[str, Any]) -> torch.Tensor:
    ids = torch.randint(0, 250, (2, 12), generator=torch.Generator().manual_seed(0))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(ids, **arguments).logits


def test_a_padded_vocabulary_is_not_grown(tmp_path: Path) -> None:
    """Qwen's embeddings have more rows than its tokenizer has tokens."""
    source = write(BY_LABEL["qwen2.5"], tmp_path / "ar", rows=300)
    for seed in (0, 0, 1):
        convert_to_dlm(source, tmp_path / "dlm", "[MASK]", seed=seed, overwrite=True)
        old, new = tensors_of(source), tensors_of(tmp_path / "dlm")
        rows = [n for n in range(300) if not torch.equal(old[HEAD][n], new[HEAD][n])]
        assert rows == [NEW_ID]
        if seed == 0:
            first = new
        assert torch.equal(new[EMBEDDING], first[EMBEDDING]) == (seed == 0)
    assert not torch.equal(new[HEAD][NEW_ID], new[EMBEDDING][NEW_ID])
    files = json.loads((tmp_path / "dlm" / "tokenizer_config.json").read_text())
    assert files["mask_token"] == files["added_tokens_decoder"]["260"]["content"] == "[MASK]"


def test_only_the_same_conversion_is_resumed(tmp_path: Path) -> None:
    source = write(BY_LABEL["qwen3"], tmp_path / "ar")
    convert_to_dlm(source, tmp_path / "dlm")
    before = tree(tmp_path / "dlm")
    for other in ({"seed": 1}, {"mask_token": "[MASK]"}):  # neither changes the config or a shape
        with refused(SettingError, "output"):
            convert_to_dlm(source, tmp_path / "dlm", resume=True, **other)
    assert any("already complete" in note for note in convert_to_dlm(source, tmp_path / "dlm", resume=True).notes)
    assert tree(tmp_path / "dlm") == before


def test_tokens_are_reused(tmp_path: Path) -> None:
    source = write(BY_LABEL["qwen3"], tmp_path / "ar")
    report = convert_to_dlm(source, tmp_path / "dlm", "<pad>")
    assert any("<pad>" in note and "259" in note for note in report.notes)
    assert (tmp_path / "dlm" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "dlm").mask_token_id == 259
    assert tensors_of(tmp_path / "dlm")[EMBEDDING].shape[0] == 260
    own = write(BY_LABEL["qwen3"], tmp_path / "own", rows=261, mask_token="<m>")
    number = transformers.AutoTokenizer.from_pretrained(own).mask_token_id
    convert_to_dlm(own, tmp_path / "dlm2")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "dlm2").mask_token_id == number
    with refused(SettingError, "mask_token", "<other>", "<m>"):
        convert_to_dlm(own, tmp_path / "dlm3", "<other>")


@pytest.mark.parametrize(
    ("declared", "generation", "config_ends", "generation_ends"),
    [(None, None, 258, None), (7, 7, [7, 258], [7, 258]), (258, [9], 258, [9, 258])],
)
def test_the_end_that_its_tokenizer_trains_ends_its_texts(
    tmp_path: Path, declared: Any, generation: Any, config_ends: Any, generation_ends: Any
) -> None:
    source = write(BY_LABEL["qwen3"], tmp_path / "ar")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "eos_token_id": declared, "pad_token_id": None}))
    (source / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (source / "generation_config.json").write_text(json.dumps({"eos_token_id": generation, "top_k": 3}))
    convert_to_dlm(source, tmp_path / "dlm")
    written = json.loads((tmp_path / "dlm/config.json").read_text())
    assert (written["eos_token_id"], written["pad_token_id"]) == (config_ends, 259)
    if generation is not None:
        assert json.loads((tmp_path / "dlm/generation_config.json").read_text())["eos_token_id"] == generation_ends


def test_a_redundant_tied_head_stays_a_copy(tmp_path: Path) -> None:
    from tests.checkpoints import write_hub_folder

    case = BY_LABEL["llama3.2"]
    config = {**case.config, "vocab_size": 260}
    tensors = case.tensors(vocab_size=260)
    tensors[HEAD] = tensors[EMBEDDING].clone()
    source = write_hub_folder(tmp_path / "ar", config, tensors)
    write_tokenizer(source, TOKENIZER)
    convert_to_dlm(source, tmp_path / "dlm")
    new = tensors_of(tmp_path / "dlm")
    assert torch.equal(new[HEAD], new[EMBEDDING])
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dlm")


@pytest.mark.parametrize(
    ("label", "to", "family", "task"),
    [
        ("qwen3", None, "idlm", "pretrain"),
        ("mixtral", "block-causal", "mixtral_block_causal", "sft"),
        ("gemma2", "shifted", "gemma2_shifted", "sft"),
        ("gpt-oss", "bidirectional", "gpt_oss_bidirectional", "sft"),
        ("ling", "shifted", "bailing_moe_v2_shifted", "pretrain"),
    ],
)
@pytest.mark.fast("ling-*", "gpt-oss-*", "qwen3-*")
def test_the_result_crosses_to_megatron_and_trains(
    label: str, to: str | None, family: str, task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(BY_LABEL[label], tmp_path / "ar")
    words = ["--mask-token", "<|mask|>", "--json", *(["--to", to] if to else [])]
    code, out, err = run_cli(capsys, "convert-to-dlm", source, tmp_path / "dlm", *words)
    assert code == 0, err
    assert json.loads(out)["family"] == family
    if BY_LABEL[label].megatron:
        Bridge.from_hf(tmp_path / "dlm").to_megatron(tmp_path / "megatron", Layout(tp=2, pp=2))
        Bridge.from_megatron(tmp_path / "megatron").to_hf(tmp_path / "back")
        assert tree(tmp_path / "back") == tree(tmp_path / "dlm")
    row = json.dumps({"prompt": "the cat", "completion": "and the hat"})
    (tmp_path / "text.txt").write_text("the cat and the hat\n" * 200)
    (tmp_path / "chats.jsonl").write_text((row + "\n") * 50)
    options = ("--steps", 3, "--global-batch-size", 2, "--micro-batch-size", 2, "--seq-length", 32, "--lr", "1e-3")
    data = tmp_path / ("text.txt" if task == "pretrain" else "chats.jsonl")
    paths = ("--data", data, "--output", tmp_path / "run", "--precision", "fp32")
    code, _, err = run_cli(capsys, task, "--model", tmp_path / "dlm", *paths, *options)
    assert code == 0, err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert all(0 < row["loss"] < float("inf") for row in rows)


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(BY_LABEL["qwen3"], tmp_path / "ar")
    out = tmp_path / "out"
    code, _, err = run_cli(capsys, "convert-to-dlm", source, out, "--to", "llada")
    assert (code, "--to" in err, "block-causal" in err, err.count("\n")) == (2, True, True, 1)
    with refused(SettingError, "mask_token", "the"):
        convert_to_dlm(source, out, "the")
    with refused(SettingError, "masktoken", "`mask_token`"):
        convert_to_dlm(source, out, masktoken="the")
    with pytest.raises(DlmBridgeError):
        convert_to_dlm(source, source)
    convert_to_dlm(source, tmp_path / "dlm")
    with pytest.raises(DlmBridgeError, match="overwrite"):
        convert_to_dlm(source, tmp_path / "dlm")
    with refused(SettingError, "source", "idlm"):
        convert_to_dlm(tmp_path / "dlm", out)
    (source / "tokenizer.json").write_text("{")
    with refused(CheckpointError, source / "tokenizer.json"):
        convert_to_dlm(source, out)
    (source / "tokenizer.json").unlink()
    with refused(CheckpointError, source, "tokenizer.json"):
        convert_to_dlm(source, out)
    assert not out.exists()
    assert no_leftovers(tmp_path)


WINDOWED = [
    pytest.param(label, changed, form, id=f"{label}-{form}")
    for label, changed in {
        "mistral": {"sliding_window": WINDOW},
        "qwen2.5": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
        "phi3": {"sliding_window": WINDOW},
        "gpt-oss": {"sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 2},
    }.items()
    for form in ("shifted", "block-causal")
]


@pytest.mark.parametrize(("label", "changed", "form"), WINDOWED)
@pytest.mark.fast("*-block-causal")
def test_sliding_windows_stay(label: str, changed: dict[str, Any], form: str, tmp_path: Path) -> None:
    """On either side of a position; under every attention implementation, with padding and with a KV cache."""
    case = BY_LABEL[label]
    source = case.write(tmp_path / "ar", vocab_size=260, num_hidden_layers=2, **changed)
    write_tokenizer(source, TOKENIZER)
    convert_to_dlm(source, tmp_path / "dlm", to=form, block_size=3 if form == "block-causal" else None)
    ids = torch.randint(0, 250, (1, 14), generator=torch.Generator().manual_seed(0))
    padded, real = torch.cat([ids[:, :2], ids], 1), torch.tensor([[0] * 2 + [1] * 14])
    causal = torch.ones(12, 12, dtype=torch.bool).tril().expand(2, 1, 12, 12)
    expected = logits_of(source, {})
    found = []
    for attention in ("eager",) if label == "gpt-oss" else ("sdpa", "eager"):  # the former has no sinks
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dlm", attn_implementation=attention)
        if label != "qwen2.5":  # whose other layer sees everything
            assert_attention_pattern(model.eval(), WINDOW)
        with torch.no_grad():
            found.append(model(ids).logits)
            positions = (real.cumsum(-1) - 1).clamp(min=0)
            aside = model(padded, attention_mask=real, position_ids=positions).logits[:, 2:]
            given = model(torch.randint(0, 250, (2, 12), generator=torch.Generator().manual_seed(0)), causal).logits
        torch.testing.assert_close(aside, found[-1], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(given[..., :NEW_ID], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[0], found[-1], atol=1e-5, rtol=1e-5)
    if form == "block-causal":
        if label == "gpt-oss":
            model.set_experts_implementation("eager")  # torch._grouped_mm has no float64
        assert_same_tokens_with_a_cache(model.double())


def assert_same_tokens_with_a_cache(model: Any) -> None:
    ids = torch.randint(0, 250, (2, 5), generator=torch.Generator().manual_seed(1))
    real = torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
    arguments = {"attention_mask": real, "gen_length": 12, "temperature": 0.0, "eos_token_id": None}
    tokens = [model.generate(ids, cache=cache, **arguments) for cache in ("none", "block")]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("label", ["deepseek-v3", "gemma2", "gpt-oss", "granite"])
def test_a_kv_cache_changes_no_token(label: str, tmp_path: Path) -> None:
    """DeepSeek's keys are wider than its values; Gemma 2 caps scores and has windows; gpt-oss has sinks and windows;
    Granite scales logits."""
    convert_to_dlm(write(BY_LABEL[label], tmp_path / "ar"), tmp_path / "dlm", to="block-causal")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dlm", dtype=torch.float64).eval()
    if label in ("deepseek-v3", "gpt-oss"):
        model.set_experts_implementation("eager")  # torch._grouped_mm has no float64
    assert_same_tokens_with_a_cache(model)


@pytest.mark.parametrize("label", ["gemma2", "granite"])
def test_the_fused_loss_is_that_of_capped_and_scaled_logits(label: str, tmp_path: Path) -> None:
    from dlm_bridge.objectives.linear_cross_entropy import LossPositions
    from dlm_bridge.train.accelerate.transforms import LossHead

    convert_to_dlm(write(BY_LABEL[label], tmp_path / "ar"), tmp_path / "dlm", to="bidirectional")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dlm").eval()
    ids = torch.randint(0, 250, (2, 12), generator=torch.Generator().manual_seed(0))
    positions, targets = torch.tensor([1, 5, 20]), torch.tensor([7, 8, 9])
    with torch.no_grad():
        logits = model(ids).logits.reshape(24, -1)[positions]
        loss, _ = LossHead(model).loss(model, LossPositions(positions, targets, torch.ones(3)), input_ids=ids)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))


def test_ling_s_multi_token_prediction_layers_are_left_out(tmp_path: Path) -> None:
    """And LLaDA2, which other values are the defaults of, computes with Ling's."""
    case = BY_LABEL["ling"]
    assert case.config["num_nextn_predict_layers"] == 1
    source = write(case, tmp_path / "ar")
    config = json.loads((source / "config.json").read_text())
    del config["routed_scaling_factor"]
    (source / "config.json").write_text(json.dumps(config))
    report = convert_to_dlm(source, tmp_path / "dlm", to="block-causal", block_size=8)
    assert any("1 multi-token prediction layers" in note for note in report.notes)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dlm").eval()
    assert (type(model).__name__, model.config.block_size) == ("LLaDA2MoeModelLM", 8)
    causal = torch.ones(12, 12, dtype=torch.bool).tril().expand(2, 1, 12, 12)
    expected, found = logits_of(source, {}), logits_of(tmp_path / "dlm", {"attention_mask": causal})
    torch.testing.assert_close(found[..., :NEW_ID], expected, atol=1e-6, rtol=1e-6)


def test_block_size_and_architecture_are_checked(tmp_path: Path) -> None:
    source = write(BY_LABEL["mistral"], tmp_path / "ar")
    convert_to_dlm(source, tmp_path / "dlm", to="block-causal", block_size=8)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "dlm").block_size == 8
    qwen2 = write(FIRST["qwen2"], tmp_path / "qwen2")
    convert_to_dlm(qwen2, tmp_path / "fast", to="block-causal-shifted", block_size=8)
    assert json.loads((tmp_path / "fast" / "config.json").read_text())["bd_size"] == 8  # the published key
    for family in ("mistral", "qwen3"):  # the default form, derived and published
        convert_to_dlm(write(FIRST[family], tmp_path / f"ar_{family}"), tmp_path / f"idlm_{family}")
        made = transformers.AutoConfig.from_pretrained(tmp_path / f"idlm_{family}")
        assert (made.family.objective, made.block_size) == ("idlm", 3)
    with refused(SettingError, "block_size", "mistral_shifted"):
        convert_to_dlm(source, tmp_path / "out", to="shifted", block_size=8)
    with refused(SettingError, "block_size", "0"):
        convert_to_dlm(source, tmp_path / "out", to="block-causal", block_size=0)
    written = json.loads((tmp_path / "dlm" / "config.json").read_text())
    (tmp_path / "dlm" / "config.json").write_text(json.dumps({**written, "block_size": 0}))
    with pytest.raises(DlmBridgeError, match="block_size 0"):
        transformers.AutoConfig.from_pretrained(tmp_path / "dlm")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["FalconForCausalLM"]}))
    with pytest.raises(DlmBridgeError, match="FalconForCausalLM"):
        convert_to_dlm(source, tmp_path / "out")
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(DlmBridgeError, match="GPT2LMHeadModel"):
        convert_to_dlm(source, tmp_path / "out")


def test_a_window_that_the_target_lacks_is_refused(tmp_path: Path) -> None:
    source = write(BY_LABEL["qwen3"], tmp_path / "ar")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "use_sliding_window": True, "sliding_window": 8}))
    with pytest.raises(DlmBridgeError, match="use_sliding_window"):
        convert_to_dlm(source, tmp_path / "dlm")


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(BY_LABEL["qwen3"], tmp_path / "ar")

    def broken(*arguments: Any) -> torch.Tensor:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(to_dlm, "initialise", broken)
    with pytest.raises(DlmBridgeError, match="no space left"):
        convert_to_dlm(source, tmp_path / "dlm")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ar"]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text"])
@pytest.mark.fast("qwen3", "gemma3_text")
def test_greedy_text_of_the_causal_forms_is_the_autoregressive_models(family: str, tmp_path: Path) -> None:
    """`idlm` with and without a cache, and `nemotron` by self-speculation; also past a sliding window."""
    source = write(FIRST[family], tmp_path / "ar")
    convert_to_dlm(source, tmp_path / "dlm", to="idlm", block_size=2)
    parent = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64).eval()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dlm", dtype=torch.float64).eval()
    assert model.config.block_size == 2
    ids = torch.randint(0, 250, (2, 9), generator=torch.Generator().manual_seed(1))
    wanted = parent.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    for cache in ("none", "block"):
        found = model.generate(ids, gen_length=20, temperature=0.0, eos_token_id=None, cache=cache)
        assert torch.equal(found, wanted), cache
    convert_to_dlm(source, tmp_path / "hybrid", to="nemotron")
    hybrid = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid", dtype=torch.float64).eval()
    drafted = hybrid.generate(ids, gen_length=20, temperature=0.0, eos_token_id=None, algorithm="linear_spec")
    assert torch.equal(drafted, wanted)
    assert hybrid.generate(ids, gen_length=20, temperature=0.0, eos_token_id=None).shape == wanted.shape
    assert hybrid.train()(input_ids=ids, labels=ids, generator=torch.Generator().manual_seed(0)).loss.isfinite()
    trained = model.train()(input_ids=ids, labels=ids, generator=torch.Generator().manual_seed(0)).loss
    assert trained.isfinite()


@pytest.mark.parametrize(
    ("form", "published"),
    [("block_causal_shifted", "fast_dllm_v2"), ("idlm", "idlm"), ("nemotron", "nemotron_labs_diffusion")],
)
def test_a_form_is_trained_and_sampled_as_the_published_family(form: str, published: str) -> None:
    made, known = family_by_name(f"llama_{form}"), family_by_name(published)
    for name in ("attention_pattern", "shift", "objective", "sampler"):
        assert getattr(made, name) == getattr(known, name), name
