"""What stands between the two products of an MLP, in the compiled step."""

import math

import numpy as np

from gpuinfer.text.decoder import cpu_sizes as at
from gpuinfer.text.decoder.cpu_math import inlined, narrow, sigmoid, tanh


@inlined
def activate(gate, up, gate_bias, up_bias, kind, gated, columns, out):
    """out = the activation of `gate`, times `up` when gated. It is left in `gate` too."""
    for i in range(columns):
        value = activation(gate[i] + gate_bias[i], kind)
        gate[i] = value * (up[i] + up_bias[i]) if gated else value
    for i in range(columns):
        out[i] = narrow(gate[i], out)


@inlined
def activation(value, kind):
    if kind == at.SILU:
        return value * sigmoid(value)
    if kind == at.GELU_TANH:
        cube = value * value * value
        half = np.float32(0.5) * value
        return half + half * tanh(np.float32(0.7978845608028654) * (value + np.float32(0.044715) * cube))
    if kind == at.GELU:
        return np.float32(0.5) * value * (np.float32(1) + erf(value * np.float32(0.7071067811865476)))
    return max(value, np.float32(0))


@inlined
def erf(x):
    """The error function of C: exact gelu is rare enough not to need a quicker one."""
    return np.float32(math.erf(x))
