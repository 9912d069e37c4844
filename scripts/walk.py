"""Files that one tensor, one batch, one `generate` call and one HTTP request pass through, and how large the core is.

    python scripts/walk.py                 every walk and the size of the package
    python scripts/walk.py import --files  one walk, with its files in the order in which they are entered
    python scripts/walk.py --json          for machines

Each walk is one job on a tiny LLaDA in a process of its own, observed by `sys.setprofile` in every thread. A file
counts when one of its functions is called during the walk. What an import executes does not count: module bodies,
class bodies, decorators, registrations; nor do annotations, which Typer evaluates for all commands when one is called.

    import    `dlm-bridge import HF OUT --tp 2 --pp 2`, the whole command; its files of cli/ count as well
    batch     `dlm-bridge pretrain --engine megatron` on one CPU process: from the end of the first optimizer step to
              the end of the run, so with the evaluation and the checkpoint, without what sets the run up
    generate  model.generate(...) of a model that is already loaded, 8 steps
    http      a completion of 8 tokens from a server in this process, on its threads, without its start

Of the last two the calls of named functions of the package are counted as well, in the last of three equal calls.
A line of code is a line that holds a token which is neither a comment nor part of a docstring.

At commit 82f9993, before the redesign: 36, 44 and 27 files; dlm_bridge/ had 372 Python files and 29,572 lines of code.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dlm_bridge.registration import EXTENSIONS  # noqa: E402

PACKAGE, COMMANDS = ROOT / "dlm_bridge", ROOT / "cli"
# The public config.json of LLaDA-8B with tiny sizes.
CONFIG: dict[str, Any] = {
    "activation_type": "silu",
    "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": 32,
    "embedding_dropout": 0.0,
    "embedding_size": 128,
    "eos_token_id": 126,
    "include_bias": False,
    "include_qkv_bias": False,
    "init_fn": "mitchell",
    "init_std": 0.02,
    "layer_norm_type": "rms",
    "mask_token_id": 127,
    "max_sequence_length": 64,
    "mlp_hidden_size": 48,
    "mlp_ratio": 4,
    "model_type": "llada",
    "n_heads": 2,
    "n_kv_heads": 2,
    "n_layers": 2,
    "pad_token_id": 126,
    "residual_dropout": 0.0,
    "rms_norm_eps": 1e-05,
    "rope": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "torch_dtype": "float32",
    "vocab_size": 128,
    "weight_tying": False,
}
STEPS = 24  # more than a loader reads ahead
IMPORTS = "<frozen importlib._bootstrap>"
ANNOTATION = ("<string>", "<module>")  # file and name of the code that typing.get_type_hints evaluates


class Walk:
    """The files whose functions are called while `on` is set, in the order in which they are entered."""

    def __init__(self) -> None:
        self.on = False
        self.files: dict[str, None] = {}
        self.calls = 0
        threading.setprofile(self._called)  # threads that start from now on
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        if not self.on or event != "call":
            return
        file = frame.f_code.co_filename
        if not file.startswith(str(PACKAGE)):
            return
        self.calls += not frame.f_code.co_name.startswith("<")  # no comprehensions, no lambdas
        if file not in self.files and not _importing(frame):
            self.files[file] = None

    def under(self, folder: Path) -> list[str]:
        files = [Path(file).resolve() for file in self.files]  # dlm_bridge/cli is a link
        return [str(file.relative_to(ROOT)) for file in files if file.is_relative_to(folder)]


def _importing(frame: FrameType | None) -> bool:
    """Whether a frame is of an import (a module's body, or what is called there), or of annotations' evaluation."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename == IMPORTS or (code.co_filename, code.co_name) == ANNOTATION:
            return True
        frame = frame.f_back
    return False


def walk_import(folder: Path, walk: Walk) -> None:
    from dlm_bridge.cli.app import app

    source = write_model(folder / "hub")
    with redirect_stdout(sys.stderr):
        walk.on = True
        app(args=["import", str(source), str(folder / "megatron"), "--tp", "2", "--pp", "2"], standalone_mode=False)


def walk_batch(folder: Path, walk: Walk) -> None:
    os.environ["DLM_BRIDGE_PLATFORM"] = "cpu"
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from dlm_bridge.cli.app import app

    source = write_model(folder / "hub")

    def step_ends(*_: object) -> None:
        walk.on = True

    register_optimizer_step_post_hook(step_ends)
    words = f"pretrain --engine megatron --model {source} --data mock --output {folder / 'run'} --steps {STEPS}"
    words += f" --global-batch-size 2 --seq-length 16 --eval-interval {STEPS}"
    app(args=words.split(), standalone_mode=False)
    if not walk.on:
        raise RuntimeError("no optimizer step was seen")


def walk_generate(folder: Path, walk: Walk) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    import dlm_bridge  # noqa: F401  registers LLaDA

    model = AutoModelForCausalLM.from_pretrained(write_model(folder / "hub"))
    for _ in range(3):
        walk.on, walk.calls = True, 0
        model.generate(torch.arange(8)[None], gen_length=16, block_length=8, steps=8)


def walk_http(folder: Path, walk: Walk) -> None:
    from dlm_bridge.loading import load_model
    from dlm_bridge.serving.connections import bind
    from dlm_bridge.serving.model import ServedModel
    from dlm_bridge.serving.options import ServeOptions
    from dlm_bridge.serving.scheduler import Scheduler
    from dlm_bridge.serving.server import Server

    write_tokenizer(write_model(folder / "hub"))
    served = ServedModel(load_model(folder / "hub"), "tiny", {"block_length": 8, "steps": 8}, None)
    scheduler = Scheduler(served.open_engine, batch_size=8, queue_size=8)
    sock = bind("127.0.0.1", 0)
    server = Server(served, scheduler, ServeOptions(timeout=60.0), sock)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    body = json.dumps({"model": "tiny", "prompt": "a b c", "max_tokens": 8}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{sock.getsockname()[1]}/v1/completions", body, {"Content-Type": "application/json"}
    )
    for _ in range(3):
        walk.on, walk.calls = True, 0
        urllib.request.urlopen(request).read()
        time.sleep(0.2)
    walk.on = False
    server.should_exit = True
    thread.join()


WALKS: dict[str, Callable[[Path, Walk], None]] = {
    "import": walk_import,
    "batch": walk_batch,
    "generate": walk_generate,
    "http": walk_http,
}
COUNTED = ("generate", "http")  # walks whose calls are counted


def write_model(folder: Path) -> Path:
    """A tiny LLaDA with random weights, as it lies on the Hub."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import dlm_bridge  # noqa: F401  registers LLaDA

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of single letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({chr(97 + n) if n < 26 else f"<{n}>": n for n in range(128)}, "<27>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<126>", mask_token="<127>").save_pretrained(folder)


def run_here(name: str) -> dict[str, Any]:
    """One walk in this process."""
    walk = Walk()
    with tempfile.TemporaryDirectory() as folder:
        WALKS[name](Path(folder), walk)
        walk.on = False
    calls = {"calls": walk.calls} if name in COUNTED else {}
    return {"dlm_bridge": walk.under(PACKAGE), "cli": walk.under(COMMANDS), **calls}


def run(name: str) -> dict[str, Any]:
    """One walk in a process of its own."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, __file__, name, "--here"]
    finished = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if finished.returncode:
        raise SystemExit(f"the walk {name} failed")
    return json.loads(finished.stdout.splitlines()[-1])


def code_lines(source: str) -> int:
    """The lines of code of a Python source, without docstrings, comments and blank lines."""
    docstrings: set[int] = set()
    strings: set[int] = set()  # of several lines, which may be blank or begin like a comment
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant | ast.JoinedStr):
            if isinstance(node, ast.JoinedStr) or isinstance(node.value, str | bytes):
                strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings.update(range(first.lineno, first.end_lineno + 1))
    lines = {number for number, line in enumerate(source.splitlines(), 1) if line.strip() and line.strip()[0] != "#"}
    return len((lines | strings) - docstrings)


def sizes() -> dict[str, dict[str, int]]:
    """Python files and lines of code: of the core, of each extension, and of all."""
    files = sorted([*PACKAGE.rglob("*.py"), *COMMANDS.rglob("*.py")])
    owners = {name: PACKAGE / name.replace(".", "/") for name in EXTENSIONS}
    parts: dict[str, dict[str, int]] = {name: {"files": 0, "lines": 0} for name in ("core", *EXTENSIONS, "all")}
    for file in files:
        owner = next((name for name, folder in owners.items() if file.is_relative_to(folder)), "core")
        lines = code_lines(file.read_text())
        for name in (owner, "all"):
            parts[name]["files"] += 1
            parts[name]["lines"] += lines
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("walks", nargs="*", metavar="WALK", help=f"{', '.join(WALKS)} (default: all)")
    parser.add_argument("--files", action="store_true", help="name the files")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.walks) - set(WALKS):
        parser.error(f"unknown walk: {', '.join(sorted(unknown))}")
    if options.here:
        print(json.dumps(run_here(options.walks[0])))
        return
    walks = {name: run(name) for name in options.walks or WALKS}
    if options.json:
        print(json.dumps({"walks": walks, "sizes": sizes()}))
        return
    for name, found in walks.items():
        files = found["dlm_bridge"] + found["cli"]
        calls = f", {found['calls']:,} calls" if "calls" in found else ""
        print(f"{name:10}{len(files):4} files, {len(found['cli'])} of them of cli/{calls}")
        if options.files:
            print(*(f"    {file}" for file in files), sep="\n")
    for name, found in sizes().items():
        print(f"{name:14} {found['files']:4} Python files, {found['lines']:,} lines of code")


if __name__ == "__main__":
    main()
