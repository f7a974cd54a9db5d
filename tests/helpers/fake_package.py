"""A package that is made in milliseconds, without torch: one real attention layer and a plain sampler, by the contract.

The sampler knows temperature, penalties, minimum length, stop ids, biases and masks, and no filters: it takes their
inputs and does nothing with them. Nothing in it is shared with the exporter, so it is a second implementation of the
contract for the runtime to run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from qsample.contract.interface import Features, ImageShape, Interface, KeyValueShape
from qsample.package.package import (
    Compilation,
    Manifest,
    Package,
    Source,
    TokenIds,
    read_package,
    write_package,
)
from tests.helpers import fake_images
from tests.helpers.fake_graphs import DIM, PAD, VOCAB, fake_graphs
from tests.helpers.small_packages import byte_tokenizer, manifest

BOS, EOS = 1, 2
POISON = 300  # a row that holds this token has NaN logits
MAX_POSITIONS = 256
PIECE_SIZE = 4  # in which tests have a fake package read its prompts
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "[{{ message.role }}]{{ message.content }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def fake_interface(**features: Any) -> Interface:
    return Interface(VOCAB, (KeyValueShape(1, DIM),), "float32", Features(**features))


def fake_weights() -> dict[str, Any]:
    """Initialisers of the model."""
    generator = np.random.default_rng(11)

    def random(*shape: int, scale: float) -> Any:
        return (generator.standard_normal(shape) * scale).astype(np.float32)

    # The tokens of the last word of a mask are drawn apart, so that the others have the same weights without them.
    whole_words = VOCAB // 32 * 32
    last_word = VOCAB - whole_words
    embedding = random(whole_words, DIM, scale=1.0)
    embedding[POISON] = np.nan
    frequencies = (1.0 / 10.0 ** np.linspace(0, 2, DIM)).astype(np.float32)
    products = {
        "w_query": random(DIM, DIM, scale=0.5),
        "w_key": random(DIM, DIM, scale=0.5),
        "w_value": random(DIM, DIM, scale=0.7),
    }
    head = random(DIM, whole_words, scale=0.6)
    head_bias = np.zeros(VOCAB, dtype=np.float32)
    head_bias[POISON] = -1e4  # never sampled by chance
    return {
        "embedding": np.concatenate([embedding, random(last_word, DIM, scale=1.0)]),
        "head_bias": head_bias,
        "frequencies": frequencies,
        **products,
        "w_head": np.concatenate([head, random(DIM, last_word, scale=0.6)], axis=1),
        "past_last": np.array([3], dtype=np.int64),
    }


def ascii_piece(text: str) -> str:
    """A character in the middle of a random text that is certain as soon as it comes."""
    return next(character for character in text[4:] if "!" <= character <= "~")


def fake_manifest(
    interface: Interface, compilation: Compilation | None = None, **changes: Any
) -> Manifest:
    values: dict[str, Any] = {
        "kind": "portable" if compilation is None else "device",
        "interface": interface,
        "source": Source("fake", None, "fake", "FakeForCausalLM", {"weights": "0" * 64}),
        "token_ids": TokenIds(PAD, BOS, (EOS,)),
        "max_position_embeddings": MAX_POSITIONS,
        "parity": None,
        "compilation": compilation,
    }
    return manifest(**(values | changes))


def fake_package(
    path: Path,
    *,
    tokenizer: bool = True,
    generation_config: Mapping[str, Any] | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    compilation: Compilation | None = None,
    manifest: Mapping[str, Any] | None = None,
    interface: Interface | None = None,
    edit: Callable[[onnx.ModelProto], None] = lambda graph: None,
    files: Mapping[str, str] | None = None,
    image: ImageShape | None = None,
    **features: Any,
) -> Package:
    """Write a fake package to `path` and open it.

    features: as in `interface.Features`. manifest: changes to it. interface: what the manifest promises, if not the
    truth. edit: changes the decoder. files: name → text of further files, or in place of the usual ones. image: how it
    reads images, see `fake_images`.
    """
    made = replace(fake_interface(**features), image=image)
    with write_package(path) as writer:
        for name, graph in fake_graphs(made, fake_weights()).items():
            if name == "decoder.onnx":
                edit(graph)
            onnx.save(graph, writer.directory / name)
        config = {"do_sample": True, "top_k": 0} if generation_config is None else generation_config
        (writer.directory / "generation_config.json").write_text(json.dumps(config))
        if tokenizer:
            bytes_ = byte_tokenizer()
            if image is not None:
                bytes_.add_special_tokens(["<image>", "<begin>", "<end>"])
            bytes_.save(str(writer.directory / "tokenizer.json"))
            template = CHAT_TEMPLATE if image is None else fake_images.CHAT_TEMPLATE
            options = (
                {"chat_template": template, "bos_token": "<s>"}
                if tokenizer_config is None
                else tokenizer_config
            )
            (writer.directory / "tokenizer_config.json").write_text(json.dumps(options))
        for name, text in (files or {}).items():
            (writer.directory / name).parent.mkdir(exist_ok=True)
            (writer.directory / name).write_text(text, encoding="utf-8")
        more = {} if image is None else {"images": fake_images.MANIFEST}
        writer.finish(fake_manifest(interface or made, compilation, **{**more, **(manifest or {})}))
    return read_package(path)


def compilation(**changes: Any) -> Compilation:
    values: dict[str, Any] = {
        "provider": "cpu",
        "execution_providers": ("CPUExecutionProvider",),
        "batch_size": 2,
        "ctx_len": 48,
        "placement": {},
        "self_test": {},
    }
    return Compilation(**(values | changes))
