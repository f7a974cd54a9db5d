"""`qsample chat`: a conversation on a terminal or through a pipe."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from qsample.cli.commands import CliCommand, Panel
from qsample.cli.common import (
    CtxLen,
    Images,
    SamplingOptions,
    TemplateOptions,
    check_jinja,
    plain_text,
    system_message,
    with_adapter,
    with_images_before,
)
from qsample.cli.opening import LoadOptions
from qsample.cli.option_groups import with_option_groups
from qsample.cli.quantized import note_divergence
from qsample.cli.terminal import counted, note, progress
from qsample.errors import PackageError, QsampleError
from qsample.images.messages import with_images
from qsample.package.disk.replace import file_aside
from qsample.package.disk.untrusted import parse_json, read_json
from qsample.progress import Stage
from qsample.request.sampling_params import NUM_SEEDS, SAMPLING_FIELDS, SamplingParams

if TYPE_CHECKING:
    from qsample.images.prompt import ProcessedImage
    from qsample.runtime import CausalLM, Engine, RequestOutput

EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample chat qwen3-cpu\n\n"
    "qsample chat qwen3-cpu --system 'Answer in one sentence.' --no-thinking --temperature 0.7\n\n"
    "qsample chat qwen-vl-cpu --image cat.jpg\n\n"
    "printf 'Who was Moses?\\nAnd his brother?\\n' | qsample chat qwen3-cpu --greedy"
)
_COMMAND_LINE: Final = re.compile(r"/([a-z?]+)(?:\s+(.*))?$", re.DOTALL)
# These quotes begin and end a text of several lines.
_QUOTES: Final = '"""'
_PROMPT: Final = ">>> "
_CONTINUATION_PROMPT: Final = "... "


@with_option_groups
def chat(
    model: Annotated[
        str, typer.Argument(metavar="PACKAGE_OR_MODEL", help="Package, checkpoint or hub id.")
    ],
    image: Images = None,
    ctx_len: CtxLen = None,
    *,
    template: TemplateOptions,
    loading: LoadOptions,
    sampling: SamplingOptions,
) -> None:
    """Talk to a model. Answers stream to stdout, remarks go to stderr. From a pipe, each line is a
    turn."""
    from qsample.runtime import Engine

    options = with_adapter(sampling.arguments(), loading.loras())
    template_arguments = template.arguments()
    check_jinja()
    opened = loading.open(model, ctx_len=ctx_len)  # stays in the cache as long as this
    with progress() as report:
        report(Stage.LOADING, 0.0)
        loaded = loading.load(opened, ctx_len=ctx_len)
        remarks = _check_template(loaded, template.system, template_arguments)
    note_divergence(opened.package)
    for remark in remarks:
        note(remark)
    _ = loaded.applied_settings  # names those that the package lacks, before the first question
    # A single slot keeps the tokens that it read and wrote: a turn costs its new tokens.
    with Engine(loaded, slots=1, reuse_sampled_tokens=True) as engine:
        conversation = Conversation(loaded, engine, options, template_arguments, template.system)
        try:
            for path in image or ():
                conversation.add_image(path)
        except TurnError as error:
            raise QsampleError(str(error)) from None
        failed = Screen(conversation).run()
    if failed > 0:
        raise QsampleError(f"lines of standard input that could not be answered: {failed}")


def _check_template(model: CausalLM, system: str | None, template: dict[str, Any]) -> list[str]:
    """Check that a package can chat, before the first question.

    Args:
        system: the system prompt.
        template: the arguments of the chat template.

    Returns:
        Remarks on options that the chat template ignores.

    Raises:
        QsampleError: the package has no tokenizer or no chat template.
    """
    if model.tokenizer is None:
        raise QsampleError(
            "the package has no tokenizer, so it cannot chat; export the model with its tokenizer"
        )
    tokenizer = model.tokenizer
    variables = template.get("chat_template_kwargs", {})
    messages = [*system_message(system), {"role": "user", "content": "hello"}]

    def render(**changes: Any) -> Any:
        return tokenizer.apply_chat_template(
            messages,
            chat_template=template.get("chat_template"),
            add_generation_prompt=True,
            tokenize=False,
            **{**variables, **changes},
        )

    remarks: list[str] = []
    if (system or "").strip() not in render():
        remarks.append("the chat template leaves the system prompt out")
    if "enable_thinking" in variables:
        if render(enable_thinking=True) == render(enable_thinking=False):
            remarks.append(
                "the chat template has no switch for thinking: --thinking and --no-thinking change nothing"
            )
    return remarks


class TurnError(Exception):
    """A turn that failed; the conversation is unchanged."""


@dataclass
class Conversation:
    """Messages, and an engine that answers them.

    Attributes:
        options: the sampling options and the adapter, as arguments of `Engine.add_request`.
        template: the arguments of the chat template.
        system: the system prompt.
        images: the files of the images for the next question.
        turns: all messages except for the system prompt.
        forgotten: the number of the oldest turns that do not fit into the context any more. The
            model does not see them.
        retries: the number of times that the last question was answered again. The seed grows with
            it.
        answers: the number of all answers.
        tokens: the number of their tokens.
        seconds: the time that they took.
        context: the number of tokens in the context after the last answer.
    """

    model: CausalLM
    engine: Engine
    options: dict[str, Any]
    template: dict[str, Any]
    system: str | None = None
    images: list[str] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    forgotten: int = 0
    retries: int = 0
    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    context: int = 0
    # Each image that was read, by its file.
    _processed_images: dict[str, ProcessedImage] = field(default_factory=dict)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages, beginning with the system prompt."""
        return [*system_message(self.system), *self.turns]

    @property
    def seen(self) -> list[dict[str, Any]]:
        """The messages that the model sees.

        Raises:
            ValueError: the file of an image is missing, or is not an image any more.
        """
        messages = [*system_message(self.system), *self.turns[self.forgotten :]]
        return with_images(messages, self._processed)

    def _processed(self, image: Any) -> Any:
        """An image, processed once: each turn sends the whole conversation again."""
        if not isinstance(image, str):
            # The image is the bytes of a conversation that was loaded.
            return image
        if image not in self._processed_images:
            (self._processed_images[image],) = self.model.images.process([image])
        return self._processed_images[image]

    def add_image(self, path: Path) -> None:
        """Put an image in front of the next question. Raises TurnError if it cannot be read."""
        name = str(path.expanduser().absolute())
        try:
            self._processed(name)
        except ValueError as error:
            raise TurnError(str(error)) from None
        self.images.append(name)

    def start_with(self, messages: list[dict[str, Any]]) -> None:
        """Continue a conversation that may begin with a system prompt."""
        self.forgotten = 0
        self.retries = 0
        if messages[0]["role"] == "system":
            self.system = messages[0]["content"]
            self.turns = messages[1:]
        else:
            self.system = None
            self.turns = messages

    def ask(self, text: str | None, show: Callable[[str], None]) -> RequestOutput:
        """Answer the user.

        KeyboardInterrupt ends an answer, whose text stays in the conversation.

        Args:
            text: the message of the user; None to answer the last question again.
            show: takes each piece of the answer.

        Raises:
            TurnError: the question cannot be answered.
            KeyboardInterrupt: the user stopped before an answer began.
        """
        turns_before = self.turns
        forgotten_before = self.forgotten
        retries_before = self.retries
        is_answered = bool(self.turns) and self.turns[-1]["role"] == "assistant"
        self.retries = self.retries + 1 if text is None and is_answered else 0
        if text is None:
            self.turns = self.turns[: self._last_question()]
        else:
            content = with_images_before(text, self.images)
            self.turns = [*self.turns, {"role": "user", "content": content}]
        try:
            if not self.turns:
                raise TurnError("the conversation has no question to answer again")
            output = self._answer(show)
        except BaseException:
            self.turns = turns_before
            self.forgotten = forgotten_before
            self.retries = retries_before
            raise
        if text is not None:
            self.images = []
        return output

    def _last_question(self) -> int:
        """The number of turns up to the last question."""
        end = len(self.turns)
        while end > 0 and self.turns[end - 1]["role"] == "assistant":
            end -= 1
        return end

    def _answer(self, show: Callable[[str], None]) -> RequestOutput:
        """Answer the last question, and add the answer to the conversation."""
        from qsample.runtime import EngineClosedError

        options = self._request_options()
        self._forget(options.get("max_new_tokens"))
        try:
            request = self.engine.add_request(self.seen, **options, **self.template)
        except EngineClosedError:
            raise
        except (ValueError, QsampleError) as error:
            too_long = self._too_long()
            raise TurnError(str(error) if too_long is None else too_long) from error
        try:
            for delta in request:
                show(delta.text or "")
        except KeyboardInterrupt:
            request.cancel()
        except BaseException:
            request.cancel()
            raise
        output = request.result()
        if output.finish_reason == "cancelled" and output.text in (None, ""):
            # An empty answer would become a part of the conversation.
            raise KeyboardInterrupt
        self.turns = [*self.turns, {"role": "assistant", "content": output.text or ""}]
        self.answers += 1
        self.tokens += len(output.token_ids)
        self.seconds += output.timing.total_seconds
        self.context = output.usage.prompt_tokens + len(output.token_ids)
        return output

    def _request_options(self) -> dict[str, Any]:
        """The arguments of `Engine.add_request` for the next answer."""
        options = {**self.options, "outputs": ()}
        if not any(
            name in options or self.model.applied_settings.get(name) is not None
            for name in ("max_new_tokens", "max_length")
        ):
            options["max_length"] = self.engine.capacity
        if options.get("seed") is not None:
            # With the same seed, a question that is answered again would have the same answer.
            options["seed"] = (options["seed"] + self.retries) % NUM_SEEDS
        return options

    def _forget(self, new_tokens: int | None) -> None:
        """Forget the oldest turns until the context has room for an answer.

        The last question is not forgotten.

        Args:
            new_tokens: the most tokens of the answer. At most a quarter of the context is kept free
                for it.
        """
        capacity = self.engine.capacity
        room = min(capacity if new_tokens is None else new_tokens, capacity // 4)
        while (self._count() or 0) + room > capacity:
            later_questions = [
                index
                for index, message in enumerate(self.turns)
                if index > self.forgotten and message["role"] == "user"
            ]
            if not later_questions:
                return
            self.forgotten = later_questions[0]

    def _count(self) -> int | None:
        """The number of tokens that the model sees; None if its template refuses the messages."""
        from qsample.request.text.chat import ChatOptions

        assert self.model.tokenizer is not None
        try:
            options = ChatOptions(**self.template)
            encoded = self.model.images.encode(self.seen, [], self.model.tokenizer, options)
            return len(encoded[0])
        except ValueError:
            return None

    def _too_long(self) -> str | None:
        """The message about a question that does not fit into the context; None if it fits."""
        count = self._count()
        if count is None or count < self.engine.capacity:
            return None
        return (
            f"the message has {count} tokens with its template and the context {self.engine.capacity}, so this was not "
            "added: say less; --ctx-len of compile gives more"
        )

    def set_parameter(self, name: str, text: str) -> None:
        """Set an option of the next answers.

        Args:
            text: the value as JSON, or a text without quotes; null for the model's own.

        Raises:
            TurnError: the name is unknown, or the value is wrong.
        """
        from qsample.request.text.generated_text import check_stop_strings

        value: Any = text
        with suppress(ValueError):
            # Errors speak of None, so users type it.
            value = parse_json("null" if text == "None" else text)
        if name in ("stop_strings", "adapter") and not isinstance(value, str | list | None):
            # A number is the text of a stop string or the name of an adapter.
            value = text
        changed = {**self.options, name: value}
        if value is None:
            del changed[name]
        elif name in SAMPLING_FIELDS:
            changed.pop("do_sample", None)
        params = {key: option for key, option in changed.items() if key != "stop_strings"}
        try:
            check_stop_strings(changed.get("stop_strings"))
            SamplingParams.from_generation_config(None, **params)
        except (ValueError, TypeError) as error:
            raise TurnError(str(error)) from None
        self.options = changed


class Screen:
    """Reads the user's lines, and shows the answers."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._typed = sys.stdin.isatty()
        self._failed = 0
        self._ended = False
        # The file that was written or read last; it may be written again.
        self._file: Path | None = None

    def run(self) -> int:
        """Run until the input ends.

        Returns:
            The number of lines of a pipe that failed; 0 at a terminal.
        """
        if self._typed:
            note("/help lists the commands; ctrl-D ends")
        for text in self._texts():
            try:
                self._take(text)
            except TurnError as error:
                self._failed += 1
                note(str(error))
            except KeyboardInterrupt:
                # The user stopped before an answer began.
                if not self._typed:
                    raise
                print()
                note("stopped before an answer began; the conversation is as it was")
            if self._ended:
                break
        return 0 if self._typed else self._failed

    def _take(self, text: str) -> None:
        """Run a command, or answer a message. Raises TurnError."""
        match = _COMMAND_LINE.match(text)
        if match is None:
            self._answer(text)
            return
        name = match[1]
        command = _commands_by_name().get(name)
        if command is None:
            raise TurnError(f"/{name} is not a command; /help lists them")
        command.run(self, (match[2] or "").strip())

    def _texts(self) -> Iterator[str]:
        """The texts of the user, except for empty ones."""
        while True:
            try:
                text = self._text()
            except KeyboardInterrupt:
                if not self._typed:
                    raise
                print()
                note("ctrl-D or /exit ends the chat")
                continue
            if text is None:
                if self._typed:
                    print()
                return
            if text.strip():
                yield text.strip()

    def _text(self) -> str | None:
        """The next text: a line, or several lines; None at the end of the input."""
        line = self._line(_PROMPT)
        if line is None:
            return None
        if line.lstrip().startswith(_QUOTES):
            return self._quoted_text(line.lstrip().removeprefix(_QUOTES))
        return self._continued_text(line)

    def _quoted_text(self, line: str) -> str:
        """The text up to the line that ends with quotes.

        Args:
            line: the first line, without the quotes at its beginning.
        """
        lines: list[str] = []
        next_line: str | None = line
        while next_line is not None:
            if next_line.rstrip().endswith(_QUOTES):
                lines.append(next_line.rstrip().removesuffix(_QUOTES))
                break
            lines.append(next_line)
            next_line = self._line(_CONTINUATION_PROMPT)
        return "\n".join(lines)

    def _continued_text(self, line: str) -> str:
        """The text up to the first line that does not end with a backslash."""
        lines: list[str] = []
        next_line: str | None = line
        while next_line is not None:
            if not next_line.endswith("\\"):
                lines.append(next_line)
                break
            lines.append(next_line[:-1])
            next_line = self._line(_CONTINUATION_PROMPT)
        return "\n".join(lines)

    def _line(self, prompt: str) -> str | None:
        """The next line of the input, without its end; None at the end of the input."""
        if not self._typed:
            line = sys.stdin.readline()
            return plain_text(line).removesuffix("\n") if line else None
        if sys.stdout.isatty():
            with suppress(ImportError):
                # With this module, input() edits lines and has a history.
                import readline  # noqa: F401
        else:
            print(prompt, end="", file=sys.stderr, flush=True)
            prompt = ""
        try:
            return input(prompt)
        except EOFError:
            return None

    def _answer(self, text: str | None) -> None:
        """Answer a message of the user; None answers the last question again."""
        last_character = "\n"

        def show(piece: str) -> None:
            nonlocal last_character
            last_character = piece[-1:] or last_character
            print(piece, end="", flush=True)

        forgotten_before = self._conversation.forgotten
        output = self._conversation.ask(text, show)
        if last_character != "\n" or output.text in (None, ""):
            print(flush=True)
        note(self._figures(output))
        if self._conversation.forgotten > forgotten_before:
            left_out = counted(self._conversation.forgotten, "message")
            note(
                f"the context is full: the model no longer sees the oldest {left_out}; /save keeps them all"
            )
        if output.finish_reason == "cancelled" and not self._typed:
            raise KeyboardInterrupt
        if output.finish_reason == "invalid":
            raise TurnError("the model gave NaN or infinite logits, and the answer ended there")

    def _figures(self, output: RequestOutput) -> str:
        """The figures of an answer, and the reason why it ended early or is empty."""
        count = len(output.token_ids)
        capacity = self._conversation.engine.capacity
        speed = count / max(output.timing.total_seconds, 1e-9)
        drafts = output.usage.drafts
        guessed = f", {drafts.tokens_per_step:.2f} a step" if drafts.num_drafts > 0 else ""
        text = f"{counted(count, 'token')}, {speed:.0f} a second{guessed}, seed {output.seed}"
        text += f"; {self._conversation.context} of {capacity} tokens of context"
        if output.finish_reason == "cancelled":
            return f"{text}; stopped"
        if output.finish_reason != "length":
            if output.text not in (None, ""):
                return text
            return f"{text}. The answer is empty: the model ended it at once"
        if self._conversation.context >= capacity:
            return f"{text}. The context is full, and the answer ends there; --ctx-len gives more"
        return f"{text}. The answer was cut off: /set max_new_tokens gives more"

    def show_help(self, text: str) -> None:
        """`/help`: the commands, and how texts are written."""
        lines = [command.help_line for command in COMMANDS]
        note("\n".join([*lines, _INPUT_HELP]))

    def reset(self, text: str) -> None:
        """`/reset`: forget the conversation, and the images of the next message."""
        self._conversation.turns = []
        self._conversation.forgotten = 0
        self._conversation.images = []
        note("the conversation is empty")

    def add_image(self, text: str) -> None:
        """`/image FILE`."""
        if not text:
            raise TurnError("name the file of an image")
        self._conversation.add_image(Path(text))
        note(f"{counted(len(self._conversation.images), 'image')} for the next message")

    def retry(self, text: str) -> None:
        """`/retry`: answer the last question again."""
        self._answer(None)

    def set_system_prompt(self, text: str) -> None:
        """`/system TEXT`: a system prompt; "-" for none, and no text to show it."""
        if text:
            self._conversation.system = None if text == "-" else text
        system = self._conversation.system
        note(f"system prompt: {'none' if system in (None, '') else system}")

    def set_parameter(self, text: str) -> None:
        """`/set NAME VALUE`: a parameter of the next answers; without both, show them."""
        name, _, value = text.partition(" ")
        if value.strip():
            self._conversation.set_parameter(name.replace("-", "_"), value.strip())
        elif name:
            raise TurnError(f"/set {name} has no value; give one, or null for the model's own")
        given = ", ".join(f"{name} {value}" for name, value in self._conversation.options.items())
        note(f"{given or 'nothing is set'}; the rest is the model's own")

    def show_figures(self, text: str) -> None:
        """`/stats`: the figures of all answers."""
        conversation = self._conversation
        speed = conversation.tokens / max(conversation.seconds, 1e-9)
        answers = counted(conversation.answers, "answer")
        tokens = counted(conversation.tokens, "token")
        note(
            f"{answers}, {tokens} in {conversation.seconds:.2f} s, {speed:.0f} a second; "
            f"{conversation.context} of {conversation.engine.capacity} tokens of context"
        )

    def end(self, text: str) -> None:
        """`/exit`."""
        self._ended = True

    def save(self, text: str) -> None:
        """`/save FILE`: write the conversation."""
        path = _path_of(text)
        if path.exists() and path != self._file:
            raise TurnError(f"{path} exists; give another file")
        messages = self._conversation.messages
        text = json.dumps({"messages": messages}, ensure_ascii=False, indent=2) + "\n"
        try:
            with file_aside(path) as aside:
                aside.write_text(text, encoding="utf-8")
        except OSError as error:
            raise TurnError(f"cannot write {path}: {error.strerror}") from None
        except PackageError as error:
            raise TurnError(str(error)) from None
        self._file = path
        note(f"{counted(len(messages), 'message')} written to {path}")

    def load(self, text: str) -> None:
        """`/load FILE`: continue a conversation that was saved."""
        from qsample.request.text.conversation import check_messages

        path = _path_of(text)
        try:
            document = read_json(path)
            messages: Any = document.get("messages") if isinstance(document, dict) else document
            check_messages(messages)
        except OSError as error:
            raise TurnError(f"cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise TurnError(f"{path} does not hold a conversation: {error}") from None
        self._conversation.start_with(messages)
        self._file = path
        waits = "" if messages[-1]["role"] == "assistant" else "; /retry answers the last"
        note(counted(len(messages), "message") + waits)


def _path_of(text: str) -> Path:
    """The file that a command names. Raises TurnError if it names none."""
    if not text:
        raise TurnError("name a file")
    return Path(text).expanduser().absolute()


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the conversation, a line that begins with a slash.

    Attributes:
        name: the name after the slash.
        argument: the placeholder of the argument in the help.
        help: the description in the help.
        run: the method of `Screen`. It is given the text after the name, and raises TurnError.
        aliases: other names of the command.
    """

    name: str
    argument: str
    help: str
    run: Callable[[Screen, str], None]
    aliases: tuple[str, ...] = ()

    @property
    def help_line(self) -> str:
        usage = f"/{self.name} {self.argument}".rstrip()
        return f"{usage:<17} {self.help}"


COMMANDS: Final = (
    Command("image", "FILE", "put an image in front of the next message", Screen.add_image),
    Command(
        "system",
        "TEXT",
        "set the system prompt; without TEXT show it, with - drop it",
        Screen.set_system_prompt,
    ),
    Command(
        "set",
        "NAME VALUE",
        "change a parameter, such as /set temperature 0.7; without NAME show them",
        Screen.set_parameter,
    ),
    Command(
        "reset",
        "",
        "forget the conversation, not the system prompt",
        Screen.reset,
        aliases=("clear",),
    ),
    Command(
        "retry",
        "",
        "answer the last message again, with the next seed if one is set",
        Screen.retry,
    ),
    Command("save", "FILE", 'write the conversation as JSON, {"messages": [...]}', Screen.save),
    Command("load", "FILE", "continue a saved conversation", Screen.load),
    Command("stats", "", "tokens and speed so far", Screen.show_figures),
    Command("help", "", "this", Screen.show_help, aliases=("?",)),
    Command("exit", "", "end, as ctrl-D does", Screen.end, aliases=("quit", "bye")),
)
_INPUT_HELP: Final = '''\
A line that ends with \\ goes on in the next; """ begins and ends a text of several lines.
ctrl-C stops an answer and keeps its text.'''


def _commands_by_name() -> dict[str, Command]:
    """The commands by their names and aliases."""
    return {name: command for command in COMMANDS for name in (command.name, *command.aliases)}


CHAT: Final = CliCommand(chat, Panel.RUN, EXAMPLES)
