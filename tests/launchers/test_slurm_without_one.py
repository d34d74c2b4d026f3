"""What of the launcher `slurm` can be seen without a cluster."""

from __future__ import annotations

import shlex
import subprocess

import pytest
from plans import plan

from gpuinfer.config.options import GivenValue
from gpuinfer.errors import UsageError
from gpuinfer.fleet.launchers import base, slurm
from gpuinfer.fleet.launchers.slurm import SlurmLauncher


def test_where_there_is_no_slurm_the_cure_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="there is no SLURM here: no sbatch") as told:
        SlurmLauncher().check()
    assert "login node" in str(told.value)


def test_one_that_does_not_answer_is_told_in_its_own_words(monkeypatch, tmp_path):
    for program in ("sbatch", "srun", "squeue", "scancel", "scontrol"):
        (tmp_path / program).write_text(
            "#!/bin/sh\necho 'squeue: error: Unable to contact slurm controller' >&2; exit 1"
        )
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(UsageError, match="Unable to contact slurm controller"):
        SlurmLauncher().check()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("partition", "main --wrap=reboot"),
        ("partition", "-p"),
        ("account", "a;reboot"),
        ("account", "a\nb"),
        ("time", "$(reboot)"),
        ("mem", "64G; reboot"),
        ("gpus", "`id`"),
        ("container", "--export=ALL"),
        ("container", "image\n#SBATCH --wrap=reboot"),
        ("cpus", "none of them"),
        ("colour", "red"),
    ],
)
def test_values_that_are_more_than_values_are_refused(option, value):
    with pytest.raises(UsageError, match=option):
        base.make_launcher("slurm", {option: GivenValue(value, f"-L {option}")})


def test_mounts_need_a_container(monkeypatch, tmp_path):
    for program in ("sbatch", "srun", "squeue", "scancel", "scontrol"):
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="-L container=IMAGE"):
        base.make_launcher("slurm", {"mounts": GivenValue("/data:/data", "-L mounts")})


def test_the_script_takes_every_word_for_itself(tmp_path):
    folder = tmp_path / "a folder; with $(signs) and 'quotes'"
    folder.mkdir()
    words = ["--model", "a b; touch harm", "$(touch harm)", "`touch harm`", "'", '"', "\\", "*"]
    srun = ["--container-image=/images/my image$(touch harm).sqsh"]
    made = slurm.write_batch_script(plan(folder, *words), folder / "fleet.pulse", ["python", "-m", "gpuinfer"], srun)
    subprocess.run(["bash", "-n", made], check=True)
    (line,) = [line for line in made.read_text().splitlines() if line.startswith("srun ")]
    told = shlex.split(line.removesuffix(' --host "$address"'))
    assert told[: len(srun) + 4] == ["srun", *srun, "python", "-m", "gpuinfer"]
    assert told[len(srun) + 4 :][: len(words)] == words
