"""The CPU target's graph: the operators that a layer is left with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest

from qsample.contract import LENGTH, RUNNING, STALLED
from qsample.exporters.compiler import recipe
from qsample.exporters.compiler.compile import optimize
from qsample.exporters.compiler.options import CompileOptions
from qsample.exporters.compiler.plan import make_plan
from qsample.exporters.compiler.targets.cpu import TARGET, remove_waiting
from qsample.exporters.graph.join import cut_at_logits
from qsample.package import read_package
from tests.helpers.small_graphs import small_graph

CAPACITY = 48
LAYERS = 2  # of every tiny model

LLAMA_LAYER = Counter(MatMul=4, GroupQueryAttention=1, SkipSimplifiedLayerNormalization=2, Split=1, QuickGelu=1, Mul=1)
# Queries and keys are normed a head each, so they leave the packed projection and are seen as heads.
QWEN3_LAYER = LLAMA_LAYER + Counter(Split=1, Reshape=4, SimplifiedLayerNormalization=2)
# The embedding, the first norm, the last token, the head, and the operator's count of tokens, once a step.
ONCE = Counter(
    Gather=1, SimplifiedLayerNormalization=1, GatherElements=1, MatMul=1, Squeeze=3, Shape=2, Cast=6, Equal=2, Or=1
) + Counter(Where=1, Add=2, ReduceMax=1, Sub=2, Unsqueeze=1, Expand=1)


# Its queries, keys and values have biases; half of each head is rotated, neighbours as pairs.
GLM_LAYER = LLAMA_LAYER + Counter(Add=1)


@pytest.mark.parametrize(("model_type", "layer"), [("llama", LLAMA_LAYER), ("qwen3", QWEN3_LAYER), ("glm", GLM_LAYER)])
def test_operators_of_a_layer(
    exported: Callable[..., Path], tmp_path: Path, model_type: str, layer: Counter[str]
) -> None:
    package = read_package(exported(model_type))
    plan = make_plan(package, CompileOptions(batch_size=4, ctx_len=CAPACITY))
    TARGET.publish(*optimize(plan, TARGET), plan, tmp_path)
    decoder = cut_at_logits(ir.load(tmp_path / "decoder.onnx"), package.interface)
    found = Counter(node.op_type for node in decoder.graph)
    assert found == Counter({operator: LAYERS * count for operator, count in layer.items()}) + ONCE


CHOICE = """
decode (int32[B] status, float[B,4] earlier, float[B,4] now) => (float[B,4] result)
    <int32 kind = {%d}, int64[1] axis = {1}>
{
    rows = Equal (status, kind)
    columns = Unsqueeze (rows, axis)
    chosen = Where (columns, earlier, now)
    result = Neg (chosen)
}
"""


def test_rows_that_wait_for_the_host_are_not_looked_for() -> None:
    model = small_graph(CHOICE % STALLED)
    assert recipe.run(model, [remove_waiting])
    (negated,) = model.graph
    assert negated.inputs[0] is model.graph.inputs[2]


@pytest.mark.parametrize("status", [RUNNING, LENGTH])
def test_choices_by_another_status_stay(status: int) -> None:
    model = small_graph(CHOICE % status)
    assert not remove_waiting(model)
    assert len(model.graph) == 4


@pytest.mark.parametrize("sampler", [True, False])
def test_a_host_that_samples_may_let_rows_wait(exported: Callable[..., Path], sampler: bool) -> None:
    package = read_package(exported("llama") if sampler else exported("llama", include_sampler=False))
    passes = TARGET.passes(make_plan(package, CompileOptions(ctx_len=CAPACITY)))
    assert (remove_waiting in passes) == sampler
