"""How hosts run a decoder file today: logits come to the host, and the next tokens are chosen there."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from decode_worker import Ids, Request

Logits = np.ndarray[Any, np.dtype[np.float32]]


class LogitsHost:
    """ONNX Runtime on a file of onnxruntime-genai's; keys and values stay in its memory, logits are copied.

    sampler: "numpy", or "transformers" for its logits processors and torch's multinomial.
    """

    def __init__(self, model: Path, threads: int, sampler: str) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.force_spinning_stop", "1")
        self._ort = ort
        self._session = ort.InferenceSession(model / "model.onnx", options, providers=["CPUExecutionProvider"])
        decoder = json.loads((model / "genai_config.json").read_text())["model"]["decoder"]
        self._heads, self._size = decoder["num_key_value_heads"], decoder["head_size"]
        # Output → the input that it becomes.
        self._states = {
            one.name: one.name.replace("present", "past_key_values")
            for one in self._session.get_outputs()
            if one.name.startswith("present")
        }
        self._names = [one.name for one in self._session.get_outputs()]
        self.vocab_size = int(self._session.get_outputs()[0].shape[-1])
        self._make_sampler = {"numpy": numpy_sampler, "transformers": transformers_sampler}[sampler]

    def generate(self, prompts: Ids, request: Request) -> tuple[list[float], list[list[int]]]:
        value = self._ort.OrtValue.ortvalue_from_numpy
        rows, sample = len(prompts), self._make_sampler(request.sampling)
        moments, ids, history = [time.perf_counter()], prompts, prompts
        empty = np.zeros((rows, self._heads, 0, self._size), np.float32)
        past = {name: value(empty) for name in self._states.values()}
        for _ in range(request.new_tokens):
            binding = self._session.io_binding()
            binding.bind_ortvalue_input("input_ids", value(np.ascontiguousarray(ids)))
            binding.bind_ortvalue_input("attention_mask", value(np.ones(history.shape, np.int64)))
            for name, state in past.items():
                binding.bind_ortvalue_input(name, state)
            for name in self._names:
                binding.bind_output(name)
            self._session.run_with_iobinding(binding)
            outputs = dict(zip(self._names, binding.get_outputs(), strict=True))
            past = {name: outputs[output] for output, name in self._states.items()}
            ids = sample(outputs["logits"].numpy()[:, -1], history)[:, None]
            history = np.concatenate([history, ids], axis=1)
            moments.append(time.perf_counter())
        return moments, history[:, prompts.shape[1] :].tolist()


def numpy_sampler(sampling: dict[str, float]) -> Any:
    """Greedy, or temperature, top-k and top-p in float32, and a draw."""
    generator = np.random.default_rng(0)
    temperature = sampling.get("temperature", 1.0)

    def sample(logits: Logits, history: Ids) -> Ids:
        if temperature == 0:
            return logits.argmax(axis=-1)
        scores = logits / np.float32(temperature)
        if sampling.get("top_k"):
            k = int(sampling["top_k"])
            least = np.partition(scores, -k, axis=-1)[:, -k, None]
            scores = np.where(scores < least, -np.inf, scores)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        if sampling.get("top_p", 1.0) < 1:
            order = np.argsort(-weights, axis=-1)
            ranked = np.take_along_axis(weights, order, axis=-1)
            ranked[ranked.cumsum(axis=-1) - ranked >= sampling["top_p"]] = 0
            np.put_along_axis(weights, order, ranked, axis=-1)
        totals = weights.cumsum(axis=-1)
        draws = generator.random((len(logits), 1), np.float32) * totals[:, -1:]
        return (totals < draws).sum(axis=-1).clip(0, logits.shape[-1] - 1)

    return sample


def transformers_sampler(sampling: dict[str, float]) -> Any:
    """The processors that `generate` would use, and its draw."""
    import torch
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    processors = LogitsProcessorList()
    temperature = sampling.get("temperature", 1.0)
    if temperature not in (0, 1):
        processors.append(TemperatureLogitsWarper(temperature))
    if sampling.get("top_k"):
        processors.append(TopKLogitsWarper(int(sampling["top_k"])))
    if sampling.get("top_p", 1.0) < 1:
        processors.append(TopPLogitsWarper(sampling["top_p"]))

    def sample(logits: Logits, history: Ids) -> Ids:
        scores = torch.from_numpy(logits)
        if temperature == 0:
            return scores.argmax(dim=-1).numpy()
        scores = processors(torch.from_numpy(history), scores)
        return torch.multinomial(scores.softmax(dim=-1), 1)[:, 0].numpy()

    return sample
