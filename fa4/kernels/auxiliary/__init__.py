"""Kernels around the main ones, the same for every architecture: before and after the backward."""
