"""Groups of any shape, for Hypothesis; and small ones with a number."""

from __future__ import annotations

from hypothesis import strategies as st

from gpuinfer.rollouts.record import Game, Group, Span, Timing, Trajectory, Turn

finite = st.floats(allow_nan=False, allow_infinity=False)
seconds = st.floats(0, 1e6)
token = st.integers(0, 2**31 - 1)
words = st.text(max_size=8)
names = st.text("abcxyz019_-@", min_size=1, max_size=6)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | finite | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=3,
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(("system", "user", "tool")), "content": words}, optional={"extra": plain}
)


def tuples(inner, **sizes):
    return st.lists(inner, **sizes).map(tuple)


@st.composite
def turns(draw, first):
    tokens = draw(tuples(token, max_size=4))
    size = len(tokens)

    def logprobs():
        return tuples(finite, min_size=size, max_size=size)

    starts = sorted({0, *draw(st.lists(st.integers(0, max(0, size - 1)), max_size=2))})
    return Turn(
        step=draw(st.integers(0, 99)),
        messages=draw(tuples(messages, max_size=2)),
        anew=True if first else draw(st.booleans()),
        prompt_tokens=draw(tuples(token, min_size=first, max_size=4)),
        completion_tokens=tokens,
        text=draw(words),
        finish_reason=draw(st.sampled_from(("stop", "length"))),
        logprobs=draw(logprobs()),
        reference_logprobs=draw(st.none() | logprobs()),
        policy_logprobs=draw(st.none() | logprobs()),
        spans=tuple(Span(start, draw(names)) for start in starts) if size else (),
        nodes=draw(st.none() | tuples(st.integers(-1, 2**31 - 1), min_size=size, max_size=size)),
        cached_tokens=draw(st.integers(0, 2**31)),
        temperature=draw(st.floats(0, 1e3)),
        reward=draw(finite),
        timing=Timing(asked=draw(seconds), queued=draw(seconds), first_token=draw(seconds), seconds=draw(seconds)),
    )


@st.composite
def trajectories(draw):
    count = draw(st.integers(0, 3))
    return Trajectory(
        id=draw(names),
        agent=draw(names),
        role=draw(st.sampled_from(("policy", "opponent"))),
        trainable=draw(st.booleans()),
        model=draw(names),
        turns=tuple(draw(turns(first=not index)) for index in range(count)),
        reward=draw(finite),
    )


games = st.builds(
    Game,
    sample=st.integers(0, 99),
    seed=st.integers(-(2**63), 2**63 - 1),
    ending=st.sampled_from(("done", "horizon", "turns", "error")),
    trajectories=tuples(trajectories(), max_size=2),
    steps=st.integers(0, 99),
    metrics=st.dictionaries(words, finite, max_size=2),
    error=words,
    attempt=st.integers(0, 9),
    seconds=seconds,
)
groups = st.builds(
    Group,
    id=names,
    number=st.integers(0, 2**40),
    environment=names,
    games=tuples(games, max_size=2),
    failed=tuples(games, max_size=2),
    started=seconds,
    seconds=seconds,
    reference_s=seconds,
)


def group_of(number: int, tokens: int = 5, samples: int = 2) -> Group:
    """Two agents, of which the policy says `tokens` tokens; no two groups are alike."""

    def turn(step: int, drawn: tuple[int, ...]) -> Turn:
        return Turn(
            step=step,
            messages=({"role": "user", "content": f"step {step}"},),
            anew=step == 0,
            prompt_tokens=(1, 2, 3 + step),
            completion_tokens=drawn,
            text="so it is",
            finish_reason="stop",
            logprobs=tuple(-0.1 * place - 1 / 3 for place in range(len(drawn))),
            spans=(Span(0, "policy@v1"),),
            reward=0.25,
        )

    def trajectory(sample: int, agent: str, role: str) -> Trajectory:
        drawn = tuple((number * 31 + sample * 7 + place) % 50_000 for place in range(tokens))
        return Trajectory(
            id=f"g{number}/{sample}/{agent}",
            agent=agent,
            role=role,
            trainable=role == "policy",
            model="tiny",
            reward=sample + 0.5,
            turns=tuple(turn(step, drawn) for step in range(2)),
        )

    def game(sample: int) -> Game:
        sides = trajectory(sample, "A", "policy"), trajectory(sample, "B", "opponent")
        seed, metrics = number * 1000 + sample, {"illegal": 0.0}
        return Game(sample=sample, seed=seed, ending="done", steps=2, metrics=metrics, trajectories=sides)

    games = tuple(game(sample) for sample in range(samples))
    return Group(id=f"g{number}", number=number, environment="toy", games=games, started=float(number), seconds=0.25)
