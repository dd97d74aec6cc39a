"""Train mixers on scikit-learn's digits on processor cores and write digits.json.

python benchmarks/digits.py [output=FILE.json] [jobs=N] [threads=N] [seconds=N] [key=value ...]   (see trainings.py)

The last row is one run of DeltaNet again and again, from initial weights that are one unit in the last place away: what
rounding alone does to the test accuracy.
"""

from __future__ import annotations

import os
import sys

from trainings import Row, read_options, run_table

MIXERS = ("longhorn", "deltanet", "attention", "linear_attention", "longhorn_exact", "mamba")
ROUNDED = Row("deltanet rounded", ("mixer=deltanet", "trainer=cpu"), ("rounding={seed}",), fixed_seed=0)
ROWS = [*(Row(mixer, (f"mixer={mixer}", "trainer=cpu")) for mixer in MIXERS), ROUNDED]
HEAD = {
    "what": "Digits of scikit-learn on a processor",
    "command": "python benchmarks/digits.py",
    "kind": "accuracy",
    "notes": [
        "Each run is `longseq train mixer=MIXER seed=SEED trainer=cpu`: 40 epochs, 1,295 training images, 359 test "
        "images, of which one is 0.0028. Cells: mean ± standard deviation over the seeds (the value of each seed).",
        "deltanet rounded: seed 0 from initial weights moved by one unit in the last place, up or down at random; the "
        "draws are numbered where the other rows have seeds.",
    ],
}


def main() -> None:
    try:
        options = read_options(sys.argv[1:], "digits", [row.name for row in ROWS], seeds=5, jobs=os.cpu_count() or 1)
        sys.exit(run_table(ROWS, HEAD, options, gpus=[]))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
