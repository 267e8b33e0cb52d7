import os
from unittest import mock

import pytest
import torch
from pool import Pool

import data


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
def place_for_what_is_left(tmp_path_factory):
    """By processes that tests start: torchrun leaves a folder for logs. pytest removes its own."""
    with mock.patch.dict(os.environ, TMPDIR=str(tmp_path_factory.mktemp("left"))):
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """As the workers: sums are then in one order."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """A token folder of short documents with a vocabulary of 51."""
    folder = tmp_path_factory.mktemp("tokens")
    data.synth(folder, tokens=3000, vocab=51, docs=400, seed=1)
    data.synth(folder, tokens=300, vocab=51, docs=40, seed=2, split="val")
    return folder
