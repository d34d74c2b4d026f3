"""What `plugins new`, `install` and `uninstall` accept, refuse and write, where neither pip nor uv has to run; and the
user's folder of plugins: seen last, and only where nobody else can put code into it.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packages import BACKEND, install, make_wheel

from gpuinfer import __version__, testing
from gpuinfer.config import registry
from gpuinfer.config.packages import installer, package_info, places, template
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
    project = tmp_path / "mine" / "pyproject.toml"
    project.parent.mkdir()
    project.write_text('[build-system]\nrequires = ["flit_core>=3"]\n')
    wheel = make_wheel(tmp_path, "acme")
    (tmp_path / "acme-1.0.tar.gz").write_bytes(b"")
    kinds = [package_info.read_source(text).kind for text in ("./mine", wheel.name, "acme-1.0.tar.gz")]
    assert kinds == ["folder", "wheel", "archive"]
    assert package_info.build_needs(tmp_path / "mine") == ["flit_core>=3"]
    project.write_text("= no")
    with pytest.raises(UsageError, match=r"pyproject\.toml cannot be read"):
        package_info.build_needs(tmp_path / "mine")


def unpacked(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as whole:
        whole.extractall(folder)
    return folder


@pytest.mark.parametrize(
    ("points", "requires", "error"),
    [
        ({"gpuinfer.workloads": {"chore": "a:X"}, "gpuinfer.backends": {"good": "a:X"}}, ["gpuinfer>=0.1"], None),
        ({}, [], "it has no entry points at all"),
        ({"console_scripts": {"x": "a:x"}}, [], "entry points of console_scripts"),
        ({"gpuinfer.backends": {"good": "a:X"}}, ["gpuinfer>=9"], "for gpuinfer >=9"),
        ({"gpuinfer.backends": {"inprocess": "a:X"}}, [], "which gpuinfer 0"),
        ({"gpuinfer.workloads": {"bench": "a:X"}}, [], "is a command or a setting"),
    ],
)
def test_what_a_package_adds_is_read_and_not_imported_and_refused_by_name(tmp_path, points, requires, error):
    made = make_wheel(tmp_path / "made", "acme", points=points, requires=requires, modules={"a": "raise SystemExit(1)"})
    offer = package_info.offer_in(unpacked(made, tmp_path / "staged"))
    if error is None:
        assert (offer.words, offer.package) == ("backend good, workload chore", "acme 1.0")
        assert (offer.contract, offer.summary) == (">=0.1", "Made.")
        package_info.refuse_unusable(offer)
    else:
        with pytest.raises(PluginError, match=rf"acme 1\.0 .*{error}"):
            package_info.refuse_unusable(offer)


# The user's folder


@pytest.fixture
def mine(tmp_path, monkeypatch):
    place = tmp_path / "mine"
    place.mkdir(mode=0o700)
    monkeypatch.setenv(installation.PLUGIN_FOLDER_VARIABLE, str(place))
    monkeypatch.setattr(sys, "path", list(sys.path))
    registry.search_again()
    yield place
    registry.search_again()


def put(folder: Path, *made, **named) -> None:
    wheel = make_wheel(folder.parent / "made", *made, **named)
    places.put_in(unpacked(wheel, wheel.with_suffix("")), folder)


def modules_in(folder: Path) -> set[str]:
    files = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {path for path in files if "dist-info" not in path}


def test_a_newer_version_takes_the_place_of_an_older_one_and_no_file_of_another_package(mine):
    put(mine, "acme", "1.0", modules={"acme": "", "acme_old": ""})
    (mine / "__pycache__").mkdir()
    (mine / "__pycache__" / "acme_old.cpython-311.pyc").write_bytes(b"")
    put(mine, "acme", "2.0", modules={"acme": "new"})
    assert [one.version for one in distributions(path=[str(mine)])] == ["2.0"]
    with pytest.raises(UsageError, match=r"zeta 1\.0 brings acme\.py, which is acme's already"):
        put(mine, "zeta", modules={"acme": "zeta's", "zeta": ""})
    assert modules_in(mine) == {"acme.py"}
    assert (mine / "acme.py").read_text() == "new"


def test_what_is_removed_leaves_nothing_of_its_own_and_all_of_others_and_cannot_lead_out_of_the_folder(mine, tmp_path):
    points = {"gpuinfer.backends": {"acme": "acme:Good"}}
    put(mine, "acme", points=points, requires=["gpuinfer>=0.1"], modules={"shared/acme": "", "acme": ""})
    put(mine, "zeta", modules={"shared/zeta": ""})
    (outside := tmp_path / "dear.txt").write_text("dear")
    record = mine / "acme-1.0.dist-info" / "RECORD"
    record.write_text(record.read_text() + f"../dear.txt,,\n{outside},,\n")
    installer.remove(installer.find_installed("acme"), 10.0)
    assert modules_in(mine) == {"shared/zeta.py"}
    assert [one.name for one in distributions(path=[str(mine)])] == ["zeta"]
    assert outside.read_text() == "dear"


def test_a_folder_of_the_users_is_made_for_its_user_alone(tmp_path):
    folder = tmp_path / "new" / "plugins"
    places.make_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(UsageError, match=r"nothing is installed into .* others may write"):
        places.make_folder(folder)


@pytest.mark.parametrize(("mark", "reason"), [("PEX-INFO", "one file"), ("uv-receipt.toml", "`uv tool`"), ("", "")])
def test_plugins_go_into_the_environment_unless_an_upgrade_would_lose_them(mark, reason, mine, tmp_path, monkeypatch):
    if mark:
        monkeypatch.setattr(sys, "prefix", str(tmp_path))
        (tmp_path / mark).write_text("")
        with pytest.raises(UsageError, match=rf"{reason}.* Leave out --into environment"):
            places.choose_place("environment")
    else:
        monkeypatch.setattr(places, "why_no_environment", lambda: None)
    assert places.choose_place().folder == (mine if mark else None)
    assert places.choose_place("folder").folder == mine


@pytest.mark.sample
@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("gpuinfer", UsageError, "gpuinfer itself is no plugin"),
        ("numpy", UsageError, "adds no plugin of gpuinfer. To remove it: pip uninstall numpy"),
        ("gpuinfer-rsoe", UnknownName, "Did you mean 'gpuinfer-rose'"),
    ],
)
def test_what_is_no_plugin_is_not_removed_and_what_is_installed_not_installed_again(
    mine, name, error, message, gpuinfer
):
    put(mine, "gpuinfer-rose", points={"gpuinfer.backends": {"rose": "rose:Good"}}, requires=["gpuinfer>=0.1"])
    with pytest.raises(error, match=message):
        installer.find_installed(name)
    code, out, _ = gpuinfer("plugins", "install", "rose", "--yes")
    assert (code, f"gpuinfer-rose 1.0 is installed already, in your folder {mine}." in out) == (0, True)


def test_a_short_name_is_checked_too(gpuinfer, monkeypatch):
    checked = []
    monkeypatch.setattr(testing, "check_package", lambda package, **named: checked.append(package) or [])
    assert gpuinfer("plugins", "check", "echo")[0] == 0
    assert checked == ["gpuinfer-echo"]


def test_the_folder_comes_last_so_that_it_hides_nothing(mine):
    assert installation.add_plugin_folder() is None
    assert sys.path[-1] == str(mine)
    installation.add_plugin_folder()
    assert sys.path.count(str(mine)) == 1


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_not_used_and_said_to_be_so(mine, mode, tmp_path, monkeypatch):
    mine.chmod(mode)
    problem = str(installation.add_plugin_folder())
    assert f"mode {mode:04o}" in problem
    assert problem.endswith(f"chmod go-w {mine}.")
    assert str(mine) not in sys.path
    (tmp_path / "link").symlink_to(mine)  # a link is judged by where it leads
    monkeypatch.setenv(installation.PLUGIN_FOLDER_VARIABLE, str(tmp_path / "link"))
    assert f"mode {mode:04o}" in str(installation.add_plugin_folder())


def test_a_folder_of_another_users_or_below_one_that_anyone_may_write_to_is_as_bad(mine, monkeypatch):
    mine.parent.chmod(0o777)
    assert f"others may write to {mine.parent} " in str(installation.add_plugin_folder())
    mine.parent.chmod(0o1777)  # as of /tmp: nobody can exchange what is another's
    assert installation.add_plugin_folder() is None
    sys.path.remove(str(mine))
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    if not mine.stat().st_uid:  # root's folders are anyone's to use
        os.chown(mine, 4712, -1)
    assert "belongs to another user" in str(installation.add_plugin_folder())


@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_the_command_sees_what_lies_there_or_says_why_it_does_not_look(mine, mode):
    install(mine, "acme", {"backends": {"good": "acme_folder:Good"}}, {"acme_folder": BACKEND})
    mine.chmod(mode)
    words, own = [sys.executable, "-m", "gpuinfer", "plugins", "list"], {**os.environ, "COLUMNS": "150"}
    done = subprocess.run(words, env=own, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    seen = any(line.split()[:3] == ["acme", "1.0", "folder"] for line in done.stdout.splitlines())
    why = f"gpuinfer: the plugins in {mine} are not used: others may write"
    assert (seen, done.stderr[: len(why)]) == ((True, "") if mode == 0o700 else (False, why)), done.stdout


# `plugins new`. Whether what is written works: test_new_packages.py


@pytest.mark.parametrize("kind", registry.KINDS.values())
def test_every_kind_of_plugin_can_be_begun(kind, tmp_path, gpuinfer):
    code, out, err = gpuinfer("plugins", "new", kind, "my-thing", "--path", str(tmp_path))
    assert (code, err) == (0, "")
    folder = tmp_path / "gpuinfer-my-thing"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    [(name, target)] = project["entry-points"][f"gpuinfer.{registry.plural(kind)}"].items()
    module, _, class_name = target.partition(":")
    tree = ast.parse((folder / module.replace(".", "/")).with_suffix(".py").read_text())
    assert name == "my-thing"
    assert next(node.name for node in tree.body if isinstance(node, ast.ClassDef)) == class_name
    wanted = registry.wanted_versions(project["dependencies"])
    assert (wanted, registry.fits_version(wanted, __version__)) == (registry.contract_range(), True)
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {"README.md", ".gitignore", "gpuinfer_my_thing/py.typed", "tests/test_gpuinfer_my_thing.py"} <= written
    assert written == {line.strip() for line in out.splitlines() if line.strip() in written}
    for path in written:
        text = (folder / path).read_text()
        assert not {"{{", "{%", "MODULE"} & set(text.split())
        assert path == "gpuinfer_my_thing/py.typed" or text.endswith("\n")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("My Backend!", "my-backend"),
        ("mine_too", "mine-too"),
        ("2fast", "fast"),
        ("", "my-plugin"),
        ("--", "my-plugin"),
        ("../../etc", "etc"),
        ("x" * 29, "x" * 28),
        ("naïve", "na-ve"),
    ],
)
def test_a_name_that_is_none_is_refused_with_a_better_one(name, hint):
    with pytest.raises(UsageError, match=f"is no name for a plugin.*such as {hint}"):
        template.new_package("backend", name)


@pytest.mark.parametrize("there", ["file", "folder", "link", "torn"])
def test_nothing_is_overwritten_and_what_is_torn_off_leaves_nothing(there, tmp_path, gpuinfer, monkeypatch):
    def torn(self, text, **said):
        raise KeyboardInterrupt

    folder = tmp_path / "gpuinfer-mine"
    if there == "file":
        folder.write_text("dear")
    elif there == "folder":
        folder.mkdir()
    elif there == "link":
        folder.symlink_to(tmp_path / "nowhere")
    else:
        monkeypatch.setattr(Path, "write_text", torn)
    code, _, err = gpuinfer("plugins", "new", "game", "mine", "--path", str(tmp_path))
    if there == "torn":
        assert (code, list(tmp_path.iterdir())) == (3, [])
        return
    assert code == 2
    assert "nothing is overwritten. Take another name, or another place: --path DIR." in err
    assert [path.name for path in tmp_path.iterdir()] == ["gpuinfer-mine"]
