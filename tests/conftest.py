import pytest
import torch
from pool import Pool


@pytest.fixture(scope="session")
def world():
    """world(n): the pool of n workers, started when first asked for, or again after a failure."""
    pools = {}

    def get(n):
        if n not in pools or not pools[n].processes:
            pools[n] = Pool(n)
        return pools[n]

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """As the workers: sums are then in one order."""
    torch.set_num_threads(1)
