"""Grammars on the host: the form that an answer has to follow, its compilation by llguidance, and the
masks of each answer.

Forms that are regular need no masks: `structured` makes tables of them, which the graph follows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
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


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar at the start of an answer.

    Attributes:
        grammar: the grammar.
        matcher: llguidance's matcher. Each answer uses a copy of it.
        mask: [1, W] int32, the mask of the first token.
    """

    grammar: Grammar
    matcher: Any
    mask: Array


def compile_grammar(grammar: Grammar, tokenizer: Any, vocab_size: int) -> CompiledGrammar:
    """Compile a grammar.

    Args:
        grammar: the grammar.
        tokenizer: llguidance's tokenizer of the model.
        vocab_size: the number of tokens of the model.

    Raises:
        ArgumentError: the grammar is invalid, or no answer can follow it.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, _for_llguidance(grammar), log_level=0)
    _check_matcher(matcher, grammar)
    # The first mask is the same for every answer, and often the slowest.
    mask = np.zeros((1, (vocab_size + 31) // 32), dtype=np.int32)
    _fill_mask(matcher, mask, grammar)
    if not mask.any():
        raise invalid_grammar("no text follows it")
    return CompiledGrammar(grammar, matcher, mask)


def _fill_mask(matcher: Any, mask: Array, grammar: Grammar) -> None:
    """Write the mask of the next token.

    Args:
        matcher: llguidance's matcher.
        mask: [1, W] int32, the mask to write.
        grammar: the grammar of the matcher.

    Raises:
        ArgumentError: as `_check_matcher`.
    """
    from llguidance import numpy

    numpy.fill_next_token_bitmask(matcher, mask, 0)
    _check_matcher(matcher, grammar)


def _check_matcher(matcher: Any, grammar: Grammar) -> None:
    """Raise ArgumentError if the grammar is invalid, or became too complex for llguidance in the
    course of an answer."""
    if matcher.is_error():
        raise grammar.refusal(matcher.get_error())


class TokenizerArguments(TypedDict):
    """The arguments of llguidance.LLTokenizer.

    Attributes:
        tokenizer: the content of tokenizer.json.
        n_vocab: the number of tokens of the model.
        eos_token: the ids of the model's stop tokens.
    """

    tokenizer: str
    n_vocab: int
    eos_token: list[int]


class GrammarGuide:
    """Writes the mask of each next token of an answer. It is the `allowed_tokens` of a request.

    The first mask is computed with the grammar. Each later mask depends on the token before it, and
    the step that samples the next token needs it, because the graph filters and draws by itself: so
    it is written between the two steps. llguidance releases Python's lock meanwhile, so an event
    loop goes on.
    """

    def __init__(self, compiled: CompiledGrammar, row: int = 0) -> None:
        """
        Args:
            compiled: the grammar of the answer.
            row: the row of the answer in its batch.
        """
        self._compiled = compiled
        self._row = row
        self._matcher: Any = None

    def __call__(self, step: Step | None, mask: Array) -> None:
        """Write the mask of the next token.

        Args:
            step: the step that sampled the last token; None before the first token.
            mask: [1, W] int32, the mask to write.
        """
        if step is None:
            mask[:] = self._compiled.mask
            return
        if self._matcher is None:
            self._matcher = self._compiled.matcher.deep_copy()
        if step.emitted[self._row] and step.status[self._row] == RUNNING:
            self._matcher.consume_token(int(step.tokens[self._row]))
            _check_matcher(self._matcher, self._compiled.grammar)
            _fill_mask(self._matcher, mask, self._compiled.grammar)
