"""Views of `dlm-bridge generate`: the animated page and picture, the live view in the terminal."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from dlm_bridge.display.trace import MASKED, DenoisingTrace, TokenStrings, frame_text, live, page, status, trace_data
from dlm_bridge.generation import DenoisingStep
from dlm_bridge.generation.offline import write_texts
from dlm_bridge.generation.request import MASK as HOLE
from dlm_bridge.loading import load_model
from tests.canvas_models import has_class, write_canvas_model
from tests.cli.conftest import MASK, Cli
from tests.cli.pages import Page, played

STEPS = 3  # of a draft


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    return write_canvas_model(tmp_path / "gemma")


@pytest.mark.parametrize("name", ["llada", "qwen3"])
def test_the_page_plays_what_was_sampled_and_loads_nothing(
    cli: Cli, name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(name)
    evil = "</script><script>alert(1)</script> & <b>\u2028{{facts}}"
    words = ["--prompt", evil, "--gen-length", 8, "--temperature", 0, "--set", "eos_token_id=null"]
    report = cli.report(folder, *words, "--html", tmp_path / "out.html")
    text = (tmp_path / "out.html").read_text("utf-8")
    found = Page(text)
    assert [attributes for attributes, _ in found.scripts] == [{"id": "trace", "type": "application/json"}, {}]
    assert not [each for each in found.attributes if each[1] in ("src", "href", "action") or each[1].startswith("on")]
    assert "http:" not in text
    assert "https:" not in text
    assert "default-src 'none'" in text
    assert str(folder) in found.text
    trace = json.loads(found.scripts[0][1])
    frames = played(trace)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    new = tokenizer.decode(report["samples"][0]["token_ids"], skip_special_tokens=False)
    assert "".join(map(str, frames[-1])) == evil + new
    assert [frame["forwards"] for frame in trace["frames"]] == list(range(report["forwards"] + 1))
    if name == "llada":
        prompt = len(tokenizer(evil)["input_ids"])
        open_places = [sum(piece is None for piece in frame) for frame in frames]
        assert open_places == list(range(8, -1, -1))  # one token a step
        assert all(given == (place < prompt) for place, piece, given, _ in trace["frames"][0]["changes"] if piece)
    for frame in trace["frames"][1:]:
        for _, piece, given, sure in frame["changes"]:
            assert (sure is not None and 0 <= sure <= 1) == (name == "llada" and piece is not None and not given)
    code, _, err = cli(folder, *words, "--html", tmp_path / "out.html")
    assert code == 2
    assert "out.html exists" in err


@pytest.mark.parametrize("name", ["llada", "qwen3"])
def test_the_picture_begins_with_masks_and_ends_with_the_text(
    cli: Cli, name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(name)
    prompt = "a <b> & 'c'\n\x0b\x1b[31m"
    words = ["--prompt", prompt, "--gen-length", 8, "--temperature", 0, "--set", "eos_token_id=null"]
    report = cli.report(folder, *words, "--svg", tmp_path / "out.svg")
    picture = ElementTree.parse(tmp_path / "out.svg").getroot()
    assert {element.tag for element in picture.iter()} <= {
        SVG + tag for tag in ("svg", "title", "g", "rect", "text", "animate")
    }
    assert not [name for element in picture.iter() for name in element.attrib if "href" in name]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    new = tokenizer.decode(report["samples"][0]["token_ids"], skip_special_tokens=False)
    masks, text = at(picture, 1.0)
    assert masks == 0
    assert text == readable(prompt + new)
    masks, text = at(picture, 0.0)
    assert (0 < masks <= 8) is (name == "llada")  # a mask that becomes a newline has no width
    assert text == readable(prompt)


def readable(text: str) -> str:
    """Remove spaces and replace control characters."""
    return re.sub(r"\s", "", re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f]", "\ufffd", text))


SVG = "{http://www.w3.org/2000/svg}"


def at(picture: ElementTree.Element, time: float) -> tuple[int, str]:
    """Masks and text (without spaces) that are visible at a fraction of the animation."""
    masks, text = 0, ""
    drawing = picture.find(f"{SVG}g")
    assert drawing is not None
    for group in drawing:
        visible = "visible"
        for animation in group.iter(f"{SVG}animate"):
            times = [float(one) for one in animation.attrib["keyTimes"].split(";")]
            values = animation.attrib["values"].split(";")
            visible = [value for begin, value in zip(times, values, strict=True) if begin <= time][-1]
        if visible == "visible":
            masks += len(group.findall(f"{SVG}rect"))
            text += "".join(one.text or "" for one in group.findall(f"{SVG}text"))
    return masks, re.sub(r"\s", "", text)


def test_the_pages_script_is_a_script(llada: Path, tmp_path: Path) -> None:
    """Only where node is installed: its parser takes the page's code."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    trace = DenoisingTrace(TokenStrings(AutoTokenizer.from_pretrained(llada)), [1, 2])
    script = Page(page(trace, "title", {})).scripts[1][1]
    (tmp_path / "page.js").write_text(script)
    subprocess.run(["node", "--check", tmp_path / "page.js"], check=True)


def test_characters_of_several_tokens_appear_when_they_are_whole(llada: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llada)
    pieces = TokenStrings(tokenizer)
    ids = tokenizer("é the 漢", add_special_tokens=False)["input_ids"]
    assert len(ids) > len("é the 漢") - 2
    assert "".join(map(str, pieces.of(ids))) == "é the 漢"
    assert pieces.of([*ids[:1], HOLE, *ids[2:]])[1] is None
    assert "\ufffd" in str(pieces.of(ids[:1])[0])


def test_the_terminal_shows_open_places_and_what_is_new(llada: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llada)
    prompt = tokenizer("the", add_special_tokens=False)["input_ids"]
    trace = DenoisingTrace(TokenStrings(tokenizer), prompt)
    console = Console(force_terminal=True, width=40, height=10, file=(out := io.StringIO()))
    with live(trace, console):
        for forwards, new in enumerate(([MASK, prompt[0]], [prompt[0], prompt[0]]), 1):
            tokens = torch.tensor([[*prompt, *new]])
            committed = torch.tensor([[False, forwards == 2, forwards == 1]])
            confidence = torch.tensor([[torch.nan, 0.02 if forwards == 2 else torch.nan, 0.99]])
            trace.on_step(DenoisingStep(forwards, (0,), tokens, tokens == MASK, committed, confidence))
            if forwards == 1:
                text = frame_text(trace.last)
    assert text.plain == "the" + MASKED + "the"
    red, green = "rgb(198,16,16)", "rgb(16,198,16)"
    assert [span.style for span in text.spans] == ["dim", "bright_black", f"reverse {green}"]
    assert [span.style for span in frame_text(trace.last).spans] == ["dim", f"reverse {red}", green]
    assert [frame.committed_at for frame in trace.frames] == [(0, 0, 0), (0, 0, 1), (0, 2, 1)]
    assert "forward 2, 2 tokens committed" in out.getvalue()
    legend = status(trace.last)
    assert legend.plain.endswith("probability 0 ██████████ 1")
    assert [span.style for span in legend.spans][:: len(legend.spans) - 1] == [red, green]
    assert "probability" not in status(trace.frames[0]).plain
    assert trace_data(trace)["length"] == 3


def test_masks_inside_a_prompt_are_open_from_the_start(cli: Cli, llada: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llada)
    first, second = (tokenizer(text)["input_ids"] for text in ("the ", " cat"))
    ids = [*first, *[MASK] * 4, *second, MASK]
    words = ["--infill", "--seed", 0, "--html", tmp_path / "o.html"]
    report = cli.report(llada, "--prompt", "the [MASK:4] cat[MASK]", *words)
    frames = played(json.loads(Page((tmp_path / "o.html").read_text("utf-8")).scripts[0][1]))
    assert [piece is None for piece in frames[0]] == [token == MASK for token in ids]
    assert "".join(map(str, frames[-1])) == tokenizer.decode(report["samples"][0]["token_ids"])


def test_without_a_terminal_only_the_text_is_printed(cli: Cli, llada: Path) -> None:
    words = ["--prompt", "the cat", "--gen-length", 8, "--seed", 3]
    assert cli(llada, *words, "--show")[:2] == cli(llada, *words)[:2]


def test_beams_have_no_steps_to_show(cli: Cli, qwen3: Path, tmp_path: Path) -> None:
    words = ["--prompt", "x", "--set", "num_beams=2", "--gen-length", 8, "--html", tmp_path / "o.html"]
    code, _, err = cli(qwen3, *words)
    assert code == 2
    assert "streamer" in err
    assert not (tmp_path / "o.html").exists()


@has_class
def test_the_page_and_the_live_view_show_every_step_of_a_draft(cli: Cli, gemma: Path, tmp_path: Path) -> None:
    # A seed at which no character is made of several tokens.
    words = ["--prompt", "the cat", "--gen-length", 16, "--steps", STEPS, "--seed", 4, "--set", "eos_token_id=null"]
    report = cli.report(gemma, *words, "--html", tmp_path / "out.html")
    trace = json.loads(Page((tmp_path / "out.html").read_text("utf-8")).scripts[0][1])
    frames = played(trace)
    assert [frame["forwards"] for frame in trace["frames"]] == [0, 1, 2, 3, 3, 4, 5, 6, 6]  # a canvas ends after 3
    tokenizer = AutoTokenizer.from_pretrained(gemma)
    shown = "the cat" + tokenizer.decode(report["samples"][0]["token_ids"], skip_special_tokens=False)
    assert "".join(map(str, frames[-1])) == shown
    assert len({"".join(map(str, frame)) for frame in frames}) > 4  # drafts change
    loaded, ids = load_model(gemma), tokenizer("the cat")["input_ids"]
    screen = io.StringIO()
    view = DenoisingTrace(TokenStrings(tokenizer), ids)
    with live(view, Console(file=screen, force_terminal=True, width=200)):
        settings = {"gen_length": 8, "steps": STEPS, "seed": 1}
        write_texts(loaded.model, tokenizer, [ids], settings, streamer=view.token_streamer())
    assert f"forward {STEPS}" in screen.getvalue()
