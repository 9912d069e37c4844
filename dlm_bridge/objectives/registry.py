"""The table of objectives by name, and the models that each of them fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.family_spec import FamilySpec
from dlm_bridge.objectives.base import Objective
from dlm_bridge.objectives.single_stream import MaskedDiffusion, NextTokenPrediction, ShiftedDiffusion
from dlm_bridge.objectives.two_streams import (
    BlockDiffusion,
    ComplementaryBlockDiffusion,
    NemotronDiffusion,
    WeDLMDiffusion,
)


@dataclass(frozen=True)
class ObjectiveSpec:
    """An objective with its settings."""

    kind: type[Objective]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def fits(self, family: FamilySpec) -> bool:
        kind = self.kind
        if kind.families and family.name not in kind.families:
            return False
        if family.name in kind.also:
            return True
        return family.attention_pattern in kind.attention_patterns and family.shift == kind.shift


OBJECTIVES: dict[str, ObjectiveSpec] = {
    "masked": ObjectiveSpec(MaskedDiffusion),
    "masked_fraction": ObjectiveSpec(MaskedDiffusion, {"loss_weighting": "fraction", "eps": 0.0}),
    "shifted": ObjectiveSpec(ShiftedDiffusion),
    "shifted_cart": ObjectiveSpec(ShiftedDiffusion, {"loss_weighting": "cart"}),
    "shifted_floor": ObjectiveSpec(ShiftedDiffusion, {"eps": 1e-3}),
    "block": ObjectiveSpec(BlockDiffusion),
    "block_levels": ObjectiveSpec(BlockDiffusion, {"level": "block"}),
    "block_complementary": ObjectiveSpec(ComplementaryBlockDiffusion),
    "nemotron": ObjectiveSpec(NemotronDiffusion),
    "wedlm": ObjectiveSpec(WeDLMDiffusion),
    "causal": ObjectiveSpec(NextTokenPrediction),
}


def check_objective(name: str, family: FamilySpec, where: str) -> None:
    """Raise DlmBridgeError, in one line that begins with `where`, unless `name` is an objective for models of
    `family`: one for another attention pattern or shift would train them for what they are not sampled with."""
    fitting = [known for known, preset in OBJECTIVES.items() if preset.fits(family)]
    instead = f"what fits is {', '.join(fitting)}" if fitting else "no objective fits it"
    if name not in OBJECTIVES:
        raise DlmBridgeError(f"{where}: unknown objective '{name}': known are {', '.join(OBJECTIVES)}; {instead}")
    if name not in fitting:
        attention = family.attention_pattern.replace("_", "-") + (" and shifted" if family.shift else "")
        raise DlmBridgeError(f"{where}: objective '{name}' is not for {family.title}, which is {attention}: {instead}")


def build_objective(
    name: str,
    mask_token_id: int,
    length_variation: float = 0.0,
    config: Any = None,
    loss_weighting: str | None = None,
    loss_normalisation: str | None = None,
) -> Objective:
    """The objective that `--objective NAME` means, with the block size and the weights of the model's `config`; with
    its own weighting and normalisation where they are None.

    Raises DlmBridgeError with the known names, where the configuration lacks what the objective needs, and for a
    weighting or normalisation that it has not.
    """
    if name not in OBJECTIVES:
        raise DlmBridgeError(f"unknown objective '{name}': known are {', '.join(OBJECTIVES)}")
    preset = OBJECTIVES[name]
    settings = {**preset.kind.settings(config), **preset.settings}
    chosen = {"loss_weighting": loss_weighting, "loss_normalisation": loss_normalisation}
    settings |= {key: value for key, value in chosen.items() if value is not None}
    return preset.kind(mask_token_id=mask_token_id, length_variation=length_variation, **settings)


def family_objective(model: Any, name: str | None = None, length_variation: float = 0.0) -> Objective:
    """The objective `name`, by default the family's own, for a loaded model. Raises DlmBridgeError where it is not one
    for that model, or where there is no mask token in its vocabulary."""
    name = name or model.family.objective
    check_objective(name, model.family, type(model).__name__)
    return build_objective(name, mask_token_id(model), length_variation, model.config)


def mask_token_id(model: Any) -> int:
    """The config's mask token, else the family's. Raises DlmBridgeError where there is none in the vocabulary."""
    token = getattr(model.config, "mask_token_id", None)
    token = model.family.mask_token_id if token is None else token
    if token is None:
        raise DlmBridgeError("the model's config has no mask_token_id: give it with --mask-token-id")
    rows = model.get_input_embeddings().weight.shape[0]
    if not 0 <= token < rows:
        raise DlmBridgeError(
            f"mask_token_id {token} is outside the vocabulary of {rows}: give another with --mask-token-id"
        )
    return int(token)
