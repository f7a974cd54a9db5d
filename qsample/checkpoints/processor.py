"""transformers' processor of a checkpoint, with its Pillow image processor, for comparison: a
package has its own.

The parts for videos and sound are left out, because they need torchvision and other libraries, and
images do not.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

import transformers
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoImageProcessor,
    ImageProcessingMixin,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.image_processing_backends import PilBackend
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from qsample.checkpoints.source import HubOptions
from qsample.errors import UnsupportedModelError


def load_processor(
    model_id: str,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    hub: HubOptions | None = None,
) -> ProcessorMixin:
    """The processor of a model of texts and images.

    Args:
        model_id: a folder or hub id.
        config: the model's configuration.
        tokenizer: the model's tokenizer, which gets the processor's chat template; None if it has
            none.
        hub: how the hub is read.

    Raises:
        UnsupportedModelError: for a model whose images do not enter as rows that stand for tokens,
            for a missing tokenizer, and for a processor that is missing, is the repository's code,
            or needs torchvision.
    """
    model: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    if not hasattr(model, "get_image_features") or getattr(config, "vision_config", None) is None:
        raise UnsupportedModelError(
            f"{model_id} is a {model.__name__}, which does not turn images into rows that stand for tokens, as models "
            "do that packages can read images with"
        )
    if tokenizer is None:
        raise UnsupportedModelError(
            f"{model_id} needs its tokenizer to read images, and tokenizer is None"
        )
    options = (hub or HubOptions()).downloading()
    try:
        settings, _ = ProcessorMixin.get_processor_dict(model_id, **options)
    except OSError:
        settings = {}
    kind = _kind(settings, model_id, config, options)
    try:
        images: Any = AutoImageProcessor.from_pretrained(  # type: ignore[no-untyped-call]
            model_id, backend="pil", config=config, trust_remote_code=False, **options
        )
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise UnsupportedModelError(
            f"{model_id} has no image processor that works with Pillow ({reason:.200})"
        ) from error
    if not isinstance(images, PilBackend):
        raise UnsupportedModelError(
            f"{model_id} has an image processor for torchvision alone ({type(images).__name__}), and packages process "
            "images with Pillow"
        )
    processor = assemble(kind, {"image_processor": images, "tokenizer": tokenizer}, settings)
    if getattr(processor, "chat_template", None) is not None:
        tokenizer.chat_template = processor.chat_template
    return processor


def assemble(
    kind: type[ProcessorMixin], parts: dict[str, Any], settings: dict[str, Any]
) -> ProcessorMixin:
    """A processor of some parts.

    Args:
        kind: the processor's class.
        parts: its parts by name; every other part is None.
        settings: the arguments of its class.
    """
    kind = _imported(kind)
    unchecked = {"check_argument_for_proper_class": lambda *_: None, "__module__": kind.__module__}
    unchecked_kind: Any = type(kind.__name__, (kind,), unchecked)
    module: Any = import_module(kind.__module__)
    # SmolVLM's processor spells the number of a video's frames, with a library that images do not
    # need.
    missing = vars(module).get("num2words", str) is None
    if missing:
        module.num2words = str
    try:
        arguments = [parts.get(name) for name in unchecked_kind.get_attributes()]
        processor: ProcessorMixin = unchecked_kind.from_args_and_dict(arguments, settings)
    finally:
        if missing:
            module.num2words = None
    return processor


def _imported(kind: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """The processor's class itself. If torchvision is missing, transformers has a dummy in place of
    Pixtral's, whose module imports torchvision for its other image processor."""
    if not getattr(kind, "is_dummy", False):
        return kind
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    stubs = {name: ModuleType(name) for name in names if name not in sys.modules}
    sys.modules.update(stubs)
    try:
        vars(sys.modules[names[-1]]).setdefault("functional", None)
        module = import_module(kind.__module__)
    finally:
        for name in stubs:
            del sys.modules[name]
    return getattr(module, kind.__name__)  # type: ignore[no-any-return]


def _kind(
    settings: dict[str, Any], model_id: str, config: PretrainedConfig, options: dict[str, Any]
) -> type[ProcessorMixin]:
    """The processor's class: the class that processor_config.json or preprocessor_config.json
    names, otherwise the class for the model's type."""
    found = settings
    if "processor_class" not in found:
        with suppress(OSError):
            found, _ = ImageProcessingMixin.get_image_processor_dict(model_id, **options)
    kind: Any = getattr(transformers, str(found.get("processor_class")), None)
    if kind is None:
        kind = PROCESSOR_MAPPING.get(type(config), None)
    if "AutoProcessor" in found.get("auto_map", {}) and "processor_class" not in found:
        raise UnsupportedModelError(
            f"{model_id} has a processor that is the repository's own code, which is not run"
        )
    if kind is None:
        raise UnsupportedModelError(f"{model_id} has no processor that transformers knows")
    return kind  # type: ignore[no-any-return]
