"""Settings of `dlm-bridge serve` and `dlm-bridge app`."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from dlm_bridge.settings import LoadingOptions, check_value, option, options_of

_option = functools.partial(option, common=True)
_limit = functools.partial(_option, panel="Limits")


@dataclass(frozen=True, kw_only=True)
class AppOptions(LoadingOptions):
    """Settings of the page."""

    port: int = _option(7860, "The page is at http://127.0.0.1:PORT.", minimum=1, maximum=65535)

    def __post_init__(self) -> None:
        for each in options_of(type(self)).values():
            check_value(each, getattr(self, each.name))


@dataclass(frozen=True, kw_only=True)
class ServeOptions(AppOptions):
    """Settings of the HTTP server."""

    host: str = _option("127.0.0.1", "Address to listen on; 0.0.0.0 is every network of this machine.")
    port: int = _option(8000, "Port to listen on; 0: any free one.", minimum=0, maximum=65535)
    api_key: str | None = _option(
        None,
        "Key that requests must send (Authorization: Bearer KEY); by default $DLM_BRIDGE_API_KEY, if set.",
        metavar="TEXT",
    )
    allowed_host: list[str] = option(
        [],
        "Name of this server that requests may use (header Host). Repeatable. By default any name, or those of this "
        "machine if the server listens on this machine alone.",
        metavar="NAME",
        panel="Browsers",
        common=True,
    )
    cors_origin: list[str] = option(
        [],
        "Origin of web pages whose scripts may use the server, such as https://example.com. Repeatable.",
        metavar="ORIGIN",
        panel="Browsers",
        common=True,
    )
    set: list[str] = option(
        [],
        "Sampler setting for requests that do not set it. Repeatable.",
        metavar="NAME=VALUE",
        common=True,
    )
    batch_size: str = _limit(
        "32", "Maximum number of texts sampled together; auto: as many as memory allows.", metavar="N|auto"
    )
    queue_size: int = _limit(
        256, "Maximum number of texts that wait or are read; further requests get 429.", minimum=1
    )
    max_length: int | None = _limit(
        None,
        "Maximum number of prompt and new tokens together; by default the model's context, up to 4096.",
        minimum=1,
        metavar="INT",
    )
    max_body: float = _limit(4, "Maximum size of a request.", above=0, metavar="MB")
    timeout: float = _limit(
        600.0, "Time from a request's header to the end of its answer.", minimum=0.001, metavar="SECONDS"
    )
