"""Runs coding agents against a server of this repository, and prints a table of agents, turns and results.

    python scripts/agents.py                    every agent
    python scripts/agents.py codex opencode
    python scripts/agents.py --record FILE      also writes what the agents sent, for tests/addons/serve/test_agents.py

The agents are installed from npm and PyPI into build/agents, once, and each has a home of its own there, a made-up key
and no telemetry. Each reads a file and writes another, in a project of its own.

The model is scripted: a small random model with the tokenizer of `scripts/real_model.py`, whose answer the graph keeps
to the next call of the script. So everything but the choice of words is real: the programs, the server, its parsers
and streams. What is recorded has its texts and descriptions cut short, because they belong to the agents' authors.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from qsample.addons.serve import ServeSettings, make_app
from qsample.addons.serve.chats import ChatCompletionRequest
from qsample.addons.serve.forms import AnswerForm
from qsample.addons.serve.models import ServedModel
from qsample.request.grammar import Form
from qsample.request.structured.grammars import Wish

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / "build" / "agents"
MODEL: Final = "qsample"
TASK: Final = "Read README.md, then create hello.txt with the word hello."
TEMPLATE: Final = """{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{{ '<|im_end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
MAX_SECONDS: Final = 240
# The tools that read a file and those that write one, in the order of preference.
READING_TOOLS: Final = ("read_file", "read", "read_files", "exec_command", "bash")
WRITING_TOOLS: Final = ("write_file", "write", "apply_patch", "editor", "exec_command", "bash")
PATCH: Final = "*** Begin Patch\n*** Add File: hello.txt\n+hello\n*** End Patch\n"
AIDERS_EDIT: Final = "hello.txt\n```\nhello\n```\n"


@dataclass(frozen=True)
class Agent:
    """A program that is run.

    Attributes:
        packages: the packages of npm.
        command: the command line.
        environment: its variables.
        files: the files of its home by path. In all three, @URL@ is the address of the server,
            @HOME@ the home, and @TASK@ the task.
        wheels: the packages of PyPI.
        preparation: a command that is run first.
    """

    packages: tuple[str, ...]
    command: str
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    wheels: tuple[str, ...] = ()
    preparation: str = ""


AGENTS: Final[dict[str, Agent]] = {
    "aider": Agent(
        (),
        f"aider --model openai/{MODEL} --yes --no-show-model-warnings --no-pretty --message @TASK@",
        {
            "OPENAI_API_BASE": "@URL@/v1",
            "OPENAI_API_KEY": "none",
            "AIDER_ANALYTICS": "false",
            "AIDER_CHECK_UPDATE": "false",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        wheels=("aider-chat",),
    ),
    "cline": Agent(
        ("cline",),
        "cline -P openai-compatible @TASK@",
        {
            "CLINE_NO_AUTO_UPDATE": "1",
            "CLINE_TELEMETRY_DISABLED": "1",
            "NODE_NO_WARNINGS": "1",
        },
        preparation=f"cline auth -p openai-compatible -k none -m {MODEL} -b @URL@/v1",
    ),
    "codex": Agent(
        ("@openai/codex",),
        "codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "
        "-c analytics.enabled=false -c check_for_update_on_startup=false @TASK@",
        files={
            ".codex/config.toml": (
                f'model = "{MODEL}"\nmodel_provider = "qsample"\n\n'
                '[model_providers.qsample]\nname = "qsample"\nbase_url = "@URL@/v1"\n'
            )
        },
    ),
    "continue": Agent(
        ("@continuedev/cli",),
        "cn --config @HOME@/.continue/config.yaml --auto -p @TASK@",
        {
            "CONTINUE_TELEMETRY_ENABLED": "0",
            "CONTINUE_ALLOW_ANONYMOUS_TELEMETRY": "0",
            "CONTINUE_CLI_DISABLE_COMMIT_SIGNATURE": "1",
        },
        {
            ".continue/config.yaml": (
                "name: qsample\nversion: 0.0.1\nschema: v1\nmodels:\n  - name: qsample\n"
                f"    provider: openai\n    model: {MODEL}\n    apiBase: @URL@/v1\n    apiKey: none\n"
            )
        },
    ),
    "opencode": Agent(
        ("opencode-ai",),
        "opencode run @TASK@",
        {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        {
            ".config/opencode/opencode.json": json.dumps(
                {
                    "model": f"qsample/{MODEL}",
                    "provider": {
                        "qsample": {
                            "npm": "@ai-sdk/openai-compatible",
                            "options": {"baseURL": "@URL@/v1", "apiKey": "none"},
                            "models": {MODEL: {}},
                        }
                    },
                }
            )
        },
    ),
    "qwen-code": Agent(
        ("@qwen-code/qwen-code",),
        "qwen -y -p @TASK@",
        {
            "OPENAI_BASE_URL": "@URL@/v1",
            "OPENAI_API_KEY": "none",
            "OPENAI_MODEL": MODEL,
            "QWEN_TELEMETRY_ENABLED": "false",
        },
        {
            ".qwen/settings.json": json.dumps(
                {
                    "privacy": {"usageStatisticsEnabled": False},
                    "telemetry": {"enabled": False},
                    "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
                }
            )
        },
    ),
}


@dataclass
class Turn:
    """A request of an agent.

    Attributes:
        path: its path.
        body: its JSON.
        status: the status of the answer.
        ignored: the header that names what was ignored.
        answer: what the model answered, in a few words.
    """

    path: str
    body: Any
    status: int = 0
    ignored: str = ""
    answer: str = ""


# The request that is being answered: some agents send two at once.
CURRENT_TURN: ContextVar[Turn] = ContextVar("CURRENT_TURN")


class Recorder:
    """An ASGI application that keeps the requests with a body."""

    def __init__(self, app: ASGIApp) -> None:
        self.turns: list[Turn] = []
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        content = bytearray()
        turn = Turn(scope["path"], None)
        self.turns.append(turn)
        CURRENT_TURN.set(turn)

        async def receive_and_keep() -> Message:
            message = await receive()
            content.extend(message.get("body", b""))
            return message

        async def send_and_keep(message: Message) -> None:
            if message["type"] == "http.response.start":
                turn.status = message["status"]
                headers = {name.lower(): value.decode() for name, value in message["headers"]}
                turn.ignored = headers.get(b"x-qsample-ignored", "")
            await send(message)

        await self._app(scope, receive_and_keep, send_and_keep)
        turn.body = json.loads(content)


def scripted_answer(request: ChatCompletionRequest) -> str:
    """What the model says: it reads a file, writes another, and is done."""
    tools = {tool.function.name: tool.function.parameters or {} for tool in request.tools or []}
    said = sum(message["role"] == "assistant" for message in request.messages)
    if not tools:
        return AIDERS_EDIT if said == 0 or "hello.txt" in str(request.messages[-1]) else "Done."
    results = sum(message["role"] == "tool" for message in request.messages)
    if results > 1:
        return "Done."
    names = (READING_TOOLS, WRITING_TOOLS)[results]
    by_lower_name = {name.lower(): name for name in tools}
    name = next(by_lower_name[name] for name in names if name in by_lower_name)
    arguments = arguments_for(tools[name], writes=results == 1)
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def arguments_for(schema: Mapping[str, Any], *, writes: bool) -> dict[str, Any]:
    """Arguments that read README.md, or write hello.txt."""
    properties = schema.get("properties", {})
    needed = [name for name in properties if name in schema.get("required", ()) or is_text(name)]
    return {name: value_for(name, properties[name], writes) for name in needed}


def is_text(name: str) -> bool:
    return name.lower() in ("content", "new_text", "newstring")


def value_for(name: str, schema: Mapping[str, Any], writes: bool) -> Any:
    """A value of an argument, by its name and type."""
    lower = name.lower()
    schema = (schema.get("anyOf") or [schema])[0]
    match schema.get("type"):
        case "array":
            return [value_for(name, schema.get("items", {}), writes)]
        case "object":
            return arguments_for(schema, writes=writes)
        case "boolean":
            return False
        case "integer" | "number":
            return 1
    if lower in ("cmd", "command", "commands"):
        return "printf 'hello\\n' > hello.txt" if writes else "cat README.md"
    if is_text(name):
        return "hello\n"
    if lower in ("input", "patch"):
        return PATCH
    if "path" in lower or "file" in lower:
        return "@PROJECT@/hello.txt" if writes else "@PROJECT@/README.md"
    return "hello"


def script(project: Path) -> None:
    """Let every answer of the server's models be the script's."""

    async def answer_form_of_chat(
        model: ServedModel, request: ChatCompletionRequest, prompt: Any, *, needs_budget: bool
    ) -> AnswerForm:
        text = scripted_answer(request).replace("@PROJECT@", str(project))
        called = re.search(r'"name": "([^"]+)"', text)
        CURRENT_TURN.get().answer = f"calls {called[1]}" if called else "text"
        return AnswerForm(await model.model.grammars.prepare(Wish(Form("choice", [text]), None)))

    ServedModel.answer_form_of_chat = answer_form_of_chat  # type: ignore[method-assign]


def scripted_model(folder: Path) -> Path:
    """A package of a small random model with a real tokenizer and a long context; made once."""
    if folder.exists():
        return folder
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    import qsample

    tokenizer_folder = ROOT / "build" / "smollm2" / "checkpoint"
    if not tokenizer_folder.exists():
        sys.exit(f"{tokenizer_folder} is missing: python scripts/real_model.py")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2**17,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    checkpoint = folder.with_name(f"{folder.name}-checkpoint")
    LlamaForCausalLM(config).save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    model = qsample.AutoModelForCausalLM.from_pretrained(
        checkpoint, include_sampler=True, grammars=True, allowed_tokens=True, logit_bias=True
    )
    model.export(folder.with_name(f"{folder.name}-portable"), overwrite=True).compile(
        folder, ctx_len=2**15
    )
    return folder


def installed(agent: Agent, folder: Path) -> list[Path]:
    """The folders of the agent's executables; it is installed once."""
    node = FOLDER / "node"
    for target, packages in ((node, ("node@22",)), (folder, agent.packages)):
        if packages and not (target / "node_modules").exists():
            subprocess.run(
                ["npm", "install", "--silent", "--prefix", target, *packages], check=True
            )
    virtual = folder / "venv"
    if agent.wheels and not virtual.exists():
        subprocess.run([sys.executable, "-m", "venv", virtual], check=True)
        subprocess.run([virtual / "bin" / "pip", "install", "-q", *agent.wheels], check=True)
    return [target / "node_modules" / ".bin" for target in (folder, node)] + [virtual / "bin"]


def run(agent: Agent, folder: Path, url: str, project: Path) -> tuple[int, str]:
    """Run the agent; returns its exit status and the end of what it printed."""
    home = folder / "home"
    shutil.rmtree(home, ignore_errors=True)
    places = {"@URL@": url, "@HOME@": str(home), "@TASK@": TASK}

    def filled(text: str) -> str:
        for name, value in places.items():
            text = text.replace(name, value)
        return text

    home.mkdir(parents=True)
    for path, content in agent.files.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(filled(content))
    folders = installed(agent, folder)
    environment = {
        "PATH": ":".join([*map(str, folders), os.environ["PATH"]]),
        "HOME": str(home),
        "DO_NOT_TRACK": "1",
        "DISABLE_TELEMETRY": "1",
        "CI": "1",
        "NO_COLOR": "1",
        "TERM": "dumb",
        **{name: filled(value) for name, value in agent.environment.items()},
    }
    if agent.preparation:
        preparation = [filled(word) for word in agent.preparation.split()]
        subprocess.run(preparation, cwd=project, env=environment, stdin=subprocess.DEVNULL)
    command = [filled(word) for word in agent.command.split()]
    try:
        done = subprocess.run(
            command, cwd=project, env=environment, stdin=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=MAX_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return -1, f"no end within {error.timeout} s"
    return done.returncode, done.stdout[-2000:]


def make_project(folder: Path) -> Path:
    """A project with a file to read."""
    project = folder / "project"
    shutil.rmtree(project, ignore_errors=True)
    project.mkdir(parents=True)
    (project / "README.md").write_text("# Demo\n\nA small project.\n")
    git = ["git", "-C", str(project), "-c", "user.name=t", "-c", "user.email=t@example.com"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "Begin"]):
        subprocess.run([*git, *words], check=True)
    return project


def shortened(value: Any, key: str = "") -> Any:
    """What an agent sent without its texts: names, types and shapes stay."""
    match value:
        case dict():
            return {name: shortened(item, name) for name, item in value.items()}
        case list():
            return [shortened(item, key) for item in value]
        case str() if key == "arguments":
            return json.dumps(dict.fromkeys(json.loads(value), "x"))
        case str() if len(value) > 40 or " " in value or "/" in value:
            return value if value.startswith("x-anthropic-billing-header:") else "Text."
    return value


def main() -> None:
    """Run the agents that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("agents", nargs="*", default=list(AGENTS), metavar="AGENT")
    parser.add_argument("--record", type=Path, help="the file for what the agents sent")
    options = parser.parse_args()
    unknown = set(options.agents) - set(AGENTS)
    if unknown:
        parser.error(f"no agent is called {', '.join(unknown)}; there are {', '.join(AGENTS)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    package = scripted_model(FOLDER / "model")
    sent: dict[str, list[dict[str, Any]]] = {}
    for name in options.agents:
        folder = FOLDER / name
        project = make_project(folder)
        script(project)
        with Served(package) as served:
            status, output = run(AGENTS[name], folder, served.url, project)
        turns = served.recorder.turns
        written = (project / "hello.txt").exists()
        for number, turn in enumerate(turns, 1):
            row = f"{name:<12}{number:>3}  {turn.path:<22}{turn.status:>4}  {turn.answer:<24}"
            print(row, turn.ignored and f"ignored: {turn.ignored}")
        result = "written" if written else "missing"
        print(f"{name:<12}end  exit status {status}, hello.txt is {result}", flush=True)
        if status or not written:
            print(output)
        sent[name] = [{"path": turn.path, "body": shortened(turn.body)} for turn in turns]
    if options.record is not None:
        lines = [
            f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, turns)) + "\n]"
            for name, turns in sent.items()
        ]
        options.record.write_text("{\n" + ",\n".join(lines) + "\n}\n")


class Served:
    """A server of a package on a free port, with its recorder."""

    def __init__(self, package: Path) -> None:
        app = make_app(ServeSettings(models={MODEL: str(package)}, slots=2))
        self.recorder = Recorder(app)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        config = uvicorn.Config(self.recorder, port=port, log_level="error")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)

    def __enter__(self) -> Served:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()


if __name__ == "__main__":
    main()
