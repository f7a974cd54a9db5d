"""The terminal: a bar, escapes, sizes, JSON that is valid; and errors, with the names of
options."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import typer.rich_utils
from onnx import numpy_helper

from qsample import cli
from qsample.cli import terminal
from qsample.cli.terminal import (
    console,
    format_size,
    name_options,
    note,
    options_of,
    progress,
    report,
)
from qsample.errors import QsampleError, install_hint
from tests.helpers.fake_package import POISON, VOCAB, fake_package


def test_no_bar_if_standard_error_is_not_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress() as report:
        report("tracing", 0.5)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("system", "chosen", "printed"),
    [("nt", None, "日本 → ─"), ("nt", "cp1252", "?? ? ?"), ("posix", None, "?? ? ?")],
    ids=["Windows", "Windows, chosen", "a locale"],
)
def test_texts_that_an_encoding_lacks(
    system: str, chosen: str | None, printed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        terminal,
        "os",
        SimpleNamespace(name=system, environ={"PYTHONIOENCODING": chosen} if chosen else {}),
    )
    pipe = TextIOWrapper(BytesIO(), "cp1252", write_through=True)
    monkeypatch.setattr("sys.stdout", pipe)
    terminal.use_utf_8()
    print("日本 → ─", end="")
    assert pipe.buffer.getvalue().decode(pipe.encoding) == printed  # type: ignore[attr-defined]


@pytest.mark.ci
def test_commands_print_in_a_code_page(bundled_package: Path) -> None:
    """Box characters of tables, and a prompt that Windows' code page lacks."""
    environment = {**os.environ, "PYTHONIOENCODING": "cp1252"}
    for command in (["inspect"], ["generate", "-p", "日本", "--max-new-tokens", "2"]):
        line = [
            sys.executable,
            "-c",
            "import qsample.cli; qsample.cli.main()",
            *command,
            str(bundled_package),
        ]
        done = subprocess.run(line, env=environment, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.decode("cp1252")


@pytest.mark.parametrize(
    ("variables", "escapes"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
    ids=["usual", "NO_COLOR", "empty NO_COLOR", "dumb"],
)
def test_escapes(
    variables: dict[str, str],
    escapes: bool,
    run: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: Any,
) -> None:
    for name, value in {
        "FORCE_COLOR": "1",
        "NO_COLOR": "",
        "TERM": "xterm-256color",
        **variables,
    }.items():
        monkeypatch.setenv(name, value)
    for name, value in (("FORCE_TERMINAL", True), ("COLOR_SYSTEM", "auto")):
        monkeypatch.setattr(typer.rich_utils, name, value)
    note("dim")
    console().rule("dim", style="dim")
    console().print("[bold]bold[/bold]")
    shown = "".join(capsys.readouterr())
    assert ("\x1b[2m" in shown) == ("\x1b[1m" in shown) == ("\x1b" in shown) == escapes
    assert ("\x1b" in run("generate", "--help")[1]) == escapes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (12_345_678, "12.3 MB"),
        (2_000_000_000, "2.0 GB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert format_size(count) == text


def test_what_a_model_masks_is_null_in_json(run: Any, tmp_path: Path) -> None:
    """Logits of -inf are a model's mask, and JSON has no infinity."""

    def mask(graph: onnx.ModelProto) -> None:
        (bias,) = (tensor for tensor in graph.graph.initializer if tensor.name == "head_bias")
        values = np.full(VOCAB, -np.inf, np.float32)
        values[[70, 71]] = 0
        bias.CopyFrom(numpy_helper.from_array(values, "head_bias"))

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    package = fake_package(tmp_path / "package", edit=mask, logprobs=True, top_logprobs=3)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "a", "outputs": ["logprobs", "top_logprobs"]}))
    options = ("--max-new-tokens", "2", "--seed", "1")
    status, whole, _ = run("generate", package.path, "-p", "a", "--json", *options)
    assert status == 0
    status, line, _ = run("generate", package.path, "--prompt-file", prompts, *options)
    assert status == 0
    for record in (
        json.loads(whole, parse_constant=refuse)["results"][0],
        json.loads(line, parse_constant=refuse),
    ):
        assert [row[2] for row in record["top_logprobs"]] == [None, None]
        assert all(value < 0 for row in record["top_logprobs"] for value in row[:2])


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
        ("generate", "filters=['dry', 'xtc'] (--filter), or top_p=1.0", "--filter dry --filter xtc, or --top-p 1.0"),
        ("generate", "max_lora_rank=8 (--max-lora-rank), max_loras (--max-loras)", "--max-lora-rank 8, --max-loras"),
        ("compile", "with the adapter merged (--adapter)", "with the adapter merged (--adapter)"),
        ("bake", "with file (--file): a, or tokenizer= (--tokenizer)", "with --file: a, or --tokenizer"),
        ("compile", "a kv_cache_dtype ('int8')", "a --kv-cache-dtype ('int8')"),
        ("compile", "/a/batch_size/b has 'batch_size'", "/a/batch_size/b has 'batch_size'"),
    ],
)  # fmt: skip
def test_messages_name_options(command: str, text: str, expected: str) -> None:
    assert name_options(text, options_of([command], cli.commands())) == expected


def test_an_error_that_names_its_argument_names_the_option() -> None:
    options = options_of(["generate"], cli.commands())
    assert name_options("slots exceeds 4", options) == "slots exceeds 4"
    assert name_options("slots exceeds 4", options, "slots") == "--slots exceeds 4"


def test_no_json_without_the_option(run: Any) -> None:
    assert run("inspect", "no-such")[1] == ""
    assert run("inspect", "--", "--json")[1] == ""


def test_a_result_with_an_error_is_one_document(run: Any, tmp_path: Path) -> None:
    files = {"chat_template.jinja": ""}
    package = fake_package(
        tmp_path / "package", files=files, generation_config={"do_sample": False}
    )
    bias = tmp_path / "rows.jsonl"
    bias.write_text(json.dumps({"prompt": [5, POISON]}) + "\n")
    status, out, err = run("generate", package.path, "--prompt-file", bias)
    (record,) = map(json.loads, out.splitlines())
    assert (status, record["finish_reason"]) == (1, "invalid")
    assert "NaN" in record["error"]["message"]
    assert "1 of 1 rows have an error" in err


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("onnxruntime", "cpu"),
        ("uvicorn", "serve"),
        ("fastapi.routing", "serve"),
        ("torch", "export"),
    ],
)
def test_a_missing_module_is_reported_with_the_extra_that_installs_it(
    module: str, extra: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report(ModuleNotFoundError(f"No module named {module!r}", name=module), [], {})
    assert f"`{install_hint(extra)}`" in capsys.readouterr().err


def test_a_name_in_a_file_does_not_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    name = "\x1b[2J\x1b]0;title\x07\x9b1m\u202e"
    assert str(QsampleError(f"{name}\nb")) == r"\x1b[2J\x1b]0;title\x07\x9b1m\u202e" + "\nb"
    for error in (QsampleError(name), ValueError(name), OSError(2, "gone", name), KeyError(name)):
        report(error, ["inspect"], cli.commands())
        terminal.note(name)
        assert capsys.readouterr().err.replace("\n", "").isprintable()
