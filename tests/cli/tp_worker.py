"""One of two processes that run `dlm-bridge generate` and `eval` together, as torchrun starts them.

Usage: tp_worker.py FOLDER, where FOLDER/commands.json has the words of each command by its name. Writes of each the
exit code, stdout, stderr and the tokens that this process drew. A command named INTERRUPTED gets Ctrl-C in every
process after a row. A command named FAILING is the last one: the second process fails in its share of the rows and
ends.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlm_bridge.cli import generate_run
from dlm_bridge.cli.app import main as command_line
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.offline import GeneratedTexts, PromptSampler, write_texts
from dlm_bridge.generation.request import Ended

FAILING, INTERRUPTED = "failing", "interrupted"


def run(words: list[str]) -> list[Any]:
    out, err, drawn = io.StringIO(), io.StringIO(), []

    def seen(*args: Any, **kwargs: Any) -> GeneratedTexts:
        result = write_texts(*args, **kwargs)
        drawn.extend(result.token_ids)
        return result

    class Seen(PromptSampler):
        def __iter__(self) -> Iterator[Ended]:
            for row in super().__iter__():
                drawn.append((row.name, row.tokens))
                yield row

    generate_run.write_texts, generate_run.PromptSampler = seen, Seen
    sys.argv = ["dlm-bridge", *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command_line()
        except SystemExit as exit_:
            return [exit_.code, out.getvalue(), err.getvalue(), drawn]
    raise AssertionError(f"{words} never ended")


def one_and_an_interrupt(rows: Any) -> Any:
    """A sampler's rows, of which the first one ends before Ctrl-C."""

    def found(*args: Any, **kwargs: Any) -> Any:
        yield next(rows(*args, **kwargs))
        raise KeyboardInterrupt

    return found


def fail(*_: Any, **__: Any) -> Iterator[Any]:
    yield from ()
    raise DlmBridgeError(None, "a row of this share cannot be sampled")


def main() -> None:
    torch.set_num_threads(1)
    root, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    end = dist.destroy_process_group
    dist.destroy_process_group = lambda: None  # the next command goes on with it
    report = {}
    for name, words in json.loads((root / "commands.json").read_text()).items():
        torch.manual_seed(rank)  # no process draws what the other does by chance
        sampler = generate_run._rows
        if name == FAILING and rank == 1:
            generate_run._rows = fail
        if name == INTERRUPTED:
            generate_run._rows = one_and_an_interrupt(sampler)
        report[name] = json.dumps(run(words))
        generate_run._rows = sampler
        (root / f"report_{rank}.json").write_text(json.dumps(report))
        if name == FAILING:
            return
    end()


if __name__ == "__main__":
    main()
