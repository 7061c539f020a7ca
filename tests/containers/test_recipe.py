"""drumbeat site image: the build steps of the hosts' RDMA library."""

import pytest

from drumbeat.base.problem import Problem
from drumbeat.containers.image import recipe
from drumbeat.jobfile.site import load_site

LIBRARY = "libbnxt_re-235.1.160.0.tar.gz"


def build(site, base, library=None):
    profile = load_site(site, {})
    return recipe(site, [path.pattern for path in profile.paths.values()], profile.container.runtime, base, library)


def test_every_step_in_its_order():
    text = build("mi300x-thor2", "docker.io/rocm/pytorch-training:latest", LIBRARY)
    steps = ["FROM docker.io/rocm/pytorch-training:latest", "libibverbs-dev", f"COPY {LIBRARY}", "sh autogen.sh",
             "./configure", ".inbox", "make install all", "ldconfig", "/etc/libibverbs.d/", "sha256sum"]  # fmt: skip
    places = [text.index(step) for step in steps]
    assert places == sorted(places)
    assert ">>" not in text  # nothing is appended twice when it is built again


@pytest.mark.parametrize("site", ["mi300x-cx7", "mi325x", "mi355x"])
def test_nics_that_the_distribution_drives(site):
    text = build(site, "docker.io/rocm/pytorch-training:latest")
    assert text.startswith(f"# An image for site {site}") and "ibverbs-providers" in text and "libmlx5" in text


@pytest.mark.parametrize(
    ("site", "base", "library", "what"),
    [
        ("olivia", "image", LIBRARY, "no build steps are known for site olivia"),
        ("mi300x-cx7", "image", LIBRARY, "needs no library of its own"),
        ("mi300x-thor2", "image", None, "is not libbnxt_re-A.B.C.D.tar.gz"),
        ("mi300x-thor2", "image; rm -rf /", LIBRARY, "not the name of an image"),
        ("mi300x-thor2", "image", "../x.tar.gz; true", "is not libbnxt_re-A.B.C.D.tar.gz"),
    ],
)
def test_refused(site, base, library, what):
    with pytest.raises(Problem) as problem:
        build(site, base, library)
    assert what in str(problem.value)
