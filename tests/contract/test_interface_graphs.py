"""What the fields of an interface promise of its graphs: names, dtypes and axes, as docs/contract.md lists them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from qsample.contract import tensors
from qsample.contract.interface import (
    AdapterTarget,
    Features,
    GraphSpec,
    ImageShape,
    Interface,
    KeyValueShape,
    RecurrentShape,
    adapter_ids,
    adapter_names,
    kind_of,
    ranks_axis,
)
from qsample.contract.storage import Storage, storage_of
from qsample.contract.tensors import TensorSpec
from qsample.errors import ArgumentError

KEY_VALUES = (KeyValueShape(2, 8), KeyValueShape(1, 16))
Q, DOWN = "model.layers.0.q_proj", "model.layers.0.down_proj"
TARGETS = (
    AdapterTarget(Q, 6, 10),
    AdapterTarget(DOWN, 5, 6),
    AdapterTarget("layers.1.q_proj", 6, 7),
)


def interface(**changes: Any) -> Interface:
    return Interface(**{"vocab_size": 100, "key_values": KEY_VALUES, **changes})


def names(specs: Any) -> list[str]:
    return [spec.name for spec in specs]


def axes(specs: Any) -> dict[str, tuple[Any, ...]]:
    return {spec.name: (spec.dtype, *spec.axes) for spec in specs}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size is 0; it must be at least 1"),
        ({"dtype": "float64"}, "dtype is 'float64'; choose one of"),
        ({"kv_cache_dtype": "int2"}, "kv_cache_dtype is 'int2'; choose one of"),
        ({"features": Features(top_logprobs=101)}, r"top_logprobs is 101; it must be 0 to vocab_size \(100\)"),
    ],
)  # fmt: skip
def test_interfaces_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        interface(**changes)
    assert interface(vocab_size=1).vocab_size == 1
    assert interface(features=Features(top_logprobs=100)).features.top_logprobs == 100


def test_sizes_that_a_package_fixes() -> None:
    plain = interface().sizes
    assert (plain["V"], plain["W"], plain["M"]) == (100, 4, 0)
    assert interface(vocab_size=96).sizes["W"] == 3
    assert interface(vocab_size=97).sizes["W"] == 4
    many = interface(features=Features(top_logprobs=5, num_speculative_tokens=3), adapters=TARGETS)
    assert many.sizes["M"] == 5
    assert (many.sizes[tensors.GUESSES], many.sizes[tensors.NEW_TOKENS]) == (3, 4)
    assert (plain[tensors.GUESSES], plain[tensors.NEW_TOKENS]) == (0, 1)
    assert {axis: size for axis, size in many.sizes.items() if "." in axis} == {
        ranks_axis("q_proj"): 0,
        ranks_axis("down_proj"): 0,
    }


@pytest.mark.parametrize(
    ("changes", "version"),
    [
        ({}, tensors.CONTRACT_VERSION),
        ({"features": Features(num_speculative_tokens=1)}, tensors.STEPS_VERSION),
        ({"adapters": TARGETS}, tensors.STEPS_VERSION),
        ({"image": ImageShape(8), "adapters": TARGETS}, tensors.IMAGES_VERSION),
        ({"image": ImageShape(8), "kv_cache_dtype": "int4"}, tensors.CACHES_VERSION),
        ({"kv_cache_dtype": "int8"}, tensors.CONTRACT_VERSION),
        ({"key_values": (KeyValueShape(1, 8, capacity=4),)}, tensors.CACHES_VERSION),
        ({"features": Features(grammars=True), "kv_cache_dtype": "int4"}, tensors.GRAMMARS_VERSION),
    ],
)
def test_the_oldest_version_that_has_all_of_it(changes: dict[str, Any], version: str) -> None:
    assert interface(**changes).contract_version == version


def test_caches() -> None:
    """Layers by their place, or by their number in a model that has other layers, too."""
    assert axes(interface(dtype="float16").cache_states) == {
        "past_key_values.0.key": ("float16", "B", 2, "T", 8),
        "past_key_values.0.value": ("float16", "B", 2, "T", 8),
        "past_key_values.1.key": ("float16", "B", 1, "T", 16),
        "past_key_values.1.value": ("float16", "B", 1, "T", 16),
    }
    assert axes(interface(kv_cache_dtype="int8").cache_states[:1]) == {
        "past_key_values.0.key": ("int8", "B", 2, "T", 8)
    }
    # Two numbers of four bits are a byte.
    assert axes(interface(kv_cache_dtype="int4").cache_states[:1]) == {
        "past_key_values.0.key": ("uint8", "B", 2, "T", 4)
    }
    mixed = interface(
        key_values=(KeyValueShape(1, 8, 3), KeyValueShape(1, 8, 5, capacity=7)),
        recurrent=(
            RecurrentShape(0, "conv_state", 0, (2, 3), "float32"),
            RecurrentShape(1, "recurrent_state", 2, (4,), "float16"),
        ),
    )
    assert mixed.cache_layers == (3, 5)
    assert axes(mixed.cache_states) == {
        "past_key_values.3.key": ("float32", "B", 1, "T", 8),
        "past_key_values.3.value": ("float32", "B", 1, "T", 8),
        "past_key_values.5.key": ("float32", "B", 1, 7, 8),
        "past_key_values.5.value": ("float32", "B", 1, 7, 8),
        "past_key_values.0.conv_state": ("float32", "B", 2, 3),
        "past_key_values.1.recurrent_state.2": ("float16", "B", 4),
    }
    assert names(mixed.fixed_states) == names(mixed.cache_states[2:])
    assert (mixed.slides, interface().slides) == (True, False)
    assert mixed.cache_states[0].meaning == "keys of layer 3"
    assert mixed.cache_states[-1].meaning == "recurrent state of layer 1"


def test_parameters_of_features() -> None:
    plain = names(interface().parameters)
    full = interface(
        features=Features(
            logit_bias=True,
            allowed_tokens=True,
            grammars=True,
            filters=("typical_p",),
            num_speculative_tokens=2,
        )
    )
    added = names(full.parameters)[len(plain) :]
    assert names(full.parameters)[: len(plain)] == plain
    assert added == [
        "logit_bias_ids",
        "logit_bias",
        "allowed_tokens",
        "grammar_deadline",
        "typical_p",
        *names(tensors.SPECULATION_INPUTS),
    ]
    assert (
        names(full.without_guesses().parameters)
        == names(full.parameters)[: -len(tensors.SPECULATION_INPUTS)]
    )
    assert interface().grammar_tables == ()
    assert full.grammar_tables == (*full.without_guesses().grammar_tables, tensors.GRAMMAR_DRAFTS)
    assert names(full.sampler_states) == [*names(interface().sampler_states), "grammar_state"]
    for name, state in tensors.FILTER_STATES.items():
        with_state = interface(features=Features(filters=(name, "typical_p"))).sampler_states
        assert with_state == (*interface().sampler_states, state)


@pytest.mark.parametrize(
    ("features", "outputs"),
    [
        ({}, []),
        ({"logprobs": True}, ["logprobs"]),
        ({"top_logprobs": 2}, ["top_logprobs", "top_logprob_ids"]),
        ({"probs": True}, ["probs"]),
        ({"logprobs": True, "top_logprobs": 1, "probs": True},
         ["logprobs", "top_logprobs", "top_logprob_ids", "probs"]),
    ],
)  # fmt: skip
def test_optional_outputs(features: dict[str, Any], outputs: list[str]) -> None:
    found = interface(features=Features(**features))
    assert found.sampler_outputs[0].name == "next_ids"
    assert sorted(names(found.token_outputs)) == sorted(outputs)
    assert found.sampler_outputs[1:] == found.token_outputs
    assert ("adjusted_logits" in names(found.sampler.outputs)) == (
        not features.keys() & {"logprobs", "top_logprobs"}
    )
    # With guesses, a step has several tokens; a token's own outputs stay as they are.
    if "probs" not in features:
        guessing = interface(features=Features(**features, num_speculative_tokens=3))
        assert guessing.token_outputs == found.token_outputs
        assert names(guessing.sampler_outputs)[1:4] == ["new_ids", "num_new", "num_draft_tokens"]
        assert len(guessing.sampler_outputs) == len(found.sampler_outputs) + 3
        later = guessing.sampler_outputs[4:]
        assert all(tensors.NEW_TOKENS in spec.axes for spec in later)


def test_scores_of_prompts() -> None:
    plain = interface(features=Features(logprobs=True, prompt_logprobs=True))
    tops = interface(features=Features(logprobs=True, prompt_logprobs=True, top_logprobs=2))
    assert interface().prompt_outputs == ()
    assert names(plain.prompt_outputs) == ["prompt_logprobs", "prompt_ranks"]
    assert sorted(names(tops.prompt_outputs)[2:]) == [
        "prompt_top_logprob_ids",
        "prompt_top_logprobs",
    ]
    scoring = plain.scoring_decoder
    assert scoring.inputs == (*plain.decoder.inputs, tensors.SCORED_PLACES, tensors.SCORED_IDS)
    assert scoring.outputs == (*plain.decoder.outputs, *plain.prompt_outputs)
    assert scoring.states == plain.decoder.states
    for wrong in ({"logprobs": False}, {"logprobs": True, "sampler": False}):
        with pytest.raises(ArgumentError, match="prompt_logprobs is True"):
            Features(prompt_logprobs=True, **wrong)


def test_adapters() -> None:
    assert kind_of(Q) == "q_proj"
    assert kind_of("lm_head") == "lm_head"
    assert adapter_names("a.b") == ("a.b.lora_A", "a.b.lora_B")
    found = interface(dtype="float16", adapters=TARGETS)
    assert found.adapter_kinds == ("q_proj", "down_proj")
    assert TARGETS[0].kind == "q_proj"
    ranks = ranks_axis("q_proj")
    assert axes(found.adapter_inputs[1:5]) == {
        "adapter_ids.q_proj": ("int32", ranks),
        "adapter_ids.down_proj": ("int32", ranks_axis("down_proj")),
        f"{Q}.lora_A": ("float16", ranks, 6),
        f"{Q}.lora_B": ("float16", ranks, 10),
    }
    assert found.adapter_inputs[0] is tensors.ADAPTER
    assert len(found.adapter_inputs) == 1 + 2 + 2 * 3
    assert adapter_ids("q_proj") == found.adapter_inputs[1]
    assert interface().adapter_inputs == ()
    for graph in (found.decoder, found.model):
        assert graph.inputs[-9:] == found.adapter_inputs


def test_images() -> None:
    tiles = interface(dtype="bfloat16", image=ImageShape(24))
    assert interface().image_inputs == ()
    assert axes(tiles.image_inputs) == {
        "image_rows": ("int32", "B", "S"),
        "image_features": ("bfloat16", tensors.IMAGE_TOKENS, 24),
    }
    assert tiles.image_inputs[1].off == 0
    assert axes(tiles.vision.inputs) == {
        "pixel_values": ("float32", tensors.TILES, 3, tensors.HEIGHT, tensors.WIDTH)
    }
    patches = interface(image=ImageShape(24, axial=True, patch_values=48))
    assert names(patches.image_inputs) == ["image_rows", "image_features", "position_offsets"]
    assert axes(patches.vision.inputs[:1]) == {"pixel_values": ("float32", tensors.PATCHES, 48)}
    assert patches.vision.inputs[1] is tensors.GRID
    assert names(patches.vision.outputs) == ["image_features"]
    assert (ImageShape(8).deepstack, ImageShape(8).axial, ImageShape(8).blockwise, ImageShape(8).patch_values) == (
        0, False, False, 0)  # fmt: skip


def test_the_graphs_of_a_package() -> None:
    plain = interface()
    assert set(plain.graphs) == {"decoder.onnx", "initial_state.onnx"}
    assert set(interface(image=ImageShape(8)).graphs) == {
        "decoder.onnx",
        "initial_state.onnx",
        "vision.onnx",
    }
    host = interface(features=Features(sampler=False))
    assert set(host.graphs) == {"decoder.onnx", "initial_state.onnx", "sampler.onnx"}
    assert host.graphs["decoder.onnx"] == host.decoder == host.model
    assert host.graphs["sampler.onnx"] == host.sampler
    # The model reads what the sampler advances; only recurrent layers have to know who runs.
    assert names(host.decoder.inputs) == ["input_ids", "input_lengths", "lengths"]
    assert names(host.decoder.outputs) == ["logits"]
    assert host.decoder.states == plain.cache_states
    recurrent = interface(recurrent=(RecurrentShape(2, "conv_state", 0, (3,), "float32"),))
    assert names(recurrent.model.inputs) == ["input_ids", "input_lengths", "lengths", "status"]
    assert names(host.sampler.inputs)[:4] == ["logits", "input_ids", "input_lengths", "emit"]
    assert names(plain.decoder.inputs)[:3] == ["input_ids", "input_lengths", "emit"]
    assert plain.decoder.inputs[3:] == plain.parameters
    assert plain.decoder.states == (*plain.sampler_states, *plain.cache_states)
    assert names(plain.initial_state.inputs) == ["seed", "capacity"]
    assert plain.initial_state.outputs == plain.decoder.states
    captured = interface(captured=True, features=Features(grammars=True))
    place = len(captured.parameters)
    assert captured.decoder.inputs[3 + place : 6 + place] == tensors.REPLAY_ROWS
    assert captured.decoder.inputs[6 + place :] == captured.grammar_tables
    assert (captured.contract_version, plain.contract_version) == ("2.5", "2.0")


def test_results_of_a_graph() -> None:
    """The next value of each state, after the outputs; none of a state that no step changes."""
    spec = GraphSpec(
        (TensorSpec("x", "int32", ("B",), ""),),
        (
            TensorSpec("past_key_values.3.key", "float32", ("B", "T"), ""),
            TensorSpec("lengths", "int32", ("B",), ""),
            TensorSpec("fixed", "int32", ("B",), "", read_only=True),
        ),
        (TensorSpec("y", "int64", ("B",), ""),),
    )
    assert spec.input_names == ["x", "past_key_values.3.key", "lengths", "fixed"]
    assert (
        spec.output_names == names(spec.results) == ["y", "present.3.key", "lengths_RetainedState"]
    )
    assert spec.retained == {
        "past_key_values.3.key": "present.3.key",
        "lengths": "lengths_RetainedState",
    }
    assert spec.results[1].axes == ("B", "T")


def test_features_for_serving() -> None:
    found = Features(top_logprobs=1, filters=("typical_p",)).for_serving()
    assert found.logit_bias
    assert found.allowed_tokens
    assert found.grammars
    assert found.logprobs
    assert found.prompt_logprobs
    assert (found.top_logprobs, set(found.filters)) == (20, {"typical_p", "penalty_last_n"})
    assert Features(top_logprobs=30).for_serving().top_logprobs == 30
    assert not Features(sampler=False).for_serving().prompt_logprobs


@pytest.mark.parametrize(
    ("kind", "field", "least"),
    [
        (Features, "logprobs_mode", 0),
        (Features, "num_speculative_tokens", 0),
        (Features, "max_lora_rank", 0),
        (KeyValueShape, "head_dim", 1),
        (KeyValueShape, "num_key_value_heads", 1),
        (KeyValueShape, "capacity", 1),
        (RecurrentShape, "shape", 1),
        (AdapterTarget, "in_features", 1),
        (AdapterTarget, "out_features", 1),
        (Interface, "adapters", 0),
        (Interface, "image", 0),
    ],
)
def test_the_least_number_of_a_field_in_manifests(kind: type, field: str, least: int) -> None:
    assert stored_as(kind, field).least == least


@pytest.mark.parametrize(
    ("kind", "field", "omitted"),
    [
        (Features, "logprobs_mode", "raw_logprobs"),
        (Features, "num_speculative_tokens", 0),
        (Features, "max_lora_rank", 0),
        (KeyValueShape, "capacity", None),
        (Interface, "adapters", ()),
        (Interface, "image", None),
    ],
)
def test_values_that_manifests_leave_out(kind: type, field: str, omitted: Any) -> None:
    assert stored_as(kind, field).omitted == omitted


def stored_as(kind: type, field: str) -> Storage:
    (entry,) = [one for one in fields(kind) if one.name == field]
    return storage_of(entry)
