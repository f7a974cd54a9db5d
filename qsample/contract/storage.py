"""How the fields of dataclasses are stored in a package's manifest, as metadata of each field.

`package.codec` writes and reads dataclasses by this metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass
from typing import Any, Final

_METADATA_KEY: Final = "storage"
_NEVER_OMITTED: Final = object()


@dataclass(frozen=True, slots=True)
class Storage:
    """How a field is stored.

    Attributes:
        omitted: The value at which the key is left out. Versions of qsample that do not know the
            field yet read such a package. By default, the key is always written.
        least: The smallest integer that is read, at any depth of the field's value.
        limit: All integers are less than this: a host may allocate memory by them.
    """

    omitted: Any = _NEVER_OMITTED
    least: int = 0
    limit: int = 2**31


def stored(
    *, omitted: Any = _NEVER_OMITTED, least: int = 0, limit: int = 2**31
) -> Mapping[str, Any]:
    """The metadata of a field; for the arguments see `Storage`."""
    return {_METADATA_KEY: Storage(omitted, least, limit)}


def storage_of(entry: Field[Any]) -> Storage:
    """How a field is stored; by default always, with integers from 0 on."""
    storage: Storage = entry.metadata.get(_METADATA_KEY, Storage())
    return storage
