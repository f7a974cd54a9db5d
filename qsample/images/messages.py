"""Chat messages → the images in their parts. Templates see {"type": "image"} for each image, see
`text.chat`."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeGuard
from urllib.parse import unquote, urlsplit

from qsample.errors import shown

# The names after "image/".
MEDIA_TYPES: Final = ("png", "jpeg", "jpg", "webp", "gif")
_DATA_URL: Final = re.compile(r"data:image/(\w+);base64,", re.IGNORECASE)
_FORM: Final = (
    'give {"type": "image", "image": ...} with a path, bytes, an image of Pillow or an array [height, width, 3] uint8, '
    'or with "path", "url" or "base64" in place of "image"'
)


def _is_image(part: Any) -> TypeGuard[Mapping[str, Any]]:
    from qsample.request.text.conversation import (
        IMAGE_TYPES,  # It needs NumPy; the command line starts without.
    )

    return isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES


def images_in(
    messages: Sequence[Mapping[str, Any]], placeholder: str, given: Iterable[Any] = ()
) -> list[Any]:
    """The images of a conversation in order, each a path, bytes, an image of Pillow or an array.

    A part has the image as `image`, or in transformers' other forms, `path`, `url` (data: or file:)
    and `base64`, or in OpenAI's form, {"type": "image_url", "image_url": {"url": ...}}. A part
    without any of these takes the next image of `given`.

    Raises ValueError for a part without an image, if there are too few or too many images in
    `given`, and for a text that contains `placeholder`, because the template writes it for an
    image.
    """
    left = iter(given)
    images = []
    for index, message in enumerate(messages):
        what = f"chat message {index}"
        for part in _parts(message.get("content")):
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str) and placeholder in text:
                raise ValueError(
                    f"{what} has the text {placeholder}, which stands for an image here; leave it out"
                )
            if not _is_image(part):
                continue
            image = _image(what, part)
            if image is None:
                image = next(left, None)
            if image is None:
                raise ValueError(
                    f"{what} has a part of type {part['type']!r} without an image; {_FORM}"
                )
            images.append(image)
    too_many = len(list(left))
    if too_many != 0:
        raise ValueError(
            f"{too_many} more images were given than the messages have places; add {{'type': 'image'}} parts"
        )
    return images


def _parts(content: Any) -> Sequence[Any]:
    """The parts of a message's content; a text is a single part."""
    if isinstance(content, str):
        return [content]
    return content if isinstance(content, list | tuple) else ()


def with_images(
    messages: Iterable[Mapping[str, Any]], change: Callable[[Any], Any]
) -> list[dict[str, Any]]:
    """A copy of a conversation, with change(image) in place of each image that a part holds. Raises
    ValueError as `images_in` does."""

    def changed(what: str, part: Any) -> Any:
        image = _image(what, part) if _is_image(part) else None
        return part if image is None else {"type": "image", "image": change(image)}

    copies = [dict(message) for message in messages]
    for index, message in enumerate(copies):
        content = message.get("content")
        if isinstance(content, list | tuple):
            message["content"] = [changed(f"chat message {index}", part) for part in content]
    return copies


def _image(what: str, part: Mapping[str, Any]) -> Any:
    """The image of a part as it is given; None if it has no image."""
    given: list[Any] = [
        part[name]
        for name in ("image", "path", "url", "base64", "image_url")
        if part.get(name) is not None
    ]
    if not given:
        return None
    value = given[0].get("url") if isinstance(part.get("image_url"), Mapping) else given[0]
    if value is None or len(given) > 1:
        raise ValueError(
            f"{what} has a part of type {part['type']!r} with {shown(sorted(part))}; {_FORM}"
        )
    if not isinstance(value, str):
        return value
    if part.get("base64") is not None:
        return decode_base64(value.partition(",")[2] if value.startswith("data:") else value)
    if value.startswith("data:"):
        return decode_data_url(value)
    scheme = urlsplit(value).scheme if "://" in value else ""
    if scheme == "file":
        return Path(unquote(urlsplit(value).path))
    if scheme:
        raise ValueError(
            f"{what} has an image at {value:.100}, and nothing is fetched here; give the file or its bytes"
        )
    return value


def decode_data_url(url: str, most: int | None = None) -> bytes:
    """The bytes of data:image/...;base64,... Raises ValueError for anything else, and for more than
    `most` bytes."""
    match = _DATA_URL.match(url)
    if match is None or match[1].lower() not in MEDIA_TYPES:
        known = ", ".join(f"image/{name}" for name in MEDIA_TYPES)
        raise ValueError(
            f"an image is {url[:60]!r}; give data:image/png;base64,..., of the types {known}"
        )
    return decode_base64(url[match.end() :], most)


def decode_base64(text: str, most: int | None = None) -> bytes:
    """The bytes of a base64 text. Raises ValueError for other texts; and for more than `most`
    bytes, before they are decoded."""
    if most is not None:
        check_base64(len(text), most)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(
            f"an image is not valid base64 ({error}); give the file's bytes in base64, without line breaks"
        ) from None


def check_base64(length: int, most: int) -> None:
    """Raise ValueError if a base64 text of `length` characters has more than `most` bytes."""
    if length * 3 > (most + 2) * 4:
        raise ValueError(
            f"an image has {length * 3 // 4} bytes, and {most} are the most; give a smaller image"
        )
