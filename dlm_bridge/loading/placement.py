"""Placement of a model's weights: one device, a device map, or shards and copies in the launcher's processes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch

from dlm_bridge.distributed import local_rank, world_size
from dlm_bridge.errors import LayoutError, MissingExtraError, SettingError
from dlm_bridge.replicas import Replicas
from dlm_bridge.settings import LoadingOptions, check_choice, check_minimum

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
    def tp_setting(self) -> str:
        """Name of the setting that requests tensor parallelism, for errors."""
        return "tp_plan" if self.tp is None else "tp"

    @property
    def tp_size(self) -> int:
        """Number of the launcher's processes that share one copy of the model."""
        return (self.tp or world_size()) if self.tensor_parallel else 1

    def arguments(self) -> dict[str, Any]:
        """Arguments for `from_pretrained`.

        Raises:
            SettingError: settings are invalid or exclude each other.
            LayoutError: the settings do not fit the number of processes.
            MissingExtraError: the device does not exist.
        """
        processes = world_size()
        check_minimum("tp", self.tp)
        given = {"device": self.device, "device_map": self.device_map, self.tp_setting: self.tensor_parallel or None}
        chosen = [name for name, value in given.items() if value is not None]
        if len(chosen) > 1:
            raise SettingError(chosen[0], f"excludes `{chosen[1]}`: set one of them")
        if self.tp_plan is not None:
            check_choice("tp_plan", self.tp_plan, ("auto",))
        if self.tensor_parallel:
            return self._tensor_parallel(processes)
        if processes > 1 and not self.replicated:
            raise LayoutError(
                "tp_plan",
                f"each of {processes} processes would load the whole model: set `tp_plan=auto`, or start one",
            )
        if processes > 1:
            device = self._own_device()
            if device.type == "cpu":
                return {}
            torch.accelerator.set_device_index(device.index)  # keeps this process's tensors off the first GPU
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
            raise SettingError("device", f"{self.device} is not a device, such as cpu, cuda or cuda:1") from None
        if device.type != "cpu":
            count = torch.accelerator.device_count() if best is not None and best.type == device.type else 0
            if (device.index or 0) >= count:
                raise MissingExtraError("device", f"{self.device} is missing: this machine has {count} {device.type}")
        return device

    def _own_device(self) -> torch.device:
        """Device of this process."""
        if self.device_map is not None:
            raise LayoutError("device_map", "distributes the model over all GPUs in every process: start one process")
        device = self._device()
        if device.type == "cpu":
            return device
        if device.index is not None:
            raise LayoutError(
                "device", f"each process uses its own GPU, not {self.device}: set `device={device.type}`"
            )
        local, count = local_rank() or 0, torch.accelerator.device_count()
        if local >= count:
            raise LayoutError(
                "device", f"each process needs its own GPU, and there are {count}: start fewer, or set `device=cpu`"
            )
        return torch.device(device.type, local)

    def _tensor_parallel(self, processes: int) -> dict[str, Any]:
        copies, rest = divmod(processes, self.tp_size)
        if processes == 1:
            problem = f"shards the model over several processes: set `nproc_per_node={self.tp or 'N'}`"
        elif rest:
            problem = f"{self.tp} does not divide {processes} processes: choose a divisor"
        elif copies > 1 and not self.replicated:
            problem = f"{processes} processes load {copies} copies of the model for one prompt: start {self.tp}"
        else:
            problem = None
        if problem is not None:
            raise LayoutError(self.tp_setting, problem)
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
        raise SettingError(
            "device_map", f'{choice} is neither {", ".join(DEVICE_MAPS)} nor a JSON object such as {{"": "cpu"}}'
        )
    return parsed


def join_replicas(placement: Placement) -> Replicas:
    """Return the launcher's processes as replicas, each a model or a group of shards."""
    return Replicas.of_launcher(placement.tp_size)


# Dimension that a plan's rule splits, by the rule's last part: its description, and the config's field with its size.
_SPLIT_DIMENSIONS = {
    "q_proj": ("attention heads", "num_attention_heads"),
    "k_proj": ("key/value heads", "num_key_value_heads"),
    "gate_up_proj": ("columns of an expert", "moe_intermediate_size"),
}


def check_tensor_parallel_split(
    config: Any, processes: int, setting: str = "tp", otherwise: str = "set `device_map=auto`"
) -> None:
    """Check that transformers' tensor parallel plan splits a model between heads and experts.

    Args:
        setting: name of the tensor parallel size in errors.
        otherwise: remedy if no size fits.

    Raises:
        LayoutError: a head or an expert would be split, or the config's class has no plan.
    """
    config = config.get_text_config()
    plan = config.base_model_tp_plan
    if not plan:
        name = type(config).__name__
        raise LayoutError(setting, f"transformers has no tensor parallelism for {name}: {otherwise}")
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
            raise LayoutError(
                setting,
                f"{count} {what} cannot be split over {processes} processes: "
                + (f"choose {fits}, or {otherwise}" if fits else otherwise),
            )
