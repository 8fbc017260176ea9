"""exp2 on the multiply-add units, as FlashAttention-4 emulates it (arXiv 2603.05451, section 3.2.1); ``docs/exp2.md`` explains it.

Here: coefficients and a numpy twin that gives the device code's bits; numpy only. ``device`` needs cutlass, ``derive`` finds the
coefficients again, ``report`` measures the error, ``cost`` predicts which share is worth emulating.
"""

from fa4.emulate_exp.coefficients import COEFFICIENTS, RELATIVE_ERROR
from fa4.emulate_exp.twin import emulated_exp2

__all__ = ["COEFFICIENTS", "RELATIVE_ERROR", "emulated_exp2"]
