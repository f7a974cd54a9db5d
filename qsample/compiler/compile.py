"""A portable package enters; a device package, optimised for a target and self-tested, leaves.

Stages: plan → the target's phases (`pipeline`) → self-test → divergence → publish.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

import qsample
from qsample.compiler import pipeline
from qsample.compiler.agreement import Published, check_guesses_change_nothing, run_self_test
from qsample.compiler.debug_dump import DebugDump
from qsample.compiler.divergence import measure_divergence
from qsample.compiler.options import CompileOptions
from qsample.compiler.plan import CompilePlan, make_plan
from qsample.compiler.quantize.blocks import quantization_report
from qsample.compiler.quantize.packed_experts import num_packed_experts
from qsample.compiler.targets import Capability, Target, find_target
from qsample.compiler.targets.requirements import check_plan
from qsample.compiler.vision import compare_vision, compile_vision
from qsample.contract.interface import Interface
from qsample.contract.tensors import BATCH, BLOCK_SIZES, STEPS_ONNXRUNTIME
from qsample.errors import CompileError
from qsample.exporters.portable import build_initial_state
from qsample.ort.session import VISION
from qsample.package import package
from qsample.package.disk.scratch import ScratchFolder
from qsample.package.divergence import Divergence
from qsample.progress import Progress, Stage, Stages, metered


def compile_package(
    source: package.Package,
    path: str | Path,
    options: CompileOptions,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> package.Package:
    """Compile `source` into a device package in `path`. progress: called with a stage's name and the fraction done.
    Raises CompileError if an option does not fit, the self-test fails or quantized weights are too far off, and
    PackageError if `path` cannot be written. Nothing is left behind then, except for a package that is merely too far
    off: it is put aside, and the message names it."""
    package.check_not_source(path, source.path)
    target = find_target(options.provider)
    plan = make_plan(source, options)
    check_plan(target, plan)
    for name in source.interface.graphs:
        source.check_graph(name)
    plan = replace(plan, interface=_interface(plan, target))
    dump = (
        None
        if options.debug_dump is None
        else DebugDump(options.debug_dump, kept=(source.path, Path(path)))
    )
    with metered(progress) as meter, package.write_package(path, overwrite=overwrite) as writer:
        stages = pipeline.stages_of(plan, meter)
        folder = writer.directory
        plan, compilation, weights_sha256 = _build(plan, target, folder, stages, dump)
        if weights_sha256 is not None:
            writer.hashed(pipeline.WEIGHTS, weights_sha256)
        _add_other_files(plan, folder)
        stages.begin(Stage.TESTING)
        unsealed = _unsealed(plan, compilation, folder)
        compilation = replace(compilation, self_test=asdict(run_self_test(plan, unsealed, target)))
        if plan.interface.image is not None:
            compilation = replace(
                compilation, self_test={**compilation.self_test, **compare_vision(plan, unsealed)}
            )
        if options.num_speculative_tokens > 0:
            check_guesses_change_nothing(plan, unsealed)
        refused = None
        if plan.quantized:
            divergence = measure_divergence(
                source,
                folder,
                plan.interface,
                plan.ctx_len,
                target.execution_providers,
                stages.begin(Stage.DIVERGENCE),
                rows=target.fixed_axes(plan).get(BATCH),
                runner=partial(Published, unsealed, logits=True)
                if options.num_devices > 1
                else None,
            )
            figures = {"divergence": asdict(divergence), **(compilation.quantization or {})}
            compilation = replace(compilation, quantization=figures)
            if not divergence.is_within(options.max_divergence):
                kept = writer.put_aside() if np.isfinite(divergence.kl.value) else None
                refused = _too_far_off(divergence, plan, kept)
                if kept is None:
                    raise refused
        stages.begin(Stage.PUBLISHING)
        source.check_not_replaced()
        writer.finish(replace(unsealed.manifest, compilation=compilation))
    if refused is not None:
        raise refused
    stages.finish()
    return package.read_package(path, verify=False)


def _interface(plan: CompilePlan, target: Target) -> Interface:
    """The interface of the compiled package. Whatever does not go with scores of prompts leaves them out: they change
    the speed only."""
    interface = target.interface(plan)
    scores = (
        interface.features.prompt_logprobs
        and Capability.PROMPT_LOGPROBS in target.capabilities
        and plan.options.num_speculative_tokens == 0
        and plan.options.num_devices == 1
    )
    return replace(interface, features=replace(interface.features, prompt_logprobs=scores))


def _build(
    plan: CompilePlan, target: Target, folder: Path, stages: Stages, dump: DebugDump | None
) -> tuple[CompilePlan, package.Compilation, str | None]:
    """Write the decode graph into `folder`. Returns the plan with its interface, how it was compiled, and the sha256 of
    its weights' file."""
    with ScratchFolder(folder.parent) as scratch:
        build = pipeline.start(plan, stages, folder, scratch.new)
        pipeline.run(build, target.phases(plan), dump)
        plan = build.plan
        if plan.interface.image is not None:
            compile_vision(plan, target.execution_providers, folder, scratch.new)
        assert build.placement is not None, f"the last phase of {target.name} sets the placement"
        compilation = package.Compilation(
            provider=plan.options.provider,
            execution_providers=target.execution_providers,
            batch_size=plan.batch_size,
            ctx_len=plan.ctx_len,
            placement=build.placement,
            self_test={},
            provider_options={**target.provider_options, **build.provider_options},
            quantization=_figures(plan, build.model),
            least_onnxruntime=STEPS_ONNXRUNTIME if plan.needs_new_attention else None,
            parts=tuple(build.parts),
            options=plan.options.described(),
            versions={"qsample": qsample.__version__, "onnxruntime": str(ort.__version__)},
        )
        return plan, compilation, build.weights_sha256


def _add_other_files(plan: CompilePlan, folder: Path) -> None:
    """Copy the other files of the portable package; the starting state follows the cache's dtype and sizes."""
    for name in plan.source.manifest.files:
        if not name.startswith((pipeline.DECODER, VISION)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(plan.source.path / name, folder / name)
    if plan.interface.cache_states != plan.source.interface.cache_states:
        ir.save(build_initial_state(plan.interface), folder / "initial_state.onnx")


def _too_far_off(divergence: Divergence, plan: CompilePlan, kept: Path | None) -> CompileError:
    causes = []
    advice = []
    if plan.weights is not None:
        causes.append(
            f"{_kind(plan)} weights in blocks of {plan.weights.block_size} (preset {plan.options.preset})"
        )
        advice += _finer_weights(plan)
    if plan.store_float16:
        causes.append("float16 weights")
        advice.append("weights float32")
    if plan.kv_cache_dtype is not None:
        causes.append(f"an {plan.kv_cache_dtype} cache")
        advice.append(
            "kv_cache_dtype int8" if plan.kv_cache_dtype == "int4" else "no kv_cache_dtype"
        )
    if plan.packed_weights:
        causes.append("activations in 8 bits, for the weights that came packed,")
        advice.append("the unquantized checkpoint")
    return CompileError(
        f"{' and '.join(causes)} change the model too much: {divergence}, and the KL may be at most "
        f"{plan.options.max_divergence:g}. Take {', or '.join(advice)}; max_divergence moves the limit"
        + (
            f". The package is kept as {kept}: rename it if it is good enough for you, or delete it"
            if kept
            else ""
        )
    )


def _kind(plan: CompilePlan) -> str:
    weights = plan.options.weights
    return weights if isinstance(weights, str) else "a table's"


def _finer_weights(plan: CompilePlan) -> list[str]:
    """Values of compile's options that keep more of the weights."""
    assert plan.weights is not None
    advice = [] if plan.calibrated or plan.options.provider != "cpu" else ["preset balanced"]
    if plan.weights.bits < 8:
        advice.append({2: "weights int4", 4: "weights int8"}[plan.weights.bits])
    if plan.weights.block_size > BLOCK_SIZES[0]:
        advice.append(
            f"block_size {max(size for size in BLOCK_SIZES if size < plan.weights.block_size)}"
        )
    return advice or ["the float weights"]


def _figures(plan: CompilePlan, model: ir.Model) -> dict[str, Any] | None:
    """The manifest's entry of quantized weights and a quantized cache; None if nothing is quantized. model: the
    compiled graph."""
    if not plan.quantized:
        return None
    figures: dict[str, Any] = {}
    report = quantization_report(model)
    if report is not None:
        blocks = asdict(plan.weights) if plan.weights is not None else {}
        figures |= {"dtype": _kind(plan), "preset": plan.options.preset, **blocks, **asdict(report)}
    if plan.kv_cache_dtype is not None:
        figures["kv_cache_dtype"] = plan.kv_cache_dtype
    if plan.source.manifest.packed_weights is not None:
        figures["packed_matrices"] = plan.source.manifest.packed_weights.get("matrices")
    if (experts := num_packed_experts(model)) > 0:
        figures["packed_experts"] = experts
    return figures


def _unsealed(plan: CompilePlan, compilation: package.Compilation, folder: Path) -> package.Package:
    """The package that `folder` will be, before its files are hashed."""
    source = plan.source.manifest
    names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    manifest = replace(
        source,
        kind="device",
        contract_version=plan.interface.contract_version,
        interface=plan.interface,
        compilation=compilation,
        files={name: package.FileEntry(sha256="", bytes=0) for name in names},
    )
    return package.Package(folder, manifest)
