"""`ModelMethods`: the methods that a script calls on a model of transformers before it generates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

from qsample.huggingface.dtypes import dtype_name, is_dtype


class Device(str):
    """The device of a model, "cpu" or "cuda", with torch's attributes."""

    __slots__ = ()

    @property
    def type(self) -> str:
        return str(self)

    @property
    def index(self) -> int | None:  # type: ignore[override]
        return None


class ModelMethods(ABC):
    """Methods of transformers' models. They return the model if they would change nothing; otherwise they say how to
    make another graph."""

    @property
    @abstractmethod
    def device(self) -> Device:
        """The device that the graph runs on. Token ids may be on any device and come back on the host."""

    @property
    @abstractmethod
    def dtype(self) -> str:
        """The dtype of the weights and the cache, "float32" for example."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises TypeError: a graph returns tokens, not logits."""
        raise TypeError("the model cannot be called, as its graph returns tokens in place of logits; use generate")

    def eval(self) -> Self:
        """The model itself, which is never in training."""
        return self

    def train(self, mode: bool = True) -> Self:
        """The model itself if mode is False. Raises ValueError for True, as a graph cannot be trained."""
        if mode:
            raise ValueError("a package cannot be trained; train the checkpoint with transformers, and export it again")
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As `train`."""
        return self.train(requires_grad)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The model itself, if it has that device and dtype. Raises ValueError otherwise."""
        for wanted in (*args, *kwargs.values()):
            kind = getattr(wanted, "type", wanted)
            if wanted is None or isinstance(wanted, bool):
                continue
            if is_dtype(wanted):
                if dtype_name(wanted) != self.dtype:
                    raise ValueError(
                        f"the model is {self.dtype} and cannot become {dtype_name(wanted)}; give dtype= to "
                        "from_pretrained or to compile"
                    )
            elif not isinstance(kind, str) or kind.split(":")[0] != self.device:
                raise ValueError(
                    f"the model runs on {str(self.device)!r} and cannot move to {str(wanted)!r}; give provider= when "
                    "you load it, or compile it for that device"
                )
        return self

    def cpu(self) -> Self:
        return self.to("cpu")

    def cuda(self, device: Any = None) -> Self:
        return self.to("cuda")

    def float(self) -> Self:
        return self.to(dtype="torch.float32")

    def half(self) -> Self:
        return self.to(dtype="torch.float16")

    def bfloat16(self) -> Self:
        return self.to(dtype="torch.bfloat16")
