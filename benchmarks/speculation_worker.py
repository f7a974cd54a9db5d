"""A system that is made to write given texts, driven over its standard streams; started by `speculation.py`.

    python benchmarks/speculation_worker.py SYSTEM MODEL --threads 2

After loading it prints a JSON line. It answers each request, a JSON line, with a line: the seconds of each step after
the first token of every row, and how many tokens and guesses these steps had. The weights are random, so no guess would
ever be right. Therefore the systems write given answers: qsample's graph gets a node that gives the answer's next token
the largest logit, before the sampler verifies anything; llama.cpp's draws are made, and replaced.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

_LARGEST: Final = 1e4  # a logit beyond all others


class Evicted:
    """Reads as much memory as the last cache holds, so that the next step finds its weights in memory alone."""

    def __init__(self, nbytes: int) -> None:
        self._filler = np.ones(nbytes // 8)

    def __call__(self) -> None:
        self._filler.sum()


class Qsample:
    """The package through the runtime's decode loop, its answers dictated by the state `noise`, which greedy rows do
    not read otherwise."""

    def __init__(self, model: Path, threads: int) -> None:
        import qsample.ort.session as session
        import qsample.runtime.decode.slots as slots
        from qsample.ort.options import FOLDER_OF_WEIGHTS
        from qsample.runtime import load

        plain = session.open_session

        def open_session(graph: Any, native: Any, *rest: Any) -> Any:
            native.add_session_config_entry(FOLDER_OF_WEIGHTS, str(model))
            return plain(_dictated(model / "decoder.onnx"), native, *rest)

        session.open_session = open_session
        slots.uniforms = self._dictate
        self._scripts: list[np.ndarray[Any, Any]] = []
        self.model = load(
            model, intra_op_num_threads=threads, verify=False, session_config={"session.force_spinning_stop": "1"}
        )

    def _dictate(self, seed: int, count: int, stream: int = 0) -> np.ndarray[Any, Any]:
        script = self._scripts[seed]
        return np.pad(script, (0, count - len(script))).astype(np.float32)

    def write(self, texts: list[dict[str, list[int]]], guesses: int, evict: Any) -> dict[str, Any]:
        from qsample.runtime import SamplingParams
        from qsample.runtime.call import Call
        from qsample.runtime.decode.loop import DecodeLoop
        from qsample.runtime.decode.scheduler import Scheduler, SchedulerConfig
        from qsample.runtime.decode.slots import Slots
        from qsample.runtime.sequence import NO_DRAFTS

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
        sequences, _ = self.model.prepare(Call(inputs=prompts, params=params, seed=list(range(len(texts)))))
        capacity = self.model.capacity(max(one.max_length for one in sequences))
        slots = Slots(self.model.sessions, len(texts), capacity)
        scheduler = Scheduler(len(texts), SchedulerConfig.of(self.model.sessions, interleave=False))
        seconds = []
        with DecodeLoop(slots, scheduler, lambda one: one.take() and None, double_buffering=False) as loop:
            for one in sequences:
                loop.add(one)
            while not all(one.started for one in sequences):
                loop.step()
            while loop.busy:
                evict()
                start = time.perf_counter()
                loop.step()
                seconds.append(time.perf_counter() - start)
        for text, one in zip(texts, sequences, strict=True):
            assert one.sampled == text["answer"], "the graph did not write the answer"
        drafts = sum((one.drafts for one in sequences), NO_DRAFTS)
        tokens = sum(len(text["answer"]) - 1 for text in texts)
        return {
            "seconds": seconds,
            "tokens": tokens,
            "draft_tokens": drafts.num_draft_tokens,
            "accepted_tokens": drafts.num_accepted_tokens,
        }


def _dictated(path: Path) -> bytes:
    """The decoder with a node behind its logits: the token that `noise` names at a draw's position gets the largest."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    model = onnx.load(path, load_external_data=False)
    graph = model.graph
    names = {name for node in graph.node for name in node.output}
    place = next(i for i, node in enumerate(graph.node) if "logits" in node.output)
    node = graph.node[place]
    node.output[[*node.output].index("logits")] = "free_logits"

    def add(kind: str, inputs: list[str], output: str, **attributes: Any) -> None:
        added.append(helper.make_node(kind, inputs, [output], f"dictated_{output}", **attributes))

    added: list[Any] = []
    add("Add", ["lengths", "input_lengths"], "total32")
    add("Cast", ["total32"], "total", to=TensorProto.INT64)
    if "step_rows" in names:  # a draw after each guess
        add("Gather", ["total", "step_rows"], "total_of_row")
        add("Add", ["total_of_row", "step_columns"], "drawn_at")
        rows = "step_rows"
    else:
        add("Shape", ["total"], "row_count")
        add("Squeeze", ["row_count"], "rows_end")
        add("Range", ["dictated_zero", "rows_end", "dictated_one"], "all_rows")
        add("Identity", ["total"], "drawn_at")
        rows = "all_rows"
    add("Shape", ["noise"], "noise_shape")
    add("Gather", ["noise_shape", "dictated_one"], "capacity_of_noise")
    add("Sub", ["capacity_of_noise", "dictated_one"], "last_place")
    add("Min", ["drawn_at", "last_place"], "read_at")
    add("Unsqueeze", [rows, "dictated_axis"], "row_column")
    add("Unsqueeze", ["read_at", "dictated_axis"], "place_column")
    add("Concat", ["row_column", "place_column"], "pairs", axis=1)
    add("GatherND", ["noise", "pairs"], "told")
    add("Cast", ["told"], "told_ids", to=TensorProto.INT64)
    add("Unsqueeze", ["told_ids", "dictated_axis"], "told_column")
    add("Shape", ["told_column"], "told_shape")
    add("Expand", ["dictated_largest", "told_shape"], "updates")
    add("ScatterElements", ["free_logits", "told_column", "updates"], "logits", axis=1)
    for name, value in (
        ("dictated_zero", np.array(0, np.int64)),
        ("dictated_one", np.array(1, np.int64)),
        ("dictated_axis", np.array([1], np.int64)),
        ("dictated_largest", np.array(_LARGEST, np.float32)),
    ):
        graph.initializer.append(numpy_helper.from_array(value, name))
    nodes = [*graph.node]
    del graph.node[:]
    graph.node.extend([*nodes[: place + 1], *added, *nodes[place + 1 :]])
    data: bytes = model.SerializeToString()
    return data


class LlamaCpp:
    """llama.cpp through its Python package's low-level calls; guesses come from that package's prompt lookup, with its
    own n-grams of 2 tokens. One row."""

    def __init__(self, model: Path, threads: int) -> None:
        from decode_worker import LlamaCpp as Base

        self._base = Base(model, threads)
        self._threads = threads

    def write(self, texts: list[dict[str, list[int]]], guesses: int, evict: Any) -> dict[str, Any]:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        (text,) = texts
        base, lib = self._base, self._base.lib
        prompt, answer = text["prompt"], text["answer"]
        options = lib.llama_context_default_params()
        options.n_ctx = len(prompt) + len(answer) + guesses + 2
        options.n_batch = options.n_ubatch = 512
        options.n_threads = options.n_threads_batch = self._threads
        context = lib.llama_init_from_model(base.model, options)
        chain, batch = base.chain({"temperature": 0.0}, 0), lib.llama_batch_init(512, 0, 1)
        drafter = LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=guesses) if guesses else None
        memory = lib.llama_get_memory(context)
        seconds, drafted, accepted = [], 0, 0
        try:
            for start in range(0, len(prompt), 512):
                entries = [(token, start + i, 0) for i, token in enumerate(prompt[start : start + 512])]
                base.decode(context, batch, entries, last=start + 512 >= len(prompt))
            lib.llama_sampler_sample(chain, context, -1)
            written = [*prompt, answer[0]]
            left = answer[1:]
            while left:
                evict()
                start_at = time.perf_counter()
                draft: list[int] = []
                if drafter is not None:
                    draft = [int(token) for token in drafter(np.array(written, dtype=np.intc))][: len(left) - 1]
                position = len(written) - 1
                entries = [(token, position + i, 0) for i, token in enumerate([written[-1], *draft])]
                base.decode(context, batch, entries, last=True, every=True)
                right = 0
                lib.llama_sampler_sample(chain, context, 0)
                while right < len(draft) and draft[right] == left[right]:
                    right += 1
                    lib.llama_sampler_sample(chain, context, right)
                lib.llama_memory_seq_rm(memory, 0, position + right + 1, -1)
                seconds.append(time.perf_counter() - start_at)
                written += left[: right + 1]
                left = left[right + 1 :]
                drafted, accepted = drafted + len(draft), accepted + right
        finally:
            lib.llama_batch_free(batch)
            lib.llama_sampler_free(chain)
            lib.llama_free(context)
        return {
            "seconds": seconds,
            "tokens": len(answer) - 1,
            "draft_tokens": drafted,
            "accepted_tokens": accepted,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=("qsample", "llama.cpp"))
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--evict-bytes", type=int, default=0, help="read so much before each step; 0 = warm weights")
    arguments = parser.parse_args()
    kind: Any = Qsample if arguments.system == "qsample" else LlamaCpp
    system = kind(arguments.model, arguments.threads)
    evict = Evicted(arguments.evict_bytes) if arguments.evict_bytes else lambda: None
    print(json.dumps({"loaded": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(system.write(request["texts"], request["guesses"], evict)), flush=True)


if __name__ == "__main__":
    main()
