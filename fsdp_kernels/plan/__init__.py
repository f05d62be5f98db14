# SPDX-License-Identifier: Apache-2.0
"""The planner: what a training needs, from the layout code that training uses.

`job.py` says what is trained and how, `memory.py` what a rank then holds, `command.py` is
`fsdp-kernels plan`.
"""
