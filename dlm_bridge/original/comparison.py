"""Comparison of a Hub checkpoint with the remote code that it names (`dlm-bridge verify` against the original).

This is the only module that runs code of the Hub, and only with the caller's consent. The code runs in a separate
process (runner.py), in a virtual environment with the versions that the checkpoint was published for. The comparison
covers the keys of config.json, every tensor name and shape, logits, and the tokens of a greedy sample.

A virtual environment is not a sandbox: the code has the user's permissions. The process gets its own home folder,
neither the Hub's token nor this process's environment variables, and cannot download further code from the Hub.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.bridge import Bridge
from dlm_bridge.convert.verify import Difference, LogitsVerdict, Verdict
from dlm_bridge.errors import CheckpointError, DlmBridgeError, MissingExtraError, SettingError, counted
from dlm_bridge.evaluation.logits import LENGTH, TOLERANCE
from dlm_bridge.files.atomic import temporary_folder
from dlm_bridge.files.reading import check_plain_files, read_json
from dlm_bridge.hub import CONFIG_FILE, resolve

PROMPT, STEPS = 8, 16  # prompt and new tokens of the greedy sample, one committed per step
# Keys of config.json that concern the loading program, not the computation.
NOT_COMPARED = {
    "architectures", "auto_map", "transformers_version", "torch_dtype", "dtype", "use_cache", "attn_implementation",
    "_attn_implementation", "_name_or_path", "name_or_path", "rope_parameters",
}  # fmt: skip
OWN_MASK = {"fast_dllm_v2"}  # block-causal families whose model builds its own mask
VERSION = re.compile(r"transformers\s*==\s*(\d+(?:\.\d+)+)")
_MISSING = "missing"  # stands for a key that a config does not have
RUNNER = Path(__file__).with_name("runner.py")
READY = "requirements.json"  # written last: an environment without it was interrupted
PASSED = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "OMP_NUM_THREADS", "SYSTEMROOT")
_SHOWN = 3  # lines of a failed process' output in the error


@dataclass(frozen=True)
class OriginalResult:
    """Results of the original code for a checkpoint, in the fields that runner.py writes."""

    versions: dict[str, str]
    class_name: str
    config: dict[str, Any]
    class_keys: list[str]
    tensors: dict[str, dict[str, Any]]
    picks: list[list[int]]
    logits: torch.Tensor  # [1, S, V]


def verify_original(
    place: str | os.PathLike[str],
    *,
    trust_remote_code: bool = False,
    original_python: str | os.PathLike[str] | None = None,
    original_requires: Sequence[str] = (),
    revision: str | None = None,
) -> Verdict:
    """Compare a Hub folder or id, as this package loads it, with its own remote code.

    Args:
        trust_remote_code: allow that code to run with the user's permissions; a virtual environment is not a sandbox.
        original_python: interpreter with torch and transformers. By default, a virtual environment is created in the
            cache folder, with the transformers version that the checkpoint's README.md or config.json names.
        original_requires: further pip requirements of that environment, or versions of `torch` and `transformers`.

    Raises:
        SettingError: without `trust_remote_code`, and if no transformers version is named.
        CheckpointError: for a damaged checkpoint, one without code of its own, and one whose code fails.
        MissingExtraError: if the environment or its process cannot be created.
    """
    folder = resolve(place, revision)
    files = code_files(folder)
    if not trust_remote_code:
        raise SettingError(
            "against_original",
            f"runs the code of {folder} ({', '.join(files) or 'no file'}) with your permissions, and a virtual "
            "environment is not a sandbox: read the code, then set `trust_remote_code`",
        )
    bridge = Bridge.from_hf(folder)
    if bridge.family.kind != "diffusion":
        raise CheckpointError(folder, f"{bridge.family.name} is a class of transformers, without code of its own")
    bridge.checkpoint.check()
    interpreter = (
        make_environment(requirements(folder, original_requires))
        if original_python is None
        else Path(original_python).expanduser()
    )
    model = bridge.build_hf_model(torch.float32)
    request = _request(bridge, model)
    original = _checked(*run_original(interpreter, folder, request), folder, request)
    verdict = _compare(bridge, model, original, request)
    verdict.notes = [
        *(f"{name} was run, sha256 {digest}" for name, digest in files.items()),
        *verdict.notes,
    ]
    return verdict


def requirements(folder: Path, more: Sequence[str] = ()) -> list[str]:
    """pip requirements of the original code's environment: torch, the transformers version that the checkpoint's card
    names (else its config.json), and `more`, which takes precedence. Raises SettingError without a version."""
    chosen = {re.split(r"[\s<>=!~\[;@]", text.strip(), maxsplit=1)[0].lower(): text for text in more}
    if "transformers" not in chosen:
        card = folder / "README.md"
        found = VERSION.search(card.read_text("utf-8", "replace")) if card.is_file() else None
        version = found[1] if found else read_json(folder / CONFIG_FILE).get("transformers_version")
        if not isinstance(version, str) or not re.fullmatch(r"\d+(\.\w+)+", version):
            raise SettingError(
                "original_requires",
                f"{folder} names a transformers version neither in README.md nor in config.json: set "
                "`original_requires=transformers==VERSION`",
            )
        chosen["transformers"] = f"transformers=={version}"
    return sorted({"torch": "torch", "safetensors": "safetensors", **chosen}.values())


def _request(bridge: Bridge, model: Any) -> dict[str, Any]:
    family = bridge.family
    mask = getattr(model.config, "mask_token_id", None)
    mask = family.mask_token_id if mask is None else mask
    if mask is None:
        raise CheckpointError(bridge.checkpoint.where, "its config has no mask_token_id, which the sample needs")
    block = int(model.config.block_size) if family.attention_pattern == "block_causal" else None
    length = max(LENGTH, 0 if block is None else 5 * block // 2)
    generator = torch.Generator().manual_seed(0)
    tokens_S = torch.randint(bridge.dims.vocab, (length,), generator=generator)
    tokens_S[length // 2 :][torch.rand(length - length // 2, generator=generator) < 0.5] = mask
    return {
        "tokens": tokens_S.tolist(),
        "block": None if family.name in OWN_MASK else block,
        "mask_token_id": mask,
        "shift": family.shift,
        "prompt": PROMPT,
        "steps": STEPS,
    }


def _checked(result: dict[str, Any], logits: torch.Tensor, folder: Path, request: dict[str, Any]) -> OriginalResult:
    """Check the shape of a result that the other process wrote. Raises CheckpointError."""
    try:
        original = OriginalResult(**result, logits=logits)
        whole = len(original.picks) == request["steps"] and logits.shape[:2] == (1, len(request["tokens"]))
    except TypeError:
        whole = False
    if not whole:
        raise CheckpointError(folder, "its original code wrote a malformed result")
    return original


def _compare(bridge: Bridge, model: Any, original: OriginalResult, request: dict[str, Any]) -> Verdict:
    checkpoint = bridge.checkpoint
    versions = ", ".join(f"{name} {version}" for name, version in original.versions.items())
    specs = checkpoint.stored_specs()
    notes: list[str] = []
    differences = [
        *_config_differences(bridge.config, model.config, original, notes),
        *_tensor_differences({name: list(shape) for name, (_, shape) in specs.items()}, original, notes),
    ]
    logits, found = _compare_logits(model, original, request)
    differences += [*found, *_sample_differences(model, original, request, logits.allowed, notes)]
    nbytes = sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in specs.values())
    name = f"{original.class_name} ({versions})"
    return Verdict(checkpoint.where, name, not differences, len(specs), nbytes, differences, logits, notes)


def _config_differences(
    source: dict[str, Any], config: Any, original: OriginalResult, notes: list[str]
) -> list[Difference]:
    """Keys of config.json, and keys that the original class adds, whose value differs here."""
    plain = json.loads(json.dumps(config.to_diff_dict()))
    rope = getattr(config, "rope_parameters", None) or {}
    differences, unread = [], []
    for key in sorted({*source, *original.class_keys} - NOT_COMPARED):
        theirs = original.config.get(key, _MISSING)
        ours = plain[key] if key in plain else getattr(config, key, rope.get(key, _MISSING))
        if ours == _MISSING and key not in source:
            if theirs is not None:
                unread.append(f"{key} = {theirs!r}")
        elif ours != theirs and not (ours is None and theirs == _MISSING):
            stored = f" (config.json has {source[key]!r})" if key in source else ""
            differences.append(Difference(key, "config", f"{ours!r} here, {theirs!r} in its class{stored}"))
    if unread:
        notes.append(f"keys that only the original class has: {', '.join(unread)}")
    return differences


def _tensor_differences(shapes: dict[str, list[int]], original: OriginalResult, notes: list[str]) -> list[Difference]:
    """Differences in name or shape between the files' tensors and those of the original class. That this package
    accounts for all tensors of the files is checked before."""
    differences = [
        Difference(name, "extra", f"in the checkpoint, but not in {original.class_name}")
        for name in shapes
        if name not in original.tensors
    ]
    recomputed = []
    for name, tensor in original.tensors.items():
        if name not in shapes:
            if not tensor["parameter"]:
                recomputed.append(name)
            elif tensor["shares"] not in shapes and not _is_shared(name, original, shapes):
                differences.append(Difference(name, "missing", f"in {original.class_name}, but not in the checkpoint"))
        elif shapes[name] != tensor["shape"]:
            detail = f"{shapes[name]} in the checkpoint, {tensor['shape']} in {original.class_name}"
            differences.append(Difference(name, "shape", detail))
    if recomputed:
        notes.append(f"buffers that the original computes itself: {len(recomputed)}, such as {recomputed[0]}")
    return differences


def _is_shared(name: str, original: OriginalResult, shapes: dict[str, list[int]]) -> bool:
    """True if the checkpoint has another tensor with the same storage."""
    return any(tensor["shares"] == name and other in shapes for other, tensor in original.tensors.items())


@torch.no_grad()
def _compare_logits(
    model: Any, original: OriginalResult, request: dict[str, Any]
) -> tuple[LogitsVerdict, list[Difference]]:
    ours_SV = model(torch.tensor([request["tokens"]])).logits[0].float()
    theirs_SV = original.logits[0].float()
    largest = float(ours_SV.abs().max())
    allowed = TOLERANCE * max(1.0, largest)
    length = len(ours_SV)
    if ours_SV.shape != theirs_SV.shape:
        detail = f"{ours_SV.shape[1]} tokens here, {theirs_SV.shape[1]} in the original"
        verdict = LogitsVerdict("dlm_bridge", "the original code", float("inf"), allowed, largest, length, [])
        return verdict, [Difference("logits", "shape", detail)]
    apart_SV = (ours_SV - theirs_SV).abs().nan_to_num(nan=float("inf"))
    difference = float(apart_SV.max())
    verdict = LogitsVerdict("dlm_bridge", "the original code", difference, allowed, largest, length, [])
    if difference <= allowed:
        return verdict, []
    wrong_S = (apart_SV > allowed).any(dim=1)
    position = int(wrong_S.int().argmax())
    token = int(apart_SV[position].argmax())
    detail = (
        f"{float(ours_SV[position, token])!r} and {float(theirs_SV[position, token])!r}; {int(wrong_S.sum())} of "
        f"{counted(length, 'position')} are more than {allowed:.1e} apart"
    )
    return verdict, [Difference(f"logits[{position}, {token}]", "values", detail)]


@torch.no_grad()
def _sample_differences(
    model: Any, original: OriginalResult, request: dict[str, Any], allowed: float, notes: list[str]
) -> list[Difference]:
    """The first step of the original's greedy sample that differs from the choice of this package's logits for the
    same tokens. Choices within the logits' precision of each other count as equal."""
    mask = request["mask_token_id"]
    prompt = request["tokens"][: request["prompt"]]
    canvas = torch.tensor([[*prompt, *([mask] * request["steps"])]])
    for step, (position, token) in enumerate(original.picks):
        scores_SV = torch.log_softmax(model(canvas).logits[0].float(), dim=-1)
        scores_SV = torch.cat([scores_SV[:1], scores_SV[:-1]]) if request["shift"] else scores_SV
        scores_SV[:, mask] = -torch.inf
        scores_SV[canvas[0] != mask] = -torch.inf
        best = int(scores_SV.argmax())
        here = [best // scores_SV.shape[1], best % scores_SV.shape[1]]
        if here != [position, token]:
            margin = float(scores_SV.flatten()[best] - scores_SV[position, token])
            if margin > 4 * allowed:
                detail = f"step {step}: token {here[1]} at {here[0]} here, token {token} at {position} in the original"
                return [Difference("greedy sample", "values", detail)]
            notes.append(f"greedy sample, step {step}: two choices are equally probable within {margin:.1e}")
        canvas[0, position] = token
    notes.append(f"greedy sample: the same {counted(len(original.picks), 'token')}, one per step, in the same order")
    return []


def cache_folder() -> Path:
    """Folder of the environments, below XDG_CACHE_HOME, by default ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "dlm_bridge" / "original"


def make_environment(requirements: Sequence[str], folder: Path | None = None, pip_options: Sequence[str] = ()) -> Path:
    """Interpreter of a virtual environment with `requirements`, created on first use.

    Environments are keyed by the requirements and this interpreter's version. Raises MissingExtraError if pip cannot
    install the requirements.
    """
    wanted = {"python": f"{sys.version_info[0]}.{sys.version_info[1]}", "requirements": sorted(requirements)}
    key = hashlib.sha256(json.dumps(wanted).encode()).hexdigest()[:16]
    place = (folder or cache_folder()) / key
    python = place / "bin" / "python"
    place.parent.mkdir(parents=True, exist_ok=True)
    with _locked(place.with_name(f"{key}.lock")):
        if (place / READY).is_file() and python.exists():
            return python
        shutil.rmtree(place, ignore_errors=True)
        create = [sys.executable, "-m", "venv", str(place)]
        _check_run(create, MissingExtraError, place, "the virtual environment cannot be created")
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pip_options]
        _check_run([*pip, *requirements], MissingExtraError, " ".join(requirements), "pip cannot install this")
        (place / READY).write_text(json.dumps(wanted, indent=2) + "\n")
    return python


def run_original(python: Path, checkpoint: Path, request: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Run the checkpoint's own code under `python`. Returns the content of result.json and the logits [1, S, V].

    Raises CheckpointError with the last lines of its output if it fails.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with temporary_folder("dlm-bridge-original-") as folder:
        (folder / "home").mkdir()
        (folder / "request.json").write_text(json.dumps({"checkpoint": str(checkpoint.absolute()), **request}))
        command = [str(python), "-I", str(RUNNER), str(folder)]
        reason = f"its original code failed under {python}"
        _check_run(command, CheckpointError, checkpoint, reason, environment=_environment(folder / "home"))
        try:
            check_plain_files(folder)
            return read_json(folder / "result.json"), load_file(folder / "logits.safetensors")["logits"]
        except (OSError, SafetensorError, KeyError) as error:
            raise CheckpointError(checkpoint, f"{reason}: incomplete result: {error}") from None


def code_files(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of every Python file that running the checkpoint's code may execute. Raises CheckpointError if its
    config.json names no code, or code of another repository."""
    where = checkpoint / CONFIG_FILE
    auto_map = read_json(where).get("auto_map")
    if not isinstance(auto_map, dict) or not auto_map:
        raise CheckpointError(where, "without auto_map: it names no original code to compare with")
    for reference in auto_map.values():
        text = str(reference)
        if "--" in text:
            raise CheckpointError(
                where,
                f"auto_map names code of another repository, {text}: copy it beside config.json and name it without "
                "the repository",
            )
    return {
        str(file.relative_to(checkpoint)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(checkpoint.rglob("*.py"))
        if file.is_file()
    }


def _environment(home: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in PASSED if name in os.environ}
    return {**kept, "HOME": str(home), "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check_run(
    command: Sequence[str],
    kind: type[DlmBridgeError],
    field: object,
    reason: str,
    environment: dict[str, str] | None = None,
) -> None:
    """Run a command to its end. Raises an error of this kind with the last lines of its output if it fails, and
    MissingExtraError if it cannot be started."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        )
    except OSError as error:
        raise MissingExtraError(command[0], f"cannot be started: {error.strerror}") from None
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            output = process.stdout.read().decode("utf-8", "replace")  # standard input stays open until the end
            code = process.wait()
        except BaseException:
            process.kill()
            raise
    if code != 0:
        lines = [line.strip() for line in output.splitlines() if line.strip()][-_SHOWN:]
        raise kind(field, f"{reason} (exit code {code}): {' | '.join(lines)}")
