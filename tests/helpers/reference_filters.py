"""Step 3 of the contract in plain NumPy float64: a function for each filter, and the two orders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
Row = Mapping[str, Array]
CANDIDATES = 64  # the contract's number
_LEAST_WEIGHT = 2.0**-100  # relative to the largest; a smaller one reaches no xtc_threshold
LOWEST = np.float32(-3e38)  # a logit as low, or as far below the largest, is masked


@dataclass
class Survivors:
    """The tokens that the filters have left so far.

    x: [V] float64, the float32 differences of each logit and the largest; equal ones are ties. left: [V] bool.
    logits: [V] float32.
    num_candidates: a top_k up to this keeps at most this many tokens. temperature: 1 until the step that sets it. edge:
    the relative distance of the closest call so far. favoured: [V] float64, the distribution after adaptive-p.
    """

    x: Array
    left: Array
    logits: Array
    num_candidates: int = CANDIDATES
    temperature: float = 1.0
    edge: float = np.inf
    favoured: Array | None = None

    def log_probs(self) -> Array:
        """[V] float64, -inf for a token that is not left."""
        log_weights = np.full(len(self.x), -np.inf)
        log_weights[self.left] = (self.x[self.left] - self.x[self.left].max()) / self.temperature
        return log_weights - np.log(np.exp(log_weights).sum())

    def probs(self) -> Array:
        return np.exp(self.log_probs())

    def final_probs(self) -> Array:
        """What the token is drawn from."""
        return self.probs() if self.favoured is None else self.favoured

    @property
    def likeliest(self) -> Array:
        """[V] bool: the largest logit that is left, and its ties."""
        return self.left & (self.x == self.x[self.left].max())

    def entropy(self) -> float:
        """In nats."""
        log_probs = self.log_probs()[self.left]
        return max(0.0, -float(np.sum(np.exp(log_probs) * log_probs)))

    def keep(self, mask: Array) -> None:
        self.left = self.left & mask

    def close_calls(self, values: Array, threshold: float) -> None:
        """Take note of values that a float32 computation may see on the other side of a threshold."""
        if values.size and 0 < threshold < np.inf:
            self.edge = min(self.edge, float(np.abs(values - threshold).min() / threshold))

    def keep_from(self, threshold: float) -> None:
        """Keep tokens of this probability or more, and the likeliest."""
        p, likeliest = self.probs(), self.likeliest
        self.close_calls(p[self.left & ~likeliest], min(threshold, float(p.max())))
        self.keep((p >= threshold) | likeliest)


def top_n_sigma(s: Survivors, row: Row) -> None:
    """x >= -n sigma. It is the first filter of both orders, so all unmasked tokens are left."""
    if (n := float(row["top_n_sigma"])) > 0:
        reach = n * float(np.std(s.x[s.left]))
        s.close_calls(-s.x[s.left], reach)
        s.keep(s.x >= -reach)


def temperature(s: Survivors, row: Row) -> None:
    """Set the temperature: the row's, or with dynatemp one that follows the entropy of the tokens that are left."""
    t, count = min(float(row["temperature"]), 1e36), int(s.left.sum())
    if (r := min(float(row.get("dynatemp_range", 0)), 1e36)) > 0 and count > 1:
        lowest, highest = max(0.0, t - r), t + r
        share = min(1.0, s.entropy() / np.log(count))
        shares = np.minimum(share * np.array([1, 1 - 1e-6, 1 + 1e-6]), 1)
        with np.errstate(divide="ignore", over="ignore"):
            t, *near = lowest + (highest - lowest) * np.power(
                shares, float(row["dynatemp_exponent"])
            )
        # Float32 has the entropy to about 1e-7, whatever its size.
        if share * np.log(count) < 0.02 or np.ptp(near) > 1e-4 * t:
            s.edge = 0.0
    s.temperature = float(np.clip(t, 2.0**-126, 1e36))


def top_k(s: Survivors, row: Row) -> None:
    """The k-th largest and all that are not below it; at most 64 tokens if k is not larger than that."""
    k = int(row["top_k"])
    if not 0 < k < s.left.sum():
        return
    smallest = np.partition(s.x[s.left], -k)[-k]
    keep = s.left & (s.x >= smallest)
    if k <= s.num_candidates < keep.sum():
        ties = np.flatnonzero(keep & (s.x == smallest))
        ties = ties[np.argsort(-s.logits[ties], kind="stable")]
        keep[ties[s.num_candidates - keep.sum() :]] = False
    s.keep(keep)


def top_p(s: Survivors, row: Row) -> None:
    """The mass of strictly likelier tokens is below p: ties are kept or dropped whole."""
    if (p := float(row["top_p"])) < 1:
        _, groups = np.unique(-s.x[s.left], return_inverse=True)
        mass = np.bincount(groups, s.probs()[s.left])
        before = np.cumsum(mass) - mass
        before[0] = 0
        s.close_calls(before[1:], p)
        keep = before < p
        keep[0] = True
        s.left[s.left] = keep[groups]


def min_p(s: Survivors, row: Row) -> None:
    if (share := float(row["min_p"])) > 0:
        s.keep_from(share * float(s.probs().max()))


def top_a(s: Survivors, row: Row) -> None:
    if (share := float(row["top_a"])) > 0:
        s.keep_from(share * float(s.probs().max()) ** 2)


def typical_p(s: Survivors, row: Row) -> None:
    """The mass of tokens whose surprise is strictly closer to the entropy is below typical_p.

    Surprise less entropy is (mean of x - x) / temperature, which tells apart what the logarithms round away.
    """
    if (p := float(row["typical_p"])) < 1:
        values, first, groups = np.unique(s.x[s.left], return_index=True, return_inverse=True)
        probs = s.probs()[s.left]
        mass, surprises = np.bincount(groups, probs), -s.log_probs()[s.left][first]
        distances = (
            np.abs(values - values[-1] - np.sum(probs * (s.x[s.left] - values[-1]))) / s.temperature
        )
        order = np.argsort(distances, kind="stable")
        before = np.cumsum(mass[order]) - mass[order]
        s.close_calls(before[1:], p)
        kept = max(1, int(np.searchsorted(before, p)))
        last = order[kept - 1]
        if kept < len(
            order
        ):  # float32 may see the next value, on the other side of the entropy, as closer
            gap = distances[order[kept]] - distances[last]
            s.edge = min(s.edge, gap / max(s.entropy() + surprises[last], 1e-30))
        s.left[s.left] = (distances <= distances[last])[groups]


def epsilon_cutoff(s: Survivors, row: Row) -> None:
    if (epsilon := float(row["epsilon_cutoff"])) > 0:
        s.keep_from(epsilon)


def eta_cutoff(s: Survivors, row: Row) -> None:
    if (eta := float(row["eta_cutoff"])) > 0:
        s.keep_from(min(eta, np.sqrt(eta) * np.exp(-s.entropy())))


def xtc(s: Survivors, row: Row) -> None:
    """Of the tokens with at least this probability only the least likely token stays, and its ties."""
    threshold = float(row["xtc_threshold"])
    if row["xtc_uniform"] < row["xtc_probability"] and threshold <= 0.5:
        p = s.probs()
        weights = np.exp(s.x / s.temperature)
        s.close_calls(p[s.left], threshold)
        s.close_calls(weights[s.left], _LEAST_WEIGHT)
        reach = s.left & (p >= threshold) & (weights >= _LEAST_WEIGHT)
        if reach.sum() >= 2:
            s.keep(~reach | (s.x == s.x[reach].min()))


def mirostat(s: Survivors, row: Row) -> None:
    """A surprise of at most mu bits."""
    if row["mirostat_tau"] > 0:
        s.keep_from(float(np.exp2(np.clip(-mirostat_limit(row), -1e3, 1.0))))


def mirostat_limit(row: Row) -> float:
    """mu, in bits."""
    return float(row["mirostat_mu"]) or 2 * float(row["mirostat_tau"])


def adaptive_p(s: Survivors, row: Row) -> None:
    """The last step: from the distribution that is left to another over the same tokens."""
    if (target := float(row["adaptive_target"])) >= 0:
        aim = min(1.0, max(0.0, target - float(row["adaptive_error"])))
        distance = np.abs(s.probs() - aim) / 0.3
        weights = np.where(s.left, np.exp(5 - 10 * distance**2 / (1 + distance)), 0)
        s.favoured = weights / weights.sum()


FILTERS: dict[str, Callable[[Survivors, Row], None]] = {
    "top_n_sigma": top_n_sigma,
    "temperature": temperature,
    "top_k": top_k,
    "top_p": top_p,
    "min_p": min_p,
    "top_a": top_a,
    "typical_p": typical_p,
    "epsilon_cutoff": epsilon_cutoff,
    "eta_cutoff": eta_cutoff,
    "xtc_probability": xtc,
    "mirostat_tau": mirostat,
    "adaptive_target": adaptive_p,
}
_NUCLEI = ("top_p", "min_p", "top_a")
_CUTOFFS = ("epsilon_cutoff", "eta_cutoff", "xtc_probability")
_LAST = ("mirostat_tau", "adaptive_target")
ORDERS = {
    "huggingface": (
        "top_n_sigma",
        "temperature",
        "top_k",
        *_NUCLEI,
        "typical_p",
        *_CUTOFFS,
        *_LAST,
    ),
    "llama.cpp": ("top_n_sigma", "top_k", "typical_p", *_NUCLEI, *_CUTOFFS, "temperature", *_LAST),
}


def survivors(
    adjusted: Array,
    row: Row,
    order: str = "huggingface",
    xtc_uniform: float = 0.0,
    num_candidates: int = CANDIDATES,
) -> Survivors:
    """Step 3.

    Args:
        adjusted: [V] float32, the logits after step 2; one at least is finite.
        row: the row's inputs; those of the extra filters may be absent.
        order: a key of ORDERS.
        xtc_uniform: decides whether XTC applies.
        num_candidates: K; the contract's is 64.
    """
    with np.errstate(over="ignore"):
        x = np.asarray(adjusted, np.float32) - np.max(adjusted).astype(np.float32)
    left = Survivors(
        x.astype(np.float64), (x > LOWEST) & (adjusted > LOWEST), adjusted, num_candidates
    )
    if row["temperature"] == 0:
        left.keep(np.arange(len(x)) == np.argmax(adjusted))
        return left
    row = {**row, "xtc_uniform": xtc_uniform}
    for name in ORDERS[order]:
        if name in row:
            FILTERS[name](left, row)
    return left


def distribution(
    adjusted: Array, row: Row, order: str = "huggingface", xtc_uniform: float = 0.0
) -> Array:
    """Step 3: [V] float64 probabilities."""
    return survivors(adjusted, row, order, xtc_uniform).final_probs()
