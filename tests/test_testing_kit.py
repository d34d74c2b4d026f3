"""Each promise, broken on purpose by a plugin that is otherwise in order: the kit must name that promise."""

import asyncio
import math
import random
import re
import threading
import time

import numpy as np
import pytest
from msgspec import structs
from pydantic import BaseModel

from gpuinfer import api
from gpuinfer.api import Backend, Event, Limits, Progress, Strategy, Workload
from gpuinfer.cli import flags
from gpuinfer.errors import BadPrompt, UsageError
from gpuinfer.generation import Completion, Generation, Prompt, Sampling
from gpuinfer.testing import assert_ok, check_backend, check_strategy, check_workload
from gpuinfer.testing.fakes import made_up, parts_of_answer
from gpuinfer.testing.findings import reserved_names


def but(base, **members):
    """The same class with other members."""
    return type("But", (base,), members)


class Double(Backend):
    """A backend in order: twice its input."""

    limits = Limits(max_rows=16)

    async def infer(self, batch):
        return self.answers([2 * request.payload for request in batch])

    def answers(self, right):
        return right


class Streaming(Double):
    """In order too, though its answers come last request first."""

    async def stream(self, batch):
        for request in reversed(batch):
            yield Event(request, "a part", last=False)
            yield Event(request, 2 * request.payload)


class Overstated(Double):
    async def infer(self, batch):
        if sum(request.rows for request in batch) > 12:
            raise MemoryError
        return await super().infer(batch)


class Words(Double):
    async def infer(self, batch):
        return [request.payload.upper() for request in batch]


class Hanging(Double):
    async def infer(self, batch):
        await asyncio.Event().wait()


async def fail(self, *given):
    raise OSError("no device")


class Blocking(Double):
    async def infer(self, batch):
        time.sleep(2.0)  # noqa: ASYNC251 (the fault itself)
        return await super().infer(batch)


class SilentOptions(Double):
    class Options(BaseModel):
        speed: float = 1.0


class Hiding(Double):
    class Options(api.Options):
        device: str = "cpu"


class Poet(Double):
    """In order: of text alone."""

    serves = ("text",)

    async def infer(self, batch):
        return [self.answer(request.payload) for request in batch]

    def answer(self, prompt):
        """The alphabet, from a letter that the key gives, or the draw; after what had begun."""
        if prompt.adapter is not None or prompt.text is None or prompt.sampling.stop_token_ids:
            return BadPrompt("a poet goes on with texts, without adapters and up to a string.")
        return self.verse(prompt, prompt.sampling.stop)

    def verse(self, prompt, stop):
        verses = [
            self.letters(prompt, prompt.begun[number] if prompt.begun else (), stop) for number in range(prompt.samples)
        ]
        return Generation(completions=tuple(verses), prompt_tokens=1)

    def letters(self, prompt, begun, stop):
        told = prompt.sampling
        first = random.Random(f"{told.seed} {prompt.key}").randrange(26) if told.temperature else ord(prompt.key[-1])
        more = [ord("a") + (first + at) % 26 for at in range(len(begun), told.max_tokens)]
        text, found, _ = "".join(map(chr, [*begun, *more])).partition(*stop or ("\n",))
        return Completion(
            text=text,
            tokens=tuple(map(ord, text)),
            finish_reason="stop" if found else "length",
            stop_reason=found or None,
        )


class Reciting(Poet):
    """In order: gives its answers out letter by letter."""

    async def stream(self, batch):
        for request in batch:
            answer = self.answer(request.payload)
            if isinstance(answer, Generation):
                for part in self.parts(request, answer):
                    yield Event(request, part, last=False)
                yield Event(request, answer)
            else:
                yield Event(request, error=answer)

    def parts(self, request, answer):
        return parts_of_answer(answer, request.payload.begun) if request.parts else ()


class Loud(Poet):
    """In order: says nothing of itself, whatever it is asked for."""

    def answer(self, prompt):
        return made_up(prompt) if prompt.sampling.temperature == 0 and plain(prompt) else BadPrompt("too much to ask.")


def plain(prompt):
    told = prompt.sampling
    return not (prompt.text is None or prompt.adapter or prompt.begun or told.stop or told.stop_token_ids)


def ignoring(**ignored):
    """A poet to whom some of what a prompt or its sampling says is as here."""
    of_sampling = {name: ignored.pop(name) for name in tuple(ignored) if name in Sampling.__struct_fields__}

    def answer(self, prompt):
        sampling = structs.replace(prompt.sampling, **of_sampling)
        return Poet.answer(self, structs.replace(prompt, sampling=sampling, **ignored))

    return type("Ignoring", (Poet,), {"answer": answer})


class Chatless(Poet):
    """Answers a chat as if nothing had been said."""

    def answer(self, prompt):
        return super().answer(structs.replace(prompt, text=prompt.text or "", messages=None, tokens=None))


class Tokenless(Poet):
    def letters(self, prompt, begun, stop):
        return structs.replace(super().letters(prompt, begun, stop), tokens=())


def true_parts(self, request, answer):
    return list(Reciting.parts(self, request, answer))


class Deaf(Reciting):
    """Goes on for ever once its reader has left."""

    left = False

    async def stream(self, batch):
        async for event in super().stream(batch):
            if self.left:
                await asyncio.Event().wait()
            yield event

    def cancel(self, request):
        self.left = request.parts


class Versioned(Poet):
    """In order: it has the same weights under any name."""

    version = ""

    def __init__(self, setup=None, /, **options):
        super().__init__(setup or api.Setup(model=api.ModelSpec(".", kind="text")), **options)

    async def update(self, version, weights, *, adapter=None, drain=True):
        if weights != ".":
            raise UsageError("no such weights. Name others.")
        self.version = version

    def answer(self, prompt):
        found = super().answer(prompt)
        if isinstance(found, BadPrompt):
            return found
        spans = ((0, self.version),)
        drawn = tuple(structs.replace(one, versions=spans) for one in found.completions)
        return structs.replace(found, completions=drawn, versions=(self.version,))


class Unspanned(Versioned):
    def answer(self, prompt):
        return structs.replace(Poet.answer(self, prompt), versions=(self.version,))


class OldCache(Versioned):
    def answer(self, prompt):
        found = super().answer(prompt)
        return found if isinstance(found, BadPrompt) else structs.replace(found, cached_tokens=3)


async def take_any(self, version, weights, *, adapter=None, drain=True):
    self.version = version


class Overlong(Poet):
    async def infer(self, batch):
        return [made_up(structs.replace(one.payload, sampling=Sampling(max_tokens=9))) for one in batch]


class Telling(Double):
    def device(self):
        return {"name": "card", "utilisation": 0.5, "tokens": {"input": 1}}


class StreamStops(Streaming):
    async def stream(self, batch):
        yield Event(batch[0], 2 * batch[0].payload)


async def odd_stats(self):
    return {"requets": 1}


class Generating(Streaming):
    """In order, with slots: one forward step answers whatever was admitted."""

    limits = Limits(max_rows=16, in_flight=16, slots=16)

    async def start(self, context):
        self.stepped = context.stepped

    async def stream(self, batch):
        self.tell(sum(request.rows for request in batch))
        async for event in super().stream(batch):
            yield event

    def tell(self, rows):
        self.stepped(rows, 0.001)


class ElsewhereTold(Generating):
    def tell(self, rows):
        thread = threading.Thread(target=self.stepped, args=(rows, 0.001))
        thread.start()
        thread.join()


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(Double, id="plain"),
        pytest.param(Streaming, id="streaming"),
        pytest.param(Generating, id="with slots"),
        pytest.param(Poet, id="of text"),
        pytest.param(Loud, id="of text that refuses what it cannot"),
        pytest.param(Reciting, id="that gives its answers out in parts"),
        pytest.param(Versioned, id="whose weights can be changed"),
        pytest.param(Telling, id="that knows its device"),
    ],
)
def test_a_backend_in_order_passes(backend):
    assert_ok(check_backend(backend))


@pytest.mark.parametrize(
    ("backend", "promise"),
    [
        pytest.param(
            but(Double, answers=lambda self, right: right[: max(1, len(right) - 1)]),
            "answers each request with its own rows",
            id="one result too few",
        ),
        pytest.param(but(Double, answers=lambda self, right: right[::-1]), "answers in order", id="changed order"),
        pytest.param(
            but(Double, answers=lambda self, right: [one[:1] for one in right]),
            "answers each request with its own rows",
            id="rows missing",
        ),
        pytest.param(
            but(Double, answers=lambda self, right: [np.full_like(one, math.nan) for one in right]),
            "answers each request with its own rows",
            id="NaN",
        ),
        pytest.param(Overstated, "takes a batch as wide as its limits say", id="limits overstated"),
        pytest.param(Hanging, "answers each request with its own rows", id="hangs"),
        pytest.param(but(Double, start=fail), "starts", id="does not start"),
        pytest.param(but(Double, limits=None), "starts", id="no limits"),
        pytest.param(
            but(Double, connect=lambda self: lambda: self),
            "connects from another process",
            id="connector that cannot be pickled",
        ),
        pytest.param(but(Double, close=fail), "closes", id="close raises"),
        pytest.param(
            but(Double, cancel=lambda self, request: {}[request]), "lets a request be cancelled", id="cancel raises"
        ),
        pytest.param(SilentOptions, "refuses unknown options", id="options dropped in silence"),
        pytest.param(StreamStops, "answers each request with its own rows", id="stream ends early"),
        pytest.param(
            but(Generating, tell=lambda self, rows: None), "tells its forward steps", id="steps that are not told"
        ),
        pytest.param(
            but(Generating, tell=lambda self, rows: self.stepped(17, 0.001)),
            "tells its forward steps",
            id="a step of more rows than slots",
        ),
        pytest.param(ElsewhereTold, "tells its forward steps", id="a step told in another thread"),
        pytest.param(but(Double, stats=odd_stats), "tells its measurements", id="stats that are no snapshot"),
        pytest.param(Hiding, "has options of its own names", id="an option named like a setting"),
        pytest.param(but(Double, serves="text"), "says what it serves", id="serves what is no kind"),
        pytest.param(
            but(Double, serves=("text",)), "answers each request with its own rows", id="a prompt that is echoed"
        ),
        pytest.param(
            but(Poet, answer=lambda self, prompt: made_up(prompt)),
            "refuses an adapter that it has not",
            id="an adapter that is not there",
        ),
        pytest.param(
            but(Reciting, parts=lambda self, request, answer: parts_of_answer(answer)),
            "gives parts that make the answer",
            id="parts that nobody reads",
        ),
        pytest.param(
            but(Reciting, parts=lambda *given: true_parts(*given)[::-1]),
            "gives parts that make the answer",
            id="parts in another order",
        ),
        pytest.param(
            but(Reciting, parts=lambda *given: true_parts(*given)[:-1]),
            "gives parts that make the answer",
            id="no last part",
        ),
        pytest.param(
            but(
                Reciting, parts=lambda self, request, answer: true_parts(self, request, self.verse(request.payload, ()))
            ),
            "gives parts that make the answer",
            id="parts beyond a stop string",
        ),
        pytest.param(
            but(Reciting, parts=lambda self, request, answer: ["la"] if request.parts else ()),
            "gives parts that make the answer",
            id="parts that are none",
        ),
        pytest.param(
            but(Reciting, parts=lambda self, request, answer: parts_of_answer(answer) if request.parts else ()),
            "goes on with an answer that has begun",
            id="begins again",
        ),
        pytest.param(ignoring(begun=()), "goes on with an answer that has begun", id="ignores what has begun"),
        pytest.param(Tokenless, "answers each request with its own rows", id="answers without tokens"),
        pytest.param(ignoring(seed=1), "draws as a prompt tells it", id="ignores the seed"),
        pytest.param(
            ignoring(temperature=0.0), "draws as a prompt tells it", id="ignores the temperature, and never draws"
        ),
        pytest.param(
            ignoring(temperature=1.0), "draws as a prompt tells it", id="ignores the temperature, and always draws"
        ),
        pytest.param(ignoring(stop=()), "stops where a prompt tells it", id="ignores stop strings"),
        pytest.param(ignoring(stop_token_ids=()), "stops where a prompt tells it", id="ignores stop tokens"),
        pytest.param(Chatless, "reads chats and tokens, or refuses them", id="ignores chats"),
        pytest.param(Deaf, "lets a reader leave", id="hangs when its reader leaves"),
        pytest.param(
            but(Versioned, answer=Poet.answer), "changes its weights", id="answers that do not name their weights"
        ),
        pytest.param(Unspanned, "changes its weights", id="completions that do not name their weights"),
        pytest.param(OldCache, "changes its weights", id="a cache of old weights"),
        pytest.param(but(Versioned, update=take_any), "changes its weights", id="weights that are not there"),
        pytest.param(Overlong, "answers each request with its own rows", id="more tokens than were wanted"),
        pytest.param(
            but(Double, device=lambda self: "a card"), "tells its measurements", id="a device that is no dict"
        ),
        pytest.param(
            but(Double, device=lambda self: {"utilisation": 87}), "tells its measurements", id="utilisation in per cent"
        ),
        pytest.param(
            but(Double, device=lambda self: {"allocated_mb": "12 MB"}), "tells its measurements", id="memory in words"
        ),
        pytest.param(
            but(Double, device=lambda self: {"model": {"at": object()}}),
            "tells its measurements",
            id="facts that are not plain",
        ),
        pytest.param(lambda: object(), "builds", id="no backend at all"),
    ],
)
def test_a_broken_backend_is_caught(backend, promise):
    assert promise in broken(check_backend(backend, timeout_s=1.0))


def test_a_backend_that_blocks_the_event_loop_is_caught_and_the_check_is_named():
    findings = check_backend(Blocking, timeout_s=0.5)
    assert broken(findings) == {"never blocks"}
    assert "'answers each request with its own rows' did not come back within 0.5 s" in findings[-1].detail


def test_after_a_check_that_hangs_those_like_it_are_not_tried():
    findings = check_backend(Hanging, timeout_s=1.0)
    assert broken(findings) == {"answers each request with its own rows"}
    skipped = [finding for finding in findings if finding.skipped]
    assert skipped[0].name == "answers in order"
    assert "'answers each request with its own rows' did not end" in skipped[0].detail
    assert findings[-1].name == "closes"


def test_payloads_can_be_the_backends_own():
    assert_ok(check_backend(Words, make_payload=lambda rows, seed: f"word {seed}"))


class Eager(Strategy):
    """A strategy in order: never waits."""

    def cut_at(self, queue):
        return queue.now


class Spoiled(Eager):
    """In order until it has learned from a batch that took no time."""

    rows = 1

    def observe(self, batch):
        self.rows = 0 if batch.seconds == 0.0 else 1

    def select(self, queue):
        return queue.waiting[: self.rows]


def test_a_strategy_in_order_passes():
    assert_ok(check_strategy(Eager))


@pytest.mark.parametrize(
    ("strategy", "promise"),
    [
        pytest.param(
            but(Eager, cut_at=lambda self, queue: queue.waiting[1].arrived),
            "answers cut_at with a time",
            id="reads beyond the last request",
        ),
        pytest.param(
            but(Eager, cut_at=lambda self, queue: math.nan), "answers cut_at with a time", id="NaN for a time"
        ),
        pytest.param(
            but(Eager, select=lambda self, queue: list(queue.waiting)),
            "selects waiting requests within the limits",
            id="too much",
        ),
        pytest.param(
            but(Eager, select=lambda self, queue: []), "selects waiting requests within the limits", id="nothing"
        ),
        pytest.param(
            but(Eager, select=lambda self, queue: [queue.waiting[0]] * 2),
            "selects waiting requests within the limits",
            id="one request twice",
        ),
        pytest.param(
            but(Eager, select=lambda self, queue: [api.Request("mine")]),
            "selects waiting requests within the limits",
            id="a request of its own",
        ),
        pytest.param(
            but(Eager, reason=lambda self, queue: "because"),
            "selects waiting requests within the limits",
            id="a reason that is none",
        ),
        pytest.param(
            but(Eager, cut_at=lambda self, queue: queue.now if queue.rows >= queue.limits.max_rows else math.inf),
            "cuts in the end",
            id="waits for arrivals that may not come",
        ),
        pytest.param(
            but(Eager, cut_at=lambda self, queue: queue.now + 1.0), "cuts in the end", id="always a little later"
        ),
        pytest.param(
            but(Eager, cut_at=lambda self, queue: queue.now + 3600.0), "cuts in the end", id="always in an hour"
        ),
        pytest.param(
            but(Eager, shed=lambda self, queue, arriving: [arriving]),
            "sheds only what waits",
            id="sheds what does not wait",
        ),
        pytest.param(but(Eager, shed=lambda self, queue, arriving: 1 / 0), "sheds only what waits", id="shed raises"),
        pytest.param(
            but(Eager, retry_after=lambda self, queue, request: math.inf),
            "tells when to try again",
            id="try again never",
        ),
        pytest.param(but(Eager, notices="one sentence"), "says its notices in words", id="notices that are one text"),
        pytest.param(
            but(Eager, cut_at=lambda self, queue: queue.now + random.random()),
            "answers the same queue the same way",
            id="rolls dice",
        ),
        pytest.param(but(Eager, cut_at=lambda self, queue: time.monotonic()), "reads no clock", id="reads a clock"),
        pytest.param(but(Eager, observe=lambda self, batch: 1 / 0), "observes", id="observe raises"),
        pytest.param(Spoiled, "observes", id="breaks by what it learns"),
        pytest.param(lambda: object(), "builds", id="no strategy at all"),
    ],
)
def test_a_broken_strategy_is_caught(strategy, promise):
    assert promise in broken(check_strategy(strategy))


def test_a_strategy_that_starves_requests_is_caught_under_load():
    """Good with any queue but those of the load: it cannot stand narrow backends that take two batches at once."""
    shunning = but(Eager, cut_at=lambda self, queue: math.inf if queue.limits.in_flight == 2 else queue.now)
    assert broken(check_strategy(shunning)) == {"serves every request of a random load"}


def test_a_strategy_that_never_answers_is_caught():
    looping = but(Eager, cut_at=lambda self, queue: time.sleep(2.0))
    assert broken(check_strategy(looping, timeout_s=0.5)) == {"never blocks"}


def test_what_a_plugin_raises_is_said_with_the_case():
    findings = {
        finding.name: finding.detail for finding in check_strategy(but(Eager, cut_at=lambda self, queue: 1 / 0))
    }
    assert "with a lone request: " in findings["answers cut_at with a time"]
    assert "ZeroDivisionError" in findings["answers cut_at with a time"]


class Sums(Workload):
    """A workload in order."""

    async def run(self, infer):
        with infer.client() as me:
            for done in range(1, 6):
                await infer(done, client=me)
                yield Progress(done, total=5)
                if infer.stopping.is_set():
                    return


class Endless(Sums):
    async def run(self, infer):
        done = 0
        while True:
            await infer(done)
            await asyncio.sleep(0.001)  # deaf, but it leaves the event loop to others
            done += 1
            yield Progress(done)


class Backwards(Sums):
    async def run(self, infer):
        for done in (3, 2):
            await infer(done)
            yield Progress(done)


class Mute(Sums):
    async def run(self, infer):
        await infer(1)
        for nothing in ():
            yield nothing


class OddModel(Sums):
    def model(self):
        return "blobnet"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("workload", "promise"),
    [
        pytest.param(Endless, "ends soon when asked to stop", id="deaf to stopping"),
        pytest.param(Backwards, "runs and tells how far it is", id="progress that shrinks"),
        pytest.param(Mute, "runs and tells how far it is", id="no progress at all"),
        pytest.param(OddModel, "names its model and processes", id="a model that is no spec"),
        pytest.param(lambda: object(), "builds", id="no workload at all"),
    ],
)
def test_a_broken_workload_is_caught(workload, promise):
    # time enough for a machine that stalls: one that blocks would be told instead
    assert promise in broken(check_workload(workload, answer=lambda request: request.payload, timeout_s=2.0))


class Raises(Sums):
    async def run(self, infer):
        yield Progress(0)
        raise OSError("no disk")


class Stuck(Sums):
    async def run(self, infer):
        yield Progress(0)
        await asyncio.Event().wait()


class Prompts(Sums):
    """Of a model of text, which a stand-in answers for."""

    def model(self):
        return api.ModelSpec("no-such-folder", kind="text")

    async def run(self, infer):
        answer = await infer(Prompt(text="once", sampling=Sampling(max_tokens=3)))
        yield Progress(len(answer.completions[0].tokens), 3)


@pytest.mark.parametrize("workload", [Sums, Prompts])
def test_a_workload_is_run_for_real(workload):
    assert_ok(check_workload(workload))


@pytest.mark.parametrize(
    ("workload", "timeout_s", "said"),
    [
        pytest.param(Raises, 30.0, "no disk", id="raises"),
        pytest.param(Stuck, 0.5, "asked to stop, it went on for 0.5 s|did not end within", id="hangs"),
        pytest.param(Endless, 0.5, "asked to stop, it went on for 0.5 s|did not end within", id="deaf to stopping"),
        pytest.param(Mute, 30.0, "it yielded no Progress", id="says nothing"),
    ],
)
def test_what_goes_wrong_in_a_real_run_is_told(workload, timeout_s, said):
    findings = {finding.name: finding for finding in check_workload(workload, timeout_s=timeout_s)}
    assert not findings["runs and tells how far it is"].ok
    assert re.search(said, findings["runs and tells how far it is"].detail)


def broken(findings):
    return {finding.name for finding in findings if not finding.ok}


def test_the_names_that_no_option_may_have_are_the_flags_of_every_run():
    assert reserved_names() == {*flags.common_flags(), "help"}
