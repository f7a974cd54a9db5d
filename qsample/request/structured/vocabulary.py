"""A tokenizer becomes the bytes of its tokens, as a trie in arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qsample.contract.arrays import Array
from qsample.request.grammar import GrammarTokenizer


@dataclass(frozen=True, slots=True, eq=False)
class TrieLevel:
    """The nodes of a trie that are equally far from its root, ordered by their parents and bytes.

    Attributes:
        parents: [N] int64, the place of each node's parent in the level before; 0 for the root.
        last_bytes: [N] int64, the byte that leads from the parent to each node.
        keys: [N] int64, 256 times the parent plus the byte; they rise.
        tokens: [N] int64, the first token whose bytes end in each node; -1 for none.
        token_ids: [M] int64, all tokens whose bytes end in a node of this level.
        token_nodes: [M] int64, the nodes in which they end.
    """

    parents: Array
    last_bytes: Array
    keys: Array
    tokens: Array
    token_ids: Array
    token_nodes: Array

    def children(self, parents: Array, last_bytes: Array) -> Array:
        """The nodes that bytes lead to.

        Args:
            parents: [Q] int64, places in the level before.
            last_bytes: [Q] int64, a byte after each of them.

        Returns:
            [Q] int64, places in this level; -1 for none.
        """
        wanted = parents * 256 + last_bytes
        places = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        return np.where(self.keys[places] == wanted, places, -1)


@dataclass(frozen=True, slots=True, eq=False)
class TokenVocabulary:
    """The tokens of a model: those with bytes as a trie, and the special tokens by their texts.

    Attributes:
        size: the number of tokens, V.
        levels: the levels of the trie below its root.
        special_ids: the tokens without bytes that have a text, by their texts.
    """

    size: int
    levels: Sequence[TrieLevel]
    special_ids: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, tokenizer: GrammarTokenizer) -> TokenVocabulary:
        """The vocabulary of a model.

        Special tokens have no bytes, and neither have the ids that the tokenizer lacks. An added
        token that is not special counts as text. llguidance takes those in angle brackets for
        special tokens, and letters of other scripts in them for single bytes.
        """
        library = tokenizer.tokenizer
        size = tokenizer.vocab_size
        tokens: list[bytes] = [library.decode_bytes([token]) for token in range(size)]
        special_ids: dict[str, list[int]] = {}
        for token in range(size):
            if token in tokenizer.added_texts:
                tokens[token] = tokenizer.added_texts[token].encode()
            elif library.is_special_token(token):
                text = tokens[token].decode("utf-8", "replace")
                tokens[token] = b""
                # llguidance writes the ids that a tokenizer lacks in the form <[123]>, and takes
                # the byte 255, which is in no text, for a special token without a text.
                if text not in ("", f"<[{token}]>"):
                    special_ids.setdefault(text, []).append(token)
        return cls.of_tokens(tokens, special_ids)

    @classmethod
    def of_tokens(
        cls, tokens: Sequence[bytes], special_ids: Mapping[str, Sequence[int]]
    ) -> TokenVocabulary:
        """A vocabulary.

        Args:
            tokens: the bytes of each token; b"" for a token without bytes.
            special_ids: the special tokens by their texts.
        """
        return cls(len(tokens), _levels(tokens), special_ids)


def _levels(tokens: Sequence[bytes]) -> list[TrieLevel]:
    """The levels of the trie of tokens with bytes."""
    ids = [token for token, text in enumerate(tokens) if text]
    # In this order, the tokens below a node are neighbours.
    ids.sort(key=tokens.__getitem__)
    order = np.array(ids, np.int64)
    lengths = np.array([len(tokens[token]) for token in ids], np.int64)
    offsets = np.cumsum(lengths) - lengths
    text = np.frombuffer(b"".join([tokens[token] for token in ids]), np.uint8)

    levels = []
    longer = np.arange(len(ids))
    nodes = np.zeros(len(ids), np.int64)
    depth = 0
    while len(longer) > 0:
        last_bytes = text[offsets[longer] + depth].astype(np.int64)
        is_new = np.ones(len(longer), np.bool_)
        is_new[1:] = (nodes[1:] != nodes[:-1]) | (last_bytes[1:] != last_bytes[:-1])
        parents = nodes[is_new]
        nodes = np.cumsum(is_new) - 1
        depth += 1

        ends = lengths[longer] == depth
        token_nodes = nodes[ends]
        token_ids = order[longer[ends]]
        first_tokens = np.full(len(parents), -1, np.int64)
        # Sorting keeps the order of equal tokens, and the first assignment must be the last one.
        first_tokens[token_nodes[::-1]] = token_ids[::-1]
        new_bytes = last_bytes[is_new]
        keys = parents * 256 + new_bytes
        levels.append(TrieLevel(parents, new_bytes, keys, first_tokens, token_ids, token_nodes))
        longer = longer[~ends]
        nodes = nodes[~ends]
    return levels
