# mypy: ignore-errors
"""What changes single logits before a token is drawn: bias, penalties, tokens that may not come."""

import numpy as np

from gpuinfer.models.text.sampling.cpu_values import NOTHING, compiled, inlined

ZERO, ONE = np.float32(0.0), np.float32(1.0)
EVERYTHING = np.int32(-1)


@inlined
def is_edited(record):
    return record.biases > 0 or record.penalised != 0 or record.drawn < record.min_tokens


@compiled
def penalise(values, slot, record, lists):
    """Logit bias, then the penalties for tokens seen: repetition divides or multiplies (Keskar et al. 2019), presence
    and frequency subtract, as OpenAI's API has them.
    """
    bias_ids, bias_values, _, _, seen_ids, seen_counts = lists
    for place in range(record.biases):
        values[bias_ids[slot, place]] += bias_values[slot, place]
    for place in range(record.seen):
        token, count = seen_ids[slot, place], np.float32(seen_counts[slot, place])
        value = values[token]
        value = value / record.repetition if value > ZERO else value * record.repetition
        if count > ZERO:
            value = (value - record.frequency * count) - record.presence
        values[token] = value


@compiled
def mask_out(values, words):
    """Leave the tokens whose bit is set in int32 `words`."""
    for place in range(words.shape[0]):
        if words[place] != EVERYTHING:
            for token in range(place * 32, min((place + 1) * 32, values.shape[0])):
                if not (words[place] >> np.int32(token & 31)) & np.int32(1):
                    values[token] = NOTHING


@compiled
def bar_ends(values, slot, record, lists):
    """Take the end tokens and the slot's stop tokens away."""
    _, _, stops, ends, _, _ = lists
    for place in range(ends.shape[0]):
        values[ends[place]] = NOTHING
    for place in range(record.stops):
        values[stops[slot, place]] = NOTHING


@inlined
def note(token, slot, record, lists):
    """Count the token that the slot has drawn."""
    _, _, _, _, ids, counts = lists
    record.drawn += 1
    if record.penalised == 0:
        return
    place = 0
    while place < record.seen and ids[slot, place] != token:
        place += 1
    if place == record.seen:
        ids[slot, place], counts[slot, place] = token, 0
        record.seen += 1
    counts[slot, place] += 1


@compiled
def note_all(tokens, slots, records, lists):
    """note for each row that has a token."""
    for row in range(slots.shape[0]):
        if tokens[row] >= 0:
            note(tokens[row], slots[row], records[slots[row]], lists)
