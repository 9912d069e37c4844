"""Servers of tiny models, each in a thread of the test's own process."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from dlm_bridge.generation.offline import write_texts
from dlm_bridge.loading import LoadedModel, load_model
from tests.cli.conftest import TEMPLATE, llada, qwen3  # noqa: F401  fixtures

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

from dlm_bridge.serving.connections import bind  # noqa: E402
from dlm_bridge.serving.model import ServedModel  # noqa: E402
from dlm_bridge.serving.options import ServeOptions  # noqa: E402
from dlm_bridge.serving.scheduler import Scheduler  # noqa: E402
from dlm_bridge.serving.server import Server  # noqa: E402

PATIENCE_S = 300  # of a client and of a wait, on the slowest machine


@dataclass
class Running:
    """A server that answers."""

    address: str
    served: ServedModel
    scheduler: Scheduler
    process: Server

    def client(self, key: str = "none") -> Any:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key=key, timeout=PATIENCE_S, max_retries=0)

    def alone(self, prompt: str, **settings: Any) -> str:
        """The text of `generate` for this prompt alone."""
        loaded = self.served.loaded
        ids = loaded.tokenizer(prompt)["input_ids"]
        found = write_texts(loaded.model, loaded.tokenizer, [ids], settings)
        return found.texts[0]

    def wait(self, true: Callable[[], bool], what: str) -> None:
        wait_until(true, what)


def wait_until(true: Callable[[], bool], what: str) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {PATIENCE_S} s: {what}")
        time.sleep(0.05)


@contextmanager
def running(
    loaded: LoadedModel,
    *,
    defaults: dict[str, Any] | None = None,
    max_length: int | None = None,
    batch_size: int = 8,
    queue_size: int = 64,
    max_body: float = 0.1,
    timeout: float = PATIENCE_S,
    name: str = "tiny",
    prompts: Any = None,
    **options: Any,
) -> Iterator[Running]:
    """A server of the model until the end of the context."""
    served = ServedModel(loaded, name, defaults or {}, max_length, prompts)
    served.check()
    scheduler = Scheduler(served.open_engine, batch_size=batch_size, queue_size=queue_size)
    sock = bind("127.0.0.1", 0)
    server = Server(served, scheduler, ServeOptions(max_body=max_body, timeout=timeout, **options), sock)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive(), "the server's start")
        yield Running(f"http://127.0.0.1:{sock.getsockname()[1]}", served, scheduler, server)
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def diffusion(tmp_path_factory: pytest.TempPathFactory, llada: Path) -> LoadedModel:  # noqa: F811
    """A tiny LLaDA whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("served") / "llada"
    shutil.copytree(llada, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return load_model(folder)


@pytest.fixture(scope="module")
def server(diffusion: LoadedModel) -> Iterator[Running]:
    with running(diffusion) as found:
        yield found
