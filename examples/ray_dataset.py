"""A dataset through Ray Data: prompts in, texts out, on this machine or on a cluster.

    RAY_AUTH_MODE=disabled python examples/ray_dataset.py           with the model that comes with qsample
    RAY_AUTH_MODE=disabled python examples/ray_dataset.py tiny-cpu  with a package

It needs qsample with the extras `cpu` and `ray`, and `export` for the model that comes with it. Ray starts a cluster
on this machine, or joins the one that RAY_ADDRESS names.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import ray

from qsample.bundled import bundled_model
from qsample.ray import QsampleProcessorConfig, build_processor

PROMPTS = ["In the beginning", "Blessed are", "And Jesus said unto them", "And the LORD spake unto"]


def ask(row: dict[str, Any]) -> dict[str, Any]:
    # What each row generates; a row's seed follows from its id, so it comes out the same when it is done again.
    return {"prompt": PROMPTS[row["id"] % len(PROMPTS)], "sampling_params": {"max_new_tokens": 16}}


def answer(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "text": row["prompt"] + row["generated_text"]}


def main() -> None:
    package = sys.argv[1] if len(sys.argv) > 1 else bundled_model("cpu").package.path
    ray.init(log_to_driver=False)
    config = QsampleProcessorConfig(
        package=os.path.abspath(package),
        concurrency=1,  # actors, each with an engine of its own; (1, 8) lets Ray decide
        num_cpus=1,  # of an actor, and its threads
        slots=8,
        sampling_params={"temperature": 0.7},
        send_package=True,  # the package travels with the job; without it every machine has to see the path
    )
    processor = build_processor(config, preprocess=ask, postprocess=answer)
    for row in sorted(processor(ray.data.range(8)).take_all(), key=lambda row: row["id"]):
        print(f"{row['id']}: {row['text']!r}")


if __name__ == "__main__":
    main()
