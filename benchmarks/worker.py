"""A system with a model in its own process, driven over its standard streams; started by `turns.Worker`.

    python benchmarks/worker.py WORK SYSTEM MODEL --threads 2

After loading it prints a JSON line: version, seconds to load, memory. It answers each request, a JSON line with the
method `call` and its arguments, with a line. All systems stay loaded and take turns without conflicts between their
libraries. It needs the library of its system and NumPy: the peers may have another environment.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from systems import SYSTEMS, memory, open_system


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", choices=list(SYSTEMS))
    parser.add_argument("system")
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--options", type=json.loads, default={}, help="further arguments of the system, as JSON"
    )
    options = parser.parse_args()
    answers, sys.stdout = (
        sys.stdout,
        sys.stderr,
    )  # the output of libraries must not mix with the answers

    def answer(values: dict[str, Any]) -> None:
        print(json.dumps(values), file=answers, flush=True)

    start = time.perf_counter()
    system = open_system(
        options.work, options.system, options.model, options.threads, **options.options
    )
    seconds = time.perf_counter() - start
    version = f"{system.library} {getattr(sys.modules[system.library], '__version__', '')}"
    answer({"version": version, "load_seconds": seconds, "memory": memory()})
    for line in sys.stdin:
        request = json.loads(line)
        answer(getattr(system, request.pop("call"))(**request))


if __name__ == "__main__":
    main()
