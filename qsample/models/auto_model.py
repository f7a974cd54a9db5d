"""Opens a hub id, a checkpoint, a file of another program or a package as a model with the same
verbs: export, compile, generate.

Torch and transformers are imported only if a checkpoint is exported.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Unpack

from qsample.checks import as_path
from qsample.contract.interface import CHOICES
from qsample.errors import QsampleError
from qsample.models.keywords import OpenKeywords, OpenOptions, read_keywords
from qsample.models.model import PackagedModel, SourceModel
from qsample.models.sources import find_source
from qsample.ort.model_package import package_in
from qsample.package.package import MANIFEST_NAME, check_features, read_package


class AutoModelForCausalLM:
    """Opens a model for sampling in its graph.

    >>> model = AutoModelForCausalLM.from_pretrained("qsample/assets/tiny_lm", include_sampler=True)
    >>> package = model.export("tiny").compile("tiny-cpu", provider="cpu", ctx_len=512)
    >>> package.generate("In the beginning", max_new_tokens=8, do_sample=False).texts
    """

    # Whether images are read, as `Checkpoint` takes it.
    _images: ClassVar[bool | None] = False

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, **keywords: Unpack[OpenKeywords]
    ) -> SourceModel | PackagedModel:
        """Open a hub id, a checkpoint folder, a GGUF file, an exported package, or a decoder file
        of another exporter.

        Checkpoints and decoder files load nothing until they are used.

        Args:
            pretrained_model_name_or_path: the hub id, folder or file.
            keywords: the keywords below, all of them optional. Keywords of transformers and
                QEfficient are accepted if they are off; docs/transformers.md and docs/qefficient.md
                have the replacements. `qaic_config` sets features.

        Keyword Args:
            include_sampler: bake the sampler into the decode graph, the default; False returns
                logits and samples on the host, with the same results.
            return_pdfs: `probs` of `interface.Features`.
            logit_bias, allowed_tokens, grammars, logprobs, top_logprobs, prompt_logprobs: as in
                `interface.Features`; off by default, and then absent from the graph.
            logprobs_mode: as in `interface.Features`; "raw_logprobs" by default.
            filters, filter_order, max_loras, max_lora_rank: as in `interface.Features`; off by
                default, and then absent from the graph.
            for_serving: logit_bias, allowed_tokens, grammars, logprobs, 20 top_logprobs,
                prompt_logprobs and the filter penalty_last_n, all that requests to `qsample serve` usually ask for.
            dtype: the dtype of the weights and the cache: "float32" (the default), "float16", or
                "auto" for float16 if the checkpoint is stored so, else float32; torch's and NumPy's
                objects are accepted, too.
            torch_dtype: the older name of dtype.
            device_map: as in transformers; a device has to be the provider's, because the provider
                chooses it.
            tokenizer: "auto", the default, another id or folder, or None for a package of token ids
                only.
            provider: the execution provider of generate(); by default the provider that a device
                package was compiled for, otherwise "cpu".
            revision, cache_dir, token, local_files_only, trust_remote_code: as in transformers, see
                `HubOptions`.
            adapter: a folder or hub id of a LoRA adapter as peft saves it; it is merged into the
                weights.
            file: which GGUF file of a folder or repository; or which decoder, see `qsample.bake`.
            gguf_file: transformers' name of `file`, for GGUF.
            text_only: export only the language model, also of a model that transformers has no text
                model of.
            trusted_keys: the keys of a package, as in `qsample.runtime.load`: anything without
                their signature is refused.

        Returns:
            A `PackagedModel` for a folder with a qsample.json; otherwise a `SourceModel`: of a
                decoder file if `file` is given, for an .onnx file, and for a folder that has .onnx
                files and no checkpoint; else of a checkpoint.

        Raises:
            QsampleError: for a path that has none of these, and for features that a package was
                exported without.
            TypeError: for an unknown keyword.
        """
        as_path("pretrained_model_name_or_path", pretrained_model_name_or_path)
        options = read_keywords(str(pretrained_model_name_or_path), keywords, images=cls._images)
        path = Path(package_in(Path(pretrained_model_name_or_path), options.provider))
        if os.path.isfile(path / MANIFEST_NAME):  # False if it is too long to be a path
            return _open_package(path, options)
        if options.trusted_keys is not None:
            raise QsampleError(
                f"{path} is no package, and only packages are signed; leave trusted_keys out"
            )
        source = find_source(options.source)
        if source.notice is not None:
            warnings.warn(source.notice, stacklevel=2)
        model = SourceModel(source, options.features, options.provider)
        return model.place(options.device_map)


class AutoModelForImageTextToText(AutoModelForCausalLM):
    """Opens a model that reads images, too: `AutoModelForCausalLM` with the same arguments;
    docs/images.md.

    >>> model = AutoModelForImageTextToText.from_pretrained("Qwen/Qwen2.5-VL-3B-Instruct", include_sampler=True)
    >>> package = model.export("qwen-vl").compile("qwen-vl-cpu", ctx_len=4096, weights="int4")
    >>> package.generate("What is this?", images="cat.jpg").texts
    """

    _images = True


class AutoModel(AutoModelForCausalLM):
    """Opens a model as the command line does: with its images, if they can be exported."""

    _images = None


def _open_package(path: Path, options: OpenOptions) -> PackagedModel:
    """The model of a package. Raises QsampleError for options that only a checkpoint has, or that
    differ from the package's own."""
    request = options.source
    package = read_package(path, trusted_keys=options.trusted_keys)
    if request.adapter is not None:
        raise QsampleError(
            f"{path} is a package, and an adapter is merged at export; export the model with it"
        )
    reads_images = package.interface.image is not None
    if request.text_only and reads_images:
        raise QsampleError(
            f"{path} is a package with images; leave text_only out, or give it to an export"
        )
    if request.images and not reads_images:
        raise QsampleError(f"{path} is a package of text alone; open it with AutoModelForCausalLM")
    own = package.interface.features
    accepted = {name: getattr(own, name) for name in CHOICES if name not in options.chosen}
    features = replace(options.features, **accepted)
    dtype = None if request.dtype == "auto" else request.dtype
    check_features(package, features, dtype)
    model = PackagedModel(package, options.provider, trusted_keys=options.trusted_keys)
    return model.place(options.device_map)
