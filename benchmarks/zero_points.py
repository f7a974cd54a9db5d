"""What zero points cost in a step on the CPU: the products of Qwen3-0.6B's layers with and without them.

    python benchmarks/zero_points.py
    LD_PRELOAD=$PWD/build/avx2.so python benchmarks/zero_points.py    # as an AVX2 processor: see decode.py

28 layers of random 4-bit weights, each layer with its own, on two threads with activations in 8 bits. The forms of the
zero points take turns; a figure is the median of the turns' times, in milliseconds, and in brackets the median of the
ratios to weights without zero points in the same turn.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir import tape
from report import describe_machine, markdown, median, median_ratio, rotated

LAYERS: Final = 28
# Inputs and outputs of qkv_proj, o_proj, gate_up_proj and down_proj.
MATRICES: Final = ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024))
WIDEST: Final = 3072  # inputs
BLOCK_SIZES: Final = (32, 64, 128)
ROWS: Final = (1, 2, 4, 64)
THREADS: Final = 2
SECONDS: Final = 5  # for each form, block size and number of rows
FEWEST_TURNS: Final = 5
MOST_TURNS: Final = 101
# Two zero points of 4 bits in a byte, 8 and 7; a zero point in floating point between them.
FORMS: Final = {
    "without": lambda levels: None,
    "in 4 bits": lambda levels: np.full((len(levels), -(-levels.shape[1] // 2)), 0x78, np.uint8),
    "float": lambda levels: np.full(levels.shape[:2], 7.5, np.float32),
}


def make_session(block_size: int, form: str) -> ort.InferenceSession:
    """A session over all layers: x [rows, 3072] float32 enters, x plus a result of the last product leaves."""
    rng = np.random.default_rng(0)
    x = ir.Value(name="x", shape=ir.Shape(["rows", WIDEST]), type=ir.TensorType(ir.DataType.FLOAT))
    graph = tape.Tape()
    zero, one = (graph.initializer(ir.tensor(np.array([n]), name=f"at_{n}")) for n in (0, 1))
    ends = {
        inputs: graph.initializer(ir.tensor(np.array([inputs]), name=f"end_{inputs}"))
        for inputs, _ in MATRICES
    }
    total = x
    for layer in range(LAYERS):
        for matrix, (inputs, outputs) in enumerate(MATRICES):
            levels = rng.integers(
                0, 256, (outputs, inputs // block_size, block_size // 2), np.uint8
            )
            scales = rng.uniform(0.001, 0.002, levels.shape[:2]).astype(np.float32)
            parts = {"levels": levels, "scales": scales, "zeros": FORMS[form](levels)}
            given = [
                graph.initializer(ir.tensor(array, name=f"{name}_{layer}_{matrix}"))
                for name, array in parts.items()
                if array is not None
            ]
            # Each product waits for the one before, as in a model.
            product = graph.op(
                "MatMulNBits",
                [graph.op("Slice", [total, zero, ends[inputs], one]), *given],
                {
                    "K": inputs,
                    "N": outputs,
                    "bits": 4,
                    "block_size": block_size,
                    "accuracy_level": 4,
                },
                domain="com.microsoft",
            )
            total = graph.op("Add", [x, graph.op("ReduceMax", [product, one])])
    opsets = {"": 20, "com.microsoft": 1}
    made = ir.Graph(
        [x], [total], nodes=graph.nodes, initializers=graph.initializers, opset_imports=opsets
    )
    total.name = "y"
    options = ort.SessionOptions()
    options.intra_op_num_threads = THREADS
    model = ir.to_proto(ir.Model(made, ir_version=10))
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def measure(sessions: dict[str, ort.InferenceSession], x: np.ndarray) -> dict[str, list[float]]:
    """Milliseconds of each turn. Each form has the same time, so that a slow one has fewer turns."""
    times: dict[str, list[float]] = {form: [] for form in sessions}
    for session in sessions.values():
        session.run(None, {"x": x})
    for turn in range(MOST_TURNS):
        for form in rotated(sessions, turn):
            if len(times[form]) >= FEWEST_TURNS and sum(times[form]) > 1e3 * SECONDS:
                continue
            start = time.perf_counter()
            sessions[form].run(None, {"x": x})
            times[form].append(1e3 * (time.perf_counter() - start))
    return times


def ratio(values: list[float], references: list[float]) -> float | None:
    """The median over the turns that both had."""
    both = min(len(values), len(references))
    return median_ratio(values[:both], references[:both])


def main() -> None:
    print(describe_machine(THREADS))
    table = []
    for block_size in BLOCK_SIZES:
        sessions = {form: make_session(block_size, form) for form in FORMS}
        for rows in ROWS:
            x = np.random.default_rng(1).standard_normal((rows, WIDEST)).astype(np.float32)
            times = measure(sessions, x)
            cells = [
                f"{median(values):.1f} ({ratio(values, times['without']):.2f}x)"
                for values in times.values()
            ]
            table.append([str(block_size), str(rows), *cells])
    print("\n".join(markdown(["blocks of", "rows", *FORMS], table)))


if __name__ == "__main__":
    main()
