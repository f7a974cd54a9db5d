"""Tokens of a real model's packages: greedy ones are transformers', and neighbours, prefixes and adapters are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qsample.runtime import CausalLM, Engine, SamplingParams, load
from tests.helpers.adapters import save_adapter
from tests.real.conftest import Reference

pytestmark = pytest.mark.real

TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Water",
    "The three laws of motion were published in 1687. The first of them says that a body remains at rest, or in motion "
    "at a constant speed in a straight line, unless it is acted upon by a force. The second says",
    "Zutaten für einen Kuchen: 250 g Mehl,",
]
QUESTION = [{"role": "user", "content": "How do I boil an egg?"}]
CHATS = [
    QUESTION,
    [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "What colour is the sky?"},
    ],
    [
        {"role": "user", "content": "My name is Anna & I like <tea>."},
        {"role": "assistant", "content": "Hello, Anna!\n"},
        {"role": "user", "content": "What do I like?"},
    ],
]
RULES = (
    "You are the assistant of a library. Be friendly and answer in at most three sentences. The library is open from "
    "Monday to Friday between nine and six, and on Saturday until one. A card costs ten euros a year and is free for "
    "children. Books may be kept for four weeks, films for one week, and both can be renewed twice by telephone."
)


@pytest.fixture(scope="module")
def model(float_package: Path) -> CausalLM:
    return load(float_package)


def new_tokens(model: CausalLM, prompt: Any, count: int, **options: Any) -> list[int]:
    return model.generate(
        prompt, max_new_tokens=count, **({"do_sample": False} | options)
    ).token_ids[0]


@pytest.mark.parametrize("form", ["float_package", "gguf_package"])
def test_greedy_tokens_are_those_of_transformers(
    form: str, reference: Reference, request: pytest.FixtureRequest
) -> None:
    package = load(request.getfixturevalue(form))
    for text in TEXTS:
        assert new_tokens(package, text, 24) == reference.greedy(reference.encoded(text), 24), text
    for chat in CHATS:
        assert new_tokens(package, chat, 24) == reference.greedy(reference.chat(chat), 24), chat


def test_conversations_are_rendered_as_by_transformers(
    model: CausalLM, reference: Reference
) -> None:
    for chat in CHATS:
        output = model.generate(chat, max_new_tokens=1)
        assert output.sequences[0, :-1].tolist() == reference.chat(chat)


def test_rows_of_different_lengths_are_those_that_each_has_alone(
    model: CausalLM, reference: Reference
) -> None:
    prompts = [reference.encoded(text) for text in TEXTS]
    assert len({len(ids) for ids in prompts}) == len(prompts)
    greedy = model.generate(TEXTS, max_new_tokens=16, do_sample=False)
    assert greedy.token_ids == [reference.greedy(ids, 16) for ids in prompts]
    sampled: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "top_k": 0}
    together = model.generate(TEXTS, SamplingParams(max_new_tokens=16, **sampled), seed=3)
    alone = [
        new_tokens(model, text, 16, do_sample=True, seed=3 + row, **sampled)
        for row, text in enumerate(TEXTS)
    ]
    assert together.token_ids == alone
    assert together.token_ids != greedy.token_ids


def test_a_stored_prefix_changes_no_token(
    model: CausalLM, reference: Reference, tmp_path: Path
) -> None:
    system = {"role": "system", "content": RULES}
    chats: Any = [
        [system, {"role": "user", "content": text}]
        for text in ("How much is a card?", "Can I renew a film?")
    ]
    stored = model.save_prefix([system], tmp_path / "rules")
    assert stored >= 64
    for prefixes, cached in (([], 0), ([tmp_path / "rules"], stored)):
        for chat in chats:
            with Engine(model, slots=1, prefixes=prefixes) as engine:
                result = engine.add_request(chat, max_new_tokens=24, do_sample=False).result()
            assert result.token_ids == reference.greedy(reference.chat(chat), 24)
            assert result.usage.cached_tokens == cached


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A LoRA adapter of two projections of every layer, and the changes of the weights by their names."""
    generator = torch.Generator().manual_seed(1)
    tensors, changes = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for layer in range(30):
        for module, rows in (("self_attn.q_proj", 576), ("mlp.up_proj", 1536)):
            a = torch.randn(4, 576, generator=generator) * 0.05
            b = torch.randn(rows, 4, generator=generator) * 0.05
            path = f"model.layers.{layer}.{module}"
            tensors |= {
                f"base_model.model.{path}.lora_{part}.weight": x for part, x in (("A", a), ("B", b))
            }
            changes[f"{path}.weight"] = 8 / 4 * b @ a
    folder = tmp_path_factory.mktemp("lora") / "adapter"
    save_adapter(folder, tensors, r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"])
    return folder, changes


def by_hand(model: Any, folder: Path, changes: dict[str, torch.Tensor]) -> Any:
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, change in changes.items():
            weights[name].add_(change)
    return model


def by_peft(model: Any, folder: Path, changes: dict[str, torch.Tensor]) -> Any:
    peft = pytest.importorskip("peft", reason="pip install peft; it merges the adapter, too")
    return peft.PeftModel.from_pretrained(model, folder).merge_and_unload()


@pytest.mark.parametrize("merge", [by_hand, by_peft])
def test_an_adapter_gives_the_tokens_of_the_merged_model(
    merge: Any, adapter: Any, model: CausalLM, real_folder: Path, reference: Reference
) -> None:
    merged = Reference(real_folder / "checkpoint")
    merged.model = merge(merged.model, *adapter)
    model.load_adapter("changed", adapter[0], hotswap=True)
    for text in TEXTS[:3]:
        ids = reference.encoded(text)
        expected = merged.greedy(ids, 16)
        assert expected != reference.greedy(ids, 16)
        params = [
            SamplingParams(temperature=0, max_new_tokens=16, adapter=name)
            for name in ("changed", None)
        ]
        assert model.generate([text, text], params).token_ids == [
            expected,
            reference.greedy(ids, 16),
        ]
