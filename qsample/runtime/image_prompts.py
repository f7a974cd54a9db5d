"""The images of prompts: which prompt has which, their placeholders among its tokens, and their features."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from qsample.contract.arrays import Array
from qsample.images.features import DEFAULT_CACHE_BYTES, VisionEncoder
from qsample.images.messages import images_in
from qsample.images.prompt import ImagePrompt, ProcessedImage
from qsample.package.package import Package
from qsample.runtime.sequence import Sequence as Row
from qsample.text.chat import ChatOptions
from qsample.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from qsample.images.decode import ImageLimits
    from qsample.images.processing import ImageProcessor

_LIST: Final = (list, tuple)


def images_of_prompts(images: Any, prompts: int) -> list[list[Any]]:
    """The argument `images` of `generate` as a list for each of `prompts` prompts. Raises ValueError."""
    several = isinstance(images, _LIST)
    if images is None or (several and not images):
        return [[] for _ in range(prompts)]
    if prompts == 1 and not (several and all(one is None or isinstance(one, _LIST) for one in images)):
        return [list(images) if several else [images]]
    if not several or len(images) != prompts:
        given = f"{len(images)} lists" if several else f"a single {type(images).__name__}"
        raise ValueError(
            f"images is {given} for {prompts} prompts; give a list with the images of each prompt: a list, a single "
            "image, or None"
        )
    return [[] if one is None else list(one) if isinstance(one, _LIST) else [one] for one in images]


class ImageReader:
    """What a package makes of images: pixels, placeholders and features. For any number of threads.

    limits: of an image, before it is decoded; they may be replaced.
    """

    def __init__(self, package: Package | None = None, cache_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        """package: by default a package that reads text only. cache_bytes: see `VisionEncoder`. vision.onnx is opened
        for the first image."""
        self._package, self._cache_bytes = package, cache_bytes
        self._processor: ImageProcessor | None = None
        if package is not None and package.interface.image is not None:
            from qsample.images.decode import ImageLimits
            from qsample.images.processing import ImageProcessor

            self.limits: ImageLimits = ImageLimits()
            self._processor = ImageProcessor.of(package)
        self._encoder: VisionEncoder | None = None
        self._opening = threading.Lock()

    @property
    def processor(self) -> ImageProcessor | None:
        """None for packages that read text only."""
        return self._processor

    def process(self, prompt: int, images: Iterable[Any]) -> list[ProcessedImage]:
        """The images of a prompt as vision.onnx reads them; an image may be processed already. Raises ValueError for an
        image that cannot be read or is too large, and if the package reads text only. prompt: for errors."""
        processed = []
        for number, image in enumerate(images):
            if self._processor is None:
                path = "" if self._package is None else f" {self._package.path}"
                raise ValueError(
                    f"images were given, and the package{path} reads text only; leave them out, or export a model that "
                    "reads images with AutoModelForImageTextToText (`qsample export` without --text-only)"
                )
            try:
                if not isinstance(image, ProcessedImage):
                    image = self._processor.process(image, self.limits)
                processed.append(image)
            except ValueError as error:
                raise ValueError(f"image {number} of prompt {prompt}: {error}") from error
        return processed

    def encode(
        self,
        prompt: int,
        item: str | Sequence[Mapping[str, Any]],
        images: list[Any],
        tokenizer: Tokenizer,
        chat: ChatOptions | None,
    ) -> tuple[list[int], list[ProcessedImage]]:
        """The token ids of a text, or of chat messages, with the placeholders of their images, and these images. A text
        without places for images has them before it. Raises ValueError if the numbers of images and places differ."""
        processor = self._processor
        text = item if isinstance(item, str) else tokenizer.render_chat(item, chat)
        if processor is not None and not isinstance(item, str):
            images = images_in(item, processor.placeholder, images)
        processed = self.process(prompt, images)
        if processed and processor is not None:
            if isinstance(item, str) and processor.placeholder not in text:
                text = processor.placeholder * len(processed) + text
            places = text.count(processor.placeholder)
            if places != len(processed):
                where = "the text has" if isinstance(item, str) else "the chat template wrote"
                raise ValueError(
                    f"prompt {prompt} has {len(processed)} images, and {where} {processor.placeholder} {places} times; "
                    "give an image for each"
                )
            text = processor.expand(text, processed)
        return tokenizer.encode(text, add_special_tokens=isinstance(item, str)), processed

    def prompt(self, prompt: int, ids: Array, images: list[ProcessedImage]) -> ImagePrompt | None:
        """Which token ids, [n] int64, are placeholders of which image; None without images. Raises ValueError if their
        numbers differ."""
        if not images:
            return None
        assert self._processor is not None
        try:
            return self._processor.prompt(ids, images)
        except ValueError as error:
            raise ValueError(f"prompt {prompt}: {error}") from error

    def see(self, sequences: Iterable[Row]) -> None:
        """Compute the image features of sequences, before they wait for slots. Raises QsampleError, and PackageError if
        vision.onnx cannot be opened."""
        seen: dict[int, tuple[ImagePrompt, Array]] = {}  # sequences of one prompt share them
        for one in sequences:
            if one.images is None or not one.images.images:
                continue
            if id(one.images) not in seen:
                seen[id(one.images)] = one.images, self.features(one.images)
            given, one.image_features = seen[id(one.images)]
            one.images = replace(given, images=())  # its pixels take more memory than its features

    def features(self, images: ImagePrompt) -> Array:
        """[F, C], the features of all placeholders of a prompt. Raises as `see` does."""
        features = [self._vision.features(image) for image in images.images]
        return features[0] if len(features) == 1 else np.concatenate(features)

    @property
    def _vision(self) -> VisionEncoder:
        with self._opening:
            if self._encoder is None:
                assert self._package is not None
                self._encoder = VisionEncoder(self._package, self._cache_bytes)
            return self._encoder


TEXT_ONLY: Final = ImageReader()
