"""The kernels: one folder per backend, the same file and function names in each."""
