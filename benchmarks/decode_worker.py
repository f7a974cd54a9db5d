"""A system with a model, driven over its standard streams; started by `decode.py`, once per system.

    python benchmarks/decode_worker.py SYSTEM MODEL --threads 2

After loading it prints a JSON line: version, seconds to load, memory. It answers each request, a JSON line with the
keys of `Request`, with a line: seconds until every row has its first token, seconds of each later step, the tokens.
Each system has its own process, so that all of them stay loaded and take turns without conflicts between their
libraries. It needs the system that it runs and NumPy, but nothing else of qsample: the peers may have another
environment.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Ids = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Request:
    """A request for `rows` rows with seeded random prompts.

    `new_tokens` counts the sampled tokens of each row, including the first. `sampling` has Hugging Face's names;
    temperature 0 is greedy, and an absent parameter is off.
    """

    rows: int
    prompt_tokens: int
    new_tokens: int
    sampling: dict[str, float]


class System(Protocol):
    """A system; `generate` returns the moments before the work and after each step, and the tokens, [B, N]."""

    vocab_size: int

    def generate(self, prompts: Ids, request: Request) -> tuple[list[float], list[list[int]]]: ...


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


class Qsample:
    """The package through the runtime's own slots, read after every step."""

    def __init__(self, model: Path, threads: int) -> None:
        from qsample.runtime import load

        # All systems stay loaded: threads that keep spinning would take the cores of the next system.
        spinning = {"session.force_spinning_stop": "1"}
        self.model = load(model, intra_op_num_threads=threads, verify=False, session_config=spinning)
        self.vocab_size = self.model.interface.vocab_size

    def _loop(self, prompts: Ids, request: Request, sessions: Any) -> Any:
        from qsample.request.sampling_params import SamplingParams
        from qsample.runtime.bench import LockStep
        from qsample.runtime.prepare import parameter_row

        rows, length = prompts.shape
        capacity = self.model.capacity(length + request.new_tokens + 1)
        params = SamplingParams(**{"temperature": 1.0, **request.sampling})
        endless = replace(
            params, eos_token_id=(), min_length=0, min_new_tokens=None, max_length=capacity, max_new_tokens=None
        )
        parameters = [parameter_row(self.model.interface, endless, length, capacity)] * rows
        return LockStep(sessions, parameters, list(range(rows)), capacity)

    def generate(self, prompts: Ids, request: Request) -> tuple[list[float], list[list[int]]]:
        moments = [time.perf_counter()]
        loop = self._loop(prompts, request, self.model.sessions)
        steps = [loop.prefill(list(prompts))]
        moments.append(time.perf_counter())
        for _ in range(request.new_tokens - 1):
            steps.append(loop.decode())
            moments.append(time.perf_counter())
        return moments, np.stack(steps, axis=1).tolist()

    def overhead(self, request: Request, everything: dict[str, float]) -> dict[str, Any]:
        """The cost of the host and the sampler, in steps that alternate between greedy and `everything`.

        Returns:
            The seconds of the steps of both kinds ("greedy", "everything"), and the parts of them outside the graph
            ("greedy_host", "everything_host").
        """
        prompts = random_prompts(request, self.vocab_size)
        timed = WatchedSession(self.model.sessions.decoder)
        loop = self._loop(prompts, request, replace(self.model.sessions, decoder=timed))
        loop.prefill(list(prompts))
        off = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        off |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        specs = {spec.name: spec for spec in self.model.interface.parameters}
        result: dict[str, list[float]] = {
            name: [] for name in ("greedy", "everything", "greedy_host", "everything_host")
        }
        for step in range(request.new_tokens - 1):
            kind = ("greedy", "everything")[step % 2]
            for name, value in (off if kind == "greedy" else off | everything).items():
                loop.set_parameter(name, np.full(request.rows, value, specs[name].dtype))
            timed.seconds = 0.0
            start = time.perf_counter()
            loop.decode()
            taken = time.perf_counter() - start
            result[kind].append(taken)
            result[f"{kind}_host"].append(taken - timed.seconds)
        return result


class Genai:
    """onnxruntime-genai's generator; threads: None = its own choice."""

    def __init__(self, model: Path, threads: int | None) -> None:
        import onnxruntime_genai as og

        self.og = og
        settings = json.loads((model / "genai_config.json").read_text())["model"]
        config = og.Config(str(model))
        options: dict[str, Any] = {"session.force_spinning_stop": "1"}
        if threads is not None:
            options["intra_op_num_threads"] = threads
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self.model = og.Model(config)
        self.vocab_size = int(settings["vocab_size"])

    def generate(self, prompts: Ids, request: Request) -> tuple[list[float], list[list[int]]]:
        length, sampling = prompts.shape[1] + request.new_tokens, request.sampling
        greedy = sampling.get("temperature", 1.0) == 0
        options: dict[str, Any] = {"batch_size": len(prompts), "max_length": length, "min_length": length}
        options |= {"do_sample": not greedy, "num_beams": 1}
        if not greedy:
            options |= {"top_k": int(sampling.get("top_k", 0)), "top_p": sampling.get("top_p", 1.0)}
            options |= {"temperature": sampling.get("temperature", 1.0), "random_seed": 0}
        moments = [time.perf_counter()]
        params = self.og.GeneratorParams(self.model)
        params.set_search_options(**options)
        generator = self.og.Generator(self.model, params)
        generator.append_tokens(prompts.astype(np.int32))
        steps = []
        for _ in range(request.new_tokens):
            generator.generate_next_token()
            steps.append(np.array(generator.get_next_tokens()))
            moments.append(time.perf_counter())
        return moments, np.stack(steps, axis=1).tolist()


class Transformers:
    """`generate` of the eager model in float32."""

    def __init__(self, model: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.vocab_size = int(self.model.config.vocab_size)

    def generate(self, prompts: Ids, request: Request) -> tuple[list[float], list[list[int]]]:
        sampling, count = dict(request.sampling), request.new_tokens
        options: dict[str, Any] = {"do_sample": sampling.get("temperature", 1.0) != 0}
        if options["do_sample"]:
            options |= {"top_k": 0, "top_p": 1.0, "temperature": 1.0} | sampling
        ids = self._torch.from_numpy(prompts)
        moments = [time.perf_counter()]

        def note(ids: Any, scores: Any, **_: Any) -> Any:
            """A stopping criterion that never stops: the only hook that `generate` calls after every step."""
            moments.append(time.perf_counter())
            return self._torch.zeros(len(ids), dtype=self._torch.bool)

        with self._torch.inference_mode():
            output = self.model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                stopping_criteria=[note],
                pad_token_id=0,
                **options,
            )
        return moments, output[:, prompts.shape[1] :].tolist()


class LlamaCpp:
    """llama.cpp through its Python package's low-level calls, with a sequence and a sampler chain per row."""

    def __init__(self, model: Path, threads: int) -> None:
        import llama_cpp

        self.lib, self._threads = llama_cpp, threads
        llama_cpp.llama_backend_init()
        # A callback has to outlive its use.
        self._silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silence, None)
        self.model = llama_cpp.llama_model_load_from_file(str(model).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = int(llama_cpp.llama_vocab_n_tokens(vocabulary))

    def generate(self, prompts: Ids, request: Request) -> tuple[list[float], list[list[int]]]:
        lib, (rows, length) = self.lib, prompts.shape
        options = lib.llama_context_default_params()
        options.n_ctx = rows * (length + request.new_tokens + 1)
        options.n_batch = options.n_ubatch = 512
        options.n_seq_max = rows
        options.n_threads = options.n_threads_batch = self._threads
        moments = [time.perf_counter()]
        context = lib.llama_init_from_model(self.model, options)
        chains = [self.chain(request.sampling, row) for row in range(rows)]
        batch = lib.llama_batch_init(512, 0, rows)
        tokens: list[list[int]] = [[] for _ in range(rows)]
        try:
            for row in range(rows):
                for start in range(0, length, 512):
                    piece = prompts[row, start : start + 512]
                    entries = [(int(token), start + i, row) for i, token in enumerate(piece)]
                    self.decode(context, batch, entries, last=start + 512 >= length)
                tokens[row].append(lib.llama_sampler_sample(chains[row], context, -1))
            moments.append(time.perf_counter())
            for step in range(request.new_tokens - 1):
                entries = [(tokens[row][-1], length + step, row) for row in range(rows)]
                self.decode(context, batch, entries, last=True, every=True)
                for row in range(rows):
                    tokens[row].append(lib.llama_sampler_sample(chains[row], context, row))
                moments.append(time.perf_counter())
        finally:
            lib.llama_batch_free(batch)
            for chain in chains:
                lib.llama_sampler_free(chain)
            lib.llama_free(context)
        return moments, tokens

    def decode(
        self, context: Any, batch: Any, entries: list[tuple[int, int, int]], *, last: bool, every: bool = False
    ) -> None:
        batch.n_tokens = len(entries)
        for i, (token, position, row) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position, 1, row
            batch.logits[i] = every or (last and i == len(entries) - 1)
        status = self.lib.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"llama_decode failed with status {status}")

    def chain(self, sampling: dict[str, float], seed: int) -> Any:
        lib = self.lib
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        temperature = sampling.get("temperature", 1.0)
        steps: list[Any] = []
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


SYSTEMS: dict[str, Callable[[Path, int], System]] = {
    "qsample": Qsample,
    "genai": Genai,
    "genai defaults": lambda model, _: Genai(model, None),
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
    "logits to NumPy": lambda model, threads: _logits_host(model, threads, "numpy"),
    "logits to transformers": lambda model, threads: _logits_host(model, threads, "transformers"),
}


def _logits_host(model: Path, threads: int, sampler: str) -> System:
    from logits_host import LogitsHost

    return LogitsHost(model, threads, sampler)


MODULES = {
    "qsample": "onnxruntime",
    "genai": "onnxruntime_genai",
    "genai defaults": "onnxruntime_genai",
    "transformers": "transformers",
    "llama.cpp": "llama_cpp",
    "logits to NumPy": "onnxruntime",
    "logits to transformers": "onnxruntime",
}


def random_prompts(request: Request, vocab_size: int) -> Ids:
    """[B, P] int64: the same ids for every system, without the special first ids."""
    return np.random.default_rng(0).integers(3, vocab_size, (request.rows, request.prompt_tokens))


def memory() -> dict[str, int]:
    """The memory of this process in bytes, "anonymous" and "mapped"; {} without /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[key].split()[0]) * 1024 for name, key in (("anonymous", "RssAnon"), ("mapped", "RssFile"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=list(SYSTEMS))
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr  # the output of libraries must not mix with the answers

    def answer(values: dict[str, Any]) -> None:
        print(json.dumps(values), file=answers, flush=True)

    start = time.perf_counter()
    system = SYSTEMS[options.system](options.model, options.threads)
    load_seconds = time.perf_counter() - start
    module = MODULES[options.system]
    version = f"{module} {getattr(sys.modules[module], '__version__', '')}"
    answer({"version": version, "load_seconds": load_seconds, "memory": memory(), "vocab_size": system.vocab_size})
    for line in sys.stdin:
        asked = json.loads(line)
        everything = asked.pop("everything", None)
        request = Request(**asked)
        if everything is not None:
            assert isinstance(system, Qsample)
            answer(system.overhead(request, everything))
            continue
        moments, tokens = system.generate(random_prompts(request, system.vocab_size), request)
        seconds = np.diff(moments).tolist()
        answer({"first_token": seconds[0], "steps": seconds[1:], "tokens": tokens, "memory": memory()})


if __name__ == "__main__":
    main()
