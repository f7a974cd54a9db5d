"""`qsample chat`: a conversation through a pipe and on a terminal."""

from __future__ import annotations

import io
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper

from qsample.cli.chat import Conversation, TurnError
from qsample.errors import install_hint
from qsample.package.package import Package
from qsample.runtime import CausalLM, Engine, load
from tests.helpers.command_line import ROOT
from tests.helpers.fake_package import CHAT_TEMPLATE, EOS, POISON, VOCAB, fake_package

SETTINGS = ["--seed", "3", "--max-new-tokens", "9"]


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return fake_package(tmp_path / "package")


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any], Any]]:
    """Every conversation that was given to an engine, with its options and its request."""
    seen: list[tuple[Any, dict[str, Any], Any]] = []
    add_request = Engine.add_request

    def spy(self: Engine, inputs: Any, *arguments: Any, **options: Any) -> Any:
        request = add_request(self, inputs, *arguments, **options)
        seen.append((json.loads(json.dumps(inputs, default=str)), options, request))
        return request

    monkeypatch.setattr(Engine, "add_request", spy)
    return seen


@pytest.mark.ci
def test_images_of_a_conversation(
    say: Any, smolvlm_package: Path, requests: list[tuple[Any, dict[str, Any], Any]], tmp_path: Path
) -> None:
    from tests.helpers.tiny_vlms import picture

    one, two = tmp_path / "a.png", tmp_path / "b.png"
    picture(30, 20).save(one)
    picture(48, 20).save(two)
    saved = tmp_path / "saved.json"
    lines = f"hello\n/image {two}\n/image {tmp_path}/none.png\nwhat\n/retry\n/save {saved}\n"
    status, _, err = say(lines, "--image", one, path=smolvlm_package)
    assert (status, "1 image for the next message" in err, "none.png' cannot be read" in err) == (
        1,
        True,
        True,
    )
    turns = json.loads(saved.read_text())["messages"]

    def user(file: Path, text: str) -> dict[str, Any]:
        return {
            "role": "user",
            "content": [{"type": "image", "image": str(file)}, {"type": "text", "text": text}],
        }

    assert turns[::2] == [user(one, "hello"), user(two, "what")]
    model = load(smolvlm_package, ctx_len=512)
    whole = model.generate(turns[:3], max_new_tokens=9, seed=4)  # /retry takes the next seed
    assert requests[-1][2].result().token_ids == whole.token_ids[0]
    assert requests[-1][2].prompt_tokens == whole.prompt_lengths[0]
    # A conversation that was saved goes on.
    status, _, err = say(f"/load {saved}\nand\n", path=smolvlm_package)
    assert status == 0, err


@pytest.fixture
def say(run: Any, package: Package, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pipe lines into a chat; (status, stdout, stderr)."""

    def pipe(lines: str, *arguments: Any, path: Path = package.path) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        result: tuple[int, str, str] = run("chat", path, *SETTINGS, *arguments)
        return result

    return pipe


def test_lines_of_windows(say: Any) -> None:
    assert say("\ufeffhello\r\nmore\\\r\nof it\r\n")[:2] == say("hello\nmore\\\nof it\n")[:2]


def answer(model: CausalLM, messages: list[Any], **options: Any) -> str:
    texts = model.generate(messages, **{"seed": 3, "max_new_tokens": 9, **options}).texts
    assert texts is not None
    return str(texts[0])


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_line_is_a_turn_and_nothing_is_read_twice(
    say: Any, package: Package, requests: list[Any]
) -> None:
    status, out, err = say("hello\n\n  \nand more", "--system", "be kind")
    model = load(package.path)
    system = {"role": "system", "content": "be kind"}
    first = answer(model, [system, user("hello")])
    history = [system, user("hello"), assistant(first), user("and more")]
    second = answer(model, history)
    assert status == 0
    assert out == f"{first}\n{second}\n"
    assert [messages for messages, _, _ in requests] == [[system, user("hello")], history]
    begun = requests[0][2].result().usage
    assert requests[1][2].result().usage.cached_tokens >= begun.prompt_tokens
    assert re.search(
        r"^9 tokens, \d+ a second, seed 3; \d+ of 256 tokens of context", err, re.MULTILINE
    )
    assert "/set max_new_tokens gives more" in err


def test_options_reach_the_engine_and_the_template(
    say: Any, requests: list[Any], tmp_path: Path
) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages[-1].content }}{{ enable_thinking }}{{ depth }}")
    flags = [
        "--temperature",
        "0.5",
        "--top-k",
        "7",
        "--stop-string",
        "zz",
        "--stop-id",
        "5",
        "--no-thinking",
    ]
    status, _, err = say(
        "hi", *flags, "--chat-template", template, "--chat-template-kwargs", '{"depth": 3}'
    )
    assert status == 0, err
    _, options, _ = requests[0]
    assert options == {
        "max_new_tokens": 9,
        "outputs": (),
        "seed": 3,
        "temperature": 0.5,
        "top_k": 7,
        "stop_strings": ("zz",),
        "eos_token_id": [5],
        "chat_template": template.read_text(),
        "chat_template_kwargs": {"depth": 3, "enable_thinking": False},
    }
    assert "no switch for thinking" not in err
    assert "no switch for thinking" in say("", "--thinking")[2]
    template.write_text("{{ messages[-1].content }}")
    assert (
        "leaves the system prompt out" in say("", "--system", "S", "--chat-template", template)[2]
    )


def test_an_answer_continues_to_the_end_of_the_context_by_default(
    run: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    path = fake_package(
        tmp_path / "endless", generation_config={"eos_token_id": []}, manifest={}
    ).path
    monkeypatch.setattr("sys.stdin", io.StringIO(f"hello\n{'x' * 64}\n/reset\n"))
    status, _, err = run("chat", path, "--ctx-len", "64", "--stop-id", "299")
    assert (
        "64 of 64 tokens of context. The context is full, and the answer ends there; --ctx-len gives more"
        in err
    )
    assert re.search(
        r"the message has \d+ tokens with its template and the context 64, so this was not added",
        err,
    )
    assert "the conversation is empty" in err
    assert status == 1
    assert err.splitlines()[-1] == "qsample: lines of standard input that could not be answered: 1"
    path = fake_package(tmp_path / "short", generation_config={"max_new_tokens": 5}).path
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert "5 tokens, " in run("chat", path, "--stop-id", "299")[2], (
        "the model's own settings say how long"
    )


def test_commands(say: Any, package: Package, requests: list[Any], tmp_path: Path) -> None:
    saved = tmp_path / "conversation.json"
    lines = [
        "/system be kind",
        "hello",
        "/retry",
        "/retry",
        f"/save {saved}",
        "/reset",
        "again",
        "/system -",
        "/set top-k 4",
        "/set seed null",
        "/set seed 9",
        "/set seed None",
        "/set seed 8",
        "once more",
        f"/load {saved}",
        f"/save {saved}",
        "/stats",
        "/help",
        "/exit",
        "never said",
    ]
    status, _, err = say("\n".join(lines))
    assert status == 0, err
    system = {"role": "system", "content": "be kind"}
    model = load(package.path)
    last = answer(model, [system, user("hello")], seed=5)
    again = answer(model, [system, user("again")])
    assert [options["seed"] for _, options, _ in requests] == [3, 4, 5, 3, 8], (
        "another answer to the same question"
    )
    assert [messages for messages, _, _ in requests] == [
        [system, user("hello")],
        [system, user("hello")],
        [system, user("hello")],
        [system, user("again")],
        [user("again"), assistant(again), user("once more")],
    ]
    assert (requests[-1][1]["top_k"], requests[-1][1]["seed"]) == (4, 8)
    assert json.loads(saved.read_text()) == {"messages": [system, user("hello"), assistant(last)]}
    assert [path.name for path in tmp_path.iterdir() if "conversation" in path.name] == [
        "conversation.json"
    ]
    assert "system prompt: none" in err
    assert "max_new_tokens 9, top_k 4, seed 8; the rest is the model's own" in err
    assert "5 answers, 45 tokens in " in err
    assert "ctrl-C stops an answer" in err


def test_commands_that_fail_change_nothing(say: Any, requests: list[Any], tmp_path: Path) -> None:
    existing, bad = tmp_path / "existing", tmp_path / "bad.json"
    existing.write_text("mine")
    bad.write_text('{"messages": [{"role": "user"}]}')
    wrong = {
        "/nonsense": "/nonsense is not a command; /help lists them",
        "/retry": "the conversation has no question to answer again",
        "/save": "name a file",
        f"/save {existing}": f"{existing} exists; give another file",
        f"/save {tmp_path}/no/file": "cannot write",
        f"/load {existing}": "does not hold a conversation",
        f"/load {bad}": "does not hold a conversation: chat message 0 (user) has no content",
        f"/load {tmp_path}/missing": "cannot read",
        "/set top_p 7": "top_p is 7",
        "/set warmth 7": "unknown sampling option 'warmth'",
        "/set top_p high": "top_p is 'high'; give a number",
        "/set top_k": "/set top_k has no value; give one, or null for the model's own",
    }
    status, out, err = say("\n".join(wrong) + "\n/etc/hosts is a file\n")
    assert status == 1
    for message in wrong.values():
        assert message in err
    assert f"could not be answered: {len(wrong)}" in err
    assert [messages for messages, _, _ in requests] == [[user("/etc/hosts is a file")]]
    assert "top_p" not in requests[0][1]
    assert existing.read_text() == "mine"
    assert out.count("\n") >= 1


def test_texts_of_several_lines(say: Any, requests: list[Any]) -> None:
    say('one\\\ntwo\n"""three\n\n /four\n"""\n"""five"""\n"""six\nseven')
    assert [messages[-1]["content"] for messages, _, _ in requests] == [
        "one\ntwo",
        "three\n\n /four",
        "five",
        "six\nseven",
    ]


def test_a_conversation_goes_on_when_the_context_is_full(
    say: Any, package: Package, tmp_path: Path, requests: list[Any]
) -> None:
    """The oldest turns are left out, whole ones and no more than needed; the file has them all."""
    saved, questions = tmp_path / "conversation.json", [str(number) * 12 for number in range(8)]
    status, out, err = say(
        "\n".join([*questions, f"/save {saved}"]), "--system", "S", "--ctx-len", "128"
    )
    messages = json.loads(saved.read_text())["messages"]
    assert [message["content"] for message in messages if message["role"] == "user"] == questions
    sent = [messages for messages, _, _ in requests]
    left_out = [2 * number + 2 - len(messages) for number, messages in enumerate(sent)]
    assert left_out == sorted(left_out)
    assert left_out[0] == 0 < left_out[-1]
    model = load(package.path, ctx_len=128)
    assert model.tokenizer is not None
    for number, (seen, missing) in enumerate(zip(sent, left_out, strict=True)):
        until = 2 * number + 2
        assert seen == [messages[0], *messages[1 + missing : until]]
        if missing:
            more = [messages[0], *messages[missing - 1 : until]]
            assert (
                len(model.tokenizer.encode_chat(more)) + 9
                > 128
                >= len(model.tokenizer.encode_chat(seen)) + 9
            )
    assert (status, out.splitlines()[-1]) == (0, answer(model, sent[-1]).splitlines()[-1])
    assert (
        f"the model no longer sees the oldest {left_out[-1]} messages; /save keeps them all" in err
    )


def test_a_loaded_conversation_is_answered_as_in_a_new_chat(
    package: Package, requests: list[Any]
) -> None:
    """Whatever was said before: a system prompt, a full context, answers that were given again."""
    model = load(package.path, ctx_len=128)
    options = {"seed": 3, "max_new_tokens": 9}
    saved = [
        [user("one"), assistant("two")],
        [{"role": "system", "content": "S"}, user("one"), assistant("two"), user("three")],
        [user("a" * 20), assistant("b" * 20), user("c" * 20), assistant("d" * 20)],
    ]
    with Engine(model, slots=1) as engine:
        used = Conversation(model, engine, options, {}, system="be kind")
        for said in saved:
            for number in range(8):
                used.ask(str(number) * 12, lambda text: None)
            used.ask(None, lambda text: None)
            used.ask(None, lambda text: None)
            assert used.forgotten
            asked = len(requests)
            new = Conversation(model, engine, options, {})
            for conversation in (used, new):
                conversation.start_with(said)
                for text in (None, "and", None):
                    conversation.ask(text, lambda text: None)
            again, plain = requests[asked : asked + 3], requests[asked + 3 :]
            assert [one[:2] for one in again] == [one[:2] for one in plain]
            assert [one[2].result().token_ids for one in again] == [
                one[2].result().token_ids for one in plain
            ]
            assert (used.messages, used.forgotten) == (new.messages, new.forgotten)


def test_a_question_that_fails_does_not_count_the_answers_anew(
    package: Package, requests: list[Any]
) -> None:
    """The answer that is given again after it has a seed of its own."""
    model = load(package.path, ctx_len=128)
    with Engine(model, slots=1) as engine:
        conversation = Conversation(model, engine, {"seed": 3, "max_new_tokens": 9}, {})
        for text in ("hello", None, None, "x" * 300, None):
            with suppress(TurnError):
                conversation.ask(text, lambda text: None)
    assert [options["seed"] for _, options, _ in requests] == [3, 4, 5, 6]


def test_a_question_that_does_not_fit_forgets_nothing(say: Any, requests: list[Any]) -> None:
    status, _, err = say(
        f"one\n{'x' * 100}\n{'y' * 200}\ntwo", "--max-new-tokens", "2", "--ctx-len", "192"
    )
    assert (status, "so this was not added" in err) == (1, True)
    asked = [
        [message["content"] for message in seen if message["role"] == "user"]
        for seen, _, _ in requests
    ]
    assert asked == [["one"], ["one", "x" * 100], ["one", "x" * 100, "two"]]


def test_a_saved_conversation_that_waits_for_an_answer(
    say: Any, package: Package, tmp_path: Path
) -> None:
    saved = tmp_path / "conversation.json"
    saved.write_text(json.dumps([user("hello")]))
    _, out, err = say(f"/load {saved}\n/retry\n")
    assert "1 message; /retry answers the last" in err
    assert out == answer(load(package.path), [user("hello")]) + "\n"


def test_a_missing_library_is_reported_before_a_model_is_looked_for(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    from qsample.request.text.jinja_template import compile_template

    compile_template.cache_clear()
    status, _, err = run("chat", "no-such")
    assert status == 1
    assert f"`{install_hint('chat')}`" in err


def test_a_missing_library_is_reported_for_a_prompt_too(
    run: Any, package: Package, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    from qsample.request.text.jinja_template import compile_template

    compile_template.cache_clear()
    (tmp_path / "prompts").write_text("x\n")
    for prompts in (["-p", "x"], ["--prompt-file", tmp_path / "prompts"]):
        status, out, err = run("generate", package.path, *prompts, *SETTINGS)
        assert (status, out) == (1, "")
        assert f"`{install_hint('chat')}`, or give plain text (`qsample generate --raw`)" in err
        assert run("generate", package.path, *prompts, "--raw", *SETTINGS)[0] == 0


def test_an_answer_that_is_empty(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def only_the_end(graph: Any) -> None:
        (bias,) = (tensor for tensor in graph.graph.initializer if tensor.name == "head_bias")
        values = np.zeros(VOCAB, np.float32)
        values[EOS] = 1e4
        bias.CopyFrom(numpy_helper.from_array(values, "head_bias"))

    path = fake_package(tmp_path / "silent", edit=only_the_end).path
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    status, out, err = run("chat", path, *SETTINGS)
    assert (status, out) == (0, "\n")
    assert "1 token, " in err
    assert "The answer is empty: the model ended it at once" in err


@pytest.mark.parametrize("text", ["more", None])
def test_an_answer_that_is_stopped_before_it_begins(text: str | None, package: Package) -> None:
    class Stopped:
        def __iter__(self) -> Iterator[Any]:
            raise KeyboardInterrupt

        def cancel(self) -> None:
            pass

        def result(self) -> Any:
            return SimpleNamespace(finish_reason="cancelled", text="")

    engine: Any = SimpleNamespace(capacity=256, add_request=lambda *_, **__: Stopped())
    conversation, said = (
        Conversation(load(package.path), engine, {}, {}),
        [user("hello"), assistant("hi")],
    )
    conversation.start_with(said)
    with pytest.raises(KeyboardInterrupt):
        conversation.ask(text, print)
    assert (conversation.turns, conversation.answers) == (said, 0), "the conversation is as it was"


def test_a_model_that_gives_nan(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    real = Engine.add_request
    monkeypatch.setattr(
        Engine, "add_request", lambda self, *_, **options: real(self, [POISON], max_new_tokens=3)
    )
    status, _, err = run("chat", fake_package(tmp_path / "package").path)
    assert status == 1
    assert "NaN" in err


class Terminal:
    """A command on a pseudo-terminal of its own."""

    def __init__(self, command: list[str], **variables: str) -> None:
        import fcntl
        import pty
        import termios

        self._master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "PYTHONUNBUFFERED": "1", **variables}
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.seen = ""

    def send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, pattern: str, seconds: float = 90) -> str:
        """What came up to the pattern, which is taken off."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen)):
            ready, _, _ = select.select(
                [self._master], [], [], max(0.0, deadline - time.monotonic())
            )
            assert ready, f"{pattern!r} did not come: {self.seen!r}"
            try:
                self.seen += os.read(self._master, 65536).decode("utf-8", "replace")
            except OSError as error:
                raise AssertionError(f"it ended: {self.seen!r}") from error
        before, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return before

    def interrupt(self, pattern: str) -> None:
        """ctrl-C until the pattern comes: one that comes before the terminal is read again waits
        for the next key."""
        for _ in range(30):
            self.send("\x03")
            with suppress(AssertionError):
                self.until(pattern, 3)
                return
        raise AssertionError(f"{pattern!r} did not come: {self.seen!r}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    pytest.importorskip("pty")
    package = fake_package(
        tmp_path / "package", tokenizer_config={"chat_template": CHAT_TEMPLATE, "bos_token": "<s>"}
    )
    slow = (
        "import time; from qsample.runtime.request import Request; update = Request.update\n"
        "Request.update = lambda self: (time.sleep(0.05), update(self))[1]\n"
        "from qsample.cli import main; main()"
    )
    slowly = [sys.executable, "-c", slow]
    made = Terminal([*slowly, "chat", str(package.path), "--stop-id", "299", "--seed", "3"])
    yield made
    made.close()


@pytest.mark.ci
def test_on_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    prompt = r">>> "
    terminal.until(r"/help lists the commands; ctrl-D ends")
    terminal.until(prompt)
    terminal.send("hello\n")
    terminal.until(r"hello\r?\n")
    terminal.until(r"(?<!\d)[a-zA-Z]")  # of the answer, not of what a terminal is told before it
    terminal.send("\x03")  # in the middle of an answer
    shown = terminal.until(r"tokens of context; stopped")
    assert "Traceback" not in shown
    count = int(re.findall(r"(\d+) tokens, ", shown)[-1])
    assert 0 < count < 200
    terminal.until(prompt)
    terminal.send("half a line")
    terminal.until(r"half a line")
    terminal.interrupt(r"ctrl-D or /exit ends the chat")  # at the prompt
    terminal.until(prompt)
    saved = tmp_path / "conversation.json"
    terminal.send(f"/save {saved}\n")
    terminal.until(r"2 messages written")
    messages = json.loads(saved.read_text())["messages"]
    assert messages[0] == user("hello")
    assert messages[1]["role"] == "assistant"
    terminal.until(prompt)
    terminal.send("/set max_new_tokens 3\n")
    terminal.until(r"the model's own")
    terminal.until(prompt)
    terminal.send("one\\\n")
    terminal.until(r"\.\.\. ")
    terminal.send("two\n")
    terminal.until(r"3 tokens, \d+ a second")
    terminal.until(prompt)
    terminal.send("\x04")
    assert terminal.process.wait(60) == 0


@pytest.mark.parametrize(
    ("text", "stop_strings"),
    [
        ("the end", "the end"),
        ('"\\n\\n"', "\n\n"),
        ('["a", "b"]', ["a", "b"]),
        ("5", "5"),
        ("{", "{"),
    ],
)
def test_stop_strings_are_set_and_dropped(text: str, stop_strings: Any) -> None:
    conversation = Conversation(None, None, {"seed": 1}, {})  # type: ignore[arg-type]
    conversation.set_parameter("stop_strings", text)
    assert conversation.options == {"seed": 1, "stop_strings": stop_strings}
    conversation.set_parameter("stop_strings", "null")
    assert conversation.options == {"seed": 1}


@pytest.mark.parametrize("name", ["sql", "7"])
def test_an_adapter_is_set_and_dropped(name: str) -> None:
    conversation = Conversation(None, None, {"seed": 1}, {})  # type: ignore[arg-type]
    conversation.set_parameter("adapter", name)
    assert conversation.options == {"seed": 1, "adapter": name}
    conversation.set_parameter("adapter", "null")
    assert conversation.options == {"seed": 1}


@pytest.mark.parametrize("text", ["", '""', "[5]", '[""]'])
def test_wrong_stop_strings_change_nothing(text: str) -> None:
    conversation = Conversation(None, None, {"stop_strings": "a"}, {})  # type: ignore[arg-type]
    with pytest.raises(TurnError, match="stop_strings is"):
        conversation.set_parameter("stop_strings", text)
    assert conversation.options == {"stop_strings": "a"}
