"""The module from which the model's part of the decode graph is traced: token ids in, logits out.

`apply_transforms` prepares a Hugging Face causal LM, and `state_shapes` finds its states in a run
of two tokens."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from qsample.contract.interface import Interface, KeyValueShape, RecurrentShape
from qsample.contract.tensors import (
    IMAGE_FEATURES,
    IMAGE_ROWS,
    POSITION_OFFSETS,
    RUNNING,
    TensorSpec,
    retained_name,
)
from qsample.errors import UnsupportedModelError
from qsample.request.huggingface.facade import dtype_name
from qsample.transforms.attention import (
    eager_masks_over_buffers,
    use_own_attention,
    use_retained_attention,
)
from qsample.transforms.cache import DecodeContext, RetainedCache
from qsample.transforms.experts import replace_own_experts, route_experts
from qsample.transforms.images import text_model, use_images, with_offsets
from qsample.transforms.markers import ADAPTED, ADAPTED_PATH, MARKER_DOMAIN
from qsample.transforms.positions import (
    RowPositions,
    check_named_parts,
    real_rotary_embeddings,
    use_rope_of_capacity,
    use_row_positions,
    use_row_query_scales,
    use_row_windows,
)
from qsample.transforms.recurrent import retain_recurrent_states
from qsample.transforms.repeated_layers import DecoderLayers


def apply_transforms(
    model: PreTrainedModel, context: DecodeContext, *, images: bool = False
) -> None:
    """Change `model` in place for decoder calls of `context`, with or without images.

    Outside of these calls, it computes the same as before.

    Raises UnsupportedModelError for a model that the installed transformers defines in another way
    than the transforms know.
    """
    check_named_parts(model)
    route_experts(model)
    replace_own_experts(model)
    use_row_positions(model, context)
    use_row_windows(model, context)
    use_rope_of_capacity(model, context)
    use_row_query_scales(model, context)
    retain_recurrent_states(model, context)
    use_retained_attention(model, context)
    use_last_token_head(model, context)
    if images:
        use_images(model, context)


class LastTokenHead(nn.Module):
    """The head, applied to the hidden state of each row's last real token; outside a decoder call,
    the head itself.

    The head is the largest MatMul of a prefill, and only one result of a row is used.
    """

    def __init__(self, head: nn.Module, context: DecodeContext) -> None:
        super().__init__()
        self.head = head
        self.context = context

    @property
    def weight(self) -> Tensor:
        """[V, hidden]; transformers reads it if the head is tied to the embedding."""
        weight = self.head.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def bias(self) -> Tensor | None:
        """[V]; None: the head has no bias."""
        bias = getattr(self.head, "bias", None)
        assert bias is None or isinstance(bias, Tensor)
        return bias

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [B, S, hidden]. Returns [B, 1, V] in a decoder call, otherwise [B, S, V]."""
        lengths = self.context.input_lengths
        if lengths is not None:
            last = (lengths.to(torch.int64) - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
            # [B, 1, hidden] and not [B, hidden]: a 2-D product becomes Gemm, and weight quantizers
            # skip Gemm.
            hidden = torch.gather(hidden, 1, last)
        logits: Tensor = self.head(hidden)
        return logits


def use_last_token_head(model: PreTrainedModel, context: DecodeContext) -> None:
    """Put a LastTokenHead in place of the model's head."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no output embeddings (no language-model head)"
        )
    if isinstance(head, LastTokenHead):
        head.context = context  # an earlier export had another
    else:
        model.set_output_embeddings(LastTokenHead(head, context))  # type: ignore[no-untyped-call]


@contextmanager
def linear_layers_marked(root: nn.Module) -> Iterator[None]:
    """While open, the trace of `root` has a marker after each call of a linear layer, but for the
    model's head; its metadata has the layer's name in `root`."""
    heads = {module.head for module in root.modules() if isinstance(module, LastTokenHead)}
    paths: dict[nn.Module, str] = {
        module: path
        for path, module in root.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module not in heads
    }
    mark = _Mark(paths)  # one for all layers: they stay equal to each other
    hooks = [layer.register_forward_hook(mark.after) for layer in paths]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Mark:
    """Puts the markers into a trace.

    paths: the name of each layer.
    """

    def __init__(self, paths: dict[nn.Module, str]) -> None:
        self._paths = paths

    def after(self, layer: nn.Module, arguments: tuple[Any, ...], result: Tensor) -> Tensor | None:
        """The result of `layer`, marked, or None to leave it as it is."""
        if not torch.onnx.is_in_onnx_export() or len(arguments) != 1:
            return None
        marked: Tensor = torch.onnx.ops.symbolic(
            f"{MARKER_DOMAIN}::{ADAPTED}",
            [arguments[0], result],
            dtype=result.dtype,
            shape=result.shape,
            version=1,
            metadata_props={ADAPTED_PATH: self._paths[layer]},
        )
        return marked


# transformers 5.24 calls the cache of every model `cache`; older versions had another name in
# Mamba-like models.
_CACHE_NAMES: Final = ("cache", "cache_params")
_ADVICE: Final = "choose a model of a type that docs/architectures.md lists as passed"


def state_shapes(
    model: PreTrainedModel, context: DecodeContext
) -> tuple[tuple[KeyValueShape, ...], tuple[RecurrentShape, ...]]:
    """Find the cache shape of every attention layer and of every other state, in the order of the
    layers.

    `context.buffered` and `context.masked` are decided here. A model whose attention does not go
    through transformers' attention interface gets its own attention back.

    Raises:
        UnsupportedModelError: a layer attends to later tokens, or keeps a state of another kind.
    """
    try:
        return _probe(model, context)
    except UnsupportedModelError:
        if context.buffered:
            raise
    use_own_attention(model, context)
    return _probe(model, context)


def _probe(
    model: PreTrainedModel, context: DecodeContext
) -> tuple[tuple[KeyValueShape, ...], tuple[RecurrentShape, ...]]:
    name = type(model).__name__
    context.clear()
    context.masked.clear()
    context.states_of.clear()
    try:
        with torch.no_grad():
            cache = _cache(model, context)
            run_model(
                model, context, torch.zeros(1, 2, dtype=torch.int64), torch.arange(2)[None], cache
            )
        present = dict(sorted(context.present.items()))
        recurrent = _recurrent_shapes(context, cache)
    except UnsupportedModelError:
        raise
    except Exception as error:
        # A layer that meets a cache of an unexpected kind may raise any exception.
        raise UnsupportedModelError(
            f"{name} keeps its state in a way that retained buffers cannot serve ({type(error).__name__}: {error}); "
            f"{_ADVICE}"
        ) from error
    finally:
        context.clear()
    if not present and not recurrent:
        raise UnsupportedModelError(
            f"{name} puts nothing into the cache, so it has no state to retain; {_ADVICE}"
        )
    numbered = list(present) == list(range(len(present)))
    key_values = tuple(
        KeyValueShape(
            key.shape[1], max(key.shape[-1], value.shape[-1]), None if numbered else layer
        )
        for layer, (key, value) in present.items()
    )
    return key_values, recurrent


def _recurrent_shapes(context: DecodeContext, cache: RetainedCache) -> tuple[RecurrentShape, ...]:
    """The states that layers made in `cache`."""
    shapes = []
    for layer, kind, index in sorted({key for keys in context.states_of.values() for key in keys}):
        state = getattr(cache.layers[layer], f"{kind}s")[index]
        shapes.append(
            RecurrentShape(layer, kind, index, tuple(state.shape[1:]), dtype_name(state.dtype))
        )
    return tuple(shapes)


def run_model(
    model: PreTrainedModel,
    context: DecodeContext,
    ids: torch.Tensor,
    positions: torch.Tensor,
    cache: RetainedCache | None = None,
) -> Any:
    """The output of `model` over `cache`, by default a new cache of `context`. ids, positions: [B,
    S] int64."""
    parameters = inspect.signature(model.forward).parameters
    name = next((name for name in _CACHE_NAMES if name in parameters), "past_key_values")
    inputs: dict[str, Any] = {
        "input_ids": ids,
        name: cache or _cache(model, context),
        "use_cache": True,
    }
    if context.position_offsets is not None:
        inputs["position_ids"] = with_offsets(positions, context.position_offsets)
    elif _takes_positions(model):
        inputs["position_ids"] = positions + _first_position(model)
    # Every key of the buffers: the causal mask decides which of them a query sees.
    keys = context.capacity if context.buffered and context.past else ids.shape[1]
    inputs["attention_mask"] = torch.ones(ids.shape[0], keys, dtype=torch.int64)
    return model(**inputs)


def _cache(model: PreTrainedModel, context: DecodeContext) -> RetainedCache:
    return RetainedCache(context, _count_layers(model))


def _count_layers(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


def _takes_positions(model: PreTrainedModel) -> bool:
    """Whether `forward` takes `position_ids`, or hands unknown arguments on to a text model that
    does."""
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" in parameters:
        return True
    hands_on = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    return hands_on and not any(isinstance(module, RowPositions) for module in model.modules())


def _first_position(model: PreTrainedModel) -> int:
    """The number of the first position: RoBERTa and its like begin after the padding's position."""
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            return int(module.padding_idx) + 1  # type: ignore[arg-type]
    return 0


class Decoder(nn.Module):
    """`model` over the retained cache: token ids in, logits of each row's next token out."""

    def __init__(
        self, model: PreTrainedModel, context: DecodeContext, interface: Interface
    ) -> None:
        super().__init__()
        self.model = model
        self._context = context
        self._recurrent = interface.recurrent
        self._vocab_size = interface.vocab_size
        names = [spec.name for spec in interface.cache_states]
        self._cache_names = names[: len(names) - len(self._recurrent)]
        self._layers = interface.cache_layers
        owners = [
            *(layer for layer in self._layers for _ in range(2)),
            *(state.layer for state in self._recurrent),
        ]
        states: dict[int, list[TensorSpec]] = {}
        for layer, state in zip(owners, interface.cache_states, strict=True):
            states.setdefault(layer, []).append(state)
        self.layers = DecoderLayers(_count_layers(model), states, context, inside=text_model(model))

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One call: gives `logits` [B, V] float32 and the next value of each cache state. `inputs`
        are `input_ids` [B, S] int64, `input_lengths` [B] int32, `lengths` [B] int32,
        `Interface.image_inputs` and the cache states; with recurrent states, `status` [B] int32 as
        well."""
        ids = inputs["input_ids"]
        lengths = inputs["lengths"]
        batch, length = ids.shape
        past = [inputs[name] for name in self._cache_names]
        positions = (lengths[:, None] + torch.arange(length, dtype=torch.int32)[None]).to(
            torch.int64
        )

        context = self._context
        context.input_lengths = inputs["input_lengths"]
        context.positions = positions
        context.image_rows = inputs.get(IMAGE_ROWS.name)
        context.image_features = inputs.get(IMAGE_FEATURES)
        context.position_offsets = inputs.get(POSITION_OFFSETS.name)
        if past:
            capacity = past[0].shape[2]
            # Padding beyond the capacity has no position; its results are never used.
            context.positions = positions = positions.clamp(max=capacity - 1)
            context.seqlens_k = lengths + (length - 1)
            context.total_length = _total_length(batch, length, capacity, lengths)
            context.past = dict(
                zip(self._layers, zip(past[::2], past[1::2], strict=True), strict=True)
            )
        if self._recurrent:
            context.states = {
                (state.layer, state.kind, state.index): inputs[state.name]
                for state in self._recurrent
            }
            context.running = inputs["status"] == RUNNING
        masks = eager_masks_over_buffers(positions, capacity) if context.buffered else nullcontext()
        try:
            with masks, real_rotary_embeddings(self.model):
                output = run_model(self.model, context, ids, positions)
            present = [tensor for layer in self._layers for tensor in context.present[layer]]
            states = {
                retained_name(state.name): context.next_states[state.layer, state.kind, state.index]
                for state in self._recurrent
            }
        finally:
            context.clear()
        # squeeze is a view; indexing would copy the logits.
        logits = output.logits.squeeze(1).to(torch.float32)
        if logits.shape[-1] > self._vocab_size:
            logits = logits[:, : self._vocab_size]
        caches = dict(zip(map(retained_name, self._cache_names), present, strict=True))
        return {"logits": logits, **caches, **states}


def _total_length(batch: int, length: int, capacity: int, lengths: Tensor) -> Tensor:
    """GroupQueryAttention's total_sequence_length, scalar int32. The operator accepts a batch of
    prompts only as a first prefill, total == S; a single row, or a token a row, if it is the
    capacity. For later pieces of several rows it is more than S, and the operator refuses them: it
    would read them as first pieces, over the rows' beginnings."""
    any_position = torch.logical_or(
        torch.scalar_tensor(batch) == 1, torch.scalar_tensor(length) == 1
    )
    longest = torch.scalar_tensor(length) + lengths.max()
    return torch.where(any_position, torch.scalar_tensor(capacity), longest).to(torch.int32)
