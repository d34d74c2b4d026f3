"""The files of a report: whole, offline, and what users named in them harmless."""

import json
import re
from html.parser import HTMLParser

import jsonschema
import pytest
from bench_outcomes import RIGHT, WRONG, document, outcome

from gpuinfer.errors import WorkError
from gpuinfer.lab.bench.bench_document import bench_document, bench_schema
from gpuinfer.lab.bench.bench_tables import bench_page
from gpuinfer.lab.bench.comparison import compare_variants
from gpuinfer.lab.bench.series import SeriesPlan

RATES = {"inprocess": [100, 102, 98], "central": [131, 133, 129]}
EVIL = '<script>alert("|")</script>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("report")
    write(path, document(RATES, parity={"inprocess": RIGHT, "central": WRONG}))
    return path


def write(folder, made):
    bench_page(made).write(folder, "bench", made, "Make room there, or give another --report.")


def test_a_report_has_all_its_files(folder):
    pictures = {"throughput.png", "batches.png", "time.png", "queue_wait.png"}
    assert {path.name for path in folder.iterdir()} == {"bench.json", "bench.md", "bench.html"} | pictures
    jsonschema.validate(json.loads((folder / "bench.json").read_text()), bench_schema())
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in pictures)


def test_the_page_needs_no_network(folder):
    class Sources(HTMLParser):
        found: list[str] = []  # noqa: RUF012 (one test, one page)

        def handle_starttag(self, tag, attributes):
            self.found += [value for name, value in attributes if name in ("src", "href")]

    text = (folder / "bench.html").read_text()
    parser = Sources()
    parser.feed(text)
    assert len(parser.found) == 4
    assert all(source.startswith("data:image/svg+xml;base64,") for source in parser.found)
    assert not re.search(r"<(script|link|iframe)|@import|url\(", text)


def test_names_are_text_wherever_they_stand():
    made = document({EVIL: [1.0, 2.0], "b": [3.0, 4.0]}, skipped={"c": EVIL})
    page = bench_page(made)
    assert "<script" not in page.html()
    lines = page.markdown().splitlines()
    assert not [line for line in lines if "<script" in line and not line.startswith("    ")]  # but in a block of code
    columns = [line.replace("\\|", "").count("|") for line in lines if line[:1] == "|"]
    assert len(set(columns)) == 1


def test_a_comparison_without_runs_has_a_page_and_no_plots():
    made = document({"a": []}, skipped={"a": "no such device"})
    page = bench_page(made)
    assert page.plots == {}
    assert "no such device" in page.html()


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "bench.json").mkdir()
    with pytest.raises(WorkError, match="give another --report"):
        write(tmp_path, document(RATES))


def test_runs_that_did_more_than_the_bare_model_tell_of_a_busy_machine():
    made = outcome({"a": [1e3, 1e3], "b": [1e3, 1e3]})
    quiet = bench_document("selfplay", made, compare_variants(made), SeriesPlan(), "2025-01-01T00:00:00+00:00")
    for run in made.runs:
        run.report["roofline"].update(raised=True, rows_per_s=124.0, measured=[90.0, 100.0])
    busy = bench_document("selfplay", made, compare_variants(made), SeriesPlan(), "2025-01-01T00:00:00+00:00")
    jsonschema.validate(busy, bench_schema())
    assert "unquiet" not in dict(bench_page(quiet).notes)
    assert (
        "a run reached 124% of what the bare model had been measured to do" in dict(bench_page(busy).notes)["unquiet"]
    )
