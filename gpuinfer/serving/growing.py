"""The answers to one request's prompts as they grow: one stream of parts, and at its end one generation.

A request may hold several prompts. Their samples are counted through: those of prompt i begin at i × samples.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from gpuinfer.generation import Generation, Part, Prompt
from gpuinfer.runtime.session import Session

News = tuple[int, Part | Generation | BaseException]


async def whole(session: Session, prompts: Sequence[Prompt], ways: dict[str, Any]) -> Generation:
    """All answers. The first prompt that fails ends the others."""
    if len(prompts) == 1:
        found: Generation = await session(prompts[0], rows=prompts[0].samples, **ways)
        return found
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(session(one, rows=one.samples, **ways)) for one in prompts]
    return joined([task.result() for task in asked])


async def growing(
    session: Session, prompts: Sequence[Prompt], ways: dict[str, Any]
) -> AsyncGenerator[Part | Generation]:
    """Parts as they come, and last the whole. Nothing is read ahead of whoever reads this."""
    if len(prompts) > 1:
        async with contextlib.aclosing(_several(session, prompts, ways)) as parts:
            async for part in parts:
                yield part
        return
    async with session.stream(prompts[0], rows=prompts[0].samples, **ways) as stream:
        async for part in stream:
            yield part
        yield stream.result


async def _several(
    session: Session, prompts: Sequence[Prompt], ways: dict[str, Any]
) -> AsyncGenerator[Part | Generation]:
    news: asyncio.Queue[News] = asyncio.Queue(1)
    readers = [asyncio.create_task(_read(session, one, ways, index, news)) for index, one in enumerate(prompts)]
    ended: dict[int, Generation] = {}
    try:
        while len(ended) < len(prompts):
            index, what = await news.get()
            if isinstance(what, BaseException):
                raise what
            if isinstance(what, Generation):
                ended[index] = what
            else:
                yield msgspec.structs.replace(what, sample=index * prompts[0].samples + what.sample)
        yield joined([ended[index] for index in range(len(prompts))])
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)


async def _read(session: Session, prompt: Prompt, ways: dict[str, Any], index: int, news: asyncio.Queue[News]) -> None:
    try:
        async with session.stream(prompt, rows=prompt.samples, **ways) as stream:
            async for part in stream:
                await news.put((index, part))
            await news.put((index, stream.result))
    except Exception as error:  # noqa: BLE001 (whatever it is, the reader of all is told)
        await news.put((index, error))


def joined(answers: Sequence[Generation]) -> Generation:
    """As one: completions in order, tokens added up."""
    if len(answers) == 1:
        return answers[0]
    return Generation(
        completions=tuple(one for each in answers for one in each.completions),
        prompt_tokens=sum(one.prompt_tokens for one in answers),
        cached_tokens=sum(one.cached_tokens for one in answers),
        first_token_s=min(one.first_token_s for one in answers),
        seconds=max(one.seconds for one in answers),
        versions=tuple(dict.fromkeys(version for one in answers for version in one.versions)),
    )
