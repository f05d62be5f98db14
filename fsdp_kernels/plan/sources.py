# SPDX-License-Identifier: Apache-2.0
"""Where a model that is planned comes from: a function of the user's, or a configuration."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from.

    Attributes:
        make: Makes it, on whatever device is current.
        call: Runs a forward with a batch of sequences, given its two sizes; the result is kept as
            the caller of a training step keeps it.
    """

    make: Callable[[], nn.Module]
    call: Callable[[nn.Module, int, int], Any]


def from_module(make: str, inputs: str | None) -> Source:
    """Take a model from a function of the user's.

    Args:
        make: ``package.module:function``, called without arguments.
        inputs: A function of batch and sequence that returns what the model is called with, as a
            tuple or a dict; None: it is called with token numbers [batch, sequence].

    Raises:
        ValueError: There is no such function.
    """
    maker = _resolve("--module", make)
    sample = _resolve("--inputs", inputs) if inputs else _tokens

    def call(model: nn.Module, batch: int, sequence: int) -> Any:
        given = sample(batch, sequence)
        return model(**given) if isinstance(given, dict) else model(*given)

    return Source(maker, call)


def _tokens(batch: int, sequence: int) -> tuple[Tensor]:
    return (torch.zeros(batch, sequence, dtype=torch.long),)


def _resolve(option: str, name: str) -> Callable[..., Any]:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` has it, so that the user's own files are found
    try:
        found = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{option}: expected package.module:function, got {name!r}: {error}. Start in the "
            "directory that holds the package, or set PYTHONPATH."
        ) from error
    if ":" not in name or not callable(found):
        raise ValueError(
            f"{option}: expected a function, as in package.module:function, got {name!r}, a "
            f"{type(found).__name__}. Name the function after a colon."
        )
    made: Callable[..., Any] = found
    return made


def from_config(path: Path) -> Source:
    """Take a model of `transformers` from its configuration; no weights are read.

    Raises:
        ValueError: `transformers` is not installed, or the file is none of its configurations.
    """
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            "--hf-config: expected transformers to be installed, got none. Run "
            "pip install transformers, or give --params."
        ) from error
    if not path.is_file():
        raise ValueError(
            f"--hf-config: expected a file, got {str(path)!r}. Give the path of a "
            "model's config.json; nothing is downloaded."
        )
    try:
        config = transformers.AutoConfig.from_pretrained(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"--hf-config: expected a configuration of transformers, got {str(path)!r}: {error}. "
            "Give the model's config.json."
        ) from error
    causal = type(config) in transformers.AutoModelForCausalLM._model_mapping
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModel

    def call(model: nn.Module, batch: int, sequence: int) -> Any:
        (tokens,) = _tokens(batch, sequence)
        with _unpacked(transformers):
            if not causal:
                return model(input_ids=tokens)
            return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    make: Callable[[Any], nn.Module] = kind.from_config
    return Source(lambda: make(config), call)


@contextmanager
def _unpacked(transformers: Any) -> Iterator[None]:
    """Let `transformers` see that each row is one sequence, as it does on tensors with data.

    On fake ones it cannot look, and masks as if several sequences might be packed in a row; its
    attention then keeps a mask, and keys and values once for each query head.
    """
    masking = getattr(transformers, "masking_utils", None)
    name = "find_packed_sequence_indices"
    looks = getattr(masking, name, None)
    if looks is None:
        yield
        return
    setattr(masking, name, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(masking, name, looks)
