"""Compile targets: the base class, and the registry that finds a target by its name.

A target is one file, and an entry point in the group `qsample.targets` that names the file's instance of `Target`. The
instance declares everything that is particular to the target.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from qsample.compiler.pipeline import Phase
from qsample.compiler.plan import CompilePlan
from qsample.contract.interface import Interface
from qsample.contract.tensors import BATCH, MODEL_DTYPES
from qsample.errors import CompileError, QsampleError
from qsample.extensions import TARGETS, extension_names, load_extension
from qsample.ort.providers import check_available


class Capability(Enum):
    """A feature of packages or options that a target may serve or not."""

    DTYPE_CONVERSION = "the phases make another dtype of a float32 graph"
    FLOAT16_WEIGHTS = "float32 weights can be stored in float16"
    CALIBRATION = (
        "the graph runs on the CPU before it is quantized, so weights can be fitted to a text"
    )
    ADAPTERS = "the phases keep the inputs of LoRA adapters"
    WINDOW_CACHES = "layers with an attention window may keep caches of the newest tokens"
    GUESSED_TOKENS = "a step may check guessed tokens (num_speculative_tokens)"
    SEVERAL_DEVICES = "the graph can be cut for several devices (num_devices)"
    IMAGES = "the phases keep the inputs of images"
    IMAGE_BLOCKS = "the graph may have an If, as images need whose tokens see each other"
    PROMPT_LOGPROBS = "the phases append the scorer of prompts (prompt_logprobs)"
    CPU_SELF_TEST = (
        "the compiled graph runs on the CPU without the options of a session, so the self-test can drive it with "
        "its weights mapped, as they may be larger than the memory, and with padded prompts"
    )


class Target(ABC):
    """Turns portable decode graphs into graphs for a device.

    Attributes:
        name: the value of `CompileOptions.provider`.
        execution_providers: ONNX Runtime's names, first the provider that compiles for the device.
        provider_options: the first provider's options, in the session that runs the package. The manifest names them; a
            session takes them if `ort.providers` lists them for that provider, or if this target is installed.
        default_options: fields of CompileOptions for a model that is given directly (`models.SourceModel.cached`).
        dtypes: the dtypes that the device's kernels compute in.
        weight_bits: the bits of quantized weights that the device multiplies by.
        kv_cache_dtypes: quantized caches that the device's attention takes.
        capabilities: the features that the phases keep or make; a plan that needs another is refused.
    """

    name: str
    execution_providers: tuple[str, ...]
    provider_options: Mapping[str, str] = {}
    default_options: Mapping[str, Any] = {}
    dtypes: tuple[str, ...] = MODEL_DTYPES
    weight_bits: tuple[int, ...] = (4, 8)
    kv_cache_dtypes: tuple[str, ...] = ("int8",)
    capabilities: frozenset[Capability] = frozenset()

    def check(self, plan: CompilePlan) -> None:  # noqa: B027  # a target may take everything
        """Raise CompileError, before any work, if the target cannot serve the package or the options of `plan`."""

    def check_installed(self) -> None:
        """Raise CompileError if a provider is missing: a graph is tested on the device that it is for."""
        try:
            check_available(self.execution_providers)
        except QsampleError as error:
            raise CompileError(str(error)) from error

    def interface(self, plan: CompilePlan) -> Interface:
        """The interface of the compiled package; `plan.interface` is the portable package's."""
        return replace(plan.interface, kv_cache_dtype=plan.kv_cache_dtype)

    def fixed_axes(self, plan: CompilePlan) -> Mapping[str, int]:
        """The size of each named axis that the graph of `plan` fixes, in addition to the capacity."""
        return {BATCH: 1} if plan.batch_size == 1 else {}

    @abstractmethod
    def phases(self, plan: CompilePlan) -> Sequence[Phase]:
        """Everything that is done to a graph, in order; see `pipeline`. The first phase gets the portable graph with
        its sampler; the last leaves `decoder.onnx` with its data in the package's folder, and the placement in the
        build."""


def target_names() -> list[str]:
    """Every target that `find_target` accepts."""
    return extension_names(TARGETS)


def find_target(name: str) -> Target:
    """The target called `name`; CompileError, with the names that exist, if there is none."""
    if name not in target_names():
        raise CompileError(f"no compile target {name!r}; choose one of {', '.join(target_names())}")
    target: Target = load_extension(TARGETS, name)
    return target
