"""One rule for the device, wherever it is asked for."""

from __future__ import annotations

import pytest
import torch

from minillm import assemble
from minillm.measure.bench import machine, peers
from minillm.model.device import resolve_device


def test_engine_and_measurements_ask_the_same_rule():
    assert assemble.resolve_device is machine.resolve_device is peers.resolve_device is resolve_device


def test_auto_is_cpu_where_there_is_no_cuda_whatever_else_there_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve_device() == "cpu"


@pytest.mark.parametrize("device", ["foo", "", "cuda:99", "meta"])
def test_a_device_that_cannot_be_used_is_a_value_error(device):
    with pytest.raises(ValueError, match="cannot be used here"):
        resolve_device(device)
