"""vLLM's fields that say which tokens come, which of them are text, and when an answer ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import qsample
from qsample.runtime import CausalLM, SamplingParams
from tests.helpers.fake_package import fake_package

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "And the LORD spake unto Moses"
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
EOS, PAD = 1, 2
Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def client(local_app: Callable[..., TestClient]) -> Iterator[TestClient]:
    with local_app(slots=2) as running:
        yield running


@pytest.fixture(scope="module")
def ask(client: TestClient) -> Ask:
    """(fields) → the choice of a completion; of a chat with `chat=True`."""

    def post(*, chat: bool = False, **fields: Any) -> dict[str, Any]:
        prompt = {"messages": MESSAGES} if chat else {"prompt": PROMPT}
        body = {"seed": 3, "max_tokens": 16, "return_token_ids": True, **prompt, **fields}
        answer = client.post(CHAT if chat else TEXT, json=body)
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        choice["text"] = choice["message"]["content"] if chat else choice["text"]
        assert streamed(client, CHAT if chat else TEXT, body) == (
            choice["text"],
            choice["finish_reason"],
            choice["stop_reason"],
        )
        return choice

    return post


def streamed(client: TestClient, path: str, body: dict[str, Any]) -> tuple[str, Any, Any]:
    """The text of a stream, and why it ended."""
    text = ""
    choice: dict[str, Any] = {}
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return text, choice["finish_reason"], choice["stop_reason"]


def masked_greedy(allowed: list[int], count: int, ends: list[int]) -> list[int]:
    """transformers' tokens if only `allowed` tokens may come."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList

    folder = Path(qsample.__file__).parent / "assets" / "tiny_lm"
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    ids = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")["input_ids"]

    def masked(_: Any, scores: Any) -> Any:
        wanted = torch.full_like(scores, -torch.inf)
        wanted[:, allowed] = scores[:, allowed]
        return wanted

    options: Any = {"max_new_tokens": count, "do_sample": False, "eos_token_id": ends}
    found = model.generate(ids, logits_processor=LogitsProcessorList([masked]), **options)
    return found[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


@pytest.mark.ci
@pytest.mark.parametrize("keeper", ["masked", "tables"])
def test_allowed_token_ids(
    keeper: str,
    local_app: Callable[..., TestClient],
    served_model: CausalLM,
    request: pytest.FixtureRequest,
) -> None:
    pytest.importorskip("transformers")
    package = request.getfixturevalue(f"{keeper}_package")
    letters = [*range(67, 93), 260, 261, 14]
    with local_app(models={"tiny": str(package)}, slots=2) as client:

        def tokens(allowed: list[int], **fields: Any) -> list[int]:
            body = {"prompt": PROMPT, "max_tokens": 12, "return_token_ids": True, **fields}
            answer = client.post(TEXT, json={**body, "allowed_token_ids": allowed})
            assert answer.status_code == 200, answer.text
            found: list[int] = answer.json()["choices"][0]["token_ids"]
            return found

        assert tokens(letters * 2, temperature=0) == masked_greedy(letters, 12, [EOS])
        assert tokens([EOS], temperature=0) == [EOS]
        assert tokens([67], temperature=0) == [67] * 12
        # Of two stop tokens, only the one that is allowed may come.
        ends = {"temperature": 0, "stop_token_ids": [70, 71]}
        fewer = [token for token in letters if token != 70]
        assert tokens(fewer, **ends) == masked_greedy(fewer, 12, [71])
        # The last token of the vocabulary, and each of two answers.
        last = 2047
        body = {"prompt": PROMPT, "max_tokens": 3, "n": 2, "return_token_ids": True, "seed": 1}
        answer = client.post(TEXT, json={**body, "allowed_token_ids": [last]})
        assert [choice["token_ids"] for choice in answer.json()["choices"]] == [[last] * 3] * 2
        free = client.post(TEXT, json={"prompt": PROMPT, "max_tokens": 12, "temperature": 0})
        assert free.json()["choices"][0]["text"].strip()
        # A random draw is the draw from what is left, the same with a mask and with tables.
        mask = np.zeros(2048, bool)
        mask[letters] = True
        wanted = served_model.generate(
            PROMPT,
            SamplingParams(seed=5, max_new_tokens=12),
            allowed_tokens=np.packbits(mask, bitorder="little").view("<i4"),
        )
        assert tokens(letters, seed=5) == wanted.token_ids[0]


def test_allowed_token_ids_need_a_feature(tmp_path: Path) -> None:
    from qsample.addons.serve import ServeSettings, make_app

    settings = ServeSettings(models={"fake": str(fake_package(tmp_path / "fake").path)})
    with TestClient(make_app(settings)) as client:
        answer = client.post(TEXT, json={"prompt": [5], "max_tokens": 2, "allowed_token_ids": [5]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "allowed_token_ids"
    assert "export it with --for-serving" in error["message"]


@pytest.mark.parametrize("chat", [False, True])
def test_include_stop_str_in_output(chat: bool, ask: Ask) -> None:
    options: Any = {"chat": chat, "temperature": 0, "max_tokens": 24}
    whole = ask(**options)["text"]
    stop = whole[9:13]
    before = whole[: whole.index(stop)]
    assert ask(**options, stop=[stop])["text"] == before
    found = ask(**options, stop=[stop], include_stop_str_in_output=True)
    assert found["text"] == before + stop
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", stop)
    # The beginning of a stop string that never comes is text.
    absent = {"stop": [whole[5:8] + "\x00"]}
    assert ask(**options, **absent, include_stop_str_in_output=True)["text"] == whole
    assert ask(**options, **absent)["text"] == whole


@pytest.mark.parametrize("chat", [False, True])
def test_the_text_of_a_stop_token(chat: bool, ask: Ask, served_model: CausalLM) -> None:
    """As in vLLM, it is left out unless the request includes it, special or not."""
    assert served_model.tokenizer is not None
    decode = served_model.tokenizer.decode
    options: Any = {"chat": chat, "temperature": 0, "max_tokens": 24}
    ids = ask(**options)["token_ids"]
    stop = ids[6]
    end = ids.index(stop)
    answer = ask(**options, stop_token_ids=[stop])
    assert answer["token_ids"] == ids[: end + 1]
    assert answer["text"] == decode(ids[:end])
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", stop)
    including = ask(**options, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert including["text"] == decode(ids[: end + 1])


@pytest.mark.parametrize("chat", [False, True])
def test_special_tokens(chat: bool, ask: Ask) -> None:
    def text(ids: list[int], **fields: Any) -> str:
        answer = ask(chat=chat, allowed_token_ids=ids, max_tokens=3, **fields)
        assert len(answer["token_ids"]) == (1 if ids == [EOS] else 3)
        return str(answer["text"])

    assert text([PAD]) == ""
    assert text([PAD], skip_special_tokens=True) == ""
    assert text([PAD], skip_special_tokens=False) == "<pad>" * 3
    # The stop token is text only if the answer includes it, and special tokens are text.
    assert text([EOS], skip_special_tokens=False) == ""
    assert text([EOS], include_stop_str_in_output=True) == ""
    both = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert text([EOS], **both) == "</s>"
    # With ignore_eos, it is a token like any other.
    ignored = ask(
        chat=chat, allowed_token_ids=[EOS], max_tokens=2, ignore_eos=True, skip_special_tokens=False
    )
    assert ignored["text"] == "</s></s>"
    # A stop string may be a special token.
    stopped = ask(chat=chat, allowed_token_ids=[PAD], skip_special_tokens=False, stop=["d><p"])
    assert (stopped["text"], stopped["stop_reason"]) == ("<pa", "d><p")
    assert len(stopped["token_ids"]) == 2


def test_offsets_of_special_tokens(ask: Ask) -> None:
    fields: Any = {
        "allowed_token_ids": [PAD, 67],
        "max_tokens": 9,
        "logprobs": 0,
        "logit_bias": {str(PAD): 12},
    }
    shown = ask(**fields, skip_special_tokens=False)
    found = shown["logprobs"]
    assert {*found["tokens"]} == {"<pad>", "a"}
    assert [
        shown["text"][start : start + len(token)]
        for start, token in zip(found["text_offset"], found["tokens"], strict=True)
    ] == found["tokens"]
    hidden = ask(**fields)
    assert hidden["text"] == "a" * hidden["logprobs"]["tokens"].count("a")
    assert hidden["logprobs"]["text_offset"][-1] <= len(hidden["text"])


@pytest.mark.parametrize("chat", [False, True])
def test_repetition_detection(chat: bool, ask: Ask) -> None:
    def end(ids: list[int], size: int, count: int, **fields: Any) -> tuple[int, str, Any]:
        detection = {"max_pattern_size": size, "min_count": count}
        answer = ask(
            chat=chat, allowed_token_ids=ids, repetition_detection=detection,
            skip_special_tokens=False, **fields
        )  # fmt: skip
        return len(answer["token_ids"]), answer["finish_reason"], answer["stop_reason"]

    repeated = ("repetition", "repetition_detected")
    assert end([67], 1, 4) == (4, *repeated)
    assert end([67], 3, 4) == (4, *repeated)
    # A stop token, a limit and a stop string that come with the same token are the reason.
    assert end([67], 1, 4, max_tokens=4) == (4, "length", None)
    assert end([67], 1, 4, stop=["aaaa"]) == (4, "stop", "aaaa")
    assert end([67], 1, 4, min_tokens=6) == (6, *repeated)
    assert end([EOS], 1, 2, ignore_eos=True) == (2, *repeated)
    assert end([67], 0, 0) == (16, "length", None)
    least = {"max_pattern_size": 3, "min_pattern_size": 3, "min_count": 2}
    fields: Any = {"allowed_token_ids": [67], "repetition_detection": least}
    assert len(ask(chat=chat, **fields)["token_ids"]) == 6


def test_responses_and_messages_take_the_fields(client: TestClient) -> None:
    fields = {
        "allowed_token_ids": [PAD],
        "skip_special_tokens": False,
        "repetition_detection": {"max_pattern_size": 1, "min_count": 3},
    }
    answer = client.post("/v1/responses", json={"input": "x", "max_output_tokens": 9, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.json()["output"][-1]["content"][0]["text"] == "<pad>" * 3
    answer = client.post("/v1/messages", json={"messages": MESSAGES, "max_tokens": 9, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"] == [{"type": "text", "text": "<pad>" * 3}]
