"""The interface of transformers' models that scripts use: configurations, dtype and device, and
methods such as `to`."""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from qsample.contract.interface import Features
from qsample.errors import UnsupportedModelError, shown, unknown
from qsample.request.refusals import ABSENT_ATTRIBUTES, BOOKKEEPING, GENERATE, UNSUPPORTED_SETTINGS
from qsample.request.sampling_params import OFF_VALUES, settings_of

# torch's other name of a dtype → its usual name.
_DTYPE_ALIASES: Final = {"float": "float32", "half": "float16", "double": "float64"}
EXPORT_DTYPES: Final = ("float32", "float16", "auto")
_DTYPE_NAMES: Final = frozenset({"float64", "float32", "float16", "bfloat16"})


def is_dtype(value: Any) -> bool:
    """Whether `value` is a dtype of torch or NumPy, or the name of such a dtype."""
    return _name(value) in _DTYPE_NAMES


def dtype_name(value: Any) -> str:
    """The short name of a dtype: "float32" for torch.float32, np.dtype("float32") and the like. A
    string of any other meaning is returned as it is. Raises ValueError for other objects."""
    name = _name(value)
    if name is None:
        raise ValueError(
            f'dtype is {shown(value, 60)}; give "float32", "float16", "auto", or a dtype of torch'
        )
    return name


def choose_dtype(dtype: Any, torch_dtype: Any) -> str | None:
    """The name of the dtype that was given as either keyword, or None. `dtype` takes precedence, as
    in transformers. Raises ValueError, as `dtype_name` does."""
    given = dtype if dtype is not None else torch_dtype
    return None if given is None else dtype_name(given)


def check_export_dtype(name: str) -> str:
    """`name`, if a checkpoint can be exported in it. Raises UnsupportedModelError otherwise."""
    if name in EXPORT_DTYPES:
        return name
    remedy = "choose among these"
    if name == "bfloat16":
        remedy = 'give "float32", which holds bfloat16 weights exactly, and compile for CUDA with dtype="bfloat16"'
    raise UnsupportedModelError(
        f"dtype is {name}, and a checkpoint is exported as {', '.join(EXPORT_DTYPES)}, which the CPU can check; "
        f"{remedy}"
    )


def _name(value: Any) -> str | None:
    """The name of a dtype, or a string of any meaning; None for other objects."""
    kind = type(value)
    if isinstance(value, type) and value.__module__ == "numpy":
        value = value.__name__
    elif kind.__module__.split(".")[0] in ("torch", "numpy"):
        # Objects of these types are dtypes: torch.dtype, numpy.dtype, numpy.dtypes.Float32DType.
        if kind.__name__.startswith(("dtype", "Float")):
            value = str(value)
    if not isinstance(value, str):
        return None
    text = value.removeprefix("torch.")
    return _DTYPE_ALIASES.get(text, text)


# Fields of a generation_config that `generate` follows, besides those of SamplingParams.
_FIELDS_OF_GENERATE: Final = (
    "do_sample",
    "pad_token_id",
    "bos_token_id",
    "return_dict_in_generate",
    "prefill_chunk_size",
)
_FIELDS: Final = frozenset(
    {*OFF_VALUES, *UNSUPPORTED_SETTINGS, *GENERATE, *BOOKKEEPING, *_FIELDS_OF_GENERATE}
)
# The fields that all of transformers' configurations have, with their defaults.
_COMMON_CONFIG_FIELDS: Final = {
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "is_encoder_decoder": False,
}


class GenerationConfig(dict[str, Any]):
    """The fields of a generation_config.json, as keys and as attributes. A field that is not set is
    None, as in transformers. A new value takes effect at the next `generate`:
    `model.generation_config.pad_token_id = 0`."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name in _FIELDS and not name.startswith("_"):
            return None
        raise AttributeError(unknown("a generation_config has no field", name, _FIELDS))

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _FIELDS and name not in self:
            raise AttributeError(unknown("a generation_config has no field", name, _FIELDS))
        if name == "eos_token_id" and value is None:
            # In a model's file, None leaves the stop tokens to the tokenizer; () means no stop
            # tokens.
            value = ()
        self[name] = value

    def to_dict(self) -> dict[str, Any]:
        return dict(self)

    # A file only has the values that differ from transformers' defaults.
    to_diff_dict = to_dict


def as_generation_config(given: Any) -> GenerationConfig:
    """`given` itself if it is a GenerationConfig; otherwise a GenerationConfig of the result of
    `settings_of`. Raises ValueError, as `settings_of` does."""
    return given if isinstance(given, GenerationConfig) else GenerationConfig(settings_of(given))


class ModelConfig(Mapping[str, Any]):
    """A checkpoint's config.json, as keys and as attributes (`model.config.hidden_size`); nested
    objects are ModelConfigs, too. It describes the model that was exported, and cannot be changed:
    settings of `generate` are in `generation_config`."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_values", dict(values))

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        return ModelConfig(value) if isinstance(value, dict) else value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_values":
            # Copying and unpickling ask for these before `_values` exists.
            raise AttributeError(name)
        if name in self._values:
            return self[name]
        if name in _COMMON_CONFIG_FIELDS:
            return _COMMON_CONFIG_FIELDS[name]
        raise AttributeError(unknown("the package's config.json has no field", name, self._values))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "use_cache":  # Scripts set it for training. `generate` always keeps its cache.
            return
        raise AttributeError(
            f"config.{name} cannot be set: config describes the model that was exported; set generation_config.{name} "
            "if it is a setting of generate"
        )

    def __reduce__(self) -> Any:
        return ModelConfig, (self._values,)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"ModelConfig({self._values!r})"

    def to_dict(self) -> dict[str, Any]:
        return dict(self._values)

    def get_text_config(self, decoder: bool | None = None) -> ModelConfig:
        """The part that describes the text model; the whole configuration if there is no such
        part."""
        text = self._values.get("text_config")
        return ModelConfig(text) if isinstance(text, dict) else self


# A pipeline of transformers logs this for classes that it does not know. It uses them all the same.
_FALSE_ALARM: Final = re.compile(
    "The model '(PackagedModel|SourceModel|CausalLM)' is not supported for text-generation"
)


def _is_no_false_alarm(record: logging.LogRecord) -> bool:
    return not _FALSE_ALARM.match(record.getMessage())


# Values of device_map that spread a model over all devices, in place of the name of a device.
_SPREADING_DEVICE_MAPS: Final = ("auto", "balanced", "balanced_low_0", "sequential")


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
    """The methods of transformers' models. They return the model if nothing changes; otherwise
    their error says how to make another graph.

    Attributes:
        features: the features of the graph.
    """

    features: Features
    main_input_name: ClassVar = "input_ids"
    input_modalities: ClassVar = "text"
    output_modalities: ClassVar = ("text",)

    @property
    @abstractmethod
    def device(self) -> Device:
        """The device on which the graph runs. Token ids may be on any device, and come back on the
        host."""

    @property
    @abstractmethod
    def dtype(self) -> str:
        """The dtype of the weights and the cache, "float32" for example."""

    def can_generate(self) -> bool:
        """True. transformers' pipelines ask for it; the error that they then log about an unknown
        class is suppressed."""
        logging.getLogger("transformers.pipelines.base").addFilter(_is_no_false_alarm)
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise TypeError: a graph keeps its cache, and returns tokens or the last logits."""
        if self.features.sampler:
            returns = "tokens"
            instead = "export with logprobs=True, top_logprobs=M or return_pdfs=True"
        else:
            returns = "the last logits of each row"
            instead = "give generate a function as logits_processor"
        raise TypeError(
            f"the model cannot be called, as its graph keeps the cache and returns {returns}; use generate. To see "
            f"probabilities, {instead}; for logits of a whole text, call the checkpoint's model in transformers"
        )

    if not TYPE_CHECKING:  # A type checker would believe that every name exists.

        def __getattr__(self, name: str) -> Any:
            if name in ABSENT_ATTRIBUTES:
                raise AttributeError(
                    f"a model of qsample has no {name}: {ABSENT_ATTRIBUTES[name].instead}"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def eval(self) -> Self:
        """Return the model itself; it is never in training."""
        return self

    def train(self, mode: bool = True) -> Self:
        """Return the model itself if mode is False. Raises ValueError for True, as a graph cannot
        be trained."""
        if mode:
            raise ValueError(
                "a package cannot be trained; train the checkpoint with transformers, and export it again"
            )
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Return the model itself or raise ValueError, as `train` does."""
        return self.train(requires_grad)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the model itself if it has every device and dtype in `args` and `kwargs`. Raises
        ValueError otherwise."""
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
        """Return the model itself if `device_map`, transformers' argument of `from_pretrained`,
        asks for no other device than the model's, as None, "auto" and the like do. Raises
        ValueError otherwise."""
        if device_map is None:
            return self
        if isinstance(device_map, str) and device_map in _SPREADING_DEVICE_MAPS:
            return self
        devices = device_map.values() if isinstance(device_map, Mapping) else [device_map]
        for wanted in devices:
            self._check_device(wanted)
        return self

    def _check_device(self, wanted: Any) -> None:
        """Raise ValueError unless `wanted` is the model's device. wanted: "cuda:0",
        torch.device("cuda"), or the number of a GPU."""
        name = getattr(wanted, "type", wanted)
        if isinstance(name, int):
            name = "cuda"
        elif isinstance(name, str):
            name = name.split(":")[0]
        else:
            name = shown(wanted)
        if name == self.device:
            return
        here = f"the model runs on {str(self.device)!r} and cannot move to {str(wanted)!r}"
        if name == "cuda":
            raise ValueError(
                f'{here}; model.compile(provider="cuda") makes a model for it. Or leave the device out; a pipeline of '
                'transformers takes device="cpu"'
            )
        if name == "cpu":
            raise ValueError(
                f'{here}; compile the checkpoint or the portable package with provider="cpu"'
            )
        raise ValueError(
            f"{here}; docs/devices.md has the devices, which compile and from_pretrained call provider="
        )

    def cpu(self) -> Self:
        """Return the model itself or raise ValueError, as `to("cpu")` does."""
        return self.to("cpu")

    def cuda(self, device: Any = None) -> Self:
        """Return the model itself or raise ValueError, as `to(device)` does; by default, the device
        is "cuda"."""
        return self.to("cuda" if device is None else device)

    def float(self) -> Self:
        """Return the model itself or raise ValueError, as `to` with float32 does."""
        return self.to(dtype="torch.float32")

    def half(self) -> Self:
        """Return the model itself or raise ValueError, as `to` with float16 does."""
        return self.to(dtype="torch.float16")

    def bfloat16(self) -> Self:
        """Return the model itself or raise ValueError, as `to` with bfloat16 does."""
        return self.to(dtype="torch.bfloat16")
