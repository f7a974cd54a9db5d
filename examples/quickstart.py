"""The whole way in Python: checkpoint → export → compile → generate.

    python examples/quickstart.py            in a temporary folder
    python examples/quickstart.py my-folder  keeps the packages there

It needs qsample with the extras `cpu` and `export`, and uses the bundled model; replace `TINY_LM` with a hub id or a
checkpoint folder to use another.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import qsample
from qsample.models.bundled import TINY_LM


def main(folder: Path) -> None:
    # A checkpoint, whose export will have the sampler in the graph. Nothing is loaded yet.
    model = qsample.AutoModelForCausalLM.from_pretrained(TINY_LM, include_sampler=True)

    # A portable package, compared with the Hugging Face model before it is published, then a package for this CPU.
    exported = model.export(folder / "tiny", overwrite=True)
    compiled = exported.compile(folder / "tiny-cpu", provider="cpu", ctx_len=256, overwrite=True)

    # To run the package, open the folder; this needs neither torch nor transformers.
    package = qsample.AutoModelForCausalLM.from_pretrained(folder / "tiny-cpu")
    assert package.package.manifest == compiled.package.manifest

    # Options have Hugging Face's names; the model's generation_config provides the defaults.
    greedy = package.generate("And the LORD spake unto", max_new_tokens=24, do_sample=False)
    print("greedy: ", greedy.texts[0])

    # Each row of a batch may have its own parameters, and its own seed.
    prompts = ["In the beginning", "Blessed are", "And Jesus said unto them"]
    rows = [
        qsample.SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=24, seed=1),
        qsample.SamplingParams(
            temperature=1.0, top_k=20, repetition_penalty=1.2, max_new_tokens=24, seed=2
        ),
        qsample.SamplingParams(temperature=0.0, max_new_tokens=24),
    ]
    batch = package.generate(prompts, rows)
    for text in batch.texts:
        print("batch:  ", text)

    # A row does not depend on its neighbours: alone, the same seed gives the same text.
    alone = package.generate(prompts[0], rows[0])
    assert alone.texts[0] == batch.texts[0]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
