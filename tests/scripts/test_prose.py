"""The marks of unclear names in code, counted in sources of a few lines; and the package's own shares."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import prose  # noqa: E402


@pytest.mark.parametrize(
    ("line", "marked"),
    [
        ("_KEPT: Final = 64  # grammars of a server", True),
        ("_KEPT = 64  # of a server", True),
        ("self._held: dict[str, int] = {}  # values, for each call", True),
        ("_LIMIT: Final = 64  # bytes", False),
        ("_LIMIT: Final = 64  # A server keeps this many grammars.", False),
        ("_LIMIT: Final = 64  # a larger table costs a second", False),
        ("x = f()  # type: ignore[arg-type]", False),
        ("x = f()  # noqa: E731", False),
        ("call(  # the last of them", False),
        ("# of all of them\nx = 1", False),
    ],
)
def test_comments_that_continue_a_name(line: str, marked: bool) -> None:
    source = line + ("\n)\n" if line.startswith("call(") else "\n")
    share = prose.continued_comments(source)
    assert (share.places, len(share.marked)) == (1, int(marked))


def test_descriptions_that_begin_with_a_preposition() -> None:
    source = '''
def function(layers, size):
    """Do something. name: of the model, for messages.

    Args:
        layers: of the decoder.
        size: the size in bytes.
        low, high: in order.

    Raises:
        ValueError: for a wrong size.
    """
'''
    share = prose.prepositional_descriptions(source)
    assert share.places == 4
    assert share.marked == ["name: of …", "layers: of …", "low, high: in …"]


def test_constants_named_by_a_participle() -> None:
    source = "_KEPT: Final = 1\nMOVED = 2\nMAX_KEPT = 3\nNEED = 4\n\n\nclass A:\n    TRIED = 5\n"
    share = prose.participle_constants(source)
    assert share.marked == ["_KEPT", "MOVED", "TRIED"]
    assert share.places == 5


def test_a_place_is_no_share_of_nothing() -> None:
    assert prose.Share().percent == 0


@pytest.mark.ci
def test_the_package_stays_within_the_limits() -> None:
    shares = prose.code_shares(prose.files_of(ROOT / "qsample"))
    for name, share in shares.items():
        assert share.places > 100, name
        assert share.percent <= prose.LIMITS[name], (name, share.marked)
