"""Mistakes planted in an exported graph, in its last layer where they hide best: the gate refuses each."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from transformers import PreTrainedModel

from qsample.errors import ParityError
from qsample.exporters import parity
from qsample.exporters.huggingface_reference import reference
from qsample.graph.edit import copy_node, initializer, insert
from qsample.graph.gqa import Slot, attentions
from qsample.graph.weights import load_graph
from qsample.package.package import Package, read_package
from tests.helpers.tiny_models import export_without_sampler, random_model

pytestmark = pytest.mark.ci  # an export, for these tests alone
LAYERS = 3
MATRICES = 7  # of a layer


def model_with_own_norms() -> PreTrainedModel:
    """A Llama with a different weight in each norm, so that they cannot stand in for each other."""
    model = random_model("llama", num_hidden_layers=LAYERS)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, 0.3)
    return model


@pytest.fixture(scope="module")
def exported_llama(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return export_without_sampler(
        model_with_own_norms(), tmp_path_factory.mktemp("plants") / "package"
    )


@pytest.fixture(scope="module")
def expected() -> parity.Reference:
    return reference(model_with_own_norms())


def check(
    package: Package, expected: parity.Reference, folder: Path, plant: Callable[[ir.Graph], None]
) -> None:
    model = load_graph(package.file("decoder.onnx"))
    plant(model.graph)
    ir.save(model, folder / "decoder.onnx", external_data="decoder.onnx.data")
    shutil.copy(package.file("initial_state.onnx"), folder)
    parity.check(folder, package.interface, expected)


def matrices(graph: ir.Graph) -> list[ir.Node]:
    """The products with weights: q, k, v, o, gate, up and down of each layer, then the head."""
    products = [
        node for node in graph if node.op_type == "MatMul" and node.inputs[1].is_initializer()
    ]  # type: ignore[union-attr]
    assert len(products) == MATRICES * LAYERS + 1
    return products


def exchange(first: ir.Node, second: ir.Node, index: int) -> None:
    a, b = first.inputs[index], second.inputs[index]
    first.replace_input_with(index, b)
    second.replace_input_with(index, a)


def norms(graph: ir.Graph) -> list[ir.Node]:
    """The products with the weights of norms, two a layer and the last."""
    found = [
        node
        for node in graph
        if node.op_type == "Mul" and "norm.weight" in str(node.inputs[0].name)
    ]  # type: ignore[union-attr]
    assert len(found) == 2 * LAYERS + 1
    return found


def put(
    before: ir.Node,
    op_type: str,
    inputs: list[ir.Value],
    dtype: ir.DataType,
    rank: int = 0,
    **attributes: int,
) -> ir.Value:
    """The output of a new node before `before`."""
    output = insert(before, op_type, inputs, [None] * rank, attributes)
    output.type = ir.TensorType(dtype)
    return output


def is_step(graph: ir.Graph, before: ir.Node) -> ir.Value:
    """Whether a call has a single token a row, [1]."""
    length = put(before, "Shape", [given(graph, "input_ids")], ir.DataType.INT64, 1, start=1)
    one = initializer(graph, "planted_one", np.ones(1, np.int64))
    return put(before, "Equal", [length, one], ir.DataType.BOOL, 1)


def given(graph: ir.Graph, name: str) -> ir.Value:
    return next(value for value in graph.inputs if value.name == name)


def one_wrong_weight(graph: ir.Graph) -> None:
    down = matrices(graph)[-2].inputs[1]
    weights = down.const_value.numpy().copy()
    weights[5, 3] += 0.12
    down.const_value = ir.tensor(weights)


def swapped_layers(graph: ir.Graph) -> None:
    products, weights = matrices(graph), norms(graph)
    for first, second in zip(
        products[-1 - 2 * MATRICES : -1 - MATRICES], products[-1 - MATRICES : -1], strict=True
    ):
        exchange(first, second, 1)
    for first, second in zip(weights[-5:-3], weights[-3:-1], strict=True):
        exchange(first, second, 0)


def norm_of_another_layer(graph: ir.Graph) -> None:
    weights = norms(graph)
    weights[-2].replace_input_with(0, weights[-4].inputs[0])


def cache_of_another_layer(graph: ir.Graph) -> None:
    """Both layers read their own, and each writes that of the other."""
    values = [node.outputs[2] for node in attentions(graph)[-2:]]
    for value, name in zip(values, [value.name for value in reversed(values)], strict=True):
        value.name = f"{name}_planted"
    for value in values:
        value.name = str(value.name).removesuffix("_planted")


def steps_one_position_late(graph: ir.Graph) -> None:
    """Prompts and chunks are right."""
    cosine = next(node for node in graph if node.op_type == "Cos")
    node = cosine
    while node.op_type != "Cast":  # of the positions, to float
        node = node.inputs[0].producer()  # type: ignore[union-attr,assignment]
    positions = node.outputs[0]
    uses = list(positions.uses())
    before = uses[0].node
    later = put(
        before, "Cast", [is_step(graph, before)], ir.DataType.FLOAT, 1, to=ir.DataType.FLOAT
    )
    moved = put(before, "Add", [positions, later], ir.DataType.FLOAT, len(positions.shape or ()))
    for use, index in uses:
        use.replace_input_with(index, moved)


def another_frequency(graph: ir.Graph) -> None:
    """In the last layer alone, whose queries and keys have cosines of angles that are 2 % larger."""
    cosine = next(node for node in graph if node.op_type == "Cos")
    angles = cosine.inputs[0]
    factor = initializer(graph, "planted_factor", np.array(1.02, np.float32))
    copies: dict[ir.Value, ir.Value] = {
        angles: insert(cosine, "Mul", [angles, factor], [None, None, None])
    }  # type: ignore[dict-item]
    node = cosine
    while True:
        copy = copy_node(node, copies, "planted")
        graph.insert_after(node, copy)
        uses = list(node.outputs[0].uses())
        if len(uses) >= 2 * LAYERS:
            break
        (node,) = (use.node for use in uses)
    for use, index in uses[-2:]:
        use.replace_input_with(index, copy.outputs[0])


def head_of_the_embedding(graph: ir.Graph) -> None:
    table = next(
        node for node in graph if node.op_type == "Gather" and "embed" in str(node.inputs[0].name)
    ).inputs[0]  # type: ignore[union-attr]
    assert table is not None
    head = matrices(graph)[-1]
    head.replace_input_with(1, insert(head, "Transpose", [table], [None, None], {"perm": [1, 0]}))


def step_that_is_not_kept(graph: ir.Graph) -> None:
    """No logit of the step itself shows it."""
    attention = attentions(graph)[-1]
    past, present = attention.inputs[Slot.PAST_VALUE], attention.outputs[2]
    node = ir.node("Identity", [present])
    graph.insert_after(attention, node)
    kept = put(node, "Where", [is_step(graph, node), past, present], ir.DataType.FLOAT, 4)
    graph.remove(node, safe=True)
    present.name, kept.name = "planted_present", present.name
    graph.outputs[graph.outputs.index(present)] = kept


def narrower_last_layer(graph: ir.Graph) -> None:
    attentions(graph)[-1].attributes["local_window_size"] = ir.AttrInt64("local_window_size", 13)


PLANTS = (
    *(
        one_wrong_weight,
        swapped_layers,
        norm_of_another_layer,
        cache_of_another_layer,
        steps_one_position_late,
    ),
    *(another_frequency, head_of_the_embedding, step_that_is_not_kept, narrower_last_layer),
)


@pytest.mark.parametrize("plant", [None, *PLANTS])
def test_a_planted_mistake(
    plant: Callable[[ir.Graph], None] | None,
    exported_llama: Package,
    expected: parity.Reference,
    tmp_path: Path,
) -> None:
    if plant is None:
        check(exported_llama, expected, tmp_path, lambda graph: None)
        return
    with pytest.raises(ParityError, match=r"differs? (from|by)"):
        check(exported_llama, expected, tmp_path, plant)


def test_padding_that_a_later_chunk_counts(llama_package: Path, tmp_path: Path) -> None:
    """The sampler's lengths then grow by the padding. The chunk itself is right, and so is a first one."""

    def plant(graph: ir.Graph) -> None:
        kept = next(value for value in graph.outputs if value.name == "lengths_RetainedState")
        last = ir.node("Identity", [kept])
        graph.insert_after(kept.producer(), last)  # type: ignore[arg-type]
        int32 = ir.DataType.INT32
        shape = put(last, "Shape", [given(graph, "input_ids")], ir.DataType.INT64, 1, start=1)
        padding = put(
            last,
            "Sub",
            [put(last, "Cast", [shape], int32, 1, to=int32), given(graph, "input_lengths")],
            int32,
            1,
        )
        later = put(last, "Sign", [given(graph, "lengths")], int32, 1)
        longer = put(last, "Add", [kept, put(last, "Mul", [padding, later], int32, 1)], int32, 1)
        graph.remove(last, safe=True)
        kept.name, longer.name = "planted_lengths", kept.name
        graph.outputs[graph.outputs.index(kept)] = longer

    with pytest.raises(ParityError, match=r"differ from .* by step"):
        check(read_package(llama_package), reference(random_model("llama")), tmp_path, plant)


def test_a_chunk_whose_logits_alone_differ(
    exported_llama: Package, expected: parity.Reference, tmp_path: Path
) -> None:
    logits = [*expected.logits[:-1], expected.logits[-1].copy()]
    logits[-1][3, 7] += 0.05
    with pytest.raises(ParityError, match=r"prompt in chunks: 0\.05"):
        check(exported_llama, replace(expected, logits=logits), tmp_path, lambda graph: None)
