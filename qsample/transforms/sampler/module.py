"""Logits, sampling parameters and retained state enter; next-token ids and the new state leave: the `Sampler`."""

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
    STALLED,
    STOPPED,
    Interface,
    retained_name,
)
from qsample.transforms.sampler import candidates, features, filters, history, penalties, tiers
from qsample.transforms.sampler.candidates import Chunks
from qsample.transforms.sampler.control import Tensors, branch


class Sampler(nn.Module):
    """One step of the decode contract, from the logits on: adjusts, filters, draws, and updates the retained state.

    Args:
        interface: vocabulary and features.
        pad_token_id: `next_ids` of a row that emitted nothing.
        num_candidates: K of the narrow tier, at least 1; None: as `candidates.choose_sizes` has it.
        chunk_size: tokens in a chunk of the two-level selection; None: likewise.
        control_flow: False: a graph without If and Loop, for capture and replay. Rows that the narrow tier cannot
            settle then get status 4 and commit nothing, and `next_ids` repeats their last input. A graph with control
            flow takes status 4 for running: it can run the step that stalled, with that step's inputs.
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
        sizes = candidates.choose_sizes(interface.vocab_size)
        self._interface = interface
        self._pad_token_id = pad_token_id
        self._chunk_size = chunk_size if chunk_size is not None else sizes.chunk_size
        self._num_candidates = min(
            num_candidates if num_candidates is not None else sizes.num_candidates, interface.vocab_size
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
        column = {name: tensor[:, None] if tensor.ndim == 1 else tensor for name, tensor in inputs.items()}
        input_ids, input_lengths = inputs["input_ids"], column["input_lengths"]
        capacity = inputs["tokens"].shape[1]

        # 1. Where the row stands. `lengths` is read once, for the sum: its buffer may be that of its own next value.
        total = column["lengths"] + input_lengths
        start = total - input_lengths
        running = self._is_running(column["status"])
        sampling = running & column["emit"]

        # 2. Masks, biases and penalties, then the check that something can be drawn.
        adjusted = self._adjust(logits, column, start, total)
        chunks = candidates.split(adjusted, self._chunk_size)
        maximum = chunks.maxima.amax(-1, keepdim=True)
        drawing = sampling & candidates.is_valid(chunks, maximum)

        # 3., 4. The argmax of greedy rows; temperature, top-k, top-p, min-p and the draw of random ones.
        random = drawing & (column["temperature"] > 0)
        last_rank = filters.last_rank(column["top_k"])
        rows = tiers.Rows(
            random,
            maximum,
            filters.inverse_temperature(column["temperature"]),
            last_rank,
            last_rank < self._interface.vocab_size - 1,
            column["top_p"],
            column["top_p"] < 1,
            column["min_p"],
            inputs["noise"].gather(1, total.clamp(max=capacity - 1).to(torch.int64)),
        )
        draw = self._draw(adjusted, chunks, rows)
        token = torch.where(random, draw.token, candidates.argmax(chunks))
        emitted = drawing if self._control_flow else drawing & ~(random & draw.unsettled)

        # 5. Commit.
        advance = running & (emitted | ~column["emit"])
        new = advance & (start == 0)
        committed = torch.where(emitted, token, 0)

        def writes(new: Tensor | None) -> Tensors:
            tokens = inputs["tokens"]
            return history.writes(tokens, start, input_ids, input_lengths, committed, advance, emitted, new)

        positions, written = self._branch(new, lambda: writes(new), lambda: writes(None))
        states = {
            "lengths": (start + input_lengths * advance)[:, 0],
            "status": self._next_status(column, total, committed, running, sampling, drawing, emitted)[:, 0],
            "tokens": inputs["tokens"].scatter(1, positions, written),
            "output_counts": inputs["output_counts"].scatter_add(1, committed, emitted.to(torch.float32)),
        }
        results = {"next_ids": committed}
        silent = self._silent_ids(column, start, states["status"][:, None])
        if silent is not None:
            results["next_ids"] = torch.where(emitted, token, silent)
        results |= self._features(logits, adjusted, committed, emitted, rows, draw.threshold)
        results |= {retained_name(name): value for name, value in states.items()}
        return results | {ADJUSTED_LOGITS.name: adjusted}

    def _is_running(self, status: Tensor) -> Tensor:
        stalled = status == STALLED
        if self._resumes:
            return stalled
        return (status == RUNNING) | stalled if self._control_flow else status == RUNNING

    def _adjust(self, logits: Tensor, column: Mapping[str, Tensor], start: Tensor, total: Tensor) -> Tensor:
        """allowed_tokens, logit_bias, minimum length, penalties; in this order."""
        if self._byte_masks is not None:
            logits = penalties.mask_disallowed(logits, column["allowed_tokens"], self._byte_masks)
        if self._interface.features.logit_bias:
            logits = penalties.add_bias(logits, column["logit_bias_ids"], column["logit_bias"])

        repetition, presence, frequency = (
            column[f"{kind}_penalty"] for kind in ("repetition", "presence", "frequency")
        )
        input_ids, input_lengths, tokens = column["input_ids"], column["input_lengths"], column["tokens"]
        unpenalised = (repetition == 1) & (presence == 0) & (frequency == 0)
        long_enough = total >= column["min_length"]
        # The history is read as far as some row is penalised for it: not at all where no row is.
        length = self._as_length((start * ~unpenalised).max().clamp(max=tokens.shape[1]), tokens.shape[1])

        def penalised(ids: Tensor) -> Tensor:
            return penalties.penalize(logits, ids, column["output_counts"], repetition, presence, frequency)

        def changed() -> Tensors:
            ids = history.history_ids(tokens, start, input_ids, input_lengths, length)
            return self._branch(~long_enough, lambda: blocked(ids), lambda: (ids, penalised(ids)))

        def blocked(ids: Tensor) -> Tensors:
            stops = penalties.blocked_stops(column["stop_ids"], ~long_enough)
            ids = torch.cat([ids, torch.where(stops >= 0, stops, ids[:, -1:])], dim=1)
            return ids, penalties.block(penalised(ids), ids, stops)

        def unchanged() -> Tensors:
            return input_ids[:, :0], logits[:, :0]

        # One scatter for all: where the logits are in a buffer of the graph's own, it is in place.
        ids, values = self._branch(~(unpenalised & long_enough), changed, unchanged)
        return logits.scatter(1, ids, values)

    def _branch(self, needed: Tensor, then: Callable[[], Tensors], otherwise: Callable[[], Tensors]) -> Tensors:
        """`then()` where some row needs it (`needed` [B, 1] bool), else `otherwise()`; without control flow, always."""
        return branch(needed.any(), then, otherwise) if self._control_flow else then()

    def _as_length(self, length: Tensor, capacity: int) -> int:
        """`length` (scalar) as a size; the whole capacity where sizes must not depend on data."""
        if not self._control_flow:
            return capacity
        size = cast(int, length.item())  # int() would ask for its value at export
        torch._check(size >= 0)  # type: ignore[no-untyped-call]
        torch._check(size <= capacity)  # type: ignore[no-untyped-call]
        return size

    def _draw(self, logits: Tensor, chunks: Chunks, rows: tiers.Rows) -> tiers.Draw:
        count = self._num_candidates
        if not self._control_flow:
            return tiers.narrow_only(chunks, rows, count, self._interface.vocab_size)

        return tiers.sample(logits, chunks, rows, count)

    def _silent_ids(self, column: Mapping[str, Tensor], start: Tensor, status: Tensor) -> Tensor | int | None:
        """`next_ids` of rows that emit nothing, [B, 1] or one for all; None = 0, which they hold anyway.

        status: [B, 1], after the step.
        """
        if self._resumes:
            # What the step itself gave a settled row: the token at `lengths`, whose keys are still to come.
            newest = start.clamp(max=column["tokens"].shape[1] - 1).to(torch.int64)
            return column["tokens"].gather(1, newest).to(torch.int64)
        if not self._control_flow:
            last = (column["input_lengths"] - 1).to(torch.int64)
            return torch.where(status == STALLED, column["input_ids"].gather(1, last), self._pad_token_id)
        return self._pad_token_id or None

    def _next_status(
        self,
        column: Mapping[str, Tensor],
        total: Tensor,
        token: Tensor,
        running: Tensor,
        sampling: Tensor,
        drawing: Tensor,
        emitted: Tensor,
    ) -> Tensor:
        """Rows asked for a token (sampling), those of them with a choice (drawing), those with a token (emitted)."""
        stopped = (token == column["stop_ids"]).any(-1, keepdim=True)
        full = total + 1 >= column["max_length"].clamp(max=column["tokens"].shape[1])
        status = torch.where(stopped, STOPPED, full * LENGTH)
        if not self._control_flow:
            status = torch.where(emitted, status, STALLED)
        status = torch.where(drawing, status, sampling * INVALID_LOGITS)
        return torch.where(running, status.to(torch.int32), column["status"])

    def _features(
        self, logits: Tensor, adjusted: Tensor, token: Tensor, emitted: Tensor, rows: tiers.Rows, threshold: Tensor
    ) -> dict[str, Tensor]:
        chosen, results = self._interface.features, {}
        if chosen.logprobs or chosen.top_logprobs:
            chunks = candidates.split(logits, self._chunk_size)
            normaliser = features.normaliser(chunks)
            if chosen.logprobs:
                results["logprobs"] = features.logprobs(logits, normaliser, token, emitted)
            if chosen.top_logprobs:
                ids, values = features.top_logprobs(chunks, normaliser, chosen.top_logprobs, emitted)
                results |= {"top_logprob_ids": ids, "top_logprobs": values}
        if chosen.probs:
            masses = filters.keep(adjusted, rows.weights(adjusted), threshold, rows.min_p)
            results["probs"] = features.probabilities(masses, rows.random & emitted, ~rows.random & emitted, token)
        return results
