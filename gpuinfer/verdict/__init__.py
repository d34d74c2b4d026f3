"""What holds a run back: `judge` names it, with the evidence, and the change that would help."""

from gpuinfer.verdict.judging import judge as judge
