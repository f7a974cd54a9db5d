"""Forms of answers → tables for the graph, or else masks from the host. The results are cached.

A form is first compiled in another process, with limits. outlines_core and llguidance are native
code: on some forms of 50 kB they overflow the stack and end the process, and they compile other
forms for minutes or into gigabytes. Tables are taken from that process; a grammar for masks that
passes there costs this process no more than it did there.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from queue import SimpleQueue
from typing import Any, Final

from qsample.contract.interface import Interface
from qsample.errors import ArgumentError
from qsample.limited_process import (
    Ask,
    LimitedProcess,
    Message,
    ProcessEndedError,
    answer_message,
    limit_memory,
    next_message,
)
from qsample.request.grammar import (
    CompiledGrammar,
    Form,
    GrammarTokenizer,
    InvalidGrammarError,
    TokenizerArguments,
    compile_grammar,
    grammar_of,
    invalid_grammar,
)
from qsample.request.structured.automaton import Thoughts, automaton_of, with_thoughts
from qsample.request.structured.expression import expression_of
from qsample.request.structured.not_regular import NotRegularError
from qsample.request.structured.tables import TokenGrammar, token_grammar
from qsample.request.structured.vocabulary import TokenVocabulary
from qsample.request.text.tokenizer import Tokenizer

MAX_CACHED_FORMS: Final = 64
# The tables of these forms together. The newest form is cached whatever its size.
MAX_CACHED_TABLE_BYTES: Final = 128 << 20
_NUM_COMPILING_THREADS: Final = 2
MAX_COMPILE_SECONDS: Final = 10.0
# The memory that a compilation may take in addition to the tokenizer's.
_MAX_COMPILE_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Wish:
    """What an answer has to look like.

    Attributes:
        form: the form of the answer, after its thoughts; None for any text.
        thoughts: the thoughts before it; None for an answer without thoughts.
    """

    form: Form | None
    thoughts: Thoughts | None = None

    @property
    def key(self) -> str:
        """A text that is equal for equal wishes. The order of a schema's properties counts. Raises
        InvalidGrammarError for a form that is nested too deep."""
        try:
            return json.dumps([self.form, self.thoughts])
        except RecursionError:
            raise invalid_grammar("it is nested too deep; give a flatter one") from None

    @classmethod
    def of_key(cls, key: str) -> Wish:
        """The wish with a key."""
        form, thoughts = json.loads(key)
        return cls(
            form=None if form is None else Form(*form),
            thoughts=None if thoughts is None else Thoughts(*thoughts),
        )


@dataclass(frozen=True, slots=True)
class PreparedForm:
    """The form of an answer, compiled for a model. Either attribute is None.

    Attributes:
        tables: the tables that the graph follows.
        masks: the grammar by which the host writes the mask of each token.
    """

    tables: TokenGrammar | None
    masks: CompiledGrammar | None

    @property
    def table_bytes(self) -> int:
        """The size of the tables; 0 without."""
        if self.tables is None:
            return 0
        return self.tables.transitions.nbytes + self.tables.classes.nbytes

    @property
    def grammar(self) -> TokenGrammar | CompiledGrammar:
        """The argument of `CausalLM.generate` or `Engine.add_request`."""
        if self.tables is not None:
            return self.tables
        assert self.masks is not None
        return self.masks


def make_tables(wish: Wish, vocabulary: TokenVocabulary) -> TokenGrammar:
    """The tables of a form.

    Raises:
        NotRegularError: no finite automaton follows the form.
        ArgumentError: the form is invalid, or no answer can follow it.
    """
    automaton = None if wish.form is None else automaton_of(expression_of(wish.form))
    if wish.thoughts is not None:
        automaton = with_thoughts(automaton, wish.thoughts)
    assert automaton is not None
    return token_grammar(automaton, vocabulary)


class Trial:
    """Compiles forms, one at a time, in a process that starts with the first form."""

    def __init__(
        self,
        tokenizer_arguments: Callable[[], TokenizerArguments],
        max_seconds: float = MAX_COMPILE_SECONDS,
    ) -> None:
        """
        Args:
            tokenizer_arguments: a function that returns the arguments of the model's tokenizer.
            max_seconds: the time that a form may take.
        """
        self._tokenizer_arguments = tokenizer_arguments
        self._process = LimitedProcess(__name__, max_seconds, self._give_tokenizer)

    def tables(self, wish: Wish) -> TokenGrammar:
        """The tables of a form. It blocks for at most `max_seconds`, and while the process starts.

        Raises:
            NotRegularError: no finite automaton follows the form.
            InvalidGrammarError: the form is invalid or takes too much to compile, or no answer can
                follow it.
        """
        answer = self._answer({"tables": wish.key})
        if answer.parts:
            return TokenGrammar.from_bytes(bytes(answer.parts[0]))
        if "not_regular" in answer.fields:
            raise NotRegularError(answer.fields["not_regular"])
        raise InvalidGrammarError(answer.fields["error"])

    def check_masks(self, form: Form) -> None:
        """Raise InvalidGrammarError if llguidance cannot compile a form within the limits. Errors of
        the form itself pass, because this process finds them, too."""
        answer = self._answer({"masks": Wish(form).key})
        if "error" in answer.fields:
            raise InvalidGrammarError(answer.fields["error"])

    def stop(self) -> None:
        """End the process and its work on a form. The next form starts another process. Any thread
        may call this."""
        self._process.stop()

    def _give_tokenizer(self, ask: Ask) -> None:
        """Give a process its tokenizer. Raises ArgumentError for a tokenizer that it cannot use."""
        answer = ask(Message(self._tokenizer_arguments()))
        if "error" in answer.fields:
            raise ArgumentError(answer.fields["error"])

    def _answer(self, fields: dict[str, str]) -> Message:
        """The answer of the process; an error if the process ends. Raises ArgumentError for a
        tokenizer that it cannot use."""
        try:
            return self._process.ask(Message(fields))
        except ProcessEndedError as ended:
            reason = "it is too large or nested too deep to compile; give a smaller one"
            if ended.is_late:
                reason = (
                    f"it takes more than {self._process.max_seconds:g} seconds to compile; "
                    "give a smaller one"
                )
            return Message({"error": str(invalid_grammar(reason))})


class Grammars:
    """The compiled forms of a model. The most recent ones are cached."""

    def __init__(self, interface: Interface, tokenizer: Tokenizer | None) -> None:
        """
        Args:
            interface: the interface of the package.
            tokenizer: the tokenizer of the package; None without one, and then no form compiles.
        """
        self._interface = interface
        self._model_tokenizer = tokenizer
        self._tokenizer: GrammarTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        # The key of a wish → its compilation.
        self._cache: OrderedDict[str, asyncio.Future[PreparedForm]] = OrderedDict()
        self._num_waiting: Counter[str] = Counter()
        self._running_trials: dict[str, Trial] = {}
        self._idle_trials: SimpleQueue[Trial] = SimpleQueue()
        for _ in range(_NUM_COMPILING_THREADS):
            self._idle_trials.put(Trial(self._tokenizer_arguments))
        # The pool of asyncio.to_thread encodes prompts, and slow forms must not delay them.
        self._threads = ThreadPoolExecutor(
            _NUM_COMPILING_THREADS, thread_name_prefix="qsample-grammar"
        )

    async def prepare(self, wish: Wish) -> PreparedForm:
        """Compile a form, with limits, on another thread: once for simultaneous requests, as long as
        one of them waits.

        Raises:
            ArgumentError: the form is invalid or takes too much to compile, no answer can follow
                it, or the package takes no answers of that kind.
        """
        key = wish.key
        compiling = self._compiling(key)
        self._num_waiting[key] += 1
        try:
            prepared = await asyncio.shield(compiling)  # Another request may wait for it.
        except BaseException:
            self._give_up(key, compiling)
            raise
        finally:
            self._num_waiting[key] -= 1
            if self._num_waiting[key] == 0:
                del self._num_waiting[key]
        self._trim_cache()
        return prepared

    def _trim_cache(self) -> None:
        """Forget the forms that were used longest ago, if there are too many, or too large ones.
        Compilations go on, because a second one of the same form would only take more time."""
        num_bytes = 0
        for place, (key, compiling) in enumerate(reversed(list(self._cache.items()))):
            if not compiling.done():
                continue
            if not compiling.cancelled() and compiling.exception() is None:
                num_bytes += compiling.result().table_bytes
            if place >= MAX_CACHED_FORMS or (place != 0 and num_bytes > MAX_CACHED_TABLE_BYTES):
                del self._cache[key]

    def _compiling(self, key: str) -> asyncio.Future[PreparedForm]:
        """The compilation of a wish, from the cache or begun now."""
        compiling = self._cache.get(key)
        if compiling is None:
            loop = asyncio.get_running_loop()
            compiling = loop.run_in_executor(self._threads, self._prepare_within_limits, key)
            self._cache[key] = compiling
        self._cache.move_to_end(key)
        self._trim_cache()
        return compiling

    def _give_up(self, key: str, compiling: asyncio.Future[PreparedForm]) -> None:
        """Forget a compilation that failed, so that the next request tries again, and stop a
        compilation for which no other request waits."""
        if compiling.done():
            if not compiling.cancelled() and compiling.exception() is None:
                return
        elif self._num_waiting[key] > 1:
            return
        if self._cache.get(key) is compiling:
            del self._cache[key]
        if not compiling.done():
            compiling.cancel()
            trial = self._running_trials.get(key)
            if trial is not None:
                trial.stop()

    def _prepare_within_limits(self, key: str) -> PreparedForm:
        wish = Wish.of_key(key)
        trial = self._idle_trials.get()
        try:
            self._running_trials[key] = trial
            return self._prepared(wish, trial.tables, trial.check_masks)
        finally:
            del self._running_trials[key]
            self._idle_trials.put(trial)

    def prepared(self, wish: Wish) -> PreparedForm:
        """Compile a form on this thread and without limits, for a user of this machine.

        Raises:
            ArgumentError: the form is invalid, no answer can follow it, or the package takes no
                answers of that kind.
        """
        return self._prepared(wish, self.tables, lambda form: None)

    def tables(self, wish: Wish) -> TokenGrammar:
        """The tables of a form, made on this thread and without limits.

        Raises:
            NotRegularError: no finite automaton follows the form.
            ArgumentError: the form is invalid, or no answer can follow it.
        """
        return make_tables(wish, self._vocabulary)

    def _prepared(
        self,
        wish: Wish,
        make: Callable[[Wish], TokenGrammar],
        check_masks: Callable[[Form], None],
    ) -> PreparedForm:
        """The tables of a form if the package takes tables and the form is regular, else masks.

        Args:
            wish: the form and its thoughts.
            make: makes tables, and raises NotRegularError.
            check_masks: raises ArgumentError for a form that llguidance must not compile here.
        """
        features = self._interface.features
        reason = "the package was exported without grammars"
        if features.grammars:
            try:
                return PreparedForm(tables=make(wish), masks=None)
            except NotRegularError as error:
                reason = str(error)
        if wish.form is None or not features.allowed_tokens:
            remedy = "--grammars" if wish.form is None else "--for-serving"
            raise ArgumentError(
                f"answers of this package cannot follow that form: {reason}; export the model with "
                f"{remedy}, or give a form that docs/structured-outputs.md lists"
            )
        check_masks(wish.form)
        masks = compile_grammar(grammar_of(wish.form), self.tokenizer)
        return PreparedForm(tables=None, masks=masks)

    @property
    def tokenizer(self) -> GrammarTokenizer:
        """The tokenizer of the package in llguidance. Raises ArgumentError."""
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = GrammarTokenizer.of(self._tokenizer_arguments())
            return self._tokenizer

    @cached_property
    def _vocabulary(self) -> TokenVocabulary:
        return TokenVocabulary.of(self.tokenizer)

    def _tokenizer_arguments(self) -> TokenizerArguments:
        if self._model_tokenizer is None:
            raise ArgumentError(
                "the package has no tokenizer, by which an answer follows a form; export the model "
                "with its tokenizer"
            )
        return TokenizerArguments(
            tokenizer=self._model_tokenizer.to_json(), vocab_size=self._interface.vocab_size
        )

    def close(self) -> None:
        """End all compilations, and begin no other."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for trial in list(self._running_trials.values()):
            trial.stop()
        while not self._idle_trials.empty():
            self._idle_trials.get().stop()


def _run_trials() -> None:
    """The process of a `Trial`.

    The first message has the arguments of the tokenizer, and its answer may be an error. Each other
    message has the key of a wish, under "tables" or "masks".
    """
    first = next_message()
    assert first is not None
    arguments: Any = first.fields
    try:
        tokenizer = GrammarTokenizer.of(arguments)
        vocabulary = TokenVocabulary.of(tokenizer)
    except ArgumentError as error:
        answer_message(Message({"error": str(error)}))
        return
    answer_message(Message({}))
    limit_memory(_MAX_COMPILE_BYTES)
    while (message := next_message()) is not None:
        answer_message(_trial_answer(message.fields, tokenizer, vocabulary))


def _trial_answer(
    message: Mapping[str, str], tokenizer: GrammarTokenizer, vocabulary: TokenVocabulary
) -> Message:
    """The answer to a message of the parent process."""
    try:
        if "tables" in message:
            tables = make_tables(Wish.of_key(message["tables"]), vocabulary)
            return Message({}, [tables.to_bytes()])
        form = Wish.of_key(message["masks"]).form
        assert form is not None
        compile_grammar(grammar_of(form), tokenizer)
    except NotRegularError as error:
        return Message({"not_regular": error.reason})
    except ArgumentError as error:
        # The parent process finds the errors of masks by itself.
        return Message({"error": str(error)} if "tables" in message else {})
    except MemoryError:
        reason = "it takes too much memory to compile; give a smaller one"
        return Message({"error": str(invalid_grammar(reason))})
    except BaseException as error:  # Panics of native code are no Exceptions.
        return Message({"error": str(invalid_grammar(f"it cannot be compiled: {error}"))})
    return Message({})


if __name__ == "__main__":
    _run_trials()
