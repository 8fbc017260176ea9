"""Kernels for sm_100a and sm_103a."""
