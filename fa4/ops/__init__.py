"""torch custom ops: ``torch.ops.fa4.attention_forward`` and ``attention_backward``, and the same with user functions on scores.

Registered through ``torch.library.Library``, whose dispatch costs less per call than ``torch.library.custom_op``. Results have fixed
arity: lse is always returned, and a gradient that is not needed is an empty tensor. The ops take what ``fa4.attention`` has already
validated and normalised; they are not a public interface.
"""

from fa4.ops.attention import attention_again, attention_forward
from fa4.ops.autocast import cast_for_autocast
from fa4.ops.modified import modified_attention_forward

__all__ = ["attention_again", "attention_forward", "cast_for_autocast", "modified_attention_forward"]
