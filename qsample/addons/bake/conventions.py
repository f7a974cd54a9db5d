"""The conventions of exporters: the names of a decoder's inputs, caches and layers, and the
refusals.

A new exporter's names go here; `recognise` finds them in a file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx_ir as ir

from qsample.errors import UnsupportedModelError
from qsample.graph.gqa import Slot

IDS: Final = "input_ids"
MASK: Final = "attention_mask"
POSITIONS: Final = "position_ids"
LOGITS: Final = "logits"
# The number of logits for a graph to compute; 0 for all.
KEEP: Final = ("num_logits_to_keep", "logits_to_keep")
# Inputs of graphs with a cache of fixed size, [B] each: the place of the first new token, and the
# number of tokens after the call.
WRITE: Final = "write_indices"
TOTAL_TOKENS: Final = "nonpad_kv_seqlen"
CALLS: Final = (IDS, MASK, POSITIONS, *KEEP, WRITE, TOTAL_TOKENS)
OLDEST_OPSET: Final = 14
NEWEST_OPSET: Final = 24

# The rank of keys and values [B, tokens, heads * size].
FLAT: Final = 3
# The rank of keys and values [B, heads, tokens, size].
BY_HEAD: Final = 4
# The inputs of ONNX's Attention for past keys and values; its outputs 1 and 2 are the present keys
# and values.
PAST_OF_ATTENTION: Final = (4, 5)
# Each operator that keeps a state → the state's name in the contract. `STATE` is the index of the
# input.
STATES: Final = {"CausalConvWithState": "conv_state", "LinearAttention": "recurrent_state"}
STATE: Final = 3
MULTI_HEAD: Final = "MultiHeadAttention"
# The input of MultiHeadAttention that is added to the scores.
SCORES_BIAS: Final = 5
FLOATS: Final = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
REFUSED_INPUTS: Final = {
    r"use_cache_branch": "it is a merged decoder, two graphs under one If; take decoder_with_past_model.onnx, or a "
    "file of a newer export, with GroupQueryAttention or without use_cache_branch",
    r"inputs_embeds": "it has no token embedding: it takes inputs_embeds; take a file whose input is input_ids",
    r"block_table|slot_mapping|.*_blocks?": "its cache is paged (PagedAttention); export it without "
    "use_paged_attention",
    r"beam_idx|beam_width|cache_indirection": "its cache has the state of a beam search; export it without",
    r"encoder_.*|pixel_values.*|audio_.*|input_features": "it is not a language model of tokens alone",
    r"cache_position": "it takes cache_position, separate positions; export it for ONNX Runtime (optimum, "
    "onnxruntime-genai)",
}
# A pattern of the names of states that are no keys or values.
RECURRENT_STATE_NAME: Final = r".*(conv|recurrent|ssm).*"
DYNAMIC: Final = (
    "it quantizes activations with a single scale per tensor ({}), "
    "so that a row would depend on the rest of its batch"
)
_PER_TOKEN: Final = (
    "it has a {} that may go through tokens; export it with ONNX Runtime's LinearAttention and CausalConvWithState "
    "(mobius without --ep onnx-standard), or the checkpoint with `qsample export`"
)
REFUSED_OPERATORS: Final = {
    "MatMulInteger": DYNAMIC,
    "DynamicQuantizeMatMul": DYNAMIC,
    "MatMulIntegerToFloat": DYNAMIC,
    "DynamicQuantizeLinear": DYNAMIC,
    "PagedAttention": "its cache is paged ({}); export it without use_paged_attention",
    "Loop": _PER_TOKEN,
    "Scan": _PER_TOKEN,
} | dict.fromkeys(
    (
        MULTI_HEAD,
        "DecoderMaskedMultiHeadAttention",
        "SparseAttention",
        "DecoderAttention",
        "Attention",
    ),
    "it attends through {}; only GroupQueryAttention, ONNX's own Attention and plain operators (MatMul, Softmax, "
    "MatMul) can be baked",
)
# Inputs of GroupQueryAttention → why a file with them is refused.
REFUSED_SLOTS: Final = dict.fromkeys(
    (Slot.K_SCALE, Slot.V_SCALE),
    "its cache is quantized; take the file with a float cache, and `qsample compile --kv-cache-dtype int8`",
)


def refusal(path: Path, why: str) -> UnsupportedModelError:
    """An error of a single line: the file, and why it cannot be baked."""
    return UnsupportedModelError(f"{path} cannot be baked: {' '.join(why.split())}")


def is_onnx_attention(node: ir.Node) -> bool:
    """Whether `node` is ONNX's Attention, not ONNX Runtime's operator of that name."""
    return node.op_type == "Attention" and not node.domain


def is_plain_attention(node: ir.Node) -> bool:
    """Whether `node` is a MultiHeadAttention that only computes Softmax(scale query keys + bias)
    values, of three separate tensors, with no cache: transformers' exporter lets the cache grow in
    front of it."""
    given = [index for index, value in enumerate(node.inputs) if value is not None]
    return (
        node.op_type == MULTI_HEAD
        and given in ([0, 1, 2], [0, 1, 2, SCORES_BIAS])
        and len(node.outputs) == 1
        and node.attributes.get_int("unidirectional", 0) == 0
    )


def layer_number(value: ir.Value, index: int) -> int:
    """The number in a cache's name; `index` if it has none."""
    found = re.search(r"\d+", str(value.name))
    return int(found.group()) if found else index


@dataclass(frozen=True, slots=True)
class Layer:
    """The cache of an attention layer.

    Its inputs and outputs are [B, heads, tokens, head_dim] or [B, tokens, heads * head_dim].

    Attributes:
        number: the number of the layer in the names of its cache.
        past_key: the graph's input for the keys.
        past_value: the graph's input for the values.
        present_key: the graph's output for the keys.
        present_value: the graph's output for the values.
        heads: the number of heads of keys and values.
        head_dim: the size of a head.
        ring: the number of tokens that the file keeps; None if it keeps all.
        size: the tokens of a cache of fixed size; None if it grows.
        attention: the GroupQueryAttention; None if the layer attends through other operators.
        new: the keys and values of the new tokens, [B, heads, S, head_dim], if the file shows them.
        new_is_flat: whether `new` are [B, S, heads * head_dim].
    """

    number: int
    past_key: ir.Value
    past_value: ir.Value
    present_key: ir.Value
    present_value: ir.Value
    heads: int
    head_dim: int
    ring: int | None = None
    size: int | None = None
    attention: ir.Node | None = None
    new: tuple[ir.Value, ir.Value] | None = None
    new_is_flat: bool = False

    def shape(self, tokens: int) -> tuple[int, ...]:
        """The shape of the file's keys or values, of a row of `tokens` tokens, or of all in a cache
        of fixed size."""
        tokens = tokens if self.size is None else self.size
        is_flat = self.past_key.shape is not None and len(self.past_key.shape) == FLAT
        return (
            (1, tokens, self.heads * self.head_dim)
            if is_flat
            else (1, self.heads, tokens, self.head_dim)
        )

    @property
    def pasts(self) -> tuple[ir.Value, ir.Value]:
        return self.past_key, self.past_value

    @property
    def presents(self) -> tuple[ir.Value, ir.Value]:
        return self.present_key, self.present_value


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A LinearAttention or CausalConvWithState with its state.

    Attributes:
        number: the number of the layer; see `interface.RecurrentShape`.
        kind: the kind of the state; see `interface.RecurrentShape`.
        shape: the shape of the state without the rows; see `interface.RecurrentShape`.
        dtype: the dtype of the state.
        node: the operator.
        past: the graph's input for the state, [B, ...].
        present: the graph's output for the state, [B, ...].
    """

    number: int
    kind: str
    shape: tuple[int, ...]
    dtype: ir.DataType
    node: ir.Node
    past: ir.Value
    present: ir.Value


@dataclass(frozen=True, slots=True)
class ForeignGraph:
    """A decoder file.

    Attributes:
        path: the file.
        model: the model in the file.
        layers: the attention layers in order.
        logits: the output with the logits.
        vocab_size: V of the logits.
        dtype: the dtype of the caches.
        changed: whether `model` has other inputs than the file.
        recurrences: the recurrent and convolutional states in the order of their layers.
    """

    path: Path
    model: ir.Model
    layers: tuple[Layer, ...]
    logits: ir.Value
    vocab_size: int
    dtype: ir.DataType
    changed: bool = False
    recurrences: tuple[Recurrence, ...] = ()

    @property
    def size(self) -> int | None:
        """The tokens of its caches; None if they grow."""
        return min((layer.size for layer in self.layers if layer.size is not None), default=None)

    @property
    def graph(self) -> ir.Graph:
        return self.model.graph

    def input(self, name: str) -> ir.Value | None:
        return next((value for value in self.graph.inputs if value.name == name), None)
