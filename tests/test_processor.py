"""Which number formats a processor multiplies by itself, told from what the system says of it."""

from __future__ import annotations

import pytest

from gpuinfer.models.processor import has_bfloat16, has_bfloat16_in_mkl, has_float16

ZEN_3 = "flags\t\t: fpu sse4_2 avx f16c avx2"
CASCADE_LAKE = "flags\t\t: fpu sse4_2 avx avx2 avx512f avx512bw avx512vl avx512_vnni"
COOPER_LAKE = f"{CASCADE_LAKE} avx512_bf16"
SAPPHIRE_RAPIDS = f"{COOPER_LAKE} avx512_fp16 amx_bf16 amx_tile amx_int8"
GRAVITON_2, GRAVITON_3 = "Features\t: fp asimd fphp asimdhp", "Features\t: fp asimd fphp asimdhp sve bf16 i8mm"


@pytest.mark.parametrize(
    ("cores", "environment", "bfloat16", "float16"),
    [
        ([ZEN_3] * 2, {}, False, False),
        ([CASCADE_LAKE] * 2, {}, False, False),
        ([COOPER_LAKE] * 2, {}, True, False),
        ([SAPPHIRE_RAPIDS] * 2, {}, True, True),
        (["flags : amx_bf16"], {}, True, False),
        ([GRAVITON_2], {}, False, True),
        ([GRAVITON_3], {}, True, True),
        ([GRAVITON_3, GRAVITON_2], {}, False, True),  # cores of two kinds have what both have
        (["bugs : bf16"], {}, False, False),
        ([SAPPHIRE_RAPIDS], {"ONEDNN_MAX_CPU_ISA": "AVX2"}, False, False),
        ([SAPPHIRE_RAPIDS], {"ONEDNN_MAX_CPU_ISA": "avx512_core_vnni"}, False, False),
        ([SAPPHIRE_RAPIDS], {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, True, False),
        ([SAPPHIRE_RAPIDS], {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, True, True),
        ([SAPPHIRE_RAPIDS], {"ONEDNN_MAX_CPU_ISA": "DEFAULT"}, True, True),
        ([SAPPHIRE_RAPIDS], {"ATEN_CPU_CAPABILITY": "avx2"}, False, False),
        ([SAPPHIRE_RAPIDS], {"ATEN_CPU_CAPABILITY": "default"}, False, False),
        ([SAPPHIRE_RAPIDS], {"ATEN_CPU_CAPABILITY": "avx512"}, True, True),
        ([SAPPHIRE_RAPIDS], {"MKL_ENABLE_INSTRUCTIONS": "AVX512_E1"}, False, False),
        ([SAPPHIRE_RAPIDS], {"MKL_ENABLE_INSTRUCTIONS": "AVX512_E3"}, True, False),
        ([SAPPHIRE_RAPIDS], {"MKL_ENABLE_INSTRUCTIONS": "AVX512_E4"}, True, True),
    ],
)
def test_a_processor_has_the_formats_that_its_flags_name(cores, environment, bfloat16, float16, tmp_path):
    (path := tmp_path / "cpuinfo").write_text("\n\n".join(cores))
    assert (has_bfloat16(path, environment), has_float16(path, environment)) == (bfloat16, float16)
    for maker in ("GenuineIntel", "AuthenticAMD"):  # MKL serves the processors of its own maker
        path.write_text(f"vendor_id\t: {maker}\n" + "\n\n".join(cores))
        assert has_bfloat16_in_mkl(path, environment) is (bfloat16 and maker == "GenuineIntel")
