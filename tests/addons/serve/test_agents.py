"""Sessions of coding agents: what they send, in several turns with their file tools.

agents.json has the bodies that were recorded from the programs themselves, over each API that they speak, with their
texts and descriptions cut short: aider 0.86.2, Cline 3.0.65, Codex 0.171.0, Continue's cn 1.5.47, opencode 1.18.33,
Qwen Code 0.24.4. Those of Claude Code and Zed are written after public reports (9router#1468, llama.cpp#20623).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from starlette.testclient import TestClient

from tests.addons.serve.test_roles import FIRST_SYSTEM
from tests.helpers.servers import TOOL_TEMPLATE
from tests.request.text.test_template_reading import IS_NONE, JOINED

SESSIONS: Final[dict[str, list[dict[str, Any]]]] = json.loads(
    Path(__file__).with_name("agents.json").read_text(encoding="utf-8")
)
# What each agent sends that changes nothing.
IGNORED: Final = {
    "claude-code": {"defer_loading"},
    "codex": {"client_metadata", "tools.web_search"},
    "codex-reasoning": {"client_metadata", "tools.web_search"},
    "cline-openainative": {"tools.web_search", "tools.image_generation"},
}
REFUSED: Final = {("claude-code", 4): "tool_choice names 'web_search', which is not among tools"}
LIMITS: Final = {
    "/v1/chat/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
ANSWERED: Final = {
    "/v1/chat/completions": "data: [DONE]",
    "/v1/responses": "event: response.output_item.done",
    "/v1/messages": "event: message_stop",
}


@pytest.fixture(scope="module")
def client(local_app: Callable[..., TestClient]) -> Iterator[TestClient]:
    with local_app(slots=2, trust_request_chat_template=True) as running:
        yield running


@pytest.mark.ci
@pytest.mark.parametrize(
    "template",
    [TOOL_TEMPLATE, JOINED, IS_NONE, FIRST_SYSTEM],
    ids=["with tools", "joined", "is none", "first system"],
)
@pytest.mark.parametrize("agent", SESSIONS)
def test_every_turn_is_answered(client: TestClient, agent: str, template: str) -> None:
    ignored: set[str] = set()
    for turn, request in enumerate(SESSIONS[agent]):
        path = request["path"]
        limit = LIMITS.get(path.partition("?")[0])
        body = {**request["body"], "model": "tiny", "chat_template": template}
        if limit is not None:
            body = {**body, limit: 16}
            body.pop("max_completion_tokens", None)
        answer = client.post(path, json=body)
        if (agent, turn) in REFUSED:
            assert answer.status_code == 400
            assert REFUSED[agent, turn] in answer.text
            continue
        assert answer.status_code == 200, (turn, answer.text)
        names = answer.headers.get("X-Qsample-Ignored", "")
        ignored |= set(filter(None, names.split(", ")))
        if body.get("stream"):
            assert ANSWERED[path.partition("?")[0]] in answer.text
    assert ignored - {"tools", "tool_calls"} == IGNORED.get(agent, set())
