"""One folder an op: the plain-JAX reference, the GPU kernel, and the function that picks."""
