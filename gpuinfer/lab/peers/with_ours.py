"""A child that generates with this package, as the backend `inprocess` does: the generator's thread, and its texts."""

from __future__ import annotations

from gpuinfer.lab.peers.peer_protocol import Order, Run, converse

LONGEST_S = 3600.0  # one order; the parent's own limit is shorter


def main() -> None:
    converse(load, "gpuinfer")


def load(order: Order) -> tuple[str, Run]:
    from concurrent.futures import Future
    from itertools import islice

    import msgspec

    from gpuinfer import __version__
    from gpuinfer.api import ModelSpec, Setup
    from gpuinfer.generation import Generation, Prompt, Sampling, Unmasking
    from gpuinfer.text.generator import Driver, Prepared, Tuning, open_generator

    unmasking = msgspec.convert(order.get("unmasking"), Unmasking | None)
    slots = order["rows"] * (2 if unmasking is not None and unmasking.cfg_scale else 1)  # of what guides a row, too
    arguments = {**order["arguments"], "slots": slots, "context": order["length"]}
    spec = ModelSpec(order["model"], weights=order["weights"], arguments=arguments, kind="text")
    setup = Setup(model=spec, devices=(order["device"],), dtype=order["dtype"], seed=order["seed"])
    generator = open_generator(spec, setup, Tuning())
    driver = Driver(generator)

    def run(order: Order) -> int:
        """Never more than `at_once` prompts are under way."""
        sampling = Sampling(max_tokens=order["new_tokens"], temperature=0, ignore_eos=True, unmasking=unmasking)
        wanted = [
            Prompt(tokens=tuple(tokens), sampling=sampling, key=str(number))
            for number, tokens in enumerate(order["prompts"])
        ]
        tokens, waiting = 0, iter(wanted)
        while some := list(islice(waiting, order["at_once"])):
            futures: list[Future[Generation]] = [submitted(one) for one in generator.prepare(some)]
            tokens += sum(len(future.result(LONGEST_S).completions[0].tokens) for future in futures)
        return tokens

    def submitted(prepared: Prepared | Exception) -> Future[Generation]:
        future: Future[Generation] = Future()

        def done(outcome: Generation | Exception) -> None:
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        if isinstance(prepared, Exception):
            raise prepared
        driver.submit(prepared, done)
        return future

    return __version__, run
