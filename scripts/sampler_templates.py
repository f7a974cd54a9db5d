"""Writes the templates of the sampler's graph by tracing the torch module; for whoever changed it.

python scripts/sampler_templates.py
"""

from __future__ import annotations

from pathlib import Path

import qsample.exporters.sampler
from qsample.exporters.sampler.template import KINDS, SUFFIX
from qsample.exporters.sampler.tracing import make_template

FOLDER = Path(qsample.exporters.sampler.__file__).parent


def main() -> None:
    for kind in KINDS:
        path = FOLDER / (kind + SUFFIX)
        path.write_text(make_template(kind), "utf-8")
        print(path)


if __name__ == "__main__":
    main()
