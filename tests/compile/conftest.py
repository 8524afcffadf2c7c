"""The compile lane: every kernel in every production configuration, built for GPUs this machine lacks."""

import os
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET", "0") != "0":
    raise pytest.UsageError("TRITON_INTERPRET is set, so nothing would be compiled: unset it, `make compile`")

MAIN = "sm_90"  # the target of the committed results


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` builds all configurations for one target. For the others it builds one configuration of
    every kernel: of a file's first kernel for each of them, of every further one for one of them in turn.

    A test function that takes a ``target`` counts as one kernel, unless ``@pytest.mark.kernel(of=...)`` tells
    kernels apart by its other parameters.
    """
    files: dict[Path, dict[object, dict[str, pytest.Item]]] = {}  # the items of a kernel by their target
    for item in items:
        parameters = dict(item.callspec.params) if hasattr(item, "callspec") else {}
        target = parameters.pop("target", MAIN)
        if target == MAIN or item.get_closest_marker("exhaustive"):
            continue
        marker = item.get_closest_marker("kernel")
        kernel = (item.nodeid.split("[")[0], marker and marker.kwargs["of"](**parameters))
        built = files.setdefault(item.path, {}).setdefault(kernel, {})
        if built.setdefault(target, item) is not item:
            item.add_marker(pytest.mark.exhaustive)
    for kernels in files.values():
        for number, built in enumerate(kernels.values()):
            for place, item in enumerate(built.values()):
                if number and place != number % len(built):
                    item.add_marker(pytest.mark.exhaustive)
