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


class Silent(BaseModel):
    speed: float = 1.0


class Hiding(api.Options):
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


def parts_beyond(self, request, answer):
    return true_parts(self, request, self.verse(request.payload, ()))


def parts_again(self, request, answer):
    return parts_of_answer(answer) if request.parts else ()


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


def unspanned(self, prompt):
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


def tell_elsewhere(self, rows):
    thread = threading.Thread(target=self.stepped, args=(rows, 0.001))
    thread.start()
    thread.join()


IN_ORDER = [Double, Streaming, Generating, Poet, Loud, Reciting, Versioned, Telling]


@pytest.mark.parametrize("backend", IN_ORDER, ids=lambda one: one.__name__)
def test_a_backend_in_order_passes(backend):
    assert_ok(check_backend(backend))


OWN_ROWS, PARTS, BEGUN = (
    "answers each request with its own rows",
    "gives parts that make the answer",
    "goes on with an answer that has begun",
)
STEPS, DRAWS, STOPS = "tells its forward steps", "draws as a prompt tells it", "stops where a prompt tells it"
MEASURES, WEIGHTS = "tells its measurements", "changes its weights"
BROKEN_BACKENDS = {
    "one result too few": (but(Double, answers=lambda self, right: right[: max(1, len(right) - 1)]), OWN_ROWS),
    "changed order": (but(Double, answers=lambda self, right: right[::-1]), "answers in order"),
    "rows missing": (but(Double, answers=lambda self, right: [one[:1] for one in right]), OWN_ROWS),
    "NaN": (but(Double, answers=lambda self, right: [np.full_like(one, math.nan) for one in right]), OWN_ROWS),
    "limits overstated": (Overstated, "takes a batch as wide as its limits say"),
    "hangs": (Hanging, OWN_ROWS),
    "does not start": (but(Double, start=fail), "starts"),
    "no limits": (but(Double, limits=None), "starts"),
    "no pickle": (but(Double, connect=lambda self: lambda: self), "connects from another process"),
    "close raises": (but(Double, close=fail), "closes"),
    "cancel raises": (but(Double, cancel=lambda self, request: {}[request]), "lets a request be cancelled"),
    "options dropped in silence": (but(Double, Options=Silent), "refuses unknown options"),
    "an option named like a setting": (but(Double, Options=Hiding), "has options of its own names"),
    "stream ends early": (StreamStops, OWN_ROWS),
    "steps that are not told": (but(Generating, tell=lambda self, rows: None), STEPS),
    "a step of more rows than slots": (but(Generating, tell=lambda self, rows: self.stepped(17, 0.001)), STEPS),
    "a step told in another thread": (but(Generating, tell=tell_elsewhere), STEPS),
    "stats that are no snapshot": (but(Double, stats=odd_stats), MEASURES),
    "serves what is no kind": (but(Double, serves="text"), "says what it serves"),
    "a prompt that is echoed": (but(Double, serves=("text",)), OWN_ROWS),
    "no such adapter": (but(Poet, answer=lambda self, prompt: made_up(prompt)), "refuses an adapter that it has not"),
    "parts that nobody reads": (but(Reciting, parts=lambda self, request, answer: parts_of_answer(answer)), PARTS),
    "parts in another order": (but(Reciting, parts=lambda *given: true_parts(*given)[::-1]), PARTS),
    "no last part": (but(Reciting, parts=lambda *given: true_parts(*given)[:-1]), PARTS),
    "parts beyond a stop string": (but(Reciting, parts=parts_beyond), PARTS),
    "parts that are none": (but(Reciting, parts=lambda self, request, answer: ["la"] * request.parts), PARTS),
    "begins again": (but(Reciting, parts=parts_again), BEGUN),
    "ignores what has begun": (ignoring(begun=()), BEGUN),
    "answers without tokens": (Tokenless, OWN_ROWS),
    "ignores the seed": (ignoring(seed=1), DRAWS),
    "never draws": (ignoring(temperature=0.0), DRAWS),
    "always draws": (ignoring(temperature=1.0), DRAWS),
    "ignores stop strings": (ignoring(stop=()), STOPS),
    "ignores stop tokens": (ignoring(stop_token_ids=()), STOPS),
    "ignores chats": (Chatless, "reads chats and tokens, or refuses them"),
    "hangs when its reader leaves": (Deaf, "lets a reader leave"),
    "answers that do not name their weights": (but(Versioned, answer=Poet.answer), WEIGHTS),
    "completions that do not": (but(Versioned, answer=unspanned), WEIGHTS),
    "a cache of old weights": (OldCache, WEIGHTS),
    "weights that are not there": (but(Versioned, update=take_any), WEIGHTS),
    "more tokens than were wanted": (Overlong, OWN_ROWS),
    "a device that is no dict": (but(Double, device=lambda self: "a card"), MEASURES),
    "utilisation in per cent": (but(Double, device=lambda self: {"utilisation": 87}), MEASURES),
    "memory in words": (but(Double, device=lambda self: {"allocated_mb": "12 MB"}), MEASURES),
    "facts that are not plain": (but(Double, device=lambda self: {"model": {"at": object()}}), MEASURES),
    "no backend at all": (object, "builds"),
}


@pytest.mark.parametrize(("backend", "promise"), BROKEN_BACKENDS.values(), ids=BROKEN_BACKENDS)
def test_a_broken_backend_is_caught(backend, promise):
    assert promise in broken(check_backend(backend, timeout_s=1.0))


def test_a_backend_that_blocks_the_event_loop_is_caught_and_the_check_is_named():
    findings = check_backend(Blocking, timeout_s=0.5)
    assert broken(findings) == {"never blocks"}
    assert "'answers each request with its own rows' did not come back within 0.5 s" in findings[-1].detail


def test_after_a_check_that_hangs_those_like_it_are_not_tried_and_payloads_can_be_the_backends_own():
    findings = check_backend(Hanging, timeout_s=1.0)
    assert broken(findings) == {"answers each request with its own rows"}
    skipped = [finding for finding in findings if finding.skipped]
    assert skipped[0].name == "answers in order"
    assert "'answers each request with its own rows' did not end" in skipped[0].detail
    assert findings[-1].name == "closes"
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


TIME, SELECTS, CUTS = "answers cut_at with a time", "selects waiting requests within the limits", "cuts in the end"
BROKEN_STRATEGIES = {
    "reads beyond the last request": (TIME, {"cut_at": lambda self, queue: queue.waiting[1].arrived}),
    "NaN for a time": (TIME, {"cut_at": lambda self, queue: math.nan}),
    "too much": (SELECTS, {"select": lambda self, queue: list(queue.waiting)}),
    "nothing": (SELECTS, {"select": lambda self, queue: []}),
    "one request twice": (SELECTS, {"select": lambda self, queue: [queue.waiting[0]] * 2}),
    "a request of its own": (SELECTS, {"select": lambda self, queue: [api.Request("mine")]}),
    "a reason that is none": (SELECTS, {"reason": lambda self, queue: "because"}),
    "waits for arrivals that may not come": (
        CUTS,
        {"cut_at": lambda self, queue: queue.now if queue.rows >= queue.limits.max_rows else math.inf},
    ),
    "always a little later": (CUTS, {"cut_at": lambda self, queue: queue.now + 1.0}),
    "always in an hour": (CUTS, {"cut_at": lambda self, queue: queue.now + 3600.0}),
    "sheds what does not wait": ("sheds only what waits", {"shed": lambda self, queue, arriving: [arriving]}),
    "shed raises": ("sheds only what waits", {"shed": lambda self, queue, arriving: 1 / 0}),
    "try again never": ("tells when to try again", {"retry_after": lambda self, queue, request: math.inf}),
    "notices that are one text": ("says its notices in words", {"notices": "one sentence"}),
    "rolls dice": (
        "answers the same queue the same way",
        {"cut_at": lambda self, queue: queue.now + random.random()},
    ),
    "reads a clock": ("reads no clock", {"cut_at": lambda self, queue: time.monotonic()}),
    "observe raises": ("observes", {"observe": lambda self, batch: 1 / 0}),
    "breaks by what it learns": ("observes", dict(vars(Spoiled))),
}


@pytest.mark.parametrize(("promise", "members"), BROKEN_STRATEGIES.values(), ids=BROKEN_STRATEGIES)
def test_a_broken_strategy_is_caught(promise, members):
    assert promise in broken(check_strategy(but(Eager, **members)))
    assert broken(check_strategy(object)) == {"builds"}


def test_a_strategy_that_starves_requests_or_never_answers_is_caught():
    """Good with any queue but those of the load: it cannot stand narrow backends that take two batches at once."""
    shunning = but(Eager, cut_at=lambda self, queue: math.inf if queue.limits.in_flight == 2 else queue.now)
    assert broken(check_strategy(shunning)) == {"serves every request of a random load"}
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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("workload", "promise"),
    [
        (Endless, "ends soon when asked to stop"),
        (Backwards, "runs and tells how far it is"),
        (Mute, "runs and tells how far it is"),
        (but(Sums, model=lambda self: "blobnet"), "names its model and processes"),
        (object, "builds"),
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


@pytest.mark.sample
@pytest.mark.parametrize(
    ("workload", "timeout_s", "said"),
    [
        (Raises, 30.0, "no disk"),
        (Stuck, 0.5, "asked to stop, it went on for 0.5 s|did not end within"),
        (Endless, 0.5, "asked to stop, it went on for 0.5 s|did not end within"),
        (Mute, 30.0, "it yielded no Progress"),
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
