"""What callers give as documents → token ids, with a tokenizer whose tokens are bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.errors import QsampleError
from qsample.package.package import Package
from qsample.request.text.documents import documents_of
from tests.helpers.small_packages import FILES, byte_tokenizer, write

BOS, A = 1, 68  # of `byte_tokenizer`; packages of small_packages have 100 tokens
PLAIN = byte_tokenizer().to_str()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Package]:
    """A package with a tokenizer.json, of `byte_tokenizer` unless another text is given; None for none."""

    def make(tokenizer: str | None = PLAIN) -> Package:
        files = FILES if tokenizer is None else FILES | {"tokenizer.json": tokenizer.encode()}
        return write(Path(tmp_path_factory.mktemp("package")) / "package", files)

    return make


@pytest.mark.parametrize(
    ("text", "documents"),
    [
        ([3, 0, 99], [[3, 0, 99]]),
        ((3, 0, 99), [[3, 0, 99]]),
        (np.array([3, 0, 99], np.uint8), [[3, 0, 99]]),
        ([np.int32(3), 4], [[3, 4]]),
        ([[3, 4], (5,), np.array([6])], [[3, 4], [5], [6]]),
        # An empty array is a document without tokens.
        ([np.array([], np.int64), [5]], [[], [5]]),
        ("a", [[BOS, A]]),
        (["a", "ba"], [[BOS, A], [BOS, A + 1, A]]),
        (["a", [5, 6]], [[BOS, A], [5, 6]]),
        (["", "a"], [[BOS], [BOS, A]]),
    ],
)
def test_forms_of_documents(
    text: Any, documents: list[list[int]], package: Callable[..., Package]
) -> None:
    found = documents_of(text, [package()])
    assert [document.tolist() for document in found] == documents
    assert {document.dtype for document in found} == {np.dtype(np.int64)}


def test_token_ids_need_no_tokenizer(package: Callable[..., Package]) -> None:
    (found,) = documents_of([1, 2], [package(None)])
    assert found.tolist() == [1, 2]
    with pytest.raises(QsampleError, match="has no tokenizer, and a text was given"):
        documents_of([[1, 2], "a"], [package(None)])
    with pytest.raises(QsampleError, match="has no tokenizer"):  # the second of two
        documents_of("a", [package(), package(None)])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "text is None; give a text, token ids, or a list of either"),
        (5, "text is 5;"),
        ({"a"}, r"text is \{'a'\};"),
        (b"ab", "text is b'ab';"),
        ([None], r"text is \[None\];"),
        (["a", None], "give a text, token ids"),
        ([1, "a"], "give a text, token ids"),
        ([1.5], "give a text, token ids"),
        (np.zeros((2, 2), np.int64), "give a text, token ids"),
        ("", "text is empty; give a document of at least 2 tokens"),
        ([], "text is empty"),
        (["", ""], "text is empty"),
        (np.array([], np.int64), "text is empty"),
        ([100], r"text has token ids \[100\]; give integers from 0 to 99"),
        ([0, -1], "give integers from 0 to 99"),
        ([[1], [99, 100]], r"text has token ids \[99, 100\]"),
        (np.array([1.0]), "give integers from 0 to 99"),
        ([True, False], "give integers from 0 to 99"),
    ],
)
def test_what_is_no_document(text: Any, problem: str, package: Callable[..., Package]) -> None:
    with pytest.raises(ValueError, match=problem):
        documents_of(text, [package()])


def test_packages_that_share_a_tokenizer(package: Callable[..., Package]) -> None:
    """Equal files, or other files of the same tokens."""
    spaced = json.dumps(json.loads(PLAIN), indent=3)
    for second in (PLAIN, spaced):
        (found,) = documents_of("a", [package(), package(second)])
        assert found.tolist() == [BOS, A]


def test_packages_with_other_tokens(package: Callable[..., Package]) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["more"])
    packages = [package(), package(), package(tokenizer.to_str())]
    with pytest.raises(QsampleError, match="has another tokenizer than") as raised:
        documents_of("a", packages)
    assert str(packages[2].path) in str(raised.value)
    assert f"than {packages[0].path}:" in str(raised.value)


def test_the_first_package_reads(package: Callable[..., Package]) -> None:
    """Of the same tokens, one adds no token before a text."""
    without = byte_tokenizer()
    plain = json.loads(without.to_str())
    plain["post_processor"] = None
    bare = json.dumps(plain)
    (found,) = documents_of("a", [package(), package(bare)])
    assert found.tolist() == [BOS, A]
    (found,) = documents_of("a", [package(bare), package()])
    assert found.tolist() == [A]
