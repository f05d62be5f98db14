# SPDX-License-Identifier: Apache-2.0
"""Generate text with a language model."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, length: int, context: int, seed: int = 0) -> str:
    """Continue a prompt, byte by byte.

    A sharded model gathers its weights at each call, so every rank has to take part. With the same
    seed all of them draw the same bytes.

    Args:
        model: Maps tokens [1, time] to logits [1, time, 256].
        prompt: What to continue; at least one byte.
        length: How many bytes to add.
        context: How many bytes the model can look back.
        seed: Of the draws; torch's own generators are left as they are.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    model.eval()
    for _ in range(length):
        logits = model(torch.tensor([text[-context:]], device=device))[0, -1].float().cpu()
        odds = torch.softmax(logits / 0.8, dim=0)  # a little bolder than the model is
        text.append(int(torch.multinomial(odds, 1, generator=generator)))
    model.train()
    return bytes(text).decode("utf-8", errors="replace")
