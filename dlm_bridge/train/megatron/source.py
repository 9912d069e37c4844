"""What a Megatron run starts from: the weights behind a Bridge, and the Hub model that they belong to, without any."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.bridge import Bridge
from dlm_bridge.convert.formats.torch_dist import TRACKER
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.config import TrainConfig


@dataclass(frozen=True)
class Source:
    """`model` is the Hub model on the meta device: its family, config and sizes are what both engines go by."""

    bridge: Bridge
    model: Any


def open_source(config: TrainConfig, checkpoint: Path | None) -> Source:
    """The source that `--model` names, or on a resume the run's own `checkpoint`. Raises DlmBridgeError."""
    if checkpoint is not None:
        bridge = Bridge.from_megatron(checkpoint)
    elif config.from_scratch:
        bridge = Bridge.from_scratch(config.model, config.seed, family=config.family)
    elif (Path(config.model).parent / TRACKER).is_file():
        raise DlmBridgeError(
            f"--model {config.model}: it is an iteration of a Megatron checkpoint: give the folder that holds it and "
            f"{TRACKER}, which says the iteration, or export this one"
        )
    elif (Path(config.model) / TRACKER).is_file():
        bridge = Bridge.from_megatron(config.model, family=config.family)
    else:
        bridge = Bridge.from_hf(config.model, family=config.family)
    hub_config = bridge.family.load("config_class").from_dict(bridge.config)
    if config.mask_token_id is not None:
        hub_config.mask_token_id = config.mask_token_id  # saved with every checkpoint
    with torch.device("meta"):
        model = bridge.family.load("model_class")(hub_config)
    return Source(bridge, model)
