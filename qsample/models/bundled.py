"""The small model of the quick start, `assets/tiny_lm`, and its package in the user's cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from qsample.progress import Progress

if TYPE_CHECKING:
    from qsample.models.model import PackagedModel

TINY_LM: Final = Path(__file__).resolve().parent.parent / "assets" / "tiny_lm"


def bundled_model(
    provider: str = "cpu", progress: Progress | None = None, *, for_serving: bool = False
) -> PackagedModel:
    """The bundled model compiled for a provider, from the cache; the first call exports it, in
    about half a minute.

    Args:
        provider: the execution provider.
        progress: as in `Model.compile`.
        for_serving: as in `AutoModelForCausalLM.from_pretrained`.
    """
    from qsample.models.auto_model import AutoModelForCausalLM
    from qsample.models.model import SourceModel

    model = AutoModelForCausalLM.from_pretrained(
        TINY_LM, local_files_only=True, provider=provider, for_serving=for_serving
    )
    assert isinstance(model, SourceModel)
    return model.cached(progress=progress)
