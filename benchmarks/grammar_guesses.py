"""Objects of twelve fields in steps of several tokens: the forced text of a schema is guessed.

    qsample export CHECKPOINT served --for-serving
    qsample compile served plain --kv-cache-dtype int8
    qsample compile served guessing --kv-cache-dtype int8 --num-speculative-tokens 7
    python benchmarks/grammar_guesses.py plain guessing

One row writes an object, whose keys the prompt names or does not; each seed gives another one. Both packages have to
write the same tokens. They take turns, in an order that changes; a ratio is the median over the objects of the time of
decoding without guesses to the time with them. A minute for SmolLM2-135M on two cores.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any, Final

from report import describe_machine, print_table

KEYS: Final = (
    "first_name", "last_name", "street_address", "postal_code", "city_of_residence", "country",
    "email_address", "phone_number", "date_of_birth", "preferred_language", "account_status", "remarks",
)  # fmt: skip
LONGEST_TEXT: Final = 24  # characters of a field
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {key: {"type": "string", "maxLength": LONGEST_TEXT} for key in KEYS},
    "required": list(KEYS),
}
QUESTIONS: Final = {
    "keys in the prompt": f"Invent a customer, as JSON with the keys {', '.join(KEYS)}.",
    "no keys in the prompt": "Invent a customer, as JSON.",
}
TEMPERATURE: Final = 0.3
MOST_TOKENS: Final = 400
HEADER: Final = ("prompt", "tokens", "tokens a step", "guesses right", "times as fast")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plain", type=Path, help="a package without guesses")
    parser.add_argument("guessing", type=Path, help="the same model, with guesses")
    parser.add_argument("--objects", type=int, default=8, help="objects of each prompt")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    from qsample.runtime import load

    models = [
        load(path, intra_op_num_threads=options.threads)
        for path in (options.plain, options.guessing)
    ]
    grammar = models[0].grammar(json=SCHEMA)

    def write(model: Any, question: str, seed: int) -> Any:
        chat = [{"role": "user", "content": question}]
        return model.generate(
            [chat], grammar=grammar, temperature=TEMPERATURE, max_new_tokens=MOST_TOKENS, seed=seed
        )

    lines = []
    for name, question in QUESTIONS.items():
        tokens = accepted = drafted = 0
        ratios = []
        for model in models:  # to warm up
            write(model, question, 0)
        for seed in range(1, options.objects + 1):
            turn = seed % 2
            outputs = {index: write(models[index], question, seed) for index in (turn, 1 - turn)}
            plain, guessing = outputs[0], outputs[1]
            if plain.token_ids != guessing.token_ids:
                raise SystemExit(f"seed {seed}: guesses changed the tokens")
            tokens += len(guessing.token_ids[0])
            accepted += guessing.timing.drafts.num_accepted_tokens
            drafted += guessing.timing.drafts.num_draft_tokens
            ratios.append(plain.timing.decode_seconds / guessing.timing.decode_seconds)
        lines.append(
            [
                name,
                str(tokens),
                f"{tokens / (tokens - accepted):.2f}",
                f"{accepted / drafted:.0%}",
                f"{statistics.median(ratios):.2f}",
            ]
        )
    print_table(HEADER, lines, describe_machine(options.threads))


if __name__ == "__main__":
    main()
