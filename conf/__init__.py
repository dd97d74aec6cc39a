"""Hydra configuration groups: data, not code. Reached as `pkg://longseq.conf`, which gives Hydra their defaults."""

from longseq.tasks.commands import store_defaults

store_defaults()
