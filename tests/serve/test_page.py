"""The page at / in a real browser, where there is one: playwright, and a Chromium of its own or of the system."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qsample.runtime import CausalLM, SamplingParams
from tests.helpers.servers import ServerProcess

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright; the page needs a browser")
pytestmark = pytest.mark.slow

PROMPT = "And the LORD spake unto Moses"
BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"no browser: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """(address) → the page there; what the browser complains of fails the test."""
    complaints: list[str] = []
    contexts: list[Any] = []

    def make(url: str, **options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        return page

    yield make
    for context in contexts:
        context.close()
    assert complaints == []


def fill(page: Any, **fields: object) -> None:
    for name, value in fields.items():
        page.fill(f"#{name}", str(value))


def wait_for_note(page: Any, text: str) -> str:
    sync_api.expect(page.locator("#note")).to_contain_text(re.compile(text), timeout=60_000)
    return str(page.inner_text("#note"))


def test_a_prompt_is_continued(open_page: Callable[..., Any], server: ServerProcess, served_model: CausalLM) -> None:
    page = open_page(server.url)
    sync_api.expect(page.locator("#model")).to_have_value("tiny")
    fill(page, prompt=PROMPT, temperature=0.7, top_p=0.9, max_tokens=40, seed=5)
    page.click("#go")
    wait_for_note(page, r"^40 tokens in .* s, the first after \d+ ms; ended by length$")
    params = SamplingParams(max_new_tokens=40, temperature=0.7, top_p=0.9)
    output = served_model.generate(PROMPT, params, seed=5)
    assert output.texts is not None
    assert page.locator("#answer").text_content() == output.texts[0]
    tokens = page.locator("#metrics div", has_text="tokens").first.locator("dd")
    sync_api.expect(tokens).not_to_have_text("0", timeout=10_000)
    # What is left empty is the server's to choose; ctrl and enter send the form.
    fill(page, temperature="", top_p="", max_tokens="", seed=6)
    page.press("#prompt", "Control+Enter")
    wait_for_note(page, "^16 tokens")
    output = served_model.generate(PROMPT, SamplingParams(max_new_tokens=16), seed=6)
    assert output.texts is not None
    assert page.locator("#answer").text_content() == output.texts[0]


def test_text_comes_in_pieces_and_can_be_stopped(open_page: Callable[..., Any], server: ServerProcess) -> None:
    page = open_page(server.url)
    stop = "{ if (list.length && ++window.pieces === 3) document.getElementById('go').click(); }"
    page.evaluate(
        f"window.pieces = 0; new MutationObserver(list => {stop})"
        ".observe(document.getElementById('answer'), { childList: true })"
    )
    fill(page, prompt="In the", temperature=1.5, max_tokens=500)
    page.click("#go")
    wait_for_note(page, "^stopped$")
    sync_api.expect(page.locator("#go")).to_have_text("Generate")
    text = page.locator("#answer").text_content()
    assert 2 < len(text) < 500
    page.wait_for_timeout(300)
    assert page.locator("#answer").text_content() == text
    page.wait_for_function(
        "async () => /num_requests_running\\{[^}]*\\} 0/.test(await (await fetch('/metrics')).text())"
    )


def test_a_chat_and_what_goes_wrong(open_page: Callable[..., Any], server: ServerProcess) -> None:
    page = open_page(server.url)
    page.check("#chat")
    fill(page, prompt="<b>Who</b> art thou?", max_tokens=8, seed=1)
    page.click("#go")
    wait_for_note(page, "^8 tokens")
    assert page.locator("#answer").text_content().strip()
    fill(page, prompt="and " * 5000)
    page.click("#go")
    assert "context" in wait_for_note(page, "tokens")
    assert "error" in page.get_attribute("#note", "class")
    fill(page, prompt="x", max_tokens="")
    page.click("#go")
    wait_for_note(page, "ended by")  # the next one is none the worse for it
    assert "error" not in (page.get_attribute("#note", "class") or "")


def test_a_model_without_a_chat_template_and_a_key(open_page: Callable[..., Any], served_package: Path) -> None:
    options = ("--served-model-name", "<i>plain</i>", "--api-key", "secret", "--threads", "1")
    with ServerProcess(served_package, *options) as server:
        page = open_page(server.url)
        wait_for_note(page, "send an API key of this server")
        fill(page, key="secret")
        page.press("#key", "Tab")
        sync_api.expect(page.locator("#model")).to_have_value("<i>plain</i>")
        sync_api.expect(page.locator("#note")).to_have_text("")
        fill(page, max_tokens=8)
        page.click("#go")
        wait_for_note(page, "^8 tokens")
        page.check("#chat")
        page.click("#go")
        wait_for_note(page, "no chat template")
        fill(page, key="wrong")
        page.uncheck("#chat")
        page.click("#go")
        wait_for_note(page, "send an API key of this server")
        server.stop()
        page.click("#go")
        wait_for_note(page, "fetch")
        sync_api.expect(page.locator("#go")).to_have_text("Generate")


@pytest.mark.parametrize("width", [320, 375, 1280])
def test_nothing_is_cut_off(open_page: Callable[..., Any], server: ServerProcess, width: int) -> None:
    page = open_page(server.url, viewport={"width": width, "height": 640})
    fill(page, prompt="In the", max_tokens=60, seed=1)
    page.click("#go")
    wait_for_note(page, "^[0-9]+ tokens")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in ("model", "prompt", "temperature", "top_p", "max_tokens", "seed", "chat", "key", "go", "answer"):
        box = page.locator(f"#{name}").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width, name
