"""Hosts as written today: they copy a decoder's logits and choose the next tokens themselves."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from decode_worker import Ids, Request

Logits = np.ndarray[Any, np.dtype[np.float32]]


class LogitsHost:
    """ONNX Runtime on a file of onnxruntime-genai's; keys and values stay in its memory, logits are copied.

    The sampler is "numpy", or "transformers" for its logits processors and torch's multinomial.
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
        self._names = [output.name for output in self._session.get_outputs()]
        # Output → the input of the next step.
        self._states = {
            name: name.replace("present", "past_key_values") for name in self._names if name.startswith("present")
        }
        self.vocab_size = int(self._session.get_outputs()[0].shape[-1])
        self._make_sampler = {"numpy": NumpySampler, "transformers": TransformersSampler}[sampler]

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
            ids = sample(outputs["logits"].numpy()[:, -1], history, prompts.shape[1])[:, None]
            history = np.concatenate([history, ids], axis=1)
            moments.append(time.perf_counter())
        return moments, history[:, prompts.shape[1] :].tolist()


class NumpySampler:
    """A sampler in float32 NumPy; parameters have Hugging Face's names, and an absent parameter is off."""

    def __init__(self, sampling: Mapping[str, float]) -> None:
        self._sampling = {"temperature": 1.0, "top_p": 1.0, **sampling}
        self._generator = np.random.default_rng(0)

    def __call__(self, logits: Logits, history: Ids, start: int) -> Ids:
        """Sample a token per row.

        Args:
            logits: [B, V] float32.
            history: [B, T] int64, the tokens so far.
            start: The column of the first sampled token in `history`.

        Returns:
            [B] int64.
        """
        if self._sampling["temperature"] == 0:
            return self.penalized(logits, history, start).argmax(axis=-1)
        totals = self.weights(logits, history, start).cumsum(axis=-1)
        draws = self._generator.random((len(logits), 1), np.float32) * totals[:, -1:]
        return (totals < draws).sum(axis=-1).clip(0, logits.shape[-1] - 1)

    def penalized(self, logits: Logits, history: Ids, start: int) -> Logits:
        """[B, V]: the logits after the penalties."""
        repetition = np.float32(self._sampling.get("repetition_penalty", 1.0))
        presence, frequency = (
            np.float32(self._sampling.get(f"{name}_penalty", 0)) for name in ("presence", "frequency")
        )
        if repetition == 1 and not presence and not frequency:
            return logits
        scores = logits.copy()
        for row, ids in zip(scores, history, strict=True):
            seen = np.unique(ids)
            row[seen] = np.where(row[seen] < 0, row[seen] * repetition, row[seen] / repetition)
            sampled, counts = np.unique(ids[start:], return_counts=True)
            row[sampled] -= presence + frequency * counts.astype(np.float32)
        return scores

    def weights(self, logits: Logits, history: Ids, start: int) -> Logits:
        """[B, V]: the unnormalized probabilities."""
        sampling = self._sampling
        scores = self.penalized(logits, history, start) / np.float32(sampling["temperature"])
        if sampling.get("top_k"):
            k = int(sampling["top_k"])
            least = np.partition(scores, -k, axis=-1)[:, -k, None]
            scores = np.where(scores < least, -np.inf, scores)
        weights: Logits = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        if sampling["top_p"] < 1:
            order = np.argsort(-weights, axis=-1)
            ranked = np.take_along_axis(weights, order, axis=-1)
            ranked[ranked.cumsum(axis=-1) - ranked >= sampling["top_p"]] = 0
            np.put_along_axis(weights, order, ranked, axis=-1)
        if sampling.get("min_p"):
            weights[weights < np.float32(sampling["min_p"]) * weights.max(axis=-1, keepdims=True)] = 0
        return weights


class TransformersSampler:
    """The processors and the draw of `generate`, plus the penalties by count, which transformers lacks."""

    def __init__(self, sampling: Mapping[str, float]) -> None:
        import torch
        import transformers as hf

        self._torch, self._sampling = torch, sampling
        self._greedy = sampling.get("temperature", 1.0) == 0
        self._penalties, self._warpers = hf.LogitsProcessorList(), hf.LogitsProcessorList()
        if sampling.get("repetition_penalty", 1.0) != 1:
            self._penalties.append(hf.RepetitionPenaltyLogitsProcessor(sampling["repetition_penalty"]))
        if sampling.get("temperature", 1.0) not in (0, 1):
            self._warpers.append(hf.TemperatureLogitsWarper(sampling["temperature"]))
        if sampling.get("top_k"):
            self._warpers.append(hf.TopKLogitsWarper(int(sampling["top_k"])))
        if sampling.get("top_p", 1.0) < 1:
            self._warpers.append(hf.TopPLogitsWarper(sampling["top_p"]))
        if sampling.get("min_p"):
            self._warpers.append(hf.MinPLogitsWarper(sampling["min_p"]))

    def __call__(self, logits: Logits, history: Ids, start: int) -> Ids:
        """Sample a token per row; see NumpySampler."""
        scores = self.scores(logits, history, start)
        if self._greedy:
            return np.asarray(scores.argmax(dim=-1).numpy())
        return np.asarray(self._torch.multinomial(scores.softmax(dim=-1), 1)[:, 0].numpy())

    def scores(self, logits: Logits, history: Ids, start: int) -> Any:
        """[B, V] tensor: the logits after all processors."""
        ids = self._torch.from_numpy(history)
        scores = self._penalties(ids, self._torch.from_numpy(logits))
        presence, frequency = (self._sampling.get(f"{name}_penalty", 0.0) for name in ("presence", "frequency"))
        if presence or frequency:
            sampled = ids[:, start:]
            counts = self._torch.zeros_like(scores).scatter_add_(
                1, sampled, self._torch.ones(sampled.shape, dtype=scores.dtype)
            )
            scores = scores - frequency * counts - presence * (counts > 0)
        return self._warpers(ids, scores)
