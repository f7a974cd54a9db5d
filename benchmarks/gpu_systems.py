"""Ways to decode from a package or a checkpoint, each of which says how long a step takes.

Each is opened, measured over every batch and mix, and closed again before the next one: a GPU holds one model at a
time, and one that fails takes no other with it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from checkpoints import prompt_ids
from mixes import EVERYTHING
from mixes import MIXES as PLAIN_MIXES

from qsample.runtime import SamplingParams, load
from qsample.runtime.decode.slots import Slots
from qsample.runtime.parameters import parameter_row

PLAIN = "plain temperature"  # of OpenAI's API: no filter, so the whole vocabulary is drawn from
MIXES = {**PLAIN_MIXES, PLAIN: {"temperature": 1.0}, "everything": EVERYTHING}
MIXED = "half greedy, half everything"
PROMPT_TOKENS = 64
FIRST_TIMED = 4  # steps of transformers and genai before the clock starts


class Decode(Protocol):
    """warm_up: before the first measurement of a batch. seconds: a step, for `rows` rows that all sample as
    `mix`."""

    def warm_up(self, rows: int, new_tokens: int) -> None: ...

    def seconds(self, rows: int, mix: str, new_tokens: int) -> float: ...


def sampling(mix: str, rows: int, new_tokens: int) -> list[SamplingParams]:
    names = ["greedy" if row % 2 else "everything" for row in range(rows)] if mix == MIXED else [mix] * rows
    return [SamplingParams(**MIXES[name], max_new_tokens=new_tokens, eos_token_id=()) for name in names]


class Qsample:
    """The runtime's slots: `flush_every` steps, then one read of what they sampled, and so on.

    `generate` reads while the next steps run, so that its own times do not show where one step ends.
    """

    def __init__(self, package: Path, flush_every: int, *, replay: bool = True) -> None:
        options = {} if replay else {"enable_cuda_graph": "0"}
        self._model = load(package, provider_options=options, verify=False)
        self._flush_every = flush_every
        self._slots: Slots | None = None

    def warm_up(self, rows: int, new_tokens: int) -> None:
        """Captures, too: a batch of this size is replayed from then on."""
        self._slots = None  # frees one batch before the next is allocated
        self._slots = Slots(self._model.sessions, rows, self._model.capacity(PROMPT_TOKENS + 2 * new_tokens))
        self.seconds(rows, "greedy", min(8, new_tokens))

    def seconds(self, rows: int, mix: str, new_tokens: int) -> float:
        slots, interface = self._slots, self._model.interface
        assert slots is not None
        prompts = prompt_ids(rows, PROMPT_TOKENS, interface.vocab_size)
        lengths = [PROMPT_TOKENS] * rows
        params = sampling(mix, rows, new_tokens)
        slots.stop(slice(None))
        for row, prompt in enumerate(prompts):
            parameters = parameter_row(interface, params[row], lengths[row], slots.capacity)
            parameters["max_length"] = np.int32(slots.capacity)  # the last window may go beyond the new tokens
            slots.begin(row, prompt, row, parameters)
            slots.prefill(row, prompt, emit=True)
        if not slots.prepared:  # a mix whose rows are searched has a capture of its own
            slots.prepare()
        windows = -(-new_tokens // self._flush_every)
        start = time.perf_counter()
        for _ in range(windows):
            for _ in range(self._flush_every - 1):
                slots.decode(wait=False)
            slots.decode()
            slots.read(newest=self._flush_every)  # as `generate` reads: what is new, not the whole history
        return (time.perf_counter() - start) / (windows * self._flush_every)


class Transformers:
    """`generate` over a static cache, whose step transformers compiles where there is a GPU."""

    def __init__(self, checkpoint: Path, device: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch, self._device = torch, device
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
        self._model: Any = model.to(device).eval()

    def warm_up(self, rows: int, new_tokens: int) -> None:
        """Compiles the step, for these rows and this length; how it samples is outside of that."""
        self.seconds(rows, "greedy", new_tokens)

    def seconds(self, rows: int, mix: str, new_tokens: int) -> float:
        torch, moments, steps = self._torch, [], 0

        def note(ids: Any, scores: Any, **_: Any) -> Any:
            """A stopping criterion that never stops: the one hook that `generate` calls after every step."""
            nonlocal steps
            steps += 1
            if steps in (FIRST_TIMED, new_tokens):
                if self._device == "cuda":
                    torch.cuda.synchronize()
                moments.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        options: dict[str, Any] = {"do_sample": mix != "greedy"}
        if mix != "greedy":  # it has no presence and frequency penalties
            supported = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
            options |= {"top_k": 0} | {name: MIXES[mix][name] for name in supported if name in MIXES[mix]}
        ids = torch.from_numpy(prompt_ids(rows, PROMPT_TOKENS, self._model.config.vocab_size)).to(self._device)
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                cache_implementation="static",
                stopping_criteria=[note],
                pad_token_id=0,
                **options,
            )
        return (moments[1] - moments[0]) / (new_tokens - FIRST_TIMED)


class Genai:
    """onnxruntime-genai's generator."""

    def __init__(self, folder: Path) -> None:
        import onnxruntime_genai as og

        self._og, self._model = og, og.Model(str(folder))
        self._vocab_size = json.loads((folder / "genai_config.json").read_text())["model"]["vocab_size"]

    def warm_up(self, rows: int, new_tokens: int) -> None:
        self.seconds(rows, "greedy", new_tokens)

    def seconds(self, rows: int, mix: str, new_tokens: int) -> float:
        length = PROMPT_TOKENS + new_tokens
        params = self._og.GeneratorParams(self._model)
        options: dict[str, Any] = {"batch_size": rows, "max_length": length, "min_length": length}
        options |= {"do_sample": mix != "greedy", **({} if mix == "greedy" else {"top_k": 0} | MIXES[mix])}
        params.set_search_options(**options)
        generator = self._og.Generator(self._model, params)
        generator.append_tokens(prompt_ids(rows, PROMPT_TOKENS, self._vocab_size).astype(np.int32))
        for step in range(new_tokens):
            if step == FIRST_TIMED:
                start = time.perf_counter()
            generator.generate_next_token()
            generator.get_next_tokens()
        return (time.perf_counter() - start) / (new_tokens - FIRST_TIMED)
