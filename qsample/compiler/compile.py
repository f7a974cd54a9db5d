"""A portable package enters; a device package, optimised for one execution provider and self-tested, leaves.

Stages: plan → the target's passes → quantize → the target publishes → self-test → divergence.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime as ort

from qsample import package
from qsample.compiler import recipe
from qsample.compiler.divergence import Divergence, measure_divergence
from qsample.compiler.options import CALIBRATED, CompileOptions
from qsample.compiler.placement import Placement
from qsample.compiler.plan import CompilePlan, calibration_sequences, make_plan
from qsample.compiler.quantize.calibration import Calibration, calibrated_levels
from qsample.compiler.quantize.check import check_quantized
from qsample.compiler.quantize.experts import quantize_experts
from qsample.compiler.quantize.kv_cache import measure_ranges, quantize_kv_cache
from qsample.compiler.quantize.report import QuantizationReport, quantization_report
from qsample.compiler.quantize.weights import Calibrate, quantize_weights
from qsample.compiler.self_test import run_self_test
from qsample.compiler.targets import Target, find_target
from qsample.contract import BATCH, CAPACITY, ROW_AXES
from qsample.disk.scratch import ScratchFolder
from qsample.disk.space import check_free
from qsample.errors import CompileError
from qsample.exporters.portable import build_initial_state
from qsample.graph.edit import all_initializers, fix_axes
from qsample.graph.join import split_at_logits
from qsample.graph.operators import BLOCK_SIZES
from qsample.graph.weights import load_graph, widen_weights
from qsample.progress import Progress, unreported
from qsample.tensors import Array


def compile_package(
    source: package.Package,
    path: str | Path,
    options: CompileOptions,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> package.Package:
    """Compile the portable package `source` into a device package at `path` and return it.

    progress: called with a stage's name and the fraction done, in [0, 1].

    Raises CompileError where an option does not fit, the self-test fails or quantized weights are too far off,
    PackageError where `path` cannot be written. Nothing is left behind then.
    """
    package.check_not_source(path, source.path)
    report = progress or unreported
    target = find_target(options.provider)
    plan = make_plan(source, options)
    target.check(plan)
    for name in source.interface.graphs:
        source.check_graph(name)
    plan = replace(plan, interface=target.interface(plan))
    with package.write_package(path, overwrite=overwrite) as writer:
        folder = writer.directory
        if plan.kv_cache_dtype is not None:
            plan = replace(plan, cache_ranges=_measure_ranges(plan, report))
        report(f"optimising for {options.provider}", 0.2)
        with ScratchFolder(folder.parent) as scratch:
            model, sampler = optimize(plan, target, _calibrate(plan, scratch.new, report))
            check_free(folder, _disk_bytes(model, plan), "the package")
            placement = target.publish(model, sampler, plan, folder)
            quantization = quantization_report(model)
            del model, sampler  # they may hold weights
        _add_other_files(plan, folder)
        report("self-test", 0.6)
        manifest = partial(_manifest, plan, target, placement)
        self_test = run_self_test(plan, _unsealed(folder, manifest()), target)
        divergence = _measure_divergence(plan, target, folder, report) if plan.quantized else None
        report("publishing", 0.9)
        source.check_not_replaced()
        writer.finish(manifest(asdict(self_test), _figures(plan, quantization, divergence)))
    report("done", 1.0)
    return package.read_package(path, verify=False)


def optimize(plan: CompilePlan, target: Target, calibrate: Calibrate | None = None) -> tuple[ir.Model, ir.Model | None]:
    """The decode graph after the target's passes, quantized; and the sampler, where the target wants it apart."""
    model, sampler = load_graph(plan.decoder), None
    widen_weights(model)
    fix_axes(model, {CAPACITY: plan.ctx_len, **target.fixed_axes(plan)})
    if target.splits_at_logits:
        model, sampler = split_at_logits(model, plan.source.interface)
    passes = list(target.passes(plan))
    if plan.cache_ranges is not None:
        passes.append(partial(quantize_kv_cache, ranges=plan.cache_ranges))
    if plan.weights is not None:
        sizes = getattr(target, "expert_block_sizes", BLOCK_SIZES)
        passes.append(partial(quantize_experts, quantization=plan.weights, block_sizes=sizes))
        pads = getattr(target, "pads_blocks", False)
        passes.append(partial(quantize_weights, quantization=plan.weights, pads=pads, calibrate=calibrate))
    recipe.run(model, passes)
    if plan.weights is not None:
        check_quantized(model, plan.weights)
    return model, sampler


def _disk_bytes(model: ir.Model, plan: CompilePlan) -> int:
    """What is written of `model` before a package is complete: ONNX Runtime reads one graph and writes another."""
    tensors = (value.const_value for value in all_initializers(model.graph))
    size = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    return 2 * size + size // 2 * plan.store_float16


def _calibrate(plan: CompilePlan, folder: Path, report: Progress) -> Calibrate | None:
    """folder: a scratch folder for as long as the graph is not saved."""
    if plan.weights is None or plan.options.quantization_method != CALIBRATED:
        return None
    sequences = calibration_sequences(plan.source, plan.options, plan.ctx_len)
    axes = {**plan.source.interface.sizes, CAPACITY: plan.ctx_len, **dict.fromkeys(ROW_AXES, 1)}
    progress = lambda fraction: report("fitting weights to the text", 0.2 + 0.3 * fraction)  # noqa: E731
    calibration = Calibration(sequences, axes, folder, progress)
    return partial(calibrated_levels, calibration=calibration)


def _measure_ranges(plan: CompilePlan, report: Progress) -> dict[str, Array]:
    return measure_ranges(
        plan.source.path,
        plan.source.interface,
        plan.ctx_len,
        lambda fraction: report("measuring keys and values", 0.2 * fraction),
    )


def _add_other_files(plan: CompilePlan, folder: Path) -> None:
    """Everything but the decode graph is as in the portable package; the starting state follows the cache's dtype."""
    for name in plan.source.manifest.files:
        if not name.startswith("decoder.onnx"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(plan.source.path / name, folder / name)
    if plan.interface.cache_states != plan.source.interface.cache_states:
        ir.save(build_initial_state(plan.interface), folder / "initial_state.onnx")


def _measure_divergence(plan: CompilePlan, target: Target, folder: Path, report: Progress) -> Divergence:
    divergence = measure_divergence(
        plan.source.path,
        folder,
        plan.source.interface,
        plan.ctx_len,
        target.execution_providers,
        lambda fraction: report("measuring the divergence", 0.7 + 0.2 * fraction),
        rows=target.fixed_axes(plan).get(BATCH),
    )
    if not divergence.kl <= plan.options.max_divergence:  # NaN must not pass
        raise _too_far_off(divergence, plan)
    return divergence


def _too_far_off(divergence: Divergence, plan: CompilePlan) -> CompileError:
    causes, advice = [], []
    if plan.weights is not None:
        causes.append(f"{plan.options.weights} weights in blocks of {plan.weights.block_size} ({plan.weights.method})")
        advice.append("int8, smaller blocks, or quantization_method='k_quant', 'hqq' or 'gptq'")
    if plan.store_float16:
        causes.append("float16 weights")
        advice.append("weights='float32'")
    if plan.kv_cache_dtype is not None:
        causes.append("an int8 cache")
        advice.append("the model's own dtype for the cache")
    if plan.packed_weights:
        causes.append("activations in 8 bits, for the weights that came packed,")
        advice.append("the unquantized checkpoint")
    return CompileError(
        f"{' and '.join(causes)} change the model too much: {divergence.kl:.3f} nats a token from the float "
        f"distribution (at most {plan.options.max_divergence:g}), perplexity {divergence.quantized_perplexity:.4g} "
        f"instead of {divergence.perplexity:.4g}; take {', or '.join(advice)}; max_divergence= moves the limit"
    )


def _figures(
    plan: CompilePlan, quantization: QuantizationReport | None, divergence: Divergence | None
) -> dict[str, Any] | None:
    """What the manifest says of quantized weights and of a quantized cache; None where nothing is quantized."""
    if divergence is None:
        return None
    figures: dict[str, Any] = {"divergence": asdict(divergence)}
    if quantization is not None:
        blocks = asdict(plan.weights) if plan.weights is not None else {}
        figures |= {"dtype": plan.options.weights, **blocks, **asdict(quantization)}
    if plan.kv_cache_dtype is not None:
        figures["kv_cache_dtype"] = plan.kv_cache_dtype
    if plan.source.manifest.packed_weights is not None:
        figures["packed_matrices"] = plan.source.manifest.packed_weights.get("matrices")
    return figures


def _unsealed(folder: Path, manifest: package.Manifest) -> package.Package:
    """The package that `folder` will be, before its files are hashed."""
    names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    files = {name: package.FileEntry(sha256="", bytes=0) for name in names}
    return package.Package(folder, replace(manifest, files=files))


def _manifest(
    plan: CompilePlan,
    target: Target,
    placement: Placement,
    self_test: dict[str, int] | None = None,
    quantization: dict[str, Any] | None = None,
) -> package.Manifest:
    source = plan.source.manifest
    return replace(
        source,
        kind="device",
        interface=plan.interface,
        versions={**source.versions, "onnxruntime": str(ort.__version__)},
        compilation=package.Compilation(
            provider=plan.options.provider,
            execution_providers=target.execution_providers,
            batch_size=plan.batch_size,
            ctx_len=plan.ctx_len,
            placement=placement,
            self_test=self_test or {},
            provider_options=target.provider_options,
            quantization=quantization,
        ),
    )
