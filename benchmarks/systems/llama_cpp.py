"""llama.cpp through its Python package's low-level calls, with a sequence and a sampler chain per row."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import llama_cpp as lib
import numpy as np

from systems import Generator, Ids, Rows, Sampling, prompt_ids

CHUNK: Final = 512  # tokens per reading call
Entries = list[tuple[int, int, int]]  # token, position, row
# A callback has to outlive its use.
_SILENCE = lib.llama_log_callback(lambda level, text, data: None)


class Model:
    """A loaded file. amx: as llama.cpp chooses; False for a processor that lists AMX and cannot run it."""

    def __init__(self, path: Path, threads: int, amx: bool = True) -> None:
        self._threads = threads
        if not amx:
            _forbid_amx()
        lib.llama_backend_init()
        lib.llama_log_set(_SILENCE, None)
        options = lib.llama_model_default_params()
        self.model = lib.llama_model_load_from_file(str(path).encode(), options)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self.vocab_size = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model)))

    def open(self, tokens: int, rows: int = 1, **settings: Any) -> Context:
        """settings: further fields of llama.cpp's parameters of a context."""
        return Context(self, tokens, rows, self._threads, settings)


class _SignalStack(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


_STACK: Final = ctypes.create_string_buffer(8192)


def _forbid_amx() -> None:
    """Linux gives no thread AMX whose signal stack has no room for its registers; llama.cpp then does without."""
    stack = _SignalStack(ctypes.addressof(_STACK), 0, len(_STACK))
    if ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None):
        raise RuntimeError("sigaltstack failed")


class Context:
    """Memory for `tokens` tokens of `rows` rows together, and a batch."""

    def __init__(
        self, model: Model, tokens: int, rows: int, threads: int, settings: dict[str, Any]
    ) -> None:
        options = lib.llama_context_default_params()
        common = {"n_ctx": tokens, "n_batch": CHUNK, "n_ubatch": CHUNK, "n_seq_max": rows}
        common |= {"n_threads": threads, "n_threads_batch": threads}
        for name, value in (common | settings).items():
            setattr(options, name, value)
        self.handle = lib.llama_init_from_model(model.model, options)
        if not self.handle:
            raise RuntimeError("llama.cpp made no context; is there enough memory?")
        self.memory = lib.llama_get_memory(self.handle)
        self._batch, self._chains = lib.llama_batch_init(CHUNK, 0, rows), list[Any]()

    def decode(self, entries: Entries, *, last: bool = True, every: bool = False) -> None:
        """Read tokens; logits of the last or of every token."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, row) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = (
                token,
                position,
                1,
                row,
            )
            batch.logits[i] = every or (last and i == len(entries) - 1)
        status = lib.llama_decode(self.handle, batch)
        if status:
            raise RuntimeError(f"llama_decode failed with status {status}")

    def read(self, prompt: Any, row: int = 0) -> None:
        """Read a prompt in chunks."""
        for start in range(0, len(prompt), CHUNK):
            entries = [
                (int(token), start + i, row)
                for i, token in enumerate(prompt[start : start + CHUNK])
            ]
            self.decode(entries, last=start + CHUNK >= len(prompt))

    def sampler(self, sampling: Sampling, seed: int) -> Any:
        """A chain that samples; the context frees it."""
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        self._chains.append(chain)
        temperature, steps = sampling.get("temperature", 1.0), list[Any]()
        if temperature == 0:
            steps = [lib.llama_sampler_init_greedy()]
        else:
            # llama.cpp's default puts the temperature last; the other systems apply it before top-p. Top-k may come
            # first.
            if sampling.get("top_k"):
                steps.append(lib.llama_sampler_init_top_k(int(sampling["top_k"])))
            steps.append(lib.llama_sampler_init_temp(temperature))
            if sampling.get("top_p", 1.0) < 1:
                steps.append(lib.llama_sampler_init_top_p(sampling["top_p"], 1))
            steps.append(lib.llama_sampler_init_dist(seed))
        for step in steps:
            lib.llama_sampler_chain_add(chain, step)
        return chain

    def sample(self, chain: Any, index: int = -1) -> int:
        """A token from the logits at an index of the last batch."""
        return int(lib.llama_sampler_sample(chain, self.handle, index))

    def close(self) -> None:
        lib.llama_batch_free(self._batch)
        for chain in self._chains:
            lib.llama_sampler_free(chain)
        lib.llama_free(self.handle)


@contextmanager
def closing(context: Context) -> Iterator[Context]:
    try:
        yield context
    finally:
        context.close()


class LlamaCpp(Generator):
    """A sequence and a sampler chain per row."""

    library = "llama_cpp"

    def __init__(self, model: Path, threads: int, amx: bool = True) -> None:
        self._model = Model(model, threads, amx)
        self.vocab_size = self._model.vocab_size

    def run(
        self, prompts: Ids, new_tokens: int, sampling: Sampling
    ) -> tuple[list[float], list[list[int]]]:
        rows, length = prompts.shape
        moments, tokens = [time.perf_counter()], list[list[int]]()
        with closing(self._model.open(rows * (length + new_tokens + 1), rows)) as context:
            chains = [context.sampler(sampling, row) for row in range(rows)]
            for row, prompt in enumerate(prompts):
                context.read(prompt, row)
                tokens.append([context.sample(chains[row])])
            moments.append(time.perf_counter())
            for step in range(new_tokens - 1):
                context.decode(
                    [(tokens[row][-1], length + step, row) for row in range(rows)], every=True
                )
                for row in range(rows):
                    tokens[row].append(context.sample(chains[row], row))
                moments.append(time.perf_counter())
        return moments, tokens


class LlamaRows(Rows):
    """A file keeps the state of a row, and several rows are filled from it.

    A history longer than the text that was read consists of copies of it at consecutive positions.

    Args:
        model: The file of the model.
        threads: Their number.
        cache: ggml's name of the type of keys and values, "f16" or "q8_0".
        rows: Rows.
        history: Tokens of each row.
        growth: Room for new tokens of a row.
        state: The file for the state of a row with this history.
        read_tokens: The tokens of an earlier, shorter history.
        read_before: The file for the state of a row with that history.
    """

    library = "llama_cpp"

    def __init__(
        self,
        model: Path,
        threads: int,
        cache: str,
        rows: int,
        history: int,
        growth: int,
        state: str,
        read_tokens: int,
        read_before: str,
    ) -> None:
        loaded = Model(model, threads)
        self._rows, self._state, self._read_before = rows, Path(state), Path(read_before)
        self._copies = 1 if self._state.exists() or rows > 1 else -(-history // read_tokens)
        self._tokens_before = read_tokens
        self._prompts = prompt_ids(rows, history, loaded.vocab_size)
        self._length = history  # of every row, without the newest token
        kind = {"f16": lib.GGML_TYPE_F16, "q8_0": lib.GGML_TYPE_Q8_0}[cache]
        # The copies become a single sequence.
        settings = {"type_k": kind, "type_v": kind, "kv_unified": self._copies > 1}
        tokens = rows * (max(history, self._copies * read_tokens) + growth)
        self._context = loaded.open(tokens, rows * self._copies, **settings)
        self._chain = self._context.sampler({"temperature": 0.0}, 0)
        self._tokens = [0] * rows

    def read(self) -> None:
        assert self._rows == 1
        self._context.read(self._prompts[0])
        self._tokens[0] = self._context.sample(self._chain)

    def history(self, filled: bool) -> dict[str, Any]:
        answer = super().history(filled)
        if not filled or self._copies > 1:
            self._keep()
        return answer

    def _keep(self) -> None:
        """Save the state of the row, for cells with several rows or a longer history."""
        handle = self._context.handle
        state = np.zeros(lib.llama_state_seq_get_size(handle, 0), np.uint8)
        if lib.llama_state_seq_get_data(handle, _address(state), state.nbytes, 0) != state.nbytes:
            raise RuntimeError("llama.cpp did not return the state of a row")
        state.tofile(self._state)

    def fill(self) -> None:
        if self._copies == 1:
            for row in range(self._rows):
                self._load(self._state, row)
            return
        memory = self._context.memory
        for copy in range(self._copies):
            self._load(self._read_before, copy, offset=copy * self._tokens_before)
            if copy:
                lib.llama_memory_seq_cp(memory, copy, 0, -1, -1)
                lib.llama_memory_seq_rm(memory, copy, -1, -1)
        lib.llama_memory_seq_rm(memory, 0, self._length, -1)

    def _load(self, path: Path, row: int, *, offset: int = 0) -> None:
        """Load the file into a row. offset: added to the positions of the tokens; the keys' rotation does not change.

        llama.cpp keeps each row in a separate stream, and accepts states with the context's number of streams. The
        third number of a state is its number of streams; the additional streams are empty, with a cell count each.
        The cells' positions follow, with the number of rows of each cell and their indices.
        """
        if not path.exists():
            raise RuntimeError(
                f"{path} does not exist; first measure the shorter history with a single row"
            )
        streams, size = (1 if self._copies > 1 else self._rows), path.stat().st_size
        state = np.zeros(size + 4 * (streams - 1), np.uint8)
        with path.open("rb") as file:
            file.readinto(memoryview(state)[:size])
        head = state[:16].view(np.uint32)
        cells = state[16 : 16 + 12 * int(head[3])].view(np.int32).reshape(-1, 3)
        if head[2] != 1 or not np.array_equal(
            cells, [[token, 1, 0] for token in range(len(cells))]
        ):
            raise RuntimeError(
                "llama.cpp's states have another layout than this benchmark was written for"
            )
        head[2] = streams
        cells[:, 0] += offset
        handle = self._context.handle
        if lib.llama_state_seq_set_data(handle, _address(state), state.nbytes, row) != state.nbytes:
            raise RuntimeError(f"llama.cpp cannot load {path}")

    def step(self) -> None:
        self._context.decode(
            [(self._tokens[row], self._length, row) for row in range(self._rows)], every=True
        )
        self._tokens = [self._context.sample(self._chain, row) for row in range(self._rows)]
        self._length += 1


class LlamaWriter:
    """One row that writes a given answer: llama.cpp's draws are made, and replaced. Guesses come from its Python
    package's prompt lookup, with the default n-grams of 2 tokens."""

    library = "llama_cpp"

    def __init__(self, model: Path, threads: int, evict_bytes: int) -> None:
        self._model = Model(model, threads)
        self._filler = np.ones(evict_bytes // 8)

    def write(self, texts: list[dict[str, list[int]]], guesses: int) -> dict[str, Any]:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        (text,) = texts
        prompt, answer = text["prompt"], text["answer"]
        drafter = (
            LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=guesses)
            if guesses
            else None
        )
        seconds, drafted, accepted = list[float](), 0, 0
        with closing(self._model.open(len(prompt) + len(answer) + guesses + 2)) as context:
            chain = context.sampler({"temperature": 0.0}, 0)
            context.read(prompt)
            context.sample(chain)
            written, left = [*prompt, answer[0]], answer[1:]
            while left:
                self._filler.sum()
                start = time.perf_counter()
                draft: list[int] = []
                if drafter is not None:
                    draft = [int(token) for token in drafter(np.array(written, dtype=np.intc))][
                        : len(left) - 1
                    ]
                position = len(written) - 1
                entries = [
                    (token, position + i, 0) for i, token in enumerate([written[-1], *draft])
                ]
                context.decode(entries, every=True)
                right = 0
                context.sample(chain, 0)
                while right < len(draft) and draft[right] == left[right]:
                    right += 1
                    context.sample(chain, right)
                lib.llama_memory_seq_rm(context.memory, 0, position + right + 1, -1)
                seconds.append(time.perf_counter() - start)
                written, left = [*written, *left[: right + 1]], left[right + 1 :]
                drafted, accepted = drafted + len(draft), accepted + right
        counts = {"draft_tokens": drafted, "accepted_tokens": accepted}
        return {"seconds": seconds, "tokens": len(answer) - 1, **counts}


def _address(array: np.ndarray[Any, Any]) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
