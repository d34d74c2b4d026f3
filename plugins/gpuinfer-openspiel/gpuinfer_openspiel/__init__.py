"""OpenSpiel's games as games of `gpuinfer selfplay`."""

from gpuinfer_openspiel.game import OpenSpiel as OpenSpiel
