"""A model whose tokenizer has other tokens than its head, and another ending than its generation_config."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM as Transformers
from transformers import AutoTokenizer

from qsample import AutoModelForCausalLM
from qsample.request.grammar import Form, compile_grammar, grammar_of
from qsample.runtime import CausalLM, Engine, SamplingParams, load
from tests.conftest import made_once

END, IMAGE = 260, 261  # <|im_end|> and <image>, which the head lacks
ASKED = [{"role": "user", "content": "Hi"}]
LACKED = r"a text has '<image>', token 261 of the tokenizer, and the model has 261 tokens"


@pytest.fixture(scope="module")
def model(short_head_package: Path) -> CausalLM:
    return load(short_head_package)


@pytest.fixture(scope="module")
def padded(shared_folder: Path) -> CausalLM:
    """The same with 320 rows. One of its stop tokens is among those that no token has."""
    from tests.helpers.tiny_models import save_chat_checkpoint

    def export(path: Path) -> None:
        folder = save_chat_checkpoint(path.with_name("padded-head"), 320, [2, 300])
        AutoModelForCausalLM.from_pretrained(folder, for_serving=True).export(path)

    return load(made_once(shared_folder / "padded-head-package", export))


def test_greedy_tokens_are_those_of_transformers(
    model: CausalLM, short_head_checkpoint: Path
) -> None:
    reference = Transformers.from_pretrained(short_head_checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(short_head_checkpoint)
    for text in ("In the beginning", "a<|im_end|>b"):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            wanted = reference.generate(ids, max_new_tokens=20, do_sample=False)
        given = model.generate(text, max_new_tokens=20, do_sample=False)
        assert given.token_ids[0] == wanted[0, ids.shape[1] :].tolist()


def refused(model: CausalLM, image: str) -> list[Callable[[], object]]:
    """Calls with a text of a token that the model lacks."""
    generate = model.generate
    return [
        lambda: generate(f"a{image}b"),
        lambda: generate(["a", image]),
        lambda: generate([{"role": "user", "content": image}]),
        lambda: generate("a", bad_words=[image]),
        lambda: generate("a", dry_multiplier=1.0, dry_sequence_breakers=[image]),
    ]


def test_texts_with_a_token_that_the_model_lacks(model: CausalLM) -> None:
    for call in refused(model, "<image>"):
        with pytest.raises(ValueError, match=LACKED):
            call()
    with Engine(model, slots=1) as engine, pytest.raises(ValueError, match=LACKED):
        engine.add_request("<image>")
    for call in refused(model, "<|im_end|>"):
        call()


@pytest.mark.parametrize(
    "options",
    [
        {"inputs": [5, IMAGE]},
        {"eos_token_id": IMAGE},
        {"eos_token_id": [2, IMAGE]},
        {"logit_bias": {IMAGE: 1.0}},
        {"bad_words_ids": [[5, IMAGE]]},
        {"pad_token_id": IMAGE},
        {"bos_token_id": IMAGE},
    ],
)
def test_ids_of_a_token_that_the_model_lacks(model: CausalLM, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"261.* 0 to 260"):
        model.generate(**{"inputs": [5], **options})


def test_decoding_knows_every_token(model: CausalLM) -> None:
    tokenizer = model.tokenizer
    assert tokenizer is not None
    assert tokenizer.decode([68, IMAGE], skip_special_tokens=False) == "a<image>"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "<image>"}])
    assert IMAGE in chat["input_ids"]


def forms_of(model: CausalLM, form: Form) -> list[Any]:
    """The form for the graph, and for masks."""
    tables = model.grammar(json=form.value)
    return [tables, compile_grammar(grammar_of(form), model.grammars.tokenizer)]


def check_answers(model: CausalLM, stops: Any, texts: list[str]) -> None:
    """Answers are one of the texts as JSON, by tables and by masks."""
    options = {} if stops is None else {"eos_token_id": stops}
    schema = {"enum": texts}
    for grammar in forms_of(model, Form("json_schema", schema)):
        for seed in range(3):
            output = model.generate(
                "x", grammar=grammar, seed=seed, temperature=9.0, max_new_tokens=40, **options
            )
            assert json.loads(output.texts[0]) in texts  # type: ignore[index]
            assert output.finish_reasons == ["stop"]
            assert IMAGE not in output.token_ids[0]
            assert END not in output.token_ids[0][:-1]


@pytest.mark.parametrize("stops", [None, (), 0, [2, 3]])
def test_answers_of_a_model_that_lacks_tokens(model: CausalLM, stops: Any) -> None:
    """A text may have the spelling of a token that the model lacks."""
    check_answers(model, stops, ["q<image>", "b", "cd"])


@pytest.mark.parametrize("stops", [None, (), 0, 300, [2, 300]])
def test_answers_of_a_padded_head(padded: CausalLM, stops: Any) -> None:
    check_answers(padded, stops, ["q", "b", "cd"])


def test_a_stop_token_without_a_text(padded: CausalLM) -> None:
    assert padded.package.manifest.token_ids.eos == (2, 300, END)
    output = padded.generate(["x", ASKED], logit_bias={300: 100.0}, max_new_tokens=5)
    assert output.token_ids == [[300], [300]]
    assert output.texts == ["", ""]
    for grammar in forms_of(padded, Form("json_schema", {"enum": ["a"]})):
        output = padded.generate(
            "x", grammar=grammar, logit_bias={300: 100.0}, temperature=1.0, max_new_tokens=9
        )
        assert output.texts == ['"a"']
        assert output.token_ids[0][-1] == 300


# The tokenizer's ending.


def test_the_package_has_both_endings(model: CausalLM) -> None:
    assert model.package.manifest.token_ids.eos == (2, END)
    assert model.generation_config.eos_token_id == 2


def reason(model: CausalLM, prompt: Any, end: int, **options: Any) -> str:
    """The finish reason of a model that writes a token again and again."""
    output = model.generate(prompt, logit_bias={end: 100.0}, max_new_tokens=4, **options)
    return output.finish_reasons[0]


GREEDY = SamplingParams(temperature=0, max_new_tokens=4, logit_bias={END: 100.0})


def test_chats_end_at_either(model: CausalLM) -> None:
    for end in (2, END):
        assert reason(model, ASKED, end) == "stop"
    assert model.generate(ASKED, GREEDY).finish_reasons == ["stop"]
    assert model.generate([ASKED, "x"], GREEDY).finish_reasons == ["stop", "length"]
    assert model.generate([ASKED, "x"], [GREEDY] * 2).finish_reasons == ["stop", "length"]
    with Engine(model, slots=1) as engine:
        options: dict[str, Any] = {"logit_bias": {END: 100.0}, "max_new_tokens": 4}
        assert engine.add_request(ASKED, **options).result(60).finish_reason == "stop"
        assert engine.add_request("x", **options).result(60).finish_reason == "length"


def test_other_prompts_end_as_in_transformers(model: CausalLM) -> None:
    for prompt in ("x", [5, 6], np.array([[5, 6]])):
        assert reason(model, prompt, 2) == "stop"
        assert reason(model, prompt, END) == "length"


def test_a_callers_stop_tokens_are_those_of_chats(model: CausalLM) -> None:
    for options in ({"eos_token_id": 5}, {"generation_config": {"eos_token_id": [5]}}):
        for prompt in (ASKED, "x"):
            assert reason(model, prompt, 5, **options) == "stop"
            assert reason(model, prompt, 2, **options) == "length"
            assert reason(model, prompt, END, **options) == "length"
    assert reason(model, ASKED, END, eos_token_id=None) == "length"


@pytest.mark.parametrize("changed", [5, [5, 6], None])
def test_changed_stop_tokens_of_a_model(short_head_package: Path, changed: Any) -> None:
    model = load(short_head_package)
    model.generation_config.eos_token_id = changed
    for prompt in (ASKED, "x"):
        assert reason(model, prompt, END) == "length"
        assert reason(model, prompt, 5) == ("length" if changed is None else "stop")
        assert model.generate(prompt, GREEDY).finish_reasons == ["length"]


@pytest.mark.ci
def test_the_command_line(
    short_head_package: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    status, _, error = run("generate", short_head_package, "-p", "a <image>")
    assert status == 1
    assert re.search(LACKED, error)
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "a <image>"}, {"messages": ASKED, "max_new_tokens": 2}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, out, error = run("generate", short_head_package, "--prompt-file", file)
    first, second = map(json.loads, out.splitlines())
    assert status == 1
    assert re.search(LACKED, first["error"]["message"])
    assert len(second["token_ids"]) == 2
