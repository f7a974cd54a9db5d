"""Answers that have to follow a form, by `qsample generate`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from qsample.errors import install_hint
from qsample.request.structured.tables import TokenGrammar
from qsample.runtime import load
from tests.helpers.flags import unlike

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"type": "integer", "maximum": 99}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TREE = {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
GBNF = 'root ::= ("ab" | "cd")+ "!"'
# The tokens are bytes, so a random model follows a form for long.
OPTIONS = ["--max-new-tokens", "40", "--seed", "5", "--temperature", "20", "--top-k", "0"]


def rows_of(run: Any, package: Path, *form: str | Path, more: list[Any] | None = None) -> list[Any]:
    """The results of a batch of prompts."""
    prompts = ["-p", "One", "-p", "Two", "--num-return-sequences", "2", "--json", *(more or [])]
    status, out, err = run("generate", package, *prompts, *form, *OPTIONS)
    assert status == 0, err
    results: list[Any] = json.loads(out)["results"]
    return results


@pytest.mark.parametrize(
    ("option", "value", "expression"),
    [
        ("--regex", "(ab|cd){2}e?", "(ab|cd){2}e?"),
        ("--choice", "yes or no", "yes or no"),
        ("--grammar", GBNF, "(ab|cd)+!"),
    ],
)
def test_answers_follow_the_form(
    run: Any, forms_package: Path, option: str, value: str, expression: str
) -> None:
    results = rows_of(run, forms_package, option, value)
    assert [row["seed"] for row in results] == [5, 6, 7, 8]
    assert all(re.fullmatch(expression, row["text"]) for row in results)
    assert {row["finish_reason"] for row in results} == {"stop"}


def test_a_schema_or_its_file(run: Any, forms_package: Path, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    by_text = rows_of(run, forms_package, "--json-schema", json.dumps(SCHEMA))
    assert rows_of(run, forms_package, "--json-schema", file) == by_text
    for row in by_text:
        jsonschema.validate(json.loads(row["text"]), SCHEMA)
        assert row["finish_reason"] == "stop"
    model = load(forms_package)
    output = model.generate(
        ["One", "One", "Two", "Two"],
        grammar=model.grammar(json=SCHEMA),
        max_new_tokens=40,
        seed=5,
        temperature=20.0,
        top_k=0,
    )
    assert [row["token_ids"] for row in by_text] == output.token_ids


def test_several_choices(run: Any, forms_package: Path) -> None:
    results = rows_of(run, forms_package, "--choice", "yes", "--choice", "no")
    assert {row["text"] for row in results} <= {"yes", "no"}


def test_a_single_answer_streams(run: Any, forms_package: Path) -> None:
    status, out, err = run(
        "generate", forms_package, "-p", "x", "--regex", "[a-f]{4}", "--raw", *OPTIONS
    )
    assert status == 0, err
    assert re.fullmatch(r"x[a-f]{4}\n", out)


def test_a_form_that_is_not_regular_has_masks(run: Any, forms_package: Path) -> None:
    schema = json.dumps(TREE)
    for row in rows_of(run, forms_package, "--json-schema", schema):
        assert row["text"].startswith("{")


@pytest.mark.parametrize("others", [{}, {"b": {"type": "object"}}], ids=["tables", "masks"])
def test_a_format_that_nobody_knows_restricts_nothing(
    run: Any, forms_package: Path, others: dict[str, Any]
) -> None:
    name = {"type": "string", "format": "path", "maxLength": 3, "x-guidance": {"lenient": True}}
    schema = {
        "type": "object",
        "properties": {"a": name, **others},
        "required": ["a"],
        "additionalProperties": False,
    }
    for row in rows_of(run, forms_package, "--json-schema", json.dumps(schema)):
        if row["finish_reason"] == "stop":
            jsonschema.validate(json.loads(row["text"]), schema)
        assert row["text"].startswith('{"a": "')


@pytest.mark.parametrize("form", ["a{30}", "[ab]{30,}"])
def test_a_limit_below_the_shortest_answer(run: Any, forms_package: Path, form: str) -> None:
    options = ["-p", "x", "--regex", form]
    status, out, err = run("generate", forms_package, *options, "--max-new-tokens", "30")
    assert (status, out) == (1, "")
    assert "the shortest that follows the grammar has 31, its stop token included" in err
    status, out, err = run("generate", forms_package, *options, "--max-new-tokens", "31")
    assert status == 0, err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--regex", "a", "--choice", "b"], "--regex and --choice were given; give one of them"),
        (["--json-schema", "{"], "--json-schema: the schema is not valid JSON"),
        (
            ["--json-schema", '{"const": NaN}'],
            "--json-schema: no answer can follow the schema: #/const",
        ),
        (["--json-schema", '{"items": {"not": {"pattern": "x"}}}'], "#/items/not: the documents"),
        (
            ["--json-schema", '{"pattern": "(?=x)", "x-guidance": {"lenient": true}}'],
            "#/pattern: it",
        ),
        (["--regex", "("], "--regex: no answer can follow that form"),
        (["--choice", ""], "is empty; give texts of at least a character"),
        (["--grammar", 'root ::= "'], "is not valid GBNF: line 1"),
        (["--grammar", "start: missing"], "--grammar: no answer can follow that form"),
        (["--grammar", "./nowhere.gbnf"], "cannot read --grammar nowhere.gbnf"),
    ],
)
def test_invalid_forms(run: Any, options: list[str], words: str) -> None:
    """They are refused before a model is looked for."""
    status, out, err = run("generate", "./nowhere", "-p", "x", *options)
    assert (status, out) == (2, "")
    assert words in err


@pytest.mark.parametrize("library", ["llguidance", "outlines_core"])
@pytest.mark.parametrize(
    "form",
    [
        ("--json-schema", "{}"),
        ("--json-schema", '{"type": "null"}'),
        ("--regex", "a"),
        ("--choice", "a"),
        ("--grammar", GBNF),
    ],
)
def test_a_form_without_its_libraries_names_their_extra(
    run: Any, monkeypatch: pytest.MonkeyPatch, library: str, form: tuple[str, str]
) -> None:
    """Before a model is looked for; the libraries of the server are not needed."""
    for name in (library, "fastapi"):
        monkeypatch.setitem(sys.modules, name, None)
    status, out, err = run("generate", "./nowhere", "-p", "x", *form)
    assert (status, out) == (1, "")
    assert f"this needs {library}, which is not installed: `{install_hint('guided')}`" in err


def test_a_prompt_file(run: Any, forms_package: Path, tmp_path: Path) -> None:
    """Each line's answer follows the form; a line whose limit is too small for it has an error."""
    lines = [
        {"id": "a", "prompt": "One"},
        {"id": "b", "prompt": "Two", "max_new_tokens": 3},
        {"id": "c", "prompt": "Three", "seed": 8},
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = tmp_path / "out.jsonl"
    options = ["--prompt-file", prompts, "--output", output, "--slots", "2", *OPTIONS]
    run("generate", forms_package, *options, "--json-schema", json.dumps(SCHEMA))
    records = {record["id"]: record for record in map(json.loads, output.read_text().splitlines())}
    assert "the shortest that follows the grammar has" in records["b"]["error"]["message"]
    for name in "ac":
        jsonschema.validate(json.loads(records[name]["text"]), SCHEMA)
        assert records[name]["finish_reason"] == "stop"


def test_a_prompt_file_with_masks(run: Any, forms_package: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("One\nTwo\nThree\n")
    (tmp_path / "form.lark").write_text('start: ("ab" | "cd") "!"\n')
    output = tmp_path / "out.jsonl"
    options = ["--prompt-file", tmp_path / "prompts.txt", "--output", output, "--slots", "2"]
    status, _, err = run(
        "generate", forms_package, *options, "--grammar", tmp_path / "form.lark", *OPTIONS
    )
    assert status == 0, err
    texts = [json.loads(line)["text"] for line in output.read_text().splitlines()]
    assert len(texts) == 3
    assert {*texts} <= {"ab!", "cd!"}


def test_a_file_of_tables_is_that_of_the_model(
    run: Any, forms_package: Path, tmp_path: Path
) -> None:
    file = tmp_path / "form.safetensors"
    status, _, err = run("grammar", "--regex", "[a-f]{4}", "--package", forms_package, "-o", file)
    assert status == 0, err
    model = load(forms_package)
    assert TokenGrammar.load(file).key == model.grammar(regex="[a-f]{4}").key


def test_the_flags() -> None:
    panel = "[Form of the answers, for packages exported with --grammars or --for-serving]"
    own = (
        "--json-schema JSON|FILE",
        "--regex REGEX",
        "--choice TEXT repeated",
        "--grammar TEXT|FILE",
    )
    assert unlike(";".join(f"{flag} {panel}" for flag in own), "generate") == []
