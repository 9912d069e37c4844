"""The process that runs reward functions: started by `judge`, which ends it where a function hangs.

    python -m dlm_bridge.train.rl.worker FUNCTION

reads one JSON object a line ({"prompts", "completions", "rows"}) and answers each with {"rewards": [...]} or
{"error": "..."}. What the function prints goes to stderr.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from typing import Any


def load(path: str) -> Callable[..., Any]:
    """The function that `package.module.name` or `file.py:name` means. Raises ImportError, AttributeError, and
    whatever its module raises."""
    if ".py:" in path:
        file, _, name = path.rpartition(":")
        spec = importlib.util.spec_from_file_location("reward_functions", file)
        if spec is None or spec.loader is None or not os.path.isfile(file):
            raise ImportError(f"no file {file}")
        module: Any = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        place, _, name = path.rpartition(".")
        if not place:
            raise ImportError("neither a dotted path nor file.py:name")
        module = importlib.import_module(place)
    found: Callable[..., Any] = getattr(module, name)
    if not callable(found):
        raise AttributeError(f"{name} is no function")
    return found


def answer(function: Callable[..., Any], request: dict[str, Any]) -> dict[str, Any]:
    """The function's rewards for a request, or what is wrong with them."""
    try:
        rewards = [float(reward) for reward in function(request["prompts"], request["completions"], request["rows"])]
    except Exception as error:  # whatever a reward raises
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")}
    if len(rewards) != len(request["completions"]):
        return {"error": f"it gave {len(rewards)} rewards for {len(request['completions'])} completions"}
    if any(reward != reward or reward in (float("inf"), float("-inf")) for reward in rewards):
        return {"error": "it gave a reward that is not a finite number"}
    return {"rewards": rewards}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a reward prints must not stand between the answers

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        function = load(sys.argv[1])
    except Exception as error:
        reply({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"})
        return
    reply({"ready": True})
    for line in sys.stdin:
        reply(answer(function, json.loads(line)))


if __name__ == "__main__":
    main()
