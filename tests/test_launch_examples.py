"""examples/slurm and examples/kubernetes: shell syntax, options, the decision to queue a job again, and schemas."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

import pytest
import typer.main
import yaml
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from dlm_bridge.cli.app import app
from dlm_bridge.cli.train import given_flags, take_words
from dlm_bridge.train.config import RLConfig, TrainConfig
from dlm_bridge.train.config.files import load_config_as

pytestmark = pytest.mark.extension("train.rl")

ROOT = Path(__file__).parents[1]
SLURM = ROOT / "examples" / "slurm"
BATCH = sorted(SLURM.glob("*.sbatch"))
MANIFESTS = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
SRUN = """#!/bin/bash
printf '%s\\n' "$@" > words
if [ -n "$NEXT_STEP" ]; then
    echo "{\\"state\\": \\"stopped\\", \\"step\\": $NEXT_STEP, \\"steps\\": 9000}" > out/status.json
fi
exit "$CODE"
"""
SCONTROL = """#!/bin/bash
echo "$@" >> requeued
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    """A folder to submit from, with stand-ins of Slurm's commands."""
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "out").mkdir()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def submit(folder: Path, script: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "17",
        "SLURM_CPUS_PER_TASK": "8",
        "OUTPUT": "out",
        "CODE": "0",
        "NEXT_STEP": "",
        **variables,
    }
    command = ["bash", str(script), *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def parsed(words: list[str]) -> TrainConfig:
    """Configuration of the words of a command."""
    task, *rest = words
    command: Any = typer.main.get_command(app).commands[task]  # type: ignore[attr-defined]
    kind: type[TrainConfig] = RLConfig if task == "rl" else TrainConfig
    given = given_flags(command.make_context(task, rest).params)
    resume = given.pop("resume")
    file = take_words(given, kind)
    given = {name: value for name, value in given.items() if name not in ("dry_run", "json", "help_all")}
    return load_config_as(kind, given, file, resume, task)


@pytest.mark.parametrize("script", [*BATCH, SLURM / "requeue.sh"], ids=lambda path: path.name)
def test_shell_scripts(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--shell=bash", "--external-sources", script], cwd=ROOT, check=True)


@pytest.mark.parametrize("script", BATCH, ids=lambda path: path.stem)
def test_a_batch_script_starts_a_run_that_can_be_queued_again(
    script: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its options are those of the command, and options after the script win."""
    assert submit(slurm, script, "--steps", "7").returncode == 0
    words = (slurm / "words").read_text().splitlines()
    command = words.index("dlm_bridge.cli") + 1
    assert words[command - 3 : command] == ["python", "-m", "dlm_bridge.cli"]
    assert words[command] == script.stem
    assert "--resume" in words
    monkeypatch.chdir(ROOT)
    config = parsed(words[command:])
    assert (config.checkpoint.output, config.checkpoint.stopped_exit_code, config.schedule.steps) == ("out", 75, 7)
    header = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in script.read_text().splitlines()
                  if line.startswith("#SBATCH"))  # fmt: skip
    assert {"requeue", "signal", "open-mode"} <= header.keys()
    for nodes in (1, 2, 4):
        config.check_batch(nodes * int(header["ntasks-per-node"]) // config.parallel.tp)
    assert not (slurm / "requeued").exists()


# Exit code of srun, step before, step after, restarts before, queued again
ENDS = {
    "finished": (0, 10, 20, 0, False),
    "stopped after a save": (75, 10, 20, 9, True),
    "stopped before its first step": (143, 0, None, 0, True),
    "ended by SIGTERM while it left": (143, 10, 20, 9, True),
    "stopped too often without a new checkpoint": (75, 20, 20, 5, False),
    "stopped often without a new checkpoint": (75, 20, 20, 4, True),
    "bad input": (2, 10, None, 0, False),
    "killed": (137, 10, None, 0, False),
    "killed while it left, after a save": (137, 10, 20, 0, True),
}


@pytest.mark.parametrize("end", ENDS)
def test_which_jobs_are_queued_again(end: str, slurm: Path) -> None:
    code, before, after, restarts, again = ENDS[end]
    if before:
        (slurm / "out" / "status.json").write_text(json.dumps({"state": "running", "step": before, "steps": 9000}))
    variables = {"CODE": str(code), "SLURM_RESTART_COUNT": str(restarts)} if restarts else {"CODE": str(code)}
    done = submit(slurm, BATCH[0], NEXT_STEP="" if after is None else str(after), **variables)
    assert done.returncode == code, done.stderr
    assert (slurm / "requeued").exists() == again
    if again:
        assert (slurm / "requeued").read_text() == "requeue 17\n"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)


class _Replica(_Strict):
    replicas: int
    restart_policy: Literal["Always", "OnFailure", "Never", "ExitCode"]
    template: dict[str, Any]


class _RunPolicy(_Strict):
    backoff_limit: int | None = None
    clean_pod_policy: Literal["All", "Running", "None"] | None = None


class _Spec(_Strict):
    nproc_per_node: str
    run_policy: _RunPolicy
    pytorch_replica_specs: dict[Literal["Master", "Worker"], _Replica]


class _PyTorchJob(_Strict):
    """The fields of kubeflow.org/v1 PyTorchJob that the example uses."""

    api_version: Literal["kubeflow.org/v1"]
    kind: Literal["PyTorchJob"]
    metadata: dict[Literal["name", "namespace", "labels"], Any]
    spec: _Spec


def unknown(given: Any, read: Any, where: str = "") -> list[str]:
    """Fields of a manifest that the model of its schema did not read."""
    if isinstance(given, dict):
        missing = [f"{where}.{key}" for key in given if key not in read]
        return missing + [
            each for key in given.keys() & read.keys() for each in unknown(given[key], read[key], f"{where}.{key}")
        ]
    if isinstance(given, list):
        return [
            each for i, pair in enumerate(zip(given, read, strict=True)) for each in unknown(*pair, f"{where}[{i}]")
        ]
    return []


def pod_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Templates of a manifest's pods, after a check of what is around them."""
    if manifest["kind"] == "PyTorchJob":
        return [
            replica.template for replica in _PyTorchJob.model_validate(manifest).spec.pytorch_replica_specs.values()
        ]
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert unknown(manifest, JobsetV1alpha2JobSet.from_dict(manifest).to_dict()) == []
    return [replicated["template"]["spec"]["template"] for replicated in manifest["spec"]["replicatedJobs"]]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their fields and types are those of the schema, their options those of torchrun and of the command."""
    pods = pytest.importorskip("kubeflow_trainer_api.models.io_k8s_api_core_v1_pod_template_spec")
    manifest = yaml.safe_load(path.read_text())
    monkeypatch.chdir(ROOT)
    for template in pod_of(manifest):
        assert unknown(template, pods.IoK8sApiCoreV1PodTemplateSpec.from_dict(template).to_dict()) == []
        (container,) = template["spec"]["containers"]
        words = container["command"]
        from torch.distributed.run import parse_args

        launcher = parse_args(words[1:])
        assert (words[0], launcher.module, launcher.training_script) == ("torchrun", True, "dlm_bridge.cli")
        config = parsed([word.replace("/shared/configs", "configs") for word in launcher.training_script_args])
        assert config.checkpoint.stopped_exit_code == 75
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in template["spec"]["volumes"]}


def test_a_misspelt_field_is_found() -> None:
    pods = pytest.importorskip("kubeflow_trainer_api.models.io_k8s_api_core_v1_pod_template_spec")
    template = {"spec": {"containers": [{"name": "a", "imagePolicy": "Always"}]}}
    read = pods.IoK8sApiCoreV1PodTemplateSpec.from_dict(template).to_dict()
    assert unknown(template, read) == [".spec.containers[0].imagePolicy"]
