"""The interface of a package's graphs: the model's dimensions and the features of the export, which
fix each `GraphSpec`."""

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
    GRAMMAR_DEADLINE,
    GRAMMAR_DRAFTS,
    GRAMMAR_STATE,
    GRAMMAR_TABLES,
    GRAMMARS_VERSION,
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
    LOGPROBS_MODES,
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
    PROMPT_LOGPROBS,
    PROMPT_RANKS,
    PROMPT_TOP_LOGPROB_OUTPUTS,
    RAW_LOGPROBS,
    REPLAY_ROWS,
    REPLAY_VERSION,
    SAMPLER_STATES,
    SCORED_IDS,
    SCORED_PLACES,
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
# OpenAI's requests may ask for this many alternatives of a token.
MOST_TOP_LOGPROBS: Final = 20


def _filters(name: str, value: Any) -> tuple[str, ...]:
    """The filters in the contract's order, so that equal features compare as equal."""
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
    """The options of an export. An absent feature adds no input, output or operator.

    The `help` of a field describes it. Some fields need more words:

    Attributes:
        sampler: Whether the graph returns next-token ids; without it, `decoder.onnx` returns
            logits, and `sampler.onnx` samples.
        top_logprobs: M; 0 switches it off.
        logprobs_mode: Whether `logprobs` and `top_logprobs` are of the model's own logits, or of the
            distribution that the token is drawn from, in vLLM's words. Without these outputs, it
            changes nothing.
        filters: Names in `EXTRA_PARAMETERS`, in its order. Each adds its inputs, and some add a
            state.
        prompt_logprobs: Whether a call can score the tokens of a prompt. It needs `sampler` and
            `logprobs`.
        num_speculative_tokens: G, the largest number of tokens that a step may guess for a row and
            check; 0 for none. `compile` adds it.
        max_loras: The largest number of LoRA adapters in a batch; 0 for none, which adds no inputs.
        max_lora_rank: The largest rank of an adapter; 0 without max_loras.
    """

    sampler: bool = flag(
        True,
        help="Bake the sampler in, or return logits.",
        argument="include_sampler",
        flag="--sampler/--no-sampler",
    )
    logit_bias: bool = flag(False, help="Take a bias on chosen tokens.")
    allowed_tokens: bool = flag(False, help="Take a token mask (guided decoding).")
    grammars: bool = flag(
        False, help="Take the tables of grammars, such as JSON schemas.", **stored(omitted=False)
    )
    logprobs: bool = flag(False, help="Also return each token's log-probability.")
    top_logprobs: int = integer(
        0,
        0,
        math.inf,
        "an integer >= 0 (0 = off)",
        help="Also return the M likeliest tokens.",
        metavar="M",
    )
    logprobs_mode: str = choice(
        RAW_LOGPROBS,
        LOGPROBS_MODES,
        help="Log-probabilities of the model's logits, or of what the sampler makes of them.",
        metavar="|".join(LOGPROBS_MODES),
        **stored(omitted=RAW_LOGPROBS),
    )
    prompt_logprobs: bool = flag(
        False, help="Also score whole pieces of prompts.", **stored(omitted=False)
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
        rank = _rank("max_lora_rank", self.max_lora_rank, 1) if self.max_loras > 0 else 0
        object.__setattr__(self, "max_lora_rank", rank)
        if self.prompt_logprobs and not (self.sampler and self.logprobs):
            refuse("prompt_logprobs", True, "it with include_sampler and logprobs, or False")

    def for_serving(self) -> Features:
        """These features, and all features that a request of OpenAI's API may need: biases, masks,
        grammars, log-probabilities.

        Clients of llama.cpp and ollama send penalty_last_n, which costs nothing in a batch that
        does not use it.
        """
        most = max(self.top_logprobs, MOST_TOP_LOGPROBS)
        filters = (*self.filters, "penalty_last_n")
        return replace(
            self,
            logit_bias=True,
            allowed_tokens=True,
            grammars=True,
            logprobs=True,
            top_logprobs=most,
            prompt_logprobs=self.sampler,
            filters=filters,
        )


# The features that are one of several words, rather than there or absent.
CHOICES: Final = ("filter_order", "logprobs_mode")


@dataclass(frozen=True, slots=True)
class KeyValueShape:
    """The cache of an attention layer.

    Attributes:
        num_key_value_heads: H, the number of key-value heads.
        head_dim: D, the number of values of a head.
        layer: The number of the layer in the model; None if all layers are attention layers.
        capacity: C, the number of newest tokens in the buffers, if the layer has a window and
            forgets old tokens; None for T.
    """

    num_key_value_heads: int = field(metadata=stored(least=1))
    head_dim: int = field(metadata=stored(least=1))
    layer: int | None = None
    capacity: int | None = field(default=None, metadata=stored(least=1, omitted=None))


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """A state of fixed size of a recurrent or convolutional layer.

    Attributes:
        layer: The number of the layer in the model.
        kind: "conv_state" or "recurrent_state".
        index: The number of the state among the layer's states of that kind.
        shape: The shape without the batch axis, which comes first.
        dtype: "float32" or the model's dtype.
    """

    layer: int
    kind: str
    index: int
    shape: tuple[int, ...] = field(metadata=stored(least=1))
    dtype: str

    @property
    def name(self) -> str:
        """`past_key_values.{layer}.{kind}`, and `.{index}` from the second state on."""
        suffix = f".{self.index}" if self.index != 0 else ""
        return f"past_key_values.{self.layer}.{self.kind}{suffix}"


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """A linear layer that LoRA adapters may change: y + x A^T B, with the adapter's scale in B.

    Attributes:
        path: PEFT's name of the layer, such as "model.layers.0.self_attn.q_proj".
        in_features: The number of values of x.
        out_features: The number of values of y.
    """

    path: str
    in_features: int = field(metadata=stored(least=1))
    out_features: int = field(metadata=stored(least=1))

    @property
    def kind(self) -> str:
        """See `kind_of`."""
        return kind_of(self.path)

    def tensors(self, dtype: str) -> tuple[TensorSpec, TensorSpec]:
        """The matrices A and B of all bound adapters, stacked along the ranks."""
        ranks = ranks_axis(self.kind)
        a, b = adapter_names(self.path)
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
    """The last part of a layer's path, "q_proj"; all layers of a kind have the same number of
    ranks."""
    return path.rpartition(".")[2]


def ranks_axis(kind: str) -> str:
    """The axis of the ranks of all bound adapters in the layers of a kind."""
    return f"{ADAPTER_RANKS}.{kind}"


def adapter_names(path: str) -> tuple[str, str]:
    """The names of the inputs with the matrices A and B of a layer."""
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
        width: C, the number of values in a row of `image_features`: the hidden size times 1 +
            `deepstack`.
        deepstack: The number of vectors of a row that are added to the hidden states, each after
            one of the first layers.
        axial: Whether positions have three parts (M-RoPE), and the decoder takes
            `position_offsets`.
        blockwise: Whether the tokens of an image see each other, so that no piece of a prompt may
            end within a run of image rows.
        patch_values: The number of values of a patch, if vision.onnx reads the patches of an image;
            0 if it reads tiles.
    """

    width: int
    deepstack: int = 0
    axial: bool = False
    blockwise: bool = False
    patch_values: int = 0

    def features(self, dtype: str) -> TensorSpec:
        """The rows that stand for images: the result of vision.onnx, and an input of the
        decoder."""
        return TensorSpec(
            IMAGE_FEATURES,
            dtype,
            (IMAGE_TOKENS, self.width),
            "what vision.onnx makes of images",
            off=0,
        )


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """The interface of an ONNX file, in graph order.

    The graph's inputs are `inputs`, then `states`. Its outputs are `outputs`, then the next value
    of each state that is not read-only.
    """

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
        """The output with the next value of each state, by the name of its input; the pair may
        share a buffer."""
        return {spec.name: retained_name(spec.name) for spec in self.states if not spec.read_only}


@dataclass(frozen=True, slots=True)
class Interface:
    """The dimensions and features that fix a package's graphs.

    Attributes:
        vocab_size: V, at least 1.
        key_values: An entry for each attention layer, in layer order.
        dtype: The dtype of the model, from MODEL_DTYPES.
        features: The options of the export.
        kv_cache_dtype: The dtype of keys and values, from KV_CACHE_DTYPES; None for the model's.
        captured: Whether the decode graph is for replay: it has no control flow, but the inputs
            `REPLAY_ROWS`.
        recurrent: An entry for each state of a recurrent or convolutional layer, in layer order.
        adapters: The layers that LoRA adapters may change; none without `features.max_loras`.
        image: How images enter the decoder; None for packages that read only text.
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
        sizes = {
            VOCAB: self.vocab_size,
            MASK_WORDS: -(-self.vocab_size // 32),
            TOP_LOGPROBS: self.features.top_logprobs,
            GUESSES: guesses,
            NEW_TOKENS: guesses + 1,
        }
        for kind in self.adapter_kinds:
            # No adapter is bound.
            sizes[ranks_axis(kind)] = 0
        return sizes

    @property
    def contract_version(self) -> str:
        """The oldest version of the contract that has all features of these graphs."""
        if self.captured:
            return REPLAY_VERSION
        if self.features.grammars:
            return GRAMMARS_VERSION
        if self.slides or self.kv_cache_dtype == "int4":
            return CACHES_VERSION
        if self.image is not None:
            return IMAGES_VERSION
        newer = self.features.num_speculative_tokens > 0 or self.adapters
        return STEPS_VERSION if newer else CONTRACT_VERSION

    def without_guesses(self) -> Interface:
        """The interface with steps of one token, as in portable packages."""
        return replace(self, features=replace(self.features, num_speculative_tokens=0))

    @property
    def slides(self) -> bool:
        """Whether a layer with a window forgets old tokens."""
        return any(shape.capacity is not None for shape in self.key_values)

    @property
    def fixed_states(self) -> tuple[TensorSpec, ...]:
        """The states whose size does not grow with T. They belong to a row's newest token: the row
        cannot go back."""
        return tuple(spec for spec in self.cache_states if CAPACITY not in spec.axes)

    @property
    def whole_up_to(self) -> int:
        """The largest number of tokens of a row that are all in its states of fixed size, with
        caches of a window.

        Such a row can go back to any of its tokens. It is -1 if a row cannot go back, or if there
        are no such states.
        """
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
        """Keys and values, then the states of recurrent and convolutional layers."""
        dtype = self.dtype if self.kv_cache_dtype is None else self.kv_cache_dtype
        values_per_number = 1
        if dtype == "int4":
            dtype = "uint8"
            values_per_number = 2
        states = list[TensorSpec]()
        for layer, shape in zip(self.cache_layers, self.key_values, strict=True):
            width = shape.head_dim // values_per_number
            capacity = CAPACITY if shape.capacity is None else shape.capacity
            axes = (BATCH, shape.num_key_value_heads, capacity, width)
            for kind in ("key", "value"):
                name = f"past_key_values.{layer}.{kind}"
                states.append(TensorSpec(name, dtype, axes, f"{kind}s of layer {layer}"))
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
        if self.features.grammars:
            specs += (GRAMMAR_DEADLINE,)
        for name in self.features.filters:
            specs += EXTRA_PARAMETERS[name]
        if self.features.num_speculative_tokens > 0:
            specs += SPECULATION_INPUTS
        return specs

    @property
    def grammar_tables(self) -> tuple[TensorSpec, ...]:
        """The tables of all bound grammars; none without the feature `grammars`."""
        if not self.features.grammars:
            return ()
        if self.features.num_speculative_tokens > 0:
            return (*GRAMMAR_TABLES, GRAMMAR_DRAFTS)
        return GRAMMAR_TABLES

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
        """The decoder's inputs for images; none in packages that read only text."""
        if self.image is None:
            return ()
        inputs: tuple[TensorSpec, ...] = (IMAGE_ROWS, self.image.features(self.dtype))
        if self.image.axial:
            inputs += (POSITION_OFFSETS,)
        return inputs

    @property
    def sampler_states(self) -> tuple[TensorSpec, ...]:
        """The states that the sampler keeps."""
        states = list(SAMPLER_STATES)
        if self.features.grammars:
            states.append(GRAMMAR_STATE)
        states += [FILTER_STATES[name] for name in self.features.filters if name in FILTER_STATES]
        return tuple(states)

    @property
    def sampler_outputs(self) -> tuple[TensorSpec, ...]:
        """The token ids, then the optional outputs."""
        guesses = self.features.num_speculative_tokens > 0
        specs: tuple[TensorSpec, ...] = (NEXT_IDS,)
        if guesses:
            specs += (NEW_IDS, NUM_NEW, NUM_DRAFT_TOKENS)
        if self.features.logprobs:
            specs += (NEW_LOGPROBS if guesses else LOGPROBS,)
        if self.features.top_logprobs > 0:
            specs += NEW_TOP_LOGPROB_OUTPUTS if guesses else TOP_LOGPROB_OUTPUTS
        if self.features.probs:
            specs += (PROBS,)
        return specs

    @property
    def token_outputs(self) -> tuple[TensorSpec, ...]:
        """The optional outputs, each with the shape for a single token of a row."""
        return self.without_guesses().sampler_outputs[1:]

    @property
    def prompt_outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs of a call that scores tokens of a prompt; none without the feature."""
        if not self.features.prompt_logprobs:
            return ()
        tops = PROMPT_TOP_LOGPROB_OUTPUTS if self.features.top_logprobs > 0 else ()
        return (PROMPT_LOGPROBS, PROMPT_RANKS, *tops)

    @property
    def scoring_decoder(self) -> GraphSpec:
        """`decoder.onnx` in a call that scores tokens of a prompt. Other calls know nothing of
        these inputs and outputs."""
        own = self.decoder
        inputs = (*own.inputs, SCORED_PLACES, SCORED_IDS)
        return replace(own, inputs=inputs, outputs=(*own.outputs, *self.prompt_outputs))

    @property
    def decoder(self) -> GraphSpec:
        """`decoder.onnx`: token ids in, next-token ids out; without the sampler, logits out."""
        if not self.features.sampler:
            return self.model
        inputs = (INPUT_IDS, INPUT_LENGTHS, *self.image_inputs, EMIT)
        inputs += (*self._sampling, *self.adapter_inputs)
        states = (*self.sampler_states, *self.cache_states)
        return GraphSpec(inputs, states, self.sampler_outputs)

    @property
    def _sampling(self) -> tuple[TensorSpec, ...]:
        rows = REPLAY_ROWS if self.captured else ()
        return (*self.parameters, *rows, *self.grammar_tables)

    @property
    def model(self) -> GraphSpec:
        """The model's part of the decode graph, up to the logits; without the sampler, it is all of
        `decoder.onnx`.

        `lengths` and `status` are ordinary inputs here, because the sampler advances them. A
        recurrent layer has to know which rows run, because a token that does not count would change
        its state; a cache only grows after `lengths`.
        """
        inputs: tuple[TensorSpec, ...] = (INPUT_IDS, INPUT_LENGTHS, *self.image_inputs, LENGTHS)
        if self.recurrent:
            inputs += (STATUS,)
        return GraphSpec((*inputs, *self.adapter_inputs), self.cache_states, (LOGITS,))

    @property
    def sampler(self) -> GraphSpec:
        """`sampler.onnx`: logits in, next-token ids out. Packages whose decoder has no sampler run
        it on the host."""
        inputs = (LOGITS, INPUT_IDS, INPUT_LENGTHS, EMIT, *self._sampling)
        outputs = self.sampler_outputs
        # Log-probabilities read the unchanged logits last, so that their memory cannot be reused.
        if not (self.features.logprobs or self.features.top_logprobs > 0):
            outputs += (ADJUSTED_LOGITS,)
        return GraphSpec(inputs, self.sampler_states, outputs)

    @property
    def vision(self) -> GraphSpec:
        """`vision.onnx`: the pixels of an image in, its rows of `image_features` out."""
        assert self.image is not None
        result = self.image.features(self.dtype)
        if self.image.patch_values > 0:
            axes = (PATCHES, self.image.patch_values)
            patches = TensorSpec(PIXEL_VALUES, "float32", axes, "the patches of an image")
            return GraphSpec((patches, GRID), (), (result,))
        tile_axes = (TILES, 3, HEIGHT, WIDTH)
        tiles = TensorSpec(PIXEL_VALUES, "float32", tile_axes, "the tiles of an image")
        return GraphSpec((tiles,), (), (result,))

    @property
    def initial_state(self) -> GraphSpec:
        """`initial_state.onnx`: seeds and capacity in, the starting value of every state out, under
        the state's name."""
        return GraphSpec((SEED, CAPACITY_INPUT), (), (*self.sampler_states, *self.cache_states))

    @property
    def graphs(self) -> dict[str, GraphSpec]:
        """The interface of every ONNX file of the package, by the name of the file."""
        graphs = {"decoder.onnx": self.decoder, "initial_state.onnx": self.initial_state}
        if not self.features.sampler:
            graphs["sampler.onnx"] = self.sampler
        if self.image is not None:
            graphs["vision.onnx"] = self.vision
        return graphs
