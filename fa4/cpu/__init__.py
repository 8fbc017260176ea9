"""The CPU backend: ``forward.attention_forward`` and ``backward.attention_backward``."""
