"""What is measured about rows: against ONNX Runtime on whole products, and against kernels that are planted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.errors import PackageError
from qsample.ort import rounding as module
from qsample.ort.kernels import Kernel, Product, read_kernels
from qsample.ort.rounding import ANY_ROWS, RowCounts, measured
from qsample.package.package import read_package
from tests.helpers.small_graphs import small_graph
from tests.helpers.small_products import decoder, product, quantized

COUNTS = (*range(1, 12), 16, 21)


def alike(path: Path) -> set[int]:
    """The numbers of rows for which a product of that file gives each row what it gives among 64."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    given = {value.name: value.shape for value in session.get_inputs()}
    rng = np.random.default_rng(2)
    feeds = {
        name: rng.standard_normal([64 if size is None else size for size in shape], np.float32)
        for name, shape in given.items()
    }

    def run(rows: slice) -> np.ndarray:
        return session.run(
            None, {name: array[rows] if name == "x" else array for name, array in feeds.items()}
        )[0]

    whole = run(slice(64))
    return {
        n
        for n in COUNTS
        if all(np.array_equal(run(slice(o, o + n)), whole[o : o + n]) for o in (0, 3))
    }


@pytest.mark.parametrize(
    "way",
    [
        (2, 32),
        (2, 64),
        (2, 128),
        (4, 32),
        (4, 64),
        (4, 128),
        (8, 32),
        (8, 128),
        (4, 32, "zeros"),
        None,
        "cast",
        "input",
    ],
)
def test_the_small_products_round_as_the_real_ones(
    way: tuple[int, ...] | str | None, tmp_path: Path
) -> None:
    """Whatever this processor does: the kernels of another are shown by scripts/check_processors."""
    path = decoder(tmp_path, product(way, 512, 1000))
    found = measured(path, 2)
    counts = found.adapters if way == "input" else found.products
    assert not found.unknown
    assert {n for n in COUNTS if counts.cover(n) == n} <= alike(path)
    if not counts.any:  # no more rows than it takes
        assert 1 not in alike(path)
    if counts.multiple > 1:
        assert 3 not in alike(path)
    assert found.experts == ANY_ROWS


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (lambda rows: np.zeros(len(rows), bool), RowCounts()),
        (lambda rows: np.full(len(rows), len(rows) == 1), RowCounts(2)),
        (lambda rows: np.arange(len(rows)) == len(rows) - len(rows) % 2, RowCounts(2, 2)),
        (lambda rows: np.full(len(rows), len(rows) == 6), None),
    ],
)
def test_planted_kernels(
    wrong: object, expected: RowCounts | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that a kernel rounds otherwise by how many they are, one last bit each."""

    class Session:
        def __init__(self, *_: object) -> None:
            pass

        def run(self, _: object, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
            rows = next(array for name, array in feeds.items() if name.startswith("rows"))
            bits = wrong(rows)  # type: ignore[operator]
            return [
                np.where(bits[:, None], np.nextafter(rows, np.float32(9)), rows),
                feeds["logits"],
            ]

    monkeypatch.setattr(module, "open_session", Session)
    monkeypatch.setattr(module, "_measured", module._measured.__wrapped__)
    found = measured(decoder(tmp_path, quantized(4, 32, 256, 192)), 1)
    assert found.products == (expected or ANY_ROWS)
    words = "MatMulNBits (4 bits, blocks of 32) rounds otherwise for every number of rows"
    assert found.unknown == (() if expected else (words,))


@pytest.mark.parametrize("count", [1, 4, None], ids=["one row", "four rows", "always"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_kernels_that_give_no_numbers(
    count: int | None, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN equals nothing, not even itself; an infinity that comes for some numbers of rows only differs as well."""

    class Session:
        def __init__(self, *_: object) -> None:
            pass

        def run(self, _: object, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
            rows = next(array for name, array in feeds.items() if name.startswith("rows")).copy()
            if count in (len(rows), None):
                rows[-1, 0] = value
            return [rows, feeds["logits"]]

    monkeypatch.setattr(module, "open_session", Session)
    monkeypatch.setattr(module, "_measured", module._measured.__wrapped__)
    found = measured(decoder(tmp_path, quantized(4, 32, 256, 192)), 1)
    assert (found.products, len(found.unknown)) == {
        1: (RowCounts(2), 0),
        4: (ANY_ROWS, 1),
        None: (ANY_ROWS, 1),
    }[count]


EVERY = set(module._MEASURED_ROW_COUNTS)
ALIKE: dict[RowCounts | None, set[int]] = {
    ANY_ROWS: EVERY,
    RowCounts(2): EVERY - {1},
    RowCounts(2, 2): {count for count in EVERY if count % 2 == 0},
    None: {5},
}


@pytest.mark.parametrize("kind", ["products", "adapters", "experts"])
@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((RowCounts(2, 2), ANY_ROWS), RowCounts(2, 2)),
        ((ANY_ROWS, RowCounts(2, 2)), RowCounts(2, 2)),
        ((RowCounts(2), RowCounts(2, 2), ANY_ROWS), RowCounts(2, 2)),
        ((RowCounts(2), None, ANY_ROWS), RowCounts(2)),
    ],
)
def test_the_numbers_of_rows_suit_all_products_of_a_kind(
    kind: str,
    counts: tuple[RowCounts | None, ...],
    expected: RowCounts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever of them asks for more, the first or the last; the other kinds are left as they are."""
    operator = "MoE" if kind == "experts" else "MatMul"
    products = [
        Product(
            operator, "float32", ((8 * (index + 1), 16),), ("float32",), given=kind == "adapters"
        )
        for index in range(len(counts))
    ]
    measured_of = dict(zip(products, counts, strict=True))

    def outputs(sorted_products: list[Product], _: object) -> module._Outputs:
        return module._Outputs([ALIKE[measured_of[one]] for one in sorted_products], "")

    monkeypatch.setattr(module._Outputs, "of", staticmethod(outputs))
    found = module._measured.__wrapped__(frozenset(products), None, ())
    others = {"products", "adapters", "experts"} - {kind}
    assert getattr(found, kind) == expected
    assert {getattr(found, other) for other in others} == {ANY_ROWS}
    assert len(found.unknown) == counts.count(None)


def test_products_of_several_kinds_in_one_graph(tmp_path: Path) -> None:
    """What suits each of them alone; in either order."""
    ways: list[tuple[tuple[object, ...] | str | None, int, int]] = [
        ((4, 32), 256, 192),
        (None, 128, 320),
        ("input", 64, 96),
        ((8, 128), 512, 64),
    ]
    alone = [
        measured(decoder(tmp_path, product(*way), name=f"alone-{number}"))
        for number, way in enumerate(ways)
    ]
    wanted = ANY_ROWS
    for one in (alone[0], alone[1], alone[3]):
        wanted = wanted & one.products
    for name, order in (("there", ways), ("back", ways[::-1])):
        found = measured(decoder(tmp_path, *(product(*way) for way in order), name=name))
        assert (found.products, found.adapters) == (wanted, alone[2].adapters)


def test_numbers_of_rows() -> None:
    assert [RowCounts().cover(n) for n in (1, 2, 3)] == [1, 2, 3]
    assert [RowCounts(3).cover(n) for n in (1, 3, 4)] == [3, 3, 4]
    assert [RowCounts(2, 2).cover(n) for n in (1, 2, 3, 4)] == [2, 2, 4, 4]
    assert RowCounts(3) & RowCounts(2, 2) == RowCounts(3, 2)
    assert (RowCounts(3) & RowCounts(2, 2)).cover(3) == 4


def test_the_digest_is_that_of_the_kernels(tmp_path: Path) -> None:
    """Not of the number of threads, or of outputs; other products have another."""
    wide, narrow, other = (
        measured(
            decoder(tmp_path, quantized(4, 32, inputs, outputs), name=str(outputs)), threads
        ).digest
        for inputs, outputs, threads in ((256, 1500, 3), (256, 192, 1), (512, 300, 1))
    )
    assert wide == narrow != other


@pytest.mark.ci
def test_attention_to_several_tokens(
    llama_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a quantized cache it is exact on this processor if compile says so, over a float cache on none."""
    from qsample.compiler import compile as compiling
    from qsample.compiler.targets import cpu

    monkeypatch.setattr(cpu, "_check_speculation", lambda plan: None)
    refused = []
    gate = compiling.check_guesses_change_nothing

    def told(*arguments: object) -> None:
        try:
            gate(*arguments)  # type: ignore[arg-type]
        except Exception:
            refused.append(True)

    monkeypatch.setattr(compiling, "check_guesses_change_nothing", told)
    for cache in ("int8", "int4", None):
        refused.clear()
        options = CompileOptions(ctx_len=64, num_speculative_tokens=5, kv_cache_dtype=cache)
        path = compile_package(
            read_package(llama_package), tmp_path / f"cache {cache}", options
        ).path
        assert measured(path / "decoder.onnx").attention is not bool(refused)
    assert refused


def test_products_that_onnxruntime_refuses(tmp_path: Path) -> None:
    """The graph itself says what is wrong when it is opened; until then an even number of rows suits all kernels."""
    found = measured(decoder(tmp_path, quantized(3, 32, 256, 192)))
    assert found.products == found.experts == RowCounts(2, 2)
    (words,) = found.unknown
    assert words.startswith("its products cannot be measured (")


@pytest.mark.parametrize("content", [b"", b"\xff\xff", b"\x3a\x05\x0a\x7f"])
def test_a_file_that_is_no_graph(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "decoder.onnx").write_bytes(content)
    with pytest.raises(PackageError, match=r"is not an ONNX file: .*; export the package again"):
        measured(tmp_path / "decoder.onnx")


def test_products_out_of_all_proportion_are_refused(tmp_path: Path) -> None:
    """Before memory is taken for them."""
    node = ir.node(
        "MatMulNBits",
        [None] * 3,
        {"K": 1 << 40, "N": 1, "bits": 4, "block_size": 32},
        domain="com.microsoft",
    )
    graph = ir.Graph([], [], nodes=[node], opset_imports={"": 20, "com.microsoft": 1}, name="g")
    ir.save(ir.Model(graph, ir_version=10), tmp_path / "decoder.onnx")
    with pytest.raises(PackageError, match="a product with 1099511627776 inputs"):
        measured(tmp_path / "decoder.onnx")


@pytest.mark.parametrize("bits", [4, 8])
def test_experts_that_onnxruntime_makes_float_as_it_opens_a_graph(bits: int) -> None:
    """A portable package has integers in front of MoE; the kernel is that of float experts."""
    shapes = {"fc1": (3, 96, 32), "fc2": (3, 32, 48)}
    plain = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    packed: dict[str, np.ndarray] = {"ids": np.arange(3)}
    nodes = []
    for name, (experts, outputs, inputs) in shapes.items():
        packed[f"{name}_levels"] = np.zeros((experts, outputs, inputs * bits // 8), np.uint8)
        packed[f"{name}_scales"] = np.zeros((experts, outputs, inputs // 16), np.float32)
        nodes.append(f"""{name} = com.microsoft.GatherBlockQuantized
            <bits = {bits}, block_size = 16, gather_axis = 0, quantize_axis = 2>
            ({name}_levels, ids, {name}_scales)""")

    def kernels(constants: dict[str, np.ndarray], before: str) -> frozenset[Kernel]:
        kinds = {"u": "uint8", "f": "float", "i": "int64"}
        given = ", ".join(
            f"{kinds[array.dtype.kind]}{list(array.shape)} {name}"
            for name, array in constants.items()
        )
        model = small_graph(
            f"""mixture (float[S,32] rows, float[S,3] choice, {given}) => (float[S,32] result) {{
                {before} result = com.microsoft.MoE <k = 1> (rows, choice, fc1, , fc2) }}""",
            constants=constants,
        )
        return read_kernels(ir.to_proto(model).SerializeToString(), 64)

    found = kernels(packed, "\n".join(nodes))
    assert found == kernels(plain, "")
    assert [kernel.operator for kernel in found if isinstance(kernel, Product)] == ["MoE"]
