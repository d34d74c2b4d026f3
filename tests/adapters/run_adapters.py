"""What the tests of adapters share."""

from __future__ import annotations

import dataclasses


def stepped(generator, asked, changes, *, parts=True):
    """The answer and the parts of one prompt, with other weights before the steps of these numbers."""
    [prepared] = generator.prepare([asked])
    if isinstance(prepared, Exception):
        raise prepared
    generator.add(0, dataclasses.replace(prepared, parts=parts))
    given, number = [], 0
    while True:
        if number in changes:
            generator.update(*changes[number])
        step = generator.step()
        given += [part for _, part in step.parts]
        number += 1
        if step.finished:
            return step.finished[0][1], given
