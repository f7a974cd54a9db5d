"""What generate() returns."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qsample.runtime import CausalLM, GenerateOutput, SamplingParams
from tests.helpers.fake_package import PAD, VOCAB
from tests.helpers.requests import PROMPTS, RANDOM, mixed


def test_the_output(model: CausalLM) -> None:
    output = model.generate(PROMPTS, mixed(), seed=3)
    assert output.sequences.dtype == np.int64
    width, longest = max(map(len, PROMPTS)), max(map(len, output.token_ids))
    assert output.sequences.shape == (4, width + longest)
    for row, (prompt, new) in enumerate(zip(PROMPTS, output.token_ids, strict=True)):
        assert output.sequences[row, :width].tolist() == [PAD] * (width - len(prompt)) + prompt
        assert output.sequences[row, width:].tolist() == new + [PAD] * (longest - len(new))
    assert output.timing.steps == max(map(len, output.token_ids)) - 1
    assert output.timing.prefill_seconds > 0
    assert output.timing.decode_seconds > 0
    assert output.logprobs is output.top_logprobs is output.top_logprob_ids is output.probs is None


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_it_is_of_the_kind_of_the_prompts(kind: str, model: CausalLM) -> None:
    torch = pytest.importorskip("torch")
    plain = torch.Tensor if kind == "tensor" else np.ndarray
    prompts: Any = torch.tensor([[5, 6, 7]]) if kind == "tensor" else np.array([[5, 6, 7]])
    output = model.generate(prompts, do_sample=False, max_new_tokens=3)
    assert isinstance(output, plain)
    for copied in (copy.copy(output), copy.deepcopy(output), pickle.loads(pickle.dumps(output))):
        assert isinstance(copied, GenerateOutput)
        assert (copied.texts, copied.tolist()) == (output.texts, output.tolist())
    for part in (
        output.sequences,
        output[0],
        output[:, 1:],
        output + 1,
        output == 5,
        next(iter(output)),
    ):
        assert type(part) is plain
    assert (
        model.generate(prompts, return_dict_in_generate=False, max_new_tokens=3).__class__ is plain
    )
    assert repr(output).startswith(f"GenerateOutput({kind}([[ ")
    if kind == "array":
        with pytest.raises(
            AttributeError, match="no cpu, a NumPy array here; give the prompts as a tensor"
        ):
            output.cpu()
    else:
        assert torch.cat([output, prompts], dim=1).tolist() == [output.tolist()[0] + [5, 6, 7]]


def test_optional_outputs_are_arrays_that_are_filled_after_the_end_of_a_row(
    fake_model: Callable[..., CausalLM],
) -> None:
    model = fake_model(logprobs=True, top_logprobs=3, probs=True)
    output = model.generate(
        PROMPTS[:2], [SamplingParams(temperature=0.7, max_new_tokens=2), RANDOM], seed=4
    )
    longest = len(output.token_ids[1])
    assert output.logprobs is not None
    assert output.top_logprob_ids is not None
    assert output.probs is not None
    assert output.logprobs.shape == (2, longest)
    assert output.probs.shape == (2, longest, VOCAB)
    assert np.isnan(output.logprobs[0, 2:]).all()
    assert (output.top_logprob_ids[0, 2:] == -1).all()
    assert (output.probs[0, 2:] == 0).all()


def test_fields_by_name_and_names_that_are_absent(model: CausalLM) -> None:
    output = model.generate(np.array([[5, 6, 7]]), do_sample=False, max_new_tokens=3)
    assert output["token_ids"] is output.token_ids
    with pytest.raises(KeyError, match=r"'scores'; the fields are sequences, token_ids, texts"):
        output["scores"]
    for name, reason in (("scores", ": "), ("attentions", ": "), ("cuda", ", a NumPy array here")):
        with pytest.raises(AttributeError, match=f"^generate returns no {name}{reason}"):
            getattr(output, name)
    largest = output.max()
    assert type(largest) is np.int64
    copied = copy.deepcopy(output)
    copied.token_ids[0].append(9)
    copied.sequences[0, 0] = 9
    assert len(output.token_ids[0]) == 3
    assert output.tolist()[0][0] == 5
    assert copied.timing == output.timing


@pytest.mark.parametrize("given", ["tensor", "mapping", "list", "nothing", "array"])
def test_tensors_in_a_process_that_uses_torch(given: str, model: CausalLM) -> None:
    torch = pytest.importorskip("torch")
    ids = torch.tensor([[5, 6, 7]])
    prompts: dict[str, Any] = {
        "tensor": ids, "mapping": {"input_ids": ids}, "list": [5, 6, 7], "nothing": None, "array": ids.numpy(),
    }  # fmt: skip
    output = model.generate(prompts[given], max_new_tokens=1)
    is_tensor = given in ("tensor", "mapping", "nothing")
    assert isinstance(output.sequences, torch.Tensor if is_tensor else np.ndarray)
