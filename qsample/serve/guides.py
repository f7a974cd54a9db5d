"""Guides: they let answers follow their grammars, by llguidance's masks."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Final

from qsample.contract.arrays import Array
from qsample.runtime import CausalLM, Step
from qsample.serve.grammar import (
    Compiled,
    TokenizerArguments,
    Trial,
    check_matcher,
    compile_grammar,
    fill_mask,
    refused,
)
from qsample.serve.http import ApiError

_KEPT: Final = 64  # grammars
_THREADS: Final = 2  # that compile


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
        """A guide for an answer, compiled on another thread, once for simultaneous requests, for as long as one waits.
        Raises ApiError if the grammar is invalid, takes too much to compile, or no answer can follow it."""
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
        except (
            BaseException
        ):  # the next request tries again; a cancelled request leaves the work to the requests that wait
            failed = compiling.done() and (compiling.cancelled() or compiling.exception() is not None)
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
        return compile_grammar(grammar, self._llguidance_tokenizer(), self._model.interface.vocab_size)

    def _llguidance_tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        with self._reading:
            if self._tokenizer is None:
                try:
                    self._tokenizer = LLTokenizer(**self._tokenizer_arguments())
                except ValueError as error:
                    raise ApiError(400, f"this model's tokenizer cannot follow a grammar: {error!s:.200}") from None
            return self._tokenizer

    def _tokenizer_arguments(self) -> TokenizerArguments:
        assert self._model.tokenizer is not None  # see `ServedModel.guides`
        ends = list(self._model.package.manifest.token_ids.eos)
        return TokenizerArguments(
            tokenizer=self._model.tokenizer.to_json(), n_vocab=self._model.interface.vocab_size, eos_token=ends
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
    two steps. llguidance releases Python's lock meanwhile, so the event loop goes on.
    """

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self._matcher: Any = None

    def __call__(self, step: Step | None, mask: Array) -> None:
        if step is None:
            mask[:] = self._compiled.mask
            return
        if self._matcher is None:
            self._matcher = self._compiled.matcher.deep_copy()
        if step.emitted[0]:
            self._matcher.consume_token(int(step.tokens[0]))
            check_matcher(self._matcher)
            fill_mask(self._matcher, mask)
