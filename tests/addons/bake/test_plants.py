"""A wrong rewrite of each step is refused: by the parity gate, or by a check before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from qsample.addons.bake import attention, bake, rows
from qsample.addons.bake.conventions import ForeignGraph
from qsample.addons.bake.rows import Nodes, Rows
from qsample.errors import ParityError, UnsupportedModelError
from qsample.graph.gqa import Slot, attentions
from tests.helpers.foreign import gate, rewritten

Decoder = Callable[[str], tuple[Path, str | None]]
INT32, INT64 = ir.DataType.INT32, ir.DataType.INT64


def refused(kind: str, decoder: Decoder, folder: Path) -> None:
    with pytest.raises((ParityError, UnsupportedModelError)):
        gate(rewritten(*decoder(kind)), folder)


def with_rows(monkeypatch: pytest.MonkeyPatch, change: Callable[[Nodes, Rows], Rows]) -> None:
    right = bake.add_rows

    def wrong(foreign: ForeignGraph, nodes: Nodes) -> Rows:
        return change(nodes, right(foreign, nodes))

    monkeypatch.setattr(bake, "add_rows", wrong)


def lengths_without_padding(nodes: Nodes, rows: Rows) -> Rows:
    """A padded later chunk is then written too early."""
    whole = nodes("Add", [rows.lengths, rows.input_lengths], INT32, ["B"])
    return replace(
        rows, seqlens_k=nodes("Sub", [whole, nodes.integers(1, dtype="int32")], INT32, ["B"])
    )


def positions_from_zero(nodes: Nodes, rows: Rows) -> Rows:
    start = nodes(
        "Unsqueeze",
        [nodes("Cast", [rows.lengths], INT64, ["B"], to=INT64), nodes.integers(1)],
        INT64,
    )
    return replace(rows, positions=nodes("Sub", [rows.positions, start], INT64, ["B", "S"]))


def one_position_later(nodes: Nodes, rows: Rows) -> Rows:
    return replace(
        rows, positions=nodes("Add", [rows.positions, nodes.integers(1)], INT64, ["B", "S"])
    )


def token_before_last(nodes: Nodes, rows: Rows) -> Rows:
    before = nodes(
        "Max",
        [nodes("Sub", [rows.last, nodes.integers(1)], INT64), nodes.integers(0)],
        INT64,
        ["B", 1],
    )
    return replace(rows, last=before)


def last_of_the_batch(nodes: Nodes, rows: Rows) -> Rows:
    """Padding of the shorter rows is then taken for their last token."""
    longest = nodes("ReduceMax", [rows.last], INT64, [1, 1], keepdims=1)
    return replace(rows, last=nodes("Max", [rows.last, longest], INT64, ["B", 1]))


@pytest.mark.parametrize(
    "kind",
    [
        *("genai_dml_fp16", "optimum_llama"),
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("genai_cpu_fp32", "genai_cpu_int4")
        ),
    ],
)
@pytest.mark.parametrize("change", [lengths_without_padding, token_before_last, last_of_the_batch])
def test_lengths(
    change: Callable[[Nodes, Rows], Rows],
    kind: str,
    decoder: Decoder,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with_rows(monkeypatch, change)
    refused(kind, decoder, tmp_path)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("genai_dml_fp16", positions_from_zero),
        (
            "optimum_gpt2",
            one_position_later,
        ),  # rotary embeddings know differences of positions only
        pytest.param("genai_dml_int4", positions_from_zero, marks=pytest.mark.slow),
        pytest.param("optimum_gemma3", positions_from_zero, marks=pytest.mark.slow),
        pytest.param("optimum_gpt2", positions_from_zero, marks=pytest.mark.slow),
    ],
)
def test_positions(
    kind: str,
    change: Callable[[Nodes, Rows], Rows],
    decoder: Decoder,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with_rows(monkeypatch, change)
    refused(kind, decoder, tmp_path)


def test_positions_that_the_graph_counts_itself(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bake, "counted_positions", lambda foreign, longest: [])
    refused("optimum_gemma3", decoder, tmp_path)


def with_rule(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    right = attention.measure

    def wrong(*arguments: Any) -> list[attention.Rule]:
        rules = right(*arguments)
        scaled = {
            name: value(getattr(rules[0], name)) if callable(value) else value
            for name, value in changes.items()
        }
        return [replace(rules[0], **scaled), *rules[1:]]

    monkeypatch.setattr(bake.attention, "measure", wrong)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("optimum_granite", {"scale": lambda scale: 1.02 * scale}),
        pytest.param("optimum_mistral", {"window": None}, marks=pytest.mark.slow),
        ("optimum_mistral", {"window": lambda window: window + 1}),
        pytest.param(
            "optimum_mistral", {"window": lambda window: window - 1}, marks=pytest.mark.slow
        ),
        pytest.param("optimum_gemma2_eager", {"softcap": 0.0}, marks=pytest.mark.slow),
        ("optimum_gemma2_eager", {"softcap": lambda cap: 0.8 * cap}),
    ],
)
def test_rules_of_plain_attention(
    kind: str,
    changes: dict[str, Any],
    decoder: Decoder,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with_rule(monkeypatch, **changes)
    refused(kind, decoder, tmp_path)


def after(monkeypatch: pytest.MonkeyPatch, edit: Callable[[ir.Graph], None]) -> None:
    """`edit` the graph when it is rewritten, before it has the contract's names."""
    right = bake.use_contract_names

    def wrong(foreign: ForeignGraph, *arguments: Any) -> ir.Model:
        edit(foreign.graph)
        return right(foreign, *arguments)

    monkeypatch.setattr(bake, "use_contract_names", wrong)


def drop_window(graph: ir.Graph) -> None:
    for node in attentions(graph):
        node.attributes.pop("local_window_size", None)


def drop_softcap(graph: ir.Graph) -> None:
    for node in attentions(graph):
        node.attributes.pop("softcap", None)


def swap_keys_and_values(graph: ir.Graph) -> None:
    node = attentions(graph)[0]
    key, value = node.inputs[Slot.PAST_KEY], node.inputs[Slot.PAST_VALUE]
    node.replace_input_with(Slot.PAST_KEY, value)
    node.replace_input_with(Slot.PAST_VALUE, key)


def swap_layers(graph: ir.Graph) -> None:
    first, second = attentions(graph)
    a, b = first.inputs[Slot.PAST_KEY], second.inputs[Slot.PAST_KEY]
    first.replace_input_with(Slot.PAST_KEY, b)
    second.replace_input_with(Slot.PAST_KEY, a)


@pytest.mark.parametrize(
    ("kind", "edit"),
    [
        ("genai_cpu_gemma2", drop_window),
        ("genai_cpu_gemma2", drop_softcap),
        pytest.param("genai_cpu_fp32", swap_keys_and_values, marks=pytest.mark.slow),
        pytest.param("genai_cpu_int4", swap_layers, marks=pytest.mark.slow),
        ("genai_cuda_fp16", swap_layers),
    ],
)
def test_attentions(
    kind: str,
    edit: Callable[[ir.Graph], None],
    decoder: Decoder,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    after(monkeypatch, edit)
    refused(kind, decoder, tmp_path)


def padding_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_leave_out", lambda *_: None)


def convolution_ends_at_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_end_at_last", lambda foreign, each, *_: each.present)


@pytest.mark.slow
@pytest.mark.parametrize("plant", [padding_is_written, convolution_ends_at_padding])
def test_states_of_recurrent_layers(
    plant: Callable[[pytest.MonkeyPatch], None],
    decoder: Decoder,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    plant(monkeypatch)
    refused("mobius_qwen3_next", decoder, tmp_path)


@pytest.mark.slow
def test_a_sink_that_is_lost(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_rule(monkeypatch, sink=None)
    refused("mobius_gpt_oss", decoder, tmp_path)


@pytest.mark.ci
def test_the_other_rotary_table(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = bake.choose_table
    monkeypatch.setattr(bake, "choose_table", lambda foreign, rope: right(foreign, "long"))
    refused("genai_cpu_longrope", decoder, tmp_path)


def test_a_scale_behind_the_head(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = bake.select_last

    def wrong(foreign: ForeignGraph, *arguments: Any) -> ir.Value:
        division = foreign.logits.producer()
        assert division is not None
        assert division.op_type == "Div"
        logits = right(foreign, *arguments)
        division.outputs[0].replace_all_uses_with(division.inputs[0])
        return logits

    monkeypatch.setattr(bake, "select_last", wrong)
    refused("optimum_granite", decoder, tmp_path)


def test_norms_that_are_mixed_up(decoder: Decoder, tmp_path: Path) -> None:
    """The file with its own norms does not run on the CPU, so another float16 file of the same model is the witness."""
    foreign_folder, _ = decoder("genai_cuda_fp16")
    baked = rewritten(foreign_folder)
    witness = rewritten(
        *decoder("genai_cpu_fp32_pruned")
    )  # the same weights in float32, its norms outside
    assert abs(baked.expected.logits[0] - witness.expected.logits[0]).max() < 0.05
