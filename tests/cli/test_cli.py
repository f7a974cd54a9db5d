"""The commands: what they print where, and the status that they end with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qsample import cli
from qsample.contract import Features
from qsample.package import read_package
from tests.conftest import made_once

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-c", "from qsample.cli import main; main()"]


def qsample(*arguments: str | Path, text: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, as a shell would."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=text,
        stdin=subprocess.DEVNULL if text is None else None,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120", **variables},
        check=False,
    )


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command line here; (status, stdout, stderr)."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        status = cli.run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_help_lists_the_commands(run: Any) -> None:
    status, out, err = run("--help")
    assert (status, err) == (0, "")
    for command in ("export", "compile", "generate", "bench", "inspect"):
        assert re.search(rf"\b{command}\b", out)


@pytest.mark.parametrize("command", ["export", "compile", "generate", "bench", "inspect"])
def test_help_of_a_command_has_examples(run: Any, command: str) -> None:
    status, out, err = run(command, "--help")
    assert (status, err) == (0, "")
    assert "Examples" in out
    assert f"qsample {command} " in out.split("Examples")[1]


def test_the_examples_in_the_help_use_options_that_exist() -> None:
    for command in cli.app.registered_commands:
        assert command.callback is not None
        known = {name.replace("_", "-") for name in command.callback.__annotations__}
        known = (known - {"as-json"}) | {"json"}
        assert set(re.findall(r" --([a-z-]+)", command.epilog or "")) <= known


def test_version(run: Any) -> None:
    assert run("--version")[:2] == (0, "qsample 0.1.0\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command"),
        (["export", "only-a-model"], "Missing argument"),
        (["compile", "a", "b", "--batch-size", "0"], "--batch-size"),
        (["generate", "--no-such-option"], "--no-such-option"),
        (["generate", "-p", "x", "--temperature", "warm"], "valid number"),
        (["generate", "-p", "x", "--top-p", "1.5"], "top_p is 1.5"),
        (["generate", "-p", "x", "--top-p", "0"], "top_p is 0"),
        (["generate", "-p", "x", "--temperature", "-1"], "temperature is -1"),
        (["generate", "-p", "x", "--temperature", "nan"], "temperature is nan"),
        (["generate", "-p", "x", "--greedy", "--top-k", "5"], "do_sample=False"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(run: Any, arguments: list[str], message: str) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("qsample: ")
    assert err.count("\n") == 1


def test_an_error_is_one_line_and_status_1(tmp_path: Path) -> None:
    done = qsample("inspect", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"qsample: {tmp_path} is not a qsample package: it has no qsample.json\n"


@pytest.mark.parametrize("arguments", [["--debug"], []], ids=["option", "variable"])
def test_debug_shows_the_traceback(tmp_path: Path, arguments: list[str]) -> None:
    done = qsample(*arguments, "inspect", tmp_path, QSAMPLE_DEBUG="" if arguments else "1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "PackageError" in done.stderr


def test_an_unexpected_error_names_its_type(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("qsample.package.read_package", broken)
    status, _, err = run("inspect", tmp_path)
    assert status == 1
    assert err == "qsample: ZeroDivisionError: a bug (QSAMPLE_DEBUG=1 shows where)\n"


def test_a_missing_dependency_says_what_to_install(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "transformers" or "exporters" in name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "transformers", None)
    status, _, err = run("export", tmp_path, tmp_path / "out")
    assert status == 1
    assert "install qsample with its extra 'export'" in err


def test_an_interrupt_ends_with_130(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("qsample.package.read_package", interrupted)
    assert run("inspect", tmp_path)[0] == 130


@pytest.fixture(scope="session")
def everything(checkpoint: Any, shared_folder: Path) -> Path:
    """A package with every feature, exported by the command."""
    features = ["--logprobs", "--top-logprobs", "3", "--logit-bias", "--allowed-tokens", "--return-pdfs"]

    def export(out: Path) -> None:
        # What is there already is replaced only when that is asked for.
        out.mkdir()
        (out / "qsample.json").write_text("{}")
        refused = qsample("export", checkpoint("llama"), out)
        assert refused.returncode == 1
        assert "already holds a package" in refused.stderr
        done = qsample("export", checkpoint("llama"), out, "--overwrite", *features)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{out}\n"
        assert done.stderr.count("\n") == 1, "the libraries' own notices are kept away"

    return made_once(shared_folder / "everything", export)


def test_export_writes_a_package_with_what_was_asked_for(everything: Path) -> None:
    assert read_package(everything).interface.features == Features(True, True, True, True, 3, True)


def test_export_passes_every_option(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def spy(model: str, **options: Any) -> None:
        seen.update(options, model=model)
        raise ValueError("seen")

    monkeypatch.setattr("qsample.auto_model.AutoModelForCausalLM.from_pretrained", spy)
    defaults = {
        "include_sampler": True,
        "return_pdfs": False,
        "logit_bias": False,
        "allowed_tokens": False,
        "logprobs": False,
        "top_logprobs": 0,
        "dtype": "float32",
        "revision": None,
        "adapter": None,
    }
    assert run("export", "some/model", tmp_path / "p")[0] == 1
    assert seen == {**defaults, "model": "some/model"}
    run("export", "some/model", tmp_path / "p", "--no-sampler", "--dtype", "float16", "--revision", "v2")
    assert seen == {**defaults, "model": "some/model", "include_sampler": False, "dtype": "float16", "revision": "v2"}


def test_export_of_a_package_is_wrong_usage(run: Any, llama_package: Path, tmp_path: Path) -> None:
    status, _, err = run("export", llama_package, tmp_path / "p")
    assert status == 2
    assert "package already" in err


def test_export_of_no_model(run: Any, tmp_path: Path) -> None:
    status, _, err = run("export", tmp_path / "nothing", tmp_path / "p")
    assert status == 1
    assert "does not exist" in err
    assert not (tmp_path / "p").exists()


def test_compile_takes_a_package(run: Any, llama_package: Path, tmp_path: Path) -> None:
    out = tmp_path / "cpu"
    status, printed, err = run("compile", llama_package, out, "--ctx-len", "64", "--batch-size", "2")
    assert (status, printed) == (0, f"{out}\n"), err
    compilation = read_package(out).manifest.compilation
    assert compilation is not None
    assert (compilation.provider, compilation.batch_size, compilation.ctx_len) == ("cpu", 2, 64)


def test_compile_for_an_unknown_target(run: Any, llama_package: Path, tmp_path: Path) -> None:
    status, _, err = run("compile", llama_package, tmp_path / "p", "--provider", "abacus")
    assert status == 1
    assert "abacus" in err
    assert "cpu" in err


def test_inspect_shows_every_tensor_of_the_contract(run: Any, llama_package: Path) -> None:
    status, out, err = run("inspect", llama_package)
    assert (status, err) == (0, "")
    package = read_package(llama_package)
    decoder = package.interface.decoder
    for spec in (*decoder.inputs, *decoder.states[:7], *decoder.outputs):
        assert re.search(rf"^ *{re.escape(spec.name)} +{spec.dtype}", out, re.MULTILINE), spec.name
    for name in package.manifest.files:
        assert name in out
    assert "u[t]" in out, "brackets in a meaning are text, not markup"
    assert "max_error" in out


def test_inspect_json_holds_manifest_and_graphs(run: Any, llama_package: Path) -> None:
    status, out, _ = run("inspect", llama_package, "--json")
    assert status == 0
    shown, package = json.loads(out), read_package(llama_package)
    manifest = json.loads((llama_package / "qsample.json").read_text())
    assert {key: shown[key] for key in manifest} == manifest
    for name, graph in package.interface.graphs.items():
        assert [entry["name"] for entry in shown["graphs"][name]["inputs"]] == [spec.name for spec in graph.inputs]
        assert {
            entry["name"]: entry["next"] for entry in shown["graphs"][name]["states"] if entry["next"]
        } == graph.retained
    assert shown["axes"]["V"] == package.interface.vocab_size


def test_inspect_names_a_damaged_file(run: Any, exported: Any, tmp_path: Path) -> None:
    import shutil

    folder = shutil.copytree(exported("llama"), tmp_path / "damaged")
    data = bytearray((folder / "decoder.onnx.data").read_bytes())
    data[100] ^= 1
    (folder / "decoder.onnx.data").write_bytes(data)
    status, _, err = run("inspect", folder)
    assert status == 1
    assert "decoder.onnx.data was altered" in err
    assert run("inspect", folder, "--no-verify")[0] == 0


GENERATE = ["--max-new-tokens", "8", "--seed", "3", "--temperature", "1.0"]


def test_generate_streams_one_prompt(llama_package: Path) -> None:
    from qsample.runtime import load

    done = qsample("generate", llama_package, "-p", "Hello", *GENERATE)
    assert done.returncode == 0, done.stderr
    expected = load(llama_package).generate("Hello", max_new_tokens=8, seed=3, temperature=1.0)
    assert expected.texts is not None
    assert done.stdout == f"Hello{expected.texts[0]}\n"
    assert re.fullmatch(r"8 tokens in [\d.]+ s, \d+ a second; seed 3\n", done.stderr)


def test_generate_reads_the_prompt_from_standard_input(llama_package: Path) -> None:
    piped = qsample("generate", llama_package, *GENERATE, text="Hello\n")
    given = qsample("generate", llama_package, "-p", "Hello", *GENERATE)
    assert (piped.returncode, piped.stdout) == (0, given.stdout)
    empty = qsample("generate", llama_package, *GENERATE, text="")
    assert empty.returncode == 2
    assert "no prompt" in empty.stderr


def test_generate_several_prompts_in_sections(run: Any, llama_package: Path) -> None:
    from qsample.runtime import load

    status, out, _ = run("generate", llama_package, "-p", "One", "-p", "Two [b]", *GENERATE)
    assert status == 0
    output = load(llama_package).generate(["One", "Two [b]"], max_new_tokens=8, seed=3, temperature=1.0)
    assert output.texts is not None
    for row, (prompt, text) in enumerate(zip(["One", "Two [b]"], output.texts, strict=True)):
        assert f"{row + 1}: 8 tokens, length, seed {3 + row} " in out
        assert prompt + text in out


def test_generate_json(run: Any, everything: Path) -> None:
    from qsample.runtime import load

    status, out, _ = run("generate", everything, "-p", "One", "-p", "Three", "--json", *GENERATE)
    assert status == 0
    document = json.loads(out)
    output = load(everything).generate(["One", "Three"], max_new_tokens=8, seed=3, temperature=1.0)
    assert output.texts is not None
    for row, result in enumerate(document["results"]):
        assert result["prompt"] == ["One", "Three"][row]
        assert result["text"] == output.texts[row]
        assert result["token_ids"] == output.new_token_ids[row]
        assert (result["finish_reason"], result["seed"]) == ("length", 3 + row)
        assert len(result["logprobs"]) == 8
        assert [len(step) for step in result["top_logprobs"]] == [3] * 8
    assert document["timing"]["steps"] == 7


def test_generate_passes_every_sampling_option(run: Any, llama_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        "repetition_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "min_new_tokens": 2,
        "seed": 11,
        "flush_every": 3,
    }
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    flags += ["--no-double-buffering", "--stop-string=one", "--stop-string=two"]
    status, _, err = run("generate", llama_package, "-p", "x", *flags, "--stop-id", "5", "--stop-id", "6")
    assert (status, err) == (1, "qsample: seen\n")
    seen.pop("streamer")
    given |= {"double_buffering": False, "stop_strings": ("one", "two")}
    assert seen == {**given, "eos_token_id": [5, 6], "inputs": ["x"]}
    assert run("generate", llama_package, "-p", "x", "--greedy")[0] == 1
    assert seen["do_sample"] is False


def test_generate_stops_at_a_stop_id(run: Any, llama_package: Path) -> None:
    first = json.loads(run("generate", llama_package, "-p", "One", "--json", *GENERATE)[1])["results"][0]["token_ids"]
    stop = first[2]
    document = json.loads(run("generate", llama_package, "-p", "One", "--json", *GENERATE, "--stop-id", str(stop))[1])
    assert document["results"][0]["token_ids"] == first[: first.index(stop) + 1]
    assert document["results"][0]["finish_reason"] == "stop"


def test_generate_with_a_prompt_that_is_too_long(run: Any, llama_package: Path) -> None:
    status, out, err = run("generate", llama_package, "-p", "x" * 400, *GENERATE)
    assert (status, out) == (1, "")
    assert "256" in err


def test_generate_without_a_chat_template(run: Any, llama_package: Path) -> None:
    status, _, err = run("generate", llama_package, "-p", "x", "--chat", *GENERATE)
    assert status == 1
    assert "chat template" in err


def test_generate_from_a_package_without_the_sampler(run: Any, exported: Any, llama_package: Path) -> None:
    host = run("generate", exported("llama", include_sampler=False), "-p", "One", *GENERATE)
    baked = run("generate", llama_package, "-p", "One", *GENERATE)
    assert (host[0], host[1]) == (0, baked[1])


def test_generate_with_an_unknown_provider(run: Any, llama_package: Path) -> None:
    status, _, err = run("generate", llama_package, "-p", "x", "--provider", "abacus")
    assert status == 1
    assert "abacus" in err


def test_a_reader_that_leaves_early_is_no_error(llama_package: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*COMMAND, "generate", str(llama_package), "-p", "x", *GENERATE],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        check=False,
    )
    os.close(write)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
