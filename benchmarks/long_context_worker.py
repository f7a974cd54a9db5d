"""One system with one long history; started by `long_context.py`, with the Python that has the system.

Requests and answers are lines of JSON: {"fill": …} once, which has every row hold its history, and {"steps": n}.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from decode_worker import Genai, Ids, LlamaCpp, Qsample, Request, memory, random_prompts

CHUNK = 512  # tokens of a call that reads, in llama.cpp
GREEDY = {"temperature": 0.0}


class Rows(Protocol):
    """`rows` rows that hold `history` tokens once they were read or filled."""

    version: str

    def read(self) -> None:
        """Read the history and choose the token behind it, in every row."""

    def fill(self) -> None:
        """Have the rows hold a history that is not read here."""

    def step(self) -> None:
        """Choose the next token of every row."""


class QsampleRows:
    """The runtime's slots. They are filled with random keys and values."""

    def __init__(self, options: argparse.Namespace) -> None:
        import onnxruntime

        from qsample.runtime.decode.slots import Slots
        from qsample.runtime.parameters import parameter_arrays
        from qsample.sampling_params import SamplingParams

        self.version = f"onnxruntime {onnxruntime.__version__}"
        model = Qsample(options.model, options.threads).model
        self._sessions, self._rows = model.sessions, options.rows
        capacity = model.capacity(options.history + options.growth)
        if capacity < options.history + options.growth:
            raise RuntimeError(f"{options.model} takes {capacity} tokens a row")
        self._slots = Slots(model.sessions, options.rows, capacity)
        params = [SamplingParams(temperature=0.0, eos_token_id=())] * options.rows
        arrays = parameter_arrays(model.interface, params, [options.history] * options.rows, capacity, ())
        self._parameters = [{name: values[row] for name, values in arrays.items()} for row in range(options.rows)]
        self._prompts = prompts(options, model.interface.vocab_size)

    def _read(self, start: int) -> None:
        from qsample.runtime.decode.scheduler import pieces

        for row, (prompt, parameters) in enumerate(zip(self._prompts, self._parameters, strict=True)):
            self._slots.begin(row, prompt, row, parameters, reused=start)
            for piece in pieces(start, len(prompt), self._sessions.piece_size):
                self._slots.prefill(row, prompt[piece.start : piece.stop], emit=piece.stop == len(prompt))
        self._slots.read()

    def read(self) -> None:
        self._read(0)

    def fill(self) -> None:
        generator, history = np.random.default_rng(0), self._prompts.shape[1]
        states = self._slots._state.inputs()  # the memory itself; nothing public writes keys and values
        for spec in self._sessions.interface.cache_states:
            cache = states[spec.name].owner.numpy()
            for row in range(self._rows):
                shape = (cache.shape[1], history, cache.shape[3])
                if cache.dtype == np.int8:
                    cache[row, :, :history] = generator.integers(-127, 128, shape, np.int8)
                else:
                    cache[row, :, :history] = generator.standard_normal(shape, np.float32)
        self._read(history - 2)

    def step(self) -> None:
        self._slots.decode()
        self._slots.read()


class GenaiRows:
    """onnxruntime-genai's generator, which can only read."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._system = Genai(options.model, options.threads)
        og = self._system.og
        self.version = f"onnxruntime_genai {og.__version__}"
        self._prompts = prompts(options, self._system.vocab_size)
        length = options.history + options.growth
        params = og.GeneratorParams(self._system.model)
        params.set_search_options(batch_size=options.rows, max_length=length, min_length=length, do_sample=False)
        self._generator = og.Generator(self._system.model, params)

    def read(self) -> None:
        self._generator.append_tokens(self._prompts.astype(np.int32))
        self.step()

    def fill(self) -> None:
        raise NotImplementedError("onnxruntime-genai has no way to write its cache")

    def step(self) -> None:
        self._generator.generate_next_token()
        self._generator.get_next_tokens()


class LlamaRows:
    """llama.cpp's context. What one row read is kept in a file, which several rows are filled from.

    cache: the type of keys and values, as ggml names it.
    """

    def __init__(self, options: argparse.Namespace, cache: str) -> None:
        system = LlamaCpp(options.model, options.threads)
        self._system, self._rows, self._state, lib = system, options.rows, options.state, system.lib
        self.version = f"llama_cpp {lib.__version__}"
        self._prompts = prompts(options, system.vocab_size)
        self._length = options.history  # of every row, the token that was chosen last left out
        context = lib.llama_context_default_params()
        context.n_ctx = options.rows * (options.history + options.growth)
        context.n_batch = context.n_ubatch = CHUNK
        context.n_seq_max = options.rows
        context.n_threads = context.n_threads_batch = options.threads
        context.type_k = context.type_v = {"f16": lib.GGML_TYPE_F16, "q8_0": lib.GGML_TYPE_Q8_0}[cache]
        self._context = lib.llama_init_from_model(system.model, context)
        if not self._context:
            raise RuntimeError("llama.cpp made no context; is there enough memory?")
        self._batch = lib.llama_batch_init(CHUNK, 0, options.rows)
        self._chain = system.chain(GREEDY, 0)
        self._tokens = [0] * options.rows

    def _read(self, row: int, start: int, end: int) -> None:
        for first in range(start, end, CHUNK):
            ids = self._prompts[row, first : min(first + CHUNK, end)]
            entries = [(int(token), first + i, row) for i, token in enumerate(ids)]
            self._system.decode(self._context, self._batch, entries, last=first + CHUNK >= end)

    def read(self) -> None:
        assert self._rows == 1
        self._read(0, 0, self._length)
        self._tokens[0] = self._system.lib.llama_sampler_sample(self._chain, self._context, -1)

    def after_read(self) -> None:
        """Keep what was read for the cells with several rows."""
        ids = self._system.lib.llama_token * 1
        written = self._system.lib.llama_state_seq_save_file(self._context, str(self._state).encode(), 0, ids(0), 1)
        if not written:
            raise RuntimeError(f"llama.cpp could not write {self._state}")

    def fill(self) -> None:
        import ctypes

        lib = self._system.lib
        ids, count = (lib.llama_token * 1)(), ctypes.c_size_t()
        for row in range(self._rows):
            path = str(self._state).encode()
            if not lib.llama_state_seq_load_file(self._context, path, row, ids, 1, ctypes.byref(count)):
                raise RuntimeError(f"llama.cpp cannot load {self._state}; measure one row first")

    def step(self) -> None:
        entries = [(self._tokens[row], self._length, row) for row in range(self._rows)]
        self._system.decode(self._context, self._batch, entries, last=True, every=True)
        for row in range(self._rows):
            self._tokens[row] = self._system.lib.llama_sampler_sample(self._chain, self._context, row)
        self._length += 1


SYSTEMS: dict[str, Callable[[argparse.Namespace], Rows]] = {
    "qsample, float32 cache": QsampleRows,
    "qsample, int8 cache": QsampleRows,
    "genai": GenaiRows,
    "llama.cpp, f16": lambda options: LlamaRows(options, "f16"),
    "llama.cpp, q8_0": lambda options: LlamaRows(options, "q8_0"),
}


def prompts(options: argparse.Namespace, vocab_size: int) -> Ids:
    """[rows, history] int64."""
    return random_prompts(Request(options.rows, options.history, 0, GREEDY), vocab_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=list(SYSTEMS))
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--history", type=int, required=True, help="tokens of each row")
    parser.add_argument("--growth", type=int, required=True, help="room for new tokens")
    parser.add_argument("--state", type=Path, required=True, help="file for what llama.cpp read")
    options = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints must not mix with the answers

    def answer(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=answers, flush=True)

    rows = SYSTEMS[options.system](options)
    answer({"version": rows.version})
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        if asked.get("fill"):
            rows.fill()
            answer({"first_token": None})
        elif "fill" in asked:
            rows.read()
            answer({"first_token": time.perf_counter() - start})
            if isinstance(rows, LlamaRows):
                rows.after_read()
        else:
            moments = [start]
            for _ in range(asked["steps"]):
                rows.step()
                moments.append(time.perf_counter())
            answer({"steps": np.diff(moments).tolist(), "memory": memory()})


if __name__ == "__main__":
    main()
