from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def threads(request):
    """One thread, or as many as an indirect parameter says: on small sizes and a busy machine threads mostly wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(getattr(request, "param", 1))
    yield
    torch.set_num_threads(before)
