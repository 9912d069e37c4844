"""The picture of `dlm-bridge app` in the documentation: the page in Chromium, in the middle of a sampling.

python scripts/app_screenshot.py    # after `make demo`; writes docs/images/app.png
"""

from __future__ import annotations

import argparse
import shutil
import threading
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from dlm_bridge.loading import load_model
from dlm_bridge.serving.connections import HttpServer, bind
from dlm_bridge.serving.web_page import PageModel, page_app

ROOT = Path(__file__).parents[1]
PROMPT, NEW_TOKENS = "Tom was a", 96
SHOWN = r"text=/forward [78]\d,/"  # the page need not show every forward pass
SECONDS = 0.1  # a forward pass lasts at least this long, so that the picture is of the middle


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo-output/llada", help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/images/app.png", help="(default: %(default)s)")
    given = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("app_screenshot.py: needs Chromium")
        return 2
    loaded = load_model(given.model)
    page_model = PageModel(loaded.model, loaded.tokenizer, given.model, diffusion=loaded.diffusion)
    loaded.model.register_forward_pre_hook(lambda *_: time.sleep(SECONDS))
    sock, ready = bind("127.0.0.1", 0), threading.Event()
    server = HttpServer(page_app(page_model), sock, ready.set, grace_s=0, lifespan="on")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    ready.wait()
    try:
        with sync_playwright() as runner:
            browser = runner.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            tab = browser.new_page(viewport={"width": 1180, "height": 640})
            tab.set_default_timeout(120_000)
            tab.goto(f"http://127.0.0.1:{sock.getsockname()[1]}")
            tab.fill("#prompt textarea", PROMPT)
            tab.fill("#sampler-llada #setting-gen_length textarea", str(NEW_TOKENS))
            tab.get_by_role("button", name="Generate").click()
            tab.wait_for_selector(SHOWN)
            tab.screenshot(path=given.output)
            browser.close()
    finally:
        server.should_exit = True
        thread.join()
        page_model.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
