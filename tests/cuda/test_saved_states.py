"""Recurrent states that are saved stay on the device, beside a step that was captured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from qsample import AutoModelForCausalLM, SamplingParams
from qsample.runtime import CausalLM, Engine, load
from qsample.runtime.decode.slots import Slots
from tests.cuda import puppet
from tests.cuda.trace import Trace
from tests.helpers.sessions import with_prompt_calls

CONTEXT, PIECE = 64, 4
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=5, eos_token_id=())
FLAT = SamplingParams(
    temperature=3.0, max_new_tokens=5, eos_token_id=()
)  # from the whole vocabulary


def test_a_conversation_goes_on(
    exported: Callable[..., Path], tmp_path: Path, trace: Trace
) -> None:
    AutoModelForCausalLM.from_pretrained(exported("olmo_hybrid")).compile(
        tmp_path / "cuda", provider="cuda", dtype="float16", ctx_len=CONTEXT, max_divergence=100
    )
    opened = load(tmp_path / "cuda")
    model = CausalLM(opened.package, with_prompt_calls(opened.sessions, piece_size=PIECE))

    slots = Slots(model.sessions, 2, CONTEXT, saved_states=2)
    trace.clear()
    slots.saved.save(0, 1)
    slots.saved.restore(1, 1)
    assert (trace.bytes_from_host(), trace.bytes_to_host()) == (0, 0)

    on_cpu = load(tmp_path / "cuda", [puppet.CPU])
    for reuse_sampled in (False, True):
        with Engine(model, slots=2, reuse_sampled_tokens=reuse_sampled) as engine:
            history = [1, *range(20, 29)]
            for turn, params in enumerate((GREEDY, FLAT, GREEDY, FLAT)):
                output = engine.add_request(history, params, seed=turn).result(300)
                wanted = on_cpu.generate([history], params, seed=turn, prefill_chunk_size=PIECE)
                assert output.token_ids == wanted.token_ids[0], turn
                assert (output.usage.cached_tokens > 0) == (turn > 0)
                history = [*history, *output.token_ids, 50 + turn]
            assert engine.stats().prefixes.hits == 3
    assert not trace.problems()
