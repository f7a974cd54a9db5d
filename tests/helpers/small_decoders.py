"""Decoders of other exporters in a few nodes, written as text; most of their arithmetic means nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx.helper
import onnx.parser
import onnx_ir as ir

GQA = "com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2{more}>"
ATTENTION = f"{GQA.format(more='')} (q, k, v, past_0_key, past_0_value)"
CACHE = "float[B,2,P,4]"


def model(
    body: str,
    inputs: str,
    outputs: str,
    *,
    logits: str = "float[B,S,7] logits",
    ids: str = "int64[B,S] input_ids",
    opset: int = 20,
) -> ir.Model:
    """A decoder whose hidden states x [B, S, 8] are of a table with 9 rows."""
    text = (
        f'<ir_version: 10, opset_import: ["": {opset}, "com.microsoft": 1]>\n'
        f"g ({ids}{', ' if inputs else ''}{inputs}) => ({logits}{', ' if outputs else ''}{outputs})\n"
        "<float[9,8] table, float[8,7] head, float[1] two = {2.0}>\n"
        f"{{ x = Gather(table, input_ids) {body} }}"
    )
    proto = onnx.parser.parse_model(text)
    for name, dims in (("table", (9, 8)), ("head", (8, 7))):
        proto.graph.initializer.append(
            onnx.helper.make_tensor(name, 1, dims, [0.0] * (dims[0] * dims[1]))
        )
    return ir.from_proto(proto)


def attending(
    nodes: Sequence[str] = (ATTENTION,),
    numbers: Sequence[object] = (0,),
    *,
    end: str = "logits = MatMul(x, head)",
    cache: str = CACHE,
    inputs: str = "",
    **options: Any,
) -> ir.Model:
    """A decoder with an operator for each of its layers."""
    sides = [(number, side) for number in numbers for side in ("key", "value")]
    pasts = ", ".join(f"{cache} past_{number}_{side}" for number, side in sides)
    presents = ", ".join(
        f"{cache.replace('P', 'T')} present_{number}_{side}" for number, side in sides
    )
    body = " ".join(
        f"a{number}, present_{number}_key, present_{number}_value = {node}"
        for number, node in zip(numbers, nodes, strict=True)
    )
    projections = "q = Neg(x) k = Abs(x) v = Exp(x)"
    more = f", {inputs}" if inputs else ""
    return model(f"{projections} {body} {end}", pasts + more, presents, **options)
