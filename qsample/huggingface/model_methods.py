"""`ModelMethods`: the methods that a script calls on a model of transformers before it generates."""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from qsample.contract.interface import Features
from qsample.errors import shown
from qsample.huggingface.dtypes import dtype_name, is_dtype

_ADAPTERS: Final = "adapters are merged before the export: open the checkpoint with from_pretrained(..., adapter=)"
_LAYERS: Final = (
    "it is an ONNX graph, without layers of torch. Train or change the checkpoint in transformers and export it again; "
    "from_pretrained(..., adapter=) merges a LoRA adapter into a checkpoint"
)


# The log of transformers for classes outside of it, which a pipeline uses all the same.
_FALSE_ALARM: Final = re.compile(
    "The model '(PackagedModel|SourceModel|CausalLM)' is not supported for text-generation"
)


def _keeps(record: logging.LogRecord) -> bool:
    return not _FALSE_ALARM.match(record.getMessage())


def _absent(names: str, why: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), why)


_ABSENT: Final[Mapping[str, str]] = {
    **_absent("load_adapter add_adapter set_adapter enable_adapters disable_adapters delete_adapter", _ADAPTERS),
    **_absent("active_adapters get_adapter_state_dict merge_and_unload", _ADAPTERS),
    "parameters": f"it has model.device and model.dtype; {_LAYERS}",
    **_absent("named_parameters buffers named_buffers state_dict load_state_dict", _LAYERS),
    **_absent("modules named_modules children named_children get_submodule apply model lm_head", _LAYERS),
    **_absent("get_input_embeddings get_output_embeddings resize_token_embeddings tie_weights", _LAYERS),
    **_absent("gradient_checkpointing_enable enable_input_require_grads zero_grad", _LAYERS),
    "forward": "its graph is compiled already, and generate runs it; leave torch.compile out",
    **_absent("get_memory_footprint num_parameters", "`qsample inspect` shows the sizes of its package"),
    "compute_transition_scores": "export with logprobs=True: the output's logprobs are the scores of its tokens",
    "generate_batch": "qsample.runtime.Engine does continuous batching; see docs/serving.md",
    "push_to_hub": "upload its folder with huggingface_hub.upload_folder",
}
# Ways to spread a model over the devices that are there, in place of a device.
_SPREAD: Final = ("auto", "balanced", "balanced_low_0", "sequential")


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

    features: Features  # of the graph
    main_input_name: ClassVar = "input_ids"
    input_modalities: ClassVar = "text"
    output_modalities: ClassVar = ("text",)

    @property
    @abstractmethod
    def device(self) -> Device:
        """The device that the graph runs on. Token ids may be on any device and come back on the host."""

    @property
    @abstractmethod
    def dtype(self) -> str:
        """The dtype of the weights and the cache, "float32" for example."""

    def can_generate(self) -> bool:
        """True. transformers' pipelines ask it, and would then log an error about a class that they do not know."""
        logging.getLogger("transformers.pipelines.base").addFilter(_keeps)
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises TypeError: a graph keeps its cache, and returns tokens or the last logits."""
        if self.features.sampler:
            returns, instead = "tokens", "export with logprobs=True, top_logprobs=M or return_pdfs=True"
        else:
            returns, instead = "the last logits of each row", "give generate a function as logits_processor"
        raise TypeError(
            f"the model cannot be called, as its graph keeps the cache and returns {returns}; use generate. To see "
            f"probabilities, {instead}; for logits of a whole text, call the checkpoint's model in transformers"
        )

    if not TYPE_CHECKING:  # which would take any name for present

        def __getattr__(self, name: str) -> Any:
            if name in _ABSENT:
                raise AttributeError(f"a model of qsample has no {name}: {_ABSENT[name]}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

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
            if wanted is None or isinstance(wanted, bool):
                continue
            if is_dtype(wanted):
                if dtype_name(wanted) != self.dtype:
                    raise ValueError(
                        f"the model is {self.dtype} and cannot become {dtype_name(wanted)}; give dtype= to "
                        "from_pretrained or to compile"
                    )
            else:
                self._check_device(wanted)
        return self

    def place(self, device_map: Any) -> Self:
        """The model itself, if `device_map`, as `from_pretrained` of transformers takes it, asks for no other device
        than the model's; None, "auto" and the like ask for none. Raises ValueError otherwise."""
        if device_map is not None and not (isinstance(device_map, str) and device_map in _SPREAD):
            for wanted in device_map.values() if isinstance(device_map, Mapping) else [device_map]:
                self._check_device(wanted)
        return self

    def _check_device(self, wanted: Any) -> None:
        """wanted: "cuda:0", torch.device("cuda"), or a GPU's number. Raises ValueError if it is another."""
        name = getattr(wanted, "type", wanted)
        name = "cuda" if isinstance(name, int) else name.split(":")[0] if isinstance(name, str) else shown(wanted)
        if name == self.device:
            return
        here = f"the model runs on {str(self.device)!r} and cannot move to {str(wanted)!r}"
        if name == "cuda":
            raise ValueError(
                f'{here}; model.compile(provider="cuda") makes a model for it. Or leave the device out; a pipeline of '
                'transformers takes device="cpu"'
            )
        if name == "cpu":
            raise ValueError(f'{here}; compile the checkpoint or the portable package with provider="cpu"')
        raise ValueError(f"{here}; docs/devices.md has the devices, which compile and from_pretrained call provider=")

    def cpu(self) -> Self:
        return self.to("cpu")

    def cuda(self, device: Any = None) -> Self:
        return self.to("cuda" if device is None else device)

    def float(self) -> Self:
        return self.to(dtype="torch.float32")

    def half(self) -> Self:
        return self.to(dtype="torch.float16")

    def bfloat16(self) -> Self:
        return self.to(dtype="torch.bfloat16")
