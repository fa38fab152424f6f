"""Devices and ports of one machine."""

import socket

import pytest

from megarl.errors import ConfigError
from megarl.launch.placement import Machine, free_ports, parse_gpu_list, place, this_machine

TWO_GPUS = """\
GPU 0: NVIDIA H200 (UUID: GPU-aaaa)
GPU 1: NVIDIA H200 (UUID: GPU-bbbb)
"""
SLICED = """\
GPU 0: NVIDIA H200 (UUID: GPU-aaaa)
  MIG 3g.71gb     Device  0: (UUID: MIG-1111)
  MIG 3g.71gb     Device  1: (UUID: MIG-2222)
GPU 1: NVIDIA H200 (UUID: GPU-bbbb)
"""


@pytest.mark.parametrize(
    ("text", "devices"),
    [("", []), (TWO_GPUS, ["0", "1"]), (SLICED, ["MIG-1111", "MIG-2222", "1"])],
)
def test_the_list_of_nvidia_smi(text, devices):
    assert parse_gpu_list(text) == devices


@pytest.mark.parametrize(
    ("visible", "gpus"), [("", ()), ("2,5", ("2", "5")), ("GPU-a, MIG-b", ("GPU-a", "MIG-b"))]
)
def test_the_environment_decides_what_is_visible(visible, gpus):
    machine = this_machine({"CUDA_VISIBLE_DEVICES": visible})
    assert machine.gpus == gpus
    assert machine.device == ("cuda" if gpus else "cpu")


def test_servers_and_trainer_share_no_gpu():
    machine = Machine(gpus=tuple("01234567"), num_cores=1)
    places = place(machine, num_servers=2, server_size=2, num_ranks=3)
    assert places.servers == ["0,1", "2,3"]
    assert places.trainer == "4,5,6"


def test_an_evaluation_client_sees_no_gpu():
    places = place(Machine(gpus=("0",), num_cores=1), num_servers=1, server_size=1, num_ranks=0)
    assert (places.servers, places.trainer) == (["0"], "")


def test_no_gpus_no_devices():
    places = place(Machine(gpus=(), num_cores=1), num_servers=2, server_size=2, num_ranks=3)
    assert (places.servers, places.trainer) == ([None, None], None)


def test_too_few_gpus():
    machine = Machine(gpus=("0", "1"), num_cores=1)
    with pytest.raises(ConfigError, match=r"^cluster\.n_gpus_per_node: .*need 3 GPUs, .*shows 2$"):
        place(machine, num_servers=1, server_size=2, num_ranks=1)


def test_ports_are_free_and_differ():
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
