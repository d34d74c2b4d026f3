"""What users of a batching toolkit expect: Triton's own client over KServe's protocol, a list for several models, how
much of the copies is hidden behind compute, a profile on demand.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import forking
import jsonschema
import numpy as np
import pytest
import torch
from serving.replica_servers import bearer, serving, write_keys

import gpuinfer
from gpuinfer.cli.screen.final_panel import panel_rows
from gpuinfer.report import report
from gpuinfer.stats import Snapshot, merge_snapshots, since

WAIT_S = 120
ROWS = ("--features", 16, "--actions", 4, "--seats", 2)


def triton(url: str, script: str, key: str = "") -> dict[str, Any]:
    """What `answer` holds after a script of Triton's own client, `client` of `http` (`tritonclient.http`), in a process
    of its own: its event loop (gevent) is not that of the tests.
    """
    begin = (
        "import json, sys\nimport numpy as np\nimport tritonclient.http as http\n"
        "from tritonclient.utils import InferenceServerException\n"
        "url, key = sys.argv[1:]\nheaders = {'Authorization': f'Bearer {key}'} if key else None\nanswer = {}\n"
        "def tensor(name, array, datatype, binary=True):\n"
        "    made = http.InferInput(name, list(array.shape), datatype)\n"
        "    made.set_data_from_numpy(array, binary_data=binary)\n"
        "    return made\n"
        f"client = http.InferenceServerClient(url, network_timeout={WAIT_S}, connection_timeout={WAIT_S})\n"
    )
    words = [sys.executable, "-c", f"{begin}{script}\nclient.close()\nprint(json.dumps(answer))"]
    words += [url.removeprefix("http://"), key]
    done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Parts(torch.nn.Module):
    """Rows of many dtypes, and answers of many."""

    def forward(self, row: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        total = row["ids"].float().sum(1) + row["half"].float().sum(1) + row["image"].float().flatten(1).sum(1)
        signed = torch.where(row["flag"], total, -total)
        return {"total": signed, "count": row["count"] + 1, "flag": ~row["flag"], "pixels": row["image"][:, 0]}


EXAMPLE = {
    "ids": torch.ones(3, dtype=torch.int64),
    "half": torch.ones(2, dtype=torch.float16),
    "image": torch.ones(2, 4, dtype=torch.uint8),
    "flag": torch.tensor(True),
    "count": torch.tensor(1, dtype=torch.int32),
}


@pytest.fixture(scope="module")
def parts() -> Iterator[str]:
    """The address of a server of `Parts`."""
    with gpuinfer.serve(Parts(), example=EXAMPLE, name="parts", threads=1) as server:
        yield server.url


INPUTS = """
rows = 5
ids = np.arange(rows * 3, dtype=np.int64).reshape(rows, 3)
half = np.full((rows, 2), 0.5, np.float16)
image = np.arange(rows * 8, dtype=np.uint8).reshape(rows, 2, 4)
flag = np.array([True, False, True, False, True])
count = np.arange(rows, dtype=np.int32)
inputs = [tensor("ids", ids, "INT64"), tensor("half", half, "FP16"), tensor("image", image, "UINT8"),
          tensor("flag", flag, "BOOL"), tensor("count", count, "INT32")]
total = ids.sum(1) + half.sum(1) + image.reshape(rows, -1).sum(1)
expected = {"total": np.where(flag, total, -total), "count": count + 1, "flag": ~flag, "pixels": image[:, 0]}
"""


def test_tritons_client_infers_with_tensors_of_every_dtype_binary_and_as_json(parts):
    said = triton(
        parts,
        INPUTS
        + """
result = client.infer("parts", inputs, request_id="17", priority=1, timeout=100_000_000)
answer["id"] = result.get_response()["id"]
answer["binary"] = all(np.array_equal(result.as_numpy(name), value) for name, value in expected.items())
answer["dtypes"] = {name: str(result.as_numpy(name).dtype) for name in expected}
plain = [tensor("half", half, "FP16")] + [
    tensor(name, array, datatype, binary=False)
    for name, array, datatype in (("ids", ids, "INT64"), ("image", image, "UINT8"), ("flag", flag, "BOOL"),
                                  ("count", count, "INT32"))]
wanted = [http.InferRequestedOutput("total", binary_data=False), http.InferRequestedOutput("count", binary_data=True)]
result = client.infer("parts", plain, outputs=wanted, model_version="1")
answer["plain"] = bool(np.array_equal(result.as_numpy("total"), expected["total"])
                       and np.array_equal(result.as_numpy("count"), expected["count"]))
answer["others"] = result.as_numpy("flag") is not None
""",
    )
    dtypes = {"total": "float32", "count": "int32", "flag": "bool", "pixels": "uint8"}
    assert said == {"id": "17", "binary": True, "dtypes": dtypes, "plain": True, "others": False}


def test_tritons_client_finds_health_metadata_and_configuration(parts):
    said = triton(
        parts,
        """
answer["alive"] = [client.is_server_live(), client.is_server_ready(), client.is_model_ready("parts"),
                   client.is_model_ready("parts", "1"), client.is_model_ready("other"),
                   client.is_model_ready("parts", "2")]
answer["server"] = client.get_server_metadata()
answer["model"] = client.get_model_metadata("parts")
answer["config"] = client.get_model_config("parts")
answer["index"] = client.get_model_repository_index()
answer["stats"] = client.get_inference_statistics("parts")
""",
    )
    assert said["alive"] == [True] * 4 + [False] * 2
    assert said["server"]["name"] == "gpuinfer"
    assert "binary_tensor_data" in said["server"]["extensions"]
    assert said["model"]["versions"] == ["1"]
    assert {one["name"]: (one["datatype"], one["shape"]) for one in said["model"]["inputs"]} == {
        "ids": ("INT64", [-1, 3]),
        "half": ("FP16", [-1, 2]),
        "image": ("UINT8", [-1, 2, 4]),
        "flag": ("BOOL", [-1]),
        "count": ("INT32", [-1]),
    }
    assert {one["name"]: (one["datatype"], one["shape"]) for one in said["model"]["outputs"]} == {
        "total": ("FP32", [-1]),
        "count": ("INT32", [-1]),
        "flag": ("BOOL", [-1]),
        "pixels": ("UINT8", [-1, 4]),
    }
    assert said["config"]["max_batch_size"] >= 1
    assert {"name": "image", "data_type": "TYPE_UINT8", "dims": [2, 4]} in said["config"]["input"]
    (stats,) = said["stats"]["model_stats"]
    assert (stats["name"], stats["version"]) == ("parts", "1")
    assert stats["inference_count"] >= stats["inference_stats"]["success"]["count"] >= 1
    assert stats["inference_stats"]["success"]["ns"] > 0
    assert said["index"] == [{"name": "parts", "version": "1", "state": "READY", "reason": ""}]


def test_tritons_client_reads_errors_as_the_protocol_says_them(parts):
    said = triton(
        parts,
        INPUTS
        + """
def fails(*given, **more):
    try:
        client.infer(*given, **more)
    except InferenceServerException as error:
        return [error.status(), error.message()]
answer["model"] = fails("other", inputs)
answer["version"] = fails("parts", inputs, model_version="7")
answer["input"] = fails("parts", inputs[1:])
answer["dtype"] = fails("parts", [tensor("ids", ids.astype(np.int32), "INT32"), *inputs[1:]])
answer["shape"] = fails("parts", [tensor("ids", ids[:, :2], "INT64"), *inputs[1:]])
answer["rows"] = fails("parts", [tensor("ids", ids[:2], "INT64"), *inputs[1:]])
answer["finite"] = fails("parts", [inputs[0], tensor("half", half * np.float16("nan"), "FP16"), *inputs[2:]])
answer["output"] = fails("parts", inputs, outputs=[http.InferRequestedOutput("nothing")])
answer["classes"] = fails("parts", inputs, outputs=[http.InferRequestedOutput("total", class_count=2)])
answer["sequence"] = fails("parts", inputs, sequence_id=3)
answer["compressed"] = fails("parts", inputs, request_compression_algorithm="gzip")
try:
    client.get_model_metadata("other")
except InferenceServerException as error:
    answer["metadata"] = [error.status(), error.message()]
try:
    client.load_model("parts")
except InferenceServerException as error:
    answer["load"] = [error.status(), error.message()]
""",
    )
    begins = {name: (status, message) for name, (status, message) in said.items()}
    assert begins["model"][0] == begins["version"][0] == begins["metadata"][0] == begins["load"][0] == "404"
    assert "'parts'" in begins["model"][1]
    for name, word in {
        "input": "'ids' INT64 [-1, 3]",
        "dtype": "'ids' is INT32 [5, 3]",
        "shape": "'ids' is INT64 [5, 2]",
        "rows": "rows",
        "finite": "NaN",
        "output": "'total'",
        "classes": "classification",
        "sequence": "'sequence_id'",
        "compressed": "gzip",
    }.items():
        status, message = begins[name]
        assert (status, word in message) == ("400", True), (name, message)


def test_rows_of_flat_features_and_texts_are_answered_too_with_keys_and_metrics(tmp_path):
    write_keys(tmp_path / "api", "the-key")
    words = ("--model", "net=blobnet-small,small=tiny", *ROWS, "-B", "threads=1", "-B", "slots=4")
    with serving(*words, "--api-key-file", "api", folder=tmp_path) as server:
        said = triton(
            server.url,
            """
assert client.is_server_ready()
rows = np.full((6, 16), 0.25, np.float32)
rows[:, :4] = 1
result = client.infer("net", [tensor("rows", rows, "FP32")], headers={**headers})
answer["policy"], answer["values"] = result.as_numpy("policy").tolist(), result.as_numpy("values").shape
texts = np.array(["one two", "three"], object)
asked = [tensor("text_input", texts, "BYTES", binary) for binary in (True, False)]
given = [client.infer("small", [one], headers={**headers}, parameters={"max_tokens": 4, "temperature": 0.0})
         for one in asked]
answer["texts"] = [[text.decode() for text in one.as_numpy("text_output")] for one in given]
try:
    client.infer("net", [tensor("rows", rows, "FP32")])
except InferenceServerException as error:
    answer["key"] = [error.status(), error.message()]
""",
            "the-key",
        )
        key = bearer("the-key")
        row = [1.0] * 4 + [0.25] * 12
        assert said["values"] == [6, 2]
        expected = server.ask("/v1/evaluate", {"rows": [row]}, key).json["outputs"]["policy"]
        np.testing.assert_allclose(said["policy"][3], np.array(expected[0], np.float32), rtol=1e-5)
        asked = {"prompt": ["one two", "three"], "model": "small", "max_tokens": 4, "temperature": 0}
        choices = server.ask("/v1/completions", asked, key).json["choices"]
        assert said["texts"] == [[one["text"] for one in choices]] * 2
        assert said["key"][0] == "401"
        assert said["key"][1].startswith("no key")
        stats = server.ask("/stats?model=net", headers=key).json
        assert stats["rows"] >= 7


@pytest.mark.thorough  # three processes start
def test_tritons_client_is_served_behind_a_router_with_two_replicas(tmp_path):
    write_keys(tmp_path / "api", "the-key")
    write_keys(tmp_path / "admin", "the-admin-key")
    words = ("--model", "blobnet-small", *ROWS, "-B", "threads=1", "--replicas", 2, "--api-key-file", "api")
    words += ("--admin-key-file", "admin")
    with serving(*words, folder=tmp_path) as server:
        said = triton(
            server.url,
            """
answer["ready"] = [client.is_server_live(), client.is_server_ready(),
                   client.is_model_ready("blobnet-small", headers=headers)]
answer["server"] = client.get_server_metadata()["name"]
answer["inputs"] = client.get_model_metadata("blobnet-small", headers=headers)["inputs"]
rows = np.full((6, 16), 0.25, np.float32)
rows[:, :4] = 1
shapes = [client.infer("blobnet-small", [tensor("rows", rows, "FP32")], headers=headers).as_numpy("values").shape
          for _ in range(8)]
answer["shapes"] = [list(shape) for shape in set(shapes)]
for name, given in (("refused", {}), ("unknown", {"headers": headers})):
    try:
        client.infer("net", [tensor("rows", rows, "FP32")], **given)
    except InferenceServerException as error:
        answer[name] = [error.status(), error.message()]
""",
            "the-key",
        )
        row = {"rows": [[1.0] * 4 + [0.25] * 12]}
        with ThreadPoolExecutor(1) as pool:
            making = pool.submit(server.ask, "/profile", {"seconds": 0.5, "worker": 0}, bearer("the-admin-key"))
            while not making.done():
                assert server.ask("/v1/evaluate", row, bearer("the-key")).status == 200
        stations, operations, _ = names_in(making.result().json)
        assert "forward" in stations
        assert operations
        assert server.ask("/profile", {"worker": 7}, bearer("the-admin-key")).status == 400
        assert said["ready"] == [True] * 3
        assert said["server"] == "gpuinfer"
        assert said["inputs"] == [{"name": "rows", "datatype": "FP32", "shape": [-1, 16]}]
        assert said["shapes"] == [[6, 2]]
        assert said["refused"][0] == "401"
        assert said["unknown"][0] == "404"
        assert "'blobnet-small'" in said["unknown"][1]


# A profile


def names_in(trace: Any) -> tuple[set[str], set[str], set[str]]:
    """Stations, operations of torch and named rows of a Chrome trace."""
    found: dict[str, set[str]] = {"station": set(), "cpu_op": set(), "thread_name": set()}
    for event in trace["traceEvents"]:
        if event.get("cat") in found:
            found[event["cat"]].add(event["name"])
            assert event["ph"] == "X"
            assert event["dur"] >= 0
        elif event["name"] == "thread_name":
            found["thread_name"].add(event["args"]["name"])
    return found["station"], found["cpu_op"], found["thread_name"]


def test_a_run_writes_a_profile_with_its_stations_and_torchs_operations(tmp_path):
    words = ["gpuinfer", "generate", "--model", "tiny", "--prompt", "one", "--num-samples", "4", "--ignore-eos"]
    words += ["--max-new-tokens", "40", "--profile", "profiles", "--no-roofline", "--quiet", "--no-trial"]
    done = forking.run(words, tmp_path, forking.own_environment(), WAIT_S)
    assert done.returncode == 0, done.stderr
    assert "profile: profiles: run.trace.json" in done.stderr
    assert "ERROR" not in done.stderr
    file = tmp_path / "profiles/run.trace.json"
    stations, operations, rows = names_in(json.loads(file.read_text()))
    assert {"forward", "sample"} <= stations
    assert "aten::to" in operations
    assert "gpuinfer: forward 0" in rows
    assert [one.name for one in file.parent.iterdir()] == [file.name]


@pytest.mark.thorough  # three processes start
def test_worker_processes_and_the_central_server_write_profiles_of_their_own(tmp_path):
    words = ["gpuinfer", "selfplay", "--games", "100", "--model", "blobnet-small", "--workers", "2", "--backend"]
    words += ["central", "--profile", "profiles", "--no-roofline", "--quiet", "--no-trial"]
    done = forking.run(words, tmp_path, forking.own_environment(), WAIT_S, workers=True)
    assert done.returncode == 0, done.stderr
    found = {one.name: names_in(json.loads(one.read_text())) for one in (tmp_path / "profiles").iterdir()}
    assert {"server.trace.json", "worker-0.trace.json", "worker-1.trace.json"} <= found.keys()
    stations, operations, _ = found["server.trace.json"]
    assert "forward" in stations
    assert "aten::slice" in operations
    stations, operations, _ = found["worker-0.trace.json"]
    assert "search" in stations
    assert not operations, "a worker of a central server has no torch"


def test_a_server_answers_with_a_profile_to_the_admin_key_alone_one_at_a_time(tmp_path, parts):
    for kind in ("api", "admin"):
        write_keys(tmp_path / kind, f"the-{kind}-key")
    words = ("--model", "blobnet-small", *ROWS, "-B", "threads=1", "--api-key-file", "api", "--admin-key-file", "admin")
    with serving(*words, folder=tmp_path) as server, ThreadPoolExecutor(2) as pool:
        admin, row = bearer("the-admin-key"), {"rows": [[1.0] * 4 + [0.25] * 12]}
        assert server.ask("/profile", {}, bearer("the-api-key")).status == 401
        with pytest.raises(urllib.error.HTTPError, match="403") as refused:  # a server without an admin key
            urllib.request.urlopen(f"{parts}/profile", b"{}", timeout=WAIT_S)
        refused.value.close()
        for wrong in ({"seconds": 0}, {"seconds": 1000}, {"second": 1}, b"["):
            assert server.ask("/profile", wrong, admin).status == 400, wrong
        long = pool.submit(server.ask, "/profile", {"seconds": 2}, admin)
        refused = 200
        while not long.done() and refused == 200:  # once the first has begun, another one has to wait
            server.ask("/v1/evaluate", row, admin)
            refused = server.ask("/profile", {"seconds": 0.01}, admin).status
        while not long.done():
            assert server.ask("/v1/evaluate", row, admin).status == 200
        assert 409 in (refused, long.result().status)
        if long.result().status == 409:  # the short one came first
            long = pool.submit(server.ask, "/profile", {"seconds": 2}, admin)
            while not long.done():
                assert server.ask("/v1/evaluate", row, admin).status == 200
        answer = long.result()
        assert answer.status == 200
        assert "attachment" in answer.headers["content-disposition"]
        stations, operations, _ = names_in(answer.json)
        assert "forward" in stations
        assert operations


# Copies behind compute


def test_the_share_of_copies_hidden_behind_compute_is_in_the_report_and_the_panel(tmp_path):
    """Of a run on the CPU, which copies nothing, it is null; the events of a device are in tests/cuda."""
    words = ["gpuinfer", "generate", "--model", "tiny", "--prompt", "one", "--max-new-tokens", "4", "--no-roofline"]
    words += ["--quiet", "--no-trial", "--json", "report.json"]
    done = forking.run(words, tmp_path, forking.own_environment(), WAIT_S)
    assert done.returncode == 0, done.stderr
    made = json.loads((tmp_path / "report.json").read_text())
    assert made["device"]["copies_hidden"] is None
    process = [  # two processes that share a device, counted on from an earlier moment
        Snapshot(device={"name": "a GPU", "transfers": {"copied_s": copied, "hidden_s": hidden, "batches": 32}})
        for copied, hidden in ((2.0, 1.5), (4.0, 3.0))
    ]
    before = Snapshot(device={"name": "a GPU", "transfers": {"copied_s": 1.0, "hidden_s": 1.0, "batches": 16}})
    device = report.device(since(merge_snapshots(process), before), 1.0)
    assert device["copies_hidden"] == 0.7
    made["device"] = device
    jsonschema.validate(made, report.schema())
    assert any("70% of the time of its copies" in row.text for row in panel_rows(made))


# A list for several models


MIXED = [
    {"id": "1", "prompt": "one", "model": "a"},
    {"id": "2", "prompt": "one", "model": "b"},
    {"id": "3", "prompt": "one", "model": "c"},
    {"id": "4", "prompt": "one"},
    {"custom_id": "5", "url": "/v1/completions", "method": "POST", "body": {"model": "B", "prompt": "five"}},
]


def test_each_row_of_a_file_is_answered_by_the_model_that_it_names(tmp_path):
    """As it answers alone; a row that names none of them fails alone, and is told which there are."""
    (tmp_path / "mixed.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in MIXED))
    (tmp_path / "b.jsonl").write_text(json.dumps({"id": "2", "prompt": "one"}))

    def answers(model: str, file: str, *more: str) -> dict[str, Any]:
        words = ["gpuinfer", "generate", "--model", model, "--input", f"{file}.jsonl", "--output", f"{file}.out.jsonl"]
        words += ["--max-new-tokens", "6", "--no-roofline", "--no-trial", "--quiet", "--json", "report.json", *more]
        done = forking.run(words, tmp_path, forking.own_environment(), WAIT_S)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in (tmp_path / f"{file}.out.jsonl").read_text().splitlines()]
        return {line.get("custom_id", line["id"]): line for line in lines}

    alone = answers("tiny-llada", "b")
    mixed = answers("a=tiny,b=tiny-llada", "mixed")
    assert (mixed["2"]["text"], mixed["2"]["model"]) == (alone["2"]["text"], "b")
    assert mixed["1"]["model"] == "a"
    assert mixed["5"]["response"]["body"]["model"] == "b"
    for id, why in (("3", "'c' is no model here"), ("4", "which model?")):
        assert mixed[id]["error"]["type"] == "bad_row"
        assert why in mixed[id]["error"]["message"]
        assert "'a', 'b'" in mixed[id]["error"]["message"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert sorted(one["rows"] for one in report["models"]) == [1, 2]
    resumed = answers("a=tiny,b=tiny-llada", "mixed", "--resume")
    assert resumed == mixed, "nothing is asked twice"


def test_one_request_holds_requests_for_several_models_and_each_is_answered_for_itself(tmp_path):
    write_keys(tmp_path / "api", "the-key tokens=100000")
    words = ("--model", "small=tiny,net=blobnet-small", *ROWS, "-B", "threads=1", "-B", "slots=4")
    with serving(*words, "--api-key-file", "api", folder=tmp_path) as server:
        key = bearer("the-key")
        row, asked = [1.0] * 4 + [0.25] * 12, {"prompt": "one", "max_tokens": 4, "temperature": 0, "model": "small"}
        requests = [
            {"custom_id": "words", "url": "/v1/completions", "body": asked},
            {"custom_id": "values", "url": "/v1/evaluate", "body": {"x": row, "model": "net"}},
            {"custom_id": "unknown", "url": "/v1/completions", "body": {**asked, "model": "large"}},
            {"custom_id": "other", "url": "/v1/completions", "body": {**asked, "model": "net"}},
            {"custom_id": "stream", "url": "/v1/completions", "body": {**asked, "stream": True}},
            {"custom_id": "nowhere", "url": "/v1/files", "body": {}},
            {"custom_id": "admin", "url": "/v1/update_weights", "body": {}},
        ]
        answer = server.ask("/v1/batch", {"requests": requests}, key)
        assert answer.status == 200
        told = {one["custom_id"]: one["response"] for one in answer.json["data"]}
        assert list(told) == [one["custom_id"] for one in requests]
        statuses = {name: one["status_code"] for name, one in told.items()}
        assert statuses == {
            "words": 200, "values": 200, "unknown": 404, "other": 404, "stream": 400, "nowhere": 404, "admin": 404,
        }  # fmt: skip
        expected = server.ask("/v1/completions", asked, key).json["choices"]
        assert told["words"]["body"]["choices"] == expected
        assert told["values"]["body"] == server.ask("/v1/evaluate", {"x": row, "model": "net"}, key).json
        assert "'small' and 'net'" in told["unknown"]["body"]["error"]["message"].replace(", ", " and ")
        assert "stream" in told["stream"]["body"]["error"]["message"]
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) > 0
        assert server.ask("/v1/batch", {"requests": []}, key).status == 400
        assert server.ask("/v1/batch", {"requests": requests}).status == 401
