# SPDX-License-Identifier: Apache-2.0
"""Fully sharded data-parallel training for PyTorch."""
