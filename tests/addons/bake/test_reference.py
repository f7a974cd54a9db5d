"""A baked graph compared with the checkpoint that its file was made from."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qsample
from qsample.addons.bake.source import DecoderSource
from qsample.checkpoints.checkpoint import Checkpoint
from qsample.checkpoints.source import HubOptions
from qsample.contract.interface import Features, Interface
from qsample.errors import ParityError

Decoder = Callable[[str], tuple[Path, str | None]]
SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "foreign_fixtures.py"


def baked(
    decoder: Decoder,
    kind: str,
    model_type: str,
    changes: dict[str, Any],
    folder: Path,
    steps: int | None = None,
) -> dict[str, Any]:
    checkpoint = runpy.run_path(str(SCRIPT))["checkpoint"](
        folder / "checkpoint", model_type, changes, steps
    )
    out = folder / "out"
    package = qsample.bake(
        decoder(kind)[0], out, features=Features(sampler=False), reference=str(checkpoint)
    ).package
    return dict(package.manifest.parity or {})


def test_the_reference_is_not_read_at_the_revision_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, HubOptions]] = []

    def compare(checkpoint: Checkpoint, *arguments: Any) -> dict[str, Any]:
        asked.append((checkpoint.model_id, checkpoint.hub))
        return {}

    monkeypatch.setattr("qsample.exporters.huggingface_reference.compare_with_checkpoint", compare)
    monkeypatch.setattr("qsample.addons.bake.bake.bake", lambda source, path, options, **_: options)
    hub = HubOptions(revision="v2", token="secret")
    source = DecoderSource(model_id="me/file", hub=hub, reference="me/checkpoint")
    options: Any = source.write_package(tmp_path, Features(), overwrite=False, progress=None)
    options.compare(tmp_path, Interface(8, ()), None)
    assert asked == [("me/checkpoint", HubOptions(token="secret"))]


@pytest.mark.slow
def test_a_float_file_is_its_checkpoint(decoder: Decoder, tmp_path: Path) -> None:
    figures = baked(decoder, "genai_cpu_fp32", "llama", {}, tmp_path)
    assert figures["checkpoint_max_error"] <= 1e-4


@pytest.mark.slow
def test_of_a_quantized_file_the_difference_is_told(decoder: Decoder, tmp_path: Path) -> None:
    figures = baked(decoder, "genai_cpu_int4", "llama", {}, tmp_path)
    assert 0.1 < figures["checkpoint_max_error"] < figures["checkpoint_scale"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*states an attention window")
def test_a_file_that_lost_its_window_is_refused(decoder: Decoder, tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="differ from the checkpoint"):
        baked(decoder, "genai_cpu_mistral", "mistral", {"sliding_window": 6}, tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mobius_gemma3", "mobius_cpu_gemma3"])
def test_of_two_files_of_a_model_that_without_its_window_is_refused(
    kind: str, decoder: Decoder, tmp_path: Path
) -> None:
    _, _, changes = runpy.run_path(str(SCRIPT))["MOBIUS"][kind]
    if kind == "mobius_cpu_gemma3":
        with pytest.raises(ParityError, match="differ from the checkpoint"):
            baked(decoder, kind, "gemma3_text", changes, tmp_path, steps=16)
        assert not (tmp_path / "out").exists()
    else:
        figures = baked(decoder, kind, "gemma3_text", changes, tmp_path, steps=16)
        assert figures["checkpoint_max_error"] <= 1e-4 * figures["checkpoint_scale"]
