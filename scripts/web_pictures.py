"""Take the pictures of the page of `qsample web` in docs/hosts.md, in the system's Chromium, from a running server.

pip install playwright
qsample web &
python scripts/web_pictures.py http://127.0.0.1:8080
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.helpers.browsers import find_browser  # noqa: E402

TEXT = "#prompt=And+the+LORD+spake+unto&temperature=0.8&topP=0.95&maxNewTokens=60&seed=7"
SIZES = {"web-390": (390, 844), "web-1280": (1280, 1000)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="the address that `qsample web` prints")
    url = parser.parse_args().url
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        for name, (width, height) in SIZES.items():
            page = browser.new_page(
                viewport={"width": width, "height": height}, reduced_motion="reduce"
            )
            page.goto(f"{url}/{TEXT}")
            expect(page.locator("article[aria-busy=false]")).to_have_count(1, timeout=120_000)
            page.locator("#place").fill("16")
            page.evaluate("scrollTo(0, 0)")
            page.screenshot(path=ROOT / "docs" / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
