"""Keywords and attributes of transformers that qsample lacks, each with the alternative."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

from qsample.errors import shown, unknown


class Refusal(NamedTuple):
    """A refused argument.

    Attributes:
        instead: the advice, which completes a sentence.
        neutral: the values that ask for nothing, besides None.
    """

    instead: str
    neutral: tuple[Any, ...] = ()

    def applies_to(self, value: Any) -> bool:
        """Whether `value` asks for something. True and 1 are different values, 1 and 1.0 are
        equal."""
        value = _as_builtin(value)
        if not isinstance(value, _BUILTIN_TYPES):
            return value is not None
        for other in self.neutral:
            if isinstance(value, bool) is isinstance(other, bool) and value == other:
                return False
        return True


def refusals(names: str, instead: str, *neutral: Any) -> dict[str, Refusal]:
    """The same refusal for several `names`, separated by spaces."""
    return dict.fromkeys(names.split(), Refusal(instead, neutral))


def without_refused(table: Mapping[str, Refusal], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` without the names of `table`. Raises ValueError that lists the names whose value asks
    for something."""
    rest: dict[str, Any] = {}
    messages: list[str] = []
    for name, value in given.items():
        if name not in table:
            rest[name] = value
        elif table[name].applies_to(value):
            messages.append(
                f"{name} is {_brief(value)}, which is not supported: {table[name].instead}"
            )
    if messages:
        raise ValueError("; ".join(messages))
    return rest


_BUILTIN_TYPES: Final = (bool, int, float, str, list, tuple, dict)


def _as_builtin(value: Any) -> Any:
    """`value`; as a number or a list of Python if it is an array or a tensor with at most one
    element."""
    size = math.prod(getattr(value, "shape", ()))
    if size <= 1 and callable(getattr(value, "tolist", None)):
        return value.tolist()
    return value


def _brief(value: Any) -> str:
    """A value in a message; the type of an object that would be long."""
    value = _as_builtin(value)
    if isinstance(value, _BUILTIN_TYPES):
        return shown(value, 60)
    return f"of type {type(value).__name__}"


_NO_BEAMS: Final = "it belongs to beam search, which qsample does not do; leave it out"
_NO_DRAFTS: Final = (
    "only prompt lookup guesses tokens; leave it out, or give prompt_lookup_num_tokens to a package that was "
    "compiled with num_speculative_tokens"
)
_MAX_NGRAM_TOKENS: Final = 8  # The graph compares no longer n-grams.
_NO_ENCODER: Final = "it belongs to encoder-decoder models, and this is a decoder; leave it out"
_NO_INPUT: Final = (
    "the graph only takes token ids and a mask; take it out of the tokenizer's result"
)
_PIXELS: Final = (
    "the package makes the pixels itself; "
    "give images= with the prompt, a text or the processor's input_ids"
)
_NOT_RETURNED: Final = "the graph does not return it; leave it out"
_CACHE: Final = "the cache is part of the graph; leave it out, or bound it with ctx_len when the package is compiled"
_NO_COMPILATION: Final = "nothing is compiled at run time; leave it out, and see model.compile()"


def _unsupported_setting(name: str, instead: str, *neutral: Any) -> Refusal:
    """The refusal of a field of a generation_config. instead: the alternative; "" for none."""
    without = f"give {name}=None to go without it (the tokens then differ from transformers')"
    return Refusal(f"{instead}, or {without}" if instead else without, neutral)


# Refused arguments of `generate`, fields of a GenerationConfig, and further results of a tokenizer.
GENERATE: Final[Mapping[str, Refusal]] = {
    **refusals("early_stopping", _NO_BEAMS, False),
    **refusals("length_penalty", _NO_BEAMS, 1),
    **refusals("low_memory", _NO_BEAMS, False),
    **refusals("use_mtp is_assistant", _NO_DRAFTS, False),
    **refusals("num_assistant_tokens", _NO_DRAFTS, 20),
    **refusals("num_assistant_tokens_schedule", _NO_DRAFTS, "constant"),
    **refusals("assistant_confidence_threshold", _NO_DRAFTS, 0.4),
    **refusals("assistant_lookbehind target_lookbehind", _NO_DRAFTS, 10),
    **refusals("assistant_model assistant_early_exit assistant_ensemble_weight speculation_type", _NO_DRAFTS),
    **refusals(
        "max_matching_ngram_size",
        f"the graph compares 2 to {_MAX_NGRAM_TOKENS} tokens; give at most {_MAX_NGRAM_TOKENS}, or leave it out",
        *range(1, _MAX_NGRAM_TOKENS + 1),
    ),
    # vLLM's.
    **refusals("use_beam_search", _NO_BEAMS, False),
    **refusals("best_of", "give num_return_sequences, the number of rows of each prompt", 1),
    **refusals(
        "logprobs",
        "a package that was exported with logprobs=True or top_logprobs=M returns them with every token, in `logprobs` "
        "and `top_logprobs`; leave it out",
    ),
    **refusals("structured_outputs guided_decoding", "give grammar, a result of model.grammar(json=...)"),
    **refusals("detokenize", "token_ids has the tokens, and texts the texts; leave it out", True),
    **refusals("logits_processors", "give logits_processor", []),
    **refusals("renormalize_logits", "give True or False; both leave the tokens as they are", True, False),
    **refusals("use_cache", "give True or False; the graph always keeps its cache", True, False),
    **refusals("disable_compile", "give True or False; nothing is compiled at run time", True, False),
    **refusals("cache_implementation", _CACHE, "dynamic"),
    **refusals("cache_config max_cache_len past_key_values", _CACHE),
    **refusals("return_legacy_cache", _CACHE, False),
    **refusals("compile_config", _NO_COMPILATION),
    **refusals("continuous_batching_config", "qsample.runtime.Engine does continuous batching; see docs/serving.md"),
    **refusals(
        "output_scores",
        "export with return_pdfs=True for the distribution of each token (`probs`), or with logprobs=True or "
        "top_logprobs=M for log-probabilities",
        False,
    ),
    **refusals("output_logits", "export with logprobs=True or top_logprobs=M, the log-softmax of the logits", False),
    **refusals("output_attentions output_hidden_states", _NOT_RETURNED, False),
    **refusals("return_dict", "the graph has other outputs; leave it out, or see return_dict_in_generate", True),
    **refusals(
        "prefix_allowed_tokens_fn",
        "export with allowed_tokens=True and give allowed_tokens a function that writes the mask of every next token",
    ),
    **refusals("synced_gpus", "a package runs in a single process; leave it out", False),
    **refusals("trust_remote_code", "a package runs no code of its model; give it to from_pretrained", False),
    **refusals("decoder_start_token_id", _NO_ENCODER),
    **refusals("token_type_ids", _NO_INPUT),
    **refusals("position_ids", "positions follow from attention_mask; leave it out"),
    **refusals("inputs_embeds", "the graph embeds the tokens itself; give input_ids"),
    **refusals("pixel_values", _PIXELS),
    **refusals("device", "load(path, provider) or from_pretrained(..., provider=...) chooses it; leave it out"),
    # QEfficient's.
    **refusals("device_id device_ids", "compile(provider=...) chooses the device; leave it out", [0]),
    **refusals("runtime_ai100", "generate runs the compiled package; leave it out", True),
    **refusals("prompt_to_lora_id_mapping", "give each row its adapter's name: SamplingParams(adapter=name)"),
    **refusals("stream", "give a streamer, such as transformers.TextStreamer(tokenizer)", False),
    **refusals("iteration", "call generate again, or measure with `qsample bench`", 1),
    **refusals("automation enable_debug_logs write_io is_tlm", "see the attributes of generate's result", False),
    **refusals("write_io_dir comp_ctx_lengths_prefill comp_ctx_lengths_decode", "leave it out"),
}  # fmt: skip
# Fields of a generation_config that change the tokens, and that qsample does not implement.
UNSUPPORTED_SETTINGS: Final[Mapping[str, Refusal]] = {
    name: _unsupported_setting(name, instead, *neutral)
    for name, instead, *neutral in (
        ("num_beams", "temperature=0 takes the likeliest token each time", 1),
        ("num_beam_groups", "", 1),
        ("diversity_penalty", "", 0),
        ("num_return_sequences", "it is an argument of generate and of Engine.add_requests", 1),
        ("penalty_alpha", "", 0),
        ("dola_layers", ""),
        ("encoder_repetition_penalty", "", 1),
        ("encoder_no_repeat_ngram_size", "", 0),
        ("force_words_ids", "allowed_tokens says which tokens may come next", []),
        ("constraints", "allowed_tokens says which tokens may come next", []),
        ("begin_suppress_tokens", "", []),
        ("forced_bos_token_id", ""),
        ("forced_eos_token_id", ""),
        ("exponential_decay_length_penalty", ""),
        ("remove_invalid_values", "", False),
        ("guidance_scale", "", 1),
        ("watermarking_config", ""),
        ("token_healing", "", False),
        ("stop_strings", "it is an argument of generate and of Engine.add_request", [], ()),
        ("max_time", "it is an argument of generate and of Engine.add_request"),
        ("top_h", ""),
    )
}

# Refused arguments of transformers' apply_chat_template.
APPLY_CHAT_TEMPLATE: Final = {
    **refusals(
        "sanitize_control_tokens truncation return_assistant_tokens_mask", "leave it out", False
    ),
    **refusals(
        "padding", "leave it out; generate takes prompts of different lengths", False, "do_not_pad"
    ),
    **refusals("max_length tokenizer_kwargs", "leave it out"),
}

# Fields in which a GenerationConfig describes its file. They ask for nothing.
BOOKKEEPING: Final = (
    "transformers_version",
    "_from_model_config",
    "_commit_hash",
    "_original_object_hash",
)

_WEIGHTS: Final = "weights stay mapped from their files, during the export and later; leave it out"
_QUANTIZE_LATER: Final = 'quantize when you compile: model.compile(weights="int4") or "int8"'
_ONE_DEVICE: Final = (
    "compile(num_devices=N) cuts a model between layers, for N devices; leave it out"
)
_DOWNLOAD: Final = (
    "download the repository first (huggingface_hub.snapshot_download) and give its folder"
)
_TRANSFORMERS: Final = (
    "qsample loads the model itself; give the folder or hub id of a checkpoint that has it already"
)

# Refused arguments of `from_pretrained`.
FROM_PRETRAINED: Final[Mapping[str, Refusal]] = {
    **refusals("max_memory", _WEIGHTS),
    **refusals("quantization_config", _QUANTIZE_LATER),
    **refusals("load_in_8bit load_in_4bit", _QUANTIZE_LATER, False),
    **refusals("tp_plan tp_size", _ONE_DEVICE),
    **refusals("subfolder", _DOWNLOAD, ""),
    **refusals("force_download", _DOWNLOAD, False),
    **refusals("variant", _DOWNLOAD),
    **refusals("proxies", "set HTTPS_PROXY in the environment"),
    **refusals("use_auth_token", "it is called token here, as in transformers today"),
    **refusals("from_tf from_flax", "save it with transformers as safetensors first", False),
    **refusals("config state_dict", _TRANSFORMERS),
    **refusals(
        "adapter_name adapter_kwargs",
        "give adapter= the folder or hub id of the LoRA adapter",
        "default",
        {},
    ),
    **refusals("generation_config", "give it to generate, or change model.generation_config"),
    **refusals("tqdm_class", "export and compile take progress=, a function; leave it out"),
    **refusals(
        "max_length max_new_tokens temperature top_k top_p do_sample", "give it to generate"
    ),
    # QEfficient's.
    **refusals(
        "continuous_batching", "give True or False; rows of any package come and go", True, False
    ),
    **refusals("full_batch_size", "give it to compile"),
    **refusals("max_seq_len_cached", "give compile ctx_len, the tokens that a row holds"),
    **refusals("num_hidden_layers", _TRANSFORMERS),
    **refusals("enable_proxy", "leave it out", False),
}

# These only affect how transformers loads and executes the model. The graph has its own kernels and
# cache, and its weights stay mapped from safetensors, so any value is accepted.
IGNORED_KEYWORDS: Final = frozenset(
    {
        "attn_implementation",
        "experts_implementation",
        "use_flash_attention_2",
        "use_kernels",
        "allow_all_kernels",
        "kernel_config",
        "low_cpu_mem_usage",
        "offload_folder",
        "offload_buffers",
        "offload_state_dict",
        "use_cache",
        "use_safetensors",
        "weights_only",
        "resume_download",
        # QEfficient's.
        "layerwise",
        "kv_offload",
    }
)


def check_from_pretrained(given: Mapping[str, Any], own: Collection[str]) -> None:
    """Check keywords that `from_pretrained` does not have.

    Args:
        given: the keywords with their values.
        own: the names of the keywords that it has, for the suggestion.

    Raises ValueError for a keyword of transformers that asks for something, TypeError for an
    unknown keyword.
    """
    rest = without_refused(FROM_PRETRAINED, given).keys() - IGNORED_KEYWORDS
    if rest:
        raise TypeError(unknown("from_pretrained has no argument", next(iter(rest)), own))


NO_GRAMMARS: Final = (
    "the model takes no grammars; export it with grammars=True (--grammars, or --for-serving)"
)
NO_ADAPTERS: Final = (
    "the model takes no LoRA adapters; export it with max_loras (--max-loras), the most adapters that a batch may use, "
    "or merge the adapter at export"
)
_ADAPTERS: Final = (
    "generate(..., adapter=name) chooses an adapter of load_adapter(name, path), and from_pretrained(..., adapter=) "
    "merges one"
)
_LAYERS: Final = (
    "it is an ONNX graph, without layers of torch. Train or change the checkpoint in transformers and export it again; "
    "from_pretrained(..., adapter=) merges a LoRA adapter into a checkpoint"
)


# Attributes of transformers' models that qsample's models lack.
ABSENT_ATTRIBUTES: Final[Mapping[str, Refusal]] = {
    **refusals(
        "add_adapter set_adapter enable_adapters disable_adapters delete_adapter", _ADAPTERS
    ),
    **refusals("active_adapters get_adapter_state_dict merge_and_unload", _ADAPTERS),
    **refusals("parameters", f"it has model.device and model.dtype; {_LAYERS}"),
    **refusals("named_parameters buffers named_buffers state_dict load_state_dict", _LAYERS),
    **refusals(
        "modules named_modules children named_children get_submodule apply model lm_head", _LAYERS
    ),
    **refusals(
        "get_input_embeddings get_output_embeddings resize_token_embeddings tie_weights", _LAYERS
    ),
    **refusals("gradient_checkpointing_enable enable_input_require_grads zero_grad", _LAYERS),
    **refusals("layers embed_tokens norm", _LAYERS),
    **refusals(
        "forward", "its graph is compiled already, and generate runs it; leave torch.compile out"
    ),
    **refusals(
        "get_memory_footprint num_parameters", "`qsample inspect` shows the sizes of its package"
    ),
    **refusals(
        "compute_transition_scores",
        "export with logprobs=True: the output's logprobs are the scores of its tokens",
    ),
    **refusals(
        "generate_batch", "qsample.runtime.Engine does continuous batching; see docs/serving.md"
    ),
    **refusals("push_to_hub", "upload its folder with huggingface_hub.upload_folder"),
}
