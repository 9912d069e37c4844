"""One row of the table of patches, and when it applies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dlm_bridge.parallel.platform import CPU, Platform


@dataclass(frozen=True)
class Condition:
    """When a patch applies: in words, and whether a platform meets it."""

    words: str
    met: Callable[[Platform], bool]


@dataclass(frozen=True)
class Patch:
    """One row of the table."""

    target: str  # name in megatron-core; of several, what they have in common
    what: str  # it becomes, or is used for
    why: str
    source: str  # path:line in megatron-core 0.16.1
    when: Condition
    code: str = ""  # in this folder, where not in `replaces`
    replaces: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)  # full dotted name: make a replacement


def on_cpu(platform: Platform) -> bool:
    """Whether a platform is the CPU's."""
    return isinstance(platform, CPU)


def anywhere(words: str) -> Condition:
    """On every platform, where the run is as the words say."""
    return Condition(words, lambda platform: True)


def on_accelerators(words: str) -> Condition:
    """On every platform but the CPU's."""
    return Condition(words, lambda platform: not on_cpu(platform))


def with_te(words: str) -> Condition:
    """Where a platform's layers are Transformer Engine's."""
    return Condition(words, lambda platform: platform.uses_transformer_engine())


def without_te(words: str) -> Condition:
    """Where they are not."""
    return Condition(words, lambda platform: not platform.uses_transformer_engine())


ON_CPU = Condition("the CPU platform", on_cpu)
