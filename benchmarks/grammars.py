"""Answers that follow schemas: tables in the graph, masks on the host, llama.cpp's grammars and genai's guidance.

    qsample export CHECKPOINT served --for-serving && qsample compile served served-cpu
    python benchmarks/grammars.py served-cpu                                   # qsample alone
    python benchmarks/grammars.py served-cpu --gguf FILE --genai FOLDER --page # and others on the same weights

Eight rows write answers to eight schemas; without a form, they write as many tokens of any text. Each round runs each
case once, in an order that changes; the first round warms up. A step is the time between two tokens of all rows. The
ratio is the median over the rounds of a case's step to the step of the same system without forms; the last column
relates it to qsample's tables. onnxruntime-genai has a single guidance for a batch, so its rows have the same schema.

`--page` writes docs/benchmarks/grammars.json and grammars.md. A minute for SmolLM2-135M on two cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
from report import describe_machine, print_table

# The systems are imported in their own processes: libraries that share one may choose other kernels.
ROWS: Final = 8
PROMPT: Final = "Write a long list as JSON:\n"
PAUSE_S: Final = 0.1  # threads of the case before may still spin
PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "grammars"
NOTES: Final = (
    "Eight rows of SmolLM2-135M-Instruct write answers to eight schemas; onnxruntime-genai has one schema for its "
    "batch. It samples any text from its whole vocabulary at temperature 0.8, which takes longer than its masks do."
)
KEYS: Final = ("name", "title", "city", "color", "animal", "author", "river", "country")
Cases = dict[str, Callable[[], float]]  # name → runs once; seconds of a step


def schema(row: int) -> dict[str, Any]:
    """A list of objects that is longer than the answer."""
    key = KEYS[row % len(KEYS)]
    properties = {
        key: {"type": "string"},
        "count": {"type": "integer"},
        "kind": {"enum": [f"{key}-{number}" for number in range(5)]},
        "is_known": {"type": "boolean"},
    }
    item = {"type": "object", "properties": properties, "required": list(properties)}
    items = {"type": "array", "items": item, "minItems": 2}
    return {"type": "object", "properties": {f"{key}s": items}, "required": [f"{key}s"]}


class Qsample:
    """qsample's three ways; a package with the features for serving."""

    def __init__(self, package: Path, threads: int, new_tokens: int) -> None:
        from qsample.request.grammar import Form, compile_grammar, grammar_of
        from qsample.request.structured.grammars import Wish
        from qsample.runtime import load

        self._model = load(package, intra_op_num_threads=threads)
        self._new_tokens = new_tokens
        assert self._model.tokenizer is not None
        ids = self._model.tokenizer.encode(PROMPT)
        self._prompts = [ids] * ROWS
        forms = [Form("json_schema", schema(row)) for row in range(ROWS)]
        self._tables = [self._model.grammars.tables(Wish(form)) for form in forms]
        tokenizer = self._model.grammars.tokenizer
        self._masks = [compile_grammar(grammar_of(form), tokenizer) for form in forms]

    def _step(self, **options: Any) -> float:
        from qsample.runtime import SamplingParams

        params = SamplingParams(temperature=0.8, max_new_tokens=self._new_tokens)
        if not options:
            params = SamplingParams(
                temperature=0.8, max_new_tokens=self._new_tokens, eos_token_id=()
            )
        output = self._model.generate(self._prompts, params, seed=1, outputs=(), **options)
        steps = max(len(ids) for ids in output.token_ids) - 1
        return float(output.timing.decode_seconds) / steps

    def cases(self) -> Cases:
        return {
            "qsample": self._step,
            "qsample, tables": lambda: self._step(grammar=self._tables),
            "qsample, masks of the host": lambda: self._step(grammar=self._masks),
        }


class LlamaCpp:
    """A sequence and a sampler chain per row, with or without a grammar."""

    def __init__(self, file: Path, threads: int, new_tokens: int) -> None:
        import llama_cpp as lib
        from llama_cpp.llama_grammar import json_schema_to_gbnf
        from systems.llama_cpp import Model

        self._lib, self._new_tokens = lib, new_tokens
        # Some processors list AMX and cannot run it.
        self._model = Model(file, threads, amx=False)
        self._grammars = [json_schema_to_gbnf(json.dumps(schema(row))) for row in range(ROWS)]
        text, buffer = PROMPT.encode(), (lib.llama_token * 64)()
        self._vocab = lib.llama_model_get_vocab(self._model.model)
        count = lib.llama_tokenize(self._vocab, text, len(text), buffer, 64, True, True)
        self._prompt = list(buffer[:count])

    def _chain(self, context: Any, row: int, *, guided: bool) -> Any:
        lib = self._lib
        if not guided:
            return context.sampler({"temperature": 0.8}, row)
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        context._chains.append(chain)
        grammar = lib.llama_sampler_init_grammar(self._vocab, self._grammars[row].encode(), b"root")
        for sampler in (
            grammar,
            lib.llama_sampler_init_temp(0.8),
            lib.llama_sampler_init_dist(row),
        ):
            lib.llama_sampler_chain_add(chain, sampler)
        return chain

    def _step(self, *, guided: bool) -> float:
        from systems.llama_cpp import closing

        length = len(self._prompt)
        with closing(self._model.open(ROWS * (length + self._new_tokens + 1), ROWS)) as context:
            chains = [self._chain(context, row, guided=guided) for row in range(ROWS)]
            newest = []
            for row in range(ROWS):
                context.read(self._prompt, row)
                newest.append(context.sample(chains[row]))
            started = time.perf_counter()
            for step in range(self._new_tokens - 1):
                entries = [(newest[row], length + step, row) for row in range(ROWS)]
                context.decode(entries, every=True)
                newest = [context.sample(chains[row], row) for row in range(ROWS)]
            return (time.perf_counter() - started) / (self._new_tokens - 1)

    def cases(self) -> Cases:
        return {
            "llama.cpp": lambda: self._step(guided=False),
            "llama.cpp, grammars": lambda: self._step(guided=True),
        }


class Genai:
    """A batch, with or without guidance."""

    def __init__(self, folder: Path, threads: int, new_tokens: int) -> None:
        import onnxruntime_genai as og
        from systems.genai import load as load_genai

        self._og, self._new_tokens = og, new_tokens
        self._model, _ = load_genai(folder, threads)
        self._prompt = og.Tokenizer(self._model).encode(PROMPT)

    def _step(self, *, guided: bool) -> float:
        og, prompts = self._og, np.array([self._prompt] * ROWS, np.int32)
        length = prompts.shape[1] + self._new_tokens
        params = og.GeneratorParams(self._model)
        params.set_search_options(
            batch_size=ROWS, max_length=length, min_length=0, do_sample=True, temperature=0.8,
            top_k=0, top_p=1.0, random_seed=1,
        )  # fmt: skip
        if guided:
            params.set_guidance("json_schema", json.dumps(schema(0)))
        generator = og.Generator(self._model, params)
        generator.append_tokens(prompts)
        generator.generate_next_token()
        started, steps = time.perf_counter(), 0
        while steps < self._new_tokens - 1 and not generator.is_done():
            generator.generate_next_token()
            steps += 1
        return (time.perf_counter() - started) / steps

    def cases(self) -> Cases:
        return {
            "onnxruntime-genai": lambda: self._step(guided=False),
            "onnxruntime-genai, guidance": lambda: self._step(guided=True),
        }


def serve(system: Callable[..., Any], arguments: tuple[Any, ...], connection: Connection) -> None:
    """The process of a system: the names of its cases, then the seconds of each case that is asked for."""
    cases = system(*arguments).cases()
    connection.send(list(cases))
    while True:
        connection.send(cases[connection.recv()]())


def cases_of(system: Callable[..., Any], *arguments: Any) -> Cases:
    """The cases of a system, which runs in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    spawn.Process(target=serve, args=(system, arguments, there), daemon=True).start()

    def run(name: str) -> float:
        here.send(name)
        return float(here.recv())

    return {name: partial(run, name) for name in here.recv()}


def measure(cases: Cases, rounds: int) -> dict[str, list[float]]:
    """The seconds of a step of each case, a number per round."""
    names, measured = list(cases), {name: list[float]() for name in cases}
    for index in range(rounds + 1):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            time.sleep(PAUSE_S)
            seconds = cases[name]()
            if index:
                measured[name].append(seconds)
    return measured


def table(measured: dict[str, list[float]]) -> list[list[str]]:
    """A line for each case."""

    def ratio(case: str, base: str) -> str:
        pairs = zip(measured[case], measured[base], strict=True)
        return f"{statistics.median(one / other for one, other in pairs):.2f}"

    lines = []
    for case, seconds in measured.items():
        step = f"{1e3 * statistics.median(seconds):.2f}"
        rate = f"{ROWS / statistics.median(seconds):.0f}"
        free = case.partition(",")[0]
        lines.append([case, step, rate, ratio(case, free), ratio(case, "qsample, tables")])
    return lines


HEADER: Final = ("case", "ms a step", "tokens a second", "to no form", "to qsample's tables")


def write_page(measured: dict[str, list[float]], machine: str) -> None:
    content = {"machine": machine, "rows": ROWS, "step_seconds": measured}
    PAGE.with_suffix(".json").write_text(json.dumps(content) + "\n", encoding="utf-8")
    lines = ["# Structured outputs", "", (__doc__ or "").partition("\n")[0], "", f"{machine}.", ""]
    lines += [
        f"| {' | '.join(line)} |" for line in (HEADER, ["---"] * len(HEADER), *table(measured))
    ]
    lines += [
        "",
        NOTES,
        "",
        "`python benchmarks/grammars.py` measures this; its first lines say how.",
        "",
    ]
    PAGE.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", type=Path)
    parser.add_argument("--gguf", type=Path, help="llama.cpp's file of the same model")
    parser.add_argument("--genai", type=Path, help="onnxruntime-genai's folder of the same model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--page", action="store_true", help="write docs/benchmarks/grammars.*")
    options = parser.parse_args()
    settings = (options.threads, options.new_tokens)
    cases = cases_of(Qsample, options.package, *settings)
    if options.gguf is not None:
        cases |= cases_of(LlamaCpp, options.gguf, *settings)
    if options.genai is not None:
        cases |= cases_of(Genai, options.genai, *settings)
    measured = measure(cases, options.rounds)
    machine = describe_machine(options.threads)
    print_table(HEADER, table(measured), f"{ROWS} rows; {machine}")
    if options.page:
        write_page(measured, machine)


if __name__ == "__main__":
    main()
