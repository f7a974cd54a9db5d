"""Grammars: the form that an answer has to follow, as llguidance reads it, and its compilation.

Each grammar is compiled in another process first, with limits. llguidance is native code: it overflows its stack and
ends the process on some schemas of 50 kB, and compiles other schemas for minutes or into gigabytes. A grammar that
passes there costs the server no more than it did there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypedDict

import numpy as np

from qsample.contract.arrays import Array
from qsample.serve.http import ApiError

# The prefix of a grammar in GBNF: its translation takes long, so the compiling thread does it.
_GBNF: Final = "\0GBNF:"
# Blanks as json.dumps writes them. A model that may write any number of them may never stop doing so.
_JSON: Final[Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
SECONDS: Final = 10.0  # for a grammar
_MEMORY: Final = 256 << 20  # bytes, in addition to the tokenizer's
_STACK: Final = 4 << 20  # bytes; the server's threads have twice as much


class Form(NamedTuple):
    """The form that an answer has to follow.

    kind: "json_schema" (value: a schema, true for any JSON, or a schema's text), "regex" (value: an expression of
    Rust's regex crate, for the whole answer), "choice" (value: a list of texts), "grammar" (value: Lark's notation as
    llguidance reads it, or llama.cpp's GBNF), "call" or "calls" (value: name → schema of a function's arguments): a
    list of a single call, or of several.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar", "call", "calls"]
    value: Any


def grammar_of(form: Form) -> str:
    """The text of a form's grammar, for `Grammars.guide`. Needs llguidance.

    Raises ApiError if the form is invalid.
    """
    from llguidance import LLMatcher

    kind, value = form
    if kind == "regex":
        return _made(LLMatcher.grammar_from_regex, value)
    if kind == "grammar":
        return _GBNF + value if "::=" in value else _made(LLMatcher.grammar_from_lark, value)
    if kind == "choice":
        if "" in value:
            raise ApiError(400, "a choice is empty; give texts of at least a character")
        texts = (json.dumps(choice, ensure_ascii=False) for choice in value)
        return _made(LLMatcher.grammar_from_lark, "start: " + " | ".join(texts))
    if kind in ("call", "calls"):
        return _made(lambda: LLMatcher.grammar_from_lark(_list_of_calls(value, several=kind == "calls")))
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the schema is not valid JSON: {error}") from None
    if value is not True and not isinstance(value, dict):
        raise ApiError(400, f"the schema is {json.dumps(value):.60}; give an object, or true for any JSON")
    schema = {} if value is True else value
    return _made(lambda: LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_JSON))


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
        raise ApiError(400, f"the grammar is not valid GBNF: {error!s:.200}") from None
    return _made(LLMatcher.grammar_from_lark, lark)


def _made(make: Callable[..., str], *value: str) -> str:
    try:
        return make(*value)
    except (ValueError, RecursionError) as error:
        raise refused(str(error)) from None


def refused(reason: str) -> ApiError:
    """The error of a grammar that is invalid or too large."""
    text = " ".join(reason.split())
    return ApiError(400, f"no answer can follow that form: {text:.300}", code="invalid_grammar")


def compile_grammar(grammar: str, tokenizer: Any, vocab_size: int) -> Compiled:
    """Compile `grammar` (see `grammar_of`) for llguidance's `tokenizer`.

    Raises ApiError if the grammar is invalid, and if no answer can follow it.
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
    """Raise ApiError for an invalid grammar, and for a grammar that became too complex for llguidance on the way."""
    if matcher.is_error():
        raise refused(matcher.get_error())


class TokenizerArguments(TypedDict):
    """Of llguidance.LLTokenizer: the content of tokenizer.json, the model's vocabulary, ids of its stop tokens."""

    tokenizer: str
    n_vocab: int
    eos_token: list[int]


class Trial:
    """Tells whether grammars can be compiled, one at a time; its process begins with the first.

    Args:
        tokenizer: returns the arguments of the model's llguidance.LLTokenizer.
        seconds: that a grammar may take.
    """

    def __init__(self, tokenizer: Callable[[], TokenizerArguments], seconds: float = SECONDS) -> None:
        self._tokenizer = tokenizer
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None

    def refusal(self, grammar: str) -> str | None:
        """Why `grammar` cannot be compiled, and None if it can. Blocks for `seconds` at most, and a start of the
        process."""
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
        """End the process, and so the work on a grammar; the next grammar starts another. Callable from any thread."""
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


def _serve() -> None:
    """Answer each line of standard input, a grammar in JSON, with a line: null, or the reason why it is refused.

    Invalid grammars pass; the server reports them.
    """
    from llguidance import LLTokenizer

    arguments: TokenizerArguments = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(**arguments)
    print("null", flush=True)
    _limit()
    for line in sys.stdin:
        reason = None
        try:
            compile_grammar(json.loads(line), tokenizer, arguments["n_vocab"])
        except ApiError:
            pass
        except MemoryError:
            reason = "it takes too much memory to compile; give a smaller one"
        except BaseException as error:  # llguidance's panics, too
            reason = f"it cannot be compiled: {error}"
        print(json.dumps(reason), flush=True)


def _limit() -> None:
    """Bound the process's memory and stack, on systems that can."""
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):  # not Linux
        return
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    _serve()
