"""Checkpoints of tiny random models, packages exported from them, and fake packages, made once for all processes."""

from __future__ import annotations

import ast
import functools
import gc
import hashlib
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer.main
from filelock import FileLock

if TYPE_CHECKING:
    from qsample.package.package import Package
    from qsample.runtime import CausalLM

# Models of a few kilobytes gain nothing from torch's second thread, and while it waits it keeps a core from the other
# test processes: half of a run's CPU time. Before torch is imported; the commands that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure() -> None:
    """Undo what commands that tests start would inherit: jobs in the background of a shell ignore SIGINT."""
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    if ignored and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def no_spinning() -> None:
    """ONNX Runtime's threads compute as ever, but leave the processors to other test processes while they wait: a third
    of the CPU time of tests that generate."""
    import onnxruntime as ort  # NumPy, too, reads OMP_NUM_THREADS when it is imported

    class SessionOptions(ort.SessionOptions):
        def __init__(self) -> None:
            super().__init__()
            self.add_session_config_entry("session.intra_op.spin_duration_us", "0")

    ort.SessionOptions = SessionOptions


@pytest.fixture(scope="session", autouse=True)
def one_parser() -> None:
    """typer builds the command line's parser anew for each command, which takes 20 ms."""
    typer.main.get_command = functools.cache(typer.main.get_command)


@pytest.fixture
def only_new_garbage() -> None:
    """Garbage collections pass over all that was there before: to look through what other tests left takes seconds."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """Keep libraries and tests out of garbage collections, which took 15 % of the time of tests that trace."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """State what the given files and folders cover: the first line of each module. Silent for the whole suite."""
    lines = []
    for name in config.args:
        path = Path(name.partition("::")[0]).resolve()
        if path == Path(__file__).parent:
            continue
        for file in sorted(path.rglob("test_*.py")) or [path] * path.is_file():
            docstring = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
            lines.append(
                f"{os.path.relpath(file, config.rootpath)}: {docstring.partition(chr(10))[0]}"
            )
    return lines


def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a pytest-xdist run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that every process of a run sees, and the runs of scripts/check: what one exports, the next takes."""
    # Tests of a changed copy of qsample, which these may start, make packages of their own.
    given = os.environ.pop("QSAMPLE_TESTS_FOLDER", None)
    folder = Path(given) if given else run_folder(tmp_path_factory) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Models that are given directly go into a cache of this run, not into the user's."""
    os.environ["QSAMPLE_CACHE"] = str(run_folder(tmp_path_factory) / "cache")
    os.environ.pop("QSAMPLE_CACHE_LIMIT", None)


def made_once(path: Path, make: Callable[[Path], object]) -> Path:
    """`path`, made by the first process that asks for it."""
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            make(path)
    return path


def named(model_type: str, features: Mapping[str, object]) -> str:
    """A name for a package of a model with these features: a file system takes 255 bytes."""
    given = "-".join(f"{key}={value}" for key, value in sorted(features.items()))
    return (
        f"{model_type}-{hashlib.sha256(given.encode()).hexdigest()[:16]}" if given else model_type
    )


@pytest.fixture(scope="session")
def checkpoint(shared_folder: Path) -> Callable[[str], Path]:
    """model_type → a checkpoint folder of a random model of that type."""
    from tests.helpers.tiny_models import save_checkpoint

    return lambda model_type: made_once(
        shared_folder / f"{model_type}-checkpoint", lambda path: save_checkpoint(path, model_type)
    )


@pytest.fixture(scope="session")
def exported(checkpoint: Callable[[str], Path], shared_folder: Path) -> Callable[..., Path]:
    """(model_type, **features) → a portable package of that model; features as `from_pretrained` takes them.

    A model type is traced once: its other features are joined to the graph of the package without them.
    """
    from qsample import AutoModelForCausalLM
    from qsample.package.package import read_package
    from tests.helpers.tiny_models import with_features

    def make(model_type: str = "llama", **features: object) -> Path:
        name = named(model_type, features)
        model = AutoModelForCausalLM.from_pretrained(checkpoint(model_type), **features)
        if not features:
            return made_once(shared_folder / f"{name}-package", model.export)
        plain = read_package(make(model_type))
        return made_once(
            shared_folder / f"{name}-package",
            lambda path: with_features(plain, path, model.features),
        )

    return make


@pytest.fixture(scope="session")
def adapted(checkpoint: Callable[[str], Path], shared_folder: Path) -> Callable[..., Path]:
    """(model_type, **features) → a portable package that takes LoRA adapters, from a trace of its own."""
    from qsample import AutoModelForCausalLM

    def make(model_type: str = "llama", **features: object) -> Path:
        name = f"{named(model_type, features)}-adapted"
        return made_once(
            shared_folder / name,
            lambda path: AutoModelForCausalLM.from_pretrained(
                checkpoint(model_type), **features
            ).export(path),
        )

    return make


@pytest.fixture(scope="session")
def image_checkpoint(shared_folder: Path) -> Callable[[str], Path]:
    """model_type → a checkpoint folder of a random model that reads images."""
    from tests.helpers.tiny_vlms import make_tiny_vlm

    return lambda model_type: made_once(
        shared_folder / f"{model_type}-images", lambda path: make_tiny_vlm(model_type, path)
    )


@pytest.fixture(scope="session")
def image_package(
    image_checkpoint: Callable[[str], Path], shared_folder: Path
) -> Callable[..., Path]:
    """(model_type, **features) → a portable package that reads images; an export of 25 seconds."""
    from qsample import AutoModelForImageTextToText

    def make(model_type: str, **features: object) -> Path:
        name = f"{named(model_type, features)}-images-package"
        model = AutoModelForImageTextToText.from_pretrained
        return made_once(
            shared_folder / name,
            lambda path: model(image_checkpoint(model_type), **features).export(path),
        )

    return make


@pytest.fixture(scope="session")
def llama_package(exported: Callable[..., Path]) -> Path:
    """A portable package of a random Llama with the sampler in its graph."""
    return exported("llama")


@pytest.fixture(scope="session")
def short_head_checkpoint(shared_folder: Path) -> Path:
    """A chat model whose head lacks the tokenizer's last token, <image>, 261. Its tokenizer ends with <|im_end|>, 260,
    and its generation_config with </s>, 2."""
    from tests.helpers.tiny_models import save_chat_checkpoint

    return made_once(
        shared_folder / "short-head-checkpoint",
        lambda path: save_chat_checkpoint(path, vocab_size=261, eos_token_id=2),
    )


@pytest.fixture(scope="session")
def short_head_package(short_head_checkpoint: Path, shared_folder: Path) -> Path:
    """A portable package of that model, with the features for serving."""
    from qsample import AutoModelForCausalLM

    features: Any = {"for_serving": True, "filters": ("bad_words_ids", "dry"), "max_loras": 1}

    def export(path: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(short_head_checkpoint, **features)
        with pytest.warns(UserWarning, match=r"the model lacks 1 of .*, from '<image>' \(id 261\)"):
            model.export(path)

    return made_once(shared_folder / "short-head-package", export)


@pytest.fixture(scope="session")
def bundled_package(shared_folder: Path) -> Path:
    """A portable package of the model that comes with qsample."""
    import qsample
    from qsample import AutoModelForCausalLM

    bundled = Path(qsample.__file__).parent / "assets" / "tiny_lm"
    return made_once(
        shared_folder / "tiny_lm-package",
        lambda path: AutoModelForCausalLM.from_pretrained(bundled).export(path),
    )


@pytest.fixture(scope="session")
def smolvlm_package(image_package: Callable[..., Path]) -> Path:
    """A portable package of a random SmolVLM, which reads tiles of 9 tokens each, with the features for serving."""
    return image_package("smolvlm", for_serving=True)


@pytest.fixture(scope="session")
def guessing_package(bundled_package: Path, shared_folder: Path) -> Path:
    """The bundled model with the features for serving and some filters; a step checks up to 7 guesses."""
    from qsample.compiler.compile import compile_package
    from qsample.compiler.options import CompileOptions
    from qsample.contract.interface import Features
    from qsample.package.package import read_package
    from tests.helpers.tiny_models import with_features

    def make(path: Path) -> None:
        features = Features(
            filters=("xtc", "dry", "no_repeat_ngram_size", "mirostat")
        ).for_serving()
        portable = shared_folder / "tiny_lm-everything"
        with_features(read_package(bundled_package), portable, features)
        options = CompileOptions(ctx_len=256, kv_cache_dtype="int8", num_speculative_tokens=7)
        compile_package(read_package(portable), path, options)

    return made_once(shared_folder / "tiny_lm-guessing", make)


@pytest.fixture(scope="session")
def adapted_server_package(shared_folder: Path) -> Path:
    """The bundled model with the features for serving; it takes LoRA adapters."""
    import qsample
    from qsample import AutoModelForCausalLM

    bundled = Path(qsample.__file__).parent / "assets" / "tiny_lm"
    features: Any = {"for_serving": True, "max_loras": 4, "max_lora_rank": 8}
    return made_once(
        shared_folder / "tiny_lm-adapted-package",
        lambda path: AutoModelForCausalLM.from_pretrained(bundled, **features).export(path),
    )


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Package]:
    """features and options → a fake package."""
    from tests.helpers.fake_package import fake_package

    made: dict[str, Package] = {}

    def make(**options: Any) -> Package:
        key = repr(sorted(options.items()))
        if key not in made:
            made[key] = fake_package(tmp_path_factory.mktemp("fake") / "package", **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def fake_model(fake: Callable[..., Package]) -> Callable[..., CausalLM]:
    """features and options → a model loaded from a fake package, which reads short prompts in several pieces."""
    from qsample.runtime import CausalLM, load
    from tests.helpers.fake_graphs import GUESSING_CAPACITY
    from tests.helpers.fake_package import PIECE_SIZE
    from tests.helpers.sessions import with_prompt_calls

    loaded: dict[str, CausalLM] = {}

    def make(**options: Any) -> CausalLM:
        key = repr(sorted(options.items()))
        if key not in loaded:
            guesses = bool(options.get("num_speculative_tokens"))
            # The fake's cache is float32, over which guesses change last bits.
            plain = load(fake(**options).path, batch_invariant=not guesses)
            ctx_len = GUESSING_CAPACITY if guesses else None
            loaded[key] = CausalLM(
                plain.package, with_prompt_calls(plain.sessions, piece_size=PIECE_SIZE), ctx_len
            )
        return loaded[key]

    return make


@pytest.fixture
def model(fake_model: Callable[..., CausalLM]) -> CausalLM:
    return fake_model()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """A command line that runs in the test's own process; a call returns (status, stdout, stderr)."""

    from qsample import cli

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        status = cli.run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call
