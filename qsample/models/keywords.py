"""The keywords of `from_pretrained`: checked when they enter, and sorted into the features of a
graph, options of the hub, and a request for a source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypedDict, cast

from qsample.checkpoints.source import HubOptions
from qsample.contract.interface import CHOICES, Features
from qsample.models.dialects import read_from_pretrained
from qsample.models.sources import SourceRequest
from qsample.package.signature import TrustedKeys
from qsample.request.huggingface.facade import choose_dtype
from qsample.request.refusals import check_from_pretrained


class DownloadKeywords(TypedDict, total=False):
    """How the hub is read; fields of `HubOptions`."""

    revision: str | None
    cache_dir: str | Path | None
    token: str | bool | None
    local_files_only: bool


class HubKeywords(DownloadKeywords, total=False):
    """All fields of `HubOptions`."""

    trust_remote_code: bool


class FeatureKeywords(TypedDict, total=False):
    """The features of a graph, fields of `interface.Features` under their names in Python."""

    include_sampler: bool
    return_pdfs: bool
    logit_bias: bool
    allowed_tokens: bool
    grammars: bool
    logprobs: bool
    top_logprobs: int
    logprobs_mode: str | None
    prompt_logprobs: bool
    filters: Sequence[str]
    filter_order: str | None
    max_loras: int
    max_lora_rank: int


class OpenKeywords(FeatureKeywords, HubKeywords, total=False):
    """All keywords of `from_pretrained`."""

    for_serving: bool
    dtype: Any
    torch_dtype: Any
    device_map: Any
    tokenizer: str | None
    provider: str | None
    adapter: str | Path | None
    file: str | None
    gguf_file: str | None
    text_only: bool
    trusted_keys: TrustedKeys | None


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """The options of `from_pretrained`, sorted by their use.

    Attributes:
        source: the model to open.
        features: the features of its graph.
        chosen: the fields of `features` among `CHOICES` that the caller chose; otherwise a package's
            own values are accepted.
        provider: the execution provider of `generate`; None for the default.
        device_map: transformers' choice of a device.
        trusted_keys: public keys; a package must be signed with one of them. None accepts every
            package.
    """

    source: SourceRequest
    features: Features
    chosen: frozenset[str]
    provider: str | None
    device_map: Any
    trusted_keys: TrustedKeys | None


def read_keywords(name: str, given: OpenKeywords, *, images: bool | None) -> OpenOptions:
    """Check the keywords of `from_pretrained`, and sort them by their use.

    Args:
        name: the hub id, folder or file to open.
        given: the keywords as they were given; the names of transformers, and of other programs that
            an add-on knows, may be among them.
        images: whether images are read, too; None: if they can be.

    Raises:
        ValueError: for a value that is not accepted, and for a keyword of transformers that asks
            for something.
        TypeError: for an unknown keyword.
    """
    keywords = cast(OpenKeywords, read_from_pretrained(given))
    known = OpenKeywords.__optional_keys__
    others = {key: value for key, value in keywords.items() if key not in known}
    check_from_pretrained(others, known)
    dtype = choose_dtype(keywords.get("dtype"), keywords.get("torch_dtype"))
    features = _features(keywords)
    adapter = keywords.get("adapter")
    source = SourceRequest(
        name=name,
        file=keywords.get("file"),
        gguf_file=keywords.get("gguf_file"),
        dtype=dtype,
        tokenizer=keywords.get("tokenizer", "auto"),
        adapter=None if adapter is None else str(adapter),
        images=images,
        text_only=keywords.get("text_only", False),
        hub=hub_options(keywords),
    )
    return OpenOptions(
        source=source,
        features=features,
        chosen=frozenset(name for name in CHOICES if keywords.get(name) is not None),
        provider=keywords.get("provider"),
        device_map=keywords.get("device_map"),
        trusted_keys=keywords.get("trusted_keys"),
    )


def hub_options(keywords: DownloadKeywords) -> HubOptions:
    """The options of the hub among the keywords. Raises ValueError for a value of another
    type."""
    names = {entry.name for entry in fields(HubOptions)}
    given: dict[str, Any] = {name: value for name, value in keywords.items() if name in names}
    return HubOptions(**given)


def _features(keywords: OpenKeywords) -> Features:
    """The features of the graph that the keywords choose. Raises ValueError for a value that
    is not accepted."""
    names = {entry.metadata.get("argument", entry.name): entry.name for entry in fields(Features)}
    given: dict[str, Any] = {
        names[argument]: value for argument, value in keywords.items() if argument in names
    }
    for name in CHOICES:
        if given.get(name) is None:
            given.pop(name, None)
    features = Features(**given)
    return features.for_serving() if keywords.get("for_serving") else features
