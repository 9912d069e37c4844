"""verify --against-original: remote code runs only with consent, and differences of its results are named."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from dlm_bridge import CheckpointError, MissingExtraError, SettingError
from dlm_bridge.models.families import families
from dlm_bridge.models.modeling_llada import LLaDAConfig, LLaDAModelLM
from dlm_bridge.original import comparison
from dlm_bridge.original.comparison import requirements, verify_original
from tests.checkpoints import llada_config, write_llada
from tests.convert.helpers import run_cli
from tests.refusals import refused

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import reproduce

CODE = Path(__file__).parent / "original_code"
HERE = sys.executable  # has what that code needs


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny LLaDA with code that does what the card says."""
    folder = write_llada(tmp_path / "hub", n_kv_heads=2)
    for file in CODE.glob("*.py"):
        shutil.copyfile(file, folder / file.name)
    return folder


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.slow
def test_the_same_model_is_equal(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its code sees neither the Hub's token nor the user's home."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    with (checkpoint / "modeling_llada.py").open("a") as file:
        file.write(f"import os\nassert 'HF_TOKEN' not in os.environ and os.environ['HOME'] != {str(Path.home())!r}\n")
    command = ("verify", checkpoint, "--against-original", "--trust-remote-code", "--original-python", HERE, "--json")
    code, shown, _ = run_cli(capsys, *command)
    assert code == 0
    verdict = json.loads(shown)
    assert verdict["equal"]
    assert verdict["tensors"] == 3 + 4 * 9
    assert 0 < verdict["logits"]["difference"] <= verdict["logits"]["allowed"]
    assert verdict["b"].startswith("LLaDAModelLM (python ")
    noted = " ".join(verdict["notes"])
    assert "modeling_llada.py" in noted
    assert "greedy sample" in noted


@pytest.mark.slow
def test_every_kind_of_difference_is_named(checkpoint: Path) -> None:
    """A default of the config class, a tensor that the checkpoint lacks, one that it has besides, and the maths."""
    modeling = checkpoint / "modeling_llada.py"
    replace(checkpoint / "configuration_llada.py", '"rms_norm_eps": 1e-5', '"rms_norm_eps": 1e-3')
    config = json.loads((checkpoint / "config.json").read_text())
    del config["rms_norm_eps"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    replace(
        modeling,
        "        self.ff_out = nn.Linear(ffn",
        "        self.gain = Norm(1, 0)\n        self.ff_out = nn.Linear(ffn",
    )
    replace(modeling, '                "ln_f": Norm', '                "ln_last": Norm')
    replace(modeling, 'parts["ln_f"]', 'parts["ln_last"]')
    verdict = verify_original(checkpoint, trust_remote_code=True, original_python=HERE)
    assert not verdict.equal
    found = {(difference.name, difference.kind) for difference in verdict.differences}
    blocks = {(f"model.transformer.blocks.{layer}.gain.weight", "missing") for layer in range(4)}
    assert found >= blocks | {
        ("rms_norm_eps", "config"),
        ("model.transformer.ln_last.weight", "missing"),
        ("model.transformer.ln_f.weight", "extra"),
    }
    (logits,) = (difference for difference in verdict.differences if difference.name.startswith("logits["))
    assert logits.kind == "values"
    assert logits.name.startswith("logits[0, ")
    assert ("greedy sample", "values") in found


@pytest.mark.slow
def test_original_code_that_fails_is_one_line(checkpoint: Path) -> None:
    (checkpoint / "modeling_llada.py").write_text("raise ImportError('no module called flux_attention')\n")
    with refused(CheckpointError, checkpoint, "flux_attention") as raised:
        verify_original(checkpoint, trust_remote_code=True, original_python=HERE)
    assert "\n" not in str(raised.value)


def test_nothing_runs_without_consent(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(comparison.subprocess, "Popen", started)
    code, shown, error = run_cli(capsys, "verify", checkpoint, "--against-original", "--original-python", HERE)
    assert (code, shown) == (2, "")
    for words in (str(checkpoint), "modeling_llada.py", "--trust-remote-code"):
        assert words in error


@pytest.mark.parametrize(
    ("auto_map", "named"),
    [
        (None, "auto_map"),
        ({}, "auto_map"),
        ({"AutoModel": "someone/else--modeling_llada.LLaDAModelLM"}, "someone/else--modeling_llada"),
    ],
)
def test_checkpoints_without_code_of_their_own(checkpoint: Path, auto_map: object, named: str) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "auto_map": auto_map}))
    with refused(CheckpointError, checkpoint / "config.json", named):
        verify_original(checkpoint, trust_remote_code=True, original_python=HERE)


def test_a_second_checkpoint_and_an_interpreter_that_is_none(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = run_cli(capsys, "verify", checkpoint, "other", "--against-original")
    assert code == 2
    assert "other" in error
    with refused(MissingExtraError, "/no/such/python"):
        verify_original(checkpoint, trust_remote_code=True, original_python="/no/such/python")


def test_the_versions_are_those_of_the_card(checkpoint: Path) -> None:
    assert requirements(checkpoint) == ["safetensors", "torch", "transformers==4.46.3"]  # of config.json
    (checkpoint / "README.md").write_text("# A model\n\n`pip install transformers == 4.38.2 torch`\n")
    assert requirements(checkpoint, ["torch==2.5.1", "einops"]) == [
        "einops",
        "safetensors",
        "torch==2.5.1",
        "transformers==4.38.2",
    ]
    assert "transformers==4.52" in requirements(checkpoint, ["transformers==4.52"])
    (checkpoint / "README.md").unlink()
    config = json.loads((checkpoint / "config.json").read_text())
    del config["transformers_version"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    with refused(SettingError, "original_requires", str(checkpoint)):
        requirements(checkpoint)


@pytest.mark.slow
def test_environments_are_made_once_and_whole(tmp_path: Path) -> None:
    wheel = tmp_path / "paper_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("paper_model.py", "answer = 42\n")
        archive.writestr(
            "paper_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: paper-model\nVersion: 1.0\n"
        )
        archive.writestr(
            "paper_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("paper_model-1.0.dist-info/RECORD", "")
    cache = tmp_path / "cache"
    with refused(MissingExtraError, "no-such-model"):
        comparison.make_environment(["no-such-model"], cache, ["--no-index"])
    python = comparison.make_environment([str(wheel)], cache, ["--no-index"])
    assert os.stat(python).st_mode & 0o100
    assert list(python.parents[1].glob("lib/*/site-packages/paper_model.py"))
    assert not list(python.parents[1].glob("lib/*/site-packages/torch"))  # nothing of this environment
    ready = python.parents[1] / comparison.READY
    wheel.unlink()
    assert comparison.make_environment([str(wheel)], cache, ["--no-index"]) == python
    ready.unlink()  # as if it had been interrupted
    with refused(MissingExtraError, wheel):
        comparison.make_environment([str(wheel)], cache, ["--no-index"])


def test_the_script_takes_every_family_that_has_code_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The table has a row for what is equal, what differs and what cannot be compared."""
    # Classes of dLLM's package or of transformers, and one that has no public id.
    without_code = {"a2d_qwen2", "a2d_qwen3", "a2d_llama", "diffullama", "difflm", "diffusion_gemma"}
    own = {spec.name for spec in families() if spec.kind == "diffusion" and not spec.derived_from} - without_code
    assert own == set(reproduce.SMALLEST)
    for name, checkpoint in reproduce.SMALLEST.items():
        card = (Path(__file__).parents[2] / "model_cards" / f"{name}.md").read_text()
        assert f"verify {checkpoint} --against-original" in card, name
    logits = {"difference": 2e-6, "allowed": 1e-5}
    sample = {"name": "greedy sample", "kind": "values", "detail": "step 3"}
    whole = {"agrees": True, "b": "M (torch 2)", "tensors": 9, "logits": logits, "equal": True, "differences": []}
    verdicts = iter(
        [whole, {**whole, "agrees": False, "equal": False, "differences": [sample]}, {"error": "no room on a|b"}]
    )
    monkeypatch.setattr(reproduce, "_verify", lambda *_: next(verdicts))
    chosen = ("--only", "llada", "--only", "dream", "--only", "coda", "--trust-remote-code", "--output", str(tmp_path))
    assert reproduce.main([*chosen]) == 1
    equal, differs, failed = [line for line in (tmp_path / "report.md").read_text().splitlines() if "`" in line[:40]]
    assert equal.startswith(
        "| llada | `GSAI-ML/LLaDA-8B-Base` | M (torch 2) | 9 | 2.0e-06 (1.0e-05) | equal | equal |"
    )
    assert "| differs | 1 differences, first greedy sample |" in differs
    assert failed.endswith("not compared: no room on a\\|b |")
    verdicts = iter([whole])  # what failed is tried again, and nothing else
    assert reproduce.main([*chosen]) == 1
    assert json.loads((tmp_path / "report.json").read_text())["verified"]["coda"]["agrees"]
    assert reproduce.main(["--only", "no-such-row", "--output", str(tmp_path)]) == 2


def test_the_script_hashes_a_checkpoint_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    hashed: list[str] = []
    compute = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, kind: hashed.append(file.name) or compute(file, kind))
    first, second = reproduce.digest(str(tmp_path)), reproduce.digest(str(tmp_path))
    assert first == second == {"model.safetensors": hashlib.sha256(b"weights").hexdigest()}
    assert hashed == [str(tmp_path / "model.safetensors")]


@pytest.mark.slow
def test_the_script_refuses_without_consent(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--only", "llada", "--checkpoint", f"llada={checkpoint}", "--output", str(tmp_path / "report")]
    assert reproduce.main(arguments) == 2
    assert "--trust-remote-code" in capsys.readouterr().err


@pytest.mark.slow
def test_the_script_measures_a_score(tmp_path: Path) -> None:
    """A stand-in for a checkpoint and for the benchmark's data, with the published settings."""
    checkpoint = tmp_path / "model"
    rows = [{"question": f"{number} + 1 =", "answer": str(number + 1)} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "stand_in",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "fewshot_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": {"until": ["\n"]},
        "filter_list": [{"name": "flexible-extract", "filter": [{"function": "take_first"}]}],
    }
    (tmp_path / "task.yaml").write_text(json.dumps(task))
    small = {"d_model": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "mlp_hidden_size": 48}
    config = llada_config(**small, embedding_size=288, vocab_size=288, mask_token_id=1, max_sequence_length=4096)
    del config["auto_map"]
    config |= {"eos_token_id": 0, "pad_token_id": 0}
    LLaDAModelLM(LLaDAConfig(**config)).save_pretrained(checkpoint)
    bytewise = ByteLevelBPETokenizer()
    bytewise.train_from_iterator(["1 + 1"], vocab_size=258, special_tokens=["<eos>", "<mask>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise._tokenizer, eos_token="<eos>", mask_token="<mask>")
    tokenizer.save_pretrained(checkpoint)
    output = tmp_path / "report"
    words = ["--only", "llada-base", "--checkpoint", f"llada-base={checkpoint}", "--output", str(output)]
    assert (
        reproduce.main([*words, "--task", f"gsm8k={tmp_path / 'task.yaml'}", "--limit", "3", "--batch-size", "3"]) == 1
    )
    report = json.loads((output / "report.json").read_text())
    row = report["scores"]["llada-base"]
    assert (row["shots"], row["documents"], row["published"]) == (5, 3, 70.0)
    assert row["settings"] == {"gen_length": 256, "steps": 256, "block_length": 256}
    assert (row["ours"], row["agrees"]) == (0.0, False)  # random weights
    (digest,) = reproduce.digest(str(checkpoint)).values()
    assert row["weights"] == {"model.safetensors": digest}
    assert report["machine"]["code_sha256"] == reproduce.machine()["code_sha256"]
    assert reproduce.main(["--only", "a2d-coder-mdlm", "--output", str(output)]) == 1  # not without consent
