"""The check of kernels that the self-test does not know: on a GPU, at their first use there in a process."""

import warnings
from collections.abc import Callable

import torch

from longseq.kernels.devices import side_stream


def find_error(
    index: int, compare: Callable[[torch.device], str | None], *, what: str, operation: str, instead: str
) -> str | None:
    """Run the comparison on a GPU; what is wrong there, or None. A warning says what runs in place of the kernels.

    Args:
        compare: runs kernels and their reference on the device: what is wrong, or None.
        what: the kernels in words, `operation` the name of what uses them, `instead` what torch does then.
    """
    device = torch.device("cuda", index)
    try:
        with torch.cuda.device(device), torch.cuda.stream(side_stream(index)), torch.no_grad():
            error = compare(device)
    except Exception as failure:  # a missing compiler, or a kernel that does not compile
        error = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
    if error is not None:
        error = f"the kernels that {what} failed their check on {torch.cuda.get_device_name(device)}: {error}"
        warnings.warn(f"longseq refuses the fused form of {operation}, and torch {instead}, slowly: {error}")
    return error
