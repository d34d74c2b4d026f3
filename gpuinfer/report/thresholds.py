"""The numbers by which the verdict judges, in one table: shares, factors and counts, by the part that reads them."""

# Evidence: curve, bounds, cores
LEAST_CORES_LEFT = 0.1  # cores that a run has, whatever other programs take
COMPUTES_HERE = 0.3  # of the answering lanes' time, on a core: with less they wait for another process or device
MOST_STRETCHED = 0.2  # of a lane's time: so much counts as work, however long threads waited
CLASSES_PER_DOUBLING = 4  # of batch sizes: sizes this close are one point of the curve
AS_GOOD = 0.97  # of the best rate: as good
NEARLY_AS_GOOD = 0.9  # of the best rate: more would hardly be worth as many rows again
RARE_BATCH = 0.02  # of the batches: a size seen less often says little
NEAR_ROOFLINE = 1.25  # a size measured within this factor of the roofline's size needs no point from the roofline
BINDS = 0.85  # of a bound: no other change can help much
ROOMY = 1.1  # times what fits into the lanes: with less outstanding, that keeps batches small
CAPPED = 0.2  # of the batches cut because no more rows fit: a cap is felt

# Replays
REPLAY_FITS = 0.25  # a replay that is further off than this predicts nothing
PATIENCE = 8.0  # times what clients take to come back: as long as `dynamic` waits for them
REPLAY_DOUBT = 0.1  # of a gain, both ways, however well the replay fits

# Trials
UNCLEAR_TRIAL = 1.15  # times as fast: if so much is possible, an interval around 1 does not say that nothing is won

# Contention for cores
CROWDED = 1.25  # threads that want a core, for each core
HIDDEN_THREADS = 0.5  # threads for each core that are in no lane: a forward's own
OURS_LEAST = 0.25  # of the cores: a run that uses fewer waits for other programs' threads
TAKEN = 0.2  # of the cores: other programs that take less do not matter
WAITED_FOR_CORES = 0.15  # of the time in which our threads were ready to run
CORES_AT_WORK = 0.8  # of the cores, ours and the others' together: below it some were free
OURS_AT_WORK = 0.8  # of the cores that are left to us
WORTH_A_CHANGE = 1.15  # times as fast: what an advice must promise
PLAINLY_CAPPED = 0.5  # of the batches cut for a cap: a cap, whatever else is known
SMALL_BATCH = 16  # rows: nearly any model is faster with more, where no other size was seen
AMDAHL_DOUBT = 0.5  # of what larger batches promise on shared cores: a bound, no measurement

# Shared devices and stages
WAITED_FOR_TURNS = 0.25  # of the forward lanes' time: worth a sentence
STAGES_BUSY = 0.8  # of the time with a batch in the stages: with less the stages are not the cause
BUBBLES = 0.03  # of the stages' time: less is what any queue costs
UNEVEN_STAGES = 0.9  # the stages' mean use of the busiest one's: below it the split is to blame

# Diffusion models
DIFFUSION_BUSY = 0.7  # of the time in forwards: with less the model is not the cause
FEW_TOKENS = 2.0  # useful tokens a forward: with more the decoder does what it is for
MOST_GAIN = 8.0  # times as fast: the most that is ever promised

# Games for training
LEAST_TRAINER_STEPS = 3  # fewer steps of the trainer say nothing
LOST_BY_STALLS = 0.1  # of the trainer's time
ENGINE_FULL = 0.85  # of the slots asked for: the engine has what it can take
SLOW_ENVIRONMENT = 0.3  # of a game's time in its environment
MOST_DEPTH = 16.0  # times the trainer's time: no buffer hides longer rollouts, since old ones teach little

# Rows
AGAIN = 2.0  # times as many rows, where no number is known that would do
KEEPS_UP = 0.93  # of the rows offered: the rest is still on its way
WORTH_NOT_WAITING = 1.1  # times as fast, where it is not plain that a timer is set
FEW_LOST = 0.01  # of the requests: so many may be lost
LANES_FULL = 0.9  # of the lanes' time: requests that are lost then lack room
TIMER_NOTICED = 0.1  # of a request's time: a timer that takes less is not to blame
UNEXPLAINED = 0.05  # of the lanes' time: above it the ledger is not to be trusted
SATURATED = 0.90  # of the roofline
ALL_CORES = 0.90  # of the cores
LEAST_AT_WORK = 0.5  # cores, of a forward on the CPU that lacks nothing
IDLE_CORES = 0.2  # of the cores: no run with so much idle is saturated
FASTER_DTYPE = 2.0  # times as fast: the most that bfloat16 is known to bring
BUSY = 0.80  # of the lanes' time: more cannot be had of lanes that take turns with their clients
UNEVEN_WORKERS = 0.75  # the workers' mean use of the busiest one's: below it one delays the others
SLOW_WORKER = 1.3  # times the median worker's time for a block
ROOM = 1.1  # times what the cores do now: less is no room for anything else
MOST_WORKERS = 8  # times those there are: no measurement reaches further

# Text
LARGE = 0.3  # of the time: worth a verdict of its own
BUSY_BESIDE = 0.5  # of the model's idle time, that a station must have been busy
LEAST_ROWS = 16  # fewer do not tell how fast rows come
IDLE_CORES_TEXT = 0.15  # of the cores: no run of text with so much idle is saturated
EXPLAINED = 0.5  # of the idle time: enough to be called the cause
SHORT_S = 10.0  # seconds: a shorter run is not judged where other programs have the cores
SHORT_CONTEXT = 256  # tokens: a shorter context is never advised
LEAST_STEPS = 16  # fewer steps say nothing
SLOTS_FULL = 0.75  # of the slots, on average over the time in steps
QUEUED = 0.1  # of a row's time in the queue: with so much there was no lack of rows
MORE_SLOTS = 2  # times the slots: what is advised
ENOUGH_SLOTS = 16  # with fewer rows a step mostly reads weights, on any device
WIDE_STEP = 256  # tokens: with fewer a step mostly reads weights, on any device
WIDER_STEP = 512  # tokens of a step: what is advised
LONG_PROMPT = 0.1  # of a step's tokens: a few such prompts fill a step
HELD = 0.3  # of the time in steps in which prompts had no room
SHORT_OF_PAGES = 0.1  # of the rows: so many waited for pages or gave theirs back
COMPUTED_AGAIN = 0.1  # of all tokens: worth a verdict though the slots are full
READS = 0.6  # of the memory's bandwidth: only reading less gains much
NOTABLE_READS = 0.3  # of the memory's bandwidth: worth a sentence
WELL = 0.6  # of the roofline: a run that reaches it does not fall short
LONG_CONTEXT = 0.05  # of the operations, for attention: with so many it takes the time between products

# Nodes
WORTH_A_NODE = 0.8  # of a node's time, that should be work: with less the run is badly divided
NEARLY_AS_QUICK = 1.1  # times the seconds of all nodes: with fewer nodes that take no longer there are too many
NOTICED = 0.1  # of the time: less is no reason for anything
LOST_TO_NODES = 0.1  # of the nodes' time: with less, nothing about the nodes is the verdict
SLOW_NODE = 0.7  # of the others' speed: a node below it is slow
COORDINATOR_BUSY = 0.5  # of the time, with one thing: while nodes wait it is what they wait for
COORDINATOR_FULL = 0.8  # of one core, for a loop that does one thing at a time
LARGE_RANGES = 0.5  # of the tail, that a range lasts on average: the tail is made of whole ranges
FEW_CORES = 0.8  # of the others' cores
FEW_ROWS = 0.5  # of the rows in the others' batches
SLOW_CLOCK = 0.8  # of the others' clock
