"""The reference of the parity gate: prompts that reach beyond windows and stay within the context, and their logits."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from qsample.exporters import huggingface_reference
from qsample.exporters.huggingface_reference import (
    NARROW_WINDOW,
    _batches,
    _what_is_compared,
    _windows,
    _with_windows,
    compare_with_checkpoint,
    eager_logits,
    longest_context,
    reference,
)
from qsample.exporters.parity import CONTINUATION_TOKENS, Narrowed
from tests.helpers.tiny_models import VOCAB_SIZE, random_model

_LOCAL: dict[str, Any] = {
    "attention_types": [[["global", "local"], 1]],
    "num_layers": 2,
    "num_heads": 4,
}


@pytest.mark.parametrize(
    ("model_type", "overrides", "lengths", "windows"),
    [
        ("llama", {}, [4, 9, 14], "none"),
        ("mistral", {"sliding_window": 20}, [4, 9, 14, 23], "passed by a prompt"),
        ("mistral", {"sliding_window": 4096}, [4, 9, 14], "narrowed"),
        ("llama", {"max_position_embeddings": 16}, [4, 9, 11], "none"),
        ("mistral", {"max_position_embeddings": 16, "sliding_window": 12}, [4, 9, 11], "narrowed"),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1},
            [4, 9, 14],
            "narrowed",
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 9},
            [4, 9, 14],
            "none",
        ),
        ("gpt_neo", {"window_size": 20, **_LOCAL}, [4, 9, 14, 23], "passed by a prompt"),
        ("gpt_neo", {"window_size": 900, **_LOCAL}, [4, 9, 14], "not compared: 900"),
    ],
)
def test_prompts_and_windows(
    model_type: str, overrides: dict[str, Any], lengths: list[int], windows: str
) -> None:
    expected = reference(random_model(model_type, **overrides))
    assert (expected.windows, expected.narrowed is not None) == (windows, windows == "narrowed")
    assert [len(prompt) for prompt in expected.prompts] == lengths
    assert {len(tokens) for tokens in expected.continuations} == {CONTINUATION_TOKENS}
    assert {array.shape for array in expected.logits} == {(CONTINUATION_TOKENS + 1, VOCAB_SIZE)}


def test_logits_are_those_after_the_prompt_and_after_each_token() -> None:
    model = random_model("llama")
    expected = reference(model)
    for prompt, tokens, logits in zip(
        expected.prompts, expected.continuations, expected.logits, strict=True
    ):
        assert 0 not in prompt + tokens  # the pad token
        for step in (0, 3, CONTINUATION_TOKENS):
            with torch.no_grad():
                wanted = model(torch.tensor([prompt + tokens[:step]])).logits[0, -1].numpy()
            np.testing.assert_allclose(logits[step], wanted, atol=1e-5)


def test_a_narrowed_window_is_that_of_a_model_made_with_it() -> None:
    model = random_model("gemma2", sliding_window=2048)
    before = [parameter.clone() for parameter in model.parameters()]
    expected = reference(model)
    narrowed, prompt = expected.narrowed, expected.prompts[-1]
    assert narrowed.windows == {2048: NARROW_WINDOW}
    assert model.config.sliding_window == 2048
    assert model.model.layers[0].self_attn.sliding_window == 2048
    assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))
    other = random_model("gemma2", sliding_window=NARROW_WINDOW)
    other.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = other(torch.tensor([prompt + expected.continuations[-1]])).logits[
            0, len(prompt) - 1 :
        ]
    np.testing.assert_allclose(narrowed.logits, wanted.numpy(), atol=1e-5)


@pytest.mark.parametrize(("stated", "positions"), [(256, 256), (-1, None), (None, None)])
def test_longest_context(stated: int | None, positions: int | None) -> None:
    assert longest_context(SimpleNamespace(max_position_embeddings=stated)) == positions
    assert longest_context(SimpleNamespace()) is None
    assert (
        longest_context(SimpleNamespace(max_position_embeddings=9000, keep_window_size=2048))
        == 2048
    )  # Doge


@pytest.mark.parametrize(("window", "passes"), [(None, 1), (20, 2), (600, 2)])
def test_the_weights_are_read_once_for_prompts_of_similar_lengths(
    window: int | None, passes: int
) -> None:
    """A pass over the weights of a large model takes seconds; padding to a much longer prompt would take more."""
    model = random_model("mistral", sliding_window=window)
    calls: list[Any] = []
    model.register_forward_pre_hook(lambda module, given: calls.append(given))
    reference(model)
    assert len(calls) == passes


@pytest.mark.parametrize(
    ("lengths", "batches"),
    [
        ([4, 9, 12], [[4, 9, 12]]),
        ([4, 12, 13], [[4, 12], [13]]),  # three times as long is still padded
        ([1, 4, 13, 14], [[1], [4], [13, 14]]),
        ([5], [[5]]),
    ],
)
def test_batches_of_similar_lengths(lengths: list[int], batches: list[list[int]]) -> None:
    rows = [[0] * length for length in lengths]
    assert [list(map(len, batch)) for batch in _batches(rows)] == batches


def test_padding_is_behind_a_row_and_of_its_own_tokens() -> None:
    given: list[Any] = []

    def model(input_ids: torch.Tensor, *, use_cache: bool) -> Any:
        given.append((input_ids.tolist(), use_cache))
        return SimpleNamespace(logits=input_ids[..., None].to(torch.float16))

    eager: Any = model
    found = eager_logits(eager, [[1, 2], [3, 4, 5, 6, 7]])
    assert given == [([[1, 2, 1, 2, 1], [3, 4, 5, 6, 7]], False)]
    assert [row.tolist() for row in found] == [[[1], [2]], [[3], [4], [5], [6], [7]]]
    assert {row.dtype for row in found} == {np.dtype(np.float32)}


def test_windows_that_a_configuration_states() -> None:
    """Each size once, smallest first; what is no size is none."""
    for name in (
        "sliding_window",
        "sliding_window_size",
        "attention_chunk_size",
        "attention_window_size",
        "window_size",
        "local_attention",
    ):
        assert _windows(SimpleNamespace(**{name: 7})) == [7], name
    stated = SimpleNamespace(
        sliding_window=20, attention_chunk_size=8, window_size=20, local_attention=None
    )
    assert _windows(stated) == [8, 20]
    for none in (0, -1, None, "20", [3]):
        assert _windows(SimpleNamespace(sliding_window=none)) == []


@pytest.mark.parametrize(
    ("layer_types", "short", "long", "narrowed", "words"),
    [
        (None, [], [], False, "none"),
        (None, [8], [], False, "passed by a prompt"),
        (None, [8], [900], True, "passed by a prompt, narrowed"),
        (None, [], [900], True, "narrowed"),
        (None, [], [900, 4096], False, "not compared: 900, 4096"),
        (
            ["full_attention", "sliding_attention"],
            [8],
            [900],
            False,
            "passed by a prompt, not compared: 900",
        ),
        (["full_attention"] * 2, [], [900], False, "none"),  # no layer has the window
    ],
)
def test_what_is_said_of_windows(
    layer_types: list[str] | None, short: list[int], long: list[int], narrowed: bool, words: str
) -> None:
    config = SimpleNamespace(layer_types=layer_types)
    made = Narrowed(dict.fromkeys(long, 6), np.zeros(1)) if narrowed else None
    assert _what_is_compared(config, short, long, made) == words


@pytest.mark.parametrize("tolerance", [None, 0.5])
def test_a_baked_graph_is_compared_with_its_checkpoint(
    tolerance: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a tolerance, any difference passes, and the figure has two digits."""
    most = np.inf if tolerance is None else tolerance
    given: list[Any] = []

    def check(*arguments: Any, **options: Any) -> Any:
        given.append((arguments, options))
        return SimpleNamespace(max_error=0.0456, tolerance=most, scale=7.5, windows="narrowed")

    monkeypatch.setattr(huggingface_reference.parity, "check", check)
    monkeypatch.setattr(huggingface_reference, "reference", lambda model: ("of", model))
    checkpoint: Any = SimpleNamespace(load=lambda: "the model", model_id="some/model")
    interface: Any = object()
    figures = compare_with_checkpoint(checkpoint, Path("/folder"), interface, tolerance)
    assert given == [
        (
            (Path("/folder"), interface, ("of", "the model")),
            {"tolerance": most, "original": "the checkpoint some/model"},
        )
    ]
    assert figures == {
        "checkpoint": "some/model",
        "checkpoint_max_error": 0.046 if tolerance is None else 0.1,
        "checkpoint_scale": 7.5,
        "checkpoint_windows": "narrowed",
    }


def test_windows_are_narrowed_for_a_while() -> None:
    """In the configuration and in modules that keep a copy; a list of sizes, or another number, stays."""
    config = SimpleNamespace(sliding_window=20, window_size=[20, 20], attention_chunk_size=8)
    modules = [
        SimpleNamespace(sliding_window=20),
        SimpleNamespace(sliding_window=None),
        SimpleNamespace(),
    ]
    model: Any = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda decoder: config if decoder else None),
        modules=lambda: modules,
    )

    def sizes() -> list[Any]:
        return [vars(owner).get("sliding_window") for owner in (config, *modules)]

    before = sizes()
    with _with_windows(model, {20: 6}):
        assert sizes() == [6, 6, None, None]
        assert (config.window_size, config.attention_chunk_size) == ([20, 20], 8)
    assert sizes() == before
    with contextlib.suppress(ZeroDivisionError), _with_windows(model, {20: 6}):
        _ = 1 / len(vars(modules[2]))
    assert sizes() == before == [20, 20, None, None]
    assert "sliding_window" not in vars(modules[2])
