"""Names of files inside a folder that mean the same on every system, and nothing outside the folder on any."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Final

_LONGEST: Final = 255  # bytes of one part, of most file systems
_FORBIDDEN: Final = re.compile(r'[\x00-\x1f\x7f-\x9f<>:"|?*\\]')
# Devices of Windows, with or without an extension: https://learn.microsoft.com/windows/win32/fileio/naming-a-file
_DEVICES: Final = re.compile(
    r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9\u00b9\u00b2\u00b3])\s*(\..*)?", re.IGNORECASE
)


def problem_of_name(name: str) -> str | None:
    """What is wrong with a relative name whose parts are separated by `/`, or None.

    Refused everywhere, whatever system this is: absolute names, `..`, drive letters, network shares, backslashes, empty
    parts, control characters and what Windows forbids or takes for a device.
    """
    parts = name.split("/")
    if name.startswith("/") or re.match(r"[A-Za-z]:", name) or "\\" in name or ".." in parts:
        return "which lies outside the package, or would on another system"
    if "" in parts or "." in parts:
        return "which has an empty part"
    if _FORBIDDEN.search(name):
        return "which has a character that file names must not have"
    for part in parts:
        if _DEVICES.fullmatch(part):
            return "which is a device on Windows"
        if part[-1] in ". ":
            return "which ends with a dot or a space, and Windows drops that"
        try:
            length = len(part.encode("utf-8"))
        except UnicodeEncodeError:
            return "which is not Unicode text"
        if length > _LONGEST:
            return f"which is longer than {_LONGEST} bytes"
    return None


def colliding_name(names: Iterable[str]) -> tuple[str, str] | None:
    """Two names that are one file on some system, or None: they differ in case or composition only, or one is the
    folder of the other."""
    seen: dict[str, str] = {}
    folders: dict[str, str] = {}
    for name in names:
        folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
        for other in (seen.get(folded), folders.get(folded)):
            if other is not None:
                return other, name
        seen[folded] = name
        parts = folded.split("/")
        for count in range(1, len(parts)):
            folder = "/".join(parts[:count])
            if folder in seen:
                return seen[folder], name
            folders.setdefault(folder, name)
    return None
