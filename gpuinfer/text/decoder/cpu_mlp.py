"""The MLP in the compiled step: activations between its products, and mixtures of experts (Shazeer et al. 2017).
Experts are chosen row by row; then an expert's rows go through it together.
"""

import math

import numpy as np

from gpuinfer.text.decoder import cpu_sizes as at
from gpuinfer.text.decoder.cpu_math import TILE, call_product, called, exp, inlined, narrow, sigmoid, tanh, widen
from gpuinfer.text.decoder.cpu_quantised import quantise_row
from gpuinfer.text.decoder.cpu_threads import claim
from gpuinfer.text.decoder.cpu_weights import panel_bytes


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


EXPERT_ROWS = 32  # that go through an expert together
GONE = np.float32(-np.inf)


@called
def choose(first, end, layer, a, sizes, addresses, biases, scales, chosen, shares, widened, scores, ranked):
    """Put the experts of the rows from `first` to before `end` in `chosen` [rows, chosen ones], ascending, and what
    each has of their sum in `shares`. `widened`, `scores`, `ranked` are scratch.
    """
    count, inner = sizes[at.EXPERTS], a.shape[1]
    router = addresses[expert_weight(sizes, layer, 0)]
    rows = end - first
    source = a.ctypes.data + a.itemsize * first * inner
    if a.itemsize == 2:
        source = widened.ctypes.data
        for row in range(rows):
            for i in range(inner):
                widened[row * inner + i] = widen(a[first + row, i])
    call_product(addresses[at.WIDE_PRODUCT], rows, count, inner, source, inner, router, scores.ctypes.data, count)
    for row in range(rows):
        score(scores[row], sizes[at.SIGMOID])
        for expert in range(count):
            ranked[expert] = scores[row, expert] + biases[layer, expert]
        if sizes[at.GROUPS] > 1:
            leave_groups(ranked, count // sizes[at.GROUPS], sizes[at.GROUPS_CHOSEN])
        pick(ranked, chosen[first + row])
        weigh(scores[row], chosen[first + row], sizes[at.NORMALISED], scales[0], shares[first + row])


@inlined
def expert_weight(sizes, layer, number):
    """The place among addresses of a layer's router (0), or of an expert's gate (1, 4, …), up and down (3, 6, …)."""
    first = at.FIRST_WEIGHT + at.WEIGHTS * sizes[at.LAYERS] + 1
    return first + layer * (1 + at.EXPERT_WEIGHTS * sizes[at.EXPERTS]) + number


@inlined
def score(logits, by_sigmoid):
    """What the router thinks of each expert, in place of its logits."""
    if by_sigmoid:
        for i in range(len(logits)):
            logits[i] = sigmoid(logits[i])
        return
    top = logits[0]
    for i in range(1, len(logits)):
        top = max(top, logits[i])
    total = np.float32(0)
    for i in range(len(logits)):
        logits[i] = exp(logits[i] - top)
        total += logits[i]
    for i in range(len(logits)):
        logits[i] /= total


@inlined
def leave_groups(ranked, size, kept):
    """Take all experts out but those of the `kept` groups whose two best have the highest sum (DeepSeek-AI 2024)."""
    groups = len(ranked) // size
    for _ in range(groups - kept):
        worst, least = -1, np.float32(np.inf)
        for group in range(groups):
            if ranked[group * size] == GONE:
                continue
            best, second = GONE, GONE
            for i in range(group * size, (group + 1) * size):
                if ranked[i] > best:
                    best, second = ranked[i], best
                elif ranked[i] > second:
                    second = ranked[i]
            if best + second <= least:
                worst, least = group, best + second
        for i in range(max(worst, 0) * size, (max(worst, 0) + 1) * size):  # -1: of numbers that are none
            ranked[i] = GONE


@inlined
def pick(ranked, chosen):
    """The highest of all, ascending by their numbers; of equal ones the first. They are taken out."""
    for number in range(len(chosen)):
        best = -1
        for i in range(len(ranked)):
            if ranked[i] != GONE and (best < 0 or ranked[i] > ranked[best]):
                best = i
        best = max(best, 0)  # of numbers that are none
        ranked[best] = GONE
        place = number
        while place > 0 and chosen[place - 1] > best:
            chosen[place] = chosen[place - 1]
            place -= 1
        chosen[place] = best


@inlined
def weigh(scores, chosen, normalised, scale, shares):
    total = np.float32(0)
    for i in range(len(chosen)):
        shares[i] = scores[chosen[i]]
        total += shares[i]
    factor = scale / total if normalised else scale
    for i in range(len(chosen)):
        shares[i] *= factor


@called
def into_experts(
    control, rows, layer, a, operands, sizes, addresses, chosen, gathered, gathered_operands, gate, up, begins, order,
    inner, inner_operands,
):  # fmt: skip
    """What is between the products of all experts: `inner` [rows × chosen, columns], in the order of experts and of
    rows within each. `begins` [experts + 1] says where each one's are, `order` whose they are: the row's number × how
    many a row has + the expert's among them. Each thread sorts for itself; `gathered`, `gathered_operands`,
    `gate`, `up` are scratch for EXPERT_ROWS rows. `operands`, `inner_operands`: the same rows for quantised weights.
    """
    count, columns, hidden = sizes[at.EXPERTS], sizes[at.EXPERT], a.shape[1]
    sort(rows, count, chosen, begins, order)
    product, quantised = addresses[at.WEIGHT_PRODUCT], sizes[at.WEIGHT_BITS] > 0
    source, lda = gathered.ctypes.data, hidden
    if quantised:
        source, lda = gathered_operands.ctypes.data, gathered_operands.shape[1]
    while True:
        expert = claim(control)
        if expert >= count:
            return
        weight = expert_weight(sizes, layer, 1 + at.EXPERT_WEIGHTS * expert)
        for first in range(begins[expert], begins[expert + 1], EXPERT_ROWS):
            many = min(EXPERT_ROWS, begins[expert + 1] - first)
            for place in range(first, first + many):
                row = order[place] // chosen.shape[1]
                if quantised:
                    for i in range(lda):
                        gathered_operands[place - first, i] = operands[row, i]
                else:
                    for i in range(hidden):
                        gathered[place - first, i] = a[row, i]
            call_product(product, many, columns, hidden, source, lda, addresses[weight], gate.ctypes.data, columns)
            if sizes[at.GATED]:
                call_product(
                    product, many, columns, hidden, source, lda, addresses[weight + 1], up.ctypes.data, columns
                )  # fmt: skip
            for number in range(many):
                begin = number * columns
                activate_plainly(
                    gate[begin : begin + columns], up[begin : begin + columns], sizes[at.ACTIVATION], sizes[at.GATED],
                    inner[first + number],
                )  # fmt: skip
                if quantised:
                    quantise_row(inner[first + number], columns, inner_operands[first + number])


@inlined
def activate_plainly(gate, up, kind, gated, out):
    """As `activate`, without biases."""
    for i in range(len(gate)):
        gate[i] = activation(gate[i], kind) * (up[i] if gated else np.float32(1))
    for i in range(len(gate)):
        out[i] = narrow(gate[i], out)


@inlined
def sort(rows, count, chosen, begins, order):
    """Rows by their experts: a counting sort."""
    for expert in range(count + 1):
        begins[expert] = 0
    for row in range(rows):
        for i in range(chosen.shape[1]):
            begins[chosen[row, i] + 1] += 1
    for expert in range(count):
        begins[expert + 1] += begins[expert]
    for row in range(rows):
        for i in range(chosen.shape[1]):
            expert = chosen[row, i]
            order[begins[expert]] = row * chosen.shape[1] + i
            begins[expert] += 1
    for expert in range(count, 0, -1):
        begins[expert] = begins[expert - 1]
    begins[0] = 0


@called
def out_of_experts(
    control, rows, layer, width, dense, dense_apart, inner, inner_operands, sizes, addresses, shares, begins, order,
    delta, added,
):  # fmt: skip
    """added [rows, hidden] = what the expert that all rows go through gives, if it has a `width` (its rows are at
    `dense`), then what the others give, expert after expert, so that a row's sum has one order. A piece is some columns
    of all rows.
    """
    hidden, each, columns, size = sizes[at.HIDDEN], shares.shape[1], sizes[at.EXPERT], sizes[at.OPERAND]
    inner_at, inner_apart = inner.ctypes.data, inner.shape[1]
    if sizes[at.WEIGHT_BITS]:
        inner_at, inner_apart = inner_operands.ctypes.data, inner_operands.shape[1]
    product, wide = addresses[at.WEIGHT_PRODUCT], len(delta) // EXPERT_ROWS // TILE * TILE
    down = at.FIRST_WEIGHT + at.WEIGHTS * layer + at.DOWN_WEIGHT
    while True:
        begin = claim(control) * wide
        if begin >= hidden:
            return
        count = min(wide, hidden - begin)
        if width:
            call_product(
                product, rows, count, width, dense, dense_apart,
                addresses[down] + begin // TILE * panel_bytes(sizes, width), added.ctypes.data + 4 * begin, hidden,
            )  # fmt: skip
        else:
            for row in range(rows):
                for i in range(begin, begin + count):
                    added[row, i] = np.float32(0)
        for expert in range(sizes[at.EXPERTS]):
            weight = addresses[expert_weight(sizes, layer, at.EXPERT_WEIGHTS * (expert + 1))]
            weight += begin // TILE * panel_bytes(sizes, columns)
            for first in range(begins[expert], begins[expert + 1], EXPERT_ROWS):
                many = min(EXPERT_ROWS, begins[expert + 1] - first)
                source = inner_at + size * first * inner_apart
                call_product(product, many, count, columns, source, inner_apart, weight, delta.ctypes.data, count)
                for place in range(first, first + many):
                    row, share = order[place] // each, shares[order[place] // each, order[place] % each]
                    for i in range(count):
                        added[row, begin + i] += share * delta[(place - first) * count + i]
