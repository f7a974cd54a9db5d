"""qsample's runtime: its own slots, read after every step."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from qsample.request.sampling_params import SamplingParams
from qsample.runtime import CausalLM, load
from qsample.runtime.bench import LockStep
from qsample.runtime.call import Call
from qsample.runtime.decode.loop import DecodeLoop
from qsample.runtime.decode.prefixes import Pieces
from qsample.runtime.decode.scheduler import Scheduler, SchedulerConfig
from qsample.runtime.decode.slots import Slots
from qsample.runtime.prepare import parameter_row
from qsample.runtime.sequence import NO_DRAFTS
from systems import Generator, Ids, Rows, Sampling, prompt_ids

# All systems stay loaded: threads that keep spinning would take the cores of the next system.
_NO_SPINNING: Final = {"session.force_spinning_stop": "1"}
_LARGEST: Final = 1e4  # a logit beyond all others


class WatchedSession:
    """An ONNX Runtime session that counts its runs and adds up their seconds."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.runs, self.seconds = 0, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, *arguments: Any) -> None:
        start = time.perf_counter()
        self._session.run_with_iobinding(*arguments)
        self.seconds += time.perf_counter() - start
        self.runs += 1


def load_watched(folder: Path, threads: int) -> CausalLM:
    """A package; `sessions.decoder` is a WatchedSession."""
    model = load(folder, intra_op_num_threads=threads, verify=False)
    model.sessions = replace(model.sessions, decoder=WatchedSession(model.sessions.decoder))
    return model


class Qsample(Generator):
    """The runtime's slots in lock step."""

    library = "onnxruntime"

    def __init__(self, model: Path, threads: int, batch_invariant: bool = True) -> None:
        options = {
            "verify": False,
            "session_config": _NO_SPINNING,
            "batch_invariant": batch_invariant,
        }
        self.model = load(model, intra_op_num_threads=threads, **options)
        self.vocab_size = self.model.interface.vocab_size

    def _loop(self, prompts: Ids, new_tokens: int, sampling: Sampling, sessions: Any) -> LockStep:
        rows, length = prompts.shape
        capacity = self.model.capacity(length + new_tokens + 1)
        params = SamplingParams(
            **{"temperature": 1.0, **sampling}, eos_token_id=(), max_length=capacity
        )
        parameters = [parameter_row(self.model.interface, params, length, capacity)] * rows
        return LockStep(sessions, parameters, list(range(rows)), capacity)

    def run(
        self, prompts: Ids, new_tokens: int, sampling: Sampling
    ) -> tuple[list[float], list[list[int]]]:
        moments = [time.perf_counter()]
        loop = self._loop(prompts, new_tokens, sampling, self.model.sessions)
        steps = [loop.prefill(list(prompts))]
        moments.append(time.perf_counter())
        for _ in range(new_tokens - 1):
            steps.append(loop.decode())
            moments.append(time.perf_counter())
        return moments, np.stack(steps, axis=1).tolist()

    def overhead(
        self, rows: int, prompt_tokens: int, new_tokens: int, everything: Sampling
    ) -> dict[str, list[float]]:
        """The cost of the host and the sampler, in steps that alternate between greedy and `everything`.

        Returns:
            The seconds of the steps of both kinds ("greedy", "everything"), and the parts of them outside the graph
            ("greedy_host", "everything_host").
        """
        prompts = prompt_ids(rows, prompt_tokens, self.vocab_size)
        timed = WatchedSession(self.model.sessions.decoder)
        loop = self._loop(
            prompts, new_tokens, {"temperature": 0.0}, replace(self.model.sessions, decoder=timed)
        )
        loop.prefill(list(prompts))
        specs = {spec.name: spec for spec in self.model.interface.parameters}
        off = {name: specs[name].off for name in everything} | {"temperature": 0.0}
        result: dict[str, list[float]] = {}
        for step in range(new_tokens - 1):
            kind = ("greedy", "everything")[step % 2]
            for name, value in (off if kind == "greedy" else everything).items():
                loop.set_parameter(name, np.full(rows, value, specs[name].dtype))
            timed.seconds = 0.0
            start = time.perf_counter()
            loop.decode()
            taken = time.perf_counter() - start
            result.setdefault(kind, []).append(taken)
            result.setdefault(f"{kind}_host", []).append(taken - timed.seconds)
        return result


class QsampleRows(Rows):
    """The runtime's slots, filled with random keys and values."""

    library = "onnxruntime"

    def __init__(
        self, model: Path, threads: int, rows: int, history: int, growth: int, **_: Any
    ) -> None:
        loaded = Qsample(model, threads).model
        capacity = loaded.capacity(history + growth)
        if capacity < history + growth:
            raise RuntimeError(f"{model} takes {capacity} tokens per row")
        self._sessions, self._slots = loaded.sessions, Slots(loaded.sessions, rows, capacity)
        self._pieces = Pieces.of(loaded.sessions)
        greedy = SamplingParams(temperature=0.0, eos_token_id=())
        self._parameters = parameter_row(loaded.interface, greedy, history, capacity)
        self._prompts = prompt_ids(rows, history, loaded.interface.vocab_size)

    def _read(self, start: int) -> None:
        for row, prompt in enumerate(self._prompts):
            self._slots.begin(row, prompt, row, self._parameters, reused=start)
            for piece in self._pieces.cut(prompt, start, len(prompt)):
                self._slots.prefill(
                    row, prompt[piece.start : piece.stop], emit=piece.stop == len(prompt)
                )
        self._slots.read()

    def read(self) -> None:
        self._read(0)

    def fill(self) -> None:
        generator, (rows, history) = np.random.default_rng(0), self._prompts.shape
        states = (
            self._slots._state.inputs()
        )  # the memory itself; no public method writes keys and values
        for spec in self._sessions.interface.cache_states:
            cache = states[spec.name].owner.numpy()
            length = min(history, cache.shape[2])  # caches of a window hold less
            for row in range(rows):
                shape = (cache.shape[1], length, cache.shape[3])
                if cache.dtype == np.float32:
                    cache[row, :, :length] = generator.standard_normal(shape, np.float32)
                else:  # two numbers of 4 bits, or one of 8
                    limits = (0, 256) if cache.dtype == np.uint8 else (-127, 128)
                    cache[row, :, :length] = generator.integers(*limits, shape, cache.dtype)
        self._read(history - 2)

    def step(self) -> None:
        self._slots.decode()
        self._slots.read()


class QsampleWriter:
    """The package through the runtime's decode loop, its answers dictated by the state `noise`, which greedy rows do
    not read otherwise: a node gives the answer's next token the largest logit, before the sampler verifies anything."""

    library = "onnxruntime"

    def __init__(self, model: Path, threads: int, evict_bytes: int) -> None:
        import qsample.ort.session as session
        import qsample.runtime.decode.slots as slots
        from qsample.ort.options import WEIGHTS_FOLDER_KEY

        plain = session.open_session

        def open_session(graph: Any, native: Any, *rest: Any) -> Any:
            native.add_session_config_entry(WEIGHTS_FOLDER_KEY, str(model))
            return plain(_dictated(model / "decoder.onnx"), native, *rest)

        session.open_session = open_session
        slots.uniforms = self._dictate
        self._scripts: list[np.ndarray[Any, Any]] = []
        self._filler = np.ones(evict_bytes // 8)
        self.model = load(
            model, intra_op_num_threads=threads, verify=False, session_config=_NO_SPINNING
        )

    def _dictate(self, seed: int, count: int, stream: int = 0) -> np.ndarray[Any, Any]:
        script = self._scripts[seed]
        return np.pad(script, (0, count - len(script))).astype(np.float32)

    def write(self, texts: list[dict[str, list[int]]], guesses: int) -> dict[str, Any]:
        """Seconds of each step after every row's first token, and the numbers of tokens and guesses of these steps."""
        self._scripts = [np.array([*text["prompt"], *text["answer"]]) for text in texts]
        params = [
            SamplingParams(
                temperature=0.0,
                max_new_tokens=len(text["answer"]),
                eos_token_id=(),
                prompt_lookup_num_tokens=guesses,
            )
            for text in texts
        ]
        prompts = [text["prompt"] for text in texts]
        sequences, _ = self.model.prepare(
            Call(inputs=prompts, params=params, seed=list(range(len(texts))))
        )
        capacity = self.model.capacity(max(one.request.max_length for one in sequences))
        slots = Slots(self.model.sessions, len(texts), capacity)
        scheduler = Scheduler(len(texts), SchedulerConfig.of(self.model.sessions, interleave=False))
        seconds = []
        with DecodeLoop(
            slots, scheduler, lambda one: one.take() and None, double_buffering=False
        ) as loop:
            for one in sequences:
                loop.add(one)
            while not all(one.started for one in sequences):
                loop.step()
            while loop.busy:
                self._filler.sum()
                start = time.perf_counter()
                loop.step()
                seconds.append(time.perf_counter() - start)
        for text, one in zip(texts, sequences, strict=True):
            assert one.progress.sampled == text["answer"], "the graph did not write the answer"
        drafts = sum((one.progress.drafts for one in sequences), NO_DRAFTS)
        counts = {
            "draft_tokens": drafts.num_draft_tokens,
            "accepted_tokens": drafts.num_accepted_tokens,
        }
        return {
            "seconds": seconds,
            "tokens": sum(len(text["answer"]) - 1 for text in texts),
            **counts,
        }


def _dictated(path: Path) -> bytes:
    """The decoder with nodes behind its logits: the token that `noise` names at a draw's position gets the largest."""
    import onnx.parser
    from onnx import numpy_helper

    model = onnx.load(path, load_external_data=False)
    graph = model.graph
    place = next(i for i, node in enumerate(graph.node) if "logits" in node.output)
    output = graph.node[place].output
    output[[*output].index("logits")] = "free_logits"
    guesses = any("step_rows" in node.output for node in graph.node)  # a draw after each guess
    draws = _DRAWS_OF_GUESSES if guesses else _ONE_DRAW_A_ROW
    added = onnx.parser.parse_graph(f"g () => () {{ {draws} {_DICTATE} }}").node
    for name, value in (
        ("zero", np.int64(0)),
        ("one", np.int64(1)),
        ("largest", np.float32(_LARGEST)),
    ):
        graph.initializer.append(numpy_helper.from_array(np.array(value), f"dictated_{name}"))
    graph.initializer.append(numpy_helper.from_array(np.array([1], np.int64), "dictated_axis"))
    nodes = [*graph.node]
    del graph.node[:]
    graph.node.extend([*nodes[: place + 1], *added, *nodes[place + 1 :]])
    data: bytes = model.SerializeToString()
    return data


_DRAWS_OF_GUESSES: Final = """
    total32 = Add (lengths, input_lengths)
    total = Cast <to = 7> (total32)
    total_of_row = Gather (total, step_rows)
    drawn_at = Add (total_of_row, step_columns)
    drawn_rows = Identity (step_rows)
"""
_ONE_DRAW_A_ROW: Final = """
    total32 = Add (lengths, input_lengths)
    drawn_at = Cast <to = 7> (total32)
    row_count = Shape (drawn_at)
    rows_end = Squeeze (row_count)
    drawn_rows = Range (dictated_zero, rows_end, dictated_one)
"""
_DICTATE: Final = """
    noise_shape = Shape (noise)
    capacity_of_noise = Gather (noise_shape, dictated_one)
    last_place = Sub (capacity_of_noise, dictated_one)
    read_at = Min (drawn_at, last_place)
    row_column = Unsqueeze (drawn_rows, dictated_axis)
    place_column = Unsqueeze (read_at, dictated_axis)
    pairs = Concat <axis = 1> (row_column, place_column)
    told = GatherND (noise, pairs)
    told_ids = Cast <to = 7> (told)
    told_column = Unsqueeze (told_ids, dictated_axis)
    told_shape = Shape (told_column)
    updates = Expand (dictated_largest, told_shape)
    logits = ScatterElements <axis = 1> (free_logits, told_column, updates)
"""
