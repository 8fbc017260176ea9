from __future__ import annotations

import torch

from fa4.testing.memory import measure_peak_memory


def test_a_temporary_is_seen_after_it_is_gone():
    with measure_peak_memory() as memory:
        torch.ones(64 << 20, dtype=torch.uint8)
    # The kernel counts resident pages in batches per CPU, hence the slack.
    assert 60 << 20 <= memory.extra_bytes < 96 << 20


def test_idle_is_near_zero():
    with measure_peak_memory() as memory:
        pass
    assert memory.extra_bytes < 8 << 20
