"""Dtypes as transformers takes them (strings, torch's, NumPy's), by name and without torch."""

from __future__ import annotations

from typing import Any, Final

from qsample.errors import UnsupportedModelError

_SHORT: Final = {"float": "float32", "half": "float16", "double": "float64"}  # torch has these names for them too
EXPORTED: Final = ("float32", "float16", "auto")
_NAMES: Final = frozenset({"float64", "float32", "float16", "bfloat16"})


def is_dtype(value: Any) -> bool:
    """Whether `value` is a dtype: torch's, NumPy's, or a string that names one."""
    return _name(value) in _NAMES


def dtype_name(value: Any) -> str:
    """The short name: "float32" for torch.float32, "torch.float32", np.float32 and np.dtype("float32"), and so on.

    Raises ValueError for what is none.
    """
    name = _name(value)
    if name is None:
        raise ValueError(f'dtype is {value!r:.60}; give "float32", "float16", "auto", or torch\'s object for one')
    return name


def choose_dtype(dtype: Any, torch_dtype: Any) -> str | None:
    """The name that the two keywords of `from_pretrained` ask for, dtype first, as in transformers; "auto" is one.

    None = neither was given. Raises ValueError for what is no dtype.
    """
    given = dtype if dtype is not None else torch_dtype
    return None if given is None else dtype_name(given)


def check_export_dtype(name: str) -> str:
    """`name`, where a checkpoint can be exported in it; UnsupportedModelError elsewhere."""
    if name not in EXPORTED:
        way = (
            ' give "float32", which holds bfloat16 weights exactly, and compile for CUDA with dtype="bfloat16"'
            if name == "bfloat16"
            else " choose one of these"
        )
        raise UnsupportedModelError(
            f"dtype is {name}, and a checkpoint is exported as {', '.join(EXPORTED)}, which the CPU can check;{way}"
        )
    return name


def _name(value: Any) -> str | None:
    """The name, whether or not it is one that a model can have."""
    if isinstance(value, str):
        text = value
    elif type(value).__module__.split(".")[0] in ("torch", "numpy") and type(value).__name__.startswith(
        ("dtype", "Float")
    ):
        text = str(value)
    elif isinstance(value, type) and value.__module__ == "numpy":
        text = value.__name__
    else:
        return None
    text = text.removeprefix("torch.")
    return _SHORT.get(text, text)
