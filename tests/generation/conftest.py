"""What the tests of this folder share."""

import sys
from types import SimpleNamespace

import pytest


@pytest.fixture
def lora_requests(monkeypatch):
    """`vllm.lora.request`, where vLLM is not installed."""
    if "vllm" in sys.modules:
        return
    module = SimpleNamespace(LoRARequest=lambda name, number, path: SimpleNamespace(number=number, lora_path=path))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(lora=SimpleNamespace(request=module)))
    monkeypatch.setitem(sys.modules, "vllm.lora", SimpleNamespace(request=module))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", module)
