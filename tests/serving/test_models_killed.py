"""Several models, each in a process of its own, one of which is killed: asked by OpenAI's own client."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import psutil
import pytest
from replica_servers import SECONDS, Server, serving, until

pytestmark = pytest.mark.thorough

ROWS = ("--features", 8, "--actions", 4, "--seats", 2)
OPTIONS = ("--backend", "central", "-B", "threads=1")
ASKED = {"prompt": "Hello", "max_tokens": 200, "seed": 1, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., tuple[Server, openai.OpenAI]]]:
    with contextlib.ExitStack() as stack:

        def start(*words: object) -> tuple[Server, openai.OpenAI]:
            server = stack.enter_context(serving(*words, *OPTIONS, folder=tmp_path))
            return server, server.openai

        yield start


def processes_of(server: Server) -> list[psutil.Process]:
    """Of the models that are alive, in their order: they are started one after the other."""

    def is_model(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return "spawn_main" in " ".join(process.cmdline())
        return False

    spawned = filter(is_model, psutil.Process(server.process.pid).children())
    return sorted(spawned, key=lambda one: one.create_time())


def states(server: Server) -> dict[str, tuple[bool, bool]]:
    """Of each model, whether it is alive, and ready."""
    return {one["model"]: (one["alive"], one["ready"]) for one in server.ask("/health").json["models"]}


def test_the_others_go_on_and_nobody_waits_for_the_dead(serve):
    server, client = serve("--model", "chat=tiny,small=tiny,net=blobnet-small", *ROWS)
    chat, small, net = processes_of(server)
    chat.suspend()  # so that what it is asked is under way when it is killed
    outcomes: list[openai.APIError] = []

    def ask() -> None:
        try:
            client.completions.create(model="chat", **ASKED)
        except openai.APIError as error:
            outcomes.append(error)

    waiting = threading.Thread(target=ask)
    waiting.start()
    until(lambda: outcomes or server.ask("/health").json["models"][0]["in_flight"], lambda: server.log)
    assert client.completions.create(model="small", **ASKED).choices[0].text
    chat.kill()
    waiting.join(SECONDS)
    (outcome,) = outcomes
    assert isinstance(outcome, openai.InternalServerError)
    assert outcome.status_code == 503
    assert "the model 'chat' behind this server is gone" in outcome.message
    with pytest.raises(openai.InternalServerError, match="gone"):
        client.completions.create(model="chat", **ASKED)
    assert client.completions.create(model="small", **ASKED).choices[0].text

    assert states(server) == {"chat": (False, False), "small": (True, True), "net": (True, True)}
    listed = {one["id"]: one["ready"] for one in server.ask("/v1/models").json["data"]}
    assert listed == {"chat": False, "small": True, "net": True}
    assert numbers(server, "gpuinfer_model_up") == {"chat": 0, "small": 1, "net": 1}
    failed = numbers(server, "gpuinfer_model_errors_total", 'kind="failed"')
    assert (failed["chat"] > 0, failed["small"], failed["net"]) == (True, 0, 0)
    told = "the model chat is gone, and its requests are refused. small, net go on."
    until(lambda: told in server.log, lambda: server.log)

    net.kill()  # while nobody asks
    until(lambda: not states(server)["net"][0], lambda: server.log)
    assert states(server)["small"] == (True, True)

    parts = iter(client.completions.create(model="small", stream=True, **ASKED))
    next(parts)
    small.kill()
    gone = "the model 'small' behind this server is gone. Ask again in a while, or another server."
    outcome = None
    try:
        list(parts)
    except openai.APIError as error:  # or it was over before
        outcome = error.message
    assert outcome in (gone, None)
    until(lambda: not states(server)["small"][0], lambda: server.log)
    assert server.log.count(told) == 1
    assert server.end() == 0


def numbers(server: Server, name: str, label: str = "") -> dict[str, float]:
    """A metric's value by model."""
    lines = [line for line in server.ask("/metrics").body.decode().splitlines() if line.startswith(f"{name}{{")]
    return {line.split('model="')[1].split('"')[0]: float(line.split()[-1]) for line in lines if label in line}


def test_with_restart_nobody_notices(serve):
    server, client = serve("--model", "chat=tiny,small=tiny", "-B", "slots=4", "-B", "restart=true")
    whole = client.completions.create(model="chat", **ASKED).choices[0].text
    parts = iter(client.completions.create(model="chat", stream=True, **ASKED))
    text = next(parts).choices[0].text
    processes_of(server)[0].kill()
    assert text + "".join(choice.text for part in parts for choice in part.choices) == whole
    assert client.completions.create(model="chat", **ASKED).choices[0].text == whole
    assert states(server) == {"chat": (True, True), "small": (True, True)}
