"""A replica without a model: `python stub.py FOLDER INDEX`. Its texts are functions of the prompt and the seed.

A prompt may begin with what the server does with it: "wait" answers once FOLDER/go is there, "die" and "die once" end
the process by SIGKILL ("once": the first process that gets it), before any text or, in a stream, after the first piece
of `die in`, which ends it in the middle. FOLDER/log gets a line for each request, and for each client that has left.
"""

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FOLDER, INDEX = Path(sys.argv[1]), sys.argv[2]
PIECES = 4  # of a stream


def log(line: str) -> None:
    with (FOLDER / "log").open("a") as file:
        file.write(f"{INDEX} {line}\n")


def text_of(prompt: str, seed: int) -> str:
    return f"<{prompt}:{seed}>"


def die_if_asked(prompt: str) -> None:
    if prompt.startswith("die once"):
        try:
            (FOLDER / "died").touch(exist_ok=False)
        except FileExistsError:
            return
    if prompt.startswith("die"):
        os.kill(os.getpid(), signal.SIGKILL)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        name = INDEX.encode()
        pages = {"/health": b"{}", "/metrics": b"dlm_bridge_batch_size 4.0\ndlm_bridge_tokens_total 7.0\n"}
        pages |= {"/v1/models": b'{"replica": "%s"}' % name, "/": b"<html>%s</html>" % self.headers["Host"].encode()}
        self.answer(pages.get(self.path, b"{}"))

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        chat = "messages" in given
        prompt = given["messages"][0]["content"] if chat else given["prompt"]
        log(f"got {prompt}")
        if given.get("stream"):
            self.stream(prompt, text_of(prompt, given.get("seed", 0)), chat)
            return
        die_if_asked(prompt)
        if prompt.startswith("wait"):
            self.wait()
        self.answer(json.dumps({"choices": [{"text": text_of(prompt, given.get("seed", 0))}]}).encode())

    def wait(self) -> None:
        self.connection.settimeout(0.05)
        while not (FOLDER / "go").exists():
            try:
                if not self.connection.recv(1):
                    log("left")
                    raise ConnectionResetError
            except TimeoutError:
                pass
        self.connection.settimeout(None)

    def stream(self, prompt: str, text: str, chat: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if chat:
            self.event({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})
        time.sleep(0.05)
        if not prompt.startswith("die in"):
            die_if_asked(prompt)
        size = -(-len(text) // PIECES)
        for start in range(0, len(text), size):
            piece = text[start : start + size]
            self.event({"delta": {"content": piece}, "finish_reason": None} if chat else {"text": piece})
            if prompt.startswith("die in"):
                time.sleep(0.2)
                die_if_asked(prompt)
            if prompt.startswith("wait"):
                self.wait()
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(self, choice: dict) -> None:
        self.chunk(b"data: %s\n\n" % json.dumps({"choices": [choice]}).encode())

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client has left."""


if (FOLDER / "refuse").exists():
    print("dlm-bridge: no such model", file=sys.stderr)
    raise SystemExit(2)
server = Server(("127.0.0.1", 0), Handler)
print(f"tiny (stub): http://127.0.0.1:{server.server_port}/v1 (Ctrl-C ends)", flush=True)
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
server.serve_forever()
