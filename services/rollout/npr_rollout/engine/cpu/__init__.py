"""What makes a CPU fast.

- `compiled`: functions that numba compiles, for one thread and for several.
- `row_counts`: numbers of rows that a matrix kernel treats alike, to the bit.
- `packed_linear`: weights packed once for oneDNN (float32) and FBGEMM (half precision).
- `kernels`: what stands between the matrix products of a layer, each in one pass over its tensors.
- `decoder`: the forward pass of the Llama family made of these.
"""
