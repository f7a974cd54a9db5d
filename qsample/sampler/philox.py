"""Philox4x32-10 in ONNX (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).

Enter: seeds, and positions or a capacity. Leave: the uniforms of the contract. Number t of stream s is u = (x >> 8) *
2**-24, x word t mod 4 of counter (t div 4, s, 0, 0) under key (seed mod 2**32, seed div 2**32).

There are two forms. `noise_buffer` computes whole buffers with int64 words and BitwiseXor; only the CPU has it.
`uniforms` computes a single number of each row inside a decode step, with operators that CUDA and WebGPU have as well;
a whole buffer would take it more than ten times as long.

`uniforms` holds words as hexadecimal digits, an element each. A matrix multiplies both words of a round and adds up
the partial products: the sum at each digit and, as a fraction, the carry of a group of five digits into it. Floor makes
carries of the fractions, and a second matrix adds the carries from the group below. The third puts each digit of
the product next to the digits that it is XORed with: an index into a table of 16**3 results.

All of that is exact. In any order of additions, a sum has at most 24 bits. The operands of MatMul and Gemm have at
most 11, because CUDA rounds float32 operands to TF32 by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from qsample.contract.arrays import Array
from qsample.contract.tensors import PHILOX_UNIFORM_SCALE
from qsample.sampler.tensor import FLOAT, INT32, Tensor, Tensors, constant, op, operator, size

_ROUNDS: Final = 10
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL_INCREMENTS: Final = (0x9E3779B9, 0xBB67AE85)
_WORDS: Final = 4  # that one counter gives

_DIGITS: Final = 8  # of a word
_GROUP: Final = 5  # digits that one fraction covers
# The multipliers' digits, lowest first. Some are negative: with all of them 0 to 15, fractions would have 27 bits.
_MULTIPLIER_DIGITS: Final = ((3, 5, -1, 2, 1, 5, 2, -3, 1), (-9, 6, -3, 9, -2, -6, -2, -3, 1))
# A row between rounds has the digits of c0 and c2, the factors; the same again, since a coefficient takes two elements
# of 11 bits; and the digits of c1 and c3.
_AGAIN: Final = 2 * _DIGITS
_OTHERS: Final = 4 * _DIGITS
_STATE: Final = 6 * _DIGITS
_PASSED: Final = (
    16**3
)  # the place in the table of XORs from which the digits 0 to 15 stand for themselves


def noise_buffer(seed: Tensor, capacity: Tensor, stream: int) -> Tensor:
    """The first `capacity` (int64 scalar, at least 1) numbers of every row from a stream (0 to 2**32 - 1), for the CPU:
    [B, T] float32 in [0, 1), by the rows' `seed` [B] int64."""
    low = op("Mod", seed, 2**32)
    high = op("Mod", (seed - low) / 2**32, 2**32)
    blocks = (capacity + (_WORDS - 1)) / _WORDS
    counter = [op("Range", 0, blocks, 1), *(_constant([word], np.int64) for word in (stream, 0, 0))]
    words = philox(counter, [low.unsqueeze(), high.unsqueeze()])
    stacked = op("Concat", *(word.unsqueeze() for word in words), axis=-1)
    flat = op("Reshape", stacked, op("Concat", size(seed, 0), [-1], axis=0))
    return (flat / 2**8).columns(0, capacity).to(FLOAT) * PHILOX_UNIFORM_SCALE


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> Tensors:
    """Philox4x32-10: four counter words and two key words in, four random words out: int64 in [0, 2**32), broadcast."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for round_ in range(_ROUNDS):
        if round_ > 0:
            k0, k1 = (
                op("Mod", k + step, 2**32)
                for k, step in zip((k0, k1), _WEYL_INCREMENTS, strict=True)
            )
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c2 = (
            op("BitwiseXor", op("BitwiseXor", high, c), k)
            for high, c, k in ((high1, c1, k0), (high0, c3, k1))
        )
        c1, c3 = low1, low0
    return c0, c1, c2, c3


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The high and low 32 bits of the 64-bit product, by halves of the multiplier so that nothing exceeds 2**49."""
    upper, lower = word * (multiplier >> 16), word * (multiplier & 0xFFFF)
    return (upper + lower / 2**16) / 2**16, op(
        "Mod", op("Mod", upper, 2**16) * 2**16 + lower, 2**32
    )


def uniforms(seed: Tensor, position: Tensor, streams: Sequence[int] = (0,)) -> Tensors:
    """A number of each row from each stream, 0 to 15: [B, 1] float32 in [0, 1). All streams share their nodes: each
    adds B rows. seed: [B] int64, any value; only the split into digits computes in int64. position: [B] int32 >= 0."""
    products = _product_matrix()
    first = np.concatenate(
        [products[:_DIGITS], products[_AGAIN : _AGAIN + _DIGITS], np.zeros_like(products[:1])]
    )
    fractions = np.zeros((_STATE, _WORDS))
    for word, column in enumerate((0, _OTHERS, _DIGITS, _OTHERS + _DIGITS)):
        fractions[column + 2 : column + _DIGITS, word] = 16.0 ** np.arange(
            2 - _DIGITS, 0
        )  # 24 of the 32 bits
    xors = np.bitwise_xor.reduce(np.indices((16, 16, 16)).reshape(3, -1))

    table, later = _constant([*xors, *range(16)]), _constant(products)
    carries, indices = _constant(_PRODUCTS.carries_matrix), _constant(_index_matrix())
    digits = _position_digits(position, len(streams))
    state, matrix = digits.to(FLOAT), _constant(first)
    for key in _keys(seed, streams):
        sums = _carry(op("MatMul", state, matrix), carries, groups=3)
        state, matrix = table.rows(op("Gemm", sums, indices, key).to(INT32)), later
    which_word = op("Gather", digits, [2 * _DIGITS], axis=1)
    numbers = op("MatMul", state, _constant(fractions)).gather(which_word)
    count = len(streams)
    return (
        operator("Split", numbers, axis=0, num_outputs=count, outputs=count)
        if count > 1
        else (numbers,)
    )


class _Columns(NamedTuple):
    """The columns of a row of sums: two numbers' digits, the carries into the digits above the lowest, and `others`
    that only pass through."""

    digits: int
    carries: int
    others: int

    @property
    def width(self) -> int:
        return 2 * (self.digits + self.carries) + self.others

    def digit(self, number: int, place: int) -> int:
        return number * self.digits + place

    def carry(self, number: int, place: int) -> int:
        return 2 * self.digits + number * self.carries + place - 1

    def with_fractions(self, digits: Array) -> Array:
        """[K, 2 * digits] -> [K, 2 * (digits + carries)]: the carries into a place by the digits of the group below."""
        fractions = np.zeros((2 * self.digits, 2 * self.carries))
        for number in range(2):
            for place in range(1, self.carries + 1):
                for below in range(_group(place), place):
                    column = self.carry(number, place) - 2 * self.digits
                    fractions[self.digit(number, below), column] = 16.0 ** (below - place)
        return np.concatenate([digits, digits @ fractions], axis=1)

    @property
    def carries_matrix(self) -> Array:
        """[width, width], negative: from a carry into a group's lowest digit to the fractions of that group."""
        matrix = np.zeros((self.width, self.width))
        for number in range(2):
            for place in range(_GROUP + 1, self.carries + 1):
                first = _group(place)
                matrix[self.carry(number, first), self.carry(number, place)] = -(
                    16.0 ** (first - place)
                )
        return matrix

    def leave_digit(self, matrix: Array, number: int, place: int, column: int, weight: int) -> None:
        """Let `matrix` add a digit of a number, after all carries, to a column of its result."""
        matrix[self.digit(number, place), column] = weight
        if place > 0:
            matrix[self.carry(number, place), column] = weight
        if place < self.carries:
            matrix[self.carry(number, place + 1), column] = -16 * weight


_PRODUCTS: Final = _Columns(2 * _DIGITS, 2 * _DIGITS - 1, 2 * _DIGITS)
_KEYS: Final = _Columns(_DIGITS, _DIGITS, 1)


def _group(place: int) -> int:
    """The lowest digit of the group that carries into `place`."""
    return (place - 1) // _GROUP * _GROUP


def _carry(sums: Tensor, carries: Tensor, groups: int) -> Tensor:
    """`sums` with whole carries in place of fractions: those into the lowest group are right at once, and so on."""
    result = op("Floor", sums)
    for _ in range(groups - 1):
        # ONNX Runtime makes a Gemm of MatMul and Add, and CUDA rounds a Gemm's bias to TF32 if there is one row.
        result = op("Floor", sums - op("MatMul", result, carries))
    return result


def _product_matrix() -> Array:
    """[48, 78]: from a state to the sums of both products; the product of c2 comes first and decides c0 and c1."""
    digits = np.zeros((2 * _DIGITS, 4 * _DIGITS))
    for number, word in enumerate((1, 0)):
        for place in range(_DIGITS):
            first = _PRODUCTS.digit(number, place)
            digits[word * _DIGITS + place, first : first + _DIGITS + 1] = _MULTIPLIER_DIGITS[word]
    sums = _PRODUCTS.with_fractions(digits)
    upper = np.round(sums * 2**10) / 2**10
    matrix = np.zeros((_STATE, _PRODUCTS.width))
    matrix[:_OTHERS, : -_PRODUCTS.others] = np.concatenate([upper, sums - upper])
    matrix[_OTHERS:, -_PRODUCTS.others :] = np.eye(_PRODUCTS.others)
    return matrix


def _index_matrix() -> Array:
    """[78, 48]: from the sums of a round to indices into the table, without the summands of its key."""
    matrix = np.zeros((_PRODUCTS.width, _STATE))
    for number in range(2):
        for place in range(_DIGITS):
            column = number * _DIGITS + place
            for xored in (column, _AGAIN + column):
                _PRODUCTS.leave_digit(matrix, number, _DIGITS + place, xored, 1)
                matrix[_PRODUCTS.width - _PRODUCTS.others + column, xored] = 16
            _PRODUCTS.leave_digit(matrix, number, place, _OTHERS + column, 1)
    return matrix


def _position_digits(position: Tensor, streams: int) -> Tensor:
    """[streams * B, 17] int32: the digits of position div 4, the same again, and position mod 4."""
    units = [4 * 16**place for place in range(_DIGITS)] * 2 + [1]
    bases = _constant([16] * 2 * _DIGITS + [_WORDS], np.int32)
    quotients = position.unsqueeze() / _constant(np.tile(units, (streams, 1, 1)), np.int32)
    return (quotients - quotients / bases * bases).reshape(-1, len(units))


def _keys(seed: Tensor, streams: Sequence[int]) -> Tensors:
    """The summands of each round's indices, [streams * B, 48]: mostly 256 times the digits of its key."""
    # After the digits comes the seed mod 1: a place for the stream.
    units = _constant([16**place for place in range(2 * _DIGITS)] + [1], np.int64)
    seeds = seed.unsqueeze()
    quotients = (
        seeds - op("Mod", seeds, units)
    ) / units  # exact: Div would round negative numbers up
    digits = op("Mod", quotients, _constant([16] * 2 * _DIGITS + [1], np.int64)).to(FLOAT)

    increments = np.zeros((_ROUNDS, len(streams), 1, 2 * _DIGITS + 1))
    for round_ in range(_ROUNDS):
        for column in range(2 * _DIGITS):
            word, place = divmod(column, _DIGITS)
            increments[round_, ..., column] = round_ * _WEYL_INCREMENTS[word] >> 4 * place & 15
    increments[0, :, 0, -1] = streams
    summands = (digits + _constant(increments)).reshape(-1, 2 * _DIGITS + 1)

    matrix = np.zeros((2 * _DIGITS + 1, _KEYS.width))
    matrix[:-1, :-1] = _KEYS.with_fractions(np.eye(2 * _DIGITS))
    matrix[-1, -1] = 1
    indices = np.zeros((_KEYS.width, _STATE))
    for column in range(2 * _DIGITS):
        for xored in (column, _AGAIN + column):
            _KEYS.leave_digit(indices, *divmod(column, _DIGITS), xored, 16**2)
    indices[-1, [0, _AGAIN]] = 16  # the stream is c1; the first round XORs it as it is
    passed = np.repeat([0, _PASSED], [_OTHERS, _STATE - _OTHERS])

    sums = _carry(
        op("MatMul", summands, _constant(matrix)), _constant(_KEYS.carries_matrix), groups=2
    )
    keys = op("Gemm", sums, _constant(indices), _constant(passed))
    return operator("Split", keys, axis=0, num_outputs=_ROUNDS, outputs=_ROUNDS)


def _constant(values: Array | Sequence[int], dtype: type = np.float32) -> Tensor:
    return constant(np.asarray(values, dtype))
