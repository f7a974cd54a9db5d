"""js/, the npm package: its tests in Node, against tokens and texts of the Python runtime.

Skipped without Node or the packages that `npm install` brings; the browser's tests also need a Chromium.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.contract.tensors import EXTRA_PARAMETERS
from qsample.request.structured.tables import TokenGrammar
from qsample.runtime import CausalLM, load
from tests.helpers.forms import (
    choice,
    person,
    thoughtful_choice,
    token_grammar,
    token_texts,
    write_grammar,
)

# Python warns of what it leaves out of a model's own settings.
pytestmark = pytest.mark.filterwarnings("ignore:the model's generation_config.json asks for")

JS = Path(__file__).parents[2] / "js"
ENGLISH = ["In the beginning", "Blessed are", "And the LORD spake unto Moses, saying"]
FOREIGN = ["Größe 😀 naïve", "東京は", ""]
CHAT = [
    {"role": "system", "content": "Hear"},
    {"role": "user", "content": [{"type": "text", "text": "O Israel"}]},
]
FILTERED = {
    "typical_p": 0.9,
    "top_a": 0.1,
    "xtc_probability": 0.5,
    "dry_multiplier": 0.8,
    "dry_sequence_breakers": ["\n", 14],
    "bad_words": ["the", "of"],
    "bad_words_ids": [[261, 262]],
    "no_repeat_ngram_size": 3,
    "penalty_last_n": 3,
    "frequency_penalty": 0.5,
    "mirostat": 2,
    "dynatemp_range": 0.3,
}
# (package, prompts, options): continued by both.
CASES: list[tuple[str, Any, dict[str, Any]]] = [
    ("bundled", ENGLISH[0], {}),
    ("bundled", ENGLISH[0], {"do_sample": False, "max_new_tokens": 20}),
    ("bundled", ENGLISH, {"temperature": 0.7, "top_p": 0.9, "top_k": None, "max_new_tokens": 40}),
    (
        "bundled",
        ENGLISH[::-1],
        {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.3, "max_length": 30},
    ),
    (
        "bundled",
        ENGLISH,
        {
            "frequency_penalty": 0.5,
            "presence_penalty": 0.2,
            "min_new_tokens": 12,
            "eos_token_id": [14, 1],
        },
    ),
    ("bundled", FOREIGN, {"temperature": 1.5, "top_k": 100, "top_p": 1, "max_new_tokens": 30}),
    ("bundled", CHAT, {"max_new_tokens": 24}),
    # Capacities that double: of a single row, and of rows that end at different times.
    (
        "bundled",
        ENGLISH[0],
        {
            "max_new_tokens": 320,
            "eos_token_id": None,
            "temperature": 1.2,
            "repetition_penalty": 1.1,
        },
    ),
    (
        "bundled",
        ENGLISH,
        {"max_new_tokens": 150, "stop_strings": ["Israel", ":", "."], "repetition_penalty": 1.05},
    ),
    ("bundled", list(range(3, 90)), {"max_new_tokens": 80}),
    (
        "llama",
        [[5, 6, 7], [8]],
        {**FILTERED, "max_new_tokens": 12, "logit_bias": {20: 2.5, 21: float("-inf")}},
    ),
    (
        "llama",
        "In the",
        {"temperature": 0.9, "top_n_sigma": 1.5, "epsilon_cutoff": 0.001, "max_new_tokens": 6},
    ),
    (
        "llama",
        "In the",
        {"adaptive_target": 0.3, "adaptive_decay": 0.7, "min_p": 0.05, "max_new_tokens": 12},
    ),
    ("own settings", ENGLISH, {}),
    ("own settings", ENGLISH[0], {"temperature": 1.1, "min_new_tokens": 4, "max_new_tokens": 9}),
    # Grammars by their names: greedy and random rows, two grammars beside a row without any, equal grammars.
    ("grammars", ENGLISH[0], {"grammar": "person", "max_new_tokens": 40}),
    ("grammars", ENGLISH[0], {"grammar": "person", "do_sample": False, "max_new_tokens": 30}),
    (
        "grammars",
        [*ENGLISH, "So"],
        {
            "grammar": ["person", None, "choice", "person"],
            "temperature": 1.3,
            "max_new_tokens": 45,
        },
    ),
    # Longer than the buffers of rows without a grammar are at first.
    (
        "grammars",
        ENGLISH,
        {
            "grammar": ["person", "choice", None],
            "temperature": 0.9,
            "logit_bias": {4: -6},
            "max_new_tokens": 200,
        },
    ),
    ("grammars", ENGLISH[1], {"grammar": "thoughts", "temperature": 1.2, "max_new_tokens": 30}),
    (
        "grammars",
        ENGLISH[1:],
        {"grammar": "thoughts", "thinking_token_budget": 5, "max_new_tokens": 30},
    ),
    (
        "grammars",
        ENGLISH[1],
        {"grammar": "thoughts", "thinking_token_budget": 0, "max_new_tokens": 30},
    ),
]
# Settings of a model: some need features, some are left out and named.
OWN_SETTINGS: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.9,
    "top_k": -1,
    "top_p": 0,
    "typical_p": 0.8,
    "begin_suppress_tokens": [5],
    "suppress_tokens": [14, 17, 9999],
    "sequence_bias": [[[20], 1.5]],
    "min_new_tokens": 50,
    "max_new_tokens": 20,
}
# The number of tokens of the shortest answer is the first limit.
NUM_SHORT_LIMITS = 8


def camel(name: str) -> str:
    return (
        "stop" if name == "stop_strings" else re.sub(r"_(\w)", lambda match: match[1].upper(), name)
    )


@pytest.fixture(scope="module")
def gpu_packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The bundled model with weights in float32, as its own float16 needs a GPU that has it: a portable package, and a
    package for WebGPU where the plugin is that compiles it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import qsample

    bundled = Path(qsample.__file__).parent / "assets" / "tiny_lm"
    folder = tmp_path_factory.mktemp("float32")
    AutoModelForCausalLM.from_pretrained(bundled, dtype=torch.float32).save_pretrained(
        folder / "checkpoint"
    )
    AutoTokenizer.from_pretrained(bundled).save_pretrained(folder / "checkpoint")
    features: dict[str, Any] = {
        "logprobs": True,
        "top_logprobs": 3,
        "return_pdfs": True,
        "grammars": True,
    }
    model = qsample.AutoModelForCausalLM.from_pretrained(folder / "checkpoint", **features)
    portable = model.export(folder / "float32")
    packages = {"float32": folder / "float32"}
    if importlib.util.find_spec("onnxruntime_ep_webgpu"):
        portable.compile(folder / "webgpu", provider="webgpu", ctx_len=512, weights="float32")
        packages["webgpu"] = folder / "webgpu"
    return packages


@pytest.fixture(scope="module")
def grammar_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, which takes grammars."""
    import qsample

    bundled = Path(qsample.__file__).parent / "assets" / "tiny_lm"
    model = qsample.AutoModelForCausalLM.from_pretrained(bundled, grammars=True, logit_bias=True)
    folder = tmp_path_factory.mktemp("grammars") / "package"
    model.export(folder)
    return folder


@pytest.fixture(scope="module")
def package_of_own_settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, whose generation_config has settings of all kinds."""
    import qsample

    folder = tmp_path_factory.mktemp("own_settings")
    shutil.copytree(Path(qsample.__file__).parent / "assets" / "tiny_lm", folder / "checkpoint")
    path = folder / "checkpoint" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | OWN_SETTINGS))
    model = qsample.AutoModelForCausalLM.from_pretrained(folder / "checkpoint")
    model.export(folder / "package")
    return folder / "package"


@pytest.fixture(scope="module")
def grammars(grammar_package: Path) -> dict[str, TokenGrammar]:
    forms = {
        "person": person(),
        "choice": choice("yes", "no", "maybe so"),
        "thoughts": thoughtful_choice("yes", "no"),
    }
    texts = token_texts(grammar_package)
    return {name: token_grammar(form, texts) for name, form in forms.items()}


@pytest.fixture(scope="module")
def cases(
    bundled_package: Path,
    grammar_package: Path,
    package_of_own_settings: Path,
    grammars: dict[str, TokenGrammar],
    exported: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A file with packages, calls, and the Python runtime's results."""
    features: dict[str, Any] = {
        "logit_bias": True,
        "allowed_tokens": True,
        "logprobs": True,
        "top_logprobs": 3,
    }
    features["grammars"] = True
    llama = exported("llama", filters=tuple(EXTRA_PARAMETERS), **features)
    packages = {
        "bundled": bundled_package,
        "llama": llama,
        "own settings": package_of_own_settings,
        "grammars": grammar_package,
    }
    models = {name: load(path) for name, path in packages.items()}
    shortest = grammars["person"].shortest
    short_limits = range(shortest, shortest + NUM_SHORT_LIMITS)
    short: list[tuple[str, Any, dict[str, Any]]] = [
        ("grammars", ENGLISH[1], {"grammar": "person", "temperature": 1, "max_new_tokens": limit})
        for limit in short_limits
    ]
    rows = [
        case(models[name], name, seed, prompts, options, grammars)
        for seed, (name, prompts, options) in enumerate(CASES + short)
    ]
    folder = tmp_path_factory.mktemp("js")
    files = {
        name: str(write_grammar(grammar, folder / f"{name}.safetensors"))
        for name, grammar in grammars.items()
    }
    path = folder / "cases.json"
    path.write_text(
        json.dumps(
            {
                "packages": {name: str(package) for name, package in packages.items()},
                "grammars": files,
                "cases": rows,
            }
        )
    )
    return path


def case(
    model: CausalLM,
    package: str,
    number: int,
    prompts: Any,
    options: dict[str, Any],
    grammars: dict[str, TokenGrammar],
) -> dict[str, Any]:
    seed = 2**53 + 1 + 100 * number
    names = options.get("grammar")
    if isinstance(names, list):
        grammar: Any = [None if name is None else grammars[name] for name in names]
    else:
        grammar = None if names is None else grammars[names]
    output = model.generate(prompts, seed=seed, **(options | {"grammar": grammar}))
    expected: dict[str, Any] = {
        "tokenIds": output.token_ids,
        "texts": output.texts,
        "finishReasons": output.finish_reasons,
        "promptLengths": output.prompt_lengths,
    }
    if output.logprobs is not None:
        expected["logprobs"] = [
            row[: len(ids)].tolist()
            for row, ids in zip(output.logprobs, output.token_ids, strict=True)
        ]
        assert output.top_logprob_ids is not None
        expected["topIds"] = output.top_logprob_ids[:, 0].tolist()
    given = {camel(name): value for name, value in options.items()}
    if isinstance(names, list):
        del given["grammar"]
        given["rows"] = [{"grammar": name} for name in names]
    if "logitBias" in given:  # JSON has no infinities
        given["logitBias"] = {
            token: str(bias) if np.isinf(bias) else bias
            for token, bias in given["logitBias"].items()
        }
    return {
        "package": package,
        "prompts": prompts,
        "options": given,
        "seed": str(seed),
        "expected": expected,
    }


def npm(*arguments: str, cwd: Path = JS, **environment: str) -> str:
    """Run a command of Node's; its output. Skips the test where it cannot run."""
    if shutil.which("node") is None:
        pytest.skip("needs Node 20 or newer")
    if not (JS / "node_modules" / "vitest").is_dir():
        pytest.skip("needs `npm install`, in js/")
    done = subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=os.environ | environment,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.ci
def test_in_node(cases: Path) -> None:
    npm("npx", "vitest", "run", "--project", "node", QSAMPLE_CASES=str(cases))


@pytest.mark.slow
def test_in_a_browser(cases: Path, gpu_packages: dict[str, Path], tmp_path: Path) -> None:
    given = json.loads(cases.read_text("utf-8"))
    given["packages"] |= {name: str(path) for name, path in gpu_packages.items()}
    (tmp_path / "cases.json").write_text(json.dumps(given), "utf-8")
    npm("npx", "vitest", "run", "--project", "browser", QSAMPLE_CASES=str(tmp_path / "cases.json"))


@pytest.mark.ci
def test_types() -> None:
    npm("npx", "tsc")


@pytest.mark.slow
def test_the_packed_package_runs_the_readmes_program(bundled_package: Path, tmp_path: Path) -> None:
    packed = npm("npm", "pack", "--silent", "--pack-destination", str(tmp_path)).split()[-1]
    (tmp_path / "package.json").write_text('{"private": true, "type": "module"}')
    install = ["npm", "install", "--offline", "--no-audit", "--no-fund", packed]
    without_cuda = os.environ | {
        "ONNXRUNTIME_NODE_INSTALL": "skip"
    }  # whose download is its installation script
    done = subprocess.run(
        install, capture_output=True, text=True, check=False, cwd=tmp_path, env=without_cuda
    )
    if "ENOTCACHED" in done.stderr:
        pytest.skip("npm's cache lacks a package that this one needs")
    assert done.returncode == 0, done.stderr
    (tmp_path / "model").symlink_to(bundled_package)
    program = next(
        re.finditer(r"```js\n(.*?)```", (JS / "README.md").read_text("utf-8"), re.DOTALL)
    )[1]
    assert len(program.splitlines()) <= 10
    (tmp_path / "program.js").write_text(program, "utf-8")
    model = load(bundled_package)
    first = model.generate(
        "In the beginning", temperature=0.7, top_p=0.9, max_new_tokens=24, seed=1
    )
    assert npm("node", "program.js", cwd=tmp_path).startswith(first.texts[0])  # type: ignore[index]
