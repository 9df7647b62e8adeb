import importlib.util
import os

import fake_device
import fake_nccl
import pytest
import simulated
import torch
from ranks import OVER_NVX, SEVERAL_HOSTS, Ranks

# Pools whose hosts `NVX_TEST_HOSTS` or `NVX_TEST_NETNS` selects. A test that uses none of these pools is the same test
# for every placement of the suite's ranks.
SPREAD_POOLS = {"ranks", "fake_gpus", "simulated_gpus", "fake_nccl_gpus", "simulated_nccl_gpus"}
SIMULATED_POOLS = {"simulated_gpus", "simulated_gpus_without_kernels", "proxied_gpus", "domain_gpus", "direct_gpus"}
SIMULATED_POOLS |= {"simulated_nccl_gpus"}


def pytest_collection_modifyitems(config, items):
    for item in items:
        if SIMULATED_POOLS.intersection(item.fixturenames):
            item.add_marker("simulated")
    if OVER_NVX and importlib.util.find_spec("nvx") is None:
        raise pytest.UsageError(
            "nvx is not importable: build it, or set NVX_TEST_BACKEND=gloo to try the tests themselves"
        )
    if SEVERAL_HOSTS:
        spread = [item for item in items if SPREAD_POOLS.intersection(item.fixturenames)]
        config.hook.pytest_deselected(items=[item for item in items if item not in spread])
        items[:] = spread
    half = os.environ.get("NVX_TEST_HALF")  # 0 or 1: every second test
    if half and not config.getoption("lf"):  # tests that failed run once more, whatever their places are
        config.hook.pytest_deselected(items=items[1 - int(half) :: 2])
        items[:] = items[int(half) :: 2]


@pytest.fixture(scope="session")
def ranks():
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks_of_two_hosts():
    if not OVER_NVX:
        pytest.skip("only nvx knows that they are")
    pool = Ranks(hosts=2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def fake_gpus():
    if not OVER_NVX:
        pytest.skip("the fake accelerator's tensors are nvx's to serve")
    fake_device.build()
    pool = Ranks(prepare="fake_device")
    yield pool
    pool.close()


def simulated_pool(*others, **settings):
    """A pool on the simulated device. `others`: build functions of what it needs besides."""
    if simulated.module() is None:
        pytest.skip("nvx was not built with NVX_SIMULATED")
    for build in (fake_device.build, *others):
        build()
    pool = Ranks(**settings)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def simulated_gpus():
    yield from simulated_pool(prepare="simulated")


@pytest.fixture(scope="session")
def simulated_gpus_without_kernels():
    yield from simulated_pool(prepare="simulated.without_kernels")


@pytest.fixture(scope="session")
def proxied_gpus():
    yield from simulated_pool(prepare="simulated", hosts=2)


@pytest.fixture(scope="session")
def domain_gpus():
    from simulated import domain

    yield from simulated_pool(domain.build, prepare="simulated.domain", hosts=2)


@pytest.fixture(scope="session")
def direct_gpus():
    from simulated import gpudirect

    if not gpudirect.build():
        pytest.skip("there is no UCX with headers here")
    yield from simulated_pool(prepare="simulated.gpudirect", hosts=2)


@pytest.fixture(scope="session")
def fake_nccl_gpus():
    if not OVER_NVX:
        pytest.skip("it is nvx that hands collectives over")
    fake_device.build()
    fake_nccl.build()
    pool = Ranks(prepare="fake_nccl")
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def simulated_nccl_gpus():
    yield from simulated_pool(fake_nccl.build, prepare="fake_nccl.over_kernels")


def why_no_gpu():
    """The reason why torch cannot use a GPU; an empty string if it can."""
    if torch.version.cuda is None:
        return "this torch has no CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0]
    return ""


def gpu_pool(prepare, hosts=1):
    if not OVER_NVX:
        pytest.skip("CUDA tensors are nvx's to serve here")
    if why := why_no_gpu():
        pytest.skip(f"there is no GPU here: {why}")
    pool = Ranks(prepare=prepare, hosts=hosts)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def gpus():
    yield from gpu_pool("gpu.ready")


@pytest.fixture(scope="session")
def gpus_expandable():
    yield from gpu_pool("gpu.expandable")


@pytest.fixture(scope="session")
def gpus_visible():
    yield from gpu_pool("gpu.visible")


@pytest.fixture(scope="session")
def gpus_of_two_hosts():
    yield from gpu_pool("gpu.ready", hosts=2)
