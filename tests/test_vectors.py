"""docs/vectors: the reference, both kinds of graph and a package give what the files say."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.contract.interface import Features, Interface
from qsample.contract.tensors import (
    CONTRACT_VERSION,
    GRAMMARS_VERSION,
    IMAGES_VERSION,
    STEPS_VERSION,
)
from qsample.exporters.portable import build_initial_state
from qsample.images.positions import position_offsets
from qsample.package.package import read_package
from tests.helpers.plain_host import OFF, PlainHost
from tests.helpers.reference import philox4x32, philox_uniform, reference_step
from tests.helpers.sampler_cases import PAD, Step, sampler
from tests.helpers.vectors import (
    FOLDER,
    Arrays,
    Case,
    after,
    inputs_of,
    interface_of,
    load,
    numbers,
    start,
)

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def by_graph(name: str) -> list[list[Case]]:
    """The cases that can be rows of one batch."""
    batches = defaultdict(list)
    for case in load(name)["cases"]:
        batches[case["filter_order"], case["vocab_size"], case["capacity"]].append(case)
    return list(batches.values())


def check(cases: list[Case], face: Interface, step: Step) -> None:
    """Run cases as the rows of a batch, each as long as it goes."""
    state = start(face, cases)
    for number in range(max(len(case["steps"]) for case in cases)):
        calls = [case["steps"][min(number, len(case["steps"]) - 1)] for case in cases]
        going = [number < len(case["steps"]) for case in cases]
        state["status"] = np.where(going, state["status"], np.int32(1))
        out = step(
            np.float32([numbers(call["logits"]) for call in calls]),
            inputs_of(face, cases, calls, state),
        )
        for row, (case, call) in enumerate(zip(cases, calls, strict=True)):
            if going[row]:
                check_row(
                    call,
                    {name: values[row] for name, values in out.items()},
                    f"{case['name']}, step {number}",
                )
        state = after(state, out)
        for row, case in enumerate(cases):
            if number == len(case["steps"]) - 1:
                # A graph for replay writes another token of the row to the unused tail.
                emitted = calls[row]["next_id"] is not None
                count = int(state["lengths"][row]) + emitted
                assert state["tokens"][row].tolist()[:count] == case["tokens"][:count], case["name"]
                counts = {
                    str(i): n for i, n in enumerate(state["output_counts"][row].tolist()) if n
                }
                assert counts == case["output_counts"], case["name"]


def check_row(call: Case, out: Arrays, where: str) -> None:
    emitted = call["next_id"] is not None
    assert out["next_ids"].tolist() == [call["next_id"] if emitted else PAD], where
    assert (out["lengths_RetainedState"], out["status_RetainedState"]) == (
        call["lengths"],
        call["status"],
    ), where
    if emitted:
        adjusted = np.float32(numbers(call["logits"]))
        for token, logit in call.get("adjusted", {}).items():
            adjusted[int(token)] = numbers(logit)
        if "adjusted_logits" in out:  # not on WebGPU
            np.testing.assert_allclose(out["adjusted_logits"], adjusted, rtol=1e-6, err_msg=where)
    if "grammar_state" in call:
        assert out["grammar_state_RetainedState"] == call["grammar_state"], where
    if "kept" in call:
        assert np.flatnonzero(out["probs"]).tolist() == call["kept"], where
    for state in {"mirostat_mu", "adaptive_error"} & call.keys():
        np.testing.assert_allclose(
            out[f"{state}_RetainedState"], call[state], **CLOSE, err_msg=where
        )
    assert out.get("margin", 1) >= 2**-16, where
    assert out.get("edge", 1) >= 2**-16, where


def _interface(case: Case, **kind: Any) -> Interface:
    return interface_of(case["vocab_size"], case["filter_order"], grammars="tables" in case, **kind)


def check_graphs(name: str, *, least: int = 1, **kind: Any) -> None:
    """Check graphs of a kind with batches of at least so many cases, and each case alone."""
    for batch in by_graph(name):
        face = _interface(batch[0], **kind)
        for cases in (batch, *([case] for case in batch)) if len(batch) >= least else ():
            check(cases, face, sampler(face))


@pytest.mark.parametrize("name", ["adjust", "filters", "wide", "recent", "grammars"])
class TestSampler:
    def test_reference(self, name: str) -> None:
        for case in load(name)["cases"]:
            order = case["filter_order"]
            with np.errstate(invalid="ignore", over="ignore"):
                check(
                    [case],
                    _interface(case),
                    lambda logits, inputs, order=order: reference_step(
                        logits, inputs, pad_token_id=PAD, filter_order=order
                    ),
                )

    @pytest.mark.ci
    def test_graph(self, name: str) -> None:
        check_graphs(name)

    # A captured graph for each vocabulary and order, in the files of most cases.
    @pytest.mark.parametrize(
        "most", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["most", "all"]
    )
    def test_captured_graphs(self, most: bool, name: str) -> None:
        check_graphs(name, least=9 if most else 1, captured=True)


def test_noise() -> None:
    content = load("noise")
    for answer in content["philox4x32_10"]:
        counter, key, words = (
            tuple(int(word, 16) for word in answer[name]) for name in ("counter", "key", "words")
        )
        assert philox4x32(counter, key) == words
    seeds, positions = [int(row["seed"]) for row in content["rows"]], content["positions"]
    model = build_initial_state(Interface(2, (), features=Features(filters=("xtc",))))
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    names = ["noise", "xtc_noise"]
    made = session.run(names, {"seed": np.int64(seeds), "capacity": np.array(max(positions) + 1)})
    for stream, (name, buffer) in enumerate(zip(names, made, strict=True)):
        expected = [row[name] for row in content["rows"]]
        assert (buffer[:, positions] * 2**24).tolist() == expected
        assert [
            [philox_uniform(seed, t, stream) * 2**24 for t in positions] for seed in seeds
        ] == expected


def test_package(bundled_package: Path) -> None:
    """All rows in a batch; then each alone, its prompt in pieces."""
    content, host = load("package"), PlainHost(bundled_package)
    face = interface_of(host.manifest["interface"]["vocab_size"], "huggingface")

    def written(rows: list[Case], piece: int) -> None:
        state = host.start([int(row["seed"]) for row in rows], content["capacity"])
        parameters = inputs_of(face, rows, [{"input_ids": [0], "emit": True}] * len(rows), {})
        given = {name: parameters[name] for name in (*OFF, "stop_ids")}
        prompts, tokens = [row["prompt_ids"] for row in rows], [[] for _ in rows]
        while len(prompts[0]) > piece:
            state = host.after(state, host.call(state, [prompts[0][:piece]], emit=[False], **given))
            prompts = [prompts[0][piece:]]
        lengths = [len(prompt) for prompt in prompts]
        ids: Any = [[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in prompts]
        while not state["status"].all():
            running = np.flatnonzero(state["status"] == 0)
            outputs = host.call(state, ids, lengths, **given)
            state, ids, lengths = host.after(state, outputs), outputs["next_ids"], [1] * len(rows)
            for row in running:
                tokens[row] += ids[row].tolist()
        assert tokens == [row["tokens"] for row in rows]
        assert state["status"].tolist() == [row["status"] for row in rows]

    written(content["rows"], piece=100)
    for row in content["rows"]:
        written([row], piece=3)


@pytest.fixture(scope="module")
def package_with_guesses(bundled_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("waiting") / "tiny-cpu"
    options = CompileOptions(
        ctx_len=load("waiting")["capacity"], kv_cache_dtype="int8", num_speculative_tokens=4
    )
    return compile_package(read_package(bundled_package), path, options).path


def test_waiting(package_with_guesses: Path) -> None:
    """Outputs have memory of their own here: what a step does not write there is lost."""
    content, host = load("waiting"), PlainHost(package_with_guesses)
    rows = content["rows"]
    state = host.start([int(row["seed"]) for row in rows], content["capacity"])
    names = ("stop_ids", "max_length", "prompt_lookup_num_tokens")
    given = {name: [row["parameters"].get(name, 0) for row in rows] for name in names}
    unread, tokens, most = (
        [row["prompt_ids"] for row in rows],
        [[] for _ in rows],
        0,
    )  # most: in a step
    for lengths in content["calls"]:
        pieces = [ids[:count] for ids, count in zip(unread, lengths, strict=True)]
        ids = [[*piece, *[0] * (max(lengths) - len(piece))] for piece in pieces]
        emit = [
            count in (0, len(left)) for count, left in zip(lengths, unread, strict=True)
        ]  # of a row with 0: any
        outputs = host.call(state, ids, lengths, emit=emit, **given)
        state = host.after(state, outputs)
        for row, count in enumerate(outputs["num_new"].tolist()):
            tokens[row] += outputs["new_ids"][row, :count].tolist()
            unread[row] = unread[row][lengths[row] :] or [int(outputs["next_ids"][row, 0])]
            most = max(most, count)
    assert tokens == [row["tokens"] for row in rows]
    assert state["status"].tolist() == [row["status"] for row in rows]
    assert most > 1


def test_images() -> None:
    """transformers' positions and those that the runtime feeds; and a NumPy host, written from the contract."""
    content = load("images")
    for case in content["cases"]:
        is_image = np.array(case["input_ids"]) == content["placeholder"]
        offsets = position_offsets(is_image, [tuple(size) for size in case["sizes"]])
        assert offsets.tolist() == case["position_offsets"]
        sizes, places, after = iter(case["sizes"]), iter(range(len(is_image) + 1)), 0
        by_contract = []
        for place in places:
            if place < len(is_image) and is_image[place]:
                rows, columns = next(sizes)
                for n in range(rows * columns):
                    at = [after, after + n // columns, after + n % columns]
                    by_contract.append([position - (place + n) for position in at])
                for _ in range(rows * columns - 1):
                    next(places)
                after += max(rows, columns)
            else:
                by_contract.append([after - place] * 3)
                after += 1
        assert by_contract == case["position_offsets"]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.name)
def test_files_are_small_and_of_this_contract(path: Path) -> None:
    assert path.stat().st_size < 100_000
    versions = {
        "waiting": STEPS_VERSION,
        "images": IMAGES_VERSION,
        "pixels": IMAGES_VERSION,
        "grammars": GRAMMARS_VERSION,
    }
    version = versions.get(path.stem, CONTRACT_VERSION)
    assert load(path.stem)["contract_version"] == version
    assert f"`{path.name}`" in (FOLDER / "README.md").read_text("utf-8")
