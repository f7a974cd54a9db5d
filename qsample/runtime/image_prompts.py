"""The images of prompts: the images of each prompt, their placeholders among its tokens, and their
features."""

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
from qsample.request.text.chat import ChatOptions
from qsample.request.text.tokenizer import Tokenizer
from qsample.runtime.sequence import Sequence as Row

_LIST_TYPES: Final = (list, tuple)


def images_of_prompts(images: Any, prompts: int) -> list[list[Any]]:
    """The argument `images` of `generate` as a list for each prompt.

    Args:
        images: the argument.
        prompts: the number of prompts.

    Raises ValueError.
    """
    is_list = isinstance(images, _LIST_TYPES)
    if images is None or (is_list and not images):
        return [[] for _ in range(prompts)]
    if prompts == 1:
        is_list_of_prompts = is_list and all(
            item is None or isinstance(item, _LIST_TYPES) for item in images
        )
        if not is_list_of_prompts:
            return [_as_list(images)]
    if not is_list or len(images) != prompts:
        given = f"a list of {len(images)}" if is_list else f"a single {type(images).__name__}"
        raise ValueError(
            f"images is {given} for {prompts} prompts; give a list with the images of each prompt: a list, a single "
            "image, or None"
        )
    return [_as_list(item) for item in images]


def _as_list(images: Any) -> list[Any]:
    """The images of a prompt: a list, a single image, or None."""
    if images is None:
        return []
    return list(images) if isinstance(images, _LIST_TYPES) else [images]


class ImageReader:
    """Reads images for a package: pixels, placeholders and features. Any number of threads may use
    it.

    Attributes:
        processor: the processor of images; None for packages that read text only.
        limits: the largest image to decode; they may be replaced.
    """

    def __init__(
        self, package: Package | None = None, open_vision: Callable[[], VisionEncoder] | None = None
    ) -> None:
        """package: the package; by default, text is read only. open_vision: opens vision.onnx for
        the first image; by default `VisionEncoder`."""
        self.processor = None if package is None else ImageProcessor.of(package)
        self.limits = ImageLimits()
        self._package = package
        self._open_vision = open_vision
        self._encoder: VisionEncoder | None = None
        self._opening = threading.Lock()

    def process(self, images: Iterable[Any]) -> list[ProcessedImage]:
        """The images of a prompt as vision.onnx reads them; an image may be processed already.
        Raises ValueError for an image that cannot be read or is too large, and if the package reads
        text only."""
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
        """The token ids of a prompt with the placeholders of its images, and these images.

        Args:
            item: a text, or chat messages. A text without places for images gets them before it.
            images: the images of the prompt.
            tokenizer: the tokenizer of the model.
            chat: the options of chat messages.

        Raises ValueError if the numbers of images and places differ.
        """
        processor = self.processor
        is_text = isinstance(item, str)
        if isinstance(item, str):
            text = item
        else:
            if processor is not None:
                images = images_in(item, processor.placeholder, images)
            text = tokenizer.render_chat(item, chat)
        processed = self.process(images)
        if processed and processor is not None:
            if is_text and processor.placeholder not in text:
                text = processor.placeholder * len(processed) + text
            text = processor.expand(text, processed)
        # A chat template writes the special tokens itself.
        return tokenizer.encode(text, add_special_tokens=is_text), processed

    def prompt(self, ids: Array, images: list[ProcessedImage]) -> ImagePrompt | None:
        """The decoder's inputs for the images of a prompt with token ids [n] int64; None without
        images. Raises ValueError if the numbers of placeholders differ."""
        if not images:
            return None
        assert self.processor is not None
        return self.processor.prompt(ids, images)

    def with_features(self, images: Iterable[ProcessedImage]) -> list[ProcessedImage]:
        """Images with their features, for callers whose threads add requests and must not wait for
        vision.onnx."""
        return [replace(image, features=self._vision.features(image)) for image in images]

    def stop(self) -> None:
        """End the run of vision.onnx soon, with an error, and begin no other. Any thread may call
        this."""
        if self._encoder is not None:
            self._encoder.stop()

    def compute_features(self, sequences: Iterable[Row]) -> None:
        """Compute the image features of sequences, before they wait for slots. Raises QsampleError,
        and PackageError if vision.onnx cannot be opened."""
        # The sequences of a prompt share its features. The values hold the prompts, so that their
        # ids stay theirs.
        computed: dict[int, tuple[ImagePrompt, Array]] = {}
        for sequence in sequences:
            if sequence.images is None or not sequence.images.prompt.images:
                continue
            prompt = sequence.images.prompt
            if id(prompt) not in computed:
                computed[id(prompt)] = prompt, self.features(prompt)
            _, sequence.images.features = computed[id(prompt)]
            # The pixels take more memory than the features.
            sequence.images.prompt = replace(prompt, images=())

    def features(self, images: ImagePrompt) -> Array:
        """The features of all placeholders of a prompt, [F, C]. Raises as `compute_features`
        does."""
        features = [self._vision.features(image) for image in images.images]
        return features[0] if len(features) == 1 else np.concatenate(features)

    @property
    def _vision(self) -> VisionEncoder:
        with self._opening:
            if self._encoder is None:
                assert self._package is not None
                if self._open_vision is not None:
                    self._encoder = self._open_vision()
                else:
                    self._encoder = VisionEncoder(self._package)
            return self._encoder


TEXT_ONLY: Final = ImageReader()
