"""What `gpuinfer serve` refuses before anything starts, and what flags of several models and devices mean."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.backends.central import Central
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.errors import UsageError
from gpuinfer.fleet import plan
from gpuinfer.fleet.plan import gpus_here, gpus_of, refuse_absent_gpus
from gpuinfer.host import machine
from gpuinfer.serving.openai.model_options import models_in
from gpuinfer.serving.serve_options import ServeOptions, check_models_exist, chosen_models

TWO = "--model a=tiny,b=tiny"
REFUSED = [
    ("", "serve needs a model: give --model DIR"),
    ("--model tiny --host 0.0.0.0", "--api-key-file"),
    ("--model tiny --api-key-file missing.txt", "missing.txt"),
    ("--model tiny --api-key-file empty", "no key"),
    ("--model a:b", "--features"),
    ("--model tiny --features 3", "--features"),
    ("--setup-file none.json", "none.json"),
    ("--model tiny --otlp-endpoint localhost:4318", "http://host:4318"),
    # TLS and origins
    ("--model tiny --tls-cert made.pem", "--tls-cert FILE --tls-key FILE"),
    ("--model tiny --tls-cert none.pem --tls-key made.key", "cannot read"),
    ("--model tiny --tls-cert made.key --tls-key made.key", "no certificate"),
    ("--model tiny --tls-cert made.pem --tls-key open.key", "can be read by others"),
    ("--model tiny --tls-cert fifo --tls-key made.key", "no regular file"),
    ("--model tiny --tls-cert made.pem --tls-key fifo", "no regular file"),
    ("--model tiny --allowed-origins app.example.org", "https://app.example.org"),
    # Diffusion models
    ("--model tiny --threshold 0.9", "`threshold` says how a diffusion model fills its masks in"),
    ("--model blobnet -D low=0.4", "-D is said of a diffusion model, and blobnet takes rows. Leave it out"),
    ("--model blobnet --mask-token-id 3", "--mask-token-id is said of a diffusion model"),
    ("--model tiny-llada --decoder treshold", "Did you mean 'threshold'"),
    ("--model tiny-llada --threshold 0.9", "'low-confidence' has no threshold"),
    # Several models
    ("--model a=x,a=y", "'a' is there twice"),
    ("--model =x,b=y", "has no name"),
    ("--model a=,b=y", "'a' has no model"),
    ("--model 'my model=x,b=y'", "'my model' is no name"),
    ("--model a=/data/x,y,b=z", "a folder with a comma in its path"),
    ("--model a=x,", "has no name"),
    ("--model a=x,b", "'b' has no name"),
    ("--model tiny --share tiny=1", "several models"),
    (f"{TWO} --share c=1", "no model 'c'"),
    (f"{TWO} --share a=0", "0 is no share"),
    (f"{TWO} --share a=nan", "nan is no share"),
    (f"{TWO} --share 2", "NAME=2"),
    (f"{TWO} --served-model-name x", "--model names them"),
    (f"{TWO} --adapter p=x", "MODEL:NAME=DIR"),
    (f"{TWO} --weights x", "none is served"),
    (f"{TWO} --mask-token-id 3", "one model of text"),
    (f"{TWO} --checkpoint x", "--checkpoint names a model"),
    ("--model a=blobnet,b=blobnet --weights x", "NAME=FILE"),
    ("--model blobnet --features a=8", "Write --features 256"),
    ("--model a=blobnet --features a=x", "not a whole number"),
    ("--model a=blobnet --features a=0", "from 1 to 1,048,576"),
    ("--model a=blobnet --seats c=2", "no model 'c'"),
    ("--model a=blobnet --input-dtype a=int7", "Choose from"),
    ("--model a=tiny,b=tiniy", "b: there is no model folder 'tiniy'"),
    ("--model a=tiny,b=nowhere/model", "b: there is no model folder 'nowhere/model'"),
    ("--model a=tiny,b=nets:make", "b: nets:make takes rows"),
    ("--model a=tiny,b=no_such_module:make --features 8", "set PYTHONPATH"),
    ("--model a=tiny,b=blobnet --weights b=no.safetensors", "Check --weights"),
    ("--model a=tiny,b=blobnet --features 8", "b: model 'blobnet' reads the legal mask from the first 53 features"),
    (f"{TWO} --backend central --share b=2", "b: a share of 2"),
    ("--model nowhere/model", "gpuinfer: there is no model folder"),
    ("--model a=tiny,b=blobnet -B b.slots=4", "Write -B slots=4"),
    ("--model a=tiny,b=blobnet -B c.slots=4", "none is called"),
    # Fleets
    ("--model tiny --routing sticky", "--routing .* --replicas"),
    ("--model tiny -L account=x", "-L .* --replicas"),
    ("--model tiny --replicas 0", "1 or more"),
    ("--model tiny --replicas 2 --routing stiky", "stiky.* sticky"),
    ("--model tiny --launcher slrum", "slrum.* slurm"),
    ("--model tiny --replicas 2 -L x=1", "-L x.* no option|no option.* -L x"),
    ("--model tiny --replicas 3 --gpus 0,1", "--gpus .*names devices 0, 1: 3 replicas"),
    ("--model tiny --gpus 0,x", "--gpus 0,x.* 0,2,4,6"),
    ("--model tiny --gpus 0,1 --device cpu", "--gpus.* --device|--device.* --gpus"),
    ("--model tiny --min-replicas 3 --max-replicas 2", "3 to 2"),
    ("--model tiny --replicas 9 --max-replicas 2", "--replicas 9.* --max-replicas|--max-replicas.* --replicas 9"),
    ("--model tiny --replicas 2 --host 0.0.0.0", "--api-key-file"),
    ("--model tiny --replicas 2 --trace t", "--trace"),
    pytest.param("--model tiny --gpus 4 --log-dir logs", "--gpus 4.*no NVIDIA driver.* --replicas N",
                 marks=pytest.mark.skipif(machine.has_cuda(), reason="this machine has a GPU")),
]  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=a -out made.pem -keyout made.key"
    subprocess.run(words.split(), cwd=folder, check=True, capture_output=True, timeout=120)
    (folder / "made.key").chmod(0o600)
    (folder / "open.key").write_bytes((folder / "made.key").read_bytes())
    (folder / "open.key").chmod(0o644)
    (folder / "empty").touch(mode=0o600)
    os.mkfifo(folder / "fifo", 0o600)
    return folder


@pytest.mark.parametrize(("words", "why"), REFUSED)
def test_what_cannot_be_served_is_a_sentence_before_anything_is_loaded(gpuinfer, files, monkeypatch, words, why):
    monkeypatch.chdir(files)
    loaded: list[object] = []
    monkeypatch.setattr("gpuinfer.backends.inprocess.open_text", lambda *given: loaded.append(given))
    code, _, err = gpuinfer("serve", "--port", "0", *shlex.split(words))
    assert (code, loaded) == (2, [])
    assert len(err.strip().splitlines()) <= 3
    said = " ".join(err.split())
    assert why in said or re.search(why, said), said
    assert not (files / "logs").exists()


@pytest.mark.parametrize("words", ["chat", "load", "selfplay", "rollouts --env guess"])
def test_commands_that_run_one_model_say_where_several_are_served(gpuinfer, words):
    code, _, said = gpuinfer(*words.split(), "--model", "a=tiny,b=tiny")
    assert code == 2
    for cure in ("gpuinfer serve --model a=tiny,b=tiny", "--backend fleet -B endpoint=URL -B model=a"):
        assert cure in " ".join(said.split())


def test_a_list_of_models_is_told_from_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c=1").mkdir()
    both = {"chat": "tiny", "net": "blobnet"}
    for text, found in (
        ("tiny", None),
        ("chat=tiny,net=blobnet", both),
        ("chat = tiny , net = blobnet", both),
        ("a=runs/lr=0.1", {"a": "runs/lr=0.1"}),
        ("runs/lr=0.1", None),
        ("./lr=0.1", None),
        ("c=1", None),
        ("net=package.module:make", {"net": "package.module:make"}),
    ):
        assert models_in(text) == found


def test_each_model_has_its_own_sizes_share_and_weights():
    chat, net = chosen_models(ServeOptions(model="chat=tiny,net=blobnet", share="chat=2", weights="w.s", context=64))
    assert (chat.name, chat.share, chat.spec.kind, chat.spec.arguments) == ("chat", 2.0, "text", {"context": 64})
    assert (net.name, net.share, net.spec.kind, net.spec.weights) == ("net", 1.0, "rows", "w.s")
    for features, actions, inputs, moves in (
        ("a=8,b=16", 5, (8, 16), (5, 5)),
        (8, "a=5,b=7", (8, 8), (5, 7)),
        ("b=16", None, (256, 16), (53, 53)),
    ):
        given = {"features": features, "actions": actions, "input_dtype": "b=int8"}
        found = chosen_models(ServeOptions(model="a=blobnet,b=blobnet-small", **given))
        assert tuple(one.spec.inputs for one in found) == inputs
        assert tuple(one.spec.arguments["actions"] for one in found) == moves
        assert tuple(one.spec.input_dtype for one in found) == ("float32", "int8")


@pytest.mark.parametrize("place", ["tiny", "null", "blobnet", "json:loads"])
def test_what_is_there_is_not_refused(place, tmp_path):
    features = 256 if place not in ("tiny", "null") else None
    for one in chosen_models(ServeOptions(model=f"a={place},b={tmp_path}", features=features)):
        check_models_exist(one.spec)


@pytest.mark.parametrize(
    ("spec", "options", "why"),
    [
        ({}, {"context": 1 << 20}, "the model was made for"),
        ({}, {"parallel": "layers", "stages": 7}, "7 stages, and .* 6 layers"),
        ({"arguments": {"adapters": {"one": "no/such/adapter"}}}, {}, "no/such/adapter"),
    ],
)
async def test_what_is_asked_of_a_model_that_stands_beside_another_is_looked_at_before_any_is_loaded(
    spec, options, why
):
    first = InProcess(Setup(model=ModelSpec("null", kind="text"), devices=("cpu",)), **options)
    with pytest.raises(UsageError, match=why):
        await first.beside(ModelSpec("tiny", kind="text", **spec)).check()
    if not options:
        await first.beside(ModelSpec("tiny-llada", kind="text")).check()
        with pytest.raises(UsageError, match="--backend inprocess, or leave --share out"):
            Central(Setup(share=2.0))


def test_devices_are_those_that_this_process_may_see(monkeypatch):
    assert gpus_of("0, 2,4").here() == ("0", "2", "4")
    assert gpus_of("GPU-8f3a,MIG-1/2").here() == ("GPU-8f3a", "MIG-1/2")
    assert gpus_of("4,").here() == ("4",)
    for visible, found in (("3,5", ("3", "5")), ("", ())):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpus_here() == found
    monkeypatch.setattr(machine, "has_cuda", lambda: True)
    monkeypatch.setattr(plan.os, "listdir", lambda _: ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"])
    refuse_absent_gpus(("0", "1", "1"))
    refuse_absent_gpus(("GPU-8f3a",))
    with pytest.raises(UsageError, match=r"no device 2 on this machine\. Name some of those here: 0 to 1"):
        refuse_absent_gpus(("1", "2"))
