"""uv looks for packages where pip was told to."""

import pytest

from tools.uv import settings, with_pip


@pytest.mark.parametrize(
    ("listed", "told"),
    [
        ("", {}),
        ("global.index-url='https://mirror.example/simple'", {"UV_DEFAULT_INDEX": "https://mirror.example/simple"}),
        ("global.extra-index-url='https://a.example https://b.example'",
         {"UV_INDEX": "https://a.example https://b.example", "UV_INDEX_STRATEGY": "unsafe-best-match"}),
        ("install.find-links='\\nwheels\\n/more'", {"UV_FIND_LINKS": "wheels,/more"}),
        (":env:.index-url='b'\nglobal.index-url='a'\ninstall.index-url='c'", {"UV_DEFAULT_INDEX": "b"}),
        ("global.timeout='60'\ndownload.index-url='a'\nnonsense", {}),
    ],
)  # fmt: skip
def test_settings_of_pip_become_those_of_uv(listed, told):
    assert settings(listed) == told


def test_pip_installs_where_uv_cannot_be_had_and_what_it_cannot_do_is_refused():
    words = with_pip(["pip", "install", "-c", "constraints.txt", "-e", "."])
    assert words[-4:] == ["install", "--no-compile", "-e", "."]
    with pytest.raises(SystemExit, match="needs uv"):
        with_pip(["pip", "compile"])
