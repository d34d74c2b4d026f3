"""Where every page of a generator is: with rows, in its prefix tree, or free."""

from __future__ import annotations

from collections import Counter

from gpuinfer.text.generator import Generator
from gpuinfer.text.transformer import PAGE


def check_pages(generator: Generator) -> None:
    """Reference counts are those of the tables, nothing is lost or in two places, and rows write into pages of their
    own.
    """
    table, pages = generator._table, generator._admission.pages
    living = [row for row in table.rows if row is not None]
    users: Counter[int] = Counter()
    for row in living:
        users.update(table.pages[row.slot, : table.held[row.slot]].tolist())
        users.update(row.spares)
    for row in living:
        filled, held = int(table.filled[row.slot]), int(table.held[row.slot])
        assert filled <= held * PAGE
        if held:
            assert users[int(table.pages[row.slot, held - 1])] == 1 or filled == held * PAGE
    assert table.held.astype(bool).sum() == len([row for row in living if table.held[row.slot]])
    free, found = set(pages.pool._free), nodes_of(generator)
    assert len(free) == len(pages.pool)
    assert pages.pool.users.tolist() == [users[page] for page in range(pages.pool.pages)]
    assert not free & (set(users) | set(found))
    assert free | set(users) | set(found) == set(range(pages.pool.pages))
    assert pages.tree.unused == len(set(found) - set(users))
    assert all(pages.tree.at(page) is found.get(page) for page in range(pages.pool.pages))


def nodes_of(generator: Generator) -> dict[int, object]:
    """Those of the prefix tree by page. A node that rows have is under nodes that rows have."""
    pages, found = generator._admission.pages, {}
    stack = [child for root in pages.tree._roots.values() for child in root.children.values()]
    while stack:
        node = stack.pop()
        assert node.page not in found
        found[node.page] = node
        assert node.parent.children[node.key] is node
        assert not node.children or len(node.key) == 4 * PAGE
        if pages.pool.users[node.page] and node.parent.key:
            assert pages.pool.users[node.parent.page]
        stack += node.children.values()
    return found


def all_free(generator: Generator) -> None:
    """No row is under way: once nothing can be found any more, every page is free."""
    check_pages(generator)
    assert generator.free_slots == generator.slots
    pages = generator._admission.pages
    assert pages.available == pages.pool.pages
    pages.tree.forget()
    assert len(pages.pool) == pages.pool.pages
    assert not pages.tree.unused
