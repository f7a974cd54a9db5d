"""Models in which the tokens of an image see each other: their tokens and transformers', and the gate."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qsample.checkpoints.checkpoint import Origin
from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.contract.interface import Features
from qsample.errors import ParityError
from qsample.exporters import parity
from qsample.exporters.export import LoadedModel, export_model
from qsample.exporters.huggingface_reference import reference
from qsample.exporters.image_reference import image_reference
from qsample.graph.image_blocks import cut_image_blocks
from qsample.graph.save import save_graph
from qsample.graph.weights import load_graph
from qsample.package.package import Package, read_package
from qsample.runtime import load
from qsample.transforms.images import image_shape
from tests.conftest import made_once
from tests.helpers.reference import philox_uniforms
from tests.helpers.tiny_vlms import (
    IMAGE_TEXT,
    make_tiny_vlm,
    open_reference,
    picture,
    reference_generate,
    reference_inputs,
)

NEW_TOKENS = 12
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3", {"sliding_window": 14}),
    "gemma4": ("gemma4", {"sliding_window": 14}),
    "gemma4, blockwise": (
        "gemma4",
        {"sliding_window": 14, "use_bidirectional_attention": "vision"},
    ),
}
CASES = (
    ("Only text here.", 0),
    ("{}What is this?", 1),
    ("One {} in the middle.", 1),
    ("First {}, then another {}, and text.", 2),
    ("Text again", 0),
)


@pytest.fixture(scope="session")
def vlm(shared_folder: Path) -> Callable[[str], tuple[Path, Path]]:
    """A name in MODELS → its checkpoint, and its portable package."""

    def make(name: str) -> tuple[Path, Path]:
        model_type, text = MODELS[name]
        folder = shared_folder / f"blocks-{list(MODELS).index(name)}"
        checkpoint = made_once(folder, lambda path: make_tiny_vlm(model_type, path, **text))
        return checkpoint, made_once(
            folder.with_suffix(".package"), lambda path: export(checkpoint, path)
        )

    return make


def export(checkpoint: Path, path: Path) -> Package:
    open_reference.cache_clear()  # an export changes its model
    model, processor = open_reference(checkpoint)
    loaded = LoadedModel(model, processor.tokenizer, Origin("tiny"), processor)
    package = export_model(loaded, path, Features())
    open_reference.cache_clear()
    return package


def cases(name: str) -> tuple[list[str], list[list[Any]]]:
    """Prompts, and their images: of several sizes."""
    text, seeds = IMAGE_TEXT[MODELS[name][0]], iter(range(100))
    prompts = [prompt.format(*[text] * count) for prompt, count in CASES]
    return prompts, [
        [picture(40 + 16 * i, 48, next(seeds)) for i in range(count)] for _, count in CASES
    ]


def check_tokens(package: Path, checkpoint: Path, name: str) -> None:
    """Greedy tokens in a batch and alone, and sampled ones."""
    prompts, images = cases(name)
    model = load(package)
    expected = reference_generate(checkpoint, prompts, images, NEW_TOKENS)
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    assert model.generate(prompts, images=images, **options).token_ids == expected
    assert len({tuple(row) for row in expected}) == len(expected)
    for prompt, some, tokens in zip(prompts, images, expected, strict=True):
        assert model.generate(prompt, images=some, **options).token_ids == [tokens]
    # Pieces are longer where they would end within an image.
    assert (
        model.generate(prompts, images=images, prefill_chunk_size=5, **options).token_ids
        == expected
    )
    options = {
        "max_new_tokens": NEW_TOKENS,
        "temperature": 1.3,
        "top_k": 0,
        "top_p": 1.0,
        "eos_token_id": (),
    }
    seeds = range(40, 40 + len(prompts))
    sampled = model.generate(prompts, images=images, seed=list(seeds), **options).token_ids
    for prompt, some, tokens, seed in zip(prompts, images, sampled, seeds, strict=True):
        assert tokens == drawn(checkpoint, prompt, some, tokens, seed)


def drawn(
    checkpoint: Path, prompt: str, images: list[Any], tokens: list[int], seed: int
) -> list[int]:
    """What the contract draws from transformers' logits, each token after the ones before it in `tokens`."""
    model, _ = open_reference(checkpoint)
    inputs = reference_inputs(checkpoint, prompt, images)
    n = inputs["input_ids"].shape[1]
    for key, value in inputs.items():
        if value.shape[:2] == (1, n):
            more = {"input_ids": tokens, "attention_mask": [1] * len(tokens)}.get(
                key, [0] * len(tokens)
            )
            inputs[key] = torch.cat([value, torch.tensor([more], dtype=value.dtype)], dim=1)
    with torch.no_grad():
        logits = model(**inputs).logits[0, n - 1 : -1].double().numpy() / 1.3
    noise, found = philox_uniforms(seed, n + len(tokens)), []
    for index, row in enumerate(logits):
        weights = np.exp(row - row.max())
        bounds = np.cumsum(weights) / weights.sum()
        found.append(int(np.searchsorted(bounds, noise[n + index], side="right")))
    return found


@pytest.mark.ci
def test_gemma3(vlm: Callable[[str], tuple[Path, Path]]) -> None:
    checkpoint, package = vlm("gemma3")
    assert read_package(package).interface.image.blockwise  # type: ignore[union-attr]
    check_tokens(package, checkpoint, "gemma3")


@pytest.mark.ci
def test_the_gate_refuses_causal_images(
    vlm: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    """The same graph without its branches."""
    checkpoint, package = vlm("gemma3")
    folder = tmp_path / "causal"
    shutil.copytree(package, folder)
    model, processor = open_reference(checkpoint)
    shape = image_shape(model)
    assert shape is not None
    text = reference(model)
    images, _ = image_reference(model, processor, shape, None)
    expected = replace(text, images=images)
    interface = read_package(package).interface
    parity.check(folder, interface, expected)
    graph = load_graph(folder / "decoder.onnx")
    assert cut_image_blocks(graph) == [0, 1]
    save_graph(graph, folder / "causal.onnx")
    (folder / "causal.onnx").replace(folder / "decoder.onnx")
    with pytest.raises(ParityError, match="image"):
        parity.check(folder, interface, expected)
    open_reference.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS)[1:])
def test_gemma4(vlm: Callable[[str], tuple[Path, Path]], name: str) -> None:
    checkpoint, package = vlm(name)
    image = read_package(package).interface.image
    assert image is not None
    assert image.blockwise == ("blockwise" in name)
    check_tokens(package, checkpoint, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "gemma4, blockwise"])
def test_compiled(vlm: Callable[[str], tuple[Path, Path]], tmp_path: Path, name: str) -> None:
    """Passes see a text model: no rotation is left in front of the attention. The branches rotate for themselves."""
    checkpoint, package = vlm(name)
    compiled = compile_package(
        read_package(package), tmp_path / "cpu", CompileOptions(provider="cpu", ctx_len=256)
    )
    check_tokens(compiled.path, checkpoint, name)
    graph = load_graph(compiled.path / "decoder.onnx").graph
    if name == "gemma3":
        assert not [node for node in graph if node.op_type == "RotaryEmbedding"]
    assert len([node for node in graph if str(node.name).startswith("image_blocks")]) == (
        5 if name == "gemma3" else 4
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"kv_cache_dtype": "int8"}, {"weights": "int4"}, {"num_devices": 2}],
    ids=lambda changes: next(iter(changes)),
)
def test_compiled_otherwise(
    vlm: Callable[[str], tuple[Path, Path]], tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Rows alone and in a batch, in one piece and in several, have the same tokens; two devices those of one."""
    checkpoint, package = vlm("gemma3")
    options: dict[str, Any] = {"provider": "cpu", "ctx_len": 256, "max_divergence": 1e9, **changes}
    compiled = compile_package(read_package(package), tmp_path / "cpu", CompileOptions(**options))
    if "num_devices" in changes:
        return check_tokens(compiled.path, checkpoint, "gemma3")
    prompts, images = cases("gemma3")
    model = load(compiled.path)
    greedy: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    together = model.generate(prompts, images=images, **greedy).token_ids
    alone = [
        model.generate(prompt, images=some, **greedy).token_ids[0]
        for prompt, some in zip(prompts, images, strict=True)
    ]
    assert (
        together
        == alone
        == model.generate(prompts, images=images, prefill_chunk_size=5, **greedy).token_ids
    )
    return None
