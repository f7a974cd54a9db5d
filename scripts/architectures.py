"""Exports and compiles every causal-LM model type of transformers, and types that read images; writes
docs/architectures.md.

    python scripts/architectures.py            all types: about 30 minutes on two cores
    python scripts/architectures.py TYPE ...   only those, printed and not written; image:TYPE for one with its images

Each result is appended to a file; an interrupted run continues after the last result. The checks are in
tests/architectures/.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 2


def main() -> None:
    """Run the given types, or all types without a result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_types", nargs="*", metavar="TYPE")
    parser.add_argument(
        "--rows", type=Path, default=ROOT / "architectures.jsonl", help="file of results"
    )
    parser.add_argument("--processes", type=int, default=PROCESSES)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))  # the processes of the pool inherit it
    from tests.architectures.document import all_types, write_document
    from tests.architectures.images import image_names
    from tests.architectures.run import Row, quiet
    from tests.architectures.timed import run_in_time

    lines = arguments.rows.read_text("utf-8").splitlines() if arguments.rows.exists() else []
    kept = {row.model_type: row for row in (Row(**json.loads(line)) for line in lines)}
    names = [*all_types(), *image_names()]
    wanted = arguments.model_types or [name for name in names if name not in kept]
    with (
        ProcessPoolExecutor(
            arguments.processes, mp_context=get_context("spawn"), initializer=quiet
        ) as pool,
        arguments.rows.open("a") as file,
    ):
        for future in as_completed([pool.submit(run_in_time, name) for name in wanted]):
            row = future.result()
            print(
                row.model_type,
                row.result,
                row.error,
                f"{row.seconds:g} s",
                row.reason[:200],
                flush=True,
            )
            print(row.to_json(), file=file, flush=True)
            kept[row.model_type] = row
    if not arguments.model_types:
        write_document(kept, ROOT / "docs" / "architectures.md")
    print(f"{sum(row.passed for row in kept.values())} of {len(names)} model types pass")


if __name__ == "__main__":
    main()
