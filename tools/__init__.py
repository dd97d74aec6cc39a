"""The command line: train, evaluate, describe, export and more. Each verb is a Hydra application on `longseq.conf`."""
