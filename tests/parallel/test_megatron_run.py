"""The Megatron engine's surroundings, in one process: sft, what its guards stop, what it tells of slow ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dlm_bridge import Bridge, Layout
from dlm_bridge.cli.app import app
from dlm_bridge.errors import CheckpointError, DlmBridgeError, MissingExtraError, NonFiniteError, SettingError
from tests.autoregressive.cases import CASES as AUTOREGRESSIVE
from tests.checkpoints import write_hub_folder
from tests.convert.helpers import hub_tensors
from tests.data.chats import chatty, conversation, three_steps, write_rows
from tests.families import dream, fast_dllm_v2, nemotron_labs_diffusion, sdar
from tests.parallel.conftest import megatron_alone
from tests.refusals import refused
from tests.train.conftest import VOCAB, Run, read_metrics
from tests.train.test_ordinary_mask import check_first_loss

CASES = {
    "llada": None,
    "dream": dream.CASE,
    "sdar": sdar.CASES[0],
    "fast_dllm_v2": fast_dllm_v2.CASES[0],
    "nemotron": nemotron_labs_diffusion.CASES[1],  # whose queries are scaled from the ninth position on
    "autoregressive": AUTOREGRESSIVE[0],
    "latent": next(case for case in AUTOREGRESSIVE if case.label == "deepseek-v3"),
    "sinks": next(case for case in AUTOREGRESSIVE if case.label == "gpt-oss"),  # and windows, under masks of documents
}


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    with megatron_alone():
        yield


@pytest.mark.parametrize(
    ("name", "packing"),
    [  # rows packed and not, by turns; make test-slow has the others
        pytest.param(name, packing, marks=[pytest.mark.slow] * (packing != number % 2))
        for number, name in enumerate(CASES)
        for packing in (False, True)
    ],
)
@pytest.mark.fast("sinks-*", "sdar-*", "latent-*")
def test_sft_has_the_losses_of_the_accelerate_engine(
    name: str, packing: bool, tmp_path: Path, run: Run, on_megatron: Run, seed_folder: Path, tokenizer: Any
) -> None:
    folder = _model(name, tmp_path / "model", seed_folder, tokenizer)
    rows = write_rows(tmp_path / "chats.jsonl", [conversation(number) for number in range(24)])
    evaluated = {"packing": packing, "length_variation": 0.0, "eval_interval": 3, "split": "60,40,0"}
    options = three_steps(folder, rows, **evaluated)
    ours, theirs = on_megatron(tmp_path / "megatron", **options), run(tmp_path / "accelerate", **options)
    for key in ("loss", "grad_norm", "eval_loss"):
        assert [row[key] for row in ours if key in row] == pytest.approx(
            [row[key] for row in theirs if key in row], rel=1e-4
        ), key
    assert len(ours) == 3
    assert "eval_loss" in ours[-1]


@pytest.mark.slow
def test_drafts_have_the_losses_of_the_accelerate_engine(
    tmp_path: Path, run: Run, on_megatron: Run, seed_folder: Path, tokenizer: Any
) -> None:
    """With missing and superfluous tokens, which the labels delete and insert."""
    folder = _model("sdar", tmp_path / "model", seed_folder, tokenizer)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "delete_token_id": 50, "split_token_id": 51}))
    rows = write_rows(tmp_path / "chats.jsonl", [conversation(number) for number in range(24)])
    options = three_steps(folder, rows, objective="block_editing", indel_probability=0.3)
    ours, theirs = on_megatron(tmp_path / "megatron", **options), run(tmp_path / "accelerate", **options)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in ours] == pytest.approx([row[key] for row in theirs], rel=1e-4), key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "objective", "packing"),
    [("llada", "trajectory", True), ("dream", "trajectory_shifted", False), ("sdar", "trajectory_block", True)],
)
def test_trajectories_have_the_losses_of_the_accelerate_engine(
    name: str,
    objective: str,
    packing: bool,
    tmp_path: Path,
    run: Run,
    on_megatron: Run,
    seed_folder: Path,
    tokenizer: Any,
) -> None:
    folder = _model(name, tmp_path / "model", seed_folder, tokenizer)
    recorded = [
        {
            "prompt_token_ids": [20 + number, 30],
            "token_ids": [40 + number % 7, 41, 60 + number, 43, 44, 45][: 3 + number % 4],
            "commit_steps": [2, 1, 2, 4, 3, 4][: 3 + number % 4],
        }
        for number in range(24)
    ]
    evaluated = {"packing": packing, "eval_interval": 3, "split": "60,40,0"}
    rows = write_rows(tmp_path / "rows.jsonl", recorded)
    options = three_steps(folder, rows, objective=objective, seq_length=16, **evaluated)
    ours, theirs = on_megatron(tmp_path / "megatron", **options), run(tmp_path / "accelerate", **options)
    for key in ("loss", "grad_norm", "eval_loss"):
        assert [row[key] for row in ours if key in row] == pytest.approx(
            [row[key] for row in theirs if key in row], rel=1e-4
        ), key
    assert ours[0]["loss"] > 0


def _model(name: str, folder: Path, seed_folder: Path, tokenizer: Any) -> Path:
    """A folder with the config.json of a case and a tokenizer with a chat template."""
    chat = chatty(tokenizer)
    chat.save_pretrained(folder)
    case = CASES[name]
    if case is None:
        config = json.loads((seed_folder / "config.json").read_text()) | {"max_sequence_length": 128}
    else:
        # transformers' own bodies give the embedding of a padding token no gradient, were it EOS too.
        pad = None if name in ("autoregressive", "latent", "sinks") else 0
        ids = {"vocab_size": VOCAB, "mask_token_id": chat.mask_token_id, "eos_token_id": 0, "pad_token_id": pad}
        config = {**case.config, **ids, "max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_no_checkpoint_of_non_finite_weights(tmp_path: Path, on_megatron: Run) -> None:
    """Without an epsilon, weights that get no gradient (of tokens that never come) become 0 / 0."""
    options = {"adam_eps": 0.0, "steps": 2, "save_interval": 1, "eval_interval": 0}
    with pytest.raises(DlmBridgeError, match="step 1"):
        on_megatron(tmp_path / "run", **options)
    assert not list((tmp_path / "run/checkpoints").glob("*iter_*"))
    assert not (tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt").exists()


def test_the_accelerate_engine_keeps_none_either(tmp_path: Path, run: Run) -> None:
    with pytest.raises(DlmBridgeError, match="step 1"):
        run(tmp_path / "run", adam_eps=0.0, steps=2, save_interval=1, eval_interval=0)
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_a_nan_loss_ends_the_run(tmp_path: Path, on_megatron: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from dlm_bridge.parallel.train import trainer

    step_of, seen = trainer.MegatronTrainer._run_schedule, []

    def broken(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(step_of(*args, **kwargs))
        return seen[-1] * (float("nan") if len(seen) == 3 else 1.0)

    monkeypatch.setattr(trainer.MegatronTrainer, "_run_schedule", broken)
    with pytest.raises(DlmBridgeError, match="step 3"):
        on_megatron(tmp_path / "run", steps=5, save_interval=1, eval_interval=0)
    assert (tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt").read_text() == "2"
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2]


def test_a_resume_of_another_model_is_refused(tmp_path: Path, on_megatron: Run, seed_folder: Path) -> None:
    on_megatron(tmp_path / "run", steps=1, eval_interval=0)
    other = shutil.copytree(seed_folder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"n_layers": 3}))
    with pytest.raises(DlmBridgeError, match=str(other)):
        on_megatron(tmp_path / "run", resume=True, steps=1, model=str(other))


def test_a_resume_with_fsdp_of_a_run_without_is_refused_before_anything_is_built(
    tmp_path: Path, on_megatron: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dlm_bridge.parallel.train import assembly

    on_megatron(tmp_path / "run", steps=1, eval_interval=0)
    monkeypatch.setattr(assembly, "assemble", None)
    with refused(SettingError, "fsdp", "iter_0000001"):
        on_megatron(tmp_path / "run", resume=True, steps=2, fsdp="optim")


@pytest.mark.parametrize(
    ("precision", "distributed"),
    [
        pytest.param("fp32", True, marks=pytest.mark.slow),
        ("fp32", False),
        ("bf16", True),
        pytest.param("bf16", False, marks=pytest.mark.slow),
        pytest.param("fp16", True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.fast("bf16-True")
def test_a_resume_reads_weights_once(
    tmp_path: Path, on_megatron: Run, monkeypatch: pytest.MonkeyPatch, precision: str, distributed: bool
) -> None:
    """By megatron-core out of the checkpoint, and not by the bridge before that."""
    from dlm_bridge.convert.checkpoints.megatron import MegatronCheckpoint

    options = {
        "precision": precision,
        "distributed_optimizer": distributed,
        "lr_schedule": "constant",
        "save_interval": 0,
    }
    whole = on_megatron(tmp_path / "whole", steps=4, **options)
    on_megatron(tmp_path / "run", steps=2, **options)
    read = []
    monkeypatch.setattr(MegatronCheckpoint, "read_param", lambda _, param: read.append(param.megatron_name))
    resumed = on_megatron(tmp_path / "run", resume=True, steps=4, **options)
    assert read == []
    for figure in ("loss", "grad_norm"):
        assert [row[figure] for row in resumed] == [row[figure] for row in whole]


def test_a_growing_batch_is_that_of_the_other_engine(tmp_path: Path, on_megatron: Run, run: Run) -> None:
    options = {"global_batch_size": 8, "batch_ramp_up": "2,2,12", "lr_schedule": "wsd", "eval_interval": 3}
    options |= {"wsd_decay_steps": 2, "steps": 6, "save_interval": 0, "micro_batch_size": 2}
    found, expected = on_megatron(tmp_path / "megatron", **options), run(tmp_path / "accelerate", **options)
    for figure in ("loss", "grad_norm", "lr", "tokens"):
        assert [row[figure] for row in found] == pytest.approx([row[figure] for row in expected], rel=2e-4), figure
    assert found[-1]["eval_loss"] == pytest.approx(expected[-1]["eval_loss"], rel=2e-4)


@pytest.mark.slow
def test_a_resume_of_experts_reads_their_routers(
    tmp_path: Path, on_megatron: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose dtype, fp32 in a model in bf16, is the checkpoint's; of multi-token prediction what is carried along."""
    from dlm_bridge.convert.checkpoints.megatron import MegatronCheckpoint
    from tests.interop.cases import PREDICTING, models

    models()[PREDICTING].write(tmp_path / "hub")
    options = {
        "model": str(tmp_path / "hub"),
        "from_scratch": False,
        "data": ["mock"],
        "precision": "bf16",
        "lr_schedule": "constant",
        "eval_interval": 0,
        "save_interval": 0,
    }
    whole = on_megatron(tmp_path / "whole", steps=4, **options)
    on_megatron(tmp_path / "run", steps=2, **options)
    read, read_param = [], MegatronCheckpoint.read_param
    monkeypatch.setattr(MegatronCheckpoint, "read_param", lambda *given: read.append(given[1]) or read_param(*given))
    resumed = on_megatron(tmp_path / "run", resume=True, steps=4, **options)
    routers = [param for param in read if not param.is_mtp]
    assert routers
    assert all("router" in param.megatron_name for param in routers), {param.megatron_name for param in routers}
    assert any(param.is_mtp for param in read)
    assert [row["loss"] for row in resumed] == [row["loss"] for row in whole]


def test_a_checkpoint_without_what_is_asked_of_it_is_one_line(tmp_path: Path, on_megatron: Run) -> None:
    """torch gathers what the ranks say, with their tracebacks."""
    options = {"precision": "bf16", "eval_interval": 0}
    on_megatron(tmp_path / "run", steps=1, **options)
    with refused(CheckpointError, tmp_path / "run/checkpoints/iter_0000001") as raised:
        on_megatron(tmp_path / "run", resume=True, steps=2, distributed_optimizer=False, **options)
    assert "Traceback" not in str(raised.value)
    assert len(str(raised.value)) < 500


def test_gradients_that_megatron_core_finds_wrong_end_the_run(tmp_path: Path, on_megatron: Run) -> None:
    options = {"lr": 1e30, "clip_grad": 0.0, "warmup_steps": 0, "lr_schedule": "constant", "eval_interval": 0}
    with refused(NonFiniteError, None, "step 2", "NaN") as raised:
        on_megatron(tmp_path / "run", megatron=["ddp.check_for_nan_in_grad=true"], steps=6, **options)
    assert "\n" not in str(raised.value)


def test_an_iteration_is_no_model(tmp_path: Path, on_megatron: Run) -> None:
    on_megatron(tmp_path / "run", steps=1, eval_interval=0)
    options = {"model": str(tmp_path / "run/checkpoints/iter_0000001"), "from_scratch": False}
    with pytest.raises(DlmBridgeError, match="iter_0000001: "):
        on_megatron(tmp_path / "next", **options)


def test_validation_drops_nothing_out(tmp_path: Path, on_megatron: Run) -> None:
    options = {"lr": 0.0, "steps": 2, "eval_interval": 1}
    plain = on_megatron(tmp_path / "plain", **options)
    dropping = on_megatron(tmp_path / "dropping", megatron=["transformer.hidden_dropout=0.5"], **options)
    assert [row["eval_loss"] for row in dropping] == [row["eval_loss"] for row in plain]
    assert all(row["loss"] != other["loss"] for row, other in zip(plain, dropping, strict=True))


def test_a_variable_that_says_otherwise_is_named(
    tmp_path: Path, on_megatron: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    with refused(SettingError, "megatron-core", "NVTE_FLASH_ATTN"):
        on_megatron(tmp_path / "run", steps=1)


def goes_on_as_if_not_stopped(run: Run, folder: Path, **options: Any) -> None:
    """Four steps in one go, and two and two."""
    options |= {"lr_schedule": "constant", "eval_interval": 0}
    whole = run(folder / "whole", steps=4, **options)
    run(folder / "run", steps=2, **options)
    resumed = run(folder / "run", resume=True, steps=4, **options)
    for figure in ("loss", "grad_norm"):
        assert [row[figure] for row in resumed] == [row[figure] for row in whole]


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_a_resume_of_an_optimizer_in_many_padded_buckets(tmp_path: Path, on_megatron: Run, precision: str) -> None:
    """megatron-core pads what it reduces at once; a checkpoint must not take the padding for parameters."""
    goes_on_as_if_not_stopped(on_megatron, tmp_path, megatron=["ddp.bucket_size=500"], precision=precision)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_resume_of_gradient_descent(tmp_path: Path, on_megatron: Run, precision: str, momentum: float) -> None:
    settings = [f"optimizer.sgd_momentum={momentum}"]
    goes_on_as_if_not_stopped(on_megatron, tmp_path, optimizer="sgd", megatron=settings, precision=precision)


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"optimizer_cpu_offload": True, "precision": "bf16"}, MissingExtraError, "optimizer_cpu_offload"),
        ({"recompute": "selective", "recompute_modules": "layernorm"}, MissingExtraError, "recompute_modules"),
        ({"precision": "fp8"}, MissingExtraError, "precision"),
        ({"fsdp": "optim"}, MissingExtraError, "fsdp"),
        ({"megatron": ["transformer.cpu_offloading=true"]}, SettingError, "megatron-core"),
        ({"megatron": ["optimizer.use_precision_aware_optimizer=true"]}, MissingExtraError, "megatron"),
        ({"fp8_recipe": "tensorwise"}, SettingError, "fp8_recipe"),
        ({"megatron": ["ddp.nccl_ub=true"]}, MissingExtraError, "megatron"),
        ({"attention_backend": "sdpa"}, SettingError, "attention_backend"),
    ],
)
def test_what_a_cpu_cannot_do_is_one_line(
    tmp_path: Path, on_megatron: Run, changes: dict[str, Any], kind: type[DlmBridgeError], field: str
) -> None:
    with refused(kind, field) as raised:
        on_megatron(tmp_path / "run", **changes)
    assert "\n" not in str(raised.value)


class GatedOperation(torch.nn.Module):
    """Called as Transformer Engine's SwiGLU is, with an extra state that strict loading asks for, as its operations
    have it, and no sharded one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0)

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("nothing of it was saved")


def test_a_run_with_transformer_engines_activation_saves_and_resumes(
    tmp_path: Path, on_megatron: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dlm_bridge.parallel.train import mcore_config

    plain = on_megatron(tmp_path / "plain", steps=4)
    built = []
    overrides = mcore_config.transformer_overrides

    def operation(config: Any) -> torch.nn.Module:
        built.append(GatedOperation())
        return built[-1]

    monkeypatch.setattr("dlm_bridge.parallel.mcore_patches.modules._te_activation", operation)
    monkeypatch.setattr(
        mcore_config,
        "transformer_overrides",
        lambda *arguments: overrides(*arguments) | {"use_te_activation_func": True},
    )
    on_megatron(tmp_path / "run", steps=2)
    resumed = on_megatron(tmp_path / "run", resume=True, steps=4)
    assert built
    assert [row["loss"] for row in resumed] == pytest.approx([row["loss"] for row in plain], rel=1e-5)


@pytest.mark.slow
def test_prediction_layers_are_not_trained_from_the_middle_of_a_run(tmp_path: Path, on_megatron: Run) -> None:
    """The optimizer has no state of theirs there. The other way round they stay as they were trained."""
    from tests.interop.cases import PREDICTING, models

    models()[PREDICTING].write(tmp_path / "hub")
    options = {"model": str(tmp_path / "hub"), "from_scratch": False, "data": ["mock"], "eval_interval": 0}
    on_megatron(tmp_path / "run", steps=1, mtp_loss_scaling_factor=0.0, **options)
    with refused(CheckpointError, None, "`mtp_loss_scaling_factor=0`"):
        on_megatron(tmp_path / "run", resume=True, steps=2, **options)
    on_megatron(tmp_path / "other", steps=1, **options)
    trained = Bridge.from_megatron(tmp_path / "other/checkpoints")
    before = {
        name: trained.read(name) for param in trained.checkpoint.params if param.is_mtp for name in param.hub_names
    }
    rows = on_megatron(tmp_path / "other", resume=True, steps=2, mtp_loss_scaling_factor=0.0, **options)
    assert ["mtp_loss" in row for row in rows] == [True, False]
    again = Bridge.from_megatron(tmp_path / "other/checkpoints")
    assert again.checkpoint.iteration == "iter_0000002"
    assert all(torch.equal(again.read(name), tensor) for name, tensor in before.items())


def test_what_prediction_layers_share_is_given_back_as_trained(tmp_path: Path, on_megatron: Run) -> None:
    """The Hub has a copy of embedding and head in each of those layers, the model one tensor."""
    case = next(case for case in AUTOREGRESSIVE if case.label == "glm4-moe")
    source = hub_tensors(case.write(tmp_path / "hub"))
    options = {"model": str(tmp_path / "hub"), "from_scratch": False, "data": ["mock"], "steps": 1, "lr": 1e-2}
    options |= {"eval_interval": 0, "objective": None}
    on_megatron(tmp_path / "run", **options)
    Bridge.from_megatron(tmp_path / "run/checkpoints").to_hf(tmp_path / "exported")
    found = hub_tensors(tmp_path / "exported")
    assert found.keys() == source.keys()
    layer = f"model.layers.{case.config['num_hidden_layers']}."
    for name, other in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        assert torch.equal(source[f"{layer}{name}.weight"], source[f"{other}.weight"])
        assert torch.equal(found[f"{layer}{name}.weight"], found[f"{other}.weight"])
        assert not torch.equal(found[f"{other}.weight"], source[f"{other}.weight"])
    assert not torch.equal(found[f"{layer}eh_proj.weight"], source[f"{layer}eh_proj.weight"])

    Bridge.from_megatron(tmp_path / "run/checkpoints").to_megatron(tmp_path / "resharded", Layout(tp=2))
    for place in ("run/checkpoints", "resharded"):
        assert CliRunner().invoke(app, ["verify", str(tmp_path / "exported"), str(tmp_path / place)]).exit_code == 0

    source[f"{layer}embed_tokens.weight"][0, 0] += 1
    config = json.loads((tmp_path / "hub/config.json").read_text())
    write_hub_folder(tmp_path / "apart", config, source)
    options |= {"model": str(tmp_path / "apart")}
    with refused(SettingError, "mtp_loss_scaling_factor", f"{layer}embed_tokens.weight", "model.embed_tokens.weight"):
        on_megatron(tmp_path / "other", **options)
    on_megatron(tmp_path / "carried", **options, mtp_loss_scaling_factor=0.0)
    Bridge.from_megatron(tmp_path / "carried/checkpoints").to_hf(tmp_path / "again")
    carried = hub_tensors(tmp_path / "again")
    assert all(torch.equal(carried[name], source[name]) for name in source if name.startswith(layer))


def test_texts_with_the_mask_token(tmp_path: Path, on_megatron: Run, tokenizer: Any, corpus: Path) -> None:
    check_first_loss(on_megatron, tmp_path, tokenizer, corpus)
