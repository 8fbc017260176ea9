"""The forward kernel; ``kernel.AmpereForward`` is the entry."""
