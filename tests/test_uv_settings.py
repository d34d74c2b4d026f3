"""uv looks for packages where pip was told to."""

from __future__ import annotations

import pytest

from tools.uv import settings, with_pip


@pytest.mark.parametrize(
    ("listed", "told"),
    [
        pytest.param("", {}, id="nothing is said"),
        pytest.param(
            "global.index-url='https://mirror.example/simple'",
            {"UV_DEFAULT_INDEX": "https://mirror.example/simple"},
            id="another index",
        ),
        pytest.param(
            "global.extra-index-url='https://a.example https://b.example'",
            {"UV_INDEX": "https://a.example https://b.example", "UV_INDEX_STRATEGY": "unsafe-best-match"},
            id="more indexes: the best of all, as pip has it",
        ),
        pytest.param("install.find-links='\\nwheels\\n/more'", {"UV_FIND_LINKS": "wheels,/more"}, id="several folders"),
        pytest.param(
            ":env:.index-url='b'\nglobal.index-url='a'\ninstall.index-url='c'",
            {"UV_DEFAULT_INDEX": "b"},
            id="the environment goes over files",
        ),
        pytest.param("global.timeout='60'\ndownload.index-url='a'\nnonsense", {}, id="what is not about it"),
    ],
)
def test_settings_of_pip_become_those_of_uv(listed, told):
    assert settings(listed) == told


def test_pip_installs_where_uv_cannot_be_had():
    words = with_pip(["pip", "install", "-c", "constraints.txt", "-e", "."])
    assert words[-4:] == ["install", "--no-compile", "-e", "."]


def test_what_pip_cannot_do_is_refused():
    with pytest.raises(SystemExit, match="needs uv"):
        with_pip(["pip", "compile"])
