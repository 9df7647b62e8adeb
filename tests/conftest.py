"""The order of the files, for workers that run a file at a time: a long one that began last would run alone."""

import pytest

# By the processor's seconds of file and ranks, most first.
LONG = """
gpu_evidence kernels_build bench_runs commands device process delegate hook reduce bad_input readme build tune_command
stand_in move log device_uses sequences trace failures flight_dumps figures recovery fsdp topo demo drill
""".split()
PLACES = {f"test_{name}.py": place for place, name in enumerate(LONG)}


def pytest_configure(config):
    # xdist would begin with the files that have the most tests, and these are short.
    config.option.loadscopereorder = False


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: PLACES.get(item.path.name, len(LONG)))
