"""Table of objectives by name, and the model families that each supports.

A new objective is a class and a row of the table, or of an extension's `objectives`. Other packages add objectives
through an entry point of the group `dlm_bridge.objectives` that names an Objective class or an ObjectiveSpec.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, get_args

from dlm_bridge.errors import CheckpointError, SettingError
from dlm_bridge.objectives.base import NoiseName, Objective
from dlm_bridge.objectives.editing import EditingBlockDiffusion
from dlm_bridge.objectives.resizing import DreamOnDiffusion
from dlm_bridge.objectives.single_stream import (
    HybridDiffusion,
    MaskedDiffusion,
    NextTokenPrediction,
    ShiftedDiffusion,
    UniformDiffusion,
)
from dlm_bridge.objectives.trajectory import (
    BlockTrajectoryDistillation,
    ShiftedTrajectoryDistillation,
    TrajectoryDistillation,
)
from dlm_bridge.objectives.two_streams import (
    BlockDiffusion,
    CanvasDiffusion,
    ComplementaryBlockDiffusion,
    IDLMDiffusion,
    NemotronDiffusion,
    WeDLMDiffusion,
)
from dlm_bridge.registration import absent, load, load_entry_points, registered
from dlm_bridge.settings import check_choice

ENTRY_POINTS = "dlm_bridge.objectives"
logger = logging.getLogger(__name__)


class ModelFamily(Protocol):
    """Attributes of a model family that objectives read."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def attention_pattern(self) -> str: ...
    @property
    def shift(self) -> bool: ...
    def is_any_of(self, names: tuple[str, ...]) -> bool: ...


@dataclass(frozen=True)
class ObjectiveSpec:
    """An objective with its settings."""

    kind: type[Objective]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def fits(self, family: ModelFamily) -> bool:
        kind = self.kind
        if not family.is_any_of(kind.families):
            return False
        if family.name in CanvasDiffusion.families and not issubclass(kind, CanvasDiffusion):
            return False  # the family has two towers and no mask token
        if family.name in kind.also:
            return True
        return family.attention_pattern in kind.attention_patterns and family.shift == kind.shift


OBJECTIVES: dict[str, ObjectiveSpec] = {
    "masked": ObjectiveSpec(MaskedDiffusion),
    "masked_fraction": ObjectiveSpec(MaskedDiffusion, {"loss_weighting": "fraction", "eps": 0.0}),
    "shifted": ObjectiveSpec(ShiftedDiffusion),
    "shifted_cart": ObjectiveSpec(ShiftedDiffusion, {"loss_weighting": "cart"}),
    "shifted_floor": ObjectiveSpec(ShiftedDiffusion, {"eps": 1e-3}),
    "dreamon": ObjectiveSpec(DreamOnDiffusion),
    "block": ObjectiveSpec(BlockDiffusion),
    "block_levels": ObjectiveSpec(BlockDiffusion, {"level": "block"}),
    "block_editing": ObjectiveSpec(EditingBlockDiffusion),
    "block_complementary": ObjectiveSpec(ComplementaryBlockDiffusion),
    "nemotron": ObjectiveSpec(NemotronDiffusion),
    "nemotron_bridge": ObjectiveSpec(
        NemotronDiffusion, {"divisors": "predictions", "diffusion_weight": 0.3, "ar_weight": 1.0}
    ),
    "nemotron_sft": ObjectiveSpec(
        NemotronDiffusion, {"divisors": "separate", "diffusion_weight": 0.3, "ar_weight": 1.0}
    ),
    "wedlm": ObjectiveSpec(WeDLMDiffusion),
    "idlm": ObjectiveSpec(IDLMDiffusion),
    "canvas": ObjectiveSpec(CanvasDiffusion),
    "trajectory": ObjectiveSpec(TrajectoryDistillation),
    "trajectory_shifted": ObjectiveSpec(ShiftedTrajectoryDistillation),
    "trajectory_block": ObjectiveSpec(BlockTrajectoryDistillation),
    "uniform": ObjectiveSpec(UniformDiffusion),
    "uniform_hybrid": ObjectiveSpec(HybridDiffusion),
    "causal": ObjectiveSpec(NextTokenPrediction),
}


@cache
def objectives() -> Mapping[str, ObjectiveSpec]:
    """The table above and the objectives of extensions and installed packages, which cannot replace a name."""
    found = dict(OBJECTIVES)
    named = [(name, load("objectives", name)) for name in registered("objectives")]
    for name, loaded in (*named, *load_entry_points(ENTRY_POINTS).items()):
        spec = ObjectiveSpec(loaded) if isinstance(loaded, type) and issubclass(loaded, Objective) else loaded
        if name in found or not isinstance(spec, ObjectiveSpec):
            problem = "is taken" if name in found else "is neither an Objective class nor an ObjectiveSpec"
            logger.warning(f"entry point '{name}' of {ENTRY_POINTS} {problem}: ignored")
        else:
            found[name] = spec
    return found


def find_objective(name: str) -> ObjectiveSpec:
    """Return the objective of a name. Raises SettingError for an unknown name."""
    check_choice("objective", name, objectives(), absent())
    return objectives()[name]


def check_objective(name: str, family: ModelFamily) -> None:
    """Raise SettingError unless the objective supports the family: models of another attention pattern or shift would
    be sampled differently than trained."""
    if not find_objective(name).fits(family):
        fitting = ", ".join(known for known, spec in objectives().items() if spec.fits(family)) or "none"
        attention = family.attention_pattern.replace("_", "-") + (" and shifted" if family.shift else "")
        raise SettingError(
            "objective", f"'{name}' does not support {family.title}, which is {attention}: choose one of {fitting}"
        )


def build_objective(
    name: str,
    mask_token_id: int,
    length_variation: float = 0.0,
    config: Any = None,
    loss_weighting: str | None = None,
    loss_normalisation: str | None = None,
    **others: Any,
) -> Objective:
    """Create an objective.

    Args:
        config: the model's configuration, for block size and loss weights.
        others: further fields of the objective. None, as for all settings: the objective's default.

    Raises:
        SettingError: an unknown name, or a setting that the objective does not have or does not support.
        CheckpointError: the configuration lacks a value that the objective needs.
    """
    spec = find_objective(name)
    settings = {**spec.kind.settings(config), **spec.settings}
    chosen = {"loss_weighting": loss_weighting, "loss_normalisation": loss_normalisation, **others}
    for key, value in chosen.items():
        if value is not None:
            if key not in spec.kind.__dataclass_fields__:
                raise SettingError(key, f"{value}: the objective '{name}' does not have this setting")
            settings[key] = value
    return spec.kind(mask_token_id=mask_token_id, length_variation=length_variation, **settings)


def family_objective(model: Any, name: str | None = None) -> Objective:
    """Create the objective `name`, by default the model's own, for a loaded model. Raises SettingError if it does not
    support the model, or needs a mask token and the model has none."""
    name = name or own_objective(model.config, model.family)
    check_objective(name, model.family)
    token, ordinary = noise_token_id(model, name), model.family.ordinary_mask
    return build_objective(name, token, config=model.config, ordinary_mask=ordinary)


def noise_process(config: Any) -> NoiseName | None:
    """Noise process recorded in a model's config; None if it records none, as on the Hub. Raises CheckpointError for
    an unknown one, and for a hybrid without its fraction of random tokens."""
    named = getattr(config, "noise_process", None)
    fraction = getattr(config, "p_uniform", None)
    is_known = named is None or named in get_args(NoiseName)
    if not is_known or (named == "hybrid" and not (isinstance(fraction, float) and 0 < fraction < 1)):
        raise CheckpointError("config.json", f"noise_process {named!r} with p_uniform {fraction!r} is not valid")
    return named


def own_objective(config: Any, family: Any) -> str:
    """Objective recorded in a model's config, else its family's default."""
    return {"uniform": "uniform", "hybrid": "uniform_hybrid"}.get(noise_process(config) or "mask", family.objective)


def noise_token_id(model: Any, objective: str) -> int:
    """Mask token of a model for an objective; -1 if the objective does not mask and the model has none. Raises
    SettingError as `mask_token_id`."""
    kind = find_objective(objective).kind
    if not kind.masks and kind.noise_process == "mask":
        return -1
    named = getattr(model.config, "mask_token_id", None)
    if not kind.masks and named is None and model.family.mask_token_id is None:
        return -1
    return mask_token_id(model)


def mask_token_id(model: Any) -> int:
    """Mask token of the config, else of the family. Raises SettingError if there is none in the vocabulary."""
    token = getattr(model.config, "mask_token_id", None)
    token = model.family.mask_token_id if token is None else token
    embedding = model.get_input_embeddings()
    rows = getattr(embedding, "num_embeddings", embedding.weight.shape[0])  # the weight may be a shard
    if type(token) is not int or not 0 <= token < rows:
        raise SettingError(
            "mask_token_id", f"the model's is {token!r}, not a token of its vocabulary of {rows}: set it"
        )
    return token
