"""Keywords of transformers that mean nothing here: which values are harmless, and what to do instead.

`GENERATE` has those of `generate`, fields of a GenerationConfig and what a tokenizer returns among them; what changes
the tokens and is not implemented stands in `sampling_params`. `FROM_PRETRAINED` has those of `from_pretrained`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

from qsample.errors import unknown


class Refusal(NamedTuple):
    """harmless: values that ask for nothing, beside None. instead: what to do, as the end of a sentence."""

    harmless: tuple[Any, ...]
    instead: str


def _all(names: str, instead: str, *harmless: Any) -> dict[str, Refusal]:
    return {name: Refusal(harmless, instead) for name in names.split()}


_NO_BEAMS: Final = "it belongs to beam search, which qsample does not do; leave it out"
_NO_DRAFTS: Final = "it belongs to assisted generation, which qsample does not do; leave it out"
_NO_ENCODER: Final = "it belongs to encoder-decoder models, and this is a decoder; leave it out"
_NO_GUIDANCE: Final = "it belongs to classifier-free guidance, which qsample does not do; leave it out"
_NO_INPUT: Final = "the graph takes token ids and a mask alone; take it out of what the tokenizer returns"
_NO_FORWARD: Final = "it belongs to a call of the model itself, which the graph replaces; leave it out"
_NOT_RETURNED: Final = "the graph does not return it; leave it out"
_CACHE: Final = "the cache is part of the graph; leave it out, or bound it with ctx_len when the package is compiled"
_COMPILED: Final = "there is nothing left to compile at run time; leave it out, and see model.compile()"

GENERATE: Final[Mapping[str, Refusal]] = {
    **_all("early_stopping", _NO_BEAMS, False),
    **_all("length_penalty", _NO_BEAMS, 1),
    **_all("low_memory", _NO_BEAMS, False),
    **_all("use_mtp is_assistant", _NO_DRAFTS, False),
    **_all("num_assistant_tokens", _NO_DRAFTS, 20),
    **_all("num_assistant_tokens_schedule", _NO_DRAFTS, "constant"),
    **_all("assistant_confidence_threshold", _NO_DRAFTS, 0.4),
    **_all("assistant_lookbehind target_lookbehind", _NO_DRAFTS, 10),
    **_all("assistant_model assistant_tokenizer assistant_early_exit assistant_ensemble_weight", _NO_DRAFTS),
    **_all("speculation_type max_matching_ngram_size", _NO_DRAFTS),
    **_all("renormalize_logits", "give True or False; both leave the tokens as they are", True, False),
    **_all("use_cache", "give True or False; the graph always keeps its cache", True, False),
    **_all("disable_compile", "give True or False; nothing is compiled at run time", True, False),
    **_all("cache_implementation", _CACHE, "dynamic"),
    **_all("cache_config max_cache_len past_key_values cache_position", _CACHE),
    **_all("return_legacy_cache", _CACHE, False),
    **_all("compile_config", _COMPILED),
    **_all("continuous_batching_config", "qsample.runtime.Engine does continuous batching; see docs/serving.md"),
    **_all(
        "output_scores",
        "export with return_pdfs=True for the distribution of each token (`probs`), or with logprobs=True or "
        "top_logprobs=M for log-probabilities",
        False,
    ),
    **_all("output_logits", "export with logprobs=True or top_logprobs=M, the log-softmax of the logits", False),
    **_all("output_attentions output_hidden_states output_router_logits", _NOT_RETURNED, False),
    **_all("return_dict", "the graph has outputs of its own; leave it out, or see return_dict_in_generate", True),
    **_all(
        "prefix_allowed_tokens_fn",
        "export with allowed_tokens=True and give allowed_tokens a function, which writes the mask of every next token",
    ),
    **_all("synced_gpus", "a package runs in one process; leave it out", False),
    **_all("negative_prompt_ids negative_prompt_attention_mask", _NO_GUIDANCE),
    **_all("custom_generate", "the decode loop is qsample's own; leave it out"),
    **_all("trust_remote_code", "a package runs no code of its model; give it to from_pretrained", False),
    **_all("decoder_start_token_id decoder_input_ids decoder_attention_mask encoder_outputs", _NO_ENCODER),
    **_all("token_type_ids special_tokens_mask offset_mapping overflowing_tokens", _NO_INPUT),
    **_all("overflow_to_sample_mapping num_truncated_tokens length word_ids", _NO_INPUT),
    **_all("position_ids", "positions follow from attention_mask; leave it out"),
    **_all("inputs_embeds", "the graph embeds the tokens itself; give input_ids"),
    **_all("pixel_values input_features input_values images audio videos", "a package takes text alone; leave it out"),
    **_all("labels head_mask logits_to_keep num_items_in_batch is_causal seq_idx", _NO_FORWARD),
    **_all("cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k", _NO_FORWARD),
    **_all("device", "load(path, provider) or from_pretrained(..., provider=...) chooses it; leave it out"),
}  # fmt: skip
# What a GenerationConfig notes about itself.
BOOKKEEPING: Final = ("transformers_version", "_from_model_config", "_commit_hash", "_original_object_hash")

_WEIGHTS: Final = "weights stay mapped from their files, during the export and later; leave it out"
_DEVICE: Final = "provider= chooses the device that generate runs on; compile() makes a package for it"
_QUANTIZED: Final = 'quantize when you compile: model.compile(weights="int4") or "int8"'
_KERNELS: Final = "attention runs through ONNX Runtime's operators; leave it out"
_ONE_DEVICE: Final = "a package runs on one device; leave it out"
_DOWNLOAD: Final = "download the repository first (huggingface_hub.snapshot_download) and give its folder"
_SAFE: Final = "weights are read from safetensors, and by transformers where there are none; leave it out"
_TRANSFORMERS: Final = "qsample loads the model itself; give the folder or hub id of a checkpoint that has it already"

FROM_PRETRAINED: Final[Mapping[str, Refusal]] = {
    **_all("device_map", _DEVICE),
    **_all("low_cpu_mem_usage", _WEIGHTS, False),
    **_all("max_memory offload_folder", _WEIGHTS),
    **_all("offload_buffers offload_state_dict disable_mmap", _WEIGHTS, False),
    **_all("attn_implementation experts_implementation", _KERNELS, "eager"),
    **_all("use_kernels allow_all_kernels use_flash_attention_2", _KERNELS, False),
    **_all("kernel_config", _KERNELS),
    **_all("quantization_config", _QUANTIZED),
    **_all("load_in_8bit load_in_4bit", _QUANTIZED, False),
    **_all("tp_plan tp_size device_mesh distributed_config", _ONE_DEVICE),
    **_all("subfolder", _DOWNLOAD, ""),
    **_all("force_download", _DOWNLOAD, False),
    **_all("variant gguf_file code_revision mirror", _DOWNLOAD),
    **_all("resume_download", "downloads always resume; leave it out", True, False),
    **_all("proxies", "set HTTPS_PROXY in the environment"),
    **_all("use_auth_token", "it is called token here, as in transformers today"),
    **_all("use_safetensors weights_only", _SAFE, True),
    **_all("from_tf from_flax", "save it with transformers as safetensors first", False),
    **_all("config state_dict key_mapping fusion_config model_kwargs", _TRANSFORMERS),
    **_all("ignore_mismatched_sizes", "weights that do not fit are refused; leave it out", False),
    **_all("output_loading_info", "a model that lacks weights is refused; leave it out", False),
    **_all("return_unused_kwargs", "unknown keywords are refused; leave it out", False),
    **_all("adapter_name adapter_kwargs", "give adapter= the folder or hub id of the LoRA adapter", "default", {}),
    **_all("generation_config", "give it to generate, or change model.generation_config"),
    **_all("use_cache", "the graph always keeps its cache; leave it out", True),
    **_all("tqdm_class", "export and compile take progress=, a function; leave it out"),
    **_all("max_length max_new_tokens temperature top_k top_p do_sample", "give it to generate"),
}


def take_refused(table: Mapping[str, Refusal], given: dict[str, Any]) -> None:
    """Take the keywords of `table` out of `given`. Raises ValueError for one that asks for something."""
    for name in [name for name in given if name in table]:
        value, refusal = given.pop(name), table[name]
        if value is not None and not _is_one_of(value, refusal.harmless):
            raise ValueError(f"{name} is {_brief(value)}, which has no meaning in qsample: {refusal.instead}")


def check_from_pretrained(given: Mapping[str, Any], own: Collection[str]) -> None:
    """Check the keywords that `from_pretrained` does not have. own: those that it has.

    Raises ValueError for one of transformers that asks for something, TypeError for one that nobody knows.
    """
    rest = dict(given)
    take_refused(FROM_PRETRAINED, rest)
    if rest:
        raise TypeError(unknown("from_pretrained has no argument", next(iter(rest)), own))


def _is_one_of(value: Any, harmless: tuple[Any, ...]) -> bool:
    # An array compares with anything to an array; True equals 1.
    return any(type(value) in (type(item), float) and value == item for item in harmless)


def _brief(value: Any) -> str:
    simple = isinstance(value, str | int | float | list | tuple | dict)
    return f"{value!r:.60}" if simple else f"of type {type(value).__name__}"
