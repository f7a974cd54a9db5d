"""The programs and commands of the pages run, and print what the pages show."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from scripts.pages import ROOT, Folder, blocks, is_as_shown
from tests.conftest import made_once
from tests.helpers.adapters import random_adapter

MODEL = ROOT / "qsample" / "assets" / "tiny_lm"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void. "
    * 4
)


@pytest.fixture(scope="session")
def given(shared_folder: Path) -> Path:
    """What readers of the pages have: checkpoints, packages, adapters and texts, all of the bundled model."""
    return made_once(shared_folder / "pages", _make)


def _make(folder: Path) -> None:
    from qsample import AutoModelForCausalLM

    folder.mkdir()
    checkpoint = shutil.copytree(MODEL, folder / "Qwen" / "Qwen3-0.6B")
    _change(checkpoint / "config.json", max_position_embeddings=4096)
    (folder / "qwen3-checkpoint").symlink_to(checkpoint)
    decoder = shutil.copytree(
        ROOT / "examples" / "tiny_lm_genai", folder / "onnx-community" / "Qwen3-0.6B-ONNX"
    )
    (decoder / "genai_config.json").unlink()
    shutil.copy(checkpoint / "config.json", decoder)
    (decoder / "onnx").mkdir()
    for file in decoder.glob("model.onnx*"):
        file.rename(decoder / "onnx" / ("model_q4.onnx" if file.suffix == ".onnx" else file.name))
    portable = AutoModelForCausalLM.from_pretrained(MODEL, for_serving=True).export(
        folder / "qwen3"
    )
    portable.compile(folder / "tiny-cpu", ctx_len=256)
    portable.compile(folder / "tiny-int4", ctx_len=256, weights="int4")
    portable.compile(folder / "tiny-int8", ctx_len=256, weights="int8")
    adapted = AutoModelForCausalLM.from_pretrained(
        MODEL, for_serving=True, max_loras=2, max_lora_rank=8
    )
    interface = adapted.compile(folder / "qwen3-cpu", ctx_len=512).package.manifest.interface
    for name in ("tiny", "exported"):
        (folder / name).symlink_to(folder / "qwen3")
    (folder / "adapters").mkdir()
    for seed, name in enumerate(("sql", "legal")):
        random_adapter(folder / "adapters" / name, interface, seed)
    for name in ("book.txt", "like_mine.txt"):
        (folder / name).write_text(TEXT * 10)
    (folder / "rules.txt").write_text(TEXT)
    prompts = [{"prompt": text} for text in ("In the beginning", "Blessed are")]
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))


def _change(config: Path, **fields: object) -> None:
    config.write_text(
        json.dumps({**json.loads(config.read_text(encoding="utf-8")), **fields}), encoding="utf-8"
    )


@pytest.mark.ci
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page.read_text("utf-8"))], ids=lambda page: page.stem
)
def test_the_programs_of_a_page_run(page: Path, given: Path, tmp_path: Path) -> None:
    with Folder(tmp_path, given) as folder:
        for block in blocks(page.read_text("utf-8")):
            if not block.reason:
                output = folder.run(block)
                assert is_as_shown(block, output), f"{page.name}:{block.line} prints\n{output}"


PAGE = """\
```bash
python3 -m venv .venv && .venv/bin/pip install -e . && .venv/bin/qsample --version
pip install ray
```

```text
qsample 1
```

<!-- not run: it needs a GPU -->

```bash
qsample compile a b --provider cuda
```

<!-- setup: word = "In" -->

```python
print(word, 1)
```

<!-- figures: they depend on the processor -->

```bash
echo 1.5 ms
```

```text
2.25 ms
```
"""


def test_installations_are_skipped_and_comments_are_obeyed(tmp_path: Path) -> None:
    first, second, third, fourth = blocks(PAGE)
    assert (first.line, first.code, first.shown) == (1, "qsample --version\n", "qsample 1\n")
    assert second.reason == "it needs a GPU"
    with Folder(tmp_path) as folder:
        assert folder.run(third) == "In 1\n"
        assert is_as_shown(fourth, folder.run(fourth))
    assert not is_as_shown(first, "qsample 2\n")
    assert not is_as_shown(fourth, "1.5 s\n")
