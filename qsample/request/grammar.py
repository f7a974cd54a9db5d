"""Grammars on the host: the form that an answer has to follow, its compilation by llguidance, and the
masks of each answer.

Forms that are regular need no masks: `structured` makes tables of them, which the graph follows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypedDict

import numpy as np

from qsample.contract.arrays import Array
from qsample.contract.tensors import RUNNING
from qsample.errors import ArgumentError, shown
from qsample.request.schemas.formats import FORMATS
from qsample.request.schemas.normal_form import InvalidSchemaError, normal_schema
from qsample.request.schemas.pointers import pointer_step

if TYPE_CHECKING:
    from qsample.runtime import Step

# JSON is written with the blanks of json.dumps. A model that may write any number of blanks may
# never stop writing them.
_JSON_OPTIONS: Final[Mapping[str, Any]] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    # The schemas of a oneOf exclude each other, see `normal_schema`.
    "coerce_one_of": True,
    # Without code points: {"\\u0061": 1} would be an additional property "a" beside that of the schema.
    "json_allowed_escapes": 'nrbtf\\"',
}
# Our words for llguidance's, about schemas in normal form.
_SCHEMA_PROBLEMS: Final = (
    ("Unsatisfiable schema", "no document is valid under the schema; correct it"),
    (
        "circular references",
        "a $ref that leads back to itself has other keywords beside it; move these to its "
        "definition",
    ),
    (
        "not disjoint",
        "a name may match several patterns of patternProperties; give patterns that exclude each "
        "other",
    ),
    (
        "min/maxProperties",
        "minProperties and maxProperties are not kept for objects of optional properties and of "
        "others; write required, or additionalProperties: false",
    ),
)
# Beyond it, float64 lacks some.
_LARGEST_INTEGER: Final = 1 << 53
_OTHER_SCHEMA_PROBLEM: Final = "the schema is too large to compile; give a smaller one"


# The entry of a special token in tokenizer.json, without its id and text.
_ADDED_TOKEN: Final[Mapping[str, Any]] = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}


class Form(NamedTuple):
    """The form that an answer has to follow.

    The value of each kind:

    - "json_schema": a schema, the text of a schema, or true for any JSON;
    - "regex": an expression of Rust's regex crate that the whole answer matches;
    - "choice": a list of texts;
    - "grammar": a grammar in Lark's notation as llguidance reads it, or in llama.cpp's GBNF;
    - "call", "calls": a mapping from the names of functions to the schemas of their arguments. The
      answer is a list of a single call, or of several.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar", "call", "calls"]
    value: Any


class InvalidGrammarError(ArgumentError):
    """No answer can follow a grammar, or the grammar is too large to compile."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The text of a grammar.

    Attributes:
        text: the grammar as llguidance's LLMatcher takes it, or GBNF.
        is_gbnf: whether the text is GBNF. Its translation takes long, so the thread that compiles
            the grammar translates it.
        schemas: the schemas of JSON of which the grammar was made, by the functions whose arguments
            they describe; "" for the whole answer.
    """

    text: str
    is_gbnf: bool = False
    schemas: Mapping[str, Any] = field(default_factory=dict)

    def refusal(self, problem: str) -> ArgumentError:
        """The error of a problem that llguidance found. A client that sent a schema knows nothing of
        llguidance, so it gets no word of it."""
        if not self.schemas:
            return invalid_grammar(problem)
        for function, schema in self.schemas.items():
            for probe in _probes(schema):
                if not _is_possible(probe.schema):
                    return InvalidSchemaError(probe.pointer, probe.reason, probe.remedy, function)
        found = [ours for words, ours in _SCHEMA_PROBLEMS if words in problem]
        return invalid_grammar(found[0] if found else _OTHER_SCHEMA_PROBLEM)


def grammar_of(form: Form) -> Grammar:
    """The grammar of a form, for `Grammars.guide`. It needs llguidance.

    Raises:
        ArgumentError: the form is invalid.
    """
    from llguidance import LLMatcher

    kind, value = form
    match kind:
        case "regex":
            return Grammar(_converted(LLMatcher.grammar_from_regex, value))
        case "grammar":
            if "::=" in value:
                return Grammar(value, is_gbnf=True)
            return Grammar(_converted(LLMatcher.grammar_from_lark, value))
        case "choice":
            return Grammar(_converted(LLMatcher.grammar_from_lark, _lark_of_choice(value)))
        case "call" | "calls":
            lark = _lark_of_calls(value, several=kind == "calls")
            return Grammar(_converted(LLMatcher.grammar_from_lark, lark), schemas=value)
        case "json_schema":
            schema = parsed_schema(value)
            text = _converted(LLMatcher.grammar_from_json_schema, _document(schema))
            return Grammar(text, schemas={"": schema})


def check_form(form: Form) -> None:
    """Raise ArgumentError for an invalid form, before a model is there."""
    from llguidance import LLMatcher

    grammar = grammar_of(form)
    problem = LLMatcher.validate_grammar(_for_llguidance(grammar))
    if problem:
        raise grammar.refusal(problem)


def _lark_of_choice(texts: list[str]) -> str:
    if "" in texts:
        raise ArgumentError("a choice is empty; give texts of at least a character")
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _lark_of_calls(functions: Mapping[str, Any], several: bool) -> str:
    """A list of calls in Lark's notation. Each schema is a separate document, so that references to
    its parts stay valid."""
    calls = []
    for name, schema in functions.items():
        start = json.dumps(f'{{"name": "{name}", "parameters": ')
        try:
            calls.append(f'{start} %json {_document(schema)} "}}"')
        except InvalidSchemaError as error:
            raise error.of_function(name) from None
    more_calls = ' (", " call)*' if several else ""
    return f'start: "[" call{more_calls} "]"\ncall: {" | ".join(calls)}'


def parsed_schema(value: Any) -> Any:
    """The schema that a text has, or the given schema.

    Raises:
        ArgumentError: the text is not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"the schema is not valid JSON: {error}") from None


def _document(schema: Any) -> str:
    """The text of a schema for llguidance, with our options. schema: as clients write it."""
    part = _for_host(normal_schema(schema), "#")
    if part is False:
        raise invalid_grammar("no document is valid under the schema; correct it")
    document = {} if part is True else part
    return json.dumps({**document, "x-guidance": _JSON_OPTIONS})


def _for_host(schema: Any, path: str) -> Any:
    """A schema in normal form as llguidance keeps it exactly.

    Formats that tables keep become patterns: llguidance has the same formats, but its February has
    always 29 days.

    Args:
        schema: the schema.
        path: its JSON pointer.

    Raises:
        InvalidSchemaError: the schema has numbers that float64, in which llguidance counts, lacks.
    """
    if not isinstance(schema, dict):
        return schema
    changed: dict[str, Any] = {}
    for keyword, value in schema.items():
        here = f"{path}/{keyword}"
        if keyword in ("properties", "patternProperties"):
            changed[keyword] = {
                name: _for_host(value[name], f"{here}/{pointer_step(name)}") for name in value
            }
        elif keyword == "$defs":  # Their names are pointers.
            changed[keyword] = {name: _for_host(value[name], name) for name in value}
        elif keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
            changed[keyword] = [
                _for_host(part, f"{here}/{place}") for place, part in enumerate(value)
            ]
        elif keyword in ("items", "additionalProperties"):
            changed[keyword] = _for_host(value, here)
        else:
            _check_numbers(value, here)
            changed[keyword] = value
    if changed.get("format") in FORMATS:
        pattern = {"pattern": f"^(?:{FORMATS[changed.pop('format')]})$"}
        changed["allOf"] = [*changed.get("allOf", []), pattern]
    return changed


def _check_numbers(value: Any, path: str) -> None:
    """Raise InvalidSchemaError if a value has an integer that float64 lacks."""
    parts = [value]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            parts += part.values()
        elif isinstance(part, list):
            parts += part
        elif isinstance(part, int) and abs(part) > _LARGEST_INTEGER:
            raise InvalidSchemaError(
                path,
                f"{shown(part, 40)} has more digits than masks keep",
                "give integers of at most 15 digits",
            )


class _Probe(NamedTuple):
    """A small schema that shows whether a part of a schema can be followed.

    Attributes:
        pointer: the place of the part.
        schema: the small schema.
        reason, remedy: the fault of the part, and what to do, if llguidance cannot follow it.
    """

    pointer: str
    schema: dict[str, Any]
    reason: str
    remedy: str


def _probes(schema: Any) -> Iterator[_Probe]:
    """The probes of all patterns of a schema, as clients write it."""
    remedy = "write it without looking around, back references and boundaries of words"
    parts = [("#", schema)]
    while parts:
        pointer, part = parts.pop()
        if isinstance(part, list):
            parts += [(f"{pointer}/{place}", item) for place, item in enumerate(part)]
        if not isinstance(part, dict):
            continue
        parts += [(f"{pointer}/{pointer_step(name)}", item) for name, item in part.items()]
        if isinstance(part.get("pattern"), str):
            pattern = {"type": "string", "pattern": part["pattern"]}
            yield _Probe(f"{pointer}/pattern", pattern, "it cannot be followed", remedy)
        names = part.get("patternProperties")
        if isinstance(names, dict):
            pointer = f"{pointer}/patternProperties"
            for name in names:
                pattern = {"type": "string", "pattern": name}
                here = f"{pointer}/{pointer_step(name)}"
                yield _Probe(here, pattern, "it cannot be followed", remedy)
            objects = {"type": "object", "patternProperties": dict.fromkeys(names, True)}
            yield _Probe(
                pointer,
                objects,
                "a name may match several patterns",
                "give patterns that exclude each other",
            )


def _is_possible(schema: dict[str, Any]) -> bool:
    """Whether llguidance can follow a schema."""
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return not LLMatcher.validate_grammar(grammar)


def _for_llguidance(grammar: Grammar) -> str:
    """The text of a grammar as LLMatcher takes it."""
    from llguidance import LLMatcher, gbnf_to_lark

    if not grammar.is_gbnf:
        return grammar.text
    try:
        lark = gbnf_to_lark.gbnf_to_lark(grammar.text)
    except Exception as error:
        raise ArgumentError(f"the grammar is not valid GBNF: {error!s:.200}") from None
    return _converted(LLMatcher.grammar_from_lark, lark)


def _converted(convert: Callable[..., str], text: str, **options: Any) -> str:
    """The result of one of LLMatcher's conversions to a grammar."""
    try:
        return convert(text, **options)
    except (ValueError, RecursionError) as error:
        raise invalid_grammar(str(error)) from None


def invalid_grammar(reason: str) -> InvalidGrammarError:
    """The error of a grammar that is invalid or too large."""
    text = " ".join(reason.split())
    return InvalidGrammarError(f"no answer can follow that form: {text:.300}")


class TokenizerArguments(TypedDict):
    """The arguments of `GrammarTokenizer.of`.

    Attributes:
        tokenizer: the content of tokenizer.json.
        vocab_size: V, the number of tokens of the model.
    """

    tokenizer: str
    vocab_size: int


@dataclass(frozen=True, slots=True, eq=False)
class GrammarTokenizer:
    """A model's tokenizer as llguidance reads it, with a further token that ends answers.

    llguidance needs such a token. A model may have none, it may be an id that the tokenizer lacks,
    and a request may name others. So the masks of llguidance say whether the further token may come,
    and a guide allows the stop tokens of its row in its place.

    Attributes:
        tokenizer: llguidance's LLTokenizer.
        vocab_size: V, the number of tokens of the model.
        end: the id of the further token.
        added_texts: the texts of the added tokens that are not special, by their ids.
    """

    tokenizer: Any
    vocab_size: int
    end: int
    added_texts: Mapping[int, str]

    @classmethod
    def of(cls, arguments: TokenizerArguments) -> GrammarTokenizer:
        """The tokenizer of a model. It needs llguidance.

        Raises:
            ArgumentError: llguidance cannot read the tokenizer.
        """
        from llguidance import LLTokenizer

        definition = json.loads(arguments["tokenizer"])
        _remove_tokens(definition, arguments["vocab_size"])
        added_texts = {
            token["id"]: token["content"]
            for token in definition["added_tokens"]
            if not token["special"]
        }
        end = _end_token(definition)
        num_tokens = max(arguments["vocab_size"], end + 1)
        try:
            tokenizer = LLTokenizer(json.dumps(definition), n_vocab=num_tokens, eos_token=[end])
        except ValueError as error:
            raise _unreadable(str(error)) from None
        return cls(tokenizer, arguments["vocab_size"], end, added_texts)

    def mask(self, matcher: Any) -> tuple[Array, bool]:
        """The tokens that may come next.

        Args:
            matcher: llguidance's matcher of an answer.

        Returns:
            [1, W] int32, the mask of the tokens that go on; and whether the answer may end. Both
            mean nothing if the matcher has found an error.
        """
        from llguidance import numpy

        words = np.zeros((1, (self.tokenizer.vocab_size + 31) // 32), dtype=np.int32)
        numpy.fill_next_token_bitmask(matcher, words, 0)
        may_end = _set_bit(words, self.end, False)
        mask = words[:, : (self.vocab_size + 31) // 32]
        for token in range(self.vocab_size, 32 * mask.shape[1]):
            _set_bit(mask, token, False)
        return mask, may_end


def _remove_tokens(definition: dict[str, Any], vocab_size: int) -> None:
    """Remove the tokens that the model lacks from the content of a tokenizer.json: llguidance asks
    for them where they spell a text that a grammar forces."""
    added_tokens = definition.get("added_tokens") or []
    definition["added_tokens"] = [token for token in added_tokens if token["id"] < vocab_size]
    model = definition.get("model") or {}
    vocabulary = model.get("vocab") or {}
    if len(vocabulary) <= vocab_size:
        return
    if isinstance(vocabulary, list):
        model["vocab"] = vocabulary[:vocab_size]
        return
    kept = {text: token for text, token in vocabulary.items() if token < vocab_size}
    model["vocab"] = kept
    if "merges" in model:
        model["merges"] = [
            pair for pair in model["merges"] if {*pair, "".join(pair)} <= kept.keys()
        ]


def _end_token(definition: dict[str, Any]) -> int:
    """Add a token to the content of a tokenizer.json, and return its id, the first after all others.

    If ids below are free, the added token would get another id. A special token, which is in no
    text, then ends answers in its place. Raises ArgumentError if there is none.
    """
    vocabulary = (definition.get("model") or {}).get("vocab") or {}
    # The place of a piece in a list is its id.
    ids = set(vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary)))
    added_tokens = definition["added_tokens"]
    ids |= {token["id"] for token in added_tokens}
    end = len(ids)
    if max(ids, default=-1) < end:
        # The text is llguidance's name of an id that a tokenizer lacks.
        added_tokens.append(dict(_ADDED_TOKEN, id=end, content=f"<[{end}]>"))
        return end
    special = [token["id"] for token in added_tokens if token["special"] and token["id"] < end]
    if not special:
        raise _unreadable("its ids have gaps, and it has no special token")
    return int(special[0])


def _unreadable(reason: str) -> ArgumentError:
    return ArgumentError(f"this model's tokenizer cannot follow a grammar: {reason:.200}")


def _set_bit(mask: Array, token: int, is_allowed: bool) -> bool:
    """Allow or forbid a token in a mask, [1, W] int32. Returns whether it was allowed."""
    word, bit = divmod(token, 32)
    words = mask.view(np.uint32)
    flag = np.uint32(1 << bit)
    was_allowed = bool(words[0, word] & flag)
    if is_allowed != was_allowed:
        words[0, word] ^= flag
    return was_allowed


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """A grammar at the start of an answer.

    Attributes:
        grammar: the grammar.
        tokenizer: the tokenizer of the model.
        matcher: llguidance's matcher. Each answer uses a copy of it.
        mask: [1, W] int32, the first tokens with which an answer goes on.
        may_end: whether an answer may be empty.
    """

    grammar: Grammar
    tokenizer: GrammarTokenizer
    matcher: Any
    mask: Array
    may_end: bool

    def is_over(self, tokens: Sequence[int]) -> bool:
        """Whether an answer is complete after tokens, and no token may follow. A token that does not
        fit ends an answer that is not complete."""
        matcher = self.matcher.deep_copy()
        if matcher.try_consume_tokens(list(tokens)) < len(tokens):
            return False
        mask, may_end = self.tokenizer.mask(matcher)
        return may_end and not mask.any()


def compile_grammar(grammar: Grammar, tokenizer: GrammarTokenizer) -> CompiledGrammar:
    """Compile a grammar.

    Raises:
        ArgumentError: the grammar is invalid, or no answer can follow it.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer.tokenizer, _for_llguidance(grammar), log_level=0)
    _check_matcher(matcher, grammar)
    # The first mask is the same for every answer, and often the slowest.
    mask, may_end = tokenizer.mask(matcher)
    _check_matcher(matcher, grammar)
    if not may_end and not mask.any():
        raise invalid_grammar("no text follows it")
    return CompiledGrammar(grammar, tokenizer, matcher, mask, may_end)


def _check_matcher(matcher: Any, grammar: Grammar) -> None:
    """Raise ArgumentError if the grammar is invalid, or became too complex for llguidance in the
    course of an answer."""
    if matcher.is_error():
        raise grammar.refusal(matcher.get_error())


class GrammarGuide:
    """Writes the masks of the next tokens of a batch of answers. It is the `allowed_tokens` of a
    call.

    The first mask is computed with the grammar. Each later mask depends on the token before it, and
    the step that samples the next token needs it, because the graph filters and draws by itself: so
    it is written between the two steps. llguidance releases Python's lock meanwhile, so an event
    loop goes on.
    """

    def __init__(
        self, grammars: Sequence[CompiledGrammar | None], stop_ids: Sequence[Sequence[int]]
    ) -> None:
        """
        Args:
            grammars: the grammar of each row; None for any text.
            stop_ids: the stop tokens of each row. They are allowed where an answer may end, and
                nowhere else.
        """
        self._grammars = grammars
        self._stop_ids = stop_ids
        self._matchers = {
            row: grammar.matcher.deep_copy()
            for row, grammar in enumerate(grammars)
            if grammar is not None
        }

    def __call__(self, step: Step | None, mask: Array) -> None:
        """Write the masks of the next tokens.

        Args:
            step: the step that sampled the last tokens; None before the first tokens.
            mask: [B, W] int32, the masks to write.
        """
        for row, grammar in enumerate(self._grammars):
            if grammar is None:
                continue
            if step is None:
                self._write(row, mask, grammar.mask, grammar.may_end)
            elif step.emitted[row] and step.status[row] == RUNNING:
                matcher = self._matchers[row]
                matcher.consume_token(int(step.tokens[row]))
                _check_matcher(matcher, grammar.grammar)
                allowed, may_end = grammar.tokenizer.mask(matcher)
                _check_matcher(matcher, grammar.grammar)
                self._write(row, mask, allowed, may_end)

    def _write(self, row: int, mask: Array, allowed: Array, may_end: bool) -> None:
        """Write the mask of a row."""
        mask[row] = allowed[0]
        for token in self._stop_ids[row]:
            _set_bit(mask[row : row + 1], token, may_end)
