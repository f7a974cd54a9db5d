"""Is there such a folder or such a model on the hub? Asked before anything is loaded, so that a mistyped name fails at
once: transformers would take it for a hub id and try for half a minute to reach the hub."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Final

from qsample.checkpoints.hub_options import HubOptions
from qsample.errors import QsampleError

_HUB_ID: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")
_CONFIG: Final = "config.json"
ADAPTER: Final = "adapter_config.json"
_LONGEST_ID: Final = 96  # characters, of huggingface_hub
_SECONDS: Final = 10  # to wait for the hub


def check_exists(name: str, hub: HubOptions | None = None, *, file: str = _CONFIG, ask_hub: bool = True) -> None:
    """Raise QsampleError unless `name` is a folder (of a model: with a config.json), or may be a hub id with `file`.

    ask_hub: whether it has that; it is asked once, and not again where it cannot be reached. What else it answers is
    left to transformers.
    """
    path = Path(name)
    if os.path.isdir(path):
        if file == _CONFIG and not (path / file).is_file():
            raise QsampleError(f"{name} has neither a {file} (a checkpoint) nor a qsample.json (a package)")
        return
    if os.path.exists(path):
        raise QsampleError(f"{name} is a file; give the folder that it is in, or a hub id")
    where = f"{name:.200} does not exist{_similar(path)}"
    accepted = "a checkpoint folder, a package folder or a hub id" if file == _CONFIG else "a folder or a hub id"
    if name.startswith((".", "~")) or not _HUB_ID.fullmatch(name) or len(name) > _LONGEST_ID:
        raise QsampleError(f"{where}; give {accepted}")
    if ask_hub:
        _ask_hub(name, where, accepted, hub or HubOptions(), file)


def _similar(path: Path) -> str:
    """A folder beside it whose name was perhaps meant."""
    try:
        folders = [entry.name for entry in os.scandir(path.parent) if entry.is_dir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, folders, n=1, cutoff=0.75)
    return f" (did you mean {path.parent / close[0]}?)" if close else ""


def _ask_hub(name: str, where: str, accepted: str, hub: HubOptions, file: str) -> None:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    if isinstance(try_to_load_from_cache(name, file, cache_dir=hub.cache_dir, revision=hub.revision), str):
        return
    if hub.local_files_only or constants.HF_HUB_OFFLINE:
        reason = "local_files_only" if hub.local_files_only else "HF_HUB_OFFLINE"
        raise QsampleError(f"{where}, was not downloaded from the hub before, and {reason} allows no download")
    try:
        get_hf_file_metadata(hf_hub_url(name, file, revision=hub.revision), token=hub.token, timeout=_SECONDS)
    except GatedRepoError:
        return
    except RepositoryNotFoundError as error:
        raise QsampleError(
            f"{where}, nor is there such a model on the hub, unless it is private and needs a token; give {accepted}"
        ) from error
    except HfHubHTTPError:
        return
    except Exception as error:
        raise QsampleError(f"{where}, and the hub cannot be reached ({error}); give {accepted}") from error
