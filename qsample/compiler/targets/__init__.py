"""Compile targets: the base class, and the registry that finds a target by its name.

A target is one file, and an entry point in the group `qsample.targets` that names the file's instance of `Target`. The
instance declares everything that is particular to the target.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from qsample.compiler.passes.parts import layers_of
from qsample.compiler.pipeline import Phase
from qsample.compiler.plan import CompilePlan
from qsample.compiler.quantize import entry_of_table
from qsample.contract.interface import Interface
from qsample.contract.tensors import BATCH, MODEL_DTYPES
from qsample.errors import CompileError, QsampleError
from qsample.extensions import TARGETS, extension_names, load_extension
from qsample.ort.providers import check_available


class Target(ABC):
    """Turns portable decode graphs into graphs for a device.

    Attributes:
        name: the value of `CompileOptions.provider`.
        execution_providers: ONNX Runtime's names, first the provider that compiles for the device.
        provider_options: of the first provider, in the session that runs the package. The manifest names them; a
            session takes them if `ort.providers` lists them for that provider, or if this target is installed.
        default_options: fields of CompileOptions for a model that is given directly (`models.SourceModel.cached`).
        dtypes: the dtypes that the device's kernels compute in.
        weight_bits: of quantized weights that the device multiplies by.
        kv_cache_dtypes: quantized caches that the device's attention takes.
        converts: whether the phases make another dtype of a float32 graph.
        stores_float16: whether weights="float16" is taken.
        calibrates: whether the graph can be run on the CPU before it is quantized, to fit weights to a text.
        adapts: whether the phases keep the inputs of LoRA adapters.
        slides: whether layers with an attention window may keep caches of the newest tokens.
        speculates: whether a step may check guessed tokens (`num_speculative_tokens`).
        cuts: whether the graph can be cut for several devices (`num_devices`).
        sees: whether the phases keep the inputs of images.
        branches: whether the graph may have an If, as images have whose tokens see each other.
        self_contained: whether the compiled graph runs on the CPU without the options of a session. The self-test then
            drives it with its weights mapped, as they may be larger than the memory, and with padded prompts.
    """

    name: str
    execution_providers: tuple[str, ...]
    provider_options: Mapping[str, str] = {}
    default_options: Mapping[str, Any] = {}
    dtypes: tuple[str, ...] = MODEL_DTYPES
    weight_bits: tuple[int, ...] = (4, 8)
    kv_cache_dtypes: tuple[str, ...] = ("int8",)
    converts = False
    stores_float16 = False
    calibrates = False
    adapts = False
    slides = False
    speculates = False
    cuts = False
    sees = False
    branches = False
    self_contained = False

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


def check_plan(target: Target, plan: CompilePlan) -> None:
    """Raise CompileError, before any work, if `target` cannot serve the package or the options of `plan`."""
    options, source, own = plan.options, plan.source, plan.source.interface.dtype
    if plan.weights is not None and plan.calibrated and not target.calibrates:
        raise CompileError(
            f"preset={options.preset!r} runs the graph that is compiled, on the CPU, and provider is "
            f"{options.provider!r}; take 'quick'"
        )
    used = {bits for bits, _ in map(entry_of_table, options.table.values()) if bits is not None}
    used |= {plan.weights.bits} if plan.weights is not None else set()
    if not used <= {*target.weight_bits}:
        raise CompileError(
            f"weights is {options.weights!r}, and products with 2-bit weights are for cpu; take 'int4' for "
            f"{target.name}"
        )
    if plan.kv_cache_dtype not in (None, *target.kv_cache_dtypes):
        listed = "".join(f", or take {dtype!r}" for dtype in target.kv_cache_dtypes)
        raise CompileError(
            f"kv_cache_dtype is {plan.kv_cache_dtype!r}, which the attention of {target.name} does not take; leave it "
            f"out{listed}"
        )
    if options.num_speculative_tokens and not target.speculates:
        raise CompileError(
            f"num_speculative_tokens is {options.num_speculative_tokens}, and steps of graphs for {target.name} are of "
            "one token; leave it out, or compile for cpu"
        )
    if options.num_devices > 1:
        _check_devices(target, plan)
    if source.interface.adapters and not target.adapts:
        raise CompileError(
            f"{source.path} takes LoRA adapters (max_loras={source.interface.features.max_loras}), and the target "
            f"{target.name} has no inputs for them; compile for cpu, or export the model without max_loras, its "
            "adapter merged (--adapter)"
        )
    if source.interface.image is not None and not target.sees:
        raise CompileError(
            f"{source.path} reads images, and packages for {target.name} read text; compile for cpu or cuda, or export "
            "the text model alone (--text-only)"
        )
    if (
        source.interface.image is not None
        and source.interface.image.blockwise
        and not target.branches
    ):
        raise CompileError(
            f"{source.path} is of a model in which the tokens of an image see each other: a branch of its graph, and "
            f"graphs for {target.name} have none; compile for cpu, or export the text model alone (--text-only)"
        )
    if plan.store_float16 and not target.stores_float16:
        converts = target.converts and "float16" in target.dtypes
        advice = "dtype='float16'" if converts else "'int4', 'int8' or 'float32'"
        raise CompileError(
            f"weights is 'float16', which is for the cpu target; give {advice} for {target.name}"
        )
    if plan.dtype not in target.dtypes:
        listed, what = (
            " or ".join(map(repr, target.dtypes)),
            "compile" if target.converts else "export the model",
        )
        raise CompileError(
            f"dtype is {plan.dtype!r} and the target {target.name} computes in {listed}; {what} with one of these"
        )
    if plan.dtype != own and not (target.converts and own == "float32"):
        raise CompileError(
            f"dtype is {plan.dtype!r} and the package was exported as {own}; export it again "
            + (
                "as float32, so that it is rounded only once"
                if target.converts
                else "with that dtype"
            )
        )
    target.check(plan)
    target.check_installed()


def _check_devices(target: Target, plan: CompilePlan) -> None:
    """Raise CompileError if the graph cannot be cut for as many devices as the options say."""
    given, layers = (
        f"num_devices is {plan.options.num_devices}",
        len({*layers_of(plan.source.interface).values()}),
    )
    if not target.cuts:
        raise CompileError(
            f"{given}, and graphs for {target.name} are for one device; compile for cpu or cuda"
        )
    if plan.options.num_devices > layers:
        raise CompileError(
            f"{given}, and the model has {layers} layers with states; give at most that"
        )
    if plan.options.num_speculative_tokens:
        raise CompileError(
            f"{given} and num_speculative_tokens {plan.options.num_speculative_tokens}: between the layers of such a "
            "graph lie as many tokens as were guessed, which no host knows; leave out either"
        )


def target_names() -> list[str]:
    """Every target that `find_target` accepts."""
    return extension_names(TARGETS)


def find_target(name: str) -> Target:
    """The target called `name`; CompileError, with the names that exist, if there is none."""
    if name not in target_names():
        raise CompileError(f"no compile target {name!r}; choose one of {', '.join(target_names())}")
    target: Target = load_extension(TARGETS, name)
    return target
