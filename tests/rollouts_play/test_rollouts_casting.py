import re

import pytest

from gpuinfer.errors import UsageError
from gpuinfer.workloads.rollouts.options import RoleOpponent, Roles


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "lora"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return folder


def test_roles_have_models_adapters_and_temperatures(adapter):
    cast = Roles.of(["enemy=tiny", "rival=adapter:old"], ["enemy=0.5"], [f"old={adapter}"])
    assert cast.opponents == {"enemy": RoleOpponent(model="tiny"), "rival": RoleOpponent(adapter="old")}
    assert cast.temperatures == {"enemy": 0.5}
    assert cast.policy is None


def test_the_adapter_called_policy_is_who_learns(adapter):
    assert Roles.of([], [], [f"policy={adapter}"]).policy == "policy"


def test_other_weights_of_an_adapter_decide_another_record(adapter):
    cast = Roles.of([], [], [f"policy={adapter}"])
    before = cast.deciding()
    assert cast.deciding() == before
    (adapter / "adapter_model.safetensors").write_bytes(b"1")
    assert cast.deciding() != before


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param((["enemy"], [], []), "--opponent enemy: not of the form role=MODEL", id="no model"),
        pytest.param((["a=x", "a=y"], [], []), "--opponent names 'a' twice", id="twice"),
        pytest.param((["a=adapter:b"], [], []), "no such adapter. Add --adapter b=DIR", id="no adapter"),
        pytest.param(([], ["a=hot"], []), "--role-temperature a=hot: no temperature", id="no number"),
        pytest.param(([], ["a=-1"], []), "Give a number from 0 to 1000", id="a temperature below zero"),
        pytest.param(([], [], ["a=/nowhere"]), "there is no adapter_config.json in it", id="no folder"),
    ],
)
def test_what_cannot_be_is_refused(given, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        Roles.of(*given)
