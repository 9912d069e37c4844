"""megatron-core's pipeline layout strings: "Et*3|(tt|)*2t*2L" cuts 9 layers into four stages of 3, 2, 2 and 2.

E is the embedding, t a transformer layer, L the loss (with the final norm and the output layer); "|" ends a stage,
"x*n" repeats one letter, "(...)*n" a group; commas are for the eye only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dlm_bridge.errors import DlmBridgeError

_GROUP = re.compile(r"\(([^()]+)\)\*(\d+)")
_LETTER = re.compile(r"([EtmL|])\*(\d+)")
_LONGEST = 100_000  # letters, after the repeats are written out


def parse_layout_string(text: str) -> list[str]:
    """The letters of each stage, in order of the layers. Raises DlmBridgeError."""

    def repeat(match: re.Match[str]) -> str:
        times = int(match[2]) if len(match[2]) < 7 else _LONGEST + 1
        if times * len(match[1]) > _LONGEST:
            raise DlmBridgeError(f"pipeline layout '{text}': too many layers")
        return match[1] * times

    flat = _LETTER.sub(repeat, _GROUP.sub(repeat, text.replace(",", "")))
    wrong = re.search(r"[^EtmL|]", flat)
    if wrong:
        raise DlmBridgeError(f"pipeline layout '{text}': '{wrong[0]}' is not one of E, t, L, | and x*n or (...)*n")
    if "m" in flat:
        raise DlmBridgeError(f"pipeline layout '{text}': the model has no multi-token prediction layers (m)")
    letters = flat.replace("|", "")
    if not letters.startswith("E") or not letters.endswith("L") or letters.count("E") + letters.count("L") != 2:
        raise DlmBridgeError(f"pipeline layout '{text}': it must start with one E and end with one L")
    return flat.split("|")


def chunk_layers(text: str, layers: int) -> list[int]:
    """Layers in each stage of the string. Raises DlmBridgeError where they are not `layers` in all."""
    sizes = [stage.count("t") for stage in parse_layout_string(text)]
    if sum(sizes) != layers:
        proposal = layout_string(balanced(layers, len(sizes)))
        raise DlmBridgeError(
            f"pipeline layout '{text}' has {sum(sizes)} layers, the model has {layers}: use '{proposal}'"
        )
    return sizes


def layout_string(sizes: Sequence[int]) -> str:
    """The string that cuts into stages of these many layers."""
    stages = ["t" * size if size < 2 else f"t*{size}" for size in sizes]
    return "E" + "|".join(stages) + "L"


def balanced(layers: int, parts: int) -> list[int]:
    """`layers` in `parts` sizes that differ by one at the most, the larger first."""
    return [layers // parts + (part < layers % parts) for part in range(parts)]
