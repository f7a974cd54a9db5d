"""The page at / in a real browser, where there is one: playwright, and a Chromium of its own or of the system."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qsample.runtime import CausalLM, SamplingParams, load
from tests.helpers.browsers import check_readable, open_browser, pages, tab_order
from tests.helpers.servers import ServerProcess

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright; the page needs a browser")
pytestmark = pytest.mark.slow

PROMPT = "And the LORD spake unto Moses"


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


def test_a_model_keeps_its_name_after_an_error(
    open_page: Callable[..., Any], served_package: Path, chat_template: Path
) -> None:
    options = ("--served-model-name", "first", "--model", f"second={served_package}", "--chat-template", chat_template)
    with ServerProcess(served_package, *options, "--api-key", "secret", "--threads", "1") as server:
        page = open_page(server.url)
        sync_api.expect(page.locator("#note.error")).to_contain_text("send an API key of this server")
        sync_api.expect(page.locator("#model")).to_be_hidden()  # there is no name yet
        page.check("#as-chat")
        fill(page, prompt="Hear", max_tokens=4, key="secret")
        page.press("#key", "Enter")  # the names come with it
        names = page.locator("article[aria-busy=false] h2")
        sync_api.expect(names).to_have_text(["You", "first"], timeout=60_000)
        page.select_option("#model", "second")
        expect_error(page, "send an API key of this server", prompt="Hear", key="wrong")
        generate(page, prompt="Hear", key="secret")
        sync_api.expect(page.locator("#model")).to_have_value("second")
        sync_api.expect(names).to_have_text(["You", "first", "You", "second"])


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
    page.evaluate("document.querySelector('#turns article').setAttribute('aria-busy', 'true')")  # as while it writes
    assert page.evaluate("document.getAnimations().length") == 0
    assert check_readable(page, width) >= {
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
    order = ["model", "API", "Metrics", "Settings", "as-text", "temperature", "top_p", "max_tokens", "seed", "key"]
    assert tab_order(page, 12) == [*order, "prompt", "go"]
    for name in [*order[5:], "prompt"]:
        assert page.locator(f"#{name}").evaluate("element => element.labels.length") == 1, name
    fill(page, prompt=PROMPT, max_tokens=8, seed=3, temperature=1)
    page.focus("#go")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("article[aria-busy=false]")).to_have_count(1, timeout=60_000)
    assert page.evaluate("document.activeElement.id") == "go"
    assert page.locator(".answer").text_content() == expected(served_model, PROMPT, 3, max_new_tokens=8)


def test_images(open_page: Callable[..., Any], smolvlm_package: Path, served_package: Path, tmp_path: Path) -> None:
    """They are chosen, pasted or dropped, seen beside the message, and sent with it; on a telephone's width, too."""
    from tests.helpers.tiny_vlms import picture

    files = [tmp_path / "one.png", tmp_path / "two.png", tmp_path / "three.png"]
    for seed, file in enumerate(files):
        picture(30, 20 + 10 * seed, seed).save(file)
    model = load(smolvlm_package, intra_op_num_threads=1, ctx_len=512)

    def answer(*turns: Any) -> str:
        messages = []
        for place, (text, *images) in enumerate(turns):
            parts: Any = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
            messages.append({"role": ("user", "assistant")[place % 2], "content": parts if images else text})
        texts = model.generate(messages, SamplingParams(temperature=0.7, max_new_tokens=8), seed=1).texts
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
        sync_api.expect(attach).to_be_hidden()  # a text to continue has none
        page.click("#settings summary")
        page.check("#as-chat")
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
        sync_api.expect(page.locator("#note.error")).to_have_text("Images are PNG, JPEG, WebP or GIF files.")
        page.evaluate(
            give, ["prompt", "paste", "one.png", "image/png", base64.b64encode(files[0].read_bytes()).decode()]
        )
        sync_api.expect(shown).to_have_count(3)

        ask = {"temperature": 0.7, "top_p": 1, "max_tokens": 8, "seed": 1}
        seen = (files[1], files[2], files[0])
        first, _ = generate(page, prompt="What is there?", **ask)
        assert first == answer(("What is there?", *seen))
        sync_api.expect(shown).to_have_count(0)
        sync_api.expect(page.locator("article img")).to_have_count(3)
        assert {"attach"} <= check_readable(page, 390)
        second, _ = generate(page, prompt="And now?")  # the images are still in the conversation
        assert second == answer(("What is there?", *seen), (first,), ("And now?",))
        page.click("#back")
        page.click("#back")
        sync_api.expect(shown).to_have_count(3)
        assert generate(page, prompt="What is there?")[0] == first
        # What fails leaves the images with the message.
        page.set_input_files("#files", files[:1])
        expect_error(page, "context", prompt="and " * 5000)
        sync_api.expect(shown).to_have_count(1)
        page.select_option("#model", "plain")
        sync_api.expect(attach).to_be_hidden()
        sync_api.expect(shown).to_be_hidden()
