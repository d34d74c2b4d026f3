"""What `plugins install` and `plugins uninstall` accept, refuse and write, where neither pip nor uv has to run."""

from __future__ import annotations

import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from made_wheels import make_wheel, plugin_wheel

from gpuinfer import testing
from gpuinfer.config import registry
from gpuinfer.config.packages import installer, package_info, places
from gpuinfer.errors import PluginError, UnknownName, UsageError
from gpuinfer.host import installation


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("echo", ("gpuinfer-echo", "echo")),
        ("gpuinfer-echo", ("gpuinfer-echo",)),
        ("gpuinfer_echo", ("gpuinfer_echo",)),
        ("acme[fast]>=1", ("gpuinfer-acme[fast]>=1", "acme[fast]>=1")),
    ],
)
def test_a_short_name_means_a_plugin_first(text, names):
    assert package_info.read_source(text).names == names


@pytest.mark.parametrize(
    ("text", "error"),
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
def test_what_names_no_package_is_refused_with_what_would(text, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare").mkdir()
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UsageError, match=error):
        package_info.read_source(text)


def test_folders_wheels_and_archives_are_distinguished(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "pyproject.toml").write_text('[build-system]\nrequires = ["flit_core>=3"]\n')
    wheel = make_wheel(tmp_path, "acme")
    (tmp_path / "acme-1.0.tar.gz").write_bytes(b"")
    kinds = [package_info.read_source(text).kind for text in ("./mine", wheel.name, "acme-1.0.tar.gz")]
    assert kinds == ["folder", "wheel", "archive"]
    assert package_info.build_needs(tmp_path / "mine") == ["flit_core>=3"]
    (tmp_path / "mine" / "pyproject.toml").write_text("= no")
    with pytest.raises(UsageError, match=r"pyproject\.toml cannot be read"):
        package_info.build_needs(tmp_path / "mine")


def unpacked(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as whole:
        whole.extractall(folder)
    return folder


def offer_of(tmp_path: Path, **contents) -> package_info.PackageOffer:
    return package_info.offer_in(unpacked(make_wheel(tmp_path / "made", "acme", **contents), tmp_path / "staged"))


def test_what_a_package_adds_is_read_and_not_imported(tmp_path):
    points = {"gpuinfer.workloads": {"chore": "acme:X"}, "gpuinfer.backends": {"good": "acme:X", "best": "acme:X"}}
    offer = offer_of(tmp_path, points=points, requires=["gpuinfer>=0.1"], modules={"acme": "raise SystemExit(1)"})
    assert offer.words == "backend best, backend good, workload chore"
    assert (offer.package, offer.contract, offer.summary) == ("acme 1.0", ">=0.1", "Made.")
    package_info.refuse_unusable(offer)


@pytest.mark.parametrize(
    ("points", "requires", "error"),
    [
        pytest.param({}, [], "it has no entry points at all", id="nothing"),
        pytest.param({"console_scripts": {"x": "a:x"}}, [], "entry points of console_scripts", id="something else"),
        pytest.param({"gpuinfer.backends": {"good": "a:X"}}, ["gpuinfer>=9"], "for gpuinfer >=9", id="a contract"),
        pytest.param({"gpuinfer.backends": {"inprocess": "a:X"}}, [], "which gpuinfer 0", id="a name that is taken"),
        pytest.param({"gpuinfer.workloads": {"bench": "a:X"}}, [], "is a command or a setting", id="our command"),
    ],
)
def test_a_package_that_cannot_be_used_is_refused_by_name(tmp_path, points, requires, error):
    with pytest.raises(PluginError, match=rf"acme 1\.0 .*{error}"):
        package_info.refuse_unusable(offer_of(tmp_path, points=points, requires=requires))


# The user's folder


@pytest.fixture
def mine(tmp_path, monkeypatch):
    place = tmp_path / "mine"
    place.mkdir(mode=0o700)
    monkeypatch.setenv(installation.PLUGIN_FOLDER_VARIABLE, str(place))
    registry.search_again()
    yield place
    registry.search_again()


def put(wheel: Path, folder: Path) -> None:
    places.put_in(unpacked(wheel, wheel.with_suffix("")), folder)


def modules_in(folder: Path) -> set[str]:
    files = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {path for path in files if "dist-info" not in path}


def test_a_newer_version_takes_the_place_of_an_older_one(mine, tmp_path):
    put(make_wheel(tmp_path / "made", "acme", "1.0", modules={"acme": "", "acme_old": ""}), mine)
    (mine / "__pycache__").mkdir()
    (mine / "__pycache__" / "acme_old.cpython-311.pyc").write_bytes(b"")
    put(make_wheel(tmp_path / "made", "acme", "2.0", modules={"acme": "new"}), mine)
    assert [one.version for one in distributions(path=[str(mine)])] == ["2.0"]
    assert modules_in(mine) == {"acme.py"}
    assert (mine / "acme.py").read_text() == "new"


def test_what_is_removed_leaves_nothing_of_its_own_and_all_of_others(mine, tmp_path):
    put(plugin_wheel(tmp_path / "made", "acme", backend="acme", modules={"shared/acme": "", "acme": ""}), mine)
    put(make_wheel(tmp_path / "made", "zeta", modules={"shared/zeta": ""}), mine)
    installer.remove(installer.find_installed("acme"), 10.0)
    assert modules_in(mine) == {"shared/zeta.py"}
    assert [one.name for one in distributions(path=[str(mine)])] == ["zeta"]


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
    places.take_out(places.packages_in(mine)["acme"], mine)
    assert outside.read_text() == "dear"


def test_a_folder_of_the_users_is_made_for_its_user_alone(tmp_path):
    folder = tmp_path / "new" / "plugins"
    places.make_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(UsageError, match=r"nothing is installed into .* others may write"):
        places.make_folder(folder)


def test_in_an_environment_of_ones_own_they_go_there_unless_another_place_is_named(mine, monkeypatch):
    monkeypatch.setattr(places, "why_no_environment", lambda: None)
    assert places.choose_place().folder is None
    assert places.choose_place("folder").folder == mine


@pytest.mark.parametrize(("mark", "reason"), [("PEX-INFO", "one file"), ("uv-receipt.toml", "`uv tool`")])
def test_where_an_upgrade_would_lose_them_they_go_to_the_folder(mark, reason, mine, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / mark).write_text("")
    assert places.choose_place().folder == mine
    with pytest.raises(UsageError, match=rf"{reason}.* Leave out --into environment"):
        places.choose_place("environment")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("gpuinfer", UsageError, "gpuinfer itself is no plugin"),
        ("numpy", UsageError, "adds no plugin of gpuinfer. To remove it: pip uninstall numpy"),
        ("gpuinfer-rsoe", UnknownName, "Did you mean 'gpuinfer-rose'"),
    ],
)
def test_what_is_no_plugin_is_not_removed(mine, tmp_path, name, error, message):
    put(plugin_wheel(tmp_path / "made", "gpuinfer-rose", backend="rose"), mine)
    with pytest.raises(error, match=message):
        installer.find_installed(name)


# The commands


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ("install echo", "--yes"),
        ("upgrade --all", "--yes"),
        ("uninstall echo", "--yes"),
        ("upgrade --yes", "gpuinfer plugins upgrade NAME, or --all"),
        ("upgrade echo --all --yes", "gpuinfer plugins upgrade NAME, or --all"),
        ("install echo --yes --find-links nowhere", "Give one that holds packages"),
    ],
)
def test_a_command_that_says_too_little_does_nothing(words, cure, gpuinfer):
    code, out, err = gpuinfer("plugins", *words.split())
    assert (code, out) == (2, "")
    assert cure in err


def test_a_package_that_is_installed_already_is_not_installed_again(mine, tmp_path, gpuinfer):
    put(plugin_wheel(tmp_path / "made", "gpuinfer-rose", backend="rose"), mine)
    code, out, _ = gpuinfer("plugins", "install", "rose", "--yes")
    assert code == 0
    assert f"gpuinfer-rose 1.0 is installed already, in your folder {mine}." in out


def test_a_short_name_is_checked_too(gpuinfer, monkeypatch):
    checked = []
    monkeypatch.setattr(testing, "check_package", lambda package, **named: checked.append(package) or [])
    assert gpuinfer("plugins", "check", "echo")[0] == 0
    assert checked == ["gpuinfer-echo"]
