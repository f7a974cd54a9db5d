"""A dataset through Ray Data: prompts in, texts out, on this machine or on a cluster.

    RAY_AUTH_MODE=disabled python examples/ray_dataset.py           with the bundled model
    RAY_AUTH_MODE=disabled python examples/ray_dataset.py tiny-cpu  with a package

It needs qsample with the extras `cpu` and `ray`, and `export` for the bundled model. Ray starts a cluster on this
machine, or joins the cluster at RAY_ADDRESS.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import ray

from qsample.addons.ray import QsampleProcessorConfig, build_processor
from qsample.models.bundled import bundled_model

PROMPTS = ["In the beginning", "Blessed are", "And Jesus said unto them", "And the LORD spake unto"]


def ask(row: dict[str, Any]) -> dict[str, Any]:
    # A row's seed is derived from its id, so a repeated row returns the same tokens.
    return {"prompt": PROMPTS[row["id"] % len(PROMPTS)], "sampling_params": {"max_new_tokens": 16}}


def answer(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "text": row["prompt"] + row["generated_text"]}


def main() -> None:
    package = sys.argv[1] if len(sys.argv) > 1 else bundled_model("cpu").package.path
    ray.init(log_to_driver=False)
    config = QsampleProcessorConfig(
        package=os.path.abspath(package),
        concurrency=1,  # actors, each with its own engine; (1, 8) lets Ray decide
        num_cpus=1,  # per actor, which runs as many threads
        slots=8,
        sampling_params={"temperature": 0.7},
        send_package=True,  # the job sends the package; otherwise every machine has to see the path
    )
    processor = build_processor(config, preprocess=ask, postprocess=answer)
    for row in sorted(processor(ray.data.range(8)).take_all(), key=lambda row: row["id"]):
        print(f"{row['id']}: {row['text']!r}")


if __name__ == "__main__":
    main()
