"""Models with the verbs export, compile and generate: what each verb hands on. The compiler, the runtime and the
exporter are replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from qsample import runtime
from qsample.addons.bake.source import DecoderSource
from qsample.checkpoints import checkpoint as checkpoints
from qsample.compiler import compile as compiler
from qsample.compiler import targets
from qsample.compiler.options import CompileOptions
from qsample.compiler.targets import Capability
from qsample.contract.interface import Features
from qsample.errors import CompileError, PackageError, QsampleError
from qsample.exporters import export as exporter
from qsample.exporters import huggingface_reference
from qsample.models import dialects
from qsample.models import model as models
from qsample.models.cache import Recipe
from qsample.models.model import PackagedModel, SourceModel
from qsample.models.sources import CheckpointSource, GraphSource
from qsample.package.package import Package, copy_package
from qsample.progress import Stage
from qsample.request.huggingface.facade import GenerationConfig
from tests.helpers.fake_package import compilation

DEVICE_PACKAGE = {"compilation": compilation(execution_providers=("CUDAExecutionProvider",))}


@dataclass(frozen=True, kw_only=True)
class FakeGraph(GraphSource):
    """The graph of another exporter, which becomes a copy of a package."""

    kind: ClassVar = "fake graph"

    package: Package
    written: list[Any]

    def write_package(self, path: Path, features: Features, **options: Any) -> Package:
        self.written.append((path, features, options["overwrite"]))
        options["progress"]("copying", 0.5)
        return copy_package(self.package, path, overwrite=options["overwrite"])

    def pinned(self) -> FakeGraph:
        return replace(self, model_id="pinned/m")

    def identity(self) -> dict[str, Any]:
        return {"model": "identity"}


class FakeCheckpoint:
    """The attributes of a checkpoint that a model reads, in the order in which they are read."""

    def __init__(self, dtype: str = "float16") -> None:
        self.read: list[str] = []
        self.dtype = dtype
        self.generation_config = {"top_k": 7}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self.read.append(name)
        return name

    def load(self, *given: Any) -> Any:
        self.read.append("load")
        self.loaded = given
        return SimpleNamespace(generation_config="its own")

    def origin(self, sources: Any) -> Any:
        return ("origin", sources)


@pytest.fixture
def graph(fake: Callable[..., Package]) -> FakeGraph:
    return FakeGraph(model_id="me/m", package=fake(), written=[])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, fake: Callable[..., Package]) -> list[Any]:
    """What the compiler was given; the result is a device package."""
    calls: list[Any] = []
    result = fake(**DEVICE_PACKAGE)

    def compile_package(
        source: Package, path: Path, options: CompileOptions, **more: Any
    ) -> Package:
        calls.append(SimpleNamespace(source=source, path=path, options=options, **more))
        more["progress"]("fusing", 0.5)
        return copy_package(result, path, overwrite=more["overwrite"])

    monkeypatch.setattr(compiler, "compile_package", compile_package)
    return calls


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `load` was given; its result says what it was asked for."""
    calls: list[Any] = []

    class Runtime:
        generation_config: Any = None
        adapters: ClassVar = {"a": "adapter"}

        def generate(self, *given: Any, **options: Any) -> Any:
            return given, options

        def grammar(self, **form: Any) -> Any:
            return form

        def load_adapter(self, *given: Any, **options: Any) -> Any:
            return given, options

        def unload_adapter(self, name: str) -> None:
            calls.append(name)

    def load(path: Path, **options: Any) -> Any:
        calls.append((path, options))
        return Runtime()

    monkeypatch.setattr(runtime, "load", load)
    return calls


# Packages.


def test_a_package_is_loaded_once_when_it_is_first_needed(
    fake: Callable[..., Package], loads: list[Any]
) -> None:
    package = fake()
    model = PackagedModel(package, "cuda", trusted_keys=("key.pem",))  # type: ignore[arg-type]
    assert loads == []
    assert model.runtime is model.runtime
    options = {"provider": "cuda", "verify": False, "trusted_keys": ("key.pem",)}
    assert loads == [(package.path, options)]
    assert model.runtime.generation_config is model.generation_config
    model.generation_config = {"top_k": 3}
    assert model.runtime.generation_config == {"top_k": 3}


def test_what_a_package_says_of_itself(fake: Callable[..., Package]) -> None:
    package = fake(
        logprobs=True, files={"config.json": '{"hidden_size": 8}'}, generation_config={"top_k": 5}
    )
    model = PackagedModel(package)
    assert repr(model) == f"PackagedModel({package.summary})"
    assert (model.dtype, model.config.hidden_size) == ("float32", 8)
    assert model.features == package.interface.features
    assert model.generation_config == {"top_k": 5}
    assert isinstance(model.generation_config, GenerationConfig)
    assert model.generation_config is model.generation_config
    assert model.model is model


def test_the_device_of_a_package(fake: Callable[..., Package]) -> None:
    assert PackagedModel(fake()).device == "cpu"
    assert PackagedModel(fake(), "cpu").device == "cpu"
    assert PackagedModel(fake(), "cuda").device == "cuda"
    assert PackagedModel(fake(**DEVICE_PACKAGE)).device == "cuda"


def test_a_package_without_its_own_lock_is_released(fake: Callable[..., Package]) -> None:
    class Lock:
        pass

    lock = Lock()
    model = PackagedModel(fake(), holding=lock)  # type: ignore[arg-type]
    assert model._holding is lock


def test_arguments_of_generate_are_read_and_passed_on(
    fake: Callable[..., Package], loads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = PackagedModel(fake())
    assert model.generate() == ((None, None), {})
    assert model.generate([[5]], "params", seed=0) == (([[5]], "params"), {"seed": 0})

    class Other(dialects.Dialect):
        def read_generate(self, arguments: Any, features: Features) -> Any:
            assert features is model.features
            return dialects.GenerateArguments("inputs", "read", {"k": arguments.keywords["key"]})

        def read_compile(self, keywords: Mapping[str, Any]) -> Mapping[str, Any]:
            return {"ctx_len": keywords["context"]} if "context" in keywords else keywords

    monkeypatch.setattr(dialects, "_dialects", lambda: [Other()])
    assert model.generate([[5]], key=1) == (("inputs", "read"), {"k": 1})


def test_grammars_and_adapters_need_their_features(
    fake: Callable[..., Package], loads: list[Any]
) -> None:
    plain = PackagedModel(fake())
    with pytest.raises(ValueError, match="grammars"):
        plain.grammar(regex="a")
    with pytest.raises(ValueError, match="takes no LoRA adapters; export it with max_loras"):
        plain.load_adapter("a", "folder")
    assert loads == []  # neither needs the sessions
    able = PackagedModel(fake())
    able.features = Features(grammars=True, allowed_tokens=True, max_loras=1, max_lora_rank=4)
    assert able.grammar(regex="a") == {"regex": "a"}
    assert able.load_adapter("a", "folder") == (("a", "folder"), {"hotswap": False})
    assert able.load_adapter("a", "folder", hotswap=True)[1] == {"hotswap": True}  # type: ignore[index]
    assert able.adapters == {"a": "adapter"}
    able.unload_adapter("a")
    assert loads[-1] == "a"


def test_a_copy_of_a_package(fake: Callable[..., Package], tmp_path: Path) -> None:
    model = PackagedModel(fake(), "cuda")
    copy = model.save_pretrained(tmp_path / "copy")
    assert copy.package.path == tmp_path / "copy"
    assert copy.device == "cuda"
    with pytest.raises(PackageError, match="overwrite"):
        model.export(tmp_path / "copy")
    assert model.export(tmp_path / "copy", overwrite=True).package.path == tmp_path / "copy"


# compile.


def test_compile_hands_everything_on(
    fake: Callable[..., Package], compiled: list[Any], tmp_path: Path
) -> None:
    package = fake()
    said: list[tuple[str, float]] = []
    model = PackagedModel(package).compile(
        tmp_path / "out",
        options=CompileOptions(ctx_len=64, batch_size=2),
        progress=lambda stage, fraction: said.append((stage, fraction)),
        batch_size=3,
        dtype="torch.float16",
    )
    (call,) = compiled
    assert (call.source, call.path, call.overwrite) == (package, tmp_path / "out", False)
    assert call.options == CompileOptions(ctx_len=64, batch_size=3, dtype="float16")
    assert said == [("fusing", 0.5)]  # a package needs no export: all of the time is the compiler's
    assert model.package.path == tmp_path / "out"
    assert model._provider == "cpu"
    assert model._holding is None
    with pytest.raises(PackageError, match="overwrite"):
        PackagedModel(package).compile(tmp_path / "out")
    assert len(compiled) == 1  # before any work
    PackagedModel(package).compile(tmp_path / "out", overwrite=True)
    assert compiled[1].overwrite is True
    assert compiled[1].options == CompileOptions()


def test_compile_without_a_path_lives_as_long_as_the_result(
    fake: Callable[..., Package], compiled: list[Any]
) -> None:
    model = PackagedModel(fake()).compile()
    path = model.package.path
    assert path.is_dir()
    del model
    assert not path.exists()


def test_compile_of_other_programs_words(
    fake: Callable[..., Package], compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(dialects.Dialect):
        def read_compile(self, keywords: Mapping[str, Any]) -> Mapping[str, Any]:
            return {"ctx_len": keywords["context"]}

    monkeypatch.setattr(dialects, "_dialects", lambda: [Other()])
    PackagedModel(fake()).compile(context=32)
    assert compiled[0].options == CompileOptions(ctx_len=32)


def test_nothing_is_written_over_the_source(
    fake: Callable[..., Package], compiled: list[Any], graph: FakeGraph, tmp_path: Path
) -> None:
    model = PackagedModel(copy_package(fake(), tmp_path / "mine"))
    with pytest.raises(PackageError, match="is what the package is made from"):
        model.compile(tmp_path / "mine", overwrite=True)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(PackageError, match="is what the package is made from"):
        model.compile(tmp_path / "link", overwrite=True)
    source = SourceModel(replace(graph, model_id=str(tmp_path / "mine")), Features())
    for write in (source.export, source.compile):
        with pytest.raises(PackageError, match="is what the package is made from"):
            write(tmp_path / "mine", overwrite=True)
    assert (compiled, graph.written) == ([], [])


# Sources.


def test_a_graph_is_exported(graph: FakeGraph, tmp_path: Path) -> None:
    said: list[tuple[str, float]] = []
    features = Features(logprobs=True)
    model = SourceModel(graph, features, "cuda")
    assert repr(model) == "SourceModel(me/m, fake graph to export or compile)"
    assert model.model is model
    made = model.export(tmp_path / "out", progress=lambda *given: said.append(given))
    assert graph.written == [(tmp_path / "out", features, False)]
    assert said == [("copying", 0.5)]
    assert made.package.path == tmp_path / "out"
    assert made.device == "cuda"
    with pytest.raises(PackageError, match="overwrite"):
        model.export(tmp_path / "out")
    model.save_pretrained(tmp_path / "out", overwrite=True)
    assert [call[2] for call in graph.written] == [False, True]
    temporary = model.export()
    assert temporary.package.path.is_dir()
    assert temporary._holding is not None


def test_a_graph_is_exported_and_compiled(
    graph: FakeGraph, compiled: list[Any], loads: list[Any], tmp_path: Path
) -> None:
    said: list[tuple[str, float]] = []
    model = SourceModel(graph, Features())
    assert model.device == "cpu"
    made = model.compile(tmp_path / "out", progress=lambda *given: said.append(given))
    assert said == [("copying", 0.25), ("fusing", 0.75)]  # half of the time each
    assert compiled[0].source.path != tmp_path / "out"
    assert not compiled[0].source.path.exists()  # the portable package was a temporary one
    # `generate` runs the compiled package from now on.
    assert model.generate([[5]])[0] == ([[5]], None)  # type: ignore[index]
    assert loads[0][0] == made.package.path
    assert model.device == "cuda"
    model.generation_config = {"top_k": 3}
    assert model.runtime.generation_config == {"top_k": 3}


def test_a_target_that_is_not_installed_is_told_before_an_export(
    graph: FakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(self: Any) -> None:
        raise CompileError("not installed")

    monkeypatch.setattr(type(targets.find_target("cpu")), "check_installed", check)
    with pytest.raises(CompileError, match="not installed"):
        SourceModel(graph, Features()).compile()
    assert graph.written == []


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, fake: Callable[..., Package]) -> list[Any]:
    """The recipes that were asked for, and how each package would be made."""
    calls: list[Any] = []

    def open_cached(recipe: Recipe, make: Any, report: Any) -> Any:
        calls.append((recipe, make, report))
        return fake(**DEVICE_PACKAGE), "lock"

    monkeypatch.setattr(models, "open_cached", open_cached)
    return calls


@pytest.mark.parametrize(
    ("provider", "given", "name"),
    [
        (None, {}, "m-cpu"),
        ("cuda", {}, "m-cuda"),
        ("cpu", {"weights": "int4", "preset": "speed", "ctx_len": 64}, "m-cpu-int4-speed"),
        ("cpu", {"weights": "int8"}, "m-cpu-int8"),
    ],
)
def test_the_recipe_of_a_package_in_the_cache(
    provider: str | None, given: dict[str, Any], name: str, graph: FakeGraph, cached: list[Any]
) -> None:
    features = Features(logprobs=True)

    def progress(stage: str, fraction: float) -> None: ...

    model = SourceModel(graph, features, provider).cached(progress=progress, **given)
    ((recipe, make, report),) = cached
    assert recipe == Recipe(
        name,
        {
            "model": {"model": "identity"},
            "features": asdict(features),
            "provider": provider or "cpu",
            "weights": None,
            "preset": None,
            "ctx_len": None,
            **given,
        },
        "pinned/m",
    )
    assert report is progress
    assert make.keywords == {
        "provider": provider or "cpu",
        "options": CompileOptions(**given),
        "progress": progress,
    }
    assert (model._holding, model._provider) == ("lock", provider)


def test_generate_runs_the_package_of_the_cache(
    graph: FakeGraph, cached: list[Any], loads: list[Any]
) -> None:
    model = SourceModel(graph, Features())
    assert (model.dtype, model.device) == ("float32", "cuda")  # as the package says
    assert model.config == PackagedModel(graph.package).config
    model.generate([[5]])
    assert len(cached) == 1
    assert isinstance(model.generation_config, GenerationConfig)


@contextmanager
def made_verbs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    calls: list[Any] = []
    for verb in ("export", "compile"):

        def call(self: SourceModel, path: Path, verb: str = verb, **options: Any) -> None:
            calls.append((verb, self.source, self.features, self._provider, path, options))

        monkeypatch.setattr(SourceModel, verb, call)
    yield calls


def test_how_a_package_of_the_cache_is_made(
    graph: FakeGraph, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    features = Features(logprobs=True)
    model = SourceModel(graph, features, "cpu")
    with made_verbs(monkeypatch) as calls:
        model._make(tmp_path, provider="cpu", options=CompileOptions(ctx_len=64), progress=None)
        model._make(tmp_path, provider="tensorrt", options=CompileOptions(), progress=None)
        with pytest.raises(QsampleError, match="nonsense"):
            model._make(tmp_path, provider="nonsense", options=CompileOptions(), progress=None)
    own = targets.find_target("cpu").default_options
    options = CompileOptions(ctx_len=64).override(provider="cpu", **own)
    assert [call[0] for call in calls] == ["compile", "export"]
    for _, source, made_features, provider, path, _ in calls:
        assert (source.model_id, made_features, provider) == ("pinned/m", features, "cpu")
        assert path == tmp_path
    assert calls[0][-1] == {"options": options, "progress": None}
    assert calls[1][-1] == {"progress": None}


@pytest.mark.parametrize("reads_images", [True, False])
@pytest.mark.parametrize("images", [None, True, False])
@pytest.mark.parametrize("text_only", [True, False])
def test_images_are_left_out_if_the_target_cannot_have_them(
    text_only: bool,
    images: bool | None,
    reads_images: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(CheckpointSource, "open", lambda self: FakeCheckpoint("float32"))
    monkeypatch.setattr(CheckpointSource, "pinned", lambda self: self)
    capabilities = {Capability.IMAGES} if reads_images else set()
    target = SimpleNamespace(capabilities=capabilities, default_options={})
    monkeypatch.setattr(targets, "find_target", lambda name: target)
    source = CheckpointSource(model_id="me/m", images=images, text_only=text_only)
    with made_verbs(monkeypatch) as calls:
        SourceModel(source, Features())._make(
            tmp_path, provider="cpu", options=CompileOptions(), progress=None
        )
    chosen_by_us = images is None and not reads_images
    assert calls[0][1].text_only is (text_only or chosen_by_us)


@pytest.mark.parametrize(
    ("preferred", "dtype", "chosen"),
    [
        ({"dtype": "bfloat16"}, "float16", "float16"),
        ({"dtype": "bfloat16"}, "float32", "bfloat16"),
        ({}, "float16", None),
    ],
)
def test_float16_that_was_chosen_stays(
    preferred: dict[str, str],
    dtype: str,
    chosen: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(CheckpointSource, "open", lambda self: FakeCheckpoint(dtype))
    monkeypatch.setattr(CheckpointSource, "pinned", lambda self: self)
    target = SimpleNamespace(capabilities=set(), default_options=preferred)
    monkeypatch.setattr(targets, "find_target", lambda name: target)
    with made_verbs(monkeypatch) as calls:
        SourceModel(CheckpointSource(model_id="me/m"), Features())._make(
            tmp_path, provider="cpu", options=CompileOptions(), progress=None
        )
    assert calls[0][-1]["options"] == CompileOptions(dtype=chosen)


# Checkpoints.


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> FakeCheckpoint:
    made = FakeCheckpoint()
    monkeypatch.setattr(CheckpointSource, "open", lambda self: made)
    return made


CHECKPOINT = CheckpointSource(model_id="me/m")


def test_what_a_checkpoint_says_of_itself(opened: FakeCheckpoint) -> None:
    model = SourceModel(CHECKPOINT, Features())
    assert (model.dtype, model.config) == ("float16", "config")
    assert model.generation_config == {"top_k": 7}
    assert isinstance(model.generation_config, GenerationConfig)


def test_logits_of_transformers(
    opened: FakeCheckpoint, graph: FakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_reference, "eager_logits", lambda model, rows: (model, rows))
    compute = SourceModel(CHECKPOINT, Features()).eager_logits()
    assert compute is not None
    model, rows = compute([[5]])  # type: ignore[misc]
    assert (model.generation_config, rows) == ("its own", [[5]])
    assert SourceModel(graph, Features()).eager_logits() is None


def test_a_checkpoint_is_exported(
    opened: FakeCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    fake: Callable[..., Package],
    tmp_path: Path,
) -> None:
    calls: list[Any] = []
    said: list[Any] = []

    def export_model(loaded: Any, path: Path, features: Features, **options: Any) -> Package:
        calls.append((loaded, path, features, options["overwrite"]))
        options["progress"]("tracing", 0.5)
        return fake()

    monkeypatch.setattr(exporter, "export_model", export_model)
    features = Features(logprobs=True)
    SourceModel(CHECKPOINT, features).export(
        tmp_path / "out", progress=lambda *given: said.append(given)
    )
    ((loaded, path, given, overwrite),) = calls
    assert (path, given, overwrite) == (tmp_path / "out", features, False)
    assert (loaded.tokenizer, loaded.processor) == ("tokenizer", "processor")
    assert loaded.model.generation_config == "its own"
    assert loaded.origin == ("origin", loaded.sources)
    # Small files are read before the weights.
    assert opened.read == ["config", "adapter_files", "tokenizer", "processor", "load"]
    dtype, scratch, sources = opened.loaded
    assert (dtype, sources) == (None, loaded.sources)
    assert scratch.parent.parent == tmp_path
    assert said == [(Stage.OPENING, 0.0), ("tracing", 0.5)]
    assert [each.name for each in tmp_path.iterdir()] == []  # no scratch is left


def test_changed_settings_go_into_an_export(
    opened: FakeCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    fake: Callable[..., Package],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(
        checkpoints, "transformers_generation_config", lambda given: {"changed": dict(given)}
    )
    loaded: list[Any] = []
    monkeypatch.setattr(
        exporter, "export_model", lambda given, *_, **__: loaded.append(given) or fake()
    )
    model = SourceModel(CHECKPOINT, Features())
    model.generation_config.top_k = 3
    model.export(tmp_path / "out")
    assert loaded[0].model.generation_config == {"changed": {"top_k": 3}}


@pytest.mark.parametrize(
    ("dtype", "loaded_as"),
    [(None, None), ("float16", "float16"), ("float32", "float32"), ("bfloat16", None)],
)
def test_a_checkpoint_is_compiled_in_the_dtype_of_its_export(
    dtype: str | None,
    loaded_as: str | None,
    opened: FakeCheckpoint,
    compiled: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    fake: Callable[..., Package],
    tmp_path: Path,
) -> None:
    calls: list[Any] = []
    open_files: list[str] = []

    class Sources:
        def __enter__(self) -> None:
            open_files.append("open")

        def __exit__(self, *_: object) -> None:
            open_files.append(f"closed after {len(compiled)}")

    def export_unpublished(loaded: Any, folder: Path, features: Features, **options: Any) -> Any:
        calls.append((folder, features))
        options["progress"]("tracing", 0.5)
        return SimpleNamespace(sources=Sources())

    monkeypatch.setattr(exporter, "export_unpublished", export_unpublished)
    features = Features(logprobs=True)
    said: list[Any] = []
    SourceModel(CHECKPOINT, features).compile(
        tmp_path / "out",
        options=CompileOptions(dtype=dtype),
        progress=lambda *given: said.append(given),
    )
    ((folder, given),) = calls
    assert (folder.name, given) == ("portable", features)
    assert folder.parent.parent == tmp_path
    assert opened.loaded[0] == loaded_as
    assert open_files == ["open", "closed after 1"]
    assert said == [(Stage.OPENING, 0.0), ("tracing", 0.25), ("fusing", 0.75)]


def test_a_decoder_has_no_checkpoint() -> None:
    model = SourceModel(DecoderSource(model_id="m.onnx"), Features())
    assert model._checkpoint is None
    assert model.eager_logits() is None
