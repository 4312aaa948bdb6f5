"""Fixtures of tests that run in one process and on all ranks."""

import os

import pytest
import torch.distributed as dist


@pytest.fixture
def process_as_it_was(anywhere, monkeypatch):
    """Lightning makes a process group where there is none, and sets environment variables."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    yield
    if anywhere is None and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def path(request, anywhere, tmp_path):
    return tmp_path if anywhere is None else request.getfixturevalue("shared_path")
