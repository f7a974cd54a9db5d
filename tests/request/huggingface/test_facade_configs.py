"""The two configurations by attribute, and the forms in which a caller brings one."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from qsample.request.huggingface.facade import GenerationConfig, ModelConfig, as_generation_config
from qsample.request.sampling_params import settings_of


def test_a_generation_config_by_attribute() -> None:
    config = GenerationConfig({"max_new_tokens": 5, "a_key_of_the_model": 1})
    assert (config.max_new_tokens, config.a_key_of_the_model, config.pad_token_id) == (5, 1, None)
    config.pad_token_id = 7
    config.max_new_tokens = None
    assert (
        config.to_dict()
        == dict(config)
        == {"max_new_tokens": None, "a_key_of_the_model": 1, "pad_token_id": 7}
    )
    config.eos_token_id = None
    assert config["eos_token_id"] == ()
    with pytest.raises(
        AttributeError, match="has no field 'max_new_token'; did you mean 'max_new_tokens'"
    ):
        config.max_new_token = 5
    with pytest.raises(AttributeError, match="has no field 'temprature'"):
        _ = config.temprature
    assert not hasattr(config, "no_such_field")
    for twin in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert type(twin) is GenerationConfig
        assert twin == config
    assert as_generation_config(config) is config


def test_every_field_of_transformers_config_can_be_read() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GenerationConfig()
    ours = GenerationConfig()
    for name in vars(theirs):
        if not name.startswith("_") and name != "transformers_version":
            assert getattr(ours, name) is None, name


@pytest.mark.parametrize("as_path", [str, Path])
def test_the_forms_of_a_generation_config(as_path: Any, tmp_path: Path) -> None:
    wanted = {"max_new_tokens": 5, "eos_token_id": [2, 3]}
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({**wanted, "top_p": None}))
    assert settings_of(wanted) == wanted
    assert settings_of(as_path(tmp_path)) == settings_of(as_path(file)) == wanted
    transformers = pytest.importorskip("transformers")
    theirs = settings_of(transformers.GenerationConfig(**wanted))
    assert {name: theirs[name] for name in wanted} == wanted
    transformers.GenerationConfig(**wanted).save_pretrained(tmp_path)
    assert wanted.items() <= settings_of(as_path(tmp_path)).items()


def test_invalid_generation_configs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="generation_config is a int; give a mapping"):
        settings_of(5)
    with pytest.raises(ValueError, match=r"nowhere.*cannot be read"):
        settings_of(tmp_path / "nowhere")
    for text in ("{", "[" * 100_000, "\xff"):
        (tmp_path / "bad.json").write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match=r"bad\.json cannot be read"):
            settings_of(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"list\.json is not a JSON object"):
        settings_of(str(tmp_path / "list.json"))


def test_a_model_config_by_attribute() -> None:
    config = ModelConfig(
        {
            "hidden_size": 64,
            "rope_parameters": {"rope_theta": 1e4},
            "text_config": {"vocab_size": 9},
        }
    )
    assert config.hidden_size == config["hidden_size"] == 64
    assert config.rope_parameters.rope_theta == 1e4
    assert config.get_text_config().vocab_size == config.text_config.vocab_size == 9
    assert ModelConfig({"a": 1}).get_text_config(decoder=True).a == 1
    assert config.pad_token_id is None
    assert config.get("nothing", 5) == getattr(config, "nothing", 5) == 5
    assert config.to_dict()["rope_parameters"] == {"rope_theta": 1e4}
    with pytest.raises(
        AttributeError, match="has no field 'hiden_size'; did you mean 'hidden_size'"
    ):
        _ = config.hiden_size
    with pytest.raises(
        AttributeError, match=r"config\.pad_token_id cannot be set.*generation_config\.pad_token_id"
    ):
        config.pad_token_id = 0
    config.use_cache = False  # for training, and without effect here
    assert config.is_encoder_decoder is False
    for twin in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config
        assert twin.hidden_size == 64
    assert not hasattr(object.__new__(ModelConfig), "hidden_size"), "as while it is copied"
    assert not hasattr(ModelConfig({"__array__": 1}), "__array__")
    assert (len(config), [*config]) == (3, ["hidden_size", "rope_parameters", "text_config"])
