"""The command line: train, evaluate, predict, describe, export. Each verb is a Hydra application on `longseq.conf`."""
