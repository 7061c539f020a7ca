"""Visible devices, by torch's own rules: checked against torch itself."""

import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumbeat.machine.model import Gpu
from drumbeat.plan.visibility import visible

GPUS = {vendor: [Gpu(index, vendor, uuid=f"GPU-{index}") for index in range(8)] for vendor in ("amd", "nvidia")}


def seen(vendor, **environment):
    found, findings = visible(GPUS[vendor], environment)
    return [gpu.index for gpu in found], [finding.code for finding in findings]


@pytest.mark.parametrize(
    "vendor,environment,expected",
    [
        ("amd", {}, (list(range(8)), [])),
        ("amd", {"ROCR_VISIBLE_DEVICES": "4,5"}, ([4, 5], [])),
        ("amd", {"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "1"}, ([5], [])),
        ("amd", {"ROCR_VISIBLE_DEVICES": "3", "HIP_VISIBLE_DEVICES": "3"}, ([], ["visibility-double-filter"])),
        ("amd", {"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0,1"}, ([], ["visibility-double-filter"])),
        ("amd", {"ROCR_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "3"}, ([], ["visibility-double-filter"])),
        ("amd", {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "2"}, ([1], ["visibility-two-names"])),
        ("amd", {"HIP_VISIBLE_DEVICES": "1,1"}, ([], ["visibility-repeated"])),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "2,-1,3"}, ([2], [])),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "6,7,8"}, ([6, 7], ["visibility-out-of-range"])),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "GPU-5,GPU-2"}, ([5, 2], [])),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": ""}, ([], [])),
        ("nvidia", {"HIP_VISIBLE_DEVICES": "0"}, (list(range(8)), [])),
    ],
)
def test_what_a_process_sees(vendor, environment, expected):
    assert seen(vendor, **environment) == expected


LISTS = st.lists(st.sampled_from(["0", "1", "2", "3", " 4", "5gpu", "-1", "x", "+2"]), min_size=1, max_size=4).map(
    ",".join
)


@settings(max_examples=100, deadline=None)
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), LISTS)))
def test_torch_itself_sees_the_same(environment):
    torch_cuda = pytest.importorskip("torch.cuda")
    for vendor in ("amd", "nvidia"):
        mine, _ = seen(vendor, **environment)
        theirs = _torch(torch_cuda, vendor, environment)
        assert mine == [index for index in theirs if index < 8], (vendor, environment)


def _torch(module, vendor, environment):
    """torch's own function, as its ROCm and CUDA builds would run it, over this environment."""
    names = {**module._parse_visible_devices.__globals__}
    names["torch"] = types.SimpleNamespace(version=types.SimpleNamespace(hip="6" if vendor == "amd" else None))
    names["os"] = types.SimpleNamespace(getenv=environment.get)
    return types.FunctionType(module._parse_visible_devices.__code__, names)()
