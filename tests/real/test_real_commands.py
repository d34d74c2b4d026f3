"""Commands on a real model: `generate`, `verify`, and `serve` with OpenAI's own client."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from forking import own_environment
from serving.replica_servers import SECONDS, serving

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("children_forked")]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
LIMITS = ("-B", "slots=8", "--context", "512")


def run(words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpuinfer", *words]
    return subprocess.run(
        command, cwd=cwd, env=own_environment(), capture_output=True, text=True, timeout=SECONDS, check=False
    )


def test_generate_answers_a_file_of_chats(folder, tmp_path):
    rows = [{"messages": QUESTION}, {"prompt": "The largest ocean on Earth is the"}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model", str(folder), "--input", "chats.jsonl", "--max-new-tokens", "16", "--temperature", "0"]
    done = run(["generate", *words, "--ordered", "--quiet"], tmp_path)
    assert done.returncode == 0, done.stderr
    chat, text = (json.loads(line)["text"] for line in done.stdout.splitlines())
    assert "Paris" in chat
    assert "Pacific" in text


def test_verify_holds(folder, tmp_path):
    brief = ["--limit", "3", "--new-tokens", "6", "--batch-sizes", "1,3", "--json", "report.json", "--quiet"]
    done = run(["verify", "--model", str(folder), *brief], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["holds"], report


class Asking:
    """OpenAI's client, asking the only model of a server."""

    def __init__(self, client: openai.OpenAI) -> None:
        self._client, self._model = client, client.models.list().data[0].id

    def chat(self, **words: Any) -> Any:
        """A chat about the capital of France."""
        settings = {"max_tokens": 24, "temperature": 0, **words}
        return self._client.chat.completions.create(model=self._model, messages=QUESTION, **settings)


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asking]:
    with serving("--model", folder, *LIMITS, folder=tmp_path_factory.mktemp("served")) as server:
        yield Asking(server.openai)


def test_a_served_chat_is_answered_right(served):
    assert "Paris" in served.chat().choices[0].message.content


def test_a_streamed_chat_joins_to_the_same_text(served):
    whole = served.chat().choices[0].message.content
    chunks = served.chat(stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole


def test_a_served_answer_in_a_json_schema_parses(served):
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    answer = served.chat(response_format=form, max_tokens=64)
    assert set(json.loads(answer.choices[0].message.content)) == {"city"}
