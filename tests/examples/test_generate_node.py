"""The program for Node gives the runtime's tokens. Skipped without Node or the npm packages that it needs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from qsample.contract.tensors import EXTRA_PARAMETERS
from qsample.runtime import load
from tests.helpers.fake_package import compilation, fake_package
from tests.helpers.forms import (
    choice,
    person,
    token_grammar,
    token_texts,
    write_grammar,
)

SCRIPT = Path(__file__).parents[2] / "examples" / "generate_node.mjs"
NEEDED = ("onnxruntime-node", "@huggingface/tokenizers")


def _node(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    # Node looks for packages from the folder of a program on, or of this one for a program on the command line.
    return subprocess.run(
        ["node", *arguments], capture_output=True, text=True, check=False, cwd=SCRIPT.parent
    )


@pytest.fixture(scope="module", autouse=True)
def _is_possible() -> None:
    if shutil.which("node") is None:
        pytest.skip("needs Node")
    for name in NEEDED:
        if _node(
            "--input-type=module", "--eval", f"import.meta.resolve('{name}'); import '{name}'"
        ).returncode:
            pytest.skip(f"npm install {' '.join(NEEDED)}, in this repository")


def same_text(package: Path, seed: int, **options: float) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    result = _node(
        SCRIPT, package, "--prompt=In the", f"--seed={seed}", "--max-new-tokens=20", *flags
    )
    assert result.returncode == 0, result.stderr
    model = load(package)
    output = model.generate("In the", max_new_tokens=20, seed=seed, **({"top_k": 0} | options))  # type: ignore[arg-type]
    assert model.tokenizer is not None
    assert result.stdout == model.tokenizer.decode(output.sequences[0].tolist()) + "\n"


def test_the_bundled_model_and_a_large_seed(bundled_package: Path) -> None:
    same_text(bundled_package, 2**53 + 1, temperature=0.8, top_k=20, top_p=0.9)
    same_text(bundled_package, 0, temperature=0, top_p=1)


def test_every_filter(exported: Callable[..., Path]) -> None:
    package = exported("llama", filters=tuple(EXTRA_PARAMETERS))
    same_text(package, 7, temperature=0.8, top_k=20, top_p=0.9)


def test_every_feature_and_a_device_package(tmp_path: Path) -> None:
    features = {
        "logit_bias": True,
        "allowed_tokens": True,
        "logprobs": True,
        "top_logprobs": 2,
        "probs": True,
    }
    same_text(fake_package(tmp_path / "features", **features).path, 2, temperature=0.9, top_p=1)  # type: ignore[arg-type]
    same_text(
        fake_package(tmp_path / "device", compilation=compilation()).path,
        3,
        temperature=0.9,
        top_p=1,
    )


@pytest.fixture(scope="module")
def grammar_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, which takes grammars."""
    import qsample

    bundled = Path(qsample.__file__).parent / "assets" / "tiny_lm"
    model = qsample.AutoModelForCausalLM.from_pretrained(bundled, grammars=True)
    folder = tmp_path_factory.mktemp("grammars") / "package"
    model.export(folder)
    return folder


@pytest.mark.ci
def test_grammars(grammar_package: Path, tmp_path: Path) -> None:
    same_text(grammar_package, 1, temperature=0.8, top_p=0.9)
    texts = token_texts(grammar_package)
    model = load(grammar_package)
    assert model.tokenizer is not None
    for name, form in {"person": person(), "choice": choice("yes", "no", "maybe so")}.items():
        grammar = token_grammar(form, texts)
        file = write_grammar(grammar, tmp_path / name)
        for seed, temperature in enumerate((0, 1, 1.5)):
            # The shortest limit, and one with room.
            for limit in (grammar.shortest, 40):
                options = {"max_new_tokens": limit, "temperature": temperature, "top_p": 1.0}
                flags = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
                result = _node(
                    SCRIPT,
                    grammar_package,
                    "--prompt=In the",
                    f"--seed={seed}",
                    f"--grammar={file}",
                    *flags,
                )
                assert result.returncode == 0, result.stderr
                output = model.generate("In the", seed=seed, top_k=0, grammar=grammar, **options)  # type: ignore[arg-type]
                assert output.finish_reasons == ["stop"]
                assert result.stdout == model.tokenizer.decode(output.sequences[0].tolist()) + "\n"
        short = _node(
            SCRIPT,
            grammar_package,
            f"--grammar={file}",
            f"--max-new-tokens={grammar.shortest - 1}",
        )
        assert short.returncode == 1
        assert f"may have {grammar.shortest - 1} tokens" in short.stderr


def test_clear_messages(tmp_path: Path) -> None:
    for package, arguments, message in (
        (
            fake_package(tmp_path / "host", sampler=False),
            (),
            "the package was exported without its sampler",
        ),
        (
            fake_package(tmp_path / "short", compilation=compilation(ctx_len=4)),
            ("--prompt=too long",),
            "has 9 tokens",
        ),
    ):
        result = _node(SCRIPT, package.path, *arguments)
        assert result.returncode == 1
        assert message in result.stderr
        assert result.stderr.count("\n") == 1


def test_a_package_for_serving(exported: Callable[..., Path]) -> None:
    """It takes grammars, and their tables are off."""
    same_text(exported("llama", for_serving=True), 7, temperature=0.8, top_k=20, top_p=0.9)
