"""Opening checkpoints that read images: the processor, the class that is loaded, and what is refused with advice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from qsample import AutoModelForCausalLM, AutoModelForImageTextToText
from qsample.checkpoints import processor as processor_module
from qsample.checkpoints.checkpoint import Checkpoint
from qsample.errors import QsampleError, UnsupportedModelError
from qsample.transforms.quantized_linear import quantized_layers
from tests.helpers.adapters import lora_pair, save_adapter
from tests.helpers.fake_package import fake_package
from tests.helpers.quantized_checkpoints import Scheme, quantized_layer
from tests.helpers.tiny_models import save_checkpoint
from tests.helpers.tiny_vlms import IMAGE_TEXT, config_of, make_tiny_vlm, picture, tokenizer_of

ALONE = r"text_only=True \(--text-only\)$"


def outlined(folder: Path, config: Any, **preprocessor: Any) -> str:
    """A checkpoint of a configuration, a tokenizer, and a preprocessor_config.json; its weights are an empty file."""
    config.save_pretrained(folder)
    tokenizer_of("llava").save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    (folder / "model.safetensors").touch()
    return str(folder)


@pytest.mark.parametrize("files", [["preprocessor", "processor"], ["preprocessor"], ["processor"]])
def test_the_processor_of_all_layouts(files: list[str], tmp_path: Path) -> None:
    """Published models have preprocessor_config.json; transformers 5 saves all in processor_config.json."""
    folder = make_tiny_vlm("qwen2_5_vl", tmp_path, unified=files == ["processor"])
    if files == ["preprocessor"]:
        (folder / "processor_config.json").unlink()
    assert sorted(path.name for path in folder.glob("*processor*")) == [
        f"{name}_config.json" for name in files
    ]
    checkpoint = Checkpoint(str(folder), images=True)
    processor: Any = checkpoint.processor
    inputs = processor(
        text=f"{IMAGE_TEXT['qwen2_5_vl']}?", images=[picture(40, 30)], return_tensors="np"
    )
    rows, columns = inputs["image_grid_thw"][0][1:]
    assert (inputs["input_ids"] == checkpoint.config.image_token_id).sum() == rows * columns // 4
    assert inputs["pixel_values"].shape == (rows * columns, 3 * 2 * 4 * 4)
    assert checkpoint.tokenizer is not None
    assert "<|image_pad|>" in str(checkpoint.tokenizer.chat_template)


def test_a_type_without_a_text_model(tmp_path: Path) -> None:
    path = str(make_tiny_vlm("llava", tmp_path / "llava"))
    with pytest.raises(
        UnsupportedModelError,
        match=f"reads images; open it with AutoModelForImageTextToText, .*{ALONE}",
    ):
        AutoModelForCausalLM.from_pretrained(path).export(tmp_path / "package")
    kinds = {}
    for name, options in {
        "both": {"images": True},
        "cli": {"images": None},
        "text": {"text_only": True},
    }.items():
        checkpoint = Checkpoint(path, **options)  # type: ignore[arg-type]
        assert checkpoint.outline.kind is transformers.LlavaForConditionalGeneration
        kinds[name] = type(checkpoint.processor).__name__
    assert kinds == {"both": "LlavaProcessor", "cli": "LlavaProcessor", "text": "NoneType"}


def test_a_type_with_a_text_model(tmp_path: Path) -> None:
    """The class is transformers' for text, unless images are read, too; a line says what is left out."""
    path = str(make_tiny_vlm("qwen3_5", tmp_path))
    text, both = transformers.Qwen3_5ForCausalLM, transformers.Qwen3_5ForConditionalGeneration
    for options, kind in (
        ({}, text),
        ({"text_only": True}, text),
        ({"images": None}, both),
        ({"images": True}, both),
    ):
        assert Checkpoint(path, **options).outline.kind is kind  # type: ignore[arg-type]
    with pytest.warns(
        UserWarning, match="language model alone is exported.*; AutoModelForImageTextToText also"
    ):
        Checkpoint(path).load()


def test_what_reads_no_images(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "llama", "llama")
    package = fake_package(tmp_path / "package")
    for path in (tmp_path / "llama", package.path):
        with pytest.raises(QsampleError, match="open it with AutoModelForCausalLM"):
            AutoModelForImageTextToText.from_pretrained(path).export(tmp_path / "out")
    assert Checkpoint(str(tmp_path / "llama"), images=None).processor is None


def mllama() -> Any:
    text = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "cross_attention_layers": [1],
    }
    return transformers.MllamaConfig(text_config=text)


def test_images_through_cross_attention(tmp_path: Path) -> None:
    path = outlined(tmp_path, mllama(), image_processor_type="MllamaImageProcessor")
    with pytest.raises(
        UnsupportedModelError,
        match=f"MllamaForConditionalGeneration, .* stand for tokens, .*{ALONE}",
    ):
        _ = Checkpoint(path, images=True).processor
    checkpoint = Checkpoint(path, images=None)  # the command line
    with pytest.warns(
        UserWarning, match="stand for tokens.*; its language model alone is exported"
    ):
        assert checkpoint.processor is None
    assert checkpoint._auto_class is transformers.AutoModelForCausalLM


@pytest.mark.parametrize(
    ("preprocessor", "message"),
    [
        (
            {
                "image_processor_type": "Llama4ImageProcessorFast",
                "processor_class": "Llama4Processor",
            },
            "with Pillow",
        ),
        (
            {"image_processor_type": "NoSuchProcessor", "processor_class": "Qwen3VLProcessor"},
            "with Pillow",
        ),
        (
            {
                "image_processor_type": "Mine",
                "auto_map": {"AutoImageProcessor": "mine.Mine", "AutoProcessor": "mine.P"},
            },
            "the repository's own code",
        ),
    ],
)
def test_processors_that_packages_have_not(
    preprocessor: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = outlined(tmp_path, config_of("qwen3_vl_moe"), **preprocessor)
    with pytest.raises(
        UnsupportedModelError, match=f"{message}.*; open its language model alone with {ALONE}"
    ):
        AutoModelForImageTextToText.from_pretrained(path).export(tmp_path / "package")


def test_own_code_beside_a_class_of_transformers_is_not_needed(tmp_path: Path) -> None:
    own = {"auto_map": {"AutoProcessor": "mine.P"}, "processor_class": "Qwen3VLProcessor"}
    kind = processor_module._kind(own, str(tmp_path), config_of("qwen3_vl_moe"), {})
    assert kind is transformers.Qwen3VLProcessor


def test_images_need_the_tokenizer(tmp_path: Path) -> None:
    path = outlined(tmp_path, config_of("llava"), image_processor_type="LlavaImageProcessor")
    with pytest.raises(
        UnsupportedModelError, match=f"needs its tokenizer to read images, .*{ALONE}"
    ):
        _ = Checkpoint(path, images=True, tokenizer=None).processor


def test_an_adapter_with_matrices_of_the_tower_is_merged(tmp_path: Path) -> None:
    path = str(make_tiny_vlm("llava", tmp_path / "llava"))
    layers = [
        "model.vision_tower.encoder.layers.0.mlp.fc1",
        "model.language_model.layers.1.mlp.up_proj",
    ]
    pairs = {**lora_pair(layers[0], 48, 32), **lora_pair(layers[1], 96, 64)}
    save_adapter(tmp_path / "adapter", pairs)
    plain, adapted = (
        Checkpoint(path, images=True, adapter=adapter).load().state_dict()
        for adapter in (None, str(tmp_path / "adapter"))
    )
    changed = {
        name.removesuffix(".weight")
        for name in plain
        if not torch.equal(plain[name], adapted[name])
    }
    assert changed == set(layers)


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_packed_language_layers_and_a_float_tower(method: str, tmp_path: Path) -> None:
    """As published quantized models have them, under the names that older versions of transformers gave the layers."""
    folder = make_tiny_vlm("llava", tmp_path / "llava", hidden_size=128, intermediate_size=256)
    scheme, generator = Scheme(method=method), np.random.default_rng(0)
    stored, wanted = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "language_model" in name and name.endswith("proj.weight"):
            layer = name.removesuffix(".weight")
            packed = quantized_layer(generator, *tensor.shape, scheme)
            stored |= {f"{layer}.{part}": values for part, values in packed.tensors.items()}
            wanted[layer.removeprefix("language_model.")] = packed.weight
        else:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {
        "quantization_config": scheme.config()
    }
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "scratch").mkdir()
    model = Checkpoint(str(folder), images=True).load(scratch=tmp_path / "scratch")
    packed_layers = {layer for layer, _ in quantized_layers(model)}
    names = {name for name, module in model.named_modules() if module in packed_layers}
    assert names == {f"model.language_model.{layer.removeprefix('model.')}" for layer in wanted}
