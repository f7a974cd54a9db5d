"""README.md as a package index shows it. hatchling calls this when it builds (`[tool.hatch.metadata.hooks.custom]`).

A relative link leads nowhere on an index. It becomes its own text, or, once `[project.urls]` in pyproject.toml has a
`Source`, a link to the file there at this version.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)\s]+)\)")


def index_readme(text: str, source: str | None = None) -> str:
    """`text` without relative links; source: the address that file names are appended to."""
    return RELATIVE_LINK.sub(rf"[\1]({source}/\2)" if source else r"\1", text)


class IndexReadme(MetadataHookInterface):
    """Sets the project's `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        source = metadata.get("urls", {}).get("Source")
        version = re.search(
            r'^__version__ = "(.+)"', (root / "qsample" / "__init__.py").read_text("utf-8"), re.MULTILINE
        )
        assert version is not None
        address = source and f"{source}/blob/v{version[1]}"
        text = index_readme((root / "README.md").read_text("utf-8"), address)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
