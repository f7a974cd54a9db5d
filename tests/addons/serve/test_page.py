"""The page at / in a real browser, where there is one: playwright, and a Chromium of its own or of the system."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qsample.runtime import CausalLM, SamplingParams, load
from tests.helpers.browsers import WIDE_MARKDOWN, check_readable, open_browser, pages, tab_order
from tests.helpers.servers import ServerProcess

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="pip install playwright; the page needs a browser"
)
pytestmark = pytest.mark.slow

PROMPT = "And the LORD spake unto Moses"
# Answers that want to run a script, or to load or link what is not of the web.
HOSTILE = (
    "<script>window.harmed = 1</script>",
    "<img src=x onerror='window.harmed = 1'>",
    "![x](https://example.org/leak.png)",
    "![x](x 'y' onerror=window.harmed=1)",
    "[x](javascript:window.harmed=1)",
    "[x](JaVaScRiPt&colon;window.harmed=1)",
    "[x](  java\nscript:window.harmed=1)",
    "[x](data:text/html;base64,PHNjcmlwdD4=)",
    "[x](vbscript:x) [x](file:///etc/passwd) [x](/docs) [x](//example.org)",
    "<javascript:window.harmed=1>",
    "[x]: javascript:window.harmed=1\n\n[x]",
    '[x](https://example.org/"onmouseover="window.harmed=1)',
    '```"><img src=x onerror=window.harmed=1>\n</code></pre><script>window.harmed = 1</script>',
    "`</code><script>window.harmed = 1</script>`",
    "| <img src=x onerror=window.harmed=1> |\n|---|\n| <svg onload=window.harmed=1> |",
    "<style>body { display: none }</style><iframe src='javascript:window.harmed=1'></iframe>",
    "<a href='javascript:window.harmed=1'>x</a><form action=//example.org><input></form>",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    with pages(browser) as make:
        yield make


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
    return str(done.last.locator(".answer").text_content()), str(
        done.last.locator("footer").inner_text()
    )


def words(text: str | None) -> list[str]:
    """Of a text, whose lines and paragraphs a page shows in its own way."""
    return (text or "").split()


def open_texts(open_page: Callable[..., Any], url: str, **options: Any) -> Any:
    """The page in the mode for texts, which the user has to choose if the model has a chat template."""
    page = open_page(url, **options)
    page.check("#as-text")
    return page


def expect_error(page: Any, text: str, **fields: object) -> None:
    """Fill in fields and generate, and read the error; the page is ready for another request."""
    fill(page, **fields)
    page.click("#go")
    sync_api.expect(page.locator("#note.error")).to_contain_text(text, timeout=60_000)
    sync_api.expect(page.locator("#spoken")).to_contain_text(text)
    sync_api.expect(page.locator("#go")).to_have_text(re.compile("Generate|Send"))


def answer_with(
    page: Any, text: str, finish_reason: str = "stop", stop_reason: str | None = None
) -> list[dict[str, Any]]:
    """Have the server's place taken, for chats: it answers with this text. Returns the bodies that it gets."""
    bodies: list[dict[str, Any]] = []

    def answer(route: Any) -> None:
        bodies.append(route.request.post_data_json)
        choice = {
            "delta": {"content": text},
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }
        part = {"model": "tiny", "choices": [choice]}
        route.fulfill(
            body=f"data: {json.dumps(part)}\n\ndata: [DONE]\n\n", content_type="text/event-stream"
        )

    page.route("**/v1/chat/completions", answer)
    return bodies


class Stream:
    """The answer to the page's next chat, a piece at a time."""

    def __init__(self, page: Any) -> None:
        self._page = page
        page.evaluate("""() => {
            const real = window.fetch;
            window.fetch = (address, options) => {
                if (!String(address).endsWith("/v1/chat/completions")) return real(address, options);
                const bytes = new TextEncoder();
                const body = new ReadableStream({ start: (to) => {
                    window.send = (part) => to.enqueue(bytes.encode(`data: ${part}\\n\\n`));
                } });
                return Promise.resolve(new Response(body));
            };
        }""")

    def _send(self, choice: dict[str, Any]) -> None:
        part = json.dumps({"model": "tiny", "choices": [choice]})
        self._page.wait_for_function("() => window.send !== undefined")
        self._page.evaluate("part => send(part)", part)

    def send(self, text: str) -> None:
        self._send({"delta": {"content": text}, "finish_reason": None})
        # A frame draws what has come, the next one is after it.
        self._page.evaluate(
            "() => new Promise(done => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 20))"
        )

    def end(self) -> None:
        self._send({"delta": {}, "finish_reason": "stop"})
        self._page.evaluate("() => send('[DONE]')")
        sync_api.expect(self._page.locator("article").last).to_have_attribute("aria-busy", "false")


def expected(model: CausalLM, prompt: str | list[int], seed: int, **params: Any) -> str:
    texts = model.generate(prompt, SamplingParams(**params), seed=seed).texts
    assert texts is not None
    return texts[0]


def test_a_prompt_is_continued(
    open_page: Callable[..., Any], server: ServerProcess, served_model: CausalLM
) -> None:
    page = open_texts(open_page, server.url)
    sync_api.expect(page.locator("#model")).to_have_value("tiny")
    # Values between the steps that browsers assume by themselves, and a seed that is no exact number of JavaScript.
    seed = 2**53 + 1
    text, facts = generate(
        page, prompt=PROMPT, temperature=0.85, top_p=0.923, max_tokens=40, seed=seed
    )
    params = {"max_new_tokens": 40, "temperature": 0.85, "top_p": 0.923}
    assert text == expected(served_model, PROMPT, seed, **params)
    assert re.match(
        rf"40 tokens in \S+ s, the first after \d+ ms, cut off by the limit of 40 tokens. Seed {seed}\s+"
        "Continue\\s+Use this seed$",
        facts,
    )
    tokens = page.locator("#metrics div", has_text="tokens").first.locator("dd")
    sync_api.expect(tokens).to_have_text(re.compile("^[1-9]"), timeout=10_000)
    # The server takes any temperature.
    assert generate(page, temperature=5, seed=1)[0] == expected(
        served_model, PROMPT, 1, **params | {"temperature": 5}
    )
    # What is left empty is the server's to choose, except for the seed, which writes the text again, and its length.
    text, facts = generate(page, temperature="", top_p="", max_tokens="", seed="")
    found = re.search(r"Seed (\d+)", facts)
    assert found is not None
    assert text == expected(served_model, PROMPT, int(found[1]), max_new_tokens=128)
    page.locator("article").last.get_by_role("button", name="Use this seed").click()
    sync_api.expect(page.locator("#seed")).to_have_value(found[1])
    assert generate(page)[0] == text
    page.click("#clear")
    sync_api.expect(page.locator("article")).to_have_count(0)


def test_a_text_is_stopped_and_spoken_once(
    open_page: Callable[..., Any], server: ServerProcess
) -> None:
    page = open_texts(open_page, server.url)
    page.evaluate("""() => {
        window.pieces = 0; window.spoken = [];
        const watch = (id, heard) => new MutationObserver(heard)
            .observe(document.getElementById(id), { childList: true, subtree: true, characterData: true });
        watch("spoken", () => spoken.push(document.getElementById("spoken").textContent));
        watch("texts", () => { if (document.querySelector(".answer")?.textContent && ++pieces === 3) stopIt(); });
    }""")
    live = page.locator("[aria-live], [role=status], [role=alert], [role=log]")
    assert [live.nth(index).get_attribute("id") for index in range(live.count())] == ["spoken"]
    for by_key in (False, True):
        page.evaluate(
            "byKey => { window.pieces = 0; spoken.length = 0; document.getElementById('texts').replaceChildren();"
            "const escape = new KeyboardEvent('keydown', { key: 'Escape', bubbles: true });"
            "window.stopIt = () => { spoken.push('|');"
            "if (byKey) document.body.dispatchEvent(escape); else document.getElementById('go').click(); } }",
            by_key,
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


def test_a_conversation(
    open_page: Callable[..., Any], server: ServerProcess, served_model: CausalLM
) -> None:
    page = open_page(server.url)
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

    shown, _ = generate(page, system="Be brief.", prompt="<b>Who</b> art thou?", **ask)
    first = answer("<b>Who</b> art thou?")
    assert words(shown) == words(first)
    sync_api.expect(page.locator(".given")).to_have_text("<b>Who</b> art thou?")
    sync_api.expect(page.locator("#prompt")).to_have_value("")
    second, _ = generate(page, prompt="And whither?")
    assert words(second) == words(answer("<b>Who</b> art thou?", first, "And whither?"))
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
    assert words(generate(page, prompt="Hear")[0]) == words(answer("Hear"))
    # Texts are apart from conversations.
    page.check("#as-text")
    sync_api.expect(page.locator("article:visible")).to_have_count(0)
    generate(page, prompt="In the")
    page.check("#as-chat")
    sync_api.expect(page.locator("article:visible")).to_have_count(1)


def test_the_mode_follows_the_model_and_the_user(
    open_page: Callable[..., Any], served_package: Path, bundled_package: Path
) -> None:
    options = (
        "--served-model-name",
        "talks",
        "--model",
        f"plain={served_package}",
        "--threads",
        "1",
    )
    with ServerProcess(bundled_package, *options) as server:
        page = open_page(server.url)
        chat, text, prompt = (
            page.locator("#as-chat"),
            page.locator("#as-text"),
            page.locator("#prompt"),
        )
        sync_api.expect(page.locator("#model")).to_have_value("talks")
        sync_api.expect(chat).to_be_checked()
        sync_api.expect(prompt).to_have_value("")
        sync_api.expect(prompt).to_have_attribute("placeholder", "Ask something")
        sync_api.expect(page.locator("#keys")).to_contain_text("Enter sends, Shift + Enter")
        page.select_option("#model", "plain")
        sync_api.expect(text).to_be_checked()
        sync_api.expect(page.locator("#keys")).to_contain_text("Ctrl + Enter generates")
        page.select_option("#model", "talks")
        sync_api.expect(chat).to_be_checked()
        page.check("#as-text")
        page.select_option("#model", "plain")
        page.select_option("#model", "talks")
        sync_api.expect(text).to_be_checked()  # as the user chose


def test_enter_sends_a_message(open_page: Callable[..., Any], server: ServerProcess) -> None:
    page = open_page(server.url)
    bodies = answer_with(page, "Yes.")
    articles, prompt = page.locator("article[aria-busy=false]:visible"), page.locator("#prompt")
    prompt.press("Enter")  # of nothing
    prompt.type("one")
    prompt.press("Shift+Enter")
    prompt.type("two")
    sync_api.expect(prompt).to_have_value("one\ntwo")
    # An input method's Enter ends a composition; Safari tells it by the key code.
    for composing in ({"isComposing": True}, {"keyCode": 229}):
        page.evaluate(
            "fields => document.getElementById('prompt').dispatchEvent(new KeyboardEvent('keydown',"
            "{ key: 'Enter', bubbles: true, cancelable: true, ...fields }))",
            composing,
        )
    page.wait_for_timeout(200)
    assert bodies == []
    prompt.press("Enter")
    sync_api.expect(articles).to_have_count(1)
    sync_api.expect(prompt).to_have_value("")
    assert [body["messages"] for body in bodies] == [[{"role": "user", "content": "one\ntwo"}]]
    assert "max_tokens" not in bodies[0]  # the server lets an answer fill the context
    prompt.type("three")
    prompt.press("Control+Enter")
    sync_api.expect(articles).to_have_count(2)
    page.check("#as-text")
    prompt.type("In the")
    prompt.press("Enter")
    sync_api.expect(prompt).to_have_value("In the\n")
    prompt.press("Control+Enter")
    sync_api.expect(articles).to_have_count(1, timeout=60_000)


def test_enter_neither_stops_an_answer_nor_sends_another(
    open_page: Callable[..., Any], server: ServerProcess
) -> None:
    page = open_page(server.url)
    stream = Stream(page)
    fill(page, prompt="one")
    page.press("#prompt", "Enter")
    stream.send("First")
    sync_api.expect(page.locator(".answer")).to_have_text("First")
    fill(page, prompt="two")
    page.press("#prompt", "Enter")
    sync_api.expect(page.locator("#go")).to_have_text("Stop")
    sync_api.expect(page.locator("article")).to_have_count(1)
    sync_api.expect(page.locator("#prompt")).to_have_value("two")
    stream.end()
    sync_api.expect(page.locator("#go")).to_have_text("Send")


def test_what_was_cut_off_goes_on(
    open_page: Callable[..., Any], server: ServerProcess, served_model: CausalLM
) -> None:
    page = open_texts(open_page, server.url)
    go_on = page.get_by_role("button", name="Continue").locator("visible=true")
    text, _ = generate(page, prompt=PROMPT, temperature=0, max_tokens=8, seed=1)
    for _ in range(2):
        go_on.click()
        sync_api.expect(page.locator("#go")).to_have_text("Generate", timeout=60_000)
        text += expected(served_model, PROMPT + text, 1, max_new_tokens=8, temperature=0.0)
        assert page.locator(".answer").text_content() == text
    # In a chat, the last answer alone can be continued; the next request has all of it.
    page.check("#as-chat")
    bodies = answer_with(page, "one, ", "length", "timeout")
    _, facts = generate(page, prompt="Count", system="Be brief.", max_tokens="")
    assert "cut off by the server's time limit" in facts
    go_on.click()
    sync_api.expect(page.locator("#go")).to_have_text("Send")
    assert page.locator("#turns .answer").text_content() == "one, one,"
    assert bodies[1]["continue_final_message"] is True
    assert bodies[1]["add_generation_prompt"] is False
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count"}]
    assert bodies[1]["messages"] == [*said, {"role": "assistant", "content": "one, "}]
    generate(page, prompt="And now?")
    sync_api.expect(go_on).to_have_count(1)
    question = {"role": "user", "content": "And now?"}
    assert bodies[2]["messages"] == [
        *said,
        {"role": "assistant", "content": "one, one, "},
        question,
    ]
    assert "continue_final_message" not in bodies[2]
    page.click("#back")
    sync_api.expect(go_on).to_have_count(1)
    # A continuation that fails leaves what there is.
    page.unroute_all()
    facts = page.locator("#turns footer").inner_text()
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, body="no room"))
    go_on.click()
    sync_api.expect(page.locator("#note.error")).to_contain_text("no room")
    assert page.locator("#turns .answer").text_content() == "one, one,"
    assert page.locator("#turns footer").inner_text() == facts
    assert page.input_value("#prompt") == "And now?"
    # A full context has no room to go on.
    page.unroute_all()
    answer_with(page, "one", "length")
    _, facts = generate(page, prompt="Count")
    assert "cut off by the end of the context" in facts
    sync_api.expect(go_on).to_have_count(0)
    # The server goes on with an answer of its own.
    page.unroute_all()
    page.click("#clear")
    shown, _ = generate(page, prompt="Hear", system="", temperature=0, max_tokens=8)
    go_on.click()
    sync_api.expect(page.locator("#go")).to_have_text("Send", timeout=60_000)
    assert page.inner_text("#note") == ""
    assert len(words(page.locator("#turns .answer").text_content())) > len(words(shown))


def test_markdown_while_it_streams(open_page: Callable[..., Any], server: ServerProcess) -> None:
    page = open_page(server.url)
    stream = Stream(page)
    answer = page.locator(".answer")
    fill(page, prompt="**not** Markdown <b>here</b>")
    page.press("#prompt", "Enter")
    stream.send("# Title\n\nSome *emphasis*, **more** and `co")
    sync_api.expect(answer.locator("h1")).to_have_text("Title")
    sync_api.expect(answer.locator("p")).to_have_text("Some emphasis, more and `co")
    page.evaluate("() => { window.title = document.querySelector('.answer h1'); }")
    stream.send("de`.\nA line\n\n- one\n- two\n\n1. first\n\n```python\nprint('<b>")
    sync_api.expect(answer.locator("p code")).to_have_text("code")
    assert answer.locator("p").first.inner_text() == "Some emphasis, more and code.\nA line"
    sync_api.expect(answer.locator("ul > li")).to_have_text(["one", "two"])
    sync_api.expect(answer.locator("ol > li")).to_have_text("first")
    sync_api.expect(answer.locator("pre")).to_have_text(
        "print('<b>"
    )  # a fence that is not closed yet
    stream.send(
        "')\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nSee https://example.org/ and [mail](mailto:a@example.org)."
    )
    stream.end()
    assert page.evaluate(
        "() => title === document.querySelector('.answer h1')"
    )  # what has not changed stays
    sync_api.expect(answer.locator(":is(h1, p, ul, ol, pre, table)")).to_have_count(7)
    sync_api.expect(answer.locator("tr")).to_have_count(2)
    links = answer.locator("a").evaluate_all(
        "links => links.map(link => [link.getAttribute('href'), link.target, link.rel])"
    )
    assert links == [
        [address, "_blank", "noopener noreferrer"]
        for address in ("https://example.org/", "mailto:a@example.org")
    ]
    assert page.locator(".given").inner_text() == "**not** Markdown <b>here</b>"
    answer.get_by_role("button", name="Copy").click()
    sync_api.expect(answer.get_by_role("button")).to_have_text("Copied")
    page.focus("#prompt")
    page.keyboard.press("Control+V")
    assert page.input_value("#prompt").strip() == "print('<b>')"


def test_hostile_answers_are_text(open_page: Callable[..., Any], server: ServerProcess) -> None:
    page = open_page(server.url)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    allowed = {
        "A",
        "BR",
        "BUTTON",
        "CODE",
        "DIV",
        "P",
        "PRE",
        "SPAN",
        "TABLE",
        "TBODY",
        "TD",
        "TH",
        "THEAD",
        "TR",
    }
    for text in HOSTILE:
        answer_with(page, text)
        generate(page, prompt="x")
        page.unroute_all()
    elements = page.locator(".answer *").evaluate_all(
        "found => found.map(element => [element.tagName, element.getAttributeNames(), element.getAttribute('href')])"
    )
    assert {tag for tag, *_ in elements} <= allowed
    names = {name for _, attributes, _ in elements for name in attributes}
    assert names <= {"class", "href", "rel", "tabindex", "target", "type"}
    assert {href.partition("/")[0] for *_, href in elements if href} == {"https:"}
    for link in page.locator(".answer a").all():  # opened nowhere but at their address
        assert link.get_attribute("href").startswith("https://example.org/")
    page.locator(".answer").last.hover()
    assert page.evaluate("window.harmed") is None
    assert all(address.startswith(server.url) for address in asked)
    # Were there a hole, the policy of the page would close it.
    page.evaluate("""() => { document.querySelector(".answer").innerHTML =
        "<img src=x onerror='window.harmed = 1'><img src=https://example.org/x><a href='javascript:harmed=1'>x</a>";
        document.querySelector(".answer a").click(); }""")
    page.wait_for_timeout(300)
    assert page.evaluate("window.harmed") is None


def test_a_model_keeps_its_name_after_an_error(
    open_page: Callable[..., Any], served_package: Path, chat_template: Path
) -> None:
    options = (
        "--served-model-name",
        "first",
        "--model",
        f"second={served_package}",
        "--chat-template",
        chat_template,
    )
    with ServerProcess(served_package, *options, "--api-key", "secret", "--threads", "1") as server:
        page = open_page(server.url)
        sync_api.expect(page.locator("#note.error")).to_contain_text(
            "send an API key of this server"
        )
        sync_api.expect(page.locator("#model")).to_be_hidden()  # there is no name yet
        fill(page, prompt="Hear", max_tokens=4, key="secret")
        page.press("#key", "Enter")  # the names come with it
        names = page.locator("article[aria-busy=false] h2")
        sync_api.expect(names).to_have_text(["You", "first"], timeout=60_000)
        page.select_option("#model", "second")
        expect_error(page, "send an API key of this server", prompt="Hear", key="wrong")
        generate(page, prompt="Hear", key="secret")
        sync_api.expect(page.locator("#model")).to_have_value("second")
        sync_api.expect(names).to_have_text(["You", "first", "You", "second"])


def test_a_model_without_a_chat_template_and_a_key(
    open_page: Callable[..., Any], served_package: Path
) -> None:
    options = ("--served-model-name", "<i>plain</i>", "--api-key", "secret", "--threads", "1")
    with ServerProcess(served_package, *options) as server:
        page = open_page(server.url)
        sync_api.expect(page.locator("#note.error")).to_contain_text(
            "send an API key of this server"
        )
        fill(page, key="secret")
        page.press("#key", "Tab")
        sync_api.expect(page.locator("#model")).to_have_value("<i>plain</i>")
        sync_api.expect(page.locator("#note")).to_have_text("")
        sync_api.expect(page.locator("#as-chat")).to_be_disabled()
        sync_api.expect(page.locator("#as-text")).to_be_checked()
        sync_api.expect(page.locator("#no-chat")).to_be_visible()
        sync_api.expect(page.locator("#system")).to_be_hidden()
        generate(page, prompt=PROMPT, max_tokens=8)
        expect_error(page, "send an API key of this server", key="wrong")
        generate(page, key="secret")
        server.stop()
        expect_error(page, "fetch")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_everything_can_be_seen_read_and_touched(
    open_page: Callable[..., Any], server: ServerProcess, width: int, scheme: str
) -> None:
    page = open_page(
        server.url,
        viewport={"width": width, "height": 640},
        color_scheme=scheme,
        reduced_motion="reduce",
    )
    sync_api.expect(page.locator("#as-chat")).to_be_checked()
    sync_api.expect(page.locator(".choice")).to_be_in_viewport(ratio=1)
    if width < 900:  # the settings are folded, until one of them is wrong
        sync_api.expect(page.locator("#seed")).to_be_hidden()
        page.evaluate("document.getElementById('seed').value = 'x'")
        page.click("#go")
        sync_api.expect(page.locator("#seed")).to_be_visible()
    page.check("#as-text")
    generate(page, prompt="In the", max_tokens=60, seed=1)
    page.check("#as-chat")
    generate(page, prompt="Hear", max_tokens=8)
    check_readable(page, width)
    answer_with(page, WIDE_MARKDOWN)
    generate(page, prompt="Hear")
    assert page.locator(".markdown :is(pre, .table)").evaluate_all(
        "boxes => boxes.map(box => box.scrollWidth > box.clientWidth)"
    ) == [True, True]
    page.unroute_all()
    expect_error(page, "tokens", prompt="and " * 5000)
    page.evaluate(
        "document.querySelector('#turns article').setAttribute('aria-busy', 'true')"
    )  # as while it writes
    assert page.evaluate("document.getAnimations().length") == 0
    assert check_readable(page, width) >= {
        "Copy",
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


def test_the_keyboard_is_enough(
    open_page: Callable[..., Any], server: ServerProcess, served_model: CausalLM
) -> None:
    page = open_page(server.url)
    sync_api.expect(page.locator("#model")).to_have_value("tiny")
    fields = ["system", "temperature", "top_p", "max_tokens", "seed", "key"]
    order = ["model", "as-chat", "API", "Metrics", "Settings", *fields, "prompt", "go"]
    assert tab_order(page, len(order)) == order
    for name in [*fields, "prompt"]:
        assert page.locator(f"#{name}").evaluate("element => element.labels.length") == 1, name
    page.focus("#as-chat")
    page.keyboard.press("ArrowRight")
    sync_api.expect(page.locator("#as-text")).to_be_checked()
    fill(page, prompt=PROMPT, max_tokens=8, seed=3, temperature=1)
    page.focus("#go")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("article[aria-busy=false]")).to_have_count(1, timeout=60_000)
    assert page.evaluate("document.activeElement.id") == "go"
    assert page.locator(".answer").text_content() == expected(
        served_model, PROMPT, 3, max_new_tokens=8
    )


def test_images(
    open_page: Callable[..., Any], smolvlm_package: Path, served_package: Path, tmp_path: Path
) -> None:
    """They are chosen, pasted or dropped, seen beside the message, and sent with it; on a telephone's width, too."""
    from tests.helpers.tiny_vlms import picture

    files = [tmp_path / "one.png", tmp_path / "two.png", tmp_path / "three.png"]
    for seed, file in enumerate(files):
        picture(30, 20 + 10 * seed, seed).save(file)
    model = load(smolvlm_package, intra_op_num_threads=1, ctx_len=512)

    def answer(*turns: Any) -> str:
        messages = []
        for place, (text, *images) in enumerate(turns):
            parts: Any = [
                *({"type": "image", "image": image} for image in images),
                {"type": "text", "text": text},
            ]
            messages.append(
                {"role": ("user", "assistant")[place % 2], "content": parts if images else text}
            )
        texts = model.generate(
            messages, SamplingParams(temperature=0.7, max_new_tokens=8), seed=1
        ).texts
        assert texts is not None
        return texts[0]

    options = (
        "--served-model-name",
        "eyes",
        "--model",
        f"plain={served_package}",
        "--threads",
        "1",
        "--ctx-len",
        "512",
    )
    with ServerProcess(smolvlm_package, *options) as server:
        page = open_page(server.url, viewport={"width": 390, "height": 700})
        attach, shown = page.locator("#attach"), page.locator("#images img")
        sync_api.expect(page.locator("#model")).to_have_value("eyes")
        page.check("#as-text")
        sync_api.expect(attach).to_be_hidden()  # a text to continue has none
        page.check("#as-chat")
        page.click("#settings summary")
        sync_api.expect(attach).to_be_visible()

        with page.expect_file_chooser() as chooser:
            attach.press("Enter")
        chooser.value.set_files(files[:2])
        sync_api.expect(shown).to_have_count(2)
        sync_api.expect(page.locator("#spoken")).to_have_text("one.png, two.png: added")
        page.get_by_role("button", name="Remove one.png").press("Enter")
        sync_api.expect(shown).to_have_count(1)
        assert page.evaluate("document.activeElement.id") == "attach"
        assert shown.first.get_attribute("alt") == "two.png"
        give = """([id, event, name, type, text]) => {
            const files = new DataTransfer(), bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
            files.items.add(new File([bytes], name, { type }));
            document.getElementById(id).dispatchEvent(event === "paste"
                ? new ClipboardEvent(event, { clipboardData: files, bubbles: true, cancelable: true })
                : new DragEvent(event, { dataTransfer: files, bubbles: true, cancelable: true }));
        }"""
        third = base64.b64encode(files[2].read_bytes()).decode()
        page.evaluate(give, ["form", "drop", "three.png", "image/png", third])
        sync_api.expect(shown).to_have_count(2)
        page.evaluate(give, ["prompt", "paste", "page.pdf", "application/pdf", third])
        sync_api.expect(page.locator("#note.error")).to_have_text(
            "Images are PNG, JPEG, WebP or GIF files."
        )
        page.evaluate(
            give,
            [
                "prompt",
                "paste",
                "one.png",
                "image/png",
                base64.b64encode(files[0].read_bytes()).decode(),
            ],
        )
        sync_api.expect(shown).to_have_count(3)

        ask = {"temperature": 0.7, "top_p": 1, "max_tokens": 8, "seed": 1}
        seen = (files[1], files[2], files[0])
        shown_first, _ = generate(page, prompt="What is there?", **ask)
        first = answer(("What is there?", *seen))
        assert words(shown_first) == words(first)
        sync_api.expect(shown).to_have_count(0)
        sync_api.expect(page.locator("article img")).to_have_count(3)
        assert {"attach"} <= check_readable(page, 390)
        second, _ = generate(page, prompt="And now?")  # the images are still in the conversation
        assert words(second) == words(answer(("What is there?", *seen), (first,), ("And now?",)))
        page.click("#back")
        page.click("#back")
        sync_api.expect(shown).to_have_count(3)
        assert words(generate(page, prompt="What is there?")[0]) == words(first)
        # What fails leaves the images with the message.
        page.set_input_files("#files", files[:1])
        expect_error(page, "context", prompt="and " * 5000)
        sync_api.expect(shown).to_have_count(1)
        page.select_option("#model", "plain")
        sync_api.expect(attach).to_be_hidden()
        sync_api.expect(shown).to_be_hidden()
