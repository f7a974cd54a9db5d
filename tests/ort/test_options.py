"""Session options: what reaches ONNX Runtime, and counts that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from qsample.ort.options import SessionOptions, session_options


def test_what_reaches_onnxruntime() -> None:
    options = session_options({"session.intra_op.allow_spinning": "0"}, intra_op_num_threads=3)
    assert options.intra_op_num_threads == 3
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert options.log_severity_level == 3


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2"])
def test_wrong_counts(value: Any) -> None:
    with pytest.raises(ValueError, match=f"intra_op_num_threads is {value!r}"):
        SessionOptions(value)


@pytest.mark.parametrize("value", [5, ["a"], {"a": None}, {1: "a"}, "a"])
def test_entries_that_are_none(value: Any) -> None:
    with pytest.raises(ValueError, match=r"provider_options is .*; give a mapping of names to texts or numbers"):
        SessionOptions(provider_options=value)
    with pytest.raises(ValueError, match="session_config is "):
        SessionOptions(config=value)


def test_numbers_are_texts_to_onnxruntime() -> None:
    options = SessionOptions(provider_options={"device_id": 3}, config={"session.set_denormal_as_zero": 1})  # type: ignore[dict-item]
    assert (options.provider_options, options.config) == ({"device_id": "3"}, {"session.set_denormal_as_zero": "1"})
