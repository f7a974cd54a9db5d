"""The program in C++ gives the runtime's tokens. Skipped without a compiler or ONNX Runtime's headers."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from qsample.contract.tensors import EXTRA_PARAMETERS
from qsample.package.package import read_package
from qsample.runtime import load
from tests.helpers.fake_package import compilation, fake_package
from tests.helpers.grammar_files import GrammarFile, choice_tables, write_tables

SOURCE = Path(__file__).parents[2] / "examples" / "generate.cpp"
HEADER = "onnxruntime_cxx_api.h"
INCLUDES = (
    "/usr/local/include",
    "/usr/local/include/onnxruntime",
    "/usr/include",
    "/usr/include/onnxruntime",
)
LONG = 3 * 10**8 + 1  # of a seed, times 3 * 10**8: beyond the 53 bits of a double


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled program, over the library that onnxruntime's wheel brings."""
    folders = [os.environ.get("ORT_INCLUDE", ""), *INCLUDES]
    include = next(
        (folder for folder in folders if folder and (Path(folder) / HEADER).is_file()), None
    )
    library = next((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"), None)
    if (compiler := shutil.which("g++")) is None or library is None:
        pytest.skip("needs g++, and an onnxruntime wheel for Linux")
    if include is None:
        pytest.skip(
            f"needs {HEADER}: name its folder, `include` of a release of ONNX Runtime, in ORT_INCLUDE"
        )
    folder = tmp_path_factory.mktemp("cpp")
    (folder / "libonnxruntime.so").symlink_to(library)
    (folder / "libonnxruntime.so.1").symlink_to(library)  # the name that programs load
    flags = [
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-isystem",
        include,
        SOURCE,
        f"-L{folder}",
        "-lonnxruntime",
    ]
    built = subprocess.run(
        [compiler, *flags, f"-Wl,-rpath,{folder}", "-o", folder / "generate"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (built.returncode, built.stderr) == (0, "")
    return folder / "generate"


def run(program: Path, package: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in (program, package, *arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def same_tokens(
    program: Path,
    package: Path,
    prompt: list[int],
    seed: int,
    grammar: GrammarFile | None = None,
    **options: float,
) -> list[int]:
    """Compare the program's tokens with the runtime's and return the new ones."""
    flags: list[object] = []
    for name, value in options.items():
        flags += [f"--{name.replace('_', '-')}", value]
    keywords: dict[str, Any] = {"top_k": 0} | options
    if grammar is not None:
        flags += ["--grammar", grammar.path]
        keywords["grammar"] = grammar.token_grammar
    result = run(
        program, package, " ".join(map(str, prompt)), "--seed", seed, "--max-new-tokens", 20, *flags
    )
    assert result.returncode == 0, result.stderr
    expected = load(package).generate(prompt, max_new_tokens=20, seed=seed, **keywords)
    tokens = expected.sequences[0, len(prompt) :].tolist()
    assert [int(token) for token in result.stdout.split()] == tokens
    return tokens


@pytest.mark.slow
def test_every_kind_of_package(
    program: Path, bundled_package: Path, exported: Callable[..., Path], tmp_path: Path
) -> None:
    same_tokens(
        program,
        bundled_package,
        [260, 1031, 75],
        LONG * 3 * 10**8,
        temperature=0.8,
        top_k=20,
        top_p=0.9,
    )
    same_tokens(program, bundled_package, [5], 0, temperature=0, top_p=1)
    every = exported("llama", filters=tuple(EXTRA_PARAMETERS))
    same_tokens(program, every, [5, 6, 7], LONG * 3 * 10**8, temperature=0.8, top_k=20, top_p=0.9)
    features = {
        "logit_bias": True,
        "allowed_tokens": True,
        "logprobs": True,
        "top_logprobs": 2,
        "probs": True,
    }
    made = [
        fake_package(tmp_path / "features", **features),
        fake_package(tmp_path / "at", compilation=compilation()),
    ]  # type: ignore[arg-type]
    for package in made:
        same_tokens(program, package.path, [1, 2], 3, temperature=0.9, top_p=1)


@pytest.mark.slow
def test_an_answer_follows_the_tables(
    program: Path, exported: Callable[..., Path], tmp_path: Path
) -> None:
    package = exported("llama", for_serving=True)
    interface = read_package(package).manifest.interface
    answers = [[10, 11, 12], [20, 21]]
    tables = choice_tables(interface.vocab_size, answers)
    grammar = write_tables(tmp_path / "choice.safetensors", tables)
    found = set()
    for seed in range(8):
        tokens = same_tokens(program, package, [5, 6], seed, grammar, temperature=9.0, top_p=1)
        # Without the stop token.
        found.add(tuple(tokens[:-1]))
    assert found == {tuple(answer) for answer in answers}
    # Without the option, every token is allowed.
    same_tokens(program, package, [5, 6], 1, temperature=0.8, top_p=0.9)


@pytest.mark.slow
def test_grammars_that_are_refused(
    program: Path, bundled_package: Path, exported: Callable[..., Path], tmp_path: Path
) -> None:
    package = exported("llama", for_serving=True)
    interface = read_package(package).manifest.interface
    tables = choice_tables(interface.vocab_size, [[10, 11, 12], [20, 21]])
    grammar = write_tables(tmp_path / "choice.safetensors", tables).path
    other = write_tables(tmp_path / "other.safetensors", choice_tables(7, [[1]])).path
    content = grammar.read_bytes()
    cut_off = tmp_path / "cut off"
    cut_off.write_bytes(content[:-1])
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    for path, file, limit, message in (
        (bundled_package, grammar, 20, "the package takes no grammars"),
        (package, tmp_path / "missing", 20, "missing cannot be read"),
        (package, other, 20, "the grammar is for 7 tokens"),
        (package, cut_off, 20, "is cut off"),
        (package, empty, 20, "has no grammar_classes"),
        (package, grammar, 2, "the shortest answer of the grammar has 3 tokens, and 2 are left"),
    ):
        result = run(program, path, "1", "--grammar", file, "--max-new-tokens", limit)
        assert (result.returncode, result.stdout) == (1, "")
        assert message in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_clear_messages(program: Path, bundled_package: Path, tmp_path: Path) -> None:
    for package, arguments, message in (
        (
            fake_package(tmp_path / "host", sampler=False).path,
            ("1",),
            "the package was exported without its sampler",
        ),
        (
            fake_package(tmp_path / "short", compilation=compilation(ctx_len=4)).path,
            ("1 2 3 4",),
            "has 4 tokens",
        ),
        (bundled_package, ("",), "has 0 tokens"),
        (bundled_package, ("1", "--top", "2"), "unknown option --top"),
        (tmp_path, ("1",), "has no qsample.json"),
    ):
        result = run(program, package, *arguments)
        assert (result.returncode, result.stdout) == (1, "")
        assert message in result.stderr
        assert result.stderr.count("\n") == 1
