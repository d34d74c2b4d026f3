"""Named keys: what each may ask in a minute, in the log by their names, exchanged while the server runs."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest
from replica_servers import serving, until

TINY = ("--model", "tiny", "-B", "slots=4", "-B", "threads=1", "--api-key-file", "keys", "--log-format", "json")
ASKED = {"prompt": "Hello", "max_tokens": 8, "ignore_eos": True}


def write(folder: Path, *lines: str) -> None:
    """All at once, as whoever rotates keys should."""
    (folder / "next").touch(mode=0o600)
    (folder / "next").write_text("\n".join(lines))
    (folder / "next").rename(folder / "keys")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def keyed(tmp_path):
    """A server with keys of these lines."""
    running = []

    def start(*lines: str, more: tuple[str, ...] = ()):
        write(tmp_path, *lines)
        running.append(serving(*TINY, *more, folder=tmp_path))
        return running[-1].__enter__()

    yield start
    for one in running:
        one.__exit__(None, None, None)


FLEET = ("--replicas", "2")


@pytest.mark.parametrize("more", [(), FLEET], ids=["one server", "a fleet"])
def test_requests_beyond_a_keys_quota_are_refused_as_openai_does(keyed, more):
    server = keyed("first name=alice requests=3", "second name=bob", more=more)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="first", max_retries=0)
    for _ in range(3):
        client.completions.create(model="tiny", prompt="a", max_tokens=1)
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(model="tiny", prompt="a", max_tokens=1)
    assert (refused.value.type, refused.value.code) == ("requests", "rate_limit_exceeded")
    headers = refused.value.response.headers
    assert 1 <= int(headers["retry-after"]) <= 20, "of three a minute one is back in twenty seconds"
    assert headers["x-ratelimit-limit-requests"] == "3"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    answer = server.ask("/v1/completions", ASKED, bearer("second"))
    assert answer.status == 200, "nobody pays for another"
    assert "x-ratelimit-limit-requests" not in answer.headers
    assert server.ask("/v1/models", headers=bearer("first")).status == 200, "looking costs nothing"
    until(lambda: '"bob"' in server.log, lambda: server.log)
    told = [json.loads(line) for line in server.log.splitlines() if '"method"' in line]
    assert [one["status"] for one in told if one.get("key") == "alice" and one["method"] == "POST"] == [200] * 3 + [429]
    assert "'alice' has used its 3 requests a minute" in next(one for one in told if one["status"] == 429)["refused"]
    (bob,) = [one for one in told if one.get("key") == "bob"]
    assert (bob["path"], bob["output_tokens"], bob["model"]) == ("/v1/completions", 8, "tiny")
    assert "first" not in server.log
    assert "second" not in server.log


def test_of_several_router_processes_each_knows_what_was_spent_at_the_others(keyed):
    server = keyed("first name=alice tokens=600", more=("--replicas", "1", "--router-processes", "2"))
    large = {**ASKED, "max_tokens": 300, "n": 4}
    assert server.ask("/v1/completions", large, bearer("first")).status == 200, "two minutes' worth, at one of them"
    one, rounds = json.dumps({"prompt": "a", "max_tokens": 1}), 0

    def refused_everywhere() -> bool:
        """Sixteen connections are with both processes, but for one case in 32,768."""
        nonlocal rounds
        rounds += 1
        others = [server.connect() for _ in range(16)]
        try:
            for other in others:
                other.request("POST", "/v1/completions", one, bearer("first"))
            answers = [other.getresponse() for other in others]
            return {answer.status for answer in answers} == {429}
        finally:
            for other in others:
                other.close()

    until(lambda: refused_everywhere() or rounds == 10)
    assert rounds < 10, "so many would not use up what the other process had"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("more", [(), FLEET], ids=["one server", "a fleet"])
def test_tokens_beyond_a_keys_quota_are_refused_until_they_are_back(keyed, more, stream):
    server = keyed("first name=alice tokens=20", more=more)
    statuses = [server.ask("/v1/completions", {**ASKED, "stream": stream}, bearer("first")).status for _ in range(6)]
    assert statuses[0] == 200
    assert statuses[-1] == 429, "each costs its prompt and eight tokens, and six of them more than came back meanwhile"
    refused = server.ask("/v1/completions", ASKED, bearer("first"))
    assert (refused.error["type"], refused.error["code"]) == ("tokens", "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) >= 1


@pytest.mark.parametrize("more", [(), FLEET], ids=["one server", "a fleet"])
def test_keys_are_exchanged_without_a_restart(keyed, tmp_path, more):
    server = keyed("old name=alice", more=more)
    assert server.ask("/v1/completions", ASKED, bearer("old")).status == 200
    write(tmp_path, "old name=alice", "new name=alice")
    until(lambda: server.ask("/v1/completions", ASKED, bearer("new")).status == 200, lambda: server.log)
    assert server.ask("/v1/completions", ASKED, bearer("old")).status == 200, "both, for a while"
    write(tmp_path, "new name=alice")
    until(lambda: server.ask("/v1/completions", ASKED, bearer("old")).status == 401, lambda: server.log)
    assert server.ask("/v1/completions", ASKED, bearer("new")).status == 200


def test_a_file_that_went_wrong_leaves_the_keys_as_they_were_and_says_so(keyed, tmp_path):
    server = keyed("old name=alice")
    write(tmp_path, "# all gone")
    until(lambda: "has no key" in server.log, lambda: server.log)
    assert "What was read before holds" in server.log
    assert server.ask("/v1/completions", ASKED, bearer("old")).status == 200
    assert server.ask("/v1/completions", ASKED).status == 401
