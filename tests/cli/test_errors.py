"""What the command line says of an error: with the names of its options, and as JSON where that was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qsample import cli
from qsample.cli import terminal
from qsample.cli.terminal import name_options, options_of, report
from qsample.errors import QsampleError
from tests.helpers.fake_package import POISON, fake_package


@pytest.mark.parametrize(
    ("command", "text", "expected"),
    [
        ("compile", "batch_size is 0; give 1 or more", "--batch-size is 0; give 1 or more"),
        ("compile", "x already holds one; pass overwrite=True to", "x already holds one; pass --overwrite to"),
        ("compile", "weights is 'int3'; use int4", "--weights is 'int3'; use int4"),
        ("compile", "weights; dtype='float16' or kv_cache_dtype", "weights; --dtype float16 or --kv-cache-dtype"),
        ("export", "exported with include_sampler=False;", "exported with --no-sampler;"),
        ("export", "give tokenizer= a folder, or tokenizer=None", "give --tokenizer a folder, or --tokenizer none"),
        ("generate", "a package with a larger ctx_len", "a package with a larger --ctx-len"),
        ("inspect", "a package with a larger ctx_len.", "a package with a larger --ctx-len."),
        ("generate", "give eos_token_id", "give --stop-id"),
        ("generate", "stop_strings are found", "--stop-string are found"),
        ("generate", "do_sample=False chooses", "--greedy chooses"),
        ("generate", "temperature is -1", "--temperature is -1"),
        ("generate", "the temperature of", "the temperature of"),
        ("inspect", "temperature is -1", "temperature is -1"),
        ("export", "logit_bias={5: 1} or give filters=['xtc']", "--logit-bias={5: 1} or give filters=['xtc']"),
        ("compile", "a quantization_method ('hqq')", "a --quantization-method ('hqq')"),
        ("compile", "/a/batch_size/b has 'batch_size'", "/a/batch_size/b has 'batch_size'"),
    ],
)  # fmt: skip
def test_messages_name_options(command: str, text: str, expected: str) -> None:
    assert name_options(text, options_of([command], cli.commands())) == expected


def test_an_error_that_names_its_argument_names_the_option() -> None:
    options = options_of(["generate"], cli.commands())
    assert name_options("slots exceeds 4", options) == "slots exceeds 4"
    assert name_options("slots exceeds 4", options, "slots") == "--slots exceeds 4"


def test_a_message_of_the_python_api_names_options(run: Any, tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package")
    fake_package(tmp_path / "other")
    status, out, err = run("compile", package.path, tmp_path / "other")
    assert (status, out) == (1, "")
    assert "pass --overwrite to replace it" in err
    status, _, err = run("compile", package.path, package.path, "--overwrite")
    assert status == 1
    assert "is what the package is made from" in err
    assert (package.path / "qsample.json").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "kind", "message"),
    [
        (["inspect", "no-such", "--json"], 1, "PackageError", "is missing"),
        (["generate", "--json", "-p", "x", "--top-p", "7"], 2, "UsageError", "--top-p is 7"),
        (["generate", "--json", "--nonsense"], 2, "UsageError", "No such option"),
        (["bench", "./no-such", "--json"], 1, "QsampleError", "./no-such does not exist"),
    ],
)
def test_errors_as_json(run: Any, arguments: list[str], status: int, kind: str, message: str) -> None:
    code, out, err = run(*arguments)
    document = json.loads(out)
    assert list(document) == ["error"]
    assert (code, document["error"]["status"], document["error"]["type"]) == (status, status, kind)
    assert message in document["error"]["message"]
    assert err.startswith("qsample: ")
    assert err.count("\n") == 1


def test_no_json_where_none_was_asked_for(run: Any) -> None:
    assert run("inspect", "no-such")[1] == ""
    assert run("inspect", "--", "--json")[1] == ""


def test_a_result_with_an_error_is_one_document(run: Any, tmp_path: Path) -> None:
    files = {"chat_template.jinja": ""}
    package = fake_package(tmp_path / "package", files=files, generation_config={"do_sample": False})
    bias = tmp_path / "rows.jsonl"
    bias.write_text(json.dumps({"prompt": [5, POISON]}) + "\n")
    status, out, err = run("generate", package.path, "--prompt-file", bias)
    (record,) = map(json.loads, out.splitlines())
    assert (status, record["finish_reason"]) == (1, "invalid")
    assert "NaN" in record["error"]["message"]
    assert "1 of 1 rows have an error" in err


@pytest.mark.parametrize(
    ("module", "extra"),
    [("onnxruntime", "'cpu' or 'gpu'"), ("uvicorn", "'serve'"), ("fastapi.routing", "'serve'"), ("torch", "'export'")],
)
def test_a_missing_module_is_told_with_the_extra_that_brings_it(
    module: str, extra: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report(ModuleNotFoundError(f"No module named {module!r}", name=module), [], {})
    assert f"install qsample with its extra {extra}" in capsys.readouterr().err


def test_a_name_in_a_file_does_not_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    name = "\x1b[2J\x1b]0;title\x07\x9b1m\u202e"
    assert str(QsampleError(f"{name}\nb")) == r"\x1b[2J\x1b]0;title\x07\x9b1m\u202e" + "\nb"
    for error in (QsampleError(name), ValueError(name), OSError(2, "gone", name), KeyError(name)):
        report(error, ["inspect"], cli.commands())
        terminal.note(name)
        assert capsys.readouterr().err.replace("\n", "").isprintable()
