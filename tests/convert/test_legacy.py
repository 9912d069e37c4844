"""Megatron's legacy format: round trips in every layout and key style, what other writers save, bad input."""

from __future__ import annotations

import argparse
import enum
import shutil
import sys
import types
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from dlm_bridge import Bridge, DlmBridgeError, Layout
from dlm_bridge.convert.inspect import inspect_checkpoint
from dlm_bridge.convert.verify import verify_manifest, verify_pair
from dlm_bridge.errors import CheckpointError, LayoutError
from dlm_bridge.files.pickles import read_torch_file
from tests.autoregressive.cases import CASES as AUTOREGRESSIVE
from tests.checkpoints import write_hub_folder, write_llada
from tests.convert.helpers import hub_tensors, run_cli, same, tree
from tests.families.case import all_cases
from tests.refusals import refused

ITERATION = "iter_0000000"
ROOT = "model.transformer."
MOE = next(case for case in all_cases() if case.name == "rnd1")
MIXED = next(case for case in all_cases() if case.name == "llada2_moe")  # dense layers first, shared experts
Capture = pytest.CaptureFixture[str]


def ranks(folder: Path) -> dict[str, dict[str, Any]]:
    """Every rank's content, by torch's own reader."""
    files = sorted((folder / ITERATION).glob("mp_rank_*/model_optim_rng.pt"))
    return {path.parent.name: torch.load(path, weights_only=False) for path in files}


def resave(path: Path, change: Any) -> None:
    """Have `change` alter a rank's content, and save it as Megatron-LM does."""
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary that nothing divides, and a tied output layer."""
    sizes = {"vocab_size": 125, "embedding_size": 125, "mask_token_id": 124}
    return write_llada(tmp_path_factory.mktemp("odd") / "hub", n_kv_heads=2, weight_tying=True, **sizes)


@pytest.fixture(scope="module")
def legacy(llada: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("legacy") / "ckpt"
    Bridge.from_hf(llada).to_megatron(folder, Layout(tp=2, pp=2), format="torch")
    return folder


@pytest.mark.parametrize("style", ["te", "local"])
@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(tp=2), Layout(pp=2, first_stage=1), Layout(tp=2, pp=2, vp=2)],
    ids=["1", "tp2", "pp2 uneven", "tp2 pp2 vp2"],
)
def test_round_trip(odd: Path, tmp_path: Path, layout: Layout, style: str) -> None:
    Bridge.from_hf(odd).to_megatron(tmp_path / "m", layout, format="torch", key_style=style)
    assert verify_manifest(tmp_path / "m").equal
    assert verify_pair(odd, tmp_path / "m").equal
    Bridge.from_megatron(tmp_path / "m").to_hf(tmp_path / "out")
    assert tree(tmp_path / "out") == tree(odd)
    # Padded as Megatron-LM does: every rank has 128 rows, of zeros after the true vocabulary.
    embedding = torch.cat(
        [
            content.get("model", content.get("model0"))["embedding.word_embeddings.weight"]
            for name, content in ranks(tmp_path / "m").items()
            if layout.pp == 1 or name.endswith("_000")
        ]
    )
    assert embedding.shape[0] == 128 * layout.tp
    assert not embedding[125:].any()


@pytest.mark.parametrize("case", [MOE, MIXED], ids=lambda case: case.name)
@pytest.mark.parametrize(
    ("layout", "style"),
    [
        (Layout(ep=2), "te"),
        (Layout(tp=2, ep=2), "te-sequential"),
        (Layout(tp=2, pp=2, ep=2, etp=1), "local"),
    ],
    ids=["ep2", "tp2 ep2", "tp2 pp2 ep2 etp1"],
)
@pytest.mark.fast("*-llada2_moe", "tp2 pp2 *")
def test_experts_round_trip(case: Any, tmp_path: Path, layout: Layout, style: str) -> None:
    case.write(tmp_path / "hub")
    bridge = Bridge.from_hf(tmp_path / "hub")
    bridge.to_megatron(tmp_path / "m", layout, format="torch", key_style=style)
    assert verify_manifest(tmp_path / "m").equal
    Bridge.from_megatron(tmp_path / "m").to_hf(tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "hub")


def test_experts_cut_finer_than_the_ranks_of_a_layer(tmp_path: Path) -> None:
    """tp 4, ep 2, etp 2: expert rank 0 is on tensor parallel ranks 0 and 1, which have no folder of rank 1."""
    MOE.write(tmp_path / "hub", num_key_value_heads=4)
    Bridge.from_hf(tmp_path / "hub").to_megatron(tmp_path / "m", Layout(tp=4, ep=2, etp=2), format="torch")
    assert list(ranks(tmp_path / "m")) == ["mp_rank_00_000", "mp_rank_01_000", "mp_rank_02_001", "mp_rank_03_001"]
    Bridge.from_megatron(tmp_path / "m").to_hf(tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "hub")


@pytest.mark.parametrize("label", ["deepseek-v3", "glm4-moe"])
def test_latent_attention_and_prediction_layers(label: str, tmp_path: Path) -> None:
    """The last stage has multi-token prediction layers, and the embedding that they need."""
    case = next(case for case in AUTOREGRESSIVE if case.label == label)
    write_hub_folder(tmp_path / "hub", case.config, case.tensors())
    Bridge.from_hf(tmp_path / "hub").to_megatron(tmp_path / "m", Layout(pp=2, ep=2), format="torch")
    last = ranks(tmp_path / "m")["mp_rank_00_001_000"]["model"]
    assert "mtp.layers.0.eh_proj.weight" in last
    assert "embedding.word_embeddings.weight" in last
    assert verify_manifest(tmp_path / "m").equal
    assert verify_pair(tmp_path / "m", tmp_path / "hub").equal


def test_reshard_between_the_formats(llada: Path, legacy: Path, tmp_path: Path, capsys: Capture) -> None:
    assert run_cli(capsys, "reshard", legacy, tmp_path / "a", "--tp", 1, "--pp", 4)[0] == 0
    more = ("--tp", 2, "--format", "torch", "--key-style", "local", "--vocab-multiple", 10)
    assert run_cli(capsys, "reshard", tmp_path / "a", tmp_path / "b", *more)[0] == 0
    content = ranks(tmp_path / "b")["mp_rank_01"]["model"]
    assert content["embedding.word_embeddings.weight"].shape[0] == 65
    assert "decoder.layers.3.input_layernorm.weight" in content
    assert run_cli(capsys, "export", tmp_path / "b", tmp_path / "hub")[0] == 0
    assert tree(tmp_path / "hub") == tree(llada)


def test_ranks_hold_what_megatron_puts_there(llada: Path, legacy: Path) -> None:
    """By index arithmetic written here, out of the Hub's tensors: 4 heads in 2 groups, one group a rank."""
    hub, found = hub_tensors(llada), ranks(legacy)
    assert list(found) == ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"]
    block = ROOT + "blocks.3."  # the second stage's second layer
    layer = "decoder.layers.1."
    for tp in range(2):
        content = found[f"mp_rank_0{tp}_001"]
        assert (content["checkpoint_version"], content["iteration"]) == (3.0, 0)
        model = content["model"]
        q, k, v = (hub[f"{block}{name}_proj.weight"] for name in "qkv")
        rows = torch.cat([q[32 * tp : 32 * tp + 32], k[16 * tp : 16 * tp + 16], v[16 * tp : 16 * tp + 16]])
        assert torch.equal(model[layer + "self_attention.linear_qkv.weight"], rows)
        gate, up = hub[block + "ff_proj.weight"], hub[block + "up_proj.weight"]
        assert torch.equal(
            model[layer + "mlp.linear_fc1.weight"],
            torch.cat([gate[48 * tp : 48 * tp + 48], up[48 * tp : 48 * tp + 48]]),
        )
        columns = hub[block + "ff_out.weight"][:, 48 * tp : 48 * tp + 48]
        assert torch.equal(model[layer + "mlp.linear_fc2.weight"], columns)
        assert model[layer + "mlp.linear_fc2._extra_state"] is None
        assert "output_layer._extra_state" in model
        args = content["args"]
        assert (args.num_layers, args.tensor_model_parallel_size, args.padded_vocab_size) == (4, 2, 256)


def test_files_are_plain_torch_files(legacy: Path) -> None:
    for path in legacy.rglob("*.pt"):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None  # every checksum is right


def save_as_megatron_lm(source: Path, folder: Path) -> None:
    """The same weights as Megatron-LM itself saves them: an enum and numpy's state in the pickle, an optimizer, an
    extra state with content, parameters under Float16Module's prefix, and no manifest."""
    module = types.ModuleType("megatron.core.transformer.enums")
    kind = enum.Enum("AttnBackend", "flash fused", module=module.__name__)
    module.AttnBackend = kind  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)  # which megatron-core's own must outlive
        for path in source.rglob("*.pt"):
            content = torch.load(path, weights_only=False)
            content["args"].attention_backend = kind.flash
            content["args"].start = torch.nn.functional.silu
            groups = [{"cpu_optimizer_cls": torch.optim.AdamW}]  # of an optimizer that was offloaded
            content["optimizer"] = {"optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": groups}}
            content["rng_state"] = [{"np_rng_state": np.random.get_state(), "torch_rng_state": torch.get_rng_state()}]
            content["model"] = {f"module.{name}": value for name, value in content["model"].items()}
            content["model"]["module.decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.ones(4, dtype=torch.uint8)
            target = folder / path.relative_to(source)
            target.parent.mkdir(parents=True)
            torch.save(content, target)
    shutil.copy(source / "latest_checkpointed_iteration.txt", folder)


def test_what_megatron_lm_saves_is_read(llada: Path, legacy: Path, tmp_path: Path) -> None:
    save_as_megatron_lm(legacy, tmp_path / "m")
    facts = inspect_checkpoint(tmp_path / "m")
    assert (facts.format, facts.training_state > 0) == ("torch", True)
    assert facts.layout == {"tp": 2, "pp": 2, "vp": 1, "ep": 1}
    report = Bridge.from_megatron(tmp_path / "m", like=llada).to_hf(tmp_path / "out")
    assert any("training state" in note for note in report.notes)
    assert any("FP8 scaling history" in note for note in report.notes)
    assert tree(tmp_path / "out") == tree(llada)
    assert verify_pair(tmp_path / "m", llada).equal


def test_flipped_byte_is_named(legacy: Path, tmp_path: Path) -> None:
    """In a weight, in a copy that another rank holds, in the zeros of the padding: all are found."""
    for number, name in enumerate(
        (
            "decoder.layers.0.mlp.linear_fc2.weight",
            "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
            "output_layer.weight",
        )
    ):
        folder = tmp_path / str(number)
        shutil.copytree(legacy, folder)
        stage = 1 if name.startswith("output") else 0
        path = folder / ITERATION / f"mp_rank_01_00{stage}" / "model_optim_rng.pt"
        tensor = torch.load(path, weights_only=False, mmap=True)["model"][name]
        data = bytearray(path.read_bytes())
        where = data.find(tensor.contiguous().numpy().tobytes()[:64]) if number < 2 else len(data) // 2
        data[where + 1] ^= 1
        path.write_bytes(data)
        verdict = verify_manifest(folder)
        assert not verdict.equal
        expected = {0: "blocks.0.ff_out.weight", 1: "decoder.layers.1.mlp.linear_fc1.layer_norm_weight", 2: ""}[number]
        assert any(expected in difference.name for difference in verdict.differences)


class Code:
    def __reduce__(self) -> Any:
        return eval, ("open('/tmp/legacy-code-was-run', 'w')",)


def _norm_differs(content: dict[str, Any]) -> None:
    content["model"]["decoder.layers.0.mlp.linear_fc1.layer_norm_weight"] += 1


FC2 = "decoder.layers.0.mlp.linear_fc2.weight"
# (rank, change of its model or content, what the error names)
BAD: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "iteration": ("mp_rank_01_001", lambda c: c.update(iteration=5), ("5", "mp_rank_00_000")),
    "old version": ("mp_rank_00_000", lambda c: c.pop("checkpoint_version"), ("0",)),
    "no model": ("mp_rank_00_000", lambda c: c.pop("model"), ("model0",)),
    "shape": ("mp_rank_01_000", lambda c: c["model"].update({FC2: torch.zeros(64, 40)}), (FC2, "[64, 40]")),
    "dtype": ("mp_rank_01_000", lambda c: c["model"].update({FC2: torch.zeros(64, 48).half()}), (FC2, "float16")),
    "extra": ("mp_rank_00_001", lambda c: c["model"].update(surprise=torch.zeros(1)), ("surprise",)),
    "lacks": ("mp_rank_01_001", lambda c: c["model"].pop(FC2), (FC2, "mp_rank_00_001")),
    "layers": (
        "mp_rank_00_000",
        lambda c: c["model"].update({FC2.replace("0", "7"): torch.zeros(64, 48)}),
        ("[0, 1, 7]",),
    ),
    "copies": ("mp_rank_01_000", _norm_differs, ("mp_rank_00_000",)),
    "before megatron-core": (
        "mp_rank_00_000",
        lambda c: c.update(model={"language_model": {"encoder": {"x": torch.zeros(1)}}}),
        ("language_model",),
    ),
}


@pytest.mark.parametrize(("rank", "change", "named"), BAD.values(), ids=BAD)
def test_a_bad_rank_is_refused(legacy: Path, tmp_path: Path, rank: str, change: Any, named: tuple[str, ...]) -> None:
    shutil.copytree(legacy, tmp_path / "m")
    path = tmp_path / "m" / ITERATION / rank / "model_optim_rng.pt"
    resave(path, change)
    with refused(CheckpointError, path, *named):
        Bridge.from_megatron(tmp_path / "m").to_hf(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_code_in_a_pickle_is_not_run(legacy: Path, tmp_path: Path, capsys: Capture) -> None:
    shutil.copytree(legacy, tmp_path / "m")
    resave(tmp_path / "m" / ITERATION / "mp_rank_01_000/model_optim_rng.pt", lambda c: c.update(args=Code()))
    code, out, err = run_cli(capsys, "export", tmp_path / "m", tmp_path / "out")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "builtins.eval" in err
    assert not Path("/tmp/legacy-code-was-run").exists()


def test_missing_and_broken_files_are_named(legacy: Path, tmp_path: Path) -> None:
    shutil.copytree(legacy, tmp_path / "m")
    iteration = tmp_path / "m" / ITERATION
    path = iteration / "mp_rank_01_001" / "model_optim_rng.pt"
    whole = path.read_bytes()
    for cut in (0, 3, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(DlmBridgeError, match="mp_rank_01_001"):
            Bridge.from_megatron(tmp_path / "m")
    path.unlink()
    with refused(CheckpointError, path):
        Bridge.from_megatron(tmp_path / "m")
    path.parent.rmdir()
    with refused(CheckpointError, path.parent, "pipeline size 2"):
        Bridge.from_megatron(tmp_path / "m")


def test_what_the_folders_cannot_tell_is_refused(tmp_path: Path) -> None:
    MOE.write(tmp_path / "hub")
    with refused(LayoutError, "etp", "format=torch_dist"):
        Bridge.from_hf(tmp_path / "hub").to_megatron(tmp_path / "m", Layout(ep=2, etp=2), format="torch")


def test_casts_and_widened_norms(tmp_path: Path) -> None:
    """Mixed dtypes share no tensor of a rank, so nothing is widened on the way back."""
    hub = write_llada(tmp_path / "hub", dtype=torch.bfloat16)
    Bridge.from_hf(hub).to_megatron(tmp_path / "m", dtype="fp32", format="torch")
    Bridge.from_megatron(tmp_path / "m").to_hf(tmp_path / "out", dtype="bf16")
    back, wanted = hub_tensors(tmp_path / "out"), hub_tensors(hub)
    assert all(same(back[name], tensor) for name, tensor in wanted.items())


def test_namespace_is_argparse(legacy: Path) -> None:
    assert all(type(content["args"]) is argparse.Namespace for content in ranks(legacy).values())


def test_damaged_files_never_crash(legacy: Path, tmp_path: Path) -> None:
    """Random bytes in the pickle, the headers and the directory: refused in one line, or read as what they now say."""
    source = legacy / ITERATION / "mp_rank_00_000" / "model_optim_rng.pt"
    data, path, random = source.read_bytes(), tmp_path / "x.pt", Random(7)
    messages = []
    for _ in range(400):
        changed = bytearray(data)
        for _ in range(random.randrange(1, 4)):
            place = random.randrange(6000) if random.random() < 0.6 else len(data) - 1 - random.randrange(6000)
            changed[place] = random.randrange(256)
        path.write_bytes(changed)
        try:
            read_torch_file(path)
        except DlmBridgeError as error:
            messages.append(str(error))
    assert len(messages) > 50
    assert all("x.pt" in message and "\n" not in message for message in messages)
