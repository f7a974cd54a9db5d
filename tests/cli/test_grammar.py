"""`qsample grammar`: the file of tables, what is told of it, and refusals that leave nothing behind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from qsample.request.grammar import Form
from qsample.request.structured.automaton import Thoughts
from qsample.request.structured.grammars import Grammars, Wish
from qsample.request.structured.tables import TokenGrammar
from qsample.runtime import load
from tests.helpers.flags import unlike

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
TEXT = json.dumps(SCHEMA)


@pytest.mark.parametrize("as_file", [False, True])
def test_a_schema(run: Any, forms_package: Path, tmp_path: Path, as_file: bool) -> None:
    schema: str | Path = TEXT
    if as_file:
        schema = tmp_path / "schema.json"
        schema.write_text(TEXT)
    file = tmp_path / "form.safetensors"
    status, out, err = run("grammar", schema, "--package", forms_package, "-o", file)
    assert (status, out) == (0, f"{file}\n"), err
    grammar = TokenGrammar.load(file)
    assert grammar.key == load(forms_package).grammar(json=SCHEMA).key
    told = re.fullmatch(
        r"(\d+) states, (\d+) classes of tokens, [\d.]+ kB; the shortest answer has (\d+) tokens, its "
        r"stop token included\n",
        err,
    )
    assert told is not None, err
    assert [int(number) for number in told.groups()] == [
        *grammar.transitions.shape,
        grammar.shortest,
    ]
    # Its file of the same name stays.
    before = file.read_bytes()
    status, out, err = run("grammar", "--regex", "b", "--package", forms_package, "-o", file)
    assert (status, out) == (2, "")
    assert f"{file} exists; give --overwrite to replace it" in " ".join(err.split())
    assert file.read_bytes() == before
    options = ("--package", forms_package, "-o", file, "--overwrite")
    assert run("grammar", "--regex", "b", *options)[0] == 0
    assert TokenGrammar.load(file).shortest == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "form.safetensors",
        *["schema.json"] * as_file,
    ]


@pytest.mark.parametrize(
    "options",
    [
        ["--json-schema", TEXT],
        ["--regex", "[a-z]{3}"],
        ["--choice", "yes", "--choice", "no"],
        ["--grammar", 'root ::= "yes" | "no"'],
    ],
)
def test_facts_as_json(run: Any, forms_package: Path, tmp_path: Path, options: list[str]) -> None:
    file = tmp_path / "form.safetensors"
    status, out, _ = run("grammar", *options, "--package", forms_package, "-o", file, "--json")
    assert status == 0
    grammar = TokenGrammar.load(file)
    states, classes = grammar.transitions.shape
    assert json.loads(out) == {
        "grammar": str(file),
        "shortest": grammar.shortest,
        "states": states,
        "classes": classes,
        "bytes": file.stat().st_size,
    }


@pytest.mark.parametrize("form", [[], ["--choice", "yes"]])
def test_thoughts(run: Any, forms_package: Path, tmp_path: Path, form: list[str]) -> None:
    file = tmp_path / "form.safetensors"
    marks = ("--thoughts", "<think>", "</think>")
    status, _, err = run("grammar", *form, *marks, "--package", forms_package, "-o", file)
    assert status == 0, err
    assert TokenGrammar.load(file).has_thoughts
    assert ("the shortest answer has" in err) == bool(form)
    choice = ["yes"] if form else None
    made = load(forms_package).grammar(choice=choice, thoughts=("<think>", "</think>"))
    assert TokenGrammar.load(file).key == made.key


REFUSALS: list[tuple[list[str], int, str]] = [
    ([], 2, "no form was given; give SCHEMA, --regex, --choice or --grammar"),
    ([TEXT, "--regex", "a"], 2, "SCHEMA and an option were given; give one form"),
    (["--regex", "a", "--choice", "b"], 2, "--regex and --choice were given; give one of them"),
    (["--regex", "("], 2, "--regex: no answer can follow that form"),
    (["./nowhere.json"], 2, "cannot read SCHEMA nowhere.json"),
    (["{"], 2, "SCHEMA: the schema is not valid JSON"),
    (['{"type": "object"}'], 1, "that form has no tables: #: any object"),
    (
        ['{"type": "array", "items": {"type": "string"}, "contains": {"const": "a"}}'],
        2,
        "contains",
    ),
    (['{"type": "string", "pattern": "a", "minLength": 3}'], 1, "#: pattern with minLength"),
    (['{"type": "number", "minimum": 3}'], 1, "minimum"),
    (
        ['{"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}'],
        1,
        "#/properties/a",
    ),
    (["--grammar", 'start: "a"'], 1, "a grammar in Lark's notation"),
    (
        ["--choice", "yes", "--thoughts", "<think>", ""],
        1,
        "the end of --thoughts is empty",
    ),
]


@pytest.mark.parametrize(("options", "status", "words"), REFUSALS)
def test_refusals_leave_nothing_behind(
    run: Any, forms_package: Path, tmp_path: Path, options: list[str], status: int, words: str
) -> None:
    file = tmp_path / "form.safetensors"
    done, out, err = run("grammar", *options, "--package", forms_package, "-o", file)
    assert (done, out) == (status, "")
    assert words in err
    assert not [*tmp_path.iterdir()]


def test_packages_without_grammars(run: Any, llama_package: Path, tmp_path: Path) -> None:
    file = tmp_path / "form.safetensors"
    status, out, err = run("grammar", TEXT, "--package", llama_package, "-o", file)
    assert (status, out) == (1, "")
    assert "was exported without --grammars, and its graph takes no tables" in err
    assert "export the model again with --grammars or --for-serving" in err
    assert not [*tmp_path.iterdir()]


def test_places_that_cannot_be_written(run: Any, forms_package: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path, words, options in (
        (tmp_path / "nowhere" / "form", "cannot write to", []),
        (tmp_path / "folder", "Is a directory; choose another path", ["--overwrite"]),
    ):
        status, out, err = run(
            "grammar", "--regex", "a", "--package", forms_package, "-o", path, *options
        )
        assert (status, out) == (1, "")
        assert words in err
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


def test_a_failure_leaves_the_file_of_that_name(
    run: Any, forms_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "form.safetensors"
    options = ("--package", forms_package, "-o", file, "--overwrite")
    assert run("grammar", "--regex", "a", *options)[0] == 0
    before = file.read_bytes()

    def write_a_half(self: Path, content: bytes) -> int:
        with self.open("wb") as opened:
            opened.write(content[: len(content) // 2])
        raise OSError(5, "the device has gone")

    monkeypatch.setattr(Path, "write_bytes", write_a_half)
    status, out, err = run("grammar", "--regex", "b", *options)
    assert (status, out) == (1, "")
    assert "the device has gone" in err
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert file.read_bytes() == before


def test_thoughts_are_open_if_they_have_no_start(
    run: Any, forms_package: Path, tmp_path: Path
) -> None:
    """Answers to a prompt that has begun the thoughts begin inside them."""
    file = tmp_path / "form.safetensors"
    options = ("--package", forms_package, "-o", file)
    assert run("grammar", "--choice", "yes", "--thoughts", "", ">", *options)[0] == 0
    model = load(forms_package)
    made = model.grammar(choice=["yes"], thoughts=("", ">"))
    assert TokenGrammar.load(file).key == made.key
    for budget in (0, 5):
        output = model.generate(
            "And he said <", grammar=made, thinking_token_budget=budget, max_new_tokens=40, seed=3
        )
        thoughts, answer = output.texts[0].split(">")
        assert answer.lstrip("\n") == "yes"
        if budget == 0:
            assert thoughts == ""


def test_thoughts_are_not_open(forms_package: Path) -> None:
    """A file is for any prompt, so its answers may begin with thoughts, or not."""
    model = load(forms_package)
    made = model.grammar(choice=["yes"], thoughts=("<", ">"))
    grammars = Grammars(model.interface, model.tokenizer)
    form = Form("choice", ["yes"])
    assert grammars.tables(Wish(form, Thoughts("<", ">", is_open=False))).key == made.key
    assert grammars.tables(Wish(form, Thoughts("<", ">", is_open=True))).key != made.key


def test_the_flags() -> None:
    own = "schema [SCHEMA]; --package PACKAGE_OR_MODEL; --output/-o FILE required; --thoughts START END; --json"
    assert unlike(own, "grammar") == []
