"""Diplomacy as an environment of gpuinfer: seven powers, and the engine `diplomacy` from PyPI.

options.py      what can be set
environment.py  the game loop's side: which powers order, what comes of the answers, scores
board.py        the engine's side: positions, legal orders, adjudication
orders.py       the constraint of legal orders, and what an answer orders
prompt.py       the board in few words
"""

from gpuinfer_diplomacy.environment import Diplomacy

__all__ = ["Diplomacy"]
