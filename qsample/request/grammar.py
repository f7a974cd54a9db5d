"""Grammars: the form that an answer has to follow, its compilation by llguidance, and the masks of
each answer.

Each grammar is first compiled in another process, with limits. llguidance is native code: some
schemas of 50 kB overflow its stack and end the process, others take minutes or gigabytes to
compile. A grammar that passes the trial costs the server no more than it cost there.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypedDict

import numpy as np

from qsample.contract.arrays import Array
from qsample.contract.tensors import RUNNING
from qsample.errors import ArgumentError

if TYPE_CHECKING:
    from qsample.runtime import CausalLM, Step

# The prefix of a grammar in GBNF. Its translation takes long, so the compiling thread does it.
_GBNF_PREFIX: Final = "\0GBNF:"
# llguidance's options for JSON: blanks as json.dumps writes them. A model that may write any number
# of blanks may never stop writing them.
_JSON_OPTIONS: Final[Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_MAX_COMPILED_GRAMMARS: Final = 64
_COMPILING_THREADS: Final = 2
MAX_COMPILE_SECONDS: Final = 10.0
_MAX_MEMORY_BYTES: Final = 256 << 20  # The tokenizer's memory is not counted.
_STACK_BYTES: Final = 4 << 20  # The server's threads have twice this stack.


class Form(NamedTuple):
    """The form that an answer has to follow. These are the kinds, with their values.

    - "json_schema": a schema, true for any JSON, or a schema's text;
    - "regex": an expression of Rust's regex crate, for the whole answer;
    - "choice": a list of texts;
    - "grammar": Lark's notation as llguidance reads it, or llama.cpp's GBNF;
    - "call", "calls": name → schema of a function's arguments, for a list of a single call, or of
      several calls.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar", "call", "calls"]
    value: Any


class InvalidGrammarError(ArgumentError):
    """No answer can follow a grammar, or the grammar is too large to compile."""


def grammar_of(form: Form) -> str:
    """The text of a form's grammar, for `Grammars.guide`. It needs llguidance.

    Raises:
        ArgumentError: the form is invalid.
    """
    from llguidance import LLMatcher

    kind, value = form
    if kind == "regex":
        return _translated(LLMatcher.grammar_from_regex, value)
    if kind == "grammar":
        if "::=" in value:
            return f"{_GBNF_PREFIX}{value}"
        return _translated(LLMatcher.grammar_from_lark, value)
    if kind == "choice":
        if "" in value:
            raise ArgumentError("a choice is empty; give texts of at least a character")
        texts = (json.dumps(choice, ensure_ascii=False) for choice in value)
        return _translated(LLMatcher.grammar_from_lark, "start: " + " | ".join(texts))
    if kind in ("call", "calls"):
        return _translated(
            lambda: LLMatcher.grammar_from_lark(_list_of_calls(value, several=kind == "calls"))
        )
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"the schema is not valid JSON: {error}") from None
    if value is not True and not isinstance(value, dict):
        raise ArgumentError(
            f"the schema is {json.dumps(value):.60}; give an object, or true for any JSON"
        )
    schema = {} if value is True else value
    return _translated(
        lambda: LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_JSON_OPTIONS)
    )


def check_form(form: Form) -> None:
    """Raise ArgumentError for an invalid form. No model is needed."""
    from llguidance import LLMatcher

    grammar = _without_gbnf(grammar_of(form))
    problem = LLMatcher.validate_grammar(grammar)
    if problem:
        raise invalid_grammar(problem)


def _list_of_calls(functions: Mapping[str, Any], several: bool) -> str:
    """The calls in Lark's notation. Each schema is a separate document, so its references to its
    parts stay valid."""
    calls = []
    for name, schema in functions.items():
        start = json.dumps(f'{{"name": "{name}", "parameters": ')
        calls.append(f'{start} %json {json.dumps({**schema, "x-guidance": _JSON_OPTIONS})} "}}"')
    more = ' (", " call)*' if several else ""
    return f'start: "[" call{more} "]"\ncall: {" | ".join(calls)}'


def _without_gbnf(grammar: str) -> str:
    """A text of `grammar_of`; translated if it is GBNF. Raises ArgumentError."""
    if not grammar.startswith(_GBNF_PREFIX):
        return grammar
    from llguidance import LLMatcher, gbnf_to_lark

    try:
        lark = gbnf_to_lark.gbnf_to_lark(grammar.removeprefix(_GBNF_PREFIX))
    except Exception as error:
        raise ArgumentError(f"the grammar is not valid GBNF: {error!s:.200}") from None
    return _translated(LLMatcher.grammar_from_lark, lark)


def _translated(translate: Callable[..., str], *value: str) -> str:
    """The result of a function of llguidance. Raises InvalidGrammarError."""
    try:
        return translate(*value)
    except (ValueError, RecursionError) as error:
        raise invalid_grammar(str(error)) from None


def invalid_grammar(reason: str) -> InvalidGrammarError:
    """The error for a grammar that is invalid or too large."""
    text = " ".join(reason.split())
    return InvalidGrammarError(f"no answer can follow that form: {text:.300}")


def compile_grammar(grammar: str, tokenizer: Any, vocab_size: int) -> CompiledGrammar:
    """Compile a text of `grammar_of` for llguidance's `tokenizer`.

    Raises:
        ArgumentError: the grammar is invalid, or no answer can follow it.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, _without_gbnf(grammar), log_level=0)
    check_matcher(matcher)
    mask = np.zeros((1, (vocab_size + 31) // 32), dtype=np.int32)
    fill_mask(matcher, mask)  # The first mask is the same for every answer, and often the slowest.
    if not mask.any():
        raise invalid_grammar("no text follows it")
    return CompiledGrammar(matcher, mask)


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar that answers can follow.

    Attributes:
        matcher: llguidance's matcher at the start of an answer; each answer gets a copy.
        mask: [1, W] int32, the mask of the first token.
    """

    matcher: Any
    mask: Array


def fill_mask(matcher: Any, mask: Array) -> None:
    """Write the mask of the next token, [1, W] int32. Raises as `check_matcher` does."""
    from llguidance import numpy

    numpy.fill_next_token_bitmask(matcher, mask, 0)
    check_matcher(matcher)


def check_matcher(matcher: Any) -> None:
    """Raise InvalidGrammarError if the grammar is invalid, or became too complex for llguidance
    during the answer."""
    if matcher.is_error():
        raise invalid_grammar(matcher.get_error())


class TokenizerArguments(TypedDict):
    """The arguments of llguidance.LLTokenizer: the content of tokenizer.json, the size of the
    model's vocabulary, and the ids of its stop tokens."""

    tokenizer: str
    n_vocab: int
    eos_token: list[int]


class Trial:
    """Finds out whether grammars can be compiled, one at a time, in a process that starts with the
    first grammar."""

    def __init__(
        self, tokenizer: Callable[[], TokenizerArguments], seconds: float = MAX_COMPILE_SECONDS
    ) -> None:
        """tokenizer: returns the arguments of the model's llguidance.LLTokenizer. seconds: the time
        that a grammar may take."""
        self._tokenizer = tokenizer
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None

    def refusal(self, grammar: str) -> str | None:
        """Why `grammar` cannot be compiled; None if it can. This blocks for at most `seconds`, and
        while the process starts."""
        process = self._process
        if process is None:
            process = self._start()
            self._process = process  # From here on, `stop` ends it.
            self._ask(process, self._tokenizer())
        timer = threading.Timer(self._seconds, process.kill)
        timer.start()
        try:
            answer = self._ask(process, grammar)
        finally:
            is_in_time = timer.is_alive()
            timer.cancel()
        if answer is not None:
            reason: str | None = json.loads(answer)
            return reason
        self.stop()
        process.wait()
        if is_in_time:
            return "it is too large or nested too deep to compile; give a smaller one"
        return f"it takes more than {self._seconds:g} seconds to compile; give a smaller one"

    def stop(self) -> None:
        """End the process, and the work on a grammar; the next grammar starts another process. Any
        thread may call this."""
        process = self._process
        self._process = None
        if process is not None:
            process.kill()

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    @staticmethod
    def _ask(process: subprocess.Popen[str], message: Any) -> str | None:
        """The answer to a message, a line; None if the process ended."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            return process.stdout.readline() or None
        except (BrokenPipeError, ValueError):  # The pipe is closed.
            return None


class Grammars:
    """The compiled grammars of a model. Those that were used last stay compiled."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._tokenizer: Any = None
        self._tokenizer_lock = threading.Lock()
        # Grammar → its compilation; the grammar that was used longest ago is the first.
        self._compilations: OrderedDict[str, asyncio.Future[CompiledGrammar]] = OrderedDict()
        self._waiting: Counter[str] = Counter()  # Grammar → the number of requests that wait.
        self._busy_trials: dict[str, Trial] = {}  # Grammar → the trial that works on it.
        self._idle_trials: SimpleQueue[Trial] = SimpleQueue()
        for _ in range(_COMPILING_THREADS):
            self._idle_trials.put(Trial(self._tokenizer_arguments))
        # This is not the pool of asyncio.to_thread, because slow grammars must not delay the
        # encoding of prompts.
        self._threads = ThreadPoolExecutor(_COMPILING_THREADS, thread_name_prefix="qsample-grammar")

    async def guide(self, grammar: str) -> GrammarGuide:
        """A guide for an answer. The grammar is compiled on another thread, once for simultaneous
        requests, as long as one of them waits.

        Raises:
            ArgumentError: the grammar is invalid or takes too much to compile, or no answer can
                follow it.
        """
        if grammar not in self._compilations:
            loop = asyncio.get_running_loop()
            self._compilations[grammar] = loop.run_in_executor(
                self._threads, self._compile, grammar
            )
        self._compilations.move_to_end(grammar)
        while len(self._compilations) > _MAX_COMPILED_GRAMMARS:
            self._compilations.popitem(last=False)
        compilation = self._compilations[grammar]
        self._waiting[grammar] += 1
        try:
            compiled = await asyncio.shield(compilation)  # Another request may wait for it.
        except BaseException:
            self._give_up(grammar, compilation)
            raise
        finally:
            self._waiting[grammar] -= 1
            self._waiting += Counter()  # This drops zeros.
        return GrammarGuide(compiled)

    def _give_up(self, grammar: str, compilation: asyncio.Future[CompiledGrammar]) -> None:
        """A request was cancelled, or the compilation failed: let the next request try again, and
        stop the work unless other requests wait for it."""
        if compilation.done():
            is_over = compilation.cancelled() or compilation.exception() is not None
        else:
            is_over = self._waiting[grammar] == 1
            if is_over:
                compilation.cancel()
                trial = self._busy_trials.get(grammar)
                if trial is not None:
                    trial.stop()
        if is_over and self._compilations.get(grammar) is compilation:
            del self._compilations[grammar]

    def compiled(self, form: Form) -> CompiledGrammar:
        """A form's grammar, compiled on this thread and without limits, for a user of this machine.

        Raises:
            ArgumentError: the form is invalid.
        """
        return compile_grammar(
            grammar_of(form), self._llguidance_tokenizer(), self._model.interface.vocab_size
        )

    def _compile(self, grammar: str) -> CompiledGrammar:
        """Try a grammar in another process, then compile it here."""
        trial = self._idle_trials.get()
        try:
            self._busy_trials[grammar] = trial
            reason = trial.refusal(grammar)
        finally:
            del self._busy_trials[grammar]
            self._idle_trials.put(trial)
        if reason is not None:
            raise invalid_grammar(reason)
        return compile_grammar(
            grammar, self._llguidance_tokenizer(), self._model.interface.vocab_size
        )

    def _llguidance_tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        with self._tokenizer_lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = LLTokenizer(**self._tokenizer_arguments())
                except ValueError as error:
                    raise ArgumentError(
                        f"this model's tokenizer cannot follow a grammar: {error!s:.200}"
                    ) from None
            return self._tokenizer

    def _tokenizer_arguments(self) -> TokenizerArguments:
        assert self._model.tokenizer is not None  # Callers check it.
        ends = list(self._model.package.manifest.token_ids.eos)
        return TokenizerArguments(
            tokenizer=self._model.tokenizer.to_json(),
            n_vocab=self._model.interface.vocab_size,
            eos_token=ends,
        )

    def close(self) -> None:
        """Stop compiling, and end the processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for trial in list(self._busy_trials.values()):
            trial.stop()
        while not self._idle_trials.empty():
            self._idle_trials.get().stop()


class GrammarGuide:
    """Writes the mask of each next token of an answer; the `allowed_tokens` of a request.

    The first mask is computed with the grammar. Each later mask depends on the token before it. As
    the graph filters and draws by itself, the step that samples the next token needs the mask, so
    it is written between the two steps. llguidance releases Python's lock meanwhile, so the event
    loop goes on.
    """

    def __init__(self, compiled: CompiledGrammar, row: int = 0) -> None:
        """row: the row of the answer in a batch."""
        self._compiled = compiled
        self._row = row
        self._matcher: Any = None

    def __call__(self, step: Step | None, mask: Array) -> None:
        if step is None:
            mask[:] = self._compiled.mask
            return
        if self._matcher is None:
            self._matcher = self._compiled.matcher.deep_copy()
        if step.emitted[self._row] and step.status[self._row] == RUNNING:
            self._matcher.consume_token(int(step.tokens[self._row]))
            check_matcher(self._matcher)
            fill_mask(self._matcher, mask)


def _serve() -> None:
    """Answer each line of standard input, in JSON, with a line: null, or the reason why a grammar
    is refused. The first line has the tokenizer's arguments. Invalid grammars pass; the server
    reports them."""
    from llguidance import LLTokenizer

    arguments: TokenizerArguments = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(**arguments)
    print("null", flush=True)
    _limit_memory()
    for line in sys.stdin:
        reason = None
        try:
            compile_grammar(json.loads(line), tokenizer, arguments["n_vocab"])
        except ArgumentError:
            pass
        except MemoryError:
            reason = "it takes too much memory to compile; give a smaller one"
        except BaseException as error:  # A panic of llguidance is no Exception.
            reason = f"it cannot be compiled: {error}"
        print(json.dumps(reason), flush=True)


def _limit_memory() -> None:
    """Limit the process's memory and stack, on Linux."""
    if sys.platform != "linux":
        return
    import resource

    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # /proc is not mounted.
        return
    limit_bytes = used_bytes + _MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    _serve()
