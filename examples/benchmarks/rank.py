"""A process of ``processes.apart``: calls a function of a script; rank 0 writes what it returns."""

import importlib
import json
import os
import sys
from pathlib import Path

script, module, function, arguments, answer = sys.argv[1:]
sys.argv[:] = [script]  # for all who look, it is this one that runs
found, rank = getattr(importlib.import_module(module), function), 0
if "MS_ROLE" in os.environ:
    from mindspore import communication

    communication.init()  # the scheduler, which runs this as well, never comes past it
    rank = communication.get_rank()
result = found(*json.loads(arguments))
if rank == 0:
    Path(answer).write_text(json.dumps(result), "utf-8")
