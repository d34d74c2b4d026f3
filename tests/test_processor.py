"""Which number formats a processor multiplies by itself, told from what the system says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuinfer.models.processor import has_bfloat16, has_bfloat16_in_mkl, has_float16

CASCADE_LAKE = "flags\t\t: fpu sse4_2 avx avx2 avx512f avx512bw avx512vl avx512_vnni"
COOPER_LAKE = f"{CASCADE_LAKE} avx512_bf16"
SAPPHIRE_RAPIDS = f"{COOPER_LAKE} avx512_fp16 amx_bf16 amx_tile amx_int8"
ZEN_3 = "flags\t\t: fpu sse4_2 avx f16c avx2"
GRAVITON_3 = "Features\t: fp asimd fphp asimdhp sve bf16 i8mm"
GRAVITON_2 = "Features\t: fp asimd fphp asimdhp"


def told(tmp_path: Path, *cores: str) -> Path:
    """A system that says this of each core."""
    path = tmp_path / "cpuinfo"
    path.write_text("\n\n".join(f"processor\t: {number}\n{line}" for number, line in enumerate(cores)))
    return path


@pytest.mark.parametrize(
    ("core", "bfloat16", "float16"),
    [
        pytest.param(ZEN_3, False, False, id="AVX2"),
        pytest.param(CASCADE_LAKE, False, False, id="AVX-512 and VNNI"),
        pytest.param(COOPER_LAKE, True, False, id="AVX-512 with bfloat16"),
        pytest.param(SAPPHIRE_RAPIDS, True, True, id="AMX"),
        pytest.param("flags : amx_bf16", True, False, id="AMX alone"),
        pytest.param(GRAVITON_2, False, True, id="Arm without bfloat16"),
        pytest.param(GRAVITON_3, True, True, id="Arm with bfloat16"),
        pytest.param("bugs : bf16", False, False, id="a line of another kind"),
    ],
)
def test_a_processor_has_the_formats_that_its_flags_name(
    core: str, bfloat16: bool, float16: bool, tmp_path: Path
) -> None:
    path = told(tmp_path, core, core)
    assert (has_bfloat16(path, {}), has_float16(path, {})) == (bfloat16, float16)


@pytest.mark.parametrize(
    ("maker", "core", "has"),
    [
        pytest.param("GenuineIntel", SAPPHIRE_RAPIDS, True, id="its own maker's"),
        pytest.param("GenuineIntel", CASCADE_LAKE, False, id="its own maker's, without"),
        pytest.param("AuthenticAMD", COOPER_LAKE, False, id="another's"),
    ],
)
def test_mkl_serves_the_processors_of_its_own_maker(maker: str, core: str, has: bool, tmp_path: Path) -> None:
    assert has_bfloat16_in_mkl(told(tmp_path, f"vendor_id\t: {maker}\n{core}"), {}) is has


def test_cores_of_two_kinds_have_what_both_have(tmp_path: Path) -> None:
    assert not has_bfloat16(told(tmp_path, GRAVITON_3, GRAVITON_2), {})


@pytest.mark.parametrize(
    ("environment", "bfloat16", "float16"),
    [
        pytest.param({"ONEDNN_MAX_CPU_ISA": "AVX2"}, False, False, id="oneDNN as on AVX2"),
        pytest.param(
            {"ONEDNN_MAX_CPU_ISA": "avx512_core_vnni"}, False, False, id="oneDNN as on VNNI, in small letters"
        ),
        pytest.param({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, True, False, id="oneDNN with bfloat16"),
        pytest.param({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, True, True, id="oneDNN with AMX"),
        pytest.param({"ONEDNN_MAX_CPU_ISA": "DEFAULT"}, True, True, id="oneDNN, all"),
        pytest.param({"ATEN_CPU_CAPABILITY": "avx2"}, False, False, id="torch as on AVX2"),
        pytest.param({"ATEN_CPU_CAPABILITY": "default"}, False, False, id="torch with nothing"),
        pytest.param({"ATEN_CPU_CAPABILITY": "avx512"}, True, True, id="torch with AVX-512"),
        pytest.param({"MKL_ENABLE_INSTRUCTIONS": "AVX512_E1"}, False, False, id="MKL as on VNNI"),
        pytest.param({"MKL_ENABLE_INSTRUCTIONS": "AVX512_E3"}, True, False, id="MKL with bfloat16"),
        pytest.param({"MKL_ENABLE_INSTRUCTIONS": "AVX512_E4"}, True, True, id="MKL with AMX"),
    ],
)
def test_an_emulated_processor_has_what_the_older_one_had(
    environment: dict[str, str], bfloat16: bool, float16: bool, tmp_path: Path
) -> None:
    path = told(tmp_path, SAPPHIRE_RAPIDS)
    assert (has_bfloat16(path, environment), has_float16(path, environment)) == (bfloat16, float16)
