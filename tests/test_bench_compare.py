"""The winner, ties and what is said of them: of work by its speed, of loads from outside by their latency; and the
files of a report: whole, offline, and what users named in them harmless.
"""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import jsonschema
import pytest
from bench_outcomes import MISSHAPEN, RIGHT, WRONG, document, made_document, outcome

from gpuinfer.cli.comparison_end import comparison_exit_code
from gpuinfer.errors import WorkError
from gpuinfer.lab.bench.bench_document import bench_schema, variants_below, wrong_variants
from gpuinfer.lab.bench.bench_tables import bench_page
from gpuinfer.lab.bench.comparison import compare_variants
from gpuinfer.lab.bench.measurement import LATENCY
from gpuinfer.report import report

CLEAR = {"a": [100, 102, 98], "b": [131, 133, 129]}
NOISY = {"a": [100, 140, 80], "b": [120, 110, 130]}
LEVEL = {"a": [50, 51, 49], "b": [100, 101, 99], "c": [101, 99, 100]}
LONE, IDLE = {"a": [100, 101, 99]}, {"a": [0, 0, 0], "b": [10, 11, 10]}


@pytest.mark.parametrize(
    ("rates", "winner", "ties", "said"),
    [
        pytest.param(CLEAR, "b", [], "b wins: 1.31× (1.2", id="a clear difference"),
        pytest.param(NOISY, "a", ["b"], "A tie: the noise allows no choice between a and b", id="noise: the first"),
        pytest.param(LEVEL, "b", ["c"], "Slower: a.", id="two that are level beat a third"),
        pytest.param({"a": [100], "b": [500]}, "a", ["b"], "b was fastest, but one run", id="one run of each"),
        pytest.param(LONE, "a", [], "Only a was measured", id="only one"),
        pytest.param(IDLE, "b", [], "b is the only one that answered", id="one that did nothing"),
        pytest.param({"a": [0, 0]}, None, [], "no winner", id="none that did anything"),
        pytest.param({"a": [], "b": []}, None, [], "no winner", id="no runs at all"),
    ],
)
def test_winners_and_what_is_said_of_them(rates, winner, ties, said):
    made = document(rates)
    assert (made["winner"], made["ties"]) == (winner, ties)
    assert said in made["verdict"]


def test_noise_that_both_runs_of_a_pair_share_does_not_hide_a_difference():
    found = compare_variants(outcome({"a": [100, 50, 200], "b": [110, 55.2, 219]}))
    assert (found.winner.name, found.ties) == ("b", [])
    assert found.rows[0].speed.low < 50 < 200 < found.rows[0].speed.high


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("made", "code"),
    [
        pytest.param(document(CLEAR, parity={"a": RIGHT, "b": RIGHT}), 0, id="all is well"),
        pytest.param(document(CLEAR, parity={"a": RIGHT, "b": WRONG}), 4, id="wrong answers"),
        pytest.param(document(NOISY, parity={"a": WRONG, "b": MISSHAPEN}), 4, id="all wrong"),
        pytest.param(document(LEVEL, failed={"c": "out of memory"}), 1, id="a variant failed"),
        pytest.param(document(CLEAR, parity={"b": WRONG}, stopped=True), 3, id="stopped"),
        pytest.param(document({"a": [1.0], "b": []}, stopped=True), 3, id="stopped early"),
        pytest.param(document({"a": [], "b": []}, skipped={"a": "why", "b": "why"}), 0, id="nothing ran"),
    ],
)
def test_a_document_is_what_its_schema_says_and_has_an_exit_code_and_a_page(made, code):
    assert comparison_exit_code(made, None) == code
    jsonschema.validate(made, bench_schema())
    for run in made["runs"]:
        jsonschema.validate(run, report.schema())
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    page = bench_page(made)
    assert all(len(row) == len(page.table.columns) for row in page.table.rows)
    assert dict(page.notes)["verdict"] == made["verdict"]


def test_wrong_answers_cannot_win_and_what_went_wrong_is_said():
    made = document(CLEAR, parity={"a": RIGHT, "b": WRONG})
    assert (made["winner"], wrong_variants(made)) == ("a", ["b"])
    assert "the only one that answered, and as the model does" in made["verdict"]
    made = document(LEVEL, parity={"b": WRONG, "c": MISSHAPEN}, skipped={"a": "no such device."}, stopped=True)
    notes = bench_page(made).notes
    assert ("skipped", "a: no such device.") in notes
    assert ("wrong answers", "b: 0.5 off, where 1e-05 is allowed") in notes
    assert any(name == "stopped" for name, _ in notes)
    unmeasured = document(LEVEL, skipped={"b": "no such device"}, failed={"c": "out of memory"})
    assert variants_below(unmeasured, 0.1) == ["b", "c"]


def counting(made, name, metric, **throughput):
    """The outcome, with the runs of one variant in another metric."""
    made.runs = [
        replace(one, metric=metric, rate=1e9, report={**one.report, "throughput": throughput})
        if one.variant == name
        else one
        for one in made.runs
    ]
    return made


def test_runs_are_compared_by_what_all_of_them_count_and_what_counts_nothing_like_it_is_named():
    made = counting(outcome(CLEAR), "b", "games_per_min", games_per_min=1e9, evaluations_per_s=50.0)
    found = compare_variants(made)
    assert [row.metric for row in found.rows] == ["evaluations_per_s"] * 2
    assert found.winner.name == "a"
    odd = made_document(counting(outcome(LEVEL), "c", "simulations_per_s", simulations_per_s=1e9))
    assert [row["name"] for row in odd["comparison"]] == ["a", "b"]
    assert (odd["failed"][0]["name"], odd["status"], odd["winner"]) == ("c", "failed", "b")
    assert "it counts simulations/s, which the others have none of." in odd["failed"][0]["reason"]
    jsonschema.validate(odd, bench_schema())


@pytest.mark.parametrize(
    ("rates", "exceeded", "said"),
    [
        pytest.param({"a": [100, 102, 98]}, False, None, id="a quiet machine"),
        pytest.param({"a": [100, 30, 98]}, False, "differ by 3.3×", id="runs far apart"),
        pytest.param({"a": [2e5, 2e5]}, False, "200% of what the bare model", id="faster than the bare model"),
        pytest.param({"a": [1e3, 1e3]}, True, "a run reached 124% of what the bare model", id="than it was measured"),
    ],
)
def test_a_busy_machine_is_noticed(rates, exceeded, said):
    made = outcome(rates)
    for run in made.runs if exceeded else ():
        run.report["roofline"].update(raised=True, rows_per_s=124.0, measured=[90.0, 100.0])
    found = made_document(made)
    jsonschema.validate(found, bench_schema())
    note = dict(bench_page(found).notes).get("unquiet")
    assert note is None if said is None else said in note


# Loads from outside

MS = 1e-3
SLOW, FAST = [20 * MS, 21 * MS, 19 * MS], [10 * MS, 10.4 * MS, 9.6 * MS]


def latencies(values, served=200.0):
    """Of a load from outside: p95 latencies by variant, and rows/s of `b`, for each repeat where it is a list."""
    made = outcome(values)
    made.runs = [
        replace(
            one, metric=LATENCY, of_load=True,
            served=200.0 if one.variant == "a" else served[one.repeat] if isinstance(served, list) else served,
        )
        for one in made.runs
    ]  # fmt: skip
    return made_document(made)


@pytest.mark.parametrize(
    ("served", "winner", "said"),
    [
        pytest.param(199.0, "b", "b wins: the p95 latency of a is 2.0", id="keeps up"),
        pytest.param([196.0, 199.0, 195.0], "b", "", id="keeps up as far as the noise tells"),
        pytest.param(100.0, "a", "a wins: it alone keeps up with the load.", id="falls behind"),
        pytest.param([150.0, 140.0, 160.0], "a", "", id="falls behind with all the noise"),
    ],
)
def test_who_does_not_keep_up_cannot_win(served, winner, said):
    made = latencies({"a": SLOW, "b": FAST}, served)
    assert made["winner"] == winner
    assert said in made["verdict"]
    assert ("behind" in dict(bench_page(made).notes)) == (winner == "a")


def test_less_latency_is_better():
    made = latencies({"a": SLOW, "b": FAST})
    assert [variants_below(made, least) for least in (0.9, 1.5, 2.5)] == [[], [], ["b"]]
    assert variants_below(latencies({"a": FAST, "b": SLOW}), 0.9) == ["b"]
    assert "b was fastest, but one run" in latencies({"a": [2 * MS], "b": [1 * MS]})["verdict"]
    tied = latencies({"a": [20 * MS, 10 * MS], "b": [19 * MS, 12 * MS]})
    assert "(the p95 latency of a is" in tied["verdict"]


def test_the_table_of_a_load_shows_what_became_of_its_requests():
    made = latencies({"a": SLOW, "b": FAST})
    jsonschema.validate(made, bench_schema())
    page = bench_page(made)
    rows = [dict(zip(page.table.columns, row, strict=True)) for row in page.table.rows]
    assert [row["p95"] for row in rows] == ["20 ms", "10 ms"]
    assert [rows[1][name] for name in ("", "rows/s", "×", "cut")] == ["★ b", "200", "2.00", "full 100%"]
    assert page.about.startswith("p95 latency, median of 3 runs")
    assert {len(row) for row in page.brief.rows} == {len(page.brief.columns)} == {8}
    assert "20 ms" in page.markdown()


# The files of a report

EVIL = '<script>alert("|")</script>'


def write(folder, made):
    bench_page(made).write(folder, "bench", made, "Make room there, or give another --report.")


class Sources(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        self.found += [value for name, value in attributes if name in ("src", "href")]


def test_a_report_has_all_its_files_and_its_page_needs_no_network(tmp_path):
    write(tmp_path, document(CLEAR, parity={"a": RIGHT, "b": WRONG}))
    pictures = {"throughput.png", "batches.png", "time.png", "queue_wait.png"}
    assert {path.name for path in tmp_path.iterdir()} == {"bench.json", "bench.md", "bench.html"} | pictures
    jsonschema.validate(json.loads((tmp_path / "bench.json").read_text()), bench_schema())
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    text, parser = (tmp_path / "bench.html").read_text(), Sources()
    parser.feed(text)
    assert len(parser.found) == 4
    assert all(source.startswith("data:image/svg+xml;base64,") for source in parser.found)
    assert not re.search(r"<(script|link|iframe)|@import|url\(", text)
    (tmp_path / "bench.json").unlink()
    (tmp_path / "bench.json").mkdir()
    with pytest.raises(WorkError, match="give another --report"):
        write(tmp_path, document(CLEAR))


def test_names_are_text_wherever_they_stand_and_without_runs_there_are_no_plots():
    page = bench_page(document({EVIL: [1.0, 2.0], "b": [3.0, 4.0]}, skipped={"c": EVIL}))
    assert "<script" not in page.html()
    lines = page.markdown().splitlines()
    assert not [line for line in lines if "<script" in line and not line.startswith("    ")]  # but in a block of code
    assert len({line.replace("\\|", "").count("|") for line in lines if line[:1] == "|"}) == 1
    empty = bench_page(document({"a": []}, skipped={"a": "no such device"}))
    assert empty.plots == {}
    assert "no such device" in empty.html()
