"""`dlm-bridge app`: what the page shows and refuses, and that nobody generates for a tab that is closed."""

from __future__ import annotations

import html
import re
import shutil
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dlm_bridge.cli.app import main
from dlm_bridge.generation import SAMPLERS
from dlm_bridge.generation.offline import write_texts
from dlm_bridge.loading import load_model

pytest.importorskip("gradio")

from fastapi.testclient import TestClient

from dlm_bridge.serving.connections import HttpServer, bind
from dlm_bridge.serving.web_page import CHAT, CONTINUE, EXAMPLES, FILL, PageModel, page_app
from tests.cli.conftest import EOS

MASK = "\u2591"


@pytest.fixture
def page_model(request: pytest.FixtureRequest) -> Iterator[PageModel]:
    """The page's model; `request.param` names its fixture."""
    loaded = load_model(request.getfixturevalue(getattr(request, "param", "llada")))
    page_model = PageModel(loaded.model, loaded.tokenizer, "a <model>", diffusion=loaded.diffusion)
    yield page_model
    page_model.close()


def text_of(shown: str) -> str:
    """The text of the denoising, as a browser shows it."""
    return html.unescape(re.sub(r"<[^>]*>", "", shown.split('<div class="denoising-status">')[0]))


def whole(text: str) -> str:
    """Bytes of incomplete characters: the page replaces them token by token, a text as a whole."""
    return re.sub("\ufffd+", "\ufffd", text)


def written(page_model: PageModel, prompt: str, **settings: Any) -> str:
    """The text of the same call without the page."""
    ids = page_model.tokenizer(prompt)["input_ids"]
    result = write_texts(page_model.model, page_model.tokenizer, [ids], settings)
    return prompt + page_model.tokenizer.decode(result.token_ids[0], skip_special_tokens=False)


def slow_down(page_model: PageModel, passes: list[float], seconds: float) -> None:
    """Count the model's forward passes, and make each last this long."""

    def hook(*_: Any) -> None:
        passes.append(time.monotonic())
        time.sleep(seconds)

    page_model.model.register_forward_pre_hook(hook)


def test_a_text_appears_token_by_token_with_its_probabilities(page_model: PageModel) -> None:
    shown = {"gen_length": "16", "block_length": "8", "temperature": "0.7", "seed": "3", "remasking": "random"}
    settings = {"gen_length": 16, "block_length": 8, "temperature": 0.7, "seed": 3, "remasking": "random"}
    evil = "<script>alert(1)</script> & "
    frames = list(page_model.sample(CONTINUE, evil, "llada", {**shown, "logits_eos_inf": False, "cache": ""}))
    assert not any("<script" in frame for frame in frames)
    assert whole(text_of(frames[-1])).startswith(whole(written(page_model, evil, **settings)))
    assert len(re.findall(r'title="[01]\.\d{3}"', frames[-1])) == 16
    assert "16 forward passes" in frames[-1]
    masks = [text_of(frame).count(MASK) for frame in frames]
    assert masks == sorted(masks, reverse=True)
    assert masks[0] <= 15
    assert masks[-1] == 0


def test_masks_inside_a_text_are_filled(page_model: PageModel) -> None:
    assert page_model.modes == [CONTINUE, FILL]
    *_, last = page_model.sample(FILL, "the [MASK:3] cat", "llada", {})
    assert re.search(r"forward passes.*</div>", last)
    assert last.count("title=") == 3
    assert text_of(last).startswith("the ")
    assert text_of(last).endswith(" cat")


@pytest.mark.extension("structured")
def test_masks_have_a_constraint_each(page_model: PageModel) -> None:
    prompt, lines = "the [MASK:3] cat, [MASK:2] or [MASK:3].", '[0-9]+\n\n{"choice": ["dog", "cat"]}\n'
    *_, last = page_model.sample(FILL, prompt, "llada", {"temperature": "1"}, constraints=lines)
    assert re.fullmatch(r"(?s)the \d{3} cat, .* or (dog|cat)\.", text_of(last))
    for wrong, named in (
        ("[0-9]+\n" * 4, "4 lines for 3 masks"),
        ("[0-9", "character"),
        ('\n{"choice": []', "mask 2"),
        ('{"xml": ""}', "`xml`"),
        ("[0-9]", "given tokens"),
    ):
        *_, said = page_model.sample(FILL, prompt, "llada", {}, constraints=wrong)
        assert 'role="alert"' in said
        assert named in html.unescape(said)
    *_, said = page_model.sample(CONTINUE, "the cat", "llada", {"gen_length": "8"}, constraints="[0-9]+")
    assert "8 forward passes" in said  # the field belongs to masks


@pytest.mark.parametrize("page_model", ["qwen3"], indirect=True)
def test_an_autoregressive_model_chats_with_transformers_own_settings(page_model: PageModel) -> None:
    assert page_model.modes == [CHAT, CONTINUE]
    names = [control.name for control in page_model.controls()[""]]
    assert names == ["gen_length", "temperature", "top_k", "top_p", "seed"]
    *_, last = page_model.sample(CHAT, "hi", "", {"gen_length": "8", "temperature": "0"})
    asked = "user: hi\nassistant: "
    assert asked + text_of(last).removeprefix("hi") == written(page_model, asked, gen_length=8, temperature=0)


def test_every_sampler_that_fits_has_its_own_parameters_with_their_values(page_model: PageModel) -> None:
    page_model.model.generation_config.steps = 64
    controls = page_model.controls()
    assert next(iter(controls)) == "llada"
    assert {"mdlm", "dream"} <= set(controls) <= set(SAMPLERS)
    assert "wedlm" not in controls  # runs on causal models
    for name, own in controls.items():
        assert [control.name for control in own][1:-3] == list(SAMPLERS[name].parameters())
        assert own[0].name == "preset"
        assert own[0].option.choices == tuple(SAMPLERS[name].presets)
        assert all(control.info for control in own)  # in words
    assert {control.name: control.default for control in controls["llada"]}["steps"] == 64


@pytest.mark.parametrize(
    ("mode", "shown", "named"),
    [
        (CONTINUE, {"gen_length": "0"}, "gen_length"),
        (CONTINUE, {"steps": "2.5"}, "steps"),
        (CONTINUE, {"temperature": "warm"}, "temperature"),
        (CONTINUE, {"gen_length": "10", "block_length": "4"}, "gen_length"),
        (CONTINUE, {"eot_token_id": "9999"}, "eot_token_id"),
        (CONTINUE, {"preset": "quick"}, "preset"),
        (FILL, {}, "mask"),
        (CHAT, {}, "chat template"),
    ],
)
def test_what_the_sampler_refuses_is_refused_in_the_page(
    page_model: PageModel, mode: str, shown: dict[str, str], named: str
) -> None:
    (said,) = page_model.sample(mode, "the cat", "llada", shown)
    assert 'role="alert"' in said
    assert named in html.unescape(said)
    *_, last = page_model.sample(CONTINUE, "the cat", "llada", {"gen_length": "8"})  # and the page goes on
    assert "8 forward passes" in last


def test_an_empty_prompt_and_a_preset_that_the_sampler_lacks_are_refused(page_model: PageModel) -> None:
    for mode, prompt, algorithm, shown, named in (
        (CONTINUE, " \n", "llada", {}, "prompt"),
        (CHAT, "", "llada", {}, "prompt"),
        (CONTINUE, "the cat", "mdlm", {"preset": "fast"}, "careful"),
    ):
        (said,) = page_model.sample(mode, prompt, algorithm, shown)
        assert 'role="alert"' in said
        assert named in said
    *_, last = page_model.sample(CONTINUE, "the cat", "mdlm", {"preset": "careful", "gen_length": "12", "steps": "4"})
    assert "12 tokens" in last
    assert " 4 forward passes" in last  # of the setting, which overrides the preset


def test_what_follows_the_end_of_the_text_is_grey(page_model: PageModel) -> None:

    def end(_: Any, __: Any, output: Any) -> None:
        output.logits[..., EOS] = 30.0

    page_model.model.register_forward_hook(end)
    *_, last = page_model.sample(CONTINUE, "the cat", "llada", {"gen_length": "8"})
    assert last.count('class="after"') == 8
    assert "after the end" in last


def test_generation_ends_where_nobody_reads_it(page_model: PageModel) -> None:
    passes: list[float] = []
    slow_down(page_model, passes, 0.02)
    frames = page_model.sample(CONTINUE, "the cat", "llada", {"gen_length": "128"})
    next(frames)
    frames.close()
    *_, last = page_model.sample(CONTINUE, "the cat", "llada", {"gen_length": "8"})
    assert "8 forward passes" in last
    assert 8 < len(passes) < 128  # the next call follows the last forward pass of the first one


@pytest.mark.parametrize("page_model", ["qwen3"], indirect=True)
def test_a_chat_has_turns(page_model: PageModel) -> None:
    shown, turns, asked = {"gen_length": "8", "temperature": "0"}, list[dict[str, str]](), ""
    for message in ("hi", "and you?"):
        *_, last = page_model.sample(CHAT, message, "", shown, turns)
        asked += f"user: {message}\nassistant: "
        begun = "".join(turn["content"] for turn in turns[:-1])
        expected = written(page_model, asked, gen_length=8, temperature=0).removeprefix(asked)
        assert whole(text_of(last)) == whole(begun + expected)
        assert last.count('class="turn ') == len(turns) - 1
        asked += turns[-1]["content"] + "\n"
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 2
    *_, refused = page_model.sample(CHAT, "again", "", {"gen_length": "0"}, turns)
    assert 'role="alert"' in refused
    assert "and you?" in refused  # the conversation stays
    stopped = page_model.sample(CHAT, "again", "", shown, turns)
    next(stopped)
    stopped.close()
    assert len(turns) == 4


def test_the_page_takes_no_files_and_no_other_hosts(page_model: PageModel) -> None:
    client = TestClient(page_app(page_model), "http://127.0.0.1")
    assert client.get("/config").status_code == 200
    for path in ("upload", "component_server", "process_recording", "stream/1"):
        files = {"files": ("a.txt", b"text")}
        answer = client.post(f"/gradio_api/{path}", files=files)
        assert answer.status_code == 404
        assert "content-security-policy" in answer.headers
    assert client.get("/config", headers={"Host": "evil.example"}).status_code == 400


def test_the_page_starts_on_a_slow_machine(page_model: PageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradio's own start-up checks, which ask the page within three seconds, are not made."""
    monkeypatch.setattr("gradio.networking.url_ok", lambda _: pytest.fail("the page is asked"))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with serving(page_model) as home, urllib.request.build_opener(urllib.request.ProxyHandler({})).open(home) as page:
        assert b"gradio" in page.read()


@contextmanager
def serving(page_model: PageModel) -> Iterator[str]:
    """The page's address."""
    sock, ready = bind("127.0.0.1", 0), threading.Event()
    server = HttpServer(page_app(page_model), sock, ready.set, grace_s=0, lifespan="on")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        assert ready.wait(60)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
    assert not thread.is_alive()


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def test_a_folder_s_name_is_printable(
    llada: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, names = tmp_path / "it\x1b[31m", []
    shutil.copytree(llada, folder)

    def serve_forever(server: HttpServer) -> None:
        server._when_ready()
        names.append(TestClient(server.config.app, "http://localhost").get("/config").json()["title"])

    monkeypatch.setattr(HttpServer, "serve_forever", serve_forever)
    monkeypatch.setattr(sys, "argv", ["dlm-bridge", "app", str(folder), "--port", free_port()])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0
    assert names[0].endswith(r"it\x1b[31m")
    assert names[0].removeprefix("dlm-bridge: ") in capsys.readouterr().out


@pytest.mark.slow
def test_in_a_browser(page_model: PageModel, tmp_path: Path) -> None:
    """Sampling, refusals and other samplers in Chromium; a tab that is closed in mid-generation ends that."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium")
    pytest.importorskip("gradio")
    playwright = pytest.importorskip("playwright.sync_api")
    passes: list[float] = []
    slow_down(page_model, passes, 0.1)
    asked: list[str] = []
    with serving(page_model) as home, playwright.sync_playwright() as runner:
        browser = runner.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page()
        tab.set_default_timeout(60_000)
        tab.on("request", lambda request: asked.append(request.url))
        answer = tab.goto(home)
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        tab.get_by_role("button", name=EXAMPLES[CONTINUE][1]).click()
        tab.wait_for_function(f"document.querySelector('#prompt textarea').value === {EXAMPLES[CONTINUE][1]!r}")
        tab.fill("#prompt textarea", "the <b>cat")
        tab.fill("#sampler-llada #setting-gen_length textarea", "8")
        tab.get_by_role("button", name="Generate").click()
        tab.wait_for_selector("text=8 forward passes")
        assert tab.inner_text("#shown .denoising").startswith("the <b>cat")
        tab.fill("#sampler-llada #setting-gen_length textarea", "0")
        tab.get_by_role("button", name="Generate").click()
        tab.wait_for_selector("#shown [role=alert]")
        assert "gen_length" in tab.inner_text("#shown [role=alert]")
        tab.get_by_label("Sampler").click()
        tab.get_by_role("option", name="mdlm").click()
        tab.fill("#sampler-mdlm #setting-gen_length textarea", "6")
        tab.get_by_role("button", name="Generate").click()
        tab.wait_for_selector("text=6 tokens")
        tab.fill("#sampler-mdlm #setting-gen_length textarea", "200")
        tab.fill("#sampler-mdlm #setting-steps textarea", "200")
        count = len(passes)
        tab.get_by_role("button", name="Generate").click()
        tab.wait_for_selector("text=tokens committed")
        tab.close()
        deadline = time.monotonic() + 60
        while page_model.running and time.monotonic() < deadline:
            threading.Event().wait(0.2)
        assert not page_model.running
        assert len(passes) - count < 200
        browser.close()
    assert all(url.startswith((home, "data:", "blob:")) for url in asked)


@pytest.mark.slow
@pytest.mark.parametrize("page_model", ["qwen3"], indirect=True)
def test_a_chat_in_a_browser(page_model: PageModel) -> None:
    """Messages go on from those before; a new chat forgets them."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    with serving(page_model) as home, playwright.sync_playwright() as runner:
        browser = runner.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page()
        tab.set_default_timeout(60_000)
        tab.goto(home)
        tab.fill("#setting-gen_length textarea", "8")
        for message in ("hello there", "and now", "a fresh start"):
            if message == "a fresh start":
                tab.get_by_role("button", name="New chat").click()
                tab.wait_for_selector("#shown .denoising", state="detached")
            tab.fill("#prompt textarea", message)
            tab.get_by_role("button", name="Generate").click()
            tab.wait_for_function("document.querySelector('#prompt textarea').value === ''")
            shown = tab.inner_text("#shown")
            assert message in shown
            assert ("hello there" in shown) == (message != "a fresh start")
        browser.close()
