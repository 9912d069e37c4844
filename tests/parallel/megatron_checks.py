"""What processes check of the Megatron engine: layouts against one process, runs that stop, and bad input."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import yaml
from rich.console import Console

from dlm_bridge import Bridge, Layout, job
from dlm_bridge.cli.app import main
from dlm_bridge.data.loader import Prefetcher
from dlm_bridge.errors import DlmBridgeError, SettingError
from dlm_bridge.mapping.layout import ContextParallelConfig
from dlm_bridge.parallel import groups
from dlm_bridge.parallel.core import parallel_state
from dlm_bridge.parallel.gpt import BridgeGPTModel
from dlm_bridge.parallel.parallelize import build_megatron_model
from dlm_bridge.parallel.train import assembly
from dlm_bridge.parallel.train import trainer as trainer_module
from dlm_bridge.parallel.train.checkpoints import CheckpointManager
from dlm_bridge.parallel.train.schedule import gathered_weights
from dlm_bridge.settings import options_of
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.metrics import read_rows
from tests.groups import make_way
from tests.parallel.megatron_cases import Cell, Files, refusal
from tests.refusals import refused
from tests.train.conftest import read_metrics, without_speed

TOLERANCE = 1e-4  # relative; of a gradient, to its largest element
FIGURES = ("loss", "grad_norm", "eval_loss")


def writes_reference(files: Files, cell: Cell) -> None:
    """Not compared: what the layouts are compared with, one process and one micro-batch."""
    torch.save(_measured(files.options(cell, micro_batch_size=None)), files.reference(cell.row))


def equals_one_process(files: Files, cell: Cell, **changes: Any) -> None:
    """Loss, norms of gradients and parameters, every gradient, and the validation loss after a step."""
    if (reason := refusal(cell)) is not None:
        with refused(SettingError, reason):
            _measured(files.options(cell))
        return
    found = _measured(files.options(cell, **changes))
    if dist.get_rank() > 0:
        return
    wanted = torch.load(files.reference(cell.row))
    assert found.keys() == wanted.keys()
    for name in wanted.keys() - {"moved"}:
        assert found[name] == pytest.approx(wanted[name], rel=TOLERANCE), name
    assert found["moved"].keys() == wanted["moved"].keys()
    for name, moved in wanted["moved"].items():
        largest = float(moved.abs().max())
        # An expert may have no token, and a bias of theirs no gradient.
        assert largest > 0 or "expert" in name or "correction_bias" in name, name
        apart = float((found["moved"][name] - moved).abs().max())
        assert apart <= TOLERANCE * largest, f"{name}: {apart:.1e} of {largest:.1e}"


def overlaps_expert_communication(files: Files, cell: Cell, **changes: Any) -> None:
    """As `equals_one_process`, two micro-batches at a time. In fp32, which megatron-core's configuration refuses: it
    is set when everything has been built."""
    assemble, plans, planned = assembly.assemble, BridgeGPTModel.build_schedule_plan, []

    def overlapping(*arguments: Any, **options: Any) -> Any:
        trainer = assemble(*arguments, **options)
        for chunk in trainer.chunks:
            chunk.config.overlap_moe_expert_parallel_comm = True
        return trainer

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        planned.append(plans(self, *arguments, **options))
        return planned[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "assemble", overlapping)
        patch.setattr(BridgeGPTModel, "build_schedule_plan", counted)
        equals_one_process(files, cell, **changes)
    assert len(planned) == 2 * changes.get("vp", 1)  # of each of the step's micro-batches, and of no evaluation


def trains_as_without(files: Files, name: str, extra: dict[str, Any], **changes: Any) -> None:
    """A run with some options more has the figures, to the last bit, of the run without."""
    found = []
    for run, options in ((name, extra), (f"{name}-without", {})):
        _train(files.run_options(run, **changes, **options))
        found.append(without_speed(read_metrics(files.run(run))))
    assert found[0] == found[1]


def starts_from_an_imported_checkpoint(files: Files, cell: Cell) -> None:
    """Cut in another way than it is trained in."""
    imported = files.root / "imported"
    Bridge.from_hf(files.hub(cell.subject)).to_megatron(imported, Layout(tp=2, pp=2))
    equals_one_process(files, cell, model=str(imported))


def masters_are_as_stored(files: Files, cell: Cell, **changes: Any) -> None:
    """In half precision the optimizer's fp32 weights begin with the checkpoint's, bit for bit."""
    options = files.options(cell, optimizer="adamw", precision="bf16", **changes)
    _fit_groups(options)
    config = TrainConfig.from_flags(**options)
    trainer = assembly.assemble(config, Console(quiet=True))
    trainer.close()
    source = trainer.source.bridge.checkpoint
    stored = build_megatron_model(source, config.parallel.layout, "fp32", config.parallel.context)
    rounded = 0
    for wrapped, plain in zip(trainer.chunks, stored, strict=True):
        wanted = dict(plain.named_parameters())
        for name, parameter in wrapped.module.named_parameters():
            if parameter.dtype == torch.float32:  # a router: the optimizer has no other
                assert torch.equal(parameter, wanted[name])
                continue
            assert torch.equal(parameter, wanted[name].bfloat16()), name
            assert torch.equal(_master(trainer.optimizer, wrapped, parameter), wanted[name].reshape(-1)), name
            rounded += int((parameter != wanted[name]).sum())
    assert rounded > 1000


def _master(optimizer: Any, chunk: Any, parameter: torch.Tensor) -> torch.Tensor:
    """All of a parameter's fp32 values, flat, from the data parallel ranks that hold shares of them."""
    if not chunk.ddp_config.use_distributed_optimizer:
        return parameter.main_param.reshape(-1)
    whole = torch.zeros(parameter.numel())
    for part in optimizer.chained_optimizers:
        if parameter in part.model_param_gbuf_map:
            share = part._get_model_param_range_map(parameter)["param"]
            whole[share.start : share.end] = parameter.main_param
    of_expert = not getattr(parameter, "allreduce", True)
    dist.all_reduce(
        whole,
        group=parallel_state.get_expert_data_parallel_group()
        if of_expert
        else parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    return whole


def trains(files: Files, name: str, resume: bool = False, **changes: Any) -> None:
    """A run, not compared here."""
    _train(files.run_options(name, **changes), resume)


def samples_as_one_process(files: Files, layout: str) -> None:
    """The texts that a run writes, whose weights one process puts together; "one" makes those to compare with."""
    sampling = {"sample_interval": 1, "sample_prompt": ["cat"], "sample_length": 8, "tokenizer": str(files.tokenizer)}
    _train(files.run_options(f"sampled-{layout}", layout=layout, steps=2, **sampling))
    if dist.get_rank() == 0:
        written, wanted = (read_rows(files.run(f"sampled-{run}") / "samples.jsonl") for run in (layout, "one"))
        assert [row["step"] for row in wanted] == [0, 1, 2]
        assert len({row["text"] for row in wanted}) == 3
        assert written == wanted


def evaluates_with_the_same_noise(files: Files) -> None:
    """Where nothing is learned every validation gives the very same loss."""
    _train(files.run_options("still", lr=0.0, steps=3, eval_interval=1, save_interval=0))
    losses = [row["eval_loss"] for row in read_metrics(files.run("still"))]
    assert len(losses) == 3
    assert len(set(losses)) == 1


def resumes_as_if_nothing_had_been(files: Files, name: str, like: str = "whole", **changes: Any) -> None:
    """At another layout than it was stopped at, to the figures of the uninterrupted run."""
    before, wanted = read_rows(files.run(name) / "metrics.jsonl"), read_metrics(files.run(like))
    assert 0 < before[-1]["step"] <= wanted[-1]["step"]  # a save in the background may fail as late as the last step
    dist.barrier()
    _train(files.run_options(name, **changes), resume=True)
    _assert_same_rows(read_metrics(files.run(name)), wanted)
    assert not list((files.run(name) / "checkpoints").glob(".iter_*"))


def resumes_a_copy(files: Files, name: str, of: str, like: str, **changes: Any) -> None:
    """Of a stopped run, at another kind of layout: to the figures and the weights of the uninterrupted run."""
    if dist.get_rank() == 0:
        shutil.copytree(files.run(of), files.run(name))
        Path(files.run(name) / "config.yaml").unlink()
    dist.barrier()
    resumes_as_if_nothing_had_been(files, name, like, **changes)
    if dist.get_rank() > 0:
        return
    found, wanted = (Bridge.from_megatron(files.run(run) / "checkpoints") for run in (name, like))
    for tensor in wanted.hub_names():
        value = wanted.read(tensor)
        apart = float((found.read(tensor) - value).norm() / value.norm())
        assert apart <= TOLERANCE, f"{tensor}: {apart:.1e}"


def crashes_while_a_save_is_written(files: Files, name: str, step: int, **changes: Any) -> None:
    """The files of a background save are there, but nobody has said that they are whole."""

    class CrashError(Exception):
        pass

    publish = CheckpointManager._publish

    def crashing(self: CheckpointManager, folder: Path, number: int, *more: Any) -> None:
        if number == step:
            raise CrashError
        publish(self, folder, number, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointManager, "_publish", crashing)
        with pytest.raises(CrashError):
            _train(files.run_options(name, async_save=True, **changes))
    dist.barrier()
    checkpoints = files.run(name) / "checkpoints"
    assert (checkpoints / f".iter_{step:07d}/metadata.json").exists()
    assert not (checkpoints / f"iter_{step:07d}").exists()
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == str(step - 4)
    dist.barrier()


def is_killed(files: Files, name: str, step: int, **changes: Any) -> None:
    """The processes and what they have started, before a step: nothing is put in order."""
    take = trainer_module.MegatronTrainer.start_step

    def killed(self: Any, number: int, want_stop: bool) -> Any:
        if number == step:
            for process in psutil.Process().children(recursive=True):
                process.kill()
            os.kill(os.getpid(), signal.SIGKILL)
        return take(self, number, want_stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module.MegatronTrainer, "start_step", killed)
        _train(files.run_options(name, **changes))


def saves_when_terminated(files: Files, name: str, step: int, kept: Sequence[int], **changes: Any) -> None:
    """One of the processes is told to stop during a step: all do, after the next one. What they have started is told
    the same, as by Slurm."""
    take = trainer_module.MegatronTrainer.start_step

    def terminated(self: Any, number: int, want_stop: bool) -> Any:
        if number == step:
            for process in psutil.Process().children(recursive=True):
                process.terminate()
        if number == step and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(self, number, want_stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module.MegatronTrainer, "start_step", terminated)
        _train(files.run_options(name, **changes))
    checkpoints_are(files, name, kept)


def checkpoints_are(files: Files, name: str, steps: Sequence[int]) -> None:
    """Those that are kept, the last of them the one that a resume takes."""
    dist.barrier()
    folder = files.run(name) / "checkpoints"
    assert sorted(path.name for path in folder.glob("iter_*")) == [f"iter_{step:07d}" for step in steps]
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == str(steps[-1])
    assert [row["step"] for row in read_metrics(files.run(name))][-1] == steps[-1]


def resumes_a_finished_run(files: Files, name: str) -> None:
    """With exit code 0, and nothing changed."""
    before = {path: path.stat().st_mtime_ns for path in files.run(name).rglob("*") if path.is_file()}
    code, said = run_cli(files, files.run_options(name), "--resume")
    assert code == 0, said
    assert "the run is finished" in said
    assert before == {path: path.stat().st_mtime_ns for path in files.run(name).rglob("*") if path.is_file()}


def starts_again_before_the_first_checkpoint(files: Files) -> None:
    """What is there of a run that was killed early does not stand in the way of --resume."""
    options = files.run_options("early", steps=2)
    _train(options)
    shutil.rmtree(files.run("early") / "checkpoints/iter_0000002")
    (files.run("early") / "checkpoints/latest_checkpointed_iteration.txt").unlink()
    rows = read_metrics(files.run("early"))
    _train(options, resume=True)
    _assert_same_rows(read_metrics(files.run("early")), rows)


def refuses(files: Files, name: str, message: str, options: dict[str, Any], *flags: str) -> None:
    """The command line says why in one line, of one process, and gives exit code 2, before anything is trained."""
    code, said = run_cli(files, {**files.run_options(f"refused-{name}"), **options}, *flags)
    assert code == 2, said
    lines = [line for line in said.splitlines() if line.startswith("dlm-bridge: ")]
    if (attempt := job.current()) is not None:
        lines = attempt.agree("lines", lines, lambda each: [line for lines in each for line in lines])
    assert len(lines) == 1, said
    assert message in lines[0], lines[0]
    assert "Traceback" not in said
    if "output" not in options:
        if dist.is_initialized():
            dist.barrier()
        assert not files.run(f"refused-{name}").exists()


def _nested(flags: dict[str, Any]) -> dict[str, Any]:
    """Flat options in the sections of a `--config` file."""
    sections: dict[str, Any] = {}
    for key, value in flags.items():
        if key == "task":
            sections["task"] = value
        else:
            option = options_of(TrainConfig)[key]
            sections.setdefault(option.section, {})[option.name] = value
    return sections


def run_cli(files: Files, options: dict[str, Any], *flags: str) -> tuple[int, str]:
    """`dlm-bridge pretrain` in this process: its exit code and what it says on stderr."""
    _fit_groups(options)
    path = files.root / f"options_{os.environ['RANK']}.yaml"
    path.write_text(yaml.safe_dump(_nested(options)))
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as said:
        patch.setattr(sys, "argv", ["dlm-bridge", "pretrain", "--config", str(path), *flags])
        with pytest.raises(SystemExit) as exit_code:
            main()
    code = exit_code.value.code
    return code if isinstance(code, int) else 0, said.getvalue()


def _measured(options: dict[str, Any]) -> dict[str, Any]:
    """The figures of one step, and by how much it moved every Hub tensor."""
    _fit_groups(options)
    config = TrainConfig.from_flags(**options, norm_interval=1)
    trainer = assembly.assemble(config, Console(quiet=True))
    trainer.prefetcher = Prefetcher(trainer.produce, 1, depth=1)
    try:
        row, _ = trainer.step(1, False)
        eval_loss = trainer.evaluate()
        with gathered_weights(trainer.chunks):
            after = dict(trainer.source.bridge.stream_hf_weights(trainer.chunks))
    finally:
        trainer.close()
    moved = {}
    if dist.get_rank() == 0:
        moved = {name: after[name] - trainer.source.bridge.read(name) for name in after}
    figures = {"loss": row.loss, "grad_norm": row.grad_norm, "eval_loss": eval_loss}
    figures |= {"param_norm": row.param_norm, "layer_grad_norms": row.layer_grad_norms}
    figures |= {name: value for name in ("mtp_loss", "z_loss") if (value := getattr(row, name)) is not None}
    return figures | {"moved": moved}


def _train(options: dict[str, Any], resume: bool = False) -> None:
    _fit_groups(options)
    assembly.train(TrainConfig.from_flags(**options), resume, Console(quiet=True))


def _fit_groups(options: dict[str, Any]) -> None:
    """Make way for another layout than the groups that are there."""
    if not dist.is_initialized():
        return
    try:
        config = TrainConfig.from_flags(**options)
    except DlmBridgeError:
        groups.destroy()
    else:
        instances = config.parallel.optimizer_instances
        make_way(config.parallel.layout, ContextParallelConfig(config.parallel.cp), instances)


def _assert_same_rows(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    for one, two in zip(found, wanted, strict=True):
        assert one.keys() >= two.keys()  # where it was stopped there is one more validation
        for name in {*FIGURES, "lr", "tokens"} & two.keys():
            assert one[name] == pytest.approx(two[name], rel=TOLERANCE), (name, one, two)
