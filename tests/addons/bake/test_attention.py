"""What other exporters put around their attention: dropped if it changes nothing, otherwise kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from qsample.addons.bake import attention
from qsample.graph.edit import constant_value, initializer, insert
from tests.helpers.foreign import edited, greedy_of_file, greedy_of_graph, read, rewritten, save

Decoder = Callable[[str], tuple[Path, str | None]]
PROMPTS = [[1, 17, 40, 23, 9], [1, 88, 5]]


def where_five_is_read(model: ir.Model) -> None:
    """Let the zeros stand for the output at id 5, not at queries that see no key."""
    ids = next(value for value in model.graph.inputs if value.name == "input_ids")
    for node in [node for node in model.graph if node.op_type == "Where"]:
        five = initializer(model.graph, "five", np.array(5, np.int64))
        axes = initializer(model.graph, "last_axes", np.array([2, 3], np.int64))
        is_five = insert(node, "Equal", [ids, five], None, dtype=ir.DataType.BOOL)
        node.replace_input_with(
            0, insert(node, "Unsqueeze", [is_five, axes], None, dtype=ir.DataType.BOOL)
        )


def zeros_behind_attention(folder: Path) -> int:
    foreign = read(folder)
    attention.unfuse_attentions(foreign)
    attention.drop_unseen_rows(foreign, 64)
    return sum(node.op_type == "Where" for node in foreign.graph)


def test_zeros_for_queries_that_see_no_key_are_dropped(decoder: Decoder) -> None:
    folder, _ = decoder("transformers_webgpu_phi3")
    assert sum(node.op_type == "Where" for node in read(folder).graph) == 2
    assert zeros_behind_attention(folder) == 0


def test_zeros_that_follow_from_ids_stay(decoder: Decoder, tmp_path: Path) -> None:
    folder = edited(
        decoder("transformers_webgpu_phi3")[0],
        tmp_path / "edited",
        where_five_is_read,
        "decode.onnx",
    )
    assert zeros_behind_attention(folder) == 2

    baked = rewritten(folder)
    got = greedy_of_graph(
        save(baked, tmp_path / "graph"), baked.interface, PROMPTS, 12, capacity=32
    )

    foreign = read(folder)
    assert got == [greedy_of_file(foreign, prompt, 12) for prompt in PROMPTS]
    plain = read(decoder("transformers_webgpu_phi3")[0])
    assert got[1] != greedy_of_file(plain, PROMPTS[1], 12)  # the zeros matter


@pytest.mark.parametrize(("slot", "value"), [(3, "bias"), (4, "padding"), (6, "past")])
def test_an_attention_with_more_inputs_is_refused(
    slot: int, value: str, decoder: Decoder, tmp_path: Path
) -> None:
    def edit(model: ir.Model) -> None:
        node = next(node for node in model.graph if node.op_type == "MultiHeadAttention")
        node.resize_inputs(max(slot + 1, len(node.inputs)))
        node.replace_input_with(slot, initializer(model.graph, value, np.zeros(4, np.float32)))

    folder = edited(
        decoder("transformers_webgpu_phi3")[0], tmp_path / "edited", edit, "decode.onnx"
    )
    with pytest.raises(Exception, match="it attends through MultiHeadAttention"):
        read(folder)


def test_numbers_are_given_constant_or_of_each_run() -> None:
    runs = [{"y": np.ones(2)}, {"y": np.zeros(2)}]
    for value, wanted in (
        (3.0, [3.0]),
        (constant_value("x", ir.tensor(np.array([4.0]))), [[4.0]]),
        (ir.Value(name="y"), [[1, 1], [0, 0]]),
    ):
        assert [one.tolist() for one in attention._numbers(value, runs)] == wanted  # type: ignore[arg-type]
