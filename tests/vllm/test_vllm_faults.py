"""What becomes of requests, adapters and processes when parts of vLLM die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from msgspec import structs
from peft import adapter
from vllm_held import TINY

from gpuinfer.api import BackendContext
from gpuinfer.backends.vllm import Vllm
from gpuinfer.errors import GpuinferError
from gpuinfer.generation import Part, Prompt, Sampling
from gpuinfer.strategies.dynamic import Dynamic

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
LIMIT_S = 60.0
LONG = Sampling(max_tokens=400, temperature=0.0, ignore_eos=True)


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=LIMIT_S)[1]


def test_a_killed_engine_is_replaced_and_answers_what_was_asked_with_the_adapters_that_it_had(held, tmp_path):
    """The core first, then the whole process; a reader who reads along goes on where it was."""
    held.update("v9", adapter(tmp_path / "a", 9), adapter="mended")
    plain = Prompt(text="what was asked", sampling=LONG)
    adapted = structs.replace(plain, adapter="mended")
    whole, other = held.asked(plain, adapted)
    for name in ("EngineCore", ""):
        for _ in range(20):  # until there is something to ask anew: a machine that is held up may look too late
            parts = list[Part]()
            asked = [held.start(held.ask(prompt)) for prompt in (plain, adapted)]
            read = held.start(held.ask(plain, parts))
            end = time.monotonic() + LIMIT_S
            while not parts and time.monotonic() < end:
                time.sleep(0.01)
            before = held.processes
            victim = held.named(name) if name else before[0]
            if not (read.done() or any(one.done() for one in asked)):
                break
        victim.send_signal(signal.SIGKILL)
        answers = [one.result(600) for one in asked]
        assert [one.completions[0].tokens for one in answers] == [one.completions[0].tokens for one in (whole, other)]
        assert answers[1].versions == ("mended@v9",)
        assert read.result(600).completions[0].tokens == whole.completions[0].tokens
        assert sum((part.tokens for part in parts), ()) == whole.completions[0].tokens
        held.asked(Prompt(text="a"))  # by the new one, also where all had been answered before the old one went
        assert gone(before)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"engine_args": {"max_num_seq": 3}},
            r"no engine argument of vLLM named 'max_num_seq'.*Did you mean 'max_num_seqs'",
        ),
        ({"max_model_len": 1 << 20}, r"vLLM does not serve .*max_model_len"),
        ({"start_timeout": 0.5}, r"did not come up within 0\.5 s"),
    ],
)
def test_an_engine_that_cannot_start_says_why(options, why):
    async def started() -> None:
        backend = Vllm(TINY, **options)
        try:
            await backend.start(BackendContext(strategy=Dynamic(TINY)))
        finally:
            await backend.close()

    with pytest.raises(GpuinferError, match=why):
        asyncio.run(started())
    assert not [one for one in psutil.Process().children(recursive=True) if "gpuinfer server" in one.name()]


def test_nothing_is_left_when_whoever_started_it_is_killed(tmp_path):
    program = tmp_path / "starts.py"
    program.write_text(
        "import sys\n"
        f"sys.path[:0] = {[str(Path(__file__).parent)]}\n"
        "if __name__ == '__main__':\n"
        "    from vllm_held import Held\n"
        "    held = Held()\n"
        "    print(*(one.pid for one in held.processes), flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) >= 3
        processes = [psutil.Process(pid) for pid in pids]
        os.kill(processes[0].pid, signal.SIGKILL)  # together with its owner: nobody is left to see to the others
        owner.kill()
    assert gone(processes)
