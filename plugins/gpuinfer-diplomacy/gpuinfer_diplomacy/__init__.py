"""Diplomacy as an environment of gpuinfer: seven powers, and the engine `diplomacy` from PyPI.

options.py      what can be set
environment.py  the game loop's side: who speaks, what comes of it
board.py        the engine's side: positions, legal orders, adjudication
asked.py        legal orders → what an answer must match
shown.py        the board in few words
said.py         an answer → orders, and what was wrong with it
scored.py       centres → rewards
"""

from gpuinfer_diplomacy.environment import Diplomacy

__all__ = ["Diplomacy"]
