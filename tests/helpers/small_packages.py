"""Packages of a few bytes, whose files are no graphs: for code that looks at files and manifests only; a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from qsample.contract.interface import Features, Interface, KeyValueShape
from qsample.package.package import Manifest, Package, Source, TokenIds, read_package, write_package

INTERFACE = Interface(
    100, (KeyValueShape(2, 8), KeyValueShape(1, 16)), "float16", Features(logprobs=True)
)
# Larger than what is read at once, so that a hash of less than all would show.
LARGE = bytes(range(256)) * 10_000
FILES = {
    "decoder.onnx": b"graph" * 1000,
    "decoder.onnx.data": LARGE,
    "initial_state.onnx": b"zeros",
    "tokenizer/extra.json": b"{}",
}


def manifest(**changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "kind": "portable",
        "interface": INTERFACE,
        "source": Source(
            "some/model", None, "llama", "LlamaForCausalLM", {"model.safetensors": "ab" * 32}
        ),
        "versions": {"qsample": "0.1.0"},
        "token_ids": TokenIds(4, None, (2, 3)),
        "max_position_embeddings": None,
        "parity": {"max_error": 1e-6, "rows": 3},
    }
    values |= changes
    return Manifest(**{"contract_version": values["interface"].contract_version, **values})


def byte_tokenizer() -> Tokenizer:
    """Byte-level, without merges: every byte is a token, "a" is 68; `<s>` in front."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    vocab = {
        token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def throw(error: BaseException) -> None:
    raise error


def write(
    path: Path,
    files: dict[str, bytes] | None = None,
    then: Callable[[Path], None] = lambda folder: None,
    **options: Any,
) -> Package:
    """Write a package of `files`; `then` runs in its folder after they are there."""
    with write_package(path, **options) as writer:
        for name, content in (files or FILES).items():
            (writer.directory / name).parent.mkdir(exist_ok=True)
            (writer.directory / name).write_bytes(content)
        then(writer.directory)
        writer.finish(manifest())
    return read_package(path)
