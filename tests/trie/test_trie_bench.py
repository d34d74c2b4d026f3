"""The measurement of lists tells what each piece costs; how much is nobody's promise here."""

from listing import units_suffice

from gpuinfer.generation import Listed
from gpuinfer.lab.rollouts_bench.constraint_speed import (
    ConstraintBench,
    SyntheticVocabulary,
    drawn_orders,
    measure_constraints,
)


def test_each_piece_has_a_time_and_what_it_stands_beside():
    rows = [cost.row() for cost in measure_constraints(rows=3, vocabulary=1200, count=40, steps=10)]
    assert [row["name"] for row in rows] == [
        "build 40 orders",
        "one step of the own engine: allowed tokens, draw, advance",
        "advance",
        "allowed tokens",
        "vLLM's processor on the logits",
    ]
    assert all(row["ms"] > 0 for row in rows)
    assert [bool(row["beside"]) for row in rows] == [row["ratio"] is not None for row in rows]


def test_what_is_measured_is_a_list_as_any_other():
    codec, made = SyntheticVocabulary(1200), drawn_orders(60)
    assert drawn_orders(60) == made
    assert len(codec.pieces) == len(set(codec.pieces)) == 1200
    [tokens] = codec.encode([made[0][1]], False)
    assert codec.decode(tokens.tolist()) == made[0][1]
    assert not units_suffice([made[0][1]] * 2, Listed(items=tuple(made)))
    bench = ConstraintBench(4, 1200, 60)
    assert all(int(node) >= 0 for node in bench.walks._places["node"])
