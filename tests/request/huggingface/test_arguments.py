"""What generate() takes from a script that was written for transformers, and what it says to the rest."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.package.manifest import TokenIds
from qsample.package.package import Package
from qsample.request.text.tokenizer import Tokenizer
from qsample.runtime import CausalLM, Engine, SamplingParams, load
from tests.helpers.fake_package import BOS, EOS, PAD, VOCAB, byte_tokenizer
from tests.helpers.requests import PROMPTS

FREE: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None}


class FakeGenerationConfig:
    """What transformers.GenerationConfig looks like from outside."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def to_dict(self) -> dict[str, Any]:
        return {"top_k": None, "num_beams": None, **self.settings}


def test_inputs_under_both_names_and_as_a_mapping(model: CausalLM) -> None:
    wanted = model.generate(PROMPTS, **FREE).token_ids
    assert model.generate(input_ids=PROMPTS, **FREE).token_ids == wanted
    assert model.generate(inputs=PROMPTS, **FREE).token_ids == wanted
    assert model.generate({"input_ids": PROMPTS}, **FREE).token_ids == wanted
    padded = {"input_ids": np.array([[0, 5], [6, 7]]), "attention_mask": np.array([[0, 1], [1, 1]])}
    assert model.generate(padded, **FREE).prompt_lengths == [1, 2]
    assert model.generate(padded, SamplingParams(max_new_tokens=1)).prompt_lengths == [1, 2]
    mask = [[1] * len(prompt) for prompt in PROMPTS]
    assert model.generate(input_ids=PROMPTS, attention_mask=mask, **FREE).token_ids == wanted


def test_a_call_without_inputs_starts_from_the_bos_token_as_in_transformers(
    fake_model: Callable[..., CausalLM],
) -> None:
    model = fake_model()
    output = model.generate(**FREE)
    assert output.sequences[0, 0] == BOS
    assert output.token_ids == model.generate([[BOS]], **FREE).token_ids
    assert (
        model.generate(bos_token_id=9, **FREE).token_ids == model.generate([[9]], **FREE).token_ids
    )
    without = fake_model(manifest={"token_ids": TokenIds(PAD, None, (EOS,))})
    assert without.generate(bos_token_id=9, **FREE).sequences[0, 0] == 9


def test_a_generation_config_on_top_of_the_models(
    fake_model: Callable[..., CausalLM], tmp_path: Path
) -> None:
    model = fake_model(
        generation_config={
            "do_sample": True,
            "top_k": 0,
            "max_new_tokens": 5,
            "repetition_penalty": 1.3,
        }
    )
    settings = {"do_sample": False, "max_new_tokens": 3}
    wanted = model.generate(
        PROMPTS, SamplingParams(temperature=0, repetition_penalty=1.3, max_new_tokens=3)
    ).token_ids
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    for form in (
        settings,
        FakeGenerationConfig(**settings),
        tmp_path,
        str(tmp_path / "generation_config.json"),
    ):
        assert model.generate(PROMPTS, generation_config=form).token_ids == wanted
    assert model.generate(PROMPTS, FakeGenerationConfig(**settings)).token_ids == wanted  # type: ignore[arg-type]
    on_top = model.generate(PROMPTS, generation_config=settings, max_new_tokens=2)
    assert on_top.token_ids == [row[:2] for row in wanted]
    total = model.generate(PROMPTS[:1], generation_config={"max_length": 5, "do_sample": False})
    assert len(total.token_ids[0]) == 2


def test_the_models_own_settings_can_be_changed(fake: Callable[..., Package]) -> None:
    model = load(fake().path)
    model.generation_config.do_sample = False
    model.generation_config.max_new_tokens = 3
    model.generation_config.eos_token_id = None
    tokens = model.generate(PROMPTS).token_ids
    assert [len(row) for row in tokens] == [3] * 4
    assert tokens == model.generate(PROMPTS, do_sample=False).token_ids
    model.generation_config = {"do_sample": False, "max_new_tokens": 2}  # type: ignore[assignment]
    assert model.generate(PROMPTS, eos_token_id=None).token_ids == [row[:2] for row in tokens]
    model.generation_config.pad_token_id = 40
    assert model.generate([[40, 40, 5, 6]], max_new_tokens=1).prompt_lengths == [2]


def test_the_pad_token_fills_both_sides_of_a_row(fake_model: Callable[..., CausalLM]) -> None:
    stops = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": list(range(3, VOCAB, 3))}
    for settings, options, wanted in (
        ({}, {}, 3),  # no pad token: the first that ends a row
        ({"pad_token_id": 7}, {}, 7),
        ({"pad_token_id": 7}, {"pad_token_id": 9}, 9),
        ({"pad_token_id": 7}, {"pad_token_id": None}, 3),
        ({"pad_token_id": -1}, {}, 3),
        ({}, {"pad_token_id": np.int64(9)}, 9),
    ):
        output = fake_model(generation_config=settings).generate(PROMPTS, **stops, **options)
        width = max(map(len, PROMPTS))
        assert output.sequences[2, 0] == wanted
        row = min(range(4), key=lambda index: len(output.token_ids[index]))
        assert len(output.token_ids[row]) < 8
        tail = output.sequences[row, width + len(output.token_ids[row]) :]
        assert set(tail.tolist()) <= {wanted}


def test_a_pad_token_that_ends_a_row_is_read(fake_model: Callable[..., CausalLM]) -> None:
    model = fake_model(generation_config={"pad_token_id": 40, "eos_token_id": [2, 41]})
    greedy = {"do_sample": False, "max_new_tokens": 1}
    for options, lengths in (
        ({}, [2, 4]),
        ({"pad_token_id": 41}, [4, 4]),  # one of the model's stop tokens
        ({"eos_token_id": 40}, [4, 4]),
        ({"eos_token_id": [7, 40]}, [4, 4]),
        ({"eos_token_id": 41}, [2, 4]),
        ({"eos_token_id": None, "pad_token_id": 41}, [4, 3]),
        ({"generation_config": {"eos_token_id": 40}}, [4, 4]),
        ({"attention_mask": [[1, 1, 1, 1], [1, 1, 1, 1]]}, [4, 4]),
    ):
        assert (
            model.generate([[40, 40, 5, 6], [41, 5, 6, 7]], **greedy, **options).prompt_lengths
            == lengths
        )
    for stops, length in (((40,), 4), ((41,), 2), ((), 2), (None, 2)):
        params = SamplingParams(temperature=0, max_new_tokens=1, eos_token_id=stops)
        assert model.generate([[40, 40, 5, 6]], params).prompt_lengths == [length]
        assert model.generate([[40, 40, 5, 6]], [params]).prompt_lengths == [length]
    of_tokenizer = fake_model(
        generation_config={"pad_token_id": EOS}
    )  # which the manifest knows from there
    assert of_tokenizer.generate([[EOS, 5]], **greedy).prompt_lengths == [2]


def test_a_prompt_that_ends_with_the_pad_token_keeps_it(
    fake_model: Callable[..., CausalLM],
) -> None:
    """As an instruct model has it: its pad token ends a message, and a call names another stop token."""
    model = fake_model(generation_config={"pad_token_id": EOS, "eos_token_id": EOS})
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 1, "eos_token_id": 9}
    for prompt in ([5, EOS, 6, EOS], np.array([5, EOS, 6, EOS])):
        assert model.generate(prompt, **options).prompt_lengths == [4]
        with Engine(model, slots=1) as engine:
            assert engine.add_request(prompt, **options).prompt_tokens == 4
    assert model.generate([[5, EOS, 6, EOS], [EOS, 7]], **options).prompt_lengths == [4, 2]


def test_the_sequences_alone_and_the_output_as_sequences(model: CausalLM) -> None:
    output = model.generate(PROMPTS, return_dict_in_generate=True, **FREE)
    alone = model.generate(PROMPTS, return_dict_in_generate=False, **FREE)
    assert isinstance(alone, np.ndarray)
    assert (
        alone.tolist()
        == output.sequences.tolist()
        == np.asarray(output).tolist()
        == [row.tolist() for row in output]
    )
    assert output.shape == alone.shape
    assert len(output) == 4
    assert output[0].tolist() == alone[0].tolist()
    assert output[:, 11:].tolist() == output.token_ids
    assert output["texts"] is output.texts
    with pytest.raises(KeyError, match="'scores'; the fields are sequences, token_ids"):
        _ = output["scores"]
    with pytest.raises(
        AttributeError, match=r"generate returns no scores: export with return_pdfs=True"
    ):
        _ = output.scores
    assert not hasattr(output, "nothing")
    twin = pickle.loads(pickle.dumps(output))
    assert twin.token_ids == copy.copy(output).token_ids == output.token_ids


def test_neutral_values_are_accepted(model: CausalLM) -> None:
    wanted = model.generate(PROMPTS, **FREE).token_ids
    harmless = {
        "use_cache": True, "num_beams": 1, "num_return_sequences": 1, "output_scores": False, "length_penalty": 1.0,
        "no_repeat_ngram_size": 0, "typical_p": 1.0, "assistant_model": None, "temperature": 1.0, "top_p": 1.0,
        "early_stopping": False, "logits_processor": [], "stopping_criteria": None, "renormalize_logits": True,
        "synced_gpus": False, "past_key_values": None, "token_type_ids": None, "max_time": None, "top_k": 50,
    }  # fmt: skip
    assert model.generate(PROMPTS, **FREE, **harmless).token_ids == wanted


def test_values_of_other_libraries(model: CausalLM) -> None:
    wanted = model.generate(
        PROMPTS, temperature=0.5, seed=[3, 4, 5, 6][: len(PROMPTS)], max_new_tokens=3
    )
    seeds = np.array([3, 4, 5, 6])[: len(PROMPTS)]
    options = {
        "temperature": np.float32(0.5),
        "num_beams": np.int64(1),
        "suppress_tokens": np.array([], np.int64),
    }
    found = model.generate(
        PROMPTS, seed=seeds, max_new_tokens=np.int64(3), max_time=np.int64(600), **options
    )
    assert (found.token_ids, found.seeds) == (wanted.token_ids, wanted.seeds)


def test_more_tokens_than_there_is_memory_for(fake_model: Callable[..., CausalLM]) -> None:
    unlimited = fake_model(manifest={"max_position_embeddings": None})
    for most in (2**31 - 1, 2**30):
        with pytest.raises(
            MemoryError, match=r"a tensor \[.*\] takes .* GB, .* fewer tokens a row"
        ):
            unlimited.generate([[5]] * 64, max_new_tokens=most, do_sample=False)


def test_a_tokenizer_for_a_package_without_one(fake_model: Callable[..., CausalLM]) -> None:
    own, bare = fake_model(), fake_model(tokenizer=False)
    wanted = own.generate("ab", **FREE)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), pad_token="<pad>"
    )
    theirs.backend_tokenizer.enable_truncation(1)
    for tokenizer in (theirs, byte_tokenizer(), Tokenizer(byte_tokenizer())):
        assert bare.generate("ab", tokenizer=tokenizer, **FREE).texts == wanted.texts
        assert own.generate("ab", tokenizer=tokenizer, **FREE).texts == wanted.texts
    assert theirs.backend_tokenizer.truncation is not None  # the caller's own is left as it is
    stopped = bare.generate("ab", tokenizer=theirs, stop_strings=wanted.texts[0][1], **FREE)
    assert stopped.finish_reasons == ["stop"]


def test_attributes_and_methods_of_a_model_of_transformers(fake: Callable[..., Package]) -> None:
    model = load(fake(files={"config.json": '{"hidden_size": 16, "model_type": "fake"}'}).path)
    assert (model.config.hidden_size, model.config.model_type, model.device, model.dtype) == (
        16,
        "fake",
        "cpu",
        "float32",
    )
    assert model.eval() is model.to("cpu") is model
    assert model.generation_config.top_p is None
    with pytest.raises(ValueError, match="runs on 'cpu' and cannot move to 'cuda'"):
        model.cuda()
