"""Runs a module as `python -m` does, in Triton's interpreter, and quicker: quick.py MODULE [ARGUMENTS]"""

from __future__ import annotations

import os
import runpy
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import interpreter

interpreter.quicken()
sys.path[0] = os.getcwd()  # this folder before
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
