"""GPU kernels in CuTe-DSL, one package per architecture family; ``common`` holds what families share."""
