"""The contract's sampling step and its noise in plain NumPy float64: slow, and written from docs/contract.md alone.

An oracle for tests. It shares no code with the package beyond names.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tests.helpers.reference_adjust import adjust
from tests.helpers.reference_filters import (
    CANDIDATES,
    LOWEST,
    Row,
    distribution,
    mirostat_limit,
    survivors,
)
from tests.helpers.reference_grammar import TABLE_NAMES, next_state

__all__ = [
    "adjust",
    "distribution",
    "philox4x32",
    "philox_uniform",
    "philox_uniforms",
    "reference_step",
]
Array = np.ndarray
# The inputs of a graph for replay that say how much of it a step needs.
REPLAY_LISTS = ("processed_rows", "vocabulary_rows", "searched_rows")
_MASK32 = 0xFFFFFFFF


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int], rounds: int = 10
) -> tuple[int, int, int, int]:
    """Philox4x32 of Salmon et al., SC'11, in Python integers."""
    c, (k0, k1) = counter, key
    for _ in range(rounds):
        product0, product1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = (
            (product1 >> 32) ^ c[1] ^ k0,
            product1 & _MASK32,
            (product0 >> 32) ^ c[3] ^ k1,
            product0 & _MASK32,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c


def philox_uniform(seed: int, t: int, stream: int = 0) -> float:
    """u[t] of a row with this seed, in [0, 1): stream 0 is `noise`, stream 1 is `xtc_noise`."""
    seed &= 0xFFFFFFFFFFFFFFFF
    return (philox4x32((t // 4, stream, 0, 0), (seed & _MASK32, seed >> 32))[t % 4] >> 8) * 2.0**-24


def philox_uniforms(seed: int, n: int, stream: int = 0) -> Array:
    """u[0..n-1] of a row with this seed: [n] float32 in [0, 1)."""
    return np.array([philox_uniform(seed, t, stream) for t in range(n)], dtype=np.float32)


def reference_step(
    logits: Array,
    inputs: Mapping[str, Array],
    *,
    pad_token_id: int,
    top_logprobs: int = 0,
    logprobs_mode: str = "raw_logprobs",
    filter_order: str = "huggingface",
    num_candidates: int = CANDIDATES,
) -> dict[str, Array]:
    """One step of the contract for every row.

    Args:
        logits: [B, V], float32 values.
        inputs: the sampler's inputs and states, as arrays with the contract's shapes. An extra filter applies if its
            inputs are there. If there are lists of rows, the step is that of a graph for replay.
        pad_token_id: `next_ids` of a row that emits nothing.
        top_logprobs: M.
        logprobs_mode: "raw_logprobs" or "processed_logprobs".
        filter_order: "huggingface" or "llama.cpp".
        num_candidates: K; the contract's is 64.

    Returns:
        The next states under `NAME_RetainedState`, `next_ids`, `logprobs`, `top_logprob_ids`, `top_logprobs`, `probs`
        in float64, `adjusted_logits` after step 2 (NaN in a row that samples nothing), and two aids for tests:
        `margin` [B], the distance of u to the nearest boundary of the cumulative distribution, and `edge` [B], the
        relative distance of the closest call that a filter made. Both are inf if nothing was close to decide. Of
        log-probabilities below `logprob_floor` [B], float32 may not tell whether they are probabilities of 0.
    """
    batch, vocab = logits.shape
    names = ("lengths", "status", "tokens", "output_counts", "mirostat_mu", "adaptive_error")
    names += ("grammar_state",)
    state = {name: np.array(inputs[name]) for name in names if name in inputs}
    out = {
        "next_ids": np.full((batch, 1), pad_token_id, np.int64),
        "logprobs": np.zeros((batch, 1)),
        "top_logprob_ids": np.full((batch, top_logprobs), -1, np.int32),
        "top_logprobs": np.zeros((batch, top_logprobs)),
        "probs": np.zeros((batch, vocab)),
        "margin": np.full(batch, np.inf),
        "edge": np.full(batch, np.inf),
        "logprob_floor": np.full(batch, -np.inf),
        "adjusted_logits": np.full((batch, vocab), np.nan, np.float32),
    }
    lists = {name: np.asarray(inputs.get(name, range(batch))).tolist() for name in REPLAY_LISTS}
    for b in range(batch):
        shared = {name: array for name, array in inputs.items() if name in TABLE_NAMES}
        row = {
            name: np.asarray(array)[b]
            for name, array in inputs.items()
            if name not in REPLAY_LISTS and name not in shared
        }
        row |= shared
        _step_row(
            b,
            np.asarray(logits[b], np.float32),
            row,
            state,
            out,
            {name for name, listed in lists.items() if b in listed},
            filter_order,
            num_candidates,
            processed=logprobs_mode == "processed_logprobs",
            replayed="processed_rows" in inputs,
        )
    return out | {f"{name}_RetainedState": array for name, array in state.items()}


def _step_row(
    b: int,
    logits: Array,
    row: Row,
    state: dict[str, Array],
    out: dict[str, Array],
    listed: set[str],
    order: str,
    num_candidates: int,
    *,
    processed: bool,
    replayed: bool,
) -> None:
    capacity = state["tokens"].shape[1]
    if row["status"] != 0:
        return
    n, length = int(row["input_lengths"]), int(row["lengths"])
    total = length + n
    tokens = np.array(row["tokens"])
    if length == 0:
        tokens[:] = row["input_ids"][0]
    tokens[length:total] = row["input_ids"][: min(n, capacity - length)]

    if row["emit"]:
        adjusted = adjust(logits, row, tokens[: min(total, capacity)], total, capacity)
        out["adjusted_logits"][b] = adjusted
        # A forbidden token's invalid logit still makes the row invalid.
        both = np.stack([logits, adjusted])
        invalid = np.isnan(both).any() or (both == np.inf).any() or not (adjusted > LOWEST).any()
        if invalid or not {*lists_of(row, num_candidates)} <= listed:
            state["status"][b] = 3
            return
        position = min(total, capacity - 1)
        left = survivors(adjusted, row, order, uniform(row, "xtc_noise", position), num_candidates)
        probs = left.final_probs()
        token, margin = pick(probs, adjusted, row, uniform(row, "noise", position))
        out["probs"][b], out["margin"][b], out["edge"][b], out["next_ids"][b, 0] = (
            probs,
            margin,
            left.edge,
            token,
        )
        if processed and row["temperature"] > 0:
            _report_shares(b, probs, token, out)
        else:
            _report_logprobs(b, adjusted if processed else logits, token, out, drops=processed)
        if row["temperature"] > 0 and row.get("mirostat_tau", 0) > 0:
            surprise = -np.log2(max(left.probs()[token], 2.0**-126))
            change = float(row["mirostat_eta"]) * (surprise - float(row["mirostat_tau"]))
            state["mirostat_mu"][b] = np.clip(mirostat_limit(row) - change, -1e30, 1e30)
        if row["temperature"] > 0 and (target := float(row.get("adaptive_target", -1))) >= 0:
            decay, error = float(row["adaptive_decay"]), float(row["adaptive_error"])
            state["adaptive_error"][b] = decay * error + (1 - decay) * (
                left.probs()[token] - target
            )
        # A graph for replay fills the unused tail with the token.
        tokens[total : capacity if replayed else total + 1] = token
        state["output_counts"][b, token] += 1
        if "grammar_state" in row:
            state["grammar_state"][b] = next_state(row, total, token)
        if token in row["stop_ids"]:
            state["status"][b] = 1
        elif total + 1 >= row["max_length"] or total + 1 >= capacity:
            state["status"][b] = 2
    state["lengths"][b] = total
    state["tokens"][b] = tokens


def needs_search(row: Row, num_candidates: int = CANDIDATES) -> bool:
    """Whether a captured graph settles the row only if `searched_rows` has it."""
    return "searched_rows" in lists_of(row, num_candidates)


def lists_of(row: Row, num_candidates: int = CANDIDATES) -> list[str]:
    """The lists of a graph for replay that have to name the row, as far as the graph notices it."""
    penalties = (row["repetition_penalty"], row["presence_penalty"], row["frequency_penalty"])
    is_random = row["temperature"] > 0
    dry = float(row.get("dry_multiplier", 0))
    if not is_random and tuple(map(float, penalties)) == (1, 0, 0) and dry == 0:
        return []
    k = int(row["top_k"])
    vocab = np.shape(row["output_counts"])[0] if "output_counts" in row else np.inf
    if not is_random or 0 < k <= num_candidates or num_candidates >= vocab:
        return ["processed_rows"]
    if k > 0 or row["top_p"] < 1 or row.get("typical_p", 1) < 1:
        return [*REPLAY_LISTS]
    return ["processed_rows", "vocabulary_rows"]


def replay_lists(inputs: Mapping[str, Array], num_candidates: int = CANDIDATES) -> dict[str, Array]:
    """The shortest lists of rows that a host may give a step of these inputs."""
    batch = len(inputs["status"])
    per_row = [
        {name: array[b] for name, array in inputs.items() if len(array) == batch}
        for b in range(batch)
    ]
    needed: dict[str, list[int]] = {name: [] for name in REPLAY_LISTS}
    for b, row in enumerate(per_row):
        lists = lists_of(row, num_candidates)
        changed = [
            row["min_length"] > 0,
            np.any(row.get("logit_bias_ids", -1) != -1),
            np.any(row.get("allowed_tokens", -1) != -1),
            np.any(row.get("bad_words_ids", -1) != -1),
            row.get("no_repeat_ngram_size", 0) > 0,
            row.get("grammar_state", 0) > 0,
        ]
        for name in lists or ["processed_rows"] * any(changed):
            needed[name].append(b)
    # The first two have all rows or none.
    return {
        name: np.array(rows if name == "searched_rows" else range(batch) if rows else [], np.int64)
        for name, rows in needed.items()
    }


def uniform(row: Row, buffer: str, position: int) -> float:
    """The row's random number at a position, from the buffer `noise` or `xtc_noise`."""
    return float(row[buffer][position]) if buffer in row else 0.0


def pick(probs: Array, adjusted: Array, row: Row, u: float) -> tuple[int, float]:
    """Step 4: the token, and how far u is from the nearest boundary."""
    if float(row["temperature"]) == 0:
        return int(np.argmax(adjusted)), np.inf
    boundaries = np.cumsum(probs)
    boundaries /= boundaries[-1]
    token = int(np.searchsorted(boundaries, u, side="right"))
    # 0 and 1 are no boundaries between tokens: u cannot fall to the other side of them.
    inner = boundaries[(boundaries > 0) & (boundaries < 1)]
    return token, float(np.abs(inner - u).min()) if inner.size else np.inf


def _report_shares(b: int, probs: Array, token: int, out: dict[str, Array]) -> None:
    """The logarithms of the distribution from which the token was drawn; no token for probabilities of 0."""
    logprobs = np.log(probs)
    order = np.argsort(-probs, kind="stable")[: out["top_logprobs"].shape[1]]
    out["logprob_floor"][b] = -80
    out["logprobs"][b, 0] = logprobs[token]
    out["top_logprob_ids"][b] = np.where(probs[order] > 0, order, -1)
    out["top_logprobs"][b] = logprobs[order]


def _report_logprobs(
    b: int, logits: Array, token: int, out: dict[str, Array], *, drops: bool
) -> None:
    """The log-softmax of logits. drops: whether tokens without probability are left out of the likeliest."""
    l = logits.astype(np.float64)
    log_softmax = l - (l.max() + np.log(np.exp(l - l.max()).sum()))
    out["logprobs"][b, 0] = log_softmax[token]
    count = out["top_logprobs"].shape[1]
    order = np.argsort(-l, kind="stable")[:count]
    out["top_logprob_ids"][b], out["top_logprobs"][b] = order, log_softmax[order]
    if drops:
        masked = l[order] <= LOWEST
        out["top_logprob_ids"][b][masked], out["top_logprobs"][b][masked] = -1, -np.inf
