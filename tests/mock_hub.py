"""A mock Hub on localhost, and the fixture `hub`."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

TOKEN = "hf_SecretSecretSecretSecret0123"


@dataclass
class Hub:
    """Records requests. Answers as the Hub, or with an error `status` and a body that contains the token."""

    status: int = 200
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    header: dict[str, Any] = field(default_factory=dict)
    created: dict[str, Any] = field(default_factory=dict)
    branches: list[str] = field(default_factory=list)

    def answer(self, path: str, body: bytes) -> Any:
        if path == "/api/repos/create":
            self.created = json.loads(body)
            return {"url": "https://huggingface.co/me/model", "id": "me/model"}
        if "/branch/" in path:
            self.branches.append(path.rpartition("/")[2])
            return {}
        if "/preupload/" in path:
            wanted = json.loads(body)["files"]
            return {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in wanted]}
        if "/commit/" in path:
            for line in body.splitlines():
                item = json.loads(line)
                if item["key"] == "header":
                    self.header = item["value"]
                elif item["key"] == "file":
                    self.files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
            return {"commitUrl": "https://huggingface.co/me/model/commit/abc", "commitOid": "abc"}
        return {}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    import huggingface_hub.constants

    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            token = self.headers.get("Authorization")
            state.requests.append((self.command, self.path, token))
            answer = state.answer(self.path, body) if state.status == 200 else {"error": f"no good: {token}"}
            data = json.dumps(answer).encode()
            self.send_response(state.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            if state.status != 200:
                self.send_header("X-Error-Message", f"no good: {token}")
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST  # noqa: N815

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()  # poll interval in seconds
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # the server is on localhost
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    huggingface_hub.close_session()
    yield state
    huggingface_hub.close_session()
    server.shutdown()
    server.server_close()
