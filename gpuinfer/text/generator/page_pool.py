"""The pool of pages of a decoder's cache: which are free, how many rows have the others, and what they hold, found by
content in a radix tree whose nodes are pages.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuinfer.text.transformer import PAGE, Shape

Ints = NDArray[np.int32]


def pages_for(positions: int) -> int:
    """How many pages hold so many positions."""
    return -(-positions // PAGE)


class PagePool:
    """`len(pool)` pages are free. The others belong to rows, or are kept in a prefix tree for rows to come."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.users = np.zeros(pages, np.int32)  # rows that have each page
        self._free = list(range(pages - 1, -1, -1))  # last freed, first taken: it may be in a core's cache
        self._withheld: list[int] = []

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Free pages, each with one user from now on. There must be as many."""
        taken = [self._free.pop() for _ in range(count)]
        self.users[taken] = 1
        return taken

    def free(self, pages: Iterable[int]) -> None:
        """Free these pages: no row has them, and the prefix tree does not keep them."""
        self._free.extend(pages)

    @property
    def withheld(self) -> int:
        """How many pages are neither free nor anybody's: their memory is left to others."""
        return len(self._withheld)

    @property
    def free_pages(self) -> Sequence[int]:
        return tuple(self._free)

    def withhold(self, count: int) -> list[int]:
        """Let so many free pages be taken no more; these."""
        taken = [self._free.pop(0) for _ in range(count)]  # freed longest ago
        self._withheld += taken
        return taken

    def restore(self, count: int) -> None:
        """Let so many of those that are withheld be taken again."""
        self._free += [self._withheld.pop() for _ in range(count)]

    def share(self, pages: Ints) -> int:
        """Count one more row for each of these pages. Returns how many of them no row had."""
        unused = int(np.count_nonzero(self.users[pages] == 0))
        self.users[pages] += 1
        return unused

    def leave(self, pages: Ints) -> list[int]:
        """Count one row fewer for each of these pages. Returns those that no row has any more."""
        self.users[pages] -= 1
        found: list[int] = pages[self.users[pages] == 0].tolist()
        return found


LEAST = 16  # positions that are worth the copy of a page
PAGES_LOOKED_AT = 16  # that begin alike behind the same page, the latest ones
BYTES = 4  # of a token
FULL, HEAD = PAGE * BYTES, LEAST * BYTES


class PrefixNode:
    """A page in its place of the tree. Only full pages have children."""

    __slots__ = ("alike", "children", "key", "page", "parent", "stamp", "start", "worth")

    def __init__(self, parent: PrefixNode | None, key: bytes, page: int, start: int) -> None:
        self.parent = parent  # None: a root, or no longer in the tree
        self.key = key  # its tokens, int32, as bytes
        self.page, self.start = page, start  # the position of its first token
        self.children: dict[bytes, PrefixNode] = {}  # by key
        self.alike: dict[bytes, dict[PrefixNode, None]] = {}  # children by their first LEAST tokens, the latest last
        self.worth, self.stamp = 0.0, -1  # since it became a leaf that no row has


class PrefixMatch(NamedTuple):
    """The longest prefix of some tokens that pages hold."""

    node: PrefixNode | None  # the last full page's; None: there is no tree yet
    pages: list[int]  # full ones, from the first position on
    partly: PrefixNode | None = None  # a page whose first `more` tokens come next: worth a copy
    more: int = 0

    @property
    def tokens(self) -> int:
        return len(self.pages) * PAGE + self.more


class PrefixTree:
    """The pages of `pool` that can be found by content. `unused` of them belong to no row: `evict` frees one.

    `cost(start, count)` is what `count` tokens from position `start` on cost to compute.
    """

    def __init__(self, pool: PagePool, cost: Callable[[int, int], float]) -> None:
        self._pool, self._cost = pool, cost
        self._roots: dict[int, PrefixNode] = {}
        self._nodes: list[PrefixNode | None] = [None] * pool.pages
        self._clock = 0.0
        self._leaves: list[tuple[float, int, PrefixNode]] = []  # a heap; entries that no longer hold are passed over
        self._order = itertools.count()
        self.unused = 0

    def root(self, adapter: int) -> PrefixNode:
        """The root of the pages that were computed with this adapter; 0: with none."""
        return self._roots.setdefault(adapter, PrefixNode(None, b"", -1, 0))

    def at(self, page: int) -> PrefixNode | None:
        """The node of this page; None: it cannot be found."""
        return self._nodes[page]

    def find(self, adapter: int, tokens: Ints) -> PrefixMatch:
        """The longest prefix of these tokens that pages hold."""
        node = self._roots.get(adapter)
        if node is None:
            return PrefixMatch(None, [])
        data, at = tokens.tobytes(), 0
        pages: list[int] = []
        while at + FULL <= len(data) and (child := node.children.get(data[at : at + FULL])) is not None:
            node = child
            pages.append(child.page)
            at += FULL
        return PrefixMatch(node, pages, *self._most_alike(node, data[at : at + FULL]))

    def covers(self, parent: PrefixNode, key: bytes) -> bool:
        """Whether a child of `parent` has all of these tokens, LEAST or more."""
        return key in parent.children or self._most_alike(parent, key)[1] * BYTES == len(key)

    def add(self, parent: PrefixNode, key: bytes, page: int) -> PrefixNode:
        """Let a row's page be found from now on, behind `parent`, which has no child with these very tokens."""
        if key in parent.children:  # the present one would lose its parent, and could not be dropped
            raise RuntimeError("these tokens are known behind this page already")
        node = PrefixNode(parent, key, page, parent.start + len(parent.key) // BYTES)
        parent.children[key] = node
        if len(key) >= HEAD:
            parent.alike.setdefault(key[:HEAD], {})[node] = None
        self._nodes[page] = node
        return node

    def drop(self, node: PrefixNode) -> None:
        """Let a node without children not be found any more."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        alike = parent.alike.get(node.key[:HEAD])
        if alike is not None:
            alike.pop(node, None)
            if not alike:
                del parent.alike[node.key[:HEAD]]
        self._nodes[node.page] = node.parent = None

    def share(self, pages: Ints) -> None:
        """Count one more row for these pages, which are in the tree."""
        self.unused -= self._pool.share(pages)

    def leave(self, pages: Ints) -> None:
        """Count one row fewer for these pages. Those without a node and without another row are freed."""
        for page in self._pool.leave(pages):
            node = self._nodes[page]
            if node is None:
                self._pool.free((page,))
                continue
            self.unused += 1
            node.worth = self._clock + self._cost(node.start, len(node.key) // BYTES)
            self._may_go(node)

    def evict(self) -> None:
        """Free the page that is worth least. Some must be `unused`."""
        while True:
            self._clock, stamp, node = heapq.heappop(self._leaves)
            if self._holds(stamp, node):
                break
        parent = node.parent
        self.drop(node)
        self.unused -= 1
        self._pool.free((node.page,))
        if parent is not None:
            self._may_go(parent)

    def forget(self, adapter: int | None = None) -> None:
        """Let nothing be found any more that was computed with this adapter; None: nothing at all."""
        gone = list(self._roots) if adapter is None else [adapter]
        for number in gone:
            root = self._roots.pop(number, None)
            self._lose([] if root is None else list(_below(root)))

    def distrust(self, adapter: int, tokens: Ints) -> None:
        """Let no page be found any more that a row with these tokens may have shared or copied from."""
        root, key = self._roots.get(adapter), tokens[:LEAST].tobytes()
        for node in [] if root is None else list(root.alike.get(key, ())):
            below = list(_below(node))
            self.drop(node)
            self._lose([node, *below])

    def _lose(self, nodes: Sequence[PrefixNode]) -> None:
        """Let these nodes, with all their descendants, not be found any more."""
        for node in nodes:
            self._nodes[node.page] = node.parent = None
            if not self._pool.users[node.page]:
                self.unused -= 1
                self._pool.free((node.page,))

    def _most_alike(self, node: PrefixNode, key: bytes) -> tuple[PrefixNode | None, int]:
        """Which child of `node` begins most like `key`, and how many tokens, if it is worth a copy."""
        best, most = None, LEAST - 1
        alike = node.alike.get(key[:HEAD], {}) if len(key) >= HEAD else {}
        for child in itertools.islice(reversed(alike), PAGES_LOOKED_AT):
            common = _common(child.key, key)
            if common > most:
                best, most = child, common
        return (None, 0) if best is None else (best, most)

    def _may_go(self, node: PrefixNode) -> None:
        if node.parent is None or node.children or self._pool.users[node.page]:
            return
        node.stamp = next(self._order)
        heapq.heappush(self._leaves, (node.worth, node.stamp, node))
        if len(self._leaves) > 2 * self._pool.pages + 64:  # mostly entries of pages that have been used again
            self._leaves = [entry for entry in self._leaves if self._holds(*entry[1:])]
            heapq.heapify(self._leaves)

    def _holds(self, stamp: int, node: PrefixNode) -> bool:
        leaf = node.parent is not None and not node.children
        return leaf and node.stamp == stamp and not self._pool.users[node.page]


def prefix_cost(shape: Shape) -> Callable[[int, int], float]:
    """What tokens cost to compute, in tokens at position 0: products with weights, and attention to all before."""
    width = shape.heads * shape.head_dim
    weights = shape.hidden * (2 * width + 2 * shape.kv_heads * shape.head_dim) + 3 * shape.hidden * shape.intermediate
    each = 2 * width / max(1, weights)

    def cost(start: int, count: int) -> float:
        return count * (1 + each * (start + count / 2))

    return cost


def _below(node: PrefixNode) -> Iterator[PrefixNode]:
    stack = list(node.children.values())
    while stack:
        one = stack.pop()
        stack += one.children.values()
        yield one


def _common(one: bytes, other: bytes) -> int:
    """How many tokens they have in common from the beginning."""
    count = min(len(one), len(other)) // BYTES
    differs = np.frombuffer(one, np.int32, count) != np.frombuffer(other, np.int32, count)
    return int(differs.argmax()) if differs.any() else count
