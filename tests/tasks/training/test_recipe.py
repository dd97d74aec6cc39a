"""The devices and batches of a recipe."""

from __future__ import annotations

import pytest

from longseq.tasks.training.recipe import device_count


@pytest.mark.parametrize(
    ("devices", "count"), [(3, 3), ("2", 2), ("0,2", 2), ("2,", 1), ("[0, 1]", 2), ([0, 3], 2), ("auto", 1)]
)
def test_devices_are_counted_as_lightning_does(devices, count):
    assert device_count({"trainer": {"accelerator": "cpu", "devices": devices}}) == count
