# SPDX-License-Identifier: Apache-2.0
"""The version, in a file of its own: the build reads it without importing the package."""

__version__ = "0.1.0"
