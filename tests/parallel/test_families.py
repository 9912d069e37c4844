"""Which families the Megatron engine says it trains, against what it can build."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from dlm_bridge import Layout
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.families import families, family_by_name
from tests.autoregressive.cases import CASES
from tests.families.case import all_cases

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="megatron-core is not installed: pip install 'dlm-bridge[megatron]'",
)
PUBLISHED = [(case.name, case.config) for case in all_cases()] + [(case.spec.name, case.config) for case in CASES]
PUBLISHED += [
    (spec.name, {**case.config, "num_nextn_predict_layers": 0})
    for spec in families()
    for case in CASES
    if case.family == spec.derived_from
]


def buildable(family: str, config: dict[str, Any]) -> bool:
    from dlm_bridge.parallel.config import model_config

    spec = family_by_name(family)
    alone = spec.attention_pattern == "causal" and spec.objective != "idlm"
    if "sliding_attention" in config.get("layer_types", ()) and not alone:
        return False  # a window on both sides, or over two streams: the engine refuses both
    mapping = spec.mapping
    try:
        model_config(mapping, config, mapping.dims(config), Layout(), torch.float32)
    except DlmBridgeError:
        return False
    return True


def test_a_family_says_megatron_where_every_published_config_can_be_built() -> None:
    # DiffusionGemma, a diffusion model of transformers' own, has a page that says what megatron-core lacks.
    can = {spec.name: True for spec in families() if spec.kind == "autoregressive" or not spec.native}
    for family, config in PUBLISHED:
        can[family] &= buildable(family, config)
    assert {family for family, _ in PUBLISHED} == set(can)
    assert {name: "megatron" in family_by_name(name).training for name in can} == can
