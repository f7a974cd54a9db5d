"""The `Sampler`: one step of the decode contract, in its order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from qsample.contract import (
    ADJUSTED_LOGITS,
    INVALID_LOGITS,
    LENGTH,
    RUNNING,
    SEARCHED_ROWS,
    STALLED,
    STOPPED,
    Interface,
    retained_name,
)
from qsample.transforms.sampler import candidates, features, history, penalties, sample, sizes
from qsample.transforms.sampler.branching import Tensors, branch, option
from qsample.transforms.sampler.candidates import Chunks


class Sampler(nn.Module):
    """One step of the decode contract, from the logits on: adjusts, filters, draws, and updates the retained state.

    Args:
        interface: vocabulary and features.
        pad_token_id: `next_ids` of a row that emitted nothing.
        num_candidates: K, at least 1; None: as `sizes.choose_sizes` has it.
        chunk_size: tokens in a chunk of the two-level selection; None: likewise.
        control_flow: False: a graph without If and Loop, for capture and replay, with one more input, `searched_rows`.
            Rows that stay unsettled (see `sample.sample_without_branches`) then get status 4 and commit nothing, and
            `next_ids` repeats their last input. A graph with control flow takes status 4 for running: it can run the
            step that stalled, with that step's inputs.
        resumes: True: the other half of such a graph, with control flow, over the logits of the step that stalled.
            Rows with status 4 are run; all others stay as they are, and `next_ids` is their newest token.
    """

    def __init__(
        self,
        interface: Interface,
        pad_token_id: int,
        *,
        num_candidates: int | None = None,
        chunk_size: int | None = None,
        control_flow: bool = True,
        resumes: bool = False,
    ) -> None:
        super().__init__()
        default = sizes.choose_sizes(interface.vocab_size)
        self._interface = interface
        self._pad_token_id = pad_token_id
        self._chunk_size = chunk_size if chunk_size is not None else default.chunk_size
        self._num_candidates = min(
            num_candidates if num_candidates is not None else default.num_candidates, interface.vocab_size
        )
        if self._num_candidates < 1 or self._chunk_size < 1:
            raise ValueError("num_candidates and chunk_size must be at least 1")
        self._control_flow = control_flow
        self._resumes = resumes
        self._byte_masks: Tensor | None
        masks = penalties.byte_masks() if interface.features.allowed_tokens else None
        self.register_buffer("_byte_masks", masks, persistent=False)

    def forward(self, logits: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """logits: [B, V] float32. inputs: every other name of `Interface.sampler.input_names`.

        Returns the names of `Interface.sampler.output_names`, and `adjusted_logits` in any case. A row with emit=False
        only records its inputs; its logits are not looked at.
        """
        input_ids, input_lengths, emit = inputs["input_ids"], inputs["input_lengths"], inputs["emit"]
        capacity = inputs["tokens"].shape[1]

        # 1. Where the row stands. `lengths` is read once, for the sum: its buffer may be that of its own next value.
        total = inputs["lengths"] + input_lengths
        start = total - input_lengths
        running = self._is_running(inputs["status"])
        sampling = running & emit

        # 2. Masks, biases and penalties, then the check that something can be drawn.
        adjusted = self._adjust(logits, inputs, start, total)
        chunks = candidates.split(adjusted, self._chunk_size)
        maximum = chunks.maxima.amax(-1)
        drawing = sampling & candidates.is_valid(chunks, maximum, one_product=not self._control_flow)

        # 3., 4. The argmax of greedy rows; temperature, top-k, top-p, min-p and the draw of random ones.
        greedy = candidates.argmax(chunks)
        random = drawing & (inputs["temperature"] > 0)
        position = total.clamp(max=capacity - 1).to(torch.int64)
        uniform = inputs["noise"].gather(1, position[:, None])
        temperature, top_k, top_p, min_p = (inputs[name] for name in ("temperature", "top_k", "top_p", "min_p"))
        rows = sample.Rows(random, maximum, temperature, top_k, top_p, min_p, uniform)
        draw = self._draw(adjusted, chunks, rows, greedy, inputs)
        token = torch.where(random[:, None], draw.token, greedy)
        emitted = drawing if self._control_flow else drawing & ~draw.unsettled

        # 5. Commit.
        advance = running & (emitted | ~emit)
        lengths = torch.where(advance, total, start)
        new = advance & (start == 0)
        committed = torch.where(emitted[:, None], token, 0)

        def writes(new: Tensor | None) -> Tensors:
            return history.writes(inputs["tokens"], start, total, lengths, input_ids, committed, emitted, new)

        positions, written = self._branch(new, lambda: writes(new), lambda: writes(None))
        states = {
            "lengths": lengths,
            "status": self._next_status(inputs, total, committed, running, sampling, drawing, emitted),
            "tokens": inputs["tokens"].scatter(1, positions, written),
            "output_counts": inputs["output_counts"].scatter_add(1, committed, emitted.to(torch.float32)[:, None]),
        }

        def with_silent_ids() -> Tensors:
            return (torch.where(emitted[:, None], token, self._silent_ids(inputs, start, states["status"])),)

        plain = self._control_flow and not self._resumes  # a row that emits nothing commits 0
        wanted = self._pad_token_id != 0
        (next_ids,) = option("pad_token", wanted, with_silent_ids, lambda: (committed,)) if plain else with_silent_ids()
        results = {"next_ids": next_ids}
        results |= self._features(logits, adjusted, committed, emitted, rows, draw.threshold)
        results |= {retained_name(name): value for name, value in states.items()}
        return results | {ADJUSTED_LOGITS.name: adjusted}

    def _is_running(self, status: Tensor) -> Tensor:
        if self._resumes:
            return status == STALLED
        return (status == RUNNING) | (status == STALLED) if self._control_flow else status == RUNNING

    def _adjust(self, logits: Tensor, inputs: Mapping[str, Tensor], start: Tensor, total: Tensor) -> Tensor:
        """allowed_tokens, logit_bias, minimum length, penalties; in this order."""
        given, chosen = logits, self._interface.features

        def masked() -> Tensors:
            assert self._byte_masks is not None
            return (penalties.mask_disallowed(given, inputs["allowed_tokens"], self._byte_masks),)

        (allowed,) = option("allowed_tokens", chosen.allowed_tokens, masked, lambda: (given,))

        def biased() -> Tensors:
            return (penalties.add_bias(allowed, inputs["logit_bias_ids"], inputs["logit_bias"]),)

        (logits,) = option("logit_bias", chosen.logit_bias, biased, lambda: (allowed,))

        strengths = [inputs[f"{kind}_penalty"] for kind in ("repetition", "presence", "frequency")]
        repetition, presence, frequency = strengths
        input_ids, input_lengths, tokens = inputs["input_ids"], inputs["input_lengths"], inputs["tokens"]
        unpenalised = (repetition == 1) & (presence == 0) & (frequency == 0)
        long_enough = total >= inputs["min_length"]
        # The history is read as far as some row is penalised for it: not at all where no row is.
        furthest = torch.where(unpenalised, 0, start).max()
        length = self._as_length(furthest.clamp(max=tokens.shape[1]), tokens.shape[1])

        def penalised(ids: Tensor) -> Tensor:
            columns = (strength[:, None] for strength in strengths)
            return penalties.penalize(logits, ids, inputs["output_counts"], *columns)

        def changed() -> Tensors:
            ids = history.history_ids(tokens, start, input_ids, input_lengths, length)
            return self._branch(~long_enough, lambda: blocked(ids), lambda: (ids, penalised(ids)))

        def blocked(ids: Tensor) -> Tensors:
            stops = penalties.blocked_stops(inputs["stop_ids"], ~long_enough[:, None])
            ids = torch.cat([ids, torch.where(stops >= 0, stops, ids[:, -1:])], dim=1)
            return ids, penalties.block(penalised(ids), ids, stops)

        def unchanged() -> Tensors:
            return input_ids[:, :0], logits[:, :0]

        # One scatter for all: where the logits are in a buffer of the graph's own, it is in place.
        ids, values = self._branch(~(unpenalised & long_enough), changed, unchanged)
        return logits.scatter(1, ids, values)

    def _branch(self, needed: Tensor, then: Callable[[], Tensors], otherwise: Callable[[], Tensors]) -> Tensors:
        """`then()` where some row needs it (`needed` [B] bool), else `otherwise()`; without control flow, always."""
        return branch(needed.any(), then, otherwise) if self._control_flow else then()

    def _as_length(self, length: Tensor, capacity: int) -> int:
        """`length` (scalar) as a size; the whole capacity where sizes must not depend on data."""
        if not self._control_flow:
            return capacity
        size = cast(int, length.item())  # int() would ask for its value at export
        torch._check(size >= 0)  # type: ignore[no-untyped-call]
        torch._check(size <= capacity)  # type: ignore[no-untyped-call]
        return size

    def _draw(
        self, logits: Tensor, chunks: Chunks, rows: sample.Rows, greedy: Tensor, inputs: Mapping[str, Tensor]
    ) -> sample.Draw:
        count = self._num_candidates
        if not self._control_flow:
            return sample.sample_without_branches(logits, chunks, rows, count, inputs[SEARCHED_ROWS.name])
        return sample.sample(logits, chunks, rows, count, greedy)

    def _silent_ids(self, inputs: Mapping[str, Tensor], start: Tensor, status: Tensor) -> Tensor | int:
        """`next_ids` of rows that emit nothing, [B, 1] or one for all.

        status: [B], after the step.
        """
        if self._resumes:
            # What the step itself gave a settled row: the token at `lengths`, whose keys are still to come.
            newest = start.clamp(max=inputs["tokens"].shape[1] - 1).to(torch.int64)
            return inputs["tokens"].gather(1, newest[:, None]).to(torch.int64)
        if not self._control_flow:
            last = (inputs["input_lengths"] - 1).to(torch.int64)[:, None]
            stalled = (status == STALLED)[:, None]
            return torch.where(stalled, inputs["input_ids"].gather(1, last), self._pad_token_id)
        return self._pad_token_id

    def _next_status(
        self,
        inputs: Mapping[str, Tensor],
        total: Tensor,
        token: Tensor,
        running: Tensor,
        sampling: Tensor,
        drawing: Tensor,
        emitted: Tensor,
    ) -> Tensor:
        """Status after the step, [B] int32. token: [B, 1]; the rest [B].

        sampling: rows asked for a token; drawing: those of them with a choice; emitted: those with a token.
        """
        stopped = (token == inputs["stop_ids"]).any(-1)
        full = total + 1 >= inputs["max_length"].clamp(max=inputs["tokens"].shape[1])
        status = torch.where(stopped, STOPPED, torch.where(full, LENGTH, RUNNING))
        if not self._control_flow:
            status = torch.where(emitted, status, STALLED)
        status = torch.where(drawing, status, torch.where(sampling, INVALID_LOGITS, RUNNING))
        return torch.where(running, status.to(torch.int32), inputs["status"])

    def _features(
        self, logits: Tensor, adjusted: Tensor, token: Tensor, emitted: Tensor, rows: sample.Rows, threshold: Tensor
    ) -> dict[str, Tensor]:
        chosen, results = self._interface.features, {}
        emitted, random = emitted[:, None], rows.random[:, None]
        if chosen.logprobs or chosen.top_logprobs:
            chunks = candidates.split(logits, self._chunk_size)
            normaliser = features.normaliser(chunks)
            if chosen.logprobs:
                results["logprobs"] = features.logprobs(logits, normaliser, token, emitted)
            if chosen.top_logprobs:
                ids, values = features.top_logprobs(chunks, normaliser, chosen.top_logprobs, emitted)
                results |= {"top_logprob_ids": ids, "top_logprobs": values}
        if chosen.probs:
            weights = rows.keep(adjusted, rows.weigh(adjusted), threshold)
            results["probs"] = features.probabilities(weights, random & emitted, ~random & emitted, token)
        return results
