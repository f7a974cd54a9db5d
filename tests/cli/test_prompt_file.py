"""`qsample generate --prompt-file`: JSON lines in order, errors that are their row's own, and runs
that go on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from qsample.cli.common import ChatMode
from qsample.cli.prompt_file import read_lines, rows_of
from qsample.package.package import Package
from qsample.runtime import load
from qsample.runtime.decode.loop import DecodeLoop
from tests.helpers.command_line import COMMAND, ROOT
from tests.helpers.fake_package import compilation, fake_package

ROWS: list[Any] = [
    {"prompt": "hello", "id": "a", "max_new_tokens": 4},
    {"messages": [{"role": "user", "content": "hi"}], "id": 7, "temperature": 0.5},
    {"prompt": [5, 6, 7], "do_sample": False, "metadata": {"kept": "out"}},
    {"prompt": "x", "max_length": 30, "seed": 5, "stop_strings": ["zz"]},
    {
        "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}],
        "tools": [{"name": "f"}],
    },
    {"prompt": "long one", "max_new_tokens": 11, "eos_token_id": [5]},
]
AS_A_CHAT = "answering as a chat, with the model's chat template; --raw continues the text itself\n"
SETTINGS = ["--max-new-tokens", "6", "--seed", "3", "--temperature", "0.9"]


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return fake_package(tmp_path / "package")


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8"
    )
    return path


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_images_of_a_line(tmp_path: Path) -> None:
    """They are files beside the prompts, or data."""
    url = "data:image/png;base64,AAAA"
    content = [
        {"type": "image", "path": "a.png"},
        "hi",
        {"type": "image_url", "image_url": {"url": url}},
    ]
    source = [
        {"prompt": "x", "images": ["a.png", url]},
        {"messages": [{"role": "user", "content": content}]},
    ]
    file = tmp_path / "a.png"
    file.write_bytes(b"1")
    parts = [{"type": "image", "image": image} for image in (file, bytes(3))]
    lines = read_lines(written(tmp_path / "p.jsonl", source))
    rows = rows_of(lines, {}, ChatMode())
    assert (rows[0].inputs, rows[0].options["images"]) == ("x", [file, bytes(3)])
    assert rows[1].inputs == [{"role": "user", "content": [parts[0], "hi", parts[1]]}]
    rows = rows_of(lines, {}, ChatMode(enabled=True))
    assert rows[0].inputs == [{"role": "user", "content": [*parts, {"type": "text", "text": "x"}]}]


@pytest.mark.ci
def test_rows_with_images(run: Any, smolvlm_package: Path, tmp_path: Path) -> None:
    from tests.helpers.tiny_vlms import picture

    picture(30, 20).save(tmp_path / "a.png")
    lines = [{"prompt": "x", "images": ["a.png"]}, {"prompt": "x"}]
    source = written(tmp_path / "p.jsonl", lines)
    status, out, err = run("generate", smolvlm_package, "--prompt-file", source, "--raw", *SETTINGS)
    assert status == 0, err
    model = load(smolvlm_package)
    for row, (record, images) in enumerate(
        zip(records(out), [tmp_path / "a.png", None], strict=True)
    ):
        done = model.generate("x", images=images, max_new_tokens=6, temperature=0.9, seed=3 + row)
        assert record["token_ids"] == done.token_ids[0]
        assert record["prompt_tokens"] == done.prompt_lengths[0]


def test_every_row_equals_the_row_alone(run: Any, package: Package, tmp_path: Path) -> None:
    status, out, err = run(
        "generate", package.path, "--prompt-file", written(tmp_path / "p.jsonl", ROWS), *SETTINGS
    )
    assert status == 0, err
    found = records(out)
    assert [record["id"] for record in found] == ["a", 7, 3, 4, 5, 6]
    model = load(package.path)
    for index, (row, record) in enumerate(zip(ROWS, found, strict=True)):
        options = {"max_new_tokens": 6, "temperature": 0.9, "seed": 3 + index, **row}
        if "max_length" in row:
            del options["max_new_tokens"]
        if row.get("do_sample") is False:
            del options["temperature"]
        inputs = options.pop("prompt", None) or options.pop("messages")
        if isinstance(inputs, str):
            inputs = [{"role": "user", "content": inputs}]
        for name in ("id", "metadata"):
            options.pop(name, None)
        alone = model.generate(inputs, **options)
        assert record["token_ids"] == alone.token_ids[0], row
        assert alone.texts is not None
        assert (record["text"], record["seed"]) == (alone.texts[0], options["seed"])
        assert (record["finish_reason"], record["prompt_tokens"]) == (
            alone.finish_reasons[0],
            alone.prompt_lengths[0],
        )
        assert record["completion_tokens"] == len(record["token_ids"])
    assert "6 rows, " in err
    assert err.count(AS_A_CHAT) == 1


def test_a_line_of_text_is_a_prompt(run: Any, package: Package, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes('\ufeffone\r\n\n{"two": 2}\nthree'.encode())
    model, system = load(package.path), {"role": "system", "content": "S"}
    for flags, head, notes in ((["--raw"], None, 0), ([], [], 1), (["--system", "S"], [system], 0)):
        status, out, err = run("generate", package.path, "--prompt-file", path, *flags, *SETTINGS)
        found = records(out)
        assert (status, [record["id"] for record in found], err.count(AS_A_CHAT)) == (
            0,
            [1, 3, 4],
            notes,
        )
        for record, prompt in zip(found, ["one", '{"two": 2}', "three"], strict=True):
            inputs: Any = prompt if head is None else [*head, {"role": "user", "content": prompt}]
            alone = model.generate(inputs, max_new_tokens=6, temperature=0.9, seed=record["seed"])
            assert record["token_ids"] == alone.token_ids[0]


def test_token_ids_and_raw_texts_are_not_answered_as_a_chat(
    run: Any, package: Package, tmp_path: Path
) -> None:
    """Token ids are continued, conversations stay as they are, and a model without a template
    continues texts."""
    source = written(tmp_path / "p.jsonl", [{"prompt": [5, 6]}, ROWS[1]])
    plain, raw = (
        run("generate", package.path, "--prompt-file", source, *more, *SETTINGS)
        for more in ([], ["--raw"])
    )
    assert (plain[0], plain[1], AS_A_CHAT in plain[2]) == (0, raw[1], False)
    system = run("generate", package.path, "--prompt-file", source, "--system", "S", *SETTINGS)
    assert [
        mine == other for mine, other in zip(records(system[1]), records(raw[1]), strict=True)
    ] == [True, False]
    bare = fake_package(tmp_path / "bare", tokenizer_config={}).path
    source = written(tmp_path / "q.jsonl", [{"prompt": "one"}])
    plain, raw = (
        run("generate", bare, "--prompt-file", source, *more, *SETTINGS) for more in ([], ["--raw"])
    )
    assert (plain[0], plain[1], AS_A_CHAT in plain[2]) == (0, raw[1], False)


def test_log_probabilities_are_for_rows_that_ask(
    run: Any, everything: Path, tmp_path: Path
) -> None:
    names = ["logprobs", "top_logprob_ids", "top_logprobs", "probs"]
    asked: list[Any] = [None, [], ["logprobs"], names, ["nonsense"], "logprobs"]
    rows = [{"prompt": "x"}, *({"prompt": "x", "outputs": outputs} for outputs in asked[1:])]
    source = written(tmp_path / "p.jsonl", rows)
    status, out, _ = run(
        "generate", everything, "--prompt-file", source, "--max-new-tokens", "2", "--greedy"
    )
    found = records(out)
    assert status == 1
    assert [[name for name in names if name in record] for record in found] == [
        [],
        [],
        ["logprobs"],
        names,
        [],
        [],
    ]
    done = load(everything).generate("x", max_new_tokens=2, do_sample=False)
    assert done.logprobs is not None
    assert found[2]["logprobs"] == done.logprobs[0].reshape(-1, 1).tolist()
    assert all(
        "give a list of the package's optional outputs" in record["error"]["message"]
        for record in found[4:]
    )


def test_an_error_affects_only_its_row(run: Any, package: Package, tmp_path: Path) -> None:
    bad: list[tuple[Any, str]] = [
        ({"prompt": 3, "id": "z"}, "prompt is 3; give a text, or token ids"),
        ("not json", "the line is not valid JSON"),
        ("[" * 100_000, "the line is not valid JSON"),
        ([1], "not a JSON object"),
        (
            {"prompt": "x", "temprature": 1},
            "temprature, which is not a parameter; did you mean 'temperature'? Otherwise",
        ),
        (
            {"prompt": "x", "max_tokens": 1},
            "max_tokens, which is not a parameter; did you mean 'max_new_tokens'?",
        ),
        (
            {"prompt": "x", "source": 1},
            "source, which is not a parameter; put your own fields into metadata",
        ),
        ({"prompt": "x", "messages": []}, "prompt and messages; give either"),
        ({"id": 1}, "neither prompt nor messages"),
        ({"messages": "hi"}, "messages is 'hi'"),
        ({"messages": []}, "messages is []"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "part of type 'image'"),
        (
            {"prompt": "x", "images": ["none.png"]},
            "the image none.png cannot be read: No such file",
        ),
        ({"prompt": "x", "images": "a.png"}, "images is 'a.png'; give a list of files"),
        ({"prompt": "x", "images": ["https://example.org/a.png"]}, "nothing is fetched here"),
        ({"prompt": "x", "top_p": 7}, "top_p is 7"),
        ({"prompt": "x", "eos_token_id": {"a": 1}}, "eos_token_id"),
        ({"prompt": "x" * 300}, "context length is 256"),
        ({"prompt": [10**9]}, "token id 1000000000"),
        ({"prompt": [5], "tools": [{}]}, "tools go with chat messages"),
        ({"prompt": "\ud800"}, ""),
    ]
    rows = [line for wrong, _ in bad for line in (wrong, {"prompt": "fine"})]
    status, out, err = run(
        "generate", package.path, "--prompt-file", written(tmp_path / "p.jsonl", rows), *SETTINGS
    )
    found = records(out)
    assert status == 1
    assert f"{len(bad)} of {2 * len(bad)} rows have an error" in err
    for (_, message), wrong, fine in zip(bad, found[::2], found[1::2], strict=True):
        assert message in wrong["error"]["message"]
        assert len(fine["token_ids"]) == 6
    assert found[0]["id"] == "z"


def test_a_run_that_was_cut_off_goes_on(run: Any, package: Package, tmp_path: Path) -> None:
    source, whole, part = (
        written(tmp_path / "p.jsonl", [*ROWS, "broken"]),
        tmp_path / "whole",
        tmp_path / "part",
    )
    command = ["generate", package.path, "--prompt-file", source, *SETTINGS, "--output"]
    assert run(*command, whole)[0] == 1
    content = whole.read_bytes()
    second = content.index(b"\n") + 1
    for size in (0, 3, 20, second - 1, second, second + 1, len(content) - 1, len(content)):
        part.write_bytes(content[:size])
        before = content[:size].count(b"\n")
        status, out, err = run(*command, part)
        assert (status, out) == (1, "")
        assert "1 of 7 rows have an error" in err
        assert part.read_bytes() == content, size
        assert (f"{before} of 7 rows are in" in err) == (before > 0)
        assert (re.search(rf"^{7 - before} rows?, ", err, re.MULTILINE) is not None) == (
            before < 7
        ), "done once"
    source.write_text(source.read_text() + '{"prompt": "one more"}\n')
    run(*command, part)
    assert part.read_bytes().startswith(content)
    assert part.read_bytes().count(b"\n") == 8


def test_files_of_other_results_are_refused_and_unchanged(
    run: Any, package: Package, tmp_path: Path
) -> None:
    source, output = written(tmp_path / "p.jsonl", ROWS), tmp_path / "out"
    command: list[Any] = ["generate", package.path, "--prompt-file", source, "--output", output]
    assert run(*command, *SETTINGS)[0] == 0
    content = output.read_bytes()

    def refused(message: str, *arguments: Any) -> None:
        content_before = output.read_bytes()
        status, out, err = run(*arguments)
        assert (status, out) == (2, "")
        assert message in err
        assert output.read_bytes() == content_before

    changed = written(tmp_path / "changed.jsonl", [*ROWS[:3], {"prompt": "x", "id": 44}, *ROWS[4:]])
    refused(
        "line 4 of --output",
        "generate",
        package.path,
        "--prompt-file",
        changed,
        *command[4:],
        *SETTINGS,
    )
    fewer = written(tmp_path / "fewer.jsonl", ROWS[:2])
    refused("more lines than the prompts have rows", *command[:3], fewer, *command[4:], *SETTINGS)
    output.write_text("my notes")
    refused("line 1 of --output", *command, *SETTINGS)
    output.write_bytes(content[:-5] + b"}")
    assert run(*command, *SETTINGS)[0] == 0
    assert output.read_bytes() == content, "a torn line, whatever it ends with, is written again"


def test_rows_with_an_error_are_done_again(run: Any, package: Package, tmp_path: Path) -> None:
    """Also from corrected prompts; the other lines stay, byte by byte, and must be those of their
    prompts."""
    bad = [
        {"prompt": "a", "id": {"error": {}}},
        {"prompt": 3},
        "broken",
        {"prompt": "b"},
        {"prompt": "x" * 300},
    ]
    good = [bad[0], {"prompt": "c"}, "broken", bad[3], {"prompt": "x"}, {"prompt": "d"}]
    source, output = written(tmp_path / "p.jsonl", bad), tmp_path / "out"
    command: list[Any] = [
        "generate",
        package.path,
        "--prompt-file",
        source,
        "--output",
        output,
        *SETTINGS,
    ]
    assert (
        "3 of 5 rows have an error, see their lines; --retry-errors does these again"
        in run(*command)[2]
    )
    before = output.read_bytes().splitlines()

    written(source, good)
    os.chmod(output, 0o640)
    link = tmp_path / "link"
    link.symlink_to(output)
    status, _, err = run(*command[:5], link, *SETTINGS, "--retry-errors")
    after = output.read_bytes().splitlines()
    assert (status, link.is_symlink(), output.stat().st_mode & 0o777) == (1, True, 0o640)
    assert "1 of 6 rows have an error" in err
    assert (after[0], after[3]) == (before[0], before[3])
    whole = tmp_path / "whole"
    run(*command[:5], whole, *SETTINGS)
    assert after == whole.read_bytes().splitlines(), "as a single run of the corrected prompts"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "link",
        "out",
        "p.jsonl",
        "package",
        "whole",
    ]

    written(source, [{"prompt": "another", "id": "another"}, *good[1:]])
    status, _, err = run(*command, "--retry-errors")
    assert (status, output.read_bytes().splitlines()) == (2, after)
    assert "line 1 of --output" in err
    assert "does not have the id of row 1" in err
    assert "--retry-errors goes with --output" in run(*command[:4], "--retry-errors")[2]


def test_a_truncated_line_that_ends_is_refused(run: Any, package: Package, tmp_path: Path) -> None:
    source, output = written(tmp_path / "p.jsonl", ROWS[:2]), tmp_path / "out"
    command: list[Any] = [
        "generate",
        package.path,
        "--prompt-file",
        source,
        "--output",
        output,
        *SETTINGS,
    ]
    assert run(*command)[0] == 0
    cut = output.read_bytes()[:40] + b"\n"
    output.write_bytes(cut)
    status, _, err = run(*command)
    assert (status, output.read_bytes()) == (2, cut)
    assert "line 1 of --output" in err
    assert "is not a whole line of a result" in err


def test_a_full_disk_leaves_whole_lines(run: Any, package: Package, tmp_path: Path) -> None:
    """A limit of the process, in place of a disk: the system takes a part of a line and then
    nothing."""
    resource = pytest.importorskip("resource")
    source, output = written(tmp_path / "p.jsonl", ROWS), tmp_path / "out"
    command: list[Any] = [
        "generate",
        package.path,
        "--prompt-file",
        source,
        "--output",
        output,
        *SETTINGS,
    ]
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
        status, _, err = run(*command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    content = output.read_bytes()
    assert (status, content.endswith(b"\n"), 0 < content.count(b"\n") < 6) == (1, True, True)
    assert (
        f"cannot write to --output {output}: File too large; the rows before are in it. Free some space"
        in err
    )
    assert run(*command)[0] == 0
    assert output.read_bytes().startswith(content)
    assert output.read_bytes().count(b"\n") == 6


def test_standard_output_has_only_lines_of_rows_after_errors(
    run: Any, package: Package, tmp_path: Path
) -> None:
    source, output = (
        written(tmp_path / "p.jsonl", [{"prompt": "x"}, {"prompt": 3}]),
        tmp_path / "out",
    )
    status, out, err = run("generate", package.path, "--prompt-file", source, "--json", *SETTINGS)
    assert (status, [set(record) & {"text", "error"} for record in records(out)]) == (
        1,
        [{"text"}, {"error"}],
    )
    assert "1 of 2 rows have an error" in err
    status, out, _ = run(
        "generate", package.path, "--prompt-file", source, "--json", "--output", output, *SETTINGS
    )
    assert (status, json.loads(out)["error"]["status"]) == (1, 1), (
        "what is in the file is not on standard output"
    )


def test_two_runs_do_not_write_to_one_file(run: Any, package: Package, tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    source, output = written(tmp_path / "p.jsonl", ROWS), tmp_path / "out"
    with output.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        status, _, err = run(
            "generate", package.path, "--prompt-file", source, "--output", output, *SETTINGS
        )
    assert status == 2
    assert "another process writes to --output" in err


def test_a_full_context_is_reported(run: Any, tmp_path: Path) -> None:
    path = fake_package(tmp_path / "package", compilation=compilation(ctx_len=48)).path
    rows = [{"prompt": "x", "max_new_tokens": 400}, {"prompt": "x", "max_new_tokens": 4}]
    _, out, err = run(
        "generate", path, "--prompt-file", written(tmp_path / "p.jsonl", rows), "--seed", "3"
    )
    first, second = records(out)
    assert first["context_full"] is True
    assert "context_full" not in second
    assert (
        "the context of 48 tokens is full, which ended 1 of 2 rows; compile with a larger --ctx-len"
        in err
    )
    for more, said in ((400, True), (4, False)):
        err = run("generate", path, "-p", "x", "--max-new-tokens", str(more), "--seed", "3")[2]
        assert ("the context of 48 tokens is full, which ended 1 of 1 rows" in err) == said


def test_many_rows_keep_the_slots_full_and_their_order(
    run: Any, package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, step = [0], DecodeLoop.step

    def counting(self: DecodeLoop) -> None:
        steps[0] += 1
        step(self)

    monkeypatch.setattr(DecodeLoop, "step", counting)
    rows = [
        {"prompt": "x", "max_new_tokens": 1 + 7 * index % 40, "eos_token_id": []}
        for index in range(150)
    ]
    status, out, err = run(
        "generate",
        package.path,
        "--prompt-file",
        written(tmp_path / "p.jsonl", rows),
        "--slots",
        "4",
        "--seed",
        "1",
    )
    found = records(out)
    assert status == 0, err
    assert [record["id"] for record in found] == list(range(1, 151))
    counts = [record["completion_tokens"] for record in found]
    assert counts == [row["max_new_tokens"] for row in rows]
    assert steps[0] < sum(counts) / 2, "four rows at once, but for the prompts and the end"


def test_a_graph_that_fails_ends_the_run_and_marks_no_row(
    run: Any, package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output, whole = (
        written(tmp_path / "p.jsonl", ROWS),
        tmp_path / "out",
        tmp_path / "whole",
    )
    command = [
        "generate",
        package.path,
        "--prompt-file",
        source,
        *SETTINGS,
        "--slots",
        "1",
        "--output",
    ]
    steps, step = [0], DecodeLoop.step

    def failing(self: DecodeLoop) -> None:
        steps[0] += 1
        if steps[0] == 15:
            raise MemoryError("no more")
        step(self)

    with monkeypatch.context() as patch:
        patch.setattr(DecodeLoop, "step", failing)
        status, _, err = run(*command, output)
    assert status == 1
    assert "the engine ended because its graph failed (" in err
    assert 0 < output.read_bytes().count(b"\n") < len(ROWS)
    assert b"error" not in output.read_bytes()
    assert [run(*command, path)[0] for path in (output, whole)] == [0, 0]
    assert output.read_bytes() == whole.read_bytes()


def test_the_bar_and_the_rows_do_not_mix(package: Package, tmp_path: Path) -> None:
    pty = pytest.importorskip("pty")
    source = written(tmp_path / "p.jsonl", ROWS)
    main, side = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "generate", str(package.path), "--prompt-file", str(source), *SETTINGS],
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "NO_COLOR": ""},
        stdout=subprocess.PIPE,
        stderr=side,
    )
    os.close(side)
    out, _ = process.communicate(timeout=120)
    shown = b""
    with suppress(OSError):  # Linux's end of a pseudo-terminal
        while part := os.read(main, 65536):
            shown += part
    os.close(main)
    assert process.returncode == 0, shown
    assert len(records(out.decode())) == len(ROWS)
    assert b"of 6 rows, " in shown
    assert b"token_ids" not in shown


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_killed_goes_on(
    run: Any, package: Package, tmp_path: Path, how: signal.Signals
) -> None:
    source = written(tmp_path / "p.jsonl", [{"prompt": f"row {index}"} for index in range(12)])
    slow = (
        "import time; from qsample.runtime.request import Request; update = Request.update\n"
        "Request.update = lambda self: (time.sleep(0.05), update(self))[1]\n"
        "from qsample.cli import main; main()"
    )
    slowly = [sys.executable, "-c", slow]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    arguments = [
        "generate",
        str(package.path),
        "--prompt-file",
        str(source),
        *SETTINGS,
        "--slots",
        "1",
        "--output",
    ]
    process = subprocess.Popen(
        [*slowly, *arguments, str(killed)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while (
        not (killed.exists() and killed.read_bytes().count(b"\n") >= 2)
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    done = killed.read_bytes().count(b"\n")
    assert 2 <= done < 12
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert f"{done} of 12 rows are done; the same command continues" in err
    assert run(*arguments, whole)[0] == 0
    assert run(*arguments, killed)[0] == 0
    assert killed.read_bytes() == whole.read_bytes()
