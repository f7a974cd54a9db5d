"""Options that several commands share: what they become as arguments, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from qsample.cli.common import (
    SAMPLING_PANELS,
    ChatMode,
    FeatureOptions,
    SamplingOptions,
    TemplateOptions,
    context_full,
    read_loras,
    read_template,
    read_text,
    system_message,
    with_adapter,
    with_images_before,
)
from qsample.contract.interface import Features
from qsample.request.huggingface.lora import CONFIG
from tests.helpers.flags import unlike


@pytest.mark.parametrize(
    ("params", "more", "arguments"),
    [
        ({}, {}, {}),
        ({"temperature": 0.0, "top_k": 0, "seed": None}, {}, {"temperature": 0.0, "top_k": 0}),
        ({"stop_token_ids": []}, {}, {}),
        ({"seed": 5}, {"greedy": True}, {"seed": 5, "do_sample": False}),
        ({}, {"stop_strings": ["a", "b"]}, {"stop_strings": ("a", "b")}),
        ({}, {"stop_strings": []}, {}),
    ],
)
def test_sampling(params: dict[str, Any], more: dict[str, Any], arguments: dict[str, Any]) -> None:
    assert SamplingOptions(params=params, **more).arguments() == arguments


def test_sampling_that_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="top_p is 2"):
        SamplingOptions(params={"top_p": 2.0}).arguments()
    with pytest.raises(
        typer.BadParameter, match=r"do_sample=False chooses greedily, yet top_p=0.5"
    ):
        SamplingOptions(params={"top_p": 0.5}, greedy=True).arguments()
    with pytest.raises(ValueError, match="stop_string"):
        SamplingOptions(params={}, stop_strings=[""]).arguments()


def test_the_headings_of_sampling_options() -> None:
    assert SAMPLING_PANELS["temperature"] == "Sampling"
    assert SAMPLING_PANELS["mirostat_tau"] == "More sampling, for packages exported with --filter"


@pytest.mark.parametrize(
    ("fields", "for_serving", "features"),
    [
        ({"filters": ()}, False, Features()),
        (
            {"filters": ("xtc, dry", "typical_p")},
            False,
            Features(filters=("xtc", "dry", "typical_p")),
        ),
        ({"filters": (), "logprobs": True}, False, Features(logprobs=True)),
        ({"filters": ("xtc",)}, True, Features(filters=("xtc",)).for_serving()),
    ],
)
def test_features(fields: dict[str, Any], for_serving: bool, features: Features) -> None:
    assert FeatureOptions(fields=fields, for_serving=for_serving).features() == features
    assert FeatureOptions(fields={"filters": ()}).features() == Features()


def test_an_unknown_filter() -> None:
    with pytest.raises(typer.BadParameter, match="--filter names 'drry'; did you mean 'dry'"):
        FeatureOptions(fields={"filters": ("xtc,drry",)}).features()


def test_names_and_files_of_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").write_text("{{ messages }}")
    (tmp_path / "folder").mkdir()
    assert read_template("plain") == "{{ messages }}"
    assert read_template("tool_use") == "tool_use"
    for given in ("t.jinja", "a/b", "{{ messages }}", "folder"):
        with pytest.raises(typer.BadParameter, match="is not a file; give a file, or a template's"):
            read_template(given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("{", r"--chat-template-kwargs is not valid JSON \(.*\): \{"),
        ("[1]", r"--chat-template-kwargs is \[1\]; give an object"),
    ],
)
def test_variables_of_a_template_that_are_refused(given: str, words: str) -> None:
    with pytest.raises(typer.BadParameter, match=words):
        TemplateOptions(chat_template_kwargs=given).arguments()


def test_files_that_hold_no_text(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"ab\xff")
    (tmp_path / "empty").write_text(" \n")
    for name, words in (
        ("none", "cannot read --prompt-text .*none: No such file"),
        ("latin", "--prompt-text .*latin is not valid UTF-8 from byte 2 on; convert it"),
        ("empty", "--prompt-text .*empty is empty; give a file with text in it"),
    ):
        with pytest.raises(typer.BadParameter, match=words):
            read_text(tmp_path / name, "--prompt-text")


@pytest.mark.parametrize(
    ("options", "asked_for"),
    [
        ({}, False),
        ({"system": ""}, True),
        ({"thinking": False}, True),
        ({"chat_template": "t"}, True),
    ],
)
def test_texts_are_messages_if_the_command_line_says_so(
    options: dict[str, Any], asked_for: bool
) -> None:
    mode = ChatMode.of(TemplateOptions(**options))
    assert (mode.enabled, mode.asked_for, mode.is_default) == (asked_for, asked_for, False)
    assert mode.system == options.get("system")
    assert mode.arguments == TemplateOptions(**options).arguments()
    enabled = mode.enable()
    assert (enabled.enabled, enabled.is_default) == (True, not asked_for)
    assert ChatMode() == ChatMode(False, False, None, {})


def test_messages_of_a_text() -> None:
    user = {"role": "user", "content": "hi"}
    assert ChatMode().messages("hi", []) == [user]
    assert ChatMode(system="").messages("hi", ()) == [{"role": "system", "content": ""}, user]
    image = {"type": "image", "image": "cat"}
    parts = [image, image, {"type": "text", "text": "hi"}]
    assert ChatMode().messages("hi", ["cat", "cat"]) == [{"role": "user", "content": parts}]
    assert with_images_before("hi", []) == "hi"
    assert system_message(None) == []


def test_adapters(tmp_path: Path) -> None:
    for name in ("a", "b=c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / CONFIG).write_text("{}")
    given = [f"x={tmp_path / 'a'}", f"y={tmp_path / 'b=c'}"]
    assert read_loras(given) == {"x": str(tmp_path / "a"), "y": str(tmp_path / "b=c")}
    assert read_loras(None) == read_loras([]) == {}
    for entries, words in (
        (["x"], "--lora is x; give NAME=DIR"),
        (["=folder"], "--lora is =folder; give NAME=DIR"),
        (["x="], "--lora is x=; give NAME=DIR"),
        ([given[0], given[0]], "--lora names x twice; give each adapter a name of its own"),
        ([f"x={tmp_path}"], f"has no {CONFIG}; give an adapter's folder"),
    ):
        with pytest.raises(typer.BadParameter, match=words):
            read_loras(entries)


@pytest.mark.parametrize(
    ("arguments", "loras", "wanted"),
    [
        ({}, {}, {}),
        ({}, {"a": "f"}, {"adapter": "a"}),
        ({"top_k": 0}, {"a": "f"}, {"top_k": 0, "adapter": "a"}),
        ({}, {"a": "f", "b": "g"}, {}),
        ({"adapter": "b"}, {"a": "f", "b": "g"}, {"adapter": "b"}),
        ({"adapter": "a"}, {"a": "f"}, {"adapter": "a"}),
    ],
)
def test_the_adapter_of_a_request(
    arguments: dict[str, Any], loras: dict[str, str], wanted: dict[str, Any]
) -> None:
    assert with_adapter(arguments, loras) == wanted


def test_an_adapter_that_was_not_loaded() -> None:
    with pytest.raises(
        typer.BadParameter, match="--adapter is c, and --lora has a, b; give either"
    ):
        with_adapter({"adapter": "c"}, {"a": "f", "b": "g"})
    with pytest.raises(typer.BadParameter, match="--adapter is c, and --lora has none"):
        with_adapter({"adapter": "c"}, {})


def test_a_context_that_is_full() -> None:
    said = context_full(64, "ends the answer")
    assert said.startswith("the context of 64 tokens is full, which ends the answer; compile with")


FLAGS = {
    "generate": """
        --image FILE repeated; --ctx-len >=2; --system; --chat-template FILE; --chat-template-kwargs JSON
        --thinking/--no-thinking; --lora NAME=DIR repeated; --weights int2|int4|int8|float16
        --preset quick|balanced|speed; --text-only; --provider; --threads >=1
        --batch-invariant/--no-batch-invariant = True; --trusted-keys FILE repeated; --json
        --stop-string repeated [Sampling]; --greedy [Sampling]; --temperature [Sampling]
        --bad-word repeated [More sampling, for packages exported with --filter]
        --dry-base [More sampling, for packages exported with --filter]
    """,
    "export": "--overwrite; --for-serving; --sampler/--no-sampler = True; --filter NAME repeated",
}


@pytest.mark.parametrize("command", FLAGS)
def test_the_flags_of_several_commands(command: str) -> None:
    assert unlike(FLAGS[command], command) == []
