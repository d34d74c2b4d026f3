"""Prefixes that rows share, read once for many of them: the same answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from masked_attention import mixed_by_pages
from random_models import LLAMA, VARIANTS, random_weights
from steps import copy_row, step_of

from gpuinfer.text.decoder import torch_static, triton_layers
from gpuinfer.text.decoder.attention_plan import COUNT, PrefixPlanner
from gpuinfer.text.decoder.torch_cache import PageCache
from gpuinfer.text.decoder.torch_decoder import TorchDecoder
from gpuinfer.text.decoder.torch_layers import SharedPrefixes, StepBatch, Tiles
from gpuinfer.text.decoder.triton_layers import TritonLayers
from gpuinfer.text.transformer import PAGE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.usefixtures("interpreted")]

CPU = torch.device("cpu")
SPLIT = 64
ROOM = 8  # columns of a row's table
TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, LLAMA.vocabulary, 150)]

# Of each row the pages that it begins with, by name, and how many positions it sees; how many items there are then.
SHARING = {
    "a prompt and a system prompt": (["aabb", "aabb", "aacc", "aacc", "aacc", ""], [140, 129, 150, 160, 131, 70], 3),
    "a prefix that ends within a portion": (["aaa", "aaa", "aaa"], [97, 128, 230], 2),
    "rows that share, anywhere among others": (["bb", "", "aaaa", "bb", "aaaa", ""], [70, 33, 140, 100, 150, 64], 3),
    "more rows than a tile has": (["aa"] * 9, [65, 70, 75, 80, 128, 129, 200, 66, 130], 2),
    "more prompts than items": (["aa", "bbbb", "bbbb", "aa", "bbbb"], [70, 129, 150, 72, 140], 1),
    "a page that one row has not filled yet": (["aaa", "aaa", "aa"], [97, 110, 80], 2),
}
SHAPES = [{"heads": 4, "kv_heads": 2, "head_dim": 16}, {"heads": 3, "kv_heads": 1, "head_dim": 20}]


class Attending:
    """Rows with these beginnings in common, over random keys and values."""

    def __init__(self, shape, names, sees, dtype=torch.float32):
        self.shape, self.rows = replace(shape, layers=1, windows=(None,)), len(names)
        self.pages = np.random.default_rng(1).permutation(self.rows * ROOM).astype(np.int32).reshape(self.rows, ROOM)
        held = {}
        for row, name in enumerate(names):
            for column in range(len(name)):
                self.pages[row, column] = held.setdefault(name[: column + 1], self.pages[row, column])
        self.sees = torch.tensor(sees)
        self.layers = TritonLayers(self.shape, None, None, None, ROOM * PAGE)
        self.layers.split = SPLIT
        self.cache = PageCache(self.shape, self.rows * ROOM, ROOM * PAGE, CPU, dtype)
        generator = torch.Generator().manual_seed(0)
        for held in (self.cache.keys, self.cache.values):
            held.copy_(torch.randn(held.shape, generator=generator))
        self.queries = torch.randn((self.rows, shape.heads, shape.head_dim), generator=generator).to(dtype)

    def plan(self, tile, items):
        whole = (self.sees.numpy() - 1) // PAGE
        return PrefixPlanner(tile, SPLIT, worth=1).plan(self.pages, whole, items, ROOM)

    def mixed(self, plan=None, listed=False):
        """Of rows that are all that there is, or `listed` as tiles, with tokens and tables in other orders."""
        table = torch.from_numpy(self.pages.astype(np.int64))
        order = torch.arange(self.rows).flip(0) if listed else torch.arange(self.rows)
        segments = torch.arange(self.rows).roll(1)
        if listed:
            table = table[segments.argsort()]
        shared = None
        if plan is not None:
            items = torch.zeros((len(plan.items), plan.items.shape[1] + 2), dtype=torch.int64)
            items[:, : plan.items.shape[1]] = torch.from_numpy(plan.items)
            lines = [torch.from_numpy(line) for line in (plan.members, plan.begins, plan.slots)]
            shared = SharedPrefixes(items, *lines, room=ROOM)
        tiles = (order, torch.ones_like(order), segments) if listed else None
        sees = self.sees[order]
        batch = StepBatch(sees, sees - 1, sees, tiles=(Tiles(table, tiles, 1, ROOM * PAGE, shared),), sees=sees)
        found = self.layers.attend(self.queries[order], batch, self.cache, 0)
        return found[order]

    def wanted(self):
        """As float64 has it."""
        return mixed_by_pages(self.shape, self.cache, self.queries, self.pages, self.sees.tolist())


@pytest.mark.parametrize("listed", [False, True], ids=["rows", "listed"])
@pytest.mark.parametrize("name", SHARING)
def test_rows_that_share_are_answered_as_by_themselves(monkeypatch, name, listed):
    """In one program a row, and in portions: the same bits."""
    names, sees, items = SHARING[name]
    one = Attending(replace(LLAMA, **SHAPES[0]), names, sees)
    monkeypatch.setattr(triton_layers, "FEW_PROGRAMS", 0)
    monkeypatch.setattr(triton_layers, "SHARED_QUERIES", 16)
    tile = triton_layers.shared_rows(one.shape, torch.float32)
    plan = one.plan(tile, items)
    assert plan.items.shape[1] == items
    assert plan.items[COUNT].max() <= tile
    alone, together = one.mixed(listed=listed), one.mixed(plan, listed=listed)
    assert (together - one.wanted()).abs().max() < 1e-5
    own = torch.from_numpy(plan.begins == 0)
    assert torch.equal(together[own], alone[own])
    monkeypatch.setattr(triton_layers, "FEW_PROGRAMS", 1 << 20)
    assert torch.equal(one.mixed(plan, listed=listed), together)


@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_whole_tiles_of_rows_and_heads_are_right(heads):
    one = Attending(replace(LLAMA, **heads), ["aabb"] * 4 + ["aa"] * 3, [140] * 4 + [100] * 3)
    plan = one.plan(triton_layers.shared_rows(one.shape, torch.float32), 100)
    assert plan.begins.tolist() == [4 * PAGE] * 4 + [2 * PAGE] * 3
    assert (one.mixed(plan) - one.wanted()).abs().max() < 1e-5


@pytest.fixture
def small_forms(monkeypatch):
    monkeypatch.setattr(torch_static, "PROMPT_TOKENS", (12, 24))
    monkeypatch.setattr(torch_static, "LEAST_ITEMS", 4)
    monkeypatch.setattr(triton_layers, "LEAST_SAVED", 0)


def decoder(shape, **options):
    options = {"slots": 4, "pages": 32, "length": 160} | options
    return TorchDecoder(shape, random_weights(shape, torch.float32), CPU, torch.float32, **options)


def shared_steps():
    """Four rows go on from the whole pages of one prompt, then three of them beside the prompt of another row."""
    rows = [(0, 70, [5]), (1, 70, [6]), (2, 70, [7]), (3, 70, [8])]
    beside = [(0, 71, [5]), (1, 71, [1]), (2, 71, [7]), (3, 0, TOKENS[:7])]
    for segments, sharing in ((rows, 4), (beside, 3)):
        step = step_of(*segments, last_only=True)
        pages = step.pages.copy()
        pages[:sharing, :2] = pages[0, :2]
        yield replace(step, pages=pages)


@pytest.mark.usefixtures("small_forms")
@pytest.mark.parametrize("variant", ["plain", "windows"])
def test_steps_of_rows_that_share_are_answered_as_by_torch(variant, monkeypatch):
    shape = replace(LLAMA, **VARIANTS[variant])
    items = []
    written = torch_static.write_plan
    monkeypatch.setattr(torch_static, "write_plan", lambda plan, *room: items.append(plan) or written(plan, *room))
    ours, theirs = decoder(shape, kernels=True), decoder(shape, kernels=False)
    apart = decoder(shape, kernels=True, share=False)
    for one in (ours, theirs, apart):
        one.forward(step_of((0, 0, TOKENS[:70]), last_only=True))
        copy_row(one, 0, [1, 2, 3])
    items.clear()
    for step in shared_steps():
        found, wanted, unshared = (one.forward(step).clone() for one in (ours, theirs, apart))
        assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()
        assert (found - unshared).abs().max() < 1e-5 * wanted.abs().max()
    plans = [plan for plan in items if plan is not None]
    assert [plan.begins.tolist() for plan in plans] == [[64] * 4, [64] * 3]


@pytest.mark.usefixtures("small_forms")
def test_few_long_rows_beside_a_prompt_are_read_in_portions(monkeypatch):
    monkeypatch.setattr(triton_layers, "LEAST_SPLIT", 32)
    plans = []
    written = torch_static.write_plan
    monkeypatch.setattr(torch_static, "write_plan", lambda plan, *room: plans.append(plan) or written(plan, *room))
    answers = []
    for kernels in (True, False):
        one, generator = decoder(LLAMA, kernels=kernels), torch.Generator().manual_seed(0)
        for held in (one._cache.keys, one._cache.values):
            held.copy_(torch.randn(held.shape, generator=generator))
        one._cache._filled[:] = 0
        answers.append(one.forward(step_of((0, 150, [5]), (1, 0, TOKENS[:5]), (2, 40, [7]), last_only=True)).clone())
    assert [plan.begins.tolist() for plan in plans] == [[128, 0]]
    assert (answers[0] - answers[1]).abs().max() < 1e-4 * answers[1].abs().max()
