"""Images in chat messages: every form that a part may have, what templates see of it, and what is refused."""

from __future__ import annotations

import base64
import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.images.messages import (
    check_base64,
    decode_base64,
    decode_data_url,
    images_in,
    with_images,
)
from qsample.request.text.chat import ChatTemplates

PNG = b"\x89PNG..."
CODED = base64.b64encode(PNG).decode()
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ part.text if part.type == 'text' else '<image>' }}{% endfor %}{% endif %}"
    "{% endfor %}"
)


def said(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def test_every_form_of_a_part() -> None:
    pixels = np.zeros((2, 2, 3), np.uint8)
    chat = [
        said({"type": "image", "image": "a.png"}, role="system"),
        said(
            {"type": "text", "text": "one"},
            {"type": "image", "image": PNG},
            "two",
            {"type": "image"},
        ),
        {"role": "assistant", "content": "ok", "tool_calls": None},
        said(
            {"type": "image", "url": f"data:image/webp;base64,{CODED}"},
            {"type": "image", "path": Path("b")},
        ),
        said(
            {
                "type": "image_url",
                "image_url": {"url": f"data:image/png;base64,{CODED}", "detail": "low"},
            }
        ),
        said({"type": "input_image", "image_url": "file:///tmp/c%20d.png"}, role="tool"),
        said({"type": "image", "base64": CODED}),
    ]
    found = images_in(chat, "<image>", [pixels])
    assert found[:2] == ["a.png", PNG]
    assert found[2] is pixels
    assert found[3:] == [PNG, Path("b"), PNG, Path("/tmp/c d.png"), PNG]
    assert ChatTemplates(TEMPLATE, text_only=None).render(chat) == (
        "[system]<image>[user]one<image>two<image>[assistant]ok[user]<image><image>[user]<image>[tool]<image>[user]<image>"
    )


@pytest.mark.parametrize(
    ("part", "given", "message"),
    [
        ({"type": "image"}, (), "without an image"),
        ("hello", ["a.png"], "1 more images were given"),
        ({"type": "image", "url": "https://example.org/a.png"}, (), "nothing is fetched here"),
        (
            {"type": "image", "image": "a", "path": "b"},
            (),
            "message 0 has a part of type 'image' with",
        ),
        (
            {"type": "image_url", "image_url": {"detail": "low"}},
            (),
            "with \\['image_url', 'type'\\]",
        ),
        ("is <image> a tag?", (), "message 0 has the text <image>, which stands for an image"),
        ({"type": "image", "base64": "%%%"}, (), "not valid base64"),
    ],
)
def test_wrong_parts(part: Any, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        images_in([said(part)], "<image>", given)


@pytest.mark.parametrize(
    "url",
    [
        "data:text/html;base64,AAAA",
        "data:image/svg+xml;base64,AAAA",
        "data:image/png,AAAA",
        "data:",
        CODED,
    ],
)
def test_wrong_data_urls(url: str) -> None:
    with pytest.raises(ValueError, match="give data:image/png;base64"):
        decode_data_url(url)


def test_a_data_url_is_as_long_as_allowed() -> None:
    url = "data:image/png;base64," + base64.b64encode(bytes(1000)).decode()
    assert len(decode_data_url(url, 1000)) == 1000
    with pytest.raises(ValueError, match="the most"):
        decode_data_url(url, 990)


def test_text_only() -> None:
    with pytest.raises(
        ValueError, match="message 0 has a part of type 'image'; the package x reads text only"
    ):
        ChatTemplates(TEMPLATE, text_only="the package x").render(
            [said({"type": "image", "image": "a.png"})]
        )
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.raises(ValueError, match="chat template reads text only"):
        ChatTemplates(plain, text_only=None).render([said({"type": "image", "image": "a.png"})])


def test_images_are_replaced_in_a_copy() -> None:
    chat = [
        {"role": "system", "content": "a text"},
        said({"type": "text", "text": "one"}, {"type": "image", "base64": CODED}, "two"),
        {"role": "user", "content": ({"type": "image", "image": "a.png"}, {"type": "image"})},
        {"role": "assistant", "content": None},
    ]
    before = copy.deepcopy(chat)
    changed = with_images(chat, lambda image: [image])
    assert chat == before
    assert changed == [
        before[0],
        said({"type": "text", "text": "one"}, {"type": "image", "image": [PNG]}, "two"),
        said({"type": "image", "image": ["a.png"]}, {"type": "image"}),
        before[3],
    ]
    assert changed[0] is not chat[0]
    wrong = [chat[0], said({"type": "image", "image": "a", "path": "b"})]
    with pytest.raises(ValueError, match="chat message 1 has a part of type 'image' with"):
        with_images(wrong, lambda image: image)


@pytest.mark.parametrize("kind", ["png", "jpeg", "jpg", "webp", "gif", "PNG", "Gif"])
def test_every_type_of_an_image_in_a_url(kind: str) -> None:
    assert decode_data_url(f"data:image/{kind};base64,{CODED}") == PNG
    assert decode_data_url(f"DATA:image/{kind};BASE64,{CODED}") == PNG
    part = {"type": "image", "base64": f"data:image/{kind};base64,{CODED}"}
    assert images_in([said(part)], "<image>") == [PNG]


@pytest.mark.parametrize("most", [999, 1000, 1001, 1002])
def test_a_base64_text_is_measured_before_it_is_decoded(most: int) -> None:
    """Up to the bytes that its last group may lack."""
    whole = -(-most // 3) * 4
    check_base64(whole, most)
    assert decode_base64(base64.b64encode(bytes(most)).decode(), most) == bytes(most)
    with pytest.raises(ValueError, match=rf"has {(whole + 4) * 3 // 4} bytes, and {most} are the"):
        check_base64(whole + 4, most)
    with pytest.raises(ValueError, match="are the most; give a smaller image"):
        decode_base64("%" * (whole + 4), most)
    assert len(decode_base64("AAAA" * 1000)) == 3000
