# ruff: noqa: E402 - vLLM may not be there, and helpers lie in other folders
"""Both logits processors leave what a matcher allows, whoever comes, goes and moves in the batch.

What vLLM's engine would tell them is told here, with its own structures, so no engine is started.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
pytest.importorskip("vllm.sampling_params")  # a folder of tests is called vllm too
sys.path[:0] = [str(Path(__file__).parent.parent / name) for name in ("trie", "text")]

import torch
from listing import ORDERS, allowed, codec_of, is_legal, spelt
from msgspec import structs
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

from gpuinfer.backends.vllm_engine.list_constraints import extra_args
from gpuinfer.generation import Constraint, Listed
from gpuinfer.text.language import Language

KIND, PLACES, STEPS = "byte level", 6, 120
FREE = structs.replace(ORDERS, ends=False)


@pytest.fixture
def config(tmp_path: Path) -> SimpleNamespace:
    from language_samples import byte_level, folder

    where = folder(tmp_path / "model", byte_level(), tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast"})
    codec = codec_of(KIND)
    model = SimpleNamespace(
        tokenizer=str(where),
        skip_tokenizer_init=False,
        runner_type="generate",
        tokenizer_mode="auto",
        tokenizer_revision=None,
        trust_remote_code=False,
        get_vocab_size=lambda: codec.size,
    )
    return SimpleNamespace(model_config=model, scheduler_config=SimpleNamespace(max_num_seqs=PLACES))


class Asked:
    """One request: what a matcher of ours says that it may say, and how it goes about it."""

    def __init__(self, listed: Listed | None, draws: random.Random) -> None:
        codec = codec_of(KIND)
        self.language = Language(codec, codec.size, ())
        self.listed, self.draws, self.output = listed, draws, []
        self.matcher = None if listed is None else self.language.matcher(Constraint(listed=listed))
        self.script = [*spelt(codec, "so <orders>", codec.size, draws, beyond=False)]
        self.params = SamplingParams(extra_args=None if listed is None else extra_args(listed), stop_token_ids=[1, 2])

    def may(self) -> list[int]:
        if self.matcher is None:
            return list(range(codec_of(KIND).size))
        return [1, 2] if self.matcher.complete else allowed(self.matcher, codec_of(KIND).size)

    def advance(self) -> bool:
        """One token more. Whether that was its last."""
        if self.matcher is not None and self.matcher.complete:
            return True
        token = self.script.pop(0) if self.script else self.draws.choice(self.may())
        self.output.append(token)
        if self.matcher is not None:
            self.matcher.advance(token)
        return len(self.output) > 90

    def check(self) -> None:
        if self.listed is not None:
            assert is_legal(self.language.decode(self.output), self.listed, whole=False)


def left(logits: torch.Tensor) -> list[int]:
    return torch.nonzero(logits > -torch.inf).flatten().tolist()


def test_the_first_interface_follows_a_batch(config):
    from gpuinfer.backends.vllm_engine.processor_v1 import ListedProcessor

    processor, draws, batch = ListedProcessor(config, torch.device("cpu"), False), random.Random(3), {}
    ways = (ORDERS, FREE, None)
    gone: list[int] = []
    for step in range(STEPS):
        removed, added, moved = gone, [], []
        for place in removed:
            batch.pop(place).check()
        if len(batch) < PLACES:  # a new one, in a place that was left or the next; with one that was interrupted
            place = min(set(range(PLACES)) - set(batch))
            one = batch[place] = Asked(draws.choice(ways), draws)
            for _ in range(draws.choice([0, 0, 5])):
                one.advance()
            added.append((place, one.params, [5], one.output))
        if len(batch) > 1 and draws.random() < 0.4:
            one, other = draws.sample(sorted(batch), 2)
            moved.append((one, other, MoveDirectionality.SWAP))
            batch[one], batch[other] = batch[other], batch[one]
        empty = sorted(set(range(PLACES)) - set(batch))
        if empty and draws.random() < 0.3:
            one = draws.choice(sorted(batch))
            moved.append((one, empty[0], MoveDirectionality.UNIDIRECTIONAL))
            batch[empty[0]] = batch.pop(one)
        changed = removed or added or moved
        processor.update_state(BatchUpdate(len(batch), removed, added, moved) if changed else None)
        logits = torch.randn(PLACES, codec_of(KIND).size)
        before = logits.clone()
        assert processor.apply(logits) is logits
        for place, one in batch.items():
            assert left(logits[place]) == one.may(), (step, place)
            if one.matcher is None or not one.matcher.complete:
                assert torch.equal(logits[place][one.may()], before[place][one.may()])
        gone = [place for place, one in batch.items() if one.advance()]
    assert not processor.is_argmax_invariant()


def test_tokens_on_their_way_from_the_device_are_waited_for(config):
    from gpuinfer.backends.vllm_engine.processor_v1 import ListedProcessor

    processor, one = ListedProcessor(config, torch.device("cpu"), False), Asked(ORDERS, random.Random(1))
    processor.update_state(BatchUpdate(1, [], [(0, one.params, [5], one.output)], []))
    for _ in range(12):
        one.output.append(-1)
        processor.update_state(None)
        one.output.pop()  # the token itself has come before the logits are looked at
        logits = torch.randn(1, codec_of(KIND).size)
        processor.apply(logits)
        assert left(logits[0]) == one.may()
        one.advance()


class States:
    """What the second model runner shares of its requests, on the host."""

    def __init__(self, rows: int, length: int) -> None:
        self.max_num_reqs, self.vocab_size, self.device = rows, codec_of(KIND).size, torch.device("cpu")
        self.all_token_ids = SimpleNamespace(gpu=torch.zeros(rows, length, dtype=torch.int32))
        self.prompt_len = SimpleNamespace(np=np.zeros(rows, np.int32))
        self.total_len = SimpleNamespace(gpu=torch.zeros(rows, dtype=torch.int32))


@pytest.mark.parametrize("proposed", [0, 3])
def test_the_second_interface_follows_slots(config, proposed):
    """`proposed`: tokens of each request that a smaller model would have proposed, some of them impossible."""
    from gpuinfer.backends.vllm_engine.processor_v2 import ListedProcessor

    states, draws = States(PLACES, 200), random.Random(4)
    processor, requests = ListedProcessor(config, states), {}
    for step in range(STEPS // 2):
        if len(requests) < PLACES:
            slot = draws.choice(sorted(set(range(PLACES)) - set(requests)))
            one = requests[slot] = Asked(draws.choice([ORDERS, FREE, None]), draws)
            for _ in range(draws.choice([0, 0, 5])):  # it was interrupted, and comes again
                one.advance()
            states.prompt_len.np[slot] = 3
            assert processor.add_request(slot, one.params) == (one.listed is not None)
        order = draws.sample(sorted(requests), len(requests))
        rows, tokens, positions, depths, supports = [], [], [], [], []
        for slot in order:
            one = requests[slot]
            answer = [7, 7, 7, *one.output]
            states.all_token_ids.gpu[slot, : len(answer)] = torch.tensor(answer, dtype=torch.int32)
            matcher, sound = None if one.matcher is None else one.matcher.copy(), True
            for depth in range(1 + proposed):
                if depth:
                    token = draws.choice(_choices(matcher)) if draws.random() < 0.8 else 0
                    answer.append(token)
                    if matcher is not None and sound:
                        sound = not matcher.complete and token in allowed(matcher, states.vocab_size)
                        if sound:
                            matcher.advance(token)
                rows.append(slot)
                tokens.append(answer[-1])
                positions.append(len(answer) - 1)
                depths.append(depth)
                known = sound and matcher is not None and not (depth and matcher.complete)
                supports.append((one.may() if depth == 0 else allowed(matcher, states.vocab_size)) if known else None)
        logits = torch.randn(len(rows), states.vocab_size)
        whole = [torch.tensor(part, dtype=torch.int32) for part in (rows, order, depths, tokens, positions)]
        context = LogitsContext(
            expanded_idx_mapping=whole[0], idx_mapping=whole[1], idx_mapping_np=np.array(order, np.int32),
            expanded_local_pos=whole[2], input_ids=whole[3], pos=whole[4],
            seq_lens_upper_bound_np=np.array(positions, np.int32) + 1,
        )  # fmt: skip
        processor.apply_staged_writes()
        assert processor.apply(logits, context) is logits
        for row, support in enumerate(supports):
            if support is not None:
                assert left(logits[row]) == support, (step, row)
            elif requests[rows[row]].listed is None:
                assert len(left(logits[row])) == states.vocab_size
        for slot in [slot for slot, one in requests.items() if one.advance()]:
            requests.pop(slot).check()


def _choices(matcher: object) -> list[int]:
    return [5] if matcher is None or matcher.complete else allowed(matcher, codec_of(KIND).size)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_what_is_no_list_is_refused_before_it_reaches_the_engine(version):
    from importlib import import_module

    processor = import_module(f"gpuinfer.backends.vllm_engine.processor_{version}").ListedProcessor
    processor.validate_params(SamplingParams())
    processor.validate_params(SamplingParams(extra_args=extra_args(ORDERS, (1, 2))))
    with pytest.raises(ValueError, match="no items"):
        processor.validate_params(SamplingParams(extra_args={"gpuinfer_listed": {"items": []}}))
    with pytest.raises(ValueError, match="no list between tags"):
        processor.validate_params(SamplingParams(extra_args={"gpuinfer_listed": 3}))
