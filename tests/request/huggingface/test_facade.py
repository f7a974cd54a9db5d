"""eval(), to() and their like; dtypes under any name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qsample.contract.interface import Features
from qsample.errors import UnsupportedModelError
from qsample.request.huggingface.facade import (
    Device,
    ModelMethods,
    check_export_dtype,
    choose_dtype,
    dtype_name,
    is_dtype,
)


class Model(ModelMethods):
    features = Features()
    device = Device("cpu")  # type: ignore[assignment]
    dtype = "float32"  # type: ignore[assignment]


def asks(*args: Any, **kwargs: Any) -> Callable[[Model], Model]:
    return lambda model: model.to(*args, **kwargs)


def test_methods_that_change_nothing_return_the_model() -> None:
    torch = pytest.importorskip("torch")
    model = Model()
    for harmless in (
        *(Model.eval, Model.cpu, Model.float, lambda model: model.train(False)),
        lambda model: model.requires_grad_(False),
        *(
            asks("cpu"),
            asks(torch.device("cpu")),
            asks(device="cpu", dtype=torch.float32, non_blocking=True),
        ),
        *(
            asks("cpu:0"),
            asks(torch.float32),
            asks("cpu", np.float32),
            asks(model.device),
            asks(None),
        ),
    ):
        assert harmless(model) is model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Model.train, "cannot be trained"),
        (Model.requires_grad_, "cannot be trained"),
        (
            Model.cuda,
            r"runs on 'cpu' and cannot move to 'cuda'; model\.compile\(provider=.cuda.\) ",
        ),
        (asks("cuda:1"), "cannot move to 'cuda:1'"),
        (asks(0), "cannot move to '0'"),
        (Model.half, "is float32 and cannot become float16; give dtype="),
        (Model.bfloat16, "cannot become bfloat16"),
        (asks("cpu", "float16"), "cannot become float16"),
    ],
)
def test_methods_that_would_change_the_graph_name_a_remedy(
    change: Callable[[Model], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        change(Model())


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (True, "returns tokens; use generate.*export with logprobs=True"),
        (False, "last logits.*as logits_processor"),
    ],
)
def test_calling_the_model_names_a_remedy(sampler: bool, message: str) -> None:
    model = Model()
    model.features = Features(sampler=sampler)
    with pytest.raises(TypeError, match=message):
        model(input_ids=[[5]])


def test_parts_of_a_model_of_torch_are_absent_with_a_remedy() -> None:
    for name, remedy in {
        "set_adapter": r"generate\(\.\.\., adapter=name\).*from_pretrained\(\.\.\., adapter=\)",
        "named_modules": r"without layers of torch.*adapter=",
        "forward": "leave torch.compile out",
    }.items():
        with pytest.raises(AttributeError, match=f"a model of qsample has no {name}: .*{remedy}"):
            getattr(Model(), name)
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'hf_device_map'"):
        _ = Model().hf_device_map  # type: ignore[attr-defined]


def test_a_device_map_asks_for_nothing_or_for_the_device_of_the_model() -> None:
    torch = pytest.importorskip("torch")
    model = Model()
    for harmless in (None, "auto", "sequential", "cpu", torch.device("cpu"), {"": "cpu"}):
        assert model.place(harmless) is model
    for other in ("cuda", 0, torch.device("cuda:1"), {"": "cpu", "lm_head": 0}):
        with pytest.raises(
            ValueError, match=r'cannot move.*compile\(provider="cuda"\).*a pipeline of'
        ):
            model.place(other)
    with pytest.raises(ValueError, match=r"cannot move to 'mps'; docs/devices.md"):
        model.to("mps")


def test_a_device_is_a_text_that_torch_takes() -> None:
    torch = pytest.importorskip("torch")
    device = Device("cpu")
    assert device == device.type == "cpu"
    assert device.index is None
    assert torch.zeros(1).to(device).device == torch.device(device)


def test_dtypes_by_every_name() -> None:
    torch = pytest.importorskip("torch")
    for value in (
        "float16",
        "torch.float16",
        "half",
        torch.float16,
        torch.half,
        np.float16,
        np.dtype("float16"),
    ):
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
    with pytest.raises(
        UnsupportedModelError, match=r'is bfloat16.*float32, float16.*CUDA with dtype="bfloat16"'
    ):
        check_export_dtype("bfloat16")
    with pytest.raises(UnsupportedModelError, match="dtype is int8"):
        check_export_dtype("int8")


def test_a_model_on_a_gpu_stays_there() -> None:
    model = Model()
    model.device = Device("cuda")
    for same in (
        model.cuda(),
        model.cuda(1),
        model.to(0),
        model.to("cuda:1"),
        model.place({"": 0}),
    ):
        assert same is model
    for name in ("auto", "balanced", "balanced_low_0", "sequential"):
        assert model.place(name) is model
    for move in (Model.cpu, asks("cpu"), lambda model: model.place({"lm_head": "cpu"})):
        with pytest.raises(
            ValueError, match=r"on 'cuda' and cannot move to 'cpu'; .*provider=.cpu"
        ):
            move(model)
    with pytest.raises(ValueError, match=r"cannot move to '\[1\]'; docs/devices.md"):
        model.to([1])


@pytest.mark.parametrize("name", ["PackagedModel", "SourceModel", "CausalLM", "OtherModel"])
def test_pipelines_take_a_model_and_give_no_false_alarm(name: str) -> None:
    model = Model()
    assert model.can_generate() is True
    assert (model.main_input_name, model.input_modalities) == ("input_ids", "text")
    assert model.output_modalities == ("text",)
    logger = logging.getLogger("transformers.pipelines.base")
    for task in ("text-generation", "translation"):
        text = f"The model '{name}' is not supported for {task}. Supported models are ..."
        record = logging.LogRecord(logger.name, logging.ERROR, "", 1, text, (), None)
        is_alarm = name == "OtherModel" or task != "text-generation"
        assert bool(logger.filter(record)) == is_alarm
