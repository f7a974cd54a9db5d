"""The commands that write files: export, compile, bake, policy and prefix."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from qsample import CompileOptions
from qsample.addons.serve.models import ServedModel
from qsample.addons.serve.settings import ServeSettings
from qsample.cli.opening import CompileChoices
from qsample.contract.interface import Features
from qsample.models.model import SourceModel
from qsample.package.package import read_package
from qsample.runtime import Engine, load
from tests.helpers.command_line import qsample
from tests.helpers.fake_package import fake_package
from tests.helpers.flags import unlike


@pytest.mark.ci
def test_export_writes_a_package_with_what_was_asked_for(
    run: Any, checkpoint: Any, tmp_path: Path
) -> None:
    (tmp_path / "qsample.json").write_text("{}")
    status, _, err = run("export", checkpoint("llama"), tmp_path)
    assert (status, "already holds a package" in err) == (1, True)
    features = (
        "--logprobs",
        "--top-logprobs",
        "3",
        "--logit-bias",
        "--allowed-tokens",
        "--return-pdfs",
    )
    done = qsample("export", checkpoint("llama"), tmp_path, "--overwrite", *features)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path}\n"
    *stages, written = done.stderr.splitlines()
    assert all(re.fullmatch(r" *\d+\.\d s  [a-zA-Z -]+", line) for line in stages), (
        "no notices of the libraries"
    )
    assert [stages[0].split("  ")[-1], stages[-1].split("  ")[-1]] == ["starting", "publishing"]
    assert written.endswith("written to")
    assert read_package(tmp_path).interface.features == Features(
        probs=True, logit_bias=True, allowed_tokens=True, logprobs=True, top_logprobs=3
    )


def test_export_passes_every_option(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: dict[str, Any] = {}

    def open_model(model: str, **options: Any) -> SourceModel:
        seen.update(options, model=model)
        return SourceModel(None, Features())  # type: ignore[arg-type]

    def export(self: SourceModel, out: Path, **options: Any) -> None:
        seen["features"] = self.features
        raise ValueError("seen")

    monkeypatch.setattr(
        "qsample.models.auto_model.AutoModelForCausalLM.from_pretrained", open_model
    )
    monkeypatch.setattr(SourceModel, "export", export)
    defaults = {
        "dtype": "float32",
        "tokenizer": "auto",
        "revision": None,
        "adapter": None,
        "text_only": False,
    }
    filters = ("--filter", "xtc,dry", "--filter", "typical_p", "--filter-order", "llama.cpp")
    chosen = Features(filters=("xtc", "dry", "typical_p"), filter_order="llama.cpp")
    cases: list[tuple[tuple[str, ...], dict[str, Any], Features]] = [
        ((), {}, Features()),
        (("--no-sampler", "--dtype", "float16"), {"dtype": "float16"}, Features(sampler=False)),
        (("--revision", "v2", "--return-pdfs"), {"revision": "v2"}, Features(probs=True)),
        (
            ("--tokenizer", "none", "--adapter", "a"),
            {"tokenizer": None, "adapter": "a"},
            Features(),
        ),
        (filters, {}, chosen),
        (("--logprobs", "--top-logprobs", "3"), {}, Features(logprobs=True, top_logprobs=3)),
        (("--logit-bias", "--allowed-tokens"), {}, Features(logit_bias=True, allowed_tokens=True)),
        (("--for-serving", "--max-loras", "2"), {}, Features(max_loras=2).for_serving()),
        (("--text-only",), {"text_only": True}, Features()),
    ]
    for flags, options, features in cases:
        assert run("export", "some/model", tmp_path / "p", *flags)[0] == 1
        assert seen == {**defaults, **options, "model": "some/model", "features": features}


def test_bake_passes_filters(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def spy(*paths: Any, **options: Any) -> None:
        seen.update(options)
        raise ValueError("seen")

    monkeypatch.setattr("qsample.addons.bake.api.bake", spy)
    run(
        "bake",
        "some/model",
        tmp_path / "p",
        "--filter",
        "mirostat",
        "--filter-order",
        "llama.cpp",
    )
    assert seen["features"] == Features(filters=("mirostat",), filter_order="llama.cpp")
    run("bake", "some/model", tmp_path / "p", "--for-serving", "--top-logprobs", "3")
    assert seen["features"] == Features().for_serving()


def test_compile_passes_every_option(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: dict[str, Any] = {}

    def spy(self: Any, out: Path, **given: Any) -> None:
        seen.update(given, out=out)
        raise ValueError("seen")

    monkeypatch.setattr("qsample.models.model.PackagedModel.compile", spy)
    (tmp_path / "text").write_text("In the beginning")
    gptq = ("--weights", "int4", "--preset", "speed", "--calibration-text", tmp_path / "text")
    sizes = (
        "--ctx-len",
        "64",
        "--batch-size",
        "2",
        "--max-divergence",
        "0.5",
        "--debug-dump",
        tmp_path / "dump",
    )
    run(
        "compile",
        fake_package(tmp_path / "package").path,
        tmp_path / "out",
        *gptq,
        *sizes,
        "--overwrite",
    )
    weights = {"weights": "int4", "preset": "speed", "calibration_text": ["In the beginning"]}
    bounds = {
        "ctx_len": 64,
        "batch_size": 2,
        "max_divergence": 0.5,
        "debug_dump": str(tmp_path / "dump"),
    }
    assert seen["options"] == CompileOptions(**weights, **bounds)
    assert (seen["out"], seen["overwrite"]) == (tmp_path / "out", True)


def test_compile_takes_a_package_and_shows_what_it_took(
    run: Any, llama_package: Path, tmp_path: Path
) -> None:
    sizes = ("--ctx-len", "64", "--batch-size", "2")
    status, printed, err = run(
        "compile", llama_package, tmp_path / "cpu", *sizes, "--timing", "--json"
    )
    assert status == 0, err
    shown, package = json.loads(printed), read_package(tmp_path / "cpu")
    compilation = package.manifest.compilation
    assert compilation is not None
    assert (compilation.provider, compilation.batch_size, compilation.ctx_len) == ("cpu", 2, 64)
    assert (shown["path"], shown["kind"]) == (str(package.path), "device")
    assert shown["bytes"] == sum(entry.bytes for entry in package.manifest.files.values())

    stages = [cost["stage"] for cost in shown["timing"]]
    assert (stages[0], stages[-1]) == ("starting", "publishing")
    assert compilation.options == {"batch_size": 2, "ctx_len": 64}
    assert shown["total"]["seconds"] == pytest.approx(
        sum(cost["seconds"] for cost in shown["timing"]), abs=0.002
    )
    for name in (*stages, "total"):
        assert re.search(rf"^ *{name} +\d", err, re.MULTILINE), name


def test_components_are_written(run: Any, tmp_path: Path) -> None:
    status, stdout, stderr = run(
        "policy", tmp_path / "out", "--vocab-size", "40", "--provider", "cuda"
    )
    assert status == 0, stderr
    assert all(Path(line).is_file() for line in stdout.split())


TEXT = "ab cd ef " * 20


def test_a_text_becomes_a_file_for_engines_and_servers(
    run: Any, everything: Path, tmp_path: Path
) -> None:
    out = tmp_path / "text.prefix"
    (tmp_path / "text").write_text(TEXT)
    status, stdout, stderr = run(
        "prefix", everything, out, "--prompt-text", tmp_path / "text", "--json"
    )
    assert status == 0, stderr
    document = json.loads(stdout)
    assert document == {
        "prefix": str(out),
        "tokens": document["tokens"],
        "bytes": out.stat().st_size,
    }
    assert document["tokens"] >= 64
    before = out.stat()
    status, _, stderr = run("prefix", everything, out, "--prompt-text", tmp_path / "text")
    assert (status, f"{out} exists; give --overwrite" in " ".join(stderr.split())) == (2, True)
    assert (out.stat().st_ino, out.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert run("prefix", everything, out, "--prompt-text", tmp_path / "text", "--overwrite")[0] == 0
    with Engine(load(everything), slots=1, prefixes=[out]) as engine:
        assert (
            engine.add_request(TEXT + "gh", max_new_tokens=1).result(60).usage.cached_tokens
            == document["tokens"]
        )
    served = ServedModel(
        "m", str(everything), ServeSettings(models={"m": str(everything)}, prefixes=(str(out),))
    )
    with served.engine as engine:
        assert (
            engine.add_request(TEXT + "gh", max_new_tokens=1).result(60).usage.cached_tokens
            == document["tokens"]
        )
    with pytest.raises(ValueError, match="give prefix_cache_dir, or one model"):
        ServeSettings(models={"a": "x", "b": "y"}, prefixes=(str(out),))


FLAGS = {
    "prefix": """
        package PACKAGE required; out OUT required; --prompt/-p; --prompt-text FILE; --system-file FILE
        --lora NAME=DIR repeated; --overwrite; --provider; --threads >=1; --json
    """,
    "export": """
        model MODEL required; out OUT required; --dtype = float32; --tokenizer FOLDER|ID|none = auto; --revision
        --adapter FOLDER|ID; --text-only; --overwrite; --timing; --json
    """,
    "compile": "package PACKAGE required; out OUT required; --text-only; --debug-dump DIR; --overwrite",
    "bundle": "out OUT required; packages PACKAGE... required; --overwrite",
}


@pytest.mark.parametrize("command", FLAGS)
def test_the_flags(command: str) -> None:
    assert unlike(FLAGS[command], command) == []


def test_prefix_passes_every_option(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened, load, out = MagicMock(), MagicMock(), tmp_path / "out"
    model, path = load.return_value, opened.return_value.package.path
    model.save_prefix.side_effect = lambda inputs, out, **_: out.write_bytes(bytes(2000)) and 9
    monkeypatch.setattr("qsample.cli.build.open_exported", opened)
    monkeypatch.setattr("qsample.runtime.load", load)
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "system").write_text("Be brief.")
    system = [{"role": "system", "content": "Be brief."}]
    loras = ["--lora", f"a={tmp_path}", "--provider", "cuda", "--threads", "3", "--no-thinking"]
    hidden = {"chat_template_kwargs": {"enable_thinking": False}}
    for given, inputs, options, provider, threads in (
        (["-p", "x"], "x", {"adapter": None}, None, None),
        (["--system", "Be brief."], system, {"adapter": None}, None, None),
        (["--system-file", tmp_path / "system", *loras], system, {"adapter": "a", **hidden}, "cuda", 3),
    ):  # fmt: skip
        status, shown, told = run("prefix", "m", out, "--overwrite", *given)
        assert (status, shown, "9 tokens, 2.0 kB" in told) == (0, f"{out}\n", True), told
        assert opened.call_args == call("m", CompileChoices(provider=provider))
        assert load.call_args == call(path, provider, intra_op_num_threads=threads)
        report = model.save_prefix.call_args.kwargs["progress"]
        assert callable(report)
        assert model.save_prefix.call_args == call(inputs, out, progress=report, **options)
    model.load_adapter.assert_called_once_with("a", str(tmp_path))
    model.save_prefix.reset_mock()
    new = tmp_path / "new"
    for target, given, words in (
        (out, ["-p", "x"], "exists; give --overwrite"), (new, [], "no text given"),
        (new, ["-p", "x", "--system", "y"], "--prompt and --system given; give one of"),
        (new, ["-p", "x", "--thinking"], "go with --system, and --prompt was given"),
        (new, ["-p", "x", *loras[:2], "--lora", f"b={tmp_path}"], "--lora was given 2 times"),
    ):  # fmt: skip
        status, _, told = run("prefix", "m", target, *given)
        assert (status, words in " ".join(told.split())) == (2, True), told
    assert not model.save_prefix.called


def test_bundle_passes_every_option(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make = MagicMock(return_value={"cpu": 1, "cuda": 2})
    monkeypatch.setattr("qsample.ort.model_package.bundle", make)
    for flags in ([], ["--overwrite"]):
        status, shown, told = run("bundle", "out", "a", "b", *flags)
        assert (status, shown, "variants: cpu, cuda" in told) == (0, "out\n", True)
        assert make.call_args == call(Path("out"), ["a", "b"], overwrite=bool(flags))
