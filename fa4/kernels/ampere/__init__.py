"""FlashAttention-2 for sm_80 and everything later that runs cp.async, ldmatrix and mma.sync."""
