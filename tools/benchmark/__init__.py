"""`longseq benchmark kernels|models|tune`: what the kernels and the models cost, beside their peers in one process."""
