"""Thoughts split off answers, however they come."""

from __future__ import annotations

import pytest

from qsample.serve.reasoning import FORMATS, ReasoningReader, find_format


def split(name: str, text: str, size: int, prompt: str = "<|assistant|>\n") -> tuple[str, str]:
    reader = ReasoningReader(FORMATS[name], prompt)
    parts = [reader.put(text[start : start + size]) for start in range(0, len(text), size)]
    parts.append(reader.end())
    return "".join(thoughts for thoughts, _ in parts), "".join(answer for _, answer in parts)


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("opened", [False, True])
def test_thoughts_and_answer(name: str, size: int, opened: bool) -> None:
    form = FORMATS[name]
    thoughts, answer = "Let me see:\n\n  2 < 3 </thin", "It is\n 3. "
    text = f"\n{thoughts}\n {form.end}\n\n{answer}"
    if opened:  # by the chat template
        assert split(name, text, size, f"<|assistant|>{form.start}\n") == (thoughts, answer)
    else:
        assert split(name, f"\n{form.start}{text}", size) == (thoughts, answer)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_thoughts_that_were_cut_off(size: int) -> None:
    for name in FORMATS:
        assert split(name, FORMATS[name].start + "\nhm, ", size) == ("hm,", "")
        assert split(name, FORMATS[name].start + "\nhm " + FORMATS[name].end[:-1], size) == (
            "hm " + FORMATS[name].end[:-1],
            "",
        )
        assert split(name, FORMATS[name].start + "a" + FORMATS[name].end, size) == ("a", "")
        assert split(name, FORMATS[name].start + FORMATS[name].end, size) == ("", "")


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("text", ["", " ", "plain", "  a < b", "<thin", "a <think>b</think> c", "x</think>y", "<think"])
def test_an_answer_without_thoughts_is_as_it_is(text: str, size: int) -> None:
    assert split("qwen3", text, size) == ("", text)
    # Where a client wants no thoughts, templates write both marks.
    for name in FORMATS:
        prompt = f"<|assistant|>{FORMATS[name].start}\n\n{FORMATS[name].end}\n\n"
        assert split(name, text, size, prompt) == ("", text)


@pytest.mark.parametrize("size", [1, 1000])
def test_an_answer_may_begin_inside(size: int) -> None:
    assert split("deepseek_r1", "hm</think>yes <think>", size) == ("hm", "yes <think>")
    assert split("deepseek_r1", "hm", size) == ("hm", "")
    # A model may repeat what the template wrote.
    assert split("qwen3", "<think>hm</think>yes", size, "<think>\n") == ("hm", "yes")
    assert split("qwen3", "< hm</think>yes", size, "<think>\n") == ("< hm", "yes")


def test_marks_that_never_come_are_refused() -> None:
    assert find_format(None, lambda mark: False) is None
    assert find_format("qwen3", lambda mark: True) is FORMATS["qwen3"]
    with pytest.raises(ValueError, match="qwen3 looks for </think>, which is a special token"):
        find_format("qwen3", lambda mark: mark != "</think>")
