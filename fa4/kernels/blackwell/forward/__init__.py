"""The forward kernel; ``kernel.BlackwellForward`` is the entry."""
