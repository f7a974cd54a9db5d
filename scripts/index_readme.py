"""README.md for a package index; hatchling calls it during a build (`[tool.hatch.metadata.hooks.custom]`).

Relative links do not work on an index. They become plain text, or, if `[project.urls]` in pyproject.toml has a
`Source`, links to the files of this version.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)\s]+)\)")


def index_readme(text: str, source: str | None = None) -> str:
    """`text` without relative links; source: the address to which file names are appended."""
    return RELATIVE_LINK.sub(rf"[\1]({source}/\2)" if source else r"\1", text)


class IndexReadme(MetadataHookInterface):
    """Sets the project's `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        source = metadata.get("urls", {}).get("Source")
        version = re.search(
            r'^__version__ = "(.+)"',
            (root / "qsample" / "__init__.py").read_text("utf-8"),
            re.MULTILINE,
        )
        assert version is not None
        address = source and f"{source}/blob/v{version[1]}"
        text = index_readme((root / "README.md").read_text("utf-8"), address)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
