"""A package with int4 weights: its tokens and caches are those of each prompt alone, to the last bit.

8-bit activations carry a last bit that differs into another token: the graph's kernels round otherwise for another
number of tokens, so this shows what reads a prompt in any other way than alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qsample.contract.tensors import CAPACITY
from qsample.models.auto_model import AutoModelForCausalLM
from qsample.ort.rounding import ANY_ROWS
from qsample.runtime import CausalLM, Engine, SamplingParams, load
from qsample.runtime.call import Call
from qsample.runtime.decode import prefixes
from qsample.runtime.decode.loop import DecodeLoop
from qsample.runtime.decode.scheduler import Scheduler, SchedulerConfig
from qsample.runtime.decode.slots import Slots
from qsample.runtime.sequence import Sequence
from tests.helpers.sessions import with_prompt_calls

CTX_LEN = 160
PIECE = 64
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=8, eos_token_id=())
LENGTHS = (
    1,
    2,
    17,
    40,
    40,
    63,
    64,
    65,
    65,
    66,
    127,
    128,
    129,
    152,
)  # the last row ends at the capacity


@pytest.fixture(scope="module")
def int4(bundled_package: Path, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    path = tmp_path_factory.mktemp("int4") / "package"
    AutoModelForCausalLM.from_pretrained(bundled_package).compile(
        path, ctx_len=CTX_LEN, weights="int4"
    )
    model = load(path)
    assert (model.sessions.prompts.piece_size, model.sessions.prompts.tail_size) == (PIECE, 2)
    return model


def prompts() -> list[list[int]]:
    """Some begin like others, with and without a whole piece in common; two are the same."""
    generator = np.random.default_rng(5)
    made = [generator.integers(3, 2000, length).tolist() for length in LENGTHS]
    made[4] = list(made[3])
    made[9][:65] = made[8]
    made[10][:64] = made[6]
    made[12][:100] = made[11][:100]
    made[13][:128] = made[11]
    return made


def run(
    model: CausalLM, rows: list[int], slots: int, chunk: int | None, *, interleave: bool = True
) -> dict[int, tuple[list[int], list[bytes], int]]:
    """Row → its tokens, its cache at the prompt's positions, and how much of the prompt was copied or held."""
    made = prompts()
    results: dict[int, tuple[list[int], list[bytes], int]] = {}

    def deliver(sequence: Sequence) -> None:
        sequence.take()
        if sequence.placement.slot is None:  # it ended
            slot, length = where[sequence.request.seed], len(sequence.request.prompt)
            states = [
                device._state[spec.name].read()[slot] for spec in model.interface.cache_states
            ]
            cache = [state[:, :length].tobytes() for state in states]
            results[sequence.request.seed] = (
                sequence.token_ids,
                cache,
                sequence.placement.tokens_reused,
            )

    where: dict[int, int] = {}
    device = Slots(model.sessions, slots, CTX_LEN)
    plain = device.begin

    def begin(slot: int, prompt: np.ndarray, seed: int, *rest: object, **named: object) -> None:
        where[seed] = slot
        plain(slot, prompt, seed, *rest, **named)  # type: ignore[arg-type]

    device.begin = begin  # type: ignore[method-assign,assignment]
    scheduler = Scheduler(
        slots, SchedulerConfig.of(model.sessions, prefill_chunk_size=chunk, interleave=interleave)
    )
    with DecodeLoop(device, scheduler, deliver, double_buffering=True) as loop:
        for row in rows:
            loop.add(
                model.prepare(Call(inputs=[made[row]], params=PARAMS, seed=row), CTX_LEN)[0][0]
            )
        while loop.busy:
            loop.step()
    return results


@pytest.fixture(scope="module")
def alone(int4: CausalLM) -> dict[int, tuple[list[int], list[bytes]]]:
    return {row: run(int4, [row], 1, None)[row][:2] for row in range(len(LENGTHS))}


@pytest.mark.parametrize("slots", [1, 3, len(LENGTHS)])
@pytest.mark.parametrize("chunk", [None, 1, 100, 128])
def test_chunks_joins_copies_and_kept_prefixes_change_no_bit(
    chunk: int | None, slots: int, int4: CausalLM, alone: dict[int, tuple[list[int], list[bytes]]]
) -> None:
    assert all(spec.axes[2] == CAPACITY for spec in int4.interface.cache_states)
    order = np.random.default_rng(slots).permutation(len(LENGTHS)).tolist()
    got = run(int4, order, slots, chunk, interleave=chunk != 100)
    reused = {row for row, (_, _, tokens) in got.items() if tokens}
    assert reused or slots == 1
    for row in range(len(LENGTHS)):
        assert got[row][0] == alone[row][0], LENGTHS[row]
        assert got[row][1] == alone[row][1], LENGTHS[row]


@pytest.mark.parametrize("chunk", [None, 1, 100])
def test_nor_do_they_where_late_pieces_are_longer(
    chunk: int | None, int4: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefixes, "LATE_START", 64)
    late = CausalLM(
        int4.package, with_prompt_calls(int4.sessions, piece_size=16, late_piece_size=32)
    )
    rows = list(range(len(LENGTHS)))
    got = run(late, rows[::-1], 3, chunk)
    assert any(tokens > 64 for _, _, tokens in got.values())
    for row in rows:
        assert got[row][:2] == run(late, [row], 1, None)[row][:2], LENGTHS[row]


def test_generate_gives_them_for_every_chunk_size(
    int4: CausalLM, alone: dict[int, tuple[list[int], list[bytes]]]
) -> None:
    for chunk in (None, 1, 2, 8, 9, 16, 33, 64, 80, 300):
        got = int4.generate(prompts(), PARAMS, seed=0, prefill_chunk_size=chunk).token_ids
        assert got == [alone[row][0] for row in range(len(LENGTHS))], chunk


def test_a_conversation_is_read_as_if_nothing_was_held(int4: CausalLM) -> None:
    """What was sampled is read again: reading computes other last bits than sampling did."""
    history = prompts()[9]
    with Engine(int4, slots=2) as engine:
        for turn in range(3):
            request = engine.add_request(history, PARAMS, seed=turn)
            wanted = int4.generate([history], PARAMS, seed=turn).token_ids[0]
            assert request.result(60).token_ids == wanted
            assert request.result().usage.cached_tokens == (PIECE if turn else 0)
            history = [*history, *wanted, 70 + turn, 71]


def test_these_prompts_show_another_cut(
    int4: CausalLM, alone: dict[int, tuple[list[int], list[bytes]]]
) -> None:
    """One token a call, as where the decoder takes no more, gives other bits, and other tokens."""
    sessions = with_prompt_calls(
        int4.sessions, piece_size=1, piece_tokens=ANY_ROWS, joins_prompts=False
    )
    other = CausalLM(int4.package, sessions)
    rows = [row for row, length in enumerate(LENGTHS) if length > 30]
    got = {row: run(other, [row], 1, None)[row] for row in rows}
    assert all(got[row][1] != alone[row][1] for row in rows)
    assert any(got[row][0] != alone[row][0] for row in rows)
