"""A process of its own in which each grammar is compiled first, with limits.

llguidance, which is native code, overflows its stack on some schemas of 50 kB, which ends the process, and compiles
others for minutes or into gigabytes. A grammar that passes here costs the server no more than it did here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, TypedDict

from qsample.serve.grammar import compile_grammar
from qsample.serve.http import ApiError

SECONDS: Final = 10.0  # for a grammar
_MEMORY: Final = 256 << 20  # bytes, in addition to those of the tokenizer
_STACK: Final = 4 << 20  # bytes; the server's threads have twice as much


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
