"""A model beside its tokens: how it is loaded, what it says of itself, its adapters and grammars, saved beginnings,
and the callbacks of a batch."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qsample.errors import ArgumentError, PackageError
from qsample.package.package import Package
from qsample.request.grammar import Form
from qsample.runtime import CausalLM, SamplingParams, causal_lm, load
from qsample.runtime.causal_lm import LoadOptions, _check_ctx_len
from tests.helpers.fake_images import ROWS, picture, placeholders
from tests.helpers.fake_package import MAX_POSITIONS, PIECE_SIZE, POISON, VOCAB, compilation
from tests.helpers.requests import GREEDY, PROMPTS

FREE = SamplingParams(temperature=0, max_new_tokens=6, eos_token_id=())


def test_options_by_default() -> None:
    options = LoadOptions()
    assert (options.ctx_len, options.intra_op_num_threads, options.trusted_keys) == (None,) * 3
    assert options.batch_invariant is options.verify is True
    assert options.image_cache_bytes == 256 * 1024 * 1024
    sessions = options.sessions
    assert (sessions.provider_options, sessions.config) == ({}, {})
    assert sessions.intra_op_num_threads is None
    assert sessions.batch_invariant
    given = LoadOptions(
        intra_op_num_threads=3,
        provider_options={"a": "b"},
        session_config={"c": "d"},
        batch_invariant=False,
    ).sessions
    assert given.intra_op_num_threads == 3
    assert (given.provider_options, given.config) == ({"a": "b"}, {"c": "d"})
    assert not given.batch_invariant


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ctx_len": 1}, "ctx_len is 1; give an integer >= 2"),
        ({"ctx_len": 2.5}, "ctx_len is 2.5"),
        ({"image_cache_bytes": -1}, "image_cache_bytes is -1; give an integer >= 0"),
        ({"intra_op_num_threads": -1}, "intra_op_num_threads is -1"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoadOptions(**options)
    LoadOptions(ctx_len=2, image_cache_bytes=0)


def test_what_a_model_is_opened_with(
    fake: Callable[..., Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = fake()
    seen: dict[str, Any] = {}

    def use_package(path: Any, use: Any, **options: Any) -> Any:
        seen.update(options, path=path)
        return use(package)

    def open_sessions(package: Any, provider: Any, options: Any) -> Any:
        seen.update(provider=provider, options=options)
        return SimpleNamespace(device="cpu")

    monkeypatch.setattr(causal_lm, "use_package", use_package)
    monkeypatch.setattr(causal_lm, "open_sessions", open_sessions)
    load(package.path)
    assert (seen["verify"], seen["trusted_keys"], seen["provider"]) == (True, None, None)
    model = load(
        package.path, "cpu", verify=False, trusted_keys=["x"], ctx_len=9, intra_op_num_threads=2
    )
    assert (seen["verify"], seen["trusted_keys"], seen["provider"]) == (False, ["x"], "cpu")
    assert seen["options"].intra_op_num_threads == 2
    assert model.capacity(5) == 9
    assert model._loaded_with is not None
    assert model._loaded_with["provider"] == "cpu"
    assert (model._loaded_with["ctx_len"], model._loaded_with["verify"]) == (9, False)
    with pytest.raises(TypeError, match="unknown_option"):
        load(package.path, unknown_option=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("compiled", "positions", "ctx_len", "message"),
    [
        (None, None, None, None),
        (None, None, 10**6, None),
        (None, 32, 32, None),
        (None, 32, 33, "ctx_len is 33; the model knows 32 positions at most"),
        (16, 32, 16, None),
        (16, 32, None, None),
        (16, 32, 17, "ctx_len is 17 and the package was compiled for 16"),
        (16, 32, 15, "ctx_len is 15 and the package was compiled for 16"),
    ],
)
def test_the_context_length_of_a_package(
    compiled: int | None, positions: int | None, ctx_len: int | None, message: str | None
) -> None:
    package: Any = SimpleNamespace(
        manifest=SimpleNamespace(
            compilation=None if compiled is None else SimpleNamespace(ctx_len=compiled),
            max_position_embeddings=positions,
        )
    )
    if message is None:
        _check_ctx_len(package, ctx_len)
    else:
        with pytest.raises(ValueError, match=message):
            _check_ctx_len(package, ctx_len)


def test_capacities(fake: Callable[..., Package], fake_model: Callable[..., CausalLM]) -> None:
    model = fake_model()
    found = [model.capacity(tokens) for tokens in (1, 64, 65, MAX_POSITIONS, MAX_POSITIONS + 1)]
    assert found == [64, 64, 128, MAX_POSITIONS, MAX_POSITIONS]
    free = load(fake(manifest={"max_position_embeddings": None}).path)
    assert free.capacity(1000) == 1024
    assert load(fake().path, ctx_len=16).capacity(1000) == 16
    compiled = load(fake(compilation=compilation(batch_size=2, ctx_len=48)).path)
    assert (compiled.capacity(1), compiled.batch_size) == (48, 2)
    assert model.batch_size is None


def test_what_a_model_says_of_itself(model: CausalLM) -> None:
    assert repr(model) == f"CausalLM({model.package.summary}, on cpu)"
    assert (str(model.device), model.dtype) == ("cpu", "float32")
    assert model.features is model.interface.features
    assert dict(model.adapters) == {}
    with pytest.raises(TypeError):
        model.adapters["a"] = None  # type: ignore[index]


def test_a_pickled_model_is_opened_from_the_same_package(
    fake: Callable[..., Package], tmp_path: Path
) -> None:
    model = load(fake().path, ctx_len=32)
    model.generation_config = {"max_new_tokens": 3, "do_sample": False}
    opened = pickle.loads(pickle.dumps(model))
    assert opened.capacity(1) == 32
    assert dict(opened.generation_config) == {"max_new_tokens": 3, "do_sample": False}
    assert opened.generate([5]).token_ids == model.generate([5]).token_ids
    reopen, (path, fingerprint, arguments, settings) = model.__reduce__()
    assert path == model.package.path
    with pytest.raises(PackageError, match="another package than when this model was pickled"):
        reopen(path, fingerprint[::-1], arguments, settings)
    with pytest.raises(
        PackageError, match=r"opened again from its package, .*nowhere, which cannot"
    ):
        reopen(tmp_path / "nowhere", fingerprint, arguments, settings)
    with pytest.raises(TypeError, match=r"not opened by qsample\.runtime\.load"):
        pickle.dumps(CausalLM(model.package, model.sessions))
    assert fingerprint != load(fake(logprobs=True).path).__reduce__()[1][1]


def test_settings_are_read_again_when_they_change(fake: Callable[..., Package]) -> None:
    model = load(fake(generation_config={"max_new_tokens": 4, "do_sample": False}).path)
    first = model.applied_settings
    assert first == {"max_new_tokens": 4, "do_sample": False}
    assert model.applied_settings is first
    model.generation_config.max_new_tokens = 5
    assert model.applied_settings["max_new_tokens"] == 5
    assert len(model.generate([5], eos_token_id=()).token_ids[0]) == 5


# Adapters


@pytest.fixture
def with_adapters(
    fake: Callable[..., Package], monkeypatch: pytest.MonkeyPatch
) -> tuple[CausalLM, list[Any]]:
    """A model, and what was read; the adapters are any objects."""
    read: list[Any] = []

    def read_adapter(name: str, path: Any, interface: Any) -> Any:
        read.append((name, path))
        return SimpleNamespace(name=name, sha256=f"{len(read)}")

    monkeypatch.setattr(causal_lm, "read_adapter", read_adapter)
    return load(fake().path), read


def test_adapters_come_and_go(with_adapters: tuple[CausalLM, list[Any]]) -> None:
    model, read = with_adapters
    first = model.load_adapter("a", "one")
    assert dict(model.adapters) == {"a": first}
    with pytest.raises(ValueError, match="an adapter 'a' is loaded already"):
        model.load_adapter("a", "two")
    assert read == [("a", "one")], "the second was not read"
    second = model.load_adapter("a", "two", hotswap=True)
    assert second is not first
    assert model.adapters["a"] is second
    model.load_adapter("b", "three", hotswap=True)
    assert list(model.adapters) == ["a", "b"]
    for name in ("c", None, ["a"]):
        with pytest.raises(ValueError, match=r"give the name of a loaded adapter: a, b$"):
            model.unload_adapter(name)  # type: ignore[arg-type]
    model.unload_adapter("a")
    model.unload_adapter("b")
    with pytest.raises(
        ValueError, match="adapter_name is 'b'; give the name of a loaded adapter: none"
    ):
        model.unload_adapter("b")


def test_of_two_threads_that_load_a_name_one_has_it(
    with_adapters: tuple[CausalLM, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = with_adapters
    plain = causal_lm.read_adapter

    def read_adapter(name: str, path: Any, interface: Any) -> Any:
        if path == "slow":
            model.load_adapter(name, "quick")
        return plain(name, path, interface)

    monkeypatch.setattr(causal_lm, "read_adapter", read_adapter)
    with pytest.raises(ValueError, match="an adapter 'a' is loaded already"):
        model.load_adapter("a", "slow")
    assert list(model.adapters) == ["a"]


# Grammars


@pytest.mark.parametrize(
    ("arguments", "form", "thoughts"),
    [
        ({"json": {}}, Form("json_schema", {}), None),
        ({"regex": "a"}, Form("regex", "a"), None),
        ({"choice": ["a"]}, Form("choice", ["a"]), None),
        ({"grammar": "g"}, Form("grammar", "g"), None),
        ({"regex": "a", "thoughts": ("<", ">")}, Form("regex", "a"), ("<", ">")),
        ({"thoughts": ("", ">")}, None, ("", ">")),
    ],
)
def test_the_form_that_is_asked_for(
    arguments: dict[str, Any], form: Form | None, thoughts: Any, model: CausalLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    asked: list[Any] = []
    monkeypatch.setattr(model.grammars, "tables", lambda wish: asked.append(wish) or "tables")
    monkeypatch.setattr(causal_lm.Thoughts, "between", lambda *texts: texts)
    assert model.grammar(**arguments) == "tables"
    (wish,) = asked
    assert wish == causal_lm.Wish(form, thoughts)


def test_no_form_or_several(model: CausalLM) -> None:
    with pytest.raises(
        ValueError, match="no form was given; give one of json, regex, choice, grammar"
    ):
        model.grammar()
    for one, two in itertools.combinations(("json", "regex", "choice", "grammar"), 2):
        with pytest.raises(ValueError, match="several forms were given"):
            model.grammar(**{one: {}, two: "a"})


# Saved beginnings


def test_whole_pieces_are_saved(model: CausalLM, tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    prompt = [*range(5, 5 + 2 * PIECE_SIZE + 3)]
    saved = model.save_prefix(
        np.array(prompt), tmp_path / "saved", progress=lambda name, done: told.append((name, done))
    )
    assert saved == 2 * PIECE_SIZE
    assert [done for _, done in told] == sorted(done for _, done in told)
    assert (told[-1][1], 0.5 in [done for _, done in told]) == (1.0, True)
    exact = model.save_prefix(np.array(prompt[:PIECE_SIZE]), tmp_path / "saved")
    assert exact == PIECE_SIZE, "in place of the file"


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ([5] * (PIECE_SIZE - 1), {}, f"has {PIECE_SIZE - 1} tokens that are the same .* and {PIECE_SIZE} are"),
        ([5] * MAX_POSITIONS, {}, f"has {MAX_POSITIONS} tokens, and a row of this package holds {MAX_POSITIONS}"),
        ([[5] * 9, [5] * 9], {}, "2 prompts were given; save them one by one"),
        ([5] * 9, {"adapter": "x"}, "adapter is 'x'"),
    ],
)  # fmt: skip
def test_beginnings_that_cannot_be_saved(
    inputs: Any, options: dict[str, Any], message: str, model: CausalLM, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        model.save_prefix(inputs, tmp_path / "saved", **options)
    assert not (tmp_path / "saved").exists()


def test_files_that_cannot_be_written(model: CausalLM, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "folder"):
        with pytest.raises(PackageError, match=f"cannot write {path}; give the path of a file"):
            model.save_prefix([5] * 9, path)


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_messages_are_saved_as_far_as_every_continuation_shares_them(
    role: str, model: CausalLM, tmp_path: Path
) -> None:
    messages = [{"role": role, "content": "be brief"}]
    # The template writes the role of the next message in full before its content.
    following = "assistant" if role == "user" else "user"
    common = f"[{role}]be brief\n[{following}]"
    expected = 1 + len(common)  # a token each, after that of the beginning
    saved = model.save_prefix(messages, tmp_path / "saved")
    assert saved == expected // PIECE_SIZE * PIECE_SIZE


# The rows of a batch


def test_batches_that_a_package_cannot_run_together(fake: Callable[..., Package]) -> None:
    model = load(fake(compilation=compilation(batch_size=2, ctx_len=48), allowed_tokens=True).path)
    three: Any = [[5], [6], [7]]
    for options, reason in (
        (
            {"allowed_tokens": lambda step, mask: None},
            "a function for allowed_tokens follows a single batch",
        ),
        ({"max_time": 100.0}, "stopping_criteria and max_time follow a single batch"),
        ({"stopping_criteria": lambda ids, scores: False}, "stopping_criteria and max_time follow"),
    ):
        with pytest.raises(
            ValueError,
            match=f"3 prompts were given and the package was compiled for 2 at most; {reason}",
        ):
            model.generate(three, FREE, **options)
        assert len(model.generate(three[:2], FREE, **options).token_ids) == 2
    assert len(model.generate(three, FREE).token_ids) == 3


def test_adapters_that_cannot_run_together(model: CausalLM) -> None:
    def rows(*names: str) -> Any:
        return [SimpleNamespace(request=SimpleNamespace(adapter_sha256=name)) for name in names]

    few = CausalLM(model.package, model.sessions)
    few.features = replace(model.features, max_loras=1, max_lora_rank=1)
    few._check_together(rows("a", "", "a"), 3, "why")
    with pytest.raises(
        ValueError, match="2 adapters were given and the package takes 1 at once; why"
    ):
        few._check_together(rows("a", "", "b"), 3, "why")
    with pytest.raises(ValueError, match="3 prompts were given and the package was compiled for 2"):
        few._check_together(rows("a", "a", "a"), 2, "why")


@pytest.mark.parametrize("name", ["prompt_logprobs", "logprob_token_ids"])
def test_scores_are_for_requests(name: str, model: CausalLM) -> None:
    value: Any = True if name == "prompt_logprobs" else [5]
    with pytest.raises(ArgumentError, match=f"{name} is for requests of an Engine") as raised:
        model.generate([5, 6], **{name: value})
    assert raised.value.argument == name


def test_values_that_generate_refuses(model: CausalLM) -> None:
    for options in ({"prefill_chunk_size": 0}, {"flush_every": 0}, {"prefill_chunk_size": 1.5}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} is"):
            model.generate([5], FREE, **options)


class Streamer:
    def __init__(self, last: int = 99) -> None:
        self.got: list[Any] = []
        self.last = last

    def put(self, value: np.ndarray) -> None:
        assert value.dtype == np.int64
        self.got.append(value.tolist())
        if len(self.got) > self.last:
            raise LookupError("enough")

    def end(self) -> None:
        self.got.append("end")


@pytest.mark.parametrize("together", [{}, {"max_time": 1000.0}])
def test_a_streamer_gets_the_prompt_and_each_token(together: Any, model: CausalLM) -> None:
    wanted = model.generate(PROMPTS[0], FREE).token_ids[0]
    streamer = Streamer()
    model.generate(PROMPTS[0], FREE, streamer=streamer, flush_every=2, **together)
    assert streamer.got == [[PROMPTS[0]], *([token] for token in wanted), "end"]
    broken = Streamer(last=3)
    with pytest.raises(LookupError):
        model.generate(PROMPTS[0], FREE, streamer=broken)
    assert broken.got[-1] == "end"
    assert len(broken.got) == 5
    with pytest.raises(ValueError, match="stream"):
        model.generate(PROMPTS[:2], FREE, streamer=Streamer())


def test_a_criterion_ends_a_row_and_no_token_after_it_is_streamed(model: CausalLM) -> None:
    wanted = model.generate(PROMPTS[0], FREE).token_ids[0]
    length = len(PROMPTS[0]) + 3
    for flush_every in (None, 4):
        streamer = Streamer()
        output = model.generate(
            PROMPTS[0],
            FREE,
            streamer=streamer,
            flush_every=flush_every,
            stopping_criteria=lambda ids, scores: ids.shape[1] >= length,
        )
        assert output.token_ids == [wanted[:3]]
        assert output.finish_reasons == ["stop"]
        assert streamer.got[1:] == [*([token] for token in wanted[:3]), "end"]


def test_a_processor_sees_the_logits(fake_model: Callable[..., CausalLM]) -> None:
    model = fake_model(sampler=False)

    def only(ids: Any, logits: Any) -> Any:
        changed = np.full_like(np.asarray(logits), -np.inf)
        changed[:, 40 + ids.shape[1] % 2] = 0
        return changed

    found = model.generate([5, 6], FREE, logits_processor=[only]).token_ids[0]
    assert found == [40, 41, 40, 41, 40, 41]
    # The next call is without it.
    assert model.generate([5, 6], FREE).token_ids == fake_model().generate([5, 6], FREE).token_ids


def test_figures_and_fill_of_a_batch(model: CausalLM) -> None:
    output = model.generate([[5, 6], [7]], [FREE, replace(FREE, max_new_tokens=2)])
    assert output.sequences.tolist() == [
        [5, 6, *output.token_ids[0]],
        [0, 7, *output.token_ids[1], 0, 0, 0, 0],
    ]
    assert output.timing.steps == 5
    assert output.timing.prefill_seconds > 0
    assert output.timing.decode_seconds > 0
    filled = model.generate([[5, 6], [7]], [FREE, replace(FREE, max_new_tokens=2)], pad_token_id=9)
    assert filled.sequences[1].tolist() == [9, 7, *output.token_ids[1], 9, 9, 9, 9]
    plain = model.generate([5, 6], FREE, return_dict_in_generate=False)
    assert type(plain).__name__ in ("ndarray", "Tensor")
    assert plain.tolist() == [[5, 6, *output.token_ids[0]]]


def test_stop_strings_of_the_file_count_unless_the_caller_gives_some(
    fake: Callable[..., Package],
) -> None:
    config = {"stop_strings": ["x"], "do_sample": False}
    model = load(fake(generation_config=config).path)
    assert model.read("a").stop_strings == model.read("a", stop_strings=None).stop_strings == ("x",)
    assert model.read("a", stop_strings="y").stop_strings == ("y",)


def test_slots_are_kept_only_of_captured_graphs(model: CausalLM) -> None:
    model.generate([5], FREE)
    assert model._captured == {}
    marked: Any = SimpleNamespace()
    own = CausalLM(model.package, model.sessions)
    own._captured = {(2, 64, 1): marked, (1, 64, 1): SimpleNamespace()}  # type: ignore[dict-item]
    assert own._take_slots(2, 64, 1) is marked
    made = own._take_slots(3, 64, 2)
    assert (made.count, made.capacity, made.flush_every) == (3, 64, 2)
    assert own._captured == {}, "only one batch at a time holds memory"


def test_sequences_of_a_call(model: CausalLM) -> None:
    call = model.read([[5], [6, 7]], FREE, seed=3)
    (one, two), guide = model.prepare(call, 32, priority=7)
    assert guide is None
    assert (one.request.priority, one.request.seed, two.request.seed) == (7, 3, 4)
    assert one.request.max_length == 7
    endless = model.read([5], replace(GREEDY, max_new_tokens=None))
    assert model.prepare(endless, 32)[0][0].request.max_length == 32
    assert model.prepare(endless)[0][0].request.max_length == MAX_POSITIONS
    assert model.interface.vocab_size == VOCAB


# How a batch is run

lm: Any = causal_lm


def test_seconds_until_every_row_has_a_token_and_from_there(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of steps; a second row, of more pieces, has its first token last."""
    steps = [100]
    monkeypatch.setattr(lm, "time", SimpleNamespace(perf_counter=lambda: float(steps[-1])))
    plain = lm.DecodeLoop.step
    firsts: dict[int, int] = {}

    def step(loop: Any) -> None:
        steps.append(steps[-1] + 1)
        plain(loop)
        for sequence in loop._scheduler.in_slots:
            if sequence.progress.sampled:
                firsts.setdefault(sequence.request.seed, steps[-1])

    monkeypatch.setattr(lm.DecodeLoop, "step", step)
    prompts = [[5], [5] * (4 * PIECE_SIZE + 1)]
    timing = model.generate(prompts, FREE, seed=7, prefill_chunk_size=PIECE_SIZE).timing
    assert firsts[8] > firsts[7]
    until_then, after = firsts[8] - 100, steps[-1] - firsts[8]
    assert until_then != after
    assert (timing.prefill_seconds, timing.decode_seconds) == (until_then, after)


def test_how_the_loop_of_a_batch_is_made(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch with an end is read after each step, unless the caller says otherwise."""
    made: list[Any] = []
    plain = lm.DecodeLoop

    def make(slots: Any, scheduler: Any, deliver: Any, *, double_buffering: bool) -> Any:
        made.append((slots.count, slots.capacity, scheduler._config, double_buffering))
        return plain(slots, scheduler, deliver, double_buffering=double_buffering)

    monkeypatch.setattr(lm, "DecodeLoop", make)
    monkeypatch.setattr(lm, "choose_flush_every", lambda sessions, flush_every: flush_every or 3)
    model.generate([[5] * 60, [6]], FREE)
    given: dict[str, Any] = {"prefill_chunk_size": 8, "flush_every": 2}
    model.generate([5], FREE, **given, double_buffering=False, max_time=1000.0)
    model.generate([5], FREE, max_time=1000.0)
    usual = lm.SchedulerConfig.of(model.sessions, flush_every=3, interleave=False)
    assert made == [
        (2, 128, usual, True),
        (1, 64, replace(usual, **given), False),
        (1, 64, replace(usual, flush_every=1), True),
    ]


def test_rows_without_a_finite_logit_are_named_and_advice_is_given_once(
    fake: Callable[..., Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm, "faster_way", lambda package: "compile it")
    model = load(fake().path)
    with pytest.warns(UserWarning, match="^compile it$"):
        model.generate([5], FREE)
    with pytest.warns(UserWarning, match=r"^rows \[1, 2\] ended early") as warned:
        output = model.generate([[5], [5, POISON], [POISON], [6]], FREE)
    assert output.finish_reasons == ["length", "invalid", "invalid", "length"]
    assert len(warned) == 1


def test_images_are_read_by_an_encoder_with_the_options_of_the_model(
    fake: Callable[..., Package], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[Any] = []
    plain = lm.VisionEncoder

    def encoder(*given: Any) -> Any:
        opened.append(given)
        return plain(*given)

    monkeypatch.setattr(lm, "VisionEncoder", encoder)
    model = load(fake(image=ROWS).path, "cpu", image_cache_bytes=5000, intra_op_num_threads=1)
    prompt, images = [5, *placeholders(4), 6], [[picture(8, 8, seed)] for seed in (0, 1, 0)]
    one, other, again = model.generate([prompt] * 3, GREEDY, images=images).token_ids
    assert one == again != other
    ((package, cache_bytes, provider, options),) = opened
    assert (package, cache_bytes, provider) == (model.package, 5000, "cpu")
    assert options.intra_op_num_threads == 1
    for seed, given in enumerate(images):
        model.save_prefix([*prompt, *[7] * 64], tmp_path / f"{seed}", images=given)
    first, second, third = ((tmp_path / f"{seed}").read_bytes() for seed in range(3))
    assert first == third != second
