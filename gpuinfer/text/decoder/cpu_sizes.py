"""Where compiled code finds what: places in its arrays `control`, `sizes` and `addresses`."""

# in `control`, a cache line apart: what the threads tell one another
MOST_THREADS = 1 << 16
GO = 0  # how many steps have begun × MOST_THREADS + how many threads take part in the latest
STOP = 8
ARRIVED = 16  # threads at the barrier
PHASE = 24  # barriers passed
REST = 32  # who waits for the next step is to sleep
ASLEEP = 40  # + 8 × thread; the next place holds what it has seen in GO

# in `sizes`
(
    LAYERS,
    SLOTS,
    HEADS,  # of this lane
    KV_HEADS,
    HEAD_DIM,
    PADDED_DIM,  # of a head in the cache: a multiple of 16
    TILES,  # of 16 positions in a slot
    HALF_ROPE,  # how many values of a head turn with how many others
    QK_NORM,
    HIDDEN,
    MIXED,  # where this lane's heads begin among all values that attention gives
    ADDED,  # columns of what attention and MLP add to a row, of this lane
    ADDED_BEGIN,
    ACTIVATION,
    GATED,
    LAYER_NORM,
    LEARNED_POSITIONS,
    COLUMN,  # of the logits, where this lane's begin
    COLUMNS,
    VOCABULARY,
    ROWS,
    SEGMENTS,
    OUTPUTS,
    RUNS,  # of rows that have an adapter
    VECTORS,  # rows that have an embedding of their own
    FEW,  # whether only wanted rows go through the last layer, beyond their keys and values
    RANKS,  # values of a row between the two products of an adapter that there is room for
    EXPERTS,
    EXPERT,  # columns between up and down projection of an expert, of this lane
    EXPERT_BEGIN,
    SIGMOID,  # of the router's logits; else softmax
    NORMALISED,
    GROUPS,
    GROUPS_CHOSEN,
    SIZES,
) = range(35)

# in `addresses`
PRODUCT, YIELD, WIDE_PRODUCT, FIRST_WEIGHT = 0, 1, 2, 3  # qkv, out, up, down of each layer; then the head, then of
# each layer its router, and up and down of each expert. The wide product is that of float32 weights.

# in a lane's table of adapters, [adapters, layers, PARTS, FACTS]
PARTS = 7  # of qkv three, of out one, of up two, of down one: each begins at its place below
QKV, OUT, UP, DOWN, END = 0, 3, 4, 6, 7
DOWNWARDS, UPWARDS, RANK, FIRST, COUNT, FACTS = range(
    6
)  # addresses; 0: no such part; the lane's columns of the product

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
SILU, GELU, GELU_TANH, RELU = ACTIVATIONS.values()
