"""A number of Philox4x32-10 for each row, computed inside a decode step from the row's seed and
position.

The numbers equal those of the noise buffers, which `qsample.sampler.philox` defines and computes.
Every execution provider has the operators used here, and a whole buffer would take more than ten
times as long.

Words are held as hexadecimal digits, an element each. In each of the ten rounds,

1. a matrix multiplies both words by their constants and adds up the partial products: it gives the
sum at each digit
   and, as a fraction, the carry of a group of five digits into that digit;
2. Floor makes carries of the fractions, and a second matrix adds the carries from the group below;
3. a third matrix puts each digit of the product next to the two digits that it is XORed with: an
index into a table of
   16**3 results.

All of that is exact. In any order of additions, a sum has at most 24 bits. The operands of MatMul
and Gemm have at most 11, because CUDA rounds float32 operands to TF32 by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from qsample.contract.arrays import Array
from qsample.sampler.philox import ROUNDS, WEYL_INCREMENTS, WORDS_PER_COUNTER
from qsample.sampler.tensor import FLOAT, INT32, Tensor, Tensors, constant, op, operator

_WORD_DIGITS: Final = 8
# A number consists of the highest 24 bits of a word, so the lowest two digits do not count.
_UNUSED_DIGITS: Final = 2
# The digits whose carry a single fraction covers.
_GROUP_DIGITS: Final = 5
# The multipliers' digits, lowest first. Some are negative: with all of them 0 to 15, fractions
# would have 27 bits.
_MULTIPLIER_DIGITS: Final = ((3, 5, -1, 2, 1, 5, 2, -3, 1), (-9, 6, -3, 9, -2, -6, -2, -3, 1))
# A state between rounds is a row of digits: of c0 and c2, which are multiplied; a copy of these,
# because a coefficient takes two elements of 11 bits; and of c1 and c3.
_COPY_START: Final = 2 * _WORD_DIGITS
_ADDENDS_START: Final = 4 * _WORD_DIGITS
_STATE_WIDTH: Final = 6 * _WORD_DIGITS
# From this index on, the table of XORs holds 0 to 15: digits that pass a round unchanged.
_IDENTITY_START: Final = 16**3


def uniforms(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    """A number of each row: [B, 1] float32, in [0, 1).

    Args:
        seed: [B] int64, any value; only its split into digits computes in int64.
        position: [B] int32, at least 0.
        stream: the stream of the numbers, 0 to 15.
    """
    products = _product_matrix()
    xors = np.bitwise_xor.reduce(np.indices((16, 16, 16)).reshape(3, -1))
    table = _constant([*xors, *range(16)])
    later_matrix = _constant(products)
    carries = _constant(_PRODUCT_COLUMNS.carries_matrix)
    indices = _constant(_index_matrix())

    digits = _position_digits(position)
    state = digits.to(FLOAT)
    matrix = _constant(_first_matrix(products))
    for key in _round_keys(seed, stream):
        sums = _carry(op("MatMul", state, matrix), carries, groups=3)
        state = table.rows(op("Gemm", sums, indices, key).to(INT32))
        matrix = later_matrix
    word = op("Gather", digits, [2 * _WORD_DIGITS], axis=1)
    return op("MatMul", state, _constant(_fraction_matrix())).gather(word)


class _Columns(NamedTuple):
    """The columns of a row of sums that stand for two numbers.

    Attributes:
        digits: the digits of each number.
        carries: the carries of each number, into the digits above the lowest.
        unchanged: the further columns, which only pass through.
    """

    digits: int
    carries: int
    unchanged: int

    @property
    def width(self) -> int:
        return 2 * (self.digits + self.carries) + self.unchanged

    @property
    def unchanged_start(self) -> int:
        return self.width - self.unchanged

    def digit(self, number: int, place: int) -> int:
        """The column of a digit of a number."""
        return number * self.digits + place

    def carry(self, number: int, place: int) -> int:
        """The column of the carry into a digit of a number."""
        return 2 * self.digits + number * self.carries + place - 1

    def with_fractions(self, digits: Array) -> Array:
        """A matrix for digits, extended by the carries: [K, 2 * digits] gives [K, 2 * (digits +
        carries)].

        The carry into a place is the sum of the digits of the group below, as a fraction.
        """
        fractions = np.zeros((2 * self.digits, 2 * self.carries))
        for number in range(2):
            for place in range(1, self.carries + 1):
                column = self.carry(number, place) - 2 * self.digits
                for below in range(_group_start(place), place):
                    fractions[self.digit(number, below), column] = 16.0 ** (below - place)
        return np.concatenate([digits, digits @ fractions], axis=1)

    @property
    def carries_matrix(self) -> Array:
        """From the carry into a group's lowest digit to the fractions of that group: [width,
        width], negative."""
        matrix = np.zeros((self.width, self.width))
        for number in range(2):
            for place in range(_GROUP_DIGITS + 1, self.carries + 1):
                start = _group_start(place)
                row = self.carry(number, start)
                matrix[row, self.carry(number, place)] = -(16.0 ** (start - place))
        return matrix

    def add_digit(self, matrix: Array, number: int, place: int, column: int, weight: int) -> None:
        """Let `matrix` add a digit of a number, after all carries, times `weight`, to a column of
        its result."""
        matrix[self.digit(number, place), column] = weight
        if place > 0:
            matrix[self.carry(number, place), column] = weight
        if place < self.carries:
            matrix[self.carry(number, place + 1), column] = -16 * weight


_PRODUCT_COLUMNS: Final = _Columns(
    digits=2 * _WORD_DIGITS, carries=2 * _WORD_DIGITS - 1, unchanged=2 * _WORD_DIGITS
)
_KEY_COLUMNS: Final = _Columns(digits=_WORD_DIGITS, carries=_WORD_DIGITS, unchanged=1)


def _group_start(place: int) -> int:
    """The lowest digit of the group that carries into `place`."""
    return (place - 1) // _GROUP_DIGITS * _GROUP_DIGITS


def _carry(sums: Tensor, carries: Tensor, groups: int) -> Tensor:
    """`sums` with whole carries in place of fractions.

    The carries into the lowest group are right at once, and each further pass makes those into the
    next group right.
    """
    result = op("Floor", sums)
    for _ in range(groups - 1):
        # ONNX Runtime makes a Gemm of MatMul and Add, and CUDA rounds a Gemm's bias to TF32 if
        # there is one row.
        result = op("Floor", sums - op("MatMul", result, carries))
    return result


def _product_matrix() -> Array:
    """From a state to the sums of both products: [48, 78]. The product of c2 comes first: it
    decides c0 and c1."""
    columns = _PRODUCT_COLUMNS
    digits = np.zeros((2 * _WORD_DIGITS, 4 * _WORD_DIGITS))
    for number, word in enumerate((1, 0)):
        for place in range(_WORD_DIGITS):
            start = columns.digit(number, place)
            row = word * _WORD_DIGITS + place
            digits[row, start : start + _WORD_DIGITS + 1] = _MULTIPLIER_DIGITS[word]
    sums = columns.with_fractions(digits)
    upper = np.round(sums * 2**10) / 2**10
    matrix = np.zeros((_STATE_WIDTH, columns.width))
    matrix[:_ADDENDS_START, : columns.unchanged_start] = np.concatenate([upper, sums - upper])
    matrix[_ADDENDS_START:, columns.unchanged_start :] = np.eye(columns.unchanged)
    return matrix


def _first_matrix(products: Array) -> Array:
    """The product matrix of the first round, whose state is a row of `_position_digits`: only c0 is
    not 0."""
    copy = products[_COPY_START : _COPY_START + _WORD_DIGITS]
    position_in_block = np.zeros_like(products[:1])
    return np.concatenate([products[:_WORD_DIGITS], copy, position_in_block])


def _index_matrix() -> Array:
    """From the sums of a round to indices into the table, without the summands of its key: [78,
    48]."""
    columns = _PRODUCT_COLUMNS
    matrix = np.zeros((columns.width, _STATE_WIDTH))
    for number in range(2):
        for place in range(_WORD_DIGITS):
            column = number * _WORD_DIGITS + place
            for xored in (column, _COPY_START + column):
                columns.add_digit(matrix, number, _WORD_DIGITS + place, xored, 1)
                matrix[columns.unchanged_start + column, xored] = 16
            columns.add_digit(matrix, number, place, _ADDENDS_START + column, 1)
    return matrix


def _fraction_matrix() -> Array:
    """From a state to the fractions in [0, 1) that the highest 24 bits of its words are: [48,
    4]."""
    fractions = np.zeros((_STATE_WIDTH, WORDS_PER_COUNTER))
    starts = (0, _ADDENDS_START, _WORD_DIGITS, _ADDENDS_START + _WORD_DIGITS)
    powers = 16.0 ** np.arange(_UNUSED_DIGITS - _WORD_DIGITS, 0)
    for word, start in enumerate(starts):
        fractions[start + _UNUSED_DIGITS : start + _WORD_DIGITS, word] = powers
    return fractions


def _position_digits(position: Tensor) -> Tensor:
    """The digits of position div 4, a copy of them, and position mod 4: [B, 17] int32."""
    digit_units = [WORDS_PER_COUNTER * 16**place for place in range(_WORD_DIGITS)]
    units = np.array([*digit_units, *digit_units, 1], np.int32)
    bases = _constant([16] * 2 * _WORD_DIGITS + [WORDS_PER_COUNTER], np.int32)
    quotients = position.unsqueeze() / constant(units[None, None])
    return (quotients - quotients / bases * bases).reshape(-1, len(units))


def _round_keys(seed: Tensor, stream: int) -> Tensors:
    """The summands of each round's indices, [B, 48] each: mostly 256 times the digits of its
    key."""
    key_digits = 2 * _WORD_DIGITS
    # The unit after the digits gives the seed mod 1, which is 0: a place for the stream.
    units = _constant([16**place for place in range(key_digits)] + [1], np.int64)
    seeds = seed.unsqueeze()
    # Without the remainders, Div is exact; it would round negative numbers up.
    quotients = (seeds - op("Mod", seeds, units)) / units
    digits = op("Mod", quotients, _constant([16] * key_digits + [1], np.int64)).to(FLOAT)
    summands = (digits + _constant(_key_increments(stream))).reshape(-1, key_digits + 1)

    matrix = np.zeros((key_digits + 1, _KEY_COLUMNS.width))
    matrix[:-1, :-1] = _KEY_COLUMNS.with_fractions(np.eye(key_digits))
    matrix[-1, -1] = 1
    indices = np.zeros((_KEY_COLUMNS.width, _STATE_WIDTH))
    for column in range(key_digits):
        word, place = divmod(column, _WORD_DIGITS)
        for xored in (column, _COPY_START + column):
            _KEY_COLUMNS.add_digit(indices, word, place, xored, 16**2)
    # The stream is c1, and the first round XORs it unchanged.
    indices[-1, [0, _COPY_START]] = 16
    offsets = np.repeat([0, _IDENTITY_START], [_ADDENDS_START, _STATE_WIDTH - _ADDENDS_START])

    products = op("MatMul", summands, _constant(matrix))
    sums = _carry(products, _constant(_KEY_COLUMNS.carries_matrix), groups=2)
    keys = op("Gemm", sums, _constant(indices), _constant(offsets))
    return operator("Split", keys, axis=0, num_outputs=ROUNDS, outputs=ROUNDS)


def _key_increments(stream: int) -> Array:
    """What each round adds to the digits of the seed, and the stream in the first round: [10, 1, 1,
    17]."""
    increments = np.zeros((ROUNDS, 1, 1, 2 * _WORD_DIGITS + 1))
    for round_ in range(ROUNDS):
        for column in range(2 * _WORD_DIGITS):
            word, place = divmod(column, _WORD_DIGITS)
            increments[round_, ..., column] = round_ * WEYL_INCREMENTS[word] >> 4 * place & 15
    increments[0, ..., -1] = stream
    return increments


def _constant(values: Array | Sequence[int], dtype: type = np.float32) -> Tensor:
    return constant(np.asarray(values, dtype))
