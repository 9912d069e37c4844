"""How tokens reach experts with `--moe-dispatcher auto`."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from dlm_bridge.train.config import TrainConfig

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="megatron-core is not installed: pip install 'dlm-bridge[megatron]'",
)


@pytest.mark.parametrize(
    ("options", "passed", "expected"),
    [
        ({"ep": 4}, {}, "allgather"),
        ({"ep": 8}, {}, "alltoall"),  # as many copies either way
        ({"ep": 1}, {}, "alltoall"),
        ({"ep": 4, "tp": 2}, {}, "alltoall"),  # experts are cut over as many ranks
        ({"ep": 4, "tp": 2, "etp": 1}, {}, "allgather"),
        ({"ep": 4, "moe_dispatcher": "alltoall"}, {}, "alltoall"),
        ({"ep": 4, "moe_shared_expert_overlap": True}, {}, "alltoall"),
        ({"ep": 4}, {"moe_expert_capacity_factor": 1.0}, "alltoall"),
    ],
)
def test_tokens_take_the_way_of_fewest_copies(options: dict[str, Any], passed: dict[str, Any], expected: str) -> None:
    from dlm_bridge.parallel.train.mcore_config import _dispatcher

    given = {"model": "m", "data": ["mock"], "output": "o", "engine": "megatron", "moe_dispatcher": "auto"}
    config = TrainConfig.from_flags(**given | options)
    assert _dispatcher(config, 8, passed) == expected
