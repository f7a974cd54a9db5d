"""`qsample.bake`."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from qsample.addons.bake.source import DecoderSource
from qsample.contract.interface import Features
from qsample.errors import unknown
from qsample.models.keywords import DownloadKeywords, hub_options
from qsample.models.model import PackagedModel, SourceModel
from qsample.progress import Progress


class BakeKeywords(DownloadKeywords, total=False):
    """The keywords of `bake`."""

    file: str | None
    features: Features | None
    tokenizer: str | None
    rope: str | None
    reference: str | None
    overwrite: bool
    progress: Progress | None


def bake(
    path: str | Path, out: str | Path | None = None, **keywords: Unpack[BakeKeywords]
) -> PackagedModel:
    """Bake the sampler into a decoder of another exporter; neither torch nor transformers is
    needed.

    Args:
        path: an .onnx file, a folder with such a file, or a hub id, of which only the decoder's
            files are downloaded.
        out: the folder of the package; by default a temporary folder that lives as long as the
            result.
        keywords: the keywords below, all of them optional.

    Keyword Args:
        file: which decoder of several, relative to the folder or repository: "onnx/model_q4.onnx".
        features: the features of the graph, see `interface.Features`; by default the sampler and no
            more.
        tokenizer: "auto" for the tokenizer next to the decoder, another folder, or None for a
            package of token ids only.
        rope: "short" or "long", for a file with two rotary tables (longrope), of which a single
            table is kept: by default the short table; it limits the context to the length at which
            the file itself would change over.
        reference: a hub id or folder of the checkpoint, to compare with transformers as well (needs
            the extra `export`). The manifest gets the figures; a float file that differs is
            refused.
        revision, cache_dir, token, local_files_only: how the hub is read, as in transformers.
        overwrite, progress: see `PackagedModel.compile`.

    Returns:
        The portable package. Nothing remains after an error.

    Raises:
        TypeError: for another keyword.
        UnsupportedModelError: for a file that cannot be baked; a line says why, and the
            alternative.
        ParityError: if the baked graph does not compute the file's logits.
        PackageError: if `out` cannot be written.

    >>> package = qsample.bake("onnx-community/Qwen3-0.6B-ONNX", "qwen3", file="onnx/model_q4.onnx")
    """
    for name in keywords:
        if name not in BakeKeywords.__optional_keys__:
            raise TypeError(unknown("bake has no argument", name, BakeKeywords.__optional_keys__))
    source = DecoderSource(
        model_id=str(path),
        file=keywords.get("file"),
        tokenizer=keywords.get("tokenizer", "auto"),
        hub=hub_options(keywords),
        rope=keywords.get("rope"),
        reference=keywords.get("reference"),
    )
    model = SourceModel(source, keywords.get("features") or Features())
    return model.export(
        out, overwrite=keywords.get("overwrite", False), progress=keywords.get("progress")
    )
