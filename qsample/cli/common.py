"""Options of several commands, and the models that commands open. `given`: all parameters of a command, by name."""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, get_args, get_type_hints

import typer

from qsample.cli.terminal import format_size, note, progress
from qsample.compiler.quantize import PRESETS
from qsample.contract.interface import DEFAULT_LORA_RANK, Features
from qsample.contract.tensors import EXTRA_PARAMETERS
from qsample.disk.untrusted import parse_json
from qsample.errors import unknown
from qsample.progress import Stage
from qsample.request.sampling_params import FILTER_FIELDS, HELP, OFF_VALUES, SamplingParams

if TYPE_CHECKING:
    from qsample.models.model import PackagedModel, SourceModel
    from qsample.package.package import Package
    from qsample.runtime import CausalLM

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


class Flag(NamedTuple):
    """An option that `with_flags` adds to a command: its type with its text, and its default."""

    annotation: Any
    default: Any = None


def flags_of(
    options: type, more: Mapping[str, Mapping[str, Any]] | None = None, *, unset: bool = False
) -> dict[str, Flag]:
    """The flags of the dataclass `options`, a flag for each field whose metadata has `help`.

    - Further metadata of a field, or of `more` by the field's name: `argument`, its name in Python's functions if that
      differs; `flag`, its name here if that differs; `metavar`; `limits` or `least`, the numbers that it takes;
      `repeated`, the type of each value if the flag may be repeated; `panel` of the help.
    - `unset`: a flag that is not given is None in place of the field's default, and the dataclass checks the numbers.
    """
    types, flags = get_type_hints(options), {}
    for entry in fields(options):
        shown = {**(more or {}).get(entry.name, {}), **entry.metadata}
        if "help" not in shown:
            continue
        name, kind = shown.get("argument", entry.name), _kind_of(types[entry.name])
        names = [shown["flag"]] if "flag" in shown else []
        if kind is bool and not names:
            names = [f"--{name.replace('_', '-')}"]
        least = shown.get(
            "least", None if unset or "limits" not in shown else shown["limits"].least
        )
        settings: dict[str, Any] = {"min": least} if kind in (int, float) else {}
        if "repeated" in shown:
            kind, settings = GenericAlias(list, (shown["repeated"],)), {}
        default = None if unset or "repeated" in shown else entry.default
        settings |= {
            "metavar": shown.get("metavar"),
            "rich_help_panel": shown.get("panel"),
            "default": default,
        }
        flags[name] = _flag(
            kind if default is not None else kind | None, shown["help"], *names, **settings
        )
    return flags


def _kind_of(annotation: Any) -> Any:
    """The type of a flag for a field: a number or a bool if it may be one, otherwise a text."""
    return next(
        (kind for kind in get_args(annotation) or [annotation] if kind in (bool, int, float)), str
    )


def given_of(options: type, params: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass with the values of its flags among `params`, the command's by name."""
    values = {}
    for entry in fields(options):
        if "help" in entry.metadata:
            value = params[entry.metadata.get("argument", entry.name)]
            values[entry.name] = tuple(value or ()) if isinstance(entry.default, tuple) else value
    return values


def _flag(kind: Any, help: str, *names: str, default: Any = None, **settings: Any) -> Flag:
    return Flag(Annotated[kind, typer.Option(*names, help=help, **settings)], default)


FEATURE_FLAGS: Final[Mapping[str, Flag]] = {
    **flags_of(Features),
    "for_serving": _flag(
        bool,
        "All four, 20 likeliest tokens and penalty_last_n: what qsample serve may be asked for.",
        "--for-serving",
        default=False,
    ),
}
_PANEL: Final = "Sampling"
_SAMPLING: Final = {
    name: {"help": HELP[name], "panel": "More sampling, for packages exported with --filter"}
    for name in FILTER_FIELDS
    if name != "bad_words_ids"
}
SAMPLING_FLAGS: Final[Mapping[str, Flag]] = {
    **flags_of(
        SamplingParams, {name: {"panel": _PANEL} for name in OFF_VALUES} | _SAMPLING, unset=True
    ),
    "stop_strings": _flag(
        list[str] | None,
        "Text that ends a row, cut off with the text after it; may be repeated.",
        "--stop-string",
        rich_help_panel=_PANEL,
    ),
    "greedy": _flag(
        bool, "Always take the likeliest token.", "--greedy", default=False, rich_help_panel=_PANEL
    ),
}
_FORM: Final = "Form of the answers, for packages exported with --allowed-tokens or --for-serving"
FORM_FLAGS: Final[Mapping[str, Flag]] = {
    name: _flag(str | None, text, metavar=metavar, rich_help_panel=_FORM)
    for name, metavar, text in (
        ("json_schema", "JSON|FILE", "Answers are JSON of this schema; {} is any JSON."),
        ("regex", "REGEX", "Answers match this expression."),
        ("grammar", "TEXT|FILE", "Answers follow this grammar, Lark's or GBNF."),
    )
}
CHAT_FLAGS: Final[Mapping[str, Flag]] = {
    "system": _flag(str | None, "System prompt, in front of every conversation."),
    "chat_template": Flag(Template),
    "chat_template_kwargs": _flag(
        str | None, "Other variables of the template, as a JSON object.", metavar="JSON"
    ),
    "thinking": _flag(
        bool | None, "enable_thinking, for templates that read it.", "--thinking/--no-thinking"
    ),
}
LOAD_FLAGS: Final[Mapping[str, Flag]] = {
    "lora": Flag(Lora),
    "weights": Flag(Weights),
    "preset": Flag(Preset),
    "text_only": Flag(TextOnly, False),
    "provider": Flag(Provider),
    "threads": Flag(Threads),
    "batch_invariant": Flag(BatchInvariant, True),
    "trusted_keys": Flag(TrustedKeys),
}


def with_flags(flags: Mapping[str, Flag]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add `flags` after the options of a command; the command reads them from its context."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters

        def wrapped(**given: Any) -> None:
            command(**{name: given[name] for name in own})

        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [parameter.replace(kind=keyword) for parameter in own.values()]
        for name, flag in flags.items():
            parameters.append(
                inspect.Parameter(name, keyword, default=flag.default, annotation=flag.annotation)
            )
        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
        return wrapped

    return add


def sampling_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling options of a command line for `generate`. Raises typer.BadParameter, before a model is loaded."""
    from qsample.text.generated_text import check_stop_strings

    options = {
        name: given[name]
        for name in SAMPLING_FLAGS
        if name != "greedy" and given[name] not in (None, (), [])
    }
    if given["greedy"]:
        options["do_sample"] = False
    stops = options.pop("stop_strings", None)
    try:
        SamplingParams.from_generation_config(None, **options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return options | ({} if stops is None else {"stop_strings": check_stop_strings(stops)})


def feature_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The features of a package in a command line, as arguments of `from_pretrained`. A --filter may have several names
    with commas between them. Raises typer.BadParameter for an unknown filter."""
    names = tuple(name.strip() for item in given["filters"] or () for name in item.split(","))
    if unknown_names := [name for name in names if name not in EXTRA_PARAMETERS]:
        raise typer.BadParameter(unknown("--filter names", unknown_names[0], EXTRA_PARAMETERS))
    return {**{name: given[name] for name in FEATURE_FLAGS}, "filters": names}


def chat_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of chat templates of a command line, as options of `generate`."""
    options: dict[str, Any] = {}
    if (template := given["chat_template"]) is not None:
        options["chat_template"] = read_template(template)
    arguments: Any = {}
    if (text := given["chat_template_kwargs"]) is not None:
        try:
            arguments = parse_json(text)
        except ValueError as error:
            raise typer.BadParameter(
                f"--chat-template-kwargs is not valid JSON ({error}): {text:.60}"
            ) from None
        if not isinstance(arguments, dict):
            raise typer.BadParameter(
                f'--chat-template-kwargs is {text:.60}; give an object, {{"name": value}}'
            )
    if given["thinking"] is not None:
        arguments["enable_thinking"] = given["thinking"]
    return options | ({"chat_template_kwargs": arguments} if arguments else {})


def read_template(template: str) -> str:
    """The text of a file; or the name of a template, if no file has that name."""
    path = Path(template)
    if not os.path.isfile(path):
        if path.suffix or "/" in template or "{" in template or os.path.exists(path):
            raise typer.BadParameter(
                f"--chat-template {template:.60} is not a file; give a file, or a template's name"
            )
        return template
    return read_text(path, "--chat-template")


def read_text(path: Path, option: str) -> str:
    """The text of a file that `option` names. Raises typer.BadParameter if it cannot be read or is empty."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise typer.BadParameter(f"cannot read {option} {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise typer.BadParameter(
            f"{option} {path} is not valid UTF-8 from byte {error.start} on; convert it"
        ) from None
    if not text.strip():
        raise typer.BadParameter(f"{option} {path} is empty; give a file with text in it")
    return text


def read_loras(given: list[str] | None) -> dict[str, str]:
    """Name → folder of the adapters of a command line. Raises typer.BadParameter, before a model is loaded."""
    from qsample.huggingface.lora import CONFIG

    loras: dict[str, str] = {}
    for entry in given or ():
        name, found, folder = entry.partition("=")
        if not found or not name or not folder:
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


def chosen_adapter(options: Mapping[str, Any], loras: Mapping[str, str]) -> dict[str, Any]:
    """Options of `generate` with the adapter of a command line: --adapter, or the only adapter."""
    if (name := options.get("adapter")) is not None and name not in loras:
        raise typer.BadParameter(
            f"--adapter is {name}, and --lora has {', '.join(loras) or 'none'}; give either"
        )
    return {
        **options,
        **({"adapter": next(iter(loras))} if name is None and len(loras) == 1 else {}),
    }


def with_images_before(text: str, images: Sequence[Any]) -> str | list[dict[str, Any]]:
    """The content of a user's message: a text, and images before it."""
    parts = [{"type": "image", "image": image} for image in images]
    return [*parts, {"type": "text", "text": text}] if parts else text


def check_jinja() -> None:
    """Raise ImportError if a chat lacks its library, before a model is loaded."""
    from qsample.text.chat import compile_template

    compile_template("{{ messages }}")


def quieten(model: str) -> None:
    """Keep libraries' own messages off the terminal; downloads from the hub still show their progress."""
    if os.path.exists(model):
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("torch.onnx._internal.exporter").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".* holds a decoder file; ")  # of `from_pretrained`


def is_package(model: str | Path) -> bool:
    """Whether `model` is the folder of a package."""
    from qsample.package.package import MANIFEST_NAME

    return os.path.isfile(
        os.path.join(model, MANIFEST_NAME)
    )  # False for names that are too long for a path, too


def open_model(
    model: str, provider: str | None = None, text_only: bool = False
) -> SourceModel | PackagedModel:
    """A package with the features that it has, a checkpoint or a decoder file."""
    from qsample.models.auto_model import AutoModel
    from qsample.models.model import PackagedModel
    from qsample.ort.model_package import package_in
    from qsample.package.package import read_package

    if is_package(folder := package_in(model, provider)):
        if text_only:
            raise typer.BadParameter(
                f"--text-only is for a checkpoint, and {model} is a package; export it so"
            )
        return PackagedModel(read_package(folder), provider)
    quieten(model)
    return AutoModel.from_pretrained(model, provider=provider, text_only=text_only)


def load_given(opened: PackagedModel, given: Mapping[str, Any]) -> CausalLM:
    """Load a package, with its adapters, as a command line says."""
    from qsample.runtime import load

    model = load(
        opened.package.path,
        given["provider"],
        ctx_len=given.get("ctx_len"),
        intra_op_num_threads=given["threads"],
        batch_invariant=given["batch_invariant"],
        verify=False,
        trusted_keys=given["trusted_keys"] or None,
    )
    for name, folder in read_loras(given["lora"]).items():
        model.load_adapter(name, folder)
    return model


def open_given(
    model: str | None, given: Mapping[str, Any], *, allowed_tokens: bool = False
) -> PackagedModel:
    """`open_exported` with the options of a command line."""
    return open_exported(
        model,
        given["provider"],
        weights=given["weights"],
        preset=given["preset"],
        ctx_len=given.get("ctx_len"),
        allowed_tokens=allowed_tokens,
        text_only=given["text_only"],
        loras=read_loras(given["lora"]),
        trusted_keys=given["trusted_keys"],
    )


def open_exported(
    model: str | None,
    provider: str | None,
    *,
    weights: str | None = None,
    preset: str | None = None,
    ctx_len: int | None = None,
    text_only: bool = False,
    for_serving: bool = False,
    allowed_tokens: bool = False,
    loras: Mapping[str, str] | None = None,
    max_loras: int = 0,
    trusted_keys: Sequence[str] | None = None,
) -> PackagedModel:
    """A package as it is; a checkpoint or decoder file compiled, from the user's cache; by default the bundled model.
    It stays in the cache as long as the returned object. Raises typer.BadParameter for a package with `weights`,
    `preset` or `text_only`.

    - `model`: the package, checkpoint folder, hub id or decoder file.
    - `provider`: by default the package's, otherwise the CPU.
    - `weights`, `preset`, `ctx_len`: of the compiled package, as in `CompileOptions`; a package has a fixed one.
    - `text_only`: without the images of a checkpoint that reads them, too.
    - `for_serving`: a compiled package gets all that a server's requests may ask for. `allowed_tokens`: it takes masks.
    - `trusted_keys`: the caller loads the package with them; anything else than a package is refused.
    - `loras`: adapters by name. A compiled package takes all of them, with their ranks, and at least `max_loras`.
    """
    from qsample.models.bundled import TINY_LM
    from qsample.ort.model_package import package_in

    name = str(TINY_LM) if model is None else str(package_in(model, provider))
    if is_package(name):
        if given := weights or preset:
            flag = "--weights" if weights else "--preset"
            raise typer.BadParameter(
                f"{flag} is for a checkpoint, and {name} is a package; quantize it with `qsample compile {name} OUT "
                f"{flag} {given}`"
            )
        if text_only:
            raise typer.BadParameter(
                f"--text-only is for a checkpoint, and {name} is a package; export it so"
            )
        from qsample.models.model import PackagedModel
        from qsample.package.package import faster_way, read_package

        with progress():
            package = read_package(name, verify=not trusted_keys)  # loading verifies it
        if advice := faster_way(package):
            note(advice)
        return PackagedModel(package, provider)
    if trusted_keys:
        raise typer.BadParameter(
            f"--trusted-keys is for packages, and {name} is none; compile and sign it first"
        )
    with progress(logged=True) as shown:
        stages = set[str]()

        def report(stage: str, fraction: float) -> None:
            stages.add(stage)
            shown(stage, fraction)

        from qsample.models.model import SourceModel

        opened = open_model(name, provider, text_only)
        assert isinstance(opened, SourceModel)
        if for_serving:
            opened.features = opened.features.for_serving()
        if allowed_tokens:
            opened.features = replace(opened.features, allowed_tokens=True)
        if most := max(max_loras, len(loras or {})):
            from qsample.huggingface.lora import CONFIG, read_config

            ranks = [
                read_config(Path(folder, CONFIG)).largest_rank for folder in (loras or {}).values()
            ]
            rank = max([opened.features.max_lora_rank, *(ranks or [DEFAULT_LORA_RANK])])
            opened.features = replace(opened.features, max_loras=most, max_lora_rank=rank)
        packaged = opened.cached(weights=weights, preset=preset, ctx_len=ctx_len, progress=report)
    if model is not None and Stage.PUBLISHING in stages:  # it was made here
        _tell_about_the_cache(model, packaged.package, weights)
    return packaged


def _tell_about_the_cache(model: str, package: Package, weights: str | None) -> None:
    """A remark on a package that has just been put into the cache."""
    size = format_size(sum(entry.bytes for entry in package.manifest.files.values()))
    better = ""
    if (
        weights is None
        and package.manifest.packed_weights is None
        and package.interface.dtype == "float32"
    ):
        better = (
            "; --weights int4 takes about a seventh and is faster, at some cost in quality; with --preset speed, it "
            f"takes minutes first and is fastest. `qsample compile {model} OUT --weights int4` has more options"
        )
    note(f"{model} is in the cache now ({size}), later runs start at once{better}")


def context_full(limit: int, consequence: str) -> str:
    """A remark about a context of `limit` tokens. `consequence` completes "which ..." in the sentence."""
    return (
        f"the context of {limit} tokens is full, which {consequence}; compile with a larger --ctx-len if the model "
        "supports it, or give less"
    )
