"""Differences of log-probabilities beside transformers' logits and NumPy, in each form; hashes of generated tokens."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from transformers import AutoModelForCausalLM

from qsample.addons.evaluate import verify
from qsample.contract.arrays import Array
from qsample.errors import PackageError, QsampleError
from qsample.models.bundled import TINY_LM
from qsample.ort.bound_graph import Replays
from qsample.ort.session import open_sessions
from qsample.request.sampling_params import SamplingParams
from qsample.runtime import load
from tests.helpers.capturing import CapturingSession, compile_captured
from tests.helpers.fake_package import compilation, fake_package
from tests.helpers.tiny_models import VOCAB_SIZE

TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps under a tree until the morning comes. "


def eager(checkpoint: Path) -> Callable[[list[list[int]]], list[Array]]:
    """The model's own logits, a row at a time."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()

    def logits(rows: list[list[int]]) -> list[Array]:
        with torch.no_grad():
            return [model(torch.tensor([row])).logits[0].numpy() for row in rows]

    return logits


def log_softmax(logits: Array) -> Array:
    x = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def differences(one: Array, reference: Array) -> tuple[Array, Array]:
    """The absolute differences of the 20 likeliest tokens of each row, [n, V] logits; and whether the argmax agrees."""
    head = np.argsort(-reference, axis=-1)[:, :20]
    pair = (np.take_along_axis(log_softmax(logits), head, -1) for logits in (one, reference))
    return np.abs(next(pair) - next(pair)), one.argmax(-1) == reference.argmax(-1)


@pytest.mark.parametrize(
    "model_type", ["llama", pytest.param("qwen3_5_text", marks=pytest.mark.slow)]
)
def test_an_exact_package_is_the_model(
    model_type: str, exported: Callable[..., Path], checkpoint: Callable[[str], Path]
) -> None:
    package = exported(model_type)
    found = verify(
        package,
        eager(checkpoint(model_type)),
        positions=50,
        max_length=24,
        batch_size=3,
        name="eager",
    )
    assert (found.positions, found.head, found.reference) == (50, 20, "eager")
    assert [form for form, one in found.forms.items() if one] == ["sequential", "batched"]
    for one in filter(None, found.forms.values()):
        assert 0 < one.mean < one.p99 <= one.largest < 1e-4
        assert one.agreement == 1
        assert (one.quantiles[99], one.quantiles[100]) == (one.p99, one.largest)
    assert found.alone_sha256 == found.sha256
    assert found.tokens == 3 * 12


def test_figures_are_those_of_numpy(
    exported: Callable[..., Path], checkpoint: Callable[[str], Path]
) -> None:
    """Two models, so that the figures are large; each row's prompt and tokens are cut out of the text here."""
    ids = np.random.default_rng(5).integers(4, VOCAB_SIZE, 400)
    found = verify(
        exported("llama"),
        eager(checkpoint("qwen3_5_text")),
        text=ids,
        positions=30,
        max_length=24,
        batch_size=2,
    )
    one, reference = eager(checkpoint("llama")), eager(checkpoint("qwen3_5_text"))
    errors, same, begin = [], [], 0
    for prompt, scored in ((1, 12), (12, 12), (11, 6)):  # lengths 11 apart, modulo 12
        row = [ids[begin : begin + prompt + scored].tolist()]
        begin += prompt + scored
        error, equal = differences(*(model(row)[0][prompt - 1 : -1] for model in (one, reference)))
        errors.append(error)
        same.append(equal)
    wanted, agreement = np.concatenate(errors), np.concatenate(same).mean()
    for form in ("sequential", "batched"):
        got = found.forms[form]
        assert got is not None
        assert got.mean == pytest.approx(wanted.mean(), rel=1e-4)
        assert got.p99 == pytest.approx(
            np.sort(wanted.ravel())[int(np.ceil(0.99 * (wanted.size - 1)))], rel=1e-4
        )
        assert got.largest == pytest.approx(wanted.max(), rel=1e-4)
        assert got.agreement == agreement


@pytest.mark.slow
def test_a_quantized_package_and_the_bundled_model(tmp_path: Path) -> None:
    from qsample import AutoModelForCausalLM as Models

    model: Any = Models.from_pretrained(TINY_LM)
    portable = model.export(tmp_path / "float32")
    int4 = portable.compile(tmp_path / "int4", weights="int4", ctx_len=64)
    text = Path("docs/evaluation.md").read_text("utf-8")
    exact, rough = (
        verify(one, eager(TINY_LM), text=text, positions=64, batch_size=4)
        for one in (portable, int4)
    )
    against = verify(int4, portable, text=text, positions=64, batch_size=4)
    for form in ("sequential", "batched"):
        float32, quantized, other = exact.forms[form], rough.forms[form], against.forms[form]
        assert float32
        assert quantized
        assert other
        assert float32.largest < 1e-3
        assert quantized.mean > 0.02
        assert quantized.p99 > 50 * float32.largest
        assert quantized.agreement < 1 == float32.agreement
        assert other.mean == pytest.approx(quantized.mean, rel=1e-3)
    assert (
        exact.sha256 == exact.alone_sha256 != rough.sha256 == rough.alone_sha256 == against.sha256
    )


@pytest.mark.ci
@pytest.mark.parametrize("model_type", ["llama", "qwen3_5_text"])
def test_a_graph_for_replay(
    model_type: str,
    exported: Callable[..., Path],
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it is here; and captured and replayed, over a session that does it as ONNX Runtime does on CUDA."""
    captured = compile_captured(exported(model_type), tmp_path / "captured", 48)
    plain = verify(exported(model_type), captured, positions=40, max_length=48, batch_size=3)
    assert plain.forms["captured"] is None
    decoders: list[CapturingSession] = []

    def replaying(*given: Any, **options: Any) -> Any:
        sessions = open_sessions(*given, **options)
        decoders.append(CapturingSession(sessions.decoder))
        return replace(sessions, decoder=decoders[-1], replays=Replays())  # type: ignore[arg-type]

    for sessions in (open_sessions, replaying):
        monkeypatch.setattr(sys.modules[verify.__module__], "open_sessions", sessions)
        found = verify(captured, eager(checkpoint(model_type)), positions=80, batch_size=3)
        assert all(
            one is not None and one.largest < 1e-4 and one.agreement == 1
            for one in found.forms.values()
        )
    assert decoders[0].replayed > 40
    assert plain.sha256 == verify(captured, captured, positions=40, batch_size=3).sha256


def test_the_hash_is_of_the_generated_tokens(tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package")
    ids = np.random.default_rng(2).integers(4, 60, 200)
    found = verify(package, package, text=ids, positions=16, max_length=16, batch_size=2)
    model, lines, begin = load(package.path), "", 0
    for row, prompt in enumerate((1, 4)):
        params = SamplingParams(temperature=row, seed=row, max_new_tokens=8, eos_token_id=())
        tokens = model.generate(ids[begin : begin + prompt].tolist(), params).token_ids[0]
        lines += " ".join(map(str, tokens)) + "\n"
        begin += prompt + 8
    assert found.sha256 == hashlib.sha256(lines.encode()).hexdigest()
    assert found.tokens == 16
    assert found.forms["sequential"].largest == 0  # type: ignore[union-attr]


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:.*guesses are off")  # the fake's cache is float32
def test_features_make_no_difference(tmp_path: Path) -> None:
    plain = fake_package(tmp_path / "plain")
    for number, features in enumerate(
        ({"sampler": False}, {"top_logprobs": 3, "probs": True}, {"num_speculative_tokens": 4})
    ):
        package = fake_package(tmp_path / str(number), **features)
        found = verify(package, plain, text=TEXT * 3, positions=60)  # two rows
        assert all(one.largest < 1e-5 for one in found.forms.values() if one)


def scaled(model: onnx.ModelProto) -> None:
    """The head's weights, 1 % larger."""
    head = next(one for one in model.graph.initializer if one.name == "w_head")
    head.CopyFrom(
        onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(head) * np.float32(1.01), "w_head")
    )


def test_a_planted_deviation_shows(tmp_path: Path) -> None:
    right = fake_package(tmp_path / "right", compilation=compilation(batch_size=1))
    wrong = fake_package(tmp_path / "wrong", edit=scaled)
    found = verify(wrong, right, text=TEXT * 3, positions=30, max_length=20)
    assert [form for form, one in found.forms.items() if one] == ["sequential", "batched"]
    for one in filter(None, found.forms.values()):
        assert one.mean > 1e-3
        assert one.largest > one.p99 > one.mean
    other_way = verify(right, wrong, text=TEXT * 3, positions=30, max_length=20)
    assert [form for form, one in other_way.forms.items() if one] == [
        "sequential"
    ]  # it is compiled for a single row


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": "short"}, r"text has 6 tokens, and 256 positions need \d+; give a longer text"),
        ({"text": ""}, "text is empty"),
        ({"positions": 0}, "positions is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_length": 1}, "max_length is 1"),
        ({"max_length": 300}, r"max_length is 300 and .*package holds 256"),
        ({"against": []}, "give a single package, and a single reference"),
        ({"against": 3}, "3 is not a reference"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package")
    with pytest.raises(ValueError, match=message):
        verify(package, **({"against": package, "text": TEXT * 30} | options))


def test_references_that_do_not_fit(tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package")
    with pytest.raises(
        QsampleError, match="other has a vocabulary of 7 tokens and the package one of 331"
    ):
        verify(
            package,
            lambda rows: [np.zeros((len(row), 7)) for row in rows],
            text=TEXT * 30,
            name="other",
        )
    with pytest.raises(QsampleError, match="other gives logits that are not numbers"):
        verify(
            package,
            lambda rows: [np.full((len(row), 331), np.nan) for row in rows],
            text=TEXT * 30,
            name="other",
        )
    with pytest.raises(PackageError, match="missing"):
        verify(package, tmp_path / "nowhere")
