"""`qsample generate`: what it prints for one prompt and for several, and what it passes on."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from qsample.request.sampling_params import FILTER_FIELDS, OFF_VALUES
from qsample.runtime import load
from tests.helpers.command_line import qsample
from tests.helpers.fake_package import VOCAB, byte_tokenizer, fake_package
from tests.helpers.filters import ASKED, FILTERS, assert_read, read_by_the_graph, record_parameters
from tests.helpers.flags import unlike

GENERATE = ["--max-new-tokens", "8", "--seed", "3", "--temperature", "1.0"]


def test_generate_streams_one_prompt(llama_package: Path) -> None:
    done = qsample("generate", llama_package, "-p", "Hello", *GENERATE)
    assert done.returncode == 0, done.stderr
    expected = load(llama_package).generate("Hello", max_new_tokens=8, seed=3, temperature=1.0)
    assert expected.texts is not None
    assert done.stdout == f"Hello{expected.texts[0]}\n"
    assert re.fullmatch(r"8 tokens in [\d.]+ s, \d+ a second; seed 3\n", done.stderr)


def test_generate_reads_the_prompt_from_standard_input(
    run: Any, llama_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def piped(text: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        result: tuple[int, str, str] = run("generate", llama_package, *GENERATE)
        return result

    given = run("generate", llama_package, "-p", "Hello\n\n two", *GENERATE)[:2]
    assert piped("Hello\n\n two\n")[:2] == given
    assert piped("\ufeffHello\r\n\r\n two\r\n")[:2] == given
    for text in ("", "\ufeff", "\r\n"):
        status, out, err = piped(text)
        assert (status, out) == (2, "")
        assert "no prompt" in err


def test_standard_input_of_another_encoding(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"In the\xff"), encoding="utf-8"))
    status, _, err = run("generate", "nothing")
    assert (status, err.partition(";")[0]) == (
        2,
        "qsample: standard input is not valid UTF-8 from byte 6 on",
    )


def test_generate_several_prompts_in_sections(run: Any, llama_package: Path) -> None:
    status, out, _ = run("generate", llama_package, "-p", "One", "-p", "Two [b]", *GENERATE)
    assert status == 0
    output = load(llama_package).generate(
        ["One", "Two [b]"], max_new_tokens=8, seed=3, temperature=1.0
    )
    assert output.texts is not None
    for row, (prompt, text) in enumerate(zip(["One", "Two [b]"], output.texts, strict=True)):
        heading = f"{row + 1}: 8 tokens, length, seed {3 + row} "
        assert any(line.startswith(heading) for line in out.splitlines())
        assert prompt + text in out


def test_generate_json(run: Any, everything: Path) -> None:
    status, out, _ = run("generate", everything, "-p", "One", "-p", "Three", "--json", *GENERATE)
    assert status == 0
    document = json.loads(out)
    output = load(everything).generate(["One", "Three"], max_new_tokens=8, seed=3, temperature=1.0)
    assert output.texts is not None
    for row, result in enumerate(document["results"]):
        assert result["prompt"] == ["One", "Three"][row]
        assert result["text"] == output.texts[row]
        assert result["token_ids"] == output.token_ids[row]
        assert (result["finish_reason"], result["seed"]) == ("length", 3 + row)
        assert len(result["logprobs"]) == 8
        assert [len(step) for step in result["top_logprobs"]] == [3] * 8
    assert document["timing"]["steps"] == 7


AS_A_CHAT = "answering as a chat, with the model's chat template; --raw continues the text itself\n"


def test_a_prompt_is_a_user_s_message_if_the_model_has_a_template(run: Any, tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package").path
    model, user = load(package), {"role": "user", "content": "One"}

    def text(inputs: Any) -> str:
        texts = model.generate(inputs, max_new_tokens=8, seed=3, temperature=1.0).texts
        assert texts is not None
        return texts[0]

    answer, continuation = text([user]), text("One")
    assert answer != continuation
    status, out, err = run("generate", package, "-p", "One", *GENERATE)
    assert (status, out) == (0, f"{answer}\n")
    assert err.startswith(AS_A_CHAT)
    assert err.count("\n") == 2
    status, out, err = run("generate", package, "-p", "One", "-p", "Two", *GENERATE)
    assert (status, out.splitlines()[1], err.count(AS_A_CHAT)) == (0, answer, 1)
    status, out, err = run("generate", package, "-p", "One", "--raw", *GENERATE)
    assert (status, out, AS_A_CHAT in err) == (0, f"One{continuation}\n", False)
    status, out, err = run("generate", package, "-p", "One", "--json", *GENERATE)
    assert (status, json.loads(out)["results"][0]["text"]) == (0, answer)
    system = text([{"role": "system", "content": "S"}, user])
    status, out, err = run("generate", package, "-p", "One", "--system", "S", *GENERATE)
    assert (status, out, AS_A_CHAT in err) == (0, f"{system}\n", False), "it was asked for"


def test_a_model_without_a_template_continues_the_prompt(run: Any, tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package", tokenizer_config={}).path
    plain, raw = (
        run("generate", package, "-p", "One", *more, *GENERATE) for more in ([], ["--raw"])
    )
    assert plain[:2] == (0, raw[1])
    assert plain[1].startswith("One")
    assert AS_A_CHAT not in plain[2]
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}?")
    status, out, err = run(
        "generate", package, "-p", "One", "--chat-template", tmp_path / "mine.jinja", *GENERATE
    )
    model = load(package)
    assert model.tokenizer is not None
    ids = model.tokenizer.encode("One?", add_special_tokens=False)
    done = model.generate(ids, max_new_tokens=8, seed=3, temperature=1.0)
    assert (status, [out], AS_A_CHAT in err) == (
        0,
        [f"{text}\n" for text in done.texts or ()],
        False,
    )


@pytest.mark.ci
@pytest.mark.parametrize("chat", [False, True])
def test_generate_with_images(run: Any, smolvlm_package: Path, tmp_path: Path, chat: bool) -> None:
    from tests.helpers.tiny_vlms import picture

    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for seed, file in enumerate(files):
        picture(30, 20, seed).save(file)
    flags = [flag for file in files for flag in ("--image", file)] + ["--raw"] * (not chat)
    status, out, err = run(
        "generate",
        smolvlm_package,
        "-p",
        "hi",
        *flags,
        "--max-new-tokens",
        6,
        "--seed",
        1,
        "--json",
    )
    assert status == 0, err
    parts = [*({"type": "image", "image": file} for file in files), {"type": "text", "text": "hi"}]
    given: dict[str, Any] = (
        {"inputs": [{"role": "user", "content": parts}]}
        if chat
        else {"images": files, "inputs": "hi"}
    )
    done = load(smolvlm_package).generate(**given, max_new_tokens=6, seed=1)
    assert json.loads(out)["results"][0]["token_ids"] == done.token_ids[0]
    status, _, err = run("generate", smolvlm_package, "-p", "a", "-p", "b", "--image", files[0])
    assert (status, "goes with a single --prompt" in err) == (2, True)


def test_generate_passes_every_sampling_option(
    run: Any, llama_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def spy(self: Any, inputs: Any, **options: Any) -> None:
        seen.update(options, inputs=inputs)
        raise ValueError("seen")

    monkeypatch.setattr("qsample.runtime.causal_lm.CausalLM.generate", spy)
    given = {
        "max_new_tokens": 9,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.75,
        "min_p": 0.125,
        "seed": 11,
    }
    given |= {
        "repetition_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "min_new_tokens": 2,
    }
    given |= {"prompt_lookup_num_tokens": 6, "flush_every": 3}
    # The filters' numbers: all but a decay take a 1 or a 2.
    given |= {
        name: 1.0 if isinstance(OFF_VALUES[name], float) else 2
        for name in FILTER_FIELDS
        if OFF_VALUES[name] is not None
    }
    given["adaptive_decay"] = 0.5
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    flags += [
        "--no-double-buffering",
        "--stop-string=one",
        "--stop-string=two",
        "--stop-id=5",
        "--stop-id=6",
    ]
    flags += ["--bad-word=one", "--bad-word=two", "--dry-sequence-breaker=."]
    status, _, err = run("generate", llama_package, "-p", "x", *flags)
    assert (status, err) == (1, "qsample: seen\n")
    seen.pop("streamer")
    given |= {"double_buffering": False, "stop_strings": ("one", "two"), "num_return_sequences": 1}
    texts = {"bad_words": ["one", "two"], "dry_sequence_breakers": ["."]}
    assert seen == {**given, **texts, "eos_token_id": [5, 6], "inputs": ["x"], "outputs": []}
    assert run("generate", llama_package, "-p", "x", "--greedy")[0] == 1
    assert seen["do_sample"] is False


def test_guesses_are_counted(run: Any, tmp_path: Path) -> None:
    """From a flag, and from a line of a file."""
    package = fake_package(tmp_path / "package", num_speculative_tokens=4).path
    # The fake's cache is float32, over which guesses change last bits.
    prompt, more = (
        "abcabcabcabc",
        ("--raw", "--greedy", "--max-new-tokens=40", "--seed=1", "--no-batch-invariant"),
    )
    status, plain, err = run("generate", package, "-p", prompt, *more)
    assert (status, "a step" in err) == (0, False), err
    status, guessed, err = run(
        "generate", package, "-p", prompt, *more, "--prompt-lookup-num-tokens=4"
    )
    assert (status, guessed) == (0, plain), err
    drafts = json.loads(
        run("generate", package, "-p", prompt, *more, "--prompt-lookup-num-tokens=4", "--json")[1]
    )
    assert drafts["timing"]["drafts"]["num_drafts"] > 0
    assert re.search(r" a second, \d\.\d\d a step; seed 1\n$", err)
    row = {"prompt": prompt, "max_new_tokens": 4, "do_sample": False, "prompt_lookup_num_tokens": 5}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    _, lines, _ = run("generate", package, "--prompt-file", tmp_path / "rows.jsonl")
    assert "prompt_lookup_num_tokens is 5, and the package checks 4 guesses" in lines


def test_filters_reach_the_graph(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From flags, and from a line of a file."""
    package = fake_package(tmp_path / "package", filters=FILTERS)
    begun = record_parameters(monkeypatch)
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in ASKED.items()
        if not isinstance(value, list)
    ]
    flags += [
        "--dry-sequence-breaker=a",
        "--dry-sequence-breaker=:",
        "--bad-word=ab",
        "--bad-word=c",
    ]
    status, _, err = run("generate", package.path, "-p", "In", "--max-new-tokens=2", *flags)
    assert status == 0, err
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"prompt": "In", "max_new_tokens": 2, **ASKED}) + "\n"
    )
    assert run("generate", package.path, "--prompt-file", tmp_path / "rows.jsonl")[0] == 0
    assert len(begun) == 2
    for row in begun:
        assert_read(row, read_by_the_graph())
    status, _, err = run(
        "generate", fake_package(tmp_path / "bare").path, "-p", "In", "--typical-p=0.9"
    )
    assert (status, "--typical-p is 0.9, and the package was exported with no filters" in err) == (
        1,
        True,
    ), err
    assert (
        "export the model again with --filter typical_p, or give --typical-p 1.0 to go without"
        in err
    )


def test_generate_from_a_package_without_the_sampler(
    run: Any, exported: Any, llama_package: Path
) -> None:
    host = run("generate", exported("llama", include_sampler=False), "-p", "One", *GENERATE)
    baked = run("generate", llama_package, "-p", "One", *GENERATE)
    assert (host[0], host[1]) == (0, baked[1])


def test_generate_advises_compile_once_for_a_large_portable_package(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = fake_package(tmp_path / "package").path
    arguments = ("generate", package, "-p", "a", "--max-new-tokens", "1")
    assert "qsample compile" not in run(*arguments)[2]
    monkeypatch.setattr("qsample.package.package._MIN_BYTES_FOR_ADVICE", 1000)
    status, _, err = run(*arguments)
    assert (status, err.count(f"`qsample compile {package} OUT --weights int4`")) == (0, 1)
    figures = {"matrices": 1, "bits": [4], "block_sizes": [32], "bytes": 9}
    package = fake_package(tmp_path / "packed", manifest={"packed_weights": figures}).path
    err = run("generate", package, *arguments[2:])[2]
    assert (f"`qsample compile {package} OUT`" in err, "int4" in err, "4 bits" in err) == (
        True,
        False,
        False,
    )


def test_an_answer_that_is_cut_inside_a_character(run: Any, tmp_path: Path) -> None:
    """The model writes a first byte of characters over and over: two that no character has, and one
    that is cut off."""
    first = byte_tokenizer().token_to_id("ð")  # the byte F0

    def always(graph: onnx.ModelProto) -> None:
        (bias,) = (tensor for tensor in graph.graph.initializer if tensor.name == "head_bias")
        values = np.zeros(VOCAB, np.float32)
        values[first] = 1e4
        bias.CopyFrom(numpy_helper.from_array(values, "head_bias"))

    package, text = fake_package(tmp_path / "package", edit=always).path, "\ufffd\ufffd"
    (tmp_path / "prompts").write_text("x\n")
    options = ("--raw", "--greedy", "--max-new-tokens", "3")
    streamed = run("generate", package, "-p", "x", *options)[1]
    whole = json.loads(run("generate", package, "-p", "x", "--json", *options)[1])["results"][0]
    line = json.loads(run("generate", package, "--prompt-file", tmp_path / "prompts", *options)[1])
    assert (streamed, whole["token_ids"], line["token_ids"]) == (
        f"x{text}\n",
        [first] * 3,
        [first] * 3,
    )
    assert whole["text"] == line["text"] == text


# Its tokens are bytes, so a random model follows an expression for long, or not at all.
FORMED = ["--max-new-tokens", "24", "--seed", "5", "--temperature", "50", "--top-k", "0"]


def test_answers_in_a_form(run: Any, tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package", allowed_tokens=True, generation_config={}).path
    prompts = ["-p", "One", "-p", "Two"]
    status, out, err = run(
        "generate",
        package,
        *prompts,
        "--num-return-sequences",
        "3",
        "--regex",
        "(ab|cd){2}e?",
        "--json",
        *FORMED,
    )
    assert status == 0, err
    results = json.loads(out)["results"]
    assert [row["prompt"] for row in results] == ["One"] * 3 + ["Two"] * 3
    assert [row["seed"] for row in results] == [5, 6, 7, 8, 9, 10]
    assert all(re.fullmatch("(ab|cd){2}e?", row["text"]) for row in results), (
        "rows that end early, and rows that do not"
    )
    assert len({row["text"] for row in results}) > 1
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    for given in (json.dumps(schema), tmp_path / "schema.json"):
        status, out, err = run("generate", package, "-p", "x", "--json-schema", given, *FORMED)
        assert (status, type(json.loads(out.removeprefix("x"))["a"])) == (0, bool), err


def test_settings_of_the_model_that_a_package_lacks_are_a_note(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"suppress_tokens": [5], "num_beams": 4, "typical_p": 0.9, "max_new_tokens": 3}
    package = fake_package(tmp_path / "package", generation_config=settings).path
    (tmp_path / "prompts.txt").write_text("One\nTwo\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain\n"))
    for command in (
        ["generate", package, "-p", "One", "-p", "Two"],
        ["generate", package, "--prompt-file", tmp_path / "prompts.txt"],
        ["chat", package],
    ):
        status, _, err = run(*command)
        assert status == 0, err
        assert err.count('asks for "suppress_tokens", "typical_p", which the package was made') == 1
        assert err.count('asks for "num_beams", which qsample does not do') == 1
        assert err.count("generation_config") == 1


def test_rows_of_a_prompt_file_in_a_form(run: Any, tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package", allowed_tokens=True, generation_config={}).path
    (tmp_path / "prompts.txt").write_text("One\nTwo\nThree\n")
    (tmp_path / "form.gbnf").write_text('root ::= ("ab" | "cd") "!"\n')
    rows = ["--prompt-file", tmp_path / "prompts.txt", "--slots", "2", *FORMED]
    output = tmp_path / "out.jsonl"
    status, _, err = run(
        "generate", package, *rows, "--grammar", tmp_path / "form.gbnf", "--output", output
    )
    assert status == 0, err
    assert {json.loads(line)["text"] for line in output.read_text().splitlines()} <= {"ab!", "cd!"}


def test_the_flags() -> None:
    own = """
        model [PACKAGE_OR_MODEL]; --prompt/-p repeated; --image FILE repeated; --prompt-file FILE; --output FILE
        --retry-errors; --slots >=1; --num-return-sequences >=1 <=128 = 1; --raw; --ctx-len >=2; --flush-every >=1
        --double-buffering/--no-double-buffering = True; --json
    """
    assert unlike(own, "generate") == []
