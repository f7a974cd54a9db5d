# ruff: noqa: RUF001 (letters that look like others)
"""The tokenizer, the chat templates and the stop tokens of a GGUF file, from its metadata.

A text gets llama.cpp's tokens (llama-vocab.cpp), its special tokens included, with one exception: of tekken and gpt-4o,
llama.cpp only approximates the expressions that cut a text into words, and the models' own are used.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qsample.checks import is_integer, is_number
from qsample.errors import QsampleError, UnsupportedModelError, shown

if TYPE_CHECKING:
    from qsample.addons.formats.gguf.file import GgufFile

_KEYS: Final = "tokenizer.ggml."
_TEMPLATE: Final = "tokenizer.chat_template"
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # types of tokens
_SPACE: Final = "▁"
_LONGEST_TOKEN: Final = 1024  # characters
_LONGEST_TEMPLATE: Final = 1 << 20  # characters; published ones have some 30,000 at most
_REMEDY: Final = (
    "give tokenizer= a folder or hub id that has the model's tokenizer, or tokenizer=None"
)
_NAMED: Final = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "pad": "padding",
    "sep": "seperator",
    "mask": "mask",
}
_DEFAULTS: Final = {"bos": 1, "eos": 2, "unknown": 0}  # of sentencepiece

# Texts of tokens at which llama.cpp stops. Those of a group count only if the metadata name no such token.
_ENDS: Final = (  # noqa: SIM905
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> "
    "<｜end▁of▁sentence｜> [e~["
).split()
_GROUPS: Final = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}

# Regular expressions that cut a text into words. Of several, each cuts the pieces that the one before it left.
_SHORT: Final = r"'(?:[sdmtSDMT]|[lL][lL]|[vV][eE]|[rR][eE])"
_LINES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2: Final = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CHINESE: Final = "[一-龥ࠀ-一가-퟿]+"
_LETTERS: Final = (  # those with a case, of an older Unicode
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ"
    "\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮ\u2cf2\u2cf3Ꙁ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇ"
    "Ꞌ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)


def _words(digits: str, signs: str = "", signs_end: str = r"[\r\n]*") -> str:
    """Llama 3's and its kin's. signs: of a class, what signs are not besides; signs_end: what may follow them."""
    letters = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    return rf"{_SHORT}|{letters}|{digits}| ?[^\s\p{{L}}\p{{N}}{signs}]+{signs_end}|{_LINES}"


def _cased_words(digits: str, after: str = "") -> str:
    """o200k's and its kin's: a capital letter begins a word. after: what a word may end with."""
    upper, lower = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    forms = (rf"[^\r\n\p{{L}}\p{{N}}]?[{upper}]{a}[{lower}]{b}{after}" for a, b in ("*+", "+*"))
    return rf"{'|'.join(forms)}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"


_EXPRESSIONS: Final = {  # by tokenizer.ggml.pre
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama3": (_words(r"\p{N}{1,3}"),),
    "qwen2": (_words(r"\p{N}"),),
    "minicpm5": (r"\p{N}{1,3}", _words(r"\p{N}+")),
    "seed-coder": (_words(r"\p{N}", r"\r\n", ""),),
    "tekken": (_cased_words(r"\p{N}"),),
    "gpt-4o": (_cased_words(r"\p{N}{1,3}", f"(?:{_SHORT})?"),),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_LETTERS}]+",
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
_SAME: Final = {
    "gpt-2": "phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4",
    "smollm": "starcoder refact command-r codeshell exaone minerva-7b mellum2",
    "llama3": "llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe chatglm-bpe glm4 glm5",
    "qwen2": "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    "gpt-4o": "llama4 kanana2 talkie minimax-m2",
    "deepseek-v3": "hunyuan-dense joyai-llm hy_v4",
}
_KINDS: Final = {name: kind for kind, names in _SAME.items() for name in names.split()}
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
_BEGINS: Final = _LLAMA3 | {"tekken"}  # with BOS, if the metadata are silent
_WHOLE: Final = _BEGINS | {"glm4", "glm5", "minicpm5"}  # a word that is a token needs no merges


def tokenizer_of(file: GgufFile) -> PreTrainedTokenizerFast:
    """The tokenizer, with the chat templates. Its tokens are the file's; none is added.

    Raises UnsupportedModelError for a kind that is not known, QsampleError for metadata that do not fit each other.
    """
    metadata = _Metadata(file)
    kind, pre = metadata.value("model", str), metadata.value("pre", str, "default")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"{file.path}: {_KEYS}model is {shown(kind)}; tokenizers of gpt2 (byte-level) and llama (sentencepiece) "
            f"are read; {_REMEDY}"
        )
    defaults = _DEFAULTS if kind == "llama" else {}
    ids = {name: metadata.id(key, defaults.get(key)) for name, key in _NAMED.items()}
    special = {
        f"{name}_token": None if i is None else metadata.tokens[i] for name, i in ids.items()
    }
    adds = {
        "add_bos_token": metadata.value("add_bos_token", bool, kind == "llama" or pre in _BEGINS),
        "add_eos_token": metadata.value("add_eos_token", bool, False),
    }
    for key, added in adds.items():
        if added and special[key.removeprefix("add_")] is None:
            raise metadata.error(key, f"is true, and {key.removeprefix('add_')}_id is missing")
    templates = metadata.templates()
    try:
        tokenizer = (
            _byte_level(metadata, pre)
            if kind == "gpt2"
            else _sentencepiece(metadata, special["unk_token"])
        )
        tokenizer.add_tokens(_added_tokens(metadata))
        return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=tokenizer,
            chat_template=templates,
            padding_side="left",
            clean_up_tokenization_spaces=False,
            **adds,
            **special,
        )
    except QsampleError:
        raise
    except Exception as error:  # the libraries' own checks
        raise metadata.error(
            "tokens", f"and the keys beside it make no tokenizer ({error})"
        ) from error


def stop_ids(file: GgufFile) -> list[int]:
    """The tokens at which llama.cpp stops, the end of a text first; [] for a file without tokens. Raises QsampleError
    for an id without a token."""
    metadata = _Metadata(file)
    if metadata.array("tokens", str) is None:
        return []
    default = _DEFAULTS["eos"] if metadata.value("model", str) == "llama" else None
    found = [metadata.id("eos", default), metadata.id("eot"), metadata.id("eom")]
    kinds = zip(metadata.tokens, metadata.types, strict=True)
    ids = {token: i for i, (token, kind) in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED)}
    for key, texts in _GROUPS.items():
        named = metadata.id(key)
        found += map(ids.get, texts) if named is None else [named]
    found += [number for token, number in ids.items() if token in _ENDS]
    stops = {number: metadata.tokens[number] for number in found if number is not None}
    ends = set(stops.values())
    if ends & {"<|call|>", "<|calls|>"} and ends & {"<|return|>", "<|flush|>"}:
        ends.discard("<|end|>")  # of a message; the answer may go on
    if "<|tool_response>" in ends:
        ends.discard("</s>")  # of HTML
    return [number for number, token in stops.items() if token in ends]


def _byte_level(metadata: _Metadata, pre: str) -> Tokenizer:
    expressions = _EXPRESSIONS.get(_KINDS.get(pre, pre))
    if expressions is None:
        raise UnsupportedModelError(
            f"{metadata.path}: {_KEYS}pre is {shown(pre)}, and how that cuts texts into words is not known; {_REMEDY}"
        )
    ids = metadata.ids
    merges: dict[tuple[str, str], None] = {}  # of equal ones, the first counts
    for text in metadata.needed("merges", str):
        cut = text.find(" ", 1)
        pair = text[:cut], text[cut + 1 :]
        if cut < 0 or not {*pair, "".join(pair)} <= ids.keys():
            raise metadata.error(
                "merges", f"has {shown(text)}, which joins no two tokens into a third"
            )
        merges[pair] = None
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[*merges], ignore_merges=pre in _WHOLE))
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: _Metadata, unk_token: str | None) -> Tokenizer:
    """Two neighbours become a token in the order of the scores, as if every way to cut a token in two were a merge."""
    ids, scores = metadata.ids, metadata.needed("scores", float, len(metadata.tokens))
    cuts = ((token, cut) for token in metadata.tokens for cut in range(len(token) - 1, 0, -1))
    merges = [
        (token[:cut], token[cut:])
        for token, cut in cuts
        if token[:cut] in ids and token[cut:] in ids
    ]
    merges.sort(key=lambda pair: -scores[ids["".join(pair)]])
    tokenizer = Tokenizer(
        models.BPE(vocab=ids, merges=merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True)
    )
    prefix = metadata.value("add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])]
    )
    return tokenizer


def _added_tokens(metadata: _Metadata) -> list[AddedToken]:
    """The tokens that are found in a text before it is cut into words."""
    # llama.cpp knows Phi-3 by its name: most of its special tokens take the spaces behind them.
    strips = re.search("phi-?3", metadata.value("general.name", str, "").lower()) is not None
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
    """Checked values of a file's metadata, by their keys without `_KEYS`. All methods raise QsampleError."""

    def __init__(self, file: GgufFile) -> None:
        self.path = file.path
        self._values = file.metadata

    def value(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._values.get(key if "." in key else _KEYS + key)
        if value is not None and not isinstance(value, kind):
            raise self.error(
                key, f"is {shown(value)}; it must be {'a text' if kind is str else 'true or false'}"
            )
        return default if value is None else value

    def array(self, key: str, kind: type, length: int | None = None) -> list[Any] | None:
        """A list of texts, integers or numbers; None if it is missing."""
        values = self._values.get(_KEYS + key)
        if values is None:
            return None
        is_valid = {str: lambda value: isinstance(value, str), int: is_integer, float: is_number}[
            kind
        ]
        if not isinstance(values, list) or not all(map(is_valid, values)):
            raise self.error(
                key, f"is {shown(values)}; it must be a list of values of type {kind.__name__}"
            )
        if length is not None and len(values) != length:
            raise self.error(key, f"has {len(values)} values, for {length} tokens")
        return values

    def needed(self, key: str, kind: type, length: int | None = None) -> list[Any]:
        values = self.array(key, kind, length)
        if values is None:
            raise self.error(key, "is missing")
        return values

    @cached_property
    def tokens(self) -> list[str]:
        tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(self.needed("tokens", str))]
        if not tokens or len(set(tokens)) < len(tokens) or max(map(len, tokens)) > _LONGEST_TOKEN:
            raise self.error(
                "tokens",
                f"has no token, one of them twice, or one of over {_LONGEST_TOKEN} characters",
            )
        return tokens

    @cached_property
    def ids(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}

    @cached_property
    def types(self) -> list[int]:
        return self.array("token_type", int, len(self.tokens)) or [1] * len(self.tokens)

    def id(self, name: str, default: int | None = None) -> int | None:
        """The id of a special token; None if the file has no such."""
        number = self._values.get(f"{_KEYS}{name}_token_id", default)
        if number is None or is_integer(number, 0, len(self.tokens) - 1):
            return number
        raise self.error(
            f"{name}_token_id", f"is {shown(number)}; there are {len(self.tokens)} tokens"
        )

    def templates(self) -> str | dict[str, str] | None:
        """The chat template, or several by name."""
        found = {}
        for key in self._values:
            name = "default" if key == _TEMPLATE else key.removeprefix(f"{_TEMPLATE}.")
            if name == key:
                continue
            found[name] = text = self.value(key, str)
            if (
                not re.fullmatch("[A-Za-z0-9_-]{1,64}", name) or len(text) > _LONGEST_TEMPLATE
            ):  # it names a file
                raise self.error(
                    key,
                    f"has a name of other than letters, digits, _ and -, or {len(text)} characters",
                )
        return found if found.keys() - {"default"} else found.get("default")

    def error(self, key: str, problem: str) -> QsampleError:
        key = key if "." in key else _KEYS + key
        return QsampleError(
            f"{self.path}: {key} {problem}; convert or download the file again, or {_REMEDY}"
        )
