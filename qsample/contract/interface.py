"""What fixes a package's graphs: a model's dimensions and the features chosen at export; and the `GraphSpec` of each,
made of the tensors of `tensors.py`."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, Final

from qsample.checks import check_fields, checked, choice, flag, integer, is_integer, refuse
from qsample.contract.storage import stored
from qsample.contract.tensors import (
    ADAPTER,
    ADAPTER_RANKS,
    ADJUSTED_LOGITS,
    ALLOWED_TOKENS,
    BATCH,
    CACHES_VERSION,
    CAPACITY,
    CAPACITY_INPUT,
    CONTRACT_VERSION,
    EMIT,
    EXTRA_PARAMETERS,
    FILTER_ORDERS,
    FILTER_STATES,
    GRID,
    GUESSES,
    HEIGHT,
    HUGGING_FACE,
    IMAGE_FEATURES,
    IMAGE_ROWS,
    IMAGE_TOKENS,
    IMAGES_VERSION,
    INPUT_IDS,
    INPUT_LENGTHS,
    KV_CACHE_DTYPES,
    LENGTHS,
    LOGIT_BIAS_INPUTS,
    LOGITS,
    LOGPROBS,
    MASK_WORDS,
    MODEL_DTYPES,
    MOST_SPECULATIVE_TOKENS,
    NEW_IDS,
    NEW_LOGPROBS,
    NEW_TOKENS,
    NEW_TOP_LOGPROB_OUTPUTS,
    NEXT_IDS,
    NUM_DRAFT_TOKENS,
    NUM_NEW,
    PARAMETERS,
    PATCHES,
    PIXEL_VALUES,
    POSITION_OFFSETS,
    PROBS,
    SAMPLER_STATES,
    SEARCHED_ROWS,
    SEED,
    SPECULATION_INPUTS,
    STATUS,
    STEPS_VERSION,
    TILES,
    TOP_LOGPROB_OUTPUTS,
    TOP_LOGPROBS,
    VOCAB,
    WIDTH,
    TensorSpec,
    retained_name,
)

MOST_LORAS: Final = 1024
MOST_LORA_RANK: Final = 4096
DEFAULT_LORA_RANK: Final = 16
MOST_TOP_LOGPROBS: Final = 20  # alternatives of a token that OpenAI's requests may ask for


def _filters(name: str, value: Any) -> tuple[str, ...]:
    """In the contract's order: equal features compare as equal."""
    known = tuple(EXTRA_PARAMETERS)
    if not isinstance(value, Collection) or any(item not in known for item in value):
        refuse(name, value, f"a list of {', '.join(known)}")
    return tuple(item for item in known if item in value)


def _rank(name: str, value: Any, least: int = 0) -> int:
    if not is_integer(value, least, MOST_LORA_RANK):
        refuse(name, value, f"the largest rank of an adapter, 1 to {MOST_LORA_RANK}")
    return int(value)


@dataclass(frozen=True, slots=True)
class Features:
    """The options of an export; an absent feature adds no input, output or operator.

    The `help` of a field says what it is. More about some:

    Attributes:
        sampler: the graph returns next-token ids; without it `decoder.onnx` returns logits and `sampler.onnx` samples.
        top_logprobs: 0 switches it off.
        filters: names of `EXTRA_PARAMETERS`, in its order: their inputs, and for some a state.
        num_speculative_tokens: G, the most tokens that a step may guess for a row and check; 0: none. compile adds it.
        max_loras: 0 for none, and no such inputs.
        max_lora_rank: 0 without max_loras.
    """

    sampler: bool = flag(
        True,
        help="Bake the sampler in, or return logits.",
        argument="include_sampler",
        flag="--sampler/--no-sampler",
    )
    logit_bias: bool = flag(False, help="Take a bias on chosen tokens.")
    allowed_tokens: bool = flag(False, help="Take a token mask (guided decoding).")
    logprobs: bool = flag(False, help="Also return each token's log-probability.")
    top_logprobs: int = integer(
        0,
        0,
        math.inf,
        "an integer >= 0 (0 = off)",
        help="Also return the M likeliest tokens.",
        metavar="M",
    )
    probs: bool = flag(
        False, help="Also return the sampled distribution, `probs`.", argument="return_pdfs"
    )
    filters: tuple[str, ...] = checked(
        (),
        _filters,
        help=f"Also have {', '.join(EXTRA_PARAMETERS)}; may be repeated, or a,b,c.",
        flag="--filter",
        metavar="NAME",
        repeated=str,
    )
    filter_order: str = choice(
        HUGGING_FACE,
        FILTER_ORDERS,
        help="Temperature before all filters, or last.",
        metavar="|".join(FILTER_ORDERS),
    )
    num_speculative_tokens: int = integer(
        0,
        0,
        MOST_SPECULATIVE_TOKENS,
        f"0 to {MOST_SPECULATIVE_TOKENS}",
        **stored(omitted=0),
    )
    max_loras: int = integer(
        0,
        0,
        MOST_LORAS,
        f"the most LoRA adapters that a batch may use, 1 to {MOST_LORAS}, or 0 for none",
        help="Take LoRA adapters at run time, N in a batch.",
        metavar="N",
        **stored(omitted=0),
    )
    max_lora_rank: int = checked(
        DEFAULT_LORA_RANK,
        _rank,
        help="Largest rank of such an adapter.",
        metavar="R",
        least=1,
        **stored(omitted=0),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        rank = _rank("max_lora_rank", self.max_lora_rank, 1) if self.max_loras else 0
        object.__setattr__(self, "max_lora_rank", rank)

    def for_serving(self) -> Features:
        """These, with all that a request of OpenAI's API may ask of a graph: biases, masks, log-probabilities; and
        with penalty_last_n, which clients of llama.cpp and ollama send: a batch that does not use it pays nothing."""
        most, filters = max(self.top_logprobs, MOST_TOP_LOGPROBS), (*self.filters, "penalty_last_n")
        return replace(
            self,
            logit_bias=True,
            allowed_tokens=True,
            logprobs=True,
            top_logprobs=most,
            filters=filters,
        )


@dataclass(frozen=True, slots=True)
class KeyValueShape:
    """The cache of an attention layer: `num_key_value_heads` (H) heads of `head_dim` (D). layer: its number in the
    model; by default its position among the attention layers, if all layers are. capacity: C, the newest tokens that
    its buffers hold, if the layer has a window and forgets old tokens; by default T."""

    num_key_value_heads: int = field(metadata=stored(least=1))
    head_dim: int = field(metadata=stored(least=1))
    layer: int | None = None
    capacity: int | None = field(default=None, metadata=stored(least=1, omitted=None))


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """A state of fixed size that a recurrent or convolutional layer keeps. `layer` is the layer's number in the model,
    `kind` "conv_state" or "recurrent_state", and `index` counts the layer's states of that kind. `shape` lacks the
    batch axis, the first. `dtype` is "float32" or the model's."""

    layer: int
    kind: str
    index: int
    shape: tuple[int, ...] = field(metadata=stored(least=1))
    dtype: str

    @property
    def name(self) -> str:
        """`past_key_values.{layer}.{kind}`, and `.{index}` from the second state on."""
        return f"past_key_values.{self.layer}.{self.kind}" + (
            f".{self.index}" if self.index else ""
        )


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """A linear layer that LoRA adapters may change: y + x A^T B, with the adapter's scale in B. x has `in_features`
    numbers, y `out_features`. path: PEFT's name of the layer: "model.layers.0.self_attn.q_proj"."""

    path: str
    in_features: int = field(metadata=stored(least=1))
    out_features: int = field(metadata=stored(least=1))

    @property
    def kind(self) -> str:
        """See `kind_of`."""
        return kind_of(self.path)

    def tensors(self, dtype: str) -> tuple[TensorSpec, TensorSpec]:
        """The matrices A and B of all bound adapters, one below the other."""
        ranks, (a, b) = ranks_axis(self.kind), adapter_names(self.path)
        return (
            TensorSpec(a, dtype, (ranks, self.in_features), "A of all bound adapters"),
            TensorSpec(
                b,
                dtype,
                (ranks, self.out_features),
                "B of all bound adapters, transposed, times its scale",
            ),
        )


def kind_of(path: str) -> str:
    """The last part of a layer's path, "q_proj"; all layers of a kind have the same number of ranks."""
    return path.rpartition(".")[2]


def ranks_axis(kind: str) -> str:
    """The axis of the ranks of all bound adapters in the layers of a kind."""
    return f"{ADAPTER_RANKS}.{kind}"


def adapter_names(path: str) -> tuple[str, str]:
    """The inputs with the matrices A and B of the layer at `path`."""
    return f"{path}.lora_A", f"{path}.lora_B"


def adapter_ids(kind: str) -> TensorSpec:
    """The input that tells the adapters apart in the layers of a kind."""
    return TensorSpec(
        f"adapter_ids.{kind}",
        "int32",
        (ranks_axis(kind),),
        "number of the adapter that each rank belongs to, from 1",
    )


@dataclass(frozen=True, slots=True)
class ImageShape:
    """How images enter the decoder.

    Attributes:
        width: C, numbers of a row of `image_features`: the hidden size times 1 + `deepstack`.
        deepstack: vectors of a row that are added to the hidden states after the first layers, one each.
        axial: positions have three parts (M-RoPE), and the decoder takes `position_offsets`.
        blockwise: the tokens of an image see each other: no piece of a prompt may end within a run of image rows.
        patch_values: numbers of a patch, if vision.onnx reads the patches of an image; 0: it reads tiles.
    """

    width: int
    deepstack: int = 0
    axial: bool = False
    blockwise: bool = False
    patch_values: int = 0

    def features(self, dtype: str) -> TensorSpec:
        """The rows that stand for images: the result of vision.onnx, and an input of the decoder."""
        return TensorSpec(
            IMAGE_FEATURES,
            dtype,
            (IMAGE_TOKENS, self.width),
            "what vision.onnx makes of images",
            off=0,
        )


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """The interface of an ONNX file: call inputs, retained states and outputs, in graph order. The graph's inputs are
    `inputs` then `states`; its outputs are `outputs`, then the next value of each state that is not read-only."""

    inputs: tuple[TensorSpec, ...]
    states: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def input_names(self) -> list[str]:
        return [spec.name for spec in (*self.inputs, *self.states)]

    @property
    def output_names(self) -> list[str]:
        return [*(spec.name for spec in self.outputs), *self.retained.values()]

    @property
    def results(self) -> tuple[TensorSpec, ...]:
        """`outputs`, and the next value of each state under the name of its output."""
        after = (
            replace(spec, name=retained_name(spec.name))
            for spec in self.states
            if not spec.read_only
        )
        return (*self.outputs, *after)

    @property
    def retained(self) -> dict[str, str]:
        """State input name → the output that holds its next value; the pair may share a buffer."""
        return {spec.name: retained_name(spec.name) for spec in self.states if not spec.read_only}


@dataclass(frozen=True, slots=True)
class Interface:
    """The dimensions and features that fix a package's graphs.

    Attributes:
        vocab_size: V, at least 1.
        key_values: an entry for each attention layer, in layer order.
        dtype: of the model, from MODEL_DTYPES.
        kv_cache_dtype: of keys and values, from KV_CACHE_DTYPES; by default the model's.
        captured: the decode graph can be captured and replayed: it has no control flow, but an input `searched_rows`.
        recurrent: an entry for each state of a recurrent or convolutional layer, in layer order.
        adapters: the layers that LoRA adapters may change; none without `features.max_loras`.
        image: of packages that read images.
    """

    vocab_size: int = field(metadata=stored(least=1))
    key_values: tuple[KeyValueShape, ...]
    dtype: str = "float32"
    features: Features = field(default_factory=Features)
    kv_cache_dtype: str | None = None
    captured: bool = False
    recurrent: tuple[RecurrentShape, ...] = ()
    adapters: tuple[AdapterTarget, ...] = field(default=(), metadata=stored(omitted=()))
    image: ImageShape | None = field(default=None, metadata=stored(omitted=None))

    def __post_init__(self) -> None:
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size is {self.vocab_size}; it must be at least 1")
        if self.dtype not in MODEL_DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; choose one of {', '.join(MODEL_DTYPES)}")
        if self.kv_cache_dtype not in (None, *KV_CACHE_DTYPES):
            raise ValueError(
                f"kv_cache_dtype is {self.kv_cache_dtype!r}; choose one of {', '.join(KV_CACHE_DTYPES)}"
            )
        if not 0 <= self.features.top_logprobs <= self.vocab_size:
            raise ValueError(
                f"top_logprobs is {self.features.top_logprobs}; it must be 0 to vocab_size ({self.vocab_size})"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """The named axes whose size the package fixes."""
        guesses = self.features.num_speculative_tokens
        return {
            VOCAB: self.vocab_size,
            MASK_WORDS: -(-self.vocab_size // 32),
            TOP_LOGPROBS: self.features.top_logprobs,
            GUESSES: guesses,
            NEW_TOKENS: guesses + 1,
            **{ranks_axis(kind): 0 for kind in self.adapter_kinds},  # unless adapters are bound
        }

    @property
    def contract_version(self) -> str:
        """The oldest version of the contract that has everything of these graphs."""
        if self.slides or self.kv_cache_dtype == "int4":
            return CACHES_VERSION
        if self.image is not None:
            return IMAGES_VERSION
        newer = self.features.num_speculative_tokens or self.adapters
        return STEPS_VERSION if newer else CONTRACT_VERSION

    def without_guesses(self) -> Interface:
        """The same with steps of one token, as in portable packages."""
        return replace(self, features=replace(self.features, num_speculative_tokens=0))

    @property
    def slides(self) -> bool:
        """Whether a layer with a window forgets old tokens."""
        return any(shape.capacity is not None for shape in self.key_values)

    @property
    def fixed_states(self) -> tuple[TensorSpec, ...]:
        """The states whose size does not grow with T. They belong to a row's newest token: it cannot go back."""
        return tuple(spec for spec in self.cache_states if CAPACITY not in spec.axes)

    @property
    def whole_up_to(self) -> int:
        """A row with at most so many tokens has all of them in its states of fixed size, and can go back to any of
        them: with caches of a window. -1: it cannot, or there are no such states."""
        capacities = [shape.capacity for shape in self.key_values if shape.capacity is not None]
        return -1 if self.recurrent else min(capacities, default=-1)

    @property
    def cache_layers(self) -> tuple[int, ...]:
        """The number of each layer that has keys and values."""
        return tuple(
            index if shape.layer is None else shape.layer
            for index, shape in enumerate(self.key_values)
        )

    @property
    def cache_states(self) -> tuple[TensorSpec, ...]:
        dtype, states = self.kv_cache_dtype or self.dtype, list[TensorSpec]()
        dtype, packed = ("uint8", 2) if dtype == "int4" else (dtype, 1)  # numbers in a byte
        for layer, shape in zip(self.cache_layers, self.key_values, strict=True):
            axes = (
                BATCH,
                shape.num_key_value_heads,
                shape.capacity or CAPACITY,
                shape.head_dim // packed,
            )
            for kind in ("key", "value"):
                states.append(
                    TensorSpec(
                        f"past_key_values.{layer}.{kind}", dtype, axes, f"{kind}s of layer {layer}"
                    )
                )
        for state in self.recurrent:
            meaning = f"{state.kind.replace('_', ' ')} of layer {state.layer}"
            states.append(TensorSpec(state.name, state.dtype, (BATCH, *state.shape), meaning))
        return tuple(states)

    @property
    def parameters(self) -> tuple[TensorSpec, ...]:
        """The per-row sampling inputs, features included."""
        specs: tuple[TensorSpec, ...] = PARAMETERS
        if self.features.logit_bias:
            specs += LOGIT_BIAS_INPUTS
        if self.features.allowed_tokens:
            specs += (ALLOWED_TOKENS,)
        for name in self.features.filters:
            specs += EXTRA_PARAMETERS[name]
        if self.features.num_speculative_tokens:
            specs += SPECULATION_INPUTS
        return specs

    @property
    def adapter_kinds(self) -> tuple[str, ...]:
        """The kinds of layers that adapters may change, in order."""
        return tuple(dict.fromkeys(target.kind for target in self.adapters))

    @property
    def adapter_inputs(self) -> tuple[TensorSpec, ...]:
        """Each row's adapter, then the matrices of all bound adapters."""
        if not self.adapters:
            return ()
        matrices = (spec for target in self.adapters for spec in target.tensors(self.dtype))
        return (ADAPTER, *map(adapter_ids, self.adapter_kinds), *matrices)

    @property
    def image_inputs(self) -> tuple[TensorSpec, ...]:
        """What the decoder takes of images; none in packages that read text only."""
        if self.image is None:
            return ()
        inputs = IMAGE_ROWS, self.image.features(self.dtype)
        return (*inputs, POSITION_OFFSETS) if self.image.axial else inputs

    @property
    def sampler_states(self) -> tuple[TensorSpec, ...]:
        """The states that the sampler keeps."""
        filters = self.features.filters
        return (
            *SAMPLER_STATES,
            *(FILTER_STATES[name] for name in filters if name in FILTER_STATES),
        )

    @property
    def sampler_outputs(self) -> tuple[TensorSpec, ...]:
        guesses = self.features.num_speculative_tokens > 0
        specs: tuple[TensorSpec, ...] = (
            (NEXT_IDS, NEW_IDS, NUM_NEW, NUM_DRAFT_TOKENS) if guesses else (NEXT_IDS,)
        )
        if self.features.logprobs:
            specs += (NEW_LOGPROBS if guesses else LOGPROBS,)
        if self.features.top_logprobs:
            specs += NEW_TOP_LOGPROB_OUTPUTS if guesses else TOP_LOGPROB_OUTPUTS
        if self.features.probs:
            specs += (PROBS,)
        return specs

    @property
    def token_outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs next to the token ids, each as it is for a single token a row."""
        return self.without_guesses().sampler_outputs[1:]

    @property
    def decoder(self) -> GraphSpec:
        """`decoder.onnx`: token ids in; next-token ids out (or logits, without the sampler)."""
        if self.features.sampler:
            inputs = (
                INPUT_IDS,
                INPUT_LENGTHS,
                *self.image_inputs,
                EMIT,
                *self._sampling,
                *self.adapter_inputs,
            )
            return GraphSpec(
                inputs, (*self.sampler_states, *self.cache_states), self.sampler_outputs
            )
        return self.model

    @property
    def _sampling(self) -> tuple[TensorSpec, ...]:
        return (*self.parameters, SEARCHED_ROWS) if self.captured else self.parameters

    @property
    def model(self) -> GraphSpec:
        """The model's part of the decode graph, up to the logits; all of `decoder.onnx` without the sampler. `lengths`
        and `status` are ordinary inputs here: the sampler advances them. A recurrent layer has to know which rows run,
        because a token that does not count would change its state; a cache only grows after `lengths`."""
        inputs: tuple[TensorSpec, ...] = (INPUT_IDS, INPUT_LENGTHS, *self.image_inputs, LENGTHS)
        inputs += (STATUS,) if self.recurrent else ()
        return GraphSpec((*inputs, *self.adapter_inputs), self.cache_states, (LOGITS,))

    @property
    def sampler(self) -> GraphSpec:
        """`sampler.onnx`: the sampler alone, logits in. Packages without a baked sampler run it on the host."""
        inputs = (LOGITS, INPUT_IDS, INPUT_LENGTHS, EMIT, *self._sampling)
        # Log-probabilities are of the logits as they came, and read them last: those may not be written over.
        reads_logits_last = self.features.logprobs or self.features.top_logprobs
        outputs = (
            self.sampler_outputs if reads_logits_last else (*self.sampler_outputs, ADJUSTED_LOGITS)
        )
        return GraphSpec(inputs, self.sampler_states, outputs)

    @property
    def vision(self) -> GraphSpec:
        """`vision.onnx`: the pixels of an image in, its rows of `image_features` out."""
        assert self.image is not None
        result = self.image.features(self.dtype)
        if self.image.patch_values:
            axes, meaning = (PATCHES, self.image.patch_values), "the patches of an image"
            return GraphSpec(
                (TensorSpec(PIXEL_VALUES, "float32", axes, meaning), GRID), (), (result,)
            )
        tiles = TensorSpec(
            PIXEL_VALUES, "float32", (TILES, 3, HEIGHT, WIDTH), "the tiles of an image"
        )
        return GraphSpec((tiles,), (), (result,))

    @property
    def initial_state(self) -> GraphSpec:
        """`initial_state.onnx`: seeds and capacity in; every state's starting value out, under the state's name."""
        return GraphSpec((SEED, CAPACITY_INPUT), (), (*self.sampler_states, *self.cache_states))

    @property
    def graphs(self) -> dict[str, GraphSpec]:
        """File name → interface, for every ONNX file of the package."""
        graphs = {"decoder.onnx": self.decoder, "initial_state.onnx": self.initial_state}
        if not self.features.sampler:
            graphs["sampler.onnx"] = self.sampler
        if self.image is not None:
            graphs["vision.onnx"] = self.vision
        return graphs
