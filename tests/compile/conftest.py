"""The compile lane: every kernel in every production configuration, built for GPUs this machine lacks."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET", "0") != "0":
    raise pytest.UsageError("TRITON_INTERPRET is set, so nothing would be compiled: unset it, `make compile`")

MAIN = "sm_90"  # the target of the committed results


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` builds all configurations for one target, and one of every kernel for the others.

    A test function that takes a ``target`` counts as one kernel, unless ``@pytest.mark.kernel(of=...)`` tells
    kernels apart by its other parameters.
    """
    built = set()
    for item in items:
        parameters = dict(item.callspec.params) if hasattr(item, "callspec") else {}
        target = parameters.pop("target", MAIN)
        if target == MAIN:
            continue
        marker = item.get_closest_marker("kernel")
        kernel = (item.nodeid.split("[")[0], target, marker and marker.kwargs["of"](**parameters))
        if kernel in built:
            item.add_marker(pytest.mark.exhaustive)
        built.add(kernel)
