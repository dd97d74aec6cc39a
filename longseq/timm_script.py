"""Run a program written for timm, such as its train.py and validate.py, with the models of longseq:

    python -m longseq.timm_script train.py IMAGES --model longseq_tiny_patch16_224 --model-kwargs mixer=deltanet
    torchrun --nproc_per_node=8 -m longseq.timm_script train.py IMAGES --model longseq_tiny_patch16_224

The program runs as with `python train.py ...`, with longseq's models and the installed plug-ins registered.
"""

import os
import runpy
import sys

from longseq import plugins


def main() -> None:
    """Run the program that the first argument names, with the others as its own."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m longseq.timm_script PROGRAM.py [ARGUMENT ...]")
    plugins.load()
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
