"""What the code computes is what was recorded before it was rebuilt; how and from what is told in README.md."""

import pytest
import torch

from goldens import api, cases, material, record

RECORDED = record.read()


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Sums in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_case_is_recorded():
    assert sorted(RECORDED) == sorted(cases.CASES)


@pytest.mark.parametrize("case", cases.CASES)
def test_as_recorded(case):
    make, dtype = cases.CASES[case]
    names, mine = material.digests(make(api))
    expected_names, expected = RECORDED[case]
    assert names == expected_names, sorted({*names} ^ {*expected_names})
    different = material.differences(names, expected, mine, cases.TOLERANCES[dtype])
    assert not different, f"{len(different)} of {len(names)} differ:\n" + "\n".join(different[:40])


def test_a_change_is_noticed():
    """Digests of two tensors that differ in one number differ."""
    x = material.normal("x", 40)
    changed = x.clone()
    changed[7] += 1e-6
    names, expected = material.digests({"a x": x})
    _, mine = material.digests({"a x": changed})
    assert not material.differences(names, expected, expected, 1e-9)
    assert material.differences(names, expected, mine, 1e-9)


def test_the_papers_memory_has_its_parameters():
    names, numbers = RECORDED["parameters"]
    assert numbers[names.index("paper count"), 0] == 11_905_025
