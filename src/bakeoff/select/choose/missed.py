"""Missed keys: what real use asked the table for and did not find, for `bakeoff tune --missed` to settle.

A miss is written down when the call is decided, which later calls of its kind are not: a line in a file
beside the table, once for each key and process.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from bakeoff.device import named_device
from bakeoff.errors import BakeoffError, DeviceError
from bakeoff.paths import contents, write_whole
from bakeoff.select.choose import policy
from bakeoff.select.choose.table import cache_dir
from bakeoff.select.contests.wire import decode_dtype, encode_dtype
from bakeoff.select.declare.case import Case
from bakeoff.select.declare.key import key
from bakeoff.select.declare.op import Op
from bakeoff.select.declare.registry import find_op

__all__ = ["Miss", "keep", "misses", "settled"]

log = logging.getLogger("bakeoff")
_LARGEST = 1 << 20  # bytes of the file; what is missed then is not written down any more
_kept: set[tuple[str, str]] = set()


class Miss(msgspec.Struct, frozen=True):
    """A selection that found no verdict."""

    op: str
    case: Case
    regime: str


def keep(op: Op, case: Case, regime: str, name: str) -> None:
    """Write down that key `name` was missed; a folder that can't be written to is no error."""
    if (name, case.device) in _kept:
        return
    _kept.add((name, case.device))
    with contextlib.suppress(OSError, ValueError, NotImplementedError, msgspec.MsgspecError):
        line = msgspec.json.encode(Miss(op.name, op.bucket(case), regime), enc_hook=encode_dtype) + b"\n"
        path = _path()
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o600)
        try:
            if os.fstat(descriptor).st_size < _LARGEST:
                os.write(descriptor, line)  # whole: it is short
        finally:
            os.close(descriptor)


def misses() -> dict[tuple[str, str], tuple[Op, Case, str]]:
    """By key and device what was missed on devices that are here, and is still not in a table: (op, case,
    regime)."""
    found = {}
    for miss in _lines():
        if not _here(miss):
            continue
        try:
            op = find_op(miss.op)
            op.check(miss.case)
            name = key(op, miss.case, miss.regime)
            if policy.store.lookup(op, name, miss.case.device) is None:
                found[name, miss.case.device] = (op, miss.case, miss.regime)
        except (BakeoffError, TypeError, ValueError, KeyError, RuntimeError, AttributeError) as error:
            log.debug("a missed call of %s is left out: %s", miss.op, error)  # of an op that changed, say
    return found


def settled() -> None:
    """Forget what is in a table by now; what other machines missed stays for them."""
    left = [Miss(op.name, case, regime) for op, case, regime in misses().values()]
    left += [miss for miss in _lines() if not _here(miss)]
    with contextlib.suppress(OSError):
        write_whole(_path(), b"".join(msgspec.json.encode(m, enc_hook=encode_dtype) + b"\n" for m in left))


def _here(miss: Miss) -> bool:
    """Whether the call's device is one of this machine's; tables may lie in a folder that several share."""
    try:
        named_device(miss.case.device)
    except DeviceError:
        return False
    return True


def _lines() -> Iterator[Miss]:
    try:
        text = contents(_path(), 2 * _LARGEST)
    except OSError:
        return
    for line in text.splitlines():
        with contextlib.suppress(msgspec.MsgspecError, AttributeError, RecursionError):
            yield msgspec.json.decode(line, type=Miss, dec_hook=decode_dtype)


def _path() -> Path:
    return cache_dir() / "missed.jsonl"
