"""Which machines are one of several, by what is there to be asked."""

import pytest
from jax._src.clusters import cloud_tpu_cluster

from attnorm.training import mesh
from attnorm.training.mesh import ClusterError, detect_cluster, initialize_distributed


@pytest.fixture
def tpu_vm(monkeypatch):
    """A TPU VM of Compute Engine, as JAX sees it."""
    for variable in ("TPU_SKIP_MDS_QUERY", "JAX_PLATFORMS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", lambda key: ("0", 200))


def test_a_worker_of_a_pod_is_found_without_any_variable(tpu_vm, monkeypatch):
    assert "metadata" in detect_cluster()
    assert detect_cluster({}) is None  # which is another machine's
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    assert detect_cluster() is None


@pytest.mark.parametrize("platforms, is_alone", [("cpu", True), ("cuda,cpu", True), ("tpu,cpu", False)])
def test_a_worker_of_a_pod_that_may_not_use_its_tpu_is_alone(tpu_vm, monkeypatch, platforms, is_alone):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    assert (detect_cluster() is None) == is_alone
    names = {"JAX_PLATFORMS": platforms, "TPU_WORKER_HOSTNAMES": "a,b", "MEGASCALE_NUM_SLICES": "2"}
    assert detect_cluster(names) == (None if is_alone else "TPU_WORKER_HOSTNAMES")
    coordinated = names | {"JAX_COORDINATOR_ADDRESS": "a:1234"}
    assert detect_cluster(coordinated) == "JAX_COORDINATOR_ADDRESS"


def test_other_machines_are_not_asked(monkeypatch):
    def get_metadata(key):
        raise AssertionError(f"{key} was asked for")

    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", get_metadata)
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", False)
    assert detect_cluster() is None


def test_a_tpu_vm_without_a_metadata_server_is_alone(tpu_vm, monkeypatch):
    def get_metadata(key):
        raise OSError("no such host")

    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", get_metadata)
    assert detect_cluster() is None


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"TPU_PROCESS_ADDRESSES": "a:8471,b:8471"}, "TPU_PROCESS_ADDRESSES"),
        ({"TPU_PROCESS_ADDRESSES_PATH": "/etc/addresses"}, "TPU_PROCESS_ADDRESSES_PATH"),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE"),
    ],
)
def test_variables(environment, found):
    assert detect_cluster(environment) == found


def test_what_cannot_be_joined_is_named_with_the_way_around_it(tpu_vm, monkeypatch):
    def initialize(**_):
        raise RuntimeError("no one is there")

    monkeypatch.setattr(mesh.jax.distributed, "initialize", initialize)
    for variable in ("JAX_COORDINATOR_ADDRESS", "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ClusterError, match="metadata.*no one is there.*set TPU_SKIP_MDS_QUERY=1"):
        initialize_distributed()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(ClusterError, match="OMPI_COMM_WORLD_SIZE='2' .*unset OMPI_COMM_WORLD_SIZE"):
        initialize_distributed()
