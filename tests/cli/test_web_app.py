"""`dlm-bridge app`: what the page shows and refuses, and that nobody generates for a tab that is closed."""

from __future__ import annotations

import html
import importlib.util
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlm_bridge.cli.app import main
from dlm_bridge.generation import SAMPLERS
from dlm_bridge.generation.display import web_page
from dlm_bridge.generation.display.web_page import CHAT, CONTINUE, FILL, PageModel, serve_page
from dlm_bridge.generation.offline import write_texts
from dlm_bridge.loading import load_model

MASK = "\u2591"


@pytest.fixture
def page_model(request: pytest.FixtureRequest) -> Iterator[PageModel]:
    """The page's model; `request.param` names its fixture."""
    loaded = load_model(request.getfixturevalue(getattr(request, "param", "llada")))
    page_model = PageModel(loaded.model, loaded.tokenizer, "a <model>")
    yield page_model
    page_model.close()


def text_of(shown: str) -> str:
    """The text of the denoising, as a browser shows it."""
    return html.unescape(re.sub(r"<[^>]*>", "", shown.split('<div class="denoising-status">')[0]))


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
    # Bytes that are no character are replaced token by token in the page, together in a text.
    page, text = (
        re.sub("\ufffd+", "\ufffd", one) for one in (text_of(frames[-1]), written(page_model, evil, **settings))
    )
    assert page.startswith(text)
    assert len(re.findall(r'title="[01]\.\d{3}"', frames[-1])) == 16
    assert "16 forwards" in frames[-1]
    masks = [text_of(frame).count(MASK) for frame in frames]
    assert masks == sorted(masks, reverse=True)
    assert masks[0] <= 15
    assert masks[-1] == 0


def test_masks_inside_a_text_are_filled(page_model: PageModel) -> None:
    assert page_model.modes == [CONTINUE, FILL]
    *_, last = page_model.sample(FILL, "the [MASK:3] cat", "llada", {})
    assert re.search(r"forwards.*</div>", last)
    assert last.count("title=") == 3
    assert text_of(last).startswith("the ")
    assert text_of(last).endswith(" cat")


@pytest.mark.parametrize("page_model", ["qwen3"], indirect=True)
def test_an_autoregressive_model_chats_with_transformers_own_settings(page_model: PageModel) -> None:
    assert page_model.modes == [CHAT, CONTINUE]
    names = [control.name for control in page_model.controls()[""]]
    assert names == ["gen_length", "temperature", "top_k", "top_p", "seed"]
    *_, last = page_model.sample(CHAT, "hi", "", {"gen_length": "8", "temperature": "0"})
    assert text_of(last) == written(page_model, "user: hi\nassistant: ", gen_length=8, temperature=0)


def test_every_sampler_that_fits_has_its_own_parameters_with_their_values(page_model: PageModel) -> None:
    page_model.model.generation_config.steps = 64
    controls = page_model.controls()
    assert next(iter(controls)) == "llada"
    assert {"mdlm", "dream"} <= set(controls) <= set(SAMPLERS)
    assert "wedlm" not in controls  # runs on causal models
    for name, own in controls.items():
        assert [control.name for control in own][:-3] == list(SAMPLERS[name].parameters())
    assert {control.name: control.default for control in controls["llada"]}["steps"] == 64


@pytest.mark.parametrize(
    ("mode", "shown", "named"),
    [
        (CONTINUE, {"gen_length": "0"}, "gen_length"),
        (CONTINUE, {"steps": "2.5"}, "steps"),
        (CONTINUE, {"temperature": "warm"}, "temperature"),
        (CONTINUE, {"gen_length": "10", "block_length": "4"}, "gen_length 10"),
        (CONTINUE, {"eot_token_id": "9999"}, "eot_token_id"),
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
    assert "8 forwards" in last


def test_generation_ends_where_nobody_reads_it(page_model: PageModel) -> None:
    passes: list[float] = []
    slow_down(page_model, passes, 0.02)
    frames = page_model.sample(CONTINUE, "the cat", "llada", {"gen_length": "128"})
    next(frames)
    frames.close()
    *_, last = page_model.sample(CONTINUE, "the cat", "llada", {"gen_length": "8"})
    assert "8 forwards" in last
    assert 8 < len(passes) < 128  # the next call follows the last forward pass of the first one


def test_a_folder_s_name_is_printable(
    llada: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, names = tmp_path / "it\x1b[31m", []
    shutil.copytree(llada, folder)
    monkeypatch.setattr(web_page, "serve_page", lambda page_model, port: names.append(page_model.name))
    monkeypatch.setattr(sys, "argv", ["dlm-bridge", "app", str(folder)])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0
    assert names[0].endswith(r"it\x1b[31m")
    assert names[0] in capsys.readouterr().out


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("dlm_bridge.cli.serving.find_spec", lambda name: None if name == "gradio" else found(name))
    monkeypatch.setattr(sys, "argv", ["dlm-bridge", "app", "nowhere"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert "pip install 'dlm-bridge[app]'" in capsys.readouterr().err


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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = serve_page(page_model, port, block=False)
    home = f"http://127.0.0.1:{port}"
    asked: list[str] = []
    try:
        with playwright.sync_playwright() as runner:
            browser = runner.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            tab = browser.new_page()
            tab.set_default_timeout(60_000)
            tab.on("request", lambda request: asked.append(request.url))
            answer = tab.goto(home)
            assert "default-src 'self'" in answer.headers["content-security-policy"]
            tab.fill("#prompt textarea", "the <b>cat")
            tab.fill("#sampler-llada #setting-gen_length textarea", "8")
            tab.get_by_role("button", name="Generate").click()
            tab.wait_for_selector("text=8 forwards")
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
    finally:
        server.close()
    assert all(url.startswith((home, "data:", "blob:")) for url in asked)
