"""`dlm-bridge env`: platform, devices, versions, and the patches of megatron-core."""

from __future__ import annotations

import logging
import os
import platform as machine
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm_bridge.cli.launch import with_processes
from dlm_bridge.errors import DlmBridgeError, counted

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)

# Distributions, in the order of the output.
PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "safetensors",
    "megatron-core",
    "nvidia-resiliency-ext",
    "transformer-engine",
    "flash-attn",
    "flash-attn-4",
    "apex",
    "triton",
    "psutil",
)
# Environment variables that affect a run; none that may contain a secret.
VARIABLES = (
    "DLM_BRIDGE_PLATFORM",
    "DLM_BRIDGE_ALLOW_UNTESTED_MCORE",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NVTE_FLASH_ATTN",
    "NVTE_FUSED_ATTN",
    "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_DISABLE",
    "NCCL_NVLS_ENABLE",
    "UB_SKIPMC",
    "GLOO_SOCKET_IFNAME",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "OMP_NUM_THREADS",
    "MASTER_ADDR",
    "MASTER_PORT",
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "HF_HOME",
    "HF_HUB_OFFLINE",
)
GIB = 2**30


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(with_processes(env))


def env(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check the hosts of a run and their network. Start it like the run.")
    ] = False,
    patches: Annotated[bool, typer.Option("--patches", help="List the patches of megatron-core.")] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --cluster: output folder of the run.")
    ] = None,
) -> None:
    """Show platform, devices and versions; with --patches, what is patched in megatron-core.

    With --cluster every process of a launcher takes part. The exit code is 1 if something would end a run: other
    versions, a clock that is off, an output folder that is not shared, a network that does not work.

    Example: dlm-bridge env --json

    Example: srun dlm-bridge env --cluster --output /shared/run
    """
    if cluster:
        from dlm_bridge.registration import load

        raise typer.Exit(load("features", "env --cluster")(output, as_json))
    if output is not None:
        raise typer.BadParameter("--output needs --cluster")
    found = environment()
    if as_json:
        import json

        typer.echo(json.dumps(found, indent=2))
    else:
        _show(found, patches)


def environment() -> dict[str, Any]:
    """Data of the command. Raises SettingError if DLM_BRIDGE_PLATFORM names an unknown platform."""
    from dlm_bridge.registration import CORE, EXTENSIONS, TESTED, load, registered, untested

    found: dict[str, Any] = {}
    for name, extension in registered("engines").items():
        try:
            found |= load("engines", name)().environment()
        except DlmBridgeError as error:
            if extension.name in (CORE.name, *EXTENSIONS):
                raise
            logger.warning(f"engine skipped: {error}")
    return found | {
        "versions": {
            "dlm-bridge": _version("dlm-bridge"),
            "python": sys.version.split()[0],
            **{name: _version(name) for name in PACKAGES},
            "os": machine.platform(),
        },
        "untested": [sentence for name in TESTED if (sentence := untested(name)) is not None],
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _show(found: dict[str, Any], patches: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if patches:
        _show_patches(console, found)
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    versions = dict(found["versions"])
    own, python, system = (versions.pop(name) for name in ("dlm-bridge", "python", "os"))
    table.add_row("dlm-bridge", Text(f"{own} on Python {python}, {system}"))
    for name, value in (_machine(found) if "platform" in found else {}).items():
        table.add_row(name, Text(value))
    installed = ", ".join(f"{name} {value}" for name, value in versions.items() if value is not None)
    table.add_row("packages", Text(installed))
    table.add_row("not installed", Text(", ".join(name for name, value in versions.items() if value is None) or "-"))
    if found["variables"]:
        table.add_row("variables", Text("\n".join(f"{name}={value}" for name, value in found["variables"].items())))
    if (overrides := found.get("overrides")) is not None:
        active = sum(patch["active"] for patch in found["patches"])
        fits = "" if overrides["fits"] else "; not the installed version: training is refused"
        table.add_row("megatron-core", f"{counted(active, 'patch', 'patches')} active (--patches lists them){fits}")
    console.print(table)
    for sentence in found["untested"]:
        console.print(Text(f"note: {sentence}"))


def _show_patches(console: Console, found: dict[str, Any]) -> None:
    from rich.table import Table

    overrides = found.get("overrides")
    if overrides is None:
        console.print("megatron-core is not installed (extra megatron): no patches", soft_wrap=True)
        return
    fits = "" if overrides["fits"] else ", not the installed version: training is refused"
    title = f"Patches of megatron-core, written for {' and '.join(overrides['made_for'])}{fits}"
    table = Table(title=title, title_justify="left")
    for heading in ("", "versions", "patched", "what", "when"):
        table.add_column(heading, overflow="fold")
    for patch in found["patches"]:
        style = None if patch["active"] else "dim"
        active, versions = "active" if patch["active"] else "-", ", ".join(patch["versions"])
        table.add_row(active, versions, patch["target"], patch["what"], patch["when"], style=style)
    console.print(table)


def _machine(found: dict[str, Any]) -> dict[str, str]:
    """Platform and devices as display strings."""
    platform, devices = found["platform"], found["devices"]
    available = [name for name, kind in platform["available"].items() if kind["available"]]
    missing = [name for name, kind in platform["available"].items() if not kind["available"]]
    rows = {
        "platform": f"{platform['chosen']} ({platform['backend']})",
        "available": ", ".join(available) + (f" (not here: {', '.join(missing)})" if missing else ""),
        "layers": "Transformer Engine" if platform["transformer_engine"] else "megatron-core, without fused kernels",
        "attention": "FlashAttention 4" if platform["flash_attention"] else "Transformer Engine's or torch's",
        "devices": f"{devices['count']} x {devices['name']}, {devices['memory_bytes'] / GIB:,.0f} GiB",
    }
    if found["overrides"] is None:
        del rows["layers"]
    return rows
