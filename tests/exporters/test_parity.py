"""The parity gate: a published graph passes, and what differs from the model is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.llama import modeling_llama

from qsample.contract import Interface
from qsample.errors import ParityError
from qsample.exporters import parity
from qsample.exporters.graph.runner import GraphRunner
from qsample.exporters.huggingface_reference import reference
from qsample.package import Package, read_package
from qsample.transforms import attention, decoder, masks, recurrent
from tests.architectures.configs import tiny_model
from tests.helpers.tiny_models import export_without_sampler, random_model


@pytest.fixture
def package(llama_package: Path) -> Package:
    return read_package(llama_package)


@pytest.fixture(scope="module")
def expected() -> parity.Reference:
    return reference(random_model("llama"))


def check(package: Package, expected: parity.Reference, **options: int) -> parity.Parity:
    return parity.check(
        package.file("decoder.onnx"), package.file("initial_state.onnx"), package.interface, expected, **options
    )


def test_a_published_graph_passes_and_stays_as_it_is(package: Package, expected: parity.Reference) -> None:
    before = package.file("decoder.onnx").read_bytes()
    assert asdict(check(package, expected)) == package.manifest.parity
    assert package.file("decoder.onnx").read_bytes() == before


@pytest.mark.parametrize(("row", "step"), [(0, 0), (1, parity.DECODE_STEPS)])
def test_one_logit_that_differs(row: int, step: int, package: Package, expected: parity.Reference) -> None:
    logits = [array.copy() for array in expected.logits]
    logits[row][step, 17] += 2e-4 * max(1.0, np.abs(logits).max())
    with pytest.raises(ParityError, match=r"differ from the eager model's by .*, more than .* by step"):
        check(package, replace(expected, logits=logits))


def test_a_logit_that_is_no_number(package: Package, expected: parity.Reference) -> None:
    logits = [array.copy() for array in expected.logits]
    logits[2][3, 5] = np.nan
    with pytest.raises(ParityError, match="differ from the eager model's by nan"):
        check(package, replace(expected, logits=logits))


def test_more_attention_operators_than_layers(package: Package, expected: parity.Reference) -> None:
    with pytest.raises(ParityError, match="2 GroupQueryAttention nodes for 1 attention layers"):
        check(package, expected, plain_attention_layers=1)


def test_a_sampler_that_is_not_greedy_at_temperature_0(
    package: Package, expected: parity.Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = GraphRunner.step

    def off_by_one(*args: Any) -> dict[str, Any]:
        results = step(*args)
        return results | {"next_ids": results["next_ids"] + 1}

    monkeypatch.setattr(GraphRunner, "step", off_by_one)
    with pytest.raises(ParityError, match="did not return the token with the largest logit"):
        check(package, expected)


# Planted errors: each changes what the exported graph computes, and must be refused.


def drop(option: str) -> Callable[..., Any]:
    """What emits the operator, without one of its options."""
    original = attention._group_query_attention

    def changed(*args: Any, **options: Any) -> Any:
        query = args[2]
        return original(*args, **(options | {option: query.shape[-1] ** -0.5 if option == "scale" else None}))

    return changed


@pytest.mark.parametrize(
    ("model_type", "option"),
    [("mistral", "sliding_window"), ("gemma2", "softcap"), ("gpt_oss", "s_aux"), ("gemma3_text", "scale")],
)
def test_parity_gate_refuses_a_planted_error(
    model_type: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = {"query_pre_attn_scalar": 64} if model_type == "gemma3_text" else {}
    monkeypatch.setattr(attention, "_group_query_attention", drop(option))
    with pytest.raises(ParityError, match=r"differ from the eager model's by .*, more than"):
        export_without_sampler(random_model(model_type, **overrides), tmp_path / "package")
    assert os.listdir(tmp_path) == []


def test_parity_gate_refuses_a_swapped_rotary_embedding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_run, real_half = decoder.run_model, modeling_llama.rotate_half

    def swapped(*args: Any) -> Any:
        with monkeypatch.context() as planted:
            planted.setattr(modeling_llama, "rotate_half", lambda states: -real_half(states))
            return real_run(*args)

    monkeypatch.setattr(decoder, "run_model", swapped)
    with pytest.raises(ParityError, match=r"differ from the eager model's by .*, more than"):
        export_without_sampler(random_model("llama"), tmp_path / "package")
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_parity_gate_refuses_a_dropped_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a layer of plain operators: every key before a token is seen, whatever the model's mask says."""
    allowed = masks.MaskRule.allowed
    monkeypatch.setattr(masks.MaskRule, "allowed", lambda rule, *args: allowed(masks.MaskRule(masks.causal()), *args))
    with pytest.raises(ParityError, match="differ from the eager model's"):
        export_without_sampler(tiny_model("llama4_text"), tmp_path / "package")


@pytest.mark.slow
def test_parity_gate_refuses_padding_that_changes_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "_where", lambda rows, new, old: new.to(old.dtype))
    with pytest.raises(ParityError, match="differ from the eager model's"):
        export_without_sampler(tiny_model("mamba"), tmp_path / "package")


def test_parity_gate_counts_attention_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = parity.check

    def short_of_a_layer(
        decoder: Path, initial: Path, interface: Interface, expected: parity.Reference, **options: int
    ) -> Any:
        layers = interface.key_values + interface.key_values[:1]
        return real(decoder, initial, replace(interface, key_values=layers), expected, **options)

    monkeypatch.setattr(parity, "check", short_of_a_layer)
    with pytest.raises(ParityError, match="2 GroupQueryAttention nodes for 3 attention layers"):
        export_without_sampler(random_model("llama"), tmp_path / "package")
