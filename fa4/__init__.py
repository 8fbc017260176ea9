"""fa4: FlashAttention-4 as a Python CuTe-DSL kernel framework."""
