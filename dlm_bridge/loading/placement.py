"""Placement of a model's weights: one device, a device map, or shards and copies in the launcher's processes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch

from dlm_bridge.distributed import Replicas, local_rank, world_size
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.settings import LoadingOptions, check_minimum

DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True)
class Placement:
    """Placement of a model's weights: one device, several devices with transformers' `device_map`, or transformers'
    tensor parallelism. With `replicated`, each of the launcher's processes uses its own device."""

    device: str | None = None  # None: the accelerator, or else the CPU
    device_map: str | None = None  # one of DEVICE_MAPS, or a JSON object that maps modules to devices
    offload_folder: str | None = None  # for weights that a device map offloads to disk
    tp_plan: str | None = None  # "auto": the family's own plan, over the launcher's processes
    replicated: bool = False  # True: the launcher's processes may hold several copies of the model
    tp: int | None = None  # number of neighbouring processes that share one copy; None: all

    @classmethod
    def of(cls, options: LoadingOptions, replicated: bool = False) -> Placement:
        """The placement that a command's options select."""
        return cls(options.device, options.device_map, options.offload_folder, options.tp_plan, replicated, options.tp)

    @property
    def tensor_parallel(self) -> bool:
        """True if processes hold shards of the model."""
        return self.tp_plan is not None if self.tp is None else self.tp > 1

    @property
    def tp_size(self) -> int:
        """Number of the launcher's processes that share one copy of the model."""
        return (self.tp or world_size()) if self.tensor_parallel else 1

    def arguments(self) -> dict[str, Any]:
        """Arguments for `from_pretrained`. Raises DlmBridgeError for devices that do not exist."""
        processes = world_size()
        check_minimum("tp", self.tp)
        if sum([self.device is not None, self.device_map is not None, self.tensor_parallel]) > 1:
            cut = "--tp-plan" if self.tp is None else "--tp"
            raise DlmBridgeError(f"--device, --device-map and {cut} exclude each other: set one of them")
        if self.offload_folder is not None and self.device_map is None:
            raise DlmBridgeError("--offload-folder needs --device-map")
        if self.tp_plan not in (None, "auto"):
            raise DlmBridgeError(f"--tp-plan {self.tp_plan}: the only choice is auto")
        if self.tensor_parallel:
            return self._tensor_parallel(processes)
        if processes > 1 and not self.replicated:
            raise DlmBridgeError(
                f"{processes} processes would each hold the whole model: add --tp-plan auto, or start one process"
            )
        if processes > 1:
            device = self._own_device()
            if device.type == "cpu":
                return {}
            torch.accelerator.set_device_index(device.index)  # so that no tensor of this process is on the first GPU
            return {"device_map": {"": str(device)}}
        if self.device_map is not None:
            more = {} if self.offload_folder is None else {"offload_folder": self.offload_folder}
            return {"device_map": _device_map(self.device_map), **more}
        device = self._device()
        return {} if device.type == "cpu" else {"device_map": {"": str(device)}}

    def _device(self) -> torch.device:
        best = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if self.device is None:
            return best or torch.device("cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError:
            raise DlmBridgeError(f"--device {self.device}: no such device: such as cpu, cuda or cuda:1") from None
        if device.type != "cpu":
            count = torch.accelerator.device_count() if best is not None and best.type == device.type else 0
            if (device.index or 0) >= count:
                raise DlmBridgeError(f"--device {self.device}: this machine has {count} of them")
        return device

    def _own_device(self) -> torch.device:
        """Device of this process."""
        if self.device_map is not None:
            raise DlmBridgeError(
                "--device-map distributes a model over all GPUs, in every process: start one process, or remove "
                "--device-map to use one GPU per process"
            )
        device = self._device()
        if device.type == "cpu":
            return device
        if device.index is not None:
            raise DlmBridgeError(f"--device {self.device}: each process uses its own GPU: set --device {device.type}")
        local, count = local_rank() or 0, torch.accelerator.device_count()
        if local >= count:
            raise DlmBridgeError(
                f"one process per GPU is needed, and this machine has {count}: start fewer, or set --device cpu"
            )
        return torch.device(device.type, local)

    def _tensor_parallel(self, processes: int) -> dict[str, Any]:
        if processes == 1:
            cut, count = ("--tp-plan", "N") if self.tp is None else (f"--tp {self.tp}", str(self.tp))
            raise DlmBridgeError(
                f"{cut} cuts the model over several processes: start them with "
                f"torchrun --nproc-per-node {count} -m dlm_bridge.cli ..."
            )
        copies, rest = divmod(processes, self.tp_size)
        if rest:
            raise DlmBridgeError(
                f"--tp {self.tp} does not divide {processes} processes: give a divisor, or start a multiple of it"
            )
        if copies > 1 and not self.replicated:
            raise DlmBridgeError(
                f"{processes} processes with --tp {self.tp} hold {copies} models for one prompt: start {self.tp}, or "
                "give a file of prompts with --jsonl"
            )
        from dlm_bridge.generation.runtime.tensor_parallel import distributed_config

        return {"distributed_config": distributed_config(self.tp_size, copies)}


def _device_map(choice: str) -> Any:
    if choice in DEVICE_MAPS:
        return choice
    try:
        parsed = json.loads(choice)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise DlmBridgeError(
            f'--device-map {choice}: one of {", ".join(DEVICE_MAPS)}, or a JSON object such as \'{{"": "cpu"}}\''
        )
    return parsed


def join_replicas(placement: Placement) -> Replicas:
    """The launcher's processes, each with its model, or its shard of one, loaded."""
    return Replicas.of_launcher(placement.tp_size)


# By the last part of a plan's rule: what it cuts, in words, and the configuration's field that counts it.
_SPLIT_DIMENSIONS = {
    "q_proj": ("attention heads", "num_attention_heads"),
    "k_proj": ("key/value heads", "num_key_value_heads"),
    "gate_up_proj": ("columns of an expert", "moe_intermediate_size"),
}


def check_tensor_parallel_split(
    config: Any, processes: int, name: str, flag: str = "--tp", otherwise: str = "use --device-map auto"
) -> None:
    """Raise DlmBridgeError, which calls the model `name`, where transformers' tensor parallel plan for the config's
    class would split a head or an expert between processes, or where that class has no plan: it says to give `flag`
    another number, or what to do `otherwise`."""
    config = config.get_text_config()
    plan = config.base_model_tp_plan
    if not plan:
        raise DlmBridgeError(
            f"{name}: transformers has no tensor parallelism for {type(config).__name__}: {otherwise}"
        )
    cut = [rule.rsplit(".", 1)[-1] for rule, style in plan.items() if style in ("colwise", "packed_colwise")]
    counts = {
        _SPLIT_DIMENSIONS[part][0]: getattr(config, _SPLIT_DIMENSIONS[part][1], None)
        for part in cut
        if part in _SPLIT_DIMENSIONS
    }
    known = {what: count for what, count in counts.items() if count}
    for what, count in known.items():
        if count % processes:
            whole = gcd(*known.values())
            fits = ", ".join(str(number) for number in range(2, whole + 1) if whole % number == 0)
            raise DlmBridgeError(
                f"{name}: {count} {what} cannot be shared by {processes} processes: "
                + (f"give {flag} {fits}, or {otherwise}" if fits else otherwise)
            )
