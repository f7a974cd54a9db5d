"""The texts of `speculation.py`: prompts, and the answers that a model is made to write.

The edits are real: versions of a file before and after a commit of this repository, the oldest commits first. Articles
and prose are documentation of Python itself. A byte-level vocabulary of 32,768 tokens, trained on Python's own sources
and documentation, splits them about as finely as those of models do.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

REPOSITORY: Final = Path(__file__).resolve().parents[1]
EDITS: Final = 40
OTHERS: Final = 12  # texts of each other kind
SHORTEST, LONGEST = 150, 700  # tokens of a file, before and after its edit
ANSWER: Final = 320  # most tokens of other answers
FIRST_ID: Final = 16  # of the vocabulary: the model's special tokens are below
_VOCABULARY: Final = 32768
_MOST_OF_A_FILE: Final = 2  # edits


@dataclass(frozen=True)
class Text:
    """A prompt and its answer, as token ids. kind: "rewriting", "second half", "quotes" or "chat"."""

    kind: str
    name: str
    prompt: list[int]
    answer: list[int]


def make_texts(folder: Path, vocab_size: int) -> list[Text]:
    """All texts. folder: keeps the vocabulary. vocab_size: of the model, whose first ids are special tokens."""
    size = min(_VOCABULARY, vocab_size - FIRST_ID)
    tokenizer = _tokenizer(folder / f"speculation-tokenizer-{size}.json", size)

    def ids(text: str) -> list[int]:
        return [FIRST_ID + token for token in tokenizer.encode(text, add_special_tokens=False).ids]

    result: list[Text] = []
    for name, before, after in _edits():
        old, new = ids(before), ids(after)
        if not (SHORTEST <= len(old) <= LONGEST and SHORTEST <= len(new) <= LONGEST):
            continue
        head, half = (
            ids(f"Here is {name}:\n```\n")
            + old
            + ids("```\nThe whole file with my change:\n```\n"),
            len(new) // 2,
        )
        result.append(Text("rewriting", name, head, new))
        result.append(Text("second half", name, head + new[:half], new[half:]))
        if len(result) == 2 * EDITS:
            break
    articles = [
        (name, text) for name, text in sorted(topics.items()) if 2_000 <= len(text) <= 12_000
    ]
    for (name, article), (_, other) in list(itertools.pairwise(articles))[:OTHERS]:
        quoted = ids(article)[: 2 * LONGEST - ANSWER]
        summary = ids(f"\n\nSummary of {name}, with quotes:\n")
        result.append(
            Text(
                "quotes", name, quoted + summary, ids(_with_quotes(article[:4000], other))[:ANSWER]
            )
        )
        question = ids(f"Explain what Python's documentation says about {name}.\n\n")
        result.append(Text("chat", name, question, ids(article)[:ANSWER]))
    return result


def _with_quotes(article: str, other: str) -> str:
    """Sentences of another text, after each a quoted sentence of the article."""
    own, quotes = (re.split(r"(?<=[.:])\s+", text) for text in (other, article))
    return " ".join(
        f'{said} The text says: "{quote}"'
        for said, quote in zip(own[1:], quotes[2::3], strict=False)
    )


def _edits() -> Iterator[tuple[str, str, str]]:
    """(path, text before, text after) of files that commits changed, at most one of a commit."""
    seen: Counter[str] = Counter()
    for commit in _git("log", "--reverse", "--no-merges", "--format=%H").split():
        changed = _git(
            "diff-tree", "--no-commit-id", "-r", "--name-only", "--diff-filter=M", commit
        ).splitlines()
        for path in changed:
            if path.endswith((".py", ".md")) and seen[path] < _MOST_OF_A_FILE:
                before, after = (
                    _git("show", f"{version}:{path}") for version in (f"{commit}^", commit)
                )
                if before != after and len(after) < 8 * LONGEST:
                    seen[path] += 1
                    yield path, before, after
                    break


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", REPOSITORY, *arguments], capture_output=True, check=True)
    return done.stdout.decode("utf-8", "replace")


def _tokenizer(path: Path, size: int) -> Tokenizer:
    """Trained unless the file exists: two minutes on a core."""
    if not path.exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(
            [*_sources(), *(text for _, text in sorted(topics.items()))], trainer
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(path))
    return Tokenizer.from_file(str(path))


def _sources() -> Iterator[str]:
    """Python's own library, without its tests and other people's packages."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if not {"test", "tests", "site-packages"} & {*path.relative_to(library).parts}:
            yield path.read_text("utf-8", "replace")
