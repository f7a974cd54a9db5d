# ruff: noqa: RUF001 (letters that look like others)
"""The tokenizer, the chat templates and the stop tokens of a GGUF file, from its metadata.

A text gets the same tokens as in llama.cpp (llama-vocab.cpp), special tokens included, with one
exception: for tekken and gpt-4o, llama.cpp only approximates the expressions that cut a text into
words, and the models' own are used here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qsample.checks import is_integer, is_number
from qsample.errors import QsampleError, UnsupportedModelError, shown

if TYPE_CHECKING:
    from qsample.addons.formats.gguf.file import GgufFile

_KEY_PREFIX: Final = "tokenizer.ggml."
_TEMPLATE_KEY: Final = "tokenizer.chat_template"
# Types of tokens (llama_token_type).
_NORMAL: Final = 1
_UNKNOWN: Final = 2
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_SPACE: Final = "▁"
_MAX_TOKEN_LENGTH: Final = 1024  # characters
# Characters. Published templates have some 30,000 at most.
_MAX_TEMPLATE_LENGTH: Final = 1 << 20
_REMEDY: Final = (
    "give tokenizer= a folder or hub id that has the model's tokenizer, or tokenizer=None"
)
# The keys of special tokens by transformers' names.
_SPECIAL_KEYS: Final = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "pad": "padding",
    "sep": "seperator",
    "mask": "mask",
}
# The ids of special tokens that sentencepiece has unless the metadata say otherwise. llama.cpp has
# Falcon's id for every byte-level vocabulary, 11: in any other model that is a letter or a comma.
_SENTENCEPIECE_IDS: Final = {"bos": 1, "eos": 2, "unknown": 0}

# The texts of tokens at which llama.cpp stops.
_STOP_TEXTS: Final = (  # noqa: SIM905
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> "
    "<｜end▁of▁sentence｜> [e~["
).split()
# The texts that a special token may have if the metadata name no such token.
_TEXTS_BY_KEY: Final = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}

# The texts of tokens that llama.cpp takes for control tokens, whatever the file says, besides those
# at which it stops.
_INFILL_TEXTS: Final = (  # noqa: SIM905
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|> "
    "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|> "
    "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>"
).split()
_CONTROL_TEXTS: Final = frozenset(
    [*_STOP_TEXTS, *_INFILL_TEXTS, *(text for texts in _TEXTS_BY_KEY.values() for text in texts)]
)

# Regular expressions that cut a text into words. If there are several, each cuts the pieces that
# the one before it left.
_CONTRACTIONS: Final = r"'(?:[sdmtSDMT]|[lL][lL]|[vV][eE]|[rR][eE])"
_LINES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2: Final = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CHINESE: Final = "[一-龥ࠀ-一가-퟿]+"
# The letters that have a case, in the version of Unicode that the model was made with.
_CASED_LETTERS: Final = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ"
    "\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮ\u2cf2\u2cf3Ꙁ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇ"
    "Ꞌ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)


def _words(
    digits: str, signs: str = "", signs_end: str = r"[\r\n]*", letter: str = r"\p{L}"
) -> str:
    """The expression of Llama 3 and related models.

    Args:
        digits: the expression for numbers.
        signs: the characters, as in a class of an expression, that are not signs besides letters,
            digits and spaces.
        signs_end: the expression for what may follow signs.
        letter: the expression for a letter behind the first character of a word.
    """
    letters = rf"[^\r\n\p{{L}}\p{{N}}]?{letter}+"
    return rf"{_CONTRACTIONS}|{letters}|{digits}| ?[^\s\p{{L}}\p{{N}}{signs}]+{signs_end}|{_LINES}"


def _cased_words(digits: str, after: str = "") -> str:
    """The expression of o200k and related models: a capital letter begins a word.

    Args:
        digits: the expression for numbers.
        after: the expression for what a word may end with.
    """
    upper = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
    lower = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    before = r"[^\r\n\p{L}\p{N}]?"
    small_word = rf"{before}[{upper}]*[{lower}]+{after}"
    capital_word = rf"{before}[{upper}]+[{lower}]*{after}"
    return rf"{small_word}|{capital_word}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"


# The expressions by their name in tokenizer.ggml.pre.
_EXPRESSIONS: Final = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama3": (_words(r"\p{N}{1,3}"),),
    "qwen2": (_words(r"\p{N}"),),
    "qwen35": (_words(r"\p{N}", r"\p{M}", letter=r"[\p{L}\p{M}]"),),
    "minicpm5": (r"\p{N}{1,3}", _words(r"\p{N}+")),
    "seed-coder": (_words(r"\p{N}", r"\r\n", ""),),
    "tekken": (_cased_words(r"\p{N}"),),
    "gpt-4o": (_cased_words(r"\p{N}{1,3}", f"(?:{_CONTRACTIONS})?"),),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_CASED_LETTERS}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        _CHINESE,
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, r"\p{N}"),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}",
    ),
    "viking": (r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"),
}
# Other names of the same expressions.
_OTHER_NAMES: Final = {
    "gpt-2": "phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4",
    "smollm": "starcoder refact command-r codeshell exaone minerva-7b mellum2",
    "llama3": "llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe chatglm-bpe glm4 glm5",
    "qwen2": "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    "gpt-4o": "llama4 kanana2 talkie minimax-m2",
    "deepseek-v3": "hunyuan-dense joyai-llm hy_v4",
}
_EXPRESSION_NAMES: Final = {
    other: name for name, others in _OTHER_NAMES.items() for other in others.split()
}
_LLAMA3: Final = frozenset(
    {
        "llama3",
        "llama-v3",
        "llama-bpe",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
    }
)
# The tokenizers that begin a text with BOS unless the metadata say otherwise.
_WITH_BOS: Final = _LLAMA3 | {"tekken"}
# The tokenizers that take a word that is a token as it is, without merges.
_WITH_WHOLE_WORDS: Final = _WITH_BOS | {"glm4", "glm5", "minicpm5"}


def tokenizer_of(file: GgufFile) -> PreTrainedTokenizerFast:
    """The tokenizer, with the chat templates. Its tokens are exactly the file's.

    Raises:
        UnsupportedModelError: for a kind that is not known.
        QsampleError: for metadata that do not fit each other.
    """
    metadata = _Metadata(file)
    kind = metadata.value("model", str)
    build = _BUILDERS.get(kind)
    if build is None:
        raise UnsupportedModelError(
            f"{file.path}: {_KEY_PREFIX}model is {shown(kind)}; tokenizers of gpt2 (byte-level), llama "
            f"(sentencepiece) and gemma4 are read; {_REMEDY}"
        )
    default_ids = _SENTENCEPIECE_IDS if kind == "llama" else {}
    special: dict[str, str | None] = {}
    for name, key in _SPECIAL_KEYS.items():
        number = metadata.id(key, default_ids.get(key))
        special[f"{name}_token"] = None if number is None else metadata.tokens[number]
    # llama.cpp begins a text of Gemma 4 with BOS, whatever the metadata say.
    default_bos = kind != "gpt2" or metadata.value("pre", str, "default") in _WITH_BOS
    added = {
        "add_bos_token": kind == "gemma4" or metadata.value("add_bos_token", bool, default_bos),
        "add_eos_token": metadata.value("add_eos_token", bool, False),
    }
    for key, is_added in added.items():
        token = key.removeprefix("add_")
        if is_added and special[token] is None:
            if f"{_KEY_PREFIX}{token}_id" not in file.metadata:
                raise metadata.error(key, f"is true, and {token}_id is missing")
            added[key] = False  # the id says that there is no such token
    templates = metadata.templates()
    try:
        tokenizer = build(metadata, special["unk_token"])
        tokenizer.add_tokens(_added_tokens(metadata))
        return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=tokenizer,
            chat_template=templates,
            padding_side="left",
            clean_up_tokenization_spaces=False,
            **added,
            **special,
        )
    except QsampleError:
        raise
    except Exception as error:  # the libraries check the metadata in several ways
        raise metadata.error(
            "tokens", f"and the keys beside it make no tokenizer ({error})"
        ) from error


def stop_ids(file: GgufFile) -> list[int]:
    """The tokens at which llama.cpp stops, the end of a text first, and those of ollama's list; []
    for a file without tokens. Raises QsampleError for ids that are no integers."""
    metadata = _Metadata(file)
    if metadata.array("tokens", str) is None:
        return []
    default_eos = _SENTENCEPIECE_IDS["eos"] if metadata.value("model", str) == "llama" else None
    found = [metadata.id("eos", default_eos), metadata.id("eot"), metadata.id("eom")]
    found += metadata.list_of_ids("eos")
    special_ids: dict[str, int] = {}
    for number, token in enumerate(metadata.tokens):
        if metadata.types[number] in (_CONTROL, _USER_DEFINED):
            special_ids[token] = number
    for key, texts in _TEXTS_BY_KEY.items():
        stated = metadata.id(key)
        found += [special_ids.get(text) for text in texts] if stated is None else [stated]
    found += [number for token, number in special_ids.items() if token in _STOP_TEXTS]
    stops = {number: metadata.tokens[number] for number in found if number is not None}
    texts_of_stops = set(stops.values())
    if texts_of_stops & {"<|call|>", "<|calls|>"} and texts_of_stops & {"<|return|>", "<|flush|>"}:
        texts_of_stops.discard("<|end|>")  # it ends a message, and the answer may go on
    if "<|tool_response>" in texts_of_stops:
        texts_of_stops.discard("</s>")  # it is a tag of HTML
    return [number for number, token in stops.items() if token in texts_of_stops]


def _byte_level(metadata: _Metadata, unk_token: str | None) -> Tokenizer:
    """A tokenizer whose tokens are bytes. unk_token: has no meaning here."""
    pre = metadata.value("pre", str, "default")
    expressions = _EXPRESSIONS.get(_EXPRESSION_NAMES.get(pre, pre))
    if expressions is None:
        raise UnsupportedModelError(
            f"{metadata.path}: {_KEY_PREFIX}pre is {shown(pre)}, and how that cuts texts into words is not known; "
            f"{_REMEDY}"
        )
    tokenizer = Tokenizer(
        models.BPE(
            vocab=metadata.ids, merges=metadata.merges(), ignore_merges=pre in _WITH_WHOLE_WORDS
        )
    )
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gemma4(metadata: _Metadata, unk_token: str | None) -> Tokenizer:
    """A tokenizer of merges whose tokens are characters, and bytes for the other characters; a text
    is cut at line breaks alone."""
    tokenizer = Tokenizer(
        models.BPE(
            vocab=metadata.ids,
            merges=metadata.merges(),
            unk_token=unk_token,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _sentencepiece(metadata: _Metadata, unk_token: str | None) -> Tokenizer:
    """A tokenizer that joins two neighbours into a token in the order of the scores, as if every
    way to cut a token in two were a merge. Equal scores, or none, leave the order of the ids, in
    which sentencepiece learns its tokens."""
    ids = metadata.ids
    count = len(metadata.tokens)
    scores = metadata.array("scores", float, count) or [0.0] * count
    merges = []
    for token in metadata.tokens:
        for cut in range(len(token) - 1, 0, -1):
            left = token[:cut]
            right = token[cut:]
            if left in ids and right in ids:
                merges.append((left, right))
    merges.sort(key=lambda pair: -scores[ids[pair[0] + pair[1]]])
    tokenizer = Tokenizer(
        models.BPE(vocab=ids, merges=merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.value("add_space_prefix", bool, True):
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(_SPACE), tokenizer.normalizer]
        )
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


_BUILDERS: Final[Mapping[str | None, Callable[[_Metadata, str | None], Tokenizer]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _gemma4,
}


def _added_tokens(metadata: _Metadata) -> list[AddedToken]:
    """The tokens that are found in a text before it is cut into words."""
    # llama.cpp knows Phi-3 by its name: most of its special tokens take the spaces behind them.
    model_name = metadata.value("general.name", str, "").lower()
    strips = re.search("phi-?3", model_name) is not None
    return [
        AddedToken(
            token,
            special=kind != _USER_DEFINED,
            normalized=False,
            rstrip=strips and token not in ("<unk>", "<s>", "<|endoftext|>"),
        )
        for token, kind in zip(metadata.tokens, metadata.types, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


class _Metadata:
    """Checked values of a file's metadata, by their keys without `_KEY_PREFIX`. All methods raise
    QsampleError."""

    def __init__(self, file: GgufFile) -> None:
        self.path = file.path
        self._file = file
        self._values = file.metadata

    def value(self, key: str, kind: type, default: Any = None) -> Any:
        """A text or a bool.

        Args:
            key: the key without `_KEY_PREFIX`, or a whole key if there is a point in it.
            kind: str or bool.
            default: the value if the key is missing.
        """
        value = self._values.get(_whole_key(key))
        if value is None:
            return default
        if not isinstance(value, kind):
            accepted = "a text" if kind is str else "true or false"
            raise self.error(key, f"is {shown(value)}; it must be {accepted}")
        return value

    def array(self, key: str, kind: type, length: int | None = None) -> list[Any] | None:
        """A list of texts, integers or numbers; None if it is missing.

        Args:
            key: the key without `_KEY_PREFIX`.
            kind: str, int or float.
            length: the number of values; any further ones are ignored, as in llama.cpp.
        """
        values = self._values.get(_KEY_PREFIX + key)
        if values is None:
            return None
        is_valid = _VALIDATORS[kind]
        if not isinstance(values, list) or not all(map(is_valid, values)):
            raise self.error(
                key, f"is {shown(values)}; it must be a list of values of type {kind.__name__}"
            )
        if length is not None and len(values) < length:
            raise self.error(key, f"has {len(values)} values, for {length} tokens")
        return values[:length]

    def needed(self, key: str, kind: type) -> list[Any]:
        """As `array`, for a list that must not be missing."""
        values = self.array(key, kind)
        if values is None:
            raise self.error(key, "is missing")
        return values

    @cached_property
    def tokens(self) -> list[str]:
        """The texts of the tokens, by id."""
        stored = self.needed("tokens", str)
        tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(stored)]
        are_unique = len(set(tokens)) == len(tokens)
        longest = max(map(len, tokens), default=0)
        if not tokens or not are_unique or longest > _MAX_TOKEN_LENGTH:
            raise self.error(
                "tokens",
                f"has no token, one of them twice, or one of over {_MAX_TOKEN_LENGTH} characters",
            )
        return tokens

    @cached_property
    def ids(self) -> dict[str, int]:
        """The ids of the tokens, by their texts."""
        return {token: number for number, token in enumerate(self.tokens)}

    @cached_property
    def types(self) -> list[int]:
        """The types of the tokens (llama_token_type), by id. If the file states none, the texts
        tell control tokens from normal ones."""
        stated = self.array("token_type", int, len(self.tokens))
        return stated or [_CONTROL if token in _CONTROL_TEXTS else _NORMAL for token in self.tokens]

    def id(self, name: str, default: int | None = None) -> int | None:
        """The id of a special token, by default another one; None if the file has no such token."""
        key = f"{name}_token_id"
        stated = self._values.get(_KEY_PREFIX + key)
        if stated is not None and not is_integer(stated):
            raise self.error(key, f"is {shown(stated)}; it must be the id of a token")
        found = self._file.special_ids(key)
        number = found[0] if found else default
        return number if is_integer(number, 0, len(self.tokens) - 1) else None

    def list_of_ids(self, name: str) -> list[int]:
        """The ids of several special tokens of a name."""
        key = f"{name}_token_ids"
        self.array(key, int)  # it checks the values
        return self._file.special_ids(key)

    def merges(self) -> list[tuple[str, str]]:
        """The merges, without repeated ones: the first of them counts."""
        merges: dict[tuple[str, str], None] = {}
        for text in self.needed("merges", str):
            cut = text.find(" ", 1)
            left = text[:cut]
            right = text[cut + 1 :]
            if cut < 0 or not {left, right, left + right} <= self.ids.keys():
                raise self.error(
                    "merges", f"has {shown(text)}, which joins no two tokens into a third"
                )
            merges[left, right] = None
        return [*merges]

    def templates(self) -> str | dict[str, str] | None:
        """The chat template, or several by name."""
        found: dict[str, str] = {}
        for key in self._values:
            name = "default" if key == _TEMPLATE_KEY else key.removeprefix(f"{_TEMPLATE_KEY}.")
            if name == key:
                continue
            text = self.value(key, str)
            # The name becomes the name of a file.
            is_name = re.fullmatch("[A-Za-z0-9_-]{1,64}", name) is not None
            if not is_name or len(text) > _MAX_TEMPLATE_LENGTH:
                raise self.error(
                    key,
                    f"has a name of other than letters, digits, _ and -, or {len(text)} characters",
                )
            found[name] = text
        has_several = bool(found.keys() - {"default"})
        return found if has_several else found.get("default")

    def error(self, key: str, problem: str) -> QsampleError:
        """The error for a value. problem: the words behind the key."""
        return QsampleError(
            f"{self.path}: {_whole_key(key)} {problem}; convert or download the file again, or {_REMEDY}"
        )


_VALIDATORS: Final[dict[type, Callable[[Any], bool]]] = {
    str: lambda value: isinstance(value, str),
    int: is_integer,
    float: is_number,
}


def _whole_key(key: str) -> str:
    """The key in the file: a key with a point in it is whole already."""
    return key if "." in key else _KEY_PREFIX + key
