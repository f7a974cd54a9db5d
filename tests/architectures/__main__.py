"""Runs every causal-LM model type of transformers and writes docs/architectures.md: `python -m tests.architectures`.

Takes 22 minutes on two cores with nothing beside it. Rows go to a file as they are made; a run that was stopped goes
on behind the last one. Model types as arguments run only those and print their rows.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from tests.architectures.document import all_types, write_document
from tests.architectures.run import Row, quiet, run_in_time

ROOT = Path(__file__).parents[2]
PROCESSES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_types", nargs="*")
    parser.add_argument("--rows", type=Path, default=ROOT / "architectures.jsonl", help="where rows are kept")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    arguments = parser.parse_args()
    kept = (
        {row.model_type: row for row in map(_from_json, arguments.rows.read_text().splitlines())}
        if (arguments.rows.exists())
        else {}
    )
    wanted = arguments.model_types or [name for name in all_types() if name not in kept]
    with (
        ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn"), initializer=quiet) as pool,
        arguments.rows.open("a") as file,
    ):
        for future in as_completed([pool.submit(run_in_time, name) for name in wanted]):
            row = future.result()
            print(row.model_type, row.result, row.error, f"{row.seconds:g} s", row.reason[:200], flush=True)
            print(row.to_json(), file=file, flush=True)
            kept[row.model_type] = row
    if not arguments.model_types:
        write_document(kept, ROOT / "docs" / "architectures.md")
    print(f"{sum(row.passed for row in kept.values())} of {len(all_types())} model types pass")


def _from_json(line: str) -> Row:
    return Row(**json.loads(line))


if __name__ == "__main__":
    main()
