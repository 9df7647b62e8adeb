import importlib.util

import pytest
from ranks import OVER_NVX, Ranks


def pytest_collection_modifyitems(items):
    if OVER_NVX and importlib.util.find_spec("nvx") is None:
        raise pytest.UsageError(
            "nvx is not importable: build it, or set NVX_TEST_BACKEND=gloo to try the tests themselves"
        )


@pytest.fixture(scope="session")
def ranks():
    pool = Ranks()
    yield pool
    pool.close()
