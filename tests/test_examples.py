"""The examples run as they are, and what the pages quote of them is what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CENTRAL_CLIENT = ROOT / "examples" / "central_client.py"
CENTRAL_PAGE = ROOT / "docs" / "central.md"


@pytest.fixture(scope="module")
def central_client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elsewhere")  # a user's program need not lie where it is started
    return subprocess.run(
        [sys.executable, str(CENTRAL_CLIENT)], cwd=folder, capture_output=True, text=True, timeout=280, check=False
    )


def test_the_central_client_runs_in_silence_but_for_what_it_did(central_client):
    assert central_client.returncode == 0, central_client.stderr
    assert central_client.stdout.splitlines()[-1] == "3 workers, 63 requests, 30,723 rows, one model"
    told = [line for line in central_client.stderr.splitlines() if line]
    assert told[0] == "gpuinfer server: 63 requests, 30,723 rows in " + told[0].rpartition(" in ")[2]
    assert len(told) == 3


def test_each_worker_of_the_central_client_says_what_it_found(central_client):
    lines = sorted(line for line in central_client.stdout.splitlines() if line.startswith("worker "))
    assert [re.sub(r"[-\d.]+$", "X", line) for line in lines] == [
        f"worker {number}: 10,241 rows asked for, the best is rated X" for number in range(3)
    ]


def quoted(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


def test_the_page_on_the_central_server_quotes_its_example_as_it_is():
    source = lines_of(CENTRAL_CLIENT.read_text())
    blocks = quoted(CENTRAL_PAGE)
    assert blocks
    for block in blocks:
        assert lines_of(block) in source, block


def lines_of(text: str) -> str:
    """The text without blank lines and without indentation, which depends on what is around it."""
    return "\n".join(["", *(line.strip() for line in text.splitlines() if line.strip()), ""])
