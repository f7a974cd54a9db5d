"""How far a package is from its float model, as the commands say it; and its bits, as a table that
compile takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qsample.cli.quantized import divergence_in_words, note_divergence, quantization_in_words
from qsample.package import divergence
from qsample.package.divergence import FAR, Divergence
from qsample.package.package import Package, read_package
from tests.helpers.command_line import qsample


@pytest.fixture(scope="module")
def int4(bundled_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("int4") / "package"
    done = qsample("compile", bundled_package, path, "--weights", "int4", "--ctx-len", "128")
    assert done.returncode == 0, done.stderr
    assert "beside its float model: KL 0." in done.stderr
    return path


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.ci
def test_inspect_and_chat_say_the_figures_of_compile(int4: Path, run: Any) -> None:
    figures = str(Divergence.of(read_package(int4)))
    _, out, _ = run("inspect", int4)
    assert figures in one_line(out)
    done = qsample("chat", int4, text="hello\n")
    assert f"beside its float model: {figures}" in one_line(done.stderr)


@pytest.mark.ci
def test_a_table_of_bits_goes_round(
    int4: Path, bundled_package: Path, tmp_path: Path, run: Any
) -> None:
    _, out, _ = run("inspect", int4, "--bits")
    table = json.loads(out)
    assert table["layers.0.qkv_proj"].startswith("int8:")
    assert table["layers.1.qkv_proj"].startswith("int4:")
    assert table["lm_head"].startswith("int4:")
    changed = {**table, "layers.1.down_proj": "int8:32", "lm_head": "float"}
    (tmp_path / "table.json").write_text(json.dumps(changed), encoding="utf-8")
    arguments = ("--weights", tmp_path / "table.json", "--ctx-len", "128")
    assert run("compile", bundled_package, tmp_path / "again", *arguments)[0] == 0
    again = json.loads(run("inspect", tmp_path / "again", "--bits")[1])
    expected = {**table, "layers.1.down_proj": "int8:32"}
    del expected["lm_head"], expected["embed_tokens"]  # a tied table is the head's
    assert again == expected


def test_bits_of_a_package_that_has_none(bundled_package: Path, run: Any) -> None:
    status, _, err = run("inspect", bundled_package, "--bits")
    assert status != 0
    assert (
        "has no table of bits: compile quantized none of its weights; give a package that was"
        in one_line(err)
    )


def measured(package: Package, kl: float) -> Package:
    """`package` with a divergence of `kl`."""
    compilation = package.manifest.compilation
    assert compilation is not None
    quantization = dict(compilation.quantization or {})
    figures = json.loads(json.dumps(quantization["divergence"]))
    figures["kl"] = {"value": kl, "low": kl, "high": kl}
    compilation = replace(compilation, quantization={**quantization, "divergence": figures})
    return replace(package, manifest=replace(package.manifest, compilation=compilation))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kl", "warns"),
    [(0.0, False), (FAR, False), (FAR + 0.001, True), (float("nan"), True)],
    ids=str,
)
def test_a_package_that_is_far_off(
    kl: float, warns: bool, int4: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note_divergence(measured(read_package(int4), kl))
    shown = one_line(capsys.readouterr().err)
    assert shown.startswith("beside its float model: KL ")
    assert ("this is far: " in shown) == warns
    assert ("--preset balanced or --weights int8" in shown) == warns


def test_a_float_package_says_nothing(
    bundled_package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = read_package(bundled_package)
    note_divergence(package)
    assert capsys.readouterr() == ("", "")
    assert divergence_in_words(package) == ""


@pytest.mark.ci
def test_figures_of_an_older_version(int4: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = read_package(int4)
    compilation = package.manifest.compilation
    assert compilation is not None
    old = replace(
        compilation, quantization={"divergence": {"kl": 0.1, "kept_kl": 0.2, "tokens": 256}}
    )
    package = replace(package, manifest=replace(package.manifest, compilation=old))
    note_divergence(package)
    assert capsys.readouterr().err == ""
    assert divergence_in_words(package).startswith("unknown: measured by an older version")


def test_words_of_each_text() -> None:
    estimate = {"value": 0.5, "low": 0.25, "high": 0.75}
    for text, words in divergence.TEXTS.items():
        figures = {
            "text": text,
            "tokens": 1234,
            "kl": estimate,
            "agreement": estimate,
            "perplexity_ratio": estimate,
        }
        expected = f"KL 0.5 nats a token (0.25 to 0.75), top-1 50.0 %, perplexity ratio 0.5, on 1,234 tokens of {words}"
        assert str(Divergence.from_json(figures)) == expected


def test_words_of_packed_weights() -> None:
    figures = {"packed_matrices": 3}
    assert quantization_in_words(figures) == "3 matrices as the checkpoint packed them"
    figures |= {"packed_experts": 8}
    assert (
        quantization_in_words(figures) == "3 matrices and 8 experts as the checkpoint packed them"
    )
