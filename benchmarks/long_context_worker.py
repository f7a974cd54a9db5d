"""A system with a long history; started by `long_context.py`, with the Python that has the system.

Requests and answers are lines of JSON: first {"fill": …}, which gives every row its history, then {"steps": n}.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from decode_worker import Genai, Ids, LlamaCpp, Qsample, Request, memory, random_prompts

CHUNK = 512  # tokens per reading call of llama.cpp
GREEDY = {"temperature": 0.0}


class Rows(Protocol):
    """`rows` rows that hold `history` tokens after `read` or `fill`."""

    version: str

    def read(self) -> None:
        """Read the history and choose the next token, in every row."""

    def fill(self) -> None:
        """Give the rows a history without reading it."""

    def step(self) -> None:
        """Choose the next token of every row."""


class QsampleRows:
    """The runtime's slots, filled with random keys and values."""

    def __init__(self, options: argparse.Namespace) -> None:
        import onnxruntime

        from qsample.request.sampling_params import SamplingParams
        from qsample.runtime.decode.prefixes import Pieces
        from qsample.runtime.decode.slots import Slots
        from qsample.runtime.prepare import parameter_row

        self.version = f"onnxruntime {onnxruntime.__version__}"
        model = Qsample(options.model, options.threads).model
        self._sessions, self._rows = model.sessions, options.rows
        capacity = model.capacity(options.history + options.growth)
        if capacity < options.history + options.growth:
            raise RuntimeError(f"{options.model} takes {capacity} tokens per row")
        self._slots = Slots(model.sessions, options.rows, capacity)
        self._pieces = Pieces.of(model.sessions)
        params = [SamplingParams(temperature=0.0, eos_token_id=())] * options.rows
        self._parameters = [parameter_row(model.interface, row, options.history, capacity) for row in params]
        self._prompts = prompts(options, model.interface.vocab_size)

    def _read(self, start: int) -> None:
        for row, (prompt, parameters) in enumerate(zip(self._prompts, self._parameters, strict=True)):
            self._slots.begin(row, prompt, row, parameters, reused=start)
            for piece in self._pieces.cut(start, len(prompt)):
                self._slots.prefill(row, prompt[piece.start : piece.stop], emit=piece.stop == len(prompt))
        self._slots.read()

    def read(self) -> None:
        self._read(0)

    def fill(self) -> None:
        generator, history = np.random.default_rng(0), self._prompts.shape[1]
        states = self._slots._state.inputs()  # the memory itself; no public method writes keys and values
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
    """onnxruntime-genai's generator, which can only read its history."""

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
        raise NotImplementedError("onnxruntime-genai cannot write its cache")

    def step(self) -> None:
        self._generator.generate_next_token()
        self._generator.get_next_tokens()


class LlamaRows:
    """llama.cpp's context. A file keeps the state of a row, and several rows are filled from it.

    A history longer than the text that was read consists of copies of it at consecutive positions. `cache` is ggml's
    name of the type of keys and values.
    """

    def __init__(self, options: argparse.Namespace, cache: str) -> None:
        system = LlamaCpp(options.model, options.threads)
        self._system, self._rows, self._state, lib = system, options.rows, options.state, system.lib
        self._read_before: Path | None = options.read_before
        self._copies = 1 if options.state.exists() or options.rows > 1 else -(-options.history // options.read_tokens)
        self._tokens_before = options.read_tokens
        self.version = f"llama_cpp {lib.__version__}"
        self._prompts = prompts(options, system.vocab_size)
        self._length = options.history  # of every row, without the newest token
        context = lib.llama_context_default_params()
        context.n_ctx = options.rows * (max(options.history, self._copies * options.read_tokens) + options.growth)
        context.n_batch = context.n_ubatch = CHUNK
        context.n_seq_max = options.rows * self._copies
        context.kv_unified = self._copies > 1  # the copies become a single sequence
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

    def keep(self) -> None:
        """Save the state of the row, for cells with several rows or a longer history."""
        lib = self._system.lib
        state = np.zeros(lib.llama_state_seq_get_size(self._context, 0), np.uint8)
        if lib.llama_state_seq_get_data(self._context, _address(state), state.nbytes, 0) != state.nbytes:
            raise RuntimeError("llama.cpp did not return the state of a row")
        state.tofile(self._state)

    def fill(self) -> None:
        if self._copies == 1:
            for row in range(self._rows):
                self._load(self._state, row)
            return
        assert self._read_before is not None
        lib, memory = self._system.lib, self._system.lib.llama_get_memory(self._context)
        for copy in range(self._copies):
            self._load(self._read_before, copy, offset=copy * self._tokens_before)
            if copy:
                lib.llama_memory_seq_cp(memory, copy, 0, -1, -1)
                lib.llama_memory_seq_rm(memory, copy, -1, -1)
        lib.llama_memory_seq_rm(memory, 0, self._length, -1)
        self.keep()

    def _load(self, path: Path, row: int, *, offset: int = 0) -> None:
        """Load the file into a row.

        llama.cpp keeps each row in a separate stream, and accepts states with the context's number of streams. The
        third number of a state is its number of streams; the additional streams are empty, with a cell count each.
        The cells' positions follow, with the number of rows of each cell and their indices.

        Args:
            path: The file.
            row: The row.
            offset: Added to the positions of the tokens; the rotation of the keys does not change.
        """
        if not path.exists():
            raise RuntimeError(f"{path} does not exist; first measure the shorter history with a single row")
        streams, size = (1 if self._copies > 1 else self._rows), path.stat().st_size
        state = np.zeros(size + 4 * (streams - 1), np.uint8)
        with path.open("rb") as file:
            file.readinto(memoryview(state)[:size])
        head = state[:16].view(np.uint32)
        cells = state[16 : 16 + 12 * int(head[3])].view(np.int32).reshape(-1, 3)
        expected = [[token, 1, 0] for token in range(len(cells))]
        if head[2] != 1 or not np.array_equal(cells, expected):
            raise RuntimeError(
                "the layout of llama.cpp's states differs from the version for which this script was written"
            )
        head[2] = streams
        cells[:, 0] += offset
        lib = self._system.lib
        if lib.llama_state_seq_set_data(self._context, _address(state), state.nbytes, row) != state.nbytes:
            raise RuntimeError(f"llama.cpp cannot load {path}")

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


def _address(array: np.ndarray[Any, Any]) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


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
    parser.add_argument("--state", type=Path, required=True, help="file for the state of a row of llama.cpp")
    parser.add_argument("--read-tokens", type=int, required=True, help="of an earlier history")
    parser.add_argument("--read-before", type=Path, help="the file of the earlier history")
    options = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr  # the output of libraries must not mix with the answers

    def answer(values: dict[str, Any]) -> None:
        print(json.dumps(values), file=answers, flush=True)

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
                rows.keep()
        else:
            moments = [start]
            for _ in range(asked["steps"]):
                rows.step()
                moments.append(time.perf_counter())
            answer({"steps": np.diff(moments).tolist(), "memory": memory()})


if __name__ == "__main__":
    main()
