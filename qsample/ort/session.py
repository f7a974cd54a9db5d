"""ONNX Runtime's sessions of a package's graphs, checked against the contract."""

from __future__ import annotations

import ctypes
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal

import numpy as np
import onnxruntime as ort

from qsample.contract.arrays import DTYPES, OF_ONNXRUNTIME, Array
from qsample.contract.interface import GraphSpec, Interface
from qsample.contract.tensors import (
    BATCH,
    CAPACITY,
    IMAGE_FEATURES,
    LOGITS,
    ROW_MULTIPLE,
    TensorSpec,
    retained_name,
)
from qsample.errors import PackageError, QsampleError
from qsample.ort.batching import (
    DecoderTraits,
    PromptCalls,
    StepRows,
    broken_promises,
    guesses_are_exact,
)
from qsample.ort.bound_graph import BoundGraph, DeviceThread, Replays
from qsample.ort.buffers import DEVICES_WITHOUT_ADDRESSES, Buffer
from qsample.ort.linux_memory import give_back_after, in_huge_pages, release_pages
from qsample.ort.options import (
    NO_SPINNING,
    WEIGHTS_FOLDER_KEY,
    PartThreads,
    SessionOptions,
    session_options,
    threads_of_parts,
)
from qsample.ort.parts import BoundParts, Part, Pipeline, hidden_states
from qsample.ort.providers import CPU, Place, open_session
from qsample.ort.rounding import Rounding, measured
from qsample.ort.small_graphs import one_more_output
from qsample.package.manifest import Compilation
from qsample.package.package import Package

DECODER: Final = "decoder.onnx"
SAMPLER: Final = "sampler.onnx"
VISION: Final = "vision.onnx"
_CAPTURE_OPTION: Final = "enable_cuda_graph"


@dataclass(frozen=True, slots=True)
class Sessions:
    """The loaded graphs of a package.

    Attributes:
        interface: The interface of the graphs.
        decoder: The decoder's session; if it has parts, the session of the first part.
        sampler: The session that samples on the host; None if the decoder samples.
        device: The device of the decoder's buffers, "cpu", "cuda" or "webgpu"; if the decoder has
            parts, the device of the last part, such as "cuda:1".
        prompts: The calls in which prompts are read.
        rows: The numbers of rows of a decode step.
        guesses: Whether steps may check guesses; False if guesses would change tokens here.
        rounding: How the products round here; None if it was not measured.
        replays: The captures of the decoder's runs; None if its runs are not captured and replayed.
        parts: The parts of the decoder, each on a device; none if it is whole.
    """

    interface: Interface
    decoder: ort.InferenceSession
    sampler: ort.InferenceSession | None
    device: str
    prompts: PromptCalls
    rows: StepRows
    guesses: bool = True
    rounding: Rounding | None = None
    replays: Replays | None = None
    parts: tuple[Part, ...] = ()

    @property
    def input_device(self) -> str:
        """The device of what the host writes and graphs only read: the host if the memory has no
        addresses, and then each run copies it."""
        return "cpu" if self.device in DEVICES_WITHOUT_ADDRESSES else self.device

    def device_of(self, tensor: TensorSpec) -> str:
        """The device of an input or a state: a state is where a part computes its next value."""
        name = retained_name(tensor.name)
        for part in self.parts:
            if name in part.spec.output_names:
                return part.device
        return self.device

    def binder(self, spec: GraphSpec) -> Callable[..., BoundGraph | BoundParts]:
        """Return a function that binds the decoder to buffers, for one user of the buffers at a
        time.

        Args:
            spec: The decoder's inputs, states and outputs.

        Returns:
            A function of the buffers by name and the keyword `captured`, as `BoundGraph` has them.
        """
        if self.parts:
            return Pipeline(self.parts).bind

        def bind(buffers: Mapping[str, Buffer], *, captured: bool = True) -> BoundGraph:
            return BoundGraph(
                self.decoder, spec, buffers, self.device, self.replays, captured=captured
            )

        return bind


def open_sessions(
    package: Package,
    provider: str | Sequence[str] | None = None,
    options: SessionOptions | None = None,
    *,
    logits: bool = False,
) -> Sessions:
    """Load the graphs of a package, checked against its manifest.

    Args:
        package: The package.
        provider: A short name (see `execution_providers`) or ONNX Runtime's provider names in order
            of preference; by default the provider that a device package was compiled for, otherwise
            "cpu".
        options: How ONNX Runtime runs.
        logits: Whether the logits are among the decoder's outputs; see `with_logits`.

    Raises:
        QsampleError: The provider does not exist here, or the package was compiled for another.
        PackageError: A graph does not have the interface that the manifest promises.
    """
    options = options or SessionOptions()
    place = Place.of(package, provider, options.provider_options)
    threads = _part_threads(package, place)
    if threads and options.intra_op_num_threads is None:
        options = replace(options, intra_op_num_threads=threads[0].count)
    rounding = _measured_rounding(package, place, options)
    assumed = rounding or Rounding()
    opener = _GraphOpener(package, place.providers, options, 1 if assumed.is_uniform else 2)
    decoder = _open_decoder(opener, place, threads, logits=logits)
    traits = DecoderTraits.of(package, decoder.sessions, options)
    for promise in broken_promises(traits, assumed):
        warnings.warn(f"{package.path}: {promise}", stacklevel=3)
    return Sessions(
        package.interface,
        decoder=decoder.sessions[0],
        sampler=_open_sampler(opener),
        device=decoder.device,
        prompts=PromptCalls.of(traits, place, assumed),
        rows=StepRows.of(traits, place, assumed, batch_invariant=options.batch_invariant),
        guesses=guesses_are_exact(traits, assumed),
        rounding=rounding,
        replays=decoder.replays,
        parts=decoder.parts,
    )


def _part_threads(package: Package, place: Place) -> list[PartThreads]:
    """The threads of each part of the decoder; nothing if it is whole."""
    parts = len(_part_files(package.manifest.compilation))
    if parts == 0:
        return []
    return threads_of_parts(parts) if place.device == "cpu" else [PartThreads()] * parts


def _part_files(compilation: Compilation | None) -> list[str]:
    """The files of the decoder's parts; nothing if it is whole."""
    return [] if compilation is None else [part.file for part in compilation.parts]


def _measured_rounding(package: Package, place: Place, options: SessionOptions) -> Rounding | None:
    """How the decoder's products round here; None if that is unknown or not wanted."""
    if not (place.is_plain_cpu and options.batch_invariant):
        return None
    return measured(package.place / DECODER, options.intra_op_num_threads, options.config)


@dataclass(frozen=True, slots=True)
class _GraphOpener:
    """Opens the graphs of a package, all with the same providers and options.

    Attributes:
        package: The package.
        providers: The execution providers in order of preference.
        options: How ONNX Runtime runs.
        row_multiple: The value of `ROW_MULTIPLE` in graphs that have it.
    """

    package: Package
    providers: tuple[str, ...]
    options: SessionOptions
    row_multiple: int = 1

    @property
    def captures(self) -> bool:
        """Whether the runs of the decoder are captured and replayed."""
        return self._provider_options(DECODER).get(_CAPTURE_OPTION) == "1"

    def open(self, file: str, *, adds_logits: bool = False) -> ort.InferenceSession:
        """Open a graph. adds_logits: Whether its logits become an output."""
        options = self.options
        native = session_options(options.config, intra_op_num_threads=options.intra_op_num_threads)
        native.add_initializer(ROW_MULTIPLE.name, _lasting_scalar(self.row_multiple))
        path = self.package.file(file)
        self.package.check_graph(file)
        try:
            graph: Path | bytes = path
            if adds_logits:
                native.add_session_config_entry(WEIGHTS_FOLDER_KEY, str(path.parent))
                graph = path.read_bytes() + one_more_output(LOGITS.name, DTYPES[LOGITS.dtype].onnx)
            return open_session(graph, native, self.providers, self._provider_options(file))
        except QsampleError:
            raise
        except Exception as error:  # ONNX Runtime's exceptions have no other common base.
            advice = _advice_on_newer_compiler(self.package)
            raise PackageError(
                f"ONNX Runtime cannot load {self.package.path / file}: {error}{advice}"
            ) from error

    def _provider_options(self, file: str) -> dict[str, str]:
        """The options of the first provider for a graph. The manifest's options are for its first
        provider."""
        compilation = self.package.manifest.compilation
        is_decoder = file == DECODER or file in _part_files(compilation)
        chosen = dict(self.options.provider_options)
        if (
            compilation is not None
            and (is_decoder or file == VISION)
            and self.providers[0] == compilation.execution_providers[0]
        ):
            chosen = {**compilation.provider_options, **chosen}
        # Other graphs are not captured: they have control flow, run once, or read memory of the
        # host, and a replay would not read it again.
        if not is_decoder or not self.package.interface.captured:
            chosen.pop(_CAPTURE_OPTION, None)
        return chosen


@cache
def _lasting_scalar(number: int) -> ort.OrtValue:
    """An int64 that lives as long as the process: a session reads the memory of initializers that
    it was given."""
    return ort.OrtValue.ortvalue_from_numpy(np.array(number, np.int64))


@dataclass(frozen=True, slots=True)
class _Decoder:
    """The decoder, opened.

    Attributes:
        sessions: The sessions of the parts in order; one if the decoder is whole.
        device: The device of its buffers; if it has parts, the device of the last part.
        replays: The captures of its runs; None if its runs are not captured and replayed.
        parts: The parts; none if it is whole.
    """

    sessions: list[ort.InferenceSession]
    device: str
    replays: Replays | None
    parts: tuple[Part, ...] = ()


def _open_decoder(
    opener: _GraphOpener, place: Place, threads: Sequence[PartThreads], *, logits: bool
) -> _Decoder:
    """Open the decoder, whole or in parts, and check its interface. threads: The threads of each
    part."""
    package = opener.package
    spec = package.interface.decoder
    wanted = with_logits(spec) if logits else spec
    adds_logits = wanted != spec
    memory: AbstractContextManager[None]
    if place.device == "cpu":
        weight_bytes = sum(file.stat().st_size for file in package.place.glob("decoder*.data"))
        # Kernels lay the weights out anew, which takes half as much memory again.
        memory = in_huge_pages(weight_bytes * 3 // 2)
    else:
        # The weights of sessions on other devices are not in this process's memory for long.
        memory = nullcontext()
    with memory:
        if threads:
            parts = _open_parts(opener, place.device, threads, adds_logits=adds_logits)
            decoder = _Decoder(
                [part.session for part in parts], parts[-1].device, parts[-1].replays, parts
            )
            checked = _joined(parts)
            name = "the decoder in parts"
        else:
            session = opener.open(DECODER, adds_logits=adds_logits)
            decoder = _Decoder([session], place.device, Replays() if opener.captures else None)
            checked = session
            name = DECODER
        wanted = replace(wanted, outputs=(*wanted.outputs, *package.interface.prompt_outputs))
        check_interface(checked, wanted, _compiled_sizes(package), name)
    release_pages(package.place / f"{DECODER}.data")
    if place.device == "cpu":
        for session in decoder.sessions:
            give_back_after(session)
    return decoder


def _compiled_sizes(package: Package) -> dict[str, int]:
    """The sizes of the decoder's axes that have one. The batch and the capacity of other graphs are
    free."""
    sizes = dict(package.interface.sizes)
    compilation = package.manifest.compilation
    if compilation is not None:
        sizes[CAPACITY] = compilation.ctx_len
        if compilation.batch_size == 1:
            sizes[BATCH] = 1
    return sizes


def _open_parts(
    opener: _GraphOpener, device: str, threads: Sequence[PartThreads], *, adds_logits: bool
) -> tuple[Part, ...]:
    """Open each part of the decoder in the thread that runs it: on a GPU each, or each on its
    processors."""
    files = _part_files(opener.package.manifest.compilation)
    captured = opener.captures
    parts = list[Part]()
    for number, (file, own) in enumerate(zip(files, threads, strict=True)):
        thread = DeviceThread(f"qsample-part-{number + 1}", own.processors)
        is_last = number == len(files) - 1
        if number == 0 or device == "cpu":
            place = device
            part_opener = opener
        else:
            place = f"{device}:{number}"
            part_opener = _on_gpu(opener, number)
        open_part = partial(part_opener.open, file, adds_logits=adds_logits and is_last)
        session = thread.submit(open_part).result()
        parts.append(Part.of(session, place, thread, captured=captured))
    return tuple(parts)


def _on_gpu(opener: _GraphOpener, number: int) -> _GraphOpener:
    """`opener` for another GPU of the machine."""
    provider_options = {**opener.options.provider_options, "device_id": str(number)}
    return replace(opener, options=replace(opener.options, provider_options=provider_options))


def _joined(parts: Sequence[Part]) -> Any:
    """The inputs and outputs of all parts, without the hidden states between them, as a session has
    them."""
    hidden = hidden_states(parts)
    sessions = [part.session for part in parts]
    inputs = {value.name: value for session in sessions for value in session.get_inputs()}
    outputs = [value for session in sessions for value in session.get_outputs()]
    outer_inputs = [value for name, value in inputs.items() if name not in hidden]
    outer_outputs = [value for value in outputs if value.name not in hidden]
    return SimpleNamespace(get_inputs=lambda: outer_inputs, get_outputs=lambda: outer_outputs)


def _open_sampler(opener: _GraphOpener) -> ort.InferenceSession | None:
    """The session that samples on the host; None if the decoder samples."""
    interface = opener.package.interface
    if interface.features.sampler:
        return None
    threads = opener.options.intra_op_num_threads
    config = opener.options.config
    on_host = replace(opener, providers=(CPU,), options=SessionOptions(threads, config=config))
    session = on_host.open(SAMPLER)
    check_interface(session, interface.graphs[SAMPLER], interface.sizes, SAMPLER)
    return session


class VisionSession:
    """vision.onnx: the pixels of an image → its rows of image features."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self._input_names = [value.name for value in session.get_inputs()]
        self._dtype = OF_ONNXRUNTIME[session.get_outputs()[0].type]
        self._run_options = ort.RunOptions()

    def stop(self) -> None:
        """End all runs soon, with an error, and begin no other."""
        self._run_options.terminate = True

    def features(self, pixel_values: Array, grid: Sequence[int] | None = None) -> Array:
        """Compute the rows of an image. Threads may call this at the same time.

        Args:
            pixel_values: The pixels of a `ProcessedImage`.
            grid: The grid of a `ProcessedImage`; None if the graph does not read it.

        Returns:
            [F, C] of the interface's dtype; bfloat16 as the uint16 of its bits.
        """
        arrays = [np.ascontiguousarray(pixel_values, np.float32)]
        if grid is not None:
            arrays.append(np.ascontiguousarray(grid, np.int64))
        binding = self._session.io_binding()
        for name, array in zip(self._input_names, arrays, strict=True):
            binding.bind_cpu_input(name, array)
        binding.bind_output(IMAGE_FEATURES)
        self._session.run_with_iobinding(binding, self._run_options)
        (result,) = binding.get_outputs()
        # ONNX Runtime cannot make an array of bfloat16.
        content = (ctypes.c_uint8 * result.tensor_size_in_bytes()).from_address(result.data_ptr())
        return np.frombuffer(content, self._dtype.numpy).reshape(result.shape()).copy()


def open_vision(
    package: Package,
    provider: str | Sequence[str] | None = None,
    options: SessionOptions | None = None,
) -> VisionSession:
    """Load vision.onnx of a package that reads images; arguments and errors are those of
    `open_sessions`.

    The session's threads do not spin while they wait for work: they would take processors from the
    decoder.
    """
    options = options or SessionOptions()
    place = Place.of(package, provider, options.provider_options)
    without_spinning = replace(options, config={**NO_SPINNING, **options.config})
    session = _GraphOpener(package, place.providers, without_spinning).open(VISION)
    check_interface(session, package.interface.vision, package.interface.sizes, VISION)
    release_pages(package.place / f"{VISION}.data")
    return VisionSession(session)


def with_logits(spec: GraphSpec) -> GraphSpec:
    """`spec` with the logits among its outputs, as in sessions that were opened with
    `logits=True`."""
    if LOGITS in spec.outputs:
        return spec
    return replace(spec, outputs=(*spec.outputs, LOGITS))


def _advice_on_newer_compiler(package: Package) -> str:
    """Advice if a newer ONNX Runtime compiled the package, whose operators this ONNX Runtime may
    lack."""
    compilation = package.manifest.compilation
    if compilation is None:
        return ""
    versions = {**package.manifest.versions, **compilation.versions}
    made = versions.get("onnxruntime", "")
    here = str(ort.__version__)
    if _version_numbers(made) <= _version_numbers(here):
        return ""
    return f"; it was compiled with onnxruntime {made} and this is {here}: install {made} or newer, or compile it here"


def _version_numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def check_interface(
    session: Any, spec: GraphSpec, sizes: Mapping[str, int], graph_name: str
) -> None:
    """Raise PackageError unless the names, dtypes and shapes of a session's tensors equal `spec`.

    Args:
        session: An InferenceSession, or anything else with `get_inputs` and `get_outputs`.
        spec: The promised interface.
        sizes: The sizes of the axes that have one, by name.
        graph_name: The name of the graph in messages.
    """
    _check_side("input", session.get_inputs(), (*spec.inputs, *spec.states), sizes, graph_name)
    _check_side("output", session.get_outputs(), spec.results, sizes, graph_name)


def _check_side(
    side: Literal["input", "output"],
    values: Sequence[Any],
    wanted: Sequence[TensorSpec],
    sizes: Mapping[str, int],
    graph_name: str,
) -> None:
    """Check the inputs or the outputs of a session."""
    actual = {value.name: value for value in values}
    wanted_names = {tensor.name for tensor in wanted}
    problems = [f"lacks {side} {tensor.name}" for tensor in wanted if tensor.name not in actual]
    problems += [f"has an unknown {side} {name}" for name in actual if name not in wanted_names]
    if problems:
        raise PackageError(
            f"{graph_name} does not follow the decode contract: it {', '.join(problems)}; export it again"
        )
    for tensor in wanted:
        problem = _mismatch(actual[tensor.name], tensor, sizes, shape_known=side == "input")
        if problem is not None:
            raise PackageError(
                f"{graph_name} does not fit the manifest: {side} {tensor.name} {problem}; export it again"
            )


def _mismatch(
    value: Any, spec: TensorSpec, sizes: Mapping[str, int], *, shape_known: bool
) -> str | None:
    """The fault of a session's input or output; None if it fits. An output may have lost its shape
    to optimisation."""
    wanted_type = DTYPES[spec.dtype].onnxruntime
    if value.type != wanted_type:
        return f"is {value.type}, not {wanted_type}"
    if not value.shape and not shape_known:
        return None
    wanted = [axis if isinstance(axis, int) else sizes.get(axis, axis) for axis in spec.axes]
    fits = len(value.shape) == len(wanted) and all(map(_axis_fits, value.shape, wanted))
    return None if fits else f"has shape {value.shape}, not {wanted}"


def _axis_fits(actual: int | str | None, wanted: int | str) -> bool:
    """Whether an axis fits: a free axis may have any name, a fixed axis must have its size."""
    is_free = not isinstance(actual, int) or not isinstance(wanted, int)
    return is_free or actual == wanted
