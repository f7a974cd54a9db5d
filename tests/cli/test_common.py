"""What the commands share: opening a package, or what is not one yet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from qsample.checks import checked, flag, integer
from qsample.cli.common import flags_of, given_of, is_package, open_exported, open_model, with_flags
from qsample.models.model import PackagedModel, SourceModel
from qsample.models.sources import CheckpointSource
from qsample.request.sampling_params import SamplingParams
from tests.helpers.fake_package import fake_package


def test_a_package_is_opened_with_the_features_that_it_has(tmp_path: Path) -> None:
    path = fake_package(tmp_path / "package", sampler=False, allowed_tokens=True).path
    assert is_package(str(path))
    opened = open_model(str(path))
    assert isinstance(opened, PackagedModel)
    assert opened.package.interface.features.allowed_tokens
    assert open_exported(str(path), None).package.path == path


def test_a_checkpoint_is_not_loaded_when_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    assert not is_package(str(tmp_path))
    for text_only in (False, True):
        opened = open_model(str(tmp_path), text_only=text_only)
        assert isinstance(opened, SourceModel)
        assert isinstance(opened.source, CheckpointSource)
        assert (opened.source.images, opened.source.text_only) == (None, text_only)
        identity = opened.source.identity()  # the cache's
        assert (identity["images"], identity["text_only"]) == (None, text_only)


@dataclass
class _Options:
    rows: int | None = integer(None, 1, 9, "1 to 9", help="Rows.")
    names: tuple[str, ...] = checked((), help="Names.", flag="--name", metavar="NAME", repeated=str)
    noisy: bool = flag(False, help="Noisy.", argument="with_noise")
    hidden: int = 3


def test_a_dataclass_becomes_flags_and_flags_its_fields() -> None:
    seen: list[dict[str, Any]] = []
    app = typer.Typer()

    @app.command()
    @with_flags(flags_of(_Options))
    def command(ctx: typer.Context) -> None:
        seen.append(given_of(_Options, ctx.params))

    for line in ("", "--rows 2 --name a --name b --with-noise"):
        app(line.split(), standalone_mode=False)
    assert seen == [
        {"rows": None, "names": (), "noisy": False},
        {"rows": 2, "names": ("a", "b"), "noisy": True},
    ]
    for line, words in (("--rows 0", "equal to 1"), ("--hidden 3", "--hidden")):
        with pytest.raises(Exception, match=words):
            app(line.split(), standalone_mode=False)
    assert flags_of(_Options, unset=True)["with_noise"].default is None


def test_the_options_of_loading_and_measuring_reach_the_runtime(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, seen = fake_package(tmp_path / "package").path, dict[str, Any]()
    monkeypatch.setattr(
        "qsample.runtime.bench.measure", lambda model, *given: seen.update(given=given)
    )
    run("bench", package, "--batch", "2", "--top-k", "3")
    assert seen["given"] == (2, 64, 64, SamplingParams(temperature=0, top_k=3), 3, [], None)

    def load(path: Path, provider: str, **options: Any) -> None:
        seen.update(options, path=path, provider=provider)

    monkeypatch.setattr("qsample.runtime.load", load)
    run(
        "chat",
        package,
        "--provider",
        "cpu",
        "--threads",
        "3",
        "--ctx-len",
        "32",
        "--no-batch-invariant",
    )
    del seen["given"]
    options = {"ctx_len": 32, "intra_op_num_threads": 3, "batch_invariant": False, "verify": False}
    options["trusted_keys"] = None
    assert seen == {"path": package, "provider": "cpu", **options}


def test_a_package_cannot_leave_out_its_images(run: Any, tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package").path
    for command in (
        ("generate", package, "-p", "x"),
        ("compile", package, tmp_path / "out"),
        ("bench", package),
    ):
        code, _, said = run(*command, "--text-only")
        assert code == 2
        assert "--text-only is for a checkpoint, and" in " ".join(said.split())
