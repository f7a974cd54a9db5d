"""Hosts as written today: they copy a decoder's logits and choose the next tokens themselves."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from systems import Generator, Ids, Sampling

Logits = np.ndarray[Any, np.dtype[np.float32]]


class LogitsHost(Generator):
    """ONNX Runtime on a file of onnxruntime-genai's; keys and values stay in its memory, logits are copied.

    sampler: "numpy", or "transformers" for its logits processors and torch's multinomial.
    """

    library = "onnxruntime"

    def __init__(self, model: Path, threads: int, sampler: str) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.force_spinning_stop", "1")
        self._session = ort.InferenceSession(
            model / "model.onnx", options, providers=["CPUExecutionProvider"]
        )
        decoder = json.loads((model / "genai_config.json").read_text())["model"]["decoder"]
        self._heads, self._size = decoder["num_key_value_heads"], decoder["head_size"]
        self._names = [output.name for output in self._session.get_outputs()]
        # Output → the input of the next step.
        self._states = {
            name: name.replace("present", "past_key_values")
            for name in self._names
            if name.startswith("present")
        }
        self.vocab_size = int(self._session.get_outputs()[0].shape[-1])
        self._make_sampler = {"numpy": NumpySampler, "transformers": TransformersSampler}[sampler]

    def run(
        self, prompts: Ids, new_tokens: int, sampling: Sampling
    ) -> tuple[list[float], list[list[int]]]:
        value = ort.OrtValue.ortvalue_from_numpy
        sample = self._make_sampler(sampling)
        moments, ids, history = [time.perf_counter()], prompts, prompts
        empty = np.zeros((len(prompts), self._heads, 0, self._size), np.float32)
        past = {name: value(empty) for name in self._states.values()}
        for _ in range(new_tokens):
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

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = {"temperature": 1.0, "top_p": 1.0, **sampling}
        self._generator = np.random.default_rng(0)

    def __call__(self, logits: Logits, history: Ids, start: int) -> Ids:
        """A token per row, [B] int64, of logits [B, V] after `history` [B, T], sampled from column `start` on."""
        scores = self._penalized(logits, history, start)
        if self._sampling["temperature"] == 0:
            return scores.argmax(axis=-1)
        totals = self.weights(scores).cumsum(axis=-1)
        draws = self._generator.random((len(logits), 1), np.float32) * totals[:, -1:]
        return (totals < draws).sum(axis=-1).clip(0, logits.shape[-1] - 1)

    def _penalized(self, logits: Logits, history: Ids, start: int) -> Logits:
        """[B, V]: the logits after the penalties."""
        repetition = np.float32(self._sampling.get("repetition_penalty", 1.0))
        presence, frequency = (
            np.float32(self._sampling.get(f"{name}_penalty", 0))
            for name in ("presence", "frequency")
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

    def weights(self, scores: Logits) -> Logits:
        """[B, V]: the unnormalized probabilities."""
        sampling = self._sampling
        scores = scores / np.float32(sampling["temperature"])
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
            weights[
                weights < np.float32(sampling["min_p"]) * weights.max(axis=-1, keepdims=True)
            ] = 0
        return weights


class TransformersSampler:
    """The processors and the draw of `generate`, plus the penalties by count, which transformers lacks."""

    def __init__(self, sampling: Sampling) -> None:
        import torch
        import transformers as hf

        self._torch, self._sampling = torch, sampling
        self._greedy = sampling.get("temperature", 1.0) == 0
        self._penalties, self._warpers = hf.LogitsProcessorList(), hf.LogitsProcessorList()
        if sampling.get("repetition_penalty", 1.0) != 1:
            self._penalties.append(
                hf.RepetitionPenaltyLogitsProcessor(sampling["repetition_penalty"])
            )
        for name, kind, off in (
            ("temperature", hf.TemperatureLogitsWarper, (0, 1)),
            ("top_k", hf.TopKLogitsWarper, (0,)),
            ("top_p", hf.TopPLogitsWarper, (1,)),
            ("min_p", hf.MinPLogitsWarper, (0,)),
        ):
            if name in sampling and sampling[name] not in off:
                self._warpers.append(kind(sampling[name]))

    def __call__(self, logits: Logits, history: Ids, start: int) -> Ids:
        """As NumpySampler."""
        scores = self.scores(logits, history, start)
        if self._greedy:
            return np.asarray(scores.argmax(dim=-1).numpy())
        return np.asarray(self._torch.multinomial(scores.softmax(dim=-1), 1)[:, 0].numpy())

    def scores(self, logits: Logits, history: Ids, start: int) -> Any:
        """[B, V] tensor: the logits after all processors."""
        ids = self._torch.from_numpy(history)
        scores = self._penalties(ids, self._torch.from_numpy(logits))
        presence, frequency = (
            self._sampling.get(f"{name}_penalty", 0.0) for name in ("presence", "frequency")
        )
        if presence or frequency:
            sampled = ids[:, start:]
            counts = self._torch.zeros_like(scores).scatter_add_(
                1, sampled, self._torch.ones(sampled.shape, dtype=scores.dtype)
            )
            scores = scores - frequency * counts - presence * (counts > 0)
        return self._warpers(ids, scores)
