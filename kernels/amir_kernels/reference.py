"""Every public op again in plain torch: same names and signatures, any float dtype, any device, no cleverness.

This file is the specification. It materializes whatever is easiest to read, `[T, V]` logits and `[B, B]` pairs
included, and lets autograd differentiate. The kernels are tested against it; use it to check them on your own tensors.
"""

# ---- log-probabilities from hidden states --------------------------------------------------------------------------


# ---- groups and pairs ----------------------------------------------------------------------------------------------


# ---- policy losses -------------------------------------------------------------------------------------------------
