"""The images of prompts: which prompt has which, their placeholders among its tokens, and their features."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from qsample.contract.arrays import Array
from qsample.images.decode import ImageLimits
from qsample.images.features import VisionEncoder
from qsample.images.messages import images_in
from qsample.images.processing import ImageProcessor
from qsample.images.prompt import ImagePrompt, ProcessedImage
from qsample.package.package import Package
from qsample.runtime.sequence import Sequence as Row
from qsample.text.chat import ChatOptions
from qsample.text.tokenizer import Tokenizer

_LIST: Final = (list, tuple)


def images_of_prompts(images: Any, prompts: int) -> list[list[Any]]:
    """The argument `images` of `generate` as a list for each of `prompts` prompts. Raises ValueError."""
    several = isinstance(images, _LIST)
    if images is None or (several and not images):
        return [[] for _ in range(prompts)]
    if prompts == 1 and not (
        several and all(one is None or isinstance(one, _LIST) for one in images)
    ):
        return [list(images) if several else [images]]
    if not several or len(images) != prompts:
        given = f"a list of {len(images)}" if several else f"a single {type(images).__name__}"
        raise ValueError(
            f"images is {given} for {prompts} prompts; give a list with the images of each prompt: a list, a single "
            "image, or None"
        )
    return [[] if one is None else list(one) if isinstance(one, _LIST) else [one] for one in images]


class ImageReader:
    """What a package makes of images: pixels, placeholders and features. For any number of threads.

    processor: None for packages that read text only. limits: of an image, before it is decoded; they may be replaced.
    """

    def __init__(
        self, package: Package | None = None, open_vision: Callable[[], VisionEncoder] | None = None
    ) -> None:
        """package: by default a package that reads text only. open_vision: called for the first image; by default,
        vision.onnx is opened as `VisionEncoder` does."""
        self.processor = None if package is None else ImageProcessor.of(package)
        self.limits = ImageLimits()
        self._package, self._open_vision = package, open_vision
        self._encoder: VisionEncoder | None = None
        self._opening = threading.Lock()

    def process(self, images: Iterable[Any]) -> list[ProcessedImage]:
        """The images of a prompt as vision.onnx reads them; an image may be processed already. Raises ValueError for an
        image that cannot be read or is too large, and if the package reads text only."""
        processed = []
        for number, image in enumerate(images):
            if self.processor is None:
                path = "" if self._package is None else f" {self._package.path}"
                raise ValueError(
                    f"images were given, and the package{path} reads text only; leave them out, or export a model that "
                    "reads images with AutoModelForImageTextToText (`qsample export` without --text-only)"
                )
            if not isinstance(image, ProcessedImage):
                image = self.processor.process(image, self.limits, f"image {number}")
            processed.append(image)
        return processed

    def encode(
        self,
        item: str | Sequence[Mapping[str, Any]],
        images: list[Any],
        tokenizer: Tokenizer,
        chat: ChatOptions | None,
    ) -> tuple[list[int], list[ProcessedImage]]:
        """The token ids of a text, or of chat messages, with the placeholders of their images, and these images. A text
        without places for images has them before it. Raises ValueError if the numbers of images and places differ."""
        processor, plain = self.processor, isinstance(item, str)
        if processor is not None and not isinstance(item, str):
            images = images_in(item, processor.placeholder, images)
        text = item if isinstance(item, str) else tokenizer.render_chat(item, chat)
        processed = self.process(images)
        if processed and processor is not None:
            if plain and processor.placeholder not in text:
                text = processor.placeholder * len(processed) + text
            text = processor.expand(text, processed)
        return tokenizer.encode(text, add_special_tokens=plain), processed

    def prompt(self, ids: Array, images: list[ProcessedImage]) -> ImagePrompt | None:
        """Which token ids, [n] int64, are placeholders of which image; None without images. Raises ValueError if their
        numbers differ."""
        if not images:
            return None
        assert self.processor is not None
        return self.processor.prompt(ids, images)

    def seen(self, images: Iterable[ProcessedImage]) -> list[ProcessedImage]:
        """Images with their features, for callers whose threads add requests and must not wait for vision.onnx."""
        return [replace(image, features=self._vision.features(image)) for image in images]

    def see(self, sequences: Iterable[Row]) -> None:
        """Compute the image features of sequences, before they wait for slots. Raises QsampleError, and PackageError if
        vision.onnx cannot be opened."""
        seen: dict[int, tuple[ImagePrompt, Array]] = {}  # sequences of one prompt share them
        for one in sequences:
            if one.images is None or not one.images.prompt.images:
                continue
            given = one.images.prompt
            if id(given) not in seen:
                seen[id(given)] = given, self.features(given)
            one.images.features = seen[id(given)][1]
            # The pixels take more memory than the features.
            one.images.prompt = replace(given, images=())

    def features(self, images: ImagePrompt) -> Array:
        """[F, C], the features of all placeholders of a prompt. Raises as `see` does."""
        features = [self._vision.features(image) for image in images.images]
        return features[0] if len(features) == 1 else np.concatenate(features)

    @property
    def _vision(self) -> VisionEncoder:
        with self._opening:
            if self._encoder is None:
                assert self._package is not None
                self._encoder = (
                    self._open_vision() if self._open_vision else VisionEncoder(self._package)
                )
            return self._encoder


TEXT_ONLY: Final = ImageReader()
