"""`dlm-bridge push` to a mock Hub on localhost: uploaded files, the card, and tokens, which are never printed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from dlm_bridge import Bridge, Layout
from dlm_bridge.convert.card import folder_card, front_matter
from dlm_bridge.convert.manifest import is_intact, renamed_source
from dlm_bridge.convert.push import push, without_tokens
from dlm_bridge.convert.verify import verify_manifest
from dlm_bridge.errors import CheckpointError, ResourceError, SettingError
from dlm_bridge.hub import public_name
from dlm_bridge.models.families import FamilySpec, families
from tests.checkpoints import write_llada
from tests.convert.helpers import run_cli
from tests.families import stable_diffcoder
from tests.mock_hub import TOKEN, Hub
from tests.refusals import refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An exported checkpoint, with files beside it that must not be uploaded."""
    source = write_llada(tmp_path / "source", dtype=torch.bfloat16)
    (source / "README.md").unlink()
    Bridge.from_hf(source).to_megatron(tmp_path / "ckpt", Layout())
    Bridge.from_megatron(tmp_path / "ckpt").to_hf(tmp_path / "model")
    (tmp_path / "model" / "optimizer.pt").write_bytes(b"state")
    (tmp_path / "model" / ".netrc").write_text(f"password {TOKEN}")
    return tmp_path / "model"


def test_uploads_the_checkpoint_in_one_commit_with_a_card(
    hub: Hub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = (folder / "README.md").read_bytes()
    code, out, err = run_cli(
        capsys, "push", folder, "me/model", "--private", "--revision", "try", "--message", "First"
    )
    assert code == 0, err
    assert [path for _, path, _ in hub.requests if "/commit/" in path] == ["/api/models/me/model/commit/try"]
    assert (hub.created["name"], hub.created["organization"]) == ("model", "me")
    assert hub.created.get("visibility") == "private" or hub.created.get("private") is True
    assert hub.branches == ["try"]
    assert hub.header["summary"] == "First"
    assert any(token == f"Bearer {TOKEN}" for _, _, token in hub.requests)
    expected = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} - {
        "optimizer.pt",
        ".netrc",
    }
    assert hub.files.keys() == expected
    changed = {"README.md", "dlm_bridge.json"}
    assert all(hub.files[name] == (folder / name).read_bytes() for name in expected - changed)
    card = hub.files["README.md"].decode()
    assert "library_name: transformers" in card
    assert "- diffusion-language-model" in card
    assert "import dlm_bridge" in card
    assert 'from_pretrained("me/model")' in card
    assert "Written by dlm-bridge" in card
    assert "excluded files: optimizer.pt" in out
    assert (folder / "README.md").read_bytes() == exported  # the source is never touched
    assert TOKEN not in out + err + card


def test_no_local_path_goes_up(hub: Hub, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = json.loads((folder / "dlm_bridge.json").read_text())
    assert manifest["source"]["name"] == str(tmp_path / "source")
    code, out, err = run_cli(capsys, "push", folder, "me/model")
    assert code == 0, err
    assert "dlm_bridge.json: local path replaced by source" in out
    assert not [name for name, content in hub.files.items() if str(tmp_path).encode() in content]
    for name, content in hub.files.items():
        (tmp_path / "downloaded" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "downloaded" / name).write_bytes(content)
    found = json.loads((tmp_path / "downloaded/dlm_bridge.json").read_text())
    assert found == {**manifest, "source": {**manifest["source"], "name": "source"}, "digest": found["digest"]}
    assert is_intact(tmp_path / "downloaded")
    assert verify_manifest(tmp_path / "downloaded").equal


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-8B-Base"),
        (
            "/home/me/hub/models--GSAI-ML--LLaDA-8B-Base/snapshots/0f2787f2/",
            "GSAI-ML/LLaDA-8B-Base",
        ),
        ("/home/me/LLaDA", "LLaDA"),
        ("runs/LLaDA", "LLaDA"),  # a folder here, though it could be a Hub id
    ],
)
def test_names_of_sources(
    name: str, public: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/LLaDA").mkdir(parents=True)
    assert public_name(name) == public
    path = folder / "dlm_bridge.json"
    manifest = json.loads(path.read_text())
    # An edited manifest stays marked as changed.
    path.write_text(json.dumps({**manifest, "source": {**manifest["source"], "name": name}}, indent=1) + "\n")
    assert not is_intact(folder)
    path.write_bytes(renamed_source(folder, public))
    assert not is_intact(folder)
    assert json.loads(path.read_text())["source"]["name"] == public
    is_id = "/" in public
    assert (
        f"base_model: {public}" in (push(folder, "me/model", overwrite_card=True, dry_run=True).card_text or "")
    ) == is_id


def test_export_writes_a_card_where_the_source_has_none(folder: Path, tmp_path: Path) -> None:
    card = folder / "README.md"
    assert "import dlm_bridge  # registers" in card.read_text()
    assert str(tmp_path) not in card.read_text()
    card.write_text("# Mine\n")
    assert verify_manifest(folder).equal  # it is there to be edited
    Bridge.from_hf(folder).to_megatron(tmp_path / "again", Layout(tp=2))
    Bridge.from_megatron(tmp_path / "again").to_hf(tmp_path / "exported")
    assert (tmp_path / "exported" / "README.md").read_text() == "# Mine\n"


@pytest.mark.parametrize("template", [True, False])
def test_a_card_that_nobody_wrote_is_replaced(template: bool, hub: Hub, folder: Path) -> None:
    if template:
        (folder / "README.md").write_text("# Model Card for Model ID\n\nDeveloped by: [More Information Needed]\n")
    assert push(folder, "me/model").card == "generated"
    card = hub.files["README.md"].decode()
    assert 'from_pretrained("me/model")' in card
    assert "More Information" not in card


def test_own_readme_is_kept_unless_told_otherwise(hub: Hub, folder: Path) -> None:
    own = "---\nlicense: cc-by-4.0\nlanguage: zh\n---\n# Mine\n"
    (folder / "README.md").write_text(own)
    assert push(folder, "me/model").card == "kept"
    assert hub.files["README.md"].decode() == own
    assert push(folder, "me/model", overwrite_card=True).card == "generated"
    card = hub.files["README.md"].decode()
    assert "# Mine" not in card
    assert "license: cc-by-4.0" in card
    assert "language: zh" in card


def test_the_card_of_a_model_that_the_auto_classes_take_for_another(hub: Hub, tmp_path: Path) -> None:
    folder = stable_diffcoder.CASE.write(tmp_path / "hub")
    push(folder, "me/model", overwrite_card=True)
    card = hub.files["README.md"].decode()
    assert "from dlm_bridge.models.modeling_stable_diffcoder import StableDiffcoderForCausalLM" in card
    assert "AutoModelForCausalLM" not in card


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_the_code_of_a_card_loads_the_family_s_class(family: FamilySpec) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", folder_card(family, None), re.DOTALL)
    imports, _, rest = code.partition("\nmodel = ")
    names: dict[str, Any] = {}
    exec(imports, names)
    assert family.native or "dlm_bridge" in imports
    loader = names[rest.partition(".")[0]]
    if loader is AutoModelForCausalLM and not family.native:
        assert "AutoModelForCausalLM" in family.auto_classes
    else:
        if loader is AutoModelForCausalLM:
            loader = AutoModelForCausalLM._model_mapping[family.load("config_class")]
        assert loader is family.load("model_class")


def test_card_of_a_training_run(hub: Hub, folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoint = run / "checkpoints" / "step-0000020"
    shutil.copytree(folder, checkpoint)
    settings = {
        "model": "GSAI-ML/LLaDA-8B-Base",
        "objective": "masked",
        "steps": 30,
        "lr": 1e-4,
        "data": ["/secret/path"],
    }
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    rows = [{"step": step, "loss": 5 - step / 10, "tokens": 100 * step} for step in (10, 20, 30)]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    report = push(checkpoint, "me/model", dry_run=True)
    assert hub.requests == []
    card = report.card_text or ""
    assert "base_model: GSAI-ML/LLaDA-8B-Base" in card
    assert "license: mit" in card  # the family's card knows its checkpoint's
    assert "| last loss | 3.0 |" in card
    assert "| last step | 20 |" in card
    assert "| objective | masked |" in card
    assert "/secret/path" not in card
    assert report.files["README.md"] == len(card.encode())


@pytest.mark.parametrize(
    ("base", "diffusion"), [("Qwen/Qwen3-8B", False), ("GSAI-ML/LLaDA-8B-Base", True), ("a local folder", True)]
)
def test_an_adapter_folder(hub: Hub, folder: Path, tmp_path: Path, base: str, diffusion: bool) -> None:
    from safetensors.torch import save_file

    adapter = tmp_path / "lora"
    adapter.mkdir()
    save_file({"base_model.model.x.lora_A.weight": torch.ones(2, 2)}, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": base}
    if base == "a local folder":
        config["base_model_name_or_path"] = str(folder)
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (adapter / "base.json").write_text(json.dumps({"base": config["base_model_name_or_path"], "fingerprint": "x"}))
    push(adapter, "me/lora")
    assert hub.files.keys() == {"adapter_model.safetensors", "adapter_config.json", "base.json", "README.md"}
    public = folder.name if base == "a local folder" else base
    assert json.loads(hub.files["adapter_config.json"]) == {**config, "base_model_name_or_path": public}
    assert json.loads(hub.files["base.json"]) == {"base": public, "fingerprint": "x"}
    card = hub.files["README.md"].decode()
    assert "library_name: peft" in card
    assert (f"base_model: {base}" in card) == (base != "a local folder")
    assert "rank 2, alpha 4" in card
    assert ("import dlm_bridge" in card) == diffusion  # PEFT finds the base model's class no other way


@pytest.mark.parametrize("status", [401, 403, 404, 400])
def test_what_the_hub_refuses_is_one_line_without_the_token(
    hub: Hub, folder: Path, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    hub.status = status
    code, out, err = run_cli(capsys, "push", folder, "me/model")
    assert code == 2
    assert "REPO_ID: me/model" in err
    assert f"({status})" in err
    assert err.count("\n") == 1
    assert TOKEN not in out + err
    assert any(token == f"Bearer {TOKEN}" for _, _, token in hub.requests)  # it was there to be said


def test_no_network_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://user:{TOKEN}@127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.close_session()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    code, out, err = run_cli(capsys, "push", folder, "me/model")
    assert code == 2
    assert "me/model" in err
    assert err.count("\n") == 1
    assert TOKEN not in out + err


def test_an_exception_with_a_token_inside_keeps_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the message nor the chain of an error contains the token."""
    from huggingface_hub import HfApi

    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError(f"Authorization: Bearer {TOKEN} and hf_AnotherTokenOfSomeone99")

    monkeypatch.setattr(HfApi, "create_repo", fail)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with refused(ResourceError, "me/model") as caught:
        push(folder, "me/model")
    assert TOKEN not in str(caught.value)
    assert "hf_Another" not in str(caught.value)
    assert caught.value.__suppress_context__
    assert without_tokens(f"https://me:{TOKEN}@host/x") == "https://***@host/x"


def test_bad_input(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with refused(SettingError, "repo_id", "no-owner"):
        push(folder, "no-owner")
    for other in (tmp_path / "nothing", tmp_path / "ckpt"):
        with refused(CheckpointError, other):
            push(other, "me/model")
    weights = next(folder.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-8])
    code, _, err = run_cli(capsys, "push", folder, "me/model")
    assert (code, str(weights) in err) == (2, True)


def test_front_matter_of_anything(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    for text, wanted in (
        ("# no\n", {}),
        ("---\na: [\n---\n", {}),
        ("---\na: 1\n---\nx", {"a": 1}),
        ("---\n- x\n---\n", {}),
    ):
        readme.write_text(text)
        assert front_matter(readme) == wanted
    assert front_matter(tmp_path / "none") == {}
