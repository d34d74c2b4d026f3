"""Runs the tests whose results depend on the processor again, each time as on an older one.

    python tests/processors.py            all that this machine can pass for
    python tests/processors.py avx2       those that are named
    python tests/processors.py --whole    with all tests that depend on the processor as on each: `make soak`

Libraries choose their kernels by what the processor can do, and round otherwise in each. Their own switches make them
take those of an older one. What a processor lacks cannot be emulated: one without AVX-512 passes for AVX2 alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
AT_ONCE = 2  # processes
LIMIT_S = 1500
PRODUCTS = (
    "tests/text/test_decoder.py",
    "tests/text/test_decoder_bits.py",
    "tests/text/test_decoder_cpu.py",
    "tests/text/test_decoder_cpu_product.py",
    "tests/text/test_decoder_torch.py",
    "tests/text/test_quantised.py",
    "tests/text/test_text_roofline.py",
    "tests/test_forward.py",
    "tests/test_inprocess.py",
)
"""Tests of what is computed in another way where the processor lacks bfloat16."""
DEPENDENT = (
    *PRODUCTS,
    "tests/text/test_diffusion_reference.py",
    "tests/text/test_diffusion_scoring.py",
    "tests/text/test_generator.py",
    "tests/text/test_generator_models.py",
    "tests/text/test_generator_properties.py",
    "tests/test_verify.py",
    "tests/selfplay/test_bits.py",
    "tests/selfplay/test_in_place.py",
    "tests/selfplay/test_player.py",
    "tests/selfplay/test_rules.py",
    "tests/selfplay/test_search.py",
    "tests/selfplay/test_strength.py",
    "tests/selfplay/test_workers.py",
)
"""Tests that compare bits, or numbers, of models and compiled kernels."""


@dataclass(frozen=True)
class Processor:
    """A kind of processor, by the flags of /proc/cpuinfo that it takes, and the switches that make libraries see it."""

    flags: frozenset[str]
    switches: Mapping[str, str]
    tests: Sequence[str]  # but for `--whole`: what differs from what newer ones and older ones do


def flags_here() -> frozenset[str]:
    """Of the first core, as Linux tells them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").partition(":")[2].split())


def numba_name() -> str:
    """Of a processor whose instructions this one has. What LLVM unrolls and sums in parts follows from the name: for a
    Zen 4 it does so where it does not for a Haswell; and the name brings its own features, AVX-512 with a Zen 4.
    """
    flags = flags_here()
    if "avx512f" in flags:
        return "znver4"
    return "znver3" if "sse4a" in flags else "haswell"


def switches(aten: str, onednn: str, mkl: str, numba: str, features: Sequence[str]) -> dict[str, str]:
    return {
        "ATEN_CPU_CAPABILITY": aten,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
        "NUMBA_CPU_NAME": numba,
        "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in features),  # the name alone leaves those of this machine
    }


AVX2 = [
    "cmov",
    "cx16",
    "sse",
    "sse2",
    "sse3",
    "ssse3",
    "sse4.1",
    "sse4.2",
    "popcnt",
    "avx",
    "avx2",
    "fma",
    "f16c",
    "bmi",
    "bmi2",
    "lzcnt",
    "movbe",
]
AVX512 = [*AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]


PROCESSORS = {
    "avx512": Processor(
        frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}),
        switches("avx512", "AVX512_CORE", "AVX512", "skylake-avx512", AVX512),
        PRODUCTS,
    ),
    "avx2": Processor(
        frozenset({"avx2", "fma", "bmi2"}), switches("avx2", "AVX2", "AVX2", numba_name(), AVX2), DEPENDENT
    ),
}
"""Newest first. None of them multiplies bfloat16 itself."""


def possible(flags: frozenset[str]) -> list[str]:
    return [name for name, processor in PROCESSORS.items() if processor.flags <= flags]


def run(name: str, tests: Sequence[str]) -> int:
    """Run the tests as on this processor; pytest's exit code."""
    print(f"\n== tests that depend on the processor, as on one with {name}", flush=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        str(AT_ONCE),
        "--dist",
        "loadfile",
        "-m",
        "not soak and not gpu and not docs and not binary and not dist and not real",
    ]
    with tempfile.TemporaryDirectory() as compiled:
        # torch.compile takes what another processor left in its folder for its own, and computes nonsense with it
        environment = {**os.environ, **PROCESSORS[name].switches, "TORCHINDUCTOR_CACHE_DIR": compiled}
        return subprocess.run([*command, *tests], cwd=ROOT, env=environment, timeout=LIMIT_S).returncode


def main(words: list[str]) -> int:
    names = [word for word in words if word != "--whole"]
    can = possible(flags_here())
    unknown = [name for name in names if name not in can]
    if unknown:
        print(f"cannot be emulated here: {', '.join(unknown)}. Possible: {', '.join(can) or 'none'}.", file=sys.stderr)
        return 2
    whole = "--whole" in words
    return max([run(name, DEPENDENT if whole else PROCESSORS[name].tests) for name in names or can], default=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
