"""`gpuinfer.serve`: a model of the program's own over HTTP, rows of any shape as JSON and as safetensors."""

from __future__ import annotations

import concurrent.futures
import json
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch

import gpuinfer
from gpuinfer.api import Setup
from gpuinfer.config.setup_file import ServerSetup, read_setup_file
from gpuinfer.errors import RequestError, UsageError
from gpuinfer.models.row_format import MEDIA_TYPE, answer_from_body, to_body
from gpuinfer.models.row_layout import array_spec

IMAGE = (3, 4, 4)


class Scores(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(48, 2)

    def forward(self, image):
        return self.head(image.flatten(1))


class Kept(torch.nn.Module):
    """{"ids", "mask"} to the sum and the number of the ids that the mask keeps."""

    def forward(self, ids, mask):
        return {"sum": (ids * mask).sum(1), "any": mask.any(1)}


def nested(one, two):
    """A row (float32 [2], (int64 [], float32 [2, 2])) to two numbers."""
    number, square = two
    return one.sum(1) + number, square.flatten(1).sum(1)


def ask(server, path, body=None, headers=None):
    """The status, and the answer: of JSON its value, of safetensors what they hold."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, headers or {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            found, kind = response.read(), response.headers["Content-Type"]
            status = response.status
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]
    return status, answer_from_body(found) if kind == MEDIA_TYPE else json.loads(found) if "json" in kind else found


def tensors(**arrays):
    return to_body(arrays)


TENSORS = {"Content-Type": MEDIA_TYPE}


@pytest.fixture(scope="module")
def model():
    return Scores()


@pytest.fixture(scope="module")
def images(model):
    with gpuinfer.serve(model, example=torch.zeros(IMAGE), threads=1) as server:
        yield server


@pytest.fixture(scope="module")
def masked():
    row = {"ids": torch.zeros(3, dtype=torch.int64), "mask": torch.zeros(3, dtype=torch.bool)}
    with gpuinfer.serve(Kept(), example=row, name="kept", threads=1) as server:
        yield server


def test_images_are_rows_as_json_and_as_safetensors(images, model):
    batch = torch.rand(3, *IMAGE)
    with torch.no_grad():
        wanted = model(batch).numpy()
    status, answer = ask(images, "/v1/evaluate", {"rows": batch.tolist()})
    assert status == 200
    np.testing.assert_allclose(answer["outputs"], wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        ask(images, "/v1/evaluate", {"x": batch[1].tolist()})[1]["y"], wanted[1], rtol=1e-4, atol=1e-5
    )
    found = ask(images, "/v1/evaluate", tensors(anything=batch.numpy()), TENSORS)[1]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_it_says_how_it_is(images):
    assert ask(images, "/health")[1]["status"] == "ready"
    assert b"gpuinfer_" in ask(images, "/metrics")[1]
    (model,) = ask(images, "/v1/models")[1]["data"]
    assert (model["id"], model["row"]) == ("Scores", [{"path": [], "shape": [3, 4, 4], "dtype": "float32"}])
    ask(images, "/v1/evaluate", {"rows": torch.zeros(2, *IMAGE).tolist()})
    assert images.stats()["batches"]["count"] >= 1
    assert images.report()["workload"] == "serve"
    assert "bottleneck" in str(images.verdict())


def test_rows_of_several_arrays_by_their_names(masked):
    rows = {"ids": [[1, 2, 1 << 60], [5, 5, 5]], "mask": [[True, True, True], [0, 1, 0]]}
    wanted = {"sum": [3 + (1 << 60), 5], "any": [True, True]}
    assert ask(masked, "/v1/evaluate", {"rows": rows, "model": "kept"}) == (200, {"outputs": wanted})
    one = {"x": {"ids": [1, 2, 3], "mask": [False, False, True]}}
    assert ask(masked, "/v1/evaluate", one) == (200, {"y": {"sum": 3, "any": True}})
    body = tensors(ids=np.array(rows["ids"]), mask=np.array(rows["mask"], bool))
    status, found = ask(masked, "/v1/evaluate", body, TENSORS)
    assert (status, {name: part.tolist() for name, part in found.items()}) == (200, wanted)


def test_tuples_in_tuples_by_their_places():
    row = (torch.zeros(2), (torch.tensor(0), torch.zeros(2, 2)))
    with gpuinfer.serve(nested, example=row) as server:
        rows = [[[1, 2], [3, 4]], [[10, 20], [[[1, 1], [1, 1]], [[2, 2], [2, 2]]]]]
        assert ask(server, "/v1/evaluate", {"rows": rows}) == (200, {"outputs": {"0": [13, 27], "1": [4, 8]}})
        body = to_body({"0": np.ones((1, 2), np.float32), "1.0": np.array([5]), "1.1": np.ones((1, 2, 2), np.float32)})
        assert [part.tolist() for part in ask(server, "/v1/evaluate", body, TENSORS)[1]] == [[7], [4]]


class Lengths(torch.nn.Module):
    """The sum of a row, and how long it was in its batch."""

    def forward(self, rows):
        return {"sum": rows.sum(1), "length": torch.full((len(rows),), rows.shape[1])}


def test_rows_of_several_lengths(masked):
    ones = [[1.0] * length for length in (3, 5, 1)]
    with gpuinfer.serve(Lengths(), example=torch.zeros(4), ragged="pad", threads=1) as server:
        found = ask(server, "/v1/evaluate", {"rows": ones})[1]["outputs"]
        assert found == {"sum": [3, 5, 1], "length": [6, 6, 6]}
        assert ask(server, "/v1/evaluate", {"x": [1.0] * 9})[1]["y"] == {"sum": 9, "length": 12}
        found = ask(server, "/v1/evaluate", tensors(rows=np.ones((2, 7), np.float32)), TENSORS)[1]
        assert [part.tolist() for part in found.values()] in ([[7, 7], [8, 8]], [[8, 8], [7, 7]])
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            sent = [pool.submit(ask, server, "/v1/evaluate", {"x": [1.0] * length}) for length in range(1, 17)]
            assert [one.result()[1]["y"]["sum"] for one in sent] == list(range(1, 17))
        status, answer = ask(server, "/v1/evaluate", {"x": [[1.0]]})
        assert (status, "A row of this model is float32 [4]" in answer["message"]) == (400, True)
    with gpuinfer.serve(Lengths(), example=torch.zeros(4), ragged="group", threads=1) as server:
        assert ask(server, "/v1/evaluate", {"x": [1.0] * 9})[1]["y"] == {"sum": 9, "length": 9}
        assert ask(server, "/v1/evaluate", {"rows": [[1.0, 2.0]]})[1]["outputs"] == {"sum": [3], "length": [2]}
        status, answer = ask(server, "/v1/evaluate", {"rows": ones})
        assert (status, "lists of different lengths" in answer["message"]) == (400, True)


@pytest.mark.parametrize("kind", [None, "application/json", "application/octet-stream", "application/safetensors"])
def test_safetensors_of_another_content_type_are_told_which_it_needs(images, kind):
    headers = {} if kind is None else {"Content-Type": kind}
    status, answer = ask(images, "/v1/evaluate", tensors(rows=np.zeros((1, *IMAGE), np.float32)), headers)
    assert status == 400
    assert answer["message"].endswith(f"Send Content-Type: {MEDIA_TYPE}.")


BAD_IMAGES = [
    ({"rows": np.zeros((2, 3, 4, 5)).tolist()}, r"float32 \[2, 3, 4, 5\]. A row of this model is float32 \[3, 4, 4\]"),
    ({"x": np.zeros((1, 3, 4, 4)).tolist()}, "Expected `float`, got `array`"),
    ({"rows": [[[[1, 2], [1]]]]}, "lists of different lengths"),
    ({"rows": 3}, "Expected `array`, got `int`"),
    ({"rows": [[[["1"]]]]}, "Expected `float`, got `str`"),
    ({"rows": []}, "A row of this model is"),
    ({"rows": np.full((1, 3, 4, 4), 1e300).tolist()}, "NaN, infinite, or too large"),
    ({}, "one of `rows` and `x` is wanted"),
    ({"x": [], "rows": []}, "one of `rows` and `x` is wanted"),
    ({"row": []}, "Did you mean `rows`"),
    (b"[" * 100_000, "nested too deeply|is not JSON|Expected `object`"),
    (b'{"rows": ' + b"[" * 5_000 + b"]" * 5_000 + b"}", "nested too deeply|Expected `float`"),
    (b"\xff", "not"),
]
BAD_TENSORS = [
    (tensors(rows=np.zeros((2, 3, 4, 4))), "float64 .*Convert|is float64"),
    (tensors(rows=np.zeros((3, 4, 4), np.float32)), r"is float32 \[3, 4, 4\]"),
    (tensors(rows=np.zeros((0, 3, 4, 4), np.float32)), "0 rows, and a request holds"),
    (tensors(rows=np.full((1, 3, 4, 4), np.nan, np.float32)), "NaN"),
    (tensors(rows=np.float32(1)), "A row of this model"),
    (tensors(a=np.zeros((1, 3, 4, 4), np.float32), b=np.zeros((1, 3, 4, 4), np.float32)), "tensors called 'a', 'b'"),
    (tensors(), "tensors called none"),
    (tensors(rows=np.zeros((1, 3, 4, 4), np.float32))[:-4], "bytes of tensors"),
    (b'{"x": 1}', "header"),
]


def hostile(**parts):
    """Safetensors whose header says of each name: dtype, shape, begin, end; over 64 bytes of data."""
    told = {name: {"dtype": kind, "shape": shape, "data_offsets": ends} for name, (kind, shape, *ends) in parts.items()}
    header = json.dumps(told).encode()
    return len(header).to_bytes(8, "little") + header + bytes(64)


IDS, MASK = ("I64", [2, 3], 0, 48), ("BOOL", [2, 3], 48, 54)
BAD_MASKED = [
    ({"rows": {"ids": [[1, 2, 3]]}}, "`rows` has ids. .*send {.rows.: {.ids.: .…., .mask.: .….}}"),
    ({"rows": {"ids": [[1, 2, 3]], "mask": [[1, 1, 1]], "more": 1}}, "has ids, mask, more"),
    ({"rows": {"ids": [[1, 2, 3]], "mask": [[1, 1, 1], [0, 0, 0]]}}, "arrays of 1, 2 rows"),
    ({"rows": {"ids": [[1, 2, 3.5]], "mask": [[1, 1, 1]]}}, "Expected `int`, got `float`"),
    ({"rows": {"ids": [[1, 2, 1 << 63]], "mask": [[1, 1, 1]]}}, "`rows..ids"),
    ({"rows": {"ids": [[1, 2, 3]], "mask": [[1, 1, 2]]}}, "<= 1"),
    ({"rows": [[1, 2, 3]]}, "Expected `object`, got `array`"),
    ({"rows": {"ids": [[1, 2]], "mask": [[1, 1, 1]]}}, r"is int64 \[1, 2\]"),
]
BAD_MASKED_TENSORS = [
    (hostile(ids=IDS, mask=MASK), "64 bytes of tensors, and the header tells of 54"),
    (hostile(ids=IDS, mask=("BOOL", [2, 3], 40, 46)), "begins at byte 40"),
    (hostile(ids=("I64", [8], 0, 64)), "tensors called 'ids'. Name one"),
    (hostile(ids=("I64", [1 << 39, 1 << 39, 1 << 39], 0, 64)), "which its shape and dtype do not make"),
    (hostile(ids=("I64", [-1, 3], 0, 64)), "a shape that is none"),
    (hostile(ids=("I64", [2, 3], 0, 1 << 62)), "bytes of tensors|begins at|header tells"),
    (hostile(ids=("F8_E4M3", [8], 0, 64)), "is of F8_E4M3"),
    (hostile(**{f"ids{n}": ("U8", [0], 0, 0) for n in range(300)}), "at most 256|header of"),
    (hostile(**{"x" * 100_000: ("U8", [64], 0, 64)}), "a header of"),
]


def as_cases(cases, headers):
    return [(body, said, headers) for body, said in cases]


@pytest.mark.parametrize(("body", "said", "headers"), as_cases(BAD_IMAGES, {}) + as_cases(BAD_TENSORS, TENSORS))
def test_what_is_no_image_is_refused_with_the_cure(images, body, said, headers):
    status, error = ask(images, "/v1/evaluate", body, headers)
    assert (status, error["type"]) == (400, "invalid_request_error"), error
    assert re.search(said, error["message"]), error


@pytest.mark.parametrize(("body", "said", "headers"), as_cases(BAD_MASKED, {}) + as_cases(BAD_MASKED_TENSORS, TENSORS))
def test_what_are_no_ids_with_a_mask_is_refused_with_the_cure(masked, body, said, headers):
    status, error = ask(masked, "/v1/evaluate", body, headers)
    assert (status, error["type"]) == (400, "invalid_request_error"), error
    assert re.search(said, error["message"]), error


def test_a_batcher_asks_a_server_that_runs(images, masked, model):
    batch = torch.rand(3, *IMAGE)
    with gpuinfer.Batcher(None, backend="fleet", endpoint=images.url) as batcher, torch.no_grad():
        torch.testing.assert_close(batcher.predict_batch(batch), model(batch), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(batcher.predict(batch[0]), model(batch)[0], rtol=1e-4, atol=1e-5)
    with gpuinfer.Batcher("kept", backend="fleet", endpoint=masked.url) as batcher:
        row = {"ids": torch.tensor([1, 2, 1 << 60]), "mask": torch.tensor([True, False, True])}
        answer = batcher.predict(row)
        assert (answer["sum"].item(), answer["any"].dtype) == ((1 << 60) + 1, torch.bool)
    with (
        gpuinfer.Batcher(None, backend="fleet", endpoint=images.url) as batcher,
        pytest.raises(UsageError, match=r"whose rows are float32 \[3, 4, 4\], and these are float32 \[5\]"),
    ):
        batcher.predict(torch.zeros(5))


def test_which_model_a_fleet_has(model):
    with pytest.raises(UsageError, match="endpoint="):
        gpuinfer.Batcher(None)
    with pytest.raises(UsageError, match="by its name, and this one is an object"):
        gpuinfer.Batcher(model, backend="fleet")


def test_a_server_of_a_shape_is_described_in_a_file(tmp_path):
    spec = array_spec("nets:net", None, "3x32x32", "int64")
    ServerSetup(setup=Setup(spec)).write(tmp_path / "setup.json")
    assert read_setup_file(tmp_path / "setup.json").setup.model == spec
    leaf = {"path": [], "shape": [3], "dtype": "int64"}
    for odd in ([], 3, [leaf | {"shape": [-1]}], [leaf | {"path": ["a", 1]}], [leaf, leaf], [leaf | {"dtype": "text"}]):
        written = json.loads((tmp_path / "setup.json").read_text())
        written["setup"]["model"]["layout"]["leaves"] = odd
        (tmp_path / "odd.json").write_text(json.dumps(written))
        with pytest.raises(UsageError, match="describes no server"):
            read_setup_file(tmp_path / "odd.json")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param("serve --model blobnet --features 3x4", "blobnet takes flat features", id="a built-in network"),
        pytest.param("serve --model nets:net --features 3xx", "'3xx' is no shape", id="no shape"),
        pytest.param(
            "serve --model nets:net --features 3x4 --input-dtype bits", "of another kind", id="bits of a shape"
        ),
        pytest.param("serve --model nets:net --input-dtype bfloat16 --features 3", "no such kind", id="bfloat16"),
        pytest.param("serve --model nets:net", "or a shape, such as --features 3x32x32", id="nothing said"),
        pytest.param("load --model nets:net --features 3y4", "'3y4' is no shape", id="no shape of a load"),
        pytest.param("load --model nets:net --features 99999x99999", "are the most", id="too large"),
        pytest.param("load --input-dtype int64", "goes with --features", id="a dtype alone"),
    ],
)
def test_shapes_on_the_command_line_are_checked_at_once(gpuinfer, words, said):
    code, _, told = gpuinfer(*words.split())
    assert (code, said in told) == (2, True), told


def test_a_load_draws_rows_of_a_shape(tmp_path, monkeypatch, gpuinfer):
    (tmp_path / "nets.py").write_text("import torch\n\ndef tokens(features):\n    return torch.nn.Embedding(2, 3)\n")
    monkeypatch.chdir(tmp_path)
    words = "load --model nets:tokens --features 2x5 --input-dtype int64 --requests 20 --no-roofline --json report.json"
    assert gpuinfer(*words.split())[0] == 0
    assert json.loads((tmp_path / "report.json").read_text())["errors"]["failed"] == 0


def test_a_row_at_which_the_model_raises_is_told_apart(images):
    class Faulty(torch.nn.Module):
        def forward(self, row):
            if (row == 999).any():
                raise ValueError("this row is bad")
            return row

    with gpuinfer.serve(Faulty(), example=torch.zeros(2)) as server:
        assert ask(server, "/v1/evaluate", {"x": [1, 999]})[0] == 500
        assert ask(server, "/v1/evaluate", {"x": [1, 2]}) == (200, {"y": [1, 2]})


def test_a_folder_of_text_is_served_as_openai_has_it():
    with gpuinfer.serve("tiny", slots=4, threads=1) as server:
        status, answer = ask(server, "/v1/completions", {"prompt": "The sea", "max_tokens": 3, "ignore_eos": True})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param({}, "what a row looks like. Give example=", id="no example"),
        pytest.param({"example": "text"}, "a row is made of tensors", id="no row"),
        pytest.param(
            {"example": torch.zeros(2, dtype=torch.bfloat16)}, "has? no bfloat16|have no bfloat16", id="bfloat16"
        ),
        pytest.param({"example": {"a.b": torch.zeros(2), "a": {"b": torch.zeros(2)}}}, "two are alike", id="dots"),
        pytest.param({"example": torch.zeros(5)}, "Let it take a batch of such rows", id="another shape"),
        pytest.param({"example": torch.zeros(IMAGE), "host": "0.0.0.0"}, "api_key_file=", id="an open address"),
        pytest.param(
            {"example": torch.zeros(IMAGE), "host": "192.0.2.1", "insecure": True}, "192.0.2.1", id="no address"
        ),
        pytest.param({"example": torch.zeros(IMAGE), "weights": "file"}, "load_state_dict", id="weights of an object"),
        pytest.param({"example": torch.zeros(IMAGE), "max_row": 4}, "max_rows", id="an unknown option"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_cure(model, arguments, said):
    with pytest.raises((UsageError, RequestError), match=said):
        gpuinfer.serve(model, **arguments)


def test_a_port_that_is_taken_is_refused_in_words_of_python(images, model):
    with pytest.raises(UsageError, match=rf"port {images.port} of 127.0.0.1 is in use.* Use port=\d+, which is free"):
        gpuinfer.serve(model, example=torch.zeros(IMAGE), port=images.port)


@pytest.mark.thorough
def test_a_program_that_closes_nothing_ends_in_silence(tmp_path):
    program = "import gpuinfer, torch\nserver = gpuinfer.serve(torch.nn.Linear(2, 1), example=torch.zeros(2))\n"
    (tmp_path / "program.py").write_text(program + "print(server.url)\n")
    words = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("http://127.0.0.1:")


def test_it_answers_what_is_under_way_and_ends():
    begun, go = threading.Event(), threading.Event()

    def slow(rows):
        if (rows == 7).any():
            begun.set()
            assert go.wait(30)
        return rows

    answers = []
    server = gpuinfer.serve(slow, example=torch.zeros(1))
    asking = threading.Thread(target=lambda: answers.append(ask(server, "/v1/evaluate", {"x": [7]})))
    asking.start()
    assert begun.wait(30)
    closing = threading.Thread(target=server.close)
    closing.start()
    go.set()
    closing.join(30)
    asking.join(30)
    assert answers == [(200, {"y": [7]})]
    server.close()  # once more does nothing
    assert server.stats()["batches"]["count"] == 1
    with pytest.raises(urllib.error.URLError):
        ask(server, "/health")


def test_times_are_written_as_elsewhere():
    with gpuinfer.serve(torch.nn.Linear(3, 2), example=torch.zeros(3), drain_timeout="5s") as server:
        assert server.url
    with pytest.raises(UsageError, match="drain_timeout"):
        gpuinfer.serve(torch.nn.Linear(3, 2), example=torch.zeros(3), drain_timeout="soon")
