"""GroupQueryAttention's inputs, as the installed ONNX Runtime names them, and the attentions of a graph."""

from __future__ import annotations

from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from qsample.graph.gqa import OP_TYPE, Slot, attentions, set_inputs
from qsample.graph.opset import CONTRIB_DOMAIN
from tests.helpers.small_graphs import small_graph

GRAPH = """
decode (float[B,S,64] q, float[B,S,32] k, float[B,2,8,16] past_key, float[B,2,8,16] past_value, int32[B] seen,
        int32 total, float[8,8] cos) => (float[B,S,64] result)
{
    first = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2>
        (q, k, k, past_key, past_value, seen, total)
    other = GroupQueryAttention (first)
    negative = Neg (other)
    result = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2>
        (negative, k, k, past_key, past_value, seen, total)
}
"""


def test_slots_are_those_of_onnx_runtime() -> None:
    (schema,) = (
        schema for schema in get_all_operator_schema() if (schema.name, schema.domain) == (OP_TYPE, CONTRIB_DOMAIN)
    )
    # Later versions append inputs (1.32 has query_seqlens); those that are there keep their places.
    assert [slot.name.lower() for slot in Slot] == [value.name for value in schema.inputs][: len(Slot)]
    assert list(Slot) == list(range(len(Slot)))


def test_attentions_are_of_onnx_runtimes_domain() -> None:
    graph = small_graph(GRAPH).graph
    assert [node.outputs[0].name for node in attentions(graph)] == ["first", "result"]


def test_inputs_are_set_by_slot_and_those_in_between_are_empty() -> None:
    graph = small_graph(GRAPH).graph
    node = graph.node(0)
    cos = graph.inputs[-1]
    set_inputs(node, {Slot.SIN_CACHE: cos, Slot.KEY: None})
    assert [value and value.name for value in node.inputs] == [
        "q", None, "k", "past_key", "past_value", "seen", "total", None, "cos",
    ]  # fmt: skip
    set_inputs(node, {Slot.QUERY: cos})
    assert (node.inputs[Slot.QUERY], len(node.inputs)) == (cos, 9)
