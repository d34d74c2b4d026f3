"""Where compiled code finds what: places in its arrays `control`, `sizes` and `addresses`."""

# in `control`: what the threads write for one another, a cache line apart
MOST_THREADS = 1 << 16
GO = 0  # how many steps have begun × MOST_THREADS + how many threads take part in the latest
STOP = 8
ARRIVED = 16  # threads at the barrier
PHASE = 24  # barriers passed
REST = 32  # threads that wait for the next step are to sleep
NEXT = 40  # the next piece of work of this phase that no thread has taken
OF_THREAD = 48  # a line for each thread, from here on
LINE = 8
# in a thread's line: SEEN is the latest GO that it has met; ticks of computing and at barriers, and when either began
ASLEEP, SEEN, BUSY, WAITED, SINCE = range(5)

# in `sizes`
(
    LAYERS,
    HEADS,
    KV_HEADS,
    HEAD_DIM,
    PADDED_DIM,  # of a head in the cache and in the queries: a multiple of 16
    HALF_ROPE,  # how many values of a head turn with how many others
    QK_NORM,
    HIDDEN,
    ACTIVATION,
    GATED,
    LAYER_NORM,
    LEARNED_POSITIONS,
    VOCABULARY,
    TIED,  # the embedding is read from the panels of the head
    ROWS,
    SEGMENTS,
    OUTPUTS,
    RUNS,  # of rows that have an adapter
    VECTORS,  # rows that have an embedding of their own
    FEW,  # whether only wanted rows go through the last layer, beyond their keys and values
    PICKED,  # whether wanted rows are some of those that come out of it, or stand in another order
    RANKS,  # values of a row between the two products of an adapter that there is room for
    EXPERTS,
    EXPERT,  # columns between up and down projection of an expert
    SIGMOID,  # of the router's logits; else softmax
    NORMALISED,
    GROUPS,
    GROUPS_CHOSEN,
    PAIR,  # consecutive terms of a panel's column that lie side by side: 2 where bfloat16 is multiplied, else 1
    ROUND,  # the terms of a weight's panel are stored in multiples of this many …
    ROUND_BYTES,  # … which take so many bytes
    WEIGHT_BITS,  # 8 or 4 where weights are quantised, else 0
    HEAD_ROUND_BYTES,  # those of the head: so many take its panels' terms …
    HEAD_BITS,  # … and it is quantised to so many
    OPERAND,  # bytes of a value of rows, where products with weights take them
    STORED,  # bytes of a value of the cache, and of weights that are not quantised
    MULTIPLIED,  # bytes of a value of rows, where products of attention take them
    PAGE_BYTES,
    LAYER_BYTES,  # of a page: what one layer has there
    HEAD_BYTES,  # of that, one head of keys and values
    KEY_BYTES,  # of that, the keys; the values come after them
    SIZES,
) = range(42)

# in `addresses`
PRODUCT, YIELD, WIDE_PRODUCT, POOL, WEIGHT_PRODUCT, HEAD_PRODUCT, FIRST_WEIGHT = range(7)
# qkv, out, gate, up, down of each layer; then the head, then of each layer its router, and gate, up and down of each
# expert. Without gates `gate` is the up projection, and `up` is 0. The wide product is that of float32 weights, the
# weight product that of the model's, the head product that of its head, and the plain one that of attention.
WEIGHTS = 5
QKV_WEIGHT, OUT_WEIGHT, GATE_WEIGHT, UP_WEIGHT, DOWN_WEIGHT = range(WEIGHTS)
EXPERT_WEIGHTS = 3

# in the table of adapters, [adapters, layers, PARTS, FACTS]
PARTS = 7  # of qkv three, of out one, of up two, of down one: each begins at its place below
QKV, OUT, UP, DOWN, END = 0, 3, 4, 6, 7
DOWNWARDS, UPWARDS, RANK, FIRST, COUNT, FACTS = range(6)  # two addresses (0: no such part), its columns of the product

# a piece of attention, in `pieces`
MEMBERS, MEMBER_COUNT, TABLE, FIRST_SPAN, END_SPAN, LAST, PIECE = range(7)
TO_THE_END = -1  # END_SPAN: all that the members see

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
SILU, GELU, GELU_TANH, RELU = ACTIVATIONS.values()
