"""CycloneDX's own schema of version 1.6, with the library of that project."""

from __future__ import annotations

import json
from typing import Any

import pytest


def check_bom(document: Any) -> None:
    """Fail if a document is not valid; skip without the library."""
    validation = pytest.importorskip("cyclonedx.validation.json")
    schema = pytest.importorskip("cyclonedx.schema")
    error = validation.JsonStrictValidator(schema.SchemaVersion.V1_6).validate_str(
        json.dumps(document)
    )
    assert error is None, error
