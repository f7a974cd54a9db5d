"""`qsample chat`: its options, and the checks before the first question."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from qsample.cli.common import Provider, Threads, open_exported
from qsample.cli.options import (
    CtxLen,
    System,
    Template,
    TemplateArguments,
    Thinking,
    chat_options,
    check_jinja,
)
from qsample.cli.sampling import sampling_options, with_sampling_flags
from qsample.errors import QsampleError

if TYPE_CHECKING:
    from qsample.runtime import CausalLM

EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample chat qwen3-cpu\n\n"
    "qsample chat qwen3-cpu --system 'Answer in one sentence.' --no-thinking --temperature 0.7\n\n"
    "printf 'Who was Moses?\\nAnd his brother?\\n' | qsample chat qwen3-cpu --greedy"
)


@with_sampling_flags
def chat(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="PACKAGE_OR_MODEL", help="Package, checkpoint or hub id.")],
    system: System = None,
    chat_template: Template = None,
    chat_template_kwargs: TemplateArguments = None,
    thinking: Thinking = None,
    ctx_len: CtxLen = None,
    provider: Provider = None,
    threads: Threads = None,
) -> None:
    """Talk to a model. Answers stream to stdout; what is said of them goes to stderr. From a pipe, a line is a turn."""
    from qsample.cli import terminal
    from qsample.cli.chat.conversation import Conversation
    from qsample.cli.chat.screen import Screen
    from qsample.runtime import Engine, load

    options = sampling_options(ctx.params)
    template = chat_options(ctx.params)
    check_jinja()
    opened = open_exported(model, provider)  # kept: a temporary export lives as long as this
    with terminal.progress() as progress:
        progress("loading", 0.0)
        loaded = load(opened.package.path, provider, ctx_len=ctx_len, intra_op_num_threads=threads, verify=False)
        remarks = _check_template(loaded, system, template)
    for remark in remarks:
        terminal.note(remark)
    # One slot keeps what it read and wrote: a turn costs its own tokens.
    with Engine(loaded, slots=1, reuse_sampled_tokens=True) as engine:
        talk = Conversation(loaded, engine, options, template)
        talk.set_system(system)
        failed = Screen(talk, terminal.note).run()
    if failed:
        raise QsampleError(f"lines of standard input that could not be answered: {failed}")


def _check_template(model: CausalLM, system: str | None, template: dict[str, Any]) -> list[str]:
    """Refuse a package that cannot chat, before the first question; and say which options its template leaves out."""
    if model.tokenizer is None:
        raise QsampleError("the package has no tokenizer, so it cannot chat; export the model with one")
    tokenizer, remarks = model.tokenizer, []
    messages = [{"role": "user", "content": "hello"}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    arguments = template.get("chat_template_kwargs", {})

    def render(**changes: Any) -> Any:
        return tokenizer.apply_chat_template(
            messages,
            chat_template=template.get("chat_template"),
            add_generation_prompt=True,
            tokenize=False,
            **{**arguments, **changes},
        )

    if system is not None and system.strip() not in render():
        remarks.append("the chat template leaves the system prompt out")
    if "enable_thinking" in arguments and render(enable_thinking=True) == render(enable_thinking=False):
        remarks.append("the chat template has no switch for thinking: --thinking and --no-thinking change nothing")
    render()
    return remarks
