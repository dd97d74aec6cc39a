"""What the tests of the Triton kernels share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def interpreted(monkeypatch):
    """Triton's interpreter, and memory that is NaN until it is written."""
    if torch.cuda.is_available():
        pytest.skip("the kernels run on the GPU here, in tests of their own")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
