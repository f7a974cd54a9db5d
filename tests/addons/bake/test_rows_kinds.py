"""Every kind of file in the fixtures becomes a graph that generates what the file itself generates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest

from qsample.addons.bake import attention
from qsample.graph.operators import OPSET
from tests.helpers.foreign import (
    GROUPED,
    MOBIUS,
    PLAIN,
    TRANSFORMERS,
    edited,
    gate,
    greedy_of_file,
    greedy_of_graph,
    read,
    recorded_tokens,
    rewritten,
    save,
)

Decoder = Callable[[str], tuple[Path, str | None]]
PROMPTS = [[1, 17, 40, 23, 9], [1, 88], [1, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40]]
TOKENS = 12
# One of each way of keeping a cache and of choosing the last token; the others are slow together.
QUICK = {
    "genai_cpu_int4_pruned",
    "genai_webgpu_int4",
    "optimum_gemma3",
    "mobius_static_qwen3",
    "mobius_qwen3_next",
}
QUICK |= {"transformers_cpu_gpt_oss", "transformers_webgpu_phi3"}
HALF = "transformers_cuda_qwen3"  # float16: transformers' tokens in float32 are others
KINDS = [
    pytest.param(
        kind, marks=[] if kind in QUICK else pytest.mark.slow, id=kind.replace("/onnx/", "/")
    )
    for kind in (*GROUPED, *PLAIN, HALF)
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_ragged_batch_generates_what_each_row_does_in_the_file(
    kind: str, decoder: Decoder, tmp_path: Path
) -> None:
    folder, file = decoder(kind)
    foreign = read(folder, file)
    in_memory = foreign.changed or (
        foreign.layers[0].attention is not None and attention.unfuse_norms(foreign)
    )
    wanted = [greedy_of_file(foreign, prompt, TOKENS, in_memory=in_memory) for prompt in PROMPTS]

    baked = rewritten(folder, file)
    figures = gate(baked, tmp_path / "gate")
    got = greedy_of_graph(
        save(baked, tmp_path / "graph"), baked.interface, PROMPTS, TOKENS, capacity=32
    )

    assert got == wanted
    assert figures.attention_layers == 2
    assert figures.plain_attention_layers == 0
    assert (
        len({token for row in wanted for token in row}) > 4
    )  # the models are not stuck at one token


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("genai_cpu_int4_tied"),
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in (
                *("genai_cpu_fp32", "genai_cpu_int4", "genai_cpu_fp32_pruned", "genai_cpu_gemma2"),
                "genai_cpu_longrope",
            )
        ),
    ],
)
def test_the_tokens_are_those_of_onnxruntime_genai(
    kind: str, decoder: Decoder, tmp_path: Path
) -> None:
    folder, file = decoder(kind)
    genai = recorded_tokens(folder)
    baked = rewritten(folder, file)

    got = greedy_of_graph(
        save(baked, tmp_path / "graph"), baked.interface, genai["prompts"], 24, capacity=48
    )

    assert sum(map(len, genai["new_tokens"])) > 20
    for row, wanted in zip(got, genai["new_tokens"], strict=True):
        assert row[: len(wanted)] == wanted


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.slow, id=kind)
        for kind in (*MOBIUS, *TRANSFORMERS)
        if kind != HALF
    ],
)
def test_the_tokens_are_those_of_transformers(kind: str, decoder: Decoder, tmp_path: Path) -> None:
    folder, _ = decoder(kind)
    wanted = recorded_tokens(folder)
    baked = rewritten(folder)
    figures = gate(baked, tmp_path / "gate")

    files = save(baked, tmp_path / "graph")

    for left in (0.0, 9.0):
        got = greedy_of_graph(files, baked.interface, wanted["prompts"], 24, capacity=48, left=left)
        assert got == wanted["new_tokens"]
    assert figures.plain_attention_layers == 0
    assert baked.model.opset_imports[""] == OPSET
    assert not {"Attention", "RMSNormalization", "TensorScatter"} & {
        node.op_type for node in baked.model.graph if not node.domain
    }


def constants_as_inputs(model: ir.Model) -> None:
    """As files of IR 3, and of torch's keep_initializers_as_inputs, have them."""
    model.graph.inputs.extend(model.graph.initializers.values())


def both(model: ir.Model) -> None:
    narrow_integers(model)
    constants_as_inputs(model)


def narrow_integers(model: ir.Model) -> None:
    """Token ids, positions and the mask in int32."""
    for value in model.graph.inputs:
        if value.name in ("input_ids", "position_ids", "attention_mask"):
            readers = list(value.uses())
            value.type = ir.TensorType(ir.DataType.INT32)
            cast = ir.node("Cast", [value], {"to": ir.DataType.INT64}, name=f"wide_{value.name}")
            for node, place in readers:
                node.replace_input_with(place, cast.outputs[0])
            model.graph.insert_before(model.graph[0], cast)


def narrow_ids(model: ir.Model) -> None:
    """Token ids in int32, which Gather reads without a cast."""
    ids = next(value for value in model.graph.inputs if value.name == "input_ids")
    ids.type = ir.TensorType(ir.DataType.INT32)


@pytest.mark.parametrize(
    ("kind", "edit"),
    [
        ("genai_cpu_int4", constants_as_inputs),
        ("genai_cpu_int4", narrow_integers),
        ("genai_cpu_int4", narrow_ids),
        *(
            pytest.param(kind, edit, marks=pytest.mark.ci)
            for kind, edit in (
                ("optimum_llama", constants_as_inputs),
                ("optimum_llama", narrow_integers),
                ("optimum_gpt2", both),
                ("mobius_qwen3_next", narrow_ids),
            )
        ),
    ],
)
def test_other_inputs_of_the_same_model(
    kind: str, edit: Callable[[ir.Model], None], decoder: Decoder, tmp_path: Path
) -> None:
    folder, _ = decoder(kind)
    foreign = read(folder)
    wanted = [greedy_of_file(foreign, prompt, TOKENS) for prompt in PROMPTS]
    changed = edited(folder, tmp_path / "changed", edit)

    baked = rewritten(changed)
    gate(baked, tmp_path / "gate")

    files = save(baked, tmp_path / "graph")
    assert greedy_of_graph(files, baked.interface, PROMPTS, TOKENS, capacity=32) == wanted


def test_the_long_table_is_another_model_than_the_short_one(
    decoder: Decoder, tmp_path: Path
) -> None:
    folder, _ = decoder("genai_cpu_longrope")
    short, long = rewritten(folder), rewritten(folder, rope="long")

    assert (short.limit, long.limit) == (64, 128)
    assert not (short.expected.logits[-1] == long.expected.logits[-1]).all()
    gate(long, tmp_path)
