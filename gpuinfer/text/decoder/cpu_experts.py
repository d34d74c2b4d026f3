"""A mixture of experts (Shazeer et al. 2017) in the compiled step: who is chosen, and each expert's rows together.

Rows are chosen for one by one. Then every lane has its columns of every expert, as of every other product, and an
expert's rows go through it side by side, gathered. A row's experts add up in their order, after the expert that all
rows go through, so that its bits depend neither on who else goes through them nor on the lanes.
"""

import numpy as np

from gpuinfer.text.decoder import cpu_sizes as at
from gpuinfer.text.decoder.cpu_activation import activate
from gpuinfer.text.decoder.cpu_intrinsics import call_product
from gpuinfer.text.decoder.cpu_math import called, exp, inlined, sigmoid, widen
from gpuinfer.text.decoder.cpu_product import multiply

AT_ONCE = 24  # rows whose scores are computed together: a multiple of what products compute at once
GONE = np.float32(-np.inf)


@called
def choose(first, end, layer, a, sizes, addresses, biases, scales, chosen, shares, wide, scores, ranked):
    """Put the experts of the rows from `first` to before `end` in `chosen` [rows, chosen ones], ascending, and what
    each has of their sum in `shares`. `wide`, `scores`, `ranked` are room.
    """
    count, inner = sizes[at.EXPERTS], a.shape[1]
    router = addresses[expert_weight(sizes, layer, 0)]
    for begin in range(first, end, AT_ONCE):
        rows = min(AT_ONCE, end - begin)
        source = a.ctypes.data + a.itemsize * begin * inner
        if a.itemsize == 2:
            source = wide.ctypes.data
            for row in range(rows):
                for i in range(inner):
                    wide[row, i] = widen(a[begin + row, i])
        call_product(addresses[at.WIDE_PRODUCT], rows, count, inner, source, inner, router, scores.ctypes.data, count)
        for row in range(rows):
            score(scores[row], sizes[at.SIGMOID])
            for expert in range(count):
                ranked[expert] = scores[row, expert] + biases[layer, expert]
            if sizes[at.GROUPS] > 1:
                leave_groups(ranked, count // sizes[at.GROUPS], sizes[at.GROUPS_CHOSEN])
            pick(ranked, chosen[begin + row])
            weigh(scores[row], chosen[begin + row], sizes[at.NORMALISED], scales[0], shares[begin + row])


@inlined
def expert_weight(sizes, layer, number):
    """The place among addresses of a layer's router (0), or of an expert's up (1, 3, …) and down (2, 4, …) weight."""
    return at.FIRST_WEIGHT + 4 * sizes[at.LAYERS] + 1 + layer * (1 + 2 * sizes[at.EXPERTS]) + number


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
def into_experts(rows, layer, a, sizes, addresses, chosen, no_bias, up, gathered, begins, order, inner):
    """This lane's inner columns of all experts, for the first `rows` of `a`: `inner` [rows × chosen, columns], in the
    order of experts and of rows within each. `begins` [experts + 1] says where each one's are, `order` whose they are:
    the row's number × how many a row has + the expert's among them.
    """
    count = sizes[at.EXPERTS]
    begin, columns = sizes[at.EXPERT_BEGIN], sizes[at.EXPERT]
    sort(rows, count, chosen, begins, order)
    for expert in range(count):
        first, last = begins[expert], begins[expert + 1]
        if first == last:
            continue
        for place in range(first, last):
            source, target = a[order[place] // chosen.shape[1]], gathered[place - first]
            for i in range(len(target)):
                target[i] = source[i]
        weight = addresses[expert_weight(sizes, layer, 1 + 2 * expert)]
        outputs = 2 * columns if sizes[at.GATED] else columns
        width = up.shape[1]
        multiply(addresses[at.PRODUCT], last - first, outputs, gathered, 0, a.shape[1], weight, up.ctypes.data, width)
        for place in range(first, last):
            activate(
                up[place - first], no_bias, sizes[at.ACTIVATION], sizes[at.GATED], columns,
                inner[place, begin : begin + columns],
            )  # fmt: skip


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
def out_of_experts(layer, inner, sizes, addresses, shares, begins, order, delta, added):
    """Add to this lane's columns of `added` [rows, hidden] what the experts give, expert after expert."""
    columns, begin, each = sizes[at.ADDED], sizes[at.ADDED_BEGIN], shares.shape[1]
    for expert in range(sizes[at.EXPERTS]):
        first, last = begins[expert], begins[expert + 1]
        if first == last:
            continue
        weight = addresses[expert_weight(sizes, layer, 2 + 2 * expert)]
        into = delta.ctypes.data
        multiply(addresses[at.PRODUCT], last - first, columns, inner, first, inner.shape[1], weight, into, columns)
        for place in range(first, last):
            row, share = order[place] // each, shares[order[place] // each, order[place] % each]
            for i in range(columns):
                added[row, begin + i] += share * delta[(place - first) * columns + i]
