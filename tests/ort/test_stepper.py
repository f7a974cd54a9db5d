"""Steps that a host decides on: the tokens of a row beside another, against a host that knows only the contract."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qsample.contract.interface import ImageShape
from qsample.ort.session import open_sessions
from qsample.ort.stepper import Stepper
from qsample.package.package import Package, read_package
from tests.helpers.fake_images import AXIAL
from tests.helpers.plain_host import PlainHost
from tests.helpers.sessions import with_prompt_calls

PROMPT = [40, 41, 42, 43, 44, 45, 46]


@pytest.mark.parametrize("image", [None, AXIAL])
def test_a_row_that_is_filled_and_continued(
    fake: Callable[..., Package], image: ImageShape | None
) -> None:
    """Also of a package that reads images: a text is what it is in the same model without."""
    host = PlainHost(fake().path)
    wanted = host.generate(host.start([0], 16), PROMPT, 5)
    stepper = Stepper(
        with_prompt_calls(open_sessions(fake(image=image)), piece_size=4), rows=2, capacity=16
    )
    for _ in range(2):  # the second time, over what the first one left
        stepper.fill(1, np.array(PROMPT[:-1]))  # a piece, and the beginning of one
        stepper.write("lengths", [0, len(PROMPT) - 1])
        stepper.write("emit", [False, True])
        stepper.write("temperature", 0)
        token, found = PROMPT[-1], list[int]()
        for _ in wanted:
            stepper.write("input_ids", [[3], [token]])
            stepper.run()
            stepper.advance()
            token = int(stepper.read("next_ids")[1, 0])
            found.append(token)
        assert found == wanted
        assert stepper.read("lengths").tolist() == [5, len(PROMPT) + 4]
        stepper.reset()
        left = {
            name: stepper.read(name).tolist()
            for name in ("lengths", "temperature", "top_p", "input_lengths")
        }
        assert left == {
            "lengths": [0, 0],
            "temperature": [1, 1],
            "top_p": [1, 1],
            "input_lengths": [1, 1],
        }


@pytest.mark.ci
def test_a_package_with_adapters(
    exported: Callable[..., Path], adapted: Callable[..., Path]
) -> None:
    """Without a loaded adapter, a row is filled and continued as in the package without them."""
    found = []
    for path in (exported("llama"), adapted("llama", max_loras=2)):
        stepper = Stepper(open_sessions(read_package(path)), rows=2, capacity=16)
        stepper.fill(1, np.array(PROMPT))
        for name, value in {"lengths": [0, len(PROMPT)], "emit": True, "temperature": 0}.items():
            stepper.write(name, value)
        stepper.run()
        found.append(stepper.read("next_ids").tolist())
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
