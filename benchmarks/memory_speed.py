"""How fast this machine reads memory: what a decode step can take at the least, for the bytes that it reads.

    python benchmarks/memory_speed.py --threads 2

Each thread goes through an array of its own that no cache holds; the fastest of several passes counts. Prints a JSON
line: bytes a second of all threads together.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

MEGABYTES: Final = 256  # of each thread
PASSES: Final = 12


def measure(threads: int) -> float:
    """Bytes a second, read by that many threads at once; in a process of its own, whose BLAS starts no others."""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--threads", str(threads)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["bytes_per_second"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    threads = parser.parse_args().threads

    import numpy as np

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
