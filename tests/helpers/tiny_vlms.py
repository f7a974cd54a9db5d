"""Tiny random image-text checkpoints with tokenizer, processor and chat template, and transformers' answers to them."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers as tf
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    LogitsProcessor,
    PreTrainedTokenizerFast,
)

from qsample.checkpoints.processor import assemble, load_processor
from tests.helpers.small_packages import byte_tokenizer

VOCAB_SIZE: Final = 320  # 256 bytes, four special tokens, and the type's own after them
FIRST_SPECIAL: Final = 260

TEXT: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
TOWER: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 24,
}
AXES: Final[dict[str, Any]] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [2, 3, 3],
}
QWEN_TOWER: Final[dict[str, Any]] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
# The images of a prompt stand where they are said, or in front of the turn's text, as in LLaVA's templates.
IN_ORDER: Final = """{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}
{%- if message['content'] is string %}{{ message['content'] }}{% else %}
{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}{{ 'IMAGE' }}{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}
{%- endfor %}{% endif %}{{ '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
IMAGES_FIRST: Final = """{% for message in messages %}{{ message['role'].upper() + ': ' }}
{%- if message['content'] is string %}{{ message['content'] }}{% else %}
{%- for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ 'IMAGE\\n' }}{% endfor %}
{%- for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}
{%- endif %}{{ ' ' }}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""

_QWEN: Final = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_IDEFICS: Final = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
_GEMMA: Final = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
# The special tokens of each type: a tuple, or the tokenizer's attributes.
SPECIAL: Final[dict[str, tuple[str, ...] | dict[str, str]]] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_5": _QWEN,
    "gemma3": dict(zip(("boi_token", "eoi_token", "image_token"), _GEMMA, strict=True)),
    "gemma4": {
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    },
    "llava": ("<image>",),
    "llava_next": ("<image>",),
    "llava_onevision": ("<image>", "<video>"),
    "smolvlm": _IDEFICS,
    "idefics3": _IDEFICS,
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    "mistral3": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "aya_vision": (
        "<image>",
        "<|START_OF_IMG|>",
        "<|END_OF_IMG|>",
        "<|IMG_PATCH|>",
        "<|IMG_LINE_BREAK|>",
        "TILE_GLOBAL",
    ),
    "glm4v": (
        "<|begin_of_image|>",
        "<|end_of_image|>",
        "<|image|>",
        "<|begin_of_video|>",
        "<|end_of_video|>",
    ),
}
# What a template writes for an image; a prompt may have it, too.
IMAGE_TEXT: Final = {
    **dict.fromkeys(SPECIAL, "<image>"),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"),
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "gemma3": "<start_of_image>",
    "gemma4": "<|image|>",
    "internvl": "<IMG_CONTEXT>",
    "mistral3": "[IMG]",
    "glm4v": "<|begin_of_image|><|image|><|end_of_image|>",
}
TYPES: Final = tuple(SPECIAL)


def ids_of(model_type: str) -> dict[str, int]:
    """The ids of the type's special tokens by text."""
    names = SPECIAL[model_type]
    return {
        name: FIRST_SPECIAL + i
        for i, name in enumerate(names.values() if isinstance(names, dict) else names)
    }


def tokenizer_of(model_type: str) -> PreTrainedTokenizerFast:
    """Bytes, `<s>` in front, and the special tokens of the type."""
    names = SPECIAL[model_type]
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), **special)
    if isinstance(names, dict):
        tokenizer.add_tokens(list(names.values()), special_tokens=True)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer._tokenizer, extra_special_tokens=names, **special
        )
    else:
        tokenizer.add_special_tokens({"extra_special_tokens": list(names)})
    assert {name: tokenizer.convert_tokens_to_ids(name) for name in ids_of(model_type)} == ids_of(
        model_type
    )
    return tokenizer


def _siglip(**changes: Any) -> tf.SiglipVisionConfig:
    return tf.SiglipVisionConfig(**{**TOWER, "vision_use_head": False, **changes})


def _clip() -> tf.CLIPVisionConfig:
    return tf.CLIPVisionConfig(**{**TOWER, "image_size": 16, "projection_dim": 32})


def _qwen(
    kind: type[tf.PretrainedConfig], text: dict[str, Any], vision: dict[str, Any]
) -> tf.PretrainedConfig:
    ids = dict(
        zip(
            ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"),
            range(260, 264),
            strict=True,
        )
    )
    return kind(
        text_config={**TEXT, "rope_parameters": AXES, **text},
        vision_config={**QWEN_TOWER, **vision},
        tie_word_embeddings=False,
        **ids,
    )


_INTERLEAVED: Final = {"rope_parameters": {**AXES, "mrope_interleaved": True}}
_DEEP: Final = {"num_position_embeddings": 64, "in_channels": 3}


def config_of(model_type: str, **text: Any) -> tf.PretrainedConfig:
    """The configuration; `text`: changes of the language model's."""
    sizes = {**TEXT, **text}
    image = ids_of(model_type)[{"gemma3": "<image_soft_token>", "gemma4": "<|image|>", "internvl": "<IMG_CONTEXT>",
        "mistral3": "[IMG]", "aya_vision": "<|IMG_PATCH|>", "glm4v": "<|image|>"}.get(
            model_type, "<|image_pad|>" if model_type.startswith("qwen") else "<image>")]  # fmt: skip
    match model_type:
        case "qwen2_vl":
            tower = {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
            tower = {
                key: value
                for key, value in {**QWEN_TOWER, **tower}.items()
                if key != "out_hidden_size"
            }
            return tf.Qwen2VLConfig(
                text_config={**sizes, "rope_parameters": AXES},
                vision_config=tower,
                vision_start_token_id=260,
                vision_end_token_id=261,
                image_token_id=262,
                video_token_id=263,
                tie_word_embeddings=False,
            )
        case "qwen2_5_vl":
            windows = {"window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2}
            return _qwen(tf.Qwen2_5_VLConfig, {"use_sliding_window": False, **text}, windows)
        case "qwen3_vl":
            deep = {**_DEEP, "deepstack_visual_indexes": [0, 1]}
            return _qwen(tf.Qwen3VLConfig, {**_INTERLEAVED, **text}, deep)
        case "qwen3_vl_moe":
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
            deep = {**_DEEP, "deepstack_visual_indexes": [0, 1]}
            return _qwen(tf.Qwen3VLMoeConfig, {**_INTERLEAVED, **experts, **text}, deep)
        case "qwen3_5":
            linear = {
                "layer_types": ["linear_attention", "full_attention"],
                "rope_parameters": {
                    **AXES,
                    "partial_rotary_factor": 1.0,
                    "mrope_interleaved": True,
                },
                "linear_num_value_heads": 4,
                "linear_num_key_heads": 2,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
                "linear_conv_kernel_dim": 4,
            }
            return _qwen(
                tf.Qwen3_5Config, {**linear, **text}, {**_DEEP, "deepstack_visual_indexes": []}
            )
        case "gemma3":
            layers = {"sliding_window": 24, "query_pre_attn_scalar": 16}
            layers["layer_types"] = ["sliding_attention", "full_attention"]
            return tf.Gemma3Config(
                text_config={**sizes, **layers, **text},
                vision_config=_siglip(),
                mm_tokens_per_image=9,
                tie_word_embeddings=False,
                image_token_index=image,
                boi_token_index=260,
                eoi_token_index=261,
            )
        case "gemma4":
            layers = {
                "sliding_window": 24,
                "global_head_dim": 16,
                "vocab_size_per_layer_input": VOCAB_SIZE,
                "hidden_size_per_layer_input": 8,
                "num_kv_shared_layers": 0,
                "layer_types": ["sliding_attention", "full_attention"],
            }
            # Two query heads attend with each key head, which stand next to each other.
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
            tower = {**TOWER, **heads, "pooling_kernel_size": 3}
            del tower["image_size"]
            return tf.Gemma4Config(
                text_config={**sizes, **layers, **text},
                vision_config={**tower, "position_embedding_size": 256},
                audio_config=None,
                tie_word_embeddings=False,
                image_token_id=image,
                boi_token_id=260,
                eoi_token_id=261,
            )
        case "llava":
            return tf.LlavaConfig(
                text_config=tf.LlamaConfig(**sizes),
                vision_config=_clip(),
                image_token_index=image,
                image_seq_length=16,
            )
        case "llava_next":
            return tf.LlavaNextConfig(
                text_config=tf.LlamaConfig(**sizes),
                vision_config=_clip(),
                image_token_index=image,
                image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]],
                image_seq_length=16,
            )
        case "llava_onevision":
            return tf.LlavaOnevisionConfig(
                text_config=tf.Qwen2Config(**sizes),
                vision_config=_siglip(image_size=16),
                image_token_index=image,
                video_token_index=261,
                image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]],
            )
        case "smolvlm" | "idefics3":
            kind = tf.SmolVLMConfig if model_type == "smolvlm" else tf.Idefics3Config
            return kind(
                text_config=tf.LlamaConfig(**sizes),
                vision_config=dict(TOWER),
                scale_factor=2,
                image_token_id=image,
                pad_token_id=0,
            )
        case "internvl":
            tower = {**TOWER, "patch_size": [4, 4], "image_size": [24, 24]}
            return tf.InternVLConfig(
                text_config=tf.Qwen2Config(**sizes),
                vision_config=tower,
                image_token_id=image,
                image_seq_length=9,
                downsample_ratio=0.5,
                tie_word_embeddings=False,
            )
        case "mistral3":
            return tf.Mistral3Config(
                text_config=tf.MistralConfig(**sizes),
                vision_config=tf.PixtralVisionConfig(**{**TOWER, "head_dim": 16, "image_size": 64}),
                image_token_index=image,
                spatial_merge_size=2,
                vision_feature_layer=-1,
                tie_word_embeddings=False,
            )
        case "aya_vision":
            return tf.AyaVisionConfig(
                text_config=tf.Cohere2Config(**{**sizes, "sliding_window": 24}),
                vision_config=_siglip(),
                image_token_index=image,
                downsample_factor=2,
                tie_word_embeddings=False,
            )
        case "glm4v":
            return tf.Glm4vConfig(
                text_config={**sizes, "rope_parameters": {**AXES, "partial_rotary_factor": 1.0}},
                vision_config={**QWEN_TOWER, "image_size": 24},
                image_start_token_id=260,
                image_end_token_id=261,
                image_token_id=image,
                video_token_id=image,
            )
    raise ValueError(f"no tiny {model_type}; {', '.join(TYPES)}")


def _processor_of(model_type: str) -> tuple[str, str, dict[str, Any], dict[str, Any]]:
    """Class, class of the image processor, its settings, and the processor's."""
    square = {"height": 24, "width": 24}
    grid = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 1024}}
    llava = {
        "patch_size": 4,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    clip = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    pinpoints = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
    tiles = {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 24}}
    match model_type:
        case "qwen2_vl":
            return "Qwen2VLProcessor", "Qwen2VLImageProcessorPil", grid, {}
        case "qwen2_5_vl":
            return "Qwen2_5_VLProcessor", "Qwen2VLImageProcessorPil", grid, {}
        case "qwen3_vl" | "qwen3_vl_moe" | "qwen3_5":
            return "Qwen3VLProcessor", "Qwen2VLImageProcessorPil", grid, {}
        case "gemma3":
            return (
                "Gemma3Processor",
                "Gemma3ImageProcessorPil",
                {"size": square},
                {"image_seq_length": 9},
            )
        case "gemma4":
            settings = {"patch_size": 4, "max_soft_tokens": 70}
            return "Gemma4Processor", "Gemma4ImageProcessorPil", settings, {"image_seq_length": 70}
        case "llava":
            return "LlavaProcessor", "LlavaImageProcessorPil", clip, llava
        case "llava_next":
            return "LlavaNextProcessor", "LlavaNextImageProcessorPil", {**clip, **pinpoints}, llava
        case "llava_onevision":
            settings = {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}
            size = {"size": {"height": 16, "width": 16}, **pinpoints}
            return "LlavaOnevisionProcessor", "LlavaOnevisionImageProcessorPil", size, settings
        case "smolvlm":
            return "SmolVLMProcessor", "SmolVLMImageProcessorPil", tiles, {"image_seq_len": 9}
        case "idefics3":
            return "Idefics3Processor", "Idefics3ImageProcessorPil", tiles, {"image_seq_len": 9}
        case "internvl":
            settings = {"size": square, "crop_to_patches": True, "max_patches": 4}
            return (
                "InternVLProcessor",
                "GotOcr2ImageProcessorPil",
                settings,
                {"image_seq_length": 9},
            )
        case "mistral3":
            settings = {"patch_size": 4, "size": {"longest_edge": 40}}
            return (
                "PixtralProcessor",
                "PixtralImageProcessorPil",
                settings,
                {"patch_size": 4, "spatial_merge_size": 2},
            )
        case "aya_vision":
            settings = {"size": square, "crop_to_patches": True, "max_patches": 4}
            own = {"patch_size": 4, "img_size": 24, "downsample_factor": 2}
            return "AyaVisionProcessor", "GotOcr2ImageProcessorPil", settings, own
        case "glm4v":
            size = {"shortest_edge": 512, "longest_edge": 2048}  # times two frames
            return "Glm4vProcessor", "Glm4vImageProcessorPil", {**grid, "size": size}, {}
    raise ValueError(f"no tiny {model_type}; {', '.join(TYPES)}")


def processor_of(
    model_type: str, image_settings: dict[str, Any] | None = None, **changes: Any
) -> tf.ProcessorMixin:
    """The processor of the type; `image_settings`, `changes`: of its image class's settings and of its own."""
    name, image_name, tiny, settings = _processor_of(model_type)
    images = getattr(tf, image_name)(**{**tiny, **(image_settings or {})})
    parts = {"image_processor": images, "tokenizer": tokenizer_of(model_type)}
    return assemble(getattr(tf, name), parts, {**settings, **changes})


def template_of(model_type: str) -> str:
    template = IMAGES_FIRST if model_type.startswith("llava") else IN_ORDER
    return template.replace("IMAGE", IMAGE_TEXT[model_type])


def random_vlm(model_type: str, **text: Any) -> tf.PreTrainedModel:
    """A random model in eval mode, so lively that greedy tokens vary; `text`: changes of the language model's sizes."""
    torch.manual_seed(7)
    model = AutoModelForImageTextToText.from_config(config_of(model_type, **text)).eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                scale = 1.4 / parameter.shape[-1] ** 0.5
                if "embed_tokens" in name:
                    scale = 1 / float(getattr(model.get_input_embeddings(), "embed_scale", 1))
                parameter.normal_(0, scale, generator=generator)
            elif "norm" in name.lower():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
            else:
                parameter.normal_(0, 0.3, generator=generator)
    model.generation_config = tf.GenerationConfig(eos_token_id=2, pad_token_id=0, bos_token_id=1)
    return model


def make_tiny_vlm(model_type: str, folder: Path, *, unified: bool = False, **text: Any) -> Path:
    """Write a checkpoint of `model_type` to `folder`.

    unified: with a single processor_config.json, as transformers 5 saves it; otherwise with preprocessor_config.json,
    as most published models have it. text: changes of the language model's configuration.
    """
    random_vlm(model_type, **text).save_pretrained(folder)
    name, *_ = _processor_of(model_type)
    processor = processor_of(model_type)
    images, tokenizer = processor.image_processor, processor.tokenizer
    processor.chat_template = template_of(model_type)
    (folder / "chat_template.jinja").write_text(processor.chat_template, encoding="utf-8")
    tokenizer.save_pretrained(folder)
    whole = processor.to_dict()
    whole["image_processor"]["processor_class"] = name
    if not unified:
        images._processor_class = name
        images.save_pretrained(folder)
        whole.pop("image_processor")
    (folder / "processor_config.json").write_text(
        json.dumps({k: v for k, v in whole.items() if v is not None})
    )
    return folder


@functools.cache
def open_reference(folder: Path) -> tuple[Any, Any]:
    """transformers' model of a checkpoint, eager, and its processor."""
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    config = AutoConfig.from_pretrained(folder)
    return model, load_processor(str(folder), config, AutoTokenizer.from_pretrained(folder))


def reference_inputs(
    folder: Path, prompt: str, images: Sequence[Any] = ()
) -> dict[str, torch.Tensor]:
    """What the processor makes of a prompt, with `IMAGE_TEXT` for each of `images`: a batch of one row."""
    _, processor = open_reference(folder)
    inputs = processor(text=prompt, images=list(images) or None, return_tensors="pt")
    return dict(inputs)


def reference_generate(
    folder: Path,
    prompts: Sequence[str],
    images: Sequence[Sequence[Any]],
    max_new_tokens: int,
    **options: Any,
) -> list[list[int]]:
    """The new tokens that transformers' generate gives each prompt by itself; greedy unless `options` say otherwise."""
    model, _ = open_reference(folder)
    results = []
    for prompt, some in zip(prompts, images, strict=True):
        inputs = reference_inputs(folder, prompt, some)
        choices: dict[str, Any] = {"do_sample": False, **options}
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=max_new_tokens, **choices)
        results.append(output[0, inputs["input_ids"].shape[1] :].tolist())
    return results


def reference_logits(
    folder: Path, prompt: str, images: Sequence[Any] = ()
) -> tuple[list[int], np.ndarray]:
    """The ids of a prompt, placeholders among them, and float32 [tokens, V]."""
    model, _ = open_reference(folder)
    inputs = reference_inputs(folder, prompt, images)
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits
    return inputs["input_ids"][0].tolist(), np.asarray(logits[0].float().numpy())


class _Forced(LogitsProcessor):
    def __init__(self, following: Sequence[int], length: int) -> None:
        self.following, self.length = following, length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.following[input_ids.shape[1] - self.length]] = 0
        return forced


def reference_steps(
    folder: Path, prompt: str, images: Sequence[Any], following: Sequence[int]
) -> tuple[list[int], np.ndarray]:
    """The ids of a prompt, and the logits from which generate would choose each of the tokens that follow, float32
    [n, V]. Ids of placeholders among these are tokens like any."""
    model, _ = open_reference(folder)
    inputs = reference_inputs(folder, prompt, images)
    ids = inputs["input_ids"][0].tolist()
    with torch.no_grad():
        output = model.generate(
            **inputs,
            max_new_tokens=len(following),
            do_sample=False,
            eos_token_id=-1,
            logits_processor=[_Forced(following, len(ids))],
            output_logits=True,
            return_dict_in_generate=True,
        )
    return ids, np.asarray(torch.cat(output.logits).float().numpy())


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth random image, so that resizing keeps its differences."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
