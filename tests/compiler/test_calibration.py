"""The text that a model writes itself: where rows begin, and what it is good for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qsample.compiler import calibration
from qsample.compiler.calibration import given_text, own_text
from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.compiler.own_text import Opening, random_starts
from qsample.compiler.plan import make_plan
from qsample.contract.interface import Interface, KeyValueShape
from qsample.errors import CompileError
from qsample.package.divergence import CHATS
from qsample.package.package import Package, read_package
from tests.helpers.small_packages import manifest

STOP = 1  # of the bundled model


@pytest.mark.parametrize(("template", "kinds"), [(True, 2), (False, 1)])
def test_half_of_the_text_is_of_another_kind_than_chats(
    template: bool, kinds: int, bundled_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_TEXT_TOKENS", 240)
    source = read_package(bundled_package)
    chat = Opening(CHATS, (3, 4, 5), (STOP,), 0.8, ((6,), (7, 8)))
    monkeypatch.setattr(
        calibration,
        "opening_of",
        lambda package, capacity: chat if template else random_starts(package),
    )
    plan = make_plan(source, CompileOptions(weights="int4", preset="speed", ctx_len=24))
    told: list[float] = []
    rows = own_text(plan, told.append)
    assert told[-1] == 1.0
    assert told == sorted(told)
    tokens = sum(map(len, rows))
    assert 230 <= tokens <= 300
    chats = [row for row in rows if row[:3].tolist() == [3, 4, 5]]
    assert abs(len(chats) - len(rows) / 2) <= 1 if kinds == 2 else not chats
    assert len({tuple(row) for row in rows}) == len(rows)


@pytest.mark.parametrize("template", [True, False])
def test_a_row_that_stops_goes_on_as_its_kind_does(
    template: bool, bundled_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat with the next turn, a text after random tokens with any token. The model stops at every third token."""
    monkeypatch.setattr(calibration, "_TEXT_TOKENS", 240)
    source = read_package(bundled_package)
    assert source.manifest.token_ids.eos == (STOP,)
    chat = Opening(CHATS, (3, 4, 5), (STOP,), 0.8, ((6,), (7, 8)))
    monkeypatch.setattr(
        calibration,
        "opening_of",
        lambda package, capacity: chat if template else random_starts(package),
    )
    monkeypatch.setattr(calibration, "GraphRunner", StopsEachThird)
    plan = make_plan(source, CompileOptions(weights="int4", preset="speed", ctx_len=24))
    rows = own_text(plan, lambda fraction: None)
    chats = [row.tolist() for row in rows if row[:3].tolist() == [3, 4, 5]]
    others = [row.tolist() for row in rows if row[:3].tolist() != [3, 4, 5]]
    assert bool(chats) == template
    for row in chats:
        # The model's own tokens are 9, and every third is a stop; the host begins the turns.
        turns = [9, 9, 6, 9, 9, 7, 8, 9, 6, 9, 9, 7, 8, 9, 6, 9, 9, 7, 8, 9, 6]
        assert row == [3, 4, 5, *turns]
    for row in others:
        assert row[1:] == ([9, 9, STOP] * 8)[: len(row) - 1]


class StopsEachThird:
    """A model that is sure: of 9, and at every third of its steps of a stop."""

    def __init__(self, model: object, folder: Path, interface: Interface, *_: Any, **__: Any):
        self._vocab_size = interface.vocab_size
        self._steps = 0

    def start(self, rows: int) -> dict[str, Any]:
        self._steps = 0
        return {}

    def step(self, ids: Any, lengths: Any, state: object) -> dict[str, Any]:
        self._steps += 1
        logits = np.full((len(ids), self._vocab_size), -1e9, np.float32)
        logits[:, STOP if self._steps % 3 == 0 else 9] = 0
        return {"logits": logits}


@pytest.mark.ci
def test_a_fit_to_it_is_closer_than_rounding(bundled_package: Path, tmp_path: Path) -> None:
    source, found, stages = read_package(bundled_package), dict[str, float](), list[str]()
    for preset in ("quick", "speed"):
        given: dict[str, Any] = {"weights": {"*": "int4:32"}, "preset": preset, "ctx_len": 256}
        made = compile_package(
            source,
            tmp_path / preset,
            CompileOptions(**given),
            progress=lambda stage, _: stages.append(stage),
        )
        assert made.manifest.compilation is not None
        assert made.manifest.compilation.quantization is not None
        found[preset] = made.manifest.compilation.quantization["divergence"]["kl"]["value"]
    assert found["speed"] < 0.8 * found["quick"]
    names = list(dict.fromkeys(stages))
    assert names.index("writing the text to fit to") < names.index("fitting weights to the text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quick", "speed"], (
        "nothing is left beside them"
    )


@pytest.mark.parametrize(
    ("lengths", "ctx_len", "pieces"),
    [
        ([128], 4096, [128]),  # the least
        ([300], 101, [100, 100, 100]),
        ([250, 130], 101, [100, 100, 50, 100, 30]),
        ([4097], 9000, [2048, 2048, 1]),
        ([65_536], 2049, [2048] * 32),  # the most
        ([65_537], 2049, [*[2048] * 16, 1]),  # of one token more, every second piece
    ],
)
def test_a_given_text_in_pieces(lengths: list[int], ctx_len: int, pieces: list[int]) -> None:
    """Of at most the context, and one token less: the next is what a piece is for."""
    documents = [np.arange(length) % 100 for length in lengths]
    rows = given_text(plan_of(documents, ctx_len))
    assert [len(row) for row in rows] == pieces
    first = documents[0]
    for number, row in enumerate(rows[: len(first) // len(rows[0])]):
        step = 2 if lengths == [65_537] else 1
        start = number * step * len(rows[0])
        np.testing.assert_array_equal(row, first[start : start + len(rows[0])])


def test_a_given_text_that_is_too_short() -> None:
    for documents, tokens in (([np.arange(100), np.arange(27)], 127), ([np.arange(2)], 2)):
        with pytest.raises(
            CompileError, match=f"calibration_text has {tokens} tokens; give at least 128"
        ):
            given_text(plan_of(documents, 64))
    with pytest.raises(CompileError, match="calibration_text is empty"):
        given_text(plan_of([np.arange(0)], 64))


def plan_of(documents: list[Any], ctx_len: int) -> Any:
    """A plan with a calibration text of token ids."""
    package = Package(Path("/nowhere"), manifest(interface=Interface(100, (KeyValueShape(1, 8),))))
    options = SimpleNamespace(calibration_text=documents)
    return SimpleNamespace(source=package, options=options, ctx_len=ctx_len)


@pytest.mark.parametrize(
    ("ctx_len", "chats", "expected"),
    [
        (4096, False, (1024, [(64, 128)])),
        (4096, True, (1024, [(32, 128), (32, 128)])),
        (100, False, (100, [(83, 99)])),
        (8, False, (8, [(256, 7)])),
    ],
)
def test_how_long_the_own_text_is(
    ctx_len: int,
    chats: bool,
    expected: tuple[int, list[tuple[int, int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """8,192 tokens in rows of 128, or fewer where the context is shorter; at most 256 rows."""
    plan = plan_of([], ctx_len)
    opening = Opening(CHATS if chats else "random", (), (STOP,), 0.8, ())
    runners: list[Any] = []
    texts: list[Any] = []

    class Runner:
        step = staticmethod(lambda ids, lengths, state: {})

        def __init__(self, *given: Any, **options: Any) -> None:
            runners.append((given, options))

        def start(self, rows: int) -> dict[str, int]:
            return {"rows": rows}

    def write_text(step: Any, one: Any, vocab_size: int, **given: Any) -> Any:
        texts.append((step.keywords["state"]["rows"], one, vocab_size, given))
        given["progress"](0.5)
        given["progress"](1.0)
        return SimpleNamespace(rows=[np.array([len(texts)])])

    asked: list[Any] = []
    monkeypatch.setattr(calibration, "opening_of", lambda *given: asked.append(given) or opening)
    monkeypatch.setattr(calibration, "logits_of", lambda path, interface: "the graph")
    monkeypatch.setattr(calibration, "GraphRunner", Runner)
    monkeypatch.setattr(calibration, "write_text", write_text)
    told: list[float] = []
    rows = own_text(plan, told.append)
    capacity, sizes = expected
    assert asked == [(plan.source, capacity)]
    ((given, options),) = runners
    assert given == ("the graph", plan.source.path, plan.source.interface, capacity)
    assert options == {"weights_mapped": True}
    assert [(given["rows"], given["tokens"]) for *_, given in texts] == sizes
    for number, (started, one, vocab_size, given) in enumerate(texts):
        assert (started, vocab_size, given["seed"]) == (given["rows"], 100, 2)
        assert (one is opening) == (number == 0)
    assert [row.tolist() for row in rows] == [[number + 1] for number in range(len(sizes))]
    assert told == ([0.25, 0.5, 0.75, 1.0] if chats else [0.5, 1.0])
