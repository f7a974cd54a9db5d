"""How commands open and load their models: what each option hands on. The models themselves are replaced."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from qsample import runtime
from qsample.cli import opening
from qsample.cli.opening import CompileChoices, FeatureNeeds, LoadOptions, open_exported, open_model
from qsample.contract.interface import Features
from qsample.models.auto_model import AutoModel
from qsample.models.bundled import TINY_LM
from qsample.models.model import PackagedModel, SourceModel
from qsample.ort import model_package
from qsample.package import package as packages
from qsample.package.package import Package
from qsample.progress import Stage


def test_choices_and_needs_by_default() -> None:
    assert CompileChoices() == CompileChoices(
        provider=None, weights=None, preset=None, ctx_len=None, text_only=False
    )
    assert FeatureNeeds() == FeatureNeeds(for_serving=False, has_form=False, loras={}, max_loras=0)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        (
            {"weights": "int4"},
            "--weights is for a checkpoint, and p is a package; quantize it with",
        ),
        ({"preset": "speed"}, "`qsample compile p OUT --preset speed`"),
        ({"text_only": True}, "--text-only is for a checkpoint, and p is a package; export it so"),
    ],
)
def test_choices_that_a_package_does_not_leave_open(choices: dict[str, Any], words: str) -> None:
    CompileChoices(provider="cuda", ctx_len=64).check_package("p")
    with pytest.raises(typer.BadParameter, match=words):
        CompileChoices(**choices).check_package("p")


def test_the_number_and_rank_of_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = FeatureNeeds(max_loras=2)
    own = Features(max_loras=1, max_lora_rank=128)
    found = needs.added_to(own)
    assert (found.max_loras, found.max_lora_rank) == (2, 128)
    assert FeatureNeeds(for_serving=True, max_loras=1).added_to(Features()).grammars


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, fake: Callable[..., Package]) -> Any:
    """A model that is no package: what it was opened with, and the package that the cache has for it."""
    state = SimpleNamespace(opened=[], cached=[], stages=[], package=fake(), features=Features())

    def from_pretrained(model: str, **options: Any) -> SourceModel:
        state.opened.append((model, options))
        return SourceModel(None, state.features)  # type: ignore[arg-type]

    def cached(self: SourceModel, *, progress: Any, **options: Any) -> PackagedModel:
        state.cached.append((self.features, options))
        for stage in state.stages:
            progress(stage, 0.0)
        return PackagedModel(state.package)

    monkeypatch.setattr(AutoModel, "from_pretrained", from_pretrained)
    monkeypatch.setattr(SourceModel, "cached", cached)
    return state


def test_a_model_goes_through_the_cache(source: Any) -> None:
    choices = CompileChoices(
        provider="cuda", weights="int4", preset="speed", ctx_len=64, text_only=True
    )
    found = open_exported("me/m", choices, FeatureNeeds(for_serving=True))
    assert found.package is source.package
    assert source.opened == [("me/m", {"provider": "cuda", "text_only": True})]
    options = {"weights": "int4", "preset": "speed", "ctx_len": 64}
    assert source.cached == [(Features().for_serving(), options)]
    open_exported(None)
    assert source.opened[1] == (str(TINY_LM), {"provider": None, "text_only": False})
    assert source.cached[1] == (Features(), {"weights": None, "preset": None, "ctx_len": None})


@pytest.mark.parametrize(
    ("model", "stages", "weights", "says", "advises"),
    [
        ("me/m", [Stage.PUBLISHING], None, True, True),
        ("me/m", [Stage.PUBLISHING], "int4", True, False),
        ("me/m", [Stage.WAITING], None, False, False),
        (None, [Stage.PUBLISHING], None, False, False),
    ],
)
def test_a_package_that_was_put_into_the_cache_is_told(
    model: str | None,
    stages: list[Stage],
    weights: str | None,
    says: bool,
    advises: bool,
    source: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source.stages = stages
    open_exported(model, CompileChoices(weights=weights))
    said = " ".join(capsys.readouterr().err.split())
    assert ("me/m is in the cache now (" in said) is says
    assert ("B), later runs start at once" in said) is says
    assert ("--weights int4 takes about a seventh" in said) is advises


def test_float16_and_packed_weights_need_no_advice(
    source: Any, fake: Callable[..., Package], capsys: pytest.CaptureFixture[str]
) -> None:
    source.stages = [Stage.PUBLISHING]
    manifest = SimpleNamespace(packed_weights={"x": 1}, files={"a": SimpleNamespace(bytes=1234)})
    interface = SimpleNamespace(dtype="float32")
    for changes in ({"manifest": manifest}, {"interface": SimpleNamespace(dtype="float16")}):
        plain = {"manifest": SimpleNamespace(packed_weights=None, files=manifest.files)}
        package = SimpleNamespace(**{"interface": interface, **plain, **changes})
        opening._report_cached("me/m", package, None)  # type: ignore[arg-type]
        said = capsys.readouterr().err
        assert "me/m is in the cache now (1.2 kB), later runs start at once\n" in said


def test_trusted_keys_are_for_packages(source: Any) -> None:
    with pytest.raises(
        typer.BadParameter, match="--trusted-keys is for packages, and me/m is none"
    ):
        open_exported("me/m", trusted_keys=["key.pem"])
    assert source.opened == []
    open_exported("me/m", trusted_keys=[])


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How packages are read."""
    calls: list[Any] = []
    real = packages.read_package

    def read_package(path: Any, **options: Any) -> Package:
        calls.append((str(path), options))
        return real(path, **options)

    monkeypatch.setattr(packages, "read_package", read_package)
    return calls


def test_a_package_is_verified_when_it_is_opened_or_when_it_is_loaded(
    fake: Callable[..., Package], read: list[Any]
) -> None:
    path = str(fake().path)
    found = open_exported(path, CompileChoices(provider="cpu"))
    assert (found._provider, found.package.path) == ("cpu", fake().path)
    open_exported(path, trusted_keys=["key.pem"])
    assert read == [(path, {"verify": True}), (path, {"verify": False})]
    with pytest.raises(typer.BadParameter, match="--weights is for a checkpoint"):
        open_exported(path, CompileChoices(weights="int4"))


def test_a_faster_way_is_told(
    fake: Callable[..., Package],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(packages, "faster_way", lambda package: "compile it")
    open_exported(str(fake().path))
    assert capsys.readouterr().err == "compile it\n"
    monkeypatch.setattr(packages, "faster_way", lambda package: None)
    open_exported(str(fake().path))
    assert capsys.readouterr().err == ""


def test_a_bundle_has_a_package_for_each_provider(
    fake: Callable[..., Package], source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def package_in(model: Any, provider: str | None) -> Any:
        asked.append((str(model), provider))
        return fake().path

    monkeypatch.setattr(model_package, "package_in", package_in)
    assert open_model("bundle", "cuda").package.path == fake().path  # type: ignore[union-attr]
    assert open_exported("bundle", CompileChoices(provider="cuda")).package.path == fake().path
    assert asked == [("bundle", "cuda")] * 2
    with pytest.raises(
        typer.BadParameter, match="--text-only is for a checkpoint, and bundle is a"
    ):
        open_model("bundle", text_only=True)


def test_the_options_of_loading(
    source: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(
        opening, "open_exported", lambda *given, **options: opened.append((given, options))
    )
    LoadOptions().open(None)
    assert opened[0] == ((None, CompileChoices(), FeatureNeeds()), {"trusted_keys": None})
    (tmp_path / "adapter_config.json").write_text("{}")
    options = LoadOptions(
        lora=[f"a={tmp_path}"],
        weights="int4",
        preset="speed",
        text_only=True,
        provider="cuda",
        trusted_keys=["key.pem"],
    )
    options.open("me/m", ctx_len=64, has_form=True)
    choices = CompileChoices(
        provider="cuda", weights="int4", preset="speed", ctx_len=64, text_only=True
    )
    needs = FeatureNeeds(has_form=True, loras={"a": str(tmp_path)})
    assert opened[1] == (("me/m", choices, needs), {"trusted_keys": ["key.pem"]})

    loaded: list[Any] = []
    model = SimpleNamespace(load_adapter=lambda *given: loaded.append(given))

    def load(*given: Any, **more: Any) -> Any:
        loaded.append((given, more))
        return model

    monkeypatch.setattr(runtime, "load", load)
    assert options.load(PackagedModel(source.package), ctx_len=32) is model
    more = {
        "ctx_len": 32,
        "intra_op_num_threads": None,
        "batch_invariant": True,
        "verify": False,
        "trusted_keys": ["key.pem"],
    }
    assert loaded == [((source.package.path, "cuda"), more), ("a", str(tmp_path))]
    LoadOptions(threads=3, batch_invariant=False, trusted_keys=[]).load(
        PackagedModel(source.package)
    )
    assert loaded[2][1] == {
        "ctx_len": None,
        "intra_op_num_threads": 3,
        "batch_invariant": False,
        "verify": False,
        "trusted_keys": None,
    }


def test_downloads_alone_show_the_bars_of_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    opening.quieten("me/m")
    assert "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ
    opening.quieten(str(tmp_path))
    assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1"
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "0")
    opening.quieten(str(tmp_path))
    assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "0"
