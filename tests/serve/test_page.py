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


def generate(page: Any, **fields: object) -> tuple[str, str]:
    """Fill in fields and generate: the answer, and what the page says about it."""
    fill(page, **fields)
    done = page.locator("article[aria-busy=false]:visible")
    before = done.count()
    page.click("#go")
    sync_api.expect(done).to_have_count(before + 1, timeout=60_000)
    assert page.inner_text("#note") == ""
    return str(done.last.locator(".answer").text_content()), str(done.last.locator("footer").inner_text())


def expect_error(page: Any, text: str, **fields: object) -> None:
    """Fill in fields and generate, and read the error; the page is ready for another request."""
    fill(page, **fields)
    page.click("#go")
    sync_api.expect(page.locator("#note.error")).to_contain_text(text, timeout=60_000)
    sync_api.expect(page.locator("#spoken")).to_contain_text(text)
    sync_api.expect(page.locator("#go")).to_have_text(re.compile("Generate|Send"))


def expected(model: CausalLM, prompt: str | list[int], seed: int, **params: Any) -> str:
    texts = model.generate(prompt, SamplingParams(**params), seed=seed).texts
    assert texts is not None
    return texts[0]


def test_a_prompt_is_continued(open_page: Callable[..., Any], server: ServerProcess, served_model: CausalLM) -> None:
    page = open_page(server.url)
    sync_api.expect(page.locator("#model")).to_have_value("tiny")
    # Values between the steps that browsers assume by themselves, and a seed that is no exact number of JavaScript.
    seed = 2**53 + 1
    text, facts = generate(page, prompt=PROMPT, temperature=0.85, top_p=0.923, max_tokens=40, seed=seed)
    params = {"max_new_tokens": 40, "temperature": 0.85, "top_p": 0.923}
    assert text == expected(served_model, PROMPT, seed, **params)
    assert re.match(
        rf"40 tokens in \S+ s, the first after \d+ ms, ended by length. Seed {seed}\s+Use this seed$", facts
    )
    tokens = page.locator("#metrics div", has_text="tokens").first.locator("dd")
    sync_api.expect(tokens).to_have_text(re.compile("^[1-9]"), timeout=10_000)
    # The server takes any temperature.
    assert generate(page, temperature=5, seed=1)[0] == expected(served_model, PROMPT, 1, **params | {"temperature": 5})
    # What is left empty is the server's to choose, except for the seed: what is shown writes the text again.
    text, facts = generate(page, temperature="", top_p="", max_tokens="", seed="")
    found = re.search(r"Seed (\d+)", facts)
    assert found is not None
    assert text == expected(served_model, PROMPT, int(found[1]), max_new_tokens=16)
    page.locator("article").last.get_by_role("button", name="Use this seed").click()
    sync_api.expect(page.locator("#seed")).to_have_value(found[1])
    assert generate(page)[0] == text
    page.click("#clear")
    sync_api.expect(page.locator("article")).to_have_count(0)


def test_a_text_is_stopped_and_spoken_once(open_page: Callable[..., Any], server: ServerProcess) -> None:
    page = open_page(server.url)
    page.evaluate("""() => {
        window.pieces = 0; window.spoken = [];
        const watch = (id, heard) => new MutationObserver(heard)
            .observe(document.getElementById(id), { childList: true, subtree: true, characterData: true });
        watch("spoken", () => spoken.push(document.getElementById("spoken").textContent));
        watch("texts", () => { if (document.querySelector(".answer")?.textContent && ++pieces === 3) stopIt(); });
    }""")
    live = page.locator("[aria-live], [role=status], [role=alert], [role=log]")
    assert [live.nth(index).get_attribute("id") for index in range(live.count())] == ["spoken"]
    for stop in ("document.getElementById('go').click()", "document.body.dispatchEvent(escape)"):
        page.evaluate(
            "stop => { window.pieces = 0; spoken.length = 0; document.getElementById('texts').replaceChildren();"
            "const escape = new KeyboardEvent('keydown', { key: 'Escape', bubbles: true });"
            "window.stopIt = () => { spoken.push('|'); eval(stop); } }",
            stop,
        )
        fill(page, prompt="In the", temperature=1.5, max_tokens=500)
        page.press("#prompt", "Control+Enter")
        sync_api.expect(page.locator("#note")).to_have_text("Stopped", timeout=60_000)
        sync_api.expect(page.locator("#go")).to_have_text("Generate")
        text = page.locator(".answer").text_content()
        assert 2 < len(text) < 500
        assert page.evaluate("spoken") == ["Generating", "|", f"{text}\nStopped"]
        page.wait_for_timeout(300)
        assert page.locator(".answer").text_content() == text
        page.wait_for_function(
            "async () => /num_requests_running\\{[^}]*\\} 0/.test(await (await fetch('/metrics')).text())"
        )


def test_a_conversation(open_page: Callable[..., Any], server: ServerProcess, served_model: CausalLM) -> None:
    page = open_page(server.url)
    page.check("#as-chat")
    ask = {"temperature": 0.7, "top_p": 1, "max_tokens": 8, "seed": 1}
    params = {"max_new_tokens": 8, "temperature": 0.7}

    def answer(*said: str) -> str:
        """Of the model, to these messages after the fixture's template (without its trailing newline trimmed)."""
        names = ("user", "assistant")
        lines = [f"{names[place % 2]}: {text}\n" for place, text in enumerate(said)]
        prompt = served_model.tokenizer.encode(  # type: ignore[union-attr]
            "".join(["system: Be brief.\n", *lines, "assistant:"]), add_special_tokens=False
        )
        return expected(served_model, prompt, 1, **params)

    first, _ = generate(page, system="Be brief.", prompt="<b>Who</b> art thou?", **ask)
    assert first == answer("<b>Who</b> art thou?")
    sync_api.expect(page.locator("#prompt")).to_have_value("")
    second, _ = generate(page, prompt="And whither?")
    assert second == answer("<b>Who</b> art thou?", first, "And whither?")
    # What fails leaves the conversation, and the message, as they were.
    expect_error(page, "tokens", prompt="and " * 5000)
    sync_api.expect(page.locator("article:visible")).to_have_count(2)
    assert page.input_value("#prompt") == "and " * 5000
    # A turn that is taken back can be sent again, changed or not.
    page.click("#back")
    sync_api.expect(page.locator("#prompt")).to_have_value("And whither?")
    assert generate(page)[0] == second
    page.click("#clear")
    sync_api.expect(page.locator("article")).to_have_count(0)
    assert generate(page, prompt="Hear")[0] == answer("Hear")
    # Texts are apart from conversations.
    page.check("#as-text")
    sync_api.expect(page.locator("article:visible")).to_have_count(0)
    generate(page, prompt="In the")
    page.check("#as-chat")
    sync_api.expect(page.locator("article:visible")).to_have_count(1)


def test_a_model_without_a_chat_template_and_a_key(open_page: Callable[..., Any], served_package: Path) -> None:
    options = ("--served-model-name", "<i>plain</i>", "--api-key", "secret", "--threads", "1")
    with ServerProcess(served_package, *options) as server:
        page = open_page(server.url)
        sync_api.expect(page.locator("#note.error")).to_contain_text("send an API key of this server")
        fill(page, key="secret")
        page.press("#key", "Tab")
        sync_api.expect(page.locator("#model")).to_have_value("<i>plain</i>")
        sync_api.expect(page.locator("#note")).to_have_text("")
        sync_api.expect(page.locator("#as-chat")).to_be_disabled()
        sync_api.expect(page.locator("#no-chat")).to_be_visible()
        generate(page, max_tokens=8)
        expect_error(page, "send an API key of this server", key="wrong")
        generate(page, key="secret")
        server.stop()
        expect_error(page, "fetch")


# The contrast of each text that is seen: the least of all, as WCAG 2 defines it, with what it belongs to.
_CONTRAST = """() => {
  const parse = text => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
  const light = color => color.slice(0, 3).map(v => v / 255)
      .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
      .reduce((sum, v, place) => sum + v * [.2126, .7152, .0722][place], 0);
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
  const ground = element => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.push(parse(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const opaque = element => { for (let e = element; e; e = e.parentElement)
    if (getComputedStyle(e).opacity !== "1") return false; return true; };
  const found = [], edges = [];
  for (const element of document.body.querySelectorAll("*")) {
    const field = element.matches("input:not([type=radio]), textarea, select, button");
    const text = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    if (!element.checkVisibility() || element.matches("script, option") || !(text || field)) continue;
    const name = `${element.tagName}#${element.id}.${element.className} ${element.textContent.slice(0, 20)}`;
    if (!opaque(element)) found.push([0, `${name} is not opaque`]);
    found.push([ratio(over(parse(getComputedStyle(element).color), ground(element)), ground(element)), name]);
    if (element.placeholder) {
      const style = getComputedStyle(element, "::placeholder");
      found.push([style.opacity === "1" ? ratio(parse(style.color), ground(element)) : 0, `${name} placeholder`]);
    }
    const edge = parse(getComputedStyle(element).borderTopColor);
    if (field && edge[3]) edges.push([ratio(edge, ground(element.parentElement)), name]);
  }
  const least = list => list.reduce((a, b) => b[0] < a[0] ? b : a);
  return { count: found.length, text: least(found), edge: least(edges) };
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_everything_can_be_seen_read_and_touched(
    open_page: Callable[..., Any], server: ServerProcess, width: int, scheme: str
) -> None:
    page = open_page(server.url, viewport={"width": width, "height": 640}, color_scheme=scheme, reduced_motion="reduce")
    if width < 900:  # the settings are folded, until one of them is wrong
        sync_api.expect(page.locator("#seed")).to_be_hidden()
        page.evaluate("document.getElementById('seed').value = 'x'")
        page.click("#go")
        sync_api.expect(page.locator("#seed")).to_be_visible()
    generate(page, prompt="In the", max_tokens=60, seed=1)
    page.check("#as-chat")
    generate(page, prompt="Hear", max_tokens=8)
    expect_error(page, "tokens", prompt="and " * 5000)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    seen = page.evaluate(_CONTRAST)
    assert seen["count"] > 25
    assert seen["text"][0] >= 4.5, seen["text"]
    assert seen["edge"][0] >= 3, seen["edge"]
    page.evaluate("document.querySelector('#turns article').setAttribute('aria-busy', 'true')")  # as while it writes
    assert page.evaluate("document.getAnimations().length") == 0
    controls = page.locator("a, button, input, select, textarea, summary").locator("visible=true")
    names = set()
    for index in range(controls.count()):
        control = controls.nth(index)
        box, name = control.bounding_box(), control.evaluate("element => element.id || element.textContent")
        assert 0 <= box["x"] <= box["x"] + box["width"] <= width, name
        assert min(box["width"], box["height"]) >= 44, (name, box)
        names.add(name)
    assert names >= {
        "model",
        "temperature",
        "top_p",
        "max_tokens",
        "seed",
        "key",
        "system",
        "prompt",
        "go",
        "back",
        "clear",
    }


def test_the_keyboard_is_enough(open_page: Callable[..., Any], server: ServerProcess, served_model: CausalLM) -> None:
    page = open_page(server.url)
    sync_api.expect(page.locator("#model")).to_have_value("tiny")
    visited = []
    for _ in range(12):
        page.keyboard.press("Tab")
        element = page.evaluate_handle("document.activeElement")
        visited.append(element.evaluate("element => element.id || element.textContent"))
        ring = "element => [element, element.nextElementSibling].map(e => e && getComputedStyle(e).outlineStyle)"
        assert "solid" in element.evaluate(ring), visited
    order = ["model", "API", "Metrics", "Settings", "as-text", "temperature", "top_p", "max_tokens", "seed", "key"]
    assert visited == [*order, "prompt", "go"]
    for name in [*order[5:], "prompt"]:
        assert page.locator(f"#{name}").evaluate("element => element.labels.length") == 1, name
    fill(page, prompt=PROMPT, max_tokens=8, seed=3, temperature=1)
    page.focus("#go")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("article[aria-busy=false]")).to_have_count(1, timeout=60_000)
    assert page.evaluate("document.activeElement.id") == "go"
    assert page.locator(".answer").text_content() == expected(served_model, PROMPT, 3, max_new_tokens=8)
