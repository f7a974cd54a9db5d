"""LoRA adapters in an engine: each request has the tokens that it has alone with its adapter, whatever comes and goes.

The oracle is an engine with a single request, whose model has only that adapter.
"""

from __future__ import annotations

import gc
import json
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample import AutoModelForCausalLM
from qsample.errors import ArgumentError, QsampleError
from qsample.ort.rounding import RowCounts
from qsample.runtime import CausalLM, Engine, Request, RequestOutput, SamplingParams, load
from qsample.runtime.adapters import Adapter
from qsample.runtime.sequence import Sequence
from tests.helpers.adapters import random_adapter
from tests.helpers.memory import resident
from tests.helpers.requests import wait_for_token
from tests.helpers.sessions import with_prompt_calls

PIECE = 16
CTX_LEN = 128
SAMPLED = SamplingParams(temperature=1.0, max_new_tokens=6, eos_token_id=())
MAX_LORAS = 2


@dataclass
class Case:
    """A package, folders of adapters, and the tokens that it gives alone."""

    path: Path
    folders: list[Path]
    alone: CausalLM
    known: dict[str, RequestOutput] = field(default_factory=dict)

    def model(self) -> CausalLM:
        return with_short_pieces(self.path)

    def check(
        self, output: RequestOutput, folder: Path | None, prompt: list[int], params: SamplingParams
    ) -> None:
        fresh = self.fresh(folder, prompt, replace(params, adapter=None, seed=output.seed))
        assert output.token_ids == fresh.token_ids
        np.testing.assert_array_equal(output.outputs["logprobs"], fresh.outputs["logprobs"])

    def fresh(
        self, folder: Path | None, prompt: list[int], params: SamplingParams
    ) -> RequestOutput:
        key = repr((folder, prompt, params))
        if key not in self.known:
            if folder is not None:
                self.alone.load_adapter("own", folder)
                params = replace(params, adapter="own")
            with Engine(
                self.alone, slots=2
            ) as engine:  # two: products of a single row have other last bits
                self.known[key] = engine.add_request(prompt, params).result(60)
            if folder is not None:
                self.alone.unload_adapter("own")
        return self.known[key]


def with_short_pieces(path: Path) -> CausalLM:
    opened = load(path, ctx_len=CTX_LEN, intra_op_num_threads=1)
    return CausalLM(opened.package, with_prompt_calls(opened.sessions, piece_size=PIECE), CTX_LEN)


def make_case(path: Path, folder: Path) -> Case:
    alone = with_short_pieces(path)
    folders = [
        random_adapter(folder / str(seed), alone.interface, seed, rank=1 + seed % 4)
        for seed in range(5)
    ]
    return Case(path, folders, alone)


@pytest.fixture(
    scope="module", params=["llama", pytest.param("qwen3_5_text", marks=pytest.mark.ci)]
)
def case(
    request: pytest.FixtureRequest,
    adapted: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Case:
    """Attention, and a hybrid with recurrent states."""
    package = adapted(request.param, logprobs=True, max_loras=MAX_LORAS, max_lora_rank=4)
    return make_case(package, tmp_path_factory.mktemp("adapters"))


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, 250), k=length)


def with_adapter(name: str | None, **changes: object) -> SamplingParams:
    return replace(SAMPLED, adapter=name, **changes)  # type: ignore[arg-type]


@pytest.fixture
def model(case: Case) -> CausalLM:
    """With the first four adapters, "0" to "3"."""
    model = case.model()
    for index, folder in enumerate(case.folders[:4]):
        model.load_adapter(str(index), folder)
    return model


def test_the_adapters_differ(case: Case) -> None:
    tokens = prompt(1, 20)
    outputs = [
        case.fresh(folder, tokens, replace(SAMPLED, seed=1)) for folder in (None, *case.folders)
    ]
    assert len({repr(output.outputs["logprobs"]) for output in outputs}) == 6


def test_more_adapters_than_a_batch_takes(case: Case, model: CausalLM) -> None:
    with Engine(model, slots=5) as engine:
        tokens = [prompt(seed, 5 + 4 * seed) for seed in range(10)]
        adapters = [
            (str(seed % 5), case.folders[seed % 5]) if seed % 5 < 4 else (None, None)
            for seed in range(10)
        ]
        requests = [
            engine.add_request(row, with_adapter(name), seed=1)
            for row, (name, _) in zip(tokens, adapters, strict=True)
        ]
        for request, row, (_, folder) in zip(requests, tokens, adapters, strict=True):
            case.check(request.result(60), folder, row, SAMPLED)


def test_no_prefix_crosses_adapters(case: Case, model: CausalLM) -> None:
    tokens = prompt(2, 50)
    with Engine(model, slots=4) as engine:

        def ask(name: str | None, folder: Path | None) -> int:
            output = engine.add_request(tokens, with_adapter(name), seed=2).result(60)
            case.check(output, folder, tokens, SAMPLED)
            return output.usage.cached_tokens

        first, second, third = case.folders[:3]
        assert [ask("0", first), ask(None, None), ask("1", second), ask("2", third)] == [0] * 4
        # Four slots keep four prompts.
        assert all(
            ask(*pair) == 48 for pair in (("0", first), (None, None), ("1", second), ("2", third))
        )
        # The same name with other weights, and the same weights with another name.
        model.unload_adapter("0")
        model.load_adapter("0", case.folders[4])
        model.load_adapter("again", first)
        assert ask("again", first) == 48
        assert ask("0", case.folders[4]) == 0


def test_kept_prefixes_on_disk_do_not_cross_adapters(
    case: Case, model: CausalLM, tmp_path: Path
) -> None:
    pairs = (("0", case.folders[0]), (None, None), ("1", case.folders[1]))
    # The second prompt is another turn of the first, which has a file of its own.
    for length, cached in ((50, 0), (100, 48), (100, 96)):
        tokens = prompt(3, length)
        for name, folder in pairs:
            with Engine(model, slots=2, prefix_cache_dir=tmp_path / "kept") as engine:
                output = engine.add_request(tokens, with_adapter(name), seed=3).result(60)
            case.check(output, folder, tokens, SAMPLED)
            assert output.usage.cached_tokens == cached
    assert len(list((tmp_path / "kept").glob("*.safetensors"))) == 6


def test_a_saved_prefix_belongs_to_its_adapter(case: Case, model: CausalLM, tmp_path: Path) -> None:
    tokens = prompt(4, 50)
    assert model.save_prefix(tokens, tmp_path / "own", adapter="0") == 48
    with Engine(model, slots=2, prefixes=[tmp_path / "own"]) as engine:
        for name, folder, cached in (
            (None, None, 0),
            ("1", case.folders[1], 0),
            ("0", case.folders[0], 48),
        ):
            output = engine.add_request(tokens, with_adapter(name), seed=3).result(60)
            case.check(output, folder, tokens, SAMPLED)
            assert output.usage.cached_tokens == cached


def test_a_request_keeps_its_adapter_until_it_ends(case: Case, model: CausalLM) -> None:
    tokens, long = prompt(5, 20), with_adapter("0", max_new_tokens=80)
    with Engine(model, slots=2) as engine:
        running = engine.add_request(tokens, long, seed=5)
        waiting = [engine.add_request(tokens, long, seed=seed) for seed in (6, 7)]
        wait_for_token(running)
        model.unload_adapter("0")
        with pytest.raises(ArgumentError, match=r"adapter is '0', and 1, 2, 3 is loaded"):
            engine.add_request(tokens, long)
        model.load_adapter("0", case.folders[4])
        after = engine.add_request(tokens, with_adapter("0"), seed=8)
        for request in (running, *waiting):
            case.check(request.result(60), case.folders[0], tokens, long)
        case.check(after.result(60), case.folders[4], tokens, SAMPLED)


def test_a_folder_that_cannot_be_used_changes_nothing(
    case: Case, model: CausalLM, tmp_path: Path
) -> None:
    damaged = random_adapter(tmp_path / "damaged", model.interface, 9, rank=2)
    weights = damaged / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    other = random_adapter(tmp_path / "other", model.interface, 9, rank=2)
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(config | {"r": 3}))
    tokens, long = prompt(5, 20), with_adapter("0", max_new_tokens=80)
    with Engine(model, slots=2) as engine:
        running = engine.add_request(tokens, long, seed=5)
        wait_for_token(running)
        for folder in (damaged, other, tmp_path / "nowhere"):
            with pytest.raises(QsampleError, match=str(folder)):
                model.load_adapter("new", folder)
        assert [*model.adapters] == ["0", "1", "2", "3"]
        case.check(running.result(60), case.folders[0], tokens, long)


@pytest.mark.parametrize("name", [["0"], {}, 1, b"0"])
def test_adapter_names_that_are_not_texts_are_refused(
    case: Case, model: CausalLM, tmp_path: Path, name: Any
) -> None:
    with pytest.raises(ValueError, match=r"the adapter's name is .*; give a text"):
        model.load_adapter(name, case.folders[0])
    with pytest.raises(
        ValueError, match=r"adapter_name is .*; give the name of a loaded adapter: 0, 1, 2, 3"
    ):
        model.unload_adapter(name)
    with pytest.raises(
        ArgumentError, match=r"adapter is .*; load it with load_adapter, or name another"
    ):
        model.save_prefix(prompt(5, 20), tmp_path / "prefix", adapter=name)


def test_an_adapter_is_replaced_at_once(case: Case, model: CausalLM) -> None:
    with pytest.raises(ValueError, match="'0'"):
        model.load_adapter("0", case.folders[1])
    with pytest.raises(QsampleError):
        model.load_adapter("0", case.folders[1] / "nowhere", hotswap=True)
    assert model.adapters["0"].path == case.folders[0]
    model.load_adapter("0", case.folders[1], hotswap=True)
    assert model.adapters["0"].sha256 == model.adapters["1"].sha256


def test_too_many_adapters_for_rows_that_run_together_are_refused(
    model: CausalLM,
) -> None:
    params = [with_adapter(name) for name in "012"]
    with pytest.raises(
        ValueError,
        match=r"3 adapters were given and the package takes 2 at once; .* max_time follow",
    ):
        model.generate([[5]] * 3, params, max_time=60)
    assert len(model.generate([[5]] * 3, params).token_ids) == 3


def test_the_adapters_of_requests_are_counted(model: CausalLM) -> None:
    with Engine(model, slots=2) as engine:
        long = {"max_new_tokens": 90, "temperature": 1.0, "eos_token_id": ()}
        running = [engine.add_request([5], adapter=name, **long) for name in ("1", "0")]
        for request in running:
            wait_for_token(request)
        engine.add_request([5], adapter="2", **long)
        engine.add_request([5], **long)
        stats = engine.stats()
        assert (stats.running_adapters, stats.waiting_adapters) == (("0", "1"), ("2",))


def random_traffic(
    case: Case, model: CausalLM, operations: int
) -> Iterator[tuple[Request, Path | None, list[int]]]:
    """Requests among random loads, swaps and unloads; each with the folder of its adapter and its prompt."""
    chooses, loaded = random.Random(0), dict[str, Path]()
    prompts = [prompt(seed, 6 + 9 * seed) for seed in range(4)]
    with Engine(model, slots=3, max_waiting=12) as engine:
        while operations:
            name, folder = str(chooses.randrange(4)), chooses.choice(case.folders)
            if name not in loaded or chooses.random() < 0.3:
                model.load_adapter(name, folder, hotswap=name in loaded)
                loaded[name], operations = folder, operations - 1
            elif chooses.random() < 0.5:
                model.unload_adapter(name)
                del loaded[name]
                operations -= 1
            for _ in range(2):
                name, tokens = chooses.choice([None, *loaded]), chooses.choice(prompts)
                request = engine.add_request(tokens, with_adapter(name), seed=chooses.randrange(2))
                if chooses.random() < 0.1:
                    request.cancel()
                yield request, None if name is None else loaded[name], tokens
            assert model.adapters.keys() == loaded.keys()
        engine.drain()


@pytest.mark.parametrize("operations", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_loads_and_unloads_under_traffic(case: Case, operations: int) -> None:
    model, cancelled = case.model(), 0
    for request, folder, tokens in [*random_traffic(case, model, operations)]:
        output = request.result(60)
        if output.finish_reason == "cancelled":
            cancelled += 1
            continue
        case.check(output, folder, tokens, SAMPLED)
    assert cancelled <= operations // 2


@pytest.mark.ci
def test_a_row_of_packed_weights_has_the_same_bits_beside_others(
    adapted: Callable[..., Path], tmp_path: Path
) -> None:
    """Its products do not depend on the number of rows, and the adapters' must not."""
    portable = adapted("llama", logprobs=True, max_loras=MAX_LORAS, max_lora_rank=4)
    compiled = AutoModelForCausalLM.from_pretrained(portable).compile(
        tmp_path / "int4", ctx_len=CTX_LEN, weights="int4", max_divergence=10
    )
    case = make_case(compiled.package.path, tmp_path)
    assert case.alone.sessions.rows.step == RowCounts(1)
    model = case.model()
    model.load_adapter("0", case.folders[0])
    model.load_adapter("1", case.folders[1])
    with Engine(model, slots=4) as engine:
        rows = [
            (None, None),
            ("0", case.folders[0]),
            ("1", case.folders[1]),
            ("0", case.folders[0]),
        ]
        requests = [
            engine.add_request(prompt(seed, 20), with_adapter(name, max_new_tokens=20), seed=seed)
            for seed, (name, _) in enumerate(rows)
        ]
        for seed, (request, (name, folder)) in enumerate(zip(requests, rows, strict=True)):
            output = request.result(60)
            case.check(output, folder, prompt(seed, 20), with_adapter(None, max_new_tokens=20))
            fresh = model.generate(
                [prompt(seed, 20)], with_adapter(name, max_new_tokens=20), seed=seed
            )
            assert fresh.token_ids[0] == output.token_ids
            assert fresh.logprobs is not None
            np.testing.assert_array_equal(fresh.logprobs[0], output.outputs["logprobs"][:, 0])


@pytest.mark.slow
def test_adapters_leave_no_memory_behind(case: Case) -> None:
    model = case.model()
    for name in [*model.adapters]:
        model.unload_adapter(name)

    def some(operations: int) -> int:
        for request, _, _ in random_traffic(case, model, operations):
            request.result(60)
        for name in [*model.adapters]:
            model.unload_adapter(name)
        del request
        gc.collect()
        return sum(isinstance(one, Adapter | Sequence | Request) for one in gc.get_objects())

    left = some(50)
    before = resident()
    assert some(500) <= left
    assert resident() - before < 16 << 20


def test_threads_load_and_unload_at_once(case: Case) -> None:
    model, errors = case.model(), []

    def work(number: int) -> None:
        for _ in range(10):
            try:
                model.load_adapter(str(number % 2), case.folders[number])
                model.unload_adapter(str(number % 2))
            except ValueError as error:
                errors.append(str(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not model.adapters
