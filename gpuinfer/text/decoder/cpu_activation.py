"""What stands between the two products of an MLP, in the compiled step."""

import math

import numpy as np

from gpuinfer.text.decoder import cpu_sizes as at
from gpuinfer.text.decoder.cpu_math import inlined, narrow, sigmoid, tanh


@inlined
def activate(up, bias, kind, gated, inner, out):
    """The activation of the up projection's first part, times its second when gated. It is left in `up` too."""
    for i in range(inner):
        value = up[i] + bias[i]
        if kind == at.SILU:
            value *= sigmoid(value)
        elif kind == at.GELU_TANH:
            cube = value * value * value
            half = np.float32(0.5) * value
            value = half + half * tanh(np.float32(0.7978845608028654) * (value + np.float32(0.044715) * cube))
        elif kind == at.GELU:
            value = np.float32(0.5) * value * (np.float32(1) + erf(value * np.float32(0.7071067811865476)))
        else:
            value = max(value, np.float32(0))
        if gated:
            value *= up[inner + i] + bias[inner + i]
        up[i] = value
    for i in range(inner):
        out[i] = narrow(up[i], out)


@inlined
def erf(x):
    """The error function of C: exact gelu is rare enough not to need a quicker one."""
    return np.float32(math.erf(x))
