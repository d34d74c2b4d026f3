"""What servers of this kind have got wrong: bounds, paths for names, templates, URLs, one request that spoils others.

Keys, hosts and routes: test_access. What is no HTTP: tests/http.
"""

from __future__ import annotations

import ast
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replica_servers import serving, until

from gpuinfer.models.row_format import MEDIA_TYPE, rows_to_body

PACKAGE = Path(__file__).parent.parent.parent / "gpuinfer"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def chain(rules: int) -> str:
    """A grammar in which each rule calls the next two."""
    lines = [f'r{n}: r{(n + 1) % rules} r{(n + 2) % rules} | "x"' for n in range(rules)]
    return "\n".join(["start: r0", *lines])


def saying(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **more}


def going_on(**more: Any) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 2, **more}


REFUSED = {
    "a deep schema as text": (COMPLETIONS, going_on(guided_json=json.dumps(nested(200)))),
    "a deep schema under vLLM's name": (COMPLETIONS, going_on(structured_outputs={"json": nested(200)})),
    "a wide schema as text": (COMPLETIONS, going_on(guided_json=json.dumps({"enum": list(range(30_000))}))),
    "a schema that asks for another": (COMPLETIONS, going_on(guided_json={"$ref": "http://127.0.0.1:9/schema.json"})),
    "a schema of a file": (COMPLETIONS, going_on(guided_json={"$ref": "file:///etc/passwd"})),
    "choices without end": (COMPLETIONS, going_on(guided_choice=["a" * 10] * 100_000)),
    "stops without end": (COMPLETIONS, going_on(stop=["a"] * 1000)),
    "log-probabilities of all words": (COMPLETIONS, going_on(logprobs=100_000)),
    "more tokens than there are": (COMPLETIONS, going_on(max_tokens=1 << 40)),
    "biases of all words": (COMPLETIONS, going_on(logit_bias={str(token): 1 for token in range(50_000)})),
    "a chat without end": (CHATS, {"messages": [{"role": "user", "content": "a"}] * 100_000}),
    "an image of another host": (CHATS, saying([{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a"}}])),
    "an image of this host's files": (
        CHATS,
        saying([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]),
    ),
    "a template": (CHATS, saying("a", chat_template="{{ ''.__class__.__mro__ }}")),
    "a template among the arguments": (CHATS, saying("a", chat_template_kwargs={"chat_template": "{{ 1 }}"})),
    "an argument that is no plain value": (CHATS, saying("a", chat_template_kwargs={"enable_thinking": {"a": [1]}})),
    "an adapter by its path": (COMPLETIONS, going_on(adapter="../../secret")),
    "too many answers": ("/predict", {"prompt": "a", "num_samples": 10_000}),
}
NAMES = ["../../../etc/passwd", "/etc/passwd", "tiny/../tiny", "./tiny", "file:///etc/passwd", "tiny\x00", "TINY", ""]
HARD = {
    "a pattern that counts to a million": {"guided_regex": "(a{1,1000}){1,1000}"},
    "a pattern that backtracks": {"guided_regex": "(x+x+)+y" * 50},
    "a pattern with long counts": {"guided_regex": "[a-z]{1,30000}.*[a-z]{1,30000}"},
    "a grammar whose rules all call one another": {"guided_grammar": chain(500)},
    "a grammar that begins with itself": {"guided_grammar": 'start: start start | "a"'},
    "a schema whose parts refer to one another": {
        "guided_json": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 50}}, "$ref": "#/$defs/a"}
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_a_bound_or_is_not_for_clients_is_refused_by_name(tiny, case):
    path, body = REFUSED[case]
    answer = tiny.ask(path, body)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
    assert len(answer.body) < 1000, "an answer does not repeat what was too long"


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_named_and_never_a_path(tiny, name):
    answer = tiny.ask(COMPLETIONS, going_on(model=name))
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    assert "passwd" not in answer.error["message"]


@pytest.mark.parametrize("case", HARD)
def test_a_form_that_is_hard_to_build_ends_and_keeps_nobody_waiting(tiny, case):
    """Its own answer, or why it cannot be had; others are answered meanwhile, and the server is well."""
    statuses: list[int] = []
    hard = threading.Thread(target=lambda: statuses.append(tiny.ask(COMPLETIONS, going_on(**HARD[case])).status))
    hard.start()
    assert tiny.ask(COMPLETIONS, going_on()).status == 200
    until(lambda: not hard.is_alive())
    assert statuses in ([200], [400])
    assert tiny.ask("/health").json["status"] == "ready"


def test_memory_is_not_taken_for_what_is_only_asked_for(tiny):
    """`max_tokens` is a wish: a thousand million of them cost as much as the context has."""
    answer = tiny.ask(COMPLETIONS, going_on(max_tokens=1 << 30, stop="e"))
    assert answer.status == 200
    assert answer.json["usage"]["completion_tokens"] <= 4096


def test_a_value_that_is_no_number_spoils_nobody_elses_answer(rows):
    bad = rows_to_body(np.full((1, 16), np.nan, np.float32))
    together = beside(rows, bad, {"Content-Type": MEDIA_TYPE})
    assert set(together) == {("good", 200), ("bad", 400)}


def test_a_row_at_which_the_model_fails_fails_alone(tmp_path):
    (tmp_path / "poisoned.py").write_text(POISONED)
    words = ("--model", "poisoned:make", "--features", 16, "-B", "threads=1")
    here = {"PYTHONPATH": f"{tmp_path}:{PACKAGE.parent}"}
    with serving(*words, folder=tmp_path, environment=here) as server:
        together = beside(server, json.dumps({"x": [13.0] * 16}).encode(), {})
        assert set(together) == {("good", 200), ("bad", 500)}
        assert "thirteen" not in server.ask("/v1/evaluate", {"x": [13.0] * 16}).error["message"], "nothing internal"
        assert server.ask("/health").json["status"] == "ready"


POISONED = """
import torch


class Model(torch.nn.Module):
    def forward(self, rows):
        if (rows[:, 0] == 13).any():
            raise RuntimeError("thirteen")
        return rows.sum(1, keepdim=True)


def make(**sizes):
    return Model()
"""


def beside(server: Any, bad: bytes, headers: dict[str, str]) -> Counter[tuple[str, int]]:
    """How requests fare that many clients send at once, two of whom send `bad`: they share batches."""
    found: Counter[tuple[str, int]] = Counter()
    good = json.dumps({"x": [0.5] * 16}).encode()

    def ask(kind: str, body: bytes, headers: dict[str, str]) -> None:
        for _ in range(40):
            found[kind, server.ask("/v1/evaluate", body, headers).status] += 1

    threads = [threading.Thread(target=ask, args=("good", good, {})) for _ in range(6)]
    threads += [threading.Thread(target=ask, args=("bad", bad, headers)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


STRANGERS = ("http/", "serving/", "fleet/", "models/row_format.py")  # what reads bytes of strangers


def test_no_guard_goes_away_and_no_shell_is_asked():
    """An `assert` is gone under -O: it may only tell the type checker something, and not where strangers' bytes are
    read. A shell interprets what a name may hold.
    """
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assert):
                test = ast.unparse(node.test)
                assert test.endswith(" is not None") or test.startswith("isinstance("), f"{name}:{node.lineno}: {test}"
                assert not name.startswith(STRANGERS), f"{name}:{node.lineno}: use if … raise"
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "os.system", "os.popen"), f"{name}:{node.lineno}: {called}"
                assert not [word for word in node.keywords if word.arg == "shell"], f"{name}:{node.lineno}: a shell"


def test_keys_are_compared_in_constant_time():
    """Wherever a bearer or a key of ours is checked."""
    for name in ("http/access.py", "fleet/control.py"):
        assert "compare_digest" in (PACKAGE / name).read_text(), name
    for name in ("http/route_table.py", "fleet/router/client_connection.py"):
        assert ".check_key(" in (PACKAGE / name).read_text(), name
