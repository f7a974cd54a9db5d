"""The models that commands open: packages as they are, anything else compiled into the user's
cache."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from qsample.cli.common import (
    BatchInvariant,
    Lora,
    Preset,
    Provider,
    TextOnly,
    Threads,
    TrustedKeys,
    Weights,
    read_loras,
)
from qsample.cli.terminal import format_size, note, progress
from qsample.contract.interface import DEFAULT_LORA_RANK, Features
from qsample.progress import Progress, Stage

if TYPE_CHECKING:
    from qsample.models.model import PackagedModel, SourceModel
    from qsample.package.package import Package
    from qsample.runtime import CausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileChoices:
    """How a model that is given directly is compiled into the cache.

    Attributes:
        provider: the execution provider; by default, the one that the package was compiled for,
            otherwise the CPU.
        weights: the type of the weights, as in `CompileOptions`.
        preset: the preset of quantized weights, as in `CompileOptions`.
        ctx_len: the tokens that a row holds, as in `CompileOptions`.
        text_only: leave out the images of a checkpoint that reads them.
    """

    provider: str | None = None
    weights: str | None = None
    preset: str | None = None
    ctx_len: int | None = None
    text_only: bool = False

    def check_package(self, name: str) -> None:
        """Raise typer.BadParameter for choices that a package does not leave open.

        Args:
            name: the package, for the message.
        """
        for flag, value in (("--weights", self.weights), ("--preset", self.preset)):
            if value is not None:
                raise typer.BadParameter(
                    f"{flag} is for a checkpoint, and {name} is a package; quantize it with "
                    f"`qsample compile {name} OUT {flag} {value}`"
                )
        check_text_only(name, self.text_only)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureNeeds:
    """The features that a command needs of a package that is compiled for it.

    Attributes:
        for_serving: whether the package has all features that a server's requests may need.
        has_form: whether answers have to follow a form.
        loras: the adapters to load, name → folder. The package takes all of them at once.
        max_loras: the least number of adapters that the package takes at once.
    """

    for_serving: bool = False
    has_form: bool = False
    loras: Mapping[str, str] = field(default_factory=dict)
    max_loras: int = 0

    def added_to(self, features: Features) -> Features:
        """The features of a model, with the needed ones."""
        if self.for_serving:
            features = features.for_serving()
        if self.has_form:
            # A form that is no regular language needs masks.
            features = replace(features, grammars=True, allowed_tokens=True)
        count = max(self.max_loras, len(self.loras))
        if count == 0:
            return features
        rank = max(features.max_lora_rank, self._largest_rank())
        return replace(features, max_loras=count, max_lora_rank=rank)

    def _largest_rank(self) -> int:
        """The largest rank of the adapters; without adapters, the usual largest rank."""
        from qsample.request.huggingface.lora import CONFIG, read_config

        folders = self.loras.values()
        ranks = [read_config(Path(folder, CONFIG)).largest_rank for folder in folders]
        return max(ranks, default=DEFAULT_LORA_RANK)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a command opens and loads its model."""

    lora: Lora = None
    weights: Weights = None
    preset: Preset = None
    text_only: TextOnly = False
    provider: Provider = None
    threads: Threads = None
    batch_invariant: BatchInvariant = True
    trusted_keys: TrustedKeys = None

    def loras(self) -> dict[str, str]:
        """The adapters, name → folder. Raises typer.BadParameter for invalid ones."""
        return read_loras(self.lora)

    def open(
        self, model: str | None, *, ctx_len: int | None = None, has_form: bool = False
    ) -> PackagedModel:
        """Open the package of a model, as `open_exported` does.

        Args:
            model: the package, checkpoint folder, hub id or decoder file; by default the bundled
                model.
            ctx_len: the tokens that a row holds, if the model is compiled.
            has_form: whether answers have to follow a form, if the model is compiled.
        """
        choices = CompileChoices(
            provider=self.provider,
            weights=self.weights,
            preset=self.preset,
            ctx_len=ctx_len,
            text_only=self.text_only,
        )
        needs = FeatureNeeds(has_form=has_form, loras=self.loras())
        return open_exported(model, choices, needs, trusted_keys=self.trusted_keys)

    def load(self, opened: PackagedModel, *, ctx_len: int | None = None) -> CausalLM:
        """Load a package with the adapters.

        Args:
            opened: the package, from `open`. It stays in the cache as long as this object.
            ctx_len: the tokens that a row holds, for a portable package.
        """
        from qsample.runtime import load

        model = load(
            opened.package.path,
            self.provider,
            ctx_len=ctx_len,
            intra_op_num_threads=self.threads,
            batch_invariant=self.batch_invariant,
            verify=False,
            trusted_keys=self.trusted_keys or None,
        )
        for name, folder in self.loras().items():
            model.load_adapter(name, folder)
        return model


def quieten(model: str) -> None:
    """Keep the messages of libraries off the terminal.

    Args:
        model: the model that is opened. A download from the hub still shows its progress.
    """
    if os.path.exists(model):
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("torch.onnx._internal.exporter").setLevel(logging.ERROR)
    # `from_pretrained` warns of decoder files, whose use is the purpose of some commands.
    warnings.filterwarnings("ignore", ".* holds a decoder file; ")


def is_package(model: str | Path) -> bool:
    """Whether a model is the folder of a package."""
    from qsample.package.package import MANIFEST_NAME

    # Unlike Path.is_file, this is False for a name that is too long for a path.
    return os.path.isfile(os.path.join(model, MANIFEST_NAME))


def open_model(
    model: str, provider: str | None = None, text_only: bool = False
) -> SourceModel | PackagedModel:
    """Open a package, checkpoint or decoder file without loading it.

    Args:
        model: the package, checkpoint folder, hub id or decoder file.
        provider: the execution provider; it chooses among the packages of a bundle.
        text_only: leave out the images of a checkpoint that reads them.

    Raises:
        typer.BadParameter: text_only with a package.
    """
    from qsample.models.auto_model import AutoModel
    from qsample.models.model import PackagedModel
    from qsample.ort.model_package import package_in
    from qsample.package.package import read_package

    folder = package_in(model, provider)
    if is_package(folder):
        check_text_only(model, text_only)
        return PackagedModel(read_package(folder), provider)
    quieten(model)
    return AutoModel.from_pretrained(model, provider=provider, text_only=text_only)


def check_text_only(name: str, text_only: bool) -> None:
    """Raise typer.BadParameter for --text-only with a package. name: the package."""
    if text_only:
        raise typer.BadParameter(
            f"--text-only is for a checkpoint, and {name} is a package; export it so"
        )


def open_exported(
    model: str | None,
    choices: CompileChoices | None = None,
    needs: FeatureNeeds | None = None,
    *,
    trusted_keys: Sequence[str] | None = None,
) -> PackagedModel:
    """Open a package as it is, and anything else as a package of the user's cache.

    A model that is not in the cache is compiled. Its package stays in the cache as long as the
    returned object.

    Args:
        model: the package, checkpoint folder, hub id or decoder file; by default the bundled model.
        choices: how the model is compiled; by default, the model has the choice.
        needs: the features that the package needs if it is compiled; by default none.
        trusted_keys: the keys with which the caller loads the package. With them, only packages are
            accepted.

    Raises:
        typer.BadParameter: a package with choices that only a checkpoint has, or a checkpoint with
            trusted_keys.
    """
    from qsample.models.bundled import TINY_LM
    from qsample.ort.model_package import package_in

    choices = choices or CompileChoices()
    needs = needs or FeatureNeeds()
    name = str(TINY_LM) if model is None else str(package_in(model, choices.provider))
    if is_package(name):
        choices.check_package(name)
        # With trusted_keys, loading verifies the files.
        return _open_package(name, choices.provider, verify=not trusted_keys)
    if trusted_keys:
        raise typer.BadParameter(
            f"--trusted-keys is for packages, and {name} is none; compile and sign it first"
        )
    stages: set[str] = set()
    with progress(logged=True) as show:

        def report(stage: str, fraction: float) -> None:
            stages.add(stage)
            show(stage, fraction)

        packaged = _cached(name, choices, needs, report)
    was_made_now = Stage.PUBLISHING in stages
    if model is not None and was_made_now:
        _report_cached(model, packaged.package, choices.weights)
    return packaged


def _open_package(name: str, provider: str | None, *, verify: bool) -> PackagedModel:
    from qsample.models.model import PackagedModel
    from qsample.package.package import faster_way, read_package

    with progress():
        package = read_package(name, verify=verify)
    advice = faster_way(package)
    if advice is not None:
        note(advice)
    return PackagedModel(package, provider)


def _cached(
    name: str, choices: CompileChoices, needs: FeatureNeeds, report: Progress
) -> PackagedModel:
    """The package of a checkpoint or decoder file in the user's cache, which is made if missing."""
    from qsample.models.model import SourceModel

    opened = open_model(name, choices.provider, choices.text_only)
    assert isinstance(opened, SourceModel)
    opened.features = needs.added_to(opened.features)
    return opened.cached(
        weights=choices.weights,
        preset=choices.preset,
        ctx_len=choices.ctx_len,
        progress=report,
    )


def _report_cached(model: str, package: Package, weights: str | None) -> None:
    """Print a remark on a package that was put into the cache."""
    size = format_size(sum(entry.bytes for entry in package.manifest.files.values()))
    is_packed = package.manifest.packed_weights is not None
    advice = ""
    if weights is None and not is_packed and package.interface.dtype == "float32":
        advice = (
            "; --weights int4 takes about a seventh and is faster, at some cost in quality; with --preset speed, it "
            f"takes minutes first and is fastest. `qsample compile {model} OUT --weights int4` has more options"
        )
    note(f"{model} is in the cache now ({size}), later runs start at once{advice}")
