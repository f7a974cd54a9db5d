"""Opens a hub id, checkpoint, decoder file or package as a model with the same verbs: export, compile, generate.

Torch and transformers are imported only if a checkpoint is exported.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from qsample.addons.formats.gguf.models import read_model
from qsample.checkpoints.source import (
    ADAPTER,
    CheckpointSource,
    DecoderSource,
    HubOptions,
    check_checkpoint,
    check_exists,
    find_gguf,
)
from qsample.contract.interface import DEFAULT_LORA_RANK, Features
from qsample.contract.tensors import HUGGING_FACE
from qsample.errors import QsampleError
from qsample.huggingface.facade import check_export_dtype, choose_dtype
from qsample.models.model import PackagedModel, SourceModel, bake_installed
from qsample.ort.model_package import package_in
from qsample.package.package import MANIFEST_NAME, check_features, read_package
from qsample.package.signature import TrustedKeys
from qsample.progress import Progress
from qsample.request.qefficient import read_config
from qsample.request.refusals import check_from_pretrained

if TYPE_CHECKING:
    from qsample.addons.bake.describe import Description

_DECODER: Final = ".onnx"
_WEIGHTS: Final = {".safetensors", ".bin"}  # of a checkpoint to export


class AutoModelForCausalLM:
    """Opens a model for sampling in its graph.

    >>> model = AutoModelForCausalLM.from_pretrained("qsample/assets/tiny_lm", include_sampler=True)
    >>> package = model.export("tiny").compile("tiny-cpu", provider="cpu", ctx_len=512)
    >>> package.generate("In the beginning", max_new_tokens=8, do_sample=False).texts
    """

    _images: ClassVar[bool | None] = False  # as in `Checkpoint`

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        include_sampler: bool = True,
        return_pdfs: bool = False,
        logit_bias: bool = False,
        allowed_tokens: bool = False,
        logprobs: bool = False,
        top_logprobs: int = 0,
        for_serving: bool = False,
        filters: Sequence[str] = (),
        filter_order: str | None = None,
        max_loras: int = 0,
        max_lora_rank: int = DEFAULT_LORA_RANK,
        dtype: Any = None,
        torch_dtype: Any = None,
        device_map: Any = None,
        tokenizer: str | None = "auto",
        provider: str | None = None,
        revision: str | None = None,
        cache_dir: str | None = None,
        token: str | None = None,
        local_files_only: bool = False,
        trust_remote_code: bool = False,
        adapter: str | Path | None = None,
        file: str | None = None,
        gguf_file: str | None = None,
        text_only: bool = False,
        trusted_keys: TrustedKeys | None = None,
        **others: Any,
    ) -> SourceModel | PackagedModel:
        """Open a hub id, a checkpoint folder, a GGUF file, an exported package, or a decoder file of another exporter.

        Checkpoints and decoder files load nothing until they are used.

        Args:
            pretrained_model_name_or_path: the hub id, folder or file.
            include_sampler: bake the sampler into the decode graph; False returns logits and samples on the host, with
                the same results.
            return_pdfs: `probs` of `interface.Features`.
            logit_bias, allowed_tokens, logprobs, top_logprobs, filters, filter_order, max_loras, max_lora_rank: as in
                `interface.Features`; off by default, and then absent from the graph.
            for_serving: logit_bias, allowed_tokens, logprobs, 20 top_logprobs and the filter penalty_last_n, all that
                requests to `qsample serve` usually ask for.
            dtype: of the weights and the cache: "float32" (the default), "float16", or "auto" for float16 if the
                checkpoint is stored so, else float32; torch's and NumPy's objects are accepted, too.
            torch_dtype: the older name of dtype.
            device_map: as in transformers; a device has to be the provider's, because the provider chooses it.
            tokenizer: "auto", another id or folder, or None for a package of token ids only.
            provider: the execution provider of generate(); by default the provider that a device package was compiled
                for, otherwise "cpu".
            revision, cache_dir, token, local_files_only, trust_remote_code: as in transformers, see `HubOptions`.
            adapter: a folder or hub id of a LoRA adapter as peft saves it; it is merged into the weights.
            file: which GGUF file of a folder or repository; or which decoder, see `qsample.bake`.
            gguf_file: transformers' name of `file`, for GGUF.
            text_only: export the language model alone, also of a model that transformers has no text model of.
            trusted_keys: of a package, as in `qsample.runtime.load`: anything without their signature is refused.
            others: keywords of transformers and QEfficient, accepted if they are off; docs/transformers.md and
                docs/qefficient.md have the replacements. `qaic_config` sets features.

        Returns:
            A `PackagedModel` for a folder with a qsample.json; otherwise a `SourceModel`: of a decoder file if `file`
                is given, for an .onnx file, and for a folder that has .onnx files and no checkpoint; else of a
                checkpoint.

        Raises:
            QsampleError: for a path that has none of these, and for features that a package was exported without.
        """
        own = cls.from_pretrained.__annotations__.keys() - {"others", "return"}
        qaic_config = others.pop("qaic_config", None) or {}
        check_from_pretrained(others, own)
        chosen = choose_dtype(dtype, torch_dtype)
        features = Features(
            sampler=include_sampler,
            logit_bias=logit_bias,
            allowed_tokens=allowed_tokens,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            probs=return_pdfs,
            filters=filters,  # type: ignore[arg-type]  # it makes a tuple of them
            filter_order=filter_order or HUGGING_FACE,
            max_loras=max_loras,
            max_lora_rank=max_lora_rank,
        )
        features = replace(features, **read_config(qaic_config))
        if for_serving:
            features = features.for_serving()
        hub = HubOptions(
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            local_files_only=local_files_only,
            trust_remote_code=trust_remote_code,
        )
        path = Path(pretrained_model_name_or_path)
        path = Path(package_in(path, provider))
        if os.path.isfile(path / MANIFEST_NAME):  # False if it is too long to be a path
            package = read_package(path, trusted_keys=trusted_keys)
            if adapter is not None:
                raise QsampleError(
                    f"{path} is a package, and an adapter is merged at export; export the model with it"
                )
            reads_images = package.interface.image is not None
            if text_only and reads_images:
                raise QsampleError(
                    f"{path} is a package with images; leave text_only out, or give it to an export"
                )
            if cls._images and not reads_images:
                raise QsampleError(
                    f"{path} is a package of text alone; open it with AutoModelForCausalLM"
                )
            if filter_order is None:
                features = replace(features, filter_order=package.interface.features.filter_order)
            check_features(package, features, None if chosen == "auto" else chosen)
            return PackagedModel(package, provider, trusted_keys=trusted_keys).place(device_map)
        if trusted_keys is not None:
            raise QsampleError(
                f"{path} is no package, and only packages are signed; leave trusted_keys out"
            )
        gguf = find_gguf(str(pretrained_model_name_or_path), gguf_file or file, hub)
        if cls._images and (gguf is not None or file is not None or is_decoder(path)):
            raise QsampleError(
                f"{path} is a file of the language model alone; open it with AutoModelForCausalLM"
            )
        if gguf is None and (file is not None or is_decoder(path)):
            if adapter is not None or chosen is not None:
                given = "adapter" if adapter is not None else "dtype"
                raise QsampleError(
                    f"{path} is a decoder file, whose weights are as they are; leave {given} out"
                )
            warnings.warn(
                f"{path} holds a decoder file; it is used as `qsample bake` writes it", stacklevel=2
            )
            decoder = DecoderSource(str(path), file, tokenizer, hub=hub)
            return SourceModel(decoder, features, provider).place(device_map)
        checkpoint = _checkpoint(
            *(gguf or (str(pretrained_model_name_or_path), None)),
            is_gguf=gguf is not None,
            dtype=chosen or "float32",
            tokenizer=tokenizer,
            adapter=None if adapter is None else str(adapter),
            hub=hub,
        )
        if gguf is None:
            checkpoint = replace(checkpoint, images=cls._images, text_only=text_only)
        return SourceModel(checkpoint, features, provider).place(device_map)


class AutoModelForImageTextToText(AutoModelForCausalLM):
    """Opens a model that reads images, too: `AutoModelForCausalLM` with the same arguments; docs/images.md.

    >>> model = AutoModelForImageTextToText.from_pretrained("Qwen/Qwen2.5-VL-3B-Instruct", include_sampler=True)
    >>> package = model.export("qwen-vl").compile("qwen-vl-cpu", ctx_len=4096, weights="int4")
    >>> package.generate("What is this?", images="cat.jpg").texts
    """

    _images = True


class AutoModel(AutoModelForCausalLM):
    """Opens a model as the command line does: with its images, if they can be exported."""

    _images = None


def bake(
    path: str | Path,
    out: str | Path | None = None,
    *,
    file: str | None = None,
    features: Features | None = None,
    tokenizer: str | None = "auto",
    rope: str | None = None,
    reference: str | None = None,
    revision: str | None = None,
    cache_dir: str | None = None,
    token: str | None = None,
    local_files_only: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PackagedModel:
    """Bake the sampler into a decoder of another exporter; neither torch nor transformers is needed.

    Args:
        path: an .onnx file, a folder with such a file, or a hub id, of which only the decoder's files are downloaded.
        out: the folder of the package; by default a temporary folder that lives as long as the result.
        file: which decoder of several, relative to the folder or repository: "onnx/model_q4.onnx".
        features: of the graph, see `interface.Features`; by default the sampler and no more.
        tokenizer: "auto" for the tokenizer next to the decoder, another folder, or None for a package of token ids
            only.
        rope: "short" or "long", for a file with two rotary tables (longrope), of which a single table is kept: by
            default the short table; it limits the context to the length at which the file itself would change over.
        reference: a hub id or folder of the checkpoint, to compare with transformers as well (needs the extra
            `export`). The manifest gets the figures; a float file that differs is refused.
        revision, cache_dir, token, local_files_only: of the hub, as in transformers.
        overwrite, progress: as in `PackagedModel.compile`.

    Returns:
        The portable package. Nothing remains after an error.

    Raises:
        UnsupportedModelError: for a file that cannot be baked; a line says why, and the alternative.
        ParityError: if the baked graph does not compute the file's logits.
        PackageError: if `out` cannot be written.

    >>> package = qsample.bake("onnx-community/Qwen3-0.6B-ONNX", "qwen3", file="onnx/model_q4.onnx")
    """
    hub = HubOptions(
        revision=revision, cache_dir=cache_dir, token=token, local_files_only=local_files_only
    )
    source = DecoderSource(str(path), file, tokenizer, rope, reference, hub)
    model = SourceModel(source, features or Features())
    return model.export(out, overwrite=overwrite, progress=progress)


def describe_decoders(path: Path) -> list[Description]:
    """What the decoder files of another exporter at `path` are, and whether bake takes them; see `describe`."""
    with bake_installed():
        from qsample.addons.bake.describe import describe
    return describe(path)


def is_decoder(path: Path) -> bool:
    """Whether `path` is an .onnx file, or a folder with .onnx files, in it or in its onnx/, and no checkpoint."""
    if os.path.isfile(path):
        return path.suffix == _DECODER
    files = [*path.glob("*"), *path.glob("onnx/*")] if os.path.isdir(path) else []
    suffixes = {file.suffix for file in files}
    return _DECODER in suffixes and not suffixes & _WEIGHTS


def _checkpoint(
    model_id: str,
    file: str | None,
    *,
    is_gguf: bool,
    dtype: str,
    tokenizer: str | None,
    adapter: str | None,
    hub: HubOptions,
) -> CheckpointSource:
    """The checkpoint of a folder, hub id or GGUF file (`find_gguf`). Raises QsampleError for a name that cannot be one;
    the hub is asked only if the extra `export` is missing."""
    exists = os.path.exists(model_id)
    if is_gguf:
        if exists:
            read_model(Path(model_id))
    else:
        # A mistyped package needs nothing that is not installed.
        check_exists(model_id, hub if find_spec("transformers") is None and not exists else None)
        if exists:
            check_checkpoint(Path(model_id))
    if adapter is not None:
        check_exists(adapter, file=ADAPTER)
    return CheckpointSource(model_id, check_export_dtype(dtype), tokenizer, adapter, hub, file)
