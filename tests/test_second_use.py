"""Objects of the public API are used again and again with other values: each result is that of a new object.

After each use comes every use, so also the same: longer inputs after shorter ones and the other way round, a row after
a batch, and anything after an error, a cancellation, a stop string and a full context.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import io
import string
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qsample
from qsample.cli.chat import Conversation
from qsample.images.processing import ImageProcessor
from qsample.package.package import Package
from qsample.request.structured.tables import TokenGrammar
from qsample.request.text.generated_text import GeneratedText, IncrementalDecoder, StopStrings
from qsample.request.text.tokenizer import Tokenizer
from qsample.runtime import CausalLM, Engine, Request, SamplingParams, TextStreamer, load
from tests.helpers.fake_graphs import GUESSING_CAPACITY
from tests.helpers.fake_images import AXIAL, ROWS, picture, placeholders
from tests.helpers.fake_package import MAX_POSITIONS, POISON, VOCAB
from tests.test_reference import NAMES, ROOMS, public

FREE = SamplingParams(temperature=0.9, max_new_tokens=12, eos_token_id=())
GREEDY = SamplingParams(temperature=0, max_new_tokens=9, eos_token_id=())
PENALISED = SamplingParams(
    temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.4, max_new_tokens=7
)
# Some of these are soon in any text of random bytes.
STOPS = list(string.ascii_letters[::2])
MESSAGES = [{"role": "user", "content": "hello"}]
Use = Callable[[Any], Any]


@dataclass(frozen=True)
class Fakes:
    """Fake packages, and models of them.

    Attributes:
        package: makes a fake package of some features.
        model: makes a new model of such a package, with a `ctx_len` if one is given.
    """

    package: Callable[..., Package]
    model: Callable[..., CausalLM]


@pytest.fixture(params=["sessions", pytest.param("packages", marks=pytest.mark.ci)])
def fakes(
    request: pytest.FixtureRequest,
    fake: Callable[..., Package],
    fake_model: Callable[..., CausalLM],
) -> Fakes:
    """Whose new models share the sessions of ONNX Runtime, or load the package anew, which takes longer."""

    def model(ctx_len: int | None = None, **options: Any) -> CausalLM:
        guesses = "num_speculative_tokens" in options
        length = GUESSING_CAPACITY if guesses else ctx_len
        if request.param == "sessions":
            shared = fake_model(**options)
            return CausalLM(shared.package, shared.sessions, length)
        return load(fake(**options).path, ctx_len=length, batch_invariant=not guesses)

    return Fakes(fake, model)


@dataclass(frozen=True)
class Subject:
    """An object that can be used twice.

    Attributes:
        kinds: the classes whose objects are used.
        make: makes a new object; the stack closes it.
        uses: what is done with it, by name. A result, or the error, has to be that of a new object.
    """

    kinds: tuple[type, ...]
    make: Callable[[Fakes, ExitStack], Any]
    uses: Mapping[str, Use]


def outcome(use: Use, subject: Any) -> Any:
    """What a use returns, or its error, in plain values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return plain(use(subject))
        except (Exception, KeyboardInterrupt) as error:
            return type(error).__name__, str(error)


def plain(value: Any) -> Any:
    """`value` in types that compare with `==`, without measured times."""
    if is_dataclass(value) and not isinstance(value, type):
        names = (one.name for one in fields(value) if "tim" not in one.name)
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, np.ndarray):
        return value.shape, str(value.dtype), value.tobytes()
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


def after(count: int, then: Callable[..., Any]) -> Callable[..., Any]:
    """A criterion that goes on `count` times, then calls `then`."""
    calls = iter(range(count))
    return lambda ids, scores: False if next(calls, None) is not None else then()


def generated(*given: Any, **options: Any) -> Use:
    """A use of a model."""

    def use(model: Any) -> Any:
        output = model.generate(*given, **options)
        scores = [getattr(output, name, None) for name in ("logprobs", "top_logprobs")]
        return output.token_ids, output.texts, output.finish_reasons, plain(scores)

    return use


PROMPT, OTHER = [5, 6, 7], [9, 200, 31, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
TEXTS: dict[str, Use] = {
    "short": generated([77], GREEDY),
    "long": generated(OTHER * 6, FREE, seed=3),
    "two": generated([PROMPT, OTHER], [PENALISED, FREE], seed=5),
    "its beginning": generated(OTHER, GREEDY, prefill_chunk_size=3),
    "stop string": generated(PROMPT, FREE, seed=4, stop_strings=STOPS),
    "full context": generated([8] * (MAX_POSITIONS - 9), temperature=0, eos_token_id=(), seed=0),
    "too long": generated([5] * (MAX_POSITIONS + 1)),
    "wrong value": generated(PROMPT, temperature=-1),
    "no numbers": generated([PROMPT, [5, POISON]], FREE, seed=1),
    "interrupted": lambda model: model.generate(
        [PROMPT, OTHER], FREE, seed=1, stopping_criteria=after(3, interrupt)
    ),
    "criterion": lambda model: generated(
        PROMPT, FREE, seed=2, stopping_criteria=after(3, lambda: True)
    )(model),
    "chat": generated(MESSAGES, FREE, seed=6),
}


def only(*names: str) -> dict[str, Use]:
    return {name: TEXTS[name] for name in names}


def loaded(**options: Any) -> Callable[[Fakes, ExitStack], CausalLM]:
    return lambda fakes, stack: fakes.model(**options)


def one_odd(step: Any, mask: np.ndarray) -> None:
    """Forbids the last token."""
    mask[:] = -1
    if step is not None:
        for row, token in enumerate(step.tokens):
            mask[row, token // 32] &= ~np.int32(1 << (token % 32)) if token % 32 < 31 else 2**31 - 1


def allowed(*tokens: int) -> np.ndarray:
    mask = np.zeros(-(-VOCAB // 32), np.uint32)
    for token in tokens:
        mask[token // 32] |= np.uint32(1) << np.uint32(token % 32)
    return mask.view(np.int32)


SMALL, LARGE = picture(8, 8), picture(16, 12, seed=1)
IMAGE_PROMPT = [1, 5, *placeholders(4), 20]
TWO_IMAGES = [1, *placeholders(12), 40, *placeholders(4), 41]
IMAGES: dict[str, Use] = {
    "image": generated(IMAGE_PROMPT, GREEDY, images=[SMALL]),
    "other image": generated(IMAGE_PROMPT, FREE, images=[picture(8, 8, seed=2)], seed=1),
    "two images": generated(TWO_IMAGES, FREE, images=[LARGE, SMALL], seed=2),
    "batch": generated(
        [IMAGE_PROMPT, PROMPT, TWO_IMAGES], GREEDY, images=[SMALL, [], [LARGE, SMALL]]
    ),
    "text": generated(PROMPT, FREE, seed=3),
    "too few": generated(TWO_IMAGES, GREEDY, images=[SMALL]),
}


# Requests of an engine.


def asked(*given: Any, **options: Any) -> Use:
    """A request, or several, of which the results are waited for."""

    def use(engine: Engine) -> Any:
        requests = engine.add_requests(*given, **options)
        results = [request.result(60) for request in requests]
        return [(one.token_ids, one.text, one.finish_reason) for one in results]

    return use


def cancelled(engine: Engine) -> Any:
    request = engine.add_request(PROMPT, temperature=0.9, max_new_tokens=200, eos_token_id=())
    next(iter(request))
    request.cancel()
    return request.result(60).finish_reason


def abandoned(engine: Engine) -> Any:
    request = engine.add_request(OTHER, temperature=0.9, max_new_tokens=200, eos_token_id=())
    reader = iter(request)
    next(reader)
    reader.close()  # type: ignore[attr-defined]
    return request.result(60).finish_reason


ENGINE: dict[str, Use] = {
    "short": asked([77], GREEDY),
    "long": asked(OTHER * 6, FREE, seed=3),
    "two": asked(PROMPT, FREE, seed=5, num_return_sequences=2),
    "its beginning": asked(OTHER, GREEDY),
    "stop string": asked(PROMPT, FREE, seed=4, stop_strings=STOPS),
    "full context": asked([8] * (MAX_POSITIONS - 9), temperature=0, eos_token_id=()),
    "too long": asked([5] * (MAX_POSITIONS + 1)),
    "wrong value": asked(PROMPT, temperature=-1),
    "no numbers": asked([5, POISON], FREE, seed=1),
    "cancelled": cancelled,
    "abandoned": abandoned,
    "no time": lambda engine: (
        engine.add_request(PROMPT, FREE, max_time=1e-9).result(60).finish_reason
    ),
    "map": lambda engine: [one.token_ids for one in engine.map([PROMPT, OTHER], GREEDY)],
}


def make_engine(**options: Any) -> Callable[[Fakes, ExitStack], Engine]:
    def make(fakes: Fakes, stack: ExitStack) -> Engine:
        return stack.enter_context(Engine(fakes.model(**options), slots=2))

    return make


def make_request(fakes: Fakes, stack: ExitStack) -> Request:
    engine = stack.enter_context(Engine(fakes.model(), slots=1))
    return engine.add_request(PROMPT, FREE, seed=4, stop_strings=["zz"])


async def deltas_of(request: Request) -> list[Any]:
    return [delta async for delta in request]


REQUEST: dict[str, Use] = {
    "deltas": lambda request: [token for delta in request for token in delta.token_ids],
    "text": lambda request: "".join(delta.text or "" for delta in request),
    "async": lambda request: [
        token for delta in asyncio.run(deltas_of(request)) for token in delta.token_ids
    ],
    "some": lambda request: next(iter(request)).token_ids[:1],
    "result": lambda request: request.result(60),
    "cancel": lambda request: request.result(60) and request.cancel(),
}


def add_call(**options: Any) -> Use:
    def use(made: tuple[CausalLM, Any]) -> Any:
        model, call = made
        with Engine(model, slots=2) as engine:
            results = [one.result(60) for one in engine.add(call, **options)]
        return [(one.token_ids, one.text, one.finish_reason) for one in results]

    return use


def make_call(fakes: Fakes, stack: ExitStack) -> Any:
    model = fakes.model(allowed_tokens=True)
    return model, model.read(PROMPT, FREE, seed=3, num_return_sequences=2, allowed_tokens=one_odd)


# Texts.


@dataclass
class Written:
    """A streamer, and what it writes."""

    model: CausalLM
    streamer: TextStreamer
    file: io.StringIO

    def since(self, use: Callable[[], Any]) -> str:
        start = len(self.file.getvalue())
        use()
        return self.file.getvalue()[start:]


def make_streamer(**options: Any) -> Callable[[Fakes, ExitStack], Written]:
    def make(fakes: Fakes, stack: ExitStack) -> Written:
        model, file = fakes.model(), io.StringIO()
        return Written(model, TextStreamer(model.tokenizer, file, **options), file)

    return make


def streamed(*given: Any, **options: Any) -> Use:
    def use(made: Written) -> str:
        return made.since(lambda: made.model.generate(*given, streamer=made.streamer, **options))

    return use


def given_up(made: Written) -> str:
    """The text of a call that ends with an error."""

    def call() -> None:
        with pytest.raises(KeyboardInterrupt):
            made.model.generate(
                OTHER, FREE, seed=1, streamer=made.streamer, stopping_criteria=after(3, interrupt)
            )

    return made.since(call)


def put(*values: Sequence[int]) -> Use:
    def use(made: Written) -> str:
        def call() -> None:
            for tokens in values:
                made.streamer.put(np.array(tokens))
            made.streamer.end()

        return made.since(call)

    return use


STREAMER: dict[str, Use] = {
    "short": streamed([77], GREEDY),
    "long": streamed(OTHER, FREE, seed=3),
    "another": streamed(PROMPT, FREE, seed=4),
    "stops": put([70, 71], [72], [68], [69], [70], [71]),
    "begins to stop": put([70, 71], [72], [68]),
    "half a character": put([70, 71], [72], [130 + 68]),
    "nothing": put(),
    "a prompt alone": put([70, 71]),
    "given up": given_up,
    "several rows": lambda made: made.model.generate([PROMPT, OTHER], streamer=made.streamer),
}


def decoded(*tokens: int) -> Use:
    """What a decoder makes of the tokens; it is used up by its end, and another is made of the same tokenizer."""

    def use(tokenizer: Tokenizer) -> Any:
        decoder = IncrementalDecoder(tokenizer, (70, 71))
        stops = StopStrings(["ab", "c"])
        return (
            [stops.put(decoder.put(token)) for token in tokens],
            stops.put(decoder.end()),
            stops.end(),
        )

    return use


def given_text(tokenizer: Tokenizer) -> Any:
    text = GeneratedText(tokenizer, (70, 71), stop_strings=["cd"])
    return [text.put(token) for token in (70, 200, 71)], text.end()


def with_template(tokenizer: Tokenizer) -> Any:
    return tokenizer.apply_chat_template(
        MESSAGES, chat_template="{{ messages[0].content }}{{ x }}", tokenize=False, x="!"
    )


TOKENIZER: dict[str, Use] = {
    "short": lambda tokenizer: tokenizer.encode("a"),
    "long": lambda tokenizer: tokenizer.encode("In the beginning é" * 9, add_special_tokens=False),
    "empty": lambda tokenizer: tokenizer.encode(""),
    "tokens": lambda tokenizer: tokenizer.decode([70, 1, 71], skip_special_tokens=False),
    "no special tokens": lambda tokenizer: tokenizer.decode([70, 1, 71]),
    "wrong tokens": lambda tokenizer: tokenizer.decode(["a"]),
    "chat": lambda tokenizer: tokenizer.encode_chat(MESSAGES),
    "text of a chat": lambda tokenizer: tokenizer.apply_chat_template(MESSAGES, tokenize=False),
    "another template": with_template,
    "wrong chat": lambda tokenizer: tokenizer.encode_chat([{"role": "user"}]),
    "batch": lambda tokenizer: tokenizer(["a", "bcd"]),
    "row": lambda tokenizer: tokenizer("a"),
    "stopped": decoded(70, 68, 69, 70),
    "half a character": decoded(70, 198),
    "text": given_text,
}


def make_tokenizer(fakes: Fakes, stack: ExitStack) -> Any:
    return Tokenizer.of(fakes.package())


# Chats, images, tables, functions.


def make_conversation(fakes: Fakes, stack: ExitStack) -> Conversation:
    model = fakes.model(128)
    engine = stack.enter_context(Engine(model, slots=1))
    return Conversation(model, engine, {"seed": 3, "max_new_tokens": 9}, {})


def said(*texts: str | None, messages: Sequence[Any] = MESSAGES) -> Use:
    """A conversation that begins with `messages`, and what is answered; None for another answer."""

    def use(conversation: Conversation) -> Any:
        conversation.start_with(list(messages))
        shown: list[str] = []
        for text in texts:
            conversation.ask(text, shown.append)
        return "".join(shown), conversation.messages, conversation.forgotten, conversation.retries

    return use


def interrupted_chat(conversation: Conversation) -> Any:
    """ctrl-C before an answer has a text."""
    conversation.start_with(list(MESSAGES))
    add_request = conversation.engine.add_request
    conversation.engine.add_request = interrupt  # type: ignore[method-assign]
    try:
        conversation.ask("more", interrupt)
    finally:
        conversation.engine.add_request = add_request  # type: ignore[method-assign]


CONVERSATION: dict[str, Use] = {
    "an answer": said(None),
    "a system prompt": said("and", messages=[{"role": "system", "content": "S"}, *MESSAGES]),
    "again": said("and", None, None),
    "full context": said("a" * 30, "b" * 30, "c" * 30, "d" * 30, None),
    "too long": said("x" * 300),
    "interrupted": interrupted_chat,
}
IMAGE: dict[str, Use] = {
    "small": lambda processor: processor.process(SMALL),
    "large": lambda processor: processor.process(LARGE),
    "wrong": lambda processor: processor.process(b"none"),
    "prompt": lambda processor: processor.prompt(
        TWO_IMAGES, [processor.process(LARGE), processor.process(SMALL)]
    ),
    "too few": lambda processor: processor.prompt(TWO_IMAGES, [processor.process(SMALL)]),
    "text": lambda processor: processor.expand("<image>!", [processor.process(LARGE)]),
    "layout": lambda processor: processor.layout(8, 16),
}
GRAMMAR: dict[str, Use] = {
    "over": lambda grammar: grammar.is_over([5, 6], 3, 2**31 - 1),
    "not over": lambda grammar: grammar.is_over([], 9, 1),
    "without stop": lambda grammar: grammar.without_stop,
    "itself": lambda grammar: (grammar, grammar.shortest, grammar.has_thoughts),
}


def opened(**options: Any) -> Use:
    def use(made: tuple[Any, Fakes]) -> Any:
        kind, fakes = made
        return generated(PROMPT, GREEDY)(kind.from_pretrained(fakes.package(**options).path))

    return use


AUTO_MODEL: dict[str, Use] = {
    "plain": opened(),
    "with features": opened(logprobs=True),
    "missing": lambda made: made[0].from_pretrained("/nowhere/at/all", local_files_only=True),
}


def make_packaged(fakes: Fakes, stack: ExitStack) -> Any:
    return qsample.AutoModelForCausalLM.from_pretrained(fakes.package().path)


def auto(kind: Any) -> Callable[[Fakes, ExitStack], Any]:
    return lambda fakes, stack: (kind, fakes)


def classes_of_models() -> tuple[type, ...]:
    from qsample.models.model import PackagedModel

    return (PackagedModel,)


MASKS: dict[str, Use] = {
    "function": generated([PROMPT, OTHER], FREE, seed=1, allowed_tokens=one_odd),
    "mask": generated(PROMPT, FREE, seed=1, allowed_tokens=allowed(3, 40, 64, 319, VOCAB - 1)),
    "masks": generated(
        [PROMPT, OTHER], GREEDY, allowed_tokens=np.stack([allowed(31), allowed(32)])
    ),
    "none": generated([PROMPT, OTHER], FREE, seed=1),
    "bias": generated(PROMPT, FREE, seed=1, logit_bias={63: 30.0, 64: 29.0}),
    "no token": generated(PROMPT, FREE, seed=1, allowed_tokens=allowed()),
}
SCORES: dict[str, Use] = {
    **only("short", "two", "stop string", "no numbers"),
    "some outputs": generated(PROMPT, FREE, seed=1, outputs=["logprobs"]),
    "no outputs": generated(PROMPT, FREE, seed=1, outputs=[]),
}
GUESSES: dict[str, Use] = {
    "lookup": generated([5, 6, 7] * 5, GREEDY, prompt_lookup_num_tokens=4),
    "few": generated([5, 6, 7] * 5, GREEDY, prompt_lookup_num_tokens=1),
    "prediction": generated(PROMPT, GREEDY, prediction=[5, 6, 7, 5, 6, 7]),
    "plain": generated(OTHER, GREEDY),
    "two": generated([PROMPT, [8] * 20], FREE, seed=2, prompt_lookup_num_tokens=4),
}
HOST: dict[str, Use] = {
    "processor": lambda model: generated(
        PROMPT, FREE, seed=1, logits_processor=lambda ids, scores: -scores
    )(model),
    "failing processor": generated([PROMPT, OTHER], FREE, seed=1, logits_processor=interrupt),
    **only("short", "two", "criterion", "no numbers"),
}
SUBJECTS: dict[str, Subject] = {
    "model": Subject((CausalLM,), loaded(), TEXTS),
    "model compiled for two": Subject(
        (CausalLM,),
        lambda fakes, stack: fakes.model(compilation=compiled()),
        {
            **only("short", "two", "its beginning", "stop string", "interrupted", "no numbers"),
            "five": generated([PROMPT, OTHER, [8], [9] * 5, [10]], FREE, seed=1),
        },
    ),
    "masks": Subject((CausalLM,), loaded(allowed_tokens=True, logit_bias=True), MASKS),
    "log-probabilities": Subject((CausalLM,), loaded(logprobs=True, top_logprobs=3), SCORES),
    "sampler on the host": Subject((CausalLM,), loaded(sampler=False), HOST),
    "guesses": Subject(
        (CausalLM,),
        loaded(num_speculative_tokens=4),
        GUESSES,
    ),
    "images": Subject((CausalLM,), loaded(image=ROWS), IMAGES),
    "images with three axes": Subject((CausalLM,), loaded(image=AXIAL), IMAGES),
    "engine": Subject((Engine,), make_engine(), ENGINE),
    "request": Subject((Request,), make_request, REQUEST),
    "call": Subject(
        (qsample.runtime.Call,),  # type: ignore[attr-defined]
        make_call,
        {
            "once": add_call(),
            "priority": add_call(priority=3),
            "prepared": lambda made: len(made[0].prepare(made[1])[0]),
        },
    ),
    "streamer": Subject((TextStreamer,), make_streamer(), STREAMER),
    "streamer that stops": Subject(
        (TextStreamer,), make_streamer(stop_strings=["ab", "cd"], skip_prompt=True), STREAMER
    ),
    "tokenizer": Subject(
        (Tokenizer, IncrementalDecoder, StopStrings, GeneratedText), make_tokenizer, TOKENIZER
    ),
    "chat": Subject((Conversation,), make_conversation, CONVERSATION),
    "image processor": Subject(
        (ImageProcessor,), lambda fakes, stack: ImageProcessor.of(fakes.package(image=AXIAL)), IMAGE
    ),
    "grammar": Subject(
        (TokenGrammar,), lambda fakes, stack: TokenGrammar.of_tokens([5, 6, 70], 80), GRAMMAR
    ),
    "packaged model": Subject(
        classes_of_models(), make_packaged, only("short", "two", "too long", "stop string", "chat")
    ),
    "auto model": Subject(
        (qsample.AutoModelForCausalLM, qsample.AutoModelForImageTextToText),
        auto(qsample.AutoModelForCausalLM),
        AUTO_MODEL,
    ),
}


def compiled() -> Any:
    from tests.helpers.fake_package import compilation

    return compilation(ctx_len=MAX_POSITIONS)


def there_and_back(names: Sequence[str]) -> Iterator[str]:
    """Each name after itself, after the one before it and after the one behind it."""
    for name in names:
        yield name
        yield name
    yield from reversed(names)


def every_pair(names: Sequence[str]) -> Iterator[str]:
    """Names such that each comes directly after each, itself included."""
    for index, name in enumerate(names):
        yield name
        yield name
        for other in names[index + 1 :]:
            yield other
            yield name


# They open packages, which takes longer.
SLOW_SUBJECTS = {"packaged model", "auto model"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.ci) if name in SLOW_SUBJECTS else name
        for name in SUBJECTS
    ],
)
@pytest.mark.parametrize(
    "order",
    [there_and_back, pytest.param(every_pair, marks=pytest.mark.slow)],
    ids=lambda one: one.__name__,
)
def test_each_use_after_others(
    order: Callable[[Sequence[str]], Iterator[str]], name: str, fakes: Fakes
) -> None:
    subject = SUBJECTS[name]
    check(subject.uses, lambda stack: subject.make(fakes, stack), order)


def check(
    uses: Mapping[str, Use],
    make: Callable[[ExitStack], Any],
    order: Callable[[Sequence[str]], Iterator[str]],
) -> None:
    """Use an object in an order, and compare each result with that of a new object."""
    wanted = {}
    for name, use in uses.items():
        with ExitStack() as stack:
            wanted[name] = outcome(use, make(stack))
    assert len({repr(one) for one in wanted.values()}) > 1, "all uses give the same"
    with ExitStack() as stack:
        used = make(stack)
        before = "nothing"
        for name in order(list(uses)):
            assert (before, name, outcome(uses[name], used)) == (before, name, wanted[name])
            before = name


@pytest.mark.ci
def test_adapters_and_grammars(adapted_server_package: Path, tmp_path: Path) -> None:
    """Adapters of two ranks, one in place of the other, and grammars, alone and in a batch with a free row."""
    from tests.helpers.adapters import random_adapter

    pytest.importorskip("llguidance")
    pytest.importorskip("outlines_core")
    plain_model = load(adapted_server_package)
    small, large = (
        random_adapter(tmp_path / f"rank {rank}", plain_model.interface, rank, rank=rank)
        for rank in (2, 8)
    )

    def make(stack: ExitStack) -> CausalLM:
        model = CausalLM(plain_model.package, plain_model.sessions)
        model.load_adapter("small", small)
        return model

    def with_another(model: CausalLM) -> Any:
        """The adapter of a name is replaced, and comes back."""
        model.load_adapter("small", large, hotswap=True)
        found = generated(PROMPT, replace(GREEDY, adapter="small"))(model)
        model.load_adapter("small", small, hotswap=True)
        return found

    def with_both(model: CausalLM) -> Any:
        model.load_adapter("large", large)
        params = [replace(GREEDY, adapter=name) for name in ("large", "small", None)]
        found = generated([PROMPT, PROMPT, PROMPT], params)(model)
        model.unload_adapter("large")
        return found

    def formed(expression: str, *given: Any, **options: Any) -> Use:
        return lambda model: generated(*given, grammar=model.grammar(regex=expression), **options)(
            model
        )

    uses: dict[str, Use] = {
        "plain": generated(PROMPT, GREEDY),
        "small": generated(PROMPT, replace(GREEDY, adapter="small")),
        "replaced": with_another,
        "both": with_both,
        "unknown": generated(PROMPT, replace(GREEDY, adapter="large")),
        "yes or no": formed("(yes|no)", OTHER, FREE, seed=2),
        "a number": formed("[0-9]{1,8}", PROMPT, replace(FREE, adapter="small"), seed=2),
        "a form and a free row": lambda model: generated(
            [PROMPT, OTHER], FREE, seed=2, grammar=[model.grammar(regex="[a-c]{3}"), None]
        )(model),
        "wrong form": formed("[", PROMPT, FREE),
    }
    check(uses, make, every_pair)


# Classes of the public API whose objects hold what they were given, and nothing else; and exceptions.
VALUES = frozenset(
    {
        "AllowedTokensFn",
        "CompileOptions",
        "Comparison",
        "Delta",
        "Differences",
        "EngineStats",
        "Estimate",
        "Evaluation",
        "Features",
        "GenerateOutput",
        "Package",
        "PackageQuality",
        "QsampleProcessorConfig",
        "RequestOutput",
        "RequestTiming",
        "SamplingParams",
        "ServeSettings",
        "Step",
        "Target",
        "Usage",
        "Verification",
    }
)
# Classes that other tests use twice, because it takes a checkpoint.
ELSEWHERE = {"SourceModel": "tests/models/test_auto_model.py"}


def public_classes() -> dict[str, type]:
    """Every class that a room or docs/reference.md names, by its own name."""
    found: dict[str, type] = {}
    names = [*NAMES]
    for room in ROOMS:
        try:
            module = importlib.import_module(room)
        except ModuleNotFoundError:
            continue
        names += [f"{room}.{name}" for name in module.__all__ if not name.startswith("__")]
    for name in names:
        try:
            one = public(name)
        except (ModuleNotFoundError, pytest.skip.Exception):
            continue
        if inspect.isclass(one):
            found[one.__name__] = one
    return found


def test_every_public_class_is_used_twice_or_has_no_state() -> None:
    used = {kind.__name__ for subject in SUBJECTS.values() for kind in subject.kinds}
    for name, kind in public_classes().items():
        if issubclass(kind, BaseException):
            continue
        places = [name in used, name in VALUES, name in ELSEWHERE]
        assert sum(places) == 1, f"{name}: use it twice in SUBJECTS, or name it in VALUES"
    for name, file in ELSEWHERE.items():
        assert name in (Path(__file__).parent.parent / file).read_text("utf-8")
