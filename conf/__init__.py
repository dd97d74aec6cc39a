"""Hydra configuration groups: data, not code. Reached as `pkg://longseq.conf`."""
