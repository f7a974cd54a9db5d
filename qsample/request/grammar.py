"""Grammars: the form that an answer has to follow, its compilation by llguidance, and the masks of
each answer.

Each grammar is first compiled in another process, with limits. llguidance is native code: on some
schemas of 50 kB it overflows its stack and ends the process, and it compiles other schemas for
minutes or into gigabytes. A grammar that passes there costs this process no more than it did there.
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
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypedDict

import numpy as np

from qsample.contract.arrays import Array
from qsample.contract.tensors import RUNNING
from qsample.errors import ArgumentError

if TYPE_CHECKING:
    from qsample.runtime import CausalLM, Step

# JSON is written with the blanks of json.dumps. A model that may write any number of blanks may
# never stop writing them.
_JSON_OPTIONS: Final[Mapping[str, Any]] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
MAX_CACHED_GRAMMARS: Final = 64
_NUM_COMPILING_THREADS: Final = 2
MAX_COMPILE_SECONDS: Final = 10.0
# The memory that a compilation may take in addition to the tokenizer's.
_MAX_COMPILE_BYTES: Final = 256 << 20
# The threads of a server have twice this stack.
_MAX_STACK_BYTES: Final = 4 << 20


class Form(NamedTuple):
    """The form that an answer has to follow.

    The value of each kind:

    - "json_schema": a schema, the text of a schema, or true for any JSON;
    - "regex": an expression of Rust's regex crate that the whole answer matches;
    - "choice": a list of texts;
    - "grammar": a grammar in Lark's notation as llguidance reads it, or in llama.cpp's GBNF;
    - "call", "calls": a mapping from the names of functions to the schemas of their arguments. The
      answer is a list of a single call, or of several.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar", "call", "calls"]
    value: Any


class InvalidGrammarError(ArgumentError):
    """No answer can follow a grammar, or the grammar is too large to compile."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The text of a grammar.

    Attributes:
        text: the grammar as llguidance's LLMatcher takes it, or GBNF.
        is_gbnf: whether the text is GBNF. Its translation takes long, so the thread that compiles
            the grammar translates it.
    """

    text: str
    is_gbnf: bool = False


def grammar_of(form: Form) -> Grammar:
    """The grammar of a form, for `Grammars.guide`. It needs llguidance.

    Raises:
        ArgumentError: the form is invalid.
    """
    from llguidance import LLMatcher

    kind, value = form
    match kind:
        case "regex":
            return Grammar(_converted(LLMatcher.grammar_from_regex, value))
        case "grammar":
            if "::=" in value:
                return Grammar(value, is_gbnf=True)
            return Grammar(_converted(LLMatcher.grammar_from_lark, value))
        case "choice":
            return Grammar(_converted(LLMatcher.grammar_from_lark, _lark_of_choice(value)))
        case "call" | "calls":
            lark = _lark_of_calls(value, several=kind == "calls")
            return Grammar(_converted(LLMatcher.grammar_from_lark, lark))
        case "json_schema":
            schema = json.dumps(_parsed_schema(value))
            return Grammar(
                _converted(LLMatcher.grammar_from_json_schema, schema, defaults=_JSON_OPTIONS)
            )


def check_form(form: Form) -> None:
    """Raise ArgumentError for an invalid form, before a model is there."""
    from llguidance import LLMatcher

    problem = LLMatcher.validate_grammar(_for_llguidance(grammar_of(form)))
    if problem:
        raise invalid_grammar(problem)


def _lark_of_choice(texts: list[str]) -> str:
    if "" in texts:
        raise ArgumentError("a choice is empty; give texts of at least a character")
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _lark_of_calls(functions: Mapping[str, Any], several: bool) -> str:
    """A list of calls in Lark's notation. Each schema is a separate document, so that references to
    its parts stay valid."""
    calls = []
    for name, schema in functions.items():
        start = json.dumps(f'{{"name": "{name}", "parameters": ')
        arguments = json.dumps({**schema, "x-guidance": _JSON_OPTIONS})
        calls.append(f'{start} %json {arguments} "}}"')
    more_calls = ' (", " call)*' if several else ""
    return f'start: "[" call{more_calls} "]"\ncall: {" | ".join(calls)}'


def _parsed_schema(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"the schema is not valid JSON: {error}") from None
    if value is True:
        return {}
    if not isinstance(value, dict):
        raise ArgumentError(
            f"the schema is {json.dumps(value):.60}; give an object, or true for any JSON"
        )
    return value


def _for_llguidance(grammar: Grammar) -> str:
    """The text of a grammar as LLMatcher takes it."""
    from llguidance import LLMatcher, gbnf_to_lark

    if not grammar.is_gbnf:
        return grammar.text
    try:
        lark = gbnf_to_lark.gbnf_to_lark(grammar.text)
    except Exception as error:
        raise ArgumentError(f"the grammar is not valid GBNF: {error!s:.200}") from None
    return _converted(LLMatcher.grammar_from_lark, lark)


def _converted(convert: Callable[..., str], text: str, **options: Any) -> str:
    """The result of one of LLMatcher's conversions to a grammar."""
    try:
        return convert(text, **options)
    except (ValueError, RecursionError) as error:
        raise invalid_grammar(str(error)) from None


def invalid_grammar(reason: str) -> InvalidGrammarError:
    """The error of a grammar that is invalid or too large."""
    text = " ".join(reason.split())
    return InvalidGrammarError(f"no answer can follow that form: {text:.300}")


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar at the start of an answer.

    Attributes:
        matcher: llguidance's matcher. Each answer uses a copy of it.
        mask: [1, W] int32, the mask of the first token.
    """

    matcher: Any
    mask: Array


def compile_grammar(grammar: Grammar, tokenizer: Any, vocab_size: int) -> CompiledGrammar:
    """Compile a grammar.

    Args:
        grammar: the grammar.
        tokenizer: llguidance's tokenizer of the model.
        vocab_size: the number of tokens of the model.

    Raises:
        ArgumentError: the grammar is invalid, or no answer can follow it.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, _for_llguidance(grammar), log_level=0)
    check_matcher(matcher)
    # The first mask is the same for every answer, and often the slowest.
    mask = np.zeros((1, (vocab_size + 31) // 32), dtype=np.int32)
    fill_mask(matcher, mask)
    if not mask.any():
        raise invalid_grammar("no text follows it")
    return CompiledGrammar(matcher, mask)


def fill_mask(matcher: Any, mask: Array) -> None:
    """Write the mask of the next token.

    Args:
        matcher: llguidance's matcher.
        mask: [1, W] int32, the mask to write.

    Raises:
        InvalidGrammarError: as `check_matcher`.
    """
    from llguidance import numpy

    numpy.fill_next_token_bitmask(matcher, mask, 0)
    check_matcher(matcher)


def check_matcher(matcher: Any) -> None:
    """Raise InvalidGrammarError if the grammar is invalid, or became too complex for llguidance in
    the course of an answer."""
    if matcher.is_error():
        raise invalid_grammar(matcher.get_error())


class TokenizerArguments(TypedDict):
    """The arguments of llguidance.LLTokenizer.

    Attributes:
        tokenizer: the content of tokenizer.json.
        n_vocab: the number of tokens of the model.
        eos_token: the ids of the model's stop tokens.
    """

    tokenizer: str
    n_vocab: int
    eos_token: list[int]


class Trial:
    """Finds out whether grammars can be compiled, one at a time, in a process that starts with the
    first grammar."""

    def __init__(
        self,
        tokenizer_arguments: Callable[[], TokenizerArguments],
        max_seconds: float = MAX_COMPILE_SECONDS,
    ) -> None:
        """
        Args:
            tokenizer_arguments: a function that returns the arguments of the model's tokenizer.
            max_seconds: the time that a grammar may take.
        """
        self._tokenizer_arguments = tokenizer_arguments
        self._max_seconds = max_seconds
        self._process: subprocess.Popen[str] | None = None

    def refusal(self, grammar: Grammar) -> str | None:
        """The reason why a grammar cannot be compiled; None if it can be compiled.

        It blocks for at most `max_seconds`, and while the process starts.
        """
        process = self._process
        if process is None:
            process = self._start()
            self._process = process  # From here on, `stop` ends it.
            self._ask(process, self._tokenizer_arguments())
        timer = threading.Timer(self._max_seconds, process.kill)
        timer.start()
        try:
            answer = self._ask(process, asdict(grammar))
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
        return f"it takes more than {self._max_seconds:g} seconds to compile; give a smaller one"

    def stop(self) -> None:
        """End the process and its work on a grammar. The next grammar starts another process. Any
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
    """The compiled grammars of a model. The most recent ones are cached."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._tokenizer: Any = None
        self._tokenizer_lock = threading.Lock()
        self._cache: OrderedDict[Grammar, asyncio.Future[CompiledGrammar]] = OrderedDict()
        self._num_waiting: Counter[Grammar] = Counter()
        self._running_trials: dict[Grammar, Trial] = {}
        self._idle_trials: SimpleQueue[Trial] = SimpleQueue()
        for _ in range(_NUM_COMPILING_THREADS):
            self._idle_trials.put(Trial(self._tokenizer_arguments))
        # The pool of asyncio.to_thread encodes prompts, and slow grammars must not delay them.
        self._threads = ThreadPoolExecutor(
            _NUM_COMPILING_THREADS, thread_name_prefix="qsample-grammar"
        )

    async def guide(self, grammar: Grammar) -> GrammarGuide:
        """A guide for an answer.

        The grammar is compiled on another thread, once for simultaneous requests, as long as one of
        them waits.

        Raises:
            ArgumentError: the grammar is invalid or takes too much to compile, or no answer can
                follow it.
        """
        compiling = self._compiling(grammar)
        self._num_waiting[grammar] += 1
        try:
            compiled = await asyncio.shield(compiling)  # Another request may wait for it.
        except BaseException:
            self._give_up(grammar, compiling)
            raise
        finally:
            self._num_waiting[grammar] -= 1
            if not self._num_waiting[grammar]:
                del self._num_waiting[grammar]
        return GrammarGuide(compiled)

    def _compiling(self, grammar: Grammar) -> asyncio.Future[CompiledGrammar]:
        """The compilation of a grammar, from the cache or begun now."""
        compiling = self._cache.get(grammar)
        if compiling is None:
            loop = asyncio.get_running_loop()
            compiling = loop.run_in_executor(self._threads, self._compile, grammar)
            self._cache[grammar] = compiling
        self._cache.move_to_end(grammar)
        while len(self._cache) > MAX_CACHED_GRAMMARS:
            self._cache.popitem(last=False)
        return compiling

    def _give_up(self, grammar: Grammar, compiling: asyncio.Future[CompiledGrammar]) -> None:
        """Forget a compilation that failed, so that the next request tries again, and stop a
        compilation for which no other request waits."""
        if compiling.done():
            if not compiling.cancelled() and compiling.exception() is None:
                return
        elif self._num_waiting[grammar] > 1:
            return
        if self._cache.get(grammar) is compiling:
            del self._cache[grammar]
        if not compiling.done():
            compiling.cancel()
            trial = self._running_trials.get(grammar)
            if trial is not None:
                trial.stop()

    def compiled(self, form: Form) -> CompiledGrammar:
        """The grammar of a form, compiled on this thread and without limits, for a user of this
        machine.

        Raises:
            ArgumentError: the form is invalid.
        """
        return self._compile_without_limits(grammar_of(form))

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        trial = self._idle_trials.get()
        try:
            self._running_trials[grammar] = trial
            reason = trial.refusal(grammar)
        finally:
            del self._running_trials[grammar]
            self._idle_trials.put(trial)
        if reason is not None:
            raise invalid_grammar(reason)
        return self._compile_without_limits(grammar)

    def _compile_without_limits(self, grammar: Grammar) -> CompiledGrammar:
        tokenizer = self._llguidance_tokenizer()
        return compile_grammar(grammar, tokenizer, self._model.interface.vocab_size)

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
        assert self._model.tokenizer is not None  # The callers check this.
        return TokenizerArguments(
            tokenizer=self._model.tokenizer.to_json(),
            n_vocab=self._model.interface.vocab_size,
            eos_token=list(self._model.package.manifest.token_ids.eos),
        )

    def close(self) -> None:
        """End all compilations, and begin no other."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for trial in list(self._running_trials.values()):
            trial.stop()
        while not self._idle_trials.empty():
            self._idle_trials.get().stop()


class GrammarGuide:
    """Writes the mask of each next token of an answer. It is the `allowed_tokens` of a request.

    The first mask is computed with the grammar. Each later mask depends on the token before it, and
    the step that samples the next token needs it, because the graph filters and draws by itself: so
    it is written between the two steps. llguidance releases Python's lock meanwhile, so an event
    loop goes on.
    """

    def __init__(self, compiled: CompiledGrammar, row: int = 0) -> None:
        """
        Args:
            compiled: the grammar of the answer.
            row: the row of the answer in its batch.
        """
        self._compiled = compiled
        self._row = row
        self._matcher: Any = None

    def __call__(self, step: Step | None, mask: Array) -> None:
        """Write the mask of the next token.

        Args:
            step: the step that sampled the last token; None before the first token.
            mask: [1, W] int32, the mask to write.
        """
        if step is None:
            mask[:] = self._compiled.mask
            return
        if self._matcher is None:
            self._matcher = self._compiled.matcher.deep_copy()
        if step.emitted[self._row] and step.status[self._row] == RUNNING:
            self._matcher.consume_token(int(step.tokens[self._row]))
            check_matcher(self._matcher)
            fill_mask(self._matcher, mask)


def _run_trials() -> None:
    """The process of a `Trial`. Each line of standard input is answered with a line: null, or the
    reason why the grammar is refused.

    The first line has the arguments of the tokenizer, and each other line a grammar, both in JSON.
    Invalid grammars pass, because the parent process reports them.
    """
    from llguidance import LLTokenizer

    arguments: TokenizerArguments = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(**arguments)
    print("null", flush=True)
    _limit_process()
    for line in sys.stdin:
        reason = None
        try:
            compile_grammar(Grammar(**json.loads(line)), tokenizer, arguments["n_vocab"])
        except ArgumentError:
            pass
        except MemoryError:
            reason = "it takes too much memory to compile; give a smaller one"
        except BaseException as error:  # llguidance's panics are no Exceptions.
            reason = f"it cannot be compiled: {error}"
        print(json.dumps(reason), flush=True)


def _limit_process() -> None:
    """Bound the memory and the stack of this process, on systems that can."""
    if sys.platform != "linux":
        return
    import resource

    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # There is no /proc.
        return
    max_bytes = used_bytes + _MAX_COMPILE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_STACK, (_MAX_STACK_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    _run_trials()
