"""The front of the one file, around small folders: unpacks once, whole or not at all, where nobody else can write."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest
import small_file
from small_file import begin, kept, names, packed, run

pytestmark = pytest.mark.binary
SAYS = 'echo "$GPUINFER_ONE_FILE"; for word; do echo "$word"; done'
NOISE = 48_000_000


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    return small_file.stub(tmp_path_factory.mktemp("front"))


@pytest.fixture(scope="module")
def light(tmp_path_factory, front):
    """The file and its name, quickly unpacked."""
    folder = tmp_path_factory.mktemp("light")
    return packed(small_file.tree(folder / "tree", SAYS), front, folder / "gpuinfer")


@pytest.fixture(scope="module")
def heavy(tmp_path_factory, front):
    """One that takes a moment."""
    folder = tmp_path_factory.mktemp("heavy")
    return packed(small_file.tree(folder / "tree", SAYS, NOISE), front, folder / "gpuinfer")


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_it_unpacks_once_and_hands_its_words_on(light, home):
    file, name = light
    first, second = run(file, home, "a", "b c", ""), run(file, home)
    folder = kept(home) / name
    assert first.stdout.splitlines() == [str(file), f"{folder}/bin/gpuinfer", "a", "b c", ""]
    assert first.stderr.startswith("gpuinfer: unpacking 0 MB into ")
    assert second.stdout.splitlines() == [str(file), f"{folder}/bin/gpuinfer"]
    assert second.stderr == ""
    assert names(home) == [name, f"{name}.lock"]


def test_the_folder_is_what_was_packed(light, home):
    file, name = light
    run(file, home)
    folder, tree = kept(home) / name, file.parent / "tree"
    inside = sorted(path.relative_to(tree) for path in tree.rglob("*"))
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == inside
    for path in inside:
        ours, theirs = folder / path, tree / path
        assert ours.is_symlink() == theirs.is_symlink()
        assert ours.is_dir() or ours.read_bytes() == theirs.read_bytes()
    assert {path.lstat().st_uid for path in folder.rglob("*")} == {os.geteuid()}
    assert not any(stat.S_IMODE(path.stat().st_mode) & 0o077 for path in [folder, *folder.rglob("*")])


def test_files_have_the_same_time_after_each_unpacking(light, home, tmp_path):
    file, name = light
    run(file, home)
    (tmp_path / "other").mkdir()
    run(file, tmp_path / "other")
    times = [(kept(each) / name / "nothing").stat().st_mtime_ns for each in (home, tmp_path / "other")]
    assert times[0] == times[1]


def test_of_first_starts_at_once_one_unpacks(heavy, home):
    file, name = heavy
    starts = [begin(file, home, str(number)) for number in range(4)]
    said = [start.communicate(timeout=small_file.LIMIT_S) for start in starts]
    assert [start.returncode for start in starts] == [0] * 4
    assert [out.splitlines()[-1] for out, _ in said] == ["0", "1", "2", "3"]
    assert sum("unpacking" in err.partition("\n")[0] and "another" not in err for _, err in said) == 1
    assert names(home) == [name, f"{name}.lock"]


def until_it_unpacks(home: Path, name: str) -> None:
    part = kept(home) / f"{name}.part"
    for _ in range(20_000):
        if (part / "noise").exists():
            return
        time.sleep(0.001)
    raise AssertionError("it does not unpack")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_whoever_is_ended_while_unpacking_leaves_nothing_that_is_run(heavy, home, number):
    file, name = heavy
    start = begin(file, home)
    until_it_unpacks(home, name)
    start.send_signal(number)
    out, _ = start.communicate(timeout=small_file.LIMIT_S)
    assert start.returncode == -number
    assert out == ""
    assert name not in names(home)
    if number != signal.SIGKILL:
        assert names(home) == [f"{name}.lock"]
    again = run(file, home, "again")
    assert again.stdout.splitlines()[-1] == "again"
    assert names(home) == [name, f"{name}.lock"]


def test_who_waits_goes_on_where_who_unpacked_was_killed(heavy, home):
    file, name = heavy
    first = begin(file, home)
    until_it_unpacks(home, name)
    second = begin(file, home, "second")
    first.kill()
    out, _ = second.communicate(timeout=small_file.LIMIT_S)
    first.communicate()
    assert out.splitlines()[-1] == "second"


def failed(said: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert said.returncode == code, said.stderr
    assert said.stdout == ""
    last = said.stderr.splitlines()[-1]
    assert last.startswith("gpuinfer: ")
    assert last.endswith(".")
    for word in words:
        assert word in last


def test_a_cache_that_cannot_be_made(light, home):
    (home / ".cache").write_text("in the way")
    failed(run(light[0], home), 2, ".cache/gpuinfer cannot be made: Not a directory", "Set XDG_CACHE_HOME")


def test_a_cache_that_cannot_be_written(light, home, tmp_path):
    """On a file system that is mounted read-only: root may write wherever the mode forbids it."""
    home.joinpath(".cache").mkdir()
    mounting = f"mount -t tmpfs -o ro none {home}/.cache && exec {light[0]}"
    said = unshared(mounting, home)
    failed(said, 2, "cannot be made: Read-only file system", "Set XDG_CACHE_HOME")


def test_a_home_that_cannot_be_written_is_given_as_the_reason(light, home):
    said = unshared(f"mount -t tmpfs -o ro none {home} && exec {light[0]}", home)
    failed(said, 2, ".cache/gpuinfer cannot be made: Read-only file system", "Set XDG_CACHE_HOME")


def test_no_space_is_said_before_anything_is_written(heavy, home):
    (home / ".cache").mkdir()
    said = unshared(
        f"mount -t tmpfs -o size=20m none {home}/.cache; {heavy[0]}; echo $?; find {home}/.cache -type d", home
    )
    assert "it needs 48 MB in " in said.stderr
    assert said.stderr.splitlines()[-1].endswith("Free some, or set XDG_CACHE_HOME to a folder with more.")
    code, *left = said.stdout.split()
    assert code == "1"
    assert [place.rpartition("/")[2] for place in left] == [".cache", "gpuinfer", "one-file"]


def test_space_that_ends_meanwhile_leaves_nothing(heavy, home):
    """A file system that runs out of inodes: there are bytes enough, which is all that can be known before."""
    (home / ".cache").mkdir()
    mounting = f"mount -t tmpfs -o size=200m,nr_inodes=8 none {home}/.cache"
    said = unshared(f"{mounting}; {heavy[0]}; echo $?; find {home}/.cache -name '*-*'", home)
    assert "cannot unpack into" in said.stderr
    assert "No space left on device. Nothing is left there." in said.stderr
    code, *left = said.stdout.split()
    assert code == "1"
    assert [place.rpartition("/")[2] for place in left] == ["one-file", f"{heavy[1]}.lock"]


def unshared(script: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a script that may mount what nobody else sees."""
    words = ["unshare", "--mount", "--map-root-user", "/bin/sh", "-c"]
    if os.geteuid() == 0:
        words.remove("--map-root-user")
    if subprocess.run([*words, "mount -t tmpfs none /mnt"], capture_output=True, timeout=60).returncode:
        pytest.skip("nothing may be mounted here")
    environment = {**os.environ, "HOME": str(home)}
    environment.pop("XDG_CACHE_HOME", None)
    return subprocess.run([*words, script], env=environment, capture_output=True, text=True, timeout=small_file.LIMIT_S)


@pytest.mark.parametrize("which", ["gpuinfer", "gpuinfer/one-file", "gpuinfer/one-file/NAME"])
def test_what_others_could_have_written_is_not_run(light, home, which):
    file, name = light
    run(file, home)
    folder = home / ".cache" / which.replace("NAME", name)
    folder.chmod(0o770)
    failed(run(file, home), 2, str(folder), "others may write", "chmod go-w")
    folder.chmod(0o700)
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(folder, 12345, -1)
    failed(run(file, home), 2, "belongs to user 12345", "Set XDG_CACHE_HOME")


def test_a_link_that_somebody_else_has_laid_is_not_followed(light, home, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can give a link away")
    ours = tmp_path / "ours"
    ours.mkdir(mode=0o700)
    (home / ".cache").mkdir()
    link = home / ".cache/gpuinfer"
    link.symlink_to(ours)
    assert run(light[0], home).returncode == 0
    os.lchown(link, 12345, -1)
    failed(run(light[0], home), 2, "belongs to user 12345")


def test_xdg_cache_home_goes_before_home(light, home, tmp_path):
    file, name = light
    assert run(file, home, XDG_CACHE_HOME=str(tmp_path / "a/b")).returncode == 0
    assert (tmp_path / "a/b/gpuinfer/one-file" / name).is_dir()
    assert list(home.iterdir()) == []
    said = subprocess.run([file], env={}, capture_output=True, text=True, timeout=small_file.LIMIT_S)
    failed(said, 2, "neither HOME nor XDG_CACHE_HOME", "Set XDG_CACHE_HOME")


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_file_that_was_not_copied_whole(heavy, home, tmp_path, damage):
    file, name = heavy
    content = bytearray(file.read_bytes())
    if damage == "cut":
        del content[-1000:]
    else:
        content[len(content) // 2] ^= 1
    broken = tmp_path / "broken"
    broken.write_bytes(content)
    broken.chmod(0o755)
    failed(run(broken, home), 1, "damaged or was not copied whole. Copy it again.")
    assert not kept(home).exists() or names(home) == [f"{name}.lock"]


def test_a_machine_with_another_c_library(light, front, home, tmp_path):
    tree = light[0].parent / "tree"
    none, _ = packed(tree, front, tmp_path / "none", loader="/lib/ld-of-another.so.1")
    failed(run(none, home), 1, "no /lib/ld-of-another.so.1", "Run it on a Linux with glibc 2.2 or newer.")
    newer, _ = packed(tree, front, tmp_path / "newer", glibc=(2, 999))
    failed(run(newer, home), 1, "was built for 2.999 or newer", "or use the wheel.")
    assert list(home.iterdir()) == []


def test_a_folder_that_somebody_has_taken_a_part_of(light, home):
    file, name = light
    run(file, home)
    (kept(home) / name / small_file.PROGRAM).unlink()
    failed(run(file, home), 1, f"{name} is not whole any more. Remove that folder and start again")


def test_the_python_of_the_environment_does_not_reach_it(front, home, tmp_path):
    shows = 'echo "$PYTHONPATH$PYTHONHOME" $PYTHONNOUSERSITE'
    file, _ = packed(small_file.tree(tmp_path / "tree", shows), front, tmp_path / "gpuinfer")
    assert run(file, home, PYTHONPATH="/evil", PYTHONHOME="/evil").stdout == " 1\n"


def test_who_runs_holds_the_lock(front, home, tmp_path):
    file, name = packed(small_file.tree(tmp_path / "tree", "read line"), front, tmp_path / "gpuinfer")
    process = subprocess.Popen([file], env=small_file.told(home, {}), stdin=subprocess.PIPE)
    lock = kept(home) / f"{name}.lock"
    for _ in range(2000):
        if lock.with_suffix("").exists() and shared(lock):
            break
        time.sleep(0.01)
    assert shared(lock)
    process.communicate(b"\n", timeout=small_file.LIMIT_S)
    assert not shared(lock)


def shared(lock: Path) -> bool:
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
