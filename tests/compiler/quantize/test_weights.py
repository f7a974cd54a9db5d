"""Weight quantization: what the matrices hold, tied tables, the divergence from the float model, bad options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample import AutoModelForCausalLM
from qsample.cli.quantized import quantization_in_words
from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.compiler.quantize import weights
from qsample.compiler.quantize.bits import BitsTable
from qsample.compiler.quantize.blocks import float_bytes, quantization_report
from qsample.compiler.quantize.float16 import store_as_float16
from qsample.compiler.quantize.methods import WeightQuantization
from qsample.compiler.quantize.weights import check_quantized, quantize_weights
from qsample.errors import CompileError
from qsample.graph.edit import initializer
from qsample.package.package import Package, read_package
from tests.helpers.small_graphs import loop_graph, normal, small_graph

VOCAB, HIDDEN, ODD = 48, 64, 40
WAYS = [
    WeightQuantization(4),
    WeightQuantization(8),
    WeightQuantization(4, 16),
    WeightQuantization(8, 64),
    WeightQuantization(2),
    WeightQuantization(2, 64),
    WeightQuantization(4, 32, zero_points=True),
]


SMALL = """
small (int64[B,S] ids, float[B,S,64] x, float[B,%d] part, float[48,64] table, float[64,48] matrix, float[%d,8] odd)
    => (float[B,S,64] lookup, float[B,S,48] product, float[B,S,48] scores, float[B,8] rest)
{
    lookup = Gather (table, ids)
    product = MatMul (x, matrix)
    scores = com.microsoft.FusedMatMul <transB = 1> (x, table)
    rest = MatMul (part, odd)
}
"""


def small_model(weights: dict[str, np.ndarray], odd: int = ODD) -> ir.Model:
    """odd: the width of part."""
    return small_graph(SMALL % (odd, odd), constants=weights)


def make_weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"table": (VOCAB, HIDDEN), "matrix": (HIDDEN, VOCAB), "odd": (ODD, 8)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def levels(stored: np.ndarray, bits: int) -> np.ndarray:
    """[..., bytes] as [..., values]: the first value of a byte lies in its low bits."""
    parts = [stored.astype(np.int64) // 2**place % 2**bits for place in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(*stored.shape[:-1], -1)


def dequantized(folder: Path, name: str, way: WeightQuantization) -> np.ndarray:
    """[N, K], from the file alone: scale times (level minus its block's zero point, or the middle level)."""
    initializers = ir.load(folder / "m.onnx").graph.initializers
    array = {
        kind: v.const_value.numpy() for kind, v in initializers.items() if v.const_value is not None
    }
    blocks = levels(array[f"{name}_blocks"], way.bits)
    count = blocks.shape[1]
    scales = array[f"{name}_scales"].reshape(-1, count, 1)
    zeros: np.ndarray | int = 2 ** (way.bits - 1)
    if f"{name}_zero_points" in array:
        packed = array[f"{name}_zero_points"].reshape(len(blocks), -1)
        zeros = levels(packed, way.bits)[:, :count, None]
    return ((blocks - zeros) * scales).reshape(len(blocks), -1)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_quantized_graph(way: WeightQuantization, tmp_path: Path) -> None:
    weights = make_weights()
    model = small_model(weights)
    assert quantize_weights(model, way)
    report = quantization_report(model)
    assert report is not None
    ir.save(model, tmp_path / "m.onnx", external_data="m.data")

    # Every row is within half a level of the weights, and the levels are as fine as the bits.
    for name, original in (("table", weights["table"]), ("matrix", weights["matrix"].T)):
        step = (
            np.abs(original).reshape(len(original), -1, way.block_size).max(-1)
            * 2
            / (2**way.bits - 2)
        )
        error = (
            np.abs(dequantized(tmp_path, name, way) - original)
            .reshape(len(original), -1, way.block_size)
            .max(-1)
        )
        # A block with a zero point may leave out up to 30 % of its range.
        most = 0.3 * np.abs(original).max() if way.zero_points and name == "matrix" else step * 1.01
        assert (error <= most).all()
        assert error.max() > 0

    # The graph computes with these very numbers: one-hot activations survive their own rounding to int8.
    session = ort.InferenceSession(tmp_path / "m.onnx")
    ids = np.arange(6).reshape(2, 3)
    feeds = {
        "ids": ids,
        "x": np.eye(HIDDEN, dtype=np.float32)[None],
        "part": np.ones((1, ODD), np.float32),
    }
    lookup, product, scores, rest = session.run(["lookup", "product", "scores", "rest"], feeds)
    np.testing.assert_allclose(lookup, dequantized(tmp_path, "table", way)[ids], atol=1e-6)
    np.testing.assert_allclose(
        scores[0].T, dequantized(tmp_path, "table", way), rtol=0.01, atol=1e-3
    )
    np.testing.assert_allclose(
        product[0].T, dequantized(tmp_path, "matrix", way), rtol=0.01, atol=1e-3
    )
    if ODD % way.block_size:
        np.testing.assert_allclose(rest, weights["odd"].sum(0)[None], rtol=1e-5)

    # The tied table is quantized once; no float copy of a quantized matrix is left.
    names = list(model.graph.initializers)
    assert ("matrix_zero_points" in names) == way.zero_points
    assert "table_zero_points" not in names, "a lookup reads it, too"
    assert [name for name in names if name.endswith("_blocks")] == ["table_blocks", "matrix_blocks"]
    assert {"table", "matrix"}.isdisjoint(names)
    assert "odd" in names
    assert report.matrices == 2
    assert report.bytes_before == weights["table"].nbytes + weights["matrix"].nbytes
    stored = [
        v.const_value
        for n, v in model.graph.initializers.items()
        if n.startswith(("table_", "matrix_"))
    ]
    assert report.bytes_after == sum(tensor.nbytes for tensor in stored if tensor is not None)


def test_tables_that_positions_are_looked_up_in_stay_float() -> None:
    model = small_graph(
        """
        g (int64[B,S] input_ids, int32[B] lengths, int64[S] steps, float[48,64] table, float[32,64] places)
            => (float[B,S,64] both) {
            axes = Constant <value_ints = [1]> ()
            column = Unsqueeze (lengths, axes)
            start = Cast <to = 7> (column)
            positions = Add (start, steps)
            place = Gather (places, positions)
            one = Constant <value = int64 {1}> ()
            begun = Less (start, one)
            ids = Where (begun, one, input_ids)
            word = Gather (table, ids)
            both = Add (word, place)
        }""",
        {"ids": ["B", "S"]},
        ir.DataType.INT64,
        {"table": normal(48, 64), "places": normal(32, 64)},
    )
    assert quantize_weights(model, WeightQuantization(4))
    assert [node.op_type for node in model.graph if "Gather" in node.op_type] == [
        "Gather",
        "GatherBlockQuantized",
    ]
    assert "places" in model.graph.initializers
    assert "table" not in model.graph.initializers


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [0, 1])
def test_the_weights_of_a_gemm(transposed: int, bias: bool, tmp_path: Path) -> None:
    """Such as those of shared experts, which see flattened rows."""
    sizes = (VOCAB, HIDDEN) if transposed else (HIDDEN, VOCAB)
    arrays = {"weight": normal(*sizes, seed=1), **({"bias": normal(VOCAB, seed=2)} if bias else {})}
    given = f"float[R,64] rows, float{list(sizes)} weight" + ", float[48] bias" * bias
    product = f"result = Gemm <transB = {transposed}> (rows, weight{', bias' * bias})"
    model = small_graph(f"gemm ({given}) => (float[R,48] result) {{ {product} }}", constants=arrays)
    way = WeightQuantization(8)
    assert quantize_weights(model, way)
    assert "weight" not in model.graph.initializers
    ir.save(model, tmp_path / "m.onnx")
    result = ort.InferenceSession(tmp_path / "m.onnx").run(
        None, {"rows": np.eye(HIDDEN, dtype=np.float32)}
    )[0]
    expected = dequantized(tmp_path, "weight", way).T + (arrays["bias"] if bias else 0)
    np.testing.assert_allclose(result, expected, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_weights_of_a_loop(bits: int, tmp_path: Path) -> None:
    """They are constants of the graph around it."""
    weights = {"w1_weight": normal(HIDDEN, 32, seed=1), "w2_weight": normal(HIDDEN, 32, seed=2)}
    model, way = loop_graph(*weights.values()), WeightQuantization(bits)
    assert quantize_weights(model, way)
    assert weights.keys().isdisjoint(model.graph.initializers)
    ir.save(model, tmp_path / "m.onnx")
    first, second = (dequantized(tmp_path, name, way).T for name in weights)

    x = np.eye(HIDDEN, dtype=np.float32)[None]  # survives its own rounding
    feeds = {"x": x, "start": np.zeros((1, 32), np.float32)}
    last, _ = ort.InferenceSession(tmp_path / "m.onnx").run(["last", "sums"], feeds)
    np.testing.assert_allclose(last[0], (first * second).sum(0), rtol=0.02, atol=0.02)


@pytest.fixture(scope="module")
def int8(llama_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("int8") / "package"
    compile_package(read_package(llama_package), path, CompileOptions(ctx_len=64, weights="int8"))
    return path


def test_a_quantized_package(int8: Path, llama_package: Path) -> None:
    compiled, portable = read_package(int8), read_package(llama_package)
    compilation = compiled.manifest.compilation
    quantization = compilation.quantization
    described = [quantization[name] for name in ("dtype", "preset", "block_size", "method")]
    assert described == ["int8", "quick", 32, "rtn"]
    assert quantization_in_words(quantization).startswith(
        "int8 weights in blocks of 32 (quick, rtn), "
    )
    operators = compilation.placement["CPUExecutionProvider"]
    assert operators["MatMulNBits"] >= quantization["matrices"] - 1
    assert operators["GatherBlockQuantized"] == 1
    assert "MatMul" not in operators or operators["MatMul"] == 1  # the sampler's own
    assert (
        compiled.file("decoder.onnx.data").stat().st_size
        < 0.5 * portable.file("decoder.onnx.data").stat().st_size
    )

    figures = quantization["divergence"]
    assert figures["text"] == "documents"
    assert 300 < figures["tokens"] <= 16 * 48
    assert 0 < figures["kl"]["low"] < figures["kl"]["value"] < figures["kl"]["high"] < 0.01
    assert figures["agreement"]["value"] > 0.9
    assert figures["perplexity_ratio"]["value"] == pytest.approx(1, abs=0.05)

    prompts = [[5, 6, 7, 8], [9], [10, 11, 12]]
    got, wanted = (
        AutoModelForCausalLM.from_pretrained(path)
        .generate(prompts, do_sample=False, max_new_tokens=8)
        .token_ids
        for path in (int8, llama_package)
    )
    same = [
        a == b
        for row, other in zip(got, wanted, strict=True)
        for a, b in zip(row, other, strict=False)
    ]
    assert np.mean(same) > 0.7


def test_too_far_off_is_refused_and_put_aside(small: Package, tmp_path: Path) -> None:
    """What took hours to compile is not thrown away, and nothing that was there is replaced."""
    (tmp_path / "out.rejected").write_text("mine")
    options = CompileOptions(ctx_len=32, weights="int4", max_divergence=1e-9)
    why = (
        r"int4 weights in blocks of 32 \(preset quick\) change the model too much: KL 0\.\d+ nats a token "
        r"\(.* to .*\), top-1 .* %, perplexity ratio .*, on \d+ tokens of .* may be at most 1e-09\. Take preset "
        r"balanced, or weights int8, or block_size 16; max_divergence moves .* kept as .*rejected1: "
    )
    with pytest.raises(CompileError, match=why):
        compile_package(small, tmp_path / "out", options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.rejected", "out.rejected1"]
    kept = read_package(tmp_path / "out.rejected1").manifest.compilation
    assert kept.quantization["divergence"]["kl"]["value"] > 1e-9


def test_the_packages_own_dtype_is_no_quantization(small: Package, tmp_path: Path) -> None:
    compiled = compile_package(
        small, tmp_path / "out", CompileOptions(ctx_len=32, weights="float32")
    )
    assert compiled.manifest.compilation.quantization is None


@pytest.mark.ci
def test_a_package_with_adapters_has_the_bits_of_one_without(
    bundled_package: Path, adapted_server_package: Path, tmp_path: Path
) -> None:
    tables = []
    for name, source in (("plain", bundled_package), ("adapted", adapted_server_package)):
        compiled = compile_package(
            read_package(source), tmp_path / name, CompileOptions(ctx_len=64, weights="int4")
        )
        assert compiled.manifest.compilation is not None
        assert compiled.manifest.compilation.quantization is not None
        tables.append(compiled.manifest.compilation.quantization["bits"])
    assert tables[0] == tables[1]
    assert {"layers.0.qkv_proj", "layers.1.down_proj", "lm_head"} <= tables[0].keys()


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({}, {"w0": 4, "w1": 2, "logits": 2}),
        ({"lm_head": "int8"}, {"w0": 4, "w1": 2, "logits": 8}),
        ({"lm_head": "float"}, {"w0": 4, "w1": 2}),
    ],
)
def test_two_bits_where_kernels_have_them(table: dict[str, str], expected: dict[str, int]) -> None:
    """Blocks of 16, which an input of 48 needs, have no kernel of 2 bits."""
    model = products(48, 128, 64)
    model.graph[2].outputs[0].name = "logits"
    assert quantize_weights(model, WeightQuantization(2, 64), BitsTable(table))
    found = [node.attributes["bits"].value for node in model.graph if node.op_type == "MatMulNBits"]
    assert found == list(expected.values())
    report = quantization_report(model)
    assert report is not None
    assert report.matrices == len(expected)
    assert set(report.bits.values()) <= {
        f"int{bits}:{size}" for bits in (2, 4, 8) for size in (16, 64)
    }
    assert ("lm_head" in report.bits) == ("logits" in expected)


def products(*sizes: int, dtype: ir.DataType = ir.DataType.FLOAT, packed: bool = False) -> ir.Model:
    """A product for each input size; packed: by weights that came quantized."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20, "com.microsoft": 1}, name="products")
    for index, size in enumerate(sizes):
        x = ir.Value(name=f"x{index}", shape=ir.Shape(["B", size]), type=ir.TensorType(dtype))
        graph.inputs.append(x)
        if packed:
            levels = [
                initializer(graph, f"b{index}", np.zeros((8, size // 32, 16), np.uint8)),
                initializer(graph, f"s{index}", np.ones(size // 4, dtype.numpy())),
            ]
            node = ir.node(
                "MatMulNBits",
                [x, *levels],
                {"K": size, "N": 8, "block_size": 32},
                domain="com.microsoft",
            )
        else:
            node = ir.node(
                "MatMul", [x, initializer(graph, f"w{index}", np.ones((size, 8), dtype.numpy()))]
            )
        graph.append(node)
        graph.outputs.append(node.outputs[0])
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize(
    ("model", "block_size", "message"),
    [
        (
            products(20, 9),
            16,
            r"none of their input sizes \(9, 20\) is a multiple of 16, the smallest block; leave",
        ),
        (
            products(40, 1000),
            256,
            r"none of their input sizes \(40, 1000\) is a multiple of 16, the smallest block",
        ),
        (
            products(64, dtype=ir.DataType.DOUBLE),
            16,
            "by no constant matrix of float32, float16 or bfloat16; leave",
        ),
        (
            products(64, packed=True),
            16,
            "no constant matrix .* brought quantized; these stay as they are; leave weights",
        ),
    ],
    ids=lambda value: None if isinstance(value, ir.Model) else str(value)[:20],
)
def test_nothing_to_quantize(model: ir.Model, block_size: int, message: str) -> None:
    way = WeightQuantization(4, block_size)
    assert not quantize_weights(model, way)
    with pytest.raises(
        CompileError,
        match=f"4-bit weights were asked for and no matrix .* can be quantized: .*{message}",
    ):
        check_quantized(model, way)


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.BFLOAT16])
def test_one_matrix_is_enough(dtype: ir.DataType) -> None:
    model = products(20, 64, dtype=dtype)
    assert quantize_weights(model, WeightQuantization(8, 64))
    check_quantized(model, WeightQuantization(8, 64))


def test_a_package_of_which_nothing_is_quantized(
    small: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "BLOCK_SIZES", (256,))
    with pytest.raises(
        CompileError, match=r"no matrix of the model can be quantized: .*input sizes \(16\)"
    ):
        compile_package(
            small, tmp_path / "out", CompileOptions(ctx_len=32, weights="int4", block_size=256)
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("asked", "inputs", "got"), [(128, 2880, 64), (256, 48, 16), (32, 80, 16), (64, 96, 32)]
)
def test_inputs_that_the_block_does_not_divide(
    asked: int, inputs: int, got: int, tmp_path: Path
) -> None:
    """The largest smaller block that divides them is taken: for 2,880, gpt-oss's width, and 128 that is 64."""
    weights = {
        "table": normal(VOCAB, HIDDEN, seed=3),
        "matrix": normal(HIDDEN, 8, seed=4),
        "odd": normal(inputs, 24),
    }
    model, way = small_model(weights, odd=inputs), WeightQuantization(4, asked)
    assert quantize_weights(model, way)
    report = quantization_report(model)
    assert (report.matrices, report.float_bytes) == (3, 0)
    assert report.block_sizes == tuple(sorted({got, min(asked, HIDDEN)}))
    ir.save(model, tmp_path / "m.onnx", external_data="m.data")

    taken = replace(way, block_size=got)
    expected = dequantized(tmp_path, "odd", taken)
    assert expected.shape == (24, inputs)
    error = np.abs(expected - weights["odd"].T).reshape(24, -1, got).mean(-1)
    assert (
        error < np.abs(weights["odd"].T).reshape(24, -1, got).max(-1) / 14
    ).all()  # half of a level
    feeds = {"ids": np.zeros((1, 1), np.int64), "x": np.zeros((1, 1, HIDDEN), np.float32)}
    rest = ort.InferenceSession(tmp_path / "m.onnx").run(
        ["rest"], feeds | {"part": np.eye(inputs, dtype=np.float32)}
    )
    np.testing.assert_allclose(rest[0].T, expected, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("way", [WAYS[0], WAYS[3]], ids=str)
@pytest.mark.parametrize("inputs", [40, 1000])
def test_inputs_that_no_block_divides(inputs: int, way: WeightQuantization, tmp_path: Path) -> None:
    """The last block of a row is filled up, where the device takes that."""
    weights = {
        "table": normal(VOCAB, HIDDEN, seed=3),
        "matrix": normal(HIDDEN, 8, seed=4),
        "odd": normal(inputs, 24),
    }
    model = small_model(weights, odd=inputs)
    assert quantize_weights(model, way, pads=True)
    report = quantization_report(model)
    assert (report.matrices, report.float_bytes) == (3, 0)
    ir.save(model, tmp_path / "m.onnx", external_data="m.data")

    fewest = 16 if way.bits == 8 and inputs == 40 else 32 if inputs == 40 else 64  # bytes
    taken = replace(way, block_size=min(way.block_size, fewest))
    expected = dequantized(tmp_path, "odd", taken)[:, :inputs]
    error = np.abs(expected - weights["odd"].T)
    assert error.mean() < np.abs(weights["odd"]).max() / (2**way.bits - 2)
    session = ort.InferenceSession(tmp_path / "m.onnx")
    for rows in (1, 5):
        x = normal(rows, inputs, seed=5)
        feeds = {
            "ids": np.zeros((1, 1), np.int64),
            "x": np.zeros((1, 1, HIDDEN), np.float32),
            "part": x,
        }
        exact = x @ expected.T
        # Activations are rounded to int8.
        assert np.abs(session.run(["rest"], feeds)[0] - exact).max() < 0.02 * np.abs(exact).max()


TIED = """
tied (int64[B,S] ids, float[B,S,160] x, float[48,160] table) => (float[B,S,160] lookup, float[B,S,48] scores) {
    lookup = Gather (table, ids)
    scores = com.microsoft.FusedMatMul <transB = 1> (x, table)
}
"""


@pytest.mark.parametrize(
    ("asked", "bits", "got"),
    [(32, 4, 32), (64, 4, 64), (128, 4, 64), (256, 4, 64), (128, 8, 32), (256, 2, 64)],
)
def test_a_tied_table_in_the_blocks_of_the_fewest_bytes(asked: int, bits: int, got: int) -> None:
    """Levels, scales, and ONNX Runtime's sums: 120 bytes a row of 160 in blocks of 64 as well as 32, 144 in 128."""
    model = small_graph(TIED, constants={"table": normal(VOCAB, 160)})
    assert quantize_weights(model, WeightQuantization(bits, asked), pads=True)
    assert quantization_report(model).block_sizes == (got,)


def test_rows_of_a_table_are_filled_up_and_cut_off(tmp_path: Path) -> None:
    table, way = normal(VOCAB, 160, seed=1), WeightQuantization(4, 64)
    model = small_graph(TIED, constants={"table": table})
    assert quantize_weights(model, way, pads=True)
    ir.save(model, tmp_path / "m.onnx")
    stored = dequantized(tmp_path, "table", way)
    assert stored.shape == (VOCAB, 192)
    assert (stored[:, 160:] == 0).all()
    assert np.abs(stored[:, :160] - table).mean() < 0.1
    ids, x = (
        np.arange(48).reshape(2, 24),
        np.eye(160, dtype=np.float32)[None],
    )  # survives its own rounding
    session = ort.InferenceSession(tmp_path / "m.onnx")
    np.testing.assert_allclose(
        session.run(["lookup"], {"ids": ids, "x": x})[0], stored[ids, :160], atol=1e-6
    )
    np.testing.assert_allclose(
        session.run(["scores"], {"ids": ids, "x": x})[0][0].T, stored[:, :160], atol=1e-2
    )


def test_what_is_not_filled_up() -> None:
    """Inputs of less than a block; and on a device that does not take it, what a product reads."""
    for changed, pads in (({"odd": normal(9, 8)}, True), ({}, False)):
        arrays = make_weights() | changed
        model = small_model(arrays, odd=len(arrays["odd"]))
        quantize_weights(model, WeightQuantization(4, 32), pads=pads)
        assert "odd" in model.graph.initializers
    lookup = (
        "g (int64[B] ids, float[48,40] table) => (float[B,40] rows) { rows = Gather (table, ids) }"
    )
    model = small_graph(lookup, constants={"table": normal(VOCAB, 40)})
    assert quantize_weights(model, WeightQuantization(4, 32))


def test_a_packages_block_sizes(small: Package, tmp_path: Path) -> None:
    """Its hidden size is 16. The manifest has both the block size of the options and those that were used."""
    compile_package(
        small, tmp_path / "out", CompileOptions(ctx_len=32, weights="int8", block_size=128)
    )
    compilation = read_package(tmp_path / "out").manifest.compilation
    assert compilation.quantization["block_size"] == 128
    assert compilation.quantization["block_sizes"] == [16]


OFFSETS = """
packed (int64[B,S] ids, float[B,S,512] x, uint8[64,32,8] blocks, float[64,32] scales, float[32,64] offsets,
    float[512,64] plain, uint8[48,32,8] table, float[48,32,1] table_scales, float[48,32,1] table_offsets)
    => (float[B,S,64] result, float[B,S,64] other, float[B,S,32,16] rows) {
    parts = Reshape (x, shape)
    sums = ReduceSum <keepdims=0> (parts, last)
    added = MatMul (sums, offsets)
    product = com.microsoft.MatMulNBits <K=512, N=64, bits=4, block_size=16> (x, blocks, scales)
    result = Add (product, added)
    other = MatMul (x, plain)
    found = com.microsoft.GatherBlockQuantized <bits=4, block_size=16, gather_axis=0, quantize_axis=2>
        (table, ids, table_scales)
    more = Gather (table_offsets, ids)
    rows = Add (found, more)
}
"""


def test_offsets_of_packed_weights_stay_float() -> None:
    """They are matrices that blocks of 16 and 32 would fit."""
    rng = np.random.default_rng(0)
    arrays = {
        "blocks": rng.integers(0, 256, (64, 32, 8), dtype=np.uint8),
        "table": rng.integers(0, 256, (48, 32, 8), dtype=np.uint8),
        "shape": np.array([0, 0, 32, 16]),
        "last": np.array([-1]),
    }
    shapes = {
        "scales": (64, 32),
        "offsets": (32, 64),
        "plain": (512, 64),
        "table_scales": (48, 32, 1),
    }
    shapes["table_offsets"] = (48, 32, 1)
    arrays |= {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    text = OFFSETS.replace("table_offsets)\n", "table_offsets, int64[4] shape, int64[1] last)\n", 1)
    for quantize in (
        lambda model: quantize_weights(model, WeightQuantization(4)),
        store_as_float16,
    ):
        model = small_graph(
            text, {"sums": ["B", "S", 32], "product": ["B", "S", 64]}, constants=arrays
        )
        assert float_bytes(model) == arrays["plain"].nbytes
        assert quantize(model)
        report = quantization_report(model)
        assert report is not None
        assert report.matrices == 1
        for name in ("offsets", "table_offsets", "scales"):
            np.testing.assert_array_equal(
                model.graph.initializers[name].const_value.numpy(), arrays[name]
            )
