"""Prompts with images: their tokens alone, in batches, in pieces, and behind beginnings that slots or files hold.

The oracle is NumPy, over the whole row and without a cache.
"""

from __future__ import annotations

import io
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from qsample.contract.interface import ImageShape
from qsample.errors import QsampleError
from qsample.images.features import VisionEncoder
from qsample.images.prompt import ProcessedImage
from qsample.ort.rounding import RowCounts
from qsample.runtime import CausalLM, Engine, SamplingParams
from qsample.runtime.decode.image_inputs import image_piece
from qsample.runtime.decode.slots import Slots
from tests.helpers import fake_reference
from tests.helpers.capturing import capturing
from tests.helpers.fake_images import (
    AXIAL,
    BEGIN,
    BLOCKWISE,
    END,
    IMAGE,
    ROWS,
    Seen,
    picture,
    placeholders,
)
from tests.helpers.fake_package import MAX_POSITIONS
from tests.helpers.requests import FREE, GREEDY, make_sequence, random_params, wait_until
from tests.helpers.sessions import with_step_rows

SHAPES = {"rows": ROWS, "axial": AXIAL, "blockwise": BLOCKWISE}
Images = list[np.ndarray]
HEAD = [1, 5, 6, 7]


@pytest.fixture(params=[pytest.param("rows", marks=pytest.mark.ci), "axial", "blockwise"])
def shape(request: pytest.FixtureRequest) -> ImageShape:
    return SHAPES[request.param]


@pytest.fixture
def model(shape: ImageShape, fake_model: Callable[..., CausalLM]) -> CausalLM:
    return fake_model(image=shape)


@dataclass(frozen=True)
class Case:
    """A prompt's ids and images."""

    ids: list[int]
    images: Images

    def expected(
        self, model: CausalLM, params: SamplingParams, seed: int, capacity: int = MAX_POSITIONS
    ) -> list[int]:
        seen = None
        if self.images:
            prompt = model.images.prompt(np.array(self.ids), model.images.process(self.images))
            assert prompt is not None
            assert model.interface.image is not None
            seen = Seen(prompt, model.interface.image.blockwise)
        return fake_reference.generate(self.ids, params, seed, capacity, seen)[0]


SMALL, LARGE = picture(8, 8), picture(16, 12, seed=1)  # 4 and 12 placeholders
CASES = [
    Case([*HEAD, *placeholders(4), 20, 21, 22], [SMALL]),
    Case([30, 31, 32, 33, 34, 35, 36], []),
    Case(
        [*HEAD, 8, 9, *placeholders(12), 40, *placeholders(4), 41, 42, 43, 44, 45], [LARGE, SMALL]
    ),
    Case([IMAGE] * 16, [LARGE, SMALL]),  # neighbours, in front of everything and at the end of it
    Case([50, *[IMAGE] * 4, 51], [picture(8, 8, seed=2)]),
]
LIVELY = SamplingParams(
    temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.3, max_new_tokens=14
)


def drawn(generator: random.Random) -> Case:
    ids: list[int] = [generator.randrange(3, 250) for _ in range(generator.randrange(6))]
    images: Images = []
    for _ in range(generator.choice([0, 1, 1, 2])):
        image = picture(
            4 * generator.randrange(1, 5), 4 * generator.randrange(1, 4), generator.randrange(3)
        )
        images.append(image)
        ids += placeholders(image.shape[0] * image.shape[1] // 16)[generator.randrange(2) :]
        ids += [generator.randrange(3, 250) for _ in range(generator.randrange(5))]
    return Case(ids or [5], images)


@pytest.mark.parametrize(
    "chunk", [pytest.param(None, marks=pytest.mark.ci), pytest.param(1, marks=pytest.mark.ci), 6]
)
@pytest.mark.parametrize("params", [pytest.param(GREEDY, marks=pytest.mark.ci), LIVELY])
def test_alone_and_in_any_batch_and_any_chunk(
    chunk: int | None, params: SamplingParams, model: CausalLM
) -> None:
    wanted = [case.expected(model, params, 3 + row) for row, case in enumerate(CASES)]
    assert len({tuple(tokens) for tokens in wanted}) == len(CASES)
    ids, images = [case.ids for case in CASES], [case.images for case in CASES]
    together = model.generate(ids, params, images=images, seed=3, prefill_chunk_size=chunk)
    assert together.token_ids == wanted
    for row, case in enumerate(CASES):
        alone = model.generate(
            case.ids, params, images=case.images, seed=3 + row, prefill_chunk_size=chunk
        )
        assert alone.token_ids == [wanted[row]]


def test_other_images_give_other_tokens(model: CausalLM) -> None:
    """What the oracle would not see if the images made no difference to it."""
    case, given = CASES[0], [SMALL, picture(8, 8, seed=9), SMALL[:, ::-1]]
    tokens = model.generate([case.ids] * 3, GREEDY, images=given).token_ids
    assert len({tuple(one) for one in tokens}) == 3
    assert tokens == [replace(case, images=[one]).expected(model, GREEDY, 0) for one in given]


@pytest.mark.ci
@pytest.mark.parametrize("options", [{"sampler": False}, {"logprobs": True, "logit_bias": True}])
def test_with_the_sampler_on_the_host_and_with_other_features(
    options: dict[str, Any], shape: ImageShape, fake_model: Callable[..., CausalLM]
) -> None:
    model = fake_model(image=shape, **options)
    params = replace(LIVELY, logit_bias={127: -9.0}) if "logit_bias" in options else LIVELY
    case = CASES[2]
    got = model.generate(case.ids, params, images=case.images, seed=1, num_return_sequences=3)
    assert got.token_ids == [case.expected(model, params, 1 + row) for row in range(3)]


@pytest.mark.ci
def test_replays_of_captured_steps(model: CausalLM) -> None:
    """Text and images by turns over the memory of one capture."""
    replaying, session = capturing(model)
    for turn, pair in enumerate([(0, 1), (1, 2), (4, 0), (1, 1)]):
        cases = [CASES[one] for one in pair]
        got = replaying.generate(
            [one.ids for one in cases], LIVELY, images=[one.images for one in cases], seed=turn
        )
        assert got.token_ids == [
            case.expected(model, LIVELY, turn + row) for row, case in enumerate(cases)
        ]
    assert len(session.captured) == 2


@pytest.mark.parametrize("narrow", [pytest.param(False, marks=pytest.mark.ci), True])
def test_requests_that_come_and_go(narrow: bool, model: CausalLM) -> None:
    """In an engine whose slots keep the beginnings of others, some with the same images, and whose rows move."""
    sessions = with_step_rows(model.sessions, step=RowCounts(1) if narrow else None)
    generator = random.Random(4)
    shared = [drawn(generator) for _ in range(4)]
    asked = []
    for turn in range(36):
        head, tail = generator.choice(shared), drawn(generator)
        case = Case([*head.ids, *tail.ids], [*head.images, *tail.images]) if turn % 2 else head
        asked.append((case, random_params(generator, 12)))
    with Engine(CausalLM(model.package, sessions), slots=4) as engine:
        requests = [
            engine.add_request(case.ids, params, images=case.images, seed=turn)
            for turn, (case, params) in enumerate(asked)
        ]
        outputs = [request.result(60) for request in requests]
        stats = engine.stats().prefixes
    for turn, (output, (case, params)) in enumerate(zip(outputs, asked, strict=True)):
        assert output.token_ids == case.expected(model, params, turn, engine.capacity), turn
    assert stats.hits > 5


def test_prompts_that_are_read_in_one_call(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    plain = Slots.prefill

    def prefill(self: Slots, slot: int, *ids: np.ndarray, **rest: Any) -> None:
        calls.append(len(ids))
        plain(self, slot, *ids, **rest)

    monkeypatch.setattr(Slots, "prefill", prefill)
    images = [picture(8, 8, seed) for seed in range(3)]
    cases = [Case([IMAGE] * 4, [image]) for image in images]
    cases.insert(1, Case([5, 6, 7, 8], []))
    got = model.generate(
        [case.ids for case in cases], LIVELY, images=[case.images for case in cases], seed=2
    )
    assert got.token_ids == [
        case.expected(model, LIVELY, 2 + row) for row, case in enumerate(cases)
    ]
    assert calls == ([4] if model.sessions.prompts.joins_prompts else [1] * 4)


def test_offsets_go_with_a_row_that_is_moved(fake_model: Callable[..., CausalLM]) -> None:
    model = fake_model(image=AXIAL)
    slots = Slots(with_step_rows(model.sessions, step=RowCounts(1)), 3, 64)
    for slot, case in ((2, CASES[0]), (1, CASES[1])):
        ids = np.array(case.ids)
        prompt = model.images.prompt(ids, model.images.process(case.images))
        features = None if prompt is None else model.images.features(prompt)
        sequence = make_sequence(model, case.ids, GREEDY, slot, 64)
        slots.begin(slot, ids, slot, sequence.request.parameters, images=prompt)
        slots.prefill(slot, ids, emit=True, images=[image_piece(prompt, features, range(len(ids)))])
    slots.decode()
    slots.move(2, 0, 0)
    for _ in range(6):
        slots.decode()
    for slot, case in ((0, CASES[0]), (1, CASES[1])):
        assert slots.read().tokens_from(slot, len(case.ids)) == case.expected(model, GREEDY, 0)[:8]


def reused(engine: Engine, model: CausalLM, case: Case) -> int:
    before = engine.stats().prefixes.cached_tokens
    output = engine.add_request(case.ids, GREEDY, images=case.images).result(60)
    assert output.token_ids == case.expected(model, GREEDY, 0, engine.capacity)
    return engine.stats().prefixes.cached_tokens - before


def test_an_image_of_the_same_size_is_not_taken_for_another(model: CausalLM) -> None:
    ids = [*HEAD, *placeholders(12), 20, 21, 22, 23, 24, 25]  # the image is at 5 to 16
    one, other = Case(ids, [LARGE]), Case(ids, [picture(16, 12, seed=5)])
    with Engine(model, slots=1) as engine:
        counts = [reused(engine, model, case) for case in (one, other, one, one)]
    assert counts == [0, 4, 4, 22], "all but the tail of the same prompt"


def test_sampled_tokens_are_gone_on_from(model: CausalLM) -> None:
    with Engine(model, slots=1, reuse_sampled_tokens=True) as engine:
        case = CASES[0]
        output = engine.add_request(case.ids, GREEDY, images=case.images).result(60)
        longer = Case([*case.ids, *output.token_ids[:3], 60], case.images)
        before = engine.stats().prefixes.cached_tokens
        assert engine.add_request(longer.ids, GREEDY, images=longer.images).result(60).token_ids
        assert engine.stats().prefixes.cached_tokens - before == len(longer.ids) - 1


def test_runs_that_are_longer_in_another_prompt(fake_model: Callable[..., CausalLM]) -> None:
    """Both begin with the same image, which a second one follows without a token between: a single run, in which the
    first image's tokens see the second's."""
    model = fake_model(image=BLOCKWISE)
    one, both = (
        Case([5, *[IMAGE] * 4, 6, 7, 8], [SMALL]),
        Case([5, *[IMAGE] * 16, 6, 7, 8, 9], [SMALL, LARGE]),
    )
    with Engine(model, slots=1) as engine:
        assert [reused(engine, model, case) for case in (one, both, one, both, both)] == [
            0,
            0,
            0,
            0,
            20,
        ]


def test_prefixes_on_disk(model: CausalLM, shape: ImageShape, tmp_path: Path) -> None:
    ids = [*HEAD, *placeholders(12), 20, 21]
    tails = [[30, 31, 32], [40]]
    saved = tmp_path / "a.prefix"
    assert model.save_prefix(ids, saved, images=[LARGE]) == 20
    with Engine(model, slots=2, prefixes=[saved]) as engine:
        for tail in tails:
            assert reused(engine, model, Case([*ids, *tail], [LARGE])) == 20
        assert reused(engine, model, Case([*ids, 50], [picture(16, 12, seed=5)])) == 4
    for expected in (0, 20):  # a folder that another engine of the machine fills
        with Engine(model, slots=1, prefix_cache_dir=tmp_path / "folder") as engine:
            assert reused(engine, model, Case([*ids, *tails[expected > 0]], [LARGE])) == expected
    (written,) = (tmp_path / "folder").iterdir()
    assert b'"format": "qsample.prefix.2"' in written.read_bytes()[:4096].replace(b'":"', b'": "')


def test_what_a_chat_s_prefix_has(model: CausalLM, tmp_path: Path) -> None:
    head = [
        {
            "role": "system",
            "content": [{"type": "image", "image": LARGE}, {"type": "text", "text": "Look at it."}],
        }
    ]
    count = model.save_prefix(head, tmp_path / "a.prefix")
    with Engine(model, slots=1, prefixes=[tmp_path / "a.prefix"]) as engine:
        chat = [*head, {"role": "user", "content": "Well?"}]
        first = engine.add_request(chat, GREEDY).result(60)
        assert engine.stats().prefixes.cached_tokens == count > 20
    assert first.token_ids == model.generate(chat, GREEDY).token_ids[0]


def test_places_for_images_in_texts(model: CausalLM, tmp_path: Path) -> None:
    file, buffer = tmp_path / "a.png", io.BytesIO()
    PIL.Image.fromarray(SMALL).save(file)
    PIL.Image.fromarray(SMALL).save(buffer, "png")
    tokenizer = model.tokenizer
    assert tokenizer is not None

    def written(text: str) -> list[int]:
        return tokenizer.encode(text)

    head, tail = written("Is ")[1:], written(" blue?")[1:]
    middle = Case([1, *head, *placeholders(4), *tail], [SMALL])
    wanted = middle.expected(model, GREEDY, 0)
    for image in (
        SMALL,
        str(file),
        file,
        buffer.getvalue(),
        PIL.Image.open(file),
        model.images.process([SMALL])[0],
    ):
        assert model.generate("Is <image> blue?", GREEDY, images=image).token_ids == [wanted]
    before = Case([1, *placeholders(4), *placeholders(12), *head], [SMALL, LARGE])
    wanted = before.expected(model, GREEDY, 0)
    for text in ("Is ", "<image><image>Is "):
        assert model.generate(text, GREEDY, images=[SMALL, LARGE]).token_ids == [wanted]
    padded = np.zeros((2, len(before.ids) + 3), int)
    padded[0, 3:], padded[1, 3 : 3 + len(middle.ids)] = before.ids, middle.ids
    both = model.generate(padded, GREEDY, attention_mask=padded > 0, images=[[SMALL, LARGE], SMALL])
    assert both.token_ids == [wanted, middle.expected(model, GREEDY, 0)]
    batch = model.generate(["<image>Is ", "Is "], GREEDY, images=[LARGE, None])
    assert batch.token_ids[1] == Case([1, *head], []).expected(model, GREEDY, 0)
    content = [{"type": "text", "text": "Is "}, {"type": "image"}, {"type": "text", "text": "?"}]
    chat = [{"role": "user", "content": content}]
    ids = [1, *written("[user]Is ")[1:], *placeholders(4), *written("?[assistant]")[1:]]
    assert model.generate(chat, GREEDY, images=file).token_ids == [
        Case(ids, [SMALL]).expected(model, GREEDY, 0)
    ]


@pytest.mark.parametrize(
    ("inputs", "images", "message"),
    [
        ("<image> and <image>", [SMALL], "2 times '<image>'.*1 images were given"),
        ([1, BEGIN, IMAGE, END], [SMALL], "1 placeholders .* take 4"),
        ([[5], [6]], [SMALL], "images is a list of 1 for 2 prompts"),
        ([[5], [6]], SMALL, "images is a single ndarray for 2 prompts"),
        (["a", "b"], [[], ["missing.png"]], "prompt 1: image 0 'missing.png' cannot be read"),
        ("a", [SMALL, 7], "image 1 is 7, a int; give a path"),
        ("a" * 300, SMALL, "the prompt has"),
    ],
)
def test_what_does_not_fit_is_refused(
    inputs: Any, images: Any, message: str, fake_model: Callable[..., Any]
) -> None:
    with pytest.raises(ValueError, match=message):
        fake_model(image=ROWS).generate(inputs, images=images, max_new_tokens=2)


def test_packages_of_text(fake_model: Callable[..., CausalLM]) -> None:
    model = fake_model()
    with pytest.raises(
        ValueError,
        match=f"the package {model.package.path} reads text only; leave them out, or export",
    ):
        model.generate("a", images=SMALL)
    with pytest.raises(ValueError, match="give images="):
        model.generate([5], pixel_values=np.zeros((1, 3, 4, 4)))
    assert (
        model.generate([[5], [6]], GREEDY, images=[None, []]).token_ids
        == model.generate([[5], [6]], GREEDY).token_ids
    )
    assert Slots(model.sessions, 2, 64)._images.of_prompts([None], 3) == {}, "no more work for them"


def test_an_engine_computes_features_before_a_request_waits(
    fake_model: Callable[..., CausalLM], gate: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before it has a place in the queue, and not on the engine's thread, which goes on meanwhile."""
    model, seen = fake_model(image=AXIAL), list[str]()
    plain, go = VisionEncoder.features, threading.Semaphore(0)

    def features(self: VisionEncoder, image: ProcessedImage) -> np.ndarray:
        seen.append(threading.current_thread().name)
        assert go.acquire(timeout=60)
        return plain(self, image)

    monkeypatch.setattr(VisionEncoder, "features", features)
    case = CASES[0]
    with Engine(model, slots=1, max_waiting=1) as engine:
        running = engine.add_request([5, 6], FREE, seed=1)
        added: list[Any] = []
        adds = threading.Thread(
            target=lambda: added.append(engine.add_request(case.ids, GREEDY, images=case.images))
        )
        adds.start()
        wait_until(lambda: bool(seen))
        with pytest.raises(Exception, match="all that this engine takes"):
            engine.add_request(case.ids, GREEDY, images=case.images, timeout=0)
        gate.release(1000)
        assert (
            running.result(60).token_ids
            == fake_reference.generate([5, 6], FREE, 1, engine.capacity)[0]
        )
        assert (engine.stats().waiting, added) == (1, [])
        go.release(5)
        adds.join(60)
        assert added[0].result(60).token_ids == case.expected(model, GREEDY, 0, engine.capacity)
    assert seen == [adds.name]


def test_an_image_that_fails_ends_its_request_alone(
    fake_model: Callable[..., CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, case = fake_model(image=ROWS), CASES[0]

    def fail(self: VisionEncoder, image: ProcessedImage) -> np.ndarray:
        raise QsampleError("no")

    with Engine(model, slots=1, max_waiting=0) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(VisionEncoder, "features", fail)
            for _ in range(3):
                with pytest.raises(QsampleError, match="no"):
                    engine.add_request(case.ids, GREEDY, images=case.images)
        got = engine.add_request(case.ids, GREEDY, images=case.images).result(60)
        assert got.token_ids == case.expected(model, GREEDY, 0, engine.capacity)
        assert engine.drain(60)
