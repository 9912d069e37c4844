"""The table of objectives by name, and the models that each of them fits.

A new objective is its class and a row of the table. Other packages add theirs through an entry point of the group
`dlm_bridge.objectives` that names an Objective class or an ObjectiveSpec.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, get_args

from dlm_bridge.errors import DlmBridgeError
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
from dlm_bridge.registration import load_entry_points

ENTRY_POINTS = "dlm_bridge.objectives"
logger = logging.getLogger(__name__)


class ModelFamily(Protocol):
    """What objectives ask of a model's family."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def attention_pattern(self) -> str: ...
    @property
    def shift(self) -> bool: ...


@dataclass(frozen=True)
class ObjectiveSpec:
    """An objective with its settings."""

    kind: type[Objective]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def fits(self, family: ModelFamily) -> bool:
        kind = self.kind
        if kind.families and family.name not in kind.families:
            return False
        if family.name in CanvasDiffusion.families and not issubclass(kind, CanvasDiffusion):
            return False  # it has no mask token, and two towers
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
    """The table above, and the objectives of installed packages. A name of the table is not replaced."""
    found = dict(OBJECTIVES)
    for name, loaded in load_entry_points(ENTRY_POINTS).items():
        spec = ObjectiveSpec(loaded) if isinstance(loaded, type) and issubclass(loaded, Objective) else loaded
        if name in OBJECTIVES or not isinstance(spec, ObjectiveSpec):
            problem = "is taken" if name in OBJECTIVES else "is neither an Objective class nor an ObjectiveSpec"
            logger.warning(f"entry point '{name}' of {ENTRY_POINTS} {problem}: left out")
        else:
            found[name] = spec
    return found


def find_objective(name: str, where: str = "--objective") -> ObjectiveSpec:
    """The objective of a name. Raises DlmBridgeError, in one line that begins with `where`, for an unknown one."""
    if name not in objectives():
        raise DlmBridgeError(f"{where}: unknown objective '{name}': known are {', '.join(objectives())}")
    return objectives()[name]


def check_objective(name: str, family: ModelFamily, where: str) -> None:
    """Raise DlmBridgeError, in one line that begins with `where`, unless `name` is an objective for models of
    `family`: with another attention pattern or shift they would be sampled differently than trained."""
    if not find_objective(name, where).fits(family):
        fitting = ", ".join(known for known, spec in objectives().items() if spec.fits(family)) or "none"
        attention = family.attention_pattern.replace("_", "-") + (" and shifted" if family.shift else "")
        raise DlmBridgeError(
            f"{where}: objective '{name}' is not for {family.title}, which is {attention}: what fits is {fitting}"
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
    """The objective of a name, with the block size and loss weights of the model's `config`, and its own weighting,
    normalisation and `others` of its fields where they are None.

    Raises DlmBridgeError for an unknown name, where the configuration lacks what the objective needs, for a weighting
    or normalisation that it does not support and for a field that it does not have.
    """
    spec = find_objective(name)
    settings = {**spec.kind.settings(config), **spec.settings}
    chosen = {"loss_weighting": loss_weighting, "loss_normalisation": loss_normalisation, **others}
    for key, value in chosen.items():
        if value is not None:
            if key not in spec.kind.__dataclass_fields__:
                raise DlmBridgeError(f"--{key.replace('_', '-')} {value}: objective '{name}' has no such setting")
            settings[key] = value
    return spec.kind(mask_token_id=mask_token_id, length_variation=length_variation, **settings)


def family_objective(model: Any, name: str | None = None) -> Objective:
    """The objective `name`, by default the model's own, for a loaded model. Raises DlmBridgeError where it is not one
    for that model, or where there is no mask token in its vocabulary and one is needed."""
    name = name or own_objective(model.config, model.family)
    check_objective(name, model.family, type(model).__name__)
    token, ordinary = noise_token_id(model, name), model.family.ordinary_mask
    return build_objective(name, token, config=model.config, ordinary_mask=ordinary)


def noise_process(config: Any) -> NoiseName | None:
    """What a model's config says that it was trained with; None where it says nothing, as those on the Hub. Raises
    DlmBridgeError for another word, and for a hybrid without its fraction of random tokens."""
    named = getattr(config, "noise_process", None)
    if named is not None and named not in get_args(NoiseName):
        raise DlmBridgeError(f"config.json: noise_process {named!r} is none of {', '.join(get_args(NoiseName))}")
    fraction = getattr(config, "p_uniform", None)
    if named == "hybrid" and not (isinstance(fraction, float) and 0 < fraction < 1):
        raise DlmBridgeError(f"config.json: noise_process hybrid needs p_uniform between 0 and 1, not {fraction!r}")
    return named


def own_objective(config: Any, family: Any) -> str:
    """The objective that a model was trained with as far as its config says, else its family's own."""
    return {"uniform": "uniform", "hybrid": "uniform_hybrid"}.get(noise_process(config) or "mask", family.objective)


def noise_token_id(model: Any, objective: str) -> int:
    """The mask token for an objective: -1 where it masks nothing and the model has none. Raises DlmBridgeError as
    `mask_token_id`."""
    kind = find_objective(objective).kind
    if not kind.masks and kind.noise_process == "mask":
        return -1
    named = getattr(model.config, "mask_token_id", None)
    if not kind.masks and named is None and model.family.mask_token_id is None:
        return -1
    return mask_token_id(model)


def mask_token_id(model: Any) -> int:
    """The config's mask token, else the family's. Raises DlmBridgeError where there is none in the vocabulary."""
    token = getattr(model.config, "mask_token_id", None)
    token = model.family.mask_token_id if token is None else token
    if token is None:
        raise DlmBridgeError("the model's config has no mask_token_id: give it with --mask-token-id")
    embedding = model.get_input_embeddings()
    rows = getattr(embedding, "num_embeddings", embedding.weight.shape[0])  # its weight may be a shard
    if type(token) is not int or not 0 <= token < rows:
        raise DlmBridgeError(
            f"mask_token_id {token!r} is outside the vocabulary of {rows}: give another with --mask-token-id"
        )
    return token
