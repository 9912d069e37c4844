"""Samplers of the caller's own, by name beside the published ones."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import TypeVar, get_args

from transformers import GenerationConfig

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.algorithms import ALGORITHMS, Algorithm
from dlm_bridge.generation.config import OWN_FIELDS, PARAMETERS, SHARED
from dlm_bridge.models.spec import Topology

Kind = TypeVar("Kind", bound=type[Algorithm])


def register_algorithm(kind: Kind) -> Kind:
    """Make a sampler known to `generate` and to `DiffusionGenerationConfig` by its name; usable as a decorator.

    A rule alone needs no name: `generate(..., commit_rule=rule)` puts it in place of the sampler's own.

        @register_algorithm
        @dataclass(frozen=True, kw_only=True)
        class LeftToRight(Algorithm):
            name: ClassVar[str] = "left_to_right"
            topologies: ClassVar[tuple[Topology, ...]] = ("bidirectional",)
            per_step: int = 2

            def recipe(self, tokens: Tokens) -> Recipe:
                schedule = [self.per_step] * self.gen_length
                return Recipe(Layout(self.gen_length), Sequential(schedule), self.sampling(), Predictor, {})

        model.generate(ids, algorithm="left_to_right", per_step=4)

    Raises:
        DlmBridgeError: no dataclass of `Algorithm`'s, a name that another sampler has, or a parameter with the name
            of another setting.
    """
    if not (isinstance(kind, type) and issubclass(kind, Algorithm) and is_dataclass(kind)):
        raise DlmBridgeError(f"{kind!r} is no sampler: register a frozen, kw_only dataclass below Algorithm")
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not name:
        raise DlmBridgeError(f"{kind.__name__} has no name: give it `name: ClassVar[str]`")
    if name in ALGORITHMS and ALGORITHMS[name].__qualname__ != kind.__qualname__:
        raise DlmBridgeError(f"{kind.__name__}: the name '{name}' is that of {ALGORITHMS[name].__name__}")
    topologies = getattr(kind, "topologies", ())
    if not topologies or not {*topologies} <= {*get_args(Topology)}:
        raise DlmBridgeError(f"{kind.__name__}: topologies must be some of {', '.join(get_args(Topology))}")
    own = [parameter for parameter in kind.parameters() if parameter not in SHARED]
    for parameter in own:
        if parameter not in PARAMETERS and (parameter in OWN_FIELDS or hasattr(GenerationConfig(), parameter)):
            raise DlmBridgeError(f"{kind.__name__}: '{parameter}' is another setting's name")
    ALGORITHMS[name] = kind
    for parameter in own:
        if parameter not in PARAMETERS:
            PARAMETERS.append(parameter)
            OWN_FIELDS.append(parameter)
    return kind
