"""Pages in a real headless browser, where there is one: playwright, and a Chromium of its own or of the system."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import pytest

_NAMES: Final = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
# Wider than a page: a line of code, a table and a word.
WIDE_MARKDOWN: Final = "\n\n".join(
    (
        "A `name`, [a link](https://example.org/):",
        f"```python\n{'x = 1; ' * 60}\n```",
        "\n".join(("| column " * 40 + "|", "|---" * 40 + "|", "| 1 " * 40 + "|")),
        "long" * 100,
    )
)


def find_browser() -> str | None:
    """The system's Chromium; None = playwright's own."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


@contextmanager
def open_browser(*flags: str, beside: Any = None) -> Iterator[Any]:
    """A browser with these flags; the test is skipped without one. beside: a browser that is open already."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="pip install playwright; the page needs a browser"
    )
    with nullcontext() if beside else sync_api.sync_playwright() as playwright:
        kind = beside.browser_type if beside else playwright.chromium
        try:
            browser = kind.launch(executable_path=find_browser(), args=["--no-sandbox", *flags])
        except sync_api.Error as error:
            pytest.skip(f"no browser: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@contextmanager
def pages(browser: Any) -> Iterator[Callable[..., Any]]:
    """(address, **options of a context) → the page there; what the browser complains of fails the test."""
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


def check_readable(page: Any, width: int) -> set[str]:
    """Contrasts are those of WCAG 2 at least, and all controls are within `width` and have 44 pixels or more.

    Returns the controls' ids, or their texts.
    """
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    seen = page.evaluate(_CONTRAST)
    assert seen["count"] > 25
    assert seen["text"][0] >= 4.5, seen["text"]
    assert seen["edge"][0] >= 3, seen["edge"]
    # WCAG 2 asks no size of links in a text.
    controls = page.locator("a:not(.markdown a), button, input, select, textarea, summary").locator(
        "visible=true"
    )
    names = set()
    for index in range(controls.count()):
        control = controls.nth(index)
        box, name = (
            control.bounding_box(),
            control.evaluate("element => element.id || element.textContent"),
        )
        assert 0 <= box["x"] <= box["x"] + box["width"] <= width, name
        assert min(box["width"], box["height"]) >= 44, (name, box)
        names.add(name)
    return names


def tab_order(page: Any, count: int) -> list[str]:
    """The ids, or texts, of the first elements that the Tab key reaches; each shows that it has the focus."""
    visited = []
    for _ in range(count):
        page.keyboard.press("Tab")
        element = page.evaluate_handle("document.activeElement")
        visited.append(element.evaluate("element => element.id || element.textContent"))
        ring = "element => [element, element.nextElementSibling].map(e => e && getComputedStyle(e).outlineStyle)"
        assert "solid" in element.evaluate(ring), visited
    return visited


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
