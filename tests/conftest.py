"""Every test starts with an empty Dynamo, a fixed seed, and no access to a model hub."""

import logging
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports triton, as Inductor does: its functions are made for one or the other
    os.environ.setdefault("TRITON_INTERPRET", "1")
logging.getLogger("torch.__trace").propagate = False  # else pytest keeps every record, and with it every graph and model
torch.set_num_threads(1)  # small tensors: more threads only get in each other's way


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
