"""Options that several commands share: annotations of single flags, and groups of flags.

The annotations are for parameters of commands and for fields of groups (option_groups.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from qsample.cli.option_groups import FieldFlags
from qsample.compiler.quantize import PRESETS
from qsample.contract.interface import Features
from qsample.contract.tensors import EXTRA_PARAMETERS
from qsample.errors import unknown
from qsample.package.disk.untrusted import parse_json
from qsample.request.sampling_params import FILTER_FIELDS, HELP, OFF_VALUES, SamplingParams

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is a package.")]
Json = Annotated[bool, typer.Option("--json", help="Print a JSON document for a script to read.")]
Provider = Annotated[
    str | None, typer.Option(help="Execution provider. (default: its compile target, else cpu)")
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="CPU threads. (default: the cores that this process may use)"),
]
BatchInvariant = Annotated[
    bool,
    typer.Option(
        "--batch-invariant/--no-batch-invariant",
        help="A row's tokens do not depend on its batch. Without it, some processors take a single row faster.",
    ),
]
CtxLen = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Tokens that a row holds, for a portable package or a checkpoint. (default: the model's, at most 4096)",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        metavar="int2|int4|int8|float16",
        help="Weights of a checkpoint given directly. (default: its own, float32)",
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(PRESETS),
        help="Of quantized weights: quick is made fastest, speed runs fastest. (default: quick)",
    ),
]
Template = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        metavar="FILE",
        help="Jinja file, or the name of a template in the package.",
    ),
]
TextOnly = Annotated[
    bool, typer.Option("--text-only", help="Leave out the images of a model that reads them.")
]
Images = Annotated[
    list[Path] | None,
    typer.Option(
        "--image",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Image of the prompt, before its text; repeatable.",
    ),
]
Lora = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        metavar="NAME=DIR",
        help="Load this LoRA adapter, a folder of PEFT's; may be repeated.",
    ),
]
TrustedKeys = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE",
        help="Refuse packages that none of these signed: PEM files, folders; repeatable.",
    ),
]

_BYTE_ORDER_MARK: Final = "\ufeff"
_SAMPLING_PANEL: Final = "Sampling"
_FILTER_PANEL: Final = "More sampling, for packages exported with --filter"
# Lists of token ids have no flag: --bad-word has texts in their place.
_SAMPLING_HELPS: Final[Mapping[str, str]] = {
    name: text for name, text in HELP.items() if name != "bad_words_ids"
}
# The heading of each flag in the help, by the field of SamplingParams.
SAMPLING_PANELS: Final[Mapping[str, str]] = {
    name: _FILTER_PANEL if name in FILTER_FIELDS else _SAMPLING_PANEL for name in OFF_VALUES
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen. The model's generation_config has the defaults."""

    params: Annotated[
        dict[str, Any],
        FieldFlags(SamplingParams, helps=_SAMPLING_HELPS, panels=SAMPLING_PANELS, unset=True),
    ]
    stop_strings: Annotated[
        list[str] | None,
        typer.Option(
            "--stop-string",
            help="Text that ends a row, cut off with the text after it; may be repeated.",
            rich_help_panel=_SAMPLING_PANEL,
        ),
    ] = None
    greedy: Annotated[
        bool,
        typer.Option(
            "--greedy", help="Always take the likeliest token.", rich_help_panel=_SAMPLING_PANEL
        ),
    ] = False

    def arguments(self) -> dict[str, Any]:
        """The given options as arguments of `generate`.

        Raises:
            typer.BadParameter: a value is outside its range, or two options contradict each other.
            ValueError: a stop string is invalid.
        """
        from qsample.request.text.generated_text import check_stop_strings

        arguments = {name: value for name, value in self.params.items() if value not in (None, [])}
        if self.greedy:
            arguments["do_sample"] = False
        try:
            SamplingParams.from_generation_config(None, **arguments)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        if self.stop_strings:
            arguments["stop_strings"] = check_stop_strings(self.stop_strings)
        return arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureOptions:
    """The features of a package that is exported."""

    fields: Annotated[dict[str, Any], FieldFlags(Features)]
    for_serving: Annotated[
        bool,
        typer.Option(
            "--for-serving",
            help="Biases, masks, grammars, log-probabilities, penalty_last_n: what qsample serve may be asked for.",
        ),
    ] = False

    def features(self) -> Features:
        """The features. A --filter may have several names, separated by commas.

        Raises:
            typer.BadParameter: a filter is unknown.
            ArgumentError: another value is invalid.
        """
        filters: list[str] = []
        for item in self.fields["filters"]:
            filters += [name.strip() for name in item.split(",")]
        for name in filters:
            if name not in EXTRA_PARAMETERS:
                raise typer.BadParameter(unknown("--filter names", name, EXTRA_PARAMETERS))
        features = Features(**{**self.fields, "filters": tuple(filters)})
        return features.for_serving() if self.for_serving else features


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """The system prompt, the chat template and its variables."""

    system: Annotated[
        str | None, typer.Option(help="System prompt, in front of every conversation.")
    ] = None
    chat_template: Template = None
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(help="Other variables of the template, as a JSON object.", metavar="JSON"),
    ] = None
    thinking: Annotated[
        bool | None,
        typer.Option(
            "--thinking/--no-thinking", help="enable_thinking, for templates that read it."
        ),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """The arguments of `generate` about the chat template; empty without such an option.

        A system prompt is not an argument, but a message.

        Raises:
            typer.BadParameter: a file cannot be read, or the variables are not a JSON object.
        """
        arguments: dict[str, Any] = {}
        if self.chat_template is not None:
            arguments["chat_template"] = read_template(self.chat_template)
        variables = self._variables()
        if self.thinking is not None:
            variables["enable_thinking"] = self.thinking
        if variables:
            arguments["chat_template_kwargs"] = variables
        return arguments

    def _variables(self) -> dict[str, Any]:
        """The variables of --chat-template-kwargs."""
        text = self.chat_template_kwargs
        if text is None:
            return {}
        try:
            variables = parse_json(text)
        except ValueError as error:
            raise typer.BadParameter(
                f"--chat-template-kwargs is not valid JSON ({error}): {text:.60}"
            ) from None
        if not isinstance(variables, dict):
            raise typer.BadParameter(
                f'--chat-template-kwargs is {text:.60}; give an object, {{"name": value}}'
            )
        return variables


@dataclass(frozen=True, slots=True)
class ChatMode:
    """Whether the texts of a command are messages of a user, and with which system prompt.

    Attributes:
        enabled: whether a text is a user's message; otherwise the model continues it.
        asked_for: whether the command line has an option of chats; otherwise texts are messages if
            the model has a chat template.
        system: the system prompt.
        arguments: the arguments of `generate` about the template.
    """

    enabled: bool = False
    asked_for: bool = False
    system: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, template: TemplateOptions) -> ChatMode:
        """The mode that the options ask for. Raises typer.BadParameter for invalid options."""
        arguments = template.arguments()
        asked_for = bool(arguments) or template.system is not None
        return cls(asked_for, asked_for, template.system, arguments)

    @property
    def is_default(self) -> bool:
        """Whether texts are messages only because the model has a chat template."""
        return self.enabled and not self.asked_for

    def enable(self) -> ChatMode:
        """The mode with texts as messages, for a model that has a chat template."""
        return replace(self, enabled=True)

    def messages(self, text: str, images: Sequence[Any]) -> list[dict[str, Any]]:
        """The conversation for a text and the images before it."""
        content = with_images_before(text, images)
        return [*system_message(self.system), {"role": "user", "content": content}]


def system_message(text: str | None) -> list[dict[str, Any]]:
    """The message of a system prompt; none without a prompt."""
    return [] if text is None else [{"role": "system", "content": text}]


def read_template(template: str) -> str:
    """The text of a template's file, or the name of a template if no file has that name.

    Raises:
        typer.BadParameter: the file cannot be read, or a text that cannot be a name is not a file.
    """
    path = Path(template)
    if os.path.isfile(path):
        return read_text(path, "--chat-template")
    if path.suffix or "/" in template or "{" in template or os.path.exists(path):
        raise typer.BadParameter(
            f"--chat-template {template:.60} is not a file; give a file, or a template's name"
        )
    return template


def plain_text(text: str) -> str:
    """A text of a file or of standard input without what Windows puts into it: a byte-order mark,
    and carriage returns before the ends of lines."""
    return text.removeprefix(_BYTE_ORDER_MARK).replace("\r\n", "\n")


def read_text(path: Path, option: str) -> str:
    """The text of a file in UTF-8, as `plain_text` has it.

    Args:
        option: the option that names the file, for messages.

    Raises:
        typer.BadParameter: the file cannot be read, is not UTF-8, or is empty.
    """
    try:
        text = plain_text(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise typer.BadParameter(f"cannot read {option} {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise typer.BadParameter(
            f"{option} {path} is not valid UTF-8 from byte {error.start} on; convert it"
        ) from None
    if not text.strip():
        raise typer.BadParameter(f"{option} {path} is empty; give a file with text in it")
    return text


def read_loras(entries: list[str] | None) -> dict[str, str]:
    """The adapters of a command line, name → folder.

    Args:
        entries: the values of --lora.

    Raises:
        typer.BadParameter: an entry is not NAME=DIR, repeats a name, or has no adapter in its
            folder.
    """
    from qsample.request.huggingface.lora import CONFIG

    loras: dict[str, str] = {}
    for entry in entries or ():
        name, separator, folder = entry.partition("=")
        if not separator or not name or not folder:
            raise typer.BadParameter(f"--lora is {entry}; give NAME=DIR")
        if name in loras:
            raise typer.BadParameter(
                f"--lora names {name} twice; give each adapter a name of its own"
            )
        if not os.path.isfile(os.path.join(folder, CONFIG)):
            raise typer.BadParameter(
                f"--lora {entry}: {folder} has no {CONFIG}; give an adapter's folder"
            )
        loras[name] = folder
    return loras


def with_adapter(arguments: Mapping[str, Any], loras: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of `generate` with the adapter of --adapter, or the only adapter of --lora.

    Args:
        arguments: the sampling options, which contain --adapter.
        loras: the adapters of --lora, name → folder.

    Raises:
        typer.BadParameter: --adapter is not a name of --lora.
    """
    name = arguments.get("adapter")
    if name is not None and name not in loras:
        raise typer.BadParameter(
            f"--adapter is {name}, and --lora has {', '.join(loras) or 'none'}; give either"
        )
    if name is None and len(loras) == 1:
        name = next(iter(loras))
        return {**arguments, "adapter": name}
    return dict(arguments)


def with_images_before(text: str, images: Sequence[Any]) -> str | list[dict[str, Any]]:
    """The content of a user's message: a text, and images before it."""
    if not images:
        return text
    parts = [{"type": "image", "image": image} for image in images]
    return [*parts, {"type": "text", "text": text}]


def check_jinja() -> None:
    """Raise ImportError if the library of chat templates is not installed.

    Commands call it before they load a model.
    """
    from qsample.request.text.jinja_template import compile_template

    compile_template("{{ messages }}")


def context_full(limit: int, consequence: str) -> str:
    """A remark about a context that is full.

    Args:
        limit: the tokens of the context.
        consequence: completes "the context is full, which ...".
    """
    return (
        f"the context of {limit} tokens is full, which {consequence}; compile with a larger --ctx-len if the model "
        "supports it, or give less"
    )
