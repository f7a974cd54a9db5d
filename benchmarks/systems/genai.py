"""onnxruntime-genai's generator."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og

from systems import Generator, Ids, Rows, Sampling, prompt_ids


def load(model: Path, threads: int | None) -> tuple[Any, int]:
    """The model and its vocabulary's size; threads: None = the library's own choice."""
    config = og.Config(str(model))
    options: dict[str, Any] = {"session.force_spinning_stop": "1"}
    if threads is not None:
        options["intra_op_num_threads"] = threads
    config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    vocab_size = json.loads((model / "genai_config.json").read_text())["model"]["vocab_size"]
    return og.Model(config), int(vocab_size)


class Genai(Generator):
    """own_threads: the library chooses their number."""

    library = "onnxruntime_genai"

    def __init__(self, model: Path, threads: int | None, own_threads: bool = False) -> None:
        self.model, self.vocab_size = load(model, None if own_threads else threads)

    def run(
        self, prompts: Ids, new_tokens: int, sampling: Sampling
    ) -> tuple[list[float], list[list[int]]]:
        length = prompts.shape[1] + new_tokens
        options: dict[str, Any] = {
            "batch_size": len(prompts),
            "max_length": length,
            "min_length": length,
        }
        options |= {"do_sample": sampling.get("temperature", 1.0) != 0, "num_beams": 1}
        if options["do_sample"]:
            options |= {"top_k": int(sampling.get("top_k", 0)), "top_p": sampling.get("top_p", 1.0)}
            options |= {"temperature": sampling.get("temperature", 1.0), "random_seed": 0}
        moments = [time.perf_counter()]
        params = og.GeneratorParams(self.model)
        params.set_search_options(**options)
        generator = og.Generator(self.model, params)
        generator.append_tokens(prompts.astype(np.int32))
        steps = []
        for _ in range(new_tokens):
            generator.generate_next_token()
            steps.append(np.array(generator.get_next_tokens()))
            moments.append(time.perf_counter())
        return moments, np.stack(steps, axis=1).tolist()


class GenaiRows(Rows):
    """The generator can only read its history."""

    library = "onnxruntime_genai"

    def __init__(
        self, model: Path, threads: int, rows: int, history: int, growth: int, **_: Any
    ) -> None:
        loaded, vocab_size = load(model, threads)
        self._prompts = prompt_ids(rows, history, vocab_size)
        length = history + growth
        params = og.GeneratorParams(loaded)
        params.set_search_options(
            batch_size=rows, max_length=length, min_length=length, do_sample=False
        )
        self._generator = og.Generator(loaded, params)

    def read(self) -> None:
        self._generator.append_tokens(self._prompts.astype(np.int32))
        self.step()

    def fill(self) -> None:
        raise NotImplementedError("onnxruntime-genai cannot write its cache")

    def step(self) -> None:
        self._generator.generate_next_token()
        self._generator.get_next_tokens()
