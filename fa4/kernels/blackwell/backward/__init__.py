"""The backward kernel; ``kernel.BlackwellBackward`` is the entry."""
