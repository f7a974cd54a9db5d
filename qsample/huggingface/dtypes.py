"""Dtypes as transformers takes them (strings, torch's, NumPy's), by name and without torch."""

from __future__ import annotations

from typing import Any, Final

from qsample.errors import UnsupportedModelError, shown

_SHORT: Final = {"float": "float32", "half": "float16", "double": "float64"}  # other names of torch
EXPORTED: Final = ("float32", "float16", "auto")
_NAMES: Final = frozenset({"float64", "float32", "float16", "bfloat16"})


def is_dtype(value: Any) -> bool:
    """Whether `value` is a dtype of torch or NumPy, or the name of such a dtype."""
    return _name(value) in _NAMES


def dtype_name(value: Any) -> str:
    """The short name: "float32" for torch.float32, "torch.float32", np.float32 and np.dtype("float32"), and so on.

    Raises ValueError for other objects.
    """
    name = _name(value)
    if name is None:
        raise ValueError(f'dtype is {shown(value, 60)}; give "float32", "float16", "auto", or a dtype of torch')
    return name


def choose_dtype(dtype: Any, torch_dtype: Any) -> str | None:
    """The name in the two keywords of `from_pretrained`, dtype first, as in transformers; None = neither was given.

    Raises ValueError for other objects than dtypes and strings.
    """
    given = dtype if dtype is not None else torch_dtype
    return None if given is None else dtype_name(given)


def check_export_dtype(name: str) -> str:
    """`name`, if a checkpoint can be exported in it. Raises UnsupportedModelError otherwise."""
    if name not in EXPORTED:
        way = (
            ' give "float32", which holds bfloat16 weights exactly, and compile for CUDA with dtype="bfloat16"'
            if name == "bfloat16"
            else " choose among these"
        )
        raise UnsupportedModelError(
            f"dtype is {name}, and a checkpoint is exported as {', '.join(EXPORTED)}, which the CPU can check;{way}"
        )
    return name


def _name(value: Any) -> str | None:
    """The name of a dtype, or a string, which may have any meaning; None for other objects."""
    if isinstance(value, type) and value.__module__ == "numpy":
        value = value.__name__
    elif type(value).__module__.split(".")[0] in ("torch", "numpy") and type(value).__name__.startswith(
        ("dtype", "Float")
    ):
        value = str(value)
    if not isinstance(value, str):
        return None
    text = value.removeprefix("torch.")
    return _SHORT.get(text, text)
