"""`longseq benchmark`: time and memory of kernels and models, compared with their peers in one process."""
