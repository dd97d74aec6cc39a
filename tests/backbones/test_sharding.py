"""Models sharded over processes by torch's `fully_shard`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from longseq import mixers


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no process groups")
def test_sharded_models_give_what_whole_ones_do(tmp_path: Path) -> None:
    """All mixers in one pair of processes: their imports take longer than the checks."""
    script = Path(__file__).with_name("sharded_models.py")
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert all(set(mixers.mixer_names()) <= set(output.split()) for output in outputs)
