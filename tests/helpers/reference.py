"""The contract's sampling step and its noise in plain NumPy float64: slow, and written from docs/contract.md alone.

An oracle for tests. It shares no code with the package beyond names.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Array = np.ndarray
_MASK32 = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int], rounds: int = 10) -> tuple[int, int, int, int]:
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


def philox_uniforms(seed: int, n: int) -> Array:
    """u[0..n-1] of a row with this seed: [n] float32 in [0, 1)."""
    seed &= 0xFFFFFFFFFFFFFFFF
    key = (seed & _MASK32, seed >> 32)
    words = [word for block in range(-(-n // 4)) for word in philox4x32((block, 0, 0, 0), key)]
    return np.array([(word >> 8) * 2.0**-24 for word in words[:n]], dtype=np.float32)


def reference_step(
    logits: Array, inputs: Mapping[str, Array], *, pad_token_id: int, top_logprobs: int = 0
) -> dict[str, Array]:
    """One step of the contract for every row.

    Args:
        logits: [B, V], float32 values.
        inputs: the sampler's inputs and states, as arrays with the contract's shapes.

    Returns the next states under `NAME_RetainedState`, `next_ids`, `logprobs`, `top_logprob_ids`, `top_logprobs`,
    `probs` in float64, `adjusted_logits` after step 2 (NaN in a row that samples nothing), and an aid for tests:
    `margin` [B], the distance of u to the nearest boundary of the cumulative distribution (inf for a greedy row).
    """
    batch, vocab = logits.shape
    state = {name: np.array(inputs[name]) for name in ("lengths", "status", "tokens", "output_counts")}
    out = {
        "next_ids": np.full((batch, 1), pad_token_id, np.int64),
        "logprobs": np.zeros((batch, 1)),
        "top_logprob_ids": np.full((batch, top_logprobs), -1, np.int32),
        "top_logprobs": np.zeros((batch, top_logprobs)),
        "probs": np.zeros((batch, vocab)),
        "margin": np.full(batch, np.inf),
        "adjusted_logits": np.full((batch, vocab), np.nan, np.float32),
    }
    for b in range(batch):
        row = {name: np.asarray(array)[b] for name, array in inputs.items()}
        _step_row(b, np.asarray(logits[b], np.float32), row, state, out)
    return out | {f"{name}_RetainedState": array for name, array in state.items()}


def _step_row(b: int, logits: Array, row: dict[str, Array], state: dict[str, Array], out: dict[str, Array]) -> None:
    capacity = state["tokens"].shape[1]
    if row["status"] not in (0, 4):
        return
    n, length = int(row["input_lengths"]), int(row["lengths"])
    total = length + n
    tokens = np.array(row["tokens"])
    if length == 0:
        tokens[:] = row["input_ids"][0]
    tokens[length:total] = row["input_ids"][: min(n, capacity - length)]

    if row["emit"]:
        adjusted = adjust(logits, row, tokens[: min(total, capacity)], total)
        out["adjusted_logits"][b] = adjusted
        # A forbidden token's invalid logit still makes the row invalid.
        if (
            np.isnan(logits).any()
            or (logits == np.inf).any()
            or not np.isfinite(adjusted).any()
            or (adjusted == np.inf).any()
        ):
            state["status"][b] = 3
            return
        probs = distribution(adjusted, row)
        token, margin = pick(probs, adjusted, row, float(row["noise"][min(total, capacity - 1)]))
        out["probs"][b], out["margin"][b], out["next_ids"][b, 0] = probs, margin, token
        _report_logprobs(b, logits, token, out)
        if total < capacity:
            tokens[total] = token
        state["output_counts"][b, token] += 1
        if token in row["stop_ids"]:
            state["status"][b] = 1
        elif total + 1 >= row["max_length"] or total + 1 >= capacity:
            state["status"][b] = 2
        else:
            state["status"][b] = 0
    else:
        state["status"][b] = 0
    state["lengths"][b] = total
    state["tokens"][b] = tokens


def adjust(logits: Array, row: Mapping[str, Array], history: Array, total: int) -> Array:
    """Step 2, in float32 because ties are judged on the float32 logits."""
    l = np.array(logits, np.float64)
    vocab = len(l)
    if "allowed_tokens" in row:
        words = [int(word) & _MASK32 for word in row["allowed_tokens"]]
        l[[i for i in range(vocab) if not words[i // 32] >> (i % 32) & 1]] = -np.inf
    if "logit_bias_ids" in row:
        bias = np.zeros(vocab)
        for i, value in zip(row["logit_bias_ids"], row["logit_bias"], strict=True):
            if i >= 0:
                bias[i] += value
        l = (l + bias).astype(np.float32).astype(np.float64)
    if total < row["min_length"]:
        l[[i for i in row["stop_ids"] if i >= 0]] = -np.inf
    ids = np.unique(history)
    r = float(row["repetition_penalty"])
    seen = l[ids]
    l[ids] = np.where(seen < 0, seen * r, seen / r).astype(np.float32)
    counts = np.asarray(row["output_counts"], np.float64)
    l -= float(row["frequency_penalty"]) * counts + float(row["presence_penalty"]) * (counts > 0)
    return l.astype(np.float32)


def distribution(adjusted: Array, row: Mapping[str, Array]) -> Array:
    """Step 3: [V] float64 probabilities."""
    l = adjusted.astype(np.float64)
    vocab, t = len(l), float(row["temperature"])
    if t == 0:
        return np.eye(vocab)[int(np.argmax(l))]
    weights = np.exp((l - l.max()) / t)
    k, p, min_p = int(row["top_k"]), float(row["top_p"]), float(row["min_p"])
    if 0 < k < vocab:
        weights[l < np.sort(l)[-k]] = 0
    if p < 1:
        # The weight of strictly larger tokens: tokens of one value form a group that is kept or dropped whole.
        _, groups = np.unique(-l, return_inverse=True)
        group_weights = np.bincount(groups, weights)
        before = np.concatenate([[0], np.cumsum(group_weights)[:-1]])
        keep = before < p * group_weights.sum()
        keep[0] = True
        weights[~keep[groups]] = 0
    weights[weights < min_p * weights.max()] = 0
    return weights / weights.sum()


def pick(probs: Array, adjusted: Array, row: Mapping[str, Array], u: float) -> tuple[int, float]:
    """Step 4: the token, and how far u is from the nearest boundary."""
    if float(row["temperature"]) == 0:
        return int(np.argmax(adjusted)), np.inf
    boundaries = np.cumsum(probs)
    boundaries /= boundaries[-1]
    token = int(np.searchsorted(boundaries, u, side="right"))
    # 0 and 1 are no boundaries between tokens: u cannot fall to the other side of them.
    inner = boundaries[(boundaries > 0) & (boundaries < 1)]
    return token, float(np.abs(inner - u).min()) if inner.size else np.inf


def _report_logprobs(b: int, logits: Array, token: int, out: dict[str, Array]) -> None:
    l = logits.astype(np.float64)
    log_softmax = l - (l.max() + np.log(np.exp(l - l.max()).sum()))
    out["logprobs"][b, 0] = log_softmax[token]
    count = out["top_logprobs"].shape[1]
    order = np.argsort(-l, kind="stable")[:count]
    out["top_logprob_ids"][b], out["top_logprobs"][b] = order, log_softmax[order]
