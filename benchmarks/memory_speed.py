"""The least time of a decode step: the bytes that it reads, and the speed at which this machine reads memory.

    python benchmarks/memory_speed.py --threads 2

Prints a JSON line: bytes per second of all threads together. Each thread reads its own array, which fits no cache; the
fastest of several passes counts.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

MEGABYTES: Final = 256  # per thread
PASSES: Final = 12
# These read a row of a table, or of cosines and sines.
_LOOKUPS: Final = ("Gather", "GatherBlockQuantized", "GroupQueryAttention", "RotaryEmbedding")


def measure(threads: int) -> float:
    """Bytes per second with that many threads, in a separate process whose BLAS starts no further threads."""
    environment = os.environ | {
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, "--threads", str(threads)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["bytes_per_second"])


def active_bytes(package: Path, experts_per_token: int, history: int) -> int:
    """The bytes that a decode step of a compiled package has to read for a single row.

    These are all weights once (of a mixture the weights of the active experts), keys and values, and recurrent and
    convolutional states. Activations and writes are not counted.

    Args:
        package: The package's folder.
        experts_per_token: Active experts.
        history: Tokens of the row; a layer with a window reads at most the window.
    """
    import onnx_ir as ir

    from qsample.graph import gqa, moe

    graph = ir.load(package / "decoder.onnx").graph
    sizes: dict[ir.Value, int] = {}
    seen: dict[ir.Value | None, int] = {}  # keys and values → tokens read
    for node in graph:
        if node.op_type == gqa.OP_TYPE:
            window = node.attributes.get_int("local_window_size", -1)
            for slot in (gqa.Slot.PAST_KEY, gqa.Slot.PAST_VALUE):
                seen[node.inputs[slot]] = min(history, window) if window > 0 else history
        for value in node.inputs if node.op_type not in _LOOKUPS else ():
            if value is None or value.const_value is None or not value.is_initializer():
                continue
            sizes[value] = value.const_value.nbytes
            if node.op_type in (moe.OP_TYPE, moe.QUANTIZED_OP_TYPE):
                sizes[value] = (
                    sizes[value] * experts_per_token // int(value.const_value.shape.numpy()[0])
                )
    return sum(sizes.values()) + sum(
        _state_bytes(value, seen.get(value, history)) for value in graph.inputs
    )


def _state_bytes(value: Any, history: int) -> int:
    """The bytes of a state of the model for a row; 0 for any other input."""
    if not value.name.startswith("past_key_values."):
        return 0
    sizes = [dim for dim in value.shape[1:] if isinstance(dim, int)]
    if value.name.endswith((".key", ".value")):  # [B, heads, capacity, head size]
        sizes = [sizes[0], history, sizes[-1]]
    return math.prod(sizes) * int(value.dtype.itemsize)


def main() -> None:
    import numpy as np
    from report import make_parser

    threads = make_parser(__doc__, threads=2).parse_args().threads
    arrays = [np.ones(MEGABYTES * 2**18, np.float32) for _ in range(threads)]
    fastest = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(PASSES):
            start = time.perf_counter()
            # A dot product with itself reads an array once, as fast as memory gives it.
            list(pool.map(lambda array: array.dot(array), arrays))
            fastest = min(fastest, time.perf_counter() - start)
    print(json.dumps({"bytes_per_second": threads * arrays[0].nbytes / fastest}))


if __name__ == "__main__":
    main()
