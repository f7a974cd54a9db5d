"""What lies beside a foreign decoder: its configurations, as the manifest and the runtime read them, and its
tokenizer."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from qsample.errors import QsampleError
from qsample.exporters.foreign.location import GENAI_CONFIG, Location
from qsample.huggingface.generation_config import GENERATION_CONFIG_FILE
from qsample.manifest import TokenIds
from qsample.text.chat import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE
from qsample.text.tokenizer import TOKENIZER_FILE

_CONFIG: Final = "config.json"
_TOKENIZER_FILES: Final = (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, "special_tokens_map.json", TEMPLATE_FILE)
_CONTEXT: Final = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "context_length")
# Of a genai_config.json's "search", under generation_config.json's names.
_SEARCH: Final = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the files beside a decoder say; None = nothing. config: config.json, of a text model. genai: the "model" of
    genai_config.json."""

    config: dict[str, Any]
    generation: dict[str, Any]
    genai: dict[str, Any]
    search: dict[str, Any]

    @property
    def context(self) -> int | None:
        """The positions that the model knows, at most."""
        stated = [owner.get(name) for owner in (self.config, self.genai) for name in _CONTEXT]
        sizes = [size for size in stated if isinstance(size, int) and size > 0]
        return min(sizes) if sizes else None

    @property
    def head_dim(self) -> int | None:
        size = self.config.get("head_dim") or (self.genai.get("decoder") or {}).get("head_size")
        if not size and self.config.get("hidden_size") and self.config.get("num_attention_heads"):
            size = self.config["hidden_size"] // self.config["num_attention_heads"]
        return size if isinstance(size, int) and size > 0 else None

    @property
    def vocab_size(self) -> int | None:
        size = self.config.get("vocab_size") or self.genai.get("vocab_size")
        return size if isinstance(size, int) and size > 0 else None

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type") or self.genai.get("type") or "unknown")

    @property
    def window(self) -> int | None:
        """The attention window that some layer has; None = none, or not stated."""
        config = self.config
        layers = config.get("layer_types")
        is_used = config.get("use_sliding_window", True) and (layers is None or "sliding_attention" in layers)
        sliding = (self.genai.get("decoder") or {}).get("sliding_window") or {}
        stated = config.get("sliding_window") if is_used else None
        size = stated or (sliding.get("window_size") if isinstance(sliding, dict) else None)
        return size if isinstance(size, int) and size > 0 else None

    def token_ids(self, vocab_size: int) -> TokenIds:
        """From generation_config.json, genai_config.json, config.json; ids that the vocabulary lacks are left out."""

        def find(name: str) -> Any:
            owners = (self.generation, self.genai, self.config)
            return next((owner[name] for owner in owners if owner.get(name) is not None), None)

        def known(token: Any) -> bool:
            return isinstance(token, int) and 0 <= token < vocab_size

        eos = find("eos_token_id")
        eos_ids = tuple(token for token in (eos if isinstance(eos, list) else [eos]) if known(token))
        bos, pad = find("bos_token_id"), find("pad_token_id")
        if not known(pad):
            pad = eos_ids[0] if eos_ids else 0
        return TokenIds(pad=int(pad), bos=bos if known(bos) else None, eos=eos_ids)


def read_settings(location: Location) -> Settings:
    """The configurations beside the decoder. Raises QsampleError for one that cannot be read."""
    config = location.read(_CONFIG)
    text = config.get("text_config")
    genai = location.read(GENAI_CONFIG)
    model, search = genai.get("model"), genai.get("search")
    return Settings(
        config | text if isinstance(text, dict) else config,
        location.read(GENERATION_CONFIG_FILE),
        model if isinstance(model, dict) else {},
        search if isinstance(search, dict) else {},
    )


def write_files(
    location: Location, settings: Settings, token_ids: TokenIds, vocab_size: int, tokenizer: str | None, folder: Path
) -> None:
    """Copy configurations and tokenizer into `folder`.

    tokenizer: "auto" for the one beside the decoder, another folder, or None for a package of token ids only. Raises
    QsampleError for a tokenizer that does not fit.
    """
    if (config := location.find(_CONFIG)) is not None:
        shutil.copyfile(config, folder / _CONFIG)
    generation = _generation_config(settings, token_ids)
    (folder / GENERATION_CONFIG_FILE).write_text(
        json.dumps(generation, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
    if tokenizer is None:
        return
    source = location if tokenizer == "auto" else Location(location.file, (Path(tokenizer),), tokenizer, ())
    if source.find(TOKENIZER_FILE) is None:
        if tokenizer != "auto":
            raise QsampleError(
                f"{tokenizer} has no {TOKENIZER_FILE}; give the folder of a tokenizer in that form, or none"
            )
        warnings.warn(
            f"{location.name} has no {TOKENIZER_FILE}: the package takes token ids only; give tokenizer= a folder that "
            "has one",
            stacklevel=4,
        )
        return
    for name in _TOKENIZER_FILES:
        if (path := source.find(name)) is not None:
            shutil.copyfile(path, folder / name)
    _check_tokenizer(folder / TOKENIZER_FILE, vocab_size)


def _generation_config(settings: Settings, token_ids: TokenIds) -> dict[str, Any]:
    """generation_config.json: its own, else what genai_config.json says in its place."""
    own = dict(settings.generation)
    if not own and settings.search.get("do_sample"):
        own = {name: settings.search[name] for name in _SEARCH if settings.search.get(name) is not None}
    own |= {"pad_token_id": token_ids.pad}
    if token_ids.bos is not None:
        own["bos_token_id"] = token_ids.bos
    own["eos_token_id"] = [*token_ids.eos] or None
    return own


def _check_tokenizer(path: Path, vocab_size: int) -> None:
    try:
        size = Tokenizer.from_file(str(path)).get_vocab_size()
    except Exception as error:  # tokenizers raises Exception itself
        raise QsampleError(f"{path.name} cannot be read: {error}") from error
    if size > vocab_size:
        raise QsampleError(
            f"the tokenizer has {size} tokens and the decoder's head only {vocab_size}; give the tokenizer that "
            "belongs to it, with tokenizer= (--tokenizer)"
        )
