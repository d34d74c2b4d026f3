"""Games that can show themselves, for `gpuinfer play`. Its process imports them by name."""

from __future__ import annotations

from typing import Any

from in_python import PythonBlob, PythonConnectFour, Wager


class ShownWager(Wager):
    """Chance moves of itself, between the person's moves."""

    def show(self, position: Any, seat: int) -> str:
        return f"so far: {' '.join(position) or 'nothing'}"

    def action_name(self, position: Any, action: int) -> str:
        return ("Sure", "Wheel")[action]


class ShownConnectFour(PythonConnectFour):
    def show(self, position: Any, seat: int) -> str:
        return self.original.show(position, seat)


class ShownBlob(PythonBlob):
    def show(self, position: Any, seat: int) -> str:
        return self.original.show(position, seat)

    def action_name(self, position: Any, action: int) -> str:
        return "the same"  # as all others: they are told apart by their numbers
