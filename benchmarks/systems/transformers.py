"""transformers' `generate`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from systems import FIRST_TIMED, Generator, Ids, Sampling


class Transformers(Generator):
    """The eager model; on a GPU, over a static cache whose step transformers compiles.

    It lacks presence and frequency penalties, and leaves them out.
    """

    library = "transformers"

    def __init__(
        self,
        model: Path,
        threads: int | None,
        device: str = "cpu",
        dtype: str = "float32",
        cache: str | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self.model, self._device, self._cache = loaded.to(device).eval(), device, cache
        self.vocab_size = int(self.model.config.vocab_size)

    def run(
        self, prompts: Ids, new_tokens: int, sampling: Sampling
    ) -> tuple[list[float], list[list[int]]]:
        options: dict[str, Any] = {"do_sample": sampling.get("temperature", 1.0) != 0}
        if options["do_sample"]:
            lacking = ("presence_penalty", "frequency_penalty")
            options |= {"top_k": 0, "top_p": 1.0, "temperature": 1.0}
            options |= {name: value for name, value in sampling.items() if name not in lacking}
        if self._cache is not None:
            options["cache_implementation"] = self._cache
        ids = torch.from_numpy(prompts).to(self._device)
        moments = [time.perf_counter()]

        def note(ids: Any, scores: Any, **_: Any) -> Any:
            """A stopping criterion that never stops: the only hook that `generate` calls after every step."""
            if self._device == "cuda" and len(moments) in (FIRST_TIMED, new_tokens):
                torch.cuda.synchronize()
            moments.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        with torch.inference_mode():
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                stopping_criteria=[note],
                pad_token_id=0,
                **options,
            )
        return moments, output[:, prompts.shape[1] :].tolist()
