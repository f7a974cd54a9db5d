"""8-bit weights with float32 activations on the CPU: one product, or the same bytes read as 4-bit levels.

    python benchmarks/eight_bits.py

[M, 2048] times [2048, 3072] on one thread, in milliseconds, the least of some calls, and the error of each product,
relative to float64. The second form is that of portable packages (`qsample/graph/packed.py`), the last that of packages
for the CPU, whose activations are rounded to 8 bits.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from report import markdown

from qsample.graph.packed import in_nibbles

N, K, SECONDS = 3072, 2048, 0.5
FORMS: Final = {
    "one product": (1, False),
    "as 4-bit levels": (1, True),
    "activations in 8 bits": (4, False),
}
GRAPH: Final = """<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
product (float[M,2048] x, uint8[N,B,S] levels, float[N,B] scales, uint8[Z] zeros) => (float[M,3072] y) {
    y = com.microsoft.MatMulNBits <K = 2048, N = 3072, bits = 8, block_size = %d, accuracy_level = %d>
        (x, levels, scales, zeros)
}"""


def measure(size: int, level: int, nibbles: bool, rows: int) -> tuple[float, float]:
    """Milliseconds and the relative error."""
    rng, count = np.random.default_rng(0), K // size
    levels, zeros = (
        rng.integers(0, 256, (N, count, size), np.uint8),
        rng.integers(100, 156, (N, count), np.uint8),
    )
    scales = rng.uniform(0.001, 0.002, (N, count)).astype(np.float32)
    model = ir.from_onnx_text(GRAPH % (size, level))
    (node,) = model.graph
    node.name = "product"
    node.outputs[0].shape = ir.Shape(["M", N])
    for value, array in zip(
        model.graph.inputs[1:], (levels, scales, zeros.reshape(-1)), strict=True
    ):
        value.const_value, value.shape = ir.tensor(array, name=value.name), ir.Shape(array.shape)
        model.graph.inputs.remove(value)
        model.graph.register_initializer(value)
    if nibbles:
        in_nibbles(model)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    x = rng.standard_normal((rows, K)).astype(np.float32)
    weight = ((levels.astype(float) - zeros[..., None]) * scales[..., None]).reshape(N, K)
    wanted, least, end = x.astype(float) @ weight.T, np.inf, time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        (got,) = session.run(None, {"x": x})
        least = min(least, 1e3 * (time.perf_counter() - start))
    return least, float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def main() -> None:
    rows = []
    for size in (16, 32, 128):
        for name, (level, nibbles) in FORMS.items():
            (first, one), (second, several) = (
                measure(size, level, nibbles, count) for count in (1, 64)
            )
            rows.append(
                [
                    f"blocks of {size}",
                    name,
                    f"{first:.3g}",
                    f"{second:.3g}",
                    f"{max(one, several):.1e}",
                ]
            )
    print(
        "\n".join(markdown(["weights", "form", "M = 1, ms", "M = 64, ms", "largest error"], rows))
    )


if __name__ == "__main__":
    main()
