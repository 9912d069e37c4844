"""Settings of `dlm-bridge serve` and `dlm-bridge app`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from dlm_bridge.settings import LoadingOptions, check_values, common_option

_limit_option = functools.partial(common_option, panel="Limits")


@dataclass(frozen=True, kw_only=True)
class AppOptions(LoadingOptions):
    """Settings of the page."""

    port: int = common_option(7860, "The page is at http://127.0.0.1:PORT.", minimum=1, maximum=65535)

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True, kw_only=True)
class ServeOptions(AppOptions):
    """Settings of the HTTP server."""

    host: str = common_option("127.0.0.1", "Address to listen on; 0.0.0.0 is every network of this machine.")
    port: int = common_option(8000, "Port to listen on; 0: any free one.", minimum=0, maximum=65535)
    replicas: int | None = common_option(
        None,
        "Serve N copies of the model behind this address, each in a process with its own GPU (--nproc-per-node M: M "
        "processes and GPUs each). A copy that dies is replaced.",
        minimum=1,
        metavar="N",
    )
    api_key: str | None = common_option(
        None,
        "Key that requests must send (Authorization: Bearer KEY); by default $DLM_BRIDGE_API_KEY, if set.",
        metavar="TEXT",
    )
    allowed_host: list[str] = common_option(
        [],
        "Name of this server that requests may use (header Host). Repeatable. By default any name, or those of this "
        "machine if the server listens on this machine alone.",
        metavar="NAME",
        panel="Browsers",
    )
    cors_origin: list[str] = common_option(
        [],
        "Origin of web pages whose scripts may use the server, such as https://example.com. Repeatable.",
        metavar="ORIGIN",
        panel="Browsers",
    )
    set: dict[str, Any] = common_option(
        {},
        "Sampler setting for requests that do not set it. Repeatable.",
        metavar="NAME=VALUE",
    )
    batch_size: int | None = _limit_option(
        32,
        "Maximum number of texts sampled together (by each replica); auto: as many as memory allows.",
        minimum=1,
        metavar="N|auto",
    )
    queue_size: int = _limit_option(
        256, "Maximum number of texts that wait or are read; further requests get 429.", minimum=1
    )
    max_length: int | None = _limit_option(
        None,
        "Maximum number of prompt and new tokens together; by default the model's context, up to 4096.",
        minimum=1,
        metavar="INT",
    )
    prefix_cache: float | None = _limit_option(
        None,
        "Memory in each process for keys and values of earlier texts, reused by requests that begin with the same "
        "tokens; of block-causal models. By default, nothing is reused.",
        above=0,
        metavar="GIB",
    )
    prefill_chunk: int = _limit_option(
        2048,
        "Number of prompt tokens that are run between two steps of running texts; of block-causal models.",
        minimum=1,
    )
    max_body: float = _limit_option(4, "Maximum size of a request.", above=0, metavar="MB")
    timeout: float = _limit_option(
        600.0, "Time from a request's header to the end of its answer.", minimum=0.001, metavar="SECONDS"
    )
