# SPDX-License-Identifier: Apache-2.0
"""Parts of the language-model example that have nothing to do with sharding, and its baselines."""
