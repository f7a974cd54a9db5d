"""The graphs of a fake package, as ONNX text: one real attention layer and a plain sampler, by the contract."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
from onnx import numpy_helper

from qsample.compiler.passes.several_tokens import check_guesses
from qsample.contract.interface import GraphSpec, Interface
from qsample.contract.tensors import (
    ADJUSTED_LOGITS,
    CAPACITY,
    FILTER_STATES,
    STATEFUL_FILTERS,
    TensorSpec,
    retained_name,
)
from qsample.exporters.portable import build_initial_state
from tests.helpers.fake_images import image_weights, vision_graph, with_images

VOCAB = 331  # no multiple of 32: the last word of a mask is a part
PAD = 0
DIM = 16
GUESSING_CAPACITY = 64  # of packages that check guesses

DOT = "_0_"  # ONNX text has no dots in names
_TYPES = {"float32": "float"}
_MODEL = """
  batch_axis = Constant <value_ints = [0]> ()
  column = Constant <value_ints = [1]> ()
  zero_i = Constant <value_int = 0> ()
  one_i = Constant <value_int = 1> ()
  last_axis = Constant <value_ints = [2]> ()
  ids_shape = Shape (input_ids)
  batch = Gather <axis = 0> (ids_shape, zero_i)
  length = Gather <axis = 0> (ids_shape, one_i)
  length32 = Cast <to = 6> (length)
  zero32 = Cast <to = 6> (zero_i)
  one32 = Cast <to = 6> (one_i)
  offsets = Range (zero32, length32, one32)
  lengths_column = Unsqueeze (lengths, column)
  positions = Add (lengths_column, offsets)
  positions_float = Cast <to = 1> (positions)
  positions_deep = Unsqueeze (positions_float, last_axis)
  angles = Mul (positions_deep, frequencies)
  waves = Sin (angles)
  embedded = Gather <axis = 0> (embedding, input_ids)
  hidden = Add (embedded, waves)
  query = MatMul (hidden, w_query)
  key = MatMul (hidden, w_key)
  value = MatMul (hidden, w_value)
  length_less_one = Sub (length32, one32)
  seqlens = Add (lengths, length_less_one)
  cache_shape = Shape (past_key_values.0.key)
  two_i = Constant <value_int = 2> ()
  cache_length = Gather <axis = 0> (cache_shape, two_i)
  one_row = Equal (batch, one_i)
  one_token = Equal (length, one_i)
  anywhere = Or (one_row, one_token)
  total_length = Where (anywhere, cache_length, length)
  total_length32 = Cast <to = 6> (total_length)
  attended, present.0.key, present.0.value = com.microsoft.GroupQueryAttention <num_heads = 1, kv_num_heads = 1> (
    query, key, value, past_key_values.0.key, past_key_values.0.value, seqlens, total_length32)
  mixed = Add (hidden, attended)
  last_offset = Sub (input_lengths, one32)
  last_offset64 = Cast <to = 7> (last_offset)
  last_index = Unsqueeze (last_offset64, column)
  last_index_deep = Unsqueeze (last_index, last_axis)
  mixed_shape = Shape (mixed)
  width = Slice (mixed_shape, last_axis, past_last)
  one_shape = Constant <value_ints = [1]> ()
  batch_shape = Slice (mixed_shape, batch_axis, column)
  index_shape = Concat <axis = 0> (batch_shape, one_shape, width)
  index = Expand (last_index_deep, index_shape)
  last = GatherElements <axis = 1> (mixed, index)
  deep_logits = MatMul (last, w_head)
  free_logits = Squeeze (deep_logits, column)
  logits = Add (free_logits, head_bias)
"""
_SAMPLER = """
  s_axis0 = Constant <value_ints = [0]> ()
  s_axis1 = Constant <value_ints = [1]> ()
  s_axis2 = Constant <value_ints = [2]> ()
  s_zero = Constant <value_int = 0> ()
  s_one = Constant <value_int = 1> ()
  s_zero32 = Cast <to = 6> (s_zero)
  s_one32 = Cast <to = 6> (s_one)
  n = Unsqueeze (input_lengths, s_axis1)
  lengths_in = Unsqueeze (lengths, s_axis1)
  total = Add (lengths_in, n)
  start = Sub (total, n)
  status_in = Unsqueeze (status, s_axis1)
  running = Equal (status_in, s_zero32)
  emit_in = Unsqueeze (emit, s_axis1)
  sampling = And (running, emit_in)
  tokens_shape = Shape (tokens)
  capacity = Gather <axis = 0> (tokens_shape, s_one)
  capacity32 = Cast <to = 6> (capacity)
  slots = Range (s_zero32, capacity32, s_one32)
  before_end = Less (slots, total)
  after_start = GreaterOrEqual (slots, start)
  inside = And (after_start, before_end)
  offset = Sub (slots, start)
  s_ids_shape = Shape (input_ids)
  s_length = Gather <axis = 0> (s_ids_shape, s_one)
  s_length32 = Cast <to = 6> (s_length)
  s_last = Sub (s_length32, s_one32)
  offset_clipped = Clip (offset, s_zero32, s_last)
  offset64 = Cast <to = 7> (offset_clipped)
  given = GatherElements <axis = 1> (input_ids, offset64)
  given32 = Cast <to = 6> (given)
  first64 = Slice (input_ids, s_axis0, s_axis1, s_axis1)
  first = Cast <to = 6> (first64)
  fresh = Equal (start, s_zero32)
  old = Where (fresh, first, tokens)
  written = Where (inside, given32, old)

  shape_v = Shape (logits)
  zeros_v = ConstantOfShape <value = float[1] {0}> (shape_v)
  vocab = Gather <axis = 0> (shape_v, s_one)
  vocab32 = Cast <to = 6> (vocab)
  ids_v = Range (s_zero32, vocab32, s_one32)
  minus_infinity = Constant <value_float = -inf> ()
  stops_deep = Unsqueeze (stop_ids, s_axis2)
  stop_hits = Equal (stops_deep, ids_v)
  stop_hits_float = Cast <to = 1> (stop_hits)
  stop_any = ReduceMax <keepdims = 0> (stop_hits_float, s_axis1)
  is_stop = Cast <to = 9> (stop_any)
  min_length_in = Unsqueeze (min_length, s_axis1)
  too_short = Less (total, min_length_in)
  banned = And (is_stop, too_short)
  unbanned = Where (banned, minus_infinity, BIASED)
  written64 = Cast <to = 7> (written)
  ones_t = ConstantOfShape <value = float[1] {1}> (tokens_shape)
  seen_float = ScatterElements <axis = 1> (zeros_v, written64, ones_t)
  seen = Cast <to = 9> (seen_float)
  r = Unsqueeze (repetition_penalty, s_axis1)
  zero_f = Constant <value_float = 0.0> ()
  negative = Less (unbanned, zero_f)
  multiplied = Mul (unbanned, r)
  divided = Div (unbanned, r)
  repeated = Where (negative, multiplied, divided)
  penalised = Where (seen, repeated, unbanned)
  frequency = Unsqueeze (frequency_penalty, s_axis1)
  presence = Unsqueeze (presence_penalty, s_axis1)
  by_count = Mul (frequency, output_counts)
  was_output = Greater (output_counts, zero_f)
  was_output_float = Cast <to = 1> (was_output)
  by_presence = Mul (presence, was_output_float)
  less_count = Sub (penalised, by_count)
  adjusted = Sub (less_count, by_presence)

  argmax = ArgMax <axis = 1, keepdims = 1> (adjusted)
  t = Unsqueeze (temperature, s_axis1)
  is_greedy = Equal (t, zero_f)
  one_f = Constant <value_float = 1.0> ()
  safe_t = Where (is_greedy, one_f, t)
  scaled = Div (adjusted, safe_t)
  p = Softmax <axis = -1> (scaled)
  cdf = CumSum (p, s_one)
  last_t = Sub (capacity32, s_one32)
  u_index = Min (total, last_t)
  u_index64 = Cast <to = 7> (u_index)
  u = GatherElements <axis = 1> (noise, u_index64)
  passed = LessOrEqual (cdf, u)
  passed64 = Cast <to = 7> (passed)
  count = ReduceSum (passed64, s_axis1)
  last_v = Sub (vocab, s_one)
  drawn = Min (count, last_v)
  token = Where (is_greedy, argmax, drawn)

  nan_v = IsNaN (logits)
  inf_v = IsInf <detect_negative = 0> (logits)
  bad_v = Or (nan_v, inf_v)
  bad_float = Cast <to = 1> (bad_v)
  bad_any = ReduceMax <keepdims = 1> (bad_float, s_axis1)
  bad_logits = Cast <to = 9> (bad_any)
  best = ReduceMax <keepdims = 1> (adjusted, s_axis1)
  nothing_left = Equal (best, minus_infinity)
  bad = Or (bad_logits, nothing_left)
  valid = Not (bad)
  emitted = And (sampling, valid)
  consuming = Not (emit_in)
  moving = Or (emitted, consuming)
  advance = And (running, moving)
  pad = Constant <value_int = PAD_ID> ()
  next_ids = Where (emitted, token, pad)
  safe_token = Where (emitted, token, s_zero)
  safe_token32 = Cast <to = 6> (safe_token)
  next_length = Where (advance, total, start)
  lengths_RetainedState = Squeeze (next_length, s_axis1)
  here = Equal (slots, total)
  commit = And (here, emitted)
  history = Where (advance, written, tokens)
  tokens_RetainedState = Where (commit, safe_token32, history)
  emitted_float = Cast <to = 1> (emitted)
  output_counts_RetainedState = ScatterElements <axis = 1, reduction = "add"> (output_counts, safe_token, emitted_float)
  hits_stop = GatherElements <axis = 1> (is_stop, safe_token)
  end = Add (total, s_one32)
  max_length_in = Unsqueeze (max_length, s_axis1)
  at_max = GreaterOrEqual (end, max_length_in)
  at_capacity = GreaterOrEqual (end, capacity32)
  full = Or (at_max, at_capacity)
  two32 = Add (s_one32, s_one32)
  three32 = Add (two32, s_one32)
  if_full = Where (full, two32, s_zero32)
  if_stop = Where (hits_stop, s_one32, if_full)
  if_valid = Where (valid, if_stop, three32)
  if_sampling = Where (sampling, if_valid, s_zero32)
  next_status = Where (running, if_sampling, status_in)
  status_RetainedState = Squeeze (next_status, s_axis1)
"""
_BIAS = """
  bias_valid = GreaterOrEqual (logit_bias_ids, s_zero32)
  bias_index32 = Where (bias_valid, logit_bias_ids, s_zero32)
  bias_index = Cast <to = 7> (bias_index32)
  bias_zero = Constant <value_float = 0.0> ()
  bias_values = Where (bias_valid, logit_bias, bias_zero)
  with_bias = ScatterElements <axis = 1, reduction = "add"> (MASKED, bias_index, bias_values)
"""
_MASK = """
  m_shape = Shape (logits)
  m_one = Constant <value_int = 1> ()
  m_zero = Constant <value_int = 0> ()
  m_vocab = Gather <axis = 0> (m_shape, m_one)
  m_ids = Range (m_zero, m_vocab, m_one)
  m_32 = Constant <value_int = 32> ()
  m_word = Div (m_ids, m_32)
  m_bit = Mod (m_ids, m_32)
  m_words = Gather <axis = 1> (allowed_tokens, m_word)
  m_words64 = Cast <to = 7> (m_words)
  m_2_32 = Constant <value_int = 4294967296> ()
  m_unsigned = Mod (m_words64, m_2_32)
  m_u = Cast <to = 13> (m_unsigned)
  m_bits = Cast <to = 13> (m_bit)
  m_shifted = BitShift <direction = "RIGHT"> (m_u, m_bits)
  m_64 = Cast <to = 7> (m_shifted)
  m_two = Constant <value_int = 2> ()
  m_odd = Mod (m_64, m_two)
  m_allowed = Cast <to = 9> (m_odd)
  m_minus_infinity = Constant <value_float = -inf> ()
  masked = Where (m_allowed, logits, m_minus_infinity)
"""
_LOG = """
  log_all = LogSoftmax <axis = -1> (logits)
"""
_TOP = """
  top_count = Constant <value_ints = [TOP_M]> ()
  top_logprobs, top_ids64 = TopK <axis = -1> (log_all, top_count)
  top_logprob_ids = Cast <to = 6> (top_ids64)
"""


def _tensors(specs: Any, sizes: Mapping[str, int]) -> str:
    def one(spec: TensorSpec) -> str:
        dims = ", ".join(str(sizes.get(str(axis), axis)) for axis in spec.axes)
        return (
            f"{_TYPES.get(spec.dtype, spec.dtype)}[{dims}] {spec.name}"
            if dims
            else f"{spec.dtype} {spec.name}"
        )

    return ", ".join(one(spec) for spec in specs)


def _graph(
    name: str, spec: GraphSpec, sizes: Mapping[str, int], body: str, weights: Mapping[str, Any]
) -> onnx.ModelProto:
    retained = [
        TensorSpec(retained_name(state.name), state.dtype, state.axes, "")
        for state in spec.states
        if not state.read_only
    ]
    inputs = _tensors((*spec.inputs, *spec.states), sizes)
    outputs = _tensors((*spec.outputs, *retained), sizes)
    head = '<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>'
    text = f"{head}\n{name} ({inputs}) => ({outputs}) {{{body}}}"
    model = onnx.parser.parse_model(text.replace(".0.", DOT))
    _restore_dots(model)
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), key) for key, value in weights.items()
    )
    return model


def _restore_dots(model: onnx.ModelProto) -> None:
    for value in (*model.graph.input, *model.graph.output):
        value.name = value.name.replace(DOT, ".0.")
    for node in model.graph.node:
        node.input[:] = [name.replace(DOT, ".0.") for name in node.input]
        node.output[:] = [name.replace(DOT, ".0.") for name in node.output]


def _sampler_body(interface: Interface) -> str:
    features = interface.features
    masked = "masked" if features.allowed_tokens else "logits"
    biased = "with_bias" if features.logit_bias else masked
    body = _SAMPLER.replace("BIASED", biased).replace("PAD_ID", str(PAD))
    bias = _BIAS.replace("MASKED", masked) if features.logit_bias else ""
    mask = _MASK if features.allowed_tokens else ""
    cut = body.index("  shape_v = ")
    body = body[:cut] + mask + bias + body[cut:]
    if features.logprobs or features.top_logprobs:
        body += _LOG
    if features.logprobs:
        body += "  logprobs = GatherElements <axis = 1> (log_all, safe_token)\n"
    if features.top_logprobs:
        body += _TOP.replace("TOP_M", str(features.top_logprobs))
    if features.probs:
        body += "  probs = Identity (p)\n"
    counting = [
        FILTER_STATES[name].name for name in features.filters if name in STATEFUL_FILTERS
    ]  # the row's tokens
    body += "  emitted_flat = Squeeze (emitted_float, s_axis1)\n" if counting else ""
    for name in counting:
        body += f"  {name}_RetainedState = Add ({name}, emitted_flat)\n"
    return body


@functools.cache
def _initial_state(interface: Interface) -> onnx.ModelProto:
    """Built once: its noise takes longer than all the rest of a package."""
    return ir.to_proto(build_initial_state(interface))


def fake_graphs(interface: Interface, weights: Mapping[str, Any]) -> dict[str, onnx.ModelProto]:
    """File name → graph, for every graph of a package with this interface. A decoder that checks guesses is that of
    qsample's own pass, with its sampler, over this model."""
    if interface.features.num_speculative_tokens:
        graphs = fake_graphs(interface.without_guesses(), weights)
        decoder = graphs["decoder.onnx"]
        for value in (*decoder.graph.input, *decoder.graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param == CAPACITY:
                    dim.Clear()
                    dim.dim_value = GUESSING_CAPACITY
        model = ir.from_proto(onnx.shape_inference.infer_shapes(decoder))
        check_guesses(model, interface, PAD, pack=True)
        return graphs | {"decoder.onnx": ir.to_proto(model)}
    sizes = interface.sizes
    graphs = {"initial_state.onnx": _initial_state(interface)}
    weights = {**weights, **image_weights(interface)}
    if interface.image is not None:
        graphs["vision.onnx"] = vision_graph(interface)
    model_body = with_images(_MODEL, interface)
    body = model_body + (_sampler_body(interface) if interface.features.sampler else "")
    graphs["decoder.onnx"] = _graph("decoder", interface.decoder, sizes, body, weights)
    if not interface.features.sampler:
        body = _sampler_body(interface)
        if ADJUSTED_LOGITS in interface.sampler.outputs:
            body += "  adjusted_logits = Identity (logits)\n"
        graphs["sampler.onnx"] = _graph("sampler", interface.sampler, sizes, body, {})
    return graphs
