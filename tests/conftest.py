"""Markers by folder, one thread, and no network for the whole suite."""

from __future__ import annotations

import os

# before anything imports torch: row-invariance and timing tests want one thread
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
    # read when a kernel is decorated, so before any test imports one: all of a process run in one form
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import settings

KINDS = ("unit", "cpu", "gpu", "multi")
HERE = Path(__file__).parent

settings.register_profile("firesteel", deadline=None, derandomize=True)
settings.load_profile("firesteel")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test the marker of its folder; skip what this machine lacks devices for."""
    for item in items:
        kind = item.path.relative_to(HERE).parts[0]
        if kind in KINDS and item.get_closest_marker(kind) is None:
            item.add_marker(kind)
    needs = {"gpu": 1, "multi": 2}
    hungry = [item for item in items if any(item.get_closest_marker(kind) for kind in needs)]
    if not hungry:
        return
    import torch

    found = torch.cuda.device_count()
    for item in hungry:
        wanted = max(n for kind, n in needs.items() if item.get_closest_marker(kind))
        if found < wanted:
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} device(s), found {found}"))
