"""ONNX Runtime's sessions of a package's graphs, checked against the contract."""

from __future__ import annotations

import ctypes
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from qsample.contract.arrays import DTYPES, OF_ONNXRUNTIME, Array
from qsample.contract.interface import GraphSpec, Interface
from qsample.contract.tensors import (
    BATCH,
    CAPACITY,
    IMAGE_FEATURES,
    INPUT_IDS,
    LOGITS,
    ROW_MULTIPLE,
    TensorSpec,
    retained_name,
)
from qsample.errors import PackageError, QsampleError, shown
from qsample.ort.bound_graph import BoundGraph, DeviceThread, Replays
from qsample.ort.buffers import WITHOUT_ADDRESSES
from qsample.ort.linux_memory import give_back_after, in_huge_pages, release_pages
from qsample.ort.options import (
    FOLDER_OF_WEIGHTS,
    NO_SPINNING,
    SessionOptions,
    most_shares,
    session_options,
    threads_of_parts,
)
from qsample.ort.parts import BoundParts, Part, Pipeline, hidden_states
from qsample.ort.providers import (
    CPU,
    check_available,
    check_manifest_options,
    check_version,
    device_of,
    execution_providers,
    open_session,
)
from qsample.ort.rounding import ANY_ROWS, Rounding, RowCounts, measured
from qsample.ort.small_graphs import one_more_output
from qsample.package.package import Package

DECODER: Final = "decoder.onnx"
VISION: Final = "vision.onnx"
_CAPTURE: Final = "enable_cuda_graph"
# On two cores, int4 weights: 1,024 tokens take as long in pieces of 64 as in larger pieces, and 10 % longer in 32.
_PIECE_SIZE: Final = 64
_LATE_PIECE_SIZE: Final = 256
_PIECE_SIZE_ON_GPU: Final = 512
# The CPU's attention computes each of two or more tokens alike, however many they are.
_TOKENS_ALIKE: Final = 2


@dataclass(frozen=True, slots=True)
class Sessions:
    """The loaded graphs of a package.

    Attributes:
        decoder: its first part, if it has parts.
        sampler: samples on the host; None if the decoder does.
        device: of the decoder's buffers, "cpu", "cuda" or "webgpu"; of the last part's, such as "cuda:1".
        replays: None if the decoder's runs are not captured and replayed.
        parts: of the decoder, each on its device; none if it is whole.
        tokens_per_call: S, if the decoder has it fixed.
        joins_prompts: a run can read the first tokens of several rows.
        ragged: a run takes any number of each row's tokens behind earlier ones, with the last bits of the row alone.
        step_rows: the numbers of adjacent rows that a decode step can be over; None if it is over the whole batch.
        adapter_rows: the same of rows with LoRA adapters.
        batch_rows: the numbers of rows of a batch, idle ones included, that its products round alike.
        piece_tokens: how many tokens of a row, padding included, a piece of a prompt can have.
        guesses: steps may check guesses; False if these would change tokens here.
        rounding: how the products round here, if it was measured.
        piece_size, late_piece_size: tokens of the pieces in which a prompt is read; see `Pieces`.
        tail_size: the number of tokens at the end of a piece that give the same last bits when they are read again
            without those before them; None if the whole piece has to be read.
    """

    interface: Interface
    decoder: ort.InferenceSession
    sampler: ort.InferenceSession | None
    device: str
    replays: Replays | None = None
    parts: tuple[Part, ...] = ()
    tokens_per_call: int | None = None
    joins_prompts: bool = False
    ragged: bool = False
    step_rows: RowCounts | None = None
    adapter_rows: RowCounts = ANY_ROWS
    batch_rows: RowCounts = ANY_ROWS
    piece_tokens: RowCounts = ANY_ROWS
    guesses: bool = True
    rounding: Rounding | None = None
    piece_size: int = _PIECE_SIZE
    late_piece_size: int | None = None
    tail_size: int | None = None

    @property
    def input_device(self) -> str:
        """The device of what the host writes and graphs only read: the host if the memory has no addresses, and then
        each run copies it."""
        return "cpu" if self.device in WITHOUT_ADDRESSES else self.device

    def device_of(self, tensor: TensorSpec) -> str:
        """The device of an input or a state: a state is where a part computes its next value."""
        name = retained_name(tensor.name)
        return next(
            (part.device for part in self.parts if name in part.spec.output_names), self.device
        )

    def binder(self, spec: GraphSpec) -> Callable[..., BoundGraph | BoundParts]:
        """Binds the decoder, of `spec`, to buffers by name, for one user of it at a time: `BoundGraph`'s arguments."""
        if self.parts:
            return Pipeline(self.parts).bind
        decoder, device, replays = self.decoder, self.device, self.replays
        return lambda buffers, *, captured=True: BoundGraph(
            decoder, spec, buffers, device, replays, captured=captured
        )


def open_sessions(
    package: Package,
    provider: str | Sequence[str] | None = None,
    options: SessionOptions | None = None,
    *,
    logits: bool = False,
) -> Sessions:
    """Load the graphs of a package, checked against its manifest.

    `provider` is a short name (see `execution_providers`) or ONNX Runtime's provider names in order of preference; by
    default the provider that a device package was compiled for, otherwise "cpu". `logits`: see `with_logits`. Raises
    QsampleError if the provider does not exist here or the package was compiled for another, PackageError if a graph
    does not have the interface that the manifest promises.
    """
    options = options or SessionOptions()
    providers = _providers(package, provider)
    check_manifest_options(package, provider, options.provider_options)
    device = device_of(providers)
    number = str(options.provider_options.get("device_id", "0"))
    if device == "cuda" and number != "0":
        raise QsampleError(
            f"provider_options has device_id {number!r}, and a process takes its first GPU; set the environment "
            f"variable CUDA_VISIBLE_DEVICES={number} for this process, and leave device_id out"
        )
    check_available(providers)
    compilation = package.manifest.compilation
    if compilation is not None and compilation.least_onnxruntime is not None:
        check_version(compilation.least_onnxruntime)
    files = [part.file for part in compilation.parts] if compilation is not None else []
    threads = (
        threads_of_parts(len(files)) if files and device == "cpu" else [(None, None)] * len(files)
    )
    if files and options.intra_op_num_threads is None:
        options = replace(options, intra_op_num_threads=threads[0][1])
    interface = package.interface
    sizes = dict(interface.sizes)
    if compilation is not None:
        sizes[CAPACITY] = compilation.ctx_len
        if compilation.batch_size == 1:
            sizes[BATCH] = 1

    def load(name: str, used: Sequence[str], used_options: SessionOptions) -> ort.InferenceSession:
        is_decoder, spec = name == DECODER, interface.graphs[name]
        wanted = with_logits(spec) if logits and is_decoder else spec
        session = _load(package, name, used, used_options, logits=wanted != spec, multiple=multiple)
        # The batch and the capacity of the other graphs are free even if the decoder's are fixed.
        check_interface(session, wanted, sizes if is_decoder else interface.sizes, name)
        return session

    # Elsewhere attention is compiled for the capacity as its longest row, and then takes no batch of prompts, whichever
    # provider runs it.
    on_plain_cpu = providers[0] == CPU and _compiled_for(package) in (None, CPU)
    rounding = Rounding()
    if on_plain_cpu and options.batch_invariant:
        path = package.path / DECODER
        rounding = measured(path, options.intra_op_num_threads, options.config)
    alike = rounding.products.any and rounding.experts.any
    multiple = _scalar(1 if alike else 2)

    on_host = SessionOptions(options.intra_op_num_threads, config=options.config)
    # Kernels lay the weights out anew, with more numbers.
    size = sum(file.stat().st_size for file in package.path.glob("decoder*.data")) * 3 // 2
    # The weights of sessions on other devices are not in this process's memory for long.
    with in_huge_pages(size) if device == "cpu" else nullcontext():
        if files:
            parts = _open_parts(
                package, files, providers, options, threads, multiple, logits=logits
            )
            decoder, device = parts[0].session, parts[-1].device
            wanted = with_logits(interface.decoder) if logits else interface.decoder
            check_interface(_joined(parts), wanted, sizes, "the decoder in parts")
        else:
            parts, decoder = (), load(DECODER, providers, options)
    release_pages(package.path / "decoder.onnx.data")
    length = next(value.shape for value in decoder.get_inputs() if value.name == INPUT_IDS.name)[1]
    fixed = length if isinstance(length, int) else None
    decoders = [part.session for part in parts] or [decoder]
    for one in decoders if device == "cpu" else ():
        give_back_after(one)
    padded = any(
        value.name == ROW_MULTIPLE.name
        for one in decoders
        for value in one.get_overridable_initializers()
    )
    guesses = interface.features.num_speculative_tokens > 0
    # The graph itself pads the rows of packages with guesses, and of experts.
    products = ANY_ROWS if guesses and padded else rounding.products
    _warn_of_broken_promises(package, rounding, guesses=guesses, padded=padded)
    rows = ANY_ROWS if sizes.get(BATCH) == 1 else products
    heads = RowCounts(_rows_of_heads(package, options)) if options.batch_invariant else ANY_ROWS
    captured = not parts and _is_captured(package, options, providers)
    replays = parts[-1].replays if parts else Replays() if captured else None
    return Sessions(
        interface,
        decoder=decoder,
        sampler=None if interface.features.sampler else load("sampler.onnx", [CPU], on_host),
        device=device,
        replays=replays,
        parts=parts,
        tokens_per_call=fixed,
        piece_size=fixed or (_PIECE_SIZE if device == "cpu" else _PIECE_SIZE_ON_GPU),
        late_piece_size=_LATE_PIECE_SIZE if fixed is None and device == "cpu" else None,
        # Which expert gets how many rows depends on all tokens of a call, so these have to be the same.
        tail_size=_TOKENS_ALIKE if providers[0] == CPU and rounding.experts.any else None,
        # The head sees a row of each prompt.
        joins_prompts=on_plain_cpu and products.any and rounding.experts.any,
        ragged=on_plain_cpu
        and guesses
        and products.any
        and rounding.experts.any
        and rounding.attention,
        step_rows=rows & heads if on_plain_cpu else None,
        adapter_rows=rows & heads & rounding.adapters,
        batch_rows=rows & rounding.adapters if interface.adapters else rows,
        piece_tokens=ANY_ROWS if fixed else replace(products, least=_TOKENS_ALIKE),
        guesses=rounding.attention and (padded or (rounding.products.any and rounding.experts.any)),
        rounding=rounding if on_plain_cpu and options.batch_invariant else None,
    )


class VisionSession:
    """vision.onnx: the pixels of an image → its rows of image features."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session, self._input_names = session, [value.name for value in session.get_inputs()]
        self._dtype = OF_ONNXRUNTIME[session.get_outputs()[0].type]

    def features(self, pixel_values: Array, grid: Sequence[int] | None = None) -> Array:
        """[F, C] of the interface's dtype, bfloat16 as uint16 of its bits. pixel_values, grid: of a `ProcessedImage`.
        Threads may call it at the same time."""
        given = [(pixel_values, np.float32), *([] if grid is None else [(grid, np.int64)])]
        binding = self._session.io_binding()
        for name, (values, dtype) in zip(self._input_names, given, strict=True):
            array = np.ascontiguousarray(values, dtype)
            binding.bind_cpu_input(name, array)
        binding.bind_output(IMAGE_FEATURES)
        self._session.run_with_iobinding(binding)
        (result,) = binding.get_outputs()
        # ONNX Runtime makes no array of bfloat16.
        content = (ctypes.c_uint8 * result.tensor_size_in_bytes()).from_address(result.data_ptr())
        return np.frombuffer(content, self._dtype.numpy).reshape(result.shape()).copy()


def open_vision(
    package: Package,
    provider: str | Sequence[str] | None = None,
    options: SessionOptions | None = None,
) -> VisionSession:
    """Load vision.onnx of a package that reads images, as `open_sessions` loads the decoder, and raise as it does. The
    session's threads do not wait for work: they would take processors from the decoder."""
    options = options or SessionOptions()
    providers = _providers(package, provider)
    check_manifest_options(package, provider, options.provider_options)
    check_available(providers)
    own = replace(options, config={**NO_SPINNING, **options.config})
    session = _load(package, VISION, providers, own, logits=False, multiple=_scalar(1))
    check_interface(session, package.interface.vision, package.interface.sizes, VISION)
    release_pages(package.path / f"{VISION}.data")
    return VisionSession(session)


@cache
def _scalar(number: int) -> ort.OrtValue:
    """An int64, kept for as long as the process: a session reads the memory of initializers that it was given."""
    return ort.OrtValue.ortvalue_from_numpy(np.array(number, np.int64))


def _rows_of_heads(package: Package, options: SessionOptions) -> int:
    """The smallest number of rows at which attention in a decode step rounds as over more rows: if a session has more
    threads than rows times attention heads, several threads share a head and add up their parts."""
    shares = most_shares(options.intra_op_num_threads)
    heads = min(
        (shape.num_key_value_heads for shape in package.interface.key_values), default=shares
    )  # or more
    return -(-shares // heads)


def _warn_of_broken_promises(
    package: Package, rounding: Rounding, *, guesses: bool, padded: bool
) -> None:
    """Say what this processor's kernels, and a graph that does not pad its rows, cannot keep."""
    broken, again = [], "compile it again with this version of qsample"
    dependent = "a row's tokens may depend on its batch here: "
    if rounding.unknown:
        weights = "try other weights, or --provider web, whose activations stay in float32"
        broken.append(f"{dependent}{'; '.join(rounding.unknown)}; {weights}")
    if not rounding.experts.any and not padded:
        broken.append(
            f"{dependent}this processor's kernels round an expert's only row otherwise than several; {again}"
        )
    one = (
        "row"
        if not padded and not rounding.products.any
        else None
        if rounding.attention
        else "token"
    )
    if guesses and one is not None:
        how = (
            "for batches (without --batch-size 1)"
            if one == "row"
            else "on this machine; compile says whether it can"
        )
        broken.append(
            f"guesses are off here (num_speculative_tokens): this processor's kernels round one {one} otherwise than "
            f"several, and they would change tokens; {again}, {how}"
        )
    for words in broken:
        warnings.warn(f"{package.path}: {words}", stacklevel=4)


def _compiled_for(package: Package) -> str | None:
    """The first of the execution providers that the package was compiled for; None for a portable package."""
    compilation = package.manifest.compilation
    return compilation.execution_providers[0] if compilation else None


def _is_captured(package: Package, options: SessionOptions, providers: Sequence[str]) -> bool:
    return _options_of(package, DECODER, options, providers).get(_CAPTURE) == "1"


def _open_parts(
    package: Package,
    files: Sequence[str],
    providers: Sequence[str],
    options: SessionOptions,
    threads: Sequence[tuple[Collection[int] | None, int | None]],
    multiple: ort.OrtValue,
    *,
    logits: bool,
) -> tuple[Part, ...]:
    """The parts of the decoder, each opened by the thread that runs it: on a GPU each, or on its processors."""
    device, captured, parts = (
        device_of(providers),
        _is_captured(package, options, providers),
        list[Part](),
    )
    for number, (file, (processors, _)) in enumerate(zip(files, threads, strict=True)):
        place = f"{device}:{number}" if number and device != "cpu" else device
        more = {"device_id": str(number)} if number and device != "cpu" else {}
        own = replace(options, provider_options={**options.provider_options, **more})
        thread = DeviceThread(f"qsample-part-{number + 1}", processors)
        last = logits and number == len(files) - 1
        opened = partial(_load, package, file, providers, own, logits=last, multiple=multiple)
        parts.append(Part.of(thread.submit(opened).result(), place, thread, captured=captured))
    return tuple(parts)


def _joined(parts: Sequence[Part]) -> Any:
    """The inputs and outputs of all parts, without the hidden states between them, as a session has them."""
    hidden, sessions = hidden_states(parts), [part.session for part in parts]
    inputs = {value.name: value for session in sessions for value in session.get_inputs()}
    outputs = [
        value for session in sessions for value in session.get_outputs() if value.name not in hidden
    ]
    kept = [value for name, value in inputs.items() if name not in hidden]
    return SimpleNamespace(get_inputs=lambda: kept, get_outputs=lambda: outputs)


def _options_of(
    package: Package, name: str, options: SessionOptions, providers: Sequence[str]
) -> dict[str, str]:
    """The options of the first provider for the graph `name`. Those of the manifest are for the first that it names."""
    compilation = package.manifest.compilation
    compiled: Mapping[str, str] = {}
    decodes = name == DECODER or (
        compilation is not None and name in [part.file for part in compilation.parts]
    )
    if (
        compilation
        and (decodes or name == VISION)
        and tuple(providers[:1]) == compilation.execution_providers[:1]
    ):
        compiled = compilation.provider_options
    chosen = {**compiled, **options.provider_options}
    # Other graphs are not captured: they have control flow, run once, or read memory of the host, and a replay would
    # not read it again.
    if not decodes or not package.interface.captured:
        chosen.pop(_CAPTURE, None)
    return chosen


def _providers(package: Package, provider: str | Sequence[str] | None) -> tuple[str, ...]:
    compilation = package.manifest.compilation
    if provider is None:
        providers = compilation.execution_providers if compilation else (CPU,)
    elif isinstance(provider, str):
        if compilation is not None and provider != compilation.provider:
            raise QsampleError(
                f"{package.path} was compiled for {compilation.provider!r}, not {provider!r}; compile the portable "
                f"package for {provider!r}, or leave provider out"
            )
        providers = (
            compilation.execution_providers if compilation else execution_providers(provider)
        )
    else:
        providers = tuple(provider) if isinstance(provider, Sequence) else (provider,)
        if not all(isinstance(name, str) for name in providers):
            raise ValueError(
                f'provider is {shown(provider)}; give a short name such as "cpu", or a list of ONNX Runtime\'s names, '
                "the options of the first with provider_options"
            )
    return providers


def _load(
    package: Package,
    name: str,
    providers: Sequence[str],
    options: SessionOptions,
    *,
    logits: bool,
    multiple: ort.OrtValue,
) -> ort.InferenceSession:
    """logits: make the logits an output of the graph. multiple: ROW_MULTIPLE of graphs that have it."""
    native = session_options(options.config, intra_op_num_threads=options.intra_op_num_threads)
    native.add_initializer(ROW_MULTIPLE.name, multiple)
    path = package.file(name)
    package.check_graph(name)
    try:
        graph: Path | bytes = path
        if logits:
            native.add_session_config_entry(FOLDER_OF_WEIGHTS, str(path.parent))
            graph = path.read_bytes() + one_more_output(LOGITS.name, DTYPES[LOGITS.dtype].onnx)
        return open_session(
            graph, native, providers, _options_of(package, name, options, providers)
        )
    except QsampleError:
        raise
    except Exception as error:  # ONNX Runtime's exceptions share no base but Exception
        hint = _made_by_newer(package)
        raise PackageError(
            f"ONNX Runtime cannot load {package.path / name}: {error}{hint}"
        ) from error


def with_logits(spec: GraphSpec) -> GraphSpec:
    """`spec` with the logits among its outputs, as a session has them that was opened with `logits=True`."""
    return spec if LOGITS in spec.outputs else replace(spec, outputs=(*spec.outputs, LOGITS))


def _made_by_newer(package: Package) -> str:
    """Advice if a newer ONNX Runtime compiled the package, whose operators this one may not know."""
    compilation = package.manifest.compilation
    versions = {
        **package.manifest.versions,
        **(compilation.versions if compilation is not None else {}),
    }
    made, here = versions.get("onnxruntime", ""), str(ort.__version__)
    numbers = [
        [int(number) for number in re.findall(r"\d+", version)[:3]] for version in (made, here)
    ]
    if compilation is None or numbers[0] <= numbers[1]:
        return ""
    return f"; it was compiled with onnxruntime {made} and this is {here}: install {made} or newer, or compile it here"


def check_interface(
    session: Any, spec: GraphSpec, sizes: Mapping[str, int], graph_name: str
) -> None:
    """Raise PackageError unless the names, dtypes and shapes of the session's tensors equal `spec`."""
    for side, values, wanted in (
        ("input", session.get_inputs(), (*spec.inputs, *spec.states)),
        ("output", session.get_outputs(), spec.results),
    ):
        actual = {value.name: value for value in values}
        missing = [tensor.name for tensor in wanted if tensor.name not in actual]
        unexpected = [name for name in actual if name not in {tensor.name for tensor in wanted}]
        if missing or unexpected:
            problems = [f"lacks {side} {name}" for name in missing] + [
                f"has an unknown {side} {name}" for name in unexpected
            ]
            raise PackageError(
                f"{graph_name} does not follow the decode contract: it {', '.join(problems)}; export it again"
            )
        for tensor in wanted:
            problem = _mismatch(actual[tensor.name], tensor, sizes, shape_known=side == "input")
            if problem:
                raise PackageError(
                    f"{graph_name} does not fit the manifest: {side} {tensor.name} {problem}; export it again"
                )


def _mismatch(
    value: Any, spec: TensorSpec, sizes: Mapping[str, int], *, shape_known: bool
) -> str | None:
    """The fault of a session's input or output, or None. An output may have lost its shape to optimisation."""
    wanted_type = DTYPES[spec.dtype].onnxruntime
    if value.type != wanted_type:
        return f"is {value.type}, not {wanted_type}"
    if not value.shape and not shape_known:
        return None
    wanted = [axis if isinstance(axis, int) else sizes.get(axis, axis) for axis in spec.axes]
    # A free axis may have any name, a fixed axis must have its size.
    fits = len(value.shape) == len(wanted) and all(
        not isinstance(have, int) or not isinstance(want, int) or have == want
        for have, want in zip(value.shape, wanted, strict=True)
    )
    return None if fits else f"has shape {value.shape}, not {wanted}"
