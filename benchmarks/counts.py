"""The part of a step that reads and writes `output_counts`, with counts of several dtypes, in turns.

    python benchmarks/counts.py

Reads the counts of 1,024 tokens a row as float32, and adds 1 to a token's; the new counts go where the old ones are, as
in compiled packages, or are copied. Prints microseconds, medians over the rounds, for each dtype that the CPU adds.
"""

from __future__ import annotations

import time

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper
from report import median

VOCAB, HISTORY, ROUNDS, CALLS = 151_936, 1024, 60, 10
DTYPES = ("float32", "float16", "int32", "int16", "uint16", "int8", "uint8")


def session(dtype: str) -> ort.InferenceSession:
    """Inputs: counts [B, V], ids [B, h], token and one [B, 1]. Outputs: float32 of ids [B, h], the new counts."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    ids = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["B", size])
        for name, size in (("ids", "h"), ("token", 1))
    ]
    counts, new, one = (
        helper.make_tensor_value_info(name, kind, ["B", size])
        for name, size in (("counts", VOCAB), ("new", VOCAB), ("one", 1))
    )
    nodes = [
        helper.make_node("GatherElements", ["counts", "ids"], ["found"], axis=1),
        helper.make_node(
            "Cast", ["found"], ["read"], to=TensorProto.FLOAT
        ),  # of float32 it is removed
        helper.make_node(
            "ScatterElements", ["counts", "token", "one"], ["new"], axis=1, reduction="add"
        ),
    ]
    read = helper.make_tensor_value_info("read", TensorProto.FLOAT, ["B", "h"])
    graph = helper.make_graph(nodes, "counts", [counts, *ids, one], [read, new])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    return ort.InferenceSession(model.SerializeToString(), options)


def bound(dtype: str, rows: int, copied: bool) -> tuple[ort.InferenceSession, ort.IOBinding]:
    """A session that has run once, and its buffers."""
    rng, runner = np.random.default_rng(0), session(dtype)
    old, new = (ort.OrtValue.ortvalue_from_numpy(np.zeros((rows, VOCAB), dtype)) for _ in range(2))
    binding = runner.io_binding()
    binding.bind_ortvalue_input("counts", old)
    binding.bind_ortvalue_output("new", new if copied else old)
    binding.bind_cpu_input("ids", rng.integers(0, VOCAB, (rows, HISTORY)))
    binding.bind_cpu_input("token", rng.integers(0, VOCAB, (rows, 1)))
    binding.bind_cpu_input("one", np.ones((rows, 1), dtype))
    binding.bind_output("read")
    runner.run_with_iobinding(binding)
    return runner, binding


def main() -> None:
    ort.set_default_logger_severity(4)
    for rows in (1, 8):
        for copied in (False, True):
            parts, lacking = {}, []
            for dtype in DTYPES:
                try:
                    parts[dtype] = bound(dtype, rows, copied)
                except RuntimeError:  # no kernel
                    lacking.append(dtype)
            times: dict[str, list[float]] = {dtype: [] for dtype in parts}
            for _ in range(ROUNDS):
                for dtype, (runner, binding) in parts.items():
                    start = time.perf_counter()
                    for _ in range(CALLS):
                        runner.run_with_iobinding(binding)
                    times[dtype].append((time.perf_counter() - start) / CALLS * 1e6)
            found = ", ".join(f"{dtype} {median(values):.1f}" for dtype, values in times.items())
            print(
                f"{rows} rows, {'copied' if copied else 'in place'}: {found}; not added: {', '.join(lacking)}"
            )


if __name__ == "__main__":
    main()
