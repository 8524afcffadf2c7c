"""The compile lane: every kernel in every production configuration, built for GPUs this machine lacks."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET", "0") != "0":
    raise pytest.UsageError("TRITON_INTERPRET is set, so nothing would be compiled: unset it, `make compile`")
