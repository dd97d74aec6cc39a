"""A command replaces the files that it wrote before; wrong_commands.txt has those that it does not replace."""

from __future__ import annotations

import shlex

import pytest
from wrong_folder import make_folder

COMMANDS = [
    "predict checkpoint=run.ckpt input=photos output=told.csv saliency=seen",
    "predict checkpoint=run.ckpt input=photos output=told.json",
    "predict checkpoint=classifier input=rows.jsonl output=told.csv",
    "evaluate checkpoint=run.ckpt trainer=cpu output=measured.json",
    "evaluate checkpoint=run.ckpt trainer=cpu",
    "evaluate checkpoint=lm input=text.txt trainer=cpu output=measured.jsonl",
    "generate checkpoint=lm prompt=a max_new_tokens=1 output=texts.jsonl save_state=state",
    "generate checkpoint=lm state=state max_new_tokens=1 save_state=state",
    "export checkpoint=run.ckpt 'batch_sizes=[1]' latency=false output=told.pt",
    "export checkpoint=run.ckpt 'batch_sizes=[1]' latency=false output=told.pt2",
]


@pytest.mark.slow
def test_a_command_replaces_what_it_wrote(tmp_path, command_here):
    folder = make_folder(tmp_path)
    (folder / "evaluation_test.json").write_text('{"test/loss": 0.5, "test/top1": 0.75}\n')  # of an earlier version
    for command in COMMANDS:
        for _ in range(2):
            done = command_here(folder, *shlex.split(command))
            assert done.returncode == 0, (command, done.stderr)
