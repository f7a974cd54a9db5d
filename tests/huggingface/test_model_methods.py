"""eval(), to() and their like; dtypes under any name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qsample.errors import UnsupportedModelError
from qsample.huggingface.dtypes import check_export_dtype, choose_dtype, dtype_name, is_dtype
from qsample.huggingface.model_methods import Device, ModelMethods


class Model(ModelMethods):
    device = Device("cpu")  # type: ignore[assignment]
    dtype = "float32"  # type: ignore[assignment]


def asks(*args: Any, **kwargs: Any) -> Callable[[Model], Model]:
    return lambda model: model.to(*args, **kwargs)


def test_what_changes_nothing_returns_the_model() -> None:
    torch = pytest.importorskip("torch")
    model = Model()
    for harmless in (
        *(Model.eval, Model.cpu, Model.float, lambda model: model.train(False)),
        lambda model: model.requires_grad_(False),
        *(asks("cpu"), asks(torch.device("cpu")), asks(device="cpu", dtype=torch.float32, non_blocking=True)),
        *(asks("cpu:0"), asks(torch.float32), asks("cpu", np.float32), asks(model.device), asks(None)),
    ):
        assert harmless(model) is model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Model.train, "cannot be trained"),
        (Model.requires_grad_, "cannot be trained"),
        (Model.cuda, "runs on 'cpu' and cannot move to 'cuda'; give provider="),
        (asks("cuda:1"), "cannot move to 'cuda:1'"),
        (asks(0), "cannot move to '0'"),
        (Model.half, "is float32 and cannot become float16; give dtype="),
        (Model.bfloat16, "cannot become bfloat16"),
        (asks("cpu", "float16"), "cannot become float16"),
    ],
)
def test_what_would_change_a_graph_says_what_to_do(change: Callable[[Model], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        change(Model())


def test_a_call_says_what_to_do() -> None:
    with pytest.raises(TypeError, match="returns tokens in place of logits; use generate"):
        Model()([[5]])


def test_a_device_is_a_text_that_torch_takes() -> None:
    torch = pytest.importorskip("torch")
    device = Device("cpu")
    assert device == device.type == "cpu"
    assert device.index is None
    assert torch.zeros(1).to(device).device == torch.device(device)


def test_dtypes_by_every_name() -> None:
    torch = pytest.importorskip("torch")
    for value in ("float16", "torch.float16", "half", torch.float16, torch.half, np.float16, np.dtype("float16")):
        assert is_dtype(value)
        assert dtype_name(value) == "float16"
    assert dtype_name(torch.bfloat16) == dtype_name("bfloat16") == "bfloat16"
    assert not is_dtype(torch.int8)
    for value in ("cpu", "cuda:0", 5, None, torch.device("cpu"), np.ones(2)):
        assert not is_dtype(value)
    for value in (5, [], torch.device("cpu")):
        with pytest.raises(ValueError, match=r"dtype is .*; give"):
            dtype_name(value)


def test_dtype_goes_before_its_older_name() -> None:
    assert choose_dtype(None, None) is None
    assert choose_dtype("auto", np.float16) == "auto"
    assert choose_dtype(None, "torch.float16") == "float16"
    assert check_export_dtype("float16") == "float16"
    with pytest.raises(UnsupportedModelError, match=r'is bfloat16.*float32, float16.*CUDA with dtype="bfloat16"'):
        check_export_dtype("bfloat16")
    with pytest.raises(UnsupportedModelError, match="dtype is int8"):
        check_export_dtype("int8")
