"""The command line: train, evaluate, predict, describe and export. Each verb is a Hydra application on `longseq.conf`."""
