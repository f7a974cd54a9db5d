"""A checkpoint's own tokenizer.json, where a class of transformers has parts of its own.

Since transformers 5, many classes of tokenizers (Qwen2Tokenizer, GPT2Tokenizer, LlamaTokenizer, …)
take the vocabulary of tokenizer.json, and build normaliser, pre-tokenizer, decoder and the options
of the model themselves. Which class a checkpoint gets follows from lists of model types and names,
so that a model may read other tokens than it was trained with. transformers 4 read the file as it
is, and so does its general class, which transformers 5 takes for models whose class is known as
wrong; issues 45920, 45812 and 45488 of transformers have such models.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils.hub import cached_file

from qsample.checkpoints.source import HubOptions
from qsample.errors import QsampleError
from qsample.package.disk.untrusted import read_json
from qsample.request.text.chat import TOKENIZER_CONFIG_FILE
from qsample.request.text.tokenizer import TOKENIZER_FILE

# Option of tokenizer_config.json → the attribute of the file's normaliser or pre-tokenizer that it
# replaces, in transformers 4 as in 5.
_STATED_OPTIONS: Final = {
    "add_prefix_space": "add_prefix_space",
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
# What pre-tokenizers and normalisers treat differently: digits, contractions, case, blanks, line
# feeds, accents in one code point and in two, compatibility forms, scripts, code, emoji.
_PROBES: Final = (
    "In 1999",
    "2024",
    "650841823",
    " 1,234.56",
    "don't",
    "WE'LL",
    "camelCase",
    "a  b   c",
    " \n\n  x",
    "\tif x:\r\n",
    "café",
    "cafe\u0301",
    "ﬁ ½",
    "Straße",
    "Привет, мир",
    "こんにちは。",
    "你好世界",
    "مرحبا",
    "नमस्ते",
    "x+=y[0]->z;",
    "https://a.b/c?d=e",
    "🙂👍🏽",
)
_MOST_NAMED: Final = 6


def keep_own_parts(tokenizer: Any, name: str, hub: HubOptions) -> None:
    """Give `tokenizer` the normaliser, the pre-tokenizer, the decoder and the model of its
    checkpoint's tokenizer.json. Added and special tokens, the template and what surrounds a text
    stay, and options that tokenizer_config.json states. A warning says which words were others.

    Args:
        tokenizer: what AutoTokenizer made of the checkpoint; changed in place.
        name: the folder or hub id that it was made of.
        hub: how to find its files.

    Raises:
        QsampleError: tokenizer_config.json or tokenizer.json cannot be read.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or _has_no_parts(type(tokenizer)):
        return
    file = cached_file(
        name, TOKENIZER_FILE, _raise_exceptions_for_missing_entries=False, **hub.downloading()
    )
    if file is None:
        return  # the class made the tokenizer of the files of another library
    path = Path(file)
    stated = _stated(path.with_name(TOKENIZER_CONFIG_FILE))
    if stated.get("fix_mistral_regex"):
        return  # transformers corrects the pre-tokenizer of a file that is known as wrong
    own = _read(path)
    backend = tokenizer.backend_tokenizer
    before = _tokens(backend)
    if own.get_vocab(with_added_tokens=False) != backend.get_vocab(with_added_tokens=False):
        _warn(tokenizer, name, before, _tokens(own), "the package has those of the class")
        return
    parts = own.normalizer, own.pre_tokenizer
    for option, attribute in _STATED_OPTIONS.items():
        for part in parts:
            if stated.get(option) is not None and hasattr(part, attribute):
                setattr(part, attribute, stated[option])
    backend.normalizer, backend.pre_tokenizer = parts
    backend.model = own.model
    if own.decoder is not None:
        backend.decoder = own.decoder
    _warn(tokenizer, name, before, _tokens(backend), "the package has those of the file")


def _has_no_parts(kind: type[PreTrainedTokenizerFast]) -> bool:
    """Whether a class reads tokenizer.json as it is."""
    return kind.__init__ is PreTrainedTokenizerFast.__init__


def _stated(path: Path) -> Mapping[str, Any]:
    """The contents of a tokenizer_config.json; empty without the file."""
    if not path.is_file():
        return {}
    try:
        stated = read_json(path, infinities=True)
    except ValueError as error:
        raise QsampleError(f"cannot read {path}: {error}") from error
    return stated if isinstance(stated, dict) else {}


def _read(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises Exception itself
        raise QsampleError(f"{path} cannot be read: {error}") from error


def _tokens(backend: Tokenizer) -> list[list[int]]:
    """The token ids of each probe."""
    return [backend.encode(probe, add_special_tokens=False).ids for probe in _PROBES]


def _warn(
    tokenizer: PreTrainedTokenizerFast,
    name: str,
    before: list[list[int]],
    after: list[list[int]],
    which: str,
) -> None:
    """Warn if some words have other tokens."""
    changed = [
        repr(probe)
        for probe, class_ids, file_ids in zip(_PROBES, before, after, strict=True)
        if class_ids != file_ids
    ]
    if not changed:
        return
    more = f" and {len(changed) - _MOST_NAMED} others" if len(changed) > _MOST_NAMED else ""
    warnings.warn(
        f"{type(tokenizer).__name__} of transformers {version('transformers')} cuts texts in another way than the "
        f"{TOKENIZER_FILE} of {name}, with other tokens for {', '.join(changed[:_MOST_NAMED])}{more}; {which}",
        stacklevel=4,
    )
