"""Grammars: the form that an answer has to follow, its compilation by llguidance, and the masks of each answer.

Each grammar is compiled in another process first, with limits. llguidance is native code: it overflows its stack and
ends the process on some schemas of 50 kB, and compiles other schemas for minutes or into gigabytes. A grammar that
passes there costs the server no more than it did there.
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

# The prefix of a grammar in GBNF: its translation takes long, so the compiling thread does it.
_GBNF: Final = "\0GBNF:"
# Blanks as json.dumps writes them. A model that may write any number of them may never stop doing so.
_JSON: Final[Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_KEPT: Final = 64  # grammars
_THREADS: Final = 2  # that compile
SECONDS: Final = 10.0  # for a grammar
_MEMORY: Final = 256 << 20  # bytes, in addition to the tokenizer's
_STACK: Final = 4 << 20  # bytes; the server's threads have twice as much


class Form(NamedTuple):
    """The form that an answer has to follow.

    - "json_schema": `value` is a schema, true for any JSON, or a schema's text;
    - "regex": an expression of Rust's regex crate, for the whole answer;
    - "choice": a list of texts;
    - "grammar": Lark's notation as llguidance reads it, or llama.cpp's GBNF;
    - "call", "calls": name → schema of a function's arguments, for a list of a single call, or of several.
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
        return _made(LLMatcher.grammar_from_regex, value)
    if kind == "grammar":
        return _GBNF + value if "::=" in value else _made(LLMatcher.grammar_from_lark, value)
    if kind == "choice":
        if "" in value:
            raise ArgumentError("a choice is empty; give texts of at least a character")
        texts = (json.dumps(choice, ensure_ascii=False) for choice in value)
        return _made(LLMatcher.grammar_from_lark, "start: " + " | ".join(texts))
    if kind in ("call", "calls"):
        return _made(
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
    return _made(lambda: LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_JSON))


def check_form(form: Form) -> None:
    """Raise ArgumentError for an invalid form, before a model is there."""
    from llguidance import LLMatcher

    grammar = grammar_of(form)
    grammar = _from_gbnf(grammar.removeprefix(_GBNF)) if grammar.startswith(_GBNF) else grammar
    if problem := LLMatcher.validate_grammar(grammar):
        raise refused(problem)


def _list_of_calls(functions: Mapping[str, Any], several: bool) -> str:
    """Lark's notation. Each schema is a separate document, so its references to its parts stay valid."""
    calls = []
    for name, schema in functions.items():
        start = json.dumps(f'{{"name": "{name}", "parameters": ')
        calls.append(f'{start} %json {json.dumps({**schema, "x-guidance": _JSON})} "}}"')
    more = ' (", " call)*' if several else ""
    return f'start: "[" call{more} "]"\ncall: {" | ".join(calls)}'


def _from_gbnf(grammar: str) -> str:
    from llguidance import LLMatcher, gbnf_to_lark

    try:
        lark = gbnf_to_lark.gbnf_to_lark(grammar)
    except Exception as error:
        raise ArgumentError(f"the grammar is not valid GBNF: {error!s:.200}") from None
    return _made(LLMatcher.grammar_from_lark, lark)


def _made(make: Callable[..., str], *value: str) -> str:
    try:
        return make(*value)
    except (ValueError, RecursionError) as error:
        raise refused(str(error)) from None


def refused(reason: str) -> InvalidGrammarError:
    """The error of a grammar that is invalid or too large."""
    text = " ".join(reason.split())
    return InvalidGrammarError(f"no answer can follow that form: {text:.300}")


def compile_grammar(grammar: str, tokenizer: Any, vocab_size: int) -> Compiled:
    """Compile a text of `grammar_of` for llguidance's `tokenizer`.

    Raises:
        ArgumentError: the grammar is invalid, or no answer can follow it.
    """
    from llguidance import LLMatcher

    if grammar.startswith(_GBNF):
        grammar = _from_gbnf(grammar.removeprefix(_GBNF))
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    check_matcher(matcher)
    mask = np.zeros((1, (vocab_size + 31) // 32), dtype=np.int32)
    fill_mask(matcher, mask)  # the same for every answer, and often the slowest
    if not mask.any():
        raise refused("no text follows it")
    return Compiled(matcher, mask)


@dataclass(frozen=True, slots=True)
class Compiled:
    """matcher: at the start of an answer; copied for each. mask: [1, W] int32, of the first token."""

    matcher: Any
    mask: Array


def fill_mask(matcher: Any, mask: Array) -> None:
    """Write the mask of the next token, [1, W] int32. Raises as `check_matcher` does."""
    from llguidance import numpy

    numpy.fill_next_token_bitmask(matcher, mask, 0)
    check_matcher(matcher)


def check_matcher(matcher: Any) -> None:
    """Raise InvalidGrammarError if the grammar is invalid, or became too complex for llguidance on the way."""
    if matcher.is_error():
        raise refused(matcher.get_error())


class TokenizerArguments(TypedDict):
    """Of llguidance.LLTokenizer: the content of tokenizer.json, the model's vocabulary, ids of its stop tokens."""

    tokenizer: str
    n_vocab: int
    eos_token: list[int]


class Trial:
    """Tells whether grammars can be compiled, one at a time, in a process that begins with the first; each may take
    `seconds`. `tokenizer` returns the arguments of the model's llguidance.LLTokenizer."""

    def __init__(
        self, tokenizer: Callable[[], TokenizerArguments], seconds: float = SECONDS
    ) -> None:
        self._tokenizer = tokenizer
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None

    def refusal(self, grammar: str) -> str | None:
        """Why `grammar` cannot be compiled; None if it can. Blocks for at most `seconds` and a start of the process."""
        process = self._process
        if process is None:
            process = self._process = self._start()  # `stop` ends it from here on
            self._ask(process, self._tokenizer())
        late = threading.Timer(self._seconds, process.kill)
        late.start()
        try:
            answer = self._ask(process, grammar)
        finally:
            in_time = late.is_alive()
            late.cancel()
        if answer is not None:
            reason: str | None = json.loads(answer)
            return reason
        self.stop()
        process.wait()
        if in_time:
            return "it is too large or nested too deep to compile; give a smaller one"
        return f"it takes more than {self._seconds:g} seconds to compile; give a smaller one"

    def stop(self) -> None:
        """End the process, and the work on a grammar; the next grammar starts another. Callable from any thread."""
        process, self._process = self._process, None
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
        """The answer, a line; None if the process ended."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            return process.stdout.readline() or None
        except (BrokenPipeError, ValueError):  # a pipe that is closed
            return None


class Grammars:
    """Compiled grammars of a model; the most recent are kept."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._tokenizer: Any = None
        self._reading = threading.Lock()
        self._kept: OrderedDict[str, asyncio.Future[Compiled]] = OrderedDict()
        self._waiting: Counter[str] = Counter()  # requests, by grammar
        self._tried: dict[str, Trial] = {}  # by the grammar that each works on
        self._trials: SimpleQueue[Trial] = SimpleQueue()  # the idle ones
        for _ in range(_THREADS):
            self._trials.put(Trial(self._tokenizer_arguments))
        # A pool apart from asyncio.to_thread's: slow grammars must not delay the encoding of prompts.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="qsample-grammar")

    async def guide(self, grammar: str) -> GrammarGuide:
        """A guide for an answer, compiled on another thread, once for simultaneous requests, as long as one waits.
        Raises ArgumentError if the grammar is invalid or takes too much to compile, or if no answer can follow it."""
        if grammar not in self._kept:
            loop = asyncio.get_running_loop()
            self._kept[grammar] = loop.run_in_executor(self._threads, self._compile, grammar)
        self._kept.move_to_end(grammar)
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        compiling = self._kept[grammar]
        self._waiting[grammar] += 1
        try:
            compiled = await asyncio.shield(compiling)  # another request may wait for it
        except BaseException:
            # The next request tries again; a cancelled request leaves the work to the requests that wait.
            failed = compiling.done() and (
                compiling.cancelled() or compiling.exception() is not None
            )
            left = not compiling.done() and self._waiting[grammar] == 1
            if (failed or left) and self._kept.get(grammar) is compiling:
                del self._kept[grammar]
            if left:
                compiling.cancel()
                if (trial := self._tried.get(grammar)) is not None:
                    trial.stop()
            raise
        finally:
            self._waiting[grammar] -= 1
            self._waiting += Counter()  # without zeros
        return GrammarGuide(compiled)

    def compiled(self, form: Form) -> Compiled:
        """A form's grammar, compiled on this thread and without limits, for a user of this machine.

        Raises:
            ArgumentError: the form is invalid.
        """
        return compile_grammar(
            grammar_of(form), self._llguidance_tokenizer(), self._model.interface.vocab_size
        )

    def _compile(self, grammar: str) -> Compiled:
        trial = self._trials.get()
        try:
            self._tried[grammar] = trial
            reason = trial.refusal(grammar)
        finally:
            del self._tried[grammar]
            self._trials.put(trial)
        if reason is not None:
            raise refused(reason)
        return compile_grammar(
            grammar, self._llguidance_tokenizer(), self._model.interface.vocab_size
        )

    def _llguidance_tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        with self._reading:
            if self._tokenizer is None:
                try:
                    self._tokenizer = LLTokenizer(**self._tokenizer_arguments())
                except ValueError as error:
                    raise ArgumentError(
                        f"this model's tokenizer cannot follow a grammar: {error!s:.200}"
                    ) from None
            return self._tokenizer

    def _tokenizer_arguments(self) -> TokenizerArguments:
        assert self._model.tokenizer is not None  # see `ServedModel.guides`
        ends = list(self._model.package.manifest.token_ids.eos)
        return TokenizerArguments(
            tokenizer=self._model.tokenizer.to_json(),
            n_vocab=self._model.interface.vocab_size,
            eos_token=ends,
        )

    def close(self) -> None:
        """Compile no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for trial in list(self._tried.values()):
            trial.stop()
        while not self._trials.empty():
            self._trials.get().stop()


class GrammarGuide:
    """Writes the mask of each next token of an answer; the `allowed_tokens` of a request.

    The first mask is computed early, with the grammar. Each later mask depends on the token before it, and the step
    that samples the next token needs it, because the graph filters and draws by itself: so it is written between the
    two steps. llguidance releases Python's lock meanwhile, so the event loop goes on. `row`: of the answer, in a batch.
    """

    def __init__(self, compiled: Compiled, row: int = 0) -> None:
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
    """Answer each line of standard input, in JSON, with a line: null, or the reason why a grammar is refused. The first
    line has the tokenizer's arguments. Invalid grammars pass; the server reports them."""
    from llguidance import LLTokenizer

    arguments: TokenizerArguments = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(**arguments)
    print("null", flush=True)
    _limit()
    for line in sys.stdin:
        reason = None
        try:
            compile_grammar(json.loads(line), tokenizer, arguments["n_vocab"])
        except ArgumentError:
            pass
        except MemoryError:
            reason = "it takes too much memory to compile; give a smaller one"
        except BaseException as error:  # llguidance's panics, too
            reason = f"it cannot be compiled: {error}"
        print(json.dumps(reason), flush=True)


def _limit() -> None:
    """Bound the process's memory and stack, on systems that can."""
    if sys.platform != "linux":
        return
    import resource

    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # no /proc
        return
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    _serve()
