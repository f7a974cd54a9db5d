"""Loading: providers, options, and graphs that are not what the manifest promises."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from qsample.contract.interface import Interface, KeyValueShape
from qsample.errors import PackageError, QsampleError
from qsample.ort import session as session_module
from qsample.ort.rounding import Rounding, RowCounts
from qsample.package.package import Package
from qsample.runtime import load
from tests.helpers.fake_graphs import DIM, VOCAB
from tests.helpers.fake_package import compilation, fake_interface, fake_package


def test_loading_by_provider_name_or_list(fake: Callable[..., Package]) -> None:
    for provider in (None, "cpu", ["CPUExecutionProvider"], ("CPUExecutionProvider",)):
        assert load(fake().path, provider).generate([5], max_new_tokens=1, seed=0).token_ids


NO_PROVIDER = r"provider is .*; give a short name such as \"cpu\", or a list of"
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(
        ({"provider": one}, ValueError, NO_PROVIDER)
        for one in (5, [5], [("CPUExecutionProvider", {})], [None])
    ),
    (
        {"provider": "tpu"},
        QsampleError,
        r"no provider 'tpu'; choose 'cpu' or .* give a list of .*CPUExecutionProvider",
    ),
    (
        {"provider": ["NoSuchExecutionProvider"]},
        QsampleError,
        r"has no NoSuch.*; it has .*CPUExecutionProvider",
    ),
    ({"provider": []}, QsampleError, "has no provider in an empty list"),
    ({"ctx_len": 1}, ValueError, "ctx_len is 1; give an integer >= 2"),
    ({"ctx_len": "64"}, ValueError, "ctx_len is '64'"),
    ({"ctx_len": 257}, ValueError, "ctx_len is 257; the model knows 256 positions at most"),
    ({"intra_op_num_threads": 0}, ValueError, "intra_op_num_threads is 0; give an integer >= 1"),
    *(
        (
            {"provider": "cuda", "provider_options": {"device_id": number}},
            QsampleError,
            f"CUDA_VISIBLE_DEVICES={number} for this process, and leave device_id out",
        )
        for number in ("1", 3)
    ),
]


@pytest.mark.parametrize(
    ("options", "error", "message"), REFUSED, ids=[str(options) for options, _, _ in REFUSED]
)
def test_what_is_refused(
    options: dict[str, Any], error: type[Exception], message: str, fake: Callable[..., Package]
) -> None:
    with pytest.raises(error, match=message):
        load(fake().path, **options)


def test_a_device_package_runs_where_and_as_it_was_compiled(fake: Callable[..., Package]) -> None:
    device = fake(compilation=compilation())
    assert load(device.path, ctx_len=48).package.manifest.kind == "device"
    with pytest.raises(QsampleError, match="was compiled for 'cpu', not 'cuda'"):
        load(device.path, "cuda")
    with pytest.raises(ValueError, match="ctx_len is 64 and the package was compiled for 48"):
        load(device.path, ctx_len=64)


def test_threads_and_session_configuration_reach_onnxruntime(fake: Callable[..., Package]) -> None:
    model = load(
        fake().path, intra_op_num_threads=1, session_config={"session.intra_op.allow_spinning": "0"}
    )
    options = model.sessions.decoder.get_session_options()
    assert options.intra_op_num_threads == 1
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_a_damaged_package_is_refused_before_a_session_is_made(tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package")
    path = package.file("decoder.onnx")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(PackageError, match=r"decoder.onnx was altered"):
        load(package.path)


def test_a_graph_that_onnxruntime_cannot_load(tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package")
    path = package.file("decoder.onnx")
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(PackageError, match=r"ONNX Runtime cannot load .*decoder.onnx"):
        load(package.path, verify=False)


# Graphs that do not fit their manifest. Each package promises another interface than its graphs have.


def other(**changes: Any) -> Interface:
    return replace(fake_interface(), **changes)


@pytest.mark.parametrize(
    ("promised", "message"),
    [
        (
            other(vocab_size=VOCAB + 1),
            rf"input output_counts has shape \['B', {VOCAB}\], not \['B', {VOCAB + 1}\]",
        ),
        (other(key_values=(KeyValueShape(2, DIM),)), r"input past_key_values.0.key has shape"),
        (other(key_values=(KeyValueShape(1, 8),)), r"input past_key_values.0.key has shape"),
        (
            other(dtype="float16"),
            r"past_key_values.0.key is tensor\(float\), not tensor\(float16\)",
        ),
        (
            other(key_values=(KeyValueShape(1, DIM),) * 2),
            r"lacks input past_key_values.1.key, lacks input past_key_values.1.value",
        ),
        (fake_interface(logit_bias=True), "lacks input logit_bias_ids, lacks input logit_bias"),
        (fake_interface(logprobs=True), "lacks output logprobs"),
    ],
)
def test_a_graph_with_another_interface(promised: Interface, message: str, tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package", interface=promised, tokenizer=False)
    with pytest.raises(PackageError, match=message):
        load(package.path)


def test_a_graph_with_an_input_that_the_contract_lacks(tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package", interface=fake_interface(), logit_bias=True)
    with pytest.raises(PackageError, match="has an unknown input logit_bias_ids"):
        load(package.path)


def test_a_capacity_other_than_the_manifests(tmp_path: Path) -> None:
    def fix(graph: onnx.ModelProto) -> None:
        for value in graph.graph.input:
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param == "T":
                    dim.dim_value = 40

    package = fake_package(tmp_path / "package", compilation=compilation(ctx_len=48), edit=fix)
    with pytest.raises(PackageError, match=r"input tokens has shape \['B', 40\], not \['B', 48\]"):
        load(package.path)
    fitting = fake_package(tmp_path / "fitting", compilation=compilation(ctx_len=40), edit=fix)
    assert (
        len(load(fitting.path).generate([5], temperature=0, eos_token_id=None).token_ids[0]) == 39
    )


@pytest.mark.parametrize(
    ("made", "here", "told"),
    [
        ("1.32.0", "1.31.1", True),
        ("1.100.0", "1.32.0", True),
        ("1.31.1", "1.32.0", False),
        ("1.32.0", "1.32.0", False),
    ],
)
def test_a_package_of_a_newer_onnxruntime_that_does_not_load(
    made: str, here: str, told: bool, fake: Callable[..., Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = fake(compilation=compilation())
    manifest = device.path / "qsample.json"
    document = json.loads(manifest.read_text())
    document["versions"]["onnxruntime"] = made
    manifest.write_text(json.dumps(document))

    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("Unrecognized attribute: query")

    monkeypatch.setattr(session_module, "open_session", fail)
    monkeypatch.setattr(session_module.ort, "__version__", here)
    with pytest.raises(PackageError, match="Unrecognized attribute: query") as caught:
        load(device.path)
    assert (
        f"compiled with onnxruntime {made} and this is {here}: install {made} or newer"
        in str(caught.value)
    ) == told


def test_threads_that_nobody_gave_count_too(
    fake: Callable[..., Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime reads the variable; with one head, each of five threads would have a part of it."""
    monkeypatch.setenv("ORT_INTRA_OP_NUM_THREADS", "5")
    assert load(fake(compilation=compilation()).path).sessions.rows.step == RowCounts(5)


@pytest.mark.parametrize(
    ("rounding", "step", "piece", "joins", "tail"),
    [
        (Rounding(), RowCounts(), RowCounts(2), True, 2),
        (Rounding(RowCounts(2)), RowCounts(2), RowCounts(2), False, 2),
        (Rounding(RowCounts(2, 2)), RowCounts(2, 2), RowCounts(2, 2), False, 2),
        (Rounding(experts=RowCounts(2)), RowCounts(), RowCounts(2), False, None),
    ],
)
def test_what_follows_from_the_kernels(
    rounding: Rounding,
    step: RowCounts,
    piece: RowCounts,
    joins: bool,
    tail: int | None,
    fake: Callable[..., Package],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "measured", lambda *_: rounding)
    monkeypatch.setattr(
        session_module.warnings, "warn", lambda *_, **__: None
    )  # of experts that nothing repeats
    sessions = load(fake().path, intra_op_num_threads=1).sessions
    assert (sessions.rows.step, sessions.rows.batch) == (step, step)
    assert sessions.prompts.piece_tokens == piece
    assert (sessions.prompts.joins_prompts, sessions.prompts.tail_size) == (joins, tail)
    free = load(fake().path, intra_op_num_threads=1, batch_invariant=False).sessions
    assert (free.rows.step, free.rows.batch, free.rounding) == (RowCounts(), RowCounts(), None)
