"""What is installed, removed and refused, as far as no package program is needed to see it."""

from __future__ import annotations

import os
import signal
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from made_wheels import make_wheel, plugin_wheel
from packages import install

from gpuinfer import testing
from gpuinfer.config import registry
from gpuinfer.config.packages import installer, package_info, places
from gpuinfer.config.packages import places as user_folder
from gpuinfer.config.packages.installer import uninterrupted
from gpuinfer.errors import PluginError, UnknownName, UsageError, WorkError
from gpuinfer.host import installation


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("echo", ("gpuinfer-echo", "echo")),
        ("gpuinfer-echo", ("gpuinfer-echo",)),
        ("gpuinfer_echo", ("gpuinfer_echo",)),
        ("echo==1.2", ("gpuinfer-echo==1.2", "echo==1.2")),
        ("acme[fast]>=1", ("gpuinfer-acme[fast]>=1", "acme[fast]>=1")),
    ],
)
def test_a_short_name_means_a_plugin_first(text, names):
    assert package_info.read_source(text).names == names


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no package"),
        ("--index-url=http://evil", "names no package"),
        ("git+ssh://host/repository", "is an address. Fetch it yourself"),
        ("https://host/a.whl", "is an address"),
        ("a b", "names no package"),
        ("echo; python_version>'3'", "is more than a name"),
        ("./nowhere", "there is no file or folder"),
        ("missing.whl", "there is no file or folder missing.whl"),
        ("./bare", "holds no package: there is no pyproject.toml"),
        ("./notes.txt", "is no package"),
    ],
)
def test_what_names_no_package_is_refused_with_what_would(text, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare").mkdir()
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UsageError, match=said):
        package_info.read_source(text)


def test_folders_wheels_and_archives_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "pyproject.toml").write_text('[build-system]\nrequires = ["flit_core>=3"]\n')
    wheel = make_wheel(tmp_path, "acme")
    (tmp_path / "acme-1.0.tar.gz").write_bytes(b"")
    assert package_info.read_source("./mine").kind == "folder"
    assert package_info.read_source(f"{tmp_path}/mine").path == tmp_path / "mine"
    assert (package_info.read_source(wheel.name).kind, package_info.read_source("acme-1.0.tar.gz").kind) == (
        "wheel",
        "archive",
    )
    assert package_info.build_needs(tmp_path / "mine") == ["flit_core>=3"]
    (tmp_path / "mine" / "pyproject.toml").write_text("= no")
    with pytest.raises(UsageError, match=r"pyproject\.toml cannot be read"):
        package_info.build_needs(tmp_path / "mine")


def unpacked(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as whole:
        whole.extractall(folder)
    return folder


def offer_of(tmp_path: Path, name: str = "acme", **said) -> package_info.PackageOffer:
    return package_info.offer_in(unpacked(make_wheel(tmp_path / "made", name, **said), tmp_path / "staged"))


def test_what_a_package_adds_is_read_and_not_imported(tmp_path):
    points = {"gpuinfer.workloads": {"chore": "acme:X"}, "gpuinfer.backends": {"good": "acme:X", "best": "acme:X"}}
    offer = offer_of(tmp_path, points=points, requires=["gpuinfer>=0.1"], modules={"acme": "raise SystemExit(1)"})
    assert offer.words == "backend best, backend good, workload chore"
    assert (offer.package, offer.contract, offer.summary) == ("acme 1.0", ">=0.1", "Made.")
    package_info.refuse_unusable(offer)


@pytest.mark.parametrize(
    ("points", "requires", "said"),
    [
        pytest.param({}, [], "adds no plugin of gpuinfer: it has no entry points at all", id="nothing"),
        pytest.param(
            {"console_scripts": {"x": "acme:x"}}, [], "it has entry points of console_scripts", id="something else"
        ),
        pytest.param(
            {"gpuinfer.backends": {"good": "acme:X"}},
            ["gpuinfer>=9"],
            "acme 1.0 is for gpuinfer >=9, and this is gpuinfer",
            id="for another contract",
        ),
        pytest.param(
            {"gpuinfer.backends": {"inprocess": "acme:X"}}, [], "'inprocess', which gpuinfer 0", id="a taken name"
        ),
        pytest.param(
            {"gpuinfer.workloads": {"bench": "acme:X"}}, [], "is a command or a setting of gpuinfer", id="our command"
        ),
    ],
)
def test_a_package_that_cannot_be_used_is_refused_by_name(tmp_path, points, requires, said):
    with pytest.raises(PluginError, match=said):
        package_info.refuse_unusable(offer_of(tmp_path, points=points, requires=requires))


def test_a_folder_without_a_package_is_none(tmp_path):
    with pytest.raises(PluginError, match="holds no package that can be read"):
        package_info.offer_in(tmp_path)


@pytest.fixture
def here(tmp_path):
    """What is installed: leaf 1.0, and stem 2.0 with an extra that needs more."""
    install(tmp_path, "leaf", {})
    install(tmp_path, "stem", {}, version="2.0")
    metadata = tmp_path / "stem-2.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text() + "Requires-Dist: leaf\nRequires-Dist: bud>1; extra == 'more'\n")
    return {registry.plain(one.name): one for one in distributions(path=[str(tmp_path)])}


@pytest.mark.parametrize(
    ("requires", "missing", "odds"),
    [
        (["leaf>=1", "Stem"], [], []),
        (["leaf>=2"], [], ["it needs leaf >=2, and here is 1.0"]),
        (["bud>=1,<3"], ["bud<3,>=1"], []),
        (["stem[more]"], ["bud>1"], []),
        (["bud; extra == 'dev'", "bud; python_version < '3'"], [], []),
        (["what is this"], [], ["it needs 'what is this', which nobody can read"]),
    ],
)
def test_what_a_package_needs_against_what_is_here(here, requires, missing, odds):
    found = package_info.needs_of(requires, here)
    assert (found.missing, found.odds) == (missing, odds)


def test_who_needs_a_package(here):
    assert package_info.who_needs("leaf", here) == ["stem 2.0"]
    assert package_info.who_needs("bud", here) == []  # only with an extra that nobody has asked for


# The user's folder


@pytest.fixture
def mine(tmp_path, monkeypatch):
    place = tmp_path / "mine"
    place.mkdir(mode=0o700)
    monkeypatch.setenv(installation.PLUGIN_FOLDER_VARIABLE, str(place))
    registry.refresh()
    yield place
    registry.refresh()


def put(wheel: Path, folder: Path) -> None:
    with user_folder.locked_folder(folder) as staged:
        user_folder.move_in(unpacked(wheel, staged), folder)


def in_it(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_a_newer_version_takes_the_place_of_an_older_one(mine, tmp_path):
    put(make_wheel(tmp_path / "made", "acme", "1.0", modules={"acme": "", "acme_old": ""}), mine)
    (mine / "__pycache__").mkdir()
    (mine / "__pycache__" / "acme_old.cpython-311.pyc").write_bytes(b"")
    put(make_wheel(tmp_path / "made", "acme", "2.0", modules={"acme": "new"}), mine)
    assert [one.version for one in distributions(path=[str(mine)])] == ["2.0"]
    assert {path for path in in_it(mine) if "dist-info" not in path} == {"acme.py"}
    assert (mine / "acme.py").read_text() == "new"


def test_what_is_taken_out_leaves_nothing_of_its_own_and_all_of_others(mine, tmp_path):
    put(make_wheel(tmp_path / "made", "acme", modules={"shared/acme": "", "acme": ""}), mine)
    put(make_wheel(tmp_path / "made", "zeta", modules={"shared/zeta": ""}), mine)
    [acme] = [one for one in distributions(path=[str(mine)]) if one.name == "acme"]
    with user_folder.locked_folder(mine):
        user_folder.take_out(acme, mine)
    assert {path for path in in_it(mine) if "dist-info" not in path} == {"shared/zeta.py"}
    assert [one.name for one in distributions(path=[str(mine)])] == ["zeta"]
    assert [path.name for path in mine.glob(".new-*")] == []


def test_a_file_of_another_package_is_not_overwritten(mine, tmp_path):
    put(make_wheel(tmp_path / "made", "acme", modules={"common": "acme's"}), mine)
    with pytest.raises(UsageError, match=r"zeta 1\.0 brings common\.py, which is acme's already"):
        put(make_wheel(tmp_path / "made", "zeta", modules={"common": "zeta's", "zeta": ""}), mine)
    assert (mine / "common.py").read_text() == "acme's"
    assert not (mine / "zeta.py").exists()


def test_a_list_of_files_cannot_lead_out_of_the_folder(mine, tmp_path):
    outside = tmp_path / "dear.txt"
    outside.write_text("dear")
    put(make_wheel(tmp_path / "made", "acme", modules={"acme": ""}), mine)
    record = mine / "acme-1.0.dist-info" / "RECORD"
    record.write_text(record.read_text() + f"../dear.txt,,\n{outside},,\n")
    [acme] = distributions(path=[str(mine)])
    with user_folder.locked_folder(mine):
        user_folder.take_out(acme, mine)
    assert outside.read_text() == "dear"


def test_what_was_torn_off_is_cleared_away_by_the_next(mine, tmp_path):
    (mine / ".new-torn" / "acme").mkdir(parents=True)
    put(make_wheel(tmp_path / "made", "zeta", modules={"zeta": ""}), mine)
    assert [path.name for path in mine.glob(".new-*")] == []


def test_one_process_at_a_time_changes_the_folder(mine, monkeypatch):
    monkeypatch.setattr(user_folder, "WAIT_S", 0.0)
    with (
        user_folder.locked_folder(mine),
        pytest.raises(WorkError, match="another gpuinfer is installing into"),
        user_folder.locked_folder(mine),
    ):
        raise AssertionError("two at once")


def test_a_ctrl_c_in_the_middle_is_heard_when_all_is_in_place():
    done = []

    def move() -> None:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("all")

    with pytest.raises(KeyboardInterrupt):
        move()
    assert done == ["all"]


def test_a_folder_of_the_users_is_made_for_its_user_alone(tmp_path):
    folder = tmp_path / "new" / "plugins"
    places.make_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(UsageError, match=r"nothing is installed into .* others may write"):
        places.make_folder(folder)


def test_in_one_file_plugins_go_to_the_folder(mine, monkeypatch):
    monkeypatch.setattr(places, "in_one_file", lambda: True)
    assert places.choose_place().folder == mine
    with pytest.raises(UsageError, match=r"gpuinfer runs from one file\. Leave out --into environment"):
        places.choose_place("environment")


def test_with_uv_tool_they_go_to_the_folder_which_an_upgrade_leaves_alone(mine, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "uv-receipt.toml").write_text("[tool]\n")
    assert places.choose_place().folder == mine
    with pytest.raises(UsageError, match=r"`uv tool`.* Leave out --into environment"):
        places.choose_place("environment")


def test_in_an_environment_of_ones_own_they_go_there_unless_another_place_is_named(mine, monkeypatch):
    monkeypatch.setattr(places, "why_no_environment", lambda: None)
    assert places.choose_place().folder is None
    assert places.choose_place("folder").folder == mine


# Removal


@pytest.fixture
def planted(mine, tmp_path):
    """A plugin with what it needs, and another one that shares some of it."""
    put(make_wheel(tmp_path / "made", "leaf", modules={"leaf": ""}), mine)
    put(make_wheel(tmp_path / "made", "stem", modules={"stem": ""}, requires=["leaf"]), mine)
    put(make_wheel(tmp_path / "made", "bud", modules={"bud": ""}), mine)
    put(plugin_wheel(tmp_path / "made", "gpuinfer-rose", backend="rose", requires=["stem", "bud"]), mine)
    put(plugin_wheel(tmp_path / "made", "gpuinfer-lily", backend="lily", requires=["bud"]), mine)
    return mine


def test_what_a_plugin_brought_goes_with_it_and_what_another_needs_stays(planted):
    rose = installer.find_installed("rose")
    assert sorted(one.name for one in installer.orphans_of(rose)) == ["leaf", "stem"]
    installer.remove(rose, None, None)
    assert sorted(one.name for one in distributions(path=[str(planted)])) == ["bud", "gpuinfer-lily"]


def test_what_another_needs_is_not_removed(planted, tmp_path):
    put(plugin_wheel(tmp_path / "made", "gpuinfer-vase", backend="vase", requires=["gpuinfer-rose"]), planted)
    with pytest.raises(UsageError, match=r"gpuinfer-vase 1\.0 needs gpuinfer-rose\. Uninstall what needs it first"):
        installer.refuse_needed(installer.find_installed("gpuinfer-rose"))


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("gpuinfer", UsageError, "gpuinfer itself is no plugin"),
        ("numpy", UsageError, "adds no plugin of gpuinfer. To remove it: pip uninstall numpy"),
        ("gpuinfer-rsoe", UnknownName, "Did you mean 'gpuinfer-rose'"),
    ],
)
def test_what_is_no_plugin_is_not_removed(planted, name, error, said):
    with pytest.raises(error, match=said):
        installer.find_installed(name)


@pytest.mark.parametrize("words", [("install", "echo"), ("upgrade", "--all"), ("uninstall", "echo")])
def test_without_somebody_to_ask_nothing_is_done(words, gpuinfer):
    code, out, err = gpuinfer("plugins", *words)
    assert (code, out) == (2, "")
    assert err == ("gpuinfer: nobody is there to be asked, and nothing is installed or removed unasked. Add --yes.\n")


def test_what_is_there_already_is_said_and_nothing_done(planted, gpuinfer):
    code, out, _ = gpuinfer("plugins", "install", "rose", "--yes")
    assert code == 0
    assert f"gpuinfer-rose 1.0 is installed already, in your folder {planted}." in out


def test_to_upgrade_says_what_or_all(gpuinfer):
    assert "gpuinfer plugins upgrade NAME, or --all" in gpuinfer("plugins", "upgrade", "--yes")[2]
    assert "gpuinfer plugins upgrade NAME, or --all" in gpuinfer("plugins", "upgrade", "echo", "--all", "--yes")[2]


def test_a_short_name_is_checked_too(gpuinfer, monkeypatch):
    checked = []
    monkeypatch.setattr(testing, "check_package", lambda package, **named: checked.append(package) or [])
    assert gpuinfer("plugins", "check", "echo")[0] == 0
    assert checked == ["gpuinfer-echo"]
