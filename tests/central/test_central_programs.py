"""`CentralServer` in programs as people write them: what can be served is, and all else is refused with its cause."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from gpuinfer.central.server import CentralServer
from gpuinfer.errors import BackendError, UsageError

HERE = Path(__file__).parent
SECONDS = 120  # after which a program that does not end has failed


class Doubled(nn.Module):
    """A network without an `__init__` of its own."""

    def forward(self, rows):
        return rows * 2


@pytest.mark.parametrize(
    ("model", "said"),
    [
        pytest.param(Doubled(), "an object of Doubled.*Give what makes it: Doubled or a function", id="a network"),
        pytest.param(nn.Linear(4, 2), "an object of Linear", id="a layer"),
        pytest.param(functools.partial(Doubled), r"functools\.partial, which has no name", id="a partial"),
        pytest.param(lambda: Doubled(), "is a lambda, which no other process can import", id="a lambda"),
        pytest.param(5, "model is 5. Give a function", id="a number"),
    ],
)
def test_what_no_other_process_can_make_is_refused_with_what_can(model, said):
    with pytest.raises(UsageError, match=said):
        CentralServer(model, inputs=4)


def test_a_function_inside_of_another_is_refused():
    def network():
        return Doubled()

    with pytest.raises(UsageError, match="'network', made inside of a function"):
        CentralServer(network, inputs=4)


def test_the_shape_of_an_image_is_told_as_features():
    with pytest.raises(UsageError, match=r"inputs=3072, and let the model begin with x\.view\(-1, 3, 32, 32\)"):
        CentralServer(Doubled, inputs=(3, 32, 32))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        pytest.param("models.tagged", "Did you mean 'models:tagged'?", id="a dot for the colon"),
        pytest.param(nn.Linear, "needs in_features, out_features.*write a function around it", id="a layer's class"),
    ],
)
def test_a_name_or_a_class_that_cannot_be_made_is_told_what_can(model, said):
    with pytest.raises(UsageError, match=said), CentralServer(model, inputs=4):
        pass


def test_a_network_without_an_init_is_served_and_rows_of_other_forms_are_told_how_to_be_sent():
    with CentralServer(f"{__name__}:Doubled", inputs=4) as server, server.client() as client:
        rows = np.ones((2, 4), np.float32)
        assert (client.evaluate(rows) == 2).all()
        for wrong, cure in (
            (rows[0], r"\[rows, 4\] for a request of so many rows, and got float32 \[4\].* send row\[None\]"),
            (rows.tolist(), r"Send np\.asarray\(rows, np\.float32\)"),
            (rows.astype(np.float64), r"Send rows\.astype\(np\.float32\)"),
            (rows.reshape(2, 2, 2), r"Send rows\.reshape\(len\(rows\), -1\)"),
        ):
            with pytest.raises(BackendError, match=cure):
                client.evaluate(wrong)


def program(*words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=HERE, input=text, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def test_a_program_without_a_guard_is_told_so():
    done = program("unguarded.py")
    assert done.returncode == 1
    assert "starts a server whenever it is imported" in done.stderr.splitlines()[-1]
    assert done.stderr.count("Traceback") == 1, done.stderr


@pytest.mark.parametrize("given", ["Doubled", '"__main__:Doubled"'], ids=["the class", "its name"])
@pytest.mark.parametrize("way", ["-", "-c"])
def test_a_network_of_a_program_without_a_file_is_refused_with_what_to_do(way, given):
    text = (HERE / "unguarded.py").read_text().replace("CentralServer(Doubled", f"CentralServer({given}")
    assert f"CentralServer({given}" in text
    done = program("-", text=text) if way == "-" else program("-c", text)
    assert done.returncode == 1
    assert "Write it into a file, such as model.py, and give 'model:Doubled'." in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("way", ["-", "-c"])
def test_a_network_of_a_module_is_served_by_a_program_without_a_file(way):
    text = (HERE / "unguarded.py").read_text()
    lines = ["from test_central_programs import Doubled" if "class" in line else line for line in text.splitlines()]
    text = "\n".join(
        line for line in lines if not line.startswith("    def") and "return" not in line and '"""A n' not in line
    )
    done = program("-", text=text) if way == "-" else program("-c", text)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "16.0"


def test_what_stands_below_the_guard_is_not_there_for_the_server(tmp_path):
    text = (HERE / "unguarded.py").read_text().replace("class Doubled", 'if __name__ == "__main__":\n class Doubled')
    head, _, rest = text.partition(" class Doubled")
    (tmp_path / "below.py").write_text(head + "\n".join(f" {line}" for line in f"class Doubled{rest}".splitlines()))
    done = program(str(tmp_path / "below.py"))
    assert done.returncode == 1
    assert "above `if __name__ == '__main__':`" in done.stderr.splitlines()[-1]
