"""The protocol, the layout, the kernels and the global model: no I/O, no MPI, no torch."""
