"""A model that several processes hold together, by transformers' tensor parallelism: how far it can be cut, and what
its processes must agree on."""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import torch.distributed as dist

from dlm_bridge.errors import DlmBridgeError

# By the last part of a plan's rule: what it cuts, in words, and the configuration's field that counts it.
_CUT = {
    "q_proj": ("attention heads", "num_attention_heads"),
    "k_proj": ("key/value heads", "num_key_value_heads"),
    "gate_up_proj": ("columns of an expert", "moe_intermediate_size"),
}


def check_cut(config: Any, processes: int, name: str) -> None:
    """Raise DlmBridgeError, which calls the model `name`, where transformers' plan for the configuration's class would
    cut a head or an expert between two of so many processes, or where that class has no plan."""
    config = config.get_text_config()
    plan = config.base_model_tp_plan
    if not plan:
        raise DlmBridgeError(
            f"{name}: transformers has no tensor parallelism for {type(config).__name__}: use --device-map auto"
        )
    cut = [rule.rsplit(".", 1)[-1] for rule, style in plan.items() if style in ("colwise", "packed_colwise")]
    counts = {_CUT[part][0]: getattr(config, _CUT[part][1], None) for part in cut if part in _CUT}
    known = {what: count for what, count in counts.items() if count}
    for what, count in known.items():
        if count % processes:
            whole = gcd(*known.values())
            fits = ", ".join(str(number) for number in range(2, whole + 1) if whole % number == 0)
            raise DlmBridgeError(
                f"{name}: {count} {what} cannot be shared by {processes} processes: "
                + (f"start {fits} of them, or use --device-map auto" if fits else "use --device-map auto")
            )


def shared_seed(model: Any) -> int | None:
    """A seed that the processes of a tensor-parallel model share, from the first one's global random numbers; None for
    a model that one process holds. All of them must call it: they draw the same tokens or wait for each other for
    ever."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if (getattr(model, "_tp_size", None) or 1) == 1:
        return None
    seed = torch.randint(2**62, (1,)).to(model.device)
    dist.broadcast(seed, group=model._device_mesh["tp"].get_group(), group_src=0)
    return int(seed)
