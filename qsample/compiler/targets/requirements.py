"""A plan and its target enter; a refusal leaves if the target cannot serve the plan. No work is done before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from qsample.compiler.passes.parts import layers_of
from qsample.compiler.plan import CompilePlan
from qsample.compiler.quantize import entry_of_table
from qsample.compiler.targets import Capability, Target
from qsample.errors import CompileError


@dataclass(frozen=True, slots=True)
class Requirement:
    """A capability that some plans need of their target.

    Attributes:
        capability: the capability of the target.
        is_needed: whether a plan needs it.
        refusal: the message for a target without it.
    """

    capability: Capability
    is_needed: Callable[[CompilePlan], bool]
    refusal: Callable[[CompilePlan, Target], str]


def _needs_calibration(plan: CompilePlan) -> bool:
    return plan.weights is not None and plan.calibrated


def _refuse_calibration(plan: CompilePlan, target: Target) -> str:
    return (
        f"preset={plan.options.preset!r} runs the graph that is compiled, on the CPU, and provider is "
        f"{plan.options.provider!r}; take 'quick'"
    )


def _needs_guessed_tokens(plan: CompilePlan) -> bool:
    return plan.options.num_speculative_tokens > 0


def _refuse_guessed_tokens(plan: CompilePlan, target: Target) -> str:
    return (
        f"num_speculative_tokens is {plan.options.num_speculative_tokens}, and steps of graphs for {target.name} are "
        "of one token; leave it out, or compile for cpu"
    )


def _needs_several_devices(plan: CompilePlan) -> bool:
    return plan.options.num_devices > 1


def _refuse_several_devices(plan: CompilePlan, target: Target) -> str:
    return (
        f"num_devices is {plan.options.num_devices}, and graphs for {target.name} are for one device; "
        "compile for cpu or cuda"
    )


def _needs_adapters(plan: CompilePlan) -> bool:
    return bool(plan.source.interface.adapters)


def _refuse_adapters(plan: CompilePlan, target: Target) -> str:
    max_loras = plan.source.interface.features.max_loras
    return (
        f"{plan.source.path} takes LoRA adapters (max_loras={max_loras}), and the target {target.name} has no inputs "
        "for them; compile for cpu, or export the model without max_loras, its adapter merged (--adapter)"
    )


def _needs_images(plan: CompilePlan) -> bool:
    return plan.source.interface.image is not None


def _refuse_images(plan: CompilePlan, target: Target) -> str:
    return (
        f"{plan.source.path} reads images, and packages for {target.name} read text; compile for cpu or cuda, or "
        "export only the text model (--text-only)"
    )


def _needs_image_blocks(plan: CompilePlan) -> bool:
    image = plan.source.interface.image
    return image is not None and image.blockwise


def _refuse_image_blocks(plan: CompilePlan, target: Target) -> str:
    return (
        f"{plan.source.path} is of a model in which the tokens of an image see each other: a branch of its graph, and "
        f"graphs for {target.name} have none; compile for cpu, or export only the text model (--text-only)"
    )


def _needs_float16_weights(plan: CompilePlan) -> bool:
    return plan.store_float16


def _refuse_float16_weights(plan: CompilePlan, target: Target) -> str:
    converts = Capability.DTYPE_CONVERSION in target.capabilities
    if converts and "float16" in target.dtypes:
        advice = "dtype='float16'"
    else:
        advice = "'int4', 'int8' or 'float32'"
    return f"weights is 'float16', which is for the cpu target; give {advice} for {target.name}"


REQUIREMENTS: Final = (
    Requirement(Capability.CALIBRATION, _needs_calibration, _refuse_calibration),
    Requirement(Capability.GUESSED_TOKENS, _needs_guessed_tokens, _refuse_guessed_tokens),
    Requirement(Capability.SEVERAL_DEVICES, _needs_several_devices, _refuse_several_devices),
    Requirement(Capability.ADAPTERS, _needs_adapters, _refuse_adapters),
    Requirement(Capability.IMAGES, _needs_images, _refuse_images),
    Requirement(Capability.IMAGE_BLOCKS, _needs_image_blocks, _refuse_image_blocks),
    Requirement(Capability.FLOAT16_WEIGHTS, _needs_float16_weights, _refuse_float16_weights),
)


def check_plan(target: Target, plan: CompilePlan) -> None:
    """Raise CompileError, before any work, if `target` cannot serve the package or the options of `plan`."""
    for requirement in REQUIREMENTS:
        if requirement.is_needed(plan) and requirement.capability not in target.capabilities:
            raise CompileError(requirement.refusal(plan, target))
    _check_weight_bits(target, plan)
    _check_kv_cache_dtype(target, plan)
    _check_devices(plan)
    _check_dtype(target, plan)
    target.check(plan)
    target.check_installed()


def _check_weight_bits(target: Target, plan: CompilePlan) -> None:
    entries = map(entry_of_table, plan.options.table.values())
    used = {bits for bits, _ in entries if bits is not None}
    if plan.weights is not None:
        used.add(plan.weights.bits)
    if not used.issubset(target.weight_bits):
        raise CompileError(
            f"weights is {plan.options.weights!r}, and products with 2-bit weights are for cpu; take 'int4' for "
            f"{target.name}"
        )


def _check_kv_cache_dtype(target: Target, plan: CompilePlan) -> None:
    if plan.kv_cache_dtype is None or plan.kv_cache_dtype in target.kv_cache_dtypes:
        return
    alternatives = "".join(f", or take {dtype!r}" for dtype in target.kv_cache_dtypes)
    raise CompileError(
        f"kv_cache_dtype is {plan.kv_cache_dtype!r}, which the attention of {target.name} does not take; "
        f"leave it out{alternatives}"
    )


def _check_devices(plan: CompilePlan) -> None:
    """Raise CompileError if the graph cannot be cut for as many devices as the options say."""
    num_devices = plan.options.num_devices
    if num_devices <= 1:
        return
    layers = len(set(layers_of(plan.source.interface).values()))
    if num_devices > layers:
        raise CompileError(
            f"num_devices is {num_devices}, and the model has {layers} layers with states; give at most that"
        )
    if plan.options.num_speculative_tokens > 0:
        raise CompileError(
            f"num_devices is {num_devices} and num_speculative_tokens {plan.options.num_speculative_tokens}: between "
            "the layers of such a graph lie as many tokens as were guessed, which no host knows; leave out either"
        )


def _check_dtype(target: Target, plan: CompilePlan) -> None:
    exported = plan.source.interface.dtype
    converts = Capability.DTYPE_CONVERSION in target.capabilities
    if plan.dtype not in target.dtypes:
        accepted = " or ".join(map(repr, target.dtypes))
        verb = "compile" if converts else "export the model"
        raise CompileError(
            f"dtype is {plan.dtype!r} and the target {target.name} computes in {accepted}; {verb} with one of these"
        )
    if plan.dtype == exported or (converts and exported == "float32"):
        return
    remedy = "as float32, so that it is rounded only once" if converts else "with that dtype"
    raise CompileError(
        f"dtype is {plan.dtype!r} and the package was exported as {exported}; export it again {remedy}"
    )
