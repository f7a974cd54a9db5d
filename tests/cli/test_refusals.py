"""What the commands refuse: a line on stderr that names the option, its value, and what to do;
nothing is written."""

from __future__ import annotations

import io
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fake_package import fake_package

CHAT_ONLY = "is token ids, so --system, --chat-template, --chat-template-kwargs and --thinking would change nothing"
RAW = "--raw goes without a chat template, and --system, --chat-template, --chat-template-kwargs and --thinking belong"
REFUSED: list[tuple[str, int, str]] = [
    ("nonsense", 2, "No such command 'nonsense'; see qsample --help"),
    ("run package", 2, "No such command 'run'; here it is `qsample chat MODEL` or `qsample generate MODEL -p TEXT`"),
    ("serve package --max-model-len 9", 2, "No such option: --max-model-len; here it is --ctx-len; see qsample serve"),
    ("chat package -n 9", 2, "No such option: -n; here it is --max-new-tokens; see qsample chat"),
    ("generate package -p x -n 60", 2, "option: -n; here it is --max-new-tokens 60 or --num-return-sequences 60; see"),
    ("generate package -p x -n60", 2, "No such option: -n; here it is --max-new-tokens or --num-return-sequences; see"),
    ("generate package -p x -n", 2, "No such option: -n; here it is --max-new-tokens or --num-return-sequences; see"),
    ("generate package -p x -np 4", 2, "No such option: -np; here it is --slots; see qsample generate --help"),
    ("serve package -ngl 99", 2, "No such option: -ngl; here it is --provider; see qsample serve --help"),
    ("generate package -p x --chat", 2, "here it is `qsample chat MODEL` or `qsample generate MODEL -p TEXT`; see"),
    ("generate package -p x --ignore-chat-template", 2, "here it is --raw; see"),
    ("bench package --max-tokens 9", 2, "No such option: --max-tokens"),
    ("generate package hello", 2, "unexpected extra argument(s) (hello); a prompt comes after -p; see"),
    ("generate package -p x --regex a --grammar b", 2, "--regex and --grammar were given; give one of them"),
    ("generate package -p x --json-schema missing.json", 2, "cannot read --json-schema missing.json"),
    ("generate package -p x --regex (", 2, "--regex: no answer can follow that form"),
    (
        "generate package -p x --regex a", 1,
        "need a package that was exported with --grammars, --allowed-tokens or --for-serving",
    ),
    ("generate package --prompt-file text --num-return-sequences 2", 2, "--num-return-sequences goes with --prompt"),
    ("export only-a-model", 2, "Missing argument 'OUT'; see qsample export --help"),
    ("export package out", 2, "package is a package already; `qsample compile` takes it from here"),
    ("export ./nothing out", 1, "does not exist; give a checkpoint folder, a package folder or a hub id"),
    ("export some/model out --filter xtc,tpyical_p", 2, "--filter names 'tpyical_p'; did you mean 'typical_p'?"),
    ("export folder out --revision v2", 2, "--revision belongs to a hub id, and folder is on this machine"),
    ("bake some/model out --filter xtc,tpyical_p", 2, "--filter names 'tpyical_p'; did you mean 'typical_p'?"),
    ("bake folder out --revision v2", 2, "--revision belongs to a hub id, and folder is on this machine"),
    ("compile a b --batch-size 0", 2, "--batch-size"),
    ("compile package out --provider abacus", 1, "abacus"),
    ("compile nowhere out --calibration-text missing", 2, "cannot read --calibration-text missing"),
    ("compile nowhere out --calibration-text empty", 2, "is empty; give a file with text in it"),
    ("compile package other", 1, "pass --overwrite to replace it"),
    ("compile package package --overwrite", 1, "is what the package is made from"),
    ("policy", 2, "give either OUT or --into"),
    ("policy out", 2, "give --vocab-size"),
    ("policy out --vocab-size 4 --contract x", 2, "contract is 'x'"),
    ("policy --into missing", 1, "cannot read missing/inference_metadata.yaml"),
    ("prefix package out", 2, "no text given; give one of --prompt, --prompt-text, --system, --system-file"),
    ("prefix package out -p a --system b", 2, "--prompt and --system given"),
    ("prefix package out -p abc --thinking", 2, "go with --system"),
    ("prefix package out --system-file missing", 2, "cannot read --system-file missing"),
    ("prefix package out -p short", 1, "64 are the least"),
    ("prefix package text -p abc", 2, "text exists; give --overwrite to replace it"),
    ("pull package", 2, "is a package already"),
    ("inspect folder", 1, "folder is not a qsample package: it has no qsample.json; "),
    ("evaluate package", 2, "--text"),
    ("evaluate package --text missing", 2, "cannot read --text missing"),
    ("evaluate package --text empty", 2, "empty is empty; give a file with text"),
    ("evaluate package --text blank", 2, "blank is empty"),
    ("evaluate package --text latin", 2, "latin is not valid UTF-8 from byte 3 on"),
    ("evaluate ./nowhere --text text", 1, "nowhere does not exist; give a checkpoint folder, a package folder or"),
    ("evaluate package --text text --plot quality.pdf", 1, "--plot is 'quality.pdf'; give a file that ends in"),
    ("evaluate package --text text --stride 90 --max-length 80", 1, "--stride is 90 and --max-length 80"),
    ("evaluate package --text text --confidence 2", 1, "--confidence is 2"),
    ("verify package --max-mean 0.1", 2, "--text, --plot and the limits go with --against"),
    ("verify package --against ./nowhere", 1, "nowhere does not exist; give a checkpoint folder, a package folder or"),
    ("verify package --against package --text missing", 2, "cannot read --text missing"),
    ("verify package --against package --text text --positions 9999", 1, "text has 136 tokens, and 9999 positions"),
    ("verify package --against package --max-length 999", 1, "package holds 256 tokens; give at most that"),
    ("verify package --against package --min-agreement 2", 2, "--min-agreement"),
    ("verify package --against package --plot quality.pdf", 1, "--plot is 'quality.pdf'; give a file that ends in"),
    ("verify package --against package --weights int4", 2, "--weights is for a checkpoint, and package is a package"),
    ("bench package --top-p 2", 2, "--top-p is 2"),
    ("bench package --new-tokens 4 --prompt-lookup-num-tokens 4", 1, "is 4, and the package draws a token a step"),
    ("bench package --weights int4", 2, "--weights is for a checkpoint, and package is a package"),
    ("generate package -p x --weights int4", 2, "--weights is for a checkpoint, and package is a package"),
    ("chat package --weights int4", 2, "--weights is for a checkpoint, and package is a package"),
    ("serve package --weights int4", 2, "--weights is for a checkpoint, and package is a package"),
    ("chat package --preset speed", 2, "--preset is for a checkpoint, and package is a package; quantize it with"),
    ("generate --no-such-option", 2, "--no-such-option"),
    ("generate package", 2, "no prompt; give -p, or standard input"),
    ("generate -p x --temperature warm", 2, "valid number"),
    ("generate -p x --top-p 1.5", 2, "--top-p is 1.5; give a number > 0 and <= 1 (1 = off); see qsample generate"),
    ("generate -p x --top-p 0", 2, "--top-p is 0"),
    ("generate -p x --temperature -1", 2, "--temperature is -1"),
    ("generate -p x --temperature nan", 2, "--temperature is nan"),
    ("generate -p x --max-new-tokens 0", 2, "--max-new-tokens is 0"),
    ("generate -p x --greedy --top-k 5", 2, "--greedy chooses greedily, yet --top-k 5 is given"),
    (f"generate -p x --chat-template '{{{{ x }}}}{' ' * 300}'", 2, "is not a file; give a file"),
    ("generate -p x --raw --thinking", 2, RAW),
    ("generate nowhere -p x --raw --system S", 2, RAW),
    ("generate nowhere --prompt-file text --raw --chat-template tool_use", 2, RAW),
    ("generate nowhere -p x --stop-string=", 1, "--stop-string is"),
    ("chat nowhere --stop-string=", 1, "--stop-string is"),
    (f"generate {'x' * 300} -p x", 1, "xxx does not exist; give a checkpoint folder, a package folder or a hub id"),
    (f"generate package --raw -p {'x' * 400}", 1, "256"),
    ("generate plain -p x --system S", 1, "chat template"),
    ("generate package -p x --provider abacus", 1, "abacus"),
    ("generate ids -p One", 1, 'it takes no text; give token ids, as "prompt" of a line in a --prompt-file'),
    ("generate ids -p One -p Two", 1, "it takes no text; give token ids"),
    ("generate nowhere -p x --lora a", 2, "--lora is a; give NAME=DIR"),
    ("generate nowhere -p x --lora =a", 2, "--lora is =a; give NAME=DIR"),
    ("generate nowhere -p x --lora a=folder", 2, "folder has no adapter_config.json"),
    ("generate nowhere -p x --lora a=lora --lora a=lora", 2, "--lora names a twice"),
    ("generate nowhere -p x --lora a=lora --adapter b", 2, "--adapter is b, and --lora has a"),
    ("generate nowhere -p x --adapter b", 2, "--adapter is b, and --lora has none"),
    ("generate nowhere -p x --prompt-file rows.jsonl", 2, "--prompt and --prompt-file were given; give either"),
    ("generate nowhere -p x --output out", 2, "--output goes with --prompt-file"),
    ("generate nowhere -p x --slots 2", 2, "--slots goes with --prompt-file"),
    ("generate nowhere --prompt-file rows.jsonl --retry-errors", 2, "--retry-errors goes with --output"),
    ("generate nowhere --prompt-file missing", 2, "cannot read --prompt-file"),
    ("generate nowhere --prompt-file empty", 2, "is empty"),
    ("generate nowhere --prompt-file array.json", 2, "is a JSON array; give its objects a line each"),
    ("generate nowhere --prompt-file rows.jsonl --output no/folder", 2, "the folder no does not exist"),
    ("generate nowhere --prompt-file rows.jsonl --output folder", 2, "cannot write --output folder: it is not a plain"),
    ("generate nowhere --prompt-file rows.jsonl --output /dev/null", 2, "cannot write --output /dev/null: it is not a"),
    ("generate nowhere --prompt-file rows.jsonl --output rows.jsonl", 2, "are the same file"),
    ("generate package --prompt-file ids.jsonl --system S", 2, f"{CHAT_ONLY}; leave them out"),
    ("generate package --prompt-file ids.jsonl --no-thinking", 2, CHAT_ONLY),
    ("generate package --prompt-file ids.jsonl --chat-template-kwargs '{\"a\": 1}'", 2, CHAT_ONLY),
    ("generate package --prompt-file ids.jsonl --chat-template tool_use", 2, CHAT_ONLY),
    ("generate package --prompt-file rows.jsonl --raw --output out --provider abacus", 1, "abacus"),
    ("chat plain", 1, "the package has no chat template"),
    ("chat ids", 1, "the package has no tokenizer, so it cannot chat"),
    ("chat strict", 1, "no system"),
    ("chat package --chat-template ./none.jinja", 2, "--chat-template ./none.jinja is not a file"),
    ("chat package --chat-template tool_us", 1, "is neither Jinja nor a template of the package"),
    ("chat package --chat-template-kwargs {", 2, "is not valid JSON"),
    ("chat package --chat-template-kwargs []", 2, "give an object"),
    ("chat nowhere --top-p 7", 2, "--top-p is 7"),
    ("serve nowhere --request-timeout 0", 2, "--request-timeout is 0, too short for an answer; give more, or leave it"),
    ("serve nowhere --generation-config vllm", 2, "--generation-config is 'vllm'; choose one of openai, auto"),
    ("serve nowhere --reasoning-parser r2", 2, "--reasoning-parser is 'r2'; choose one of "),
    ("serve nowhere --speculative-config {", 2, "--speculative-config is not valid JSON (Expecting property name"),
    ("serve nowhere --speculative-config '{\"method\": \"eagle\"}'", 2, "is {'method': 'eagle'}; tokens are guessed"),
    ("serve nowhere --served-model-name ''", 2, "--served-model-name is empty; give the name"),
    ("serve nowhere --model tiny=elsewhere --served-model-name tiny", 2, "--model names tiny twice"),
    ("serve nowhere --model small=elsewhere", 2, "elsewhere is not a package"),
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with packages of several kinds and small files, which nothing may change."""
    folder = tmp_path_factory.mktemp("place")
    refusing = {"chat_template": "{{ raise_exception('no system') }}"}
    for name, options in (
        ("package", {}),
        ("other", {}),
        ("plain", {"tokenizer_config": {}}),
        ("ids", {"tokenizer": False}),
        ("strict", {"tokenizer_config": refusing}),
    ):
        fake_package(folder / name, **options)  # type: ignore[arg-type]
    for name in ("folder", "lora"):
        (folder / name).mkdir()
    (folder / "lora" / "adapter_config.json").write_text("{}")
    for name, content in (
        ("empty", b""),
        ("blank", b" \n"),
        ("latin", b"ok \xff"),
        ("text", b"The quick brown fox jumps over the lazy dog.\n" * 3),
        ("rows.jsonl", b'{"prompt": "x"}\n'),
        ("ids.jsonl", b'{"prompt": [5]}\n'),
        ("array.json", json.dumps([{"prompt": "x"}], indent=1).encode()),
    ):
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(("line", "status", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_the_commands_refuse(
    line: str, status: int, words: str, run: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    before = sorted(place.rglob("*"))
    command, *arguments = shlex.split(line)
    done, out, err = run(command, *arguments)
    assert (done, out) == (status, "")
    *progress, told = err.splitlines()
    assert words in told
    assert told.startswith("qsample: ")
    assert not progress or command in ("compile", "export", "bake"), (
        "a line, after the stages of a long command"
    )
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize(
    ("line", "status", "kind", "words"),
    [
        ("inspect no-such --json", 1, "PackageError", "is missing"),
        ("generate --json -p x --top-p 7", 2, "UsageError", "--top-p is 7"),
        ("generate --json --nonsense", 2, "UsageError", "No such option"),
        ("generate ids -p One --json", 1, "QsampleError", "it takes no text"),
        ("bench ./no-such --json", 1, "QsampleError", "./no-such does not exist"),
        ("evaluate ./nowhere --text text --json", 1, "QsampleError", "nowhere does not exist"),
    ],
)
def test_errors_as_json(
    line: str,
    status: int,
    kind: str,
    words: str,
    run: Any,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    code, out, err = run(*line.split())
    (error,) = json.loads(out).values()
    assert (code, error["status"], error["type"]) == (status, status, kind)
    assert words in error["message"]
    assert err.startswith("qsample: ")
    assert err.count("\n") == 1
