"""Models sharded over processes by torch's `fully_shard`."""

from __future__ import annotations

import os
import runpy
import subprocess
from pathlib import Path

import pytest
import torch
from forked import start_fork
from representatives import REPRESENTATIVES


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no process groups")
def test_sharded_models_give_what_whole_ones_do(tmp_path: Path) -> None:
    """The mixers in one pair of processes: their start takes longer than the checks."""
    script = Path(__file__).with_name("sharded_models.py")
    processes = [
        start_fork(
            [tmp_path],
            tmp_path,
            environment={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"},
            run=lambda: runpy.run_path(str(script), run_name="__main__") and None,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert all(set(REPRESENTATIVES) <= set(output.split()) for output in outputs)
