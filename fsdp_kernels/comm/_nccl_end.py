# SPDX-License-Identifier: Apache-2.0
"""How an `NcclComm` ends: closed, collected, or with the program."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from typing import Any

from fsdp_kernels.comm._groups import Hosts

logger = logging.getLogger("fsdp_kernels")

# How long a communicator that nobody closed waits for its peers: they may never come, and nobody
# reads what is under way.
_PATIENCE_S = 5.0

# The owners of what is open, and what ends it when they are collected.
_open: weakref.WeakKeyDictionary[Any, weakref.finalize[Any, Any]] = weakref.WeakKeyDictionary()


def log_messages(native: Any) -> None:
    """Log what the module did otherwise than asked for, each once."""
    for message in native.take_messages():
        logger.warning("%s", message)


def end_with(owner: object, native: Any, hosts: Hosts | None) -> None:
    """End a communicator and its hosts' channel with the object that owns them, at the latest."""
    finalizer = weakref.finalize(owner, _end, native, hosts, os.getpid())
    finalizer.atexit = False  # `_end_all` does that
    _open[owner] = finalizer


def close(owner: object) -> None:
    """End them now, after what is under way."""
    ended = _open.pop(owner).detach()
    if ended is not None:
        native, hosts, _ = ended[2]
        native.close()
        _let_go(native, hosts)


@atexit.register
def _end_all() -> None:
    """Close what is open when the program ends: no watchdog may outlive the interpreter."""
    for finalizer in list(_open.values()):
        ended = finalizer.detach()
        if ended is None:
            continue
        native, hosts, pid = ended[2]
        if os.getpid() == pid and getattr(sys, "last_value", None) is not None:
            # The program ends by an exception. What is under way waits for peers, which wait for
            # this rank: to wait for them here would hide its error.
            native.abort("the program ended by an exception")
        _end(native, hosts, pid)


def _end(native: Any, hosts: Hosts | None, pid: int) -> None:
    """Close a communicator that nobody has closed."""
    if os.getpid() == pid:  # a fork has neither the threads nor the connections
        native.close(_PATIENCE_S)
        _let_go(native, hosts)


def _let_go(native: Any, hosts: Hosts | None) -> None:
    """Do what is left after the module's own close."""
    log_messages(native)
    if hosts is not None:
        hosts.close()
