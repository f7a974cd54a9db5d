"""The page of `qsample web` in a real browser: its texts are Python's, its errors are clear, and anybody can use it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

import qsample
from qsample import AutoModelForCausalLM
from qsample.addons.serve.web import WebServer
from qsample.package.package import read_package
from qsample.runtime import CausalLM, load
from tests.conftest import made_once
from tests.helpers.browsers import WIDE_MARKDOWN, check_readable, open_browser, pages, tab_order

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="pip install playwright; the page needs a browser"
)
pytestmark = pytest.mark.slow

WEB = Path(__file__).parents[2] / "examples" / "web"
BUNDLED = Path(qsample.__file__).parent / "assets" / "tiny_lm"
SWIFTSHADER = (
    "--enable-unsafe-webgpu",
    "--use-webgpu-adapter=swiftshader",
    "--enable-features=Vulkan,WebGPUService",
)
PROMPT = "And the LORD spake unto"
SEED = 2**53 + 1  # no exact number of JavaScript
PATIENCE = 300_000  # milliseconds: a GPU in software is slow


@pytest.fixture(scope="module")
def page_folder(shared_folder: Path) -> Path:
    """The page, built from its sources."""
    if shutil.which("npx") is None or not (WEB / "node_modules").is_dir():
        pytest.skip("needs Node, and npm --prefix examples/web ci")

    def build(folder: Path) -> None:
        command = ["npx", "vite", "build", "--outDir", folder, "--logLevel", "error"]
        built = subprocess.run(command, cwd=WEB, capture_output=True, text=True, check=False)
        assert built.returncode == 0, built.stderr

    return made_once(shared_folder / "built-page", build)


@pytest.fixture(scope="module")
def package(shared_folder: Path) -> Path:
    features = {"logprobs": True, "top_logprobs": 5}
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, **features)
    return made_once(shared_folder / "tiny_lm-for-the-page", model.export)


@pytest.fixture(scope="module")
def compiled(package: Path, shared_folder: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(package)
    return made_once(
        shared_folder / "tiny_lm-for-the-page-cpu", lambda path: model.compile(path, ctx_len=128)
    )


@pytest.fixture(scope="module")
def float32_package(shared_folder: Path) -> Path:
    """The bundled model with its weights in float32: its own float16 needs a GPU that has it."""
    import torch
    import transformers

    def make(path: Path) -> None:
        checkpoint = path.with_name("tiny_lm-float32")
        transformers.AutoModelForCausalLM.from_pretrained(
            BUNDLED, dtype=torch.float32
        ).save_pretrained(checkpoint)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(BUNDLED / name, checkpoint)
        AutoModelForCausalLM.from_pretrained(checkpoint, logprobs=True, top_logprobs=5).export(path)

    return made_once(shared_folder / "tiny_lm-float32-package", make)


@pytest.fixture(scope="module")
def model(package: Path) -> CausalLM:
    return load(package, intra_op_num_threads=1)


@pytest.fixture(scope="module")
def serve(page_folder: Path) -> Iterator[Callable[[Path], str]]:
    """(package) → the address of a server."""
    with ExitStack() as stack:

        def start(folder: Path) -> str:
            server = stack.enter_context(WebServer(read_package(folder), port=0, page=page_folder))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            return server.url

        yield start


@pytest.fixture(scope="module")
def url(serve: Callable[[Path], str], package: Path) -> str:
    return serve(package)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    with pages(browser) as make:
        yield make


def ready(page: Any) -> Any:
    """The page with the package open, or an error shown."""
    sync_api.expect(page.locator("#go")).to_have_text(re.compile("Generate|Send"), timeout=PATIENCE)
    return page


def finished(page: Any, count: int = 1) -> str:
    """The newest text, once there are `count`."""
    ready(page)
    assert page.locator("#note.error").all_inner_texts() == []
    sync_api.expect(page.locator("article[aria-busy=false]:visible")).to_have_count(count)
    return str(page.locator("article:visible .answer").last.text_content())


def words(text: str | None) -> list[str]:
    """Of a text, whose lines and paragraphs a page shows in its own way."""
    return (text or "").split()


def link(url: str, prompt: str, **params: object) -> str:
    off = {"temperature": 1, "topK": 0, "topP": 1, "minP": 0, "maxNewTokens": 24, "seed": SEED}
    return f"{url}/#{urlencode({'prompt': prompt, **off, **params})}"


def expected(model: CausalLM, prompt: str | list[int], **params: Any) -> str:
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 24, "seed": SEED}
    texts = model.generate(prompt, **{**options, **params}).texts
    assert texts is not None
    return texts[0]


def test_a_link_writes_pythons_text(
    open_page: Callable[..., Any],
    url: str,
    compiled: Path,
    serve: Callable[[Path], str],
    model: CausalLM,
) -> None:
    page = open_page(
        link(url, PROMPT, temperature=0.85, topP=0.92, minP=0.02, repetitionPenalty=1.1)
    )
    text = finished(page)
    params = {"temperature": 0.85, "top_p": 0.92, "min_p": 0.02, "repetition_penalty": 1.1}
    assert text == expected(model, PROMPT, **params)
    sync_api.expect(page.locator("#about")).to_have_text(
        re.compile(r"^tiny_lm, \d+ MB, on WebAssembly$")
    )
    sync_api.expect(page.locator("#remark")).to_contain_text("this browser")
    assert page.evaluate("crossOriginIsolated") is True
    # All sliders count, and the link under the text is all that it takes.
    for name, value in {"topK": "7", "presencePenalty": "0.5", "frequencyPenalty": "0.25"}.items():
        page.locator(f"#{name}").fill(value)
    page.click("#go")
    text = finished(page, 2)
    params |= {"top_k": 7, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    assert text == expected(model, PROMPT, **params)
    facts = page.locator("article footer").last.inner_text()
    assert re.match(
        rf"24 tokens, [\d.]+ a second, the first after \d+ ms, cut off by the limit of 24 tokens\. Seed {SEED}\b",
        facts,
    )
    address = page.locator("article a").last.get_attribute("href")
    assert finished(open_page(f"{url}/{address}")) == text
    # A package with a fixed context, and a link of another package.
    other = open_page(f"{serve(compiled)}/{address}")
    assert finished(other) == text
    sync_api.expect(other.locator("#note")).to_contain_text("another package")


def test_bars_show_the_models_own_probabilities(
    open_page: Callable[..., Any], url: str, model: CausalLM
) -> None:
    page = open_page(link(url, PROMPT, temperature=1.5))
    finished(page)
    output = model.generate(
        PROMPT, temperature=1.5, top_k=0, top_p=1.0, max_new_tokens=24, seed=SEED
    )
    length = output.sequences.shape[1] - 24
    for place in (24, 3):
        page.locator("#place").fill(str(place))
        sync_api.expect(page.locator("#place-name")).to_have_text(f"Token {place} of 24")
        rows = [row.split("\n") for row in page.locator("#bars li").all_inner_texts()]
        drawn = [row for row in rows if row[0] == "●"]
        token = output.sequences[0, length + place - 1]
        assert len(drawn) == 1
        assert model.tokenizer is not None
        assert drawn[0][1] == model.tokenizer.decode([int(token)]).join('""').replace("\n", "\\n")
        shares = [float(row[-1].removesuffix(" %")) for row in rows[:5]]
        assert shares == sorted(shares, reverse=True)
        likeliest = 100 * 2.718281828459045 ** output.top_logprobs[0, place - 1]
        assert shares == pytest.approx(likeliest.tolist(), abs=0.5)
        widths = "bars => bars.map(bar => 100 * bar.clientWidth / bar.parentElement.clientWidth)"
        assert page.locator("#bars .bar").evaluate_all(widths)[:5] == pytest.approx(shares, abs=1.5)


def test_a_conversation_and_its_link(
    open_page: Callable[..., Any], url: str, model: CausalLM
) -> None:
    page = ready(open_page(url))
    sync_api.expect(page.locator("#as-chat")).to_be_checked()
    said = [{"role": "system", "content": "Be brief."}]
    page.fill("#system", "Be brief.")
    page.fill("#seed", str(SEED))
    page.fill("#maxNewTokens", "8")
    for turn, text in enumerate(("<b>Who</b> art thou?", "And whither?"), 1):
        said.append({"role": "user", "content": text})
        page.fill("#prompt", text)
        page.press("#prompt", "Enter")
        answer = finished(page, turn)
        params = {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "max_new_tokens": 8, "seed": SEED}
        texts = model.generate(said, **params).texts
        assert texts is not None
        assert words(answer) == words(texts[0])
        said.append({"role": "assistant", "content": texts[0]})
    again = open_page(f"{url}/{page.locator('article a').last.get_attribute('href')}")
    assert finished(again, 2) == answer
    # A turn that is taken back can be sent again.
    page.click("#back")
    sync_api.expect(page.locator("#prompt")).to_have_value("And whither?")
    page.click("#go")
    assert finished(page, 2) == answer


def test_a_chat_may_fill_the_context(
    open_page: Callable[..., Any], serve: Callable[[Path], str], compiled: Path, model: CausalLM
) -> None:
    page = ready(open_page(serve(compiled)))
    page.fill("#seed", str(SEED))
    page.locator("#temperature").fill("2")
    prompt = page.locator("#prompt")
    prompt.type("Who")
    prompt.press("Shift+Enter")
    for composing in ({"isComposing": True}, {"keyCode": 229}):  # an input method's Enter; Safari's
        prompt.dispatch_event(
            "keydown", {"key": "Enter", "bubbles": True, "cancelable": True, **composing}
        )
    prompt.type("art thou?")
    sync_api.expect(prompt).to_have_value("Who\nart thou?")
    sync_api.expect(page.locator("article")).to_have_count(0)
    prompt.press("Enter")
    params = {"temperature": 2.0, "top_k": 0, "top_p": 0.95, "seed": SEED, "max_length": 128}
    output = model.generate([{"role": "user", "content": "Who\nart thou?"}], **params)
    assert output.texts is not None
    assert output.finish_reasons[0] == "length"  # of more than the text mode's 100 tokens
    text = finished(page)
    assert words(text) == words(output.texts[0])
    sync_api.expect(page.locator("article footer")).to_contain_text(
        "cut off by the end of the context"
    )
    address = page.locator("article a").get_attribute("href")
    again = open_page(f"{page.url}{address}")
    assert finished(again) == text
    sync_api.expect(again.locator("#maxNewTokens")).to_have_value("")


def test_answers_are_markdown_and_harm_nobody(open_page: Callable[..., Any], url: str) -> None:
    answer = "# Title\n\n**Bold**, [a](https://example.org/), [b](javascript:window.harmed=1)\n\n```\n<b>\n```\n"
    answer += "<img src=x onerror='window.harmed=1'>"
    said = [{"role": "user", "content": "**Hear**"}, {"role": "assistant", "content": answer}]
    messages = json.dumps([*said, {"role": "user", "content": "And?"}])
    page = open_page(f"{url}/#{urlencode({'messages': messages, 'maxNewTokens': 4})}")
    finished(page, 2)
    assert page.locator(".given").first.inner_text() == "**Hear**"
    shown = page.locator(".answer").first
    sync_api.expect(shown.locator("h1")).to_have_text("Title")
    sync_api.expect(shown.locator("strong")).to_have_text("Bold")
    sync_api.expect(shown.locator("pre")).to_have_text("<b>")
    addresses = shown.locator("a").evaluate_all(
        "links => links.map(link => [link.href, link.target, link.rel])"
    )
    assert addresses == [["https://example.org/", "_blank", "noopener noreferrer"]]
    sync_api.expect(shown.locator("img")).to_have_count(0)
    assert page.evaluate("window.harmed") is None


def test_answers_follow_a_form(
    open_page: Callable[..., Any],
    serve: Callable[[Path], str],
    shared_folder: Path,
    url: str,
    tmp_path: Path,
) -> None:
    """The form is a file of `qsample grammar`; the answers are Python's, and the next text is free again."""
    source = AutoModelForCausalLM.from_pretrained(BUNDLED, grammars=True)
    package = made_once(shared_folder / "tiny_lm-with-grammars", source.export)
    model = load(package, intra_op_num_threads=1)
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    grammar = model.grammar(json=schema)
    file, damaged = tmp_path / "age.safetensors", tmp_path / "damaged.safetensors"
    grammar.save(file)
    damaged.write_bytes(file.read_bytes()[:-1])
    page = open_page(link(serve(package), PROMPT, temperature=1.5))
    free = finished(page)
    assert free == expected(model, PROMPT, temperature=1.5)
    sync_api.expect(page.locator("#no-grammar")).to_be_hidden()

    page.set_input_files("#grammar", file)
    page.click("#go")
    answer = finished(page, 2)
    assert answer == expected(model, PROMPT, temperature=1.5, grammar=grammar)
    assert list(json.loads(answer)) == ["age"]
    facts = page.locator("article footer").last
    sync_api.expect(facts).to_contain_text("ended by stop")
    sync_api.expect(facts.locator("a")).to_have_count(0)

    page.fill("#maxNewTokens", str(grammar.shortest - 1))
    page.click("#go")
    error = page.locator("#note.error")
    sync_api.expect(error).to_contain_text(f"allow at least {grammar.shortest}")
    page.set_input_files("#grammar", damaged)
    page.click("#go")
    sync_api.expect(error).to_contain_text("copy all of it")
    page.fill("#maxNewTokens", "24")
    page.click("#no-grammar")
    sync_api.expect(page.locator("#grammar")).to_be_focused()
    page.click("#go")
    assert finished(page, 3) == free

    without_grammars = ready(open_page(url))
    sync_api.expect(without_grammars.locator("#grammar")).to_be_hidden()


def test_a_model_without_a_chat_template_writes_texts(
    open_page: Callable[..., Any],
    serve: Callable[[Path], str],
    float32_package: Path,
    model: CausalLM,
) -> None:
    page = ready(open_page(serve(float32_package)))
    sync_api.expect(page.locator("#as-text")).to_be_checked()
    sync_api.expect(page.locator("#as-chat")).to_be_disabled()
    sync_api.expect(page.locator("#no-chat")).to_be_visible()
    page.fill("#prompt", "In the")
    page.press("#prompt", "Enter")
    sync_api.expect(page.locator("#prompt")).to_have_value("In the\n")
    page.press("#prompt", "Control+Enter")
    finished(page)
    sync_api.expect(page.locator("article footer")).to_contain_text(
        "cut off by the limit of 100 tokens"
    )


def test_a_text_is_stopped_and_spoken_once(open_page: Callable[..., Any], url: str) -> None:
    page = ready(open_page(url))
    page.check("#as-text")
    page.fill("#prompt", PROMPT)
    page.evaluate("""() => {
        window.spoken = [];
        const watch = (id, heard) => new MutationObserver(heard)
            .observe(document.getElementById(id), { childList: true, subtree: true, characterData: true });
        watch("spoken", () => spoken.push(document.getElementById("spoken").textContent));
        watch("texts", () => { if (document.querySelector(".answer")?.textContent.length > 20)
            document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true })); });
    }""")
    live = page.locator("[aria-live], [role=status], [role=alert], [role=log]")
    assert [live.nth(index).get_attribute("id") for index in range(live.count())] == ["spoken"]
    page.fill("#maxNewTokens", "400")
    page.press("#prompt", "Control+Enter")
    sync_api.expect(page.locator("#note")).to_have_text("Stopped", timeout=PATIENCE)
    text = finished(page)
    assert 20 < len(text) < 300
    assert page.evaluate("spoken") == ["Generating", f"{text}\nStopped"]
    page.wait_for_timeout(300)
    assert page.locator(".answer").text_content() == text


def test_damaged_and_missing_parts_and_no_gpu(
    open_page: Callable[..., Any],
    package: Path,
    serve: Callable[[Path], str],
    tmp_path: Path,
    model: CausalLM,
) -> None:
    copy = tmp_path / "package"
    shutil.copytree(package, copy)
    url = serve(copy)
    data = copy / "decoder.onnx.data"
    content = data.read_bytes()
    data.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    page = open_page(link(url, PROMPT))
    error = page.locator("#note.error")
    sync_api.expect(error).to_contain_text("decoder.onnx.data", timeout=PATIENCE)
    sync_api.expect(error).to_contain_text("damaged")
    sync_api.expect(page.locator("#spoken")).to_contain_text("damaged")
    data.unlink()
    page.click("#go")
    sync_api.expect(error).to_contain_text("404", timeout=PATIENCE)
    # The page is usable: with the part in its place, the next text is written.
    data.write_bytes(content)
    page.click("#go")
    assert finished(page) == expected(model, PROMPT)
    # WebGPU, where there is none.
    page.select_option("#device", "webgpu")
    sync_api.expect(error).to_contain_text("WebGPU", timeout=PATIENCE)
    page.select_option("#device", "wasm")
    sync_api.expect(page.locator("#about")).to_contain_text("on WebAssembly", timeout=PATIENCE)
    page.click("#go")
    assert finished(page, 2) == expected(model, PROMPT)


def test_webgpu_and_a_lost_device(
    float32_package: Path, serve: Callable[[Path], str], browser: Any, model: CausalLM
) -> None:
    with open_browser(*SWIFTSHADER, beside=browser) as gpu, pages(gpu) as make:
        page = make(link(serve(float32_package), PROMPT, temperature=0.8, maxNewTokens=8))
        text = finished(page)
        if "no adapter" in page.inner_text("#remark"):
            pytest.skip("this browser has no SwiftShader")
        sync_api.expect(page.locator("#about")).to_contain_text(re.compile("on WebGPU$"))
        assert text == expected(model, PROMPT, temperature=0.8, max_new_tokens=8)
        # The process of the GPU dies while the model writes; another one takes its place.
        page.fill("#maxNewTokens", "200")
        page.click("#go")
        sync_api.expect(page.locator(".answer").last).not_to_be_empty(timeout=PATIENCE)
        gpu.new_browser_cdp_session().send("Browser.crashGpuProcess")
        sync_api.expect(page.locator("#note.error")).to_contain_text("lost", timeout=PATIENCE)
        page.fill("#maxNewTokens", "8")
        page.click("#go")
        ready(page)
        assert page.locator(".answer").last.text_content() == text


def test_too_little_memory(url: str, browser: Any) -> None:
    with (
        open_browser("--js-flags=--wasm-max-mem-pages=320", beside=browser) as small,
        pages(small) as make,
    ):
        page = ready(make(url))
        sync_api.expect(page.locator("#note.error")).to_contain_text(
            "too little memory", timeout=PATIENCE
        )
        sync_api.expect(page.locator("#go")).to_be_enabled()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_everything_can_be_seen_read_and_touched(
    open_page: Callable[..., Any], url: str, width: int, scheme: str
) -> None:
    page = open_page(
        link(url, PROMPT),
        viewport={"width": width, "height": 640},
        color_scheme=scheme,
        reduced_motion="reduce",
    )
    finished(page)
    if width < 900:
        sync_api.expect(page.locator("#seed")).to_be_hidden()
        page.click("#settings summary")
    page.evaluate(
        "document.querySelector('article').setAttribute('aria-busy', 'true')"
    )  # as while it writes
    assert page.evaluate("document.getAnimations().length") == 0
    sliders = {
        "temperature",
        "topK",
        "topP",
        "minP",
        "repetitionPenalty",
        "presencePenalty",
        "frequencyPenalty",
        "place",
    }
    others = {
        "device",
        "maxNewTokens",
        "seed",
        "prompt",
        "go",
        "clear",
        "Use this seed",
        "Link to this text",
    }
    assert check_readable(page, width) >= sliders | others
    page.fill("#prompt", "and " * 5000)
    page.evaluate("document.querySelector('article').setAttribute('aria-busy', 'false')")
    page.click("#go")
    sync_api.expect(page.locator("#note.error")).to_contain_text("tokens", timeout=PATIENCE)
    check_readable(page, width)
    said = [{"role": "user", "content": "Hear"}, {"role": "assistant", "content": WIDE_MARKDOWN}]
    messages = json.dumps([*said, {"role": "user", "content": "And?"}])
    page.goto(f"{url}/#{urlencode({'messages': messages, 'maxNewTokens': 4})}")
    sync_api.expect(page.locator(".markdown :is(pre, .table)")).to_have_count(2, timeout=PATIENCE)
    ready(page)  # with an error: this conversation has too many tokens, too
    assert check_readable(page, width) >= {"Copy", "system"}
    sync_api.expect(page.locator(".choice")).to_be_visible()


def test_the_keyboard_is_enough(open_page: Callable[..., Any], url: str, model: CausalLM) -> None:
    page = ready(open_page(url))
    fields = [
        "system",
        "maxNewTokens",
        "seed",
        "temperature",
        "topK",
        "topP",
        "minP",
        "repetitionPenalty",
    ]
    fields += ["presencePenalty", "frequencyPenalty", "prompt"]
    assert tab_order(page, 15) == ["as-chat", "device", "Settings", *fields, "go"]
    for name in ["device", *fields, "place"]:
        assert page.locator(f"#{name}").evaluate("element => element.labels.length") == 1, name
    page.focus("#temperature")
    for _ in range(10):
        page.keyboard.press("ArrowLeft")
    sync_api.expect(
        page.locator("#temperature + output, label:has(#temperature) output")
    ).to_have_text("0.7")
    page.focus("#as-chat")
    page.keyboard.press("ArrowRight")
    page.fill("#prompt", PROMPT)
    page.fill("#seed", "3")
    page.fill("#maxNewTokens", "8")
    page.focus("#go")
    page.keyboard.press("Enter")
    assert finished(page) == expected(
        model, PROMPT, temperature=0.7, top_p=0.95, seed=3, max_new_tokens=8
    )
    assert page.evaluate("document.activeElement.id") == "go"
